//! One of several ranks that are a device group: collective calls run from device to device, and every rank updates its
//! shards on its device (ZeRO stages 1 to 3).
//!
//! The state stays on the devices for the life of the rank, because only all ranks together can restore it.

use std::sync::Arc;

use device::ops::vectors::sum_of_squares;
use device::{DeviceBuffer, DeviceGroup};

use super::RankBase;
use super::membership::{OwnShards, RankMembership};
use super::on_device::zeroed;
use super::step::{StepInputs, finite};
use crate::TrainerError;
use crate::learner::{LearnerStep, RowLoss};
use crate::norm::{SquareSum, clip};
use crate::on_device::{
    DeviceMoments, DeviceNetwork, DevicePass, GroupWeights, LearnerStorage, Mirror, NetworkWeights, Piece,
    TrainedWeights,
};
use crate::optimizer::TensorState;
use crate::plan::step_passes;
use crate::rank_spans::RankPhase;
use crate::zero::{DeviceReduction, DeviceSharding};

pub(super) struct GroupRank<T: LearnerStorage> {
    pub(super) membership: RankMembership,
    network: DeviceNetwork<T>,
    weights: GroupWeights<T>,
    /// The host's copy of the shards of this rank.
    mirror: Mirror<Vec<f32>>,
    moments: DeviceMoments,
    /// Sums of the gradients of several passes. The buffer stays allocated between steps.
    sums: Option<DeviceBuffer<f32>>,
    /// Sums over all ranks of the gradients that this rank owns.
    own: Option<DeviceBuffer<f32>>,
    sharding: DeviceSharding<T>,
    group: Arc<DeviceGroup>,
}

impl<T: LearnerStorage> GroupRank<T> {
    /// The rank with its weights `own`, `[owned weights]`, and the optimizer state of `base` on the device.
    ///
    /// # Errors
    /// If the memory of the device is too small, or another rank does not make the call.
    pub(super) fn new(
        network: DeviceNetwork<T>,
        membership: RankMembership,
        group: DeviceGroup,
        own: Vec<f32>,
        base: &mut RankBase,
    ) -> Result<Self, TrainerError> {
        let (group, device) = (Arc::new(group), network.device());
        let sharding = DeviceSharding::new(Arc::clone(&group) as _, membership.weights.clone());
        let gathers = (!base.config.shares_weights()).then_some(&*base.layout);
        let weights = GroupWeights::load(device, &own, gathers, &sharding)?;
        let pieces = Piece::fragments(&base.layout, membership.fragments());
        let moments = DeviceMoments::load(device, pieces, base.optimizer.states())?;
        base.optimizer.take_states();
        let mirror = Mirror::of(Arc::new(own));
        Ok(Self { membership, network, weights, mirror, moments, sums: None, own: None, sharding, group })
    }

    /// This rank's part of a step.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a device or another rank fails, or the gradient is not finite.
    pub(super) fn step<L: RowLoss>(
        &mut self,
        base: &mut RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<LearnerStep<L::Report>, TrainerError> {
        let position = self.membership.collective()?.position();
        let Self { membership, network, weights, mirror, moments, sums, own, sharding, .. } = self;
        let (device, layout, sharding) = (network.device(), network.layout(), &*sharding);
        let passes = membership.clock.enter(RankPhase::ForwardBackward);
        let own = zeroed(own, device, moments.len())?;
        // ZeRO stage 1 accumulates the gradients of several passes.
        let accumulates = base.accumulates();
        let sums = if accumulates { Some(zeroed(sums, device, layout.len())?) } else { None };
        let reduction = DeviceReduction { sharding, own: &mut *own, complete: true, first: true };
        let source = weights.source(device, layout, sharding)?;
        let mut pass = network.pass(source, sums).reducing(reduction);
        let mut reports = step.reports(position.world);
        for current in step_passes(step.task.plan, position, accumulates) {
            pass.reduces(current.complete, current.slot.round == 0);
            match current.batch {
                Some(batch) => {
                    step.reverse_on_device(&mut pass, batch, &mut reports[current.slot.index])?;
                }
                None => pass.skip()?,
            }
        }
        drop(pass);
        sharding.wait("add up gradients")?;
        drop(passes);
        let _optimizer = membership.clock.enter(RankPhase::Optimizer);
        let mut squares = SquareSum::default();
        squares.add(sum_of_squares(device, own.all())?);
        let grad_norm = membership.norm(&squares)?;
        finite(grad_norm, &base.optimizer, step.task.rows.len())?;
        if grad_norm != 0.0 {
            let scale = clip(grad_norm, base.config.max_grad_norm);
            let adam = base.optimizer.next_adam(scale, step.learning_rate);
            moments.update(device, &adam, weights.own_mut().updated(), own.all())?;
            weights.gather(sharding)?;
            mirror.outdate();
        }
        Ok(LearnerStep { grad_norm, reports })
    }

    /// The shards of this rank, as a copy on the host.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn shards(&self) -> Result<OwnShards<'_>, TrainerError> {
        let new = || vec![0.0; self.moments.len()];
        let masters = self.weights.own().masters().all();
        let read = |values: &mut [f32]| Ok(self.network.device().download_to(masters, values)?);
        Ok(OwnShards { membership: &self.membership, values: self.mirror.get(new, read)? })
    }

    /// A pass that scores.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(super) fn scoring(&self) -> Result<Box<dyn DevicePass + '_>, TrainerError> {
        let Self { network, weights, sharding, .. } = self;
        let source = weights.source(network.device(), network.layout(), sharding)?;
        Ok(Box::new(network.pass(source, None)))
    }

    /// The optimizer state of every fragment.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn states(&self) -> device::Result<Vec<TensorState>> {
        self.moments.read(self.network.device())
    }

    /// Closes the device group. The calls of the other ranks end with an error.
    pub(super) fn leave(&self) {
        self.membership.leave();
        self.group.abort();
    }

    /// Frees the gradients. Returns their bytes.
    pub(super) fn drop_sums(&mut self) -> u64 {
        [self.sums.take(), self.own.take()].iter().flatten().map(DeviceBuffer::bytes).sum()
    }

    /// Memory of the shards on the host, bytes.
    pub(super) fn host_bytes(&self) -> usize {
        self.mirror.bytes()
    }

    /// Memory of the optimizer and of the weights on the device, bytes.
    pub(super) fn device_bytes(&self) -> [u64; 2] {
        [self.moments.bytes(), self.weights.bytes()]
    }

    /// The network, and its weights if all of them are on the device.
    pub(super) fn on_device(&self) -> NetworkWeights<'_, T> {
        NetworkWeights { network: &self.network, weights: self.weights.gathered() }
    }
}
