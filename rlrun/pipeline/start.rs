//! The state that training starts from: the last checkpoint, or the model of the recipe after its warm-up.
//!
//! Invariant: this state is saved before the first training step. Checkpoints newer than the resumed one are renamed.

use std::borrow::Cow;
use std::sync::Arc;

use model::{Head, ModelDirectory, Parameters};
use serde_json::json;
use trainer::checkpoint::{CheckpointContents, CheckpointIntegrity, NetworkState, set_aside_after};
use trainer::critic::CriticKind;
use trainer::optimizer::{OptimizerConfig, OptimizerKind};
use trainer::{Checkpoint, Learner, LearnerConfig, OuterExchange, StateWeights, TrainerError, TrainerState};
use trajectory::PolicyVersion;

use super::Run;
use crate::auxiliary_models::{LearnerStates, learner};
use crate::demonstrations::Demonstrations;
use crate::evaluation::{Evaluated, Which};
use crate::failure::Failure;
use crate::island::{IslandSetup, RunIsland};
use crate::observe::Observer;
use crate::prepare::Prepared;
use crate::recipe::schema::Warmup;
use crate::supervised;
use crate::trainer_progress::TrainerPhase;
use crate::warmup::warm_up;

/// Decay of the second moment in the warm-up.
const WARMUP_BETA2: f32 = 0.95;
/// Steps of the warm-up between measurements of the accuracy, if the recipe names one to stop at.
const WARMUP_LOOK_UP: u64 = 50;
/// A checkpoint that cannot be used, and why.
type Damage = (PolicyVersion, String);

/// The state that training starts from.
pub(super) struct StartingState {
    pub(super) learner: Learner,
    pub(super) directory: Arc<ModelDirectory>,
    pub(super) prepared: Prepared,
    pub(super) state: TrainerState,
    /// The run as an island, if it is one.
    pub(super) island: Option<RunIsland>,
    /// The evaluation before the first step; `None` after a resume.
    pub(super) evaluation: Option<Evaluated>,
    /// Whether it is that of a checkpoint.
    pub(super) resumed: bool,
}

impl StartingState {
    /// Records that training starts from it.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn record(&self, observer: &mut Observer<'_>) -> Result<(), Failure> {
        let TrainerState { version, time_s, .. } = self.state;
        observer.event("start", &json!({ "version": version, "time_s": time_s }))?;
        observer.resume_after(version)?;
        observer.write_tokens(&self.directory);
        self.evaluation.iter().try_for_each(|evaluation| observer.initial(version, evaluation))
    }
}

