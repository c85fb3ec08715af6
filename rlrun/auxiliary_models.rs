//! Auxiliary models of the training: reference policy, critic, and demonstrations.
//!
//! Invariant: the reference is bit for bit the policy that training started from, also after a resume: it is written to the
//! run directory once, before the first step.

use std::sync::Arc;

use model::{
    AdaptedBase, Config, Head, MemoryBudget, ModelDirectory, Placement, ResidentParameters, SharedCores,
    ThreadPool,
};
use trainer::critic::{Critic, CriticKind, CriticNetwork};
use trainer::lora::Adapter;
use trainer::optimizer::Optimizer;
use trainer::trainer::Demonstrate;
use trainer::{
    AuxiliaryModels, Frozen, FrozenWeights, Leader, Learner, LearnerConfig, StateWeights, TrainerError,
    TrainerState, checkpoint,
};
use trajectory::PolicyVersion;

use crate::demonstrations;
use crate::failure::Failure;
use crate::prepare::Prepared;
use crate::recipe::{DataSource, Recipe};
use crate::run_dir::RunDir;

/// The sources of the auxiliary models.
pub(crate) struct AuxiliarySetup<'a> {
    pub(crate) recipe: &'a Recipe,
    pub(crate) run_dir: &'a RunDir,
    pub(crate) directory: &'a ModelDirectory,
    pub(crate) learner: &'a Learner,
    pub(crate) state: &'a TrainerState,
    pub(crate) prepared: &'a Prepared,
    pub(crate) cores: &'a Arc<SharedCores>,
    pub(crate) leader: Option<&'a Arc<Leader>>,
}

/// The initial state of a learner.
pub(crate) struct LearnerStates {
    pub(crate) weights: StateWeights,
    /// With LoRA.
    pub(crate) adapter: Option<Adapter>,
    /// `None`: fresh.
    pub(crate) optimizer: Option<Optimizer>,
}

/// The learner of `states`, on all ranks of `leader` if there is one.
///
/// # Errors
/// A rank that is lost.
pub(crate) fn learner(
    leader: Option<&Arc<Leader>>,
    config: LearnerConfig,
    model: Config,
    states: LearnerStates,
) -> Result<Learner, Failure> {
    let LearnerStates { weights, adapter, optimizer } = states;
    if let Some(leader) = leader {
        return Ok(leader.learner(config, model, weights, adapter, optimizer)?);
    }
    Ok(match (weights, adapter) {
        (StateWeights::Quantized(base), Some(adapter)) => Learner::over(config, base, adapter, optimizer)?,
        (StateWeights::Quantized(_), None) => return Err(TrainerError::QuantizedBase.into()),
        (StateWeights::Whole(parameters), Some(adapter)) => {
            Learner::adapting(config, model, Arc::unwrap_or_clone(parameters), adapter, optimizer)?
        }
        (StateWeights::Whole(parameters), None) => {
            Learner::new(config, model, Arc::unwrap_or_clone(parameters), optimizer)?
        }
    })
}

impl AuxiliarySetup<'_> {
    /// All auxiliary models that the algorithm needs.
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

    /// The reference policy, if the recipe needs one.
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
        let is_new = !path.exists();
        if is_new && self.state.version != PolicyVersion::default() {
            let what = format!("{}: the run's reference policy is not there any more", path.display());
            return Err(Failure::NotThere(what));
        }
        if let Some((policy, adapter)) = self.learner.adapted().zip(self.learner.adapter()) {
            if is_new {
                adapter.save(&path, &self.directory.path().to_string_lossy())?;
            }
            let start = Adapter::open_over(&path, adapter.config(), policy.base())?;
            let start = AdaptedBase::new(Arc::clone(policy.base()), Arc::clone(start.factors()));
            return Ok(Some(Frozen { weights: FrozenWeights::Adapted(start), pool: self.reference_pool() }));
        }
        if is_new {
            self.directory.save(&path, &*self.learner.parameters()?)?;
        }
        Ok(Some(self.frozen(&self.recipe.opened(&path)?)?))
    }

    /// The thread pool of a separated reference.
    fn reference_pool(&self) -> Option<Arc<ThreadPool>> {
        let is_separated = self.recipe.placement.reference == Some(Placement::Separated);
        is_separated.then(|| self.own_pool())
    }

    /// The reference in the placement of the recipe. Separated, it has its own thread pool and stays in memory.
    fn frozen(&self, directory: &ModelDirectory) -> Result<Frozen, Failure> {
        let (pool, everything) = (self.reference_pool(), MemoryBudget::default());
        let budget = if pool.is_some() { &everything } else { &*self.prepared.budget };
        let weights = ResidentParameters::open(directory.path(), directory.config(), budget)?;
        Ok(Frozen { weights: weights.into(), pool })
    }

    /// The thread pool of a model with placement `separated`.
    fn own_pool(&self) -> Arc<ThreadPool> {
        Arc::new(self.recipe.trainer_pool(self.cores))
    }

    /// Refuses a reference with another tokenizer: its log-probabilities would be of other tokens.
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
            let checkpoint::CriticCheckpoint { directory, parameters, optimizer } =
                checkpoint::load_critic(&path, self.state, optimizer)?;
            (directory.with_reduction(self.recipe.reduction), parameters, Some(optimizer))
        } else {
            let directory = self.recipe.opened(self.directory.path())?.with_head(Head::Value);
            let parameters = self.learner.parameters()?.with_head(directory.config());
            (directory, parameters, None)
        };
        let weights = StateWeights::Whole(Arc::new(parameters));
        let pool = match config.placement {
            Placement::Colocated => Arc::clone(self.learner.pool()),
            Placement::Separated => self.own_pool(),
        };
        // A critic has no samples to balance for.
        let of_learner = LearnerConfig { router_correction_rate: 0.0, ..self.recipe.learner() };
        let model = directory.config().clone();
        let learner =
            learner(self.leader, of_learner, model, LearnerStates { weights, adapter: None, optimizer })?
                .on(pool);
        Ok(Some(Critic { config, network: Some(CriticNetwork { learner, directory: Arc::new(directory) }) }))
    }

    fn demonstrate(&self) -> Result<Option<Demonstrate>, Failure> {
        if self.recipe.algorithm().demonstration_gate.is_none() {
            return Ok(None);
        }
        let column = match &self.recipe.data.source {
            DataSource::Arithmetic(_) | DataSource::Seeds(_) => None,
            DataSource::Files(_) => self.recipe.algorithm.demonstration_column.clone(),
        };
        let directory = ModelDirectory::open(self.directory.path())?;
        // A missing demonstration is found now, not at its task.
        for task in self.prepared.train_tasks() {
            demonstrations::text(&task, column.as_deref())?;
        }
        let longest = self.recipe.data.max_prompt_length + self.recipe.rollout.max_completion_length;
        Ok(Some(Box::new(move |task| {
            let text = demonstrations::text(task, column.as_deref()).ok()?;
            let sample = demonstrations::sample(&directory, &task.prompt, &text).ok()?;
            // A longer one exceeds the planned sequence length; the group is trained on without it.
            (sample.token_ids().len() <= longest).then_some(sample)
        })))
    }
}
