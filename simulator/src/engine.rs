//! One sampler: sequences that decode together, each a token per step (processor sharing).
//!
//! Invariant: `clock` counts the tokens that a sequence which runs since the start would have; a sequence ends when the clock reaches
//! its mark. Time and clock are only moved by [`SimulatedEngine::advance`]; between two calls the number of sequences is constant.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use buffer::{RunningControl, RunningObservation};
use trajectory::PolicyVersion;

use crate::decode::DecodeCurve;
use crate::events::VirtualTime;

/// Tokens by which a mark may be missed through rounding.
const CLOSE: f64 = 1e-4;
/// Share of the cache up to which sequences start: the others need space to grow (vLLM's watermark).
const WATERMARK: f64 = 0.95;

/// A sampler in virtual time.
#[derive(Debug)]
pub(crate) struct SimulatedEngine {
    curve: DecodeCurve,
    /// Capacity, tokens.
    kv_tokens: f64,
    max_running: usize,
    /// Decides how many sequences start, if that adapts.
    control: Option<RunningControl>,
    clock: f64,
    /// The time of the clock, seconds.
    at: f64,
    /// No decoding before this time: prefill or new weights, seconds.
    blocked_until: f64,
    /// No decoding at all: the trainer has the devices.
    paused: bool,
    /// Factor of all times, for cores that are shared.
    slowdown: f64,
    running: usize,
    /// Tokens that running sequences attend to.
    context: f64,
    /// Tokens in the KV cache.
    cached: f64,
    ends: BinaryHeap<Reverse<(VirtualTime, usize, u64)>>,
    /// Running sequences in the order of their starts; those that ended are removed lazily.
    started: Vec<(usize, u64)>,
    /// Sequences that wait for the cache, or for another one to end.
    pub(crate) waiting: VecDeque<usize>,
    /// Sequences between two turns.
    pub(crate) acting: usize,
    pub(crate) served: PolicyVersion,
    /// A newer version that is there.
    pub(crate) staged: Option<PolicyVersion>,
    pub(crate) away: bool,
    /// Events of earlier epochs are void.
    pub(crate) epoch: u64,
    /// Since when no sequence has been running, seconds.
    idle_since: Option<f64>,
    idle_s: f64,
    /// From when idle time counts, seconds.
    counted_from: f64,
}

/// What the next event of an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineOccasion {
    End { sequence: usize },
    Full,
    Nothing,
}

impl SimulatedEngine {
    pub(crate) fn new(curve: DecodeCurve, kv_tokens: f64, max_running: usize) -> Self {
        Self {
            curve,
            kv_tokens,
            max_running,
            control: None,
            clock: 0.0,
            at: 0.0,
            blocked_until: 0.0,
            paused: false,
            slowdown: 1.0,
            running: 0,
            context: 0.0,
            cached: 0.0,
            ends: BinaryHeap::new(),
            started: Vec::new(),
            waiting: VecDeque::new(),
            acting: 0,
            served: PolicyVersion(0),
            staged: None,
            away: false,
            epoch: 0,
            idle_since: Some(0.0),
            idle_s: 0.0,
            counted_from: 0.0,
        }
    }

    /// The same, with a limit that follows the throughput.
    pub(crate) fn adapting(self, control: Option<RunningControl>) -> Self {
        Self { control, ..self }
    }

    /// Sequences up to which groups start.
    fn limit(&self) -> usize {
        self.control.as_ref().map_or(self.max_running, RunningControl::limit)
    }

    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// Running and waiting sequences.
    pub(crate) fn load(&self) -> usize {
        self.running + self.waiting.len() + self.acting
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.load() == 0
    }

    pub(crate) fn context(&self) -> f64 {
        self.context
    }

    /// Whether it can start `sequences` with a prompt of `prompt` tokens.
    pub(crate) fn has_capacity(&self, sequences: usize, prompt: f64) -> bool {
        if self.away || self.paused {
            return false;
        }
        let (load, needs) = (self.load(), prompt + sequences as f64);
        load == 0
            || (self.waiting.is_empty()
                && load.saturating_add(sequences) <= self.limit()
                && self.cached + needs <= WATERMARK * self.kv_tokens)
    }

    /// Whether a sequence with `tokens` tokens of its own can run.
    pub(crate) fn fits(&self, tokens: f64) -> bool {
        self.running == 0
            || (self.running < self.max_running && self.cached + tokens <= WATERMARK * self.kv_tokens)
    }

    /// Moves the clock to `now`.
    pub(crate) fn advance(&mut self, now: f64) {
        let from = self.at.max(self.blocked_until);
        let sequences = self.running as f64;
        let mut steps = 0.0;
        if self.running > 0 && !self.paused && now > from {
            steps = self.curve.steps(sequences, self.context, (now - from) / self.slowdown);
            self.clock += steps;
            self.context += steps * sequences;
            self.cached += steps * sequences;
        }
        let in_flight = self.load();
        if let Some(control) = self.control.as_mut().filter(|_| now > self.at) {
            let (version, tokens) = (self.served, steps * sequences);
            let (decode_s, elapsed_s) = ((now - from).max(0.0), now - self.at);
            control.observe(RunningObservation { version, in_flight, steps, tokens, decode_s, elapsed_s });
        }
        self.at = self.at.max(now);
    }

