//! What a replay compares at every step: sampled tokens and log-probabilities before it, weights after it.
//!
//! Invariant: the first difference ends the replay, and names step, group, trajectory and token, or the tensor. What is taken from
//! the record without sampling it again is counted.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use buffer::FIRST_KEYED;
use rollout::{Network, PromptSet, TrajectoryReplay};
use trainer::{StepReport, Trainer};
use trajectory::{Group, PolicyVersion, Trajectory};

use super::ArmBounds;
use crate::failure::Failure;
use crate::report::Report;
use crate::schedule::{ScheduleReader, ScheduleRecord, StepNumbers, StepRecord, TrainedTensors};

/// A replay in progress.
pub(crate) struct RunReplay {
    reader: ScheduleReader,
    /// The step that is made next.
    next: Option<StepRecord>,
    /// The tensors that training has to begin with.
    first: TrainedTensors,
    /// The version that the replay begins at.
    from: PolicyVersion,
    /// The bounds of an arm, which is compared with nothing.
    arm: Option<ArmBounds>,
    /// What sampled the tokens of this part of the run, if they are taken as recorded.
    sampled_by: Option<&'static str>,
    /// Trajectories of what cannot sample to the bit again, by what that is.
    elsewhere: BTreeMap<&'static str, u64>,
    report: Arc<Report>,
    counts: ReplayCounts,
    /// The first bound that was crossed, with the step, and whether that ended it.
    crossed: Option<String>,
    has_ended: bool,
}

/// What was compared.
#[derive(Clone, Copy, Debug, Default)]
struct ReplayCounts {
    steps: u64,
    /// Trajectories and tokens that were sampled again.
    trajectories: u64,
    tokens: u64,
    /// Trajectories of external sessions, of versions before the first step, and of the pool of successes.
    external: u64,
    earlier: u64,
    pooled: u64,
}

/// How the trajectories of a part of a run are sampled again.
pub(crate) struct SampledAgain<'a> {
    pub(crate) sampler: TrajectoryReplay,
    pub(crate) prompts: &'a PromptSet,
    /// Whether agents sampled all trajectories.
    pub(crate) has_agents: bool,
    /// Whether a group may hold the success of another.
    pub(crate) has_pool: bool,
}

impl RunReplay {
    /// A replay of the schedule at `path` from `from` on.
    ///
    /// # Errors
    /// A schedule that cannot be used.
    pub(crate) fn new(
        path: &Path,
        from: PolicyVersion,
        arm: Option<ArmBounds>,
        report: Arc<Report>,
    ) -> Result<Self, Failure> {
        let mut reader = ScheduleReader::open(path)?;
        let (mut first, mut next) = (TrainedTensors::default(), None);
        while let Some(record) = reader.next()? {
            match record {
                ScheduleRecord::Start(start) if start.version <= from => first = start.tensors,
                ScheduleRecord::Step(step) if step.version <= from => first.digests = step.tensors.digests,
                ScheduleRecord::Start(_) => {}
                ScheduleRecord::Step(step) => {
                    next = Some(*step);
                    break;
                }
            }
        }
        let counts = ReplayCounts::default();
        Ok(Self {
            reader,
            next,
            first,
            from,
            arm,
            sampled_by: None,
            elsewhere: BTreeMap::new(),
            report,
            counts,
            crossed: None,
            has_ended: false,
        })
    }

    /// Begins a part of the run, whose tokens are taken as recorded if something that cannot repeat them sampled them.
    pub(crate) fn begin_part(&mut self, sampled_by: Option<&'static str>) {
        self.sampled_by = sampled_by;
    }

    /// Whether the trajectories of this part are sampled again.
    pub(crate) fn samples_again(&self) -> bool {
        !self.is_arm() && self.sampled_by.is_none()
    }

    /// Whether it is an arm, whose trajectories are taken as recorded.
    pub(crate) fn is_arm(&self) -> bool {
        self.arm.is_some()
    }

