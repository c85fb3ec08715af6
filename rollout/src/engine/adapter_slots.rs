//! Changes of what an engine serves, asked for by other threads: adapters that come and go, and whole weights.
//!
//! Invariant: changes are made in the order in which they were asked for, between two steps, and before any request that was
//! submitted after them. A receipt is sent after the engine serves the version, with the digest of the values that it serves; a
//! change that is never made has an error in place of it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use model::LowRank;
use trajectory::PolicyVersion;
use weights::{Digest, Receipt};

use super::{Engine, ServedWeights};
use crate::RolloutError;

/// Most changes that wait for the next step.
const MAX_WAITING: usize = 256;
/// Who does not send a receipt.
const SAMPLER: RolloutError = RolloutError::Ended { who: "the sampler" };

/// Changes what a [`LocalSampler`](crate::LocalSampler) serves, from any thread. Clones are the same.
#[derive(Clone, Debug)]
pub struct AdapterSlots {
    waiting: Arc<Mutex<ChangeQueue>>,
}

/// The changes that wait, on the side of the sampler.
#[derive(Debug)]
pub(super) struct WaitingChanges {
    waiting: Arc<Mutex<ChangeQueue>>,
}

#[derive(Debug, Default)]
struct ChangeQueue {
    changes: VecDeque<ServedChange>,
    /// Whether the sampler has ended.
    is_closed: bool,
}

/// The receipt of a change that is on its way.
#[derive(Debug)]
pub struct PendingReceipt {
    version: PolicyVersion,
    receipt: Receiver<Result<Receipt, RolloutError>>,
}

/// One change.
#[derive(Debug)]
enum ServedChange {
    Adapter { slot: usize, factors: Arc<LowRank>, version: ChangedVersion },
    Free { slot: usize },
    Weights { served: ServedWeights, version: ChangedVersion },
}

/// What a receipt says, and who gets it.
#[derive(Debug)]
struct ChangedVersion {
    version: PolicyVersion,
    /// Of the values that will be served.
    digest: Digest,
    bytes: u64,
    asked: Instant,
    receipt: Sender<Result<Receipt, RolloutError>>,
}

/// A handle, and what it asks for.
pub(super) fn adapter_slots() -> (AdapterSlots, WaitingChanges) {
    let waiting = Arc::new(Mutex::default());
    (AdapterSlots { waiting: Arc::clone(&waiting) }, WaitingChanges { waiting })
}

fn lock(waiting: &Mutex<ChangeQueue>) -> MutexGuard<'_, ChangeQueue> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WaitingChanges {
    /// Makes the changes that wait, in their order.
    ///
    /// # Errors
    /// If the engine failed and cannot sample any more.
    pub(super) fn make(&self, engine: &mut Engine) -> Result<(), RolloutError> {
        let changes = std::mem::take(&mut lock(&self.waiting).changes);
        changes.into_iter().try_for_each(|change| change.make(engine))
    }
}

impl Drop for WaitingChanges {
    fn drop(&mut self) {
        let mut waiting = lock(&self.waiting);
        waiting.is_closed = true;
        let dropped = std::mem::take(&mut waiting.changes);
        drop(waiting);
        drop(dropped);
    }
}

impl AdapterSlots {
    /// Serves `factors` as `version` in `slot`: from the next step on, and for every request that is submitted after this call. They
    /// replace an older version of the adapter in the slot, whose sequences in flight continue with them.
    ///
    /// # Errors
    /// If the sampler has ended, or too many changes wait. The receipt has the errors of [`Engine::set_adapter`].
    pub fn set(
        &self,
        slot: usize,
        factors: Arc<LowRank>,
        version: PolicyVersion,
    ) -> Result<PendingReceipt, RolloutError> {
        let (digest, bytes) = (Digest::of(factors.values()), size_of_val(factors.values()) as u64);
        let (version, receipt) = ChangedVersion::new(version, digest, bytes);
        self.send(ServedChange::Adapter { slot, factors, version })?;
        Ok(receipt)
    }

