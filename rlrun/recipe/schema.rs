//! The schema of a recipe in TOML: every section, key, unit and default.
//!
//! Invariant: a text that does not parse into these types is not a recipe; an unknown key is an error. `checks.rs` checks
//! ranges and the rules between keys. The comment `// resume = R, worker = W` above a key says whether a resume may change
//! it (`resume/rules.rs`) and whether the run may choose it on a worker's machine (`workers/permissions/keys.rs`). The names
//! of a key in other frameworks are in its documentation and, for error messages, in `peers.rs`. The words that a key
//! accepts are in `words.rs`.

use std::net::SocketAddr;
use std::path::PathBuf;

use environments::EnvironmentSpec;
use rewards::RewardSpec;
use serde::{Deserialize, Serialize};

use super::decode::one_or_many;
use super::words::*;

mod algorithm;
mod curation;
mod data;
mod endpoint;
mod eval;
mod island;
mod log;
mod lora;
mod placement;
mod supervised;
mod trainer;

pub use algorithm::{AlgorithmSection, CriticSection};
pub use curation::CurationSection;
pub use data::{ArithmeticSection, RawData, SeedsSection};
pub use endpoint::EndpointSection;
pub use eval::{Correct, Eval, EvalSet};
pub use island::IslandSection;
pub use log::{DashboardSection, Log};
pub use lora::Lora;
pub use placement::PlacementSection;
pub use supervised::Supervised;
pub use trainer::{ElasticSection, ParallelSection, TrainerSection};

/// A recipe as written, with all layers merged and before any check.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawRecipe {
    /// Recipes that this recipe extends: paths relative to this file. A later recipe overrides an earlier one.
    #[serde(deserialize_with = "one_or_many", skip_serializing)]
    // resume = run, worker = operator
    pub extends: Vec<String>,
    /// Name of the run and of its directory. Default: the file name without `.toml`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = run, worker = run
    pub name: Option<String>,
    /// Seed of all random numbers: initial weights, task order, sampling.
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
    /// What the policy acts in, for episodes of several turns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<EnvironmentSpec>,
    /// Rewards of a trajectory, added up with weights.
    pub rewards: Vec<RewardSpec>,
    /// Selection of tasks to sample and of groups to train on.
    pub curation: CurationSection,
    /// Queue of groups between rollout and trainer.
    pub buffer: BufferSection,
    /// Advantages and loss.
    pub algorithm: AlgorithmSection,
    /// Value function of an actor-critic algorithm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub critic: Option<CriticSection>,
    /// How the policy is updated.
    pub trainer: TrainerSection,
    /// Low-rank adapters; without this section all weights are trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
    /// Exchange of outer gradients with other runs over slow links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub island: Option<IslandSection>,
    /// Devices, processes and cores of each role.
    pub placement: PlacementSection,
    /// The policy as an endpoint, and sessions of agents.
    pub endpoint: EndpointSection,
    /// Definition of a correct answer, and measurement of accuracy.
    pub eval: Eval,
    /// Checkpoints that a run resumes from.
    pub checkpoint: CheckpointSection,
    /// Transfer of policy versions to samplers.
    pub weights: Weights,
    /// Logs in addition to the metrics.
    pub log: Log,
    /// The live page, served by the run.
    pub dashboard: DashboardSection,
    /// Time limits of waits between roles.
    pub deadlines: Deadlines,
}

