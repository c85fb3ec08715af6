//! A line of `timeline.jsonl`.
//!
//! Invariant: unknown fields are passed over, and a line without lane, kind and times is none.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::events::cut;

/// Longest note that is shown, bytes.
pub(super) const MAX_NOTE_BYTES: usize = 500;
/// Longest name of a lane or kind, bytes.
const MAX_NAME_BYTES: usize = 80;
/// Latest time that is believed, seconds; beyond it sums and differences are not exact.
const MAX_SECONDS: f64 = 1e12;
/// Most versions of a trajectory that are shown.
const MAX_VERSIONS: usize = 32;

/// A line of the file. Times are seconds of the run.
#[derive(Debug, Deserialize)]
pub(super) struct SpanLine<'a> {
    #[serde(borrow)]
    lane: Cow<'a, str>,
    #[serde(borrow)]
    kind: Cow<'a, str>,
    pub(super) start: f64,
    end: f64,
    pub(super) step: Option<u64>,
    version: Option<u64>,
    count: Option<u64>,
    bytes: Option<u64>,
    note: Option<Cow<'a, str>>,
    group: Option<u64>,
    index: Option<u64>,
    lag: Option<f64>,
    versions: Option<Vec<u64>>,
    sampled: Option<f64>,
    scored: Option<f64>,
    stored: Option<f64>,
    leased: Option<f64>,
    sampler: Option<Cow<'a, str>>,
}

impl<'a> SpanLine<'a> {
    /// `None` for what is no line of a timeline.
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let line: Self = serde_json::from_slice(line).ok()?;
        (line.start.abs().max(line.end.abs()) <= MAX_SECONDS).then_some(line)
    }

    pub(super) fn lane(&self) -> &str {
        cut(&self.lane, MAX_NAME_BYTES)
    }

    pub(super) fn kind(&self) -> &str {
        cut(&self.kind, MAX_NAME_BYTES)
    }

    /// Not before the start, seconds.
    pub(super) fn end(&self) -> f64 {
        self.end.max(self.start)
    }

    pub(super) fn is_trajectory(&self) -> bool {
        self.kind == "trajectory"
    }

    /// What a span that waits says it waits for.
    pub(super) fn waits_for(&self) -> Option<&str> {
        self.note.as_deref().filter(|_| is_wait(&self.kind)).map(|note| cut(note, MAX_NAME_BYTES))
    }

    pub(super) fn note(&self) -> Option<&str> {
        self.note.as_deref().map(|note| cut(note, MAX_NOTE_BYTES))
    }

    /// The fields beside lane, kind and times that the line has.
    pub(super) fn details(&self) -> Map<String, Value> {
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
pub(super) fn is_wait(kind: &str) -> bool {
    kind.starts_with("wait")
}
