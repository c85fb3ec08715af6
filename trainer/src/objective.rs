//! The loss of an update over its rows, and the statistics that the step reports.
//!
//! ```text
//! sum over tokens of  weight * (correction * policy loss + kl_coef * divergence - entropy_coef * entropy + ...)
//! ```

use std::cmp::Ordering;

use model::{Prediction, PredictionGradient, RoutedTokens};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use crate::algorithm::{Algorithm, Proximal};
use crate::batch::BatchRow;
use crate::learner::RowLoss;
use crate::loss::correction::{CorrectionWeights, interpolated};
use crate::loss::trajectory_balance::{self, Balance};
use crate::loss::value::{self, ValuePrediction};
use crate::loss::{LossRow, PolicyLoss, Ratio, TokenLoss, weighted};
use crate::loss_inputs::LossInputs;
use crate::report::{ExpertLoads, LogprobMismatch, TokenSums};
use crate::token_log::TokenLog;

/// The policy loss of an algorithm over the rows of one minibatch.
#[derive(Debug)]
pub struct PolicyObjective<'a> {
    /// The algorithm.
    pub algorithm: &'a Algorithm,
    /// The minibatch.
    pub rows: &'a [BatchRow<'a>],
    /// Loss inputs of each row, `[rows]`.
    pub inputs: &'a [LossInputs],
    /// Trajectory balance: `log Z` of each row's group, `[rows]`; otherwise empty.
    pub log_z: Vec<f64>,
    /// The value loss, if the policy has the value head.
    pub critic: Option<ValueLossConfig>,
    /// Whether behavior log-probabilities are compared with those at the start of the step, which are the current ones
    /// if `inputs` has none.
    pub compares_sampler: bool,
    /// The version at the start of the step, if its samples must have exactly the trainer's log-probabilities.
    pub bitwise: Option<PolicyVersion>,
    /// Where log-probabilities at the start of the step are reported, and the index of the first row there.
    pub token_log: Option<(&'a TokenLog, usize)>,
}

/// The value loss of a critic.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValueLossConfig {
    /// Coefficient beside the policy loss; 1 for a separate critic.
    pub coef: f64,
    /// Largest change of a value in a step (PPO value clipping); `None` for no clip.
    pub clip: Option<f64>,
}

/// The loss of a separate critic.
#[derive(Debug)]
pub struct ValueObjective<'a> {
    /// Loss inputs of each row, `[rows]`.
    pub inputs: &'a [LossInputs],
    /// The loss.
    pub term: ValueLossConfig,
}

impl RowLoss for PolicyObjective<'_> {
    type Report = TokenSums;

    fn row(
        &self,
        index: usize,
        predictions: &[Prediction],
        report: &mut TokenSums,
    ) -> Vec<PredictionGradient> {
        let wide = |prediction: &Prediction| Predicted {
            logprob: f64::from(prediction.logprob),
            entropy: f64::from(prediction.entropy),
            value: f64::from(prediction.value),
        };
        let predictions: Vec<Predicted> = predictions.iter().map(wide).collect();
        let narrow = |slope: Predicted| PredictionGradient {
            logprob: slope.logprob as f32,
            entropy: slope.entropy as f32,
            value: slope.value as f32,
        };
        self.gradients(index, &predictions, report).into_iter().map(narrow).collect()
    }

    fn routed(&self, layers: &[RoutedTokens], report: &mut TokenSums) {
        report.experts.add(layers);
    }

    fn loads(report: &TokenSums) -> Option<&ExpertLoads> {
        Some(&report.experts)
    }
}

/// Predictions of the network for one token, or derivatives of the loss by them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Predicted {
    /// Log-probability, nats.
    pub logprob: f64,
    /// Entropy, nats.
    pub entropy: f64,
    /// Value of the critic head.
    pub value: f64,
}

