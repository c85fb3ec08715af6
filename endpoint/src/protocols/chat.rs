//! OpenAI's chat completions, with the fields that vLLM and SGLang add for training.
//!
//! Invariant: the tokens of an answer are those that were sampled, whether or not calls of tools were read from their text.

use std::collections::BTreeMap;

use environments::tool_calls::ToolCall;
use serde_json::{Map, Value, json};

use super::parts::{FINGERPRINT, MAX_ALTERNATIVES, StreamRequest, TokenDetails, stop_reason, usage};
use crate::ApiError;
use crate::answer::{Choice, Delta, Usage};
use crate::conversation::{Conversation, openai_messages};
use crate::fields::Fields;
use crate::parameters::{SamplingParameters, TokenText};
use crate::protocol::{AnswerWriter, Answered, Call, PlannedAnswer, Protocol};
use crate::service::{Generation, seconds_now};
use crate::sse::SseEvent;
use crate::tools::{ToolStream, Toolbox, call_id, openai_call, openai_tool};

/// `POST /v1/chat/completions`.
#[derive(Debug)]
pub(crate) struct ChatCompletions;

impl Protocol for ChatCompletions {
    fn read(call: &mut Call) -> Result<PlannedAnswer, ApiError> {
        let model = call.take_model()?;
        let limits = *call.service.limits();
        let format = call.service.renderer().format();
        let fields = &mut call.fields;
        let stream = StreamRequest::take(fields)?;
        let mut parameters = SamplingParameters::take(fields, &limits)?;
        let (length_field, max_tokens) = take_length(fields)?;
        parameters.max_tokens = max_tokens;
        let logprobs = fields.flag("logprobs")?.unwrap_or(false);
        let alternatives = fields.count("top_logprobs", 0..=MAX_ALTERNATIVES)?;
        if alternatives.is_some_and(|n| n > 0) && !logprobs {
            let message = "`top_logprobs` needs `logprobs` = true";
            return Err(ApiError::invalid("top_logprobs", message));
        }
        parameters.options.alternatives = alternatives.unwrap_or(0);
        let details = take_details(fields, logprobs, call.service.directory().tokenizer())?;
        let tools = Toolbox::take(fields, format, openai_tool)?;
        refuse(fields)?;
        let prompt = take_prompt(call, &tools)?;
        let writer = ChatWriter {
            id: call.service.id("chatcmpl-"),
            created: seconds_now(),
            model,
            details,
            tools,
            stream,
            begun: BTreeMap::new(),
            prompt: Vec::new(),
        };
        let generation = Generation { prompts: vec![prompt], parameters, length_field };
        Ok(PlannedAnswer { generation, stream: stream.stream, writer: Box::new(writer) })
    }
}

/// Most tokens of a completion, and the name of the field that says it.
pub(super) fn take_length(fields: &mut Fields) -> Result<(&'static str, Option<usize>), ApiError> {
    let range = 1..=u32::MAX as usize;
    let newer = fields.count("max_completion_tokens", range.clone())?;
    let older = fields.count("max_tokens", range)?;
    Ok(if newer.is_some() { ("max_completion_tokens", newer) } else { ("max_tokens", older) })
}

/// What is wanted of tokens.
pub(super) fn take_details(
    fields: &mut Fields,
    logprobs: bool,
    tokenizer: &model::Tokenizer,
) -> Result<TokenDetails, ApiError> {
    let vllm = fields.flag("return_token_ids")?.unwrap_or(false);
    let sglang = fields.flag("return_prompt_token_ids")?.unwrap_or(false);
    Ok(TokenDetails { logprobs, token_ids: vllm || sglang, tokens: TokenText::take(fields, tokenizer)? })
}

fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    fields.neutral("modalities", &[json!(["text"])])?;
    fields.neutral("verbosity", &[json!("medium")])?;
    fields.neutral("echo", &[json!(false)])?;
    fields.neutral("add_special_tokens", &[json!(false)])?;
    fields.neutral("return_meta_info", &[json!(false)])?;
    for name in ["audio", "prediction", "functions", "function_call", "web_search_options", "chat_template"] {
        fields.neutral(name, &[])?;
    }
    Ok(())
}

/// The tokens of the prompt: given as ids, or those of the messages.
fn take_prompt(call: &mut Call, tools: &Toolbox) -> Result<Vec<u32>, ApiError> {
    let fields = &mut call.fields;
    let given = match fields.token_ids("input_ids")? {
        Some(ids) => Some(ids),
        None => fields.token_ids("prompt_token_ids")?,
    };
    let conversation = take_conversation(fields, tools, given.is_none())?;
    match (given, conversation) {
        (Some(ids), _) => Ok(ids),
        (None, Some(conversation)) => call.encode(conversation),
        (None, None) => Err(ApiError::missing("messages")),
    }
}