/// `[model]`: exactly one of `path` and `random`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawModel {
    /// Hugging Face model directory; or a GGUF file (`.gguf`: `llama`, `qwen2`, `qwen3`; F32, F16, BF16, Q4_0 to Q8_0, Q2_K to
    /// Q8_K), which is dequantised to f32 and trained as such, with the `tokenizer.json` beside it instead of its own tokenizer
    /// if there is one; or `hf:OWNER/NAME[@REVISION]` on the Hugging Face Hub, fetched into the user's cache (`HF_HOME`), where
    /// `hf:OWNER/NAME/FILE` is one file of a repository. A run records the commit of the revision, and a resume uses it.
    /// Checkpoints and exports are directories. A path is relative to the recipe's file, or else to the working directory. TRL
    /// `model_name_or_path`, verl `model.path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = policy, worker = ignored
    pub path: Option<PathBuf>,
    /// Number format of weights and activations on a device: `auto` is bf16 on CUDA, and f32 on the processor and the
    /// emulator. Master weights and accumulation are always f32. TRL, vLLM `dtype`.
    // resume = changes, worker = run
    pub dtype: ModelDtype,
    /// Order of the sums that tensor-parallel ranks would split: sums over the inputs of `o_proj` and `down_proj`, and in
    /// the backward pass sums over the outputs of the other projections and of the head. It applies to sampler and trainer
    /// on the processor.
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
    /// Model family of the decoder layers.
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
    /// Key and value heads; they divide `num_heads`. `deepseek_v3` and `glm4_moe_lite` have one of each for every
    /// query head, whatever this says.
    // resume = policy, worker = ignored
    pub num_kv_heads: usize,
    /// Experts of a layer, in families that have them (`olmoe`, `qwen3_moe`, `glm4_moe`, `gpt_oss`, `deepseek_v3`, `qwen3_next` and
    /// others); each is `intermediate_size` wide. Default: 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = policy, worker = ignored
    pub experts: Option<usize>,
    /// Experts of a token. Default: 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = policy, worker = ignored
    pub experts_per_token: Option<usize>,
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
            experts: None,
            experts_per_token: None,
            initializer_range: 0.02,
        }
    }
}

impl RandomModel {
    /// Experts of a layer, and of a token, in families that have them.
    #[must_use]
    pub fn experts(&self) -> [usize; 2] {
        [self.experts.unwrap_or(8), self.experts_per_token.unwrap_or(2)]
    }
}

/// `[warmup]`: supervised training on demonstrations of the generated tasks, some of them wrong. With `[environment]` they are
/// episodes of its scripted player.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Warmup {
    /// Largest number of optimizer steps; 0 turns the warm-up off.
    // resume = warmup, worker = ignored
    pub steps: usize,
    /// Demonstrations per step.
    // resume = warmup, worker = ignored
    pub batch_tasks: usize,
    /// Peak learning rate.
    // resume = warmup, worker = ignored
    pub learning_rate: f64,
    /// Fraction of demonstrations with a wrong answer, at least 0 and below 1; of turns, where they are episodes.
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

