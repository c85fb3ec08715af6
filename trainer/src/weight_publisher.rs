//! Publishes new policy versions to samplers, from host memory or from the trainer's device.
//!
//! Invariant: the published weights are those that the next step starts from, for every transport.

use std::io;
use std::path::Path;
use std::sync::Arc;

use device::{Device, Storage, View, bf16};
use model::{ModelError, Parameters};
use trajectory::PolicyVersion;
use weights::direct::nccl::NcclPublisher;
use weights::direct::round::PushPlan;
use weights::{DevicePublisher, Digest, Hub, Publisher, Snapshot, WeightAdapter, WeightMemory, WeightsError};

use crate::TrainerError;
use crate::learner::Learner;
use crate::lora::Adapter;
use crate::lora_files;
use crate::on_device::LearnerWeights;

/// The trainer's weight publisher.
#[derive(Clone)]
pub enum WeightPublisher {
    /// From host memory.
    Host(Arc<dyn Publisher>),
    /// From the device, f32.
    F32(Arc<dyn DevicePublisher<f32>>),
    /// From the device, bf16.
    Bf16(Arc<dyn DevicePublisher<bf16>>),
}

impl std::fmt::Debug for WeightPublisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Host(_) => "Host",
            Self::F32(_) => "F32",
            Self::Bf16(_) => "Bf16",
        })
    }
}

impl WeightPublisher {
    /// Publishes the weights of `learner` as `version`; only its factors if the base stays quantised.
    ///
    /// # Errors
    /// If the transport fails, or the learner does not have the weights where the transport needs them.
    pub(crate) fn publish(&self, version: PolicyVersion, learner: &Learner) -> Result<(), TrainerError> {
        if let (Self::Host(publisher), Some(policy)) = (self, learner.adapted()) {
            let factors: Arc<[f32]> = policy.factors().values().into();
            let snapshot = Snapshot::new(version, factors.into());
            publisher.publish(snapshot.with_adapter(published_adapter(learner)))?;
            return Ok(());
        }
        match (self, learner.device_weights()) {
            (Self::Host(publisher), _) => match learner.whole()? {
                Some(whole) => {
                    let (parameters, adapter) = (Arc::clone(whole), published_adapter(learner));
                    publisher.publish_shared(version, Arc::new(SharedParameters { parameters, adapter }))?;
                }
                None => {
                    let adapter = published_adapter(learner);
                    if let Some(owners) = learner.owned_by_rank()? {
                        publisher.publish_owned(version, owners, adapter)?;
                    } else if learner.write_shards(&**publisher, version)? {
                        publisher.commit(version, adapter)?;
                    } else {
                        let snapshot = Snapshot::new(version, learner.snapshot()?.into());
                        publisher.publish(snapshot.with_adapter(adapter))?;
                    }
                }
            },
            (Self::F32(publisher), Some((device, LearnerWeights::F32(values)))) => {
                publish_from(&**publisher, version, learner, device, values)?;
            }
            (Self::Bf16(publisher), Some((device, LearnerWeights::Bf16(values)))) => {
                publish_from(&**publisher, version, learner, device, values)?;
            }
            (Self::F32(_) | Self::Bf16(_), _) => return Err(TrainerError::NotOnDevice),
        }
        Ok(())
    }

    /// Lets go of published weights that no subscriber will ask for, so that the next update need not copy them.
    ///
    /// # Errors
    /// If a thread of the publisher has panicked.
    pub(crate) fn drop_taken(&self) -> Result<(), TrainerError> {
        if let Self::Host(publisher) = self {
            publisher.drop_taken()?;
        }
        Ok(())
    }