    /// Frees `slot`, if it has an adapter. Its sequences in flight end as they would.
    ///
    /// # Errors
    /// If the sampler has ended, or too many changes wait.
    pub fn free(&self, slot: usize) -> Result<(), RolloutError> {
        self.send(ServedChange::Free { slot })
    }

    /// Serves whole weights as `version` from the next step on. Sequences in flight keep their KV cache. `digest` is that of the values
    /// of `served`, as [`ServeOn::prepare`](crate::ServeOn::prepare) gives both; their size is `bytes`.
    ///
    /// # Errors
    /// If the sampler has ended, or too many changes wait. The receipt has an error if the version goes back. The sampler fails if its
    /// engine cannot serve the weights.
    pub fn set_weights(
        &self,
        served: ServedWeights,
        digest: Digest,
        bytes: u64,
        version: PolicyVersion,
    ) -> Result<PendingReceipt, RolloutError> {
        let (version, receipt) = ChangedVersion::new(version, digest, bytes);
        self.send(ServedChange::Weights { served, version })?;
        Ok(receipt)
    }

    fn send(&self, change: ServedChange) -> Result<(), RolloutError> {
        let mut waiting = lock(&self.waiting);
        if waiting.is_closed {
            return Err(SAMPLER);
        }
        if waiting.changes.len() >= MAX_WAITING {
            return Err(RolloutError::TooManyChanges { waiting: MAX_WAITING });
        }
        waiting.changes.push_back(change);
        Ok(())
    }
}

impl PendingReceipt {
    /// Waits up to `limit` for the receipt, on the calling thread.
    ///
    /// # Errors
    /// If the change failed, the sampler ended, or the time is over.
    pub fn wait(self, limit: Duration) -> Result<Receipt, RolloutError> {
        match self.receipt.recv_timeout(limit) {
            Ok(served) => served,
            Err(RecvTimeoutError::Disconnected) => Err(SAMPLER),
            Err(RecvTimeoutError::Timeout) => Err(RolloutError::Deadline {
                who: "a publication",
                whom: format!("the sampler to serve version {}", self.version),
                seconds: limit.as_secs_f64(),
            }),
        }
    }

    /// The same for an asynchronous caller.
    ///
    /// # Errors
    /// As there.
    pub async fn served(self, limit: Duration) -> Result<Receipt, RolloutError> {
        tokio::task::spawn_blocking(move || self.wait(limit)).await.unwrap_or(Err(SAMPLER))
    }
}

impl ChangedVersion {
    fn new(version: PolicyVersion, digest: Digest, bytes: u64) -> (Self, PendingReceipt) {
        let (sender, receipt) = bounded(1);
        let changed = Self { version, digest, bytes, asked: Instant::now(), receipt: sender };
        (changed, PendingReceipt { version, receipt })
    }

    /// Sends the receipt of a change that took from `start` until now.
    fn confirm(self, start: Instant, taken: u64, made: Result<(), RolloutError>) {
        let Self { version, digest, bytes, asked, receipt } = self;
        let (took, stalled) = (start.duration_since(asked), start.elapsed());
        // The caller may not wait for it.
        let _ = receipt.send(made.map(|()| Receipt { version, digest, took, stalled, bytes, taken }));
    }
}

impl ServedChange {
    /// Makes the change.
    ///
    /// # Errors
    /// If the engine failed and cannot sample any more.
    fn make(self, engine: &mut Engine) -> Result<(), RolloutError> {
        let start = Instant::now();
        match self {
            Self::Adapter { slot, factors, version } => {
                let made = engine.set_adapter(slot, factors, version.version);
                version.confirm(start, 0, made);
            }
            Self::Free { slot } => {
                engine.free_adapter(slot)?;
            }
            Self::Weights { version: changed, .. } if changed.version < engine.version() => {
                let (served, asked) = (engine.version(), changed.version);
                let what = "the sampler".to_owned();
                changed.confirm(start, 0, Err(RolloutError::OlderVersion { what, served, asked }));
            }
            Self::Weights { served, version: changed } => {
                if engine.is_asleep() {
                    engine.wake_up(served, changed.version)?;
                } else {
                    engine.apply(served, changed.version)?;
                }
                changed.confirm(start, engine.taken(), Ok(()));
            }
        }
        Ok(())
    }
}
