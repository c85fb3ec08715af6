//! Training on recorded batches: samples them again under the versions that sampled them, and makes their steps.
//!
//! Invariant: one thread does one thing after the other. Which threads and ranks share its passes changes no bit.

use std::sync::Arc;

use model::Quantization;
use rollout::{OnUpdate, ReplayConfig, ServeOn, TrajectoryReplay};
use trainer::{Trainer, TrainerParts};
use trajectory::PolicyVersion;
use weights::{Dtype, Hub};

use super::samplers::Samplers;
use super::start::StartingState;
use super::steps::{MadeStep, StepConnections, StepFollower};
use super::weights::WeightPublishing;
use super::{Run, RunOptions};
use crate::agents;
use crate::failure::Failure;
use crate::observe::Observer;
use crate::recipe::Recipe;
use crate::replay::{RecordedBatches, RunReplay, SampledAgain};
use crate::report::Report;
use crate::run_dir::RunDir;
use crate::sampler::published_network;
use crate::workers::registry::WorkerRegistry;

/// Makes the recorded steps up to version `until` in `run_dir`, as `recipe` says. False if the replay ends there or before.
///
/// # Errors
/// The first difference, or whatever ended the run.
pub(crate) fn replay_in(
    recipe: &Recipe,
    run_dir: &RunDir,
    report: &Arc<Report>,
    options: RunOptions,
    replay: &mut RunReplay,
    until: PolicyVersion,
) -> Result<bool, Failure> {
    let opened = Run::open(recipe, run_dir, report, options)?;
    let run = Run { evaluates: replay.is_arm(), is_replay: true, ..opened };
    let mut observer = Observer::new(recipe, run_dir, report)?;
    let Some(start) = run.starting_state(&mut observer)? else { return Ok(false) };
    start.record(&mut observer)?;
    let reached = run.repeat(start, replay, until, &mut observer)?;
    observer.finish_logs();
    let done = reached == until;
    observer.event("end", &serde_json::json!({ "version": reached, "done": done }))?;
    Ok(done && !replay.has_ended() && !run.signals.stop_requested())
}

/// Samples the batches of a replay again, and compares the steps that are made of them.
struct ReplayFollower<'a> {
    replay: &'a mut RunReplay,
    batches: Arc<RecordedBatches>,
    /// `None` for an arm, and for tokens that are taken as recorded.
    again: Option<SampledAgain<'a>>,
    on: ServeOn,
    config: model::Config,
    /// What weights are rounded to for samplers.
    dtype: Dtype,
    adapts_microbatch: bool,
    until: PolicyVersion,
}

impl Run<'_> {
    /// Trains from `start` up to version `until`. Returns the version that is reached.
    fn repeat(
        &self,
        start: StartingState,
        replay: &mut RunReplay,
        until: PolicyVersion,
        observer: &mut Observer<'_>,
    ) -> Result<PolicyVersion, Failure> {
        let auxiliary = self.auxiliary(&start).auxiliary_models()?;
        let hub = Hub::new(self.recipe.hub());
        let weights = WeightPublishing::new(self.recipe, &hub, false, false)?;
        let again = if replay.samples_again() { Some(self.sampled_again(&start)?) } else { None };
        let (prompts, evaluated) =
            (Arc::clone(&start.prepared.train), self.recipe.opened(start.directory.path())?);
        let StartingState { learner, directory, prepared, state, .. } = start;
        let batches = Arc::<RecordedBatches>::default();
        let parts = TrainerParts {
            learner,
            auxiliary,
            directory: Arc::clone(&directory),
            buffer: Arc::clone(&batches) as _,
            publisher: weights.publishing(),
            stop: self.signals.stop_flag(),
            archive: None,
            exchange: None,
            elasticity: None,
        };
        let mut trainer = Trainer::start(self.recipe.trainer(self.run_dir.checkpoints()), parts, &state)?;
        replay.compare_start(&trainer)?;
        let samplers = Samplers { local: None, registry: Arc::new(WorkerRegistry::after(0)), rewards: None };
        let on =
            if replay.samples_again() { served(self.recipe)? } else { ServeOn::Host(Quantization::None) };
        let mut follower = ReplayFollower {
            replay,
            batches,
            again: again.map(|sampler| SampledAgain {
                sampler,
                prompts: &prompts,
                has_agents: agents::has_agents(self.recipe),
                has_pool: self.recipe.curation.success_pool,
            }),
            on,
            config: directory.config().clone(),
            dtype: weights.dtype(self.recipe),
            adapts_microbatch: self.recipe.trainer.adapt_microbatch,
            until,
        };
        follower.hold(&trainer)?;
        let connections = StepConnections {
            samplers: &samplers,
            weights: &weights,
            buffer: None,
            follower: Some(&mut follower),
        };
        self.steps(&mut trainer, connections, observer, |trainer| {
            self.evaluate(&prepared, trainer.learner(), &evaluated)
        })?;
        observer.sync()?;
        trainer.last_checkpoint()?;
        Ok(trainer.version())
    }

    /// What samples the trajectories of the run again.
    fn sampled_again(&self, start: &StartingState) -> Result<TrajectoryReplay, Failure> {
        let (recipe, stop) = (self.recipe, self.recipe.stop_rules(&start.directory));
        let config = ReplayConfig {
            seed: recipe.engine(1, start.directory.config().max_context()).seed,
            sampling: recipe.sampling(),
            interruption: recipe.interruption(&stop)?,
            stop,
            // A colocated sampler has no cache when it is woken up with new weights.
            recomputes: recipe.is_colocated() || recipe.rollout.on_update == OnUpdate::Recompute,
            records_experts: recipe.rollout.routing_replay,
        };
        Ok(TrajectoryReplay::new(config, Arc::clone(&start.prepared.pool)))
    }
}

/// Where the weights of the sampler are: with the quantization of the recipe, and whole.
fn served(recipe: &Recipe) -> Result<ServeOn, Failure> {
    Ok(match recipe.serve_on()? {
        ServeOn::Ranks(_) => ServeOn::Host(Quantization::None),
        on => on,
    })
}

impl ReplayFollower<'_> {
    /// Holds the weights of `trainer` for the batches that they sampled tokens of.
    fn hold(&mut self, trainer: &Trainer) -> Result<(), Failure> {
        let Some(again) = &mut self.again else { return Ok(()) };
        let network = published_network(&self.on, &self.config, trainer.learner(), self.dtype)?;
        again.hold(trainer.version(), network, self.replay.oldest_needed());
        Ok(())
    }
}

impl StepFollower for ReplayFollower<'_> {
    fn before(&mut self, trainer: &mut Trainer) -> Result<bool, Failure> {
        if trainer.version() >= self.until {
            return Ok(false);
        }
        let Some((groups, dropped_stale)) = self.replay.batch() else { return Ok(false) };
        match &mut self.again {
            Some(again) => self.replay.compare_samples(again)?,
            None => self.replay.take_samples(),
        }
        self.batches.set(groups, dropped_stale);
        // An arm with a fixed size trains with that.
        if let Some(tokens) = self.replay.microbatch_tokens().filter(|_| self.adapts_microbatch) {
            trainer.set_microbatch_tokens(tokens);
        }
        Ok(true)
    }

    fn after(&mut self, made: &MadeStep<'_>) -> Result<bool, Failure> {
        let goes_on = self.replay.compare_step(made.step, made.trainer, self.until)?;
        self.hold(made.trainer)?;
        Ok(goes_on)
    }
}
