//! Requests for completions, `asample`.
//!
//! Invariant: every number of a request is within the bounds below before the service sees it.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, SeqAccess, Visitor};
use serde_json::Number;

use super::json::{InputTokens, read_json};
use super::passes::TensorBody;
use super::tensors::ElementBudget;
use super::{WireError, refuse};
use crate::data::{LossValues, SamplingRequest, StopForm};

/// Most completions of a request.
const MAX_SAMPLES: usize = 1024;
/// Most tokens that are reported for a position.
const MAX_ALTERNATIVES: usize = 256;
/// Most stop strings or stop tokens.
const MAX_STOPS: usize = 64;
/// Longest stop string, bytes.
const MAX_STOP_BYTES: usize = 1024;

/// A request for completions, and where it belongs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SampleCall {
    pub(crate) sampling_session_id: String,
    /// From 0.
    pub(crate) seq_id: u64,
    pub(crate) request: SamplingRequest,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SampleBody {
    num_samples: Option<usize>,
    prompt: InputTokens,
    sampling_params: ParametersBody,
    sampling_session_id: Option<String>,
    seq_id: Option<u64>,
    prompt_logprobs: Option<bool>,
    #[serde(default)]
    topk_prompt_logprobs: usize,
    #[serde(default)]
    topk_sample_logprobs: usize,
    target_prompt_logprobs: Option<TensorBody>,
    #[serde(default)]
    prompt_alt_tokens_k: usize,
    prompt_logprobs_last_n: Option<usize>,
    record_stability_info: Option<bool>,
    /// Known to the sampling session.
    #[serde(default, rename = "base_model")]
    _base_model: IgnoredAny,
    /// Known to the sampling session.
    #[serde(default, rename = "model_path")]
    _model_path: IgnoredAny,
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ParametersBody {
    max_tokens: Option<usize>,
    seed: Option<Number>,
    #[serde(default)]
    stop: StopBody,
    temperature: Option<f64>,
    top_k: Option<i64>,
    top_p: Option<f64>,
}

/// `null`, a string, a list of strings or a list of tokens.
#[derive(Default)]
struct StopBody(StopForm);

impl<'de> Deserialize<'de> for StopBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Stop;
        impl<'de> Visitor<'de> for Stop {
            type Value = StopForm;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("null, a string, a list of strings or a list of tokens")
            }

            fn visit_unit<E>(self) -> Result<StopForm, E> {
                Ok(StopForm::Model)
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<StopForm, E> {
                stop_string(text).map(|text| StopForm::Strings(vec![text]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<StopForm, A::Error> {
                let (mut strings, mut tokens) = (Vec::new(), Vec::new());
                while let Some(item) = list.next_element::<StopItem>()? {
                    match item {
                        StopItem::Token(token) => tokens.push(token),
                        StopItem::Text(text) => strings.push(text),
                    }
                    if strings.len() + tokens.len() > MAX_STOPS {
                        return Err(A::Error::custom(format!("`stop` has more than {MAX_STOPS} entries")));
                    }
                }
                match (strings.is_empty(), tokens.is_empty()) {
                    (_, true) if !strings.is_empty() => Ok(StopForm::Strings(strings)),
                    (true, _) => Ok(StopForm::Tokens(tokens)),
                    _ => Err(A::Error::custom("`stop` mixes strings and tokens")),
                }
            }
        }
        deserializer.deserialize_any(Stop).map(Self)
    }
}

enum StopItem {
    Token(u32),
    Text(String),
}

impl<'de> Deserialize<'de> for StopItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Item;
        impl Visitor<'_> for Item {
            type Value = StopItem;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a token")
            }

            fn visit_u64<E: serde::de::Error>(self, token: u64) -> Result<StopItem, E> {
                u32::try_from(token)
                    .map(StopItem::Token)
                    .map_err(|_| E::custom(format!("{token} is no token")))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<StopItem, E> {
                stop_string(text).map(StopItem::Text)
            }
        }
        deserializer.deserialize_any(Item)
    }
}

fn stop_string<E: serde::de::Error>(text: &str) -> Result<String, E> {
    if text.is_empty() || text.len() > MAX_STOP_BYTES {
        return Err(E::custom(format!("a stop string has 1 to {MAX_STOP_BYTES} bytes")));
    }
    Ok(text.to_owned())
}

