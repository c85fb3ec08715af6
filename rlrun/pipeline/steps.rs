//! The training steps of a run with samplers.

use std::time::Instant;

use buffer::{AdmissionControl, Buffer, Consumer, StepObservation};
use rollout::Progress;
use serde_json::json;
use trainer::{StepReport, Trainer};

use super::Run;
use super::samplers::Samplers;
use super::weights::WeightPublishing;
use crate::evaluation::Evaluated;
use crate::failure::Failure;
use crate::observe::{Observer, ObserverInputs};
use crate::recipe::Recipe;
use crate::trainer_progress::TrainerPhase;

/// Admission that follows what the trainer waits for.
struct AdaptedAdmission<'a> {
    buffer: &'a Buffer,
    control: AdmissionControl,
}

impl<'a> AdaptedAdmission<'a> {
    /// `None` unless the recipe asks for it.
    fn of(recipe: &Recipe, buffer: &'a Buffer) -> Option<Self> {
        let control = AdmissionControl::new(recipe.buffer.batch_groups, recipe.buffer.max_staleness);
        recipe.buffer.adapt_staleness.then_some(Self { buffer, control })
    }

    /// Takes a step of `step_s` seconds into account. Returns by how many versions samplers run ahead from now on.
    fn after(&mut self, step: &StepReport, step_s: f64, observer: &mut Observer<'_>) -> Result<u64, Failure> {
        let stats = self.buffer.stats()?;
        let wait_s = step.time.wait_for_batch;
        let (ready_groups, free_slots) = (stats.finalized, stats.slots_free);
        let before = self.control.ahead();
        let observed = StepObservation { wait_s, step_s, ready_groups, free_slots };
        if let Some(ahead) = self.control.observe(observed) {
            self.buffer.run_ahead(ahead)?;
            let (version, groups) = (step.version, ready_groups);
            let fields =
                json!({ "version": version, "ahead_before": before, "ahead": ahead, "ready_groups": groups });
            observer.event("admission", &fields)?;
        }
        Ok(self.control.ahead())
    }
}

impl Run<'_> {
    /// Runs the training steps and measures each; evaluates where it is due. Returns the evaluation of the last version.
    pub(super) fn steps(
        &self,
        trainer: &mut Trainer,
        samplers: &Samplers,
        weights: &WeightPublishing,
        buffer: Option<&Buffer>,
        observer: &mut Observer<'_>,
        evaluate: impl Fn(&Trainer) -> Result<Option<Evaluated>, Failure>,
    ) -> Result<Option<Evaluated>, Failure> {
        let (steps, interval) = (self.recipe.trainer.steps, self.recipe.eval.interval);
        let phase = self.report.phase("training", steps);
        phase.set(trainer.version().0, "");
        let mut window = (Progress::default(), Progress::default());
        let mut last = None;
        let mut admission = buffer.and_then(|buffer| AdaptedAdmission::of(self.recipe, buffer));
        let mut clock = Instant::now();
        while trainer.version().0 < steps {
            self.progress.reach(trainer.version());
            self.progress.enter(TrainerPhase::Step);
            let Some(step) = trainer.step()? else { return Ok(None) };
            let version = trainer.version().0;
            self.progress.reach(trainer.version());
            let due = version == steps || (interval > 0 && version.is_multiple_of(interval));
            let before = trainer.time_s();
            let evaluation = if due && !self.signals.stop_requested() { evaluate(trainer)? } else { None };
            let evaluated = evaluation.is_some().then(|| before..trainer.time_s());
            self.progress.enter(TrainerPhase::Writing);
            let now = samplers.progress();
            // Workers report once a second; until the next report the last one counts.
            if now != window.1 {
                window = (window.1, now);
            }
            let (lags, refused) = (weights.lags()?, self.peers.take());
            let step_s = clock.elapsed().as_secs_f64();
            let ahead =
                admission.as_mut().map(|admission| admission.after(&step, step_s, observer)).transpose()?;
            observer.step(&ObserverInputs {
                step: &step,
                push: weights.last()?,
                lags: &lags,
                distribution: weights.distribution()?,
                evaluation: evaluation.as_ref(),
                evaluated,
                activity: &samplers.take_activity(),
                rewards: &samplers.take_loads(),
                refused: &refused,
                sampler_before: window.0,
                sampler_after: window.1,
                step_s,
                ahead,
                time_s: trainer.time_s(),
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
        }
        if last.is_none() && !self.signals.stop_requested() {
            // A run that was resumed after its last step has not been evaluated yet.
            last = evaluate(trainer)?;
            last.iter().try_for_each(|of| observer.late(trainer.version(), trainer.time_s(), of))?;
        }
        Ok(last)
    }
}
