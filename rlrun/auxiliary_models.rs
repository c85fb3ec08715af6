//! What stands beside the policy in training: its reference, its critic, demonstrations.
//!
//! Invariant: the reference is the policy that training started from, to the bit, also after a resume: it is written to
//! the run directory once, before the first step.

use std::sync::Arc;

use model::{
    Config, Head, MemoryBudget, ModelDirectory, Parameters, Placement, ResidentParameters, SharedCores,
    ThreadPool,
};
use trainer::critic::{Critic, CriticKind, CriticNetwork};
use trainer::lora::Adapter;
use trainer::optimizer::Optimizer;
use trainer::trainer::Demonstrate;
use trainer::{AuxiliaryModels, Frozen, Leader, Learner, LearnerConfig, TrainerState, checkpoint};
use trajectory::PolicyVersion;

use crate::demonstrations;
use crate::failure::Failure;
use crate::prepare::Prepared;
use crate::recipe::{DataSource, Recipe};
use crate::run_dir::RunDir;

/// What training starts from.
pub(crate) struct Starting<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) run_dir: &'a RunDir,
    pub(crate) directory: &'a ModelDirectory,
    pub(crate) learner: &'a Learner,
    pub(crate) state: &'a TrainerState,
    pub(crate) prepared: &'a Prepared,
    pub(crate) cores: &'a Arc<SharedCores>,
    pub(crate) leader: Option<&'a Arc<Leader>>,
}

/// A learner, shared with the processes of `leader` if there is one.
///
/// # Errors
/// If one of them is gone.
pub(crate) fn learner(
    leader: Option<&Arc<Leader>>,
    config: LearnerConfig,
    model: Config,
    (parameters, adapter, optimizer): (Parameters, Option<Adapter>, Option<Optimizer>),
) -> Result<Learner, Failure> {
    Ok(match (leader, adapter) {
        (Some(leader), adapter) => leader.learner(config, model, parameters, adapter, optimizer)?,
        (None, Some(adapter)) => Learner::adapting(config, model, parameters, adapter, optimizer)?,
        (None, None) => Learner::new(config, model, parameters, optimizer)?,
    })
}

impl Starting<'_> {
    /// Everything that the algorithm needs beside the policy.
    ///
    /// # Errors
    /// A model that cannot be read or does not fit, a checkpoint without its critic, tasks without demonstrations.
    pub(crate) fn auxiliary_models(&self) -> Result<AuxiliaryModels, Failure> {
        Ok(AuxiliaryModels {
            reference: self.reference()?,
            critic: self.critic()?,
            demonstrate: self.demonstrate()?,
        })
    }

    /// The policy that the trained one is held by, if anything is.
    ///
    /// # Errors
    /// A model that cannot be read or does not fit.
    pub(crate) fn reference(&self) -> Result<Option<Frozen>, Failure> {
        if !self.recipe.needs_reference() {
            return Ok(None);
        }
        if let Some(path) = &self.recipe.algorithm.reference {
            let directory = self.recipe.opened(path)?;
            self.same_tokens(&directory)?;
            return Ok(Some(self.frozen(&directory)?));
        }
        let path = self.run_dir.path().join("reference");
        if !path.exists() {
            if self.state.version != PolicyVersion::default() {
                let what = format!("{}: the run's reference policy is not there any more", path.display());
                return Err(Failure::NotThere(what));
            }
            self.directory.save(&path, &*self.learner.parameters()?)?;
        }
        Ok(Some(self.frozen(&self.recipe.opened(&path)?)?))
    }

    /// The reference where the recipe places it. Separated, it has cores of its own and stays in memory.
    fn frozen(&self, directory: &ModelDirectory) -> Result<Frozen, Failure> {
        let separated = self.recipe.placement.reference == Some(Placement::Separated);
        let everything = MemoryBudget::default();
        let budget = if separated { &everything } else { &*self.prepared.budget };
        let weights = ResidentParameters::open(directory.path(), directory.config(), budget)?;
        Ok(Frozen { weights, pool: separated.then(|| self.own_pool()) })
    }

    /// The cores of a model that is placed beside the policy.
    fn own_pool(&self) -> Arc<ThreadPool> {
        Arc::new(self.recipe.trainer_pool(self.cores))
    }

    /// Log-probabilities of tokens are only comparable if tokens mean the same.
    fn same_tokens(&self, reference: &ModelDirectory) -> Result<(), Failure> {
        let (ours, theirs) = (self.directory.tokenizer(), reference.tokenizer());
        let ids = 0..ours.vocab_size() as u32;
        let other = ids.into_iter().find(|id| ours.token(*id) != theirs.token(*id));
        let Some(id) = other else { return Ok(()) };
        Err(Failure::Argument(format!(
            "{} has another tokenizer than the policy: token {id} is {:?} there and {:?} here; name a model with the \
             policy's tokenizer in algorithm.reference",
            reference.path().display(),
            theirs.token(id).unwrap_or_default(),
            ours.token(id).unwrap_or_default(),
        )))
    }

    fn critic(&self) -> Result<Option<Critic>, Failure> {
        let Some(config) = self.recipe.critic() else { return Ok(None) };
        if config.kind == CriticKind::Shared {
            return Ok(Some(Critic { config, network: None }));
        }
        let checkpoints = self.run_dir.checkpoints();
        let path = checkpoint::path(&checkpoints, self.state.version);
        let resumed = path.exists() && self.state.version != PolicyVersion::default();
        let (directory, parameters, optimizer) = if resumed {
            let optimizer = self.recipe.optimizer();
            let (directory, parameters, optimizer) = checkpoint::load_critic(&path, self.state, optimizer)?;
            let directory = directory.with_reduction(self.recipe.reduction);
            (directory, parameters, Some(optimizer))
        } else {
            let directory = self.recipe.opened(self.directory.path())?.with_head(Head::Value);
            let parameters = self.learner.parameters()?.with_head(directory.config());
            (directory, parameters, None)
        };
        let pool = match config.placement {
            Placement::Colocated => Arc::clone(self.learner.pool()),
            Placement::Separated => self.own_pool(),
        };
        let (of_learner, model) = (self.recipe.learner(), directory.config().clone());
        let learner = learner(self.leader, of_learner, model, (parameters, None, optimizer))?.on(pool);
        Ok(Some(Critic { config, network: Some(CriticNetwork { learner, directory: Arc::new(directory) }) }))
    }

    fn demonstrate(&self) -> Result<Option<Demonstrate>, Failure> {
        if self.recipe.algorithm().demonstration_gate.is_none() {
            return Ok(None);
        }
        let column = match &self.recipe.data.source {
            DataSource::Arithmetic(_) => None,
            DataSource::Files(_) => self.recipe.algorithm.demonstration_column.clone(),
        };
        let directory = ModelDirectory::open(self.directory.path())?;
        // What is missing shows now, not when the first task fails.
        for task in self.prepared.train_tasks() {
            demonstrations::text(&task, column.as_deref())?;
        }
        let longest = self.recipe.data.max_prompt_length + self.recipe.rollout.max_completion_length;
        Ok(Some(Box::new(move |task| {
            let text = demonstrations::text(task, column.as_deref()).ok()?;
            let sample = demonstrations::sample(&directory, &task.prompt, &text).ok()?;
            // A longer one would not fit where sequences are planned to fit; the group is trained on as it is.
            (sample.token_ids().len() <= longest).then_some(sample)
        })))
    }
}
