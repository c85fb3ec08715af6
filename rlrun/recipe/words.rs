//! The words that keys of a recipe accept.
//!
//! Invariant: a word is the snake-case name of its variant. What a word does is decided by the code that reads it.

use serde::{Deserialize, Serialize};

/// Families of decoders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    /// Llama 2 and 3.
    Llama,
    /// Mistral.
    Mistral,
    /// Qwen 2 and 2.5.
    #[default]
    Qwen2,
    /// Qwen 3.
    Qwen3,
}

/// What happens to a prompt over `data.max_prompt_length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OverlongPrompts {
    /// The run does not start and names the row.
    #[default]
    Error,
    /// The task is left out and counted.
    Drop,
}

/// What happens to sequences in flight when new weights arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnUpdate {
    /// They go on with the KV cache of the old weights (PipelineRL).
    #[default]
    Keep,
    /// Their KV cache is computed again under the new weights (AReaL).
    Recompute,
    /// They finish under the old weights first.
    Drain,
}

/// Built-in rewards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardKind {
    /// The answer is mathematically equal to the reference.
    Math,
    /// The answer after `####` equals the reference, as verl's GSM8K score.
    Gsm8k,
    /// The completion equals the reference answer.
    Exact,
    /// A pattern is found in the completion.
    Regex,
    /// The whole completion has the expected form.
    Format,
    /// Completions near the length limit are punished (DAPO).
    Length,
}

impl RewardKind {
    /// The word used in recipes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Math => "math",
            Self::Gsm8k => "gsm8k",
            Self::Exact => "exact",
            Self::Regex => "regex",
            Self::Format => "format",
            Self::Length => "length",
        }
    }
}

/// How the `gsm8k` reward finds the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gsm8kMethod {
    /// Only after `####`.
    Strict,
    /// The last number.
    Flexible,
}

/// What a failed reward call does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The trajectory is not trained on, and counted.
    #[default]
    Skip,
    /// The component counts as 0; the error stays recorded.
    Zero,
    /// The run stops.
    Fail,
}

/// What happens to a group over the staleness bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnStale {
    /// Admission is paced so that none gets over it; one that would is an error.
    #[default]
    Wait,
    /// It is dropped and counted, its task put back first in line.
    Drop,
}

/// Where groups wait for the trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Store {
    /// A journal in the run directory that survives crashes.
    #[default]
    Redb,
    /// Memory only; a crash loses what waits.
    Memory,
}

/// Algorithms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmKind {
    /// Group-relative policy optimisation with decoupled clipping.
    #[default]
    Grpo,
}

/// What rewards are divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The standard deviation of the group.
    #[default]
    Group,
    /// Nothing (Dr. GRPO).
    None,
}

/// How token losses are averaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossAgg {
    /// Over all tokens of the batch (DAPO). verl `token-mean`.
    #[default]
    TokenMean,
    /// Over the tokens of a sequence, then over sequences. verl `seq-mean-token-mean`.
    SequenceMean,
    /// Over the tokens of a prompt's group, then over prompts.
    PromptMean,
    /// Sum over tokens divided by a constant (Dr. GRPO). verl `seq-mean-token-sum-norm`.
    Constant,
}

/// Course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays.
    #[default]
    Constant,
    /// Falls to 0 in a line.
    Linear,
    /// Falls to 0 along a half cosine.
    Cosine,
}
