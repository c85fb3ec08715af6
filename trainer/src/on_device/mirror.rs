//! The host's copy of weights that are trained on a device: of all of them, or of those that a rank owns.
//!
//! Invariant: it is copied on demand and at most once per version, into the memory of the copy before.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use model::Parameters;

use crate::TrainerError;

/// MirroredValues that a copy can be made in.
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

/// A copy that may be out of date, and is then copied again.
#[derive(Debug)]
pub(crate) struct Mirror<V> {
    current: OnceLock<Arc<V>>,
    /// Those of an earlier version, to be overwritten.
    spare: Mutex<Option<V>>,
}

impl<V: MirroredValues> Mirror<V> {
    /// One that is up to date.
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
        // Another thread may have made it meanwhile.
        if let Some(current) = self.current.get() {
            return Ok(current);
        }
        let mut values = spare.take().unwrap_or_else(new);
        read(values.all_mut())?;
        Ok(self.current.get_or_init(|| Arc::new(values)))
    }

    /// Says that the weights are others now.
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
    fn it_is_read_once_per_version() {
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
        let never = |_: &mut [f32]| unreachable!("it is up to date");
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
