//! The values of a recipe in the types of each crate.
//!
//! Invariant: every key of the recipe is read here or in the command that it belongs to. This module adds no decision to the
//! recipe. Words of the recipe are the crates' enums, its numbers are plain.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use buffer::BufferConfig;
use std::sync::Arc;

use environments::{EnvironmentFactory, EnvironmentSpec, TicTacToe};
use model::{Config, ModelDirectory, Placement, Sampling, SharedCores, Sizes, ThreadPool};
use rollout::tasks::{Arithmetic, ArithmeticTasks, Questions, TaskError, TaskOrder, TaskSource, TaskSplit};
use rollout::{ENVIRONMENT_COLUMN, EngineConfig, Overlong, StopRules, WorkerConfig};
use serde_json::Value;
use trainer::advantage::AdvantageEstimator;
use trainer::algorithm::Algorithm;
use trainer::batch::BatchSplit;
use trainer::checkpoint::{CheckpointWriterConfig, Retention};
use trainer::critic::CriticConfig;
use trainer::lora::LoraConfig;
use trainer::objective::ValueLossConfig;
use trainer::optimizer::OptimizerConfig;
use trainer::schedule::LearningRateSchedule;
use trainer::{LearnerConfig, TrainerConfig};
use trajectory::{Prompt, Task, TaskId};
use weights::{DeltaConfig, Dtype, HubConfig, PublishConfig};

use crate::archive::ArchiveUrl;
use crate::recipe::schema::{ArithmeticSection, CheckpointSection, EvalSet, RandomModel, SeedsSection};
use crate::recipe::words::{PolicyPlacement, Ranks, SupervisedKind, WeightDtypeWord};
use crate::recipe::{Data, DataSource, Recipe};

mod devices;

pub use devices::Devices;

/// Longest sequence that a fresh model is made for beyond what the recipe needs, tokens.
const SPARE_POSITIONS: usize = 64;

/// A wait of thirty years is as long as any; what is longer has no moment at which it ends.
pub(crate) const LONGEST_WAIT_S: f64 = 1e9;

/// Where the system has files that are only memory.
pub(crate) const SHARED_MEMORY: &str = "/dev/shm";

/// Roles of the environment of a `spec`, as far as it alone tells; at least 1.
pub(crate) fn roles_of(spec: &EnvironmentSpec) -> usize {
    let game = Some(spec).filter(|spec| spec.kind == TicTacToe::KIND);
    let roles = game.and_then(|spec| TicTacToe::new(spec).ok()).map(|game| game.roles().len());
    roles.unwrap_or(1).max(1)
}

impl Recipe {
    /// Most tokens of an episode for a model with a context of `context` tokens: what the trainer can take at once, unless the
    /// recipe says less.
    #[must_use]
    pub fn episode_tokens(&self, context: usize) -> usize {
        let given = self.environment.as_ref().and_then(|environment| environment.max_tokens);
        given.unwrap_or(self.trainer.microbatch_tokens).min(context)
    }

    /// Roles of the environment, as far as the recipe alone tells: those of a game, and 1 for an environment that says how many
    /// it has when it is made.
    #[must_use]
    pub fn known_roles(&self) -> usize {
        self.environment.as_ref().map_or(1, roles_of)
    }

    /// The longest wait of the trainer for a batch: an episode may take its whole time.
    #[must_use]
    pub fn batch_wait(&self) -> Duration {
        let episode = self.environment.as_ref().map_or(0.0, |environment| environment.episode_timeout_s);
        Duration::from_secs_f64((self.deadlines.wait_s + episode).min(LONGEST_WAIT_S))
    }

    /// Ranks of the trainer that join the run from elsewhere: a run of processes starts its own.
    #[must_use]
    pub fn ranks_that_join(&self) -> usize {
        let joins = self.trainer.ranks == Ranks::Processes && !self.placement.processes;
        if joins { self.trainer.world.saturating_sub(1) } else { 0 }
    }

    /// The longest wait of one role for another.
    #[must_use]
    pub fn wait(&self) -> Duration {
        Duration::from_secs_f64(self.deadlines.wait_s.min(LONGEST_WAIT_S))
    }

