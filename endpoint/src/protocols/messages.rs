//! Anthropic's messages and their token count.
//!
//! Invariant: a conversation has the tokens that the same conversation has in OpenAI's form.

use environments::tool_calls::ToolCall;
use model::ChatMessage;
use rollout::{RequestOptions, RequestStop};
use serde_json::{Map, Value, json};

use crate::ApiError;
use crate::answer::{Choice, Delta, StopMatch, Usage};
use crate::conversation::{Conversation, content_text, template_call, text_message};
use crate::fields::Fields;
use crate::parameters::{SamplingParameters, cache_salt, take_sampling, take_stop_strings};
use crate::protocol::{AnswerWriter, Answered, Call, PlannedAnswer, Protocol};
use crate::service::Generation;
use crate::sse::SseEvent;
use crate::tools::{ToolStream, Toolbox, call_id};

/// `POST /v1/messages`.
#[derive(Debug)]
pub(crate) struct Messages;

impl Protocol for Messages {
    fn read(call: &mut Call) -> Result<PlannedAnswer, ApiError> {
        let model = call.take_model()?;
        let limits = *call.service.limits();
        let max_tokens = call.fields.count("max_tokens", 1..=u32::MAX as usize)?;
        let max_tokens = call.fields.required("max_tokens", max_tokens)?;
        let stream = call.fields.flag("stream")?.unwrap_or(false);
        let sampling = take_sampling(&mut call.fields)?;
        let strings = take_stop_strings(&mut call.fields, "stop_sequences", &limits)?;
        let (conversation, tools) = take_conversation(call)?;
        let prompt = call.encode(conversation)?;
        let options = RequestOptions {
            stop: RequestStop { strings, ..RequestStop::default() },
            score_greedy: true,
            prefix_cache: Some(cache_salt("")),
            ..RequestOptions::default()
        };
        let parameters = SamplingParameters { samples: 1, sampling, max_tokens: Some(max_tokens), options };
        let writer = MessageWriter {
            id: call.service.id("msg_"),
            model,
            tools,
            text: ToolStream::default(),
            blocks: 0,
            open: false,
            reason: Map::new(),
        };
        let generation = Generation { prompts: vec![prompt], parameters, length_field: "max_tokens" };
        Ok(PlannedAnswer { generation, stream, writer: Box::new(writer) })
    }

    fn error(error: &ApiError) -> Value {
        error.anthropic_body()
    }
}

/// Tokens of a conversation: the body of `/v1/messages/count_tokens`.
pub(crate) fn count(call: &mut Call) -> Result<Value, ApiError> {
    call.take_model()?;
    call.fields.ignore(&["max_tokens", "stream"]);
    let (conversation, _) = take_conversation(call)?;
    // Counting is no turn of a session.
    let tokens = call.service.renderer().encode(conversation)?;
    Ok(json!({"input_tokens": tokens.len()}))
}

/// What is said, and the tools.
fn take_conversation(call: &mut Call) -> Result<(Conversation, Toolbox), ApiError> {
    let format = call.service.renderer().format();
    let fields = &mut call.fields;
    let system = fields.take("system");
    let messages = fields.list("messages")?;
    let messages = fields.required("messages", messages)?;
    let tools = Toolbox::take(fields, format, anthropic_tool)?;
    // Thinking is what the model was trained to do; a budget for it is not enforced.
    fields.ignore(&[
        "metadata",
        "service_tier",
        "thinking",
        "context_management",
        "cache_control",
        "user_profile_id",
    ]);
    if let Some(output) = fields.object("output_config")? {
        let mut output = Fields::of(output, "output_config");
        output.neutral("format", &[])?;
        output.ignore(&["effort"]);
        output.finish()?;
    }
    for name in ["container", "mcp_servers", "output_format", "inference_geo"] {
        fields.neutral(name, &[json!([])])?;
    }
    let mut read = Vec::new();
    if let Some(system) = &system {
        let text = content_text(Some(system), "system")?;
        if !text.is_empty() {
            read.push(text_message("system", text));
        }
    }
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty; send at least one message"));
    }
    let last_is_assistant = messages.last().is_some_and(|message| message["role"] == "assistant");
    for (n, message) in messages.iter().enumerate() {
        read.extend(anthropic_message(n, message)?);
    }
    let conversation = Conversation {
        messages: read,
        tools: tools.described.clone(),
        variables: Map::new(),
        // A last message of the assistant is continued.
        add_generation_prompt: !last_is_assistant,
        continue_final_message: last_is_assistant,
    };
    Ok((conversation, tools))
}

