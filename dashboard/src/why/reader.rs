//! Reads a timeline line by line into the critical paths of its steps.
//!
//! Invariant: memory does not depend on the length of the file. A step stays open until the trainer is [`LATE_S`] further, for
//! workers report what they did afterwards; then it is a row of seconds by cause, of which the newest [`MAX_ROWS`] are kept one by
//! one.

use std::collections::{BTreeMap, VecDeque};

use super::cause::{Cause, CauseKind};
use super::lanes::SideLanes;
use super::path::{StepCauses, StepLines, TrainerWork};
use crate::lines::LineSink;
use crate::span_line::SpanLine;

/// How much later than a step its workers may report what they did, seconds of the run.
const LATE_S: f64 = 30.0;
/// Most steps that wait for reports.
const MAX_OPEN: usize = 2048;
/// Most spans of ranks of the open steps.
const MAX_RANK_SPANS: usize = 400_000;
/// Most ranks of a step.
pub(super) const MAX_RANKS: usize = 4096;
/// Most spans of a step that interrupt others.
const MAX_INTERRUPTIONS: usize = 16;
/// Most steps that are kept one by one.
pub(super) const MAX_ROWS: usize = 65_536;
/// Most causes; the time of others is of an unknown cause.
const MAX_CAUSES: usize = 1024;

/// The causes of a step.
#[derive(Clone, Debug)]
pub(super) struct StepRow {
    pub(super) step: u64,
    /// When the step before it ended, seconds of the run.
    pub(super) start: f64,
    /// When it ended, seconds of the run.
    pub(super) end: f64,
    /// Whether it is the first of a start or resume, in which samplers and buffer begin.
    pub(super) is_first: bool,
    /// Seconds by number of the cause, each cause once.
    pub(super) parts: Vec<(u16, f64)>,
}

impl StepRow {
    /// Seconds from the end of the step before to its own.
    pub(super) fn seconds(&self) -> f64 {
        self.end - self.start
    }

    /// Seconds of the cause with this number.
    pub(super) fn of(&self, cause: u16) -> f64 {
        self.parts.iter().find(|(known, _)| *known == cause).map_or(0.0, |(_, seconds)| *seconds)
    }
}

/// Seconds of a cause over all steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CauseTotal {
    pub(super) seconds: f64,
    /// Steps in which it has any.
    pub(super) steps: u64,
}

/// The rows of closed steps, and sums over all.
#[derive(Clone, Debug, Default)]
pub(super) struct PathRows {
    /// By number.
    pub(super) causes: Vec<Cause>,
    numbers: BTreeMap<Cause, u16>,
    pub(super) totals: Vec<CauseTotal>,
    pub(super) rows: VecDeque<StepRow>,
    /// All steps, those included that are no longer kept.
    pub(super) steps: u64,
    /// Starts and resumes.
    pub(super) attempts: u64,
    pub(super) wall_s: f64,
    /// Spans that were too many for their step.
    pub(super) dropped: u64,
}

impl PathRows {
    fn number(&mut self, cause: Cause) -> u16 {
        let full = self.causes.len() + 1 >= MAX_CAUSES && !self.numbers.contains_key(&cause);
        let cause = if full { Cause::only(CauseKind::Unknown) } else { cause };
        if let Some(number) = self.numbers.get(&cause) {
            return *number;
        }
        let number = self.causes.len() as u16;
        self.causes.push(cause.clone());
        self.totals.push(CauseTotal::default());
        self.numbers.insert(cause, number);
        number
    }

    /// Adds a step that ended before it began as one without time.
    fn add(&mut self, step: &StepLines, begin: Option<f64>, lanes: &SideLanes) -> Option<f64> {
        let (first, end) = step.range()?;
        let start = begin.unwrap_or(first);
        let mut parts: Vec<(u16, f64)> = Vec::new();
        let StepCauses { seconds, dropped } = step.path(start, lanes);
        self.dropped += dropped;
        for (cause, seconds) in seconds {
            let number = self.number(cause);
            match parts.iter_mut().find(|(known, _)| *known == number) {
                Some((_, sum)) => *sum += seconds,
                None => parts.push((number, seconds)),
            }
        }
        for (number, seconds) in &parts {
            let total = &mut self.totals[usize::from(*number)];
            total.seconds += seconds;
            total.steps += 1;
        }
        let end = end.max(start);
        let row = StepRow { step: step.step, start, end, is_first: begin.is_none(), parts };
        self.wall_s += row.seconds();
        self.steps += 1;
        self.attempts += u64::from(row.is_first);
        self.rows.push_back(row);
        if self.rows.len() > MAX_ROWS {
            self.rows.pop_front();
        }
        Some(end)
    }
}

