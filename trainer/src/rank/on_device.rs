//! Ranks and passes on a device.
//!
//! Invariant: master weights and optimizer state are on the device if the rank updates them there, and on the host
//! otherwise. A move between device and host changes no bit.

use std::sync::{Arc, Mutex, PoisonError};

use device::ops::vectors::{cast, sum_of_squares};
use device::{Device, DeviceBuffer, Storage, bf16};
use model::on_device::{DevicePassRanks, StoredWeights};
use model::{LowRank, Parameters};

use super::RankBase;
use super::step::{StepInputs, finite};
use crate::TrainerError;
use crate::learner::{LearnerStep, RouterStep, RowLoss};
use crate::lora::Adapter;
use crate::norm::clip;
use crate::on_device::{
    ByDtype, DeviceMoments, DeviceNetwork, DevicePass, LearnerStorage, NetworkWeights, ParameterSource,
    ParameterUpload, Piece, SingleWeights, TrainedWeights, UpdatedWeights, upload,
};
use crate::optimizer::TensorState;
use crate::state_weights::StateWeights;
use crate::zero::ParameterGathering;

/// The device of a rank whose host updates the weights.
pub(super) struct PassDevice<T: LearnerStorage> {
    network: DeviceNetwork<T>,
    /// `None` while the sampler has the device, and if layers are gathered from all ranks.
    copy: Option<WeightCopy<T>>,
    /// Sums of gradients. The buffer stays allocated between steps.
    sums: Option<DeviceBuffer<f32>>,
}

/// A copy of all weights of a host.
enum WeightCopy<T: Storage> {
    Flat(DeviceBuffer<T>),
    /// A base that stays quantised, and factors. Scoring changes the factors for a pass.
    Stored(Box<Mutex<StoredWeights<T>>>),
}

/// A [`PassDevice`] of either dtype.
pub(super) type AnyPassDevice = ByDtype<PassDevice<f32>, PassDevice<bf16>>;

/// The only rank of a learner, which updates all weights on its device.
pub(super) struct SingleDeviceRank<T: LearnerStorage> {
    network: DeviceNetwork<T>,
    weights: SingleWeights<T>,
    /// `None` while the sampler has the device: the optimizer has the states.
    moments: Option<DeviceMoments>,
    /// Sums of gradients. The buffer stays allocated between steps.
    sums: Option<DeviceBuffer<f32>>,
}

impl<T: LearnerStorage> PassDevice<T> {
    pub(super) fn new(network: DeviceNetwork<T>) -> Self {
        Self { network, copy: None, sums: None }
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.copy.is_some()
    }

    /// Copies the weights of the host to the device; only the factors of an `adapter` of a base that is there.
    ///
    /// # Errors
    /// If the memory of the device is too small, or a base stays quantised without an adapter.
    pub(super) fn load(
        &mut self,
        weights: &StateWeights,
        adapter: Option<&Adapter>,
    ) -> Result<(), TrainerError> {
        let device = self.network.device();
        let copy = match (weights, self.copy.take()) {
            (StateWeights::Whole(parameters), copy) => {
                let mut copy = match copy {
                    Some(WeightCopy::Flat(copy)) => copy,
                    _ => device.labelled("weights").uninit(parameters.values().len())?,
                };
                upload(device, parameters.values(), copy.all_mut())?;
                WeightCopy::Flat(copy)
            }
            (StateWeights::Quantized(base), copy) => {
                let factors = adapter.ok_or(TrainerError::QuantizedBase)?.factors();
                match copy {
                    Some(WeightCopy::Stored(mut copy)) => {
                        copy.get_mut().unwrap_or_else(PoisonError::into_inner).set_factors(factors)?;
                        WeightCopy::Stored(copy)
                    }
                    _ => {
                        let stored = StoredWeights::new(device, base, factors)?;
                        WeightCopy::Stored(Box::new(Mutex::new(stored)))
                    }
                }
            }
        };
        self.copy = Some(copy);
        Ok(())
    }