/// The description that chat templates take of a tool, which is in OpenAI's form.
fn anthropic_tool(tool: &Value) -> Option<Value> {
    let name = tool.get("name")?.as_str()?;
    // Tools that Anthropic's servers run have a type and no schema.
    let parameters = tool.get("input_schema")?;
    let description = tool.get("description").and_then(Value::as_str).unwrap_or_default();
    Some(
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}),
    )
}

/// The messages of a message: results of tools are messages of their own, before the text beside them.
fn anthropic_message(n: usize, message: &Value) -> Result<Vec<ChatMessage>, ApiError> {
    let place = format!("messages[{n}]");
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
    if !["user", "assistant", "system"].contains(&role) {
        let text = format!("`{place}.role` is `{role}`; it must be user or assistant");
        return Err(ApiError::invalid(&place, text));
    }
    let content = message.get("content").unwrap_or(&Value::Null);
    let Value::Array(blocks) = content else {
        return Ok(vec![text_message(role, content_text(Some(content), &format!("{place}.content"))?)]);
    };
    let (mut results, mut texts, mut whole) = (Vec::new(), Vec::new(), text_message(role, ""));
    for (block_number, block) in blocks.iter().enumerate() {
        let place = format!("{place}.content[{block_number}]");
        match block.get("type").and_then(Value::as_str).unwrap_or_default() {
            "tool_use" => {
                let name = block.get("name").and_then(Value::as_str).unwrap_or_default();
                let input = block.get("input").unwrap_or(&Value::Null);
                whole.tool_calls.push(template_call(block.get("id").and_then(Value::as_str), name, input));
            }
            "tool_result" => {
                let text = content_text(block.get("content"), &format!("{place}.content"))?;
                let mut result = text_message("tool", text);
                let id = block.get("tool_use_id").filter(|id| id.is_string());
                result.extra.extend(id.map(|id| ("tool_call_id".to_owned(), id.clone())));
                results.push(result);
            }
            "thinking" => {
                let text = block.get("thinking").and_then(Value::as_str).unwrap_or_default();
                whole.extra.insert("reasoning_content".to_owned(), text.into());
            }
            "redacted_thinking" => {}
            _ => texts.push(content_text(Some(&Value::Array(vec![block.clone()])), &place)?),
        }
    }
    whole.content = texts.join("\n");
    if !texts.is_empty() || !whole.tool_calls.is_empty() || results.is_empty() {
        results.push(whole);
    }
    Ok(results)
}

/// Writes messages.
struct MessageWriter {
    id: String,
    model: String,
    tools: Toolbox,
    text: ToolStream,
    /// Of a stream: blocks that were begun.
    blocks: usize,
    /// Of a stream: whether the newest block has not ended.
    open: bool,
    /// Of a stream: `stop_reason` and `stop_sequence`, once they are known.
    reason: Map<String, Value>,
}

