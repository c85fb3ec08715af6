//! The critic of actor-critic algorithms: a head of the policy, or a network of its own.
//!
//! Invariant: a critic of its own begins as the policy with a zero value head, has the policy's layout beside the head,
//! its own optimizer and its own learning rate; its updates never touch the policy.

use std::sync::Arc;

use model::{ModelDirectory, Placement};
use serde::{Deserialize, Serialize};

use crate::learner::Learner;
use crate::objective::ValueTerm;

/// Where values come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CriticKind {
    /// A network of its own.
    #[default]
    Separate,
    /// A head of the policy.
    Shared,
}

/// How the critic learns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CriticConfig {
    /// Where values come from.
    pub kind: CriticKind,
    /// Factor and clip of the value loss; the factor is 1 for a network of its own.
    pub term: ValueTerm,
    /// Learning rate of a network of its own.
    pub learning_rate: f32,
    /// Steps at the beginning in which the critic alone learns (VC-PPO, arXiv 2503.01491); of a network of its own.
    pub pretrain_steps: u64,
    /// Whether a network of its own takes turns with the policy, or scores and learns at the same time.
    pub placement: Placement,
}

/// A critic in training.
#[derive(Debug)]
pub struct Critic {
    /// How it learns.
    pub config: CriticConfig,
    /// Its network; `None` where it is the policy's.
    pub network: Option<Network>,
}

/// A network with the files that describe it.
#[derive(Debug)]
pub struct Network {
    /// Its weights in training.
    pub learner: Learner,
    /// Everything of its model that is no weight.
    pub directory: Arc<ModelDirectory>,
}
