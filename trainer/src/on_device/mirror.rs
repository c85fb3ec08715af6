//! The host's copy of weights that are trained on a device: of all weights, or of the shards of a rank.
//!
//! Invariant: the copy is made on demand and at most once per version, in the memory of the previous copy.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use model::Parameters;

use crate::TrainerError;

/// Values in memory that a copy can be written to.
pub(crate) trait MirroredValues {
    fn all(&self) -> &[f32];
    fn all_mut(&mut self) -> &mut [f32];
}

impl MirroredValues for Parameters {
    fn all(&self) -> &[f32] {
        self.values()
    }

    fn all_mut(&mut self) -> &mut [f32] {
        self.values_mut()
    }
}

impl MirroredValues for Vec<f32> {
    fn all(&self) -> &[f32] {
        self
    }

    fn all_mut(&mut self) -> &mut [f32] {
        self
    }
}

/// A host copy of the weights, which is read again after they have changed.
#[derive(Debug)]
pub(crate) struct Mirror<V> {
    current: OnceLock<Arc<V>>,
    /// The copy of an earlier version, whose memory is reused.
    spare: Mutex<Option<V>>,
}

impl<V: MirroredValues> Mirror<V> {
    /// A mirror whose copy is up to date.
    pub(crate) fn of(values: Arc<V>) -> Self {
        Self { current: OnceLock::from(values), spare: Mutex::default() }
    }

    /// The copy. If it is out of date, `read` writes the weights to memory that `new` allocates if there is none.
    ///
    /// # Errors
    /// That of `read`.
    pub(crate) fn get(
        &self,
        new: impl FnOnce() -> V,
        read: impl FnOnce(&mut [f32]) -> Result<(), TrainerError>,
    ) -> Result<&Arc<V>, TrainerError> {
        if let Some(current) = self.current.get() {
            return Ok(current);
        }
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have read the copy meanwhile.
        if let Some(current) = self.current.get() {
            return Ok(current);
        }
        let mut values = spare.take().unwrap_or_else(new);
        read(values.all_mut())?;
        Ok(self.current.get_or_init(|| Arc::new(values)))
    }

    /// Marks the copy as out of date.
    pub(crate) fn outdate(&mut self) {
        if let Some(values) = self.current.take().and_then(Arc::into_inner) {
            *self.spare.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(values);
        }
    }

    /// Memory, bytes.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |values: &V| size_of_val(values.all());
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        self.current.get().map_or(0, |values| bytes(values)) + spare.as_ref().map_or(0, bytes)
    }
}

#[cfg(test)]
mod tests {
    use model::{Config, Sizes};

    use super::*;

    #[test]
    fn a_mirror_is_read_once_per_version() {
        let config = Config::fresh(&Sizes {
            vocab_size: 4,
            hidden_size: 4,
            intermediate_size: 4,
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: 1,
            max_position_embeddings: 8,
        });
        let first = Arc::new(Parameters::random(&config, 1));
        let layout = Arc::clone(first.layout());
        let mut mirror = Mirror::of(Arc::clone(&first));
        let zeros = || Parameters::zeros(Arc::clone(&layout));
        let never = |_: &mut [f32]| Err(TrainerError::RanksEnded);
        assert_eq!(mirror.get(zeros, never).unwrap().values(), first.values());
        drop(first);
        for version in 1..3 {
            mirror.outdate();
            let failed = mirror.get(zeros, |_| Err(TrainerError::RanksEnded));
            assert!(matches!(failed, Err(TrainerError::RanksEnded)));
            let read = |values: &mut [f32]| {
                values.fill(version as f32);
                Ok(())
            };
            assert!(mirror.get(zeros, read).unwrap().values().iter().all(|v| *v == version as f32));
            assert!(mirror.get(zeros, never).unwrap().values().iter().all(|v| *v == version as f32));
            assert_eq!(mirror.bytes(), 4 * layout.len());
        }
    }
}
