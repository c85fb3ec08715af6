//! Where new versions go: to samplers that take them from the host, or from the trainer's device.
//!
//! Invariant: what is published is what the next step starts from, whichever way it goes.

use std::sync::Arc;

use device::bf16;
use trajectory::PolicyVersion;
use weights::{DevicePublisher, Publisher, Snapshot};

use crate::TrainerError;
use crate::learner::Learner;
use crate::on_device::DeviceWeights;

/// The trainer's end of the backward edge.
#[derive(Clone)]
pub enum Publishing {
    /// Through memory of the host.
    Host(Arc<dyn Publisher>),
    /// From the device, in f32.
    F32(Arc<dyn DevicePublisher<f32>>),
    /// From the device, in bf16.
    Bf16(Arc<dyn DevicePublisher<bf16>>),
}

impl std::fmt::Debug for Publishing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Host(_) => "Host",
            Self::F32(_) => "F32",
            Self::Bf16(_) => "Bf16",
        })
    }
}

impl Publishing {
    /// Publishes the weights of `learner` as `version`.
    ///
    /// # Errors
    /// If the transport fails, or the weights are not where they are to be published from.
    pub(crate) fn publish(&self, version: PolicyVersion, learner: &Learner) -> Result<(), TrainerError> {
        match (self, learner.device_weights()) {
            // The one copy of the weights, straight into the memory that the samplers share, by whoever has them.
            (Self::Host(publisher), _) => match learner.whole()? {
                Some(whole) => publisher.publish_values(version, whole.values())?,
                None => publisher.publish(Snapshot::new(version, learner.snapshot()?.into()))?,
            },
            (Self::F32(publisher), Some((device, DeviceWeights::F32(values)))) => {
                // They are copied on another stream than the one that has made them.
                device.synchronize()?;
                publisher.publish(version, values)?;
            }
            (Self::Bf16(publisher), Some((device, DeviceWeights::Bf16(values)))) => {
                device.synchronize()?;
                publisher.publish(version, values)?;
            }
            (Self::F32(_) | Self::Bf16(_), _) => return Err(TrainerError::NotOnDevice),
        }
        Ok(())
    }

    /// Sends the version that `learner` has published last to samplers that have come since, if its way has to be told. The
    /// weights are those that were published, and still where they were, as long as no update begins.
    ///
    /// # Errors
    /// If the transport fails.
    pub(crate) fn resend(&self, learner: &Learner) -> Result<(), TrainerError> {
        match (self, learner.device_weights()) {
            (Self::F32(publisher), Some((_, DeviceWeights::F32(values)))) => publisher.resend(values)?,
            (Self::Bf16(publisher), Some((_, DeviceWeights::Bf16(values)))) => publisher.resend(values)?,
            // Whoever comes finds it on the host.
            _ => false,
        };
        Ok(())
    }
}
