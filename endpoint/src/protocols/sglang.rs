//! SGLang's `/generate`: a text or token ids in, text and token ids out, as generate functions of slime ask.
//!
//! Invariant: `meta_info.output_token_logprobs` has an entry for every token of `output_ids`, whatever the text leaves out.

use model::Tokenizer;
use serde_json::{Map, Value, json};
use trajectory::StopReason;

use super::parts::{MAX_ALTERNATIVES, number};
use crate::ApiError;
use crate::answer::{Choice, Delta, StopMatch, Usage};
use crate::fields::Fields;
use crate::parameters::{SamplingParameters, encode_prompts, take_prompts};
use crate::protocol::{AnswerWriter, Answered, Call, PlannedAnswer, Protocol};
use crate::service::Generation;
use crate::sse::SseEvent;

/// Tokens of a completion whose request does not say how many, as at SGLang.
const DEFAULT_TOKENS: usize = 128;
/// Where requests have the longest completion.
const LENGTH_FIELD: &str = "sampling_params.max_new_tokens";

/// `POST /generate`.
#[derive(Debug)]
pub(crate) struct SglangGenerate;

impl Protocol for SglangGenerate {
    fn read(call: &mut Call) -> Result<PlannedAnswer, ApiError> {
        call.take_model()?;
        let limits = *call.service.limits();
        let tokenizer = call.service.directory().tokenizer().clone();
        let fields = &mut call.fields;
        let name = if fields.has("input_ids") { "input_ids" } else { "text" };
        let prompts = take_prompts(fields, name, limits.max_prompts)?;
        let listed = prompts.listed;
        let prompts = encode_prompts(prompts, &tokenizer, model::SpecialTokens::Add)?;
        let logprobs = fields.flag("return_logprob")?.unwrap_or(false);
        let alternatives = fields.count("top_logprobs_num", 0..=MAX_ALTERNATIVES)?.unwrap_or(0);
        let texts = fields.flag("return_text_in_logprobs")?.unwrap_or(false);
        let id = fields.text("rid")?.unwrap_or_else(|| call.service.id(""));
        fields.neutral("stream", &[json!(false)])?;
        fields.neutral("logprob_start_len", &[json!(-1)])?;
        for name in ["image_data", "video_data", "audio_data", "session_params"] {
            fields.neutral(name, &[json!([])])?;
        }
        for name in ["return_hidden_states", "return_routed_experts"] {
            fields.neutral(name, &[json!(false)])?;
        }
        if let Some(name) = fields.text("lora_path")? {
            call.adapter = call.service.adapter(Some(&name))?;
        }
        fields.ignore(&["log_metrics", "priority", "return_prompt_token_ids"]);
        let asked = fields.object("sampling_params")?.unwrap_or_default();
        let mut asked = Fields::of(asked, "sampling_params");
        let text = AnswerText::take(&mut asked, tokenizer)?;
        let mut parameters = take_parameters(&mut asked, &limits)?;
        parameters.options.alternatives = alternatives;
        asked.finish()?;
        let several = listed || parameters.samples > 1;
        let writer = SglangWriter { id, text, logprobs, texts, several };
        let generation = Generation { prompts, parameters, length_field: LENGTH_FIELD };
        Ok(PlannedAnswer { generation, stream: false, writer: Box::new(writer) })
    }
}

/// Takes the parameters under SGLang's names.
fn take_parameters(
    asked: &mut Fields,
    limits: &crate::EndpointLimits,
) -> Result<SamplingParameters, ApiError> {
    let max_tokens = asked.count("max_new_tokens", 1..=u32::MAX as usize)?.unwrap_or(DEFAULT_TOKENS);
    for (theirs, ours) in [("sampling_seed", "seed"), ("min_new_tokens", "min_tokens")] {
        if let Some(value) = asked.take(theirs) {
            asked.put(ours, value);
        }
    }
    asked.neutral("custom_params", &[json!({})])?;
    let mut parameters = SamplingParameters::take(asked, limits)?;
    parameters.max_tokens = Some(max_tokens);
    Ok(parameters)
}

/// What the text of an answer has.
struct AnswerText {
    tokenizer: Tokenizer,
    /// Whether special tokens are left out.
    skip_special: bool,
    /// Whether the stop token or stop string stays.
    keep_stop: bool,
}

impl AnswerText {
    /// Takes `skip_special_tokens` and `no_stop_trim`.
    fn take(asked: &mut Fields, tokenizer: Tokenizer) -> Result<Self, ApiError> {
        let skip_special = asked.flag("skip_special_tokens")?.unwrap_or(true);
        let keep_stop = asked.flag("no_stop_trim")?.unwrap_or(false);
        asked.ignore(&["spaces_between_special_tokens"]);
        Ok(Self { tokenizer, skip_special, keep_stop })
    }

