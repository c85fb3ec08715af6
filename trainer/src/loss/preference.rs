//! Losses of pairs: one completion was preferred to the other.

use serde::{Deserialize, Serialize};

use super::sigmoid;

/// How a pair is compared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Preference {
    /// `-(1 - e) log sigmoid(x) - e log sigmoid(-x)` with `x = beta ((c - c_ref) - (r - r_ref))`, log-probabilities summed
    /// over tokens (DPO, arXiv 2305.18290; `e` is the share of pairs that are labelled wrongly).
    Dpo {
        /// Strength of the pull towards the reference.
        beta: f64,
        /// Share of pairs that are labelled wrongly.
        smoothing: f64,
    },
    /// `((c - c_ref) - (r - r_ref) - 1 / (2 beta))^2`, log-probabilities averaged over tokens (IPO, arXiv 2310.12036).
    Ipo {
        /// Strength of the pull towards the reference.
        beta: f64,
    },
}

/// One pair, chosen and rejected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// Of the preferred completion.
    pub chosen: f64,
    /// Of the other.
    pub rejected: f64,
}

impl Preference {
    /// Loss and its derivatives by the policy's log-probabilities.
    #[must_use]
    pub fn loss(self, policy: Pair, reference: Pair) -> (f64, Pair) {
        let margin = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected);
        match self {
            Self::Dpo { beta, smoothing } => {
                let x = beta * margin;
                let loss = (1.0 - smoothing) * softplus(-x) + smoothing * softplus(x);
                let slope = beta * (smoothing * sigmoid(x) - (1.0 - smoothing) * sigmoid(-x));
                (loss, Pair { chosen: slope, rejected: -slope })
            }
            Self::Ipo { beta } => {
                let off = margin - 1.0 / (2.0 * beta);
                (off * off, Pair { chosen: 2.0 * off, rejected: -2.0 * off })
            }
        }
    }

    /// Whether log-probabilities are averaged over tokens, not added up.
    #[must_use]
    pub fn averages(self) -> bool {
        matches!(self, Self::Ipo { .. })
    }
}

/// Bradley-Terry: `-log sigmoid(c - r - margin)` of the scores of a reward model, and its derivatives by them.
#[must_use]
pub fn bradley_terry(scores: Pair, margin: f64) -> (f64, Pair) {
    let x = scores.chosen - scores.rejected - margin;
    let slope = -sigmoid(-x);
    (softplus(-x), Pair { chosen: slope, rejected: -slope })
}

/// `log(1 + exp(x))`, without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
