//! All weights of a model on the host, which updates them. A device may compute with a copy.
//!
//! Invariant: between two steps the copy on the device is up to date, unless the sampler has the device.

use std::sync::Arc;

use model::{ParameterSpec, Parameters, ThreadPool};

use super::RankBase;
use super::on_device::AnyPassDevice;
use super::step::{StepInputs, finite};
use crate::TrainerError;
use crate::lora::Adapter;
use crate::norm::{clip, squares};
use crate::on_device::by_dtype;
use crate::optimizer::{ScaledGradients, StateStream};
use crate::pass::Pass;

pub(super) struct WholeWeights {
    /// Published versions and checkpoints share them: an update then copies them first.
    pub(super) parameters: Arc<Parameters>,
    /// The adapter that is trained in place of the weights. It is merged into them.
    pub(super) adapter: Option<Adapter>,
    /// The device of the passes; `None` for the processor.
    pub(super) device: Option<AnyPassDevice>,
}

impl WholeWeights {
    pub(super) fn new(
        parameters: Arc<Parameters>,
        adapter: Option<Adapter>,
        device: Option<AnyPassDevice>,
    ) -> Self {
        Self { parameters, adapter, device }
    }

    /// The trained tensors.
    pub(super) fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.parameters.layout().specs(), Adapter::specs)
    }

    /// A pass that scores.
    ///
    /// # Errors
    /// If the weights are not on the device.
    pub(super) fn scoring(&self, base: &RankBase) -> Result<Pass<'_>, TrainerError> {
        match &self.device {
            Some(device) => Ok(Pass::Device(by_dtype!(device, device => device.scoring()?))),
            None => Ok(Pass::whole(&base.model, &self.parameters, base.config.recompute)),
        }
    }

    /// Updates all weights, or the adapter, with their `gradients`, `[trained values]`. Returns the norm of the gradient.
    ///
    /// # Errors
    /// If the gradient is not finite; the weights are then unchanged.
    pub(super) fn update<L>(
        &mut self,
        base: &mut RankBase,
        gradients: &[f32],
        &StepInputs { task, learning_rate, pool, .. }: &StepInputs<'_, L>,
    ) -> Result<f32, TrainerError> {
        let norm = squares(self.trained().iter().map(|spec| &gradients[spec.range()]), pool).norm();
        finite(norm, &base.optimizer, task)?;
        if norm == 0.0 {
            return Ok(norm);
        }
        let update = ScaledGradients { gradients, scale: clip(norm, base.config.max_grad_norm) };
        let optimizer = &mut base.optimizer;
        if let Some(adapter) = &mut self.adapter {
            adapter.update(optimizer, update, learning_rate, pool);
            self.merge(pool);
        } else {
            let values = Arc::make_mut(&mut self.parameters).values_mut();
            optimizer.update(base.layout.specs(), values, update, learning_rate, pool);
        }
        Ok(norm)
    }

    /// Changes the trained values, `[trained values]`, with `update`, and merges an adapter.
    ///
    /// # Errors
    /// That of `update`.
    pub(super) fn change(
        &mut self,
        pool: &ThreadPool,
        update: impl FnOnce(&[ParameterSpec], &mut [f32]) -> Result<(), TrainerError>,
    ) -> Result<(), TrainerError> {
        if let Some(adapter) = &mut self.adapter {
            let (specs, values) = adapter.parts_mut();
            update(specs, values)?;
            self.merge(pool);
            return Ok(());
        }
        let layout = Arc::clone(self.parameters.layout());
        update(layout.specs(), Arc::make_mut(&mut self.parameters).values_mut())
    }

    /// Copies the weights to the device after an update.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn refresh(&mut self) -> Result<(), TrainerError> {
        if let Some(device) = &mut self.device {
            by_dtype!(device, device => device.load(&self.parameters)?);
        }
        Ok(())
    }

    /// Copies the weights to the device if they are not there.
    ///
    /// # Errors
    /// If the memory of the device is too small.
    pub(super) fn enter_device(&mut self) -> Result<(), TrainerError> {
        match &self.device {
            Some(device) if !by_dtype!(device, device => device.is_loaded()) => self.refresh(),
            _ => Ok(()),
        }
    }

    /// The weights, and the base weights of an adapter.
    pub(super) fn streams(&mut self) -> impl Iterator<Item = StateStream<'_>> {
        let weights = Arc::make_mut(&mut self.parameters).buffer_mut();
        let frozen = self.adapter.as_mut().map(Adapter::base_mut);
        std::iter::once(weights).chain(frozen).map(StateStream::F32)
    }

    fn merge(&mut self, pool: &ThreadPool) {
        if let Some(adapter) = &self.adapter {
            adapter.merge(Arc::make_mut(&mut self.parameters).values_mut(), pool);
        }
    }
}
