//! The critical path of one step: every second between the ends of two steps has one cause.
//!
//! The trainer's thread is on the path. Where it waits for a batch, the path is the way of the trajectory that came last, and of the
//! sampler that sampled it; where its ranks wait for each other, it is that of the ranks that compute.
//!
//! Invariant: the causes of a step sum to its time, and finding them takes time that is almost linear in the number of spans.

use std::collections::BTreeMap;

use super::cause::{Cause, CauseKind};
use super::lanes::{SamplerActivity, SideLanes};
use crate::span_line::LastTrajectory;

/// Most parts of a window of time; spans that would make more are dropped.
pub(super) const MAX_PARTS: usize = 4096;

/// What the timeline says of one step. Times are seconds of the run.
#[derive(Clone, Debug, Default)]
pub(super) struct StepLines {
    pub(super) step: u64,
    /// What the trainer did: kind, start, end.
    pub(super) trainer: Vec<(TrainerWork, f64, f64)>,
    /// What each rank did, by name.
    pub(super) ranks: BTreeMap<String, Vec<RankTime>>,
    pub(super) last: Option<LastTrajectory>,
}

/// Whether a rank waited, and from when to when, seconds of the run.
pub(super) type RankTime = (bool, f64, f64);

/// What the trainer's thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrainerWork {
    SavesCheckpoint,
    WaitsForBatch,
    SwitchesPhase,
    Regroups,
    TakesSnapshot,
    Trains,
    PublishesWeights,
    Evaluates,
}

impl TrainerWork {
    pub(super) fn of(kind: &str) -> Option<Self> {
        Some(match kind {
            "save_checkpoint" => Self::SavesCheckpoint,
            "wait_for_batch" => Self::WaitsForBatch,
            "phase_switch" => Self::SwitchesPhase,
            "regroup" => Self::Regroups,
            "snapshot" => Self::TakesSnapshot,
            "forward_backward" => Self::Trains,
            "weight_sync" => Self::PublishesWeights,
            "evaluate" => Self::Evaluates,
            _ => return None,
        })
    }

    /// Whether it interrupts other work of the step, as often as ranks are lost or join.
    pub(super) fn interrupts(self) -> bool {
        matches!(self, Self::Regroups | Self::TakesSnapshot)
    }
}

impl StepLines {
    /// First start and last end of the trainer. A snapshot may have been taken long before the first step.
    pub(super) fn range(&self) -> Option<(f64, f64)> {
        let starts = self.trainer.iter().filter(|(work, ..)| !work.interrupts()).map(|(_, start, _)| *start);
        let ends = self.trainer.iter().map(|(_, _, end)| *end);
        Some((starts.reduce(f64::min)?, ends.reduce(f64::max)?))
    }

    /// The causes of the time from `begin` to the end of the step.
    pub(super) fn path(&self, begin: f64, lanes: &SideLanes) -> StepCauses {
        let mut parts = PathParts { lanes, found: StepCauses::default() };
        let mut cursor = begin;
        for (work, start, end) in self.trainer_work() {
            let (start, end) = (start.max(cursor), end.max(cursor));
            parts.records(cursor, start);
            match work {
                TrainerWork::WaitsForBatch => parts.batch(start, end, self.last.as_ref()),
                TrainerWork::Trains => parts.training(start, end, &self.ranks),
                TrainerWork::SavesCheckpoint => {
                    parts.add(Cause::new(CauseKind::Disk, "checkpoint"), end - start)
                }
                TrainerWork::SwitchesPhase => parts.add(Cause::only(CauseKind::PhaseSwitch), end - start),
                TrainerWork::Regroups => parts.add(Cause::only(CauseKind::Regroup), end - start),
                TrainerWork::TakesSnapshot => parts.add(Cause::only(CauseKind::Snapshot), end - start),
                TrainerWork::PublishesWeights => {
                    parts.add(Cause::new(CauseKind::Weights, "publish"), end - start)
                }
                TrainerWork::Evaluates => parts.add(Cause::only(CauseKind::Evaluation), end - start),
            }
            cursor = end;
        }
        parts.found
    }

    /// What the trainer did, in order; what was interrupted is in parts.
    fn trainer_work(&self) -> Vec<(TrainerWork, f64, f64)> {
        let (interruptions, mut work): (Vec<_>, Vec<_>) =
            self.trainer.iter().copied().partition(|(work, ..)| work.interrupts());
        for (_, from, to) in &interruptions {
            let split = |(work, start, end): (TrainerWork, f64, f64)| {
                [(work, start, end.min(*from)), (work, start.max(*to), end)]
            };
            work = work.into_iter().flat_map(split).filter(|(_, start, end)| end > start).collect();
        }
        work.extend(interruptions);
        work.sort_by(|a, b| a.1.total_cmp(&b.1));
        work
    }
}

/// The causes of a step.
#[derive(Debug, Default)]
pub(super) struct StepCauses {
    /// Seconds each; a cause that occurs twice is listed twice.
    pub(super) seconds: Vec<(Cause, f64)>,
    /// Spans that were too many.
    pub(super) dropped: u64,
}

