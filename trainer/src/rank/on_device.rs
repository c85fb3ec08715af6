//! The part of a rank that is on a device.
//!
//! Invariant: weights and optimizer are in one place that counts: on the device, where the rank trains there, or on the
//! host. They move as a whole and unchanged.

use std::borrow::Cow;
use std::sync::Arc;

use device::{Buffer, Device};
use model::{Parameters, Team};

use super::step::finite;
use super::{Rank, Task, Weights};
use crate::TrainerError;
use crate::learner::{Frozen, RowLoss};
use crate::norm::clip;
use crate::on_device::{DeviceWeights, Engine, Mirror, OptimizerPlace, open};
use crate::optimizer::{Optimizer, OptimizerKind};
use crate::pass::Pass;
use crate::rank::{Scored, score_with};

/// What a rank has on its device.
#[derive(Debug)]
pub(super) struct OnDevice {
    pub(super) engine: Box<dyn Engine>,
    /// Sums of gradients, kept from step to step as the host's are.
    sums: Option<Buffer<f32>>,
    /// Whether the weights are updated there.
    trains: bool,
}

impl OnDevice {
    /// Weights that others have updated, computed with from now on.
    fn refresh(&mut self, parameters: &Parameters) -> Result<(), TrainerError> {
        Ok(self.engine.load(parameters.values(), false)?)
    }
}

impl Rank {
    /// Opens the device of the configuration, if there is one, and brings there what belongs there.
    ///
    /// # Errors
    /// If the device is not there, or has no room.
    pub(super) fn on_device(mut self) -> Result<Self, TrainerError> {
        let Some(config) = &self.config.device else { return Ok(self) };
        let rank = self.place.as_ref().map_or(0, |place| place.rank);
        let trains = self.place.is_none()
            && self.adapter.is_none()
            && config.optimizer == OptimizerPlace::Device
            && self.config.optimizer.kind == OptimizerKind::Adamw;
        let place = config.place_of(rank);
        let engine = open(place, config.dtype, &self.model, &self.layout, self.config.recompute)?;
        self.device = Some(OnDevice { engine, sums: None, trains });
        self.enter_device()?;
        Ok(self)
    }

    /// Brings to the device what belongs there and is on the host.
    ///
    /// # Errors
    /// If the device has no room.
    pub(crate) fn enter_device(&mut self) -> Result<(), TrainerError> {
        let Some(OnDevice { engine, trains, .. }) = &mut self.device else { return Ok(()) };
        if let Weights::Whole(parameters) = &self.weights
            && !engine.has_weights()
        {
            engine.load(parameters.values(), *trains)?;
            if *trains {
                self.weights = Weights::Device(Mirror::of(Arc::clone(parameters)));
            }
        }
        if *trains && !self.optimizer.states().is_empty() {
            engine.load_moments(self.optimizer.states())?;
            self.optimizer.take_states();
        }
        Ok(())
    }

