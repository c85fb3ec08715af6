//! What a reward model on another process or host is asked, and what it answers.
//!
//! Invariant: scores of tokens are exact: they are f32, and JSON carries every bit of them. Tokens are sent only to a model
//! whose tokenizer gives them the same meaning, texts to any other.

use std::fmt;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use trajectory::{Message, Prompt};

/// Where sequences are sent.
pub(super) const SCORES: &str = "/v1/scores";
/// Where the model says what it is.
pub(super) const MODEL: &str = "/v1/model";

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 4096;

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
#[serde(untagged, try_from = "Fields")]
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

/// Both kinds of [`Asked`], read field by field: what is told apart only once it is whole takes many times its size until
/// then.
#[derive(Deserialize)]
struct Fields {
    prompt_ids: Option<Vec<u32>>,
    completion_ids: Option<Vec<u32>>,
    prompt: Option<Asking>,
    completion: Option<String>,
    ended: Option<bool>,
}

impl TryFrom<Fields> for Asked {
    type Error = &'static str;

    fn try_from(fields: Fields) -> Result<Self, Self::Error> {
        match fields {
            Fields { prompt_ids: Some(prompt_ids), completion_ids: Some(completion_ids), .. } => {
                Ok(Self::Tokens { prompt_ids, completion_ids })
            }
            Fields { prompt: Some(prompt), completion: Some(completion), ended: Some(ended), .. } => {
                Ok(Self::Texts { prompt, completion, ended })
            }
            _ => Err("give `prompt_ids` and `completion_ids`, or `prompt`, `completion` and `ended`"),
        }
    }
}

/// A prompt on the wire: a text, or a conversation.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum Asking {
    /// A text.
    Text(String),
    /// Role and content of every message.
    Messages(Vec<(String, String)>),
}

impl<'de> Deserialize<'de> for Asking {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Asking;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, or a list of role and content of each message")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Asking, E> {
                Ok(Asking::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Asking, A::Error> {
                let mut messages = Vec::new();
                while let Some(message) = sequence.next_element()? {
                    if messages.len() == MAX_MESSAGES {
                        return Err(de::Error::invalid_length(MAX_MESSAGES + 1, &self));
                    }
                    messages.push(message);
                }
                Ok(Asking::Messages(messages))
            }
        }
        deserializer.deserialize_any(Either)
    }
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
