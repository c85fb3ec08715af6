//! The backward edge of a run: through memory of the host, or from device to device within this process.
//!
//! Invariant: publisher and sampler are made for the same way, by the same rule.

use std::sync::Arc;

use device::{Device, bf16};
use model::on_device::Dtype;
use rollout::applier::Incoming;
use trainer::Publishing;
use weights::direct::colocated::DeviceMemory;
use weights::{DevicePublisher, DevicePush, Hub, HubPublisher, Lag, Publisher, PushCost, WeightsError};

use crate::failure::Failure;
use crate::recipe::Recipe;

/// Name of the sampler of this process.
const INSIDE: &str = "sampler 0";

/// What versions are published through.
pub(super) enum Push {
    Host(Arc<HubPublisher>),
    F32(Arc<DeviceMemory<f32>>),
    Bf16(Arc<DeviceMemory<bf16>>),
}

impl Push {
    /// The publisher of a run; `served` if samplers of other machines may come.
    pub(super) fn new(recipe: &Recipe, hub: &Hub, served: bool, alone: bool) -> Result<Self, Failure> {
        let devices = recipe.devices();
        let trainer = devices.trainer.first().copied().flatten();
        let direct = alone
            && recipe.trainer.world == 1
            && !recipe.is_colocated()
            && !served
            && devices.rollout.is_some()
            && recipe.dtype_on(devices.rollout) == recipe.dtype_on(trainer);
        let Some(place) = trainer.filter(|_| direct) else {
            return Ok(Self::Host(Arc::new(HubPublisher::new(hub.clone(), recipe.publish(served))?)));
        };
        // Copies are made on a stream of their own, after what the trainer was waited for.
        let device = Device::open(place)?;
        Ok(match recipe.dtype_on(trainer) {
            Dtype::F32 => Self::F32(Arc::new(DeviceMemory::new(hub.clone(), &device))),
            Dtype::Bf16 => Self::Bf16(Arc::new(DeviceMemory::new(hub.clone(), &device))),
        })
    }

    /// The trainer's end.
    pub(super) fn publishing(&self) -> Publishing {
        match self {
            Self::Host(publisher) => Publishing::Host(Arc::clone(publisher) as Arc<dyn Publisher>),
            Self::F32(memory) => Publishing::F32(Arc::clone(memory) as Arc<dyn DevicePublisher<f32>>),
            Self::Bf16(memory) => Publishing::Bf16(Arc::clone(memory) as Arc<dyn DevicePublisher<bf16>>),
        }
    }

    /// The end of the sampler of this process, which runs `model`.
    pub(super) fn incoming(
        &self,
        recipe: &Recipe,
        hub: &Hub,
        model: &model::Config,
    ) -> Result<Incoming, Failure> {
        let open = || recipe.devices().rollout.map(Device::open).transpose();
        Ok(match (self, self.is_direct().then(open).transpose()?.flatten()) {
            (Self::F32(memory), Some(device)) => Incoming::F32(Arc::new(memory.subscribe(INSIDE, &device)?)),
            (Self::Bf16(memory), Some(device)) => {
                Incoming::Bf16(Arc::new(memory.subscribe(INSIDE, &device)?))
            }
            _ => Incoming::Host {
                subscriber: Arc::new(hub.subscribe(INSIDE)?),
                config: model.clone(),
                // What comes next is uploaded on another stream than that on which the engine goes on.
                on: recipe.serve_on()?,
            },
        })
    }

    fn is_direct(&self) -> bool {
        !matches!(self, Self::Host(_))
    }

    /// How far samplers are behind.
    pub(super) fn lags(&self) -> Result<Vec<Lag>, WeightsError> {
        match self {
            Self::Host(publisher) => publisher.lags(),
            Self::F32(memory) => memory.lags(),
            Self::Bf16(memory) => memory.lags(),
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
            Self::F32(memory) => memory.last_push()?.map(cost),
            Self::Bf16(memory) => memory.last_push()?.map(cost),
        })
    }
}
