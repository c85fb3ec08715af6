//! OpenAI's completions: prompts as texts or as token ids, continued as they are.
//!
//! Invariant: a prompt of token ids is sampled from exactly as it is, without a token before or after it.

use std::collections::HashMap;

use model::{SpecialTokens, TokenLogprob};
use serde_json::{Map, Value, json};

use super::chat::{take_details, take_length};
use super::parts::{FINGERPRINT, MAX_ALTERNATIVES, StreamRequest, TokenDetails, number, stop_reason, usage};
use crate::ApiError;
use crate::answer::{Choice, Delta, Usage};
use crate::parameters::{SamplingParameters, encode_prompts, take_prompts};
use crate::protocol::{AnswerWriter, Answered, Call, PlannedAnswer, Protocol};
use crate::service::{Generation, seconds_now};
use crate::sse::SseEvent;

/// Tokens of a completion whose request does not say how many, as at OpenAI.
const DEFAULT_TOKENS: usize = 16;

/// `POST /v1/completions`.
#[derive(Debug)]
pub(crate) struct Completions;

impl Protocol for Completions {
    fn read(call: &mut Call) -> Result<PlannedAnswer, ApiError> {
        let model = call.take_model()?;
        let limits = *call.service.limits();
        let tokenizer = call.service.directory().tokenizer().clone();
        let fields = &mut call.fields;
        let stream = StreamRequest::take(fields)?;
        let mut parameters = SamplingParameters::take(fields, &limits)?;
        let (length_field, max_tokens) = take_length(fields)?;
        parameters.max_tokens = Some(max_tokens.unwrap_or(DEFAULT_TOKENS));
        let logprobs = fields.count("logprobs", 0..=MAX_ALTERNATIVES)?;
        parameters.options.alternatives = logprobs.unwrap_or(0);
        let details = take_details(fields, logprobs.is_some(), &tokenizer)?;
        fields.neutral("echo", &[json!(false)])?;
        fields.neutral("suffix", &[json!("")])?;
        let special = fields.flag("add_special_tokens")?.unwrap_or(true);
        let special = if special { SpecialTokens::Add } else { SpecialTokens::Omit };
        let prompts = take_prompts(fields, "prompt", limits.max_prompts)?;
        let prompts = encode_prompts(prompts, &tokenizer, special)?;
        let writer = CompletionWriter {
            id: call.service.id("cmpl-"),
            created: seconds_now(),
            model,
            details,
            stream,
            lengths: HashMap::new(),
            prompts: Vec::new(),
            samples: parameters.samples,
        };
        let generation = Generation { prompts, parameters, length_field };
        Ok(PlannedAnswer { generation, stream: stream.stream, writer: Box::new(writer) })
    }
}

/// Writes completions.
struct CompletionWriter {
    id: String,
    created: u64,
    model: String,
    details: TokenDetails,
    stream: StreamRequest,
    /// Of a stream: characters of each choice that were sent.
    lengths: HashMap<usize, usize>,
    /// Of a stream: `[P]` the tokens of each prompt.
    prompts: Vec<Vec<u32>>,
    /// Completions per prompt.
    samples: usize,
}

/// `[N]` tokens with their log-probabilities.
struct TokenRows<'a> {
    token_ids: &'a [u32],
    logprobs: &'a [f32],
    alternatives: &'a [Vec<TokenLogprob>],
}