    /// The result of `score` of a pass with the first `factors` over a base that stays quantised. The second ones, of the policy, are
    /// there again afterwards.
    ///
    /// # Errors
    /// If the weights are not on the device, it fails, or the error of `score`.
    pub(super) fn score_under<R>(
        &self,
        [factors, own]: [&LowRank; 2],
        score: impl FnOnce(Box<dyn DevicePass + '_>) -> Result<R, TrainerError>,
    ) -> Result<R, TrainerError> {
        let Some(WeightCopy::Stored(stored)) = &self.copy else { return Err(NOT_LOADED) };
        let change = |factors: &LowRank| -> Result<(), TrainerError> {
            Ok(stored.lock().unwrap_or_else(PoisonError::into_inner).set_factors(factors)?)
        };
        change(factors)?;
        let scored = self.scoring(DevicePassRanks::default()).and_then(score);
        change(own)?;
        scored
    }

    /// A pass of `ranks` that scores with the copy of the weights.
    ///
    /// # Errors
    /// If the weights are not on the device.
    pub(super) fn scoring(&self, ranks: DevicePassRanks) -> Result<Box<dyn DevicePass + '_>, TrainerError> {
        let source = source(&self.network, self.copy.as_ref())?;
        Ok(Box::new(self.network.pass(source, None).among(ranks)))
    }

    /// A pass of `ranks` with the copy of the weights, and the gradients of these or of an `adapter`. If it `accumulates`, gradients stay
    /// on the device until they are complete.
    ///
    /// # Errors
    /// If the weights are not on the device, or its memory is too small.
    pub(super) fn pass<'a>(
        &'a mut self,
        accumulates: bool,
        adapter: Option<&Adapter>,
        ranks: DevicePassRanks,
    ) -> Result<Box<dyn DevicePass + 'a>, TrainerError> {
        let Self { network, copy, sums } = self;
        let sums = if accumulates { Some(zeros(sums, network, adapter)?) } else { None };
        let pass = network.pass(source(network, copy.as_ref())?, sums);
        Ok(Box::new(pass.among(ranks).adapting(adapter)?))
    }

    /// A pass of `ranks` with weights that are gathered from all ZeRO ranks through the host.
    ///
    /// # Errors
    /// If the all-gather fails, or the memory of the device is too small.
    pub(super) fn gathered<'a>(
        &'a self,
        gathering: ParameterGathering<'a>,
        ranks: DevicePassRanks,
    ) -> Result<Box<dyn DevicePass + 'a>, TrainerError> {
        let upload = ParameterUpload::new(self.network.device(), self.network.layout(), gathering)?;
        let source = ParameterSource::Gathered(Box::new(upload));
        Ok(Box::new(self.network.pass(source, None).among(ranks)))
    }

    /// Copies the gradients of all rows of a step of a single rank to `gradients`, `[weights]`, or of the factors of an `adapter`,
    /// `[factors]`. Returns the report.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, or the device fails.
    pub(super) fn gradients<L: RowLoss>(
        &mut self,
        step: &StepInputs<'_, L>,
        adapter: Option<&Adapter>,
        gradients: &mut [f32],
    ) -> Result<L::Report, TrainerError> {
        let Self { network, copy, sums } = self;
        let sums = zeros(sums, network, adapter)?;
        let pass = network.pass(source(network, copy.as_ref())?, Some(&mut *sums));
        let report = step.sum_on_device(&mut pass.adapting(adapter)?)?;
        network.device().download_to(sums.all(), gradients)?;
        Ok(report)
    }

    /// Frees the copy of the weights, if it does not stay, and the frozen network. Returns the bytes.
    pub(super) fn leave(&mut self, weights: bool) -> u64 {
        let copy = if weights { self.copy.take() } else { None };
        copy.map_or(0, |copy| copy.bytes()) + self.network.forget()
    }

    /// Frees the gradients. Returns their bytes.
    pub(super) fn drop_sums(&mut self) -> u64 {
        self.sums.take().map_or(0, |sums| sums.bytes())
    }

    /// Memory of the weights, bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.copy.as_ref().map_or(0, WeightCopy::bytes)
    }

    /// The network and its weights.
    pub(super) fn on_device(&self) -> NetworkWeights<'_, T> {
        let weights = match &self.copy {
            Some(WeightCopy::Flat(copy)) => Some(copy),
            Some(WeightCopy::Stored(_)) | None => None,
        };
        NetworkWeights { network: &self.network, weights }
    }
}

