//! The part of a rank that is on a device.
//!
//! Invariant: master weights and optimizer state are on the device if the rank updates them there, and on the host
//! otherwise. They move as a whole and unchanged. A rank of a device group owns only its shards of the master weights,
//! also if it computes with all weights.

use std::borrow::Cow;
use std::sync::Arc;

use device::group::{DeviceGroup, DeviceGroupId, GroupCandidate};
use device::{Device, DeviceBuffer};
use model::{Parameters, ThreadPool};
use weights::direct::round::PushPlan;
use weights::{Digest, Hub, WeightsError};

use super::step::{StepInputs, finite, norm_of_all};
use super::{PlannedRows, Rank, RankWeights};
use crate::TrainerError;
use crate::learner::{Frozen, RowLoss};
use crate::norm::{SquareSum, clip};
use crate::on_device::{CollectivePlace, DeviceRank, LearnerWeights, Mirror, OptimizerPlace, open};
use crate::optimizer::{Optimizer, OptimizerKind, TensorState};
use crate::pass::Pass;
use crate::plan::step_passes;
use crate::rank::{ScoredRows, score_with};
use crate::zero::DeviceSharding;

/// The state of a rank on its device.
#[derive(Debug)]
pub(super) struct RankDevice {
    pub(super) engine: Box<dyn DeviceRank>,
    /// Sums of gradients. The buffer stays allocated between steps, as on the host.
    sums: Option<DeviceBuffer<f32>>,
    /// Sums over all ranks of the gradients that this rank owns, in a device group.
    own: Option<DeviceBuffer<f32>>,
    /// Whether the weights are updated on the device.
    trains: bool,
    /// Whether the ranks are a device group: collective calls run from device to device.
    pub(super) meets: bool,
}

impl RankDevice {
    /// Copies weights that the host has updated to the device.
    fn refresh(&mut self, parameters: &Parameters) -> Result<(), TrainerError> {
        Ok(self.engine.load(parameters.values(), false)?)
    }
}

impl Rank {
    /// Opens the device of the configuration, if there is one, and copies to it the state that belongs there.
    ///
    /// # Errors
    /// If the device is not available, or its memory is too small.
    pub(super) fn on_device(mut self) -> Result<Self, TrainerError> {
        let Some(config) = &self.config.device else { return Ok(self) };
        let rank = self.membership.as_ref().map_or(0, |membership| membership.rank);
        let movable = self.adapter.is_none()
            && config.optimizer == OptimizerPlace::Device
            && self.config.optimizer.kind == OptimizerKind::Adamw;
        let place = config.place_of(rank);
        let mut engine = open(place, config.dtype, &self.model, &self.layout, self.config.recompute)?;
        if !movable && self.membership.is_some() && config.collective == CollectivePlace::Device {
            let reason = "they update weights on the host, as LoRA and other optimizers than AdamW do";
            return Err(TrainerError::NoCollective { reason: reason.to_owned() });
        }
        let meets = movable && self.meet(&mut *engine, config.collective)?;
        let trains = movable && (meets || self.membership.is_none());
        if let (true, Some(membership), RankWeights::Whole(all)) = (meets, &self.membership, &self.weights) {
            self.weights = RankWeights::Own(membership.weights.pack(rank, all.values()));
        }
        self.device = Some(RankDevice { engine, sums: None, own: None, trains, meets });
        self.enter_device()?;
        Ok(self)
    }