impl Run<'_> {
    /// The last checkpoint, or the model of the recipe, warmed up if the recipe says so. `None` if it was stopped.
    pub(super) fn starting_state(
        &self,
        observer: &mut Observer<'_>,
    ) -> Result<Option<StartingState>, Failure> {
        if let Some((checkpoint, damage)) = self.checkpoint()? {
            return self.resumed(checkpoint, &damage, observer);
        }
        let recipe = self.recipe;
        self.progress.enter(TrainerPhase::Opening);
        let mut directory = recipe.open_model(self.run_dir.path())?;
        let prepared = self.prepared(&directory)?;
        prepared.announce(recipe, &self.report, &directory);
        if recipe.has_quantized_base() {
            let (base, adapter) = recipe.over_quantized_base(&directory)?;
            let weights = StateWeights::Quantized(Arc::new(base));
            return self.first_state(
                directory,
                prepared,
                LearnerStates { weights, adapter: Some(adapter), optimizer: None },
            );
        }
        let mut parameters = directory.load_parameters()?;
        // An adapter that does not fit is refused before the warm-up.
        recipe.adapter(&parameters)?;
        if let Some(warmup) = &recipe.warmup {
            let Some(warm) = self.warmed_up(warmup, &prepared, &directory, parameters)? else {
                return Ok(None);
            };
            parameters = warm;
        }
        let shared = recipe.critic().is_some_and(|critic| critic.kind == CriticKind::Shared);
        let head = if shared { Head::LanguageAndValue } else { supervised::head(recipe) };
        if directory.config().head != head {
            directory = directory.with_head(head);
            parameters = parameters.with_head(directory.config());
        }
        let adapter = recipe.adapter(&parameters)?;
        let weights = StateWeights::Whole(Arc::new(parameters));
        self.first_state(directory, prepared, LearnerStates { weights, adapter, optimizer: None })
    }

    /// The state before the first step; `None` if the run was stopped.
    fn first_state(
        &self,
        directory: ModelDirectory,
        prepared: Prepared,
        states: LearnerStates,
    ) -> Result<Option<StartingState>, Failure> {
        let recipe = self.recipe;
        if let Some(adapter) = &states.adapter {
            let trained = adapter.values().len();
            self.report.note(&format!("LoRA trains {trained} parameters, all others are frozen"));
        }
        let directory = Arc::new(directory);
        let mut learner = self.learner(&directory, states)?;
        let island = self.island().map(|setup| setup.join(&mut learner)).transpose()?;
        let state = TrainerState::at(PolicyVersion::default());
        if island.is_some() || (recipe.warmup.is_some() && recipe.checkpoint.interval > 0) {
            let policy = NetworkState::of(&directory, &learner)?;
            let island = island.as_ref().map(|island| Cow::Owned(island.state()));
            let contents = CheckpointContents { policy, critic: None, state: &state, island };
            trainer::checkpoint::save(&self.run_dir.checkpoints(), &contents, recipe.retention())?;
        }
        let evaluation = self.evaluate(&prepared, &learner, &directory)?;
        Ok(self.unless_stopped(StartingState {
            learner,
            directory,
            prepared,
            state,
            island,
            evaluation,
            resumed: false,
        }))
    }

    /// The state in `checkpoint`; the checkpoints of `damage` are newer and cannot be used. `None` if the run was stopped.
    fn resumed(
        &self,
        checkpoint: Checkpoint,
        damage: &[Damage],
        observer: &mut Observer<'_>,
    ) -> Result<Option<StartingState>, Failure> {
        let Checkpoint { directory, weights, adapter, optimizer, state, island, integrity } = checkpoint;
        let (checkpoints, version) = (self.run_dir.checkpoints(), state.version);
        let path = trainer::checkpoint::path(&checkpoints, version);
        let directory = Arc::new(directory);
        let prepared = self.prepared(&directory)?;
        let states = LearnerStates { weights, adapter, optimizer: Some(optimizer) };
        let learner = self.learner(&directory, states)?;
        let island = self.island().map(|setup| setup.resume(&learner, island.as_deref())).transpose()?;
        // From here on only errors remain that no change of the recipe can mend.
        for (damaged, reason) in damage {
            self.report.note(&format!("the checkpoint of step {} cannot be used: {reason}", damaged.0));
            observer.event("checkpoint_damaged", &json!({ "version": damaged, "reason": reason }))?;
        }
        for (later, place) in set_aside_after(&checkpoints, Some(version))? {
            let place = place.display();
            self.report.note(&format!("the checkpoint of step {} is kept in {place}", later.0));
            observer
                .event("checkpoint_set_aside", &json!({ "version": later, "place": place.to_string() }))?;
        }
        self.progress.reach(version);
        self.report.note(&format!("resumed after step {} from {}", version.0, path.display()));
        if integrity == CheckpointIntegrity::Undigested {
            self.report
                .note("its files carry no digests, as those of format 1: they were not checked for damage");
        }
        // A run that was killed before its first step may have been killed before its first line.
        let first = version == PolicyVersion::default();
        let evaluation = if first { self.evaluate(&prepared, &learner, &directory)? } else { None };
        Ok(self.unless_stopped(StartingState {
            learner,
            directory,
            prepared,
            state,
            island,
            evaluation,
            resumed: true,
        }))
    }

    /// The run as an island, if its recipe says so.
    fn island(&self) -> Option<IslandSetup<'_>> {
        let (recipe, run_dir, report, progress) = (self.recipe, self.run_dir, &self.report, &self.progress);
        let (section, stop) = (recipe.island.as_ref()?, self.signals.stop_flag());
        Some(IslandSetup { recipe, section, run_dir, report, progress, stop })
    }

    /// The checkpoint of [`Run::from`], or the newest undamaged one, and the damaged ones that are newer.
    fn checkpoint(&self) -> Result<Option<(Checkpoint, Vec<Damage>)>, Failure> {
        let checkpoints = self.run_dir.checkpoints();
        let (optimizer, lora) = (self.recipe.optimizer(), self.recipe.lora());
        let mut versions = trainer::checkpoint::list(&checkpoints);
        if let Some(from) = self.from {
            versions.retain(|version| *version == from);
        }
        let mut damage = Vec::new();
        for version in versions.into_iter().rev() {
            let path = trainer::checkpoint::path(&checkpoints, version);
            match trainer::checkpoint::load(&path, optimizer, lora.as_ref()) {
                Ok(mut checkpoint) => {
                    checkpoint.directory = checkpoint.directory.with_reduction(self.recipe.reduction);
                    return Ok(Some((checkpoint, damage)));
                }
                Err(TrainerError::Damaged { reason, .. }) => damage.push((version, reason)),
                Err(error) => return Err(error.into()),
            }
        }
        let reasons = damage.iter().map(|(version, reason)| format!("\n  step {}: {reason}", version.0));
        let reasons: String = reasons.collect();
        if reasons.is_empty() {
            return Ok(None);
        }
        let place = checkpoints.display();
        Err(Failure::NotThere(format!("no checkpoint in {place} can be resumed from:{reasons}")))
    }

    /// `start`, unless the run was asked to stop; a later resume repeats the evaluation.
    fn unless_stopped(&self, start: StartingState) -> Option<StartingState> {
        if !self.signals.stop_requested() {
            return Some(start);
        }
        self.report.note(&format!("stopped before the next step{}", self.continuation()));
        None
    }

    /// How a run that was stopped continues.
    fn continuation(&self) -> String {
        let run_dir = self.run_dir.path().display();
        if self.is_replay { String::new() } else { format!("; go on with: rlrun resume {run_dir}") }
    }

    fn prepared(&self, directory: &ModelDirectory) -> Result<Prepared, Failure> {
        // Set once.
        let _ = self.limits.set(self.recipe.group_limits(directory.config()));
        let prepared = Prepared::new(self.recipe, directory, &self.runtime, &self.run_dir.logs())?;
        let prepared = match self.evaluates {
            true => prepared.serving_agents(self.recipe, directory, &self.runtime)?,
            false => prepared,
        };
        prepared.agents.iter().for_each(|agents| self.report.note(&agents.note()));
        let prepared = match &self.rewards {
            Some(rewards) => Prepared { rewards: Some(Arc::clone(rewards)), ..prepared },
            None => prepared,
        };
        self.progress.set_rewards(prepared.rewards.clone());
        Ok(prepared)
    }

    /// The learner of the training steps, on the cores that the recipe gives the trainer.
    fn learner(&self, directory: &ModelDirectory, states: LearnerStates) -> Result<Learner, Failure> {
        let (config, model) = (self.recipe.learner(), directory.config().clone());
        let learner = learner(self.leader.as_ref(), config, model, states)?;
        match learner.meets_on_devices() {
            Some(true) => self.report.note("ranks exchange from device to device"),
            Some(false) if learner.passes_meet_on_devices() => {
                self.report.note(
                    "ranks exchange from device to device in passes, gradients and weights through the host",
                );
            }
            Some(false) => self.report.note("ranks exchange through the host"),
            None => {}
        }
        Ok(learner.on(Arc::new(self.recipe.trainer_pool(&self.cores))))
    }

    /// The parameters after the warm-up; `None` if it was stopped.
    fn warmed_up(
        &self,
        warmup: &Warmup,
        prepared: &Prepared,
        directory: &ModelDirectory,
        parameters: Parameters,
    ) -> Result<Option<Parameters>, Failure> {
        // AdamW on all weights, for every `trainer.optimizer`; the recipe only chooses the format of its moments.
        let kind = match self.recipe.trainer.optimizer {
            OptimizerKind::Adamw8bit => OptimizerKind::Adamw8bit,
            OptimizerKind::Adamw | OptimizerKind::Muon | OptimizerKind::Dion => OptimizerKind::Adamw,
        };
        let optimizer = OptimizerConfig::standard(kind, WARMUP_BETA2);
        let config = LearnerConfig { optimizer, router_correction_rate: 0.0, ..self.recipe.learner() };
        let model = directory.config().clone();
        let weights = StateWeights::Whole(Arc::new(parameters));
        let states = LearnerStates { weights, adapter: None, optimizer: None };
        let mut learner = learner(self.leader.as_ref(), config, model, states)?
            .on(Arc::new(self.recipe.trainer_pool(&self.cores)));
        let phase = self.report.phase("warm-up", warmup.steps as u64);
        self.progress.enter(TrainerPhase::WarmUp);
        let mut last_loss = 0.0;
        let demonstrations = Demonstrations {
            prepared,
            directory,
            runtime: self.runtime.handle(),
            max_completion_length: self.recipe.rollout.max_completion_length,
            episodes: self.recipe.environment.is_some(),
        };
        warm_up(warmup, self.recipe.seed, &mut learner, &demonstrations, |step, loss, learner| {
            last_loss = loss;
            self.progress.enter(TrainerPhase::WarmUp);
            phase.set(step, &format!("loss {loss:.3}"));
            if let Some(wanted) = warmup.stop_accuracy
                && step.is_multiple_of(WARMUP_LOOK_UP)
                && let Some(evaluation) = self.evaluate_sets(Which::First, prepared, learner, directory)?
                && evaluation.accuracy().is_some_and(|(_, accuracy)| accuracy >= wanted)
            {
                return Ok(false);
            }
            Ok(!self.signals.stop_requested())
        })?;
        if self.signals.stop_requested() {
            phase.finish(&format!("stopped{}", self.continuation()));
            return Ok(None);
        }
        let wrong = 100.0 * warmup.wrong_share;
        phase.finish(&format!("loss {last_loss:.3} on demonstrations of which {wrong:.0} % are wrong"));
        Ok(Some(learner.into_parameters()?))
    }
}
