//! Weights that stay on devices: from the trainer's to those of samplers, never through the host.
//!
//! ```text
//!   colocated   the trainer's weights --copy--> a sampler's spare buffer, in the same process
//!   cuda-ipc    the trainer's weights --copy--> slot 0 | 1 --copy--> a sampler's spare buffer, in another process
//!   nccl        every owner's shard --broadcast in buckets--> the spare buffers of all samplers, on other GPUs
//! ```
//! What samplers decode from is not touched: new weights are made ready in a spare buffer, on a stream of its own (a second
//! [`Device::open`] of the same place), and a sampler takes them between two steps.
//!
//! The control plane is the [`Hub`] as ever: newest version, receipts, lags. A digest here is BLAKE3 over the
//! weights as they are stored (bf16 as two bytes), by the device.
//!
//! - [`colocated`], [`ipc`], [`nccl`]: the transports; [`round`]: what the members of a broadcast are told
//! - `control`: a sampler's line to the hub; `spares`: buffers that are used again
//!
//! Invariants:
//! - What a sampler holds is not written.
//! - A receipt has the digest of what lies in the sampler's own buffer.
//! - Every wait for a peer has a deadline, and one that gives up says for whom it waited.

pub mod colocated;
mod hub_connection;
pub mod ipc;
pub mod nccl;
pub mod round;
mod spare_buffers;
#[cfg(all(test, feature = "emulator"))]
mod tests;

use std::time::{Duration, Instant};

use device::{Buffer, Device, DeviceError, Storage, View};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use self::round::BroadcastRound;
use crate::hub::{PublicationStatus, PublishedVersion};
use crate::publisher::same;
use crate::{Digest, Dtype, Hub, Lag, Receipt, Received, WeightsError};

/// The side of the trainer.
pub trait DevicePublisher<T: Storage>: Send + Sync {
    /// Makes a version visible to all subscribers, as [`Publisher::publish`](crate::Publisher::publish) does. `values` are
    /// `[parameters]`, in the canonical order of the model, and free to change when this returns.
    ///
    /// # Errors
    /// A version that is not newer than the last and was not published; the same version with other weights; an earlier
    /// mismatch; samplers that do not give back memory; a device that fails.
    fn publish(&self, version: PolicyVersion, values: View<'_, T>) -> Result<(), WeightsError>;

    /// Sends the newest version to samplers that have come since, if the transport has to be told; whether it did. `values`
    /// must be those that were published. To be called between steps, and while samplers are waited for.
    ///
    /// # Errors
    /// As [`DevicePublisher::publish`].
    fn resend(&self, values: View<'_, T>) -> Result<bool, WeightsError>;

    /// What the last push cost; `None` before the first.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a push.
    fn last_push(&self) -> Result<Option<DevicePush>, WeightsError>;

    /// The hub that is published to.
    fn hub(&self) -> &Hub;

    /// The same publisher, if several owners can send a shard each through it.
    fn broadcasting(&self) -> Option<&nccl::NcclPublisher<T>> {
        None
    }

    /// As [`Publisher::wait_applied`](crate::Publisher::wait_applied).
    ///
    /// # Errors
    /// [`WeightsError::NotApplied`], which names who is behind; an earlier mismatch.
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

/// The side of one sampler, called beside its decoding. Dropping it unsubscribes.
pub trait DeviceSubscriber<T: Storage>: Send + Sync {
    /// The newest version, whole, in a buffer of the sampler's own, as soon as it is newer than `after`; `None` if none came
    /// within `wait`.
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

    /// Takes a buffer to receive later versions into, such as that of the version before, once no work that reads it is under
    /// way on any stream. Without that every version takes new memory.
    fn give_back(&self, values: Buffer<T>);

    /// As [`Subscriber::applied`](crate::Subscriber::applied).
    ///
    /// # Errors
    /// As [`Subscriber::applied`](crate::Subscriber::applied).
    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError>;
}

/// The weights of one version on a device.
#[derive(Debug)]
pub struct DeviceWeights<T: Storage> {
    /// Which version.
    pub version: PolicyVersion,
    /// `[parameters]` all weights, flat, in the canonical order of the model.
    pub values: Buffer<T>,
    /// What they were digested to where they lie.
    pub digest: Digest,
    /// What it took to get them here.
    pub received: Received,
}

impl<T: Storage> DeviceWeights<T> {
    /// What to report once they are decoded from, if the decoding stood still for `stalled`.
    #[must_use]
    pub fn receipt(&self, stalled: Duration) -> Receipt {
        let Received { bytes, took } = self.received;
        Receipt { version: self.version, digest: self.digest, took: took + stalled, stalled, bytes }
    }
}

/// What a push from a device cost its publisher.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DevicePush {
    /// Which version.
    pub version: PolicyVersion,
    /// Bytes of the weights.
    pub bytes: u64,
    /// Until samplers could read it, or had received it.
    pub moved: Duration,
    /// All of it, with the digest.
    pub took: Duration,
    /// Attempts that it took.
    pub attempts: usize,
}

/// How samplers get a version that is on a device, as the hub tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WeightsLocation {
    /// What it is stored in.
    dtype: String,
    /// Where it can be opened on this host.
    #[serde(default)]
    slot: Option<ipc::SlotAddress>,
    /// Who broadcasts it to whom.
    #[serde(default)]
    round: Option<BroadcastRound>,
}

/// A version on a device, as a subscriber is told of it.
#[derive(Clone, Debug)]
pub(crate) struct PushNotice {
    pub(crate) version: PolicyVersion,
    pub(crate) parameters: usize,
    pub(crate) direct: WeightsLocation,
}

impl WeightsLocation {
    /// Weights of `T` that nobody else can reach.
    fn within<T: Storage>() -> Self {
        Self { dtype: dtype::<T>().as_str().to_owned(), slot: None, round: None }
    }

    /// The number of its round; 0 if there is none.
    pub(crate) fn round_number(&self) -> u64 {
        self.round.as_ref().map_or(0, |round| round.number)
    }
}

impl PushNotice {
    /// Checks that the weights are of the type that the subscriber wants.
    fn check<T: Storage>(&self, transport: &'static str) -> Result<(), WeightsError> {
        let wanted = dtype::<T>().as_str();
        if self.direct.dtype == wanted {
            return Ok(());
        }
        let what = format!("it is stored in {}, and {wanted} is expected", self.direct.dtype);
        Err(WeightsError::OtherWay { version: self.version, transport, what })
    }
}

/// What `T` is to a recipe.
fn dtype<T: Storage>() -> Dtype {
    if T::NARROW { Dtype::Bf16 } else { Dtype::F32 }
}

/// BLAKE3 over weights as they are stored on the device. Waits.
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

/// Whether a version has to be published; one that was is compared.
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

/// Makes a version visible that lies where samplers can get it, and then digests it.
fn announce<T: Storage>(
    hub: &Hub,
    device: &Device,
    (version, direct): (PolicyVersion, WeightsLocation),
    values: View<'_, T>,
    started: Instant,
) -> Result<DevicePush, WeightsError> {
    hub.announce(PublishedVersion::Device(version, values.len(), direct))?;
    let moved = started.elapsed();
    hub.digested(version, digest(device, values)?)?;
    hub.settle(None)?;
    let bytes = (values.len() * size_of::<T>()) as u64;
    Ok(DevicePush { version, bytes, moved, took: started.elapsed(), attempts: 1 })
}
