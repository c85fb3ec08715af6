//! The host publisher, for all transports of host memory.
//!
//! Invariant: a version is visible as soon as samplers can read its weights. Digest and delta are computed
//! afterwards, and what needs them (the network, the comparison of receipts) waits for them.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use trajectory::PolicyVersion;

use crate::copier::Copier;
use crate::delta::{self, full_bytes};
use crate::hub::{PublicationStatus, PublishedVersion};
use crate::parts::whole_len;
use crate::shm::SlotWriter;
use crate::{
    Digest, Dtype, Hub, Lag, OwnedWeights, Publisher, Snapshot, Values, WeightAdapter, WeightMemory,
    WeightsError, WritableSlot,
};

/// Maximum number of threads that copy and digest: more do not increase memory bandwidth.
const MAX_THREADS: usize = 8;

/// Configuration of a publisher.
#[derive(Clone, Debug)]
pub struct PublishConfig {
    /// Threads that copy, digest and look for changes.
    pub threads: usize,
    /// Deltas for samplers on other hosts; `None`: every push is full.
    pub deltas: Option<DeltaConfig>,
    /// Directory for shared memory, such as `/dev/shm`; `None`: samplers in other processes get weights over HTTP.
    pub shm: Option<PathBuf>,
    /// Whether all subscribers are in this process and subscribe before the first version: they can share the memory of the
    /// trainer, and the hub needs no weights that all of them have taken.
    pub in_process: bool,
}

/// How deltas are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaConfig {
    /// At least one of this many pushes is full, which bounds the chain of deltas of a late sampler.
    pub full_every: NonZeroUsize,
    /// Whether deltas are compressed with zstd.
    pub compress: bool,
}

/// What a push cost the publisher.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PushCost {
    /// The version.
    pub version: PolicyVersion,
    /// Time until samplers of this host could read it.
    pub copied: Duration,
    /// Time to compute the digest.
    pub digested: Duration,
    /// Time to encode the delta.
    pub encoded: Duration,
    /// Total time.
    pub took: Duration,
    /// Bytes of a full push over the network.
    pub full_bytes: u64,
    /// Bytes of the delta; `None` if the push is full.
    pub delta_bytes: Option<u64>,
    /// Share of changed weights; `None` if it was not computed.
    pub density: Option<f64>,
}

/// The publisher of a hub.
#[derive(Debug)]
pub struct HubPublisher {
    hub: Hub,
    threads: usize,
    deltas: Option<DeltaConfig>,
    in_process: bool,
    pushing: Mutex<PublisherState>,
}

#[derive(Debug)]
struct PublisherState {
    copier: Copier,
    store: Option<SlotWriter>,
    /// When owners could write the version in progress.
    begun: Option<Instant>,
    /// Number of deltas since the last full push.
    since_full: usize,
    last: Option<PushCost>,
}

impl Default for PublishConfig {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MAX_THREADS);
        Self { threads, deltas: None, shm: None, in_process: false }
    }
}

impl HubPublisher {
    /// Publishes to `hub`, which must have no other publisher.
    ///
    /// # Errors
    /// A directory for shared memory that cannot be used.
    pub fn new(hub: Hub, config: PublishConfig) -> Result<Self, WeightsError> {
        let PublishConfig { threads, deltas, shm, in_process } = config;
        let store = shm.map(|directory| SlotWriter::create(&directory)).transpose()?;
        let pushing =
            PublisherState { copier: Copier::new(threads), store, begun: None, since_full: 0, last: None };
        Ok(Self { hub, threads, deltas, in_process, pushing: Mutex::new(pushing) })
    }

    /// Publishes to the subscribers within this process.
    #[must_use]
    pub(crate) fn in_memory(hub: Hub, threads: usize) -> Self {
        let pushing = PublisherState {
            copier: Copier::new(threads),
            store: None,
            begun: None,
            since_full: 0,
            last: None,
        };
        Self { hub, threads, deltas: None, in_process: false, pushing: Mutex::new(pushing) }
    }

