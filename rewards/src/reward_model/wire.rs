//! What a reward model on another process or host is asked, and what it answers.
//!
//! Invariant: scores of tokens are exact: they are f32, and JSON carries every bit of them. Tokens are sent only to a model
//! whose tokenizer gives them the same meaning, texts to any other.

use serde::{Deserialize, Serialize};
use trajectory::{Message, Prompt};

/// Where sequences are sent.
pub(super) const SCORES: &str = "/v1/scores";
/// Where the model says what it is.
pub(super) const MODEL: &str = "/v1/model";

/// What a model is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Described {
    /// [`model::Tokenizer::fingerprint`] of the tokenizer whose tokens it reads; none if it reads texts only.
    pub(super) tokenizer: Option<String>,
    /// Longest sequence, tokens.
    pub(super) max_context: usize,
}

/// A sequence to be scored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Asked {
    /// The tokens that were sampled.
    Tokens {
        /// The prompt.
        prompt_ids: Vec<u32>,
        /// What follows it.
        completion_ids: Vec<u32>,
    },
    /// The texts.
    Texts {
        /// The prompt.
        prompt: Asking,
        /// What answers it.
        completion: String,
        /// Whether it was not cut off.
        ended: bool,
    },
}

/// A prompt on the wire: a text, or a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Asking {
    /// A text.
    Text(String),
    /// Role and content of every message.
    Messages(Vec<(String, String)>),
}

/// The score of a sequence, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Answer {
    /// The score.
    pub(super) score: Option<f32>,
    /// What went wrong.
    pub(super) error: Option<String>,
}

impl From<&Prompt> for Asking {
    fn from(prompt: &Prompt) -> Self {
        match prompt {
            Prompt::Text(text) => Self::Text(text.clone()),
            Prompt::Messages(messages) => {
                Self::Messages(messages.iter().map(|m| (m.role.clone(), m.content.clone())).collect())
            }
        }
    }
}

impl From<Asking> for Prompt {
    fn from(asking: Asking) -> Self {
        let message = |(role, content)| Message { role, content };
        match asking {
            Asking::Text(text) => Self::Text(text),
            Asking::Messages(messages) => Self::Messages(messages.into_iter().map(message).collect()),
        }
    }
}