/// Reads the JSON of `asample`.
///
/// # Errors
/// What is no such JSON, out of its bounds, or not served.
pub(crate) fn sample_from_json(body: &[u8]) -> Result<SampleCall, WireError> {
    let body: SampleBody = read_json(body)?;
    let (Some(sampling_session_id), Some(seq_id)) = (body.sampling_session_id, body.seq_id) else {
        return refuse(
            "`sampling_session_id` and `seq_id` are missing: completions belong to a session of \
             create_sampling_session; use the SDK's sampling client",
        );
    };
    if body.prompt_alt_tokens_k > 0 {
        return refuse("`prompt_alt_tokens_k`: draws at positions of the prompt are not served here");
    }
    if body.record_stability_info == Some(true) {
        return refuse(
            "`record_stability_info`: it is for the loss stable_reinforce, which is not served here; use \
             loss_fn=importance_sampling",
        );
    }
    let prompt = body.prompt.0;
    if prompt.is_empty() {
        return refuse("`prompt`: it has no tokens");
    }
    let samples = bounded("num_samples", body.num_samples.unwrap_or(1), 1, MAX_SAMPLES)?;
    let alternatives = bounded("topk_sample_logprobs", body.topk_sample_logprobs, 0, MAX_ALTERNATIVES)?;
    let prompt_alternatives =
        bounded("topk_prompt_logprobs", body.topk_prompt_logprobs, 0, MAX_ALTERNATIVES)?;
    let prompt_logprobs = body.prompt_logprobs.unwrap_or(false);
    if let Some(last) = body.prompt_logprobs_last_n {
        if !prompt_logprobs && prompt_alternatives == 0 {
            return refuse("`prompt_logprobs_last_n` needs `prompt_logprobs`");
        }
        bounded("prompt_logprobs_last_n", last, 1, prompt.len() - 1)?;
    }
    let prompt_targets = match body.target_prompt_logprobs {
        None => None,
        Some(tensor) => Some(targets(tensor, prompt.len() - 1)?),
    };
    let parameters = body.sampling_params.checked()?;
    let request = SamplingRequest {
        prompt,
        samples,
        alternatives,
        prompt_logprobs,
        prompt_alternatives,
        prompt_last: body.prompt_logprobs_last_n,
        prompt_targets,
        ..parameters
    };
    Ok(SampleCall { sampling_session_id, seq_id, request })
}

impl ParametersBody {
    /// A request of these parameters, without a prompt.
    fn checked(self) -> Result<SamplingRequest, WireError> {
        let temperature = self.temperature.unwrap_or(1.0);
        if !(0.0..=1e6).contains(&temperature) {
            return refuse(format!("`temperature`: {temperature} is not between 0 and 1e6"));
        }
        let top_p = self.top_p.unwrap_or(1.0);
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refuse(format!("`top_p`: {top_p} is not above 0 and at most 1"));
        }
        let top_k = match self.top_k.unwrap_or(-1) {
            -1 | 0 => None,
            top_k => match usize::try_from(top_k) {
                Ok(top_k) => Some(top_k),
                Err(_) => return refuse(format!("`top_k`: {top_k} is neither -1 nor a number of tokens")),
            },
        };
        if self.max_tokens == Some(0) {
            return refuse("`max_tokens`: a completion has at least 1 token");
        }
        let seed = match &self.seed {
            None => None,
            Some(seed) => match seed.as_u64().or_else(|| seed.as_i64().map(i64::cast_unsigned)) {
                Some(seed) => Some(seed),
                None => return refuse(format!("`seed`: {seed} is no integer of 64 bits")),
            },
        };
        Ok(SamplingRequest {
            prompt: Vec::new(),
            samples: 1,
            max_tokens: self.max_tokens,
            seed,
            stop: self.stop.0,
            temperature: temperature as f32,
            top_k,
            top_p: top_p as f32,
            alternatives: 0,
            prompt_logprobs: false,
            prompt_alternatives: 0,
            prompt_last: None,
            prompt_targets: None,
        })
    }
}

fn bounded(name: &str, value: usize, least: usize, most: usize) -> Result<usize, WireError> {
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    refuse(format!("`{name}`: {value} is not between {least} and {most}"))
}