/// `[rollout]`: sampling. Behavior log-probabilities are recorded after temperature and truncation.
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
    /// Nucleus sampling: the smallest set of tokens with this total probability; 1 is off.
    // resume = changes, worker = run
    pub top_p: f64,
    /// Number of most likely tokens to sample from; 0 is off. verl writes -1 for off.
    // resume = changes, worker = run
    pub top_k: usize,
    /// Smallest probability relative to the most likely token; 0 is off.
    // resume = changes, worker = run
    pub min_p: f64,
    /// Texts that end a completion.
    // resume = groups, worker = run
    pub stop: Vec<String>,
    /// Token ids that end a completion, in addition to those of the model.
    // resume = groups, worker = run
    pub stop_token_ids: Vec<u32>,
    /// Whether completions always have full length, without stop tokens or texts. For benchmarks. vLLM `ignore_eos`.
    // resume = groups, worker = run
    pub ignore_stop: bool,
    /// Sequences decoded together. vLLM `max_num_seqs`, AReaL `max_concurrent_rollouts`.
    // resume = changes, worker = run
    pub max_running: usize,
    /// Whether every sampler runs the fewest sequences at once, from `group_size` to `max_running`, that are enough: it measures their
    /// tokens per second to be within 3 % of the best, or 15 % more than what it samples with its waits for slots. More make each
    /// sequence slower, and its group staler. Every change is an event.
    // resume = changes, worker = run
    pub adapt_running: bool,
    /// Prompt tokens that are prefilled per decoding step. Default: 256, or 2048 on a device. vLLM `max_num_batched_tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub prefill_chunk: Option<usize>,
    /// Capacity of the paged KV cache in tokens. Default: `max_running` sequences of full length.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = run
    pub kv_cache_tokens: Option<usize>,
    /// Text inserted into a completion that has not ended at a random length between `interrupt_after_min` and
    /// `interrupt_after_max` (ScaleRL). The policy reads it; it is not trained on.
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
    /// Treatment of sequences in flight when new weights arrive.
    // resume = changes, worker = run
    pub on_update: OnUpdate,
    /// Quantization of the sampler's weights: "int8" has the layers in 8 bits, "bf16" layers and head in 16 bits, fast
    /// only with AVX-512 BF16, with the same bits elsewhere. Log-probabilities are those of the quantised policy, `kl/mismatch`
    /// measures the difference, and `algorithm.behavior_weight_cap` bounds the weight that corrects the loss for it.
    /// Evaluation and checkpoints are f32. vLLM `quantization`, `dtype`.
    // resume = changes, worker = run
    pub quantization: Quantization,
    /// Speculation, while few sequences decode: "ngram" proposes the tokens that followed the last ones where they occurred
    /// before, and one pass verifies all of them. Completions and log-probabilities are the same with and without it. It
    /// pays where completions repeat parts of the prompt; `rollout/speculation_acceptance` is the share of proposals that
    /// were accepted. Not for models with a recurrence. vLLM `speculative_config`.
    // resume = changes, worker = run
    pub speculation: Speculation,
    /// Whether samples record the experts of every token, and the trainer computes with them instead of those that its router
    /// prefers by then (routing replay, R3, arXiv 2510.11370). For models with experts; vLLM and SGLang are started with
    /// `--enable-return-routed-experts`. `experts/changed` is the share of tokens that it matters for. verl
    /// `enable_router_replay`, slime `--use-rollout-routing-replay`.
    // resume = changes, worker = run
    pub routing_replay: bool,
    /// Ranks that share the weights of a sampler (tensor parallel): threads of its process, each with its part of every matrix, and
    /// the KV cache of its heads. A power of two that divides the heads and the width of the feed-forward network; where it is
    /// larger than the number of key-value heads, several ranks have copies of one. It needs `model.reduction = "tree"`, which gives every number the same bits, and the processor; it need not be that of
    /// `trainer.parallel.tensor`. Every sampler of the run has so many. vLLM `tensor_parallel_size`, verl
    /// `rollout.tensor_model_parallel_size`.
    // resume = changes, worker = run
    pub tensor: usize,
    /// Whether the run stops if trainer and sampler compute different bits for a log-probability of the current version.
    /// f32 sampling is bitwise equal with and without this key; the key checks it. The check has no cost.
    // resume = changes, worker = run
    pub bitwise: bool,
    /// What samples: rlrun's own engine, or engines of others at `urls`, which load every version from `weights_dir`. They have
    /// to report log-probabilities after temperature. prime-rl, verl `rollout.name`.
    // resume = changes, worker = ignored
    pub engine: EngineWord,
    /// Addresses of the engines. Default: none.
    // resume = changes, worker = ignored
    pub urls: Vec<String>,
    /// A program and its arguments that start the engine, if the run is to start it. It is started again if it ends, and ends with the
    /// run. Default: none.
    // resume = changes, worker = ignored
    pub command: Vec<String>,
    /// Directory that this process and all engines see, for the weights of a version. Default: `engine_weights` in the run
    /// directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub weights_dir: Option<PathBuf>,
    /// Whether vLLM gets the LoRA adapter of a version alone, in place of all weights: it has the base model, and was started with
    /// `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`. For runs with `[lora]`.
    // resume = changes, worker = ignored
    pub push_adapter: bool,
    /// Largest difference between a log-probability of an engine and that of the pushed weights, nats; checked on three prompts after
    /// every push. bf16 engines need about 0.1.
    // resume = changes, worker = run
    pub probe_bound: f64,
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
            adapt_running: false,
            prefill_chunk: None,
            kv_cache_tokens: None,
            interrupt_text: None,
            interrupt_after_min: None,
            interrupt_after_max: None,
            on_update: OnUpdate::Keep,
            quantization: Quantization::None,
            speculation: Speculation::None,
            routing_replay: false,
            tensor: 1,
            bitwise: false,
            engine: EngineWord::Own,
            urls: Vec::new(),
            command: Vec::new(),
            weights_dir: None,
            push_adapter: false,
            probe_bound: 0.02,
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
    /// Largest number of policy versions between the oldest token of a sample and the step that trains on it; 0 is
    /// synchronous. TRL `max_staleness`, verl `staleness_threshold`, AReaL `max_head_offpolicyness`, prime-rl
    /// `max_off_policy_steps`.
    // resume = changes, worker = run
    pub max_staleness: u64,
    /// Whether sampling runs ahead of the trainer by the fewest versions with which the trainer does not wait, instead of by
    /// `max_staleness`, which stays the bound. The number falls when two batches are ready after each of eight steps, and rises when
    /// the trainer waits for more than 5 % of the time and no slot is free. Every change is an event.
    // resume = changes, worker = ignored
    pub adapt_staleness: bool,
    /// Treatment of a group that exceeds `max_staleness`.
    // resume = changes, worker = run
    pub on_stale: OnStale,
    /// Storage of groups that wait for the trainer.
    // resume = groups, worker = ignored
    pub store: StoreWord,
    /// Order in which steps take groups. All orders but `fifo` need `on_stale = "drop"`. TBA samples by recency and by
    /// reward.
    // resume = changes, worker = run
    pub order: SampleOrder,
    /// For `order = "reward"`: a group's sampling weight is exp(mean reward / temperature).
    // resume = changes, worker = run
    pub reward_temperature: f64,
    /// Number of steps that train on a group before it is deleted; more than one needs `on_stale = "drop"`.
    // resume = changes, worker = run
    pub max_uses: u32,
    /// Whether a trajectory is skipped if the buffer has one of the same task with the same tokens, as in TBA.
    // resume = changes, worker = run
    pub dedup: bool,
    /// Capacity for stored groups in their written form, MiB. While the buffer is full, no new group starts.
    // resume = changes, worker = run
    pub max_mib: u64,
    /// For `store = "http"`: URL of the buffer server, such as `http://127.0.0.1:8700`. For `store = "postgres"`: URL of the
    /// database, such as `postgres://rlrun@db:5432/rlrun`, without a password, which is that of PGPASSWORD or of the password
    /// file of libpq; with several hosts, `postgres://rlrun@a,b/rlrun`, the one that accepts writes.
    // resume = changes, worker = ignored
    pub url: Option<String>,
    /// For `store = "postgres"`: schema of the database for this run; by default `rlrun_` and the name of the run directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = groups, worker = ignored
    pub schema: Option<String>,
    /// For `store = "http"`: a file with the token of the role `admin`, if the server requires one. For `listen`: a file
    /// with one token per role, in lines such as `writer TOKEN`, `trainer TOKEN`, `admin TOKEN`. Without the file a loopback
    /// address accepts every request.
    // resume = changes, worker = ignored
    pub token_file: Option<PathBuf>,
    /// Address on which the run serves HTTP, such as `127.0.0.1:8700`. Clients can inspect the run, add groups, and join
    /// with `rlrun worker rollout --join http://127.0.0.1:8700`. On an address that other machines can reach, the run encrypts
    /// and wants a token; what is not given of `token_file` and `tls_cert` it makes itself (`credentials`).
    // resume = changes, worker = ignored
    pub listen: Option<SocketAddr>,
    /// For `listen`: directory in which the run makes the tokens and the certificate authority that are not given, `tokens` and
    /// `ca.pem` for workers; what is there is used. By default `credentials` in the run directory, for an address that other
    /// machines can reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub credentials: Option<PathBuf>,
    /// For `listen`: certificate chain, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub tls_cert: Option<PathBuf>,
    /// For `listen`: the private key of `tls_cert`, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub tls_key: Option<PathBuf>,
    /// For `listen`: whether tokens may cross the network without TLS.
    // resume = changes, worker = ignored
    pub insecure: bool,
}

