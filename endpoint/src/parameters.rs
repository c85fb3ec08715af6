//! The parameters of sampling, which all protocols share.
//!
//! Invariant: what is sampled is what was asked for: a parameter that this endpoint cannot honour is refused unless it has
//! the value at which it changes nothing.

use model::{Sampling, SpecialTokens, Tokenizer};
use rollout::{RequestOptions, RequestStop};
use serde_json::{Value, json};

use crate::fields::{Fields, token_id};
use crate::{ApiError, EndpointLimits};

/// Lowest temperature above 0.
const COLDEST: f64 = 1e-3;

/// What a request asks of the sampler.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParameters {
    /// Completions per prompt.
    pub samples: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Most tokens of a completion; `None` for what the context leaves.
    pub max_tokens: Option<usize>,
    /// The rest.
    pub options: RequestOptions,
}

impl SamplingParameters {
    /// Takes the parameters that OpenAI's routes and vLLM's share, but the number of log-probabilities and the longest
    /// completion, whose names differ.
    ///
    /// # Errors
    /// A parameter that is out of range or not supported.
    pub fn take(fields: &mut Fields, limits: &EndpointLimits) -> Result<Self, ApiError> {
        refuse(fields)?;
        let samples = fields.count("n", 1..=limits.max_samples)?.unwrap_or(1);
        let sampling = take_sampling(fields)?;
        let stop = take_stop(fields, limits)?;
        // Seeds are any 64 bits; OpenAI's clients send negative ones too.
        let seed = fields.integer("seed", i64::MIN..=i64::MAX)?.map(i64::cast_unsigned);
        let salt = cache_salt(&fields.text("cache_salt")?.unwrap_or_default());
        let options = RequestOptions {
            stop,
            seed,
            score_greedy: true,
            prefix_cache: Some(salt),
            ..RequestOptions::default()
        };
        Ok(Self { samples, sampling, max_tokens: None, options })
    }
}

/// The salt of the prefix cache that a text names.
pub(crate) fn cache_salt(text: &str) -> u64 {
    let digest = blake3::hash(text.as_bytes());
    digest.as_bytes().iter().take(8).fold(0, |salt, byte| (salt << 8) | u64::from(*byte))
}

/// Temperature, top-p, top-k and min-p.
pub(crate) fn take_sampling(fields: &mut Fields) -> Result<Sampling, ApiError> {
    let temperature = fields.number("temperature", 0.0..=100.0)?.unwrap_or(1.0);
    if temperature > 0.0 && temperature < COLDEST {
        return Err(fields.wrong("temperature", &format!("0, or at least {COLDEST}")));
    }
    let top_p = fields.number("top_p", 0.0..=1.0)?.unwrap_or(1.0);
    if top_p == 0.0 {
        return Err(fields.wrong("top_p", "above 0 and at most 1"));
    }
    // -1 means all tokens in vLLM.
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0);
    let min_p = fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.0);
    Ok(Sampling {
        temperature: temperature as f32,
        top_p: top_p as f32,
        top_k: usize::try_from(top_k).unwrap_or(0),
        min_p: min_p as f32,
    })
}

/// `stop`, `stop_token_ids`, `ignore_eos` and `min_tokens`.
fn take_stop(fields: &mut Fields, limits: &EndpointLimits) -> Result<RequestStop, ApiError> {
    let strings = take_stop_strings(fields, "stop", limits)?;
    let token_ids = fields.token_ids("stop_token_ids")?.unwrap_or_default();
    if token_ids.len() > limits.max_stops {
        return Err(fields.wrong("stop_token_ids", &format!("at most {} token ids", limits.max_stops)));
    }
    let ignore_eos = fields.flag("ignore_eos")?.unwrap_or(false);
    let min_tokens = fields.count("min_tokens", 0..=u32::MAX as usize)?.unwrap_or(0);
    Ok(RequestStop { strings, token_ids, ignore_eos, min_tokens })
}

/// A text or a list of texts that end a completion.
pub(crate) fn take_stop_strings(
    fields: &mut Fields,
    name: &str,
    limits: &EndpointLimits,
) -> Result<Vec<String>, ApiError> {
    let strings: Option<Vec<String>> = match fields.take(name) {
        None => Some(Vec::new()),
        Some(Value::String(one)) => Some(vec![one]),
        Some(Value::Array(list)) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        Some(_) => None,
    };
    let strings = strings.ok_or_else(|| fields.wrong(name, "a text or a list of texts"))?;
    let (most, longest) = (limits.max_stops, limits.max_stop_bytes);
    let fits = |text: &String| !text.is_empty() && text.len() <= longest;
    if strings.len() > most || !strings.iter().all(fits) {
        return Err(fields.wrong(name, &format!("at most {most} texts of 1 to {longest} bytes")));
    }
    Ok(strings)
}

