//! Weights that stay on devices: from the trainer's device to those of samplers, without the host.
//!
//! ```text
//!   colocated   the trainer's weights --copy--> a sampler's spare buffer, in the same process
//!   cuda-ipc    the trainer's weights --copy--> slot 0 | 1 --copy--> a sampler's spare buffer, in another process
//!   nccl        every owner's shard --broadcast in buckets--> the spare buffers of all samplers, on other GPUs
//! ```
//! Double buffering: new weights are received into a spare buffer, on a separate stream (a second [`Device::open`] of
//! the same device), and a sampler swaps buffers between two decode steps.
//!
//! The [`Hub`] is the control plane: newest version, receipts, lags. The digest of device weights is BLAKE3 over the
//! stored weights (bf16 as two bytes), computed on the device.
//!
//! - [`colocated`], [`ipc`], [`nccl`]: the transports; [`round`]: the members and shards of a broadcast
//! - `hub_connection`: a sampler's connection to the hub; `spare_buffers`: reused buffers
//!
//! Invariants:
//! - A buffer that a sampler decodes from is not written.
//! - A receipt has the digest of the sampler's own buffer.
//! - Every wait for a peer has a deadline, and an error names the peers that it waited for.

pub mod colocated;
mod hub_connection;
pub mod ipc;
pub mod nccl;
pub mod round;
mod spare_buffers;
#[cfg(all(test, feature = "emulator"))]
mod tests;

use std::time::{Duration, Instant};

use device::{Device, DeviceBuffer, DeviceError, Storage, View};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use self::round::BroadcastRound;
use crate::hub::{PublicationStatus, PublishedVersion};
use crate::publisher::same;
use crate::{Digest, Dtype, Hub, Lag, Receipt, Received, WeightsError};

/// Publisher side: the trainer, with weights on a device.
pub trait DevicePublisher<T: Storage>: Send + Sync {
    /// Publishes a version to all subscribers, as [`Publisher::publish`](crate::Publisher::publish). `values` are
    /// `[parameters]` weights in the canonical order of the model, and may change after the return.
    ///
    /// # Errors
    /// A version that is not newer than the last and was not published; the same version with other weights; an
    /// earlier mismatch; samplers that do not release memory; a device that fails.
    fn publish(&self, version: PolicyVersion, values: View<'_, T>) -> Result<(), WeightsError>;

    /// Sends the newest version to samplers that subscribed since, if the transport requires it; whether it did.
    /// `values` must be the published `[parameters]` weights. Call it between steps, and while waiting for samplers.
    ///
    /// # Errors
    /// As [`DevicePublisher::publish`].
    fn resend(&self, values: View<'_, T>) -> Result<bool, WeightsError>;

    /// What the last push cost; `None` before the first.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a push.
    fn last_push(&self) -> Result<Option<DevicePush>, WeightsError>;

    /// The hub.
    fn hub(&self) -> &Hub;

    /// The publisher as a broadcast publisher, if several shard owners can send through it.
    fn broadcasting(&self) -> Option<&nccl::NcclPublisher<T>> {
        None
    }

    /// As [`Publisher::wait_applied`](crate::Publisher::wait_applied).
    ///
    /// # Errors
    /// [`WeightsError::NotApplied`], which names the late subscribers; an earlier mismatch.
    fn wait_applied(&self, version: PolicyVersion, wait: Duration) -> Result<(), WeightsError> {
        self.hub().wait_applied(version, wait)
    }

    /// As [`Publisher::lags`](crate::Publisher::lags).
    ///
    /// # Errors
    /// An earlier mismatch.
    fn lags(&self) -> Result<Vec<Lag>, WeightsError> {
        self.hub().lags()
    }
}

/// Subscriber side: one sampler, on another thread than its decoding. Dropping it unsubscribes.
pub trait DeviceSubscriber<T: Storage>: Send + Sync {
    /// The newest version in a buffer of the sampler, as soon as it is newer than `after`; `None` if none came within
    /// `wait`.
    ///
    /// # Errors
    /// An earlier mismatch; [`WeightsError::PublisherGone`] if nothing newer will ever come; a device that fails.
    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<DeviceWeights<T>>, WeightsError>;

    /// The same without a wait for the next version.
    ///
    /// # Errors
    /// As [`DeviceSubscriber::wait_newer`].
    fn newest(&self, after: Option<PolicyVersion>) -> Result<Option<DeviceWeights<T>>, WeightsError> {
        self.wait_newer(after, Duration::ZERO)
    }

    /// Returns a buffer for reuse, such as that of the previous version, once no work on any stream reads it.
    /// Otherwise every version allocates memory.
    fn give_back(&self, values: DeviceBuffer<T>);

    /// As [`Subscriber::applied`](crate::Subscriber::applied).
    ///
    /// # Errors
    /// As [`Subscriber::applied`](crate::Subscriber::applied).
    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError>;
}

/// The weights of one version on a device.
#[derive(Debug)]
pub struct DeviceWeights<T: Storage> {
    /// The version.
    pub version: PolicyVersion,
    /// `[parameters]` weights, flat, in the canonical order of the model.
    pub values: DeviceBuffer<T>,
    /// Their digest, computed on the device.
    pub digest: Digest,
    /// Cost of receiving them.
    pub received: Received,
}

impl<T: Storage> DeviceWeights<T> {
    /// The receipt once they are decoded from, if the decoding was stopped for `stalled`.
    #[must_use]
    pub fn receipt(&self, stalled: Duration) -> Receipt {
        let Received { bytes, took } = self.received;
        Receipt { version: self.version, digest: self.digest, took: took + stalled, stalled, bytes, taken: 0 }
    }
}

/// Cost of a push from a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DevicePush {
    /// The version.
    pub version: PolicyVersion,
    /// Bytes of the weights.
    pub bytes: u64,
    /// Time until samplers could read it, or had received it.
    pub moved: Duration,
    /// Total time, with the digest.
    pub took: Duration,
    /// Number of attempts.
    pub attempts: usize,
}

/// How samplers get a version that is on a device, in the hub's announcement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WeightsLocation {
    /// Its dtype.
    dtype: String,
    /// The slot to open on this host.
    #[serde(default)]
    slot: Option<ipc::SlotAddress>,
    /// The broadcast that sends it.
    #[serde(default)]
    round: Option<BroadcastRound>,
}

