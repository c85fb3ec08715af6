//! The words that keys of a recipe accept.
//!
//! Invariant: a word is the snake-case name of its variant, and the type of a word belongs to the crate that acts on it;
//! here stand only the words that the program itself acts on.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

pub use buffer::OnStale;
pub use device::device::DeviceLocation;
pub use model::{Architecture, Placement as ModelPlacement, Quantization, Recompute, Reduction};
pub use rollout::{OnUpdate, Overlong};
pub use trainer::advantage::ScaleRewards;
pub use trainer::algorithm::{AlgorithmKind, Proximal};
pub use trainer::critic::CriticKind;
pub use trainer::lora::TargetModule;
pub use trainer::loss::kl::KlPlacement;
pub use trainer::loss::{Aggregation, KlEstimator};
pub use trainer::optimizer::OptimizerKind;
pub use trainer::schedule::ScheduleShape;

/// Where groups wait between rollout and trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreWord {
    /// A journal in the run directory; nothing acknowledged is lost in a crash.
    #[default]
    Redb,
    /// Memory only; a crash loses what waits.
    Memory,
    /// A buffer that `rlrun serve buffer` serves at `buffer.url`.
    Http,
}

/// What the workers of a trainer are.
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

/// How samplers in other processes get weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightTransport {
    /// From shared memory on this host, over HTTP elsewhere.
    #[default]
    Auto,
    /// Over HTTP.
    Http,
    /// Samplers of this host map the memory of the trainer's device.
    #[serde(rename = "cuda-ipc")]
    CudaIpc,
    /// The trainer's device broadcasts to those of all samplers.
    Nccl,
}

impl WeightTransport {
    /// Whether weights go from device to device.
    #[must_use]
    pub fn is_between_devices(self) -> bool {
        matches!(self, Self::CudaIpc | Self::Nccl)
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

/// What is sampled with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightDtypeWord {
    /// The weights as they are trained.
    #[default]
    F32,
    /// The same, rounded to the upper half of their bits.
    Bf16,
}

/// What weights and activations are stored in on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelDtype {
    /// What the device is fast with: bf16 on CUDA, f32 elsewhere.
    #[default]
    Auto,
    /// All 32 bits.
    F32,
    /// The upper 16.
    Bf16,
}

/// Where the f32 weights and the state of the optimizer are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerHome {
    /// With the weights.
    #[default]
    Device,
    /// In the memory of the machine.
    Host,
}

/// Where ranks that compute on devices exchange gradients and weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveWord {
    /// From device to device where that can be, through the host where not.
    #[default]
    Auto,
    /// From device to device, by NCCL.
    Device,
    /// Through the host.
    Host,
}

/// Where a role computes.
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
    /// They take turns, and who waits gives up its memory.
    Colocated,
    /// Both at once, each with its memory, sharing the cores.
    #[default]
    Separated,
}

/// Which groups a training step takes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleOrder {
    /// The oldest version first.
    #[default]
    Fifo,
    /// The newest version first.
    Recency,
    /// Drawn with weights by the mean reward.
    Reward,
    /// Drawn, all alike.
    Uniform,
}

impl SampleOrder {
    /// The order with the temperature that `reward` draws at.
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

/// Off-policy corrections; their bounds are keys of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionKind {
    /// Not at all.
    None,
    /// The weight of a token is at most the cap.
    TokenTruncate,
    /// The weight of a sequence is at most the cap.
    SequenceTruncate,
    /// Tokens outside the bounds are left out; the others have their ratio as weight (IcePop).
    TokenMask,
    /// Sequences whose ratio (the product over tokens) is outside the bounds are left out; the others have it as weight
    /// (verl `decoupled_seq_is_rs`, TRL `sequence_mask`).
    SequenceMask,
    /// Sequences whose geometric mean of the tokens' ratios is outside the bounds are left out; a token of the others has
    /// its ratio as weight, at most 2 (verl `decoupled_geo_rs_token_tis`).
    GeometricMask,
    /// Sequences whose divergence (mean k3, nats) is above the cap are left out; a token of the others has its ratio as
    /// weight, at most 2 (verl `decoupled_k3_rs_token_tis`).
    K3Mask,
}

/// What is learnt without sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SupervisedKind {
    /// Demonstrations, by their likelihood.
    #[default]
    Sft,
    /// Preferences (arXiv 2305.18290).
    Dpo,
    /// Preferences, without overconfidence in them (arXiv 2310.12036).
    Ipo,
    /// A score of completions (Bradley-Terry).
    RewardModel,
}

impl SupervisedKind {
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
