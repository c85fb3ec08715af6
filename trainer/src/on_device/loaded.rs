//! Weights that are trained on a device.
//!
//! Invariant: the weights that are computed with are the rounded form of the master weights, and change with them. If a single
//! rank computes in f32 both are one buffer.

use std::sync::Arc;

use device::ops::vectors::cast;
use device::{Device, DeviceBuffer, Storage, View, bf16};
use model::{Layout, Parameters};

use super::Mirror;
use super::pass::ParameterSource;
use crate::TrainerError;
use crate::zero::{DeviceGathering, DeviceSharding};

/// Storage type of the weights that a rank computes with, f32 or bf16.
pub(crate) trait LearnerStorage: Storage {
    /// All weights, in the form in which a single rank trains them.
    type Trained: TrainedWeights<Self>;

    /// All weights without their storage type.
    fn erased(weights: View<'_, Self>) -> LearnerWeights<'_>;
}

/// Weights that are trained and computed with.
pub(crate) trait TrainedWeights<T: Storage>: Sized + Send + Sync {
    /// Copies `values`, `[trained values]`, to the device.
    fn upload(device: &Device, values: &[f32]) -> device::Result<Self>;

    /// The weights of the computation.
    fn rounded(&self) -> &DeviceBuffer<T>;

    /// The master weights.
    fn masters(&self) -> &DeviceBuffer<f32>;

    /// The buffers that an update changes.
    fn updated(&mut self) -> UpdatedWeights<'_, T>;

    /// Memory, bytes.
    fn bytes(&self) -> u64;
}

/// The buffers that an update changes.
pub(crate) struct UpdatedWeights<'a, T: Storage> {
    pub(crate) masters: &'a mut DeviceBuffer<f32>,
    /// The rounded form, if it is another buffer.
    pub(crate) rounded: Option<&'a mut DeviceBuffer<T>>,
}

/// Master weights with their rounded form in a buffer of its own.
pub(crate) struct RoundedWeights<T: Storage> {
    masters: DeviceBuffer<f32>,
    rounded: DeviceBuffer<T>,
}

/// The weights of a single rank that trains them on its device.
pub(crate) enum SingleWeights<T: LearnerStorage> {
    /// On the device, with a copy on the host.
    Loaded { trained: T::Trained, mirror: Mirror<Parameters> },
    /// On the host while a sampler has the device.
    Unloaded(Arc<Parameters>),
}

/// The weights of a rank of a device group.
pub(crate) struct GroupWeights<T: Storage> {
    /// The shards that this rank owns and trains, concatenated in the order of its fragments.
    own: RoundedWeights<T>,
    /// All weights, gathered from the shards of all ranks. `None` if a pass gathers a layer when it needs it.
    gathered: Option<DeviceBuffer<T>>,
}

