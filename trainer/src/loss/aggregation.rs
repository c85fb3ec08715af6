//! Aggregation: how the losses of tokens are summed to the loss of a minibatch.

use serde::{Deserialize, Serialize};

/// The denominator of the sum of token losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// Mean over all tokens (DAPO).
    #[default]
    TokenMean,
    /// Mean over trajectories of the mean over their tokens (GRPO as published, arXiv 2402.03300).
    SequenceMean,
    /// Mean over groups of the mean over their tokens (ScaleRL, arXiv 2510.13786).
    PromptMean,
    /// Sum divided by trajectories times the longest completion allowed (Dr.GRPO, arXiv 2503.20783).
    Constant,
    /// Mean over trajectories of the sum over their tokens: the plain policy gradient.
    SequenceSum,
}

/// Token counts of the denominators. Tokens that are skipped because their gradient is zero count, and so do tokens
/// without policy loss under `entropy_share`; tokens that an off-policy correction masks do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCounts {
    /// Trained tokens of the trajectory, in all its branches.
    pub sequence_tokens: usize,
    /// Trained tokens of its group.
    pub group_tokens: usize,
    /// Trained tokens of the minibatch, over all data-parallel ranks and micro-batches.
    pub batch_tokens: usize,
    /// Trajectories of the minibatch.
    pub batch_sequences: usize,
    /// Groups of the minibatch.
    pub batch_groups: usize,
    /// Longest completion that the recipe allows, tokens.
    pub max_completion_length: usize,
}

impl Aggregation {
    /// The weight of each token's loss: one over the denominator.
    #[must_use]
    pub fn token_weight(self, counts: &TokenCounts) -> f64 {
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
