//! What can go wrong at the buffer. Every message says what was found and what to do about it.

use std::path::PathBuf;
use std::time::Duration;

use trajectory::{GroupId, PolicyVersion};

use crate::{BufferConfig, Stats};

/// Why the buffer did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// The configuration admits nothing, or more than can be kept.
    #[error(
        "batch_groups = {batch_groups} with max_staleness = {max_staleness} makes (max_staleness + 1) * batch_groups \
         slots; there must be between 1 and {limit}"
    )]
    Config {
        /// Groups per step.
        batch_groups: usize,
        /// The bound, in versions.
        max_staleness: u64,
        /// Most slots there can be.
        limit: usize,
    },
    /// A group without trajectories has no version and trains nothing.
    #[error("{group} has no trajectories: abort it instead of finalizing it")]
    EmptyGroup {
        /// Which one.
        group: GroupId,
    },
    /// The verb does not fit the life of the group.
    #[error("{group} is {is}, but must be {needs}: discard what was generated for it and ask for admission")]
    WrongState {
        /// Which one.
        group: GroupId,
        /// Where it is in its life.
        is: &'static str,
        /// Where it would have to be.
        needs: &'static str,
    },
    /// No batch could be put together in time.
    #[error("no batch for the step from {step} within {:.1} s: {stats}; {}", .waited.as_secs_f64(), remedy(*.held_for_slow))]
    LeaseTimeout {
        /// The step that asked.
        step: PolicyVersion,
        /// How long it waited.
        waited: Duration,
        /// Whether a batch was there, but held back so that slow groups stay within the bound.
        held_for_slow: bool,
        /// Who waits for whom.
        stats: Box<Stats>,
    },
    /// The groups of the step were forgotten or given back, and later steps were leased.
    #[error(
        "the step from {step} cannot be leased: the next is {next}, and groups of steps before {acked} were forgotten \
         when their checkpoint was acknowledged; resume from a checkpoint at {acked} or later, or start with an empty buffer"
    )]
    StepPassed {
        /// The step that asked.
        step: PolicyVersion,
        /// The lowest step that was never leased.
        next: PolicyVersion,
        /// Groups of steps below are forgotten.
        acked: PolicyVersion,
    },
    /// Only the newest lease can be given back: on the others later versions are built.
    #[error(
        "the lease of the step from {step} cannot be released: it is not the newest; the next step is {next}"
    )]
    NotNewestLease {
        /// The step that asked.
        step: PolicyVersion,
        /// The lowest step that was never leased.
        next: PolicyVersion,
    },
    /// Another process has the journal open.
    #[error("journal {} is open in another process: stop that run, or use another run directory", .path.display())]
    Locked {
        /// The journal.
        path: PathBuf,
    },
    /// The file is something else.
    #[error("{} is not a journal of this program ({found}): move it away, or use another run directory", .path.display())]
    NotAJournal {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        found: String,
    },
    /// A newer program wrote the journal.
    #[error(
        "journal {} has format {found}, this program reads up to {known}: use the program that wrote it, or a newer one",
        .path.display()
    )]
    NewerFormat {
        /// The journal.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The newest format known here.
        known: u64,
    },
    /// The journal cannot be read or written.
    #[error("journal {}: {action}: {source}; check the disk, then resume the run", .path.display())]
    Journal {
        /// The journal.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// What the store said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An earlier failure of the writer; nothing is acknowledged any more.
    #[error("journal {}: the writer has stopped: {cause}; check the disk, then resume the run", .path.display())]
    WriterStopped {
        /// The journal.
        path: PathBuf,
        /// The first failure.
        cause: String,
    },
    /// The disk did not answer.
    #[error("journal {}: no write was acknowledged within {} s: check the disk, then resume the run", .path.display(), .waited.as_secs())]
    WriteTimeout {
        /// The journal.
        path: PathBuf,
        /// How long it waited.
        waited: Duration,
    },
    /// Two calls finalize the same group and the first does not come back.
    #[error("{group} is being written by another call, which did not end within {} s: check the disk", .waited.as_secs())]
    StillWriting {
        /// Which one.
        group: GroupId,
        /// How long it waited.
        waited: Duration,
    },
    /// A thread panicked in the middle of a change.
    #[error("a thread panicked while it changed the buffer: see its message, then resume the run")]
    Poisoned,
}

impl BufferConfig {
    pub(crate) fn checked(self) -> Result<Self, BufferError> {
        let fits = self
            .max_staleness
            .checked_add(1)
            .and_then(|versions| usize::try_from(versions).ok()?.checked_mul(self.batch_groups))
            .is_some_and(|slots| (1..=Self::MAX_SLOTS).contains(&slots));
        if fits {
            return Ok(self);
        }
        let Self { batch_groups, max_staleness, .. } = self;
        Err(BufferError::Config { batch_groups, max_staleness, limit: Self::MAX_SLOTS })
    }
}

fn remedy(held_for_slow: bool) -> &'static str {
    if held_for_slow {
        "a batch is held back so that the oldest in flight stay within max_staleness: see why they are slow, or set \
         on_stale = \"drop\""
    } else {
        "the trainer waits for the samplers: see why the oldest in flight are slow, or give rollout more devices"
    }
}
