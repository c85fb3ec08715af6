//! Weights of models that are not trained: in memory all the time, or only while they compute.
//!
//! Invariant: what a model computes does not depend on where its weights are between two uses. Models share a budget;
//! those that do not fit are read from their files for every use, and let go after it.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::manifest;
use crate::{Config, Layout, ModelError, Parameters};

/// Where a model computes that is not the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// On the policy's device: here the cores of the policy's role, one after the other.
    Colocated,
    /// On a worker of its own, beside the policy.
    #[default]
    Separated,
}

/// Bytes that models beside the policy may keep in memory together.
#[derive(Debug)]
pub struct MemoryBudget {
    left: AtomicU64,
}

/// The weights of one model.
#[derive(Clone, Debug)]
pub struct ResidentParameters {
    directory: std::path::PathBuf,
    config: Config,
    /// `None` of a model that is swapped in.
    kept: Option<Arc<Parameters>>,
    /// Times that they were read.
    loads: Arc<Mutex<u64>>,
}

impl MemoryBudget {
    /// A budget in bytes; without one everything fits.
    #[must_use]
    pub fn new(bytes: Option<u64>) -> Self {
        Self { left: AtomicU64::new(bytes.unwrap_or(u64::MAX)) }
    }

    /// Takes `bytes` out of the budget, if they are there.
    pub fn claim(&self, bytes: u64) -> bool {
        let take = |left: u64| left.checked_sub(bytes);
        self.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok()
    }
}

impl Default for MemoryBudget {
    fn default() -> Self {
        Self::new(None)
    }
}

impl ResidentParameters {
    /// The weights in `directory`, which has the shape `config`: read once and kept if `budget` has room for them.
    ///
    /// # Errors
    /// Those of [`Parameters::load`] and [`manifest::check`]; also of a model that does not stay, so that a broken file shows at once.
    pub fn open(directory: &Path, config: &Config, budget: &MemoryBudget) -> Result<Self, ModelError> {
        manifest::check(directory)?;
        let loaded = Parameters::load(directory, config)?;
        let bytes = (Layout::new(config).len() as u64).saturating_mul(size_of::<f32>() as u64);
        let kept = budget.claim(bytes).then(|| Arc::new(loaded));
        let (directory, config) = (directory.to_owned(), config.clone());
        Ok(Self { directory, config, kept, loads: Arc::new(Mutex::new(1)) })
    }

    /// Weights that are in memory already, and stay.
    #[must_use]
    pub fn of(config: Config, parameters: Arc<Parameters>) -> Self {
        Self { directory: std::path::PathBuf::new(), config, kept: Some(parameters), loads: Arc::default() }
    }

    /// The shape of the model.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether they are in memory only while somebody holds what [`ResidentParameters::get`] returned.
    #[must_use]
    pub fn is_swapped(&self) -> bool {
        self.kept.is_none()
    }

    /// How often they have been read from their files.
    #[must_use]
    pub fn loads(&self) -> u64 {
        *self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The weights; of a swapped model they are read now, and gone when the caller drops them.
    ///
    /// # Errors
    /// Those of [`Parameters::load`].
    pub fn get(&self) -> Result<Arc<Parameters>, ModelError> {
        if let Some(kept) = &self.kept {
            return Ok(Arc::clone(kept));
        }
        *self.loads.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Ok(Arc::new(Parameters::load(&self.directory, &self.config)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelDirectory, Sizes};

    #[test]
    fn what_does_not_fit_is_read_for_every_use_and_is_the_same() {
        let config = Config::fresh(&Sizes {
            vocab_size: crate::CHARACTERS,
            hidden_size: 8,
            intermediate_size: 8,
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: 1,
            max_position_embeddings: 16,
        });
        let scratch = tempfile::tempdir().unwrap();
        let directory = ModelDirectory::fresh(&scratch.path().join("m"), &config, 7).unwrap();
        let bytes = Layout::new(&config).len() as u64 * 4;
        let budget = MemoryBudget::new(Some(bytes + bytes / 2));
        let open = || ResidentParameters::open(directory.path(), &config, &budget).unwrap();
        let (beside, swapped) = (open(), open());
        assert!(!beside.is_swapped() && swapped.is_swapped());
        assert_eq!(beside.get().unwrap().values(), swapped.get().unwrap().values());
        let held = swapped.get().unwrap();
        assert_eq!(Arc::strong_count(&held), 1, "nobody else keeps them");
        assert_eq!((beside.loads(), swapped.loads()), (1, 3));
    }
}
