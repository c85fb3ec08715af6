//! Training without sampling: supervised fine-tuning on demonstrations, and preference pairs (DPO, IPO, reward models).
//!
//! Invariant: the loss of a pair depends on two rows, which may be in different micro-batches. Both are scored first
//! with the same weights, so the gradient is exact.

use std::borrow::Cow;

use model::{Prediction, PredictionGradient};
use trajectory::Sample;

use crate::TrainerError;
use crate::frozen::Frozen;
use crate::lead::{PairComparison, RankCommand};
use crate::learner::{Learner, LearnerStep, RowLoss};
use crate::loss::preference::{Preference, PreferencePair, bradley_terry};

/// Cross-entropy on demonstrations: the mean over all trained tokens of the batch.
#[derive(Clone, Copy, Debug)]
pub struct DemonstrationLoss {
    weight: f64,
}

impl DemonstrationLoss {
    /// The loss over `samples`, all rows of the optimizer step.
    #[must_use]
    pub fn over(samples: &[&Sample]) -> Self {
        let tokens: usize = samples.iter().map(|sample| sample.trained_tokens()).sum();
        Self { weight: 1.0 / tokens.max(1) as f64 }
    }
}

impl RowLoss for DemonstrationLoss {
    /// The loss.
    type Report = f64;

    fn row(&self, _: usize, predictions: &[Prediction], report: &mut f64) -> Vec<PredictionGradient> {
        let token = |prediction: &Prediction| {
            *report -= self.weight * f64::from(prediction.logprob);
            PredictionGradient { logprob: -self.weight as f32, ..PredictionGradient::default() }
        };
        predictions.iter().map(token).collect()
    }
}

/// Statistics of a step on demonstrations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DemonstrationReport {
    /// Gradient norm before clipping.
    pub grad_norm: f32,
    /// Mean loss per trained token.
    pub loss: f64,
}

/// One step of supervised fine-tuning on `rows`.
///
/// # Errors
/// Those of [`Learner::step`].
pub fn imitate(
    learner: &mut Learner,
    rows: &[&Sample],
    learning_rate: f32,
) -> Result<DemonstrationReport, TrainerError> {
    let samples = || rows.iter().copied().map(Cow::Borrowed).collect();
    learner.send_command(|network| RankCommand::Imitate { network, rows: samples(), learning_rate })?;
    let done = learner.step(rows, &DemonstrationLoss::over(rows), learning_rate)?;
    Ok(DemonstrationReport { grad_norm: done.grad_norm, loss: done.reports.iter().sum() })
}

/// Objective of training on pairs.
#[derive(Clone, Debug)]
pub enum PairLoss {
    /// A policy, with a frozen reference policy.
    Preference {
        /// The preference loss.
        preference: Preference,
        /// The frozen reference policy.
        reference: Box<Frozen>,
    },
    /// A reward model, whose score is the value after the last token (Bradley-Terry).
    Reward {
        /// Margin between the scores of chosen and rejected.
        margin: f64,
    },
}

/// Statistics of a step on pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairReport {
    /// Mean loss per pair.
    pub loss: f64,
    /// Share of pairs in which the chosen completion has the higher score.
    pub accuracy: f64,
    /// Mean margin of the chosen completion: of scores, or of log-probability ratios to the reference in nats.
    pub margin: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f32,
}

/// One gradient per row, equal for all its tokens.
struct RowGradients(Vec<PredictionGradient>);

impl RowLoss for RowGradients {
    type Report = ();

    fn row(&self, index: usize, predictions: &[Prediction], (): &mut ()) -> Vec<PredictionGradient> {
        vec![self.0[index]; predictions.len()]
    }
}

impl PairLoss {
    /// One optimizer step on pairs; `rows` alternate between chosen and rejected.
    ///
    /// # Errors
    /// Those of [`Learner::step`].
    pub fn step(
        &self,
        learner: &mut Learner,
        rows: &[&Sample],
        learning_rate: f32,
    ) -> Result<PairReport, TrainerError> {
        self.send_command(learner, rows, Some(learning_rate))?;
        let (report, slopes) = self.compare(learner, rows)?;
        let LearnerStep { grad_norm, .. } = learner.step(rows, &RowGradients(slopes), learning_rate)?;
        Ok(PairReport { grad_norm, ..report })
    }

