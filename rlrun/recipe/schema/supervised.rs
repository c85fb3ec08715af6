//! The section `[supervised]` as it is written.
//!
//! Invariant: with it nothing is sampled but answers to held-out tasks.

use serde::{Deserialize, Serialize};

use crate::recipe::words::SupervisedKind;

/// `[supervised]`: demonstrations, preferences, reward models. Generated tasks have a right and a wrong demonstration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Supervised {
    /// What is learnt.
    // resume = experiment, worker = ignored
    pub kind: SupervisedKind,
    /// Demonstrations or pairs per step. TRL `per_device_train_batch_size`.
    // resume = tasks, worker = ignored
    pub batch: usize,
    /// Of `sft`: column of what is to be imitated, a text or a list of messages. TRL `completion`.
    // resume = experiment, worker = ignored
    pub completion_column: String,
    /// Of `sft`: column of whole conversations, of which every assistant turn is imitated; read where a row has no
    /// completion. TRL `messages`.
    // resume = experiment, worker = ignored
    pub messages_column: String,
    /// Of pairs: column of the better completion: a text, or a list of messages with or without those of the prompt. TRL
    /// `chosen`.
    // resume = experiment, worker = ignored
    pub chosen_column: String,
    /// Of pairs: column of the worse completion. TRL `rejected`.
    // resume = experiment, worker = ignored
    pub rejected_column: String,
    /// Of `dpo` and `ipo`: strength of the pull towards the policy that training starts from. TRL `beta`.
    // resume = changes, worker = ignored
    pub beta: f64,
    /// Of `dpo`: share of pairs that are labelled wrongly. TRL `label_smoothing`.
    // resume = changes, worker = ignored
    pub smoothing: f64,
    /// Of `reward_model`: by how much the better one should score more.
    // resume = changes, worker = ignored
    pub margin: f64,
}

impl Supervised {
    /// Column of conversations that hold their own prompt.
    #[must_use]
    pub fn conversation_column(&self) -> &str {
        if self.kind == SupervisedKind::Sft { &self.messages_column } else { &self.chosen_column }
    }
}

impl Default for Supervised {
    fn default() -> Self {
        Self {
            kind: SupervisedKind::Sft,
            batch: 64,
            completion_column: "completion".to_owned(),
            messages_column: "messages".to_owned(),
            chosen_column: "chosen".to_owned(),
            rejected_column: "rejected".to_owned(),
            beta: 0.1,
            smoothing: 0.0,
            margin: 0.0,
        }
    }
}
