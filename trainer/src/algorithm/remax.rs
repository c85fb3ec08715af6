//! ReMax (arXiv 2310.10505): the baseline is the reward of the greedy completion of the same task.
//!
//! The sampler decodes one more completion per group, which is never trained on.

use super::Algorithm;
use crate::credit::Advantage;
use crate::loss::PolicyLoss;

impl Algorithm {
    /// Its defaults.
    #[must_use]
    pub fn remax() -> Self {
        Self { advantage: Advantage::Greedy, loss: PolicyLoss::Reinforce, ..Self::decoupled() }
    }
}