    /// Loss and accuracy of the current weights on pairs.
    ///
    /// # Errors
    /// If a token is outside the vocabulary.
    pub fn measure(&self, learner: &Learner, rows: &[&Sample]) -> Result<PairReport, TrainerError> {
        self.send_command(learner, rows, None)?;
        Ok(self.compare(learner, rows)?.0)
    }

    /// Sends the same comparison to the other processes of the learner.
    fn send_command(
        &self,
        learner: &Learner,
        rows: &[&Sample],
        learning_rate: Option<f32>,
    ) -> Result<(), TrainerError> {
        let Some(remote) = learner.remote() else { return Ok(()) };
        let comparison = match self {
            Self::Reward { margin } => PairComparison::Reward { margin: *margin },
            Self::Preference { preference, reference } => {
                remote.send_reference(reference)?;
                PairComparison::Preference(*preference)
            }
        };
        let (network, rows) = (remote.network, rows.iter().copied().map(Cow::Borrowed).collect());
        remote.send_command(&RankCommand::Compare { network, comparison, rows, learning_rate })
    }

    fn compare(
        &self,
        learner: &Learner,
        rows: &[&Sample],
    ) -> Result<(PairReport, Vec<PredictionGradient>), TrainerError> {
        let own = self.sequences(&learner.score(rows)?);
        let reference = match self {
            Self::Preference { reference, .. } => self.sequences(&learner.score_under(reference, rows)?),
            Self::Reward { .. } => vec![0.0; rows.len()],
        };
        let pairs = own.len() / 2;
        let share = 1.0 / pairs.max(1) as f64;
        let (mut report, mut slopes) = (PairReport::default(), Vec::with_capacity(rows.len()));
        let mut right = 0;
        for pair in 0..pairs {
            let of = |all: &[f64]| PreferencePair { chosen: all[2 * pair], rejected: all[2 * pair + 1] };
            let (policy, frozen) = (of(&own), of(&reference));
            let (loss, slope) = match self {
                Self::Preference { preference, .. } => preference.loss(policy, frozen),
                Self::Reward { margin } => bradley_terry(policy, *margin),
            };
            let lead = (policy.chosen - frozen.chosen) - (policy.rejected - frozen.rejected);
            report.loss += share * loss;
            right += usize::from(lead > 0.0);
            report.margin += share * lead;
            slopes.push(self.slope(share * slope.chosen, rows[2 * pair]));
            slopes.push(self.slope(share * slope.rejected, rows[2 * pair + 1]));
        }
        report.accuracy = right as f64 / pairs.max(1) as f64;
        Ok((report, slopes))
    }

    /// One number per row, `[rows]`: its score, or its log-probability, summed or averaged over tokens.
    fn sequences(&self, predictions: &[Vec<Prediction>]) -> Vec<f64> {
        let of = |row: &Vec<Prediction>| match self {
            Self::Reward { .. } => row.iter().map(|token| f64::from(token.value)).sum(),
            Self::Preference { preference, .. } => {
                let sum: f64 = row.iter().map(|token| f64::from(token.logprob)).sum();
                if preference.averages() { sum / row.len().max(1) as f64 } else { sum }
            }
        };
        predictions.iter().map(of).collect()
    }

    fn slope(&self, slope: f64, row: &Sample) -> PredictionGradient {
        match self {
            Self::Reward { .. } => {
                PredictionGradient { value: slope as f32, ..PredictionGradient::default() }
            }
            Self::Preference { preference, .. } => {
                let tokens = if preference.averages() { row.trained_tokens().max(1) as f64 } else { 1.0 };
                PredictionGradient { logprob: (slope / tokens) as f32, ..PredictionGradient::default() }
            }
        }
    }
}
