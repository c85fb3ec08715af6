//! How the losses of tokens add up to that of a minibatch.

use serde::{Deserialize, Serialize};

/// What the sum of token losses is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Mean over all tokens (DAPO).
    #[default]
    TokenMean,
    /// Mean over trajectories of the mean over their tokens (GRPO as published).
    SequenceMean,
    /// Mean over groups of the mean over their tokens (ScaleRL).
    PromptMean,
    /// Sum divided by trajectories times the longest completion allowed (Dr.GRPO).
    Constant,
    /// Mean over trajectories of the sum over their tokens: what the policy gradient is.
    SequenceSum,
}

/// Token counts that an aggregation divides by. Tokens that are left out because their gradient is zero count, and so do
/// those that an entropy share leaves out; those that a correction masks do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Trained tokens of the trajectory.
    pub sequence_tokens: usize,
    /// Trained tokens of its group.
    pub group_tokens: usize,
    /// Trained tokens of the minibatch.
    pub batch_tokens: usize,
    /// Trajectories of the minibatch.
    pub batch_sequences: usize,
    /// Groups of the minibatch.
    pub batch_groups: usize,
    /// Longest completion that the recipe allows, tokens.
    pub max_completion_length: usize,
}

impl Aggregation {
    /// The factor of each token's loss.
    #[must_use]
    pub fn token_weight(self, counts: &Counts) -> f64 {
        let divisor = match self {
            Self::TokenMean => counts.batch_tokens,
            Self::SequenceMean => counts.batch_sequences * counts.sequence_tokens.max(1),
            Self::PromptMean => counts.batch_groups * counts.group_tokens,
            Self::Constant => counts.batch_sequences * counts.max_completion_length,
            Self::SequenceSum => counts.batch_sequences,
        };
        1.0 / divisor.max(1) as f64
    }
}
