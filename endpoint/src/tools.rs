//! Calls of tools in what the model writes.
//!
//! Invariant: a text with no call that can be read is content, whole and unchanged; the tokens are returned unparsed beside
//! the calls in any case.

use environments::tool_calls::{ToolCall, ToolCallFormat, ToolSchema};
use serde_json::{Value, json};

use crate::ApiError;
use crate::conversation::schemas;
use crate::fields::Fields;

/// The tools of a request.
#[derive(Clone, Debug, Default)]
pub struct Toolbox {
    /// Descriptions, in the form of OpenAI's `tools`; empty if the model may call none.
    pub described: Vec<Value>,
    schemas: Vec<ToolSchema>,
    format: Option<ToolCallFormat>,
    /// Whether a message may have several calls.
    parallel: bool,
}

/// What a completion says and calls.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedText {
    /// The text before the calls.
    pub content: String,
    /// The calls, in order.
    pub calls: Vec<ToolCall>,
}

impl Toolbox {
    /// Takes `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's routes. `describe` makes the description that chat
    /// templates take of a tool in the form of its protocol.
    ///
    /// # Errors
    /// A tool without a name; a choice that would need constrained decoding.
    pub(crate) fn take(
        fields: &mut Fields,
        format: ToolCallFormat,
        describe: impl Fn(&Value) -> Option<Value>,
    ) -> Result<Self, ApiError> {
        let tools = fields.list("tools")?.unwrap_or_default();
        let described: Option<Vec<Value>> = tools.iter().map(describe).collect();
        let described =
            described.ok_or_else(|| fields.wrong("tools", "a list of functions, each with a name"))?;
        let parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true);
        let choice = fields.take("tool_choice");
        let kind = match &choice {
            None => "auto",
            Some(Value::String(kind)) => kind,
            Some(object) => object.get("type").and_then(Value::as_str).unwrap_or_default(),
        };
        let one_at_a_time = choice.as_ref().and_then(|choice| choice.get("disable_parallel_tool_use"));
        let parallel = parallel && one_at_a_time != Some(&Value::Bool(true));
        match kind {
            "none" => Ok(Self::default()),
            "auto" if described.is_empty() => Ok(Self::default()),
            "auto" => Ok(Self { parallel, ..Self::of(described, format) }),
            other => Err(ApiError::invalid(
                "tool_choice",
                format!(
                    "`tool_choice` = `{other}` needs constrained decoding, which this endpoint does not have; send auto or none"
                ),
            )),
        }
    }

    /// The tools of a conversation that may be called, as often as the model likes; none if none is described.
    #[must_use]
    pub fn of(described: Vec<Value>, format: ToolCallFormat) -> Self {
        if described.is_empty() {
            return Self::default();
        }
        Self { schemas: schemas(&described), described, format: Some(format), parallel: true }
    }

    /// What `text` says and calls.
    #[must_use]
    pub fn parse(&self, text: &str) -> ParsedText {
        let Some(format) = self.format else {
            return ParsedText { content: text.to_owned(), calls: Vec::new() };
        };
        let read = format.parse(text, &self.schemas);
        let mut calls: Vec<ToolCall> = read.into_iter().filter_map(Result::ok).collect();
        if !self.parallel {
            calls.truncate(1);
        }
        let begin = self.marker_in(text).unwrap_or(text.len());
        if calls.is_empty() {
            return ParsedText { content: text.to_owned(), calls };
        }
        ParsedText { content: text[..begin].trim_end().to_owned(), calls }
    }

    /// How much of `text`, which may grow, is certainly content: what stands before the first place where a call may begin.
    #[must_use]
    pub fn certain(&self, text: &str) -> usize {
        let Some(format) = self.format else { return text.len() };
        let begin = self.marker_in(text).unwrap_or(text.len());
        // The end of the text may be the beginning of a marker.
        let partly = markers(format).iter().filter_map(|marker| {
            let lengths = (1..marker.len()).rev().filter(|n| text.ends_with(&marker[..*n]));
            lengths.map(|n| text.len() - n).next()
        });
        // White space before a call is no content.
        let before = partly.min().unwrap_or(begin).min(begin);
        text[..before].trim_end().len()
    }

    /// Where the first call may begin.
    fn marker_in(&self, text: &str) -> Option<usize> {
        self.format.and_then(|format| markers(format).iter().filter_map(|marker| text.find(marker)).min())
    }
}

/// The text of a completion that is streamed, without its calls.
#[derive(Debug, Default)]
pub(crate) struct ToolStream {
    whole: String,
    /// Bytes that were sent.
    sent: usize,
}

impl ToolStream {
    /// The text that can be sent after `text` more.
    pub(crate) fn push(&mut self, tools: &Toolbox, text: &str) -> String {
        self.whole.push_str(text);
        let end = tools.certain(&self.whole).max(self.sent);
        let piece = self.whole[self.sent..end].to_owned();
        self.sent = end;
        piece
    }

