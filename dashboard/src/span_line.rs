//! A line of `timeline.jsonl`, for the timeline and for the critical path.
//!
//! Invariant: unknown fields are passed over. A line without lane, kind and times is none, nor is one whose known fields have other
//! types.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::events::cut;

/// Longest note that is shown, bytes.
pub(crate) const MAX_NOTE_BYTES: usize = 500;
/// Longest name of a lane or kind, bytes.
const MAX_NAME_BYTES: usize = 80;
/// Latest time that is believed, seconds; beyond it sums and differences are not exact.
const MAX_SECONDS: f64 = 1e12;
/// Most versions of a trajectory that are shown.
const MAX_VERSIONS: usize = 32;

/// A line of the file. Times are seconds of the run.
#[derive(Debug, Deserialize)]
pub(crate) struct SpanLine<'a> {
    #[serde(borrow)]
    lane: Cow<'a, str>,
    #[serde(borrow)]
    kind: Cow<'a, str>,
    pub(crate) start: f64,
    end: f64,
    pub(crate) step: Option<u64>,
    version: Option<u64>,
    count: Option<u64>,
    bytes: Option<u64>,
    note: Option<Cow<'a, str>>,
    group: Option<u64>,
    index: Option<u64>,
    lag: Option<f64>,
    versions: Option<Vec<u64>>,
    /// Whether the step waited for this trajectory last.
    #[serde(default)]
    last: bool,
    sampled: Option<f64>,
    scored: Option<f64>,
    settled: Option<f64>,
    stored: Option<f64>,
    leased: Option<f64>,
    sampler: Option<Cow<'a, str>>,
}

/// The trajectory that a step waited for last, and the times of its stages, seconds of the run.
#[derive(Clone, Debug)]
pub(crate) struct LastTrajectory {
    pub(crate) sampler: String,
    /// Its last token was sampled.
    pub(crate) sampled: f64,
    /// The rewards of its group had judged it.
    pub(crate) settled: f64,
    /// Its group was stored.
    pub(crate) stored: f64,
}

impl<'a> SpanLine<'a> {
    /// `None` for what is no line of a timeline.
    pub(crate) fn parse(line: &'a [u8]) -> Option<Self> {
        let line: Self = serde_json::from_slice(line).ok()?;
        (line.start.abs().max(line.end.abs()) <= MAX_SECONDS).then_some(line)
    }

    pub(crate) fn lane(&self) -> &str {
        cut(&self.lane, MAX_NAME_BYTES)
    }

    pub(crate) fn kind(&self) -> &str {
        cut(&self.kind, MAX_NAME_BYTES)
    }

    /// Not before the start, seconds.
    pub(crate) fn end(&self) -> f64 {
        self.end.max(self.start)
    }

    pub(crate) fn is_trajectory(&self) -> bool {
        self.kind == "trajectory"
    }

    /// The times of its stages, if its step waited for this trajectory last.
    pub(crate) fn last_trajectory(&self) -> Option<LastTrajectory> {
        let (sampled, stored) = (self.sampled?, self.stored?);
        // Timelines of earlier versions do not have the end of the rewards of groups.
        let settled = self.settled.or(self.scored)?;
        let sampler = cut(self.sampler.as_deref()?, MAX_NAME_BYTES).to_owned();
        let last = LastTrajectory { sampler, sampled, settled: settled.max(sampled), stored };
        let finite = [last.sampled, last.settled, last.stored].into_iter().all(f64::is_finite);
        (self.last && finite).then_some(last)
    }

    /// What a span that waits says it waits for.
    pub(crate) fn waits_for(&self) -> Option<&str> {
        self.note.as_deref().filter(|_| is_wait(&self.kind)).map(|note| cut(note, MAX_NAME_BYTES))
    }

    pub(crate) fn note(&self) -> Option<&str> {
        self.note.as_deref().map(|note| cut(note, MAX_NOTE_BYTES))
    }

    /// The fields beside lane, kind and times that the line has.
    pub(crate) fn details(&self) -> Map<String, Value> {
        let whole = [
            ("step", self.step),
            ("version", self.version),
            ("count", self.count),
            ("bytes", self.bytes),
            ("group", self.group),
            ("index", self.index),
        ];
        let times = [
            ("lag", self.lag),
            ("sampled", self.sampled),
            ("scored", self.scored),
            ("stored", self.stored),
            ("leased", self.leased),
        ];
        let mut details = Map::new();
        let mut add = |name: &str, value: Value| details.insert(name.to_owned(), value);
        for (name, value) in whole.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            add(name, value.into());
        }
        for (name, value) in times.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            add(name, value.into());
        }
        if let Some(note) = self.note() {
            add("note", note.into());
        }
        if let Some(versions) = &self.versions {
            add("versions", versions[..versions.len().min(MAX_VERSIONS)].into());
        }
        if let Some(sampler) = &self.sampler {
            add("sampler", cut(sampler, MAX_NAME_BYTES).into());
        }
        details
    }
}

/// Whether time of this kind is spent waiting.
pub(crate) fn is_wait(kind: &str) -> bool {
    kind.starts_with("wait")
}
