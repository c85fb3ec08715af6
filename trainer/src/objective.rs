//! The loss of a step over its rows, and what the step reports of it.
//!
//! ```text
//! sum over tokens of  weight * (correction * policy loss + kl_coef * divergence - entropy_coef * entropy + ...)
//! ```

use std::cmp::Ordering;

use model::{Prediction, PredictionGradient};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use crate::algorithm::{Algorithm, Proximal};
use crate::batch::Row;
use crate::learner::RowLoss;
use crate::loss::correction::{Corrected, interpolated};
use crate::loss::trajectory_balance::{self, Balance};
use crate::loss::{PolicyLoss, Ratio, RowTerms, TokenLoss, value, weighted};
use crate::report::{Mismatch, TokenSums};
use crate::terms::Terms;

/// The loss of an algorithm over the rows of one minibatch.
#[derive(Debug)]
pub struct PolicyObjective<'a> {
    /// The algorithm.
    pub algorithm: &'a Algorithm,
    /// The minibatch.
    pub rows: &'a [Row<'a>],
    /// What is known of each row before the forward pass.
    pub terms: &'a [Terms],
    /// Of trajectory balance: the normaliser of each row's group; otherwise empty.
    pub log_z: Vec<f64>,
    /// Weight and clip of the value loss, if the policy is its own critic.
    pub critic: Option<ValueTerm>,
    /// Whether what the sampler recorded is compared with the policy before the step, which is the one being differentiated
    /// where `terms` do not have it.
    pub compares: bool,
    /// The version before the step, if what it has sampled must have the bits that it computes now.
    pub bitwise: Option<PolicyVersion>,
}

/// How the value loss enters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValueTerm {
    /// Its factor beside the policy's loss; 1 for a critic of its own.
    pub coef: f64,
    /// How far a value may move in a step; `None` for any.
    pub clip: Option<f64>,
}

/// The loss of a critic of its own.
#[derive(Debug)]
pub struct ValueObjective<'a> {
    /// What is known of each row.
    pub terms: &'a [Terms],
    /// The loss.
    pub term: ValueTerm,
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
}

/// What is predicted of a token, or derivatives by it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Predicted {
    /// Log-probability, nats.
    pub logprob: f64,
    /// Entropy, nats.
    pub entropy: f64,
    /// Value.
    pub value: f64,
}

