//! Receives newer weights concurrently with decoding, or uploads them to a device, and swaps them in between two decode steps.
//! Weights on the processor are packed then: packing takes the cores from decoding at any time, and before the swap it would
//! need the memory of one more version.
//!
//! Invariant: staged weights carry the digest of the values that they will be packed from or were uploaded to, computed after
//! the transfer. The receipt states the digest of the weights that are served, not of those that were announced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, bounded};
use device::bf16;
use model::Config;
use model::on_device::StagedWeights;
use trajectory::PolicyVersion;
use weights::{DeviceSubscriber, DeviceWeights, Digest, Receipt, Subscriber, WeightsError};

use crate::RolloutError;
use crate::engine::{ServeOn, ServedWeights};

/// How long the thread waits for a newer version before it checks the stop flag.
const LOOK_UP: Duration = Duration::from_millis(50);

/// How long a dropped applier waits for its thread, which may be staging a version or reading from a peer that is silent.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// Pause while the thread ends after its last message.
const LAST_STEPS: Duration = Duration::from_millis(1);

/// Weights that are ready to be served.
#[derive(Debug)]
pub struct ReadyWeights {
    version: PolicyVersion,
    /// `None` once it is served.
    served: Option<ServedWeights>,
    digest: Digest,
    took: Duration,
    /// Bytes that the transport moved.
    bytes: u64,
}

impl ReadyWeights {
    /// The version.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// The weights; can be taken once.
    ///
    /// # Panics
    /// If they were taken before.
    pub fn take_served(&mut self) -> ServedWeights {
        self.served.take().expect("a version is served once")
    }
}

/// Where newer versions come from.
#[derive(Clone)]
pub enum WeightSource {
    /// Memory of the host; the applier uploads them where they are served on a device.
    Host {
        /// Receives them; they are shared, not copied.
        subscriber: Arc<dyn Subscriber>,
        /// The network that they belong to.
        config: Arc<Config>,
        /// Where they are served.
        on: ServeOn,
    },
    /// A device, in f32, served as they arrive.
    F32(Arc<dyn DeviceSubscriber<f32>>),
    /// A device, in bf16.
    Bf16(Arc<dyn DeviceSubscriber<bf16>>),
}

impl std::fmt::Debug for WeightSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Host { .. } => "Host",
            Self::F32(_) => "F32",
            Self::Bf16(_) => "Bf16",
        })
    }
}

/// Stages newer versions.
pub struct Applier {
    incoming: WeightSource,
    source: ApplierMode,
}

enum ApplierMode {
    /// Starts a thread that runs concurrently with decoding. At most one staged version waits, so memory is bounded by two
    /// versions, of which that on the host is the publisher's own.
    Thread(Background),
    /// [`Applier::take`] stages the version itself.
    Inline { after: Option<PolicyVersion> },
}

struct Background {
    ready: Receiver<Result<ReadyWeights, RolloutError>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// How long it is waited for when this is dropped.
    ends_within: Duration,
}

impl Applier {
    /// Starts the thread, which stages every version, beginning with the one that is published already.
    #[must_use]
    pub fn start(incoming: WeightSource) -> Self {
        let (sender, ready) = bounded(1);
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, asked_to_stop) = (incoming.clone(), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut after = None;
            while !asked_to_stop.load(Ordering::Relaxed) {
                let Some(next) = theirs.receive(after, LOOK_UP).transpose() else { continue };
                let failed = next.is_err();
                after = next.as_ref().ok().map(|ready| ready.version).or(after);
                if sender.send(next).is_err() || failed {
                    break;
                }
            }
        });
        let background = Background { ready, stop, thread: Some(thread), ends_within: ENDS_WITHIN };
        Self { incoming, source: ApplierMode::Thread(background) }
    }

    /// An applier without a thread, for a sampler that sleeps whenever a version is published: it takes no memory before
    /// [`Applier::take`].
    #[must_use]
    pub fn inline(incoming: WeightSource) -> Self {
        Self { incoming, source: ApplierMode::Inline { after: None } }
    }

    /// The newest staged version. Waits up to `wait` if there is none.
    ///
    /// # Errors
    /// If receiving failed.
    pub fn take(&mut self, wait: Duration) -> Result<Option<ReadyWeights>, RolloutError> {
        match &mut self.source {
            // Without a wait too, `recv_timeout` gives the core to other threads, a trainer's among them, before it looks at the time.
            ApplierMode::Thread(Background { ready, .. }) => match ready.recv_timeout(wait) {
                Ok(ready) => ready.map(Some),
                Err(RecvTimeoutError::Timeout) => Ok(None),
                Err(RecvTimeoutError::Disconnected) => {
                    Err(RolloutError::Ended { who: "the thread that receives weights" })
                }
            },
            ApplierMode::Inline { after } => {
                let ready = self.incoming.receive(*after, wait)?;
                *after = ready.as_ref().map(ReadyWeights::version).or(*after);
                Ok(ready)
            }
        }
    }

    /// Sends the receipt: `ready` is served from now on, decoding `stalled` for it, and its ranks have `taken` bytes of it.
    ///
    /// # Errors
    /// If the digest is not that of the published version.
    pub fn confirm(&self, ready: &ReadyWeights, stalled: Duration, taken: u64) -> Result<(), RolloutError> {
        let ReadyWeights { version, digest, took, bytes, .. } = *ready;
        let receipt = Receipt { version, digest, took, stalled, bytes, taken };
        Ok(self.incoming.applied(receipt)?)
    }

    /// Takes back weights that are no longer served; later ones are received into their memory.
    pub fn give_back(&self, weights: StagedWeights) {
        match (&self.incoming, weights) {
            (WeightSource::F32(subscriber), StagedWeights::F32(buffer)) => subscriber.give_back(buffer),
            (WeightSource::Bf16(subscriber), StagedWeights::Bf16(buffer)) => subscriber.give_back(buffer),
            (_, weights) => drop(weights),
        }
    }
}

