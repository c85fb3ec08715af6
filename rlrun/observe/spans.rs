//! The lines of `timeline.jsonl`: what the trainer, the samplers, the rewards and the weights did around a step, and the way of
//! its first trajectories.
//!
//! Invariant: what samplers report is bounded, also of trajectories that no step ever trains on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use ::weights::PushCost;
use buffer::Buffer;
use buffer::store::CommitTime;
use rewards::LoadCounts;
use rollout::activity::{EpisodeTimes, PhaseSpan};
use rollout::{Activity, WorkerPhase};
use trainer::StepReport;
use trainer::rank_spans::{RankPhase, RankSpan};
use trainer::trainer::elastic::Regrouping;
use trajectory::{GroupId, PolicyVersion};

use super::ObserverInputs;
use crate::timeline::{SampledTimes, TRAINER, Timeline, TimelineLine, TimelineSpan, TimelineTrajectory};

/// Most episodes whose times are kept until a step trains on them, and most trajectories that wait for a report of their sampler.
const MAX_WAITING: usize = 65_536;
/// The span that every step has, also one without anything to learn from.
const TRAINING: &str = "forward_backward";
/// Another span of the trainer that is shorter is left out, seconds.
const BRIEF: f64 = 1e-4;

/// Writes the timeline of a run.
#[derive(Debug)]
pub(super) struct SpanWriter {
    timeline: Arc<Timeline>,
    /// Trajectories of a step that are written.
    trajectories: usize,
    /// Times of episodes that no step has trained on, and their samplers.
    waiting: BTreeMap<(GroupId, u32), (EpisodeTimes, Arc<str>)>,
    /// Batches of which a sampler has not reported every trajectory, oldest first.
    unreported: VecDeque<UnreportedBatch>,
    /// The buffer, if it is in this process.
    buffer: Option<Arc<Buffer>>,
}

/// A batch whose last trajectory is not known yet.
#[derive(Debug)]
struct UnreportedBatch {
    /// The last one of those that were reported.
    last: Option<TimelineTrajectory>,
    missing: Vec<TimelineTrajectory>,
}

impl SpanWriter {
    pub(super) fn new(timeline: Arc<Timeline>, trajectories: usize, buffer: Option<Arc<Buffer>>) -> Self {
        let (waiting, unreported) = (BTreeMap::new(), VecDeque::new());
        Self { timeline, trajectories, waiting, unreported, buffer }
    }

    /// Writes down a step.
    pub(super) fn step(&mut self, inputs: &ObserverInputs<'_>) {
        let mut lines = Vec::new();
        trainer(&mut lines, inputs);
        interruptions(&mut lines, inputs.step);
        ranks(&mut lines, inputs.step);
        inputs.activity.iter().for_each(|(sampler, activity)| self.sampler(&mut lines, sampler, activity));
        inputs.rewards.iter().for_each(|(name, load)| self.reward(&mut lines, name, load));
        lines.extend(inputs.push.map(|push| pushed(inputs.step, push)));
        self.commits(&mut lines);
        self.reported(&mut lines);
        self.trajectories(&mut lines, inputs.step);
        self.timeline.write(&lines);
    }

    /// Writes what samplers and rewards did, as far as no step has written it.
    pub(super) fn late_reports(&mut self, activity: &[(String, Activity)], rewards: &[(String, LoadCounts)]) {
        let mut lines = Vec::new();
        activity.iter().for_each(|(sampler, activity)| self.sampler(&mut lines, sampler, activity));
        rewards.iter().for_each(|(name, load)| self.reward(&mut lines, name, load));
        self.timeline.write(&lines);
    }

    /// Writes what waits for reports of samplers: the run ends.
    pub(super) fn finish(&mut self) {
        let mut lines = Vec::new();
        self.commits(&mut lines);
        self.reported(&mut lines);
        lines.extend(self.unreported.drain(..).filter_map(UnreportedBatch::line));
        self.timeline.write(&lines);
    }

