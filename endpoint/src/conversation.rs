//! Conversations as the chat template of the model takes them, and their tokens.
//!
//! Invariant: every protocol's messages become the same [`Conversation`], so that equal conversations have equal tokens
//! whichever client sends them.

use std::sync::Arc;

use environments::tool_calls::{ToolCall, ToolCallFormat, ToolSchema};
use model::{ChatMessage, ChatOptions, ChatTemplate, ModelDirectory, SpecialTokens};
use serde_json::{Map, Value, json};

use crate::ApiError;

/// Variables that a client may not set: the conversation has them.
const OWN_VARIABLES: [&str; 4] = ["messages", "tools", "add_generation_prompt", "documents"];

/// Appended to a message that is continued, so that its end is found in the rendered text. It ends with a space, which a template
/// that trims messages removes.
const CONTINUED: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A conversation whose next message is sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The messages so far.
    pub messages: Vec<ChatMessage>,
    /// Descriptions of tools, in the form of OpenAI's `tools`.
    pub tools: Vec<Value>,
    /// Further variables of the chat template.
    pub variables: Map<String, Value>,
    /// Whether the assistant's turn is opened at the end.
    pub add_generation_prompt: bool,
    /// Whether the last message, of the assistant, is continued.
    pub continue_final_message: bool,
}

/// Renders conversations for one model.
#[derive(Clone, Debug)]
pub struct ChatRenderer {
    directory: Arc<ModelDirectory>,
    /// The form in which the model writes calls of tools.
    format: ToolCallFormat,
    /// Whether the chat template describes tools, and whether it renders calls.
    knows: TemplateKnowledge,
}

#[derive(Clone, Copy, Debug)]
struct TemplateKnowledge {
    tools: bool,
    calls: bool,
}

impl ChatRenderer {
    /// For the model of `directory`.
    #[must_use]
    pub fn new(directory: Arc<ModelDirectory>) -> Self {
        let text = directory.template().map(ChatTemplate::text).unwrap_or_default().into_owned();
        let format = ToolCallFormat::of_template(&text).unwrap_or(ToolCallFormat::Json);
        let knows = TemplateKnowledge { tools: text.contains("tools"), calls: text.contains("tool_calls") };
        Self { directory, format, knows }
    }

    /// The form in which the model writes calls of tools.
    #[must_use]
    pub fn format(&self) -> ToolCallFormat {
        self.format
    }

    /// The model.
    #[must_use]
    pub fn directory(&self) -> &Arc<ModelDirectory> {
        &self.directory
    }

    /// `[P]` tokens of the whole conversation.
    ///
    /// # Errors
    /// A model without chat template, or one that refuses the conversation.
    pub fn encode(&self, conversation: Conversation) -> Result<Vec<u32>, ApiError> {
        let text = self.render(conversation)?;
        let tokens = self.directory.tokenizer().encode(&text, SpecialTokens::Omit);
        let tokens = tokens.map_err(|error| ApiError::invalid("messages", error.to_string()))?;
        if tokens.is_empty() {
            return Err(ApiError::invalid("messages", "the conversation has no tokens; send a message"));
        }
        Ok(tokens)
    }

    /// The text of the whole conversation.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn render(&self, conversation: Conversation) -> Result<String, ApiError> {
        let Conversation { mut messages, tools, variables, add_generation_prompt, continue_final_message } =
            conversation;
        let Some(template) = self.directory.template() else {
            let message =
                "the model has no chat template; use /v1/completions, or give it a chat_template.jinja";
            return Err(ApiError::invalid("messages", message));
        };
        if let Some(name) = OWN_VARIABLES.iter().find(|name| variables.contains_key(**name)) {
            let message =
                format!("`chat_template_kwargs` cannot set `{name}`; the request has a field for it");
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
        if !self.knows.calls {
            messages.iter_mut().for_each(|message| self.write_calls(message));
        }
        if !tools.is_empty() && !self.knows.tools {
            self.describe(&tools, &mut messages);
        }
        let continued = messages.last_mut().filter(|_| continue_final_message);
        let continued = continued.map(|last| {
            let content = last.content.trim().to_owned();
            last.content.push_str(CONTINUED);
            content
        });
        let tools = if self.knows.tools { tools } else { Vec::new() };
        let options = ChatOptions { tools, add_generation_prompt, variables };
        let rendered = template.render_chat(messages, options);
        let rendered = rendered.map_err(|error| ApiError::invalid("messages", error.to_string()))?;
        let Some(content) = continued else { return Ok(rendered) };
        let end = rendered.rfind(CONTINUED.trim_end()).filter(|end| rendered[..*end].contains(&content));
        let Some(end) = end else {
            return Err(ApiError::invalid(
                "continue_final_message",
                "the chat template does not render the last message as it is, so it cannot be continued",
            ));
        };
        let (before, after) = rendered.split_at(end);
        // A template that trims messages would have trimmed the end of this one.
        Ok(if after.starts_with(CONTINUED) { before } else { before.trim_end() }.to_owned())
    }

