//! Model, data and rewards of a recipe, opened and checked against each other before any work is done.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use environments::EnvironmentContext;
use model::{Config, FrozenParameters, MemoryBudget, ModelDirectory, Parameters, SharedCores, ThreadPool};
use rewards::reward_model::{ModelContext, ModelServer};
use rewards::{RewardContext, RewardSet};
use rollout::tasks::TaskOrder;
use rollout::{ENVIRONMENT_COLUMN, EpisodeConfig, PromptSet, RolloutError};
use serde_json::Value;
use tokio::runtime::{Handle, Runtime};
use trainer::TrainerError;
use trainer::lora::Adapter;
use trajectory::{Prompt, Task};

use crate::acting::Acting;
use crate::agents::AgentEndpoint;
use crate::evaluation::NamedSet;
use crate::failure::Failure;
use crate::program::Program;
use crate::recipe::schema::EvalSet;
use crate::recipe::{DataSource, Model, Recipe};
use crate::report::Report;

/// Where rewards run: the runtime that waits for them, the program that knows their kinds, the cores of the process.
#[derive(Debug)]
pub struct RewardRuntime {
    /// There until it is dropped.
    runtime: Option<Runtime>,
    handle: Handle,
    program: Program,
    cores: Arc<SharedCores>,
    /// Reward models of the recipe that other processes serve.
    servers: Arc<BTreeMap<String, ModelServer>>,
}

impl RewardRuntime {
    /// Starts it.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn new(program: &Program, cores: &Arc<SharedCores>) -> Result<Self, Failure> {
        let system =
            |source| Failure::System { what: "start the thread that waits for rewards".to_owned(), source };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(system)?;
        let handle = runtime.handle().clone();
        let (program, cores, servers) = (program.clone(), Arc::clone(cores), Arc::default());
        Ok(Self { runtime: Some(runtime), handle, program, cores, servers })
    }

    /// Uses the reward models that other processes serve from now on.
    pub(crate) fn ask(&mut self, servers: BTreeMap<String, ModelServer>) {
        self.servers = Arc::new(servers);
    }

    /// Starts tasks and waits for them.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The variables of the process.
    pub(crate) fn environment(&self) -> &BTreeMap<String, String> {
        self.program.environment()
    }

    /// What rewards find that belong to no run; they keep logs and sockets in `scratch`.
    #[must_use]
    pub fn context(&self, scratch: &Path) -> RewardContext {
        RewardContext {
            environment: Arc::clone(self.program.environment()),
            runtime: Some(self.handle().clone()),
            scratch: scratch.to_path_buf(),
            models: ModelContext { cores: Some(Arc::clone(&self.cores)), ..ModelContext::default() },
            ..RewardContext::default()
        }
    }

    /// The rewards of `recipe`, for a policy in `directory`; they keep logs and sockets in `scratch`.
    ///
    /// # Errors
    /// A reward that cannot be built or started.
    pub fn rewards(
        &self,
        recipe: &Recipe,
        directory: &ModelDirectory,
        pool: &Arc<ThreadPool>,
        budget: &Arc<MemoryBudget>,
        scratch: &Path,
    ) -> Result<RewardSet, Failure> {
        let models = ModelContext {
            policy_tokenizer: Some(directory.tokenizer().fingerprint()),
            policy_pool: Some(Arc::clone(pool)),
            cores: Some(Arc::clone(&self.cores)),
            budget: Arc::clone(budget),
            servers: Arc::clone(&self.servers),
        };
        let tokenizer = directory.tokenizer().clone();
        let context = RewardContext {
            decode: Some(Arc::new(move |ids: &[u32]| tokenizer.decode_special(ids).unwrap_or_default())),
            max_steps: recipe.trainer.steps,
            group_size: recipe.rollout.group_size + usize::from(recipe.greedy_baseline()),
            models,
            ..self.context(scratch)
        };
        let rewards = RewardSet::from_specs(&recipe.rewards, self.program.registry(), &context)?;
        Ok(rewards.judged_by(recipe.criterion())?)
    }
}

