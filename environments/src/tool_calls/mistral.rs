//! `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]NAME[ARGS]{..}` once per call (from tokenizer version 11 on), where
//! `[ARGS]` may be missing.
//!
//! Invariant: without the marker only a text that is a list of objects with names has calls.

use serde_json::{Deserializer, Value};

use super::{BadCall, MOST_CALLS, ToolCall, call_of};

const KEYS: [&str; 2] = ["arguments", "parameters"];
const MARKER: &str = "[TOOL_CALLS]";

pub(super) fn parse(text: &str) -> Vec<Result<ToolCall, BadCall>> {
    let Some((_, behind)) = text.split_once(MARKER) else {
        return match serde_json::from_str(text.trim()) {
            Ok(Value::Array(list)) if list.iter().any(|call| call.get("name").is_some()) => calls_of(list),
            _ => Vec::new(),
        };
    };
    if behind.trim_start().starts_with('[') {
        return match first(behind) {
            Ok(Value::Array(list)) => calls_of(list),
            Ok(_) => Vec::new(),
            Err(error) => vec![Err(BadCall::new(format!(
                "the list of tool calls is not valid JSON ({error}); write [{{\"name\": \"TOOL\", \"arguments\": {{...}}}}]"
            )))],
        };
    }
    behind.split(MARKER).take(MOST_CALLS).map(named).collect()
}

/// `NAME[ARGS]{..}` or `NAME{..}`.
fn named(call: &str) -> Result<ToolCall, BadCall> {
    let (name, arguments) = match (call.split_once("[ARGS]"), call.find('{')) {
        (Some((name, arguments)), _) => (name, arguments),
        (None, Some(at)) => call.split_at(at),
        (None, None) => (call, "{}"),
    };
    match first(arguments) {
        Ok(arguments) => call_of(serde_json::json!({"name": name.trim(), "arguments": arguments}), &KEYS),
        Err(error) => Err(BadCall::new(format!(
            "the arguments of {} are not valid JSON ({error}); write [TOOL_CALLS]TOOL[ARGS]{{...}}",
            name.trim()
        ))),
    }
}

fn calls_of(list: Vec<Value>) -> Vec<Result<ToolCall, BadCall>> {
    list.into_iter().take(MOST_CALLS).map(|call| call_of(call, &KEYS)).collect()
}

/// The JSON value that `text` begins with.
fn first(text: &str) -> Result<Value, serde_json::Error> {
    let mut values = Deserializer::from_str(text).into_iter();
    values.next().unwrap_or_else(|| serde_json::from_str(""))
}
