//! The trained values of a learner as one flat list, to read and to replace: the weights, or the factors of an adapter.

use std::sync::Arc;

use super::Learner;
use crate::TrainerError;

impl Learner {
    /// The trained values, `[trained values]` in the order of [`Self::trained`].
    ///
    /// # Errors
    /// If a rank has failed.
    pub fn trained_values(&self) -> Result<Vec<f32>, TrainerError> {
        if let Some(adapter) = self.adapter() {
            return Ok(adapter.values().to_vec());
        }
        let mut values = vec![0.0; self.first.layout().len()];
        self.write(&mut values)?;
        Ok(values)
    }

    /// Replaces the trained values, `[trained values]`, on all ranks of this process. An adapter is merged. The optimizer state
    /// stays.
    ///
    /// # Errors
    /// If other processes have ranks, or weights are updated on a device.
    ///
    /// # Panics
    /// If `values` has another length.
    pub fn set_trained_values(&mut self, values: &[f32]) -> Result<(), TrainerError> {
        if self.is_spread() {
            let reason = "the ranks are processes, which do not receive new weights";
            return Err(TrainerError::State { reason });
        }
        let pool = Arc::clone(&self.pool);
        self.ranks_mut().try_for_each(|rank| rank.set_trained(values, &pool))
    }
}
