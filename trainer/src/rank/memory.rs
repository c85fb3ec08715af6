//! What a rank has in memory, and what of it can leave while somebody else has the device.

use std::sync::Arc;

use model::Parameters;

use super::{Rank, Weights};
use crate::lora::Adapter;
use crate::optimizer::Stream;

impl Rank {
    /// Memory of weights, gradients and optimizer, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let weights = match &self.weights {
            Weights::Whole(parameters) => size_of_val(parameters.values()),
            Weights::Own(own) => size_of_val(&own[..]),
        };
        let gradients = self.gradients.as_ref().map_or(0, |gradients| size_of_val(gradients.values()));
        (weights + gradients + size_of_val(&self.own[..])) as u64 + self.optimizer.bytes()
    }

    /// Gives up the gradients that are only kept because zeroing is cheaper than allocating. Returns their bytes.
    pub(crate) fn drop_gradients(&mut self) -> u64 {
        self.gradients.take().map_or(0, |gradients| size_of_val(gradients.values()) as u64)
    }

    /// The numbers of the optimizer, of the weights with the frozen ones under an adapter, or of both.
    pub(crate) fn streams(&mut self, of_optimizer: bool, of_weights: bool) -> Vec<Stream<'_>> {
        let mut streams = if of_optimizer { self.optimizer.streams() } else { Vec::new() };
        if of_weights {
            let weights = match &mut self.weights {
                Weights::Whole(parameters) => Arc::get_mut(parameters).map(Parameters::buffer_mut),
                Weights::Own(own) => Some(own),
            };
            let frozen = self.adapter.as_mut().map(Adapter::base_mut);
            streams.extend(weights.into_iter().chain(frozen).map(Stream::F32));
        }
        streams
    }
}
