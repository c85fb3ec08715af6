//! The words that keys of a recipe accept.
//!
//! Invariant: a word is the snake-case name of its variant. The crate that implements a word defines its type; this module
//! defines only the words that the program itself implements.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

pub use buffer::OnStale;
pub use device::device::DeviceLocation;
pub use islands::GradientCompression;
pub use model::{Architecture, Placement as ModelPlacement, Quantization, Recompute, Reduction};
pub use rollout::engine::Speculation;
pub use rollout::tasks::QuestionKind;
pub use rollout::{OnUpdate, Overlong};
pub use trainer::advantage::ScaleRewards;
pub use trainer::algorithm::{AlgorithmKind, EntropyUnit, Proximal};
pub use trainer::critic::CriticKind;
pub use trainer::lora::TargetModule;
pub use trainer::loss::kl::KlPlacement;
pub use trainer::loss::{Aggregation, KlEstimator};
pub use trainer::optimizer::OptimizerKind;
pub use trainer::schedule::ScheduleShape;
use weights::http::remote::RemoteTransport;

/// Storage of groups between rollout and trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreWord {
    /// A journal in the run directory; a crash loses no acknowledged group.
    #[default]
    Redb,
    /// Memory only; a crash loses the stored groups.
    Memory,
    /// A buffer that `rlrun serve buffer` serves at `buffer.url`.
    Http,
    /// The PostgreSQL database at `buffer.url`; the loss of the run's machine loses no acknowledged group. Needs a program that
    /// was built with `--features postgres`.
    Postgres,
}

impl StoreWord {
    /// The words of the stores that are part of the run, for messages.
    pub const OWN: &str = "\"redb\" or \"memory\"";

    /// Whether this program has it.
    #[must_use]
    pub fn is_built(self) -> bool {
        self != Self::Postgres || cfg!(feature = "postgres")
    }

    /// Whether another process serves the buffer.
    #[must_use]
    pub fn is_remote(self) -> bool {
        self == Self::Http
    }

    /// Whether the groups are in a journal of the run directory.
    #[must_use]
    pub fn has_journal(self) -> bool {
        self == Self::Redb
    }

    /// Whether the stored groups survive a crash of the run.
    #[must_use]
    pub fn is_durable(self) -> bool {
        self != Self::Memory
    }
}

/// What samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineWord {
    /// The engine of rlrun.
    #[default]
    Own,
    /// vLLM, started with `--enable-scale-out` and VLLM_SERVER_DEV_MODE=1.
    Vllm,
    /// SGLang.
    Sglang,
}

impl FromStr for EngineWord {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "own" => Ok(Self::Own),
            "vllm" => Ok(Self::Vllm),
            "sglang" => Ok(Self::Sglang),
            _ => Err(format!("`{word}` is no engine: own, vllm or sglang")),
        }
    }
}

/// Logs of Weights & Biases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WandbLog {
    /// None.
    #[default]
    Off,
    /// Files that `wandb sync` uploads.
    Offline,
    /// The same, uploaded while they are written by the user's `wandb` program.
    Online,
}

/// Form of the trainer's ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ranks {
    /// Threads of the process.
    #[default]
    Threads,
    /// Processes that join the run.
    Processes,
    /// Processes that `mpirun` has started.
    Mpi,
}

/// Transport of weights to samplers in other processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightTransport {
    /// Shared memory on this host, HTTP elsewhere.
    #[default]
    Auto,
    /// HTTP for all samplers.
    Http,
    /// Samplers of this host map the memory of the trainer's device.
    #[serde(rename = "cuda-ipc")]
    CudaIpc,
    /// The trainer's device broadcasts to the devices of all samplers.
    Nccl,
}

impl WeightTransport {
    /// Whether weights go from device to device.
    #[must_use]
    pub fn is_between_devices(self) -> bool {
        matches!(self, Self::CudaIpc | Self::Nccl)
    }

    /// Whether the publisher writes its versions to shared memory too.
    #[must_use]
    pub fn publishes_to_shared_memory(self) -> bool {
        self == Self::Auto
    }

    /// How a subscriber in another process receives weights through host memory.
    #[must_use]
    pub fn remote(self) -> RemoteTransport {
        match self {
            Self::Auto | Self::CudaIpc | Self::Nccl => RemoteTransport::Any,
            Self::Http => RemoteTransport::Http,
        }
    }

    /// The word of the recipe.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Http => "http",
            Self::CudaIpc => "cuda-ipc",
            Self::Nccl => "nccl",
        }
    }
}

