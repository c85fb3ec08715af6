//! Tool calls in the text of a completion.
//!
//! Model families write calls in forms of their own; which one a model learned follows from its chat template. A call that
//! cannot be read has a reason, which is written for the model: it is the answer that the model gets.
//!
//! # Layout
//! - `hermes`: `<tool_call>{"name": .., "arguments": {..}}</tool_call>` (Hermes, Qwen2.5, Qwen3)
//! - `qwen3_coder`: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`
//! - `llama3`: `{"name": .., "parameters": {..}}` as the whole text, several separated by `;`
//! - `mistral`: `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]NAME[ARGS]{..}`
//! - `json`: the first object of the text that is a call, for models without a form of their own
//!
//! # Invariants
//! - Parsing takes time and memory proportional to the text, whatever it is: the text comes from a model.
//! - Markers that the tokenizer has as special tokens may be missing from the text.

mod hermes;
mod json;
mod llama3;
mod mistral;
mod qwen3_coder;
mod schema;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use schema::ToolSchema;

/// Most calls of one completion that are read; later ones are ignored.
const MOST_CALLS: usize = 64;

/// The form in which a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`.
    Hermes,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
    #[serde(rename = "qwen3_coder")]
    Qwen3Coder,
    /// `{"name": .., "parameters": {..}}` as the whole text.
    #[serde(rename = "llama3")]
    Llama3,
    /// `[TOOL_CALLS]` and a list of calls.
    Mistral,
    /// The first object in the text with `name` and `arguments`.
    Json,
}

/// A call that a model wrote.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// Its arguments by name.
    pub arguments: Map<String, Value>,
    /// The id that the model gave the call, if it gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// Why a call cannot be read or made, in words for the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct BadCall {
    /// The reason, and what to write instead.
    pub reason: String,
}

impl ToolCallFormat {
    /// All forms.
    pub const ALL: [Self; 5] = [Self::Hermes, Self::Qwen3Coder, Self::Llama3, Self::Mistral, Self::Json];

    /// The form that a chat template teaches, by the markers in its text; `None` if it has none of them.
    #[must_use]
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |marker: &str| template.contains(marker);
        // GLM and others put other things than JSON between the same tags.
        let foreign = has("<arg_key>") || has("<|channel|>");
        match () {
            () if has("<function=") && has("<tool_call>") => Some(Self::Qwen3Coder),
            () if has("<tool_call>") && !foreign => Some(Self::Hermes),
            () if has("[TOOL_CALLS]") => Some(Self::Mistral),
            () if has("<|python_tag|>") || (has("ipython") && has("parameters")) => Some(Self::Llama3),
            () => None,
        }
    }

    /// Its name in recipes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Llama3 => "llama3",
            Self::Mistral => "mistral",
            Self::Json => "json",
        }
    }

    /// The calls in `text`, in order; empty if it has none. `tools` give the types of arguments that a form writes without
    /// quotes.
    #[must_use]
    pub fn parse(self, text: &str, tools: &[ToolSchema]) -> Vec<Result<ToolCall, BadCall>> {
        let mut calls = match self {
            Self::Hermes => hermes::parse(text),
            Self::Qwen3Coder => qwen3_coder::parse(text, tools),
            Self::Llama3 => llama3::parse(text),
            Self::Mistral => mistral::parse(text),
            Self::Json => json::parse(text),
        };
        calls.truncate(MOST_CALLS);
        calls
    }

    /// What a system message says of `tools`, for models whose chat template does not describe them.
    #[must_use]
    pub fn describe(self, tools: &[ToolSchema]) -> String {
        let example = ToolCall { name: "NAME".to_owned(), arguments: Map::new(), id: None };
        let listed: Vec<String> = tools.iter().map(|tool| tool.to_json().to_string()).collect();
        format!(
            "You can call tools. To call one, write its name and its arguments in this form:\n{}\nYou get its answer in the \
             next message. When you need no tool any more, write your answer. The tools are:\n{}",
            self.write(&example),
            listed.join("\n")
        )
    }

    /// How `call` is written.
    #[must_use]
    pub fn write(self, call: &ToolCall) -> String {
        let ToolCall { name, arguments, .. } = call;
        let arguments = Value::Object(arguments.clone());
        match self {
            Self::Hermes => format!(
                "<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>",
                Value::from(&name[..])
            ),
            Self::Qwen3Coder => qwen3_coder::write(call),
            Self::Llama3 => format!("{{\"name\": {}, \"parameters\": {arguments}}}", Value::from(&name[..])),
            Self::Mistral => {
                format!("[TOOL_CALLS][{{\"name\": {}, \"arguments\": {arguments}}}]", Value::from(&name[..]))
            }
            Self::Json => format!("{{\"name\": {}, \"arguments\": {arguments}}}", Value::from(&name[..])),
        }
    }
}

impl BadCall {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into() }
    }
}

/// The call of a JSON object. Arguments stand under one of `keys`, as an object or as a text that is one.
fn call_of(value: Value, keys: &[&str]) -> Result<ToolCall, BadCall> {
    let Value::Object(mut object) = value else {
        return Err(BadCall::new(format!("a tool call is a JSON object, not {}", type_of(&value))));
    };
    let Some(Value::String(name)) = object.remove("name") else {
        return Err(BadCall::new("a tool call needs the name of a tool as the text \"name\""));
    };
    let id = match object.remove("id") {
        Some(Value::String(id)) => Some(id),
        _ => None,
    };
    let given = keys.iter().find_map(|key| object.remove(*key));
    let given = match given {
        Some(Value::String(text)) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        other => other.unwrap_or_else(|| Value::Object(Map::new())),
    };
    match given {
        Value::Object(arguments) => Ok(ToolCall { name, arguments, id }),
        other => Err(BadCall::new(format!(
            "\"{}\" of the call of {name} is {}; it must be a JSON object",
            keys[0],
            type_of(&other)
        ))),
    }
}

/// A JSON text as a call.
fn read(text: &str, keys: &[&str]) -> Result<ToolCall, BadCall> {
    match serde_json::from_str(text) {
        Ok(value) => call_of(value, keys),
        Err(error) => Err(BadCall::new(format!(
            "the tool call is not valid JSON ({error}); write {{\"name\": \"TOOL\", \"{}\": {{...}}}}",
            keys[0]
        ))),
    }
}

/// The kind of a JSON value in words.
pub(crate) fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The parts of `text` between `open` and `close`. The last part may lack its end, where generation stopped at it.
fn between<'a>(text: &'a str, open: &str, close: &str) -> Vec<&'a str> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(open) {
        let (part, left) = after.split_once(close).unwrap_or((after, ""));
        parts.push(part);
        rest = left;
        if parts.len() == MOST_CALLS {
            break;
        }
    }
    parts
}