    /// Sends the last published version to samplers that subscribed after it, for transports that do not serve it on
    /// request. The weights are unchanged until the next update begins.
    ///
    /// # Errors
    /// If the transport fails.
    pub(crate) fn resend(&self, learner: &Learner) -> Result<(), TrainerError> {
        match (self, learner.device_weights()) {
            (Self::F32(publisher), Some((_, LearnerWeights::F32(values)))) => {
                resend_from(&**publisher, learner, values)?
            }
            (Self::Bf16(publisher), Some((_, LearnerWeights::Bf16(values)))) => {
                resend_from(&**publisher, learner, values)?
            }
            // New subscribers read it from the host.
            _ => false,
        };
        Ok(())
    }
}

/// The weights of a learner as published. The learner copies them before it changes them while they are referenced here.
struct SharedParameters {
    parameters: Arc<Parameters>,
    adapter: Option<Arc<dyn WeightAdapter>>,
}

impl WeightMemory for SharedParameters {
    fn values(&self) -> &[f32] {
        self.parameters.values()
    }

    fn adapter(&self) -> Option<Arc<dyn WeightAdapter>> {
        self.adapter.clone()
    }
}

/// A copy of the adapter of a learner as published, without the frozen weights.
#[derive(Debug)]
struct PublishedAdapter(Adapter);

impl WeightAdapter for PublishedAdapter {
    fn write(&self, directory: &Path) -> io::Result<()> {
        // The engine that reads it has the base model already.
        lora_files::write(directory, &self.0, "").map_err(|error| match error {
            ModelError::Write { source, .. } => source,
            error => io::Error::other(error),
        })
    }
}

fn published_adapter(learner: &Learner) -> Option<Arc<dyn WeightAdapter>> {
    let adapter = learner.adapter()?.without_base();
    Some(Arc::new(PublishedAdapter(adapter)))
}

/// Publishes from the device of a single rank, or by all ranks, a shard each.
fn publish_from<T: Storage>(
    publisher: &dyn DevicePublisher<T>,
    version: PolicyVersion,
    learner: &Learner,
    device: &Device,
    values: View<'_, T>,
) -> Result<(), TrainerError> {
    // The copy may run on another stream than the update.
    device.synchronize()?;
    match by_all(publisher, learner) {
        Some(all) => {
            together(learner, publisher.hub(), |send| all.publish_shards(version, &learner.push_cuts(), send))
        }
        None => Ok(publisher.publish(version, values)?),
    }
}

fn resend_from<T: Storage>(
    publisher: &dyn DevicePublisher<T>,
    learner: &Learner,
    values: View<'_, T>,
) -> Result<bool, TrainerError> {
    match by_all(publisher, learner) {
        Some(all) => together(learner, publisher.hub(), |send| all.resend_shards(send)),
        None => Ok(publisher.resend(values)?),
    }
}

/// The NCCL publisher, if all ranks send their shards.
fn by_all<'a, T: Storage>(
    publisher: &'a dyn DevicePublisher<T>,
    learner: &Learner,
) -> Option<&'a NcclPublisher<T>> {
    publisher.broadcasting().filter(|_| learner.meets_on_devices().is_some())
}

/// Runs `push`, for whose plans all ranks send their shards.
fn together<R>(
    learner: &Learner,
    hub: &Hub,
    push: impl FnOnce(&mut dyn FnMut(&PushPlan) -> Result<Vec<Digest>, WeightsError>) -> Result<R, WeightsError>,
) -> Result<R, TrainerError> {
    // A rank that has ended makes further attempts fail.
    let mut ended: Option<TrainerError> = None;
    let mut send = |plan: &PushPlan| {
        let sent = match ended {
            None => learner.send(plan, hub),
            Some(_) => Err(TrainerError::RanksEnded),
        };
        sent.unwrap_or_else(|error| {
            let reason = error.to_string();
            ended.get_or_insert(error);
            Err(WeightsError::Device { what: "send weights", reason })
        })
    };
    let pushed = push(&mut send);
    match ended {
        Some(error) => Err(error),
        None => Ok(pushed?),
    }
}

#[cfg(test)]
mod tests;