impl std::fmt::Debug for Applier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inline = matches!(self.source, ApplierMode::Inline { .. });
        f.debug_struct("Applier").field("inline", &inline).finish_non_exhaustive()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return };
        let deadline = Instant::now() + self.ends_within;
        while !thread.is_finished() && Instant::now() < deadline {
            // The thread may be blocked in its send.
            if let Err(RecvTimeoutError::Disconnected) = self.ready.recv_timeout(LOOK_UP) {
                std::thread::sleep(LAST_STEPS);
            }
        }
        // Otherwise it reads from a peer that is silent, and ends when that read does.
        if thread.is_finished() {
            drop(thread.join());
        }
    }
}

impl WeightSource {
    /// The newest version after `after`, staged; `None` if none arrived within `wait`.
    fn receive(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<ReadyWeights>, RolloutError> {
        let (subscriber, config, on) = match self {
            Self::F32(subscriber) => {
                let next = subscriber.wait_newer(after, wait)?;
                return Ok(next.map(|weights| ReadyWeights::of_device(weights, StagedWeights::F32)));
            }
            Self::Bf16(subscriber) => {
                let next = subscriber.wait_newer(after, wait)?;
                return Ok(next.map(|weights| ReadyWeights::of_device(weights, StagedWeights::Bf16)));
            }
            Self::Host { subscriber, config, on } => (subscriber, config, on),
        };
        let Some(snapshot) = subscriber.wait_newer(after, wait)? else { return Ok(None) };
        fail::fail_point!("weights-receive");
        let start = Instant::now();
        let (served, digest) = on.prepare(config, snapshot.values.clone())?;
        let took = snapshot.received.took + start.elapsed();
        let (version, bytes) = (snapshot.version, snapshot.received.bytes);
        Ok(Some(ReadyWeights { version, served: Some(served), digest, took, bytes }))
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        match self {
            Self::Host { subscriber, .. } => subscriber.applied(receipt),
            Self::F32(subscriber) => subscriber.applied(receipt),
            Self::Bf16(subscriber) => subscriber.applied(receipt),
        }
    }
}

impl ReadyWeights {
    /// Weights that are on the device already.
    fn of_device<T: device::Storage>(
        weights: DeviceWeights<T>,
        stage: impl FnOnce(device::DeviceBuffer<T>) -> StagedWeights,
    ) -> Self {
        let DeviceWeights { version, values, digest, received } = weights;
        let served = Some(ServedWeights::Device(stage(values)));
        Self { version, served, digest, took: received.took, bytes: received.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_applier_does_not_wait_for_a_silent_peer() {
        let (release, silent) = bounded::<()>(0);
        let (sender, ready) = bounded(1);
        let thread = std::thread::spawn(move || {
            let _sender = sender;
            let _ = silent.recv();
        });
        let (stop, ends_within) = (Arc::new(AtomicBool::new(false)), Duration::from_millis(10));
        let asked_to_stop = Arc::clone(&stop);
        drop(Background { ready, stop, thread: Some(thread), ends_within });
        assert!(asked_to_stop.load(Ordering::Relaxed));
        drop(release);
    }
}