/// Parameters that change what is sampled or returned, and that this endpoint does not have.
fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    let neutral: [(&str, &[Value]); 34] = [
        ("frequency_penalty", &[json!(0)]),
        ("presence_penalty", &[json!(0)]),
        ("repetition_penalty", &[json!(1)]),
        ("length_penalty", &[json!(1)]),
        ("logit_bias", &[json!({})]),
        ("best_of", &[json!(1)]),
        ("use_beam_search", &[json!(false)]),
        ("early_stopping", &[json!(false)]),
        ("prompt_logprobs", &[]),
        ("allowed_token_ids", &[]),
        ("bad_words", &[json!([])]),
        ("logits_processors", &[]),
        ("vllm_xargs", &[json!({})]),
        ("response_format", &[json!({"type": "text"})]),
        ("structured_outputs", &[]),
        ("guided_json", &[]),
        ("guided_regex", &[]),
        ("guided_choice", &[]),
        ("guided_grammar", &[]),
        ("json_schema", &[]),
        ("regex", &[]),
        ("ebnf", &[]),
        ("truncate_prompt_tokens", &[]),
        ("include_stop_str_in_output", &[json!(false)]),
        ("skip_special_tokens", &[json!(true)]),
        ("spaces_between_special_tokens", &[json!(true)]),
        ("priority", &[json!(0)]),
        ("mm_processor_kwargs", &[]),
        ("kv_transfer_params", &[]),
        ("documents", &[json!([])]),
        ("lora_path", &[]),
        ("return_sampling_mask", &[json!(false)]),
        ("return_routed_experts", &[json!(false)]),
        ("return_prompt_text", &[json!(false)]),
    ];
    for (name, values) in neutral {
        fields.neutral(name, values)?;
    }
    fields.ignore(&["user", "request_id", "rid", "metadata", "service_tier", "safety_identifier"]);
    fields.ignore(&["store", "prompt_cache_key", "prompt_cache_retention"]);
    Ok(())
}

/// The prompts of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PromptText {
    Text(String),
    Tokens(Vec<u32>),
}

/// The prompts of a request, and whether they came as a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prompts {
    pub(crate) prompts: Vec<PromptText>,
    pub(crate) listed: bool,
}

/// Field `name`: a text, a list of texts, a list of token ids, or a list of such lists.
pub(crate) fn take_prompts(fields: &mut Fields, name: &str, most: usize) -> Result<Prompts, ApiError> {
    let wanted = "a text, a list of texts, a list of token ids, or a list of lists of token ids";
    let value = fields.take(name);
    let value = fields.required(name, value)?;
    let ids = |list: &[Value]| list.iter().map(token_id).collect::<Option<Vec<u32>>>();
    let one = |value: &Value| match value {
        Value::String(text) => Some(PromptText::Text(text.clone())),
        Value::Array(list) => ids(list).map(PromptText::Tokens),
        _ => None,
    };
    let listed = matches!(&value, Value::Array(list) if !list.first().is_some_and(Value::is_number));
    let prompts = match &value {
        Value::String(_) => one(&value).map(|prompt| vec![prompt]),
        Value::Array(list) if list.first().is_some_and(Value::is_number) => {
            ids(list).map(|ids| vec![PromptText::Tokens(ids)])
        }
        Value::Array(list) if list.is_empty() || list.len() > most => None,
        Value::Array(list) => list.iter().map(one).collect(),
        _ => None,
    };
    match prompts {
        Some(prompts) => Ok(Prompts { prompts, listed }),
        None => Err(fields.wrong(name, &format!("{wanted}, at most {most} prompts"))),
    }
}

/// `[P]` the tokens of each prompt; texts get the special tokens that `special` says.
pub(crate) fn encode_prompts(
    prompts: Prompts,
    tokenizer: &Tokenizer,
    special: SpecialTokens,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let encode = |prompt| match prompt {
        PromptText::Tokens(ids) => Ok(ids),
        PromptText::Text(text) => {
            tokenizer.encode(&text, special).map_err(|error| ApiError::invalid("prompt", error.to_string()))
        }
    };
    prompts.prompts.into_iter().map(encode).collect()
}

