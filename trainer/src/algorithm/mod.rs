//! Algorithms: what an advantage is, what a token's loss is, how losses add up.
//!
//! Invariant: an algorithm is arithmetic on host numbers. It is handed log-probabilities and returns, per token, the
//! loss and its derivative by the current log-probability; it knows no tensor, so every formula stands in one place
//! and is tested against finite differences.

pub mod advantage;
pub mod grpo;

use serde::{Deserialize, Serialize};

/// How token losses of one minibatch add up.
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
}

/// Token counts that an aggregation divides by. Zero-variance groups count too: leaving them out of the computation
/// must not change the step.
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
    pub fn token_weight(self, counts: &Counts) -> f32 {
        let divisor = match self {
            Self::TokenMean => counts.batch_tokens,
            Self::SequenceMean => counts.batch_sequences * counts.sequence_tokens,
            Self::PromptMean => counts.batch_groups * counts.group_tokens,
            Self::Constant => counts.batch_sequences * counts.max_completion_length,
        };
        1.0 / divisor.max(1) as f32
    }
}

/// Log-probabilities of one token under the policies that a loss knows, nats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Under the policy being differentiated.
    pub current: f32,
    /// Under the policy that anchors the clip.
    pub proximal: f32,
    /// Under the distribution that sampled the token.
    pub behavior: f32,
}

/// What a loss says of one token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenLoss {
    /// The loss, unweighted.
    pub loss: f32,
    /// Its derivative by the current log-probability.
    pub derivative: f32,
    /// Which bound of the clip took the gradient away.
    pub clipped: Clipped,
    /// The factor that corrects for the behavior policy.
    pub behavior_weight: f32,
}

/// Which bound of the clip took the gradient away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clipped {
    /// Neither.
    #[default]
    No,
    /// The ratio fell below `1 - clip_eps_low` with a negative advantage.
    Low,
    /// The ratio rose above `1 + clip_eps_high` with a positive advantage.
    High,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_a_batch_add_up_to_one() {
        // Two groups of two trajectories with 1, 3 | 2, 6 tokens.
        let groups = [[1, 3], [2, 6]];
        for aggregation in [Aggregation::TokenMean, Aggregation::SequenceMean, Aggregation::PromptMean] {
            let mut total = 0.0;
            for group in groups {
                for tokens in group {
                    let counts = Counts {
                        sequence_tokens: tokens,
                        group_tokens: group.iter().sum(),
                        batch_tokens: 12,
                        batch_sequences: 4,
                        batch_groups: 2,
                        max_completion_length: 8,
                    };
                    total += aggregation.token_weight(&counts) * tokens as f32;
                }
            }
            assert!((total - 1.0).abs() < 1e-6, "{aggregation:?}: {total}");
        }
    }
}
