//! The memory of a rank, and the state that leaves the device while the sampler uses it.

use std::sync::Arc;

use model::Parameters;

use super::{Rank, RankWeights};
use crate::lora::Adapter;
use crate::optimizer::StateStream;

impl Rank {
    /// Memory of weights, gradients and optimizer, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let weights = match &self.weights {
            RankWeights::Whole(parameters) => size_of_val(parameters.values()),
            RankWeights::Own(own) => size_of_val(&own[..]),
            RankWeights::Device(mirror) => mirror.bytes(),
            RankWeights::DeviceOwn(mirror) => mirror.bytes(),
        };
        let host = weights as u64 + self.sums.bytes() + self.optimizer.bytes();
        host + self.device_bytes().iter().sum::<u64>()
    }

    /// Memory of the optimizer and of the weights, bytes, on the host and on the device. The weights include the base
    /// weights of an adapter.
    pub(crate) fn bytes_to_keep(&mut self) -> [u64; 2] {
        let on_device = self.device_bytes();
        let on_host = [(true, false), (false, true)].map(|(optimizer, weights)| {
            self.streams(optimizer, weights).iter().map(StateStream::bytes).sum::<u64>()
        });
        [on_host[0] + on_device[0], on_host[1] + on_device[1]]
    }

    /// Frees the gradient buffers, which stay allocated between steps to save allocations. Returns their bytes.
    pub(crate) fn drop_gradients(&mut self) -> u64 {
        self.sums.clear() + self.buffers.clear() + self.drop_sums()
    }

    /// The values of the optimizer state, of the weights, or of both. The weights include the base weights of an adapter.
    pub(crate) fn streams(&mut self, of_optimizer: bool, of_weights: bool) -> Vec<StateStream<'_>> {
        let mut streams = if of_optimizer { self.optimizer.streams() } else { Vec::new() };
        if of_weights {
            let weights = match &mut self.weights {
                RankWeights::Whole(parameters) => Arc::get_mut(parameters).map(Parameters::buffer_mut),
                RankWeights::Own(own) => Some(own),
                // The state is copied to the host before it leaves the device.
                RankWeights::Device(_) | RankWeights::DeviceOwn(_) => None,
            };
            let frozen = self.adapter.as_mut().map(Adapter::base_mut);
            streams.extend(weights.into_iter().chain(frozen).map(StateStream::F32));
        }
        streams
    }
}
