//! The whole recipe as it is written in TOML: every section, key, unit and default.
//!
//! Invariant: what does not parse into these types is not a recipe; an unknown key is an error. Ranges and the rules
//! between keys are checked in `checks.rs`. The comment `// resume = R, worker = W` above a key says whether a resume may
//! change it (`resume/rules.rs`) and whether the run may choose it on a worker's machine (`workers/permissions/keys.rs`). The names that peers give to a key stand in its documentation and, for
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
mod trainer;

pub use algorithm::{AlgorithmSection, CriticSection};
pub use curation::CurationSection;
pub use eval::{Correct, Eval, EvalSet};
pub use lora::Lora;
pub use placement::PlacementSection;
pub use supervised::Supervised;
pub use trainer::TrainerSection;

/// A recipe as written: all layers merged, nothing checked yet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawRecipe {
    /// Recipes that this one builds on: paths relative to this file, later ones win.
    #[serde(deserialize_with = "one_or_many", skip_serializing)]
    // resume = run, worker = operator
    pub extends: Vec<String>,
    /// Name of the run and of its directory; the file's name without `.toml` if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = run, worker = run
    pub name: Option<String>,
    /// Seed of everything random: initial weights, task order, sampling.
    // resume = tasks, worker = run
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
    pub curation: CurationSection,
    /// What stands between rollout and trainer.
    pub buffer: BufferSection,
    /// How advantages and the loss are made.
    pub algorithm: AlgorithmSection,
    /// What the advantages of an actor-critic algorithm are measured against.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub critic: Option<CriticSection>,
    /// How the policy is updated.
    pub trainer: TrainerSection,
    /// What of the policy is updated; all of it without this section.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
    /// Who computes where.
    pub placement: PlacementSection,
    /// Which answers are correct, and how accuracy is measured.
    pub eval: Eval,
    /// What is kept to resume from.
    pub checkpoint: CheckpointSection,
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
    // resume = policy, worker = ignored
    pub path: Option<PathBuf>,
    /// What weights and activations are stored in on a device: `auto` is bf16 on CUDA, and f32 on the processor and the
    /// emulator. The optimizer moves f32 weights in any case, and sums are made in f32. TRL, vLLM `dtype`.
    // resume = changes, worker = run
    pub dtype: ModelDtype,
    /// Order of the sums that tensor-parallel ranks would share: over the inputs of `o_proj` and `down_proj`, and in the
    /// backward over the outputs of the other projections and of the head. On the processor, for sampler and trainer.
    // resume = changes, worker = run
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
    // resume = policy, worker = ignored
    pub architecture: Architecture,
    /// Width of the residual stream.
    // resume = policy, worker = ignored
    pub hidden_size: usize,
    /// Width inside the feed-forward block.
    // resume = policy, worker = ignored
    pub intermediate_size: usize,
    /// Decoder layers.
    // resume = policy, worker = ignored
    pub num_layers: usize,
    /// Query heads; they divide `hidden_size` into even parts.
    // resume = policy, worker = ignored
    pub num_heads: usize,
    /// Key and value heads; they divide `num_heads`.
    // resume = policy, worker = ignored
    pub num_kv_heads: usize,
    /// Standard deviation of the weights at the start.
    // resume = policy, worker = ignored
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
    // resume = tasks, worker = operator
    pub train: Vec<PathBuf>,
    /// Files of held-out tasks. verl `data.val_files`.
    #[serde(deserialize_with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    // resume = changes, worker = ignored
    pub eval: Vec<PathBuf>,
    /// Generated additions instead of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arithmetic: Option<ArithmeticSection>,
    /// Column of the prompt; found by its usual names if not given. verl `data.prompt_key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub prompt_column: Option<String>,
    /// Column of the answer; found by its usual names if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub answer_column: Option<String>,
    /// Prompt with `{column}` placeholders, used instead of a prompt column.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub prompt_template: Option<String>,
    /// System message put before every prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub system_prompt: Option<String>,
    /// Whether text prompts are rendered with the chat template of the model.
    // resume = tasks, worker = run
    pub chat: bool,
    /// Longest prompt in tokens. TRL (removed in 1.0) and verl `max_prompt_length`, prime-rl `seq_len`.
    // resume = tasks, worker = run
    pub max_prompt_length: usize,
    /// What to do with longer prompts. verl `filter_overlong_prompts`.
    // resume = tasks, worker = run
    pub overlong_prompts: Overlong,
    /// Whether tasks come in a new random order in every epoch. TRL `shuffle_dataset`, verl `data.shuffle`.
    // resume = tasks, worker = run
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
pub struct ArithmeticSection {
    /// Largest operand; the smallest is 0.
    // resume = tasks, worker = run
    pub max_operand: u32,
    /// Number of training tasks.
    // resume = tasks, worker = run
    pub train_tasks: usize,
    /// Number of held-out tasks.
    // resume = tasks, worker = run
    pub eval_tasks: usize,
}

