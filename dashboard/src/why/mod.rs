//! Why a run takes the time that it takes: the critical path of every step, what stalled it, and who the others waited for.
//!
//! - `lanes`: what samplers, rewards and the journal did; `reader`: lines to steps
//! - [`cause`]: resources; `path`: the critical path of a step; [`stalls`]: outliers within the run
//! - `answer`: the result as JSON, for `rlrun why --json` and the page
//!
//! `docs/why.md` has the method and the meaning of every cause.
//!
//! Invariant: the file is read as a stream, and memory does not depend on its length. What the page shows and what `rlrun why`
//! prints is one [`RunExplanation`].

mod answer;
pub mod cause;
mod follow;
mod lanes;
mod path;
mod reader;
pub mod stalls;
#[cfg(test)]
mod tests;

use std::io;
use std::path::Path;
use std::sync::Arc;

pub use cause::{Cause, CauseKind};
pub(crate) use follow::{FollowedPaths, SerialAdvisor};
use serde_json::Value;
pub use stalls::Stall;

use crate::lines::{LineSink, for_each_line, open_inside};
use reader::{CauseTotal, PathReader, PathRows, StepRow};
use stalls::median;

/// Most stragglers and slowest steps that are listed.
const MAX_LISTED: usize = 5;

/// Seconds of a cause on the critical path of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct CauseShare {
    /// The resource.
    pub cause: Cause,
    /// All steps together.
    pub seconds: f64,
    /// Of the wall time of all steps, 0 to 1.
    pub share: f64,
    /// Steps that have it.
    pub steps: u64,
}

/// The critical path of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ExplainedStep {
    /// The training step.
    pub step: u64,
    /// The end of the step before, seconds of the run.
    pub start_s: f64,
    /// Seconds from there to its own end.
    pub seconds: f64,
    /// Its causes and their seconds, the longest first; they sum to `seconds`.
    pub path: Vec<(Cause, f64)>,
}

/// Where the time of a run went.
#[derive(Clone, Debug)]
pub struct RunExplanation {
    /// Steps in the timeline; a step that a resume repeated counts twice.
    pub steps: u64,
    /// Starts and resumes.
    pub attempts: u64,
    /// Time of all these steps, seconds.
    pub wall_s: f64,
    /// Median time of a step, seconds.
    pub median_step_s: f64,
    /// Where it went, the longest first; the seconds sum to `wall_s`.
    pub causes: Vec<CauseShare>,
    /// Samplers, rewards, ranks and environments that the others waited for longest, by name.
    pub stragglers: Vec<CauseShare>,
    /// What took longer than it does otherwise, the longest first.
    pub stalls: Vec<Stall>,
    /// The slowest steps.
    pub slowest: Vec<ExplainedStep>,
    /// Lines of the file that are no lines of a timeline, such as a last one that was cut.
    pub unreadable: u64,
    /// Spans that were too many to be kept.
    pub dropped: u64,
    rows: PathRows,
}

/// Why a run cannot be explained.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExplanationError {
    /// The run has no timeline.
    #[error(
        "`{run}` has no `timeline.jsonl`: it ran with `log.timeline = 0`, or has not trained a step yet; `log.timeline` \
             writes it, from 1 on"
    )]
    NoTimeline {
        /// The run directory.
        run: String,
    },
    /// The timeline cannot be read.
    #[error("cannot read the timeline of `{run}`: {source}")]
    Read {
        /// The run directory.
        run: String,
        /// The system's answer.
        source: io::Error,
    },
}

/// Recommends changes for the run in a directory: an object with `changes` and `notes`.
pub type Advisor = Arc<dyn Fn(&Path, &RunExplanation) -> Value + Send + Sync>;

/// Reads the timeline of the run in `root` and explains it. A torn last line is left out and counted.
///
/// # Errors
/// A run without a timeline, or one that cannot be read.
pub fn explain(root: &Path) -> Result<RunExplanation, ExplanationError> {
    let run = || root.display().to_string();
    let read = |source| ExplanationError::Read { run: run(), source };
    let Some(file) = open_inside(root, &root.join("timeline.jsonl")).map_err(read)? else {
        return Err(ExplanationError::NoTimeline { run: run() });
    };
    let mut reader = PathReader::default();
    let mut too_long = 0;
    for_each_line(file, |line| {
        match line {
            Some(line) => reader.line(line.strip_suffix(b"\n").unwrap_or(line)),
            None => too_long += 1,
        }
        true
    })
    .map_err(read)?;
    reader.unreadable += too_long;
    Ok(RunExplanation::of(&reader))
}

impl RunExplanation {
    fn of(reader: &PathReader) -> Self {
        let rows = reader.rows();
        let mut causes: Vec<CauseShare> =
            rows.causes.iter().zip(&rows.totals).map(|(cause, total)| rows.share(cause, *total)).collect();
        causes.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.cause.cmp(&b.cause)));
        let named = |share: &&CauseShare| is_straggler(&share.cause, &causes);
        let stragglers = causes.iter().filter(named).take(MAX_LISTED).cloned().collect();
        let mut slowest: Vec<&StepRow> = rows.rows.iter().collect();
        slowest.sort_by(|a, b| b.seconds().total_cmp(&a.seconds()));
        slowest.truncate(MAX_LISTED);
        Self {
            steps: rows.steps,
            attempts: rows.attempts,
            wall_s: rows.wall_s,
            median_step_s: median(rows.rows.iter().map(StepRow::seconds).collect()),
            stragglers,
            stalls: stalls::stalls(&rows),
            slowest: slowest.into_iter().map(|row| rows.explained(row)).collect(),
            unreadable: reader.unreadable,
            dropped: reader.dropped() + rows.dropped,
            causes,
            rows,
        }
    }

    /// The critical path of a step, the newest one if it was repeated; `None` for a step that is not in the timeline, or before the
    /// newest 65,536.
    #[must_use]
    pub fn step(&self, step: u64) -> Option<ExplainedStep> {
        let row = self.rows.rows.iter().rev().find(|row| row.step == step)?;
        Some(self.rows.explained(row))
    }

    /// Share of the wall time of all causes of a kind, 0 to 1.
    #[must_use]
    pub fn share_of(&self, kind: CauseKind) -> f64 {
        self.causes.iter().filter(|share| share.cause.kind == kind).map(|share| share.share).sum()
    }
}

/// Whether a cause is one of several of its kind, or a role that the others wait for.
fn is_straggler(cause: &Cause, causes: &[CauseShare]) -> bool {
    match cause.kind {
        CauseKind::Reward | CauseKind::SlowRank | CauseKind::Paused | CauseKind::Environment => true,
        CauseKind::Sampling => {
            causes.iter().filter(|other| other.cause.kind == CauseKind::Sampling).count() > 1
        }
        _ => false,
    }
}

impl PathRows {
    fn share(&self, cause: &Cause, total: CauseTotal) -> CauseShare {
        let share = if self.wall_s > 0.0 { total.seconds / self.wall_s } else { 0.0 };
        CauseShare { cause: cause.clone(), seconds: total.seconds, share, steps: total.steps }
    }

    fn explained(&self, row: &StepRow) -> ExplainedStep {
        let mut path: Vec<(Cause, f64)> = row
            .parts
            .iter()
            .map(|(number, seconds)| (self.causes[usize::from(*number)].clone(), *seconds))
            .collect();
        path.sort_by(|a, b| b.1.total_cmp(&a.1));
        ExplainedStep { step: row.step, start_s: row.start, seconds: row.seconds(), path }
    }
}