impl Drop for RewardRuntime {
    fn drop(&mut self) {
        // A function of the user that never returns would be waited for.
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

/// Data and rewards of a recipe, ready.
#[derive(Debug)]
pub struct Prepared {
    /// Training tasks with their prompts.
    pub train: Arc<PromptSet>,
    /// Held-out tasks of `[data]`, if there are any.
    pub eval: Option<PromptSet>,
    /// Further sets of held-out tasks.
    pub sets: Vec<NamedSet>,
    /// How the environment was understood, one line each.
    pub notes: Vec<String>,
    /// What an episode is played in.
    pub episodes: EpisodeConfig,
    /// The endpoint of agents, if one is served.
    pub(crate) agents: Option<AgentEndpoint>,
    /// The rewards; `None` where nothing is sampled, as for a reward model.
    pub rewards: Option<Arc<RewardSet>>,
    /// The cores that the sampler may use, and models that are colocated with it.
    pub pool: Arc<ThreadPool>,
    /// The memory that is left for frozen models.
    pub budget: Arc<MemoryBudget>,
}

impl Recipe {
    /// Opens the model of the recipe; a fresh one is made in `run_dir` first, if it is not there yet.
    ///
    /// # Errors
    /// If the directory is no model that rlrun can run.
    pub fn open_model(&self, run_dir: &Path) -> Result<ModelDirectory, Failure> {
        match &self.model {
            Model::Path(path) => self.opened(path),
            Model::Random(sizes) => {
                let path = run_dir.join("model");
                if path.exists() {
                    return self.opened(&path);
                }
                let fresh = ModelDirectory::fresh(&path, &self.fresh_model(sizes), self.seed)?;
                model::manifest::write(&path)?;
                Ok(fresh.with_reduction(self.reduction))
            }
        }
    }

    /// Opens a model directory or a GGUF file to compute with as the recipe says.
    ///
    /// # Errors
    /// If the directory is no model that rlrun can run.
    pub fn opened(&self, path: &Path) -> Result<ModelDirectory, Failure> {
        Ok(ModelDirectory::open(path)?.with_reduction(self.reduction))
    }
}

impl Recipe {
    /// The adapter to train on the frozen weights `base`: that of `lora.path`, or a fresh one. `None` without `[lora]`.
    ///
    /// # Errors
    /// If the adapter cannot be read, or is not as the recipe says.
    pub fn adapter(&self, base: &Parameters) -> Result<Option<Adapter>, Failure> {
        let (Some(config), Some(lora)) = (self.lora(), &self.lora) else { return Ok(None) };
        Ok(Some(match &lora.path {
            Some(path) => Adapter::open(path, &config, base)?,
            None => {
                config.check(base.layout().specs())?;
                Adapter::new(config, base, self.seed)
            }
        }))
    }

    /// Whether the frozen weights stay quantised.
    pub(crate) fn has_quantized_base(&self) -> bool {
        self.lora.as_ref().is_some_and(|lora| lora.quantized_base)
    }

    /// The frozen weights as the files of `directory` store them, and the adapter to train over them.
    ///
    /// # Errors
    /// If there is no `[lora]`, the weights cannot be computed with as they are stored, or the adapter cannot be read or is not as
    /// the recipe says.
    pub(crate) fn over_quantized_base(
        &self,
        directory: &ModelDirectory,
    ) -> Result<(FrozenParameters, Adapter), Failure> {
        let (Some(config), Some(lora)) = (self.lora(), &self.lora) else {
            return Err(TrainerError::QuantizedBase.into());
        };
        let base = FrozenParameters::load(directory.path(), directory.config())?;
        let adapter = match &lora.path {
            Some(path) => Adapter::open_over(path, &config, &base)?,
            None => {
                config.check(base.layout().specs())?;
                Adapter::over(config, &base, self.seed)
            }
        };
        Ok((base, adapter))
    }

    /// Why programs that read PEFT's adapters cannot read that of this recipe for `model`, if they cannot.
    pub(crate) fn why_not_in_peft(&self, model: &Config) -> Option<String> {
        let mut adapted = self.lora.as_ref()?.target_modules.iter();
        let fused = adapted.find(|module| model.is_fused_in_files(**module))?;
        Some(format!(
            "the files of {} have `{}` in one tensor with others, which PEFT does not adapt apart",
            model.architecture.model_type(),
            fused.as_str()
        ))
    }
}

impl Prepared {
    /// Reads and encodes the tasks and builds the rewards, which run in `runtime` and keep what they need in `scratch`.
    ///
    /// # Errors
    /// Whatever is wrong with data or rewards, or does not fit the model.
    pub fn new(
        recipe: &Recipe,
        directory: &ModelDirectory,
        runtime: &RewardRuntime,
        scratch: &Path,
    ) -> Result<Self, Failure> {
        rollout::engine::check_trainable(recipe.sampling())?;
        recipe.interruption(&recipe.stop_rules(directory))?;
        let context = EnvironmentContext {
            format: None,
            runtime: Some(runtime.handle().clone()),
            variables: Arc::clone(runtime.program.environment()),
            scratch: scratch.to_path_buf(),
        };
        let acting = Acting::new(recipe, directory, runtime.program.environments(), &context)?;
        let (train, eval) = recipe.tasks()?;
        let limit = recipe.data.max_prompt_length;
        let set = |tasks: Vec<Task>, files: &[PathBuf], order| {
            acting.check_names(&tasks, files)?;
            let tasks = tasks.into_iter().map(|task| acting.described(task)).collect::<Result<_, _>>()?;
            let encode = |task: &Task| acting.encoded(directory, task);
            Ok::<_, Failure>(PromptSet::encoded(tasks, encode, limit, recipe.overlong(), order)?)
        };
        let further = recipe.eval_set_tasks(&eval)?;
        let (of_train, of_eval) = match &recipe.data.source {
            DataSource::Files(files) => (&files.train[..], &files.eval[..]),
            DataSource::Arithmetic(_) | DataSource::Seeds(_) => (&[][..], &[][..]),
        };
        let train = set(train, of_train, recipe.task_order())?;
        let eval = if eval.is_empty() { None } else { Some(set(eval, of_eval, TaskOrder::File)?) };
        let named = |(of, tasks): (&EvalSet, Vec<Task>)| {
            let samples = of.samples.unwrap_or(recipe.eval.samples);
            Ok::<_, Failure>(NamedSet {
                name: of.name.clone(),
                prompts: set(tasks, if of.path.is_empty() { of_eval } else { &of.path }, TaskOrder::File)?,
                samples,
            })
        };
        let sets: Vec<NamedSet> = further.into_iter().map(named).collect::<Result<_, _>>()?;
        let held_out = eval.iter().chain(sets.iter().map(|set| &set.prompts)).map(PromptSet::longest);
        let longest = held_out.fold(train.longest(), usize::max);
        let context = directory.config().max_context();
        let completion = recipe.rollout.max_completion_length;
        if longest + completion > context {
            let limit = directory.config().context_limit();
            return Err(RolloutError::ContextTooShort { prompt: longest, completion, limit }.into());
        }
        let pool = Arc::new(recipe.rollout_pool(&runtime.cores));
        let budget = Arc::new(MemoryBudget::new(recipe.placement.memory_mib.map(|mib| mib << 20)));
        let rewards = match (&recipe.rewards[..], &recipe.environment) {
            ([], None) => None,
            ([], Some(_)) => Some(Arc::new(RewardSet::none())),
            _ => Some(Arc::new(runtime.rewards(recipe, directory, &pool, &budget, scratch)?)),
        };
        let (train, episodes) =
            (Arc::new(train), acting.episodes(recipe.episode_tokens(context), recipe.wait()));
        Ok(Self { train, eval, sets, notes: acting.notes(), episodes, agents: None, rewards, pool, budget })
    }

    /// The same, with an endpoint for the agents of the recipe.
    ///
    /// # Errors
    /// An address that cannot be opened.
    pub(crate) fn serving_agents(
        mut self,
        recipe: &Recipe,
        directory: &ModelDirectory,
        runtime: &RewardRuntime,
    ) -> Result<Self, Failure> {
        let directory = Arc::new(recipe.opened(directory.path())?);
        self.agents = AgentEndpoint::start(recipe, &directory, runtime.handle())?;
        if let Some(agents) = &self.agents {
            self.episodes = self.episodes.played_by(agents.player());
        }
        Ok(self)
    }

    /// Says what there is to train on.
    pub fn announce(&self, recipe: &Recipe, report: &Report, directory: &ModelDirectory) {
        let parameters = model::Layout::new(directory.config()).len();
        let held_out = self.held_out();
        let name = directory.config().architecture.model_type();
        report.note(&format!(
            "model {name}, {parameters} parameters; {} training tasks, {held_out} held-out tasks",
            self.train.len()
        ));
        self.understood().for_each(|line| report.note(&line));
        if recipe.criterion().is_none() {
            recipe.describe_correct().iter().for_each(|line| report.note(line));
        }
        if self.train.dropped() > 0 {
            report.note(&format!("{} tasks skipped: their prompts are too long", self.train.dropped()));
        }
    }

    /// The first task that is played in each environment, with its prompt, by the name of the environment; tasks of training
    /// come first.
    #[must_use]
    pub fn first_by_environment(&self) -> BTreeMap<Option<&str>, (&Task, &[u32])> {
        let held_out = self.eval.iter().chain(self.sets.iter().map(|set| &set.prompts));
        let mut first = BTreeMap::new();
        for (task, prompt) in self.train.iter().chain(held_out.flat_map(PromptSet::iter)) {
            let name = task.columns.get(ENVIRONMENT_COLUMN).and_then(Value::as_str);
            let name = name.filter(|name| self.episodes.named.contains_key(*name));
            first.entry(name).or_insert((&**task, &prompt[..]));
        }
        first
    }

    /// Held-out tasks of all sets.
    #[must_use]
    pub fn held_out(&self) -> usize {
        let sets = self.eval.iter().chain(self.sets.iter().map(|set| &set.prompts));
        sets.map(PromptSet::len).sum()
    }

    /// How the environment, and rewards that say so, were understood, one line each.
    pub fn understood(&self) -> impl Iterator<Item = String> {
        let rewards = self.rewards.iter().flat_map(|rewards| rewards.rewards());
        let rewards = rewards.filter_map(|weighted| {
            Some(format!("reward `{}`: {}", weighted.reward.name(), weighted.reward.about()?))
        });
        self.notes.iter().cloned().chain(rewards)
    }

    /// The training tasks in file order.
    #[must_use]
    pub fn train_tasks(&self) -> Vec<Task> {
        self.train.iter().map(|(task, _)| Task::clone(task)).collect()
    }
}

/// A prompt as people read it.
#[must_use]
pub fn prompt_text(task: &Task) -> String {
    match &task.prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Messages(messages) => {
            messages.last().map(|message| message.content.clone()).unwrap_or_default()
        }
    }
}
