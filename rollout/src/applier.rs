//! New weights, received and packed beside the decoding, ready to be swapped in between two steps.
//!
//! Invariant: what is handed over carries the digest of the values that it was packed from or uploaded to, computed after the
//! transfer: the receipt speaks of what is served, not of what was promised.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, bounded};
use device::bf16;
use model::on_device::StagedWeights;
use model::{Config, Layout, Parameters};
use trajectory::PolicyVersion;
use weights::{DeviceSubscriber, DeviceWeights, Digest, Receipt, Subscriber, WeightsError};

use crate::RolloutError;
use crate::engine::{ServeOn, Served};

/// How long the thread waits for a newer version before it looks whether it should stop.
const LOOK_UP: Duration = Duration::from_millis(50);

/// Weights that can be served at once.
#[derive(Debug)]
pub struct Ready {
    version: PolicyVersion,
    /// `None` once it is served.
    served: Option<Served>,
    digest: Digest,
    took: Duration,
    /// Bytes that the transport moved.
    bytes: u64,
}

impl Ready {
    /// The version.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// The weights; can be taken once.
    ///
    /// # Panics
    /// If they were taken before.
    pub fn take_served(&mut self) -> Served {
        self.served.take().expect("a version is served once")
    }
}

/// Where new versions come from.
#[derive(Clone)]
pub enum Incoming {
    /// Memory of the host; they are made ready here.
    Host {
        /// What brings them.
        subscriber: Arc<dyn Subscriber>,
        /// Of what network they are.
        config: Arc<Config>,
        /// Where they are to be served.
        on: ServeOn,
    },
    /// A device, in f32, where they can be served as they come.
    F32(Arc<dyn DeviceSubscriber<f32>>),
    /// A device, in bf16.
    Bf16(Arc<dyn DeviceSubscriber<bf16>>),
}

impl std::fmt::Debug for Incoming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Host { .. } => "Host",
            Self::F32(_) => "F32",
            Self::Bf16(_) => "Bf16",
        })
    }
}

/// What makes new versions ready.
pub struct Applier {
    incoming: Incoming,
    source: Source,
}

enum Source {
    /// A thread beside the decoding. At most one version waits to be taken, so memory is bounded by two versions.
    Thread(Background),
    /// Whoever takes a version makes it ready first.
    Inline { after: Option<PolicyVersion> },
}

struct Background {
    ready: Receiver<Result<Ready, RolloutError>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Applier {
    /// Starts the thread, which makes each version ready. The first that it makes ready is any that is there.
    #[must_use]
    pub fn start(incoming: Incoming) -> Self {
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
        Self { incoming, source: Source::Thread(Background { ready, stop, thread: Some(thread) }) }
    }

    /// One without a thread, for a sampler that stands still whenever a version is published: nothing takes memory before
    /// it is asked for.
    #[must_use]
    pub fn inline(incoming: Incoming) -> Self {
        Self { incoming, source: Source::Inline { after: None } }
    }

    /// The newest version that is ready, waiting up to `wait` for one.
    ///
    /// # Errors
    /// If receiving failed.
    pub fn take(&mut self, wait: Duration) -> Result<Option<Ready>, RolloutError> {
        match &mut self.source {
            Source::Thread(Background { ready, .. }) => match ready.recv_timeout(wait) {
                Ok(ready) => ready.map(Some),
                Err(crossbeam::channel::RecvTimeoutError::Timeout) => Ok(None),
                Err(crossbeam::channel::RecvTimeoutError::Disconnected) => {
                    Err(RolloutError::Ended { who: "the thread that receives weights" })
                }
            },
            Source::Inline { after } => {
                let ready = self.incoming.receive(*after, wait)?;
                *after = ready.as_ref().map(Ready::version).or(*after);
                Ok(ready)
            }
        }
    }

    /// Says that `ready` is served from now on, after the decoding had `stalled` for it.
    ///
    /// # Errors
    /// If the digest is not that of the published version.
    pub fn confirm(&self, ready: &Ready, stalled: Duration) -> Result<(), RolloutError> {
        let Ready { version, digest, took, bytes, .. } = *ready;
        let receipt = Receipt { version, digest, took, stalled, bytes };
        Ok(self.incoming.applied(receipt)?)
    }

    /// Takes weights that are not served any more, to receive later ones into their memory.
    pub fn give_back(&self, weights: StagedWeights) {
        match (&self.incoming, weights) {
            (Incoming::F32(subscriber), StagedWeights::F32(buffer)) => subscriber.give_back(buffer),
            (Incoming::Bf16(subscriber), StagedWeights::Bf16(buffer)) => subscriber.give_back(buffer),
            (_, weights) => drop(weights),
        }
    }
}

impl std::fmt::Debug for Applier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inline = matches!(self.source, Source::Inline { .. });
        f.debug_struct("Applier").field("inline", &inline).finish_non_exhaustive()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A version that nobody took would keep the thread in its send.
        while self.ready.recv_timeout(LOOK_UP).is_ok() {}
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl Incoming {
    /// The newest version after `after`, made ready; `None` if none came within `wait`.
    fn receive(&self, after: Option<PolicyVersion>, wait: Duration) -> Result<Option<Ready>, RolloutError> {
        let (subscriber, config, on) = match self {
            Self::F32(subscriber) => {
                let next = subscriber.wait_newer(after, wait)?;
                return Ok(next.map(|weights| Ready::of_device(weights, StagedWeights::F32)));
            }
            Self::Bf16(subscriber) => {
                let next = subscriber.wait_newer(after, wait)?;
                return Ok(next.map(|weights| Ready::of_device(weights, StagedWeights::Bf16)));
            }
            Self::Host { subscriber, config, on } => (subscriber, config, on),
        };
        let Some(snapshot) = subscriber.wait_newer(after, wait)? else { return Ok(None) };
        fail::fail_point!("weights-receive");
        let start = Instant::now();
        let layout = Arc::new(Layout::new(config));
        let parameters = Parameters::from_values(layout, snapshot.values.to_vec())?;
        let (served, digest) = on.prepare(config, &parameters)?;
        let took = snapshot.received.took + start.elapsed();
        let (version, bytes) = (snapshot.version, snapshot.received.bytes);
        Ok(Some(Ready { version, served: Some(served), digest, took, bytes }))
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        match self {
            Self::Host { subscriber, .. } => subscriber.applied(receipt),
            Self::F32(subscriber) => subscriber.applied(receipt),
            Self::Bf16(subscriber) => subscriber.applied(receipt),
        }
    }
}

impl Ready {
    /// Weights that lie on the device already.
    fn of_device<T: device::Storage>(
        weights: DeviceWeights<T>,
        stage: impl FnOnce(device::Buffer<T>) -> StagedWeights,
    ) -> Self {
        let DeviceWeights { version, values, digest, received } = weights;
        let served = Some(Served::Device(stage(values)));
        Self { version, served, digest, took: received.took, bytes: received.bytes }
    }
}
