//! What the critical path needs of a line of `timeline.jsonl`.
//!
//! Invariant: a line without lane, kind and finite times is none; unknown fields are passed over.

use std::borrow::Cow;

use serde::Deserialize;

use crate::events::cut;

/// Longest name of a lane, bytes.
const MAX_NAME_BYTES: usize = 80;
/// Latest time that is believed, seconds; beyond it sums are not exact.
const MAX_SECONDS: f64 = 1e12;

/// A line. Times are seconds of the run.
#[derive(Debug, Deserialize)]
pub(super) struct PathLine<'a> {
    #[serde(borrow)]
    lane: Cow<'a, str>,
    #[serde(borrow)]
    kind: Cow<'a, str>,
    pub(super) start: f64,
    pub(super) end: f64,
    pub(super) step: Option<u64>,
    note: Option<Cow<'a, str>>,
    /// Whether the step waited for this trajectory last.
    #[serde(default)]
    pub(super) last: bool,
    sampled: Option<f64>,
    scored: Option<f64>,
    settled: Option<f64>,
    stored: Option<f64>,
    sampler: Option<Cow<'a, str>>,
}

/// The trajectory that a step waited for last, and the times of its stages, seconds of the run.
#[derive(Clone, Debug)]
pub(super) struct LastTrajectory {
    pub(super) sampler: String,
    /// Its last token was sampled.
    pub(super) sampled: f64,
    /// The rewards of its group had judged it.
    pub(super) settled: f64,
    /// Its group was stored.
    pub(super) stored: f64,
}

impl<'a> PathLine<'a> {
    /// `None` for what is no line of a timeline.
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let line: Self = serde_json::from_slice(line).ok()?;
        (line.start.abs().max(line.end.abs()) <= MAX_SECONDS).then_some(line)
    }

    pub(super) fn lane(&self) -> &str {
        cut(&self.lane, MAX_NAME_BYTES)
    }

    pub(super) fn kind(&self) -> &str {
        &self.kind
    }

    pub(super) fn note(&self) -> &str {
        self.note.as_deref().unwrap_or_default()
    }

    pub(super) fn is_trajectory(&self) -> bool {
        self.kind == "trajectory"
    }

    /// The times of its stages, if its step waited for this trajectory last.
    pub(super) fn last_trajectory(&self) -> Option<LastTrajectory> {
        let (sampled, stored) = (self.sampled?, self.stored?);
        // Timelines of earlier versions do not have the end of the rewards of groups.
        let settled = self.settled.or(self.scored)?;
        let sampler = cut(self.sampler.as_deref()?, MAX_NAME_BYTES).to_owned();
        let last = LastTrajectory { sampler, sampled, settled: settled.max(sampled), stored };
        let finite = [last.sampled, last.settled, last.stored].into_iter().all(f64::is_finite);
        (self.last && finite).then_some(last)
    }
}
