//! One dataset row: a prompt, what is known of its answer, and the columns it came with.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Row of the dataset that a task was made from, counted from 0 in file order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TaskId(pub u64);

/// What the policy is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prompt {
    /// Text that the policy continues as it is.
    Text(String),
    /// A conversation, rendered with the chat template of the model.
    Messages(Vec<Message>),
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text of the message.
    pub content: String,
    /// Of a tool's answer: the id of the call that it answers, where the model gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A message of `role`.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), tool_call_id: None }
    }
}

/// One dataset row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Which row this is.
    pub id: TaskId,
    /// What the policy is asked.
    pub prompt: Prompt,
    /// The reference answer, for rewards that compare with one.
    pub answer: Option<String>,
    /// Every column of the row as it was read, for rewards that want more than the answer.
    pub columns: Map<String, Value>,
}