    /// The next event and its time, if nothing changes before.
    pub(crate) fn next(&self) -> Option<(f64, EngineOccasion)> {
        if self.running == 0 || self.paused {
            return None;
        }
        let Reverse((VirtualTime(mark), sequence, _)) = self.ends.peek()?;
        let to_end = (mark - self.clock).max(0.0);
        let sequences = self.running as f64;
        let to_full = ((self.kv_tokens - self.cached) / sequences).max(0.0);
        let (steps, event) = if self.running > 1 && to_full < to_end {
            (to_full, EngineOccasion::Full)
        } else {
            (to_end, EngineOccasion::End { sequence: *sequence })
        };
        let seconds = self.slowdown * self.curve.seconds(sequences, self.context, steps);
        Some((self.at.max(self.blocked_until) + seconds, event))
    }

    /// What has happened by the time of the clock.
    pub(crate) fn due(&self) -> EngineOccasion {
        match self.ends.peek() {
            Some(Reverse((VirtualTime(mark), sequence, _))) if *mark <= self.clock + CLOSE => {
                EngineOccasion::End { sequence: *sequence }
            }
            Some(_) if self.running > 1 && self.cached >= self.kv_tokens - CLOSE * self.running as f64 => {
                EngineOccasion::Full
            }
            _ => EngineOccasion::Nothing,
        }
    }

    /// A sequence starts that has `left` tokens to sample and attends to `attends` tokens, of which `own` are new in the cache.
    /// Returns the clock at its start.
    pub(crate) fn start(&mut self, (sequence, life): (usize, u64), left: f64, attends: f64, own: f64) -> f64 {
        self.end_idle();
        self.running += 1;
        self.context += attends;
        self.cached += own;
        self.ends.push(Reverse((VirtualTime(self.clock + left), sequence, life)));
        self.started.push((sequence, life));
        self.clock
    }

    /// Takes the sequence that ended, which attended to `attends` tokens, of which `own` leave the cache.
    pub(crate) fn end(&mut self, attends: f64, own: f64) {
        self.ends.pop();
        self.stop(attends, own);
    }

    /// The youngest running sequence, by `is_alive`.
    pub(crate) fn youngest(&mut self, is_alive: impl Fn(usize, u64) -> bool) -> Option<usize> {
        while let Some(&(sequence, life)) = self.started.last() {
            self.started.pop();
            if is_alive(sequence, life) {
                return Some(sequence);
            }
        }
        None
    }

    /// Takes a running sequence out of the step, and `own` tokens out of the cache.
    pub(crate) fn preempt(&mut self, sequence: usize, attends: f64, own: f64) {
        self.ends.retain(|Reverse((_, other, _))| *other != sequence);
        self.stop(attends, own);
    }

    fn stop(&mut self, attends: f64, own: f64) {
        self.running -= 1;
        self.context = if self.running == 0 { 0.0 } else { (self.context - attends).max(0.0) };
        self.uncache(own);
        if self.running == 0 {
            self.started.clear();
            self.idle_since = Some(self.at);
        } else if self.started.len() > 4 * self.running + 64 {
            let running: std::collections::HashSet<(usize, u64)> =
                self.ends.iter().map(|Reverse((_, sequence, life))| (*sequence, *life)).collect();
            self.started.retain(|entry| running.contains(entry));
        }
    }

    pub(crate) fn clock(&self) -> f64 {
        self.clock
    }

    pub(crate) fn cache(&mut self, tokens: f64) {
        self.cached += tokens;
    }

    pub(crate) fn uncache(&mut self, tokens: f64) {
        self.cached = (self.cached - tokens).max(0.0);
    }

    /// Decodes nothing for `seconds` more.
    pub(crate) fn block(&mut self, seconds: f64, now: f64) {
        self.blocked_until = self.blocked_until.max(now) + seconds * self.slowdown;
    }

    pub(crate) fn pause(&mut self, paused: bool, now: f64) {
        self.advance(now);
        self.paused = paused;
        if paused && self.running > 0 {
            self.idle_since = Some(now);
        } else if !paused && self.running > 0 {
            self.end_idle();
        }
    }

    pub(crate) fn slow_down(&mut self, factor: f64, now: f64) {
        self.advance(now);
        self.slowdown = factor;
    }

    pub(crate) fn slowdown(&self) -> f64 {
        self.slowdown
    }

    /// Loses everything.
    pub(crate) fn clear(&mut self, now: f64) {
        self.advance(now);
        (self.running, self.acting, self.context, self.cached) = (0, 0, 0.0, 0.0);
        self.ends.clear();
        self.started.clear();
        self.waiting.clear();
        self.staged = None;
        self.blocked_until = now;
        self.idle_since.get_or_insert(now);
    }

    fn end_idle(&mut self) {
        if let Some(since) = self.idle_since.take() {
            self.idle_s += (self.at - since.max(self.counted_from)).max(0.0);
        }
    }

    /// Counts idle time from now on.
    pub(crate) fn count_from(&mut self, now: f64) {
        (self.idle_s, self.counted_from) = (0.0, now);
    }

    /// Time without a running sequence since [`Self::count_from`], seconds.
    pub(crate) fn idle_s(&self, now: f64) -> f64 {
        self.idle_s + self.idle_since.map_or(0.0, |since| (now - since.max(self.counted_from)).max(0.0))
    }
}
