//! `<tool_call>\n{"name": .., "arguments": {..}}\n</tool_call>`, once per call.
//!
//! Invariant: text outside the tags is no call.

use super::{BadCall, ToolCall, between, read};

pub(super) fn parse(text: &str) -> Vec<Result<ToolCall, BadCall>> {
    let calls = between(text, "<tool_call>", "</tool_call>");
    calls.into_iter().map(|call| read(call.trim(), &["arguments", "parameters"])).collect()
}
