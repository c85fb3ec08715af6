//! The network of a rank on its device, without the weights of the rank: decoder, frozen networks, broadcasts to samplers.
//!
//! Invariant: a rank has one dtype for its life, so [`ByDtype`] is matched where a rank calls its device, and everything
//! below is generic over the storage type.

use std::sync::{Arc, Mutex, PoisonError};

use device::{Device, DeviceBuffer, Storage, bf16};
use model::on_device::{DeviceDecoder, DeviceDtype};
use model::{Config, Layout, Parameters, Recompute};
use weights::direct::nccl::PushOwner;
use weights::direct::round::PushPlan;
use weights::{Digest, Hub, WeightsError};

use super::pass::{NetworkPass, ParameterSource};
use super::uploads::{OffloadedParameters, upload};
use super::{DeviceConfig, FrozenPlace, LearnerStorage, LearnerWeights};

/// One of two types, by the dtype of the weights that a device computes with.
pub(crate) enum ByDtype<F, B> {
    F32(F),
    Bf16(B),
}

/// Evaluates an expression for the value of either dtype. With `map` the results are of either dtype too.
macro_rules! by_dtype {
    (map $value:expr, $name:pat => $result:expr) => {
        match $value {
            $crate::on_device::ByDtype::F32($name) => $crate::on_device::ByDtype::F32($result),
            $crate::on_device::ByDtype::Bf16($name) => $crate::on_device::ByDtype::Bf16($result),
        }
    };
    ($value:expr, $name:pat => $result:expr) => {
        match $value {
            $crate::on_device::ByDtype::F32($name) => $result,
            $crate::on_device::ByDtype::Bf16($name) => $result,
        }
    };
}
pub(crate) use by_dtype;

/// A device with the decoder of a network whose weights have the storage type `T`.
pub(crate) struct DeviceNetwork<T: Storage> {
    device: Device,
    recompute: Recompute,
    decoder: DeviceDecoder<T>,
    /// The sender of broadcasts to samplers.
    owner: Mutex<Option<PushOwner<T>>>,
    frozen_place: FrozenPlace,
    frozen: Mutex<Option<Arc<FrozenOnDevice<T>>>>,
}

/// A frozen network.
pub(crate) struct FrozenOnDevice<T: Storage> {
    /// The parameters that it was made from, which identify it.
    parameters: Arc<Parameters>,
    decoder: DeviceDecoder<T>,
    /// `None` if layers are copied from `parameters` in every pass.
    weights: Option<DeviceBuffer<T>>,
}

/// The network of a rank, and its weights if all of them are on the device.
pub(crate) struct NetworkWeights<'a, T: Storage> {
    pub(crate) network: &'a DeviceNetwork<T>,
    pub(crate) weights: Option<&'a DeviceBuffer<T>>,
}

/// Opens the device of a rank for a network.
///
/// # Errors
/// If the device is not available.
pub(crate) fn open(
    config: &DeviceConfig,
    rank: usize,
    model: &Config,
    layout: &Arc<Layout>,
    recompute: Recompute,
) -> device::Result<ByDtype<DeviceNetwork<f32>, DeviceNetwork<bf16>>> {
    let device = Device::open(config.place_of(rank))?;
    Ok(match config.dtype {
        DeviceDtype::F32 => {
            ByDtype::F32(DeviceNetwork::new(device, model, layout, recompute, config.frozen)?)
        }
        DeviceDtype::Bf16 => {
            ByDtype::Bf16(DeviceNetwork::new(device, model, layout, recompute, config.frozen)?)
        }
    })
}

impl<T: Storage> DeviceNetwork<T> {
    fn new(
        device: Device,
        model: &Config,
        layout: &Arc<Layout>,
        recompute: Recompute,
        frozen_place: FrozenPlace,
    ) -> device::Result<Self> {
        let decoder = DeviceDecoder::new(&device, model, layout, recompute)?;
        let (owner, frozen) = (Mutex::default(), Mutex::default());
        Ok(Self { device, recompute, decoder, owner, frozen_place, frozen })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        self.decoder.layout()
    }