impl Default for ArithmeticSection {
    fn default() -> Self {
        Self { max_operand: 99, train_tasks: 8000, eval_tasks: 500 }
    }
}

/// `[warmup]`: supervised training on demonstrations of the generated tasks, some of them wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Warmup {
    /// Most optimizer steps; 0 turns the warm-up off.
    // resume = warmup, worker = ignored
    pub steps: usize,
    /// Demonstrations per step.
    // resume = warmup, worker = ignored
    pub batch_tasks: usize,
    /// Peak learning rate.
    // resume = warmup, worker = ignored
    pub learning_rate: f64,
    /// Share of demonstrations that are wrong, from 0 up to and without 1.
    // resume = warmup, worker = ignored
    pub wrong_share: f64,
    /// Held-out accuracy at which the warm-up stops early.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = warmup, worker = ignored
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
    // resume = groups, worker = run
    pub group_size: usize,
    /// Longest completion in tokens. TRL `max_completion_length`, verl `max_response_length`, AReaL `max_new_tokens`.
    // resume = changes, worker = run
    pub max_completion_length: usize,
    /// Sampling temperature, above 0.
    // resume = changes, worker = run
    pub temperature: f64,
    /// Nucleus: the smallest set of tokens with this probability; 1 is off.
    // resume = changes, worker = run
    pub top_p: f64,
    /// Most likely tokens to sample from; 0 is off. verl writes -1 for off.
    // resume = changes, worker = run
    pub top_k: usize,
    /// Least probability relative to the most likely token; 0 is off.
    // resume = changes, worker = run
    pub min_p: f64,
    /// Texts that end a completion.
    // resume = groups, worker = run
    pub stop: Vec<String>,
    /// Token ids that end a completion, beside those of the model.
    // resume = groups, worker = run
    pub stop_token_ids: Vec<u32>,
    /// Whether completions go on to their full length whatever they say: for measuring speed. vLLM `ignore_eos`.
    // resume = groups, worker = run
    pub ignore_stop: bool,
    /// Sequences decoded together. vLLM `max_num_seqs`, AReaL `max_concurrent_rollouts`.
    // resume = changes, worker = run
    pub max_running: usize,
    /// Prompt tokens read per decoding step; 256, or 2048 on a device, if not given. vLLM `max_num_batched_tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub prefill_chunk: Option<usize>,
    /// Tokens that the paged KV cache holds; enough for `max_running` sequences of full length if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub kv_cache_tokens: Option<usize>,
    /// Text that is put into a completion which has not ended at a random place between the two below (ScaleRL); it is
    /// read by the policy and not trained on.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = groups, worker = run
    pub interrupt_text: Option<String>,
    /// Fewest tokens before `interrupt_text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = groups, worker = run
    pub interrupt_after_min: Option<usize>,
    /// Most tokens before `interrupt_text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = groups, worker = run
    pub interrupt_after_max: Option<usize>,
    /// What happens to sequences in flight when new weights arrive.
    // resume = changes, worker = run
    pub on_update: OnUpdate,
    /// How coarsely the weights are represented that are sampled from. Log-probabilities are those of the quantised
    /// policy, and `algorithm.behavior_weight_cap` bounds the weight that corrects the loss for it; evaluation and
    /// checkpoints are f32. vLLM `quantization`.
    // resume = changes, worker = run
    pub quantization: Quantization,
    /// Whether the run stops if the trainer computes other bits than the sampler for a token that the version being
    /// trained has sampled. f32 sampling is bitwise in any case; this makes it a promise. Costs nothing.
    // resume = changes, worker = run
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
pub struct BufferSection {
    /// Groups per training step. verl `data.train_batch_size`.
    // resume = groups, worker = run
    pub batch_groups: usize,
    /// Most policy versions between the oldest token of a sample and the step that trains on it; 0 is synchronous.
    /// TRL `max_staleness`, verl `staleness_threshold`, AReaL `max_head_offpolicyness`, prime-rl
    /// `max_off_policy_steps`.
    // resume = changes, worker = run
    pub max_staleness: u64,
    /// What happens to a group over the bound.
    // resume = changes, worker = run
    pub on_stale: OnStale,
    /// Where groups wait.
    // resume = groups, worker = ignored
    pub store: StoreWord,
    /// Which groups a step takes first. All but `fifo` need `on_stale = "drop"`. TBA samples by recency and by reward.
    // resume = changes, worker = run
    pub order: SampleOrder,
    /// Of `order = "reward"`: groups are drawn with weights exp(mean reward / temperature).
    // resume = changes, worker = run
    pub reward_temperature: f64,
    /// How many steps train on a group before it is forgotten; more than one needs `on_stale = "drop"`.
    // resume = changes, worker = run
    pub max_uses: u32,
    /// Leave out a trajectory if the buffer holds one of the same task with the same tokens, as TBA does.
    // resume = changes, worker = run
    pub dedup: bool,
    /// Most groups that are kept, MiB as they are written; when it is full, nothing new starts.
    // resume = changes, worker = run
    pub max_mib: u64,
    /// Of `store = "http"`: where the buffer is served, such as `http://127.0.0.1:8700`.
    // resume = changes, worker = ignored
    pub url: Option<String>,
    /// Of `store = "http"`: a file with the token of the role `admin`, if the server wants one. Of `listen`: who may do what,
    /// in lines such as `writer TOKEN`, `trainer TOKEN`, `admin TOKEN`; without it everybody may, on a loopback address.
    // resume = changes, worker = ignored
    pub token_file: Option<PathBuf>,
    /// Serve this run while it lasts, on an address such as `127.0.0.1:8700`: to look at it, to add groups from elsewhere, and
    /// for `rlrun worker rollout --join http://127.0.0.1:8700`. An address that others can reach needs `token_file`, and TLS
    /// or `insecure`.
    // resume = changes, worker = ignored
    pub listen: Option<SocketAddr>,
    /// Of `listen`: certificate chain, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub tls_cert: Option<PathBuf>,
    /// Of `listen`: the private key of `tls_cert`, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub tls_key: Option<PathBuf>,
    /// Of `listen`: let tokens go over the network without TLS.
    // resume = changes, worker = ignored
    pub insecure: bool,
}