impl PolicyObjective<'_> {
    /// Derivatives `[T]` of the loss by the `predictions [T]` of row `index`; statistics are added to `report`.
    pub fn gradients(
        &self,
        index: usize,
        predictions: &[Predicted],
        report: &mut TokenSums,
    ) -> Vec<Predicted> {
        let inputs = &self.inputs[index];
        let current: Vec<f64> = predictions.iter().map(|prediction| prediction.logprob).collect();
        let proximal = self.proximal(inputs, &current);
        let corrected = match &inputs.correction {
            Some(corrected) => corrected,
            None => &self.algorithm.correction.weights(&proximal, &inputs.behavior_logprobs),
        };
        let losses = self.losses(index, &current, &proximal);
        let mut gradients = Vec::with_capacity(predictions.len());
        for (t, (prediction, token)) in predictions.iter().zip(&losses).enumerate() {
            let (gradient, sums) = self.token(inputs, t, prediction, token, corrected);
            gradients.push(gradient);
            report.merge(&sums);
        }
        if !inputs.demonstration {
            self.compare(index, &current, corrected, &losses, report);
        }
        gradients
    }

    /// Proximal log-probabilities `[T]`, nats.
    fn proximal(&self, inputs: &LossInputs, current: &[f64]) -> Vec<f64> {
        match (&inputs.proximal_logprobs, self.algorithm.proximal) {
            (Some(proximal), _) => proximal.clone(),
            (None, Proximal::Interpolate) => current
                .iter()
                .zip(&inputs.behavior_logprobs)
                .zip(&inputs.staleness)
                .map(|((current, behavior), staleness)| interpolated(*current, *behavior, *staleness))
                .collect(),
            (None, Proximal::Recompute | Proximal::Behavior) => current.to_vec(),
        }
    }

    fn losses(&self, index: usize, current: &[f64], proximal: &[f64]) -> Vec<TokenLoss> {
        let inputs = &self.inputs[index];
        let row = LossRow {
            current,
            proximal,
            behavior: &inputs.behavior_logprobs,
            advantages: &inputs.advantages,
        };
        match self.algorithm.loss {
            _ if inputs.demonstration => weighted::nll(row),
            PolicyLoss::TrajectoryBalance { beta } => {
                trajectory_balance::row(balance(inputs, current), self.log_z[index], beta, current.len())
            }
            loss => loss.row(row),
        }
    }

    /// Gradient and statistics of one token.
    fn token(
        &self,
        inputs: &LossInputs,
        t: usize,
        prediction: &Predicted,
        token: &TokenLoss,
        corrected: &CorrectionWeights,
    ) -> (Predicted, TokenSums) {
        let algorithm = self.algorithm;
        let (weight, current) = (inputs.weights[t], prediction.logprob);
        let selected = inputs.selected.get(t).is_none_or(|selected| *selected);
        let correction = if selected { corrected.weights[t] } else { 0.0 };
        let likelihood = algorithm.nll_coef * inputs.likelihood_weights[t];
        let mut loss = correction * token.loss;
        let mut slope = correction * token.derivative;
        let mut sums = TokenSums { tokens: 1, entropy: prediction.entropy, ..TokenSums::default() };
        let mut entropy = 0.0;
        if !inputs.demonstration {
            if let Some(reference) = inputs.reference_logprobs.get(t) {
                let (divergence, derivative) = algorithm.kl.estimator.token(current, *reference);
                sums.reference_kl = divergence;
                if algorithm.kl.in_loss() {
                    loss += algorithm.kl.coef * divergence;
                    slope += algorithm.kl.coef * derivative;
                }
            }
            entropy = -algorithm.entropy_coef;
            loss += entropy * prediction.entropy;
        }
        let mut value_slope = 0.0;
        if let (Some(term), Some(target)) = (self.critic, inputs.returns.get(t)) {
            let (value_loss, derivative) = value::token(
                ValuePrediction { value: prediction.value, old: inputs.values[t], target: *target },
                term.clip,
            );
            loss += term.coef * value_loss;
            value_slope = term.coef * derivative;
            sums.value_loss = value_loss;
        }
        sums.loss = weight * loss - likelihood * current;
        let gradient = Predicted {
            logprob: weight * slope - likelihood,
            entropy: weight * entropy,
            value: weight * value_slope,
        };
        (gradient, sums)
    }

    /// Adds the statistics of the mismatch between sampler and trainer.
    fn compare(
        &self,
        index: usize,
        current: &[f64],
        corrected: &CorrectionWeights,
        losses: &[TokenLoss],
        report: &mut TokenSums,
    ) {
        let (inputs, sample) = (&self.inputs[index], self.rows[index].sample);
        let before = self.compares_sampler.then(|| inputs.start_logprobs.as_deref().unwrap_or(current));
        if let (Some((log, first)), Some(before)) = (self.token_log, before) {
            log.observe(first + index, before);
        }
        let bitwise =
            self.bitwise.is_some_and(|version| sample.versions().iter().all(|run| run.version == version));
        // With the behavior policy as the anchor, the ratio of the loss is the importance ratio.
        let anchored = self.algorithm.proximal == Proximal::Behavior && self.algorithm.loss.uses_proximal();
        for (t, behavior) in inputs.behavior_logprobs.iter().enumerate() {
            let ratio = if anchored { Ratio::of(current[t] - behavior).value } else { 1.0 };
            let weight = corrected.weights[t] * losses[t].weight * ratio;
            let masked = inputs.weights[t] == 0.0 || inputs.selected.get(t) == Some(&false);
            report.weigh((!masked).then_some((weight, losses[t].clipped)));
            report.ratios.count(current[t] - behavior);
            let Some(before) = before.map(|before| before[t]) else { continue };
            report.compare(before - behavior);
            // NaN differs too.
            let differs = bitwise && before.partial_cmp(behavior) != Some(Ordering::Equal);
            let mismatch =
                LogprobMismatch { row: index, token: t, behavior: *behavior as f32, proximal: before as f32 };
            report.mismatched = report.mismatched.or(differs.then_some(mismatch));
        }
    }
}

/// Sequence log-probabilities and reward of a row for trajectory balance; `current` is `[tokens]`, nats.
#[must_use]
pub fn balance(inputs: &LossInputs, current: &[f64]) -> Balance {
    Balance {
        current: current.iter().sum(),
        reference: inputs.reference_logprobs.iter().sum(),
        reward: inputs.reward,
    }
}

impl RowLoss for ValueObjective<'_> {
    type Report = TokenSums;

    fn row(
        &self,
        index: usize,
        predictions: &[Prediction],
        report: &mut TokenSums,
    ) -> Vec<PredictionGradient> {
        let inputs = &self.inputs[index];
        let token = |(t, prediction): (usize, &Prediction)| {
            let (loss, derivative) = value::token(
                ValuePrediction {
                    value: f64::from(prediction.value),
                    old: inputs.values[t],
                    target: inputs.returns[t],
                },
                self.term.clip,
            );
            let weight = self.term.coef * inputs.weights[t];
            report.merge(&TokenSums { tokens: 1, value_loss: loss, ..TokenSums::default() });
            PredictionGradient { value: (weight * derivative) as f32, ..PredictionGradient::default() }
        };
        predictions.iter().enumerate().map(token).collect()
    }
}
