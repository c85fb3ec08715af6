//! The first object of the text that has `name` and `arguments`, for models whose chat template knows no tools.
//!
//! Invariant: at most [`STARTS`] places of the text are tried, so that the time is proportional to its length.

use serde_json::{Deserializer, Value};

use super::{BadCall, ToolCall, call_of};

/// Most opening braces that are tried.
const STARTS: usize = 32;
const KEYS: [&str; 2] = ["arguments", "parameters"];

pub(super) fn parse(text: &str) -> Vec<Result<ToolCall, BadCall>> {
    for (at, _) in text.match_indices('{').take(STARTS) {
        let value = Deserializer::from_str(&text[at..]).into_iter::<Value>().next();
        if let Some(Ok(value)) = value
            && value.get("name").is_some()
            && KEYS.iter().any(|key| value.get(key).is_some())
        {
            return vec![call_of(value, &KEYS)];
        }
    }
    let named = text.find("{\"name\"").or_else(|| text.find("{ \"name\""));
    let reason = "the tool call is not valid JSON; write {\"name\": \"TOOL\", \"arguments\": {...}}";
    named.map(|_| Err(BadCall::new(reason))).into_iter().collect()
}
