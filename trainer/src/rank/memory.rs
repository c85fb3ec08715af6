//! What a rank has in memory, and what of it can leave while somebody else has the device.

use std::sync::Arc;

use model::Parameters;

use super::{Rank, Weights};
use crate::lora::Adapter;
use crate::optimizer::StateStream;

impl Rank {
    /// Memory of weights, gradients and optimizer, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let weights = match &self.weights {
            Weights::Whole(parameters) => size_of_val(parameters.values()),
            Weights::Own(own) => size_of_val(&own[..]),
            Weights::Device(mirror) => mirror.bytes(),
            Weights::DeviceOwn(mirror) => mirror.bytes(),
        };
        let host = weights as u64 + self.sums.bytes() + self.optimizer.bytes();
        host + self.device_bytes().iter().sum::<u64>()
    }

    /// Memory of the optimizer and of the weights with the frozen ones under an adapter, bytes: where they count, and
    /// what a device computes with.
    pub(crate) fn bytes_to_keep(&mut self) -> [u64; 2] {
        let on_device = self.device_bytes();
        let on_host = [(true, false), (false, true)].map(|(optimizer, weights)| {
            self.streams(optimizer, weights).iter().map(StateStream::bytes).sum::<u64>()
        });
        [on_host[0] + on_device[0], on_host[1] + on_device[1]]
    }

    /// Gives up the gradients that are only kept because zeroing is cheaper than allocating. Returns their bytes.
    pub(crate) fn drop_gradients(&mut self) -> u64 {
        self.sums.clear() + self.pool.clear() + self.drop_sums()
    }

    /// The numbers of the optimizer, of the weights with the frozen ones under an adapter, or of both.
    pub(crate) fn streams(&mut self, of_optimizer: bool, of_weights: bool) -> Vec<StateStream<'_>> {
        let mut streams = if of_optimizer { self.optimizer.streams() } else { Vec::new() };
        if of_weights {
            let weights = match &mut self.weights {
                Weights::Whole(parameters) => Arc::get_mut(parameters).map(Parameters::buffer_mut),
                Weights::Own(own) => Some(own),
                // It is brought to the host before it leaves.
                Weights::Device(_) | Weights::DeviceOwn(_) => None,
            };
            let frozen = self.adapter.as_mut().map(Adapter::base_mut);
            streams.extend(weights.into_iter().chain(frozen).map(StateStream::F32));
        }
        streams
    }
}
