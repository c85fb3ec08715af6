//! The training steps of a run with samplers.

use std::time::Instant;

use buffer::Buffer;
use rollout::Progress;
use trainer::{StepReport, Trainer, TrainerError};

use super::Run;
use super::admission::AdaptedAdmission;
use super::samplers::Samplers;
use super::weights::WeightPublishing;
use crate::evaluation::Evaluated;
use crate::failure::Failure;
use crate::observe::{Observer, ObserverInputs};
use crate::schedule::ScheduleRecorder;
use crate::trainer_progress::TrainerPhase;

/// What a run is connected to during its steps.
pub(super) struct StepConnections<'a> {
    pub(super) samplers: &'a Samplers,
    pub(super) weights: &'a WeightPublishing,
    /// The buffer, if it is in this process.
    pub(super) buffer: Option<&'a Buffer>,
    /// Records the steps, or compares them with those of a record.
    pub(super) follower: Option<&'a mut dyn StepFollower>,
}

/// Follows the steps of a run.
pub(super) trait StepFollower {
    /// Prepares the next step of `trainer`. False if there is none.
    ///
    /// # Errors
    /// What ends the run.
    fn before(&mut self, _trainer: &mut Trainer) -> Result<bool, Failure> {
        Ok(true)
    }

    /// Takes a step. False if it was the last.
    ///
    /// # Errors
    /// What ends the run.
    fn after(&mut self, made: &MadeStep<'_>) -> Result<bool, Failure>;
}

/// A step that was made.
pub(super) struct MadeStep<'a> {
    pub(super) step: &'a StepReport,
    pub(super) trainer: &'a Trainer,
    /// Wall time of the run, seconds.
    pub(super) time_s: f64,
}

impl StepFollower for ScheduleRecorder {
    fn after(&mut self, made: &MadeStep<'_>) -> Result<bool, Failure> {
        self.step(made.step, made.trainer, made.time_s)?;
        Ok(true)
    }
}

/// What `evaluate` says of the version that `trainer` has.
fn evaluated_by(
    trainer: &mut Trainer,
    evaluate: impl Fn(&Trainer) -> Result<Option<Evaluated>, Failure>,
) -> Result<Option<Evaluated>, Failure> {
    trainer.with_ranks(of_trainer, |trainer| evaluate(trainer))
}

/// The error of the trainer in a failure.
fn of_trainer(failure: &Failure) -> Option<&TrainerError> {
    match failure {
        Failure::Trainer(error) => Some(error),
        _ => None,
    }
}

impl Run<'_> {
    /// Runs the training steps and measures each; evaluates where it is due. Returns the evaluation of the last version.
    pub(super) fn steps(
        &self,
        trainer: &mut Trainer,
        connections: StepConnections<'_>,
        observer: &mut Observer<'_>,
        evaluate: impl Fn(&Trainer) -> Result<Option<Evaluated>, Failure>,
    ) -> Result<Option<Evaluated>, Failure> {
        let StepConnections { samplers, weights, buffer, mut follower } = connections;
        let (steps, interval) = (self.recipe.trainer.steps, self.recipe.eval.interval);
        let phase = self.report.phase("training", steps);
        phase.set(trainer.version().0, "");
        let mut window = (Progress::default(), Progress::default());
        let mut last = None;
        let mut admission = buffer.map(|buffer| AdaptedAdmission::of(self.recipe, buffer)).transpose()?;
        let mut clock = Instant::now();
        while trainer.version().0 < steps {
            self.progress.reach(trainer.version());
            self.progress.enter(TrainerPhase::Step);
            if let Some(follower) = &mut follower
                && !follower.before(trainer)?
            {
                break;
            }
            let Some(step) = trainer.step()? else { return Ok(None) };
            let version = trainer.version().0;
            self.progress.reach(trainer.version());
            let due = version == steps || (interval > 0 && version.is_multiple_of(interval));
            let before = trainer.time_s();
            let wanted = due && !self.signals.stop_requested();
            let evaluation = if wanted { evaluated_by(trainer, &evaluate)? } else { None };
            let evaluated = evaluation.is_some().then(|| before..trainer.time_s());
            self.progress.enter(TrainerPhase::Writing);
            let now = samplers.progress();
            // Workers report once a second; until the next report the last one counts.
            if now != window.1 {
                window = (window.1, now);
            }
            let (lags, refused, step_s) = (weights.lags()?, self.peers.take(), clock.elapsed().as_secs_f64());
            let limits = admission.as_mut().map(|of| of.after(&step, step_s, observer)).transpose()?;
            let (activity, time_s) = (samplers.take_activity(), trainer.time_s());
            let goes_on = trainer.with_ranks(of_trainer, |trainer| {
                let made = MadeStep { step: &step, trainer, time_s };
                follower.as_mut().map_or(Ok(true), |follower| follower.after(&made))
            })?;
            observer.step(&ObserverInputs {
                step: &step,
                push: weights.last()?,
                lags: &lags,
                distribution: weights.distribution()?,
                evaluation: evaluation.as_ref(),
                evaluated,
                activity: &activity,
                rewards: &samplers.take_loads(),
                refused: &refused,
                sampler_before: window.0,
                sampler_after: window.1,
                step_s,
                limits: limits.unwrap_or_default(),
                time_s,
            })?;
            clock = Instant::now();
            if trainer.checkpoint_due() {
                observer.sync()?;
                trainer.checkpoint()?;
            } else if self.recipe.checkpoint.interval == 0 && !self.recipe.buffer.store.is_durable() {
                trainer.forget()?;
            }
            phase.set(version, &format!("reward {:.3}", step.batch.reward.mean));
            last = evaluation;
            if !goes_on {
                break;
            }
        }
        if last.is_none() && !self.signals.stop_requested() {
            // A run that was resumed after its last step has not been evaluated yet.
            last = evaluated_by(trainer, &evaluate)?;
            last.iter().try_for_each(|of| observer.late(trainer.version(), trainer.time_s(), of))?;
        }
        Ok(last)
    }
}
