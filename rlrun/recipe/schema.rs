//! The whole recipe as it is written in TOML: every section, key, unit and default.
//!
//! Invariant: what does not parse into these types is not a recipe; an unknown key is an error. Ranges and the rules
//! between keys are checked in `checks.rs`. The names that peers give to a key stand in its documentation and, for
//! error messages, in `peers.rs`; the words that a key accepts in `words.rs`.

use std::net::SocketAddr;
use std::path::PathBuf;

use rewards::RewardSpec;
use serde::{Deserialize, Serialize};

use super::decode::one_or_many;
use super::words::*;

mod algorithm;
mod curation;
mod eval;
mod lora;
mod placement;
mod supervised;

pub use algorithm::{Algorithm, Critic};
pub use curation::Curation;
pub use eval::{Correct, Eval, EvalSet};
pub use lora::Lora;
pub use placement::Placement;
pub use supervised::Supervised;

/// A recipe as written: all layers merged, nothing checked yet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawRecipe {
    /// Recipes that this one builds on: paths relative to this file, later ones win.
    #[serde(deserialize_with = "one_or_many", skip_serializing)]
    pub extends: Vec<String>,
    /// Name of the run and of its directory; the file's name without `.toml` if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Seed of everything random: initial weights, task order, sampling.
    pub seed: u64,
    /// The policy.
    pub model: RawModel,
    /// The tasks.
    pub data: RawData,
    /// Supervised warm-up before reinforcement learning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup: Option<Warmup>,
    /// Training without sampling instead of reinforcement learning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub supervised: Option<Supervised>,
    /// How trajectories are sampled.
    pub rollout: Rollout,
    /// What trajectories are worth: a weighted sum.
    pub rewards: Vec<RewardSpec>,
    /// Which tasks are drawn and which groups are trained on.
    pub curation: Curation,
    /// What stands between rollout and trainer.
    pub buffer: Buffer,
    /// How advantages and the loss are made.
    pub algorithm: Algorithm,
    /// What the advantages of an actor-critic algorithm are measured against.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub critic: Option<Critic>,
    /// How the policy is updated.
    pub trainer: Trainer,
    /// What of the policy is updated; all of it without this section.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
    /// Who computes where.
    pub placement: Placement,
    /// Which answers are correct, and how accuracy is measured.
    pub eval: Eval,
    /// What is kept to resume from.
    pub checkpoint: Checkpoint,
    /// How versions get to samplers.
    pub weights: Weights,
    /// What is written down beside the metrics.
    pub log: Log,
    /// How long one role waits for another.
    pub deadlines: Deadlines,
}

/// `[model]`: exactly one of `path` and `random`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawModel {
    /// Hugging Face model directory; relative to the file that names it, then to the working directory. TRL
    /// `model_name_or_path`, verl `model.path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// What weights and activations are stored in on a device: `auto` is bf16 on CUDA, and f32 on the processor and the
    /// emulator. The optimizer moves f32 weights in any case, and sums are made in f32. TRL, vLLM `dtype`.
    pub dtype: ModelDtype,
    /// Order of the sums that tensor-parallel ranks would share: over the inputs of `o_proj` and `down_proj`, and in the
    /// backward over the outputs of the other projections and of the head. On the processor, for sampler and trainer.
    pub reduction: Reduction,
    /// A new character-level model with random weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub random: Option<RandomModel>,
}

/// `[model.random]`: the sizes of a new character-level model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RandomModel {
    /// Family whose layers are used.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward block.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads; they divide `hidden_size` into even parts.
    pub num_heads: usize,
    /// Key and value heads; they divide `num_heads`.
    pub num_kv_heads: usize,
    /// Standard deviation of the weights at the start.
    pub initializer_range: f64,
}

impl Default for RandomModel {
    fn default() -> Self {
        Self {
            architecture: Architecture::Qwen2,
            hidden_size: 64,
            intermediate_size: 256,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            initializer_range: 0.02,
        }
    }
}

