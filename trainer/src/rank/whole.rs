//! All weights of a model on the host, which updates them, or an adapter over them. A device may compute with a copy.
//!
//! An adapter is merged into weights in f32, and never into a base that stays quantised (QLoRA, Dettmers et al. 2023, arXiv
//! 2305.14314): on the processor a sampler of the same base and factors then computes the bits of the passes here.
//!
//! Invariant: between two steps the copy on the device is up to date, unless the sampler has the device.

use std::sync::Arc;

use model::{AdaptedBase, LowRank, ParameterSpec, ThreadPool};

use super::RankBase;
use super::on_device::AnyPassDevice;
use super::step::{UpdateInputs, finite};
use crate::TrainerError;
use crate::lora::Adapter;
use crate::norm::{clip, squares};
use crate::on_device::by_dtype;
use crate::optimizer::{ScaledGradients, StateStream};
use crate::pass::Pass;
use crate::state_weights::StateWeights;

pub(super) struct WholeWeights {
    /// Published versions and checkpoints share them: an update then copies them first.
    pub(super) values: StateWeights,
    /// The adapter that is trained in place of the weights.
    pub(super) adapter: Option<Adapter>,
    /// The device of the passes; `None` for the processor.
    pub(super) device: Option<AnyPassDevice>,
}

impl WholeWeights {
    pub(super) fn new(values: StateWeights, adapter: Option<Adapter>, device: Option<AnyPassDevice>) -> Self {
        Self { values, adapter, device }
    }

    /// The trained tensors.
    pub(super) fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.values.specs(), Adapter::specs)
    }

    /// The policy, if its base stays quantised.
    pub(super) fn adapted(&self) -> Option<AdaptedBase> {
        let (StateWeights::Quantized(base), Some(adapter)) = (&self.values, &self.adapter) else {
            return None;
        };
        Some(AdaptedBase::new(Arc::clone(base), Arc::clone(adapter.factors())))
    }

    /// Memory on the host, bytes: of the weights, and of factors that are not merged.
    pub(super) fn bytes(&self) -> u64 {
        let factors = self.unmerged().map_or(0, |factors| size_of_val(factors.values()));
        self.values.bytes() + factors as u64
    }

    /// The factors of the adapter, if it is not merged.
    fn unmerged(&self) -> Option<&Arc<LowRank>> {
        let adapter = self.adapter.as_ref()?;
        matches!(self.values, StateWeights::Quantized(_)).then_some(adapter.factors())
    }

    /// A pass that scores.
    ///
    /// # Errors
    /// If the weights are not on the device.
    pub(super) fn scoring(&self, base: &RankBase) -> Result<Pass<'_>, TrainerError> {
        match &self.device {
            Some(device) => {
                let ranks = base.passes.on_devices()?;
                Ok(Pass::Device(by_dtype!(device, device => device.scoring(ranks)?)))
            }
            None => self.on_host(base, None),
        }
    }

    /// Updates all weights, or the adapter, with their `gradients`, `[trained values]`. Returns the norm of the gradient.
    ///
    /// # Errors
    /// If the gradient is not finite; the weights are then unchanged.
    pub(super) fn update(
        &mut self,
        base: &mut RankBase,
        gradients: &[f32],
        UpdateInputs { rows, learning_rate, max_grad_norm, pool }: UpdateInputs<'_>,
    ) -> Result<f32, TrainerError> {
        let tensors = self.trained().iter().map(|spec| &gradients[spec.range()]);
        let norm = squares(tensors, base.model.reduction, pool).norm();
        finite(norm, &base.optimizer, rows)?;
        if norm == 0.0 {
            return Ok(norm);
        }
        let update = ScaledGradients { gradients, scale: clip(norm, max_grad_norm) };
        let optimizer = &mut base.optimizer;
        if let Some(adapter) = &mut self.adapter {
            adapter.update(optimizer, update, learning_rate, pool);
            self.merge(pool);
        } else {
            let values = self.values_mut()?;
            optimizer.update(base.layout.specs(), values, update, learning_rate, pool);
        }
        Ok(norm)
    }

    /// All values in f32, for an update in place.
    ///
    /// # Errors
    /// If the base stays quantised.
    pub(super) fn values_mut(&mut self) -> Result<&mut [f32], TrainerError> {
        match &mut self.values {
            StateWeights::Whole(parameters) => Ok(Arc::make_mut(parameters).values_mut()),
            StateWeights::Quantized(_) => Err(TrainerError::QuantizedBase),
        }
    }

    /// A pass on the host that trains.
    ///
    /// # Errors
    /// If a base stays quantised without an adapter.
    pub(super) fn training(&self, base: &RankBase) -> Result<Pass<'static>, TrainerError> {
        self.on_host(base, self.adapter.as_ref())
    }

    /// A pass on the host, with the gradients of `adapter` if there is one.
    fn on_host(&self, base: &RankBase, adapter: Option<&Adapter>) -> Result<Pass<'static>, TrainerError> {
        let (recompute, ranks) = (base.config.recompute, base.passes.passes(&base.model, false)?);
        match (&self.values, self.unmerged()) {
            (StateWeights::Whole(parameters), _) => {
                Ok(Pass::whole(&base.model, parameters, adapter, recompute, ranks))
            }
            (StateWeights::Quantized(base), Some(factors)) => {
                Ok(Pass::frozen(base, factors, recompute, ranks))
            }
            (StateWeights::Quantized(_), None) => Err(TrainerError::QuantizedBase),
        }
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
        let layout = Arc::clone(self.values.layout());
        update(layout.specs(), self.values_mut()?)
    }

    /// Copies the weights to the device after an update.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn refresh(&mut self) -> Result<(), TrainerError> {
        let Self { values, adapter, device } = self;
        if let Some(device) = device {
            by_dtype!(device, device => device.load(values, adapter.as_ref())?);
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
        let weights = match &mut self.values {
            StateWeights::Whole(parameters) => Some(Arc::make_mut(parameters).buffer_mut()),
            // A base that stays quantised is not written to files, and its factors are small.
            StateWeights::Quantized(_) => None,
        };
        let frozen = self.adapter.as_mut().filter(|_| weights.is_some()).map(Adapter::base_mut);
        weights.into_iter().chain(frozen).map(StateStream::F32)
    }

    fn merge(&mut self, pool: &ThreadPool) {
        if let (StateWeights::Whole(parameters), Some(adapter)) = (&mut self.values, &self.adapter) {
            adapter.merge(Arc::make_mut(parameters).values_mut(), pool);
        }
    }
}
