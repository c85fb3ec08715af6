//! The host's copy of weights that are trained on a device.
//!
//! Invariant: it is made when somebody asks for it and once per version, into the memory that the one before had.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use model::{Layout, Parameters};

use crate::TrainerError;

/// A copy that may be out of date, and then is made anew.
#[derive(Debug)]
pub(crate) struct Mirror {
    current: OnceLock<Arc<Parameters>>,
    /// Those of an earlier version, to be overwritten.
    spare: Mutex<Option<Parameters>>,
}

impl Mirror {
    /// One that is up to date.
    pub(crate) fn of(parameters: Arc<Parameters>) -> Self {
        Self { current: OnceLock::from(parameters), spare: Mutex::default() }
    }

    /// The copy; `read` writes the weights where they go, if it is out of date.
    ///
    /// # Errors
    /// That of `read`.
    pub(crate) fn get(
        &self,
        layout: &Arc<Layout>,
        read: impl FnOnce(&mut [f32]) -> Result<(), TrainerError>,
    ) -> Result<&Arc<Parameters>, TrainerError> {
        if let Some(current) = self.current.get() {
            return Ok(current);
        }
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have made it meanwhile.
        if let Some(current) = self.current.get() {
            return Ok(current);
        }
        let mut parameters = spare.take().unwrap_or_else(|| Parameters::zeros(Arc::clone(layout)));
        read(parameters.values_mut())?;
        Ok(self.current.get_or_init(|| Arc::new(parameters)))
    }

    /// Says that the weights are others now.
    pub(crate) fn outdate(&mut self) {
        if let Some(parameters) = self.current.take().and_then(Arc::into_inner) {
            *self.spare.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(parameters);
        }
    }

    /// Memory, bytes.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |parameters: &Parameters| size_of_val(parameters.values());
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        self.current.get().map_or(0, |parameters| bytes(parameters)) + spare.as_ref().map_or(0, bytes)
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
        let never = |_: &mut [f32]| unreachable!("it is up to date");
        assert_eq!(mirror.get(&layout, never).unwrap().values(), first.values());
        drop(first);
        for version in 1..3 {
            mirror.outdate();
            let failed = mirror.get(&layout, |_| Err(TrainerError::RanksEnded));
            assert!(matches!(failed, Err(TrainerError::RanksEnded)));
            let read = |values: &mut [f32]| {
                values.fill(version as f32);
                Ok(())
            };
            assert!(mirror.get(&layout, read).unwrap().values().iter().all(|v| *v == version as f32));
            assert!(mirror.get(&layout, never).unwrap().values().iter().all(|v| *v == version as f32));
            assert_eq!(mirror.bytes(), 4 * layout.len());
        }
    }
}