impl PolicyObjective<'_> {
    /// Derivatives of the loss by the predictions of row `index`; what it says of them is added to `report`.
    pub fn gradients(
        &self,
        index: usize,
        predictions: &[Predicted],
        report: &mut TokenSums,
    ) -> Vec<Predicted> {
        let terms = &self.terms[index];
        let current: Vec<f64> = predictions.iter().map(|prediction| prediction.logprob).collect();
        let proximal = self.proximal(terms, &current);
        let corrected = match &terms.corrected {
            Some(corrected) => corrected,
            None => &self.algorithm.correction.of(&proximal, &terms.behavior),
        };
        let losses = self.losses(index, &current, &proximal);
        let mut gradients = Vec::with_capacity(predictions.len());
        for (t, (prediction, token)) in predictions.iter().zip(&losses).enumerate() {
            let (gradient, sums) = self.token(terms, t, prediction, token, corrected);
            gradients.push(gradient);
            report.merge(&sums);
        }
        if !terms.demonstration {
            self.compare(index, &current, corrected, &losses, report);
        }
        gradients
    }

    /// The policy that anchors the loss, at every token.
    fn proximal(&self, terms: &Terms, current: &[f64]) -> Vec<f64> {
        match (&terms.proximal, self.algorithm.proximal) {
            (Some(proximal), _) => proximal.clone(),
            (None, Proximal::Interpolate) => current
                .iter()
                .zip(&terms.behavior)
                .zip(&terms.staleness)
                .map(|((current, behavior), staleness)| interpolated(*current, *behavior, *staleness))
                .collect(),
            (None, Proximal::Recompute | Proximal::Behavior) => current.to_vec(),
        }
    }

    fn losses(&self, index: usize, current: &[f64], proximal: &[f64]) -> Vec<TokenLoss> {
        let terms = &self.terms[index];
        let row = RowTerms { current, proximal, behavior: &terms.behavior, advantages: &terms.advantages };
        match self.algorithm.loss {
            _ if terms.demonstration => weighted::nll(row),
            PolicyLoss::TrajectoryBalance { beta } => {
                trajectory_balance::row(balance(terms, current), self.log_z[index], beta, current.len())
            }
            loss => loss.row(row),
        }
    }

    /// Gradient of one token, and what it adds to the sums.
    fn token(
        &self,
        terms: &Terms,
        t: usize,
        prediction: &Predicted,
        token: &TokenLoss,
        corrected: &Corrected,
    ) -> (Predicted, TokenSums) {
        let algorithm = self.algorithm;
        let (weight, current) = (terms.weights[t], prediction.logprob);
        let selected = terms.selected.get(t).is_none_or(|selected| *selected);
        let correction = if selected { corrected.weights[t] } else { 0.0 };
        let likelihood = algorithm.nll_coef * terms.likelihood_weights[t];
        let mut loss = correction * token.loss;
        let mut slope = correction * token.derivative;
        let mut sums = TokenSums { tokens: 1, entropy: prediction.entropy, ..TokenSums::default() };
        let mut entropy = 0.0;
        if !terms.demonstration {
            if let Some(reference) = terms.reference.get(t) {
                let (divergence, derivative) = algorithm.divergence.estimator.token(current, *reference);
                sums.reference_divergence = divergence;
                if algorithm.divergence.in_loss() {
                    loss += algorithm.divergence.coef * divergence;
                    slope += algorithm.divergence.coef * derivative;
                }
            }
            entropy = -algorithm.entropy_coef;
            loss += entropy * prediction.entropy;
        }
        let mut value_slope = 0.0;
        if let (Some(term), Some(target)) = (self.critic, terms.returns.get(t)) {
            let (value_loss, derivative) =
                value::token(prediction.value, terms.values[t], *target, term.clip);
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

    /// What the row says of the difference between sampler and trainer.
    fn compare(
        &self,
        index: usize,
        current: &[f64],
        corrected: &Corrected,
        losses: &[TokenLoss],
        report: &mut TokenSums,
    ) {
        let (terms, sample) = (&self.terms[index], self.rows[index].sample);
        let before = self.compares.then(|| terms.before.as_deref().unwrap_or(current));
        let bitwise =
            self.bitwise.is_some_and(|version| sample.versions().iter().all(|run| run.version == version));
        // Anchored at the sampler, the ratio of the loss is the importance weight.
        let anchored = self.algorithm.proximal == Proximal::Behavior && self.algorithm.loss.uses_proximal();
        for (t, behavior) in terms.behavior.iter().enumerate() {
            let ratio = if anchored { Ratio::of(current[t] - behavior).value } else { 1.0 };
            let weight = corrected.weights[t] * losses[t].weight * ratio;
            let masked = terms.weights[t] == 0.0 || terms.selected.get(t) == Some(&false);
            report.weigh((!masked).then_some((weight, losses[t].clipped)));
            let Some(before) = before.map(|before| before[t]) else { continue };
            report.compare(before - behavior);
            // Not a number is no match either.
            let differs = bitwise && before.partial_cmp(behavior) != Some(Ordering::Equal);
            let mismatch =
                Mismatch { row: index, token: t, behavior: *behavior as f32, proximal: before as f32 };
            report.mismatched = report.mismatched.or(differs.then_some(mismatch));
        }
    }
}

/// A row as its group's trajectory balance sees it.
#[must_use]
pub fn balance(terms: &Terms, current: &[f64]) -> Balance {
    Balance { current: current.iter().sum(), reference: terms.reference.iter().sum(), reward: terms.reward }
}

impl RowLoss for ValueObjective<'_> {
    type Report = TokenSums;

    fn row(
        &self,
        index: usize,
        predictions: &[Prediction],
        report: &mut TokenSums,
    ) -> Vec<PredictionGradient> {
        let terms = &self.terms[index];
        let token = |(t, prediction): (usize, &Prediction)| {
            let (loss, derivative) =
                value::token(f64::from(prediction.value), terms.values[t], terms.returns[t], self.term.clip);
            let weight = self.term.coef * terms.weights[t];
            report.merge(&TokenSums { tokens: 1, value_loss: loss, ..TokenSums::default() });
            PredictionGradient { value: (weight * derivative) as f32, ..PredictionGradient::default() }
        };
        predictions.iter().enumerate().map(token).collect()
    }
}