    /// Gives up the device's memory of the optimizer, of the weights, or of both; what counts of it goes to the host.
    /// Returns the bytes.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn leave_device(&mut self, optimizer: bool, weights: bool) -> Result<u64, TrainerError> {
        let Some(OnDevice { engine, .. }) = &mut self.device else { return Ok(0) };
        let before = engine.bytes().iter().sum::<u64>();
        if optimizer && let Some(states) = engine.read_moments(self.layout.specs())? {
            self.optimizer.put_states(states);
            engine.unload_moments();
        }
        if weights {
            if let Weights::Device(mirror) = &self.weights {
                let read = |values: &mut [f32]| Ok(engine.read(values)?);
                self.weights = Weights::Whole(Arc::clone(mirror.get(&self.layout, read)?));
            }
            engine.unload();
        }
        Ok(before - engine.bytes().iter().sum::<u64>() + engine.forget())
    }

    /// Gives up the device's gradients. Returns their bytes.
    pub(super) fn drop_sums(&mut self) -> u64 {
        let sums = self.device.as_mut().and_then(|device| device.sums.take());
        sums.map_or(0, |sums| sums.bytes())
    }

    /// The device's memory of optimizer and weights, bytes.
    pub(crate) fn device_bytes(&self) -> [u64; 2] {
        let [weights, moments] = self.device.as_ref().map_or([0; 2], |device| device.engine.bytes());
        [moments, weights]
    }

    /// The device and the weights that it computes with, if they are there.
    pub(crate) fn device_weights(&self) -> Option<(&Device, DeviceWeights<'_>)> {
        let engine = &self.device.as_ref()?.engine;
        Some((engine.device(), engine.weights()?))
    }

    /// The weights of `mirror`, which belong to the device.
    pub(super) fn mirrored<'a>(&'a self, mirror: &'a Mirror) -> Result<&'a Arc<Parameters>, TrainerError> {
        let Some(device) = &self.device else { unreachable!("weights of a device have one") };
        mirror.get(&self.layout, |values| Ok(device.engine.read(values)?))
    }

    /// The optimizer with its states, wherever they are.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn whole_optimizer(&self) -> Result<Cow<'_, Optimizer>, TrainerError> {
        let states = match &self.device {
            Some(device) => device.engine.read_moments(self.layout.specs())?,
            None => None,
        };
        let resumed = |states| Optimizer::resume(self.config.optimizer, self.optimizer.updates(), states);
        Ok(states.map_or(Cow::Borrowed(&self.optimizer), |states| Cow::Owned(resumed(states))))
    }

    /// Predictions under another network on the device.
    ///
    /// # Errors
    /// If the device has no room for its weights.
    pub(super) fn score_frozen(
        &self,
        device: &OnDevice,
        (frozen, parameters): (&Frozen, &Arc<Parameters>),
        task: Task<'_>,
        team: &Team,
    ) -> Result<Scored, TrainerError> {
        // A model that is swapped in is let go on the device as it is on the host.
        let keep = !frozen.weights.is_swapped();
        let network = device.engine.frozen(frozen.weights.config(), parameters, keep)?;
        let rank = self.place.as_ref().map_or(0, |place| place.rank);
        score_with(&mut Pass::Device(network.pass()), rank, task, team)
    }

    /// A place for sums of gradients on the device, all zero: where there is one, and gradients stay for longer than a
    /// pass.
    pub(super) fn take_sums(&mut self) -> Result<Option<Buffer<f32>>, TrainerError> {
        let stay = self.place.is_none() || !self.config.shares_gradients();
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

    /// Puts back what [`Self::take_sums`] took.
    pub(super) fn put_sums(&mut self, sums: Option<Buffer<f32>>) {
        if let Some(device) = &mut self.device {
            device.sums = sums;
        }
    }

    /// Computes with what an update on the host has made of the weights.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn refresh(&mut self) -> Result<(), TrainerError> {
        match (&mut self.device, &self.weights) {
            (Some(device), Weights::Whole(parameters)) => device.refresh(parameters),
            _ => Ok(()),
        }
    }

    /// A step of a rank that is alone and computes on a device: like that of the processor, with gradients in `sums`.
    pub(super) fn step_on_device<L: RowLoss>(
        &mut self,
        sums: &mut Buffer<f32>,
        task: Task<'_>,
        loss: &L,
        learning_rate: f32,
        team: &Team,
    ) -> Result<(f32, L::Report), TrainerError> {
        let Some(on_device) = &mut self.device else { unreachable!("sums are taken of a device") };
        let mut pass = Pass::Device(on_device.engine.pass(Some(&mut *sums)));
        let mut report = L::Report::default();
        for batch in task.plan.iter().flatten() {
            super::step::reverse(&mut pass, (batch, task.rows), (loss, &mut report), None, team)?;
        }
        drop(pass);
        if on_device.trains {
            let norm = on_device.engine.squares(sums.all())?.sqrt() as f32;
            finite(norm, &self.optimizer, task.rows.len())?;
            let adam = self.optimizer.next_adam(clip(norm, self.config.max_grad_norm), learning_rate);
            on_device.engine.update(&adam, self.layout.specs(), sums.all())?;
            if let Weights::Device(mirror) = &mut self.weights {
                mirror.outdate();
            }
            return Ok((norm, report));
        }
        let mut gradients = std::mem::take(&mut self.own);
        gradients.resize(sums.len(), 0.0);
        let downloaded = on_device.engine.device().download_to(sums.all(), &mut gradients);
        let norm = downloaded
            .map_err(TrainerError::from)
            .and_then(|()| self.update_alone(&gradients, task.rows.len(), learning_rate, team));
        self.own = gradients;
        let norm = norm?;
        self.refresh()?;
        Ok((norm, report))
    }
}