/// `[data]`: either files or generated arithmetic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawData {
    /// JSONL or Parquet files, or directories of them, to train on. TRL `dataset_name`, verl `data.train_files`.
    #[serde(deserialize_with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub train: Vec<PathBuf>,
    /// Files of held-out tasks. verl `data.val_files`.
    #[serde(deserialize_with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub eval: Vec<PathBuf>,
    /// Generated additions instead of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arithmetic: Option<Arithmetic>,
    /// Column of the prompt; found by its usual names if not given. verl `data.prompt_key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_column: Option<String>,
    /// Column of the answer; found by its usual names if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer_column: Option<String>,
    /// Prompt with `{column}` placeholders, used instead of a prompt column.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_template: Option<String>,
    /// System message put before every prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// Whether text prompts are rendered with the chat template of the model.
    pub chat: bool,
    /// Longest prompt in tokens. TRL (removed in 1.0) and verl `max_prompt_length`, prime-rl `seq_len`.
    pub max_prompt_length: usize,
    /// What to do with longer prompts. verl `filter_overlong_prompts`.
    pub overlong_prompts: Overlong,
    /// Whether tasks come in a new random order in every epoch. TRL `shuffle_dataset`, verl `data.shuffle`.
    pub shuffle: bool,
}

impl Default for RawData {
    fn default() -> Self {
        Self {
            train: Vec::new(),
            eval: Vec::new(),
            arithmetic: None,
            prompt_column: None,
            answer_column: None,
            prompt_template: None,
            system_prompt: None,
            chat: false,
            max_prompt_length: 512,
            overlong_prompts: Overlong::Error,
            shuffle: true,
        }
    }
}

/// `[data.arithmetic]`: additions such as `37+48=`, training and held-out tasks disjoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Arithmetic {
    /// Largest operand; the smallest is 0.
    pub max_operand: u32,
    /// Number of training tasks.
    pub train_tasks: usize,
    /// Number of held-out tasks.
    pub eval_tasks: usize,
}

impl Default for Arithmetic {
    fn default() -> Self {
        Self { max_operand: 99, train_tasks: 8000, eval_tasks: 500 }
    }
}

/// `[warmup]`: supervised training on demonstrations of the generated tasks, some of them wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Warmup {
    /// Most optimizer steps; 0 turns the warm-up off.
    pub steps: usize,
    /// Demonstrations per step.
    pub batch_tasks: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Share of demonstrations that are wrong, from 0 up to and without 1.
    pub wrong_share: f64,
    /// Held-out accuracy at which the warm-up stops early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_accuracy: Option<f64>,
}

impl Default for Warmup {
    fn default() -> Self {
        Self { steps: 700, batch_tasks: 64, learning_rate: 5e-3, wrong_share: 0.62, stop_accuracy: None }
    }
}

