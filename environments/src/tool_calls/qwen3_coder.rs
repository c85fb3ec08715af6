//! `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>..</function></tool_call>`, as Qwen3-Coder writes calls.
//!
//! Invariant: a value is text unless the schema of the tool gives its parameter another type, and it can be read as that.

use serde_json::{Map, Value};

use super::{BadCall, ToolCall, ToolSchema, between};

pub(super) fn parse(text: &str, tools: &[ToolSchema]) -> Vec<Result<ToolCall, BadCall>> {
    let calls = between(text, "<tool_call>", "</tool_call>");
    calls.into_iter().map(|call| function(call, tools)).collect()
}

fn function(call: &str, tools: &[ToolSchema]) -> Result<ToolCall, BadCall> {
    const FORM: &str =
        "write <tool_call><function=TOOL><parameter=NAME>VALUE</parameter></function></tool_call>";
    let named = call.split_once("<function=").and_then(|(_, behind)| behind.split_once('>'));
    let Some((name, body)) = named else {
        return Err(BadCall::new(format!("the tool call names no function; {FORM}")));
    };
    let name = name.trim().to_owned();
    let body = body.split_once("</function>").map_or(body, |(body, _)| body);
    let tool = tools.iter().find(|tool| tool.name == name);
    let mut arguments = Map::new();
    for parameter in between(body, "<parameter=", "</parameter>") {
        let Some((key, value)) = parameter.split_once('>') else {
            return Err(BadCall::new(format!("a parameter of {name} has no value; {FORM}")));
        };
        let key = key.trim().to_owned();
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let text = tool.is_none_or(|tool| tool.is_text(&key));
        let read = if text { None } else { serde_json::from_str(value).ok() };
        arguments.insert(key, read.unwrap_or_else(|| Value::from(value)));
    }
    Ok(ToolCall { name, arguments, id: None })
}

pub(super) fn write(call: &ToolCall) -> String {
    let mut text = format!("<tool_call>\n<function={}>\n", call.name);
    for (key, value) in &call.arguments {
        let value = value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
        text += &format!("<parameter={key}>\n{value}\n</parameter>\n");
    }
    text + "</function>\n</tool_call>"
}
