//! The memory of a rank, and the state that leaves the device while the sampler uses it.

use std::sync::Arc;

use super::replicated::ReplicatedRank;
use super::single::SingleRank;
use super::{Rank, RankKind};
use crate::TrainerError;
use crate::on_device::by_dtype;
use crate::optimizer::StateStream;

impl Rank {
    /// Memory of weights, gradients and optimizer, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let (weights, sums) = match &self.kind {
            RankKind::Single(SingleRank { weights, sums })
            | RankKind::Replicated(ReplicatedRank { weights, sums, .. }) => (weights.bytes(), sums.bytes()),
            RankKind::Sharded(rank) => (size_of_val(&rank.own[..]) as u64, rank.sums.bytes()),
            RankKind::SingleOnDevice(rank) => (by_dtype!(&**rank, rank => rank.host_bytes()) as u64, 0),
            RankKind::Group(rank) => (by_dtype!(&**rank, rank => rank.host_bytes()) as u64, 0),
        };
        weights + sums + self.base.optimizer.bytes() + self.device_bytes().iter().sum::<u64>()
    }

    /// Memory of the optimizer and of the weights on the device, bytes.
    pub(crate) fn device_bytes(&self) -> [u64; 2] {
        let copy = match &self.kind {
            RankKind::Single(SingleRank { weights, .. })
            | RankKind::Replicated(ReplicatedRank { weights, .. }) => &weights.device,
            RankKind::Sharded(rank) => &rank.device,
            RankKind::SingleOnDevice(rank) => return by_dtype!(&**rank, rank => rank.device_bytes()),
            RankKind::Group(rank) => return by_dtype!(&**rank, rank => rank.device_bytes()),
        };
        [0, copy.as_ref().map_or(0, |copy| by_dtype!(copy, copy => copy.bytes()))]
    }

    /// Memory of the optimizer and of the weights, bytes, on the host and on the device. The weights include the base
    /// weights of an adapter.
    pub(crate) fn bytes_to_keep(&mut self) -> [u64; 2] {
        let [optimizer, weights] = self.device_bytes();
        let mut on_host = |of_optimizer, of_weights| {
            self.streams(of_optimizer, of_weights).iter().map(StateStream::bytes).sum::<u64>()
        };
        [on_host(true, false) + optimizer, on_host(false, true) + weights]
    }

    /// Frees the gradient buffers, which stay allocated between steps to save allocations. Returns their bytes.
    pub(crate) fn drop_gradients(&mut self) -> u64 {
        let (sums, device) = match &mut self.kind {
            RankKind::Single(SingleRank { weights, sums })
            | RankKind::Replicated(ReplicatedRank { weights, sums, .. }) => (sums, &mut weights.device),
            RankKind::Sharded(rank) => (&mut rank.sums, &mut rank.device),
            RankKind::SingleOnDevice(rank) => return by_dtype!(&mut **rank, rank => rank.drop_sums()),
            RankKind::Group(rank) => return by_dtype!(&mut **rank, rank => rank.drop_sums()),
        };
        let on_device = device.as_mut().map_or(0, |device| by_dtype!(device, device => device.drop_sums()));
        sums.clear() + self.base.buffers.clear() + on_device
    }

    /// The values on the host of the optimizer state, of the weights, or of both. The weights include the base weights of
    /// an adapter.
    pub(crate) fn streams(&mut self, of_optimizer: bool, of_weights: bool) -> Vec<StateStream<'_>> {
        let mut streams = if of_optimizer { self.base.optimizer.streams() } else { Vec::new() };
        if of_weights {
            match &mut self.kind {
                RankKind::Single(SingleRank { weights, .. })
                | RankKind::Replicated(ReplicatedRank { weights, .. }) => streams.extend(weights.streams()),
                RankKind::Sharded(rank) => streams.push(StateStream::F32(&mut rank.own)),
                RankKind::SingleOnDevice(rank) => {
                    let unloaded = by_dtype!(&mut **rank, rank => rank.unloaded_mut());
                    let values = unloaded.map(|parameters| Arc::make_mut(parameters).buffer_mut());
                    streams.extend(values.map(StateStream::F32));
                }
                RankKind::Group(_) => {}
            }
        }
        streams
    }

    /// Copies the state that belongs on the device from the host to it.
    ///
    /// # Errors
    /// If the memory of the device is too small.
    pub(crate) fn enter_device(&mut self) -> Result<(), TrainerError> {
        match &mut self.kind {
            RankKind::Single(SingleRank { weights, .. })
            | RankKind::Replicated(ReplicatedRank { weights, .. }) => weights.enter_device(),
            RankKind::SingleOnDevice(rank) => {
                by_dtype!(&mut **rank, rank => rank.enter_device(&mut self.base))
            }
            RankKind::Sharded(_) | RankKind::Group(_) => Ok(()),
        }
    }

    /// Frees the device memory of the optimizer, of the weights, or of both. Optimizer state and master weights move to the
    /// host. Returns the freed bytes.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn leave_device(&mut self, optimizer: bool, weights: bool) -> Result<u64, TrainerError> {
        let copy = match &mut self.kind {
            RankKind::Single(SingleRank { weights, .. })
            | RankKind::Replicated(ReplicatedRank { weights, .. }) => &mut weights.device,
            RankKind::Sharded(rank) => &mut rank.device,
            RankKind::SingleOnDevice(rank) => {
                return by_dtype!(&mut **rank, rank => rank.leave_device(&mut self.base, optimizer, weights));
            }
            RankKind::Group(_) => return Ok(0),
        };
        Ok(copy.as_mut().map_or(0, |copy| by_dtype!(copy, copy => copy.leave(weights))))
    }
}