    /// The config of a fresh model.
    #[must_use]
    pub fn fresh_model(&self, sizes: &RandomModel) -> Config {
        let one_turn = self.data.max_prompt_length + self.rollout.max_completion_length + SPARE_POSITIONS;
        let episode =
            self.environment.as_ref().map_or(0, |_| self.episode_tokens(self.trainer.microbatch_tokens));
        let positions = one_turn.max(episode);
        let mut config = Config::fresh(&Sizes {
            vocab_size: model::CHARACTERS,
            hidden_size: sizes.hidden_size,
            intermediate_size: sizes.intermediate_size,
            num_layers: sizes.num_layers,
            num_heads: sizes.num_heads,
            num_kv_heads: sizes.num_kv_heads,
            max_position_embeddings: positions,
        });
        config.initializer_range = sizes.initializer_range;
        let [experts, per_token] = sizes.experts();
        config.of_family(sizes.architecture).with_experts(experts, per_token)
    }

    /// Training tasks and held-out tasks.
    ///
    /// # Errors
    /// If a dataset cannot be read or a column is missing.
    pub fn tasks(&self) -> Result<(Vec<Task>, Vec<Task>), TaskError> {
        match &self.data.source {
            DataSource::Arithmetic(arithmetic) => self.generated(arithmetic),
            DataSource::Seeds(seeds) => Ok(self.seeds(seeds)),
            DataSource::Files(files) => {
                let source = |split, limit| TaskSource { split, limit, ..self.task_source() };
                let eval = match &files.eval[..] {
                    [] => Vec::new(),
                    paths => source(TaskSplit::HeldOut, self.eval.tasks).load(paths)?,
                };
                Ok((source(TaskSplit::Train, None).load(&files.train)?, eval))
            }
        }
    }

    /// Training tasks and held-out tasks that are additions, or questions with the messages of `[data]`.
    fn generated(&self, arithmetic: &ArithmeticSection) -> Result<(Vec<Task>, Vec<Task>), TaskError> {
        let (max_operand, seed) = (arithmetic.max_operand, self.seed);
        let (train, eval) = (arithmetic.train_tasks, arithmetic.eval_tasks);
        let kinds = arithmetic.questions.clone();
        let ArithmeticTasks { train, eval } = if kinds.is_empty() {
            Arithmetic { max_operand, train, eval, seed }.tasks()?
        } else {
            Questions { kinds, max_operand, train, eval, seed }.tasks()?
        };
        let source = self.task_source();
        let asked = |task: Task| Task { prompt: source.conversation(task.prompt), ..task };
        Ok((train.into_iter().map(asked).collect(), eval.into_iter().map(asked).collect()))
    }

    /// The prompt with the messages of `[data]`. A conversation without a text is begun by the environment.
    #[must_use]
    pub fn conversation(&self, prompt: Prompt) -> Prompt {
        let Data { system_prompt, chat, .. } = &self.data;
        let prompt = match prompt {
            Prompt::Text(text) if text.is_empty() && (*chat || system_prompt.is_some()) => {
                Prompt::Messages(Vec::new())
            }
            prompt => prompt,
        };
        self.task_source().conversation(prompt)
    }

    /// Training tasks and held-out tasks that are numbers alone.
    fn seeds(
        &self,
        SeedsSection { train_tasks, eval_tasks, prompt }: &SeedsSection,
    ) -> (Vec<Task>, Vec<Task>) {
        let prompt = self.conversation(Prompt::Text(prompt.clone().unwrap_or_default()));
        let task = |id: u64| Task {
            id: TaskId(id),
            prompt: prompt.clone(),
            answer: None,
            columns: serde_json::Map::from_iter([("seed".to_owned(), id.into())]),
        };
        let first = *train_tasks as u64;
        (
            (0..first).map(task).collect(),
            (first..first.saturating_add(*eval_tasks as u64)).map(task).collect(),
        )
    }

    /// Tasks of the further sets of held-out tasks, in their order. `held_out` are those of the set `default`.
    ///
    /// # Errors
    /// If a dataset cannot be read or a column is missing.
    pub fn eval_set_tasks(&self, held_out: &[Task]) -> Result<Vec<(&EvalSet, Vec<Task>)>, TaskError> {
        let load = |set: &EvalSet| match &set.path[..] {
            [] => Ok(held_out
                .iter()
                .take(set.tasks.or(self.eval.tasks).unwrap_or(usize::MAX))
                .cloned()
                .collect()),
            path => self.eval_source(set).load(path),
        };
        let played_in = |set: &EvalSet, mut task: Task| {
            let name = set.environment.as_ref().map(|name| Value::from(name.clone()));
            task.columns.extend(name.map(|name| (ENVIRONMENT_COLUMN.to_owned(), name)));
            task
        };
        let of_set = |set| Ok((set, load(set)?.into_iter().map(|task| played_in(set, task)).collect()));
        self.eval.sets.iter().map(of_set).collect()
    }