impl CompletionWriter {
    /// `logprobs` of tokens whose text begins at character `offset` of the completion.
    fn logprobs(&self, tokens: &TokenRows<'_>, mut offset: usize) -> Value {
        if !self.details.logprobs {
            return Value::Null;
        }
        let texts: Vec<String> = tokens.token_ids.iter().map(|id| self.details.tokens.of(*id)).collect();
        let mut offsets = Vec::with_capacity(texts.len());
        for text in &texts {
            offsets.push(offset);
            offset += text.chars().count();
        }
        let chosen: Vec<Value> = tokens.logprobs.iter().map(|logprob| number(*logprob)).collect();
        let none = Vec::new();
        let likely = |n: usize| {
            let mut map = Map::new();
            map.insert(texts[n].clone(), chosen[n].clone());
            for likely in tokens.alternatives.get(n).unwrap_or(&none) {
                map.insert(self.details.tokens.of(likely.token), number(likely.logprob));
            }
            Value::Object(map)
        };
        let likely: Vec<Value> = (0..texts.len()).map(likely).collect();
        json!({"text_offset": offsets, "token_logprobs": chosen, "tokens": texts, "top_logprobs": likely})
    }

    fn choice(&self, choice: &Choice, prompts: &[Vec<u32>]) -> Value {
        let Choice { token_ids, logprobs, alternatives, .. } = choice;
        let mut map = Map::new();
        map.insert("index".to_owned(), choice.index.into());
        map.insert("text".to_owned(), choice.text.clone().into());
        map.insert("logprobs".to_owned(), self.logprobs(&TokenRows { token_ids, logprobs, alternatives }, 0));
        map.insert("finish_reason".to_owned(), choice.finish_reason().into());
        map.insert("stop_reason".to_owned(), stop_reason(choice));
        self.details.add_ids(&mut map, token_ids);
        map.insert("prompt_logprobs".to_owned(), Value::Null);
        if self.details.token_ids {
            map.insert("prompt_token_ids".to_owned(), prompts.get(choice.prompt).map(Vec::as_slice).into());
        }
        self.details.add_versions(&mut map, choice);
        Value::Object(map)
    }

    fn body(&self, choices: &[Value]) -> Value {
        json!({"id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
            "choices": choices, "service_tier": null, "system_fingerprint": FINGERPRINT})
    }
}

impl AnswerWriter for CompletionWriter {
    fn id(&self) -> &str {
        &self.id
    }

    fn whole(&mut self, answer: &Answered<'_>) -> Value {
        let choices = answer.choices.iter().map(|choice| self.choice(choice, answer.prompts));
        let mut body = self.body(&choices.collect::<Vec<_>>());
        body["usage"] = usage(answer.usage());
        body
    }

    fn begin(&mut self, prompts: &[Vec<u32>]) -> Vec<SseEvent> {
        self.prompts = prompts.to_vec();
        Vec::new()
    }

    fn delta(&mut self, delta: &Delta) -> Vec<SseEvent> {
        let Delta { index, token_ids, logprobs, alternatives, text, ended } = delta;
        let first = !self.lengths.contains_key(index);
        let offset = *self.lengths.entry(*index).or_default();
        let mut map = Map::new();
        map.insert("index".to_owned(), (*index).into());
        map.insert("text".to_owned(), text.clone().into());
        map.insert(
            "logprobs".to_owned(),
            self.logprobs(&TokenRows { token_ids, logprobs, alternatives }, offset),
        );
        map.insert("finish_reason".to_owned(), ended.as_ref().map(Choice::finish_reason).into());
        map.insert("stop_reason".to_owned(), ended.as_ref().map_or(Value::Null, stop_reason));
        self.details.add_ids(&mut map, token_ids);
        if first && self.details.token_ids {
            let prompt = self.prompts.get(index / self.samples.max(1));
            map.insert("prompt_token_ids".to_owned(), prompt.map(Vec::as_slice).into());
        }
        if let Some(choice) = ended {
            self.details.add_versions(&mut map, choice);
        }
        self.lengths.insert(*index, offset + text.chars().count());
        vec![SseEvent::data(&self.body(&[Value::Object(map)]))]
    }

    fn end(&mut self, answer: Usage) -> Vec<SseEvent> {
        let mut events = Vec::new();
        if self.stream.usage {
            let mut chunk = self.body(&[]);
            chunk["usage"] = usage(answer);
            events.push(SseEvent::data(&chunk));
        }
        events.push(SseEvent::done());
        events
    }
}