impl Default for BufferSection {
    fn default() -> Self {
        // AReaL measures no loss of quality up to 8 with the corrected loss, and full throughput from 2. 4 has a margin on
        // both sides and is the default of TRL and SkyRL.
        Self {
            batch_groups: 32,
            max_staleness: 4,
            adapt_staleness: false,
            on_stale: OnStale::Wait,
            store: StoreWord::Redb,
            order: SampleOrder::Fifo,
            reward_temperature: 1.0,
            max_uses: 1,
            dedup: false,
            max_mib: 16 << 10,
            url: None,
            schema: None,
            token_file: None,
            listen: None,
            credentials: None,
            tls_cert: None,
            tls_key: None,
            insecure: false,
        }
    }
}

/// `[weights]`: transfer of policy versions to samplers. Within a process trainer and sampler share memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Weights {
    /// Transport to samplers in other processes. With `auto`, samplers on this host map shared memory and samplers elsewhere
    /// use HTTP; with `http`, all use HTTP. Two transports go from device to device without a copy in host memory: with
    /// `cuda-ipc`, samplers on the trainer's host map the memory of its device; with `nccl`, the trainer's device
    /// broadcasts to samplers that have other GPUs, on any host.
    // resume = changes, worker = run
    pub transport: WeightTransport,
    /// Number format of the transferred weights: `f32`, the trained weights, or `bf16`, rounded and half the size. The
    /// mismatch from rounding is measured and corrected as any other mismatch. prime-rl `weight_broadcast` and vLLM sample
    /// in bf16.
    // resume = changes, worker = run
    pub dtype: WeightDtypeWord,
    /// Pushes over HTTP between two full transfers; the pushes between send only changed weights. 1 sends all weights
    /// always.
    // resume = changes, worker = run
    pub full_every: usize,
    /// Whether transfers over HTTP are compressed with zstd. For slow networks.
    // resume = changes, worker = run
    pub compress: bool,
    /// Most samplers that fetch a version over HTTP from the run, or from one relay, if there are relays
    /// (`rlrun worker rollout --relay`); 0: all from the run. INTELLECT-2 SHARDCAST.
    // resume = changes, worker = run
    pub fanout: usize,
}

