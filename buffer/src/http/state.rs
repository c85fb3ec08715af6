//! State of the server: the served buffer, limits, metrics.
//!
//! Invariant: only running requests keep the buffer alive, and waits end when its storage fails. So the buffer is
//! dropped soon, and the journal can be opened again.

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use axum::body::Bytes;
use tokio::sync::{Semaphore, watch};

use super::auth::AccessControl;
use super::limits::ServerLimits;
use super::metrics::BufferMetrics;
use super::problem::{Problem, ProblemCode};
use super::wire::{ItemLimits, Rejection};
use crate::{Buffer, BufferError, GroupLimits};

/// Receives every group that is refused as invalid. The request tasks call it, so it must not block.
pub type OnRefused = Arc<dyn Fn(RefusedGroup<'_>) + Send + Sync>;

/// A group that was refused as invalid.
#[derive(Clone, Copy, Debug)]
pub struct RefusedGroup<'a> {
    /// Address of its sender, if it is known.
    pub sender: Option<IpAddr>,
    /// The error code of the answer.
    pub code: &'a str,
    /// The detail of the answer.
    pub detail: &'a str,
}

/// Validation of groups.
#[derive(Default)]
pub(super) struct GroupValidation {
    /// Limits of the model and recipe, once they are known; `None`: any group is accepted.
    pub(super) limits: Option<Arc<OnceLock<GroupLimits>>>,
    /// Receives the refused groups.
    pub(super) refused: Option<OnRefused>,
}

impl fmt::Debug for GroupValidation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupValidation").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// State that all requests share.
#[derive(Debug)]
pub(crate) struct ServerState {
    served: RwLock<BufferStatus>,
    /// Incremented by what ends all waits: a failure, a stop.
    interruptions: watch::Sender<Interruptions>,
    /// KiB of memory available for large bodies.
    pub(super) bodies: Arc<Semaphore>,
    pub(super) limits: ServerLimits,
    pub(super) access: AccessControl,
    entry: GroupValidation,
    pub(super) metrics: BufferMetrics,
    /// The OpenAPI document, once the routes are made.
    pub(super) openapi: OnceLock<Bytes>,
}

#[derive(Debug)]
pub(super) enum BufferStatus {
    Buffer(Arc<Buffer>),
    /// Its storage failed; the watchdog opens it again if it can.
    Failed(Problem),
}

#[derive(Clone, Copy, Debug, Default)]
struct Interruptions {
    stopping: bool,
    failures: u64,
}

impl ServerState {
    pub(super) fn new(
        served: BufferStatus,
        limits: ServerLimits,
        access: AccessControl,
        entry: GroupValidation,
    ) -> Self {
        let reservable = limits.bodies_bytes.max(limits.body_bytes).max(limits.decoded_bytes);
        Self {
            served: RwLock::new(served),
            interruptions: watch::Sender::default(),
            bodies: Arc::new(Semaphore::new(reservable.div_ceil(1024))),
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

    /// The problem for an error of `buffer`. Drops a buffer that can no longer write.
    pub(super) fn problem(&self, buffer: &Buffer, error: &BufferError) -> Problem {
        self.drop_if_failed(buffer);
        Problem::from(error)
    }

    /// Drops a buffer that can no longer write.
    pub(super) fn drop_if_failed(&self, buffer: &Buffer) {
        let Some(failure) = buffer.failure() else { return };
        let mut served = self.served.write().unwrap_or_else(PoisonError::into_inner);
        // Another one may have been opened meanwhile.
        if matches!(&*served, BufferStatus::Buffer(current) if std::ptr::eq(&**current, buffer)) {
            *served = BufferStatus::Failed(Problem::new(ProblemCode::StorageFailed, failure.to_string()));
            drop(served);
            self.interruptions.send_modify(|interruptions| interruptions.failures += 1);
        }
    }

    /// Records why the buffer could not be opened again.
    pub(super) fn still_failed(&self, error: &BufferError) {
        let mut served = self.served.write().unwrap_or_else(PoisonError::into_inner);
        *served = BufferStatus::Failed(Problem::new(ProblemCode::StorageFailed, error.to_string()));
    }

    /// Continues with the reopened buffer.
    pub(super) fn reopened(&self, buffer: Buffer) {
        *self.served.write().unwrap_or_else(PoisonError::into_inner) = BufferStatus::Buffer(Arc::new(buffer));
    }

    /// Ends all waits from now on.
    pub(super) fn stop(&self) {
        self.interruptions.send_modify(|interruptions| interruptions.stopping = true);
    }

    /// Waits for `work`, unless the server stops or the storage fails.
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

    /// Limits of one group.
    pub(super) fn item_limits(&self) -> ItemLimits {
        let ServerLimits { trajectories, tokens, vocabulary, values, name_bytes, depth, correct, .. } =
            self.limits;
        ItemLimits { trajectories, tokens, vocabulary, values, name_bytes, depth, correct }
    }

    /// Limits of the model and recipe; `None` if any group is accepted.
    ///
    /// # Errors
    /// [`ProblemCode::Preparing`] until they are known.
    pub(super) fn group_limits(&self) -> Result<Option<GroupLimits>, Problem> {
        let Some(limits) = &self.entry.limits else { return Ok(None) };
        limits.get().copied().map(Some).ok_or_else(|| {
            Problem::new(
                ProblemCode::Preparing,
                "the run is still opening its model: send the same again soon",
            )
        })
    }

    /// Counts and reports a refused group.
    pub(super) fn refused(&self, sender: Option<IpAddr>, rejection: &Rejection) {
        self.metrics.refused_groups.inc();
        if let Some(refused) = &self.entry.refused {
            refused(RefusedGroup { sender, code: rejection.code.as_str(), detail: &rejection.detail });
        }
    }
}
