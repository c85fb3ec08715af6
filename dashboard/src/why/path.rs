//! The critical path of one step: every second between the ends of two steps has one cause.
//!
//! The trainer's thread is on the path. Where it waits for a batch, the path is the way of the trajectory that came last, and of the
//! sampler that sampled it; where its ranks wait for each other, it is that of the ranks that compute.
//!
//! Invariant: the causes of a step sum to its time.

use super::cause::{Cause, CauseKind};
use super::lanes::{SamplerActivity, SideLanes};
use super::line::LastTrajectory;

/// What the timeline says of one step. Times are seconds of the run.
#[derive(Clone, Debug, Default)]
pub(super) struct StepLines {
    pub(super) step: u64,
    /// What the trainer did: kind, start, end.
    pub(super) trainer: Vec<(TrainerWork, f64, f64)>,
    /// What each rank did, by name.
    pub(super) ranks: Vec<(String, Vec<RankTime>)>,
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
            "forward_backward" => Self::Trains,
            "weight_sync" => Self::PublishesWeights,
            "evaluate" => Self::Evaluates,
            _ => return None,
        })
    }
}

impl StepLines {
    /// First start and last end of the trainer.
    pub(super) fn range(&self) -> Option<(f64, f64)> {
        let starts = self.trainer.iter().map(|(_, start, _)| *start);
        let ends = self.trainer.iter().map(|(_, _, end)| *end);
        Some((starts.reduce(f64::min)?, ends.reduce(f64::max)?))
    }

    /// The causes of the time from `begin` to the end of the step, seconds each; one that occurs twice is listed twice.
    pub(super) fn path(&self, begin: f64, lanes: &SideLanes) -> Vec<(Cause, f64)> {
        let mut parts = PathParts { lanes, found: Vec::new() };
        let mut work = self.trainer.clone();
        work.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut cursor = begin;
        for (work, start, end) in work {
            let (start, end) = (start.max(cursor), end.max(cursor));
            parts.records(cursor, start);
            match work {
                TrainerWork::WaitsForBatch => parts.batch(start, end, self.last.as_ref()),
                TrainerWork::Trains => parts.training(start, end, &self.ranks),
                TrainerWork::SavesCheckpoint => {
                    parts.add(Cause::new(CauseKind::Disk, "checkpoint"), end - start)
                }
                TrainerWork::SwitchesPhase => parts.add(Cause::only(CauseKind::PhaseSwitch), end - start),
                TrainerWork::PublishesWeights => {
                    parts.add(Cause::new(CauseKind::Weights, "publish"), end - start)
                }
                TrainerWork::Evaluates => parts.add(Cause::only(CauseKind::Evaluation), end - start),
            }
            cursor = end;
        }
        parts.found
    }
}

/// The causes that were found so far.
struct PathParts<'a> {
    lanes: &'a SideLanes,
    found: Vec<(Cause, f64)>,
}

