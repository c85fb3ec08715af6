//! How weights go from the trainer to the samplers: through memory of the host, or from device to device.
//!
//! Invariant: the publisher, the local sampler and samplers in other processes get their transport in this file.

use std::path::PathBuf;
use std::sync::Arc;

use device::device::DeviceLocation;
use device::{Device, Storage, bf16};
use model::on_device::DeviceDtype;
use rollout::ServeOn;
use rollout::applier::WeightSource;
use trainer::WeightPublisher;
use weights::direct::colocated::ColocatedPublisher;
use weights::direct::ipc::{IpcConfig, IpcPublisher, IpcSubscriber};
use weights::direct::nccl::{NcclConfig, NcclPublisher, NcclSubscriber};
use weights::http::RemoteConfig;
use weights::{
    DevicePublisher, DevicePush, DeviceSubscriber, Distribution, Dtype, Hub, HubPublisher, Lag, Publisher,
    PushCost, WeightsError,
};

use super::samplers::SAMPLER_NAME;
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::recipe::words::{Ranks, WeightTransport};
use crate::settings::SHARED_MEMORY;

/// The publisher of a run.
pub(super) enum WeightPublishing {
    Host(Arc<HubPublisher>),
    F32(DevicePublishing<f32>),
    Bf16(DevicePublishing<bf16>),
}

/// From device to device.
pub(super) struct DevicePublishing<T: Storage> {
    publisher: Arc<dyn DevicePublisher<T>>,
    local: LocalSubscription<T>,
}

/// How the local sampler gets the weights.
enum LocalSubscription<T: Storage> {
    /// The publisher copies them.
    Copy(Arc<ColocatedPublisher<T>>),
    /// A member of the broadcast.
    Broadcast,
    /// There is no local sampler: CUDA IPC cannot open memory of the same process.
    None,
}

/// Transports between devices.
#[derive(Clone, Copy)]
enum DeviceTransport {
    Memory,
    Ipc,
    Nccl,
}

/// The subscription of a sampler in another process to weights that are sent from device to device.
pub(crate) fn remote_subscriber<T: Storage>(
    transport: WeightTransport,
    remote: RemoteConfig,
    device: &Device,
) -> Result<Arc<dyn DeviceSubscriber<T>>, WeightsError> {
    Ok(match transport {
        WeightTransport::Nccl => Arc::new(NcclSubscriber::connect(remote, device)?),
        _ => Arc::new(IpcSubscriber::connect(remote, device)?),
    })
}

impl<T: Storage> DevicePublishing<T> {
    /// Copies run on a stream of their own, after a synchronization with the trainer's stream.
    fn new(
        recipe: &Recipe,
        hub: &Hub,
        place: DeviceLocation,
        transport: DeviceTransport,
    ) -> Result<Self, Failure> {
        let (hub, device) = (hub.clone(), Device::open(place)?);
        let (publisher, local): (Arc<dyn DevicePublisher<T>>, _) = match transport {
            DeviceTransport::Memory => {
                let memory = Arc::new(ColocatedPublisher::new(hub, &device));
                (Arc::clone(&memory) as _, LocalSubscription::Copy(memory))
            }
            DeviceTransport::Ipc => {
                let config = IpcConfig { directory: PathBuf::from(SHARED_MEMORY), wait: recipe.wait() };
                (Arc::new(IpcPublisher::new(hub, &device, &config)?), LocalSubscription::None)
            }
            DeviceTransport::Nccl => {
                let elsewhere = recipe.trainer.ranks != Ranks::Threads && recipe.trainer.world > 1;
                // Ranks in other processes do not learn that a sampler has left. They join the broadcast and time out, which
                // has to happen before the first rank times out on them.
                let deadline = if elsewhere { recipe.wait() / 3 } else { recipe.wait() };
                let config = NcclConfig { deadline, ..NcclConfig::default() };
                (Arc::new(NcclPublisher::new(hub, &device, config)), LocalSubscription::Broadcast)
            }
        };
        Ok(Self { publisher, local })
    }

