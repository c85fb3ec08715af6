//! Losses of preference pairs: one completion is preferred to the other.

use serde::{Deserialize, Serialize};

use super::sigmoid;

/// Which loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Preference {
    /// DPO (arXiv 2305.18290): `-(1 - e) log sigmoid(x) - e log sigmoid(-x)` with `x = beta ((c - c_ref) - (r -
    /// r_ref))`, where `c` and `r` are log-probabilities summed over the tokens of chosen and rejected, and `e` is
    /// label smoothing.
    Dpo {
        /// Strength of the KL constraint to the reference policy.
        beta: f64,
        /// Label smoothing: assumed share of wrongly labelled pairs.
        smoothing: f64,
    },
    /// IPO (arXiv 2310.12036): `((c - c_ref) - (r - r_ref) - 1 / (2 beta))^2`, log-probabilities averaged over tokens.
    Ipo {
        /// Strength of the KL constraint to the reference policy.
        beta: f64,
    },
}

/// One number for each completion of a pair: a log-probability in nats, a score, or a derivative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreferencePair {
    /// Of the chosen completion.
    pub chosen: f64,
    /// Of the rejected completion.
    pub rejected: f64,
}

impl Preference {
    /// The loss and its derivatives by the policy's sequence log-probabilities.
    #[must_use]
    pub fn loss(self, policy: PreferencePair, reference: PreferencePair) -> (f64, PreferencePair) {
        let margin = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected);
        match self {
            Self::Dpo { beta, smoothing } => {
                let x = beta * margin;
                let loss = (1.0 - smoothing) * softplus(-x) + smoothing * softplus(x);
                let slope = beta * (smoothing * sigmoid(x) - (1.0 - smoothing) * sigmoid(-x));
                (loss, PreferencePair { chosen: slope, rejected: -slope })
            }
            Self::Ipo { beta } => {
                let off = margin - 1.0 / (2.0 * beta);
                (off * off, PreferencePair { chosen: 2.0 * off, rejected: -2.0 * off })
            }
        }
    }

    /// Whether sequence log-probabilities are averaged over tokens instead of summed.
    #[must_use]
    pub fn averages(self) -> bool {
        matches!(self, Self::Ipo { .. })
    }
}

/// Bradley-Terry loss of a reward model: `-log sigmoid(c - r - margin)` of the scores, and its derivatives by them.
#[must_use]
pub fn bradley_terry(scores: PreferencePair, margin: f64) -> (f64, PreferencePair) {
    let x = scores.chosen - scores.rejected - margin;
    let slope = -sigmoid(-x);
    (softplus(-x), PreferencePair { chosen: slope, rejected: -slope })
}

/// `log(1 + exp(x))`, without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + libm::log1p(libm::exp(-x.abs()))
}