    fn of(&self, choice: &Choice) -> String {
        let decode = |ids: &[u32]| {
            let decoded = if self.skip_special {
                self.tokenizer.decode(ids)
            } else {
                self.tokenizer.decode_special(ids)
            };
            // The tokens are there as ids in any case.
            decoded.unwrap_or_default()
        };
        let ids = &choice.token_ids[..];
        match (self.keep_stop, self.skip_special, choice.stop, &choice.matched) {
            (true, ..) => decode(ids),
            (false, true, ..) => choice.text.clone(),
            (false, false, StopReason::StopToken, _) => decode(&ids[..ids.len().saturating_sub(1)]),
            (false, false, StopReason::StopString, Some(StopMatch::Text(stop))) => {
                let text = decode(ids);
                text.rfind(stop.as_str()).map_or(text.clone(), |end| text[..end].to_owned())
            }
            (false, false, ..) => decode(ids),
        }
    }
}

/// Writes answers in the form of SGLang.
struct SglangWriter {
    id: String,
    text: AnswerText,
    logprobs: bool,
    /// Whether log-probabilities have the text of their token.
    texts: bool,
    /// Whether the answer is a list.
    several: bool,
}

impl SglangWriter {
    fn finish_reason(choice: &Choice) -> Value {
        match (choice.stop, &choice.matched) {
            (StopReason::Length, _) => json!({"type": "length", "length": choice.token_ids.len()}),
            (_, Some(StopMatch::Token(id))) => json!({"type": "stop", "matched": id}),
            (_, Some(StopMatch::Text(text))) => json!({"type": "stop", "matched": text}),
            (_, None) => json!({"type": "stop", "matched": choice.token_ids.last()}),
        }
    }

    fn entry(&self, token: u32, logprob: f32) -> Value {
        let text = self.texts.then(|| self.text.tokenizer.decode_special(&[token]).unwrap_or_default());
        json!([number(logprob), token, text])
    }

    fn choice(&self, choice: &Choice, prompt: &[u32]) -> Value {
        let mut meta = Map::new();
        let id = if self.several { format!("{}-{}", self.id, choice.index) } else { self.id.clone() };
        meta.insert("id".to_owned(), id.into());
        meta.insert("finish_reason".to_owned(), Self::finish_reason(choice));
        meta.insert("prompt_tokens".to_owned(), prompt.len().into());
        meta.insert("completion_tokens".to_owned(), choice.token_ids.len().into());
        let version = choice.versions.last().map(|run| run.version.0.to_string());
        meta.insert("weight_version".to_owned(), version.into());
        if self.logprobs {
            let sampled = choice.token_ids.iter().zip(&choice.logprobs);
            let entries: Vec<Value> = sampled.map(|(token, logprob)| self.entry(*token, *logprob)).collect();
            meta.insert("output_token_logprobs".to_owned(), entries.into());
            if !choice.alternatives.is_empty() {
                let likely = |likely: &Vec<model::TokenLogprob>| {
                    Value::from(likely.iter().map(|t| self.entry(t.token, t.logprob)).collect::<Vec<_>>())
                };
                let entries: Vec<Value> = choice.alternatives.iter().map(likely).collect();
                meta.insert("output_top_logprobs".to_owned(), entries.into());
            }
        }
        json!({"text": self.text.of(choice), "output_ids": choice.token_ids, "meta_info": meta})
    }
}

impl AnswerWriter for SglangWriter {
    fn id(&self) -> &str {
        &self.id
    }

    fn whole(&mut self, answer: &Answered<'_>) -> Value {
        let prompt =
            |choice: &Choice| answer.prompts.get(choice.prompt).map(Vec::as_slice).unwrap_or_default();
        let mut choices = answer.choices.iter().map(|choice| self.choice(choice, prompt(choice)));
        if self.several {
            return choices.collect::<Vec<_>>().into();
        }
        choices.next().unwrap_or(Value::Null)
    }

    // A request for a stream is refused when it is read.
    fn begin(&mut self, _prompts: &[Vec<u32>]) -> Vec<SseEvent> {
        Vec::new()
    }

    fn delta(&mut self, _delta: &Delta) -> Vec<SseEvent> {
        Vec::new()
    }

    fn end(&mut self, _usage: Usage) -> Vec<SseEvent> {
        Vec::new()
    }
}