    /// How a row of the set becomes a task: as in `[data]`, but for the columns that the set names itself.
    fn eval_source(&self, set: &EvalSet) -> TaskSource {
        let base = self.task_source();
        let own = set.prompt_column.is_some() || set.prompt_template.is_some();
        let prompt = |own_key: &Option<String>, key| if own { own_key.clone() } else { key };
        TaskSource {
            prompt_column: prompt(&set.prompt_column, base.prompt_column),
            prompt_template: prompt(&set.prompt_template, base.prompt_template),
            answer_column: set.answer_column.clone().or(base.answer_column),
            limit: set.tasks.or(self.eval.tasks),
            split: TaskSplit::HeldOut,
            ..base
        }
    }

    /// How a row of the files of `[data]` becomes a task.
    fn task_source(&self) -> TaskSource {
        let Data { system_prompt, chat, .. } = &self.data;
        let messages =
            TaskSource { system_prompt: system_prompt.clone(), chat: *chat, ..TaskSource::default() };
        match &self.data.source {
            DataSource::Arithmetic(_) | DataSource::Seeds(_) => messages,
            DataSource::Files(files) => TaskSource {
                prompt_column: files.prompt_column.clone(),
                answer_column: files.answer_column.clone(),
                prompt_template: files.prompt_template.clone(),
                conversation_column: self.supervised.as_ref().map(|s| s.conversation_column().to_owned()),
                ..messages
            },
        }
    }

    /// Order of the training tasks.
    #[must_use]
    pub fn task_order(&self) -> TaskOrder {
        if self.data.shuffle { TaskOrder::Shuffled { seed: self.seed } } else { TaskOrder::File }
    }

    /// The treatment of prompts that are too long.
    #[must_use]
    pub fn overlong(&self) -> Overlong {
        self.data.overlong_prompts
    }