impl Default for Weights {
    fn default() -> Self {
        Self {
            transport: WeightTransport::Auto,
            dtype: WeightDtypeWord::F32,
            full_every: 20,
            compress: false,
            fanout: 4,
        }
    }
}

/// `[checkpoint]`: checkpoints that a run resumes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// Steps between checkpoints; 0 writes one at the end only. TRL `save_steps`, verl `save_freq`.
    // resume = changes, worker = ignored
    pub interval: u64,
    /// Number of newest checkpoints that are kept. TRL `save_total_limit`, verl `max_actor_ckpt_to_keep`.
    // resume = changes, worker = ignored
    pub keep_last: usize,
    /// Checkpoints of versions that are multiples of this number are never deleted; 0 for none.
    // resume = changes, worker = ignored
    pub keep_every: u64,
    /// Whether training continues while a copy of the state is written. Without it steps wait, and no copy uses memory.
    // resume = changes, worker = ignored
    pub asynchronous: bool,
    /// Archive of the run: an object store (`s3://BUCKET/RUN`, `gs://BUCKET/RUN`, `az://CONTAINER/RUN`) or a directory that
    /// other machines see (`file:///DIRECTORY`), one for each run. Every checkpoint, with recipe, metrics, samples and logs, is
    /// stored there too, and counts as durable once it is: `rlrun resume URL` continues the run on another machine. Credentials
    /// and endpoints come from the variables of the store, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL. Needs a program
    /// with the feature `object-store`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub url: Option<String>,
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self { interval: 50, keep_last: 2, keep_every: 0, asynchronous: true, url: None }
    }
}

/// `[deadlines]`: time limits; every wait has one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Deadlines {
    /// Seconds that a role waits for another before the run stops with a report of the waiting roles.
    // resume = changes, worker = run
    pub wait_s: f64,
    /// Seconds without progress after which the watchdog reports which role waits for which; the run continues.
    // resume = changes, worker = run
    pub quiet_s: f64,
    /// Seconds without a heartbeat after which a process counts as dead. The controller kills and restarts a process that it
    /// started; the run deregisters a process that was started elsewhere.
    // resume = changes, worker = run
    pub heartbeat_s: f64,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self { wait_s: 600.0, quiet_s: 60.0, heartbeat_s: 30.0 }
    }
}
