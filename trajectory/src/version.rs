//! The clock of a run: how many training steps the policy has behind it.

use serde::{Deserialize, Serialize};

/// Training steps completed, one per batch of `batch_groups` groups however many minibatches or epochs it is
/// split into. The initial model is 0. It is also the name of the step that starts from it: step `v` turns
/// version `v` into version `v + 1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PolicyVersion(pub u64);

impl PolicyVersion {
    /// The version that one more training step produces; the largest number has none after it.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Staleness in versions of a token sampled at `self` when a trainer at `trainer` consumes it; 0 for a token
    /// that is not older.
    #[must_use]
    pub fn staleness_at(self, trainer: Self) -> u64 {
        trainer.0.saturating_sub(self.0)
    }
}

impl std::fmt::Display for PolicyVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "v{}", self.0)
    }
}