    /// Joins the device group of the ranks, if there are several and their devices allow it. Returns whether it did.
    fn meet(&self, engine: &mut dyn DeviceRank, wish: CollectivePlace) -> Result<bool, TrainerError> {
        let Some(membership) = self.membership.as_ref().filter(|_| wish != CollectivePlace::Host) else {
            return Ok(false);
        };
        let (collective, device) = (self.collective()?, engine.device());
        let all = collective.all_gather_bytes(GroupCandidate::new(device)?.to_bytes())?;
        let all: Vec<_> = all.iter().map(|bytes| GroupCandidate::from_bytes(bytes)).collect();
        if let Some(reason) = GroupCandidate::obstacle(&all) {
            return match wish {
                CollectivePlace::Device => Err(TrainerError::NoCollective { reason }),
                _ => Ok(false),
            };
        }
        let id = if membership.rank == 0 { DeviceGroupId::new(device)?.to_bytes() } else { Vec::new() };
        let id = DeviceGroupId::from_bytes(&collective.broadcast_bytes(0, id)?);
        let group = DeviceGroup::join(device, &id, membership.rank, collective.world(), self.config.wait)?;
        engine.meet(DeviceSharding::new(group, membership.weights.clone(), self.config.shares_weights()));
        Ok(true)
    }

    /// Copies the state that belongs on the device from the host to it.
    ///
    /// # Errors
    /// If the memory of the device is too small.
    pub(crate) fn enter_device(&mut self) -> Result<(), TrainerError> {
        let Some(RankDevice { engine, trains, meets, .. }) = &mut self.device else { return Ok(()) };
        if !engine.has_weights() {
            match &mut self.weights {
                RankWeights::Whole(parameters) => {
                    engine.load(parameters.values(), *trains)?;
                    if *trains {
                        self.weights = RankWeights::Device(Mirror::of(Arc::clone(parameters)));
                    }
                }
                RankWeights::Own(own) if *meets => {
                    engine.load(own, true)?;
                    self.weights = RankWeights::DeviceOwn(Mirror::of(Arc::new(std::mem::take(own))));
                }
                RankWeights::Own(_) | RankWeights::Device(_) | RankWeights::DeviceOwn(_) => {}
            }
        }
        if *trains && !self.optimizer.states().is_empty() {
            engine.load_moments(self.optimizer.states())?;
            self.optimizer.take_states();
        }
        Ok(())
    }

