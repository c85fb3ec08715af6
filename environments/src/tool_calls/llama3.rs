//! `{"name": .., "parameters": {..}}` as the whole text, several separated by `;`, behind `<|python_tag|>` or without it.
//!
//! Invariant: a text that does not begin with such an object has no call. What follows the last readable call is a bad call,
//! unless it is white space.

use serde_json::{Deserializer, Value};

use super::{BadCall, MOST_CALLS, ToolCall, call_of};

const KEYS: [&str; 2] = ["parameters", "arguments"];

pub(super) fn parse(text: &str) -> Vec<Result<ToolCall, BadCall>> {
    let tagged = text.trim_start().strip_prefix("<|python_tag|>");
    let mut rest = tagged.unwrap_or(text).trim();
    let mut calls = Vec::new();
    while rest.starts_with('{') && calls.len() < MOST_CALLS {
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        match values.next() {
            // An answer in JSON is no call.
            Some(Ok(value)) if calls.is_empty() && tagged.is_none() && value.get("name").is_none() => break,
            Some(Ok(value)) => {
                calls.push(call_of(value, &KEYS));
                rest = rest[values.byte_offset()..].trim_start_matches([';', ' ', '\n', '\t', '\r']);
            }
            Some(Err(error)) => {
                let reason = format!(
                    "the tool call is not valid JSON ({error}); write {{\"name\": \"TOOL\", \"parameters\": {{...}}}} and \
                     nothing else"
                );
                calls.push(Err(BadCall::new(reason)));
                break;
            }
            None => break,
        }
    }
    calls
}
