//! DAPO (arXiv 2503.14476): the upper bound of the clip is wider, tokens count the same.
//!
//! Its other two parts live elsewhere: `curation.dynamic_sampling` refills groups without differing rewards, the reward
//! `length` is its overlong shaping.

use super::Algorithm;
use crate::loss::PolicyLoss;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn dapo() -> Self {
        Self { loss: PolicyLoss::Clip { low: 0.2, high: 0.28, dual: None }, ..Self::grpo() }
    }
}