impl<T: Storage> WeightCopy<T> {
    /// Memory, bytes.
    fn bytes(&self) -> u64 {
        match self {
            Self::Flat(copy) => copy.bytes(),
            Self::Stored(stored) => stored.lock().unwrap_or_else(PoisonError::into_inner).bytes(),
        }
    }
}

impl<T: LearnerStorage> SingleDeviceRank<T> {
    /// The rank with its weights and the optimizer state of `base` on the device.
    ///
    /// # Errors
    /// If the memory of the device is too small.
    pub(super) fn new(
        network: DeviceNetwork<T>,
        parameters: Arc<Parameters>,
        base: &mut RankBase,
    ) -> Result<Self, TrainerError> {
        let weights = SingleWeights::Unloaded(parameters);
        let mut rank = Self { network, weights, moments: None, sums: None };
        rank.enter_device(base)?;
        Ok(rank)
    }

    /// Copies weights and optimizer state to the device, if they are on the host.
    ///
    /// # Errors
    /// If the memory of the device is too small.
    pub(super) fn enter_device(&mut self, base: &mut RankBase) -> Result<(), TrainerError> {
        let device = self.network.device();
        self.weights.load(device)?;
        if self.moments.is_none() {
            let pieces = Piece::tensors(&base.layout);
            self.moments = Some(DeviceMoments::load(device, pieces, base.optimizer.states())?);
            base.optimizer.take_states();
        }
        Ok(())
    }

    /// Moves the optimizer state, the weights, or both to the host, and frees the frozen network. Returns the freed bytes.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn leave_device(
        &mut self,
        base: &mut RankBase,
        optimizer: bool,
        weights: bool,
    ) -> Result<u64, TrainerError> {
        let before = self.device_bytes().iter().sum::<u64>();
        let device = self.network.device();
        if optimizer && let Some(moments) = &self.moments {
            base.optimizer.put_states(moments.read(device)?);
            self.moments = None;
        }
        if weights {
            self.weights.unload(device, &base.layout)?;
        }
        Ok(before - self.device_bytes().iter().sum::<u64>() + self.network.forget())
    }

    /// A step: the same as on the host.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, the device fails, or the gradient is not finite.
    pub(super) fn step<L: RowLoss>(
        &mut self,
        base: &mut RankBase,
        step: &StepInputs<'_, L>,
    ) -> Result<LearnerStep<L::Report>, TrainerError> {
        let Self { network, weights, moments, sums } = self;
        let (SingleWeights::Loaded { trained, mirror }, Some(moments)) = (weights, moments) else {
            return Err(NOT_LOADED);
        };
        let (device, sums) = (network.device(), zeros(sums, network, None)?);
        let source = ParameterSource::whole(trained.rounded(), network.layout());
        let report = step.sum_on_device(&mut network.pass(source, Some(&mut *sums)))?;
        let done = LearnerStep {
            grad_norm: sum_of_squares(device, sums.all())?.sqrt() as f32,
            reports: vec![report],
        };
        finite(done.grad_norm, &base.optimizer, step.task.rows.len())?;
        if done.grad_norm == 0.0 {
            return Ok(done);
        }
        let scale = clip(done.grad_norm, base.config.max_grad_norm);
        let adam = base.optimizer.next_adam(scale, step.learning_rate);
        moments.update(device, &adam, trained.updated(), sums.all())?;
        mirror.outdate();
        Ok(done)
    }

    /// Adds `steps` to the corrections of routers.
    ///
    /// # Errors
    /// If the weights are not on the device, or it fails.
    pub(super) fn correct(&mut self, steps: &[RouterStep]) -> Result<(), TrainerError> {
        let SingleWeights::Loaded { trained, mirror } = &mut self.weights else { return Err(NOT_LOADED) };
        let (device, UpdatedWeights { masters, mut rounded }) = (self.network.device(), trained.updated());
        for step in steps {
            let place = step.place();
            let mut values = device.download(masters.view(place.clone()))?;
            step.add(&place, &mut values);
            device.upload_to(&values, masters.view_mut(place.clone()))?;
            if let Some(rounded) = &mut rounded {
                cast(device, masters.view(place.clone()), rounded.view_mut(place))?;
            }
        }
        mirror.outdate();
        Ok(())
    }

    /// A pass that scores.
    ///
    /// # Errors
    /// If the weights are not on the device.
    pub(super) fn scoring(&self) -> Result<Box<dyn DevicePass + '_>, TrainerError> {
        Ok(Box::new(self.network.pass(whole(&self.network, self.weights.on_device())?, None)))
    }

    /// All weights on the host, as a copy if they are on the device.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn parameters(&self) -> Result<&Arc<Parameters>, TrainerError> {
        self.weights.on_host(self.network.device(), self.network.layout())
    }

    /// The weights on the host, if they are not on the device.
    pub(super) fn unloaded_mut(&mut self) -> Option<&mut Arc<Parameters>> {
        match &mut self.weights {
            SingleWeights::Loaded { .. } => None,
            SingleWeights::Unloaded(parameters) => Some(parameters),
        }
    }

    /// The optimizer state of every tensor, if it is on the device.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn states(&self) -> device::Result<Option<Vec<TensorState>>> {
        self.moments.as_ref().map(|moments| moments.read(self.network.device())).transpose()
    }

    /// Frees the gradients. Returns their bytes.
    pub(super) fn drop_sums(&mut self) -> u64 {
        self.sums.take().map_or(0, |sums| sums.bytes())
    }

    /// Memory of the weights on the host, bytes.
    pub(super) fn host_bytes(&self) -> usize {
        self.weights.host_bytes()
    }

    /// Memory of the optimizer and of the weights on the device, bytes.
    pub(super) fn device_bytes(&self) -> [u64; 2] {
        [self.moments.as_ref().map_or(0, DeviceMoments::bytes), self.weights.device_bytes()]
    }

    /// The network and its weights.
    pub(super) fn on_device(&self) -> NetworkWeights<'_, T> {
        NetworkWeights { network: &self.network, weights: self.weights.on_device() }
    }
}

