//! Spans of samplers, rewards and the journal, kept until no open step can need them.
//!
//! Invariant: at most [`MAX_SPANS`] spans are kept; of more, the oldest are dropped and counted.

use std::collections::{BTreeMap, VecDeque};

use crate::span_line::SpanLine;

/// Most spans of all lanes.
const MAX_SPANS: usize = 400_000;
/// Most lanes.
const MAX_LANES: usize = 4096;

/// What a sampler does, as far as the critical path distinguishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SamplerActivity {
    Paused,
    Applies,
    Samples,
    WaitsForEnvironment,
    WaitsForBuffer,
    WaitsForWeights,
    WaitsForRewards,
}

impl SamplerActivity {
    /// The state that a span of a sampler's lane says; the notes of waits are those of `docs/run_directory.md`.
    fn of(kind: &str, note: &str) -> Option<Self> {
        Some(match kind {
            "paused" => Self::Paused,
            "apply_weights" => Self::Applies,
            "sample" => Self::Samples,
            "wait" if note.starts_with("environments") => Self::WaitsForEnvironment,
            "wait" if note.starts_with("the buffer") => Self::WaitsForBuffer,
            "wait" if note.starts_with("rewards") => Self::WaitsForRewards,
            "wait" if note.starts_with("a slot or newer weights") => Self::WaitsForWeights,
            _ => return None,
        })
    }
}

/// A span of time, seconds of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TimeSpan<S> {
    pub(super) start: f64,
    pub(super) end: f64,
    pub(super) state: S,
}

/// The lanes of the roles beside the trainer.
#[derive(Clone, Debug, Default)]
pub(super) struct SideLanes {
    samplers: BTreeMap<String, VecDeque<TimeSpan<SamplerActivity>>>,
    rewards: BTreeMap<String, VecDeque<TimeSpan<()>>>,
    journal: VecDeque<TimeSpan<()>>,
    spans: usize,
    pub(super) dropped: u64,
}

impl SideLanes {
    /// Keeps the span of `line`, if it is of such a lane.
    pub(super) fn add(&mut self, line: &SpanLine<'_>) {
        let (start, end, lane) = (line.start, line.end(), line.lane());
        if end <= start {
            return;
        }
        let full = self.samplers.len() + self.rewards.len() >= MAX_LANES;
        if lane == "journal" {
            self.journal.push_back(TimeSpan { start, end, state: () });
        } else if let Some(name) = lane.strip_prefix("reward ") {
            if full && !self.rewards.contains_key(name) {
                self.dropped += 1;
                return;
            }
            self.rewards.entry(name.to_owned()).or_default().push_back(TimeSpan { start, end, state: () });
        } else if let Some(state) = SamplerActivity::of(line.kind(), line.note().unwrap_or_default()) {
            if full && !self.samplers.contains_key(lane) {
                self.dropped += 1;
                return;
            }
            self.samplers.entry(lane.to_owned()).or_default().push_back(TimeSpan { start, end, state });
        } else {
            return;
        }
        self.spans += 1;
        if self.spans > MAX_SPANS {
            self.drop_oldest();
        }
    }

    /// Drops what ended before `time`, seconds.
    pub(super) fn forget_before(&mut self, time: f64) {
        // Spans of one lane are in order, but for parts that were reported late.
        fn prune<S>(spans: &mut VecDeque<TimeSpan<S>>, time: f64) -> usize {
            let old = spans.iter().take_while(|span| span.end < time).count();
            spans.drain(..old);
            old
        }
        let mut dropped = prune(&mut self.journal, time);
        dropped += self.rewards.values_mut().map(|spans| prune(spans, time)).sum::<usize>();
        dropped += self.samplers.values_mut().map(|spans| prune(spans, time)).sum::<usize>();
        self.spans -= dropped;
    }

    /// Drops the older half of every lane.
    fn drop_oldest(&mut self) {
        fn halve<S>(spans: &mut VecDeque<TimeSpan<S>>) -> usize {
            let half = spans.len().div_ceil(2);
            spans.drain(..half);
            half
        }
        let mut dropped = halve(&mut self.journal);
        dropped += self.rewards.values_mut().map(halve).sum::<usize>();
        dropped += self.samplers.values_mut().map(halve).sum::<usize>();
        self.spans -= dropped;
        self.dropped += dropped as u64;
    }

    /// The names of the samplers.
    pub(super) fn samplers(&self) -> impl Iterator<Item = &str> {
        self.samplers.keys().map(String::as_str)
    }

    /// When `sampler` was in `state`, between two times.
    pub(super) fn sampler(
        &self,
        sampler: &str,
        state: SamplerActivity,
        (from, to): (f64, f64),
    ) -> impl Iterator<Item = (f64, f64)> {
        let spans = self.samplers.get(sampler).into_iter().flatten();
        let inside = move |span: &&TimeSpan<SamplerActivity>| span.end > from && span.start < to;
        spans.filter(inside).filter(move |span| span.state == state).map(|span| (span.start, span.end))
    }

    /// When the journal committed, between two times.
    pub(super) fn commits(&self, (from, to): (f64, f64)) -> impl Iterator<Item = (f64, f64)> {
        let inside = move |span: &&TimeSpan<()>| span.end > from && span.start < to;
        self.journal.iter().filter(inside).map(|span| (span.start, span.end))
    }

    /// When `reward` judged, between two times.
    pub(super) fn judging(&self, reward: &str, (from, to): (f64, f64)) -> impl Iterator<Item = (f64, f64)> {
        let inside = move |span: &&TimeSpan<()>| span.end > from && span.start < to;
        let spans = self.rewards.get(reward).into_iter().flatten();
        spans.filter(inside).map(|span| (span.start, span.end))
    }

    /// The names of the rewards.
    pub(super) fn rewards(&self) -> impl Iterator<Item = &str> {
        self.rewards.keys().map(String::as_str)
    }

    /// The reward that judges most of the time between two times, if one does at all.
    pub(super) fn busiest_reward(&self, window: (f64, f64)) -> Option<&str> {
        let overlap = |(start, end): (f64, f64)| end.min(window.1) - start.max(window.0);
        let seconds = |reward: &&str| self.judging(reward, window).map(overlap).sum::<f64>();
        let busy = self.rewards().map(|reward| (seconds(&reward), reward));
        // Of equal ones the first by name.
        busy.filter(|(seconds, _)| *seconds > 0.0)
            .fold(None, |best: Option<(f64, &str)>, next| match best {
                Some(best) if best.0 >= next.0 => Some(best),
                _ => Some(next),
            })
            .map(|(_, reward)| reward)
    }
}
