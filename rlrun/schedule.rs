//! `schedule.bin`: what an asynchronous run did in which order, so that `rlrun replay` can repeat it.
//!
//! A record per start of the run (recipe, build, digests of the weights that it starts from) and one per training step: the leased
//! groups in their order, with tokens, versions, log-probabilities, rewards and answers of environments as they came, and a digest of
//! every trained tensor after the step.
//!
//! # Layout
//! - `file`: the records on disk, appended and checked
//! - `record`: what they say
//! - `recorder`: writes them during a run
//!
//! Invariant: a record counts only if it is whole, follows the record before it, and has the bytes that were written.

mod file;
mod record;
mod recorder;

use std::path::{Path, PathBuf};

pub(crate) use file::{ScheduleReader, cut_after};
pub(crate) use record::{ScheduleRecord, StartRecord, StepNumbers, StepRecord, TrainedTensors, build_id};
pub(crate) use recorder::ScheduleRecorder;

/// Name of the file in a run directory.
pub(crate) const FILE: &str = "schedule.bin";

/// The schedule of the run in `run_dir`.
pub(crate) fn path(run_dir: &Path) -> PathBuf {
    run_dir.join(FILE)
}

/// Why a schedule cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// There is none.
    #[error("`{path}` is not there: the run has no schedule; record one with `[log] schedule = true`")]
    NotThere {
        /// The file.
        path: PathBuf,
    },
    /// It is no schedule, or one of another format.
    #[error("`{path}` is no schedule that this rlrun reads: it does not begin with `{expected}`")]
    Unknown {
        /// The file.
        path: PathBuf,
        /// Its first line.
        expected: &'static str,
    },
    /// It has no record.
    #[error("`{path}` is empty: the run ended before it began to train")]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// It ends in the middle of a record.
    #[error(
        "`{path}` was cut, or its run is in progress and writes it: it ends at byte {bytes}, within the record after {after}; copy the \
         whole file, or wait for the end of the run"
    )]
    Cut {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The last whole record.
        after: String,
    },
    /// The bytes of a record are not those that were written, or do not follow the record before.
    #[error(
        "`{path}` was edited or damaged: the record at byte {at}, after {after}, {reason}; copy the file again"
    )]
    Edited {
        /// The file.
        path: PathBuf,
        /// Where the record begins, bytes.
        at: u64,
        /// The record before it.
        after: String,
        /// What is wrong.
        reason: String,
    },
    /// It is the schedule of another run.
    #[error("`{path}` is the schedule of another run: {reason}; copy that of this run")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
    /// A record cannot be written.
    #[error(
        "cannot append a record to `{path}`: it {reason}; continue without a schedule: `rlrun resume RUN --set log.schedule=false`"
    )]
    Encode {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The file system refused.
    #[error("cannot {verb} `{path}`: {source}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl ScheduleError {
    /// The schedule at `path` has `step`, which ended at another time in the metrics of the run.
    pub(crate) fn other_time(path: &Path, step: u64) -> Self {
        let reason = format!("step {step} ended at another time in metrics.jsonl");
        Self::Foreign { path: path.to_path_buf(), reason }
    }

    /// Whether the file is wrong, and not the system.
    #[must_use]
    pub fn is_input(&self) -> bool {
        !matches!(self, Self::Io { .. } | Self::Encode { .. })
    }
}
