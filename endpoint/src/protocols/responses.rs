//! OpenAI's responses, without state: the whole conversation comes with every request.
//!
//! Invariant: a conversation has the tokens that the same conversation has in chat completions.

mod input;
mod stream;

use serde_json::{Value, json};

use super::parts::{MAX_ALTERNATIVES, TokenDetails};
use crate::ApiError;
use crate::answer::{Choice, Usage};
use crate::conversation::{Conversation, text_message};
use crate::fields::Fields;
use crate::parameters::{SamplingParameters, TokenText};
use crate::protocol::{Call, PlannedAnswer, Protocol};
use crate::service::{Generation, seconds_now};
use crate::tools::{Toolbox, call_id};
use input::input_messages;
use stream::ResponseWriter;

/// `POST /v1/responses`.
#[derive(Debug)]
pub(crate) struct Responses;

impl Protocol for Responses {
    fn read(call: &mut Call) -> Result<PlannedAnswer, ApiError> {
        let model = call.take_model()?;
        let limits = *call.service.limits();
        let format = call.service.renderer().format();
        let fields = &mut call.fields;
        let stream = fields.flag("stream")?.unwrap_or(false);
        let mut parameters = SamplingParameters::take(fields, &limits)?;
        if parameters.samples != 1 {
            return Err(ApiError::invalid("n", "a response has one completion; leave `n` out"));
        }
        parameters.max_tokens = fields.count("max_output_tokens", 1..=u32::MAX as usize)?;
        let includes = fields.list("include")?.unwrap_or_default();
        let logprobs = includes.iter().any(|include| include == "message.output_text.logprobs");
        let alternatives = fields.count("top_logprobs", 0..=MAX_ALTERNATIVES)?.unwrap_or(0);
        parameters.options.alternatives = if logprobs { alternatives } else { 0 };
        let tokens = TokenText::take(fields, call.service.directory().tokenizer())?;
        let described = fields.take("tools");
        if let Some(tools) = &described {
            fields.put("tools", tools.clone());
        }
        let tools = Toolbox::take(fields, format, response_tool)?;
        let (conversation, instructions) = take_conversation(fields, &tools)?;
        refuse(fields)?;
        let writer = ResponseWriter {
            response: ResponseHead {
                id: call.service.id("resp_"),
                created: seconds_now(),
                model,
                instructions,
                tools: described.unwrap_or_else(|| json!([])),
                temperature: parameters.sampling.temperature,
                top_p: parameters.sampling.top_p,
                max_output_tokens: parameters.max_tokens,
            },
            details: TokenDetails { logprobs, token_ids: false, tokens },
            tools,
            text: crate::tools::ToolStream::default(),
            sequence: 0,
            message: None,
            output: Vec::new(),
            choice: None,
        };
        let prompt = call.encode(conversation)?;
        let generation = Generation { prompts: vec![prompt], parameters, length_field: "max_output_tokens" };
        Ok(PlannedAnswer { generation, stream, writer: Box::new(writer) })
    }
}

/// The conversation of `input`, and the instructions before it.
fn take_conversation(fields: &mut Fields, tools: &Toolbox) -> Result<(Conversation, Value), ApiError> {
    let input = fields.take("input");
    let input = fields.required("input", input)?;
    let instructions = fields.text("instructions")?;
    let mut variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(reasoning) = fields.object("reasoning")? {
        let mut reasoning = Fields::of(reasoning, "reasoning");
        if let Some(effort) = reasoning.text("effort")? {
            variables.entry("reasoning_effort").or_insert(effort.into());
        }
        reasoning.ignore(&["summary", "generate_summary"]);
        reasoning.finish()?;
    }
    let mut messages = Vec::new();
    messages.extend(instructions.as_deref().map(|text| text_message("system", text)));
    messages.extend(input_messages(&input)?);
    let conversation = Conversation {
        messages,
        tools: tools.described.clone(),
        variables,
        add_generation_prompt: true,
        continue_final_message: false,
    };
    Ok((conversation, instructions.into()))
}

fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    if let Some(text) = fields.object("text")? {
        let mut text = Fields::of(text, "text");
        text.neutral("format", &[json!({"type": "text"})])?;
        text.neutral("verbosity", &[json!("medium")])?;
        text.finish()?;
    }
    fields.neutral("background", &[json!(false)])?;
    fields.neutral("truncation", &[json!("disabled")])?;
    for name in ["previous_response_id", "conversation", "prompt", "max_tool_calls"] {
        fields.neutral(name, &[])?;
    }
    if let Some(options) = fields.object("stream_options")? {
        let mut options = Fields::of(options, "stream_options");
        options.ignore(&["include_obfuscation"]);
        options.finish()?;
    }
    fields.ignore(&["client_metadata"]);
    Ok(())
}

/// The description that chat templates take of a function: that of responses has no object around it.
fn response_tool(tool: &Value) -> Option<Value> {
    (tool.get("type")? == "function").then_some(())?;
    let name = tool.get("name")?.as_str()?;
    let description = tool.get("description").and_then(Value::as_str).unwrap_or_default();
    let parameters = tool.get("parameters").filter(|schema| schema.is_object()).cloned();
    let parameters = parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}}));
    Some(
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}),
    )
}

/// What a response says of its request.
struct ResponseHead {
    id: String,
    created: u64,
    model: String,
    instructions: Value,
    tools: Value,
    temperature: f32,
    top_p: f32,
    max_output_tokens: Option<usize>,
}

impl ResponseHead {
    /// The response with `output`; `choice` and usage once it has ended.
    fn body(&self, output: &[Value], ended: Option<(&Choice, Usage)>) -> Value {
        let truncated = ended.is_some_and(|(choice, _)| choice.finish_reason() == "length");
        let status = match ended {
            None => "in_progress",
            Some(_) if truncated => "incomplete",
            Some(_) => "completed",
        };
        let usage = ended.map(|(_, usage)| {
            json!({"input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens})
        });
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": null,
            "incomplete_details": truncated.then(|| json!({"reason": "max_output_tokens"})),
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens, "model": self.model,
            "output": output, "parallel_tool_calls": true, "previous_response_id": null,
            "reasoning": {"effort": null, "summary": null}, "store": false,
            "temperature": self.temperature, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
            "tools": self.tools, "top_p": self.top_p, "truncation": "disabled", "usage": usage,
            "user": null, "metadata": {},
        })
    }

    /// Item `n` of the output, a call of a tool.
    fn call(&self, n: usize, call: &environments::tool_calls::ToolCall, status: &str) -> Value {
        json!({"type": "function_call", "id": call_id("fc_", &self.id, (0, n)),
            "call_id": call_id("call_", &self.id, (0, n)), "name": call.name,
            "arguments": Value::Object(call.arguments.clone()).to_string(), "status": status})
    }

    /// The item of the output that is text.
    fn message(&self, content: &[Value], status: &str) -> Value {
        json!({"type": "message", "id": call_id("msg_", &self.id, (0, 0)), "status": status, "role": "assistant",
            "content": content})
    }
}