    /// Whether a bound ended it.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Compares the weights that `trainer` begins with, at the first step of the replay.
    ///
    /// # Errors
    /// A tensor that differs.
    pub(crate) fn compare_start(&self, trainer: &Trainer) -> Result<(), Failure> {
        if self.is_arm() || trainer.version() != self.from {
            return Ok(());
        }
        let tensors = TrainedTensors::of(trainer)?;
        match tensors.first_difference(&self.first) {
            None => Ok(()),
            Some(name) => Err(Failure::Differs(format!(
                "the replay differs from the record before its first step: the weights of step {} differ in `{name}`; model files, \
                 the warm-up or the program differ from those of the run",
                self.from.0
            ))),
        }
    }

    /// The oldest version that a token of the next step was sampled by.
    pub(crate) fn oldest_needed(&self) -> Option<PolicyVersion> {
        self.next.as_ref()?.groups.iter().filter_map(|group| group.oldest_version()).min()
    }

    /// The batch of the next step, and the groups dropped before it; `None` after the last step.
    pub(crate) fn batch(&self) -> Option<(Vec<Arc<Group>>, u64)> {
        let next = self.next.as_ref()?;
        Some((next.groups.clone(), next.numbers.dropped_stale))
    }

    /// Most tokens of a micro-batch in the next step, if the run adapted it.
    pub(crate) fn microbatch_tokens(&self) -> Option<usize> {
        self.next.as_ref()?.numbers.microbatch_tokens
    }

    /// Takes the trajectories of the next step as recorded.
    pub(crate) fn take_samples(&mut self) {
        let Some(by) = self.sampled_by else { return };
        let groups = self.next.iter().flat_map(|next| &next.groups);
        let taken: usize = groups.map(|group| group.trajectories.len()).sum();
        *self.elsewhere.entry(by).or_default() += taken as u64;
    }

    /// Samples the trajectories of the next step again.
    ///
    /// # Errors
    /// The first difference.
    pub(crate) fn compare_samples(&mut self, again: &mut SampledAgain<'_>) -> Result<(), Failure> {
        let Some(next) = &self.next else { return Ok(()) };
        let (step, groups) = (next.version, next.groups.clone());
        for group in &groups {
            if group.id.0 < FIRST_KEYED && !again.has_agents {
                let task = again.prompts.of(group.id).0.id;
                if task != group.task.id {
                    return Err(Failure::Differs(format!(
                        "the replay differs from the record in step {}: {} has task {}, and the data of the recipe has task {} there; \
                         the data has changed",
                        step.0, group.id, group.task.id.0, task.0
                    )));
                }
            }
            for trajectory in &group.trajectories {
                self.sample_again(step, group, trajectory, again)?;
            }
        }
        Ok(())
    }

    fn sample_again(
        &mut self,
        step: PolicyVersion,
        group: &Group,
        trajectory: &Trajectory,
        again: &mut SampledAgain<'_>,
    ) -> Result<(), Failure> {
        if group.id.0 >= FIRST_KEYED || again.has_agents || !trajectory.branches.is_empty() {
            self.counts.external += 1;
            return Ok(());
        }
        if !again.sampler.can_sample(trajectory) {
            self.counts.earlier += 1;
            return Ok(());
        }
        let Some(difference) = again.sampler.first_difference(group.id, trajectory)? else {
            self.counts.trajectories += 1;
            self.counts.tokens += trajectory.completion_tokens() as u64;
            return Ok(());
        };
        let pooled = |last: &Trajectory| !last.baseline && last.role == trajectory.role;
        let is_last = group.trajectories.iter().rfind(|last| pooled(last)).map(|last| last.index);
        if again.has_pool && is_last == Some(trajectory.index) {
            self.counts.pooled += 1;
            return Ok(());
        }
        Err(Failure::Differs(format!(
            "the replay differs from the record in step {}: {}, trajectory {}, {difference}",
            step.0, group.id, trajectory.index
        )))
    }