/// A pass needs state that is not on the device.
const NOT_LOADED: TrainerError =
    TrainerError::State { reason: "its weights or its optimizer state are not on its device" };

/// All `weights` of a network as the source of a pass.
fn whole<'a, T: LearnerStorage>(
    network: &'a DeviceNetwork<T>,
    weights: Option<&'a DeviceBuffer<T>>,
) -> Result<ParameterSource<'a, T>, TrainerError> {
    Ok(ParameterSource::whole(weights.ok_or(NOT_LOADED)?, network.layout()))
}

/// The `copy` of the weights of a network as the source of a pass.
fn source<'a, T: LearnerStorage>(
    network: &'a DeviceNetwork<T>,
    copy: Option<&'a WeightCopy<T>>,
) -> Result<ParameterSource<'a, T>, TrainerError> {
    match copy {
        Some(WeightCopy::Stored(stored)) => {
            Ok(ParameterSource::Stored(stored.lock().unwrap_or_else(PoisonError::into_inner)))
        }
        Some(WeightCopy::Flat(weights)) => whole(network, Some(weights)),
        None => Err(NOT_LOADED),
    }
}

/// A buffer of zeros for the sums of all gradients of a network, or of the factors of an `adapter`.
fn zeros<'a, T: LearnerStorage>(
    sums: &'a mut Option<DeviceBuffer<f32>>,
    network: &DeviceNetwork<T>,
    adapter: Option<&Adapter>,
) -> device::Result<&'a mut DeviceBuffer<f32>> {
    let len = adapter.map_or(network.layout().len(), |adapter| adapter.values().len());
    zeroed(sums, network.device(), len)
}

/// The buffer of gradients with `len` zeros, which is allocated in the first step.
pub(super) fn zeroed<'a>(
    buffer: &'a mut Option<DeviceBuffer<f32>>,
    device: &Device,
    len: usize,
) -> device::Result<&'a mut DeviceBuffer<f32>> {
    match buffer {
        Some(buffer) => {
            device.clear(buffer.all_mut())?;
            Ok(buffer)
        }
        None => Ok(buffer.insert(device.labelled("gradients").zeros(len)?)),
    }
}