    fn commits(&self, lines: &mut Vec<TimelineLine>) {
        for CommitTime { start, end } in self.buffer.iter().flat_map(|buffer| buffer.take_commits()) {
            let (start, end) = (self.timeline.second(start), self.timeline.second(end));
            let (lane, kind) = ("journal".into(), "commit");
            lines.push(TimelineLine::Span(TimelineSpan {
                lane,
                kind,
                start,
                end,
                ..TimelineSpan::default()
            }));
        }
    }

    /// The last trajectories of earlier batches whose samplers have reported by now.
    fn reported(&mut self, lines: &mut Vec<TimelineLine>) {
        for mut batch in std::mem::take(&mut self.unreported) {
            for mut trajectory in std::mem::take(&mut batch.missing) {
                let key = (trajectory.group, trajectory.index);
                match self.waiting.remove(&key) {
                    Some((times, sampler)) => {
                        trajectory.start = self.timeline.second(times.admitted);
                        trajectory.sampled = Some(self.sampled(&times, &sampler));
                        batch.see(trajectory);
                    }
                    None => batch.missing.push(trajectory),
                }
            }
            match batch.missing.is_empty() {
                true => lines.extend(batch.line()),
                false => self.unreported.push_back(batch),
            }
        }
        let missing = |batches: &VecDeque<UnreportedBatch>| {
            batches.iter().map(|batch| batch.missing.len()).sum::<usize>()
        };
        while missing(&self.unreported) > MAX_WAITING {
            lines.extend(self.unreported.pop_front().and_then(UnreportedBatch::line));
        }
    }

    fn sampled(&self, times: &EpisodeTimes, sampler: &str) -> SampledTimes {
        SampledTimes {
            sampled: self.timeline.second(times.sampled),
            scored: self.timeline.second(times.scored),
            settled: self.timeline.second(times.settled),
            stored: self.timeline.second(times.stored),
            sampler: sampler.to_owned(),
        }
    }

    fn sampler(&mut self, lines: &mut Vec<TimelineLine>, name: &str, activity: &Activity) {
        for PhaseSpan { phase, start, end, version } in &activity.phases {
            let (kind, note) = described(*phase);
            let (start, end) = (self.timeline.second(*start), self.timeline.second(*end));
            let lane = name.to_owned().into();
            let note = (!note.is_empty()).then(|| note.into());
            let version = *version;
            lines.push(TimelineLine::Span(TimelineSpan {
                lane,
                kind,
                start,
                end,
                version,
                note,
                ..TimelineSpan::default()
            }));
        }
        let name: Arc<str> = name.into();
        for times in &activity.episodes {
            self.waiting.insert((times.group, times.index), (*times, Arc::clone(&name)));
        }
        while self.waiting.len() > MAX_WAITING {
            self.waiting.pop_first();
        }
    }

    fn reward(&self, lines: &mut Vec<TimelineLine>, name: &str, load: &LoadCounts) {
        for busy in load.busy.iter().filter(|busy| busy.start.is_finite() && busy.end.is_finite()) {
            // The evaluation before the first step.
            if self.timeline.second(busy.start) < 0.0 {
                continue;
            }
            lines.push(TimelineLine::Span(TimelineSpan {
                lane: format!("reward {name}").into(),
                kind: "score",
                start: self.timeline.second(busy.start),
                end: self.timeline.second(busy.end),
                count: Some(busy.scored),
                ..TimelineSpan::default()
            }));
        }
    }

