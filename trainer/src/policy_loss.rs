//! The policy-gradient loss over rows, and what a step reports of it.

use std::cmp::Ordering;

use model::{Prediction, PredictionGradient};
use trajectory::PolicyVersion;

use crate::algorithm::grpo::Grpo;
use crate::algorithm::{Clipped, TokenLogprobs};
use crate::batch::Row;
use crate::learner::RowLoss;

/// The loss of an algorithm over the rows of one minibatch.
#[derive(Debug)]
pub struct PolicyLoss<'a> {
    /// The algorithm.
    pub algorithm: &'a Grpo,
    /// The minibatch.
    pub rows: &'a [Row<'a>],
    /// Log-probabilities of each row's trained tokens under the policy before the step; `None` while that is the
    /// policy being differentiated.
    pub proximal: Option<&'a [Vec<Prediction>]>,
    /// The version before the step, if what it has sampled must have the bits that it computes now.
    pub bitwise: Option<PolicyVersion>,
}

/// A token whose log-probability the sampler recorded with other bits than the trainer computes with the same weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mismatch {
    /// Row of the minibatch.
    pub row: usize,
    /// Which of the row's trained tokens.
    pub token: usize,
    /// As the sampler recorded it, nats.
    pub behavior: f32,
    /// As the trainer computes it, nats.
    pub proximal: f32,
}

/// Sums over the trained tokens of a step. Fields that are means are divided by `tokens` when reported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenSums {
    /// Number of tokens.
    pub tokens: u64,
    /// Weighted losses: already a mean over the minibatch.
    pub loss: f64,
    /// Entropy of the current policy, nats.
    pub entropy: f64,
    /// `|current - behavior|`, nats.
    pub logprob_abs_diff: f64,
    /// The largest of them.
    pub logprob_abs_diff_max: f64,
    /// `exp(d) - d - 1` with `d = current - behavior`: an estimate of the divergence of sampler and trainer (k3).
    pub mismatch: f64,
    /// Behavior weights, after the cap.
    pub behavior_weight: f64,
    /// Their squares.
    pub behavior_weight_squared: f64,
    /// The largest of them.
    pub behavior_weight_max: f64,
    /// Tokens whose gradient the lower bound of the clip took.
    pub clipped_low: u64,
    /// Tokens whose gradient the upper bound of the clip took.
    pub clipped_high: u64,
    /// The first mismatch, if there must not be one.
    pub mismatched: Option<Mismatch>,
}

impl TokenSums {
    /// Adds another rank's.
    pub fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.loss += other.loss;
        self.entropy += other.entropy;
        self.logprob_abs_diff += other.logprob_abs_diff;
        self.logprob_abs_diff_max = self.logprob_abs_diff_max.max(other.logprob_abs_diff_max);
        self.mismatch += other.mismatch;
        self.behavior_weight += other.behavior_weight;
        self.behavior_weight_squared += other.behavior_weight_squared;
        self.behavior_weight_max = self.behavior_weight_max.max(other.behavior_weight_max);
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.mismatched = self.mismatched.or(other.mismatched);
    }

    /// Mean of one of the sums over the tokens; 0 for none.
    #[must_use]
    pub fn mean(&self, sum: f64) -> f64 {
        if self.tokens == 0 { 0.0 } else { sum / self.tokens as f64 }
    }

    /// Effective sample size of the behavior weights as a share of the tokens: `(sum w)^2 / (n sum w^2)`.
    #[must_use]
    pub fn effective_share(&self) -> f64 {
        let denominator = self.tokens as f64 * self.behavior_weight_squared;
        if denominator == 0.0 { 1.0 } else { self.behavior_weight.powi(2) / denominator }
    }
}

impl RowLoss for PolicyLoss<'_> {
    type Report = TokenSums;

    fn row(
        &self,
        index: usize,
        predictions: &[Prediction],
        report: &mut TokenSums,
    ) -> Vec<PredictionGradient> {
        let row = &self.rows[index];
        let trained = row.sample.behavior_logprobs().iter().zip(row.sample.loss_mask()).filter(|(_, m)| **m);
        let bitwise = self
            .bitwise
            .is_some_and(|version| row.sample.versions().iter().all(|run| run.version == version));
        let mut slopes = Vec::with_capacity(predictions.len());
        for (t, (prediction, (behavior, _))) in predictions.iter().zip(trained).enumerate() {
            let current = prediction.logprob;
            let proximal = self.proximal.map_or(current, |proximal| proximal[index][t].logprob);
            let logprobs = TokenLogprobs { current, proximal, behavior: *behavior };
            let token = self.algorithm.token_loss(logprobs, row.advantage);
            slopes.push(PredictionGradient {
                logprob: token.derivative * row.token_weight,
                ..PredictionGradient::default()
            });

            // Not a number is no match either.
            let differs = bitwise && proximal.partial_cmp(behavior) != Some(Ordering::Equal);
            let mismatch = Mismatch { row: index, token: t, behavior: *behavior, proximal };
            let difference = f64::from(current - behavior);
            let weight = f64::from(token.behavior_weight);
            report.merge(&TokenSums {
                tokens: 1,
                loss: f64::from(token.loss * row.token_weight),
                entropy: f64::from(prediction.entropy),
                logprob_abs_diff: difference.abs(),
                logprob_abs_diff_max: difference.abs(),
                mismatch: difference.exp() - difference - 1.0,
                behavior_weight: weight,
                behavior_weight_squared: weight * weight,
                behavior_weight_max: weight,
                clipped_low: u64::from(token.clipped == Clipped::Low),
                clipped_high: u64::from(token.clipped == Clipped::High),
                mismatched: differs.then_some(mismatch),
            });
        }
        slopes
    }
}

/// Cross-entropy on demonstrations.
#[derive(Debug)]
pub struct DemonstrationLoss<'a> {
    /// The demonstrations.
    pub rows: &'a [Row<'a>],
}

impl RowLoss for DemonstrationLoss<'_> {
    /// The loss, a mean over the trained tokens of the batch.
    type Report = f64;

    fn row(&self, index: usize, predictions: &[Prediction], report: &mut f64) -> Vec<PredictionGradient> {
        let weight = self.rows[index].token_weight;
        predictions
            .iter()
            .map(|prediction| {
                *report -= f64::from(prediction.logprob * weight);
                PredictionGradient { logprob: -weight, ..PredictionGradient::default() }
            })
            .collect()
    }
}
