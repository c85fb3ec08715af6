//! The backward edge of a run: through memory of the host, or from device to device.
//!
//! Invariant: publisher and sampler are made for the same way, by the same rule.

use std::path::PathBuf;
use std::sync::Arc;

use device::device::DeviceLocation;
use device::{Device, Storage, bf16};
use model::on_device::Dtype;
use rollout::applier::Incoming;
use trainer::WeightPublisher;
use weights::direct::colocated::ColocatedPublisher;
use weights::direct::ipc::{IpcConfig, IpcPublisher};
use weights::direct::nccl::{NcclConfig, NcclPublisher, NcclSubscriber};
use weights::{
    DevicePublisher, DevicePush, DeviceSubscriber, Hub, HubPublisher, Lag, Publisher, PushCost, WeightsError,
};

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::recipe::words::{Ranks, WeightTransport};
use crate::settings::SHARED_MEMORY;

/// Name of the sampler of this process.
const INSIDE: &str = "sampler 0";

/// What versions are published through.
pub(super) enum Push {
    Host(Arc<HubPublisher>),
    F32(Direct<f32>),
    Bf16(Direct<bf16>),
}

/// From device to device.
pub(super) struct Direct<T: Storage> {
    publisher: Arc<dyn DevicePublisher<T>>,
    inside: Inside<T>,
}

/// How the sampler of this process gets it.
enum Inside<T: Storage> {
    /// By a copy that the publisher makes.
    Memory(Arc<ColocatedPublisher<T>>),
    /// As a member of the broadcasts.
    Broadcast,
    /// There is none: it could not open memory of its own process.
    Nobody,
}

/// Ways between devices.
#[derive(Clone, Copy)]
enum Way {
    Memory,
    Ipc,
    Nccl,
}

impl<T: Storage> Direct<T> {
    /// Copies are made on a stream of their own, after what the trainer was waited for.
    fn new(recipe: &Recipe, hub: &Hub, place: DeviceLocation, way: Way) -> Result<Self, Failure> {
        let (hub, device) = (hub.clone(), Device::open(place)?);
        let (publisher, inside): (Arc<dyn DevicePublisher<T>>, _) = match way {
            Way::Memory => {
                let memory = Arc::new(ColocatedPublisher::new(hub, &device));
                (Arc::clone(&memory) as _, Inside::Memory(memory))
            }
            Way::Ipc => {
                let config = IpcConfig { directory: PathBuf::from(SHARED_MEMORY), wait: recipe.wait() };
                (Arc::new(IpcPublisher::new(hub, &device, &config)?), Inside::Nobody)
            }
            Way::Nccl => {
                let elsewhere = recipe.trainer.ranks != Ranks::Threads && recipe.trainer.world > 1;
                // Ranks elsewhere do not hear of a sampler that is gone. They join, wait for it and give up within the time
                // that the first rank waits for them.
                let deadline = if elsewhere { recipe.wait() / 3 } else { recipe.wait() };
                let config = NcclConfig { deadline, ..NcclConfig::default() };
                (Arc::new(NcclPublisher::new(hub, &device, config)), Inside::Broadcast)
            }
        };
        Ok(Self { publisher, inside })
    }

    fn subscribe(&self, recipe: &Recipe) -> Result<Option<Arc<dyn DeviceSubscriber<T>>>, Failure> {
        let Some(place) = recipe.devices().rollout else { return Ok(None) };
        Ok(match &self.inside {
            Inside::Memory(memory) => Some(Arc::new(memory.subscribe(INSIDE, &Device::open(place)?)?)),
            Inside::Broadcast => {
                let device = Device::open(place)?;
                Some(Arc::new(NcclSubscriber::within(self.publisher.hub(), INSIDE, &device)?))
            }
            Inside::Nobody => None,
        })
    }
}

impl Push {
    /// The publisher of a run; `served` if samplers of other machines may come.
    pub(super) fn new(recipe: &Recipe, hub: &Hub, served: bool, alone: bool) -> Result<Self, Failure> {
        let devices = recipe.devices();
        let trainer = devices.trainer.first().copied().flatten();
        let inside = alone
            && !served
            && !recipe.is_colocated()
            && devices.trainer.len() == 1
            && devices.rollout.is_some()
            && recipe.dtype_on(devices.rollout) == recipe.dtype_on(trainer);
        let way = match recipe.weights.transport {
            WeightTransport::CudaIpc => Some(Way::Ipc),
            WeightTransport::Nccl => Some(Way::Nccl),
            WeightTransport::Auto | WeightTransport::Http => inside.then_some(Way::Memory),
        };
        let Some((place, way)) = trainer.zip(way) else {
            return Ok(Self::Host(Arc::new(HubPublisher::new(hub.clone(), recipe.publish(served))?)));
        };
        Ok(match recipe.dtype_on(trainer) {
            Dtype::F32 => Self::F32(Direct::new(recipe, hub, place, way)?),
            Dtype::Bf16 => Self::Bf16(Direct::new(recipe, hub, place, way)?),
        })
    }

    /// The trainer's end.
    pub(super) fn publishing(&self) -> WeightPublisher {
        match self {
            Self::Host(publisher) => WeightPublisher::Host(Arc::clone(publisher) as Arc<dyn Publisher>),
            Self::F32(direct) => WeightPublisher::F32(Arc::clone(&direct.publisher)),
            Self::Bf16(direct) => WeightPublisher::Bf16(Arc::clone(&direct.publisher)),
        }
    }

    /// The end of the sampler of this process, which runs `model`.
    pub(super) fn incoming(
        &self,
        recipe: &Recipe,
        hub: &Hub,
        model: &model::Config,
    ) -> Result<Incoming, Failure> {
        let direct = match self {
            Self::Host(_) => None,
            Self::F32(direct) => direct.subscribe(recipe)?.map(Incoming::F32),
            Self::Bf16(direct) => direct.subscribe(recipe)?.map(Incoming::Bf16),
        };
        if let Some(direct) = direct {
            return Ok(direct);
        }
        // What comes next is uploaded on another stream than that on which the engine goes on.
        let on = recipe.serve_on()?;
        Ok(Incoming::Host {
            subscriber: Arc::new(hub.subscribe(INSIDE)?),
            config: Arc::new(model.clone()),
            on,
        })
    }

    /// How far samplers are behind.
    pub(super) fn lags(&self) -> Result<Vec<Lag>, WeightsError> {
        match self {
            Self::Host(publisher) => publisher.lags(),
            Self::F32(direct) => direct.publisher.lags(),
            Self::Bf16(direct) => direct.publisher.lags(),
        }
    }

    /// What the last push cost.
    pub(super) fn last(&self) -> Result<Option<PushCost>, WeightsError> {
        let cost = |push: DevicePush| PushCost {
            version: push.version,
            copied: push.moved,
            digested: push.took.saturating_sub(push.moved),
            encoded: std::time::Duration::ZERO,
            took: push.took,
            full_bytes: push.bytes,
            delta_bytes: None,
            density: None,
        };
        Ok(match self {
            Self::Host(publisher) => publisher.last_push()?,
            Self::F32(direct) => direct.publisher.last_push()?.map(cost),
            Self::Bf16(direct) => direct.publisher.last_push()?.map(cost),
        })
    }
}
