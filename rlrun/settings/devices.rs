//! The device of every role of a run.
//!
//! Invariant: `None` is the processor. A device is opened or looked for only if the recipe names one.

use std::collections::BTreeSet;

use device::device::DeviceLocation;
use device::{Device, DeviceError};
use model::on_device::DeviceDtype;
use model::{Quantization, SamplerRanks};
use rollout::ServeOn;
use trainer::on_device::{CollectivePlace, DeviceConfig, FrozenPlace, OptimizerPlace};

use crate::recipe::Recipe;
use crate::recipe::words::{CollectiveWord, DeviceWord, ModelDtype, OptimizerKind, PlaceWord, Ranks};

/// Whether ranks on these devices can exchange from one to the other: GPUs that differ, emulators of one process.
fn reach_each_other(devices: &[Option<DeviceLocation>], ranks: Ranks) -> bool {
    let emulated = devices.iter().all(|device| *device == Some(DeviceLocation::Emulated));
    let different: BTreeSet<_> = devices.iter().flatten().collect();
    if emulated { ranks == Ranks::Threads } else { different.len() == devices.len() }
}

/// More ranks or samplers than any run has: a number that is wrong is refused, not counted up to.
const MAX_RANKS: usize = 1 << 16;

/// Where the roles of a run compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices {
    /// The ranks of the trainer in order; `trainer.world` of them in a valid recipe.
    pub trainer: Vec<Option<DeviceLocation>>,
    /// The sampler, the first of them if there are several, and what answers for the trainer when it measures.
    pub rollout: Option<DeviceLocation>,
    /// Every sampler that the run starts, in order.
    pub rollouts: Vec<Option<DeviceLocation>>,
    /// Whether every rank of the trainer has a reference with weights of its own on its device.
    pub reference: bool,
    /// Whether the f32 weights and the state of the optimizer are on the devices of the trainer.
    pub optimizer_on_device: bool,
    /// Whether the ranks exchange from device to device, as far as the recipe tells.
    pub meets: bool,
}

impl Devices {
    /// Whether the trainer computes on devices.
    #[must_use]
    pub fn trains(&self) -> bool {
        self.trainer.iter().any(Option::is_some)
    }

    /// Whether the ranks of the trainer can exchange from device to device.
    #[must_use]
    pub fn reach_each_other(&self, ranks: Ranks) -> bool {
        reach_each_other(&self.trainer, ranks)
    }

    /// Whether anybody computes on a device.
    #[must_use]
    pub fn any(&self) -> bool {
        self.trains() || self.rollouts.iter().chain([&self.rollout]).any(Option::is_some)
    }
}

impl Recipe {
    /// Where the roles compute.
    #[must_use]
    pub fn devices(&self) -> Devices {
        let placement = &self.placement;
        let first = placement.trainer_device.unwrap_or(placement.device);
        let trainer: Vec<_> = match &placement.trainer_devices {
            Some(list) => list.iter().map(|device| device.place()).collect(),
            None => (0..self.trainer.world.min(MAX_RANKS)).map(|rank| further(first, rank).place()).collect(),
        };
        let rollout = placement.rollout_device.unwrap_or(placement.device).place();
        let samplers = if placement.processes { self.rollout_workers() } else { 1 };
        let rollouts: Vec<_> = match &placement.rollout_devices {
            Some(list) => list.iter().map(|device| device.place()).collect(),
            None => vec![rollout; samplers.min(MAX_RANKS)],
        };
        let on_device = placement.optimizer == PlaceWord::Device && trainer.iter().any(Option::is_some);
        let meets = on_device
            && trainer.len() > 1
            && self.collective() != CollectivePlace::Host
            && self.trainer.optimizer == OptimizerKind::Adamw
            && self.lora.is_none()
            && self.trainer.router_correction_rate == 0.0
            && self.trainer.parallel.config().of_pass() == 1
            && self.trainer.parallel.expert <= 1
            && reach_each_other(&trainer, self.trainer.ranks);
        let optimizer_on_device = on_device && (trainer.len() == 1 || meets);
        Devices {
            rollout: rollouts.first().copied().unwrap_or(rollout),
            rollouts,
            reference: trainer.iter().any(Option::is_some) && self.has_own_reference(),
            trainer,
            optimizer_on_device,
            meets,
        }
    }

    /// The number format of weights and activations on the device.
    #[must_use]
    pub fn dtype_on(&self, place: Option<DeviceLocation>) -> DeviceDtype {
        match (self.dtype, place) {
            (_, None) | (ModelDtype::F32, _) | (ModelDtype::Auto, Some(DeviceLocation::Emulated)) => {
                DeviceDtype::F32
            }
            (ModelDtype::Bf16, Some(_)) | (ModelDtype::Auto, Some(DeviceLocation::Cuda(_))) => {
                DeviceDtype::Bf16
            }
        }
    }
}

impl Recipe {
    /// Where the ranks of the trainer compute; `None` for the processor.
    #[must_use]
    pub fn trains_on(&self) -> Option<DeviceConfig> {
        let devices = self.devices();
        let places: Vec<DeviceLocation> = devices.trainer.iter().copied().flatten().collect();
        let optimizer = match self.placement.optimizer {
            PlaceWord::Device => OptimizerPlace::Device,
            PlaceWord::Host => OptimizerPlace::Host,
        };
        let frozen = match self.placement.reference_weights {
            PlaceWord::Device => FrozenPlace::Device,
            PlaceWord::Host => FrozenPlace::Host,
        };
        let (place, collective) = (*places.first()?, self.collective());
        let dtype = self.dtype_on(Some(place));
        Some(DeviceConfig { place, dtype, places: places.into(), optimizer, collective, frozen })
    }

    /// Where ranks exchange. What they share on their devices cannot leave for a sampler, so those that take turns with one
    /// exchange through the host.
    pub(crate) fn collective(&self) -> CollectivePlace {
        match self.trainer.collective {
            _ if self.is_colocated() => CollectivePlace::Host,
            CollectiveWord::Auto => CollectivePlace::Auto,
            CollectiveWord::Device => CollectivePlace::Device,
            CollectiveWord::Host => CollectivePlace::Host,
        }
    }

    /// Where a sampler's weights are served, on a separate stream.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub fn serve_on(&self) -> Result<ServeOn, DeviceError> {
        self.serve_as(self.rollout.quantization)
    }

    /// The same for answers of the policy as it is trained, however coarsely it is sampled from.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub fn evaluate_on(&self) -> Result<ServeOn, DeviceError> {
        self.serve_as(Quantization::None)
    }

    /// The ranks that share the weights of a sampler.
    #[must_use]
    pub fn sampler_ranks(&self) -> SamplerRanks {
        SamplerRanks { degree: self.rollout.tensor, wait: self.wait() }
    }

    fn serve_as(&self, quantization: Quantization) -> Result<ServeOn, DeviceError> {
        let place = self.devices().rollout;
        Ok(match place {
            None if self.rollout.tensor > 1 => ServeOn::Ranks(self.sampler_ranks()),
            None => ServeOn::Host(quantization),
            Some(at) => ServeOn::Device(Device::open(at)?, self.dtype_on(place)),
        })
    }
}

/// The GPU `rank` places after this one.
fn further(first: DeviceWord, rank: usize) -> DeviceWord {
    match first {
        DeviceWord::At(DeviceLocation::Cuda(ordinal)) => {
            DeviceWord::At(DeviceLocation::Cuda(ordinal.saturating_add(rank)))
        }
        DeviceWord::Cpu | DeviceWord::At(DeviceLocation::Emulated) => first,
    }
}