    /// Writes the calls of a message into its text, for templates that do not.
    fn write_calls(&self, message: &mut ChatMessage) {
        for call in std::mem::take(&mut message.tool_calls) {
            let function = &call["function"];
            let name = function["name"].as_str().unwrap_or_default().to_owned();
            let arguments = function["arguments"].as_object().cloned().unwrap_or_default();
            let written = self.format.write(&ToolCall { name, arguments, id: None });
            if !message.content.is_empty() {
                message.content.push('\n');
            }
            message.content += &written;
        }
    }

    /// Describes tools in the system message, for templates that do not.
    fn describe(&self, tools: &[Value], messages: &mut Vec<ChatMessage>) {
        let described = self.format.describe(&schemas(tools));
        match messages.first_mut().filter(|first| first.role == "system") {
            Some(system) => system.content = format!("{}\n\n{described}", system.content),
            None => messages.insert(0, text_message("system", described)),
        }
    }
}

/// A message with nothing but text.
pub(crate) fn text_message(role: &str, content: impl Into<String>) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content: content.into(), ..ChatMessage::default() }
}

/// A call of a tool as chat templates take it: `arguments` as an object, as transformers has it.
pub(crate) fn template_call(id: Option<&str>, name: &str, arguments: &Value) -> Value {
    let parsed = match arguments {
        Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| arguments.clone()),
        other => other.clone(),
    };
    let mut call = json!({"type": "function", "function": {"name": name, "arguments": parsed}});
    if let (Some(id), Some(map)) = (id, call.as_object_mut()) {
        map.insert("id".to_owned(), Value::from(id));
    }
    call
}

/// What parsers need of OpenAI's `tools`.
pub(crate) fn schemas(tools: &[Value]) -> Vec<ToolSchema> {
    let schema = |tool: &Value| {
        let function = tool.get("function")?;
        Some(ToolSchema {
            name: function.get("name")?.as_str()?.to_owned(),
            description: function.get("description").and_then(Value::as_str).unwrap_or_default().to_owned(),
            parameters: function
                .get("parameters")
                .cloned()
                .unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        })
    };
    tools.iter().filter_map(schema).collect()
}

/// The text of a message's content: a text, or a list of parts with text.
///
/// # Errors
/// Parts that are no text, such as images.
pub(crate) fn content_text(value: Option<&Value>, place: &str) -> Result<String, ApiError> {
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let texts: Result<Vec<&str>, ApiError> =
                parts.iter().map(|part| part_text(part, place)).collect();
            Ok(texts?.join("\n"))
        }
        Some(_) => Err(ApiError::invalid(place, format!("`{place}` must be a text or a list of parts"))),
    }
}

fn part_text<'a>(part: &'a Value, place: &str) -> Result<&'a str, ApiError> {
    if let Value::String(text) = part {
        return Ok(text);
    }
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    let known = ["text", "input_text", "output_text", "refusal"].contains(&kind);
    let text = part.get(if kind == "refusal" { "refusal" } else { "text" }).and_then(Value::as_str);
    text.filter(|_| known).ok_or_else(|| {
        ApiError::invalid(
            place,
            format!("`{place}` has a part of type `{kind}`; this model reads text alone"),
        )
    })
}

/// The messages of OpenAI's chat completions.
///
/// # Errors
/// A message that is none.
pub(crate) fn openai_messages(messages: &[Value]) -> Result<Vec<ChatMessage>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty; send at least one message"));
    }
    (0..).zip(messages).map(|(n, message)| openai_message(n, message)).collect()
}

fn openai_message(n: usize, message: &Value) -> Result<ChatMessage, ApiError> {
    let place = format!("messages[{n}]");
    let Some(role) = message.get("role").and_then(Value::as_str) else {
        return Err(ApiError::invalid(&place, format!("`{place}` has no text `role`")));
    };
    let role = match role {
        "developer" => "system",
        "function" => "tool",
        known @ ("system" | "user" | "assistant" | "tool") => known,
        other => {
            let message = format!("`{place}.role` is `{other}`; it must be system, user, assistant or tool");
            return Err(ApiError::invalid(&place, message));
        }
    };
    let mut extra = Map::new();
    for key in ["name", "tool_call_id"] {
        extra.extend(
            message.get(key).filter(|value| value.is_string()).map(|value| (key.to_owned(), value.clone())),
        );
    }
    // vLLM names it `reasoning`, SGLang and chat templates `reasoning_content`.
    let reasoning = ["reasoning_content", "reasoning"].iter().find_map(|key| message.get(*key)?.as_str());
    extra.extend(reasoning.map(|text| ("reasoning_content".to_owned(), Value::from(text))));
    let calls = message.get("tool_calls").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let calls: Result<Vec<Value>, ApiError> = calls
        .iter()
        .map(|call| {
            let function = call.get("function").unwrap_or(&Value::Null);
            let name = function.get("name").and_then(Value::as_str).ok_or_else(|| {
                ApiError::invalid(
                    &place,
                    format!("a call of `{place}.tool_calls` has no function with a name"),
                )
            })?;
            let arguments = function.get("arguments").unwrap_or(&Value::Null);
            Ok(template_call(call.get("id").and_then(Value::as_str), name, arguments))
        })
        .collect();
    let content = content_text(message.get("content"), &format!("{place}.content"))?;
    Ok(ChatMessage { role: role.to_owned(), content, tool_calls: calls?, extra })
}