    /// Frees the device memory of the optimizer, of the weights, or of both. Optimizer state and master weights move to the
    /// host. The state of a device group stays on its devices, because only all ranks together can restore it. Returns the
    /// freed bytes.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn leave_device(&mut self, optimizer: bool, weights: bool) -> Result<u64, TrainerError> {
        let Some(RankDevice { engine, meets: false, .. }) = &mut self.device else { return Ok(0) };
        let before = engine.bytes().iter().sum::<u64>();
        if optimizer && let Some(states) = engine.read_moments()? {
            self.optimizer.put_states(states);
            engine.unload_moments();
        }
        if weights {
            if let RankWeights::Device(mirror) = &self.weights {
                let read = |values: &mut [f32]| Ok(engine.read(values)?);
                let new = || Parameters::zeros(Arc::clone(&self.layout));
                self.weights = RankWeights::Whole(Arc::clone(mirror.get(new, read)?));
            }
            engine.unload();
        }
        Ok(before - engine.bytes().iter().sum::<u64>() + engine.forget())
    }

    /// Frees the gradients on the device. Returns their bytes.
    pub(super) fn drop_sums(&mut self) -> u64 {
        let Some(device) = &mut self.device else { return 0 };
        [device.sums.take(), device.own.take()].iter().flatten().map(DeviceBuffer::bytes).sum()
    }

    /// Device memory of the optimizer and of the weights, bytes.
    pub(crate) fn device_bytes(&self) -> [u64; 2] {
        let [weights, moments] = self.device.as_ref().map_or([0; 2], |device| device.engine.bytes());
        [moments, weights]
    }

    /// Whether collective calls run from device to device. `None` on the processor and for a single rank.
    pub(crate) fn meets_on_devices(&self) -> Option<bool> {
        self.device.as_ref().filter(|_| self.membership.is_some()).map(|device| device.meets)
    }

    /// Sends this rank's shard of the weights to all samplers of `plan`. Returns the digest of the shard.
    ///
    /// # Errors
    /// If a sampler is gone or late, or the device fails or does not have all weights.
    pub(crate) fn send(&self, plan: &PushPlan, hub: Option<&Hub>) -> Result<Digest, WeightsError> {
        let rank = self.membership.as_ref().map_or(0, |membership| membership.rank);
        match &self.device {
            Some(device) => device.engine.send(plan, rank, hub),
            None => {
                let reason = format!("rank {rank} computes on the processor");
                Err(WeightsError::Device { what: "send weights", reason })
            }
        }
    }

    /// The device and its weights, if they are on it.
    pub(crate) fn device_weights(&self) -> Option<(&Device, LearnerWeights<'_>)> {
        let engine = &self.device.as_ref()?.engine;
        Some((engine.device(), engine.weights()?))
    }

    /// All weights as a host copy of the device's, which `mirror` keeps.
    pub(super) fn mirrored<'a>(
        &'a self,
        mirror: &'a Mirror<Parameters>,
    ) -> Result<&'a Arc<Parameters>, TrainerError> {
        let Some(device) = &self.device else { unreachable!("weights of a device have one") };
        let new = || Parameters::zeros(Arc::clone(&self.layout));
        mirror.get(new, |values| Ok(device.engine.read(values)?))
    }

    /// The weights that this rank owns as a host copy of the device's, `[owned weights]`, which `mirror` keeps.
    pub(super) fn mirrored_own<'a>(
        &'a self,
        mirror: &'a Mirror<Vec<f32>>,
    ) -> Result<&'a [f32], TrainerError> {
        let Some(device) = &self.device else { unreachable!("weights of a device have one") };
        let new = || vec![0.0; device.engine.trained()];
        Ok(mirror.get(new, |values| Ok(device.engine.read(values)?))?)
    }

    /// The optimizer state of each tensor or fragment, from the host or the device.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn states(&self) -> Result<Cow<'_, [TensorState]>, TrainerError> {
        let states = match &self.device {
            Some(device) => device.engine.read_moments()?,
            None => None,
        };
        Ok(states.map_or(Cow::Borrowed(self.optimizer.states()), Cow::Owned))
    }

    /// The optimizer with its states, from the host or the device.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn whole_optimizer(&self) -> Result<Cow<'_, Optimizer>, TrainerError> {
        let resumed =
            |states| Optimizer::from_states(self.config.optimizer, self.optimizer.updates(), states);
        Ok(match self.states()? {
            Cow::Borrowed(_) => Cow::Borrowed(&self.optimizer),
            Cow::Owned(states) => Cow::Owned(resumed(states)),
        })
    }

    /// Predictions under another network on the device.
    ///
    /// # Errors
    /// If the memory of the device is too small for its weights.
    pub(super) fn score_frozen(
        &self,
        device: &RankDevice,
        (frozen, parameters): (&Frozen, &Arc<Parameters>),
        task: PlannedRows<'_>,
        pool: &ThreadPool,
    ) -> Result<ScoredRows, TrainerError> {
        // A model that is swapped in is freed on the device as on the host.
        let keep = !frozen.weights.is_swapped();
        let network = device.engine.frozen(frozen.weights.config(), parameters, keep)?;
        let rank = self.membership.as_ref().map_or(0, |membership| membership.rank);
        score_with(&mut Pass::Device(network.pass()), rank, task, pool)
    }

    /// A buffer of zeros for the sums of gradients on the device. `None` without a device, or if every pass reduces its
    /// gradients.
    pub(super) fn take_sums(&mut self) -> Result<Option<DeviceBuffer<f32>>, TrainerError> {
        let stay = self.membership.is_none() || !self.config.shares_gradients();
        let Some(on_device) = self.device.as_mut().filter(|_| stay) else { return Ok(None) };
        let device = on_device.engine.device();
        Ok(Some(match on_device.sums.take() {
            Some(mut sums) => {
                device.clear(sums.all_mut())?;
                sums
            }
            None => device.labelled("gradients").zeros(self.layout.len())?,
        }))
    }

    /// Returns the buffer of [`Self::take_sums`] to the rank.
    pub(super) fn put_sums(&mut self, sums: Option<DeviceBuffer<f32>>) {
        if let Some(device) = &mut self.device {
            device.sums = sums;
        }
    }

    /// Copies the weights to the device after an update on the host.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn refresh(&mut self) -> Result<(), TrainerError> {
        match (&mut self.device, &self.weights) {
            (Some(device), RankWeights::Whole(parameters)) => device.refresh(parameters),
            _ => Ok(()),
        }
    }

    /// A step of a single rank on a device: the same as on the processor, with gradients in `sums`.
    pub(super) fn step_on_device<L: RowLoss>(
        &mut self,
        sums: &mut DeviceBuffer<f32>,
        step: &StepInputs<'_, L>,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let Some(on_device) = &mut self.device else { unreachable!("sums are taken of a device") };
        let mut pass = Pass::Device(on_device.engine.pass(Some(&mut *sums), None)?);
        let mut report = L::Report::default();
        for batch in step.task.plan.iter().flatten() {
            step.reverse(&mut pass, batch, &mut report, None)?;
        }
        let reports = vec![report];
        drop(pass);
        if on_device.trains {
            let norm = on_device.engine.squares(sums.all())?.sqrt() as f32;
            finite(norm, &self.optimizer, step.task)?;
            if norm == 0.0 {
                return Ok((norm, reports));
            }
            let adam = self.optimizer.next_adam(clip(norm, self.config.max_grad_norm), step.learning_rate);
            on_device.engine.update(&adam, sums.all())?;
            if let RankWeights::Device(mirror) = &mut self.weights {
                mirror.outdate();
            }
            return Ok((norm, reports));
        }
        let mut gradients = self.buffers.take(sums.len());
        let downloaded = on_device.engine.device().download_to(sums.all(), &mut gradients);
        let norm = downloaded.map_err(TrainerError::from).and_then(|()| {
            let adapted = self.adapter.as_ref().map(|adapter| adapter.gradients(&gradients, step.pool));
            self.update_alone(adapted.as_deref().unwrap_or(&gradients), step)
        });
        self.buffers.put(gradients);
        let norm = norm?;
        self.refresh()?;
        Ok((norm, reports))
    }

    /// A step of a rank of a device group, with gradients in `sums` if they are accumulated over several passes.
    pub(super) fn step_on_devices<L: RowLoss>(
        &mut self,
        sums: Option<&mut DeviceBuffer<f32>>,
        step: &StepInputs<'_, L>,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let collective = self.collective()?;
        let Some(on_device) = &mut self.device else {
            unreachable!("ranks of a device group have a membership and a device")
        };
        let RankDevice { engine, own, .. } = on_device;
        let own = match own {
            Some(own) => {
                engine.device().clear(own.all_mut())?;
                own
            }
            None => own.insert(engine.device().labelled("gradients").zeros(engine.trained())?),
        };
        let position = collective.position();
        let step_passes = step_passes(step.task.plan, position, !self.config.shares_gradients());
        let mut reports = step.reports(position.world);
        let mut pass = Pass::Device(engine.pass(sums, Some(&mut *own))?);
        for current in step_passes {
            pass.reduces(current.complete, current.slot.round == 0);
            match current.batch {
                Some(batch) => {
                    step.reverse(&mut pass, batch, &mut reports[current.slot.index], None)?;
                }
                None => pass.skip(None)?,
            }
        }
        drop(pass);
        let mut squares = SquareSum::default();
        squares.add(engine.squares(own.all())?);
        let norm = norm_of_all(&*collective, &squares)?;
        finite(norm, &self.optimizer, step.task)?;
        if norm == 0.0 {
            return Ok((norm, reports));
        }
        let adam = self.optimizer.next_adam(clip(norm, self.config.max_grad_norm), step.learning_rate);
        engine.update(&adam, own.all())?;
        if let RankWeights::DeviceOwn(mirror) = &mut self.weights {
            mirror.outdate();
        }
        Ok((norm, reports))
    }
}