/// The causes that were found so far.
struct PathParts<'a> {
    lanes: &'a SideLanes,
    found: StepCauses,
}

impl PathParts<'_> {
    fn add(&mut self, cause: Cause, seconds: f64) {
        if seconds > 0.0 {
            self.found.seconds.push((cause, seconds));
        }
    }

    /// What is left has `cause`.
    fn rest(&mut self, cause: Cause, left: &UncoveredTime) {
        self.add(cause, left.seconds());
        self.found.dropped += left.dropped;
    }

    /// Between two spans of the trainer it writes records, or waits for the journal to forget groups.
    fn records(&mut self, start: f64, end: f64) {
        let mut left = UncoveredTime::new(start, end);
        self.journal(&mut left);
        self.rest(Cause::only(CauseKind::Records), &left);
    }

    fn journal(&mut self, left: &mut UncoveredTime) {
        let seconds = left.take(self.lanes.commits(left.window));
        self.add(Cause::new(CauseKind::Disk, "journal"), seconds);
    }

    /// The trainer waits for a batch, whose last trajectory is `last`.
    fn batch(&mut self, start: f64, end: f64, last: Option<&LastTrajectory>) {
        let Some(LastTrajectory { sampler, sampled, settled, stored }) = last else {
            self.batch_of_any(start, end);
            return;
        };
        let [sampled, settled, stored] = [*sampled, *settled, *stored].map(|time| time.clamp(start, end));
        let (settled, stored) = (settled.max(sampled), stored.max(settled).max(sampled));
        self.sampling(&mut UncoveredTime::new(start, sampled), sampler);

        let mut judged = UncoveredTime::new(sampled, settled);
        self.paused(&mut judged, sampler);
        let reward = self.lanes.busiest_reward(judged.window).unwrap_or_default();
        self.rest(Cause::new(CauseKind::Reward, reward), &judged);

        let mut handed = UncoveredTime::new(settled, stored);
        self.paused(&mut handed, sampler);
        self.journal(&mut handed);
        self.rest(Cause::new(CauseKind::Buffer, "hand-over"), &handed);

        let mut leased = UncoveredTime::new(stored, end);
        self.journal(&mut leased);
        self.rest(Cause::new(CauseKind::Buffer, "lease"), &leased);
    }

    fn paused(&mut self, left: &mut UncoveredTime, sampler: &str) {
        let seconds = left.take(self.lanes.sampler(sampler, SamplerActivity::Paused, left.window));
        self.add(Cause::new(CauseKind::Paused, sampler), seconds);
    }

    /// What `sampler` does up to the last token that the batch needs.
    fn sampling(&mut self, left: &mut UncoveredTime, sampler: &str) {
        use SamplerActivity::{
            Applies, Samples, WaitsForBuffer, WaitsForEnvironment, WaitsForRewards, WaitsForWeights,
        };
        let lanes = self.lanes;
        self.paused(left, sampler);
        for (state, kind, name) in [
            (Applies, CauseKind::Weights, sampler),
            (Samples, CauseKind::Sampling, sampler),
            (WaitsForEnvironment, CauseKind::Environment, ""),
        ] {
            let seconds = left.take(lanes.sampler(sampler, state, left.window));
            self.add(Cause::new(kind, name), seconds);
        }
        let mut waited = left.cut_out(lanes.sampler(sampler, WaitsForBuffer, left.window));
        self.journal(&mut waited);
        self.rest(Cause::new(CauseKind::Buffer, "slots"), &waited);
        let waits: Vec<(f64, f64)> = lanes.sampler(sampler, WaitsForRewards, left.window).collect();
        if let (Some((start, _)), Some((_, end))) = (waits.first().copied(), waits.last().copied()) {
            let reward = lanes.busiest_reward((start, end)).unwrap_or_default();
            let seconds = left.take(waits);
            self.add(Cause::new(CauseKind::Reward, reward), seconds);
        }
        // The trainer has advanced, for it waits: the newer version is on its way.
        let seconds = left.take(lanes.sampler(sampler, WaitsForWeights, left.window));
        self.add(Cause::new(CauseKind::Weights, sampler), seconds);
        self.rest(Cause::only(CauseKind::Unknown), left);
    }

    /// The trainer waits for a batch of which no sampler has reported the last trajectory: what any role does counts.
    fn batch_of_any(&mut self, start: f64, end: f64) {
        use SamplerActivity::{Applies, Paused, Samples, WaitsForEnvironment, WaitsForWeights};
        let (lanes, mut left) = (self.lanes, UncoveredTime::new(start, end));
        for (state, kind) in [(Paused, CauseKind::Paused), (Samples, CauseKind::Sampling)] {
            for sampler in lanes.samplers() {
                let seconds = left.take(lanes.sampler(sampler, state, left.window));
                self.add(Cause::new(kind, sampler), seconds);
            }
        }
        for reward in lanes.rewards() {
            let seconds = left.take(lanes.judging(reward, left.window));
            self.add(Cause::new(CauseKind::Reward, reward), seconds);
        }
        self.journal(&mut left);
        for (state, kind) in [
            (WaitsForEnvironment, CauseKind::Environment),
            (Applies, CauseKind::Weights),
            (WaitsForWeights, CauseKind::Weights),
        ] {
            for sampler in lanes.samplers() {
                let seconds = left.take(lanes.sampler(sampler, state, left.window));
                let name = if kind == CauseKind::Environment { "" } else { sampler };
                self.add(Cause::new(kind, name), seconds);
            }
        }
        self.rest(Cause::only(CauseKind::Unknown), &left);
    }

    /// The updates of a step by its ranks.
    fn training(&mut self, start: f64, end: f64, ranks: &BTreeMap<String, Vec<RankTime>>) {
        let changes = rank_changes(start, end, ranks);
        let (mut computing, mut waiting) = (0_usize, 0_usize);
        let (mut training, mut exchange) = (0.0, 0.0);
        // Seconds in which a minority of ranks computes, as shares of each of them, since the start and for each rank.
        let (mut share, mut begun, mut slow) = (0.0, vec![0.0; ranks.len()], vec![0.0; ranks.len()]);
        let mut cursor = start;
        for RankChange { time, rank, waits, begins } in changes {
            let seconds = time - cursor;
            cursor = time;
            match (computing, waiting) {
                (0, 1..) => exchange += seconds,
                (1.., 1..) if 2 * computing <= ranks.len() => share += seconds / computing as f64,
                _ => training += seconds,
            }
            match (waits, begins) {
                (true, true) => waiting += 1,
                (true, false) => waiting -= 1,
                (false, true) => (computing, begun[rank]) = (computing + 1, share),
                (false, false) => {
                    computing -= 1;
                    slow[rank] += share - begun[rank];
                }
            }
        }
        training += end - cursor;
        for (name, seconds) in ranks.keys().zip(slow) {
            self.add(Cause::new(CauseKind::SlowRank, name), seconds);
        }
        self.add(Cause::only(CauseKind::RankExchange), exchange);
        self.add(Cause::only(CauseKind::Training), training);
    }
}

