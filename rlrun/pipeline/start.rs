//! What a run starts from: its last checkpoint, or the model of the recipe, warmed up.
//!
//! Invariant: what the training steps start from is saved before the first of them.

use std::sync::Arc;

use model::{Head, ModelDirectory, Parameters};
use rollout::evaluate::Evaluation;
use trainer::checkpoint::{Contents, NetworkState};
use trainer::critic::CriticKind;
use trainer::lora::Adapter;
use trainer::optimizer::{Optimizer, OptimizerConfig, OptimizerKind};
use trainer::{Checkpoint, Learner, LearnerConfig, TrainerState};
use trajectory::PolicyVersion;

use super::Run;
use crate::companions::learner;
use crate::failure::Failure;
use crate::prepare::Prepared;
use crate::recipe::schema::Warmup;
use crate::supervised;
use crate::warmup::warm_up;

/// Decay of the second moment in the warm-up.
const WARMUP_BETA2: f32 = 0.95;
/// Steps of the warm-up between looks at the accuracy, if the recipe names one to stop at.
const WARMUP_LOOK_UP: u64 = 50;
/// What training starts from.
pub(super) struct Start {
    pub(super) learner: Learner,
    pub(super) directory: Arc<ModelDirectory>,
    pub(super) prepared: Prepared,
    pub(super) state: TrainerState,
    /// Answers before the first step; `None` for a run that goes on after another.
    pub(super) evaluation: Option<Evaluation>,
}

impl Run<'_> {
    /// The last checkpoint, or the model of the recipe, warmed up if the recipe says so. `None` if it was stopped.
    pub(super) fn starting_point(&self) -> Result<Option<Start>, Failure> {
        let recipe = self.recipe;
        let checkpoints = self.run_dir.checkpoints();
        if let Some(version) = trainer::checkpoint::list(&checkpoints).pop() {
            let path = trainer::checkpoint::path(&checkpoints, version);
            let Checkpoint { directory, parameters, adapter, optimizer, state } =
                trainer::checkpoint::load(&path, recipe.optimizer(), recipe.lora().as_ref())?;
            let directory = Arc::new(directory);
            let prepared = self.prepared(&directory)?;
            let learner = self.learner(&directory, parameters, adapter, Some(optimizer))?;
            self.report.note(&format!("resumed after step {} from {}", version.0, path.display()));
            // A run that was killed before its first step may have been killed before its first line.
            let first = version == PolicyVersion::default();
            let evaluation = if first { self.evaluate(&prepared, &learner, &directory)? } else { None };
            return Ok(Some(Start { learner, directory, prepared, state, evaluation }));
        }
        let mut directory = recipe.open_model(self.run_dir.path())?;
        let prepared = self.prepared(&directory)?;
        prepared.announce(&self.report, &directory);
        let mut parameters = directory.load_parameters()?;
        // What is wrong with an adapter shows before the warm-up, not after it.
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
        if let Some(adapter) = &adapter {
            let trained = adapter.values().len();
            self.report.note(&format!("LoRA trains {trained} parameters, all others are frozen"));
        }
        let directory = Arc::new(directory);
        let learner = self.learner(&directory, parameters, adapter, None)?;
        let state = TrainerState::new(PolicyVersion::default(), 0, 0, 0.0);
        if recipe.warmup.is_some() && recipe.checkpoint.interval > 0 {
            let policy = NetworkState::of(&directory, &learner)?;
            let contents = Contents { policy, critic: None, state: &state };
            trainer::checkpoint::save(&checkpoints, &contents, recipe.retention())?;
        }
        let evaluation = self.evaluate(&prepared, &learner, &directory)?;
        Ok(Some(Start { learner, directory, prepared, state, evaluation }))
    }

    fn prepared(&self, directory: &ModelDirectory) -> Result<Prepared, Failure> {
        let prepared = Prepared::new(self.recipe, directory, (&self.runtime, &self.run_dir.logs()))?;
        Ok(match &self.rewards {
            Some(rewards) => Prepared { rewards: Some(Arc::clone(rewards)), ..prepared },
            None => prepared,
        })
    }

    /// The learner of the training steps, on the cores that the recipe gives the trainer.
    fn learner(
        &self,
        directory: &ModelDirectory,
        parameters: Parameters,
        adapter: Option<Adapter>,
        optimizer: Option<Optimizer>,
    ) -> Result<Learner, Failure> {
        let (config, model) = (self.recipe.learner(), directory.config().clone());
        let learner = learner(self.leader.as_ref(), config, model, (parameters, adapter, optimizer))?;
        match learner.meets_on_devices() {
            Some(true) => self.report.note("ranks exchange from device to device"),
            Some(false) => self.report.note("ranks exchange through the host"),
            None => {}
        }
        Ok(learner.on(Arc::new(self.recipe.trainer_team(&self.cores))))
    }

    /// The parameters after the warm-up; `None` if it was stopped.
    fn warmed_up(
        &self,
        warmup: &Warmup,
        prepared: &Prepared,
        directory: &ModelDirectory,
        parameters: Parameters,
    ) -> Result<Option<Parameters>, Failure> {
        // AdamW on all weights, whatever the training steps do; only how it keeps its moments is the recipe's.
        let kind = match self.recipe.trainer.optimizer {
            OptimizerKind::Adamw8bit => OptimizerKind::Adamw8bit,
            OptimizerKind::Adamw | OptimizerKind::Muon | OptimizerKind::Dion => OptimizerKind::Adamw,
        };
        let optimizer = OptimizerConfig::usual(kind, WARMUP_BETA2);
        let config = LearnerConfig { optimizer, ..self.recipe.learner() };
        let model = directory.config().clone();
        let mut learner = learner(self.leader.as_ref(), config, model, (parameters, None, None))?
            .on(Arc::new(self.recipe.trainer_team(&self.cores)));
        let phase = self.report.phase("warm-up", warmup.steps as u64);
        let mut last_loss = 0.0;
        let tasks = prepared.train_tasks();
        warm_up(warmup, self.recipe.seed, (&mut learner, directory), &tasks, |step, loss, learner| {
            last_loss = loss;
            phase.set(step, &format!("loss {loss:.3}"));
            if let Some(wanted) = warmup.stop_accuracy
                && step.is_multiple_of(WARMUP_LOOK_UP)
                && let Some(evaluation) = self.evaluate(prepared, learner, directory)?
                && evaluation.accuracy() >= wanted
            {
                return Ok(false);
            }
            Ok(!self.signals.stop_requested())
        })?;
        if self.signals.stop_requested() {
            phase.finish(&format!(
                "stopped; start it again with: rlrun resume {}",
                self.run_dir.path().display()
            ));
            return Ok(None);
        }
        let wrong = 100.0 * warmup.wrong_share;
        phase.finish(&format!("loss {last_loss:.3} on demonstrations of which {wrong:.0} % are wrong"));
        Ok(Some(learner.into_parameters()?))
    }
}