    fn subscribe(&self, recipe: &Recipe) -> Result<Option<Arc<dyn DeviceSubscriber<T>>>, Failure> {
        let Some(place) = recipe.devices().rollout else { return Ok(None) };
        Ok(match &self.local {
            LocalSubscription::Copy(memory) => {
                Some(Arc::new(memory.subscribe(SAMPLER_NAME, &Device::open(place)?)?))
            }
            LocalSubscription::Broadcast => {
                let device = Device::open(place)?;
                Some(Arc::new(NcclSubscriber::within(self.publisher.hub(), SAMPLER_NAME, &device)?))
            }
            LocalSubscription::None => None,
        })
    }
}

impl WeightPublishing {
    /// The publisher of a run; `served`: rollout workers may join; `local`: this process has a sampler.
    pub(super) fn new(recipe: &Recipe, hub: &Hub, served: bool, local: bool) -> Result<Self, Failure> {
        let devices = recipe.devices();
        let trainer = devices.trainer.first().copied().flatten();
        let direct = local
            && !served
            && !recipe.has_quantized_base()
            && !recipe.is_colocated()
            && devices.trainer.len() == 1
            && devices.rollout.is_some()
            && recipe.dtype_on(devices.rollout) == recipe.dtype_on(trainer);
        let transport = match recipe.weights.transport {
            WeightTransport::CudaIpc => Some(DeviceTransport::Ipc),
            WeightTransport::Nccl => Some(DeviceTransport::Nccl),
            WeightTransport::Auto | WeightTransport::Http => direct.then_some(DeviceTransport::Memory),
        };
        let Some((place, transport)) = trainer.zip(transport) else {
            return Ok(Self::Host(Arc::new(HubPublisher::new(hub.clone(), recipe.publish(served))?)));
        };
        Ok(match recipe.dtype_on(trainer) {
            DeviceDtype::F32 => Self::F32(DevicePublishing::new(recipe, hub, place, transport)?),
            DeviceDtype::Bf16 => Self::Bf16(DevicePublishing::new(recipe, hub, place, transport)?),
        })
    }

    /// What published weights are rounded to; a device keeps them as it has them.
    pub(super) fn dtype(&self, recipe: &Recipe) -> Dtype {
        match self {
            Self::Host(_) => recipe.hub().dtype,
            Self::F32(_) | Self::Bf16(_) => Dtype::F32,
        }
    }

    /// The publisher, for the trainer.
    pub(super) fn publishing(&self) -> WeightPublisher {
        match self {
            Self::Host(publisher) => WeightPublisher::Host(Arc::clone(publisher) as Arc<dyn Publisher>),
            Self::F32(direct) => WeightPublisher::F32(Arc::clone(&direct.publisher)),
            Self::Bf16(direct) => WeightPublisher::Bf16(Arc::clone(&direct.publisher)),
        }
    }

    /// The subscription of the local sampler, which runs `model` and serves it `on`.
    pub(super) fn incoming(
        &self,
        recipe: &Recipe,
        hub: &Hub,
        model: &model::Config,
        on: ServeOn,
    ) -> Result<WeightSource, Failure> {
        let direct = match self {
            Self::Host(_) => None,
            Self::F32(direct) => direct.subscribe(recipe)?.map(WeightSource::F32),
            Self::Bf16(direct) => direct.subscribe(recipe)?.map(WeightSource::Bf16),
        };
        if let Some(direct) = direct {
            return Ok(direct);
        }
        Ok(WeightSource::Host {
            subscriber: Arc::new(hub.subscribe(SAMPLER_NAME)?),
            config: Arc::new(model.clone()),
            on,
        })
    }

    /// The lag of every sampler.
    pub(super) fn lags(&self) -> Result<Vec<Lag>, WeightsError> {
        match self {
            Self::Host(publisher) => publisher.lags(),
            Self::F32(direct) => direct.publisher.lags(),
            Self::Bf16(direct) => direct.publisher.lags(),
        }
    }

    /// How versions have been sent so far.
    pub(super) fn distribution(&self) -> Result<Distribution, WeightsError> {
        match self {
            Self::Host(publisher) => publisher.hub().distribution(),
            Self::F32(direct) => direct.publisher.hub().distribution(),
            Self::Bf16(direct) => direct.publisher.hub().distribution(),
        }
    }

    /// The cost of the last push.
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
