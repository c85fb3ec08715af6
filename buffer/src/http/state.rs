//! What all requests share: the buffer that is served just now, the limits, the counters.
//!
//! Invariant: nobody keeps the buffer longer than a request that goes on working, and waits end when its storage fails. So
//! the last one soon lets go of it, and the journal can be opened again.

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use axum::body::Bytes;
use tokio::sync::{Semaphore, watch};

use super::auth::AccessControl;
use super::limits::ServerLimits;
use super::metrics::BufferMetrics;
use super::problem::{Problem, ProblemCode};
use super::wire::{ItemLimits, Rejection};
use crate::{Buffer, BufferError, GroupLimits};

/// Hears of every group that is refused as invalid; called by the tasks that answer, so it must not wait.
pub type OnRefused = Arc<dyn Fn(RefusedGroup<'_>) + Send + Sync>;

/// A group that was refused as invalid.
#[derive(Clone, Copy, Debug)]
pub struct RefusedGroup<'a> {
    /// The address that it came from, if that is known.
    pub sender: Option<IpAddr>,
    /// The reason, as it is answered.
    pub code: &'a str,
    /// The evidence, as it is answered.
    pub detail: &'a str,
}

/// Which groups are taken.
#[derive(Default)]
pub(super) struct GroupValidation {
    /// What the run knows of groups that trains on them, as soon as it does; `None`: any group is taken.
    pub(super) limits: Option<Arc<OnceLock<GroupLimits>>>,
    /// Who hears of those that are not.
    pub(super) refused: Option<OnRefused>,
}

impl fmt::Debug for GroupValidation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupValidation").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// What all requests share.
#[derive(Debug)]
pub(crate) struct ServerState {
    served: RwLock<BufferStatus>,
    /// Counts what ends all waits: a failure, a stop.
    interruptions: watch::Sender<Interruptions>,
    /// KiB of large bodies that may still come.
    pub(super) bodies: Arc<Semaphore>,
    pub(super) limits: ServerLimits,
    pub(super) access: AccessControl,
    entry: GroupValidation,
    pub(super) metrics: BufferMetrics,
    /// The OpenAPI document, once the routes are known.
    pub(super) openapi: OnceLock<Bytes>,
}

#[derive(Debug)]
enum BufferStatus {
    Buffer(Arc<Buffer>),
    /// Its storage failed; whether and when it goes on is the business of whoever opens it again.
    Failed(Problem),
}

#[derive(Clone, Copy, Debug, Default)]
struct Interruptions {
    stopping: bool,
    failures: u64,
}

impl ServerState {
    pub(super) fn new(
        buffer: Arc<Buffer>,
        limits: ServerLimits,
        access: AccessControl,
        entry: GroupValidation,
    ) -> Self {
        let room = limits.bodies_bytes.max(limits.body_bytes).max(limits.decoded_bytes);
        Self {
            served: RwLock::new(BufferStatus::Buffer(buffer)),
            interruptions: watch::Sender::default(),
            bodies: Arc::new(Semaphore::new(room.div_ceil(1024))),
            limits,
            access,
            entry,
            metrics: BufferMetrics::default(),
            openapi: OnceLock::new(),
        }
    }

    /// The buffer, for one request.
    ///
    /// # Errors
    /// [`ProblemCode::StorageFailed`] until it is open again.
    pub(super) fn buffer(&self) -> Result<Arc<Buffer>, Problem> {
        match &*self.served.read().unwrap_or_else(PoisonError::into_inner) {
            BufferStatus::Buffer(buffer) => Ok(Arc::clone(buffer)),
            BufferStatus::Failed(problem) => Err(problem.clone()),
        }
    }

    /// What the client hears of an error of `buffer`, which is let go of if it can write no more.
    pub(super) fn problem(&self, buffer: &Buffer, error: &BufferError) -> Problem {
        self.drop_if_failed(buffer);
        Problem::from(error)
    }

    /// Whether the buffer is usable; lets go of one that is not.
    pub(super) fn drop_if_failed(&self, buffer: &Buffer) {
        let Some(failure) = buffer.failure() else { return };
        let mut served = self.served.write().unwrap_or_else(PoisonError::into_inner);
        // Another may have been opened meanwhile.
        if matches!(&*served, BufferStatus::Buffer(current) if std::ptr::eq(&**current, buffer)) {
            *served = BufferStatus::Failed(Problem::new(ProblemCode::StorageFailed, failure.to_string()));
            drop(served);
            self.interruptions.send_modify(|interruptions| interruptions.failures += 1);
        }
    }

    /// Why the buffer is not open again.
    pub(super) fn still_failed(&self, error: &BufferError) {
        let mut served = self.served.write().unwrap_or_else(PoisonError::into_inner);
        *served = BufferStatus::Failed(Problem::new(ProblemCode::StorageFailed, error.to_string()));
    }

    /// Goes on with a buffer that was opened again.
    pub(super) fn reopened(&self, buffer: Buffer) {
        *self.served.write().unwrap_or_else(PoisonError::into_inner) = BufferStatus::Buffer(Arc::new(buffer));
    }

    /// All waits end from now on.
    pub(super) fn stop(&self) {
        self.interruptions.send_modify(|interruptions| interruptions.stopping = true);
    }

    /// Waits for `work` unless the server is stopped or the storage fails meanwhile.
    ///
    /// # Errors
    /// [`ProblemCode::Stopping`], [`ProblemCode::StorageFailed`].
    pub(super) async fn uninterrupted<T>(&self, work: impl Future<Output = T>) -> Result<T, Problem> {
        let mut interruptions = self.interruptions.subscribe();
        let failures = interruptions.borrow().failures;
        let interrupted = async {
            loop {
                let now = *interruptions.borrow_and_update();
                if now.stopping {
                    return Problem::new(
                        ProblemCode::Stopping,
                        "the server is being stopped: try again later",
                    );
                }
                if now.failures > failures {
                    let detail = "the storage failed while the request waited: try again";
                    return Problem::new(ProblemCode::StorageFailed, detail);
                }
                if let Err(problem) = self.buffer() {
                    return problem;
                }
                // The sender lives as long as `self`.
                let _ = interruptions.changed().await;
            }
        };
        tokio::select! {
            biased;
            done = work => Ok(done),
            problem = interrupted => Err(problem),
        }
    }

    /// What one group may have.
    pub(super) fn item_limits(&self) -> ItemLimits {
        let ServerLimits { trajectories, tokens, vocabulary, values, name_bytes, depth, correct, .. } =
            self.limits;
        ItemLimits { trajectories, tokens, vocabulary, values, name_bytes, depth, correct }
    }

    /// What the run knows of groups that trains on them; `None` where that is nobody's business.
    ///
    /// # Errors
    /// [`ProblemCode::Preparing`] while the run does not know it yet.
    pub(super) fn group_limits(&self) -> Result<Option<GroupLimits>, Problem> {
        let Some(limits) = &self.entry.limits else { return Ok(None) };
        limits.get().copied().map(Some).ok_or_else(|| {
            Problem::new(
                ProblemCode::Preparing,
                "the run is still opening its model: send the same again soon",
            )
        })
    }

    /// Counts and passes on that a group is not stored.
    pub(super) fn refused(&self, sender: Option<IpAddr>, rejection: &Rejection) {
        self.metrics.refused_groups.fetch_add(1, Ordering::Relaxed);
        if let Some(refused) = &self.entry.refused {
            refused(RefusedGroup { sender, code: rejection.code.as_str(), detail: &rejection.detail });
        }
    }
}