/// The conversation of `messages` and what belongs to it; `None` without messages, unless they are `needed`.
pub(super) fn take_conversation(
    fields: &mut Fields,
    tools: &Toolbox,
    needed: bool,
) -> Result<Option<Conversation>, ApiError> {
    let messages = fields.list("messages")?;
    let mut variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(effort) = fields.text("reasoning_effort")? {
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
    let continue_final_message = fields.flag("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.flag("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        let message =
            "a message cannot be continued and followed by another: set `add_generation_prompt` = false";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    let messages = match messages {
        None if needed => return Err(ApiError::missing("messages")),
        None => return Ok(None),
        Some(_) if !needed => return Ok(None),
        Some(messages) => openai_messages(&messages)?,
    };
    Ok(Some(Conversation {
        messages,
        tools: tools.described.clone(),
        variables,
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
    }))
}

/// Writes chat completions.
struct ChatWriter {
    id: String,
    created: u64,
    model: String,
    details: TokenDetails,
    tools: Toolbox,
    stream: StreamRequest,
    /// Of a stream: the choices that have begun, by index.
    begun: BTreeMap<usize, ToolStream>,
    /// `[P]`
    prompt: Vec<u32>,
}

impl ChatWriter {
    fn choice(&self, choice: &Choice) -> Value {
        let parsed = self.tools.parse(&choice.text);
        let called = !parsed.calls.is_empty();
        let content = if called && parsed.content.is_empty() { Value::Null } else { parsed.content.into() };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null, "annotations": null,
            "audio": null, "function_call": null, "reasoning": null, "reasoning_content": null});
        if called {
            let number = choice.index;
            let call = |(n, call)| openai_call(&call_id("call_", &self.id, (number, n)), call);
            let calls: Vec<Value> = parsed.calls.iter().enumerate().map(call).collect();
            message["tool_calls"] = calls.into();
        }
        let Choice { token_ids, logprobs, alternatives, .. } = choice;
        let mut map = Map::new();
        map.insert("index".to_owned(), choice.index.into());
        map.insert("message".to_owned(), message);
        map.insert("logprobs".to_owned(), self.details.content(token_ids, logprobs, alternatives));
        map.insert("finish_reason".to_owned(), finish_reason(choice, called).into());
        map.insert("stop_reason".to_owned(), stop_reason(choice));
        self.details.add_ids(&mut map, token_ids);
        self.details.add_versions(&mut map, choice);
        Value::Object(map)
    }

    fn chunk(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut chunk = Map::new();
        chunk.insert("id".to_owned(), self.id.clone().into());
        chunk.insert("object".to_owned(), "chat.completion.chunk".into());
        chunk.insert("created".to_owned(), self.created.into());
        chunk.insert("model".to_owned(), self.model.clone().into());
        chunk.insert("system_fingerprint".to_owned(), FINGERPRINT.into());
        chunk.insert("choices".to_owned(), choices.into());
        chunk
    }
}

fn finish_reason(choice: &Choice, called: bool) -> &'static str {
    if called && choice.finish_reason() == "stop" { "tool_calls" } else { choice.finish_reason() }
}

impl AnswerWriter for ChatWriter {
    fn id(&self) -> &str {
        &self.id
    }

    fn whole(&mut self, answer: &Answered<'_>) -> Value {
        let choices: Vec<Value> = answer.choices.iter().map(|choice| self.choice(choice)).collect();
        let mut body = json!({"id": self.id, "object": "chat.completion", "created": self.created,
            "model": self.model, "choices": choices, "service_tier": null,
            "system_fingerprint": FINGERPRINT, "usage": usage(answer.usage()), "prompt_logprobs": null});
        if self.details.token_ids {
            body["prompt_token_ids"] = answer.prompts.first().map(Vec::as_slice).into();
        }
        body
    }

    fn begin(&mut self, prompts: &[Vec<u32>]) -> Vec<SseEvent> {
        self.prompt = prompts.first().cloned().unwrap_or_default();
        Vec::new()
    }

    fn delta(&mut self, delta: &Delta) -> Vec<SseEvent> {
        let mut events = Vec::new();
        let index = delta.index;
        if !self.begun.contains_key(&index) {
            events.push(self.first(index));
        }
        let stream = self.begun.entry(index).or_default();
        let (text, calls) = match delta.ended {
            None => (stream.push(&self.tools, &delta.text), Vec::new()),
            Some(_) => stream.end(&self.tools, &delta.text),
        };
        let calls: Vec<Value> =
            calls.iter().enumerate().map(|(n, call)| self.call_delta(index, n, call)).collect();
        let called = !calls.is_empty();
        let mut message = Map::new();
        if !text.is_empty() || !called {
            message.insert("content".to_owned(), text.into());
        }
        if called {
            message.insert("tool_calls".to_owned(), calls.into());
        }
        let mut map = Map::new();
        map.insert("index".to_owned(), index.into());
        map.insert("delta".to_owned(), Value::Object(message));
        let Delta { token_ids, logprobs, alternatives, ended, .. } = delta;
        map.insert("logprobs".to_owned(), self.details.content(token_ids, logprobs, alternatives));
        let reason = ended.as_ref().map(|choice| finish_reason(choice, called));
        map.insert("finish_reason".to_owned(), reason.into());
        self.details.add_ids(&mut map, token_ids);
        if let Some(choice) = ended {
            map.insert("stop_reason".to_owned(), stop_reason(choice));
            self.details.add_versions(&mut map, choice);
        }
        events.push(SseEvent::data(&Value::Object(self.chunk(vec![Value::Object(map)]))));
        events
    }

    fn end(&mut self, answer: Usage) -> Vec<SseEvent> {
        let mut events = Vec::new();
        if self.stream.usage {
            let mut chunk = self.chunk(Vec::new());
            chunk.insert("usage".to_owned(), usage(answer));
            events.push(SseEvent::data(&Value::Object(chunk)));
        }
        events.push(SseEvent::done());
        events
    }
}

impl ChatWriter {
    /// The first chunk of choice `index`.
    fn first(&self, index: usize) -> SseEvent {
        let choice = json!({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null,
            "finish_reason": null});
        let mut chunk = self.chunk(vec![choice]);
        if self.details.token_ids {
            chunk.insert("prompt_token_ids".to_owned(), self.prompt.as_slice().into());
        }
        SseEvent::data(&Value::Object(chunk))
    }

    /// Call `n` of choice `index` as a chunk has it.
    fn call_delta(&self, index: usize, n: usize, call: &ToolCall) -> Value {
        let mut delta = openai_call(&call_id("call_", &self.id, (index, n)), call);
        delta["index"] = n.into();
        delta
    }
}