impl PathParts<'_> {
    fn add(&mut self, cause: Cause, seconds: f64) {
        if seconds > 0.0 {
            self.found.push((cause, seconds));
        }
    }

    /// Between two spans of the trainer it writes records, or waits for the journal to forget groups.
    fn records(&mut self, start: f64, end: f64) {
        let mut left = UncoveredTime::new(start, end);
        self.journal(&mut left);
        self.add(Cause::only(CauseKind::Records), left.seconds());
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
        self.add(Cause::new(CauseKind::Reward, reward), judged.seconds());

        let mut handed = UncoveredTime::new(settled, stored);
        self.paused(&mut handed, sampler);
        self.journal(&mut handed);
        self.add(Cause::new(CauseKind::Buffer, "hand-over"), handed.seconds());

        let mut leased = UncoveredTime::new(stored, end);
        self.journal(&mut leased);
        self.add(Cause::new(CauseKind::Buffer, "lease"), leased.seconds());
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
        for (start, end) in lanes.sampler(sampler, WaitsForBuffer, left.window) {
            let mut inside = left.cut_out(start, end);
            self.journal(&mut inside);
            self.add(Cause::new(CauseKind::Buffer, "slots"), inside.seconds());
        }
        for (start, end) in lanes.sampler(sampler, WaitsForRewards, left.window) {
            let reward = lanes.busiest_reward((start, end)).unwrap_or_default();
            let seconds = left.take([(start, end)]);
            self.add(Cause::new(CauseKind::Reward, reward), seconds);
        }
        // The trainer has advanced, for it waits: the newer version is on its way.
        let seconds = left.take(lanes.sampler(sampler, WaitsForWeights, left.window));
        self.add(Cause::new(CauseKind::Weights, sampler), seconds);
        self.add(Cause::only(CauseKind::Unknown), left.seconds());
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
        self.add(Cause::only(CauseKind::Unknown), left.seconds());
    }

    /// The updates of a step by its ranks.
    fn training(&mut self, start: f64, end: f64, ranks: &[(String, Vec<RankTime>)]) {
        let mut left = end - start;
        let mut times: Vec<f64> =
            ranks.iter().flat_map(|(_, spans)| spans).flat_map(|(_, start, end)| [*start, *end]).collect();
        times.retain(|time| *time > start && *time < end);
        times.extend([start, end]);
        times.sort_by(f64::total_cmp);
        let mut next = vec![0; ranks.len()];
        for pair in times.windows(2).filter(|pair| pair[1] > pair[0]) {
            let (middle, seconds) = ((pair[0] + pair[1]) / 2.0, pair[1] - pair[0]);
            let (mut computing, mut waiting) = (Vec::new(), 0);
            for ((name, spans), next) in ranks.iter().zip(&mut next) {
                while spans.get(*next).is_some_and(|(_, _, end)| *end <= middle) {
                    *next += 1;
                }
                match spans.get(*next).filter(|(_, start, _)| *start <= middle) {
                    Some((true, ..)) => waiting += 1,
                    Some((false, ..)) => computing.push(name),
                    None => {}
                }
            }
            if computing.is_empty() && waiting > 0 {
                self.add(Cause::only(CauseKind::RankExchange), seconds);
            } else if waiting > 0 && 2 * computing.len() <= ranks.len() {
                for name in &computing {
                    let share = seconds / computing.len() as f64;
                    self.add(Cause::new(CauseKind::SlowRank, name), share);
                }
            } else {
                continue;
            }
            left -= seconds;
        }
        self.add(Cause::only(CauseKind::Training), left);
    }
}

/// The parts of a window of time that have no cause yet, in order.
#[derive(Debug)]
struct UncoveredTime {
    window: (f64, f64),
    parts: Vec<(f64, f64)>,
}

impl UncoveredTime {
    fn new(start: f64, end: f64) -> Self {
        let parts = if end > start { vec![(start, end)] } else { Vec::new() };
        Self { window: (start, end), parts }
    }

    /// Covers `spans`; returns the seconds that had no cause before.
    fn take(&mut self, spans: impl IntoIterator<Item = (f64, f64)>) -> f64 {
        spans.into_iter().map(|(start, end)| self.cut_out(start, end).seconds()).sum()
    }

    /// Covers the time from `start` to `end`; returns the parts of it that had no cause before.
    fn cut_out(&mut self, start: f64, end: f64) -> Self {
        let mut rest = Vec::with_capacity(self.parts.len() + 1);
        let mut inside = Vec::new();
        for (from, to) in self.parts.drain(..) {
            let (cut_from, cut_to) = (from.max(start), to.min(end));
            if cut_to <= cut_from {
                rest.push((from, to));
                continue;
            }
            inside.push((cut_from, cut_to));
            rest.extend([(from, cut_from), (cut_to, to)].into_iter().filter(|(from, to)| to > from));
        }
        self.parts = rest;
        Self { window: (start, end), parts: inside }
    }

    fn seconds(&self) -> f64 {
        self.parts.iter().map(|(from, to)| to - from).sum()
    }
}