/// `[rollout]`: sampling. The log-probabilities recorded are those of the distribution after all of this.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rollout {
    /// Completions per task. TRL `num_generations`, verl `rollout.n`, AReaL `n_samples`.
    pub group_size: usize,
    /// Longest completion in tokens. TRL `max_completion_length`, verl `max_response_length`, AReaL `max_new_tokens`.
    pub max_completion_length: usize,
    /// Sampling temperature, above 0.
    pub temperature: f64,
    /// Nucleus: the smallest set of tokens with this probability; 1 is off.
    pub top_p: f64,
    /// Most likely tokens to sample from; 0 is off. verl writes -1 for off.
    pub top_k: usize,
    /// Least probability relative to the most likely token; 0 is off.
    pub min_p: f64,
    /// Texts that end a completion.
    pub stop: Vec<String>,
    /// Token ids that end a completion, beside those of the model.
    pub stop_token_ids: Vec<u32>,
    /// Whether completions go on to their full length whatever they say: for measuring speed. vLLM `ignore_eos`.
    pub ignore_stop: bool,
    /// Sequences decoded together. vLLM `max_num_seqs`, AReaL `max_concurrent_rollouts`.
    pub max_running: usize,
    /// Prompt tokens read per decoding step; 256, or 2048 on a device, if not given. vLLM `max_num_batched_tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_chunk: Option<usize>,
    /// Tokens that the paged KV cache holds; enough for `max_running` sequences of full length if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_tokens: Option<usize>,
    /// Text that is put into a completion which has not ended at a random place between the two below (ScaleRL); it is
    /// read by the policy and not trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interrupt_text: Option<String>,
    /// Fewest tokens before `interrupt_text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interrupt_after_min: Option<usize>,
    /// Most tokens before `interrupt_text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interrupt_after_max: Option<usize>,
    /// What happens to sequences in flight when new weights arrive.
    pub on_update: OnUpdate,
    /// How coarsely the weights are represented that are sampled from. Log-probabilities are those of the quantised
    /// policy, and `algorithm.behavior_weight_cap` bounds the weight that corrects the loss for it; evaluation and
    /// checkpoints are f32. vLLM `quantization`.
    pub quantization: Quantization,
    /// Whether the run stops if the trainer computes other bits than the sampler for a token that the version being
    /// trained has sampled. f32 sampling is bitwise in any case; this makes it a promise. Costs nothing.
    pub bitwise: bool,
}

impl Default for Rollout {
    fn default() -> Self {
        Self {
            group_size: 8,
            max_completion_length: 512,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_stop: false,
            max_running: 64,
            prefill_chunk: None,
            kv_cache_tokens: None,
            interrupt_text: None,
            interrupt_after_min: None,
            interrupt_after_max: None,
            on_update: OnUpdate::Keep,
            quantization: Quantization::None,
            bitwise: false,
        }
    }
}

/// `[buffer]`: batches, staleness and durability.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Buffer {
    /// Groups per training step. verl `data.train_batch_size`.
    pub batch_groups: usize,
    /// Most policy versions between the oldest token of a sample and the step that trains on it; 0 is synchronous.
    /// TRL `max_staleness`, verl `staleness_threshold`, AReaL `max_head_offpolicyness`, prime-rl
    /// `max_off_policy_steps`.
    pub max_staleness: u64,
    /// What happens to a group over the bound.
    pub on_stale: OnStale,
    /// Where groups wait.
    pub store: Store,
    /// Which groups a step takes first. All but `fifo` need `on_stale = "drop"`. TBA samples by recency and by reward.
    pub order: SampleOrder,
    /// Of `order = "reward"`: groups are drawn with weights exp(mean reward / temperature).
    pub reward_temperature: f64,
    /// How many steps train on a group before it is forgotten; more than one needs `on_stale = "drop"`.
    pub max_uses: u32,
    /// Leave out a trajectory if the buffer holds one of the same task with the same tokens, as TBA does.
    pub dedup: bool,
    /// Most groups that are kept, MiB as they are written; when it is full, nothing new starts.
    pub max_mib: u64,
    /// Of `store = "http"`: where the buffer is served, such as `http://127.0.0.1:8700`.
    pub url: Option<String>,
    /// Of `store = "http"`: a file with the token of the role `admin`, if the server wants one. Of `listen`: who may do what,
    /// in lines such as `writer TOKEN`, `trainer TOKEN`, `admin TOKEN`; without it everybody may, on a loopback address.
    pub token_file: Option<PathBuf>,
    /// Serve this run while it lasts, on an address such as `127.0.0.1:8700`: to look at it, to add groups from elsewhere, and
    /// for `rlrun worker rollout --join http://127.0.0.1:8700`. An address that others can reach needs `token_file`, and TLS
    /// or `insecure`.
    pub listen: Option<SocketAddr>,
    /// Of `listen`: certificate chain, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert: Option<PathBuf>,
    /// Of `listen`: the private key of `tls_cert`, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key: Option<PathBuf>,
    /// Of `listen`: let tokens go over the network without TLS.
    pub insecure: bool,
}