/// Reads a timeline that may still grow.
#[derive(Clone, Debug, Default)]
pub(super) struct PathReader {
    closed: PathRows,
    open: VecDeque<StepLines>,
    lanes: SideLanes,
    rank_spans: usize,
    /// When the last closed step ended, seconds of the run; `None` before the first of an attempt.
    cursor: Option<f64>,
    /// The newest time of the trainer, seconds of the run.
    newest: f64,
    /// Lines that are no lines of a timeline.
    pub(super) unreadable: u64,
    dropped: u64,
}

impl PathReader {
    /// The steps so far, those included that wait for reports.
    pub(super) fn rows(&self) -> PathRows {
        let (mut rows, mut cursor) = (self.closed.clone(), self.cursor);
        for step in &self.open {
            cursor = rows.add(step, cursor, &self.lanes).or(cursor);
        }
        rows
    }

    /// Spans that were too many to be kept.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped + self.lanes.dropped
    }

    fn close_first(&mut self) {
        if let Some(step) = self.open.pop_front() {
            self.rank_spans -= step.ranks.values().map(Vec::len).sum::<usize>();
            self.cursor = self.closed.add(&step, self.cursor, &self.lanes).or(self.cursor);
        }
    }

    /// Closes the steps that no report can change any more.
    fn close_old(&mut self) {
        let old = |step: &StepLines| step.range().is_some_and(|(_, end)| end + LATE_S < self.newest);
        // The newest step may have more lines.
        let closing = self.open.iter().take(self.open.len().saturating_sub(1)).take_while(|step| old(step));
        let count = closing.count().max(self.open.len().saturating_sub(MAX_OPEN));
        if count == 0 {
            return;
        }
        (0..count).for_each(|_| self.close_first());
        if let Some(cursor) = self.cursor {
            self.lanes.forget_before(cursor);
        }
    }

    /// The open step with this number; a number that is not above the newest one begins another attempt at the run.
    fn step(&mut self, step: u64, is_trainer: bool) -> Option<&mut StepLines> {
        let newest = self.open.back().map(|open| open.step);
        if is_trainer && newest.is_none_or(|newest| step > newest) {
            self.open.push_back(StepLines { step, ..StepLines::default() });
            self.close_old();
        }
        self.open.iter_mut().rev().find(|open| open.step == step)
    }

    /// The steps of an attempt that was resumed are over: what follows repeats steps.
    fn restart_attempt(&mut self) {
        while !self.open.is_empty() {
            self.close_first();
        }
        (self.cursor, self.newest) = (None, 0.0);
        let lanes = std::mem::take(&mut self.lanes);
        self.dropped += lanes.dropped;
    }

    fn trainer_line(&mut self, line: &SpanLine<'_>) {
        if line.kind() == "start" {
            self.restart_attempt();
            return;
        }
        let (Some(step), Some(work)) = (line.step, TrainerWork::of(line.kind())) else { return };
        // A step has one span of every kind, but for interruptions, and its last is written together with its first.
        let of_kind = |open: &StepLines| open.trainer.iter().filter(|(known, ..)| *known == work).count();
        let repeats = self.open.back().is_some_and(|open| {
            step < open.step || (step == open.step && !work.interrupts() && of_kind(open) > 0)
        });
        if repeats {
            self.restart_attempt();
        }
        let (start, end) = (line.start, line.end());
        self.newest = self.newest.max(end);
        let Some(open) = self.step(step, true) else { return };
        if of_kind(open) >= MAX_INTERRUPTIONS {
            self.dropped += 1;
        } else {
            open.trainer.push((work, start, end));
        }
    }

    fn rank_line(&mut self, line: &SpanLine<'_>) {
        if self.rank_spans >= MAX_RANK_SPANS {
            self.dropped += 1;
            return;
        }
        let span = (line.kind() == "wait", line.start, line.end());
        let Some(open) = line.step.and_then(|step| self.step(step, false)) else { return };
        if open.ranks.len() >= MAX_RANKS && !open.ranks.contains_key(line.lane()) {
            self.dropped += 1;
            return;
        }
        open.ranks.entry(line.lane().to_owned()).or_default().push(span);
        self.rank_spans += 1;
    }
}

impl LineSink for PathReader {
    fn restart(&mut self) {
        *self = Self::default();
    }

    fn line(&mut self, line: &[u8]) {
        let Some(line) = SpanLine::parse(line) else {
            self.unreadable += u64::from(!line.is_empty());
            return;
        };
        if line.is_trajectory() {
            if let (Some(last), Some(step)) = (line.last_trajectory(), line.step)
                && let Some(open) = self.step(step, false)
            {
                open.last = Some(last);
            }
        } else if line.lane() == "trainer" {
            self.trainer_line(&line);
        } else if line.lane().starts_with("trainer rank ") {
            self.rank_line(&line);
        } else {
            self.lanes.add(&line);
        }
    }
}
