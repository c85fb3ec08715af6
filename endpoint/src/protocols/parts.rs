//! Fields that the answers of OpenAI's and vLLM's routes share.
//!
//! Invariant: the number of entries of `logprobs` is the number of tokens, whatever their text: a token that is a part of a
//! character has empty text.

use model::TokenLogprob;
use serde_json::{Map, Value, json};

use crate::ApiError;
use crate::answer::{Choice, StopMatch, Usage};
use crate::fields::Fields;
use crate::parameters::TokenText;

/// Most alternatives per token.
pub(super) const MAX_ALTERNATIVES: usize = rollout::RequestOptions::MAX_ALTERNATIVES;

/// What an answer says of its tokens.
#[derive(Clone, Debug)]
pub(super) struct TokenDetails {
    /// Whether log-probabilities are wanted.
    pub(super) logprobs: bool,
    /// Whether token ids, and versions of the policy, are wanted.
    pub(super) token_ids: bool,
    pub(super) tokens: TokenText,
}

impl TokenDetails {
    /// `logprobs.content` of chat completions for `token_ids [N]` with `logprobs [N]`.
    pub(super) fn content(
        &self,
        token_ids: &[u32],
        logprobs: &[f32],
        alternatives: &[Vec<TokenLogprob>],
    ) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let none = Vec::new();
        let entry = |(n, (token, logprob)): (usize, (&u32, &f32))| {
            let mut entry = self.token(*token, *logprob);
            let likely = alternatives.get(n).unwrap_or(&none).iter();
            let likely: Vec<Value> = likely.map(|t| Value::Object(self.token(t.token, t.logprob))).collect();
            entry.insert("top_logprobs".to_owned(), likely.into());
            Value::Object(entry)
        };
        let entries: Vec<Value> = token_ids.iter().zip(logprobs).enumerate().map(entry).collect();
        json!({"content": entries})
    }

    fn token(&self, token: u32, logprob: f32) -> Map<String, Value> {
        let text = self.tokens.of(token);
        let mut map = Map::new();
        map.insert("bytes".to_owned(), text.as_bytes().into());
        map.insert("token".to_owned(), text.into());
        map.insert("logprob".to_owned(), number(logprob));
        map
    }

    /// Adds `token_ids [N]` to a choice, if they are wanted.
    pub(super) fn add_ids(&self, map: &mut Map<String, Value>, token_ids: &[u32]) {
        if self.token_ids {
            map.insert("token_ids".to_owned(), token_ids.into());
        }
    }

    /// Adds the versions of the policy to a choice that has ended, if they are wanted.
    pub(super) fn add_versions(&self, map: &mut Map<String, Value>, choice: &Choice) {
        if self.token_ids {
            map.insert("weight_versions".to_owned(), weight_versions(choice));
        }
    }
}

/// A log-probability as JSON: the shortest number that is the same f32.
pub(super) fn number(logprob: f32) -> Value {
    // By way of text: as f64 it would have digits that the f32 does not have.
    logprob.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// Spans of versions over the tokens of a choice, in the form of vLLM.
pub(super) fn weight_versions(choice: &Choice) -> Value {
    let mut start = 0;
    let span = |run: &trajectory::VersionRun| {
        let end = start + run.len;
        let span = json!({"version": run.version.0.to_string(), "start": start, "end": end});
        start = end;
        span
    };
    choice.versions.iter().map(span).collect::<Vec<_>>().into()
}

/// What of the request ended a choice, in the form of vLLM.
pub(super) fn stop_reason(choice: &Choice) -> Value {
    match &choice.matched {
        None => Value::Null,
        Some(StopMatch::Token(id)) => (*id).into(),
        Some(StopMatch::Text(text)) => text.clone().into(),
    }
}

/// `usage` of OpenAI's routes.
pub(super) fn usage(usage: Usage) -> Value {
    let Usage { prompt_tokens, completion_tokens } = usage;
    json!({
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": null,
        "completion_tokens_details": null,
    })
}

/// How a stream is wanted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StreamRequest {
    pub(super) stream: bool,
    /// Whether a last chunk has the usage.
    pub(super) usage: bool,
}

impl StreamRequest {
    /// Takes `stream` and `stream_options`.
    pub(super) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let stream = fields.flag("stream")?.unwrap_or(false);
        let Some(options) = fields.object("stream_options")? else {
            return Ok(Self { stream, ..Self::default() });
        };
        let mut options = Fields::of(options, "stream_options");
        let usage = options.flag("include_usage")?.unwrap_or(false);
        options.neutral("continuous_usage_stats", &[json!(false)])?;
        options.ignore(&["include_obfuscation"]);
        options.finish()?;
        Ok(Self { stream, usage })
    }
}

/// The fingerprint of answers: the release of rlrun.
pub(super) const FINGERPRINT: &str = concat!("rlrun-", env!("CARGO_PKG_VERSION"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_same_f32() {
        for logprob in [-0.1_f32, -5.763_214, -1e-30, 0.0, -123.456] {
            let value = number(logprob);
            let back = value.as_f64().unwrap() as f32;
            assert_eq!(back.to_bits(), logprob.to_bits(), "{value}");
        }
        assert_eq!(number(-0.1).to_string(), "-0.1");
    }

    #[test]
    fn options_of_streams_are_checked() {
        let take =
            |value: Value| StreamRequest::take(&mut Fields::of(value.as_object().unwrap().clone(), ""));
        let options = json!({"stream": true, "stream_options": {"include_usage": true}});
        let taken = take(options).unwrap();
        assert!(taken.stream && taken.usage);
        let error = take(json!({"stream_options": {"other": 1}})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stream_options.other"));
    }
}
