//! The memory of a learner: what it has, and what leaves a device or the memory while a sampler has its turn.

use super::Learner;
use crate::TrainerError;
use crate::optimizer::StateStream;
use crate::rank::Rank;

impl Learner {
    /// Memory of weights, gradients and optimizer in this process, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.ranks().map(Rank::bytes).sum()
    }

    /// Frees the gradients, which begin at zero in every step. Returns their bytes.
    pub(crate) fn drop_gradients(&mut self) -> u64 {
        self.ranks_mut().map(Rank::drop_gradients).sum()
    }

    /// Memory of the optimizer and of the weights on devices, bytes.
    #[must_use]
    pub fn device_bytes(&self) -> [u64; 2] {
        let add = |[a, b]: [u64; 2], [c, d]: [u64; 2]| [a + c, b + d];
        self.ranks().map(Rank::device_bytes).fold([0; 2], add)
    }

    /// Memory of the optimizer and of the weights, bytes.
    pub(crate) fn bytes_to_keep(&mut self) -> [u64; 2] {
        let add = |[a, b]: [u64; 2], [c, d]: [u64; 2]| [a + c, b + d];
        self.ranks_mut().map(Rank::bytes_to_keep).fold([0; 2], add)
    }

    /// Frees the device memory of the optimizer, of the weights, or of both, and of frozen networks. Returns the bytes.
    pub(crate) fn leave_device(&mut self, optimizer: bool, weights: bool) -> Result<u64, TrainerError> {
        self.ranks_mut().map(|rank| rank.leave_device(optimizer, weights)).sum()
    }

    /// Copies the state that belongs on the devices back to them.
    pub(crate) fn enter_device(&mut self) -> Result<(), TrainerError> {
        self.ranks_mut().try_for_each(Rank::enter_device)
    }

    /// The optimizer state.
    pub(crate) fn optimizer_streams(&mut self) -> Vec<StateStream<'_>> {
        self.ranks_mut().flat_map(|rank| rank.streams(true, false)).collect()
    }

    /// The weights, and the base weights of an adapter.
    pub(crate) fn weight_streams(&mut self) -> Vec<StateStream<'_>> {
        self.ranks_mut().flat_map(|rank| rank.streams(false, true)).collect()
    }

    /// The optimizer state and the weights.
    pub(crate) fn all_streams(&mut self) -> Vec<StateStream<'_>> {
        self.ranks_mut().flat_map(|rank| rank.streams(true, true)).collect()
    }
}