    /// The first trajectories of the batch and the last that was stored; forgets the times of all.
    fn trajectories(&mut self, lines: &mut Vec<TimelineLine>, step: &StepReport) {
        let (leased, trained_from) = (step.time.leased_at, step.time.trained_from);
        let end = trained_from + step.time.forward_backward;
        // The version before the step is the one that is trained.
        let trained = PolicyVersion(step.version.0.saturating_sub(1));
        let mut written = Vec::new();
        let mut batch = UnreportedBatch { last: None, missing: Vec::new() };
        for group in &step.groups {
            for trajectory in &group.trajectories {
                let known = self.waiting.remove(&(group.id, trajectory.index));
                let start = known.as_ref().map_or(leased, |(times, _)| self.timeline.second(times.admitted));
                let sampled = known.map(|(times, sampler)| self.sampled(&times, &sampler));
                let mut versions: Vec<PolicyVersion> =
                    trajectory.sample.versions().iter().map(|run| run.version).collect();
                versions.dedup();
                let line = TimelineTrajectory {
                    group: group.id,
                    index: trajectory.index,
                    step: step.version.0,
                    lag: trajectory.oldest_version().staleness_at(trained),
                    versions,
                    start,
                    sampled,
                    leased,
                    last: false,
                    end,
                };
                if written.len() < self.trajectories {
                    written.push(line.clone());
                }
                if line.sampled.is_some() { batch.see(line) } else { batch.missing.push(line) }
            }
        }
        if !batch.missing.is_empty() {
            self.unreported.push_back(batch);
        } else if let Some(last) = batch.last {
            let same = |line: &&mut TimelineTrajectory| (line.group, line.index) == (last.group, last.index);
            match written.iter_mut().find(same) {
                Some(line) => line.last = true,
                None => written.push(TimelineTrajectory { last: true, ..last }),
            }
        }
        lines.extend(written.into_iter().map(TimelineLine::Trajectory));
    }
}

impl UnreportedBatch {
    /// Sees a trajectory that was reported. Of two that were stored together, the one that was judged last is the last.
    fn see(&mut self, new: TimelineTrajectory) {
        let at = |of: &TimelineTrajectory| {
            of.sampled.as_ref().map_or((f64::NEG_INFINITY, f64::NEG_INFINITY), |at| (at.stored, at.scored))
        };
        let later = |known: &TimelineTrajectory| {
            let (new, known) = (at(&new), at(known));
            new.0.total_cmp(&known.0).then(new.1.total_cmp(&known.1)).is_gt()
        };
        if self.last.as_ref().is_none_or(later) {
            self.last = Some(new);
        }
    }

    /// The line of the last trajectory of those that were reported.
    fn line(self) -> Option<TimelineLine> {
        Some(TimelineLine::Trajectory(TimelineTrajectory { last: true, ..self.last? }))
    }
}

/// What the trainer did for a step, in order.
fn trainer(lines: &mut Vec<TimelineLine>, inputs: &ObserverInputs<'_>) {
    let (step, time) = (inputs.step.version.0, &inputs.step.time);
    let asked = time.leased_at - time.wait_for_batch;
    let trained = time.trained_from + time.forward_backward;
    let evaluated = inputs.evaluated.clone().unwrap_or_default();
    for (kind, start, end) in [
        ("save_checkpoint", asked - time.save_checkpoint, asked),
        ("wait_for_batch", asked, time.leased_at),
        ("phase_switch", time.leased_at, time.switched_at),
        (TRAINING, time.trained_from, trained),
        ("weight_sync", trained, trained + time.weight_sync),
        ("evaluate", evaluated.start, evaluated.end),
    ] {
        if end - start >= BRIEF || kind == TRAINING {
            let (lane, step) = (TRAINER.into(), Some(step));
            lines.push(TimelineLine::Span(TimelineSpan {
                lane,
                kind,
                start,
                end,
                step,
                ..TimelineSpan::default()
            }));
        }
    }
}

/// Regroupings and snapshots of a step, also in the midst of other spans of the trainer.
fn interruptions(lines: &mut Vec<TimelineLine>, step: &StepReport) {
    let mut add = |kind, start: f64, end, note: Option<String>| {
        lines.push(TimelineLine::Span(TimelineSpan {
            lane: TRAINER.into(),
            kind,
            start,
            end,
            step: Some(step.version.0),
            note: note.map(Into::into),
            ..TimelineSpan::default()
        }));
    };
    for Regrouping { lost, before, after, start, seconds, .. } in &step.regroupings {
        let reason = lost.as_deref().unwrap_or("ranks have joined");
        add("regroup", *start, start + seconds, Some(format!("{after} instead of {before} ranks: {reason}")));
    }
    for taken in step.snapshots.iter().filter(|taken| taken.end - taken.start >= BRIEF) {
        add("snapshot", taken.start, taken.end, None);
    }
}