/// Number format of the sampler's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightDtypeWord {
    /// The trained weights, without rounding.
    #[default]
    F32,
    /// The trained weights, rounded to 16 bits.
    Bf16,
}

/// Number format of weights and activations on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelDtype {
    /// The fast format of the device: bf16 on CUDA, f32 elsewhere.
    #[default]
    Auto,
    /// 32 bits per number.
    F32,
    /// 16 bits per number, with the exponent range of f32.
    Bf16,
}

/// Memory of what a role on a device works with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlaceWord {
    /// On the device.
    #[default]
    Device,
    /// In host memory.
    Host,
}

/// Transport of gradients and weights between ranks on devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveWord {
    /// `device` if its requirements are met, otherwise `host`.
    #[default]
    Auto,
    /// From device to device, with NCCL.
    Device,
    /// Through host memory.
    Host,
}

/// Device of a role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceWord {
    /// On the processor.
    #[default]
    Cpu,
    /// On a device.
    At(DeviceLocation),
}

impl DeviceWord {
    /// The device, if it is one.
    #[must_use]
    pub fn place(self) -> Option<DeviceLocation> {
        match self {
            Self::Cpu => None,
            Self::At(place) => Some(place),
        }
    }
}

impl fmt::Display for DeviceWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::At(place) => place.fmt(f),
        }
    }
}

impl FromStr for DeviceWord {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "cpu" {
            return Ok(Self::Cpu);
        }
        text.parse().map(Self::At).map_err(|error| format!("{error}, or \"cpu\""))
    }
}

impl Serialize for DeviceWord {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DeviceWord {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = DeviceWord;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<DeviceWord, E> {
                text.parse().map_err(E::custom)
            }
        }
        from.deserialize_str(Visitor)
    }
}

/// How sampler and trainer share the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyPlacement {
    /// Sampler and trainer alternate; the idle role frees its device memory.
    Colocated,
    /// Sampler and trainer run at the same time, each with its memory; they share the cores.
    #[default]
    Separated,
}

/// Order in which a training step takes groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleOrder {
    /// The oldest version first.
    #[default]
    Fifo,
    /// The newest version first.
    Recency,
    /// Random, with weights by the mean reward.
    Reward,
    /// Random, with equal weights.
    Uniform,
}

impl SampleOrder {
    /// The buffer's order; `temperature` applies to `reward`.
    #[must_use]
    pub fn with(self, temperature: f64) -> buffer::Order {
        match self {
            Self::Fifo => buffer::Order::Fifo,
            Self::Recency => buffer::Order::Recency,
            Self::Reward => buffer::Order::Reward { temperature },
            Self::Uniform => buffer::Order::Uniform,
        }
    }
}

/// Off-policy corrections. `behavior_weight_cap` and `behavior_weight_floor` are their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionKind {
    /// No correction.
    None,
    /// The weight of a token is at most the cap.
    TokenTruncate,
    /// The weight of a sequence is at most the cap.
    SequenceTruncate,
    /// Tokens with a ratio outside the bounds are masked; the weight of the others is their ratio (IcePop).
    TokenMask,
    /// Sequences with a ratio (the product over tokens) outside the bounds are masked; the weight of the others is their
    /// ratio (verl `decoupled_seq_is_rs`, TRL `sequence_mask`).
    SequenceMask,
    /// Sequences with a geometric mean of the tokens' ratios outside the bounds are masked. In the others the weight of a
    /// token is its ratio, at most 2 (verl `decoupled_geo_rs_token_tis`).
    GeometricMask,
    /// Sequences with a divergence (mean k3, nats) above the cap are masked. In the others the weight of a token is its
    /// ratio, at most 2 (verl `decoupled_k3_rs_token_tis`).
    K3Mask,
}

/// Training objectives without sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SupervisedKind {
    /// Supervised fine-tuning: the likelihood of demonstrations.
    #[default]
    Sft,
    /// Direct preference optimization (arXiv 2305.18290).
    Dpo,
    /// Identity preference optimization, which does not overfit certain preferences (arXiv 2310.12036).
    Ipo,
    /// A reward model of completions (Bradley-Terry).
    RewardModel,
}

impl SupervisedKind {
    /// Whether it learns from pairs of completions.
    #[must_use]
    pub fn has_pairs(self) -> bool {
        self != Self::Sft
    }

    /// The word of the recipe.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Dpo => "dpo",
            Self::Ipo => "ipo",
            Self::RewardModel => "reward_model",
        }
    }
}
