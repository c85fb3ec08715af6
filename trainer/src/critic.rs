//! The critic of actor-critic algorithms: a value head on the policy, or a separate network.
//!
//! Invariant: a separate critic is initialised from the policy with a zero value head. It has the policy's layout plus
//! the head, its own optimizer and its own learning rate; its updates never change the policy.

use std::sync::Arc;

use model::{ModelDirectory, Placement};
use serde::{Deserialize, Serialize};

use crate::learner::Learner;
use crate::objective::ValueLossConfig;

/// Which network predicts the values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CriticKind {
    /// A separate network.
    #[default]
    Separate,
    /// A value head on the policy.
    Shared,
}

/// How the critic is trained.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CriticConfig {
    /// Which network predicts the values.
    pub kind: CriticKind,
    /// Coefficient and clip of the value loss; the coefficient is 1 for a separate network.
    pub term: ValueLossConfig,
    /// Learning rate of a separate network.
    pub learning_rate: f32,
    /// Initial steps in which only the critic is trained (value pre-training, VC-PPO, arXiv 2503.01491); separate
    /// network only.
    pub pretrain_steps: u64,
    /// Whether a separate network runs after the policy, or at the same time.
    pub placement: Placement,
}

/// A critic in training.
#[derive(Debug)]
pub struct Critic {
    /// How it is trained.
    pub config: CriticConfig,
    /// Its network; `None` if the policy has the value head.
    pub network: Option<CriticNetwork>,
}

/// A separate critic: its learner and the files that describe its model.
#[derive(Debug)]
pub struct CriticNetwork {
    /// Its weights and optimizer state.
    pub learner: Learner,
    /// The model files other than weights.
    pub directory: Arc<ModelDirectory>,
}