    /// Whether subscribers read weights where their owners have published them.
    fn shares_memory(&self) -> Result<bool, WeightsError> {
        Ok(self.in_process && self.hub.dtype() == Dtype::F32 && self.pushing()?.store.is_none())
    }

    /// What the last push cost; `None` before the first.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a push.
    pub fn last_push(&self) -> Result<Option<PushCost>, WeightsError> {
        Ok(self.pushing()?.last)
    }

    /// The hub.
    #[must_use]
    pub fn hub(&self) -> &Hub {
        &self.hub
    }

    fn pushing(&self) -> Result<MutexGuard<'_, PublisherState>, WeightsError> {
        self.pushing.lock().map_err(|_| WeightsError::Poisoned)
    }

    fn push(
        &self,
        mut pushing: MutexGuard<'_, PublisherState>,
        snapshot: Snapshot,
        place: Option<PathBuf>,
        started: Instant,
    ) -> Result<(), WeightsError> {
        let (version, dtype, snapshot) = (snapshot.version, self.hub.dtype(), Arc::new(snapshot));
        let before = self.hub.announce(PublishedVersion::Host(Arc::clone(&snapshot), place))?;
        let before = before.as_ref().and_then(PublishedVersion::snapshot);
        let copied = started.elapsed();
        let digest = snapshot.digest_on(self.threads);
        if let Some(store) = &pushing.store {
            store.digested(version, digest);
        }
        let digested = started.elapsed() - copied;
        self.hub.digested(version, digest)?;
        let encoded = match (self.deltas, before) {
            (Some(deltas), Some(before)) if pushing.since_full + 1 < deltas.full_every.get() => {
                delta::encode(before, &snapshot, dtype, deltas.compress, self.threads)
            }
            _ => delta::DeltaEncoding::default(),
        };
        let delta_bytes = encoded.frame.as_ref().map(|frame| frame.bytes().len() as u64);
        pushing.since_full = if delta_bytes.is_some() { pushing.since_full + 1 } else { 0 };
        self.hub.settle(encoded.frame.map(Arc::new))?;
        let took = started.elapsed();
        pushing.last = Some(PushCost {
            version,
            copied,
            digested,
            encoded: took - copied - digested,
            took,
            full_bytes: full_bytes(snapshot.values.len(), dtype),
            delta_bytes,
            density: encoded.density,
        });
        Ok(())
    }

    /// Publishes a copy of `[parameters]` weights, into which `adapter` is merged.
    fn publish_copy(
        &self,
        version: PolicyVersion,
        values: &[f32],
        adapter: Option<Arc<dyn WeightAdapter>>,
    ) -> Result<(), WeightsError> {
        self.publish_pieces(version, &[(0..values.len(), values)], adapter)
    }

    /// The same of `pieces` that make up all weights, each copied once to where subscribers read it.
    fn publish_pieces(
        &self,
        version: PolicyVersion,
        pieces: &[(Range<usize>, &[f32])],
        adapter: Option<Arc<dyn WeightAdapter>>,
    ) -> Result<(), WeightsError> {
        let started = Instant::now();
        let mut pushing = self.pushing()?;
        let (dtype, threads) = (self.hub.dtype(), self.threads);
        if let PublicationStatus::Published(before) = self.hub.known(version)? {
            let again = pushing.copier.gather(pieces, dtype);
            return same(version, before, Digest::on(&again, threads));
        }
        if let Some(store) = &mut pushing.store {
            store.begin(version, whole_len(pieces), dtype)?;
            pieces.iter().try_for_each(|(range, values)| store.place(range.start, values, threads))?;
            let (values, place) = store.commit(version)?;
            return self.push(
                pushing,
                Snapshot::new(version, values).with_adapter(adapter),
                Some(place),
                started,
            );
        }
        let values = pushing.copier.gather(pieces, dtype);
        self.push(pushing, Snapshot::new(version, values).with_adapter(adapter), None, started)
    }
}