    /// How tokens are chosen while training.
    #[must_use]
    pub fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.rollout.temperature as f32,
            top_p: self.rollout.top_p as f32,
            top_k: self.rollout.top_k,
            min_p: self.rollout.min_p as f32,
        }
    }

    /// How tokens are chosen in an evaluation.
    #[must_use]
    pub fn eval_sampling(&self) -> Sampling {
        Sampling { temperature: self.eval.temperature as f32, ..Sampling::PLAIN }
    }

    /// The stop tokens of this model.
    #[must_use]
    pub fn stop_rules(&self, directory: &ModelDirectory) -> StopRules {
        let tokenizer = directory.tokenizer().clone();
        if self.rollout.ignore_stop {
            return StopRules { token_ids: Vec::new(), strings: Vec::new(), tokenizer };
        }
        let mut token_ids = directory.stop_token_ids().to_vec();
        token_ids.extend(&self.rollout.stop_token_ids);
        StopRules { token_ids, strings: self.rollout.stop.clone(), tokenizer }
    }

    /// Prompt tokens that the sampler reads per decoding step.
    #[must_use]
    pub fn prefill_chunk(&self) -> usize {
        let default = || EngineConfig::default_prefill_chunk(self.devices().rollout.is_some());
        self.rollout.prefill_chunk.unwrap_or_else(default)
    }

    /// What groups from elsewhere must keep to, for a policy like `model`.
    #[must_use]
    pub fn group_limits(&self, model: &model::Config) -> buffer::GroupLimits {
        buffer::GroupLimits {
            vocabulary: u32::try_from(model.vocab_size).unwrap_or(u32::MAX),
            context: model.max_context(),
            trajectories: self.rollout.group_size,
            experts: trainer::expert_limits(model),
        }
    }

    /// Bounds of the sampler, for prompts of at most `longest_prompt` tokens.
    #[must_use]
    pub fn engine(&self, longest_prompt: usize, context: usize) -> EngineConfig {
        EngineConfig {
            max_episode_length: self.environment.as_ref().map_or(0, |_| self.episode_tokens(context)),
            max_running: self.rollout.max_running,
            prefill_chunk: self.prefill_chunk(),
            kv_cache_tokens: self.rollout.kv_cache_tokens,
            max_prompt_length: longest_prompt,
            max_completion_length: self.rollout.max_completion_length,
            max_samples: self.rollout.group_size + usize::from(self.greedy_baseline()),
            seed: self.seed,
        }
    }

    /// The sampler's share of the cores.
    #[must_use]
    pub fn rollout_pool(&self, cores: &Arc<SharedCores>) -> ThreadPool {
        ThreadPool::new(cores, self.placement.rollout_threads.unwrap_or(cores.total()))
    }

    /// The trainer's share of the cores.
    #[must_use]
    pub fn trainer_pool(&self, cores: &Arc<SharedCores>) -> ThreadPool {
        ThreadPool::new(cores, self.placement.trainer_threads.unwrap_or(cores.total()))
    }

    /// Samplers that a run of processes starts.
    #[must_use]
    pub fn rollout_workers(&self) -> usize {
        self.placement.rollout_workers.unwrap_or(1)
    }

    /// How often a process may be started again within ten minutes.
    #[must_use]
    pub fn restarts(&self) -> usize {
        self.placement.restarts.unwrap_or(5)
    }

    /// Whether every group has a greedy decoding to be compared with.
    #[must_use]
    pub fn greedy_baseline(&self) -> bool {
        self.algorithm().advantage == AdvantageEstimator::Greedy
    }

    /// Whether sampler and trainer take turns on one device.
    #[must_use]
    pub fn is_colocated(&self) -> bool {
        self.placement.policy == Some(PolicyPlacement::Colocated)
    }

    /// What the sampler does.
    #[must_use]
    pub fn worker(&self) -> WorkerConfig {
        WorkerConfig {
            group_size: self.rollout.group_size,
            greedy_baseline: self.greedy_baseline(),
            sampling: self.sampling(),
            max_completion_length: self.rollout.max_completion_length,
            on_update: self.rollout.on_update,
            wait: self.wait(),
            holder: None,
        }
    }

    /// Admission and staleness.
    #[must_use]
    pub fn buffer_config(&self) -> BufferConfig {
        let buffer = &self.buffer;
        BufferConfig {
            on_stale: buffer.on_stale,
            order: buffer.order.with(buffer.reward_temperature),
            max_uses: buffer.max_uses,
            dedup: buffer.dedup,
            max_bytes: buffer.max_mib << 20,
            seed: self.seed,
            ..BufferConfig::new(buffer.batch_groups, buffer.max_staleness)
        }
    }

    /// The samplers as subscribers of the weight hub.
    #[must_use]
    pub fn hub(&self) -> HubConfig {
        let dtype = match self.weights.dtype {
            WeightDtypeWord::F32 => Dtype::F32,
            WeightDtypeWord::Bf16 => Dtype::Bf16,
        };
        let hold = Duration::from_secs_f64(self.deadlines.heartbeat_s);
        HubConfig { hold, dtype, fanout: self.weights.fanout, ..HubConfig::default() }
    }

    /// How new versions are published; `served` says whether other processes can take them.
    #[must_use]
    pub fn publish(&self, served: bool) -> PublishConfig {
        let every = NonZeroUsize::new(self.weights.full_every).unwrap_or(NonZeroUsize::MIN);
        let deltas = DeltaConfig { full_every: every, compress: self.weights.compress };
        let shared = served && self.weights.transport.publishes_to_shared_memory();
        PublishConfig {
            deltas: (served && every > NonZeroUsize::MIN).then_some(deltas),
            shm: shared.then(|| PathBuf::from(SHARED_MEMORY)).filter(|directory| directory.is_dir()),
            // Sampler and trainer that take turns move their weights out of memory.
            in_process: !served && !self.is_colocated(),
            ..PublishConfig::default()
        }
    }

    /// The optimizer of the training steps.
    #[must_use]
    pub fn optimizer(&self) -> OptimizerConfig {
        OptimizerConfig {
            kind: self.trainer.optimizer,
            beta1: self.trainer.adam_beta1 as f32,
            beta2: self.trainer.adam_beta2 as f32,
            eps: self.trainer.adam_eps as f32,
            weight_decay: self.trainer.weight_decay as f32,
            momentum: self.trainer.momentum as f32,
            dion_rank_fraction: self.trainer.dion_rank_fraction as f32,
        }
    }

    /// The adapter that is trained, if not all weights are.
    #[must_use]
    pub fn lora(&self) -> Option<LoraConfig> {
        let lora = self.lora.as_ref()?;
        let target_modules = lora.target_modules.clone();
        Some(LoraConfig { rank: lora.rank, alpha: lora.alpha, target_modules })
    }

    /// How gradients are computed.
    #[must_use]
    pub fn learner(&self) -> LearnerConfig {
        LearnerConfig {
            optimizer: self.optimizer(),
            max_grad_norm: self.trainer.max_grad_norm as f32,
            router_correction_rate: self.trainer.router_correction_rate as f32,
            microbatch_tokens: self.trainer.microbatch_tokens,
            recompute: self.trainer.recompute,
            world: self.trainer.world,
            parallel: self.trainer.parallel.config(),
            leaves: self.trainer.leaves,
            zero: self.trainer.zero,
            wait: self.wait(),
            device: self.trains_on(),
        }
    }

    /// Advantages, loss and correction.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        let mut algorithm = self.algorithm.algorithm();
        if let AdvantageEstimator::PerReward { weights } = &mut algorithm.advantage {
            *weights = self.rewards.iter().map(|reward| reward.weight).collect();
        }
        if let (AdvantageEstimator::Gae(gae), Some(critic)) = (&mut algorithm.advantage, &self.critic) {
            gae.lambda_critic = critic.lambda;
        }
        algorithm
    }

    /// Whether the policy is compared with a frozen one.
    #[must_use]
    pub fn needs_reference(&self) -> bool {
        match &self.supervised {
            Some(supervised) => matches!(supervised.kind, SupervisedKind::Dpo | SupervisedKind::Ipo),
            None => self.algorithm().needs_reference(),
        }
    }

    /// Whether that one has weights of its own: over a base that stays quantised it shares them.
    #[must_use]
    pub fn has_own_reference(&self) -> bool {
        let is_shared = self.has_quantized_base() && self.algorithm.reference.is_none();
        self.needs_reference() && !is_shared
    }

    /// How the critic learns, if the algorithm has one.
    #[must_use]
    pub fn critic(&self) -> Option<CriticConfig> {
        let critic = self.critic.as_ref()?;
        let (coef, rate) = (critic.coef.unwrap_or(1.0), critic.learning_rate.unwrap_or_default());
        Some(CriticConfig {
            kind: critic.kind,
            term: ValueLossConfig { coef, clip: critic.value_clip },
            learning_rate: rate as f32,
            pretrain_steps: critic.pretrain_steps.unwrap_or(0),
            placement: self.placement.critic.unwrap_or(Placement::Colocated),
        })
    }

    /// The learning rate of every step of the policy.
    #[must_use]
    pub fn schedule(&self) -> LearningRateSchedule {
        let pretraining = self.critic().map_or(0, |critic| critic.pretrain_steps);
        LearningRateSchedule {
            peak: self.trainer.learning_rate as f32,
            shape: self.trainer.schedule,
            warmup_steps: self.trainer.warmup_steps,
            decay_steps: self.trainer.decay_steps.unwrap_or(0),
            steps: self.trainer.steps.saturating_sub(pretraining),
        }
    }

    /// The training steps.
    #[must_use]
    pub fn trainer(&self, checkpoints: PathBuf) -> TrainerConfig {
        TrainerConfig {
            algorithm: self.algorithm(),
            schedule: self.schedule(),
            split: BatchSplit {
                minibatches: self.trainer.minibatches,
                max_completion_length: self.rollout.max_completion_length,
            },
            epochs: self.trainer.epochs,
            bitwise: self.rollout.bitwise,
            checkpoint_interval: self.checkpoint.interval,
            checkpoint: self.checkpoints(checkpoints),
            adapt_microbatch: self.trainer.adapt_microbatch,
            logged_groups: self.log.samples,
            wait: self.batch_wait(),
        }
    }

    /// How checkpoints are written.
    #[must_use]
    pub fn checkpoints(&self, checkpoints: PathBuf) -> CheckpointWriterConfig {
        let (retention, asynchronous) = (self.retention(), self.checkpoint.asynchronous);
        CheckpointWriterConfig { checkpoints, retention, asynchronous, wait: self.wait() }
    }

    /// The archive of the run, if the recipe names one. Its address was checked.
    #[must_use]
    pub(crate) fn archive(&self) -> Option<ArchiveUrl> {
        self.checkpoint.url.as_ref()?.parse().ok()
    }

    /// Which checkpoints stay.
    #[must_use]
    pub fn retention(&self) -> Retention {
        let CheckpointSection { keep_last, keep_every, .. } = self.checkpoint;
        Retention { keep_last, keep_every }
    }
}