    /// The rest of the text after `text` more, which is the end, and the calls.
    pub(crate) fn end(&mut self, tools: &Toolbox, text: &str) -> (String, Vec<ToolCall>) {
        self.whole.push_str(text);
        let parsed = tools.parse(&self.whole);
        (parsed.content.get(self.sent..).unwrap_or_default().to_owned(), parsed.calls)
    }
}

/// The id of call `n` of choice `choice` of an answer: unique in all answers.
pub(crate) fn call_id(prefix: &str, answer: &str, (choice, n): (usize, usize)) -> String {
    let digest = blake3::hash(format!("{answer} {choice} {n}").as_bytes());
    format!("{prefix}{}", &digest.to_hex()[..24])
}

/// What calls of a form begin with. Markers that are special tokens may be missing from the text.
fn markers(format: ToolCallFormat) -> &'static [&'static str] {
    match format {
        ToolCallFormat::Hermes | ToolCallFormat::Qwen3Coder => &["<tool_call>"],
        ToolCallFormat::Mistral => &["[TOOL_CALLS]", "["],
        ToolCallFormat::Llama3 => &["<|python_tag|>", "{"],
        ToolCallFormat::Json => &["{"],
    }
}

/// A call in the form of OpenAI's chat completions.
#[must_use]
pub(crate) fn openai_call(id: &str, call: &ToolCall) -> Value {
    let arguments = Value::Object(call.arguments.clone()).to_string();
    json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
}

/// The description of a tool of chat completions, if it is one.
pub(crate) fn openai_tool(tool: &Value) -> Option<Value> {
    let named = tool.get("function")?.get("name")?.is_string();
    named.then(|| json!({"type": "function", "function": tool["function"]}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toolbox(format: ToolCallFormat, fields: &Value) -> Result<Toolbox, ApiError> {
        Toolbox::take(&mut Fields::of(fields.as_object().unwrap().clone(), ""), format, openai_tool)
    }

    fn weather() -> Value {
        json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
            "properties": {"city": {"type": "string"}}}}})
    }

    const CALL: &str =
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

    #[test]
    fn calls_are_taken_out_of_the_text() {
        let tools = toolbox(ToolCallFormat::Hermes, &json!({"tools": [weather()]})).unwrap();
        let parsed = tools.parse(&format!("Let me see.\n{CALL}\n{CALL}"));
        assert_eq!((&parsed.content[..], parsed.calls.len()), ("Let me see.", 2));
        let call = openai_call("call_1", &parsed.calls[0]);
        assert_eq!(call["function"], json!({"name": "weather", "arguments": "{\"city\":\"Rome\"}"}));
        let broken = "<tool_call>{\"name\": </tool_call> no";
        assert_eq!(tools.parse(broken), ParsedText { content: broken.to_owned(), calls: Vec::new() });
        let one =
            toolbox(ToolCallFormat::Hermes, &json!({"tools": [weather()], "parallel_tool_calls": false}))
                .unwrap();
        assert_eq!(one.parse(&format!("{CALL}{CALL}")).calls.len(), 1);
    }

    #[test]
    fn without_tools_a_call_is_text() {
        for fields in [json!({}), json!({"tools": [weather()], "tool_choice": "none"}), json!({"tools": []})]
        {
            let tools = toolbox(ToolCallFormat::Hermes, &fields).unwrap();
            assert_eq!((tools.parse(CALL).calls.len(), tools.certain(CALL)), (0, CALL.len()));
        }
    }

    #[test]
    fn a_stream_keeps_back_what_may_be_a_call() {
        let tools = toolbox(ToolCallFormat::Hermes, &json!({"tools": [weather()]})).unwrap();
        let certain = |text: &str| tools.certain(text);
        assert_eq!(certain("hello <b> x"), "hello <b> x".len());
        assert_eq!(certain("hello \n<tool"), "hello".len());
        assert_eq!(certain("hello <tool_call>{"), "hello".len());
        assert_eq!(certain("hello <"), "hello".len());
        let json = toolbox(ToolCallFormat::Json, &json!({"tools": [weather()]})).unwrap();
        assert_eq!(json.certain("use {\"name\""), "use".len());
    }

    #[test]
    fn choices_that_need_constrained_decoding_are_refused() {
        for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
            let error =
                toolbox(ToolCallFormat::Hermes, &json!({"tools": [weather()], "tool_choice": choice}));
            assert_eq!(error.unwrap_err().param.as_deref(), Some("tool_choice"));
        }
        assert!(toolbox(ToolCallFormat::Hermes, &json!({"tools": [{"type": "function"}]})).is_err());
    }
}