/// What each of several ranks of the trainer did during the updates of a step.
fn ranks(lines: &mut Vec<TimelineLine>, step: &StepReport) {
    let begin = step.time.updated_from;
    for (rank, spans) in step.ranks.iter().enumerate() {
        for span in spans {
            let (kind, note) = match span.phase {
                RankPhase::Score => ("forward", None),
                RankPhase::ForwardBackward => (TRAINING, None),
                RankPhase::Wait => ("wait", Some(awaited(&step.ranks, rank, *span).into())),
                RankPhase::Optimizer => ("optimizer", None),
            };
            lines.push(TimelineLine::Span(TimelineSpan {
                lane: lane_of(rank).into(),
                kind,
                start: begin + span.start,
                end: begin + span.end,
                step: Some(step.version.0),
                note,
                ..TimelineSpan::default()
            }));
        }
    }
}

/// The lane of a rank.
fn lane_of(rank: usize) -> String {
    format!("{TRAINER} rank {rank}")
}

/// The rank that works longest while `waiting` waits in `wait`; if no rank works, the exchange itself takes the time.
fn awaited(ranks: &[Vec<RankSpan>], waiting: usize, wait: RankSpan) -> String {
    let overlap = |span: &RankSpan| (span.end.min(wait.end) - span.start.max(wait.start)).max(0.0);
    let works = |spans: &[RankSpan]| {
        let first = spans.partition_point(|span| span.end <= wait.start);
        let inside = spans[first..].iter().take_while(|span| span.start < wait.end);
        inside.filter(|span| span.phase != RankPhase::Wait).map(overlap).sum::<f64>()
    };
    let others = ranks.iter().enumerate().filter(|(rank, _)| *rank != waiting);
    let longest = others.map(|(rank, spans)| (works(spans), rank)).max_by(|a, b| a.0.total_cmp(&b.0));
    match longest {
        Some((seconds, rank)) if seconds > 0.0 => lane_of(rank),
        _ => "the exchange with other ranks".to_owned(),
    }
}

fn pushed(step: &StepReport, push: PushCost) -> TimelineLine {
    let start = step.time.trained_from + step.time.forward_backward;
    TimelineLine::Span(TimelineSpan {
        lane: "weights".into(),
        kind: "push",
        start,
        end: start + push.took.as_secs_f64(),
        version: Some(push.version),
        bytes: Some(push.delta_bytes.unwrap_or(push.full_bytes)),
        ..TimelineSpan::default()
    })
}

/// The kind of a phase, and what it waits for.
fn described(phase: WorkerPhase) -> (&'static str, &'static str) {
    match phase {
        WorkerPhase::Starting => ("start", ""),
        WorkerPhase::Decoding => ("sample", ""),
        WorkerPhase::Stepping => ("wait", "environments"),
        WorkerPhase::Admitting => ("wait", "the buffer, asked for slots"),
        WorkerPhase::Waiting => ("wait", "a slot or newer weights: the trainer has to advance"),
        WorkerPhase::HandingOver => ("wait", "rewards: too many completions are being scored"),
        WorkerPhase::Applying => ("apply_weights", ""),
        WorkerPhase::Stopping => ("stop", ""),
        WorkerPhase::Paused => ("paused", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_for_the_rank_that_works_meanwhile() {
        let span = |phase, start, end| RankSpan { phase, start, end };
        let ranks = vec![
            vec![span(RankPhase::ForwardBackward, 0.0, 1.0), span(RankPhase::Wait, 1.0, 3.0)],
            vec![span(RankPhase::ForwardBackward, 0.0, 1.5), span(RankPhase::Wait, 1.5, 3.0)],
            vec![
                span(RankPhase::Score, 0.0, 0.5),
                span(RankPhase::ForwardBackward, 0.5, 2.0),
                span(RankPhase::Wait, 2.0, 3.0),
            ],
        ];
        assert_eq!(awaited(&ranks, 0, ranks[0][1]), "trainer rank 2");
        assert_eq!(awaited(&ranks, 1, ranks[1][1]), "trainer rank 2");
        assert_eq!(awaited(&ranks, 2, ranks[2][2]), "the exchange with other ranks");
        assert_eq!(awaited(&ranks[..1], 0, ranks[0][1]), "the exchange with other ranks");
    }
}