impl Default for Buffer {
    fn default() -> Self {
        // AReaL measures no loss up to 8 with the corrected loss and full throughput from 2 on; 4 leaves room on
        // both sides and is what TRL and SkyRL users have.
        Self {
            batch_groups: 32,
            max_staleness: 4,
            on_stale: OnStale::Wait,
            store: Store::Redb,
            order: SampleOrder::Fifo,
            reward_temperature: 1.0,
            max_uses: 1,
            dedup: false,
            max_mib: 16 << 10,
            url: None,
            token_file: None,
            listen: None,
            tls_cert: None,
            tls_key: None,
            insecure: false,
        }
    }
}

/// `[weights]`: how new versions of the policy get to those who sample. Within a process they share the memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Weights {
    /// How samplers in other processes get them: those of this host map shared memory and others ask over HTTP (`auto`), or
    /// all ask over HTTP (`http`). Between devices they need not come by the host's memory: samplers of one host map that of
    /// the trainer's device (`cuda-ipc`), or it broadcasts to samplers with GPUs of their own, here or elsewhere (`nccl`).
    pub transport: WeightTransport,
    /// What is sampled with: the weights as they are trained (`f32`), or rounded to `bf16`, half as large; what that changes
    /// is measured and corrected as any mismatch is. prime-rl `weight_broadcast` and vLLM sample in bf16.
    pub dtype: WeightDtype,
    /// Over HTTP only what has changed is sent, and everything at least every so many pushes; 1: everything always.
    pub full_every: usize,
    /// Whether what is sent over HTTP is compressed with zstd: for slow networks.
    pub compress: bool,
}

impl Default for Weights {
    fn default() -> Self {
        Self { transport: WeightTransport::Auto, dtype: WeightDtype::F32, full_every: 20, compress: false }
    }
}

/// `[trainer]`: the update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Trainer {
    /// Training steps of the run; required. TRL `max_steps`, verl `total_training_steps`.
    pub steps: u64,
    /// What turns gradients into updates; `adamw8bit` keeps the moments in a quarter of the memory. `muon` and `dion`
    /// move the matrices of the decoder's blocks, and AdamW the rest. TRL `optim`.
    pub optimizer: OptimizerKind,
    /// Peak learning rate of all weights. Updates of `muon` are as large as those of AdamW; those of `dion` are
    /// orthonormal times sqrt(rows / columns), for which its paper has 0.01. verl `actor.optim.lr`.
    pub learning_rate: f64,
    /// How the learning rate goes on after the warm-up. TRL `lr_scheduler_type`.
    pub schedule: ScheduleShape,
    /// Steps over which the learning rate rises from 0.
    pub warmup_steps: u64,
    /// Of `schedule = "wsd"`, which needs it: steps at the end over which the learning rate falls to 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// Decoupled weight decay. A minibatch without a gradient (all groups have equal rewards) makes no update with any
    /// optimizer: no moments, no decay; the step still makes a version. `optim/updates` counts the updates of a step.
    pub weight_decay: f64,
    /// Decay of the first moment.
    pub adam_beta1: f64,
    /// Decay of the second moment.
    pub adam_beta2: f64,
    /// Added to the root of the second moment.
    pub adam_eps: f64,
    /// Of `muon` and `dion`: what stays of the momentum.
    pub momentum: f64,
    /// Of `dion`: rank of the updates as a fraction of the full one. Less takes less time and memory.
    pub dion_rank_fraction: f64,
    /// Largest gradient norm. verl `grad_clip`.
    pub max_grad_norm: f64,
    /// Optimizer updates that a batch is split into. verl `ppo_mini_batch_size` as a count, AReaL `ppo_n_minibatches`.
    pub minibatches: usize,
    /// Passes over a batch. TRL `num_iterations`, verl `ppo_epochs`.
    pub epochs: usize,
    /// Tokens packed into one forward and backward pass. verl `ppo_max_token_len_per_gpu`.
    pub microbatch_tokens: usize,
    /// What the backward computes again instead of keeping it in memory. TRL `gradient_checkpointing`, verl
    /// `enable_gradient_checkpointing`.
    pub recompute: Recompute,
    /// Trainer workers that share a step.
    pub world: usize,
    /// Leaves that the gradients of a step are summed from as a balanced binary tree: a power of two. Trainer workers on the
    /// processor compute whole leaves, so the weights have the same bits for every `trainer.world` that is a power of two
    /// and at most this. A batch is cut into so many micro-batches at least, and one worker keeps log2(leaves) gradient
    /// buffers of 4 bytes per weight (one more if a leaf has several micro-batches), two workers one less each. Workers on
    /// devices have one leaf each.
    pub leaves: usize,
    /// What these workers are: threads, processes (`rlrun worker trainer`; a run of processes starts them), or what `mpirun`
    /// has started, in a binary built with the feature `mpi`.
    pub ranks: Ranks,
    /// What trainer workers share beside the work: 1 the state of the optimizer, 2 gradients too, 3 weights too. The same
    /// step with less memory for each, for more communication; with LoRA each has all weights in any case. DeepSpeed
    /// `zero_optimization.stage`.
    pub zero: usize,
    /// Of trainer workers on devices: where they exchange gradients and weights. From device to device (NCCL) each updates what
    /// it owns there, which needs a GPU for each and AdamW; through the host they meet in its memory. `auto` is the first where
    /// that can be.
    pub collective: Collective,
}