    /// A pass with the weights of `source`. Gradients are accumulated in `sums`, or in one buffer per unit.
    pub(crate) fn pass<'a>(
        &'a self,
        source: ParameterSource<'a, T>,
        sums: Option<&'a mut DeviceBuffer<f32>>,
    ) -> NetworkPass<'a, T> {
        NetworkPass::new(&self.decoder, source, sums)
    }

    /// A frozen network. With `keep` what the device has of it stays until the next frozen network or [`Self::forget`].
    ///
    /// # Errors
    /// If the memory of the device is too small.
    pub(crate) fn frozen(
        &self,
        config: &Config,
        parameters: &Arc<Parameters>,
        keep: bool,
    ) -> device::Result<Arc<FrozenOnDevice<T>>> {
        let mut kept = self.frozen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(frozen) = &*kept
            && Arc::ptr_eq(&frozen.parameters, parameters)
        {
            return Ok(Arc::clone(frozen));
        }
        // Freed before the new weights are allocated.
        *kept = None;
        let weights = match self.frozen_place {
            FrozenPlace::Device => {
                let mut weights = self.device.labelled("frozen weights").uninit(parameters.layout().len())?;
                upload(&self.device, parameters.values(), weights.all_mut())?;
                Some(weights)
            }
            FrozenPlace::Host => None,
        };
        let frozen = Arc::new(FrozenOnDevice {
            parameters: Arc::clone(parameters),
            decoder: DeviceDecoder::new(&self.device, config, parameters.layout(), self.recompute)?,
            weights,
        });
        if keep {
            *kept = Some(Arc::clone(&frozen));
        }
        Ok(frozen)
    }

    /// Frees the frozen network. Returns its bytes.
    pub(crate) fn forget(&self) -> u64 {
        let frozen = self.frozen.lock().unwrap_or_else(PoisonError::into_inner).take();
        frozen.and_then(|frozen| Some(frozen.weights.as_ref()?.bytes())).unwrap_or(0)
    }
}

impl<T: Storage> FrozenOnDevice<T> {
    /// A pass of the frozen network.
    ///
    /// # Errors
    /// If the memory of the device is too small.
    pub(crate) fn pass(&self) -> device::Result<NetworkPass<'_, T>> {
        let source = match &self.weights {
            Some(weights) => ParameterSource::whole(weights, self.decoder.layout()),
            None => {
                let offloaded = OffloadedParameters::new(self.decoder.device(), &self.parameters)?;
                ParameterSource::Offloaded(Box::new(offloaded))
            }
        };
        Ok(NetworkPass::new(&self.decoder, source, None))
    }
}

impl<'a, T: LearnerStorage> NetworkWeights<'a, T> {
    /// The device and its weights, if all of them are on it.
    pub(crate) fn erased(&self) -> Option<(&'a Device, LearnerWeights<'a>)> {
        Some((self.network.device(), T::erased(self.weights?.all())))
    }

    /// Sends this rank's shard of the weights, as the owner number `index`, to all samplers of `plan`. Returns the digest of
    /// the shard. `hub` is the hub of the samplers, in the process that has it.
    ///
    /// # Errors
    /// If a sampler is gone or late, or the device fails or does not have all weights.
    pub(crate) fn send(
        &self,
        plan: &PushPlan,
        index: usize,
        hub: Option<&Hub>,
    ) -> Result<Digest, WeightsError> {
        let Self { network, weights } = self;
        let cut = plan.cut(index);
        let Some(weights) = weights.filter(|all| cut.end <= all.len()) else {
            let device = network.device.name();
            let reason = format!("{device} does not have all weights, of which it is to send {cut:?}");
            return Err(WeightsError::Device { what: "send weights", reason });
        };
        let mut owner = network.owner.lock().unwrap_or_else(PoisonError::into_inner);
        let owner = owner.get_or_insert_with(|| {
            let owner = PushOwner::new(&network.device, index);
            match hub {
                Some(hub) => owner.watching(hub.clone()),
                None => owner,
            }
        });
        owner.send(plan, weights.view(cut))
    }
}
