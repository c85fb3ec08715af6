//! The answer to a response, whole or as events.
//!
//! Invariant: the response of the last event is the response that a request without a stream gets.

use environments::tool_calls::ToolCall;
use serde_json::{Value, json};

use super::super::parts::TokenDetails;
use super::ResponseHead;
use crate::answer::{Choice, Delta, Usage};
use crate::protocol::{AnswerWriter, Answered};
use crate::sse::SseEvent;
use crate::tools::{ToolStream, Toolbox};

/// Writes responses.
pub(super) struct ResponseWriter {
    pub(super) response: ResponseHead,
    pub(super) details: TokenDetails,
    pub(super) tools: Toolbox,
    pub(super) text: ToolStream,
    /// Number of the next event.
    pub(super) sequence: u64,
    /// Of a stream: the text that was sent, once the message has begun.
    pub(super) message: Option<String>,
    /// Of a stream: finished items.
    pub(super) output: Vec<Value>,
    /// Of a stream: the completion, once it has ended.
    pub(super) choice: Option<Choice>,
}

impl ResponseWriter {
    fn event(&mut self, name: &str, mut fields: Value) -> SseEvent {
        fields["type"] = name.into();
        fields["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        SseEvent::named(name, &fields)
    }

    fn text_part(&self, text: &str, choice: Option<&Choice>) -> Value {
        let logprobs =
            choice.map(|choice| self.logprobs(&choice.token_ids, choice)).unwrap_or_else(|| json!([]));
        json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
    }

    fn logprobs(&self, token_ids: &[u32], choice: &Choice) -> Value {
        match self.details.content(token_ids, &choice.logprobs, &choice.alternatives) {
            Value::Object(mut content) => content.remove("content").unwrap_or_else(|| json!([])),
            _ => json!([]),
        }
    }

    /// The items of a completion.
    fn items(&self, choice: &Choice, text: &str, calls: &[ToolCall]) -> Vec<Value> {
        let status = item_status(choice);
        let mut items = Vec::new();
        if !text.is_empty() || calls.is_empty() {
            items.push(self.response.message(&[self.text_part(text, Some(choice))], status));
        }
        items.extend(calls.iter().enumerate().map(|(n, call)| self.response.call(n, call, status)));
        items
    }

    /// The events with which the message begins.
    fn begin_message(&mut self) -> Vec<SseEvent> {
        self.message = Some(String::new());
        let item = self.response.message(&[], "in_progress");
        let (id, part) = (item["id"].clone(), self.text_part("", None));
        vec![
            self.event("response.output_item.added", json!({"output_index": 0, "item": item})),
            self.event(
                "response.content_part.added",
                json!({"item_id": id, "output_index": 0, "content_index": 0, "part": part}),
            ),
        ]
    }

    /// The events with which the message ends.
    fn end_message(&mut self, item: &Value) -> Vec<SseEvent> {
        let (id, part) = (item["id"].clone(), item["content"][0].clone());
        let place = json!({"item_id": id, "output_index": 0, "content_index": 0});
        let mut done = place.clone();
        done["text"] = part["text"].clone();
        done["logprobs"] = part["logprobs"].clone();
        let mut part_done = place;
        part_done["part"] = part;
        vec![
            self.event("response.output_text.done", done),
            self.event("response.content_part.done", part_done),
            self.event("response.output_item.done", json!({"output_index": 0, "item": item})),
        ]
    }

    /// The events of a call, whole.
    fn call_events(&mut self, at: usize, item: &Value) -> Vec<SseEvent> {
        let mut begun = item.clone();
        begun["arguments"] = "".into();
        begun["status"] = "in_progress".into();
        let (id, arguments) = (item["id"].clone(), item["arguments"].clone());
        let delta = json!({"item_id": id, "output_index": at, "delta": arguments});
        let done = json!({"item_id": id, "output_index": at, "arguments": arguments, "name": item["name"]});
        vec![
            self.event("response.output_item.added", json!({"output_index": at, "item": begun})),
            self.event("response.function_call_arguments.delta", delta),
            self.event("response.function_call_arguments.done", done),
            self.event("response.output_item.done", json!({"output_index": at, "item": item})),
        ]
    }
}

fn item_status(choice: &Choice) -> &'static str {
    if choice.finish_reason() == "length" { "incomplete" } else { "completed" }
}

impl AnswerWriter for ResponseWriter {
    fn id(&self) -> &str {
        &self.response.id
    }

    fn whole(&mut self, answer: &Answered<'_>) -> Value {
        let Some(choice) = answer.choices.first() else { return Value::Null };
        let parsed = self.tools.parse(&choice.text);
        let items = self.items(choice, &parsed.content, &parsed.calls);
        self.response.body(&items, Some((choice, answer.usage())))
    }

    fn begin(&mut self, _prompts: &[Vec<u32>]) -> Vec<SseEvent> {
        let response = self.response.body(&[], None);
        vec![
            self.event("response.created", json!({"response": response})),
            self.event("response.in_progress", json!({"response": response})),
        ]
    }

    fn delta(&mut self, delta: &Delta) -> Vec<SseEvent> {
        let (text, calls) = match delta.ended {
            None => (self.text.push(&self.tools, &delta.text), Vec::new()),
            Some(_) => self.text.end(&self.tools, &delta.text),
        };
        let mut events = Vec::new();
        let only_item = delta.ended.is_some() && calls.is_empty();
        if (!text.is_empty() || only_item) && self.message.is_none() {
            events.extend(self.begin_message());
        }
        if !text.is_empty() {
            let id = self.response.message(&[], "")["id"].clone();
            let fields =
                json!({"item_id": id, "output_index": 0, "content_index": 0, "delta": text, "logprobs": []});
            events.push(self.event("response.output_text.delta", fields));
            self.message.get_or_insert_default().push_str(&text);
        }
        if let Some(choice) = &delta.ended {
            let whole = self.message.clone().unwrap_or_default();
            let items = self.items(choice, &whole, &calls);
            for (at, item) in items.iter().enumerate() {
                events.extend(match item["type"] == "message" {
                    true => self.end_message(item),
                    false => self.call_events(at, item),
                });
            }
            self.output = items;
            self.choice = Some(choice.clone());
        }
        events
    }

    fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
        let Some(choice) = self.choice.take() else { return Vec::new() };
        let output = std::mem::take(&mut self.output);
        let response = self.response.body(&output, Some((&choice, usage)));
        let truncated = choice.finish_reason() == "length";
        let name = if truncated { "response.incomplete" } else { "response.completed" };
        vec![self.event(name, json!({"response": response}))]
    }

    fn failed(&mut self, error: &crate::ApiError) -> SseEvent {
        let message = error.message.clone();
        self.event("error", json!({"code": error.kind, "message": message, "param": error.param}))
    }
}