impl PublisherState {
    fn store(&mut self) -> Result<&mut SlotWriter, WeightsError> {
        self.store.as_mut().ok_or_else(|| WeightsError::Shard {
            path: "nowhere".to_owned(),
            reason: "this publisher was made without a directory for shared memory".to_owned(),
        })
    }
}

impl Publisher for HubPublisher {
    fn publish(&self, snapshot: Snapshot) -> Result<(), WeightsError> {
        let started = Instant::now();
        let pushing = self.pushing()?;
        if pushing.store.is_some() || self.hub.dtype() != Dtype::F32 {
            drop(pushing);
            return self.publish_copy(snapshot.version, &snapshot.values, snapshot.adapter);
        }
        match self.hub.known(snapshot.version)? {
            PublicationStatus::Published(before) => {
                same(snapshot.version, before, snapshot.digest_on(self.threads))
            }
            PublicationStatus::New => self.push(pushing, snapshot, None, started),
        }
    }

    fn publish_values(&self, version: PolicyVersion, values: &[f32]) -> Result<(), WeightsError> {
        self.publish_copy(version, values, None)
    }

    fn publish_shared(
        &self,
        version: PolicyVersion,
        owner: Arc<dyn WeightMemory>,
    ) -> Result<(), WeightsError> {
        if self.shares_memory()? {
            // Subscribers read what the owner has.
            return self.publish(
                Snapshot::new(version, Values::owned_by(Arc::clone(&owner))).with_adapter(owner.adapter()),
            );
        }
        self.publish_copy(version, owner.values(), owner.adapter())
    }

    fn publish_owned(
        &self,
        version: PolicyVersion,
        owners: Vec<OwnedWeights<'_>>,
        adapter: Option<Arc<dyn WeightAdapter>>,
    ) -> Result<(), WeightsError> {
        if self.shares_memory()? {
            return self.publish(Snapshot::new(version, Values::copied(owners)).with_adapter(adapter));
        }
        self.publish_pieces(version, &owners.concat(), adapter)
    }

    fn begin(&self, version: PolicyVersion, parameters: usize) -> Result<Option<WritableSlot>, WeightsError> {
        let mut pushing = self.pushing()?;
        self.hub.known(version)?;
        pushing.begun = Some(Instant::now());
        let Some(store) = &mut pushing.store else { return Ok(None) };
        Ok(Some(WritableSlot::new(store.begin(version, parameters, self.hub.dtype())?)))
    }

    fn commit(
        &self,
        version: PolicyVersion,
        adapter: Option<Arc<dyn WeightAdapter>>,
    ) -> Result<(), WeightsError> {
        let mut pushing = self.pushing()?;
        let started = pushing.begun.take().unwrap_or_else(Instant::now);
        if let PublicationStatus::Published(before) = self.hub.known(version)? {
            let values = pushing.store()?.begun(version)?;
            return same(version, before, Digest::on(&values, self.threads));
        }
        let (values, place) = pushing.store()?.commit(version)?;
        self.push(pushing, Snapshot::new(version, values).with_adapter(adapter), Some(place), started)
    }

    fn drop_taken(&self) -> Result<(), WeightsError> {
        if self.in_process { self.hub.drop_taken() } else { Ok(()) }
    }

    fn wait_applied(&self, version: PolicyVersion, wait: Duration) -> Result<(), WeightsError> {
        self.hub.wait_applied(version, wait)
    }

    fn lags(&self) -> Result<Vec<Lag>, WeightsError> {
        self.hub.lags()
    }
}

impl Drop for HubPublisher {
    fn drop(&mut self) {
        self.hub.publisher_gone();
    }
}

/// Compares a version that is published again.
pub(crate) fn same(version: PolicyVersion, before: Digest, now: Digest) -> Result<(), WeightsError> {
    if before == now {
        return Ok(());
    }
    Err(WeightsError::Republished { version, before, now, who: "the hub".to_owned() })
}
