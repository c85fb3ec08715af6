//! The section `[supervised]`.
//!
//! Invariant: a run with this section samples answers to held-out tasks only.

use serde::{Deserialize, Serialize};

use crate::recipe::words::SupervisedKind;

/// `[supervised]`: training on demonstrations, on preferences, or of a reward model. Generated tasks have a correct and a
/// wrong demonstration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Supervised {
    /// Training objective.
    // resume = experiment, worker = ignored
    pub kind: SupervisedKind,
    /// Demonstrations or pairs per step. TRL `per_device_train_batch_size`.
    // resume = tasks, worker = ignored
    pub batch: usize,
    /// For `sft`: column of the completion, a text or a list of messages. TRL `completion`.
    // resume = experiment, worker = ignored
    pub completion_column: String,
    /// For `sft`: column of whole conversations, which train on every assistant turn. It is read if a row has no
    /// completion. TRL `messages`.
    // resume = experiment, worker = ignored
    pub messages_column: String,
    /// For pairs: column of the better completion: a text, or a list of messages with or without those of the prompt. TRL
    /// `chosen`.
    // resume = experiment, worker = ignored
    pub chosen_column: String,
    /// For pairs: column of the worse completion. TRL `rejected`.
    // resume = experiment, worker = ignored
    pub rejected_column: String,
    /// For `dpo` and `ipo`: strength of the regularization towards the initial policy. TRL `beta`.
    // resume = changes, worker = ignored
    pub beta: f64,
    /// For `dpo`: assumed fraction of wrongly labelled pairs. TRL `label_smoothing`.
    // resume = changes, worker = ignored
    pub smoothing: f64,
    /// For `reward_model`: target difference between the scores of a pair.
    // resume = changes, worker = ignored
    pub margin: f64,
}

impl Supervised {
    /// Column of conversations that include their prompt.
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