/// `[positions, K]` tokens, negative for none, and `K`.
fn targets(tensor: TensorBody, positions: usize) -> Result<(Vec<i64>, usize), WireError> {
    let name = "target_prompt_logprobs";
    let tensor = tensor.into_sent(name)?.dense(name, -1, &mut ElementBudget::new())?;
    let (LossValues::Int(tokens), [rows, width]) = (tensor.values, &tensor.shape[..]) else {
        return refuse(format!("`{name}`: it is of type int64 and has two dimensions"));
    };
    if *rows != positions || *width == 0 {
        return refuse(format!(
            "`{name}`: shape [{rows}, {width}] does not fit the {positions} tokens after the first of the prompt"
        ));
    }
    Ok((tokens, *width))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// As SDK 0.38.0 sends it.
    fn body() -> Value {
        json!({
            "num_samples": 2,
            "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}, {"tokens": [3], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 3, "stop": [2], "temperature": 1.0, "top_k": -1, "top_p": 1.0},
            "sampling_session_id": "s1:sample:0", "seq_id": 0, "prompt_logprobs": false,
            "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0, "prompt_alt_tokens_k": 0,
            "record_stability_info": false, "type": "sample",
        })
    }

    fn read(body: &Value) -> Result<SampleCall, WireError> {
        sample_from_json(body.to_string().as_bytes())
    }

    #[test]
    fn a_request_of_the_sdk_is_read() {
        let call = read(&body()).unwrap();
        assert_eq!((&call.sampling_session_id[..], call.seq_id), ("s1:sample:0", 0));
        assert_eq!((&call.request.prompt[..], call.request.samples), (&[1, 2, 3][..], 2));
        assert_eq!((call.request.stop, call.request.top_k), (StopForm::Tokens(vec![2]), None));
    }

    #[test]
    fn stop_has_four_forms() {
        for (stop, form) in [
            (json!(null), StopForm::Model),
            (json!([]), StopForm::Tokens(Vec::new())),
            (json!("a"), StopForm::Strings(vec!["a".to_owned()])),
            (json!(["a", "b"]), StopForm::Strings(vec!["a".to_owned(), "b".to_owned()])),
            (json!([5, 6]), StopForm::Tokens(vec![5, 6])),
        ] {
            let mut body = body();
            body["sampling_params"]["stop"] = stop;
            assert_eq!(read(&body).unwrap().request.stop, form);
        }
    }

    #[test]
    fn what_is_out_of_bounds_or_not_served_is_refused_by_name() {
        for (name, value) in [
            ("num_samples", json!(0)),
            ("num_samples", json!(MAX_SAMPLES + 1)),
            ("topk_prompt_logprobs", json!(MAX_ALTERNATIVES + 1)),
            ("prompt_alt_tokens_k", json!(1)),
            ("record_stability_info", json!(true)),
            ("prompt_logprobs_last_n", json!(1)),
            ("seq_id", json!(null)),
            ("logit_bias", json!({})),
            ("prompt", json!({"chunks": []})),
            ("target_prompt_logprobs", json!({"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1]})),
        ] {
            let mut body = body();
            body[name] = value.clone();
            let error = read(&body).unwrap_err();
            assert!(error.0.contains(&format!("`{name}`")), "{name} {value}: {error}");
        }
        for (name, value) in [
            ("temperature", json!(-1)),
            ("top_p", json!(0)),
            ("top_k", json!(-2)),
            ("max_tokens", json!(0)),
            ("seed", json!(1.5)),
            ("min_p", json!(0.1)),
            ("stop", json!(["a", 1])),
            ("stop", json!(vec![1; MAX_STOPS + 1])),
        ] {
            let mut body = body();
            body["sampling_params"][name] = value.clone();
            let error = read(&body).unwrap_err();
            assert!(error.0.contains(&format!("`{name}`")), "{name} {value}: {error}");
        }
    }

    #[test]
    fn an_image_in_the_prompt_is_refused_with_the_reason() {
        let mut body = body();
        body["prompt"] = json!({"chunks": [{"type": "image", "data": "AA==", "format": "png"}]});
        let error = read(&body).unwrap_err();
        assert!(error.0.contains("chunks of type `image` are not served here"), "{error}");
    }

    /// Cells that a sparse tensor does not list ask for nothing.
    #[test]
    fn sparse_targets_are_made_dense() {
        let mut body = body();
        body["target_prompt_logprobs"] = json!({
            "data": [7], "dtype": "int64", "shape": [2, 2],
            "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [1],
        });
        let call = read(&body).unwrap();
        assert_eq!(call.request.prompt_targets, Some((vec![-1, -1, -1, 7], 2)));
    }
}
