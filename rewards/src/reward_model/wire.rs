//! Requests to a reward model in another process or on another host, and its responses.
//!
//! Invariant: scores of tokens are exact: they are f32, and JSON carries every bit of them. Tokens are sent only to a model
//! whose tokenizer gives them the same meaning, texts to any other.

use std::fmt;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use trajectory::{Message, Prompt};

/// Path for sequences.
pub(super) const SCORES: &str = "/v1/scores";
/// Path for the description of the model.
pub(super) const MODEL: &str = "/v1/model";

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 4096;

/// The description of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ModelDescription {
    /// [`model::Tokenizer::fingerprint`] of the tokenizer whose tokens it reads; none if it reads texts only.
    pub(super) tokenizer: Option<String>,
    /// Longest sequence, tokens.
    pub(super) max_context: usize,
}

/// A sequence to be scored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, try_from = "ScoreRequestFields")]
pub(super) enum RewardModelRequest {
    /// The tokens that were sampled.
    Tokens {
        /// The prompt.
        prompt_ids: Vec<u32>,
        /// The completion.
        completion_ids: Vec<u32>,
    },
    /// The texts.
    Texts {
        /// The prompt.
        prompt: WirePrompt,
        /// The completion.
        completion: String,
        /// False if the completion was cut off.
        ended: bool,
    },
}

/// Both kinds of [`RewardModelRequest`], read field by field: serde would buffer an untagged enum in many times its size.
#[derive(Deserialize)]
struct ScoreRequestFields {
    prompt_ids: Option<Vec<u32>>,
    completion_ids: Option<Vec<u32>>,
    prompt: Option<WirePrompt>,
    completion: Option<String>,
    ended: Option<bool>,
}

impl TryFrom<ScoreRequestFields> for RewardModelRequest {
    type Error = &'static str;

    fn try_from(fields: ScoreRequestFields) -> Result<Self, Self::Error> {
        match fields {
            ScoreRequestFields {
                prompt_ids: Some(prompt_ids), completion_ids: Some(completion_ids), ..
            } => Ok(Self::Tokens { prompt_ids, completion_ids }),
            ScoreRequestFields {
                prompt: Some(prompt),
                completion: Some(completion),
                ended: Some(ended),
                ..
            } => Ok(Self::Texts { prompt, completion, ended }),
            _ => Err("give `prompt_ids` and `completion_ids`, or `prompt`, `completion` and `ended`"),
        }
    }
}

/// A prompt on the wire: a text, or a conversation.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum WirePrompt {
    /// A text.
    Text(String),
    /// Role and content of every message.
    Messages(Vec<(String, String)>),
}

impl<'de> Deserialize<'de> for WirePrompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WirePromptVisitor;
        impl<'de> Visitor<'de> for WirePromptVisitor {
            type Value = WirePrompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, or a list of role and content of each message")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<WirePrompt, E> {
                Ok(WirePrompt::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<WirePrompt, A::Error> {
                let mut messages = Vec::new();
                while let Some(message) = sequence.next_element()? {
                    if messages.len() == MAX_MESSAGES {
                        return Err(de::Error::invalid_length(MAX_MESSAGES + 1, &self));
                    }
                    messages.push(message);
                }
                Ok(WirePrompt::Messages(messages))
            }
        }
        deserializer.deserialize_any(WirePromptVisitor)
    }
}

/// The score of a sequence, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ScoreResponse {
    /// The score.
    pub(super) score: Option<f32>,
    /// The reason of a failure.
    pub(super) error: Option<String>,
}

impl From<&Prompt> for WirePrompt {
    fn from(prompt: &Prompt) -> Self {
        match prompt {
            Prompt::Text(text) => Self::Text(text.clone()),
            Prompt::Messages(messages) => {
                Self::Messages(messages.iter().map(|m| (m.role.clone(), m.content.clone())).collect())
            }
        }
    }
}

impl From<WirePrompt> for Prompt {
    fn from(asking: WirePrompt) -> Self {
        let message = |(role, content)| Message::new(role, content);
        match asking {
            WirePrompt::Text(text) => Self::Text(text),
            WirePrompt::Messages(messages) => Self::Messages(messages.into_iter().map(message).collect()),
        }
    }
}