/// A rank begins, or ends, to compute or to wait.
struct RankChange {
    /// Seconds of the run.
    time: f64,
    /// Its number in the order of names.
    rank: usize,
    waits: bool,
    begins: bool,
}

/// What ranks begin and end between two times, in order. Of spans of a rank at the same time the first counts.
fn rank_changes(start: f64, end: f64, ranks: &BTreeMap<String, Vec<RankTime>>) -> Vec<RankChange> {
    let mut changes = Vec::new();
    for (rank, spans) in ranks.values().enumerate() {
        let mut over = start;
        for (waits, from, to) in spans {
            let (from, to, waits) = (from.max(over), to.min(end), *waits);
            if to > from {
                let change = |time, begins| RankChange { time, rank, waits, begins };
                changes.extend([change(from, true), change(to, false)]);
                over = to;
            }
        }
    }
    // Stable: a rank ends one span before it begins the next one at the same time.
    changes.sort_by(|a, b| a.time.total_cmp(&b.time));
    changes
}

/// The parts of a window of time that have no cause yet, in order.
#[derive(Debug)]
struct UncoveredTime {
    window: (f64, f64),
    parts: Vec<(f64, f64)>,
    /// Spans that would have made too many parts.
    dropped: u64,
}

impl UncoveredTime {
    fn new(start: f64, end: f64) -> Self {
        let parts = if end > start { vec![(start, end)] } else { Vec::new() };
        Self { window: (start, end), parts, dropped: 0 }
    }

    /// Covers `spans`; returns the seconds that had no cause before.
    fn take(&mut self, spans: impl IntoIterator<Item = (f64, f64)>) -> f64 {
        self.cut_out(spans).seconds()
    }

    /// Covers `spans`; returns the parts of them that had no cause before.
    fn cut_out(&mut self, spans: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut parts = Vec::new();
        for (start, end) in spans {
            let first = self.parts.partition_point(|(_, to)| *to <= start);
            let after = self.parts.partition_point(|(from, _)| *from < end);
            if after <= first {
                continue;
            }
            let (begin, over) = (self.parts[first].0, self.parts[after - 1].1);
            let rest: Vec<(f64, f64)> =
                [(begin, start), (end, over)].into_iter().filter(|(from, to)| to > from).collect();
            if self.parts.len() + rest.len() > MAX_PARTS + (after - first) {
                self.dropped += 1;
                continue;
            }
            let cut = self.parts.splice(first..after, rest);
            parts.extend(cut.map(|(from, to)| (from.max(start), to.min(end))));
        }
        // Reports that came late are not in order.
        parts.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self { window: self.window, parts, dropped: 0 }
    }

    fn seconds(&self) -> f64 {
        self.parts.iter().map(|(from, to)| to - from).sum()
    }
}
