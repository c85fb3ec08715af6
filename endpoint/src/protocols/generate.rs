//! vLLM's `/inference/v1/generate`: token ids in, token ids out. The client renders and parses.
//!
//! Invariant: no text is made or read, unless `output_mode` asks for it.

use serde_json::{Map, Value, json};

use super::parts::{MAX_ALTERNATIVES, StreamRequest, number, stop_reason, usage, weight_versions};
use crate::ApiError;
use crate::answer::{Choice, Delta, Usage};
use crate::fields::Fields;
use crate::parameters::SamplingParameters;
use crate::protocol::{AnswerWriter, Answered, Call, PlannedAnswer, Protocol};
use crate::service::{Generation, seconds_now};
use crate::sse::SseEvent;

/// `POST /inference/v1/generate`.
#[derive(Debug)]
pub(crate) struct Generate;

impl Protocol for Generate {
    fn read(call: &mut Call) -> Result<PlannedAnswer, ApiError> {
        let model = call.take_model()?;
        let limits = *call.service.limits();
        let fields = &mut call.fields;
        let prompt = fields.token_ids("token_ids")?;
        let prompt = fields.required("token_ids", prompt)?;
        let stream = StreamRequest::take(fields)?;
        let id = fields.text("request_id")?.unwrap_or_else(|| call.service.id(""));
        let wants_prompt = fields.flag("return_token_ids")?.unwrap_or(false);
        let mode = fields.text("output_mode")?.unwrap_or_else(|| "tokens".to_owned());
        if mode != "tokens" && mode != "text" {
            return Err(fields.wrong("output_mode", "tokens or text"));
        }
        for name in ["features", "content_parts", "kv_transfer_params"] {
            fields.neutral(name, &[])?;
        }
        fields.neutral("priority", &[json!(0)])?;
        let mut inner = fields.object("sampling_params")?.unwrap_or_default();
        // It may be given beside the parameters as well.
        inner.extend(fields.take("cache_salt").map(|salt| ("cache_salt".to_owned(), salt)));
        let mut inner = Fields::of(inner, "sampling_params");
        let mut parameters = SamplingParameters::take(&mut inner, &limits)?;
        parameters.max_tokens = inner.count("max_tokens", 1..=u32::MAX as usize)?;
        let logprobs = inner.count("logprobs", 0..=MAX_ALTERNATIVES)?;
        parameters.options.alternatives = logprobs.unwrap_or(0);
        inner.ignore(&["detokenize", "output_kind"]);
        inner.finish()?;
        let writer = GenerateWriter {
            id: format!("generate-tokens-{id}"),
            created: seconds_now(),
            model,
            logprobs: logprobs.is_some(),
            prompt: wants_prompt.then(|| prompt.clone()),
            text: mode == "text",
            stream,
        };
        let length_field = "max_tokens";
        let generation = Generation { prompts: vec![prompt], parameters, length_field };
        Ok(PlannedAnswer { generation, stream: stream.stream, writer: Box::new(writer) })
    }
}

/// Writes answers of token ids.
struct GenerateWriter {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    /// `[P]` if the answer has it.
    prompt: Option<Vec<u32>>,
    /// Whether choices have text.
    text: bool,
    stream: StreamRequest,
}

impl GenerateWriter {
    fn body(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut body = Map::new();
        body.insert("request_id".to_owned(), self.id.clone().into());
        body.insert("model".to_owned(), self.model.clone().into());
        body.insert("created".to_owned(), self.created.into());
        body.insert("output_mode".to_owned(), if self.text { "text" } else { "tokens" }.into());
        body.insert("choices".to_owned(), choices.into());
        body
    }

    /// A choice, or new tokens of one.
    fn choice(&self, delta: &Delta) -> Value {
        let Delta { index, token_ids, logprobs, alternatives, text, ended } = delta;
        let mut map = Map::new();
        map.insert("index".to_owned(), (*index).into());
        map.insert("finish_reason".to_owned(), ended.as_ref().map(Choice::finish_reason).into());
        map.insert("stop_reason".to_owned(), ended.as_ref().map_or(Value::Null, stop_reason));
        map.insert("token_ids".to_owned(), token_ids.as_slice().into());
        if self.text {
            map.insert("text".to_owned(), text.clone().into());
        }
        if let Some(choice) = ended {
            map.insert("weight_versions".to_owned(), weight_versions(choice));
        }
        if self.logprobs {
            let entry = |(n, (token, logprob)): (usize, (&u32, &f32))| {
                let likely = alternatives.get(n).map(Vec::as_slice).unwrap_or_default();
                let rank = likely.iter().position(|likely| likely.token == *token).map(|at| at + 1);
                let top = |likely: &model::TokenLogprob| json!({"token_id": likely.token, "logprob": number(likely.logprob)});
                let top: Vec<Value> = likely.iter().map(top).collect();
                json!({"token_id": token, "logprob": number(*logprob), "rank": rank, "top_logprobs": top})
            };
            let content: Vec<Value> = token_ids.iter().zip(logprobs).enumerate().map(entry).collect();
            map.insert("logprobs".to_owned(), json!({"content": content}));
        }
        Value::Object(map)
    }
}

impl AnswerWriter for GenerateWriter {
    fn id(&self) -> &str {
        &self.id
    }

    fn whole(&mut self, answer: &Answered<'_>) -> Value {
        let whole = |choice: &Choice| {
            self.choice(&Delta {
                index: choice.index,
                token_ids: choice.token_ids.clone(),
                logprobs: choice.logprobs.clone(),
                alternatives: choice.alternatives.clone(),
                text: choice.text.clone(),
                ended: Some(choice.clone()),
            })
        };
        let mut body = self.body(answer.choices.iter().map(whole).collect());
        body.insert("usage".to_owned(), usage(answer.usage()));
        body.extend(self.prompt.take().map(|prompt| ("prompt_token_ids".to_owned(), prompt.into())));
        Value::Object(body)
    }

    fn begin(&mut self, _prompts: &[Vec<u32>]) -> Vec<SseEvent> {
        Vec::new()
    }

    fn delta(&mut self, delta: &Delta) -> Vec<SseEvent> {
        let mut body = self.body(vec![self.choice(delta)]);
        body.extend(self.prompt.take().map(|prompt| ("prompt_token_ids".to_owned(), prompt.into())));
        vec![SseEvent::data(&Value::Object(body))]
    }

    fn end(&mut self, answer: Usage) -> Vec<SseEvent> {
        let mut events = Vec::new();
        if self.stream.usage {
            let mut body = self.body(Vec::new());
            body.insert("usage".to_owned(), usage(answer));
            events.push(SseEvent::data(&Value::Object(body)));
        }
        events.push(SseEvent::done());
        events
    }
}
