//! One curator shared by a rollout worker and its scorer, and the sink of its history.
//!
//! Invariant: an outcome is written before its group leaves the scorer. A crash between the two writes it again, and the
//! history counts it once.

use std::error::Error;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use trajectory::{Group, GroupId, PolicyVersion, TaskId};

use super::{CurationConfig, CurationCounts, CurationVerdict, Curator, Decision, Exhausted, TaskOutcome};
use crate::RolloutError;

/// Stores outcomes for a resume.
pub trait OutcomeSink: Send {
    /// Writes one outcome.
    ///
    /// # Errors
    /// Why it cannot be written.
    fn append(&mut self, outcome: &TaskOutcome) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// A curator that worker and scorer share.
#[derive(Clone)]
pub struct Curation {
    config: CurationConfig,
    shared: Arc<Mutex<SharedCurator>>,
}

struct SharedCurator {
    curator: Curator,
    sink: Box<dyn OutcomeSink>,
}

impl fmt::Debug for Curation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Curation").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Curation {
    /// Shares `curator`, whose outcomes go to `sink`.
    #[must_use]
    pub fn new(curator: Curator, sink: Box<dyn OutcomeSink>) -> Self {
        let config = *curator.config();
        Self { config, shared: Arc::new(Mutex::new(SharedCurator { curator, sink })) }
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &CurationConfig {
        &self.config
    }

    /// As [`Curator::decide`].
    #[must_use]
    pub fn decide(&self, group: GroupId, task: TaskId) -> Decision {
        self.lock().curator.decide(group, task)
    }

    /// As [`Curator::serve`].
    pub fn serve(&self, version: PolicyVersion) {
        self.lock().curator.serve(version);
    }

    /// As [`Curator::counts`].
    #[must_use]
    pub fn counts(&self) -> CurationCounts {
        self.lock().curator.counts()
    }

    /// As [`Curator::forget`].
    pub fn forget(&self, group: GroupId) {
        self.lock().curator.forget(group);
    }

    /// As [`Curator::exhausted`].
    #[must_use]
    pub fn exhausted(&self) -> Option<Exhausted> {
        self.lock().curator.exhausted()
    }

    /// As [`Curator::is_pending`].
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.lock().curator.is_pending()
    }

    /// As [`Curator::settle`]; the outcome is written first.
    ///
    /// # Errors
    /// If the outcome cannot be written.
    pub fn settle(&self, group: &mut Group) -> Result<CurationVerdict, RolloutError> {
        let mut shared = self.lock();
        let settled = shared.curator.settle(group);
        if let Some(outcome) = &settled.outcome {
            shared.sink.append(outcome).map_err(RolloutError::Outcome)?;
        }
        Ok(settled.verdict)
    }

    fn lock(&self) -> MutexGuard<'_, SharedCurator> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
