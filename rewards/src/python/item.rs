//! A trajectory as the arguments of a call, the same for all dialects.
//!
//! Invariant: an item is complete when it is submitted; the worker that gets it needs nothing else. Token ids and decoded
//! text are only written for dialects that need them.

use std::fmt;
use std::sync::Arc;

use host::python::ProcessPool;
use serde::Serialize;
use serde_json::{Map, Value};
use trajectory::{Prompt, Turn};

use crate::RewardInput;
use crate::registry::Decode;

/// The fields that the dialect of a function needs beside those of all items.
pub(super) struct ItemFields {
    prompt_ids: bool,
    completion_ids: bool,
    query: bool,
    decode: Option<Arc<Decode>>,
    max_steps: u64,
}

impl fmt::Debug for ItemFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ItemFields").field("query", &self.query).finish_non_exhaustive()
    }
}

#[derive(Serialize)]
struct Item<'a> {
    task: u64,
    index: u32,
    /// A string, or a list of messages.
    prompt: Value,
    completion: &'a str,
    answer: Option<&'a str>,
    columns: &'a Map<String, Value>,
    truncated: bool,
    /// The turns of the policy, where there are several or they have rewards.
    #[serde(skip_serializing_if = "is_plain")]
    turns: &'a [Turn],
    /// Training step that sampled its last token.
    step: u64,
    max_steps: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_ids: Option<&'a [u32]>,
    /// Prompt with special tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_text: Option<String>,
    /// Prompt and completion with special tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    query: Option<String>,
}

/// Whether a trajectory is one turn without a reward of its own, of which nothing is said.
fn is_plain(turns: &&[Turn]) -> bool {
    turns.len() <= 1 && turns.iter().all(|turn| turn.reward.is_none())
}

impl ItemFields {
    pub(super) fn new(needs: &[String], decode: Option<Arc<Decode>>, max_steps: u64) -> Self {
        let needs = |name: &str| needs.iter().any(|need| need == name);
        let (prompt_ids, completion_ids) = (needs("prompt_ids"), needs("completion_ids"));
        Self { prompt_ids, completion_ids, query: needs("query"), decode, max_steps }
    }

    /// The item of an input as JSON, or why there can be none.
    pub(super) fn item(&self, input: &RewardInput<'_>) -> Result<String, String> {
        let decoded = self.query.then(|| input.decoded(self.decode.as_deref()));
        let (prompt_text, query) = decoded.unzip();
        let prompt = match &input.task.prompt {
            Prompt::Text(text) => Value::from(text.as_str()),
            Prompt::Messages(messages) => {
                serde_json::to_value(messages).map_err(|error| error.to_string())?
            }
        };
        let item = Item {
            task: input.task.id.0,
            index: input.index,
            prompt,
            completion: input.text,
            answer: input.task.answer.as_deref(),
            columns: &input.task.columns,
            truncated: input.truncated,
            turns: input.turns,
            step: input.version.0,
            max_steps: self.max_steps,
            prompt_ids: self.prompt_ids.then_some(input.prompt_ids),
            completion_ids: self.completion_ids.then_some(input.completion_ids),
            prompt_text,
            query,
        };
        let text = serde_json::to_string(&item).map_err(|error| error.to_string())?;
        if text.len() > ProcessPool::MAX_ARGUMENTS {
            let most = ProcessPool::MAX_ARGUMENTS;
            return Err(format!("it is {} bytes as JSON; the most are {most}", text.len()));
        }
        Ok(text)
    }
}