/// How a token is written in log-probabilities.
#[derive(Clone, Debug)]
pub(crate) struct TokenText {
    pub(crate) tokenizer: Tokenizer,
    /// As `token_id:ID` instead of text.
    pub(crate) as_ids: bool,
}

impl TokenText {
    /// Takes `return_tokens_as_token_ids`.
    pub(crate) fn take(fields: &mut Fields, tokenizer: &Tokenizer) -> Result<Self, ApiError> {
        let as_ids = fields.flag("return_tokens_as_token_ids")?.unwrap_or(false);
        Ok(Self { tokenizer: tokenizer.clone(), as_ids })
    }

    /// The text of a token; empty for a part of a character, whose text is not known alone.
    pub(crate) fn of(&self, token: u32) -> String {
        if self.as_ids {
            return format!("token_id:{token}");
        }
        let text = self.tokenizer.decode_special(&[token]).unwrap_or_default();
        if text.contains('\u{fffd}') { String::new() } else { text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(value: &Value) -> Result<SamplingParameters, ApiError> {
        let mut fields = Fields::parse(value.to_string().as_bytes())?;
        let taken = SamplingParameters::take(&mut fields, &EndpointLimits::default())?;
        fields.finish()?;
        Ok(taken)
    }

    #[test]
    fn defaults_are_the_policys_own_distribution() {
        let taken = take(&json!({})).unwrap();
        assert_eq!((taken.samples, taken.sampling, taken.max_tokens), (1, Sampling::PLAIN, None));
        assert_eq!(taken.options.seed, None);
        assert_eq!(take(&json!({"top_k": -1, "min_p": null})).unwrap().sampling, Sampling::PLAIN);
    }

    #[test]
    fn parameters_are_taken_as_they_are_written() {
        let asked = json!({"n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -1,
            "stop": "END", "stop_token_ids": [4], "ignore_eos": true, "min_tokens": 2, "user": "u"});
        let taken = take(&asked).unwrap();
        let sampling = Sampling { temperature: 0.5, top_p: 0.9, top_k: 7, min_p: 0.1 };
        assert_eq!((taken.samples, taken.sampling, taken.options.seed), (3, sampling, Some(u64::MAX)));
        let stop = RequestStop {
            strings: vec!["END".to_owned()],
            token_ids: vec![4],
            ignore_eos: true,
            min_tokens: 2,
        };
        assert_eq!(taken.options.stop, stop);
        let other = take(&json!({"cache_salt": "a"})).unwrap().options.prefix_cache;
        assert_ne!(other, taken.options.prefix_cache);
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (name, value) in [
            ("frequency_penalty", json!(0.1)),
            ("presence_penalty", json!(-1)),
            ("repetition_penalty", json!(1.1)),
            ("logit_bias", json!({"5": 1})),
            ("prompt_logprobs", json!(1)),
            ("response_format", json!({"type": "json_object"})),
            ("guided_json", json!({})),
            ("include_stop_str_in_output", json!(true)),
            ("temperature", json!(-1)),
            ("temperature", json!(1e-9)),
            ("top_p", json!(0)),
            ("top_k", json!(-2)),
            ("n", json!(0)),
            ("stop", json!([""])),
            ("stop", json!(1)),
            ("min_tokens", json!(-1)),
            ("anything_else", json!(1)),
        ] {
            let error = take(&json!({name: value})).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(name)), "{value}");
        }
        take(&json!({"frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {},
            "response_format": {"type": "text"}}))
        .unwrap();
    }

    #[test]
    fn prompts_have_four_forms() {
        let prompts = |value: Value| {
            let mut fields = Fields::of(json!({"prompt": value}).as_object().unwrap().clone(), "");
            take_prompts(&mut fields, "prompt", 2).map(|taken| taken.prompts)
        };
        let text = |text: &str| PromptText::Text(text.to_owned());
        assert_eq!(prompts(json!("a")).unwrap(), [text("a")]);
        assert_eq!(prompts(json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
        assert_eq!(prompts(json!([1, 2])).unwrap(), [PromptText::Tokens(vec![1, 2])]);
        let lists = [PromptText::Tokens(vec![1]), PromptText::Tokens(vec![2, 3])];
        assert_eq!(prompts(json!([[1], [2, 3]])).unwrap(), lists);
        for wrong in
            [json!([]), json!(["a", "b", "c"]), json!([1, "a"]), json!([[-1]]), json!(7), json!(null)]
        {
            assert_eq!(prompts(wrong.clone()).unwrap_err().status.as_u16(), 400, "{wrong}");
        }
    }
}