impl Default for Trainer {
    fn default() -> Self {
        Self {
            steps: 0,
            optimizer: OptimizerKind::Adamw,
            learning_rate: 1e-6,
            schedule: ScheduleShape::Constant,
            warmup_steps: 0,
            decay_steps: None,
            weight_decay: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_eps: 1e-8,
            momentum: 0.95,
            dion_rank_fraction: 1.0,
            max_grad_norm: 1.0,
            minibatches: 1,
            epochs: 1,
            microbatch_tokens: 4096,
            recompute: Recompute::None,
            world: 1,
            leaves: 4,
            ranks: Ranks::Threads,
            zero: 1,
            collective: Collective::Auto,
        }
    }
}

/// `[checkpoint]`: what a run resumes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Checkpoint {
    /// Steps between checkpoints; 0 is only at the end. TRL `save_steps`, verl `save_freq`.
    pub interval: u64,
    /// Newest checkpoints that are kept. TRL `save_total_limit`, verl `max_actor_ckpt_to_keep`.
    pub keep_last: usize,
    /// Versions that are multiples of it are kept for ever, beside the newest; 0 for none.
    pub keep_every: u64,
    /// Steps go on while a copy of everything is written; without it they wait, and the memory of the copy is saved.
    pub asynchronous: bool,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Self { interval: 50, keep_last: 2, keep_every: 0, asynchronous: true }
    }
}

/// `[log]`: what is written down beside the metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Groups written to `samples/` per step.
    pub samples: usize,
}

impl Default for Log {
    fn default() -> Self {
        Self { samples: 2 }
    }
}

/// `[deadlines]`: every wait has one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Deadlines {
    /// Seconds that a role waits for another before the run stops and says who waits for whom.
    pub wait_s: f64,
    /// Seconds without any progress after which the run says who waits for whom, and goes on.
    pub quiet_s: f64,
    /// Seconds of silence after which a process is taken for dead: it is killed and started again, or forgotten if others
    /// started it.
    pub heartbeat_s: f64,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self { wait_s: 600.0, quiet_s: 60.0, heartbeat_s: 30.0 }
    }
}