impl MessageWriter {
    fn message(&self, content: &[Value], reason: Map<String, Value>, usage: Usage) -> Value {
        let mut message = json!({"id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": null, "stop_sequence": null,
            "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}});
        for (key, value) in reason {
            message[key] = value;
        }
        message
    }

    fn call(&self, n: usize, call: &ToolCall) -> (String, Value) {
        (call_id("toolu_", &self.id, (0, n)), Value::Object(call.arguments.clone()))
    }

    /// The events of a block that begins with `block`.
    fn begin_block(&mut self, block: &Value) -> Vec<SseEvent> {
        let mut events: Vec<SseEvent> = self.end_block().into_iter().collect();
        let begun = json!({"type": "content_block_start", "index": self.blocks, "content_block": block});
        events.push(SseEvent::named("content_block_start", &begun));
        self.blocks += 1;
        self.open = true;
        events
    }

    fn in_block(&self, delta: &Value) -> SseEvent {
        let delta =
            json!({"type": "content_block_delta", "index": self.blocks.saturating_sub(1), "delta": delta});
        SseEvent::named("content_block_delta", &delta)
    }

    fn end_block(&mut self) -> Option<SseEvent> {
        let open = std::mem::take(&mut self.open);
        let index = self.blocks.saturating_sub(1);
        open.then(|| {
            SseEvent::named("content_block_stop", &json!({"type": "content_block_stop", "index": index}))
        })
    }
}

/// `stop_reason` and `stop_sequence`.
fn stop_reason(choice: &Choice, called: bool) -> Map<String, Value> {
    let (reason, sequence) = match (&choice.matched, choice.finish_reason()) {
        (Some(StopMatch::Text(text)), _) => ("stop_sequence", Value::from(text.clone())),
        (_, "length") => ("max_tokens", Value::Null),
        _ if called => ("tool_use", Value::Null),
        _ => ("end_turn", Value::Null),
    };
    Map::from_iter([("stop_reason".to_owned(), reason.into()), ("stop_sequence".to_owned(), sequence)])
}

impl AnswerWriter for MessageWriter {
    fn id(&self) -> &str {
        &self.id
    }

    fn whole(&mut self, answer: &Answered<'_>) -> Value {
        let mut content = Vec::new();
        let mut reason = Map::new();
        for choice in answer.choices {
            let parsed = self.tools.parse(&choice.text);
            if !parsed.content.is_empty() || parsed.calls.is_empty() {
                content.push(json!({"type": "text", "text": parsed.content}));
            }
            for (n, call) in parsed.calls.iter().enumerate() {
                let (id, input) = self.call(n, call);
                content.push(json!({"type": "tool_use", "id": id, "name": call.name, "input": input}));
            }
            reason = stop_reason(choice, !parsed.calls.is_empty());
        }
        self.message(&content, reason, answer.usage())
    }

    fn begin(&mut self, prompts: &[Vec<u32>]) -> Vec<SseEvent> {
        let usage = Usage { prompt_tokens: prompts.iter().map(Vec::len).sum(), completion_tokens: 0 };
        let message = self.message(&[], Map::new(), usage);
        vec![SseEvent::named("message_start", &json!({"type": "message_start", "message": message}))]
    }

    fn delta(&mut self, delta: &Delta) -> Vec<SseEvent> {
        let (text, calls) = match delta.ended {
            None => (self.text.push(&self.tools, &delta.text), Vec::new()),
            Some(_) => self.text.end(&self.tools, &delta.text),
        };
        let mut events = Vec::new();
        let only_block = delta.ended.is_some() && self.blocks == 0 && calls.is_empty();
        if (!text.is_empty() || only_block) && !self.open {
            events.extend(self.begin_block(&json!({"type": "text", "text": ""})));
        }
        if !text.is_empty() {
            events.push(self.in_block(&json!({"type": "text_delta", "text": text})));
        }
        for (n, call) in calls.iter().enumerate() {
            let (id, input) = self.call(n, call);
            let block = json!({"type": "tool_use", "id": id, "name": call.name, "input": {}});
            events.extend(self.begin_block(&block));
            let arguments = json!({"type": "input_json_delta", "partial_json": input.to_string()});
            events.push(self.in_block(&arguments));
        }
        if let Some(choice) = &delta.ended {
            self.reason = stop_reason(choice, !calls.is_empty());
        }
        events
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        let mut events: Vec<SseEvent> = self.end_block().into_iter().collect();
        let usage = json!({"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens});
        let delta =
            json!({"type": "message_delta", "delta": std::mem::take(&mut self.reason), "usage": usage});
        events.push(SseEvent::named("message_delta", &delta));
        events.push(SseEvent::named("message_stop", &json!({"type": "message_stop"})));
        events
    }

    fn failed(&mut self, error: &ApiError) -> SseEvent {
        SseEvent::named("error", &error.anthropic_body())
    }
}