/// All weights of a model on a device, in the order of its layout.
#[derive(Clone, Copy, Debug)]
pub enum LearnerWeights<'a> {
    /// As they are trained.
    F32(View<'a, f32>),
    /// Rounded.
    Bf16(View<'a, bf16>),
}

impl LearnerStorage for f32 {
    type Trained = DeviceBuffer<f32>;

    fn erased(weights: View<'_, f32>) -> LearnerWeights<'_> {
        LearnerWeights::F32(weights)
    }
}

impl LearnerStorage for bf16 {
    type Trained = RoundedWeights<bf16>;

    fn erased(weights: View<'_, bf16>) -> LearnerWeights<'_> {
        LearnerWeights::Bf16(weights)
    }
}

impl TrainedWeights<f32> for DeviceBuffer<f32> {
    fn upload(device: &Device, values: &[f32]) -> device::Result<Self> {
        device.labelled("weights").upload(values)
    }

    fn rounded(&self) -> &Self {
        self
    }

    fn masters(&self) -> &Self {
        self
    }

    fn updated(&mut self) -> UpdatedWeights<'_, f32> {
        UpdatedWeights { masters: self, rounded: None }
    }

    fn bytes(&self) -> u64 {
        Self::bytes(self)
    }
}

impl<T: Storage> TrainedWeights<T> for RoundedWeights<T> {
    fn upload(device: &Device, values: &[f32]) -> device::Result<Self> {
        let weights = device.labelled("weights");
        let masters = weights.upload(values)?;
        let mut rounded = weights.uninit(values.len())?;
        cast(device, masters.all(), rounded.all_mut())?;
        Ok(Self { masters, rounded })
    }

    fn rounded(&self) -> &DeviceBuffer<T> {
        &self.rounded
    }

    fn masters(&self) -> &DeviceBuffer<f32> {
        &self.masters
    }

    fn updated(&mut self) -> UpdatedWeights<'_, T> {
        UpdatedWeights { masters: &mut self.masters, rounded: Some(&mut self.rounded) }
    }

    fn bytes(&self) -> u64 {
        self.masters.bytes() + self.rounded.bytes()
    }
}

impl<T: LearnerStorage> SingleWeights<T> {
    /// Copies the weights to the device.
    ///
    /// # Errors
    /// If its memory is too small.
    pub(crate) fn load(&mut self, device: &Device) -> device::Result<()> {
        if let Self::Unloaded(parameters) = self {
            let trained = T::Trained::upload(device, parameters.values())?;
            *self = Self::Loaded { trained, mirror: Mirror::of(Arc::clone(parameters)) };
        }
        Ok(())
    }

    /// Moves the weights to the host.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn unload(&mut self, device: &Device, layout: &Arc<Layout>) -> Result<(), TrainerError> {
        let parameters = Arc::clone(self.on_host(device, layout)?);
        *self = Self::Unloaded(parameters);
        Ok(())
    }

    /// All weights on the host: a copy of the device's, which the mirror keeps.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn on_host(
        &self,
        device: &Device,
        layout: &Arc<Layout>,
    ) -> Result<&Arc<Parameters>, TrainerError> {
        match self {
            Self::Loaded { trained, mirror } => {
                let new = || Parameters::zeros(Arc::clone(layout));
                mirror.get(new, |values| Ok(device.download_to(trained.masters().all(), values)?))
            }
            Self::Unloaded(parameters) => Ok(parameters),
        }
    }

    /// The weights of the computation, if they are on the device.
    pub(crate) fn on_device(&self) -> Option<&DeviceBuffer<T>> {
        match self {
            Self::Loaded { trained, .. } => Some(trained.rounded()),
            Self::Unloaded(_) => None,
        }
    }

    /// Memory on the host, bytes.
    pub(crate) fn host_bytes(&self) -> usize {
        match self {
            Self::Loaded { mirror, .. } => mirror.bytes(),
            Self::Unloaded(parameters) => size_of_val(parameters.values()),
        }
    }

    /// Memory on the device, bytes.
    pub(crate) fn device_bytes(&self) -> u64 {
        match self {
            Self::Loaded { trained, .. } => trained.bytes(),
            Self::Unloaded(_) => 0,
        }
    }
}

impl<T: Storage> GroupWeights<T> {
    /// Copies the shards of this rank to the device. If `gathers`, all weights are gathered from all ranks.
    ///
    /// # Errors
    /// If the memory of the device is too small, or another rank does not make the call.
    pub(crate) fn load(
        device: &Device,
        values: &[f32],
        gathers: Option<&Layout>,
        sharding: &DeviceSharding<T>,
    ) -> device::Result<Self> {
        let own = RoundedWeights::upload(device, values)?;
        let gathered = gathers.map(|layout| device.labelled("weights").uninit(layout.len())).transpose()?;
        let mut weights = Self { own, gathered };
        weights.gather(sharding)?;
        Ok(weights)
    }

    /// Gathers the weights after an update of all ranks.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(crate) fn gather(&mut self, sharding: &DeviceSharding<T>) -> device::Result<()> {
        match &mut self.gathered {
            Some(gathered) => sharding.gather(self.own.rounded.all(), gathered),
            None => Ok(()),
        }
    }

    /// The weights of a pass.
    ///
    /// # Errors
    /// If embedding and tail cannot be gathered.
    pub(crate) fn source<'a>(
        &'a self,
        device: &Device,
        layout: &'a Layout,
        sharding: &'a DeviceSharding<T>,
    ) -> device::Result<ParameterSource<'a, T>> {
        Ok(match &self.gathered {
            Some(gathered) => ParameterSource::whole(gathered, layout),
            None => {
                let gathering = DeviceGathering::new(device, layout, sharding, self.own.rounded.all())?;
                ParameterSource::Collected(Box::new(gathering))
            }
        })
    }

    /// All weights, if they are on this device.
    pub(crate) fn gathered(&self) -> Option<&DeviceBuffer<T>> {
        self.gathered.as_ref()
    }

    /// The shards that this rank owns.
    pub(crate) fn own(&self) -> &RoundedWeights<T> {
        &self.own
    }

    /// The shards that this rank owns, for an update.
    pub(crate) fn own_mut(&mut self) -> &mut RoundedWeights<T> {
        &mut self.own
    }

    /// Memory, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.own.bytes() + self.gathered.as_ref().map_or(0, DeviceBuffer::bytes)
    }
}
