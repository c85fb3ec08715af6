//! Weights of frozen models (reference, reward): kept in memory, or read for every use.
//!
//! Invariant: results do not depend on which of the two applies. Models share a memory budget; one that does not fit is read
//! from its files for every use and freed after it.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::manifest;
use crate::{Config, Layout, ModelError, Parameters};

/// Placement of a model other than the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// On the policy's device, in turns with it: on the processor, the thread pool of the policy's role.
    Colocated,
    /// On a worker of its own, at the same time as the policy.
    #[default]
    Separated,
}

/// Memory that all frozen models may keep together, bytes.
#[derive(Debug)]
pub struct MemoryBudget {
    left: AtomicU64,
}

/// The weights of one model.
#[derive(Clone, Debug)]
pub struct ResidentParameters {
    directory: std::path::PathBuf,
    config: Config,
    /// `None` if they are read for every use.
    kept: Option<Arc<Parameters>>,
    /// Number of reads.
    loads: Arc<Mutex<u64>>,
}

impl MemoryBudget {
    /// A budget in bytes; `None` is unlimited.
    #[must_use]
    pub fn new(bytes: Option<u64>) -> Self {
        Self { left: AtomicU64::new(bytes.unwrap_or(u64::MAX)) }
    }

    /// Reserves `bytes` of the budget; false if fewer are left.
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
    /// The weights of `config` in `directory`: read once, and kept if they fit `budget`.
    ///
    /// # Errors
    /// Those of [`Parameters::load`] and [`manifest::check`], also for weights that are not kept: a broken file shows at once.
    pub fn open(directory: &Path, config: &Config, budget: &MemoryBudget) -> Result<Self, ModelError> {
        manifest::check(directory)?;
        let loaded = Parameters::load(directory, config)?;
        let bytes = (Layout::new(config).len() as u64).saturating_mul(size_of::<f32>() as u64);
        let kept = budget.claim(bytes).then(|| Arc::new(loaded));
        let (directory, config) = (directory.to_owned(), config.clone());
        Ok(Self { directory, config, kept, loads: Arc::new(Mutex::new(1)) })
    }

    /// Weights that are in memory already and are kept.
    #[must_use]
    pub fn of(config: Config, parameters: Arc<Parameters>) -> Self {
        Self { directory: std::path::PathBuf::new(), config, kept: Some(parameters), loads: Arc::default() }
    }

    /// The shape of the model.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether they are in memory only between [`ResidentParameters::get`] and the drop of its result.
    #[must_use]
    pub fn is_swapped(&self) -> bool {
        self.kept.is_none()
    }

    /// Number of reads from their files.
    #[must_use]
    pub fn loads(&self) -> u64 {
        *self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The weights. Those that are not kept are read now, and freed when the caller drops them.
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
    fn a_model_beyond_the_budget_is_read_for_every_use_with_the_same_values() {
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
        let weights = swapped.get().unwrap();
        assert_eq!(Arc::strong_count(&weights), 1, "no other owner keeps the weights");
        assert_eq!((beside.loads(), swapped.loads()), (1, 3));
    }
}
