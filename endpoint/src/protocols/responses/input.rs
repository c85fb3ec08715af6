//! The input of a response: items that become the messages of a conversation.
//!
//! Invariant: calls and thoughts that follow each other become one message of the assistant, as they were said.

use model::ChatMessage;
use serde_json::Value;

use crate::ApiError;
use crate::conversation::{content_text, template_call, text_message};

/// The messages of `input`: a text, or a list of items.
pub(super) fn input_messages(input: &Value) -> Result<Vec<ChatMessage>, ApiError> {
    let items = match input {
        Value::String(text) => return Ok(vec![text_message("user", text.as_str())]),
        Value::Array(items) if !items.is_empty() => items,
        _ => return Err(ApiError::invalid("input", "`input` must be a text or a list of items")),
    };
    let mut messages: Vec<ChatMessage> = Vec::new();
    // Whether the last message is one of the assistant that may get more.
    let mut open = false;
    for (n, item) in items.iter().enumerate() {
        let place = format!("input[{n}]");
        let text = |key: &str| item.get(key).and_then(Value::as_str);
        let kind = text("type").unwrap_or(if item.get("role").is_some() { "message" } else { "" });
        match kind {
            "message" => {
                let role = text("role").unwrap_or_default();
                let role = if role == "developer" { "system" } else { role };
                if !["system", "user", "assistant", "tool"].contains(&role) {
                    let message = format!(
                        "`{place}.role` is `{role}`; it must be system, developer, user or assistant"
                    );
                    return Err(ApiError::invalid(&place, message));
                }
                let content = content_text(item.get("content"), &format!("{place}.content"))?;
                match messages.last_mut().filter(|_| open && role == "assistant") {
                    Some(last) if last.content.is_empty() => last.content = content,
                    _ => messages.push(text_message(role, content)),
                }
                open = role == "assistant";
            }
            "function_call" => {
                let name = text("name").unwrap_or_default();
                let arguments = item.get("arguments").unwrap_or(&Value::Null);
                let call = template_call(text("call_id"), name, arguments);
                assistant(&mut messages, open).tool_calls.push(call);
                open = true;
            }
            "function_call_output" => {
                let content = content_text(item.get("output"), &format!("{place}.output"))?;
                let mut message = text_message("tool", content);
                message.extra.extend(text("call_id").map(|id| ("tool_call_id".to_owned(), Value::from(id))));
                messages.push(message);
                open = false;
            }
            "reasoning" => {
                let thoughts = item.get("content").or_else(|| item.get("summary")).and_then(Value::as_array);
                let thoughts = thoughts.into_iter().flatten().filter_map(|part| part.get("text")?.as_str());
                let thoughts: Vec<&str> = thoughts.collect();
                let message = assistant(&mut messages, false);
                message.extra.insert("reasoning_content".to_owned(), thoughts.join("\n").into());
                open = true;
            }
            other => {
                let message = format!("`{place}` is of type `{other}`, which this endpoint does not read");
                return Err(ApiError::invalid(&place, message));
            }
        }
    }
    Ok(messages)
}

/// The last message, if it is `open`, or a new one of the assistant.
fn assistant(messages: &mut Vec<ChatMessage>, open: bool) -> &mut ChatMessage {
    if !open {
        messages.push(text_message("assistant", ""));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn items_become_messages() {
        let messages = input_messages(&json!([
            {"role": "developer", "content": "be brief"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
        ]))
        .unwrap();
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "assistant"]);
        assert_eq!(messages[2].extra["reasoning_content"], "hm");
        assert_eq!(messages[2].tool_calls.len(), 2);
        assert_eq!(messages[2].tool_calls[0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!((&messages[3].content[..], &messages[3].extra["tool_call_id"]), ("one", &json!("c1")));
        assert_eq!(input_messages(&json!("hi")).unwrap(), [text_message("user", "hi")]);
        for wrong in
            [json!([]), json!(3), json!([{"type": "item_reference"}]), json!([{"role": "x", "content": ""}])]
        {
            assert_eq!(input_messages(&wrong).unwrap_err().status.as_u16(), 400, "{wrong}");
        }
    }
}
