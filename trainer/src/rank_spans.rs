//! What the ranks of a learner do during the updates of a batch, as the computing thread of each rank sees it.
//!
//! Times count from the start of the updates in the process of the rank, so the clocks of two machines are never compared.
//! Ranks that are a device group wait for each other on their devices: the host cannot see these waits, which are part of
//! the passes.
//!
//! Invariant: a batch has at most [`MAX_SPANS`] spans per rank, whatever its number of micro-batches. The spans of a rank do
//! not overlap and are in order.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Most spans of a rank; what follows extends the last one.
pub const MAX_SPANS: usize = 256;
/// A shorter phase counts as part of the one before, seconds.
const BRIEF: f64 = 1e-4;

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankPhase {
    /// Forward passes before the first update: log-probabilities, values, those of the reference policy.
    Score,
    /// Forward and backward passes.
    ForwardBackward,
    /// Waiting for values of the other ranks.
    Wait,
    /// Clipping and the update of its shards.
    Optimizer,
}

/// A phase of a rank, seconds since the start of the updates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankSpan {
    /// What it does.
    pub phase: RankPhase,
    /// Its start.
    pub start: f64,
    /// Its end, not before the start.
    pub end: f64,
}

/// The clock of one rank. It records nothing before its first [`Self::restart`].
#[derive(Debug, Default)]
pub(crate) struct RankClock(Mutex<RecordedPhases>);

#[derive(Debug, Default)]
struct RecordedPhases {
    begin: Option<Instant>,
    /// The open phase and its start.
    current: Option<(RankPhase, f64)>,
    spans: Vec<RankSpan>,
}

/// Ends a phase when it is dropped, and continues the phase around it.
#[derive(Debug)]
pub(crate) struct PhaseGuard<'a> {
    clock: &'a RankClock,
    before: Option<RankPhase>,
}

impl RankClock {
    /// Starts at second 0, without spans.
    pub(crate) fn restart(&self, begin: Instant) {
        *self.recorded() = RecordedPhases { begin: Some(begin), ..RecordedPhases::default() };
    }

    /// The spans since the start.
    pub(crate) fn take(&self) -> Vec<RankSpan> {
        std::mem::take(&mut self.recorded().spans)
    }

    /// Starts a phase, which lasts until the guard is dropped. Only one thread of a rank has phases at a time.
    pub(crate) fn enter(&self, phase: RankPhase) -> PhaseGuard<'_> {
        PhaseGuard { clock: self, before: self.switch(Some(phase)) }
    }

    /// Does `work` as `phase`.
    pub(crate) fn during<R>(&self, phase: RankPhase, work: impl FnOnce() -> R) -> R {
        let _guard = self.enter(phase);
        work()
    }

    /// Ends the open phase and starts `next`. Returns the ended one.
    fn switch(&self, next: Option<RankPhase>) -> Option<RankPhase> {
        let mut recorded = self.recorded();
        let now = recorded.begin?.elapsed().as_secs_f64();
        let before = std::mem::replace(&mut recorded.current, next.map(|phase| (phase, now)));
        let (phase, start) = before?;
        recorded.add(RankSpan { phase, start, end: now });
        Some(phase)
    }

    fn recorded(&self) -> MutexGuard<'_, RecordedPhases> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RecordedPhases {
    fn add(&mut self, span: RankSpan) {
        let full = self.spans.len() >= MAX_SPANS;
        match self.spans.last_mut() {
            Some(last) if full => last.end = span.end,
            Some(last)
                if span.start - last.end < BRIEF
                    && (last.phase == span.phase || span.end - span.start < BRIEF) =>
            {
                last.end = span.end;
            }
            _ => self.spans.push(span),
        }
    }
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        self.clock.switch(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(phase: RankPhase, start: f64, end: f64) -> RankSpan {
        RankSpan { phase, start, end }
    }

    #[test]
    fn a_wait_divides_the_phase_around_it() {
        let clock = RankClock::default();
        clock.during(RankPhase::Score, || ());
        assert_eq!(clock.take(), [], "it was not started");
        // It has run for a while.
        let begin = Instant::now().checked_sub(std::time::Duration::from_secs(1)).unwrap();
        clock.restart(begin);
        let wait = || {
            let until = begin.elapsed() + std::time::Duration::from_millis(1);
            while begin.elapsed() < until {
                std::hint::spin_loop();
            }
        };
        clock.during(RankPhase::ForwardBackward, || {
            wait();
            clock.during(RankPhase::Wait, wait);
            wait();
        });
        let _optimizer = clock.enter(RankPhase::Optimizer);
        drop(_optimizer);
        let spans = clock.take();
        let phases: Vec<RankPhase> = spans.iter().map(|span| span.phase).collect();
        assert_eq!(phases, [RankPhase::ForwardBackward, RankPhase::Wait, RankPhase::ForwardBackward]);
        assert!(spans.windows(2).all(|pair| pair[0].end == pair[1].start), "{spans:?}");
        assert!(spans.iter().all(|span| span.start >= 1.0 && span.end - span.start >= 0.001), "{spans:?}");
        assert_eq!(clock.take(), []);
    }

    #[test]
    fn brief_phases_are_merged_and_their_number_is_bounded() {
        let mut recorded = RecordedPhases::default();
        recorded.add(span(RankPhase::ForwardBackward, 0.0, 0.5));
        recorded.add(span(RankPhase::Wait, 0.5, 0.500_05));
        recorded.add(span(RankPhase::ForwardBackward, 0.500_05, 1.0));
        assert_eq!(recorded.spans, [span(RankPhase::ForwardBackward, 0.0, 1.0)]);
        // A gap between two minibatches stays one.
        recorded.add(span(RankPhase::ForwardBackward, 1.5, 2.0));
        assert_eq!(recorded.spans.len(), 2);
        for index in 2..1000 {
            let phase = if index % 2 == 0 { RankPhase::Wait } else { RankPhase::ForwardBackward };
            recorded.add(span(phase, f64::from(index), f64::from(index + 1)));
        }
        assert_eq!((recorded.spans.len(), recorded.spans[MAX_SPANS - 1].end), (MAX_SPANS, 1000.0));
    }
}