    /// Compares a step that was made with its record. False if it was the last: `until` is reached, or a bound is crossed.
    ///
    /// # Errors
    /// A tensor that differs; a schedule that cannot be read.
    pub(crate) fn compare_step(
        &mut self,
        made: &StepReport,
        trainer: &Trainer,
        until: PolicyVersion,
    ) -> Result<bool, Failure> {
        let Some(record) = self.next.take() else { return Ok(false) };
        let numbers = StepNumbers::of(made, trainer.time_s());
        if self.arm.is_none() {
            compare_weights(&record, &numbers, trainer, self.samples_again())?;
        }
        self.counts.steps += 1;
        if let Some(bounds) = &self.arm
            && let Some(reason) = bounds.crossed(&numbers, &record.numbers)
        {
            let step = made.version.0;
            self.report.note(&format!("step {step}: {reason}"));
            let begins = if bounds.keep_going { "a bound was crossed in" } else { "it stopped after" };
            self.crossed.get_or_insert_with(|| format!("{begins} step {step}: {reason}"));
            if !bounds.keep_going {
                self.has_ended = true;
                return Ok(false);
            }
        }
        while let Some(record) = self.reader.next()? {
            if let ScheduleRecord::Step(step) = record {
                self.next = Some(*step);
                break;
            }
        }
        Ok(made.version < until && self.next.is_some())
    }

    /// What was compared, and what was taken from the record, up to the step of version `last`.
    ///
    /// # Errors
    /// A replay that was stopped before that step.
    pub(crate) fn summary(&self, run: &Path, place: &Path, last: PolicyVersion) -> Result<String, Failure> {
        let (run, place) = (run.display(), place.display());
        let ReplayCounts { steps, trajectories, tokens, external, earlier, pooled } = self.counts;
        let all = last.0.saturating_sub(self.from.0);
        let reason = self.crossed.as_deref().unwrap_or("no bound was crossed");
        if steps < all && !self.has_ended {
            let so_far = match (self.is_arm(), steps) {
                (true, _) => format!("the others were not trained on; {reason}"),
                (false, 0) => "no step was compared".to_owned(),
                (false, _) => {
                    format!("these equal those of {run} bit for bit, and the others were not compared")
                }
            };
            return Err(Failure::Requeue(format!(
                "stopped after {steps} of {all} recorded steps: {so_far}; start it again in another directory (--run-dir), or remove \
                 {place} before"
            )));
        }
        if self.is_arm() {
            return Ok(format!("{place} was trained on {steps} recorded batches of {run}; {reason}"));
        }
        let mut lines = vec![format!(
            "{place} equals {run} bit for bit: {steps} steps, {tokens} tokens of {trajectories} trajectories sampled again, all \
             weights after every step"
        )];
        let others = [
            (external, "of external sessions"),
            (earlier, "of versions before the first step"),
            (pooled, "of the pool of successes"),
        ];
        let elsewhere = self.elsewhere.iter().map(|(by, count)| (*count, *by));
        for (count, what) in others.into_iter().chain(elsewhere) {
            if count > 0 {
                lines.push(format!("{count} trajectories {what} were taken as recorded"));
            }
        }
        Ok(lines.join("\n"))
    }
}

impl SampledAgain<'_> {
    /// Holds the weights of `version` in place of versions before `oldest`.
    pub(crate) fn hold(&mut self, version: PolicyVersion, network: Network, oldest: Option<PolicyVersion>) {
        self.sampler.free_before(oldest.unwrap_or(version).min(version));
        self.sampler.hold(version, network);
    }
}

/// # Errors
/// The first tensor that differs.
fn compare_weights(
    record: &StepRecord,
    numbers: &StepNumbers,
    trainer: &Trainer,
    sampled_again: bool,
) -> Result<(), Failure> {
    let tensors = TrainedTensors::of(trainer)?;
    let Some(name) = tensors.first_difference(&record.tensors) else { return Ok(()) };
    let (step, differences) = (record.version.0, record.numbers.differences(numbers));
    let tokens =
        if sampled_again { "all sampled tokens are equal" } else { "it trained on the recorded tokens" };
    Err(Failure::Differs(format!(
        "the replay differs from the record in step {step}: the weights differ after it, first in `{name}`, although {tokens}; \
         recorded and again: {differences}"
    )))
}