/// A push notice: a version on a device, as announced to a subscriber.
#[derive(Clone, Debug)]
pub(crate) struct PushNotice {
    pub(crate) version: PolicyVersion,
    pub(crate) parameters: usize,
    pub(crate) direct: WeightsLocation,
}

impl WeightsLocation {
    /// Weights of type `T` within the process.
    fn within<T: Storage>() -> Self {
        Self { dtype: dtype::<T>().as_str().to_owned(), slot: None, round: None }
    }

    /// The number of its broadcast round; 0 without one.
    pub(crate) fn round_number(&self) -> u64 {
        self.round.as_ref().map_or(0, |round| round.number)
    }
}

impl PushNotice {
    /// Checks that the weights have the subscriber's type.
    fn check<T: Storage>(&self, transport: &'static str) -> Result<(), WeightsError> {
        let wanted = dtype::<T>().as_str();
        if self.direct.dtype == wanted {
            return Ok(());
        }
        let what = format!("it is stored in {}, and {wanted} is expected", self.direct.dtype);
        Err(WeightsError::OtherWay { version: self.version, transport, what })
    }
}

/// The dtype of `T` in a recipe.
fn dtype<T: Storage>() -> Dtype {
    if T::NARROW { Dtype::Bf16 } else { Dtype::F32 }
}

/// BLAKE3 over `[n]` weights as stored on the device. Waits for the device.
///
/// # Errors
/// A device that fails.
pub fn digest<T: Storage>(device: &Device, values: View<'_, T>) -> Result<Digest, WeightsError> {
    device::ops::digest::digest(device, values).map(Digest::from_bytes).map_err(failed("digest weights"))
}

/// Turns an error of a device into one of this crate.
fn failed(what: &'static str) -> impl Fn(DeviceError) -> WeightsError {
    move |error| WeightsError::Device { what, reason: error.to_string() }
}

/// Whether a version is new; a version that was published is compared.
fn is_new<T: Storage>(
    hub: &Hub,
    device: &Device,
    version: PolicyVersion,
    values: View<'_, T>,
) -> Result<bool, WeightsError> {
    match hub.known(version)? {
        PublicationStatus::New => Ok(true),
        PublicationStatus::Published(before) => {
            same(version, before, digest(device, values)?).map(|()| false)
        }
    }
}

/// Announces a version that samplers can read, then computes its digest.
fn announce<T: Storage>(
    hub: &Hub,
    device: &Device,
    version: PolicyVersion,
    location: WeightsLocation,
    values: View<'_, T>,
    started: Instant,
) -> Result<DevicePush, WeightsError> {
    hub.announce(PublishedVersion::Device(version, values.len(), location))?;
    let moved = started.elapsed();
    hub.digested(version, digest(device, values)?)?;
    hub.settle(None)?;
    let bytes = (values.len() * size_of::<T>()) as u64;
    Ok(DevicePush { version, bytes, moved, took: started.elapsed(), attempts: 1 })
}
