//! Supervised training: steps on demonstrations or pairs, with evaluations and checkpoints where they are due.
//!
//! Invariant: it can be stopped between two steps, and resumes from its last checkpoint.

use std::sync::Arc;
use std::time::Instant;

use model::ModelDirectory;
use trainer::Learner;
use trainer::checkpoint::{CheckpointArchive, CheckpointContents, CheckpointWriter, NetworkState};

use super::start::StartingState;
use super::{Run, TrainingResult};
use crate::evaluation::Evaluated;
use crate::failure::Failure;
use crate::metrics::Metrics;
use crate::observe::Observer;
use crate::prepare::Prepared;
use crate::recipe::schema::Supervised;
use crate::supervised::SupervisedTraining;
use crate::trainer_progress::TrainerPhase;

impl Run<'_> {
    /// Trains without sampling until all steps are done or the run is stopped.
    pub(super) fn supervise(
        &self,
        config: &Supervised,
        start: StartingState,
        observer: &mut Observer<'_>,
    ) -> Result<TrainingResult, Failure> {
        let reference = self.auxiliary(&start).reference()?;
        let StartingState { mut learner, directory, prepared, mut state, .. } = start;
        let files = ModelDirectory::open(directory.path())?;
        let training = SupervisedTraining::new(self.recipe, config, files, reference);
        training.check(&prepared)?;
        let (began, earlier) = (Instant::now(), state.time_s);
        let (steps, every) = (self.recipe.trainer.steps, self.recipe.checkpoint.interval);
        let phase = self.report.phase("training", steps);
        let mut last = None;
        let archive = self.archive.clone().map(|archive| archive as Arc<dyn CheckpointArchive>);
        let writer = CheckpointWriter::new(self.recipe.checkpoints(self.run_dir.checkpoints()));
        let mut writer = writer.archived(archive);
        while state.version.0 < steps && !self.signals.stop_requested() {
            let clock = Instant::now();
            self.progress.enter(TrainerPhase::Step);
            let (mut metrics, tokens) = training.step(state.version.0, &mut learner, &prepared.train)?;
            state.version = state.version.next();
            self.progress.reach(state.version);
            state.updates = learner.updates();
            state.trained_tokens += tokens;
            state.time_s = earlier + began.elapsed().as_secs_f64();
            let seconds = clock.elapsed().as_secs_f64();
            metrics.set("time_s", state.time_s);
            metrics.set("time/step", seconds);
            metrics.set("trainer/tokens_per_s", tokens as f64 / seconds.max(f64::MIN_POSITIVE));
            let (version, interval) = (state.version.0, self.recipe.eval.interval);
            if version == steps || (interval > 0 && version.is_multiple_of(interval)) {
                last = self.examine(&training, &prepared, &learner, &directory, &mut metrics)?;
                last.iter().for_each(|evaluation| observer.failures_of(evaluation));
            }
            self.progress.enter(TrainerPhase::Writing);
            observer.record(&metrics)?;
            phase.set(version, "");
            if every > 0 && version.is_multiple_of(every) {
                observer.sync()?;
                let policy = NetworkState::of(&directory, &learner)?;
                writer.save(CheckpointContents { policy, critic: None, state: &state, island: None })?;
            }
            // An error of an earlier checkpoint ends the run.
            writer.take_durable()?;
        }
        observer.sync()?;
        let policy = NetworkState::of(&directory, &learner)?;
        writer.save_now(&CheckpointContents { policy, critic: None, state: &state, island: None })?;
        let version = state.version;
        if last.is_none() && version.0 >= steps {
            last = self.evaluate(&prepared, &learner, &directory)?;
            last.iter().try_for_each(|evaluation| observer.late(version, state.time_s, evaluation))?;
        }
        let cut_short = last.is_none() && self.is_cut_short(&prepared);
        Ok(TrainingResult { version: state.version, time_s: state.time_s, evaluation: last, cut_short })
    }

    /// Measures on held-out tasks: the accuracy on pairs, the loss on demonstrations, and the answers of a policy.
    fn examine(
        &self,
        training: &SupervisedTraining<'_>,
        prepared: &Prepared,
        learner: &Learner,
        directory: &ModelDirectory,
        metrics: &mut Metrics,
    ) -> Result<Option<Evaluated>, Failure> {
        if let Some(tasks) = &prepared.eval
            && let Some(accuracy) = training.pair_accuracy(learner, tasks)?
        {
            metrics.set("eval/pair_accuracy", accuracy);
        }
        if let Some(tasks) = &prepared.eval
            && let Some(loss) = training.loss(learner, tasks)?
        {
            metrics.set("eval/loss", loss);
        }
        let evaluation = self.evaluate(prepared, learner, directory)?;
        if let Some(evaluation) = &evaluation {
            evaluation.measure(metrics);
        }
        Ok(evaluation)
    }
}
