//! DAPO (arXiv 2503.14476): a higher upper clip bound and a mean over tokens.
//!
//! Its other two parts are recipe keys: `curation.dynamic_sampling` replaces groups of equal rewards, and the reward
//! kind `length` is overlong reward shaping.

use super::Algorithm;
use crate::loss::PolicyLoss;

impl Algorithm {
    /// The published defaults.
    #[must_use]
    pub fn dapo() -> Self {
        Self { loss: PolicyLoss::Clip { low: 0.2, high: 0.28, dual: None }, ..Self::grpo() }
    }
}
