//! Messages of a conversation as sessions compare them.
//!
//! Invariant: two messages are equal if role, text, and names and arguments of tool calls are. Ids of calls, null fields
//! and the order of keys do not count: clients write the messages that they were sent again, and change these.

use environments::ToolCall;
use model::ChatMessage;
use serde_json::Value;
use trajectory::Message;

/// A message of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionMessage {
    role: String,
    text: String,
    calls: Vec<CalledTool>,
}

/// A tool call of an assistant message.
#[derive(Clone, Debug, PartialEq)]
struct CalledTool {
    name: String,
    /// Parsed; the text itself if it is no JSON.
    arguments: Value,
}

impl SessionMessage {
    /// A message without tool calls.
    #[must_use]
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        Self { role: role.into(), text: text.into(), calls: Vec::new() }
    }

    /// A message of the assistant with `calls`.
    #[must_use]
    pub fn calling(text: impl Into<String>, calls: &[ToolCall]) -> Self {
        let call = |call: &ToolCall| CalledTool {
            name: call.name.clone(),
            arguments: without_nulls(Value::Object(call.arguments.clone())),
        };
        Self { role: "assistant".to_owned(), text: text.into(), calls: calls.iter().map(call).collect() }
    }

    /// Its role.
    #[must_use]
    pub fn role(&self) -> &str {
        &self.role
    }

    /// Its text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it may follow a completion without a new rendering of the conversation.
    #[must_use]
    pub fn follows_completion(&self) -> bool {
        matches!(self.role.as_str(), "tool" | "user" | "system")
    }

    /// Approximate bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        let calls = self.calls.iter().map(|call| call.name.len() + call.arguments.to_string().len());
        size_of::<Self>() + self.role.len() + self.text.len() + calls.sum::<usize>()
    }

    /// The message for a chat template that appends it.
    #[must_use]
    pub fn plain(&self) -> Message {
        Message::new(self.role.clone(), self.text.clone())
    }
}

impl From<&ChatMessage> for SessionMessage {
    /// Ids of calls, reasoning and names of authors are left out.
    fn from(message: &ChatMessage) -> Self {
        Self {
            role: message.role.clone(),
            text: message.content.clone(),
            calls: message.tool_calls.iter().map(CalledTool::of).collect(),
        }
    }
}

impl CalledTool {
    /// A call in the form of OpenAI's `tool_calls`.
    fn of(call: &Value) -> Self {
        let function = call.get("function").unwrap_or(call);
        let arguments = match function.get("arguments") {
            Some(Value::String(text)) => {
                serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone()))
            }
            Some(value) => value.clone(),
            None => Value::Null,
        };
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        Self { name, arguments: without_nulls(arguments) }
    }
}

/// The value without null fields of its objects.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(
            map.into_iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(name, value)| (name, without_nulls(value)))
                .collect(),
        ),
        Value::Array(items) => Value::Array(items.into_iter().map(without_nulls).collect()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn message(content: &str, calls: &Value) -> ChatMessage {
        let tool_calls = calls.as_array().cloned().unwrap_or_default();
        ChatMessage {
            role: "assistant".to_owned(),
            content: content.to_owned(),
            tool_calls,
            ..ChatMessage::default()
        }
    }

    #[test]
    fn ids_nulls_and_the_order_of_keys_do_not_count() {
        let sent = message(
            "",
            &json!([{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1, \"b\": [2]}"}}]),
        );
        let back =
            message("", &json!([{"function": {"arguments": {"b": [2], "a": 1, "c": null}, "name": "add"}}]));
        assert_eq!(SessionMessage::from(&sent), SessionMessage::from(&back));
        let arguments = [("b".to_owned(), json!([2])), ("a".to_owned(), json!(1))].into_iter().collect();
        let call = ToolCall { name: "add".to_owned(), arguments, id: Some("y".to_owned()) };
        assert_eq!(SessionMessage::calling("", &[call]), SessionMessage::from(&sent));
        let other = message("", &json!([{"function": {"name": "add", "arguments": {"a": 2, "b": [2]}}}]));
        assert_ne!(SessionMessage::from(&sent), SessionMessage::from(&other));
        assert!(!SessionMessage::from(&sent).follows_completion());
        assert!(SessionMessage::new("tool", "3").follows_completion());
    }

    #[test]
    fn arguments_that_are_no_json_are_compared_as_text() {
        let call = |arguments: &str| {
            SessionMessage::from(&message("", &json!([{"function": {"name": "f", "arguments": arguments}}])))
        };
        assert_eq!(call("{broken"), call("{broken"));
        assert_ne!(call("{broken"), call("{ broken"));
    }
}