impl Default for BufferSection {
    fn default() -> Self {
        // AReaL measures no loss up to 8 with the corrected loss and full throughput from 2 on; 4 has a margin on
        // both sides and is what TRL and SkyRL users have.
        Self {
            batch_groups: 32,
            max_staleness: 4,
            on_stale: OnStale::Wait,
            store: StoreWord::Redb,
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
    // resume = changes, worker = run
    pub transport: WeightTransport,
    /// What is sampled with: the weights as they are trained (`f32`), or rounded to `bf16`, half as large; what that changes
    /// is measured and corrected as any mismatch is. prime-rl `weight_broadcast` and vLLM sample in bf16.
    // resume = changes, worker = run
    pub dtype: WeightDtypeWord,
    /// Over HTTP only what has changed is sent, and everything at least every so many pushes; 1: everything always.
    // resume = changes, worker = run
    pub full_every: usize,
    /// Whether what is sent over HTTP is compressed with zstd: for slow networks.
    // resume = changes, worker = run
    pub compress: bool,
}

impl Default for Weights {
    fn default() -> Self {
        Self {
            transport: WeightTransport::Auto,
            dtype: WeightDtypeWord::F32,
            full_every: 20,
            compress: false,
        }
    }
}

/// `[checkpoint]`: what a run resumes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// Steps between checkpoints; 0 is only at the end. TRL `save_steps`, verl `save_freq`.
    // resume = changes, worker = ignored
    pub interval: u64,
    /// Newest checkpoints that are kept. TRL `save_total_limit`, verl `max_actor_ckpt_to_keep`.
    // resume = changes, worker = ignored
    pub keep_last: usize,
    /// Versions that are multiples of it are kept for ever, beside the newest; 0 for none.
    // resume = changes, worker = ignored
    pub keep_every: u64,
    /// Steps go on while a copy of everything is written; without it they wait, and the memory of the copy is saved.
    // resume = changes, worker = ignored
    pub asynchronous: bool,
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self { interval: 50, keep_last: 2, keep_every: 0, asynchronous: true }
    }
}

/// `[log]`: what is written down beside the metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Groups written to `samples/` per step.
    // resume = changes, worker = ignored
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
    // resume = changes, worker = run
    pub wait_s: f64,
    /// Seconds without any progress after which the run says who waits for whom, and goes on.
    // resume = changes, worker = run
    pub quiet_s: f64,
    /// Seconds of silence after which a process is taken for dead: it is killed and started again, or forgotten if others
    /// started it.
    // resume = changes, worker = run
    pub heartbeat_s: f64,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self { wait_s: 600.0, quiet_s: 60.0, heartbeat_s: 30.0 }
    }
}
