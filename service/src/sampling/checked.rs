//! Sampling requests before the engine sees them: what is wrong with one is said here, to its user.
//!
//! Invariant: the engine can carry out what was checked, whatever it has in progress.

use std::sync::Arc;

use model::Sampling;
use rollout::{RequestOptions, RequestStop};

use crate::data::{SamplingRequest, StopForm};
use crate::outcome::{FailedRequest, FailureCategory};

/// Most strings or tokens that end a completion.
const MAX_STOPS: usize = 256;
/// Smallest temperature above 0: smaller ones are greedy, up to rounding.
const MIN_TEMPERATURE: f32 = 1e-4;

/// What requests may ask for.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestLimits {
    /// Tokens of the vocabulary.
    pub(super) vocabulary: usize,
    /// Longest prompt and completion together, tokens.
    pub(super) max_context: usize,
    /// Most completions of a prompt.
    pub(super) max_samples: usize,
}

/// A request that can be carried out.
#[derive(Clone, Debug)]
pub(super) struct CheckedRequest {
    /// `[P]`
    pub(super) prompt: Arc<[u32]>,
    pub(super) samples: usize,
    pub(super) sampling: Sampling,
    /// 0 if the prompt is scored alone: it fills the longest sequence.
    pub(super) max_completion_length: usize,
    /// Without the adapter.
    pub(super) options: RequestOptions,
    /// What is wanted of the prompt; `None` for nothing.
    pub(super) query: Option<PromptQuery>,
}

/// What is wanted of a prompt of `P` tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct PromptQuery {
    pub(super) logprobs: bool,
    /// Most likely tokens at each position.
    pub(super) alternatives: usize,
    /// Only so many of the last positions are scored.
    pub(super) last: Option<usize>,
    /// `[P - 1][K]` tokens, negative for none, and `K`.
    pub(super) targets: Option<(Vec<i64>, usize)>,
}

/// A failure that the user of the request can avoid.
pub(super) fn user_failure(message: String) -> FailedRequest {
    FailedRequest { category: FailureCategory::User, message }
}

/// A failure of the service.
pub(super) fn server_failure(message: String) -> FailedRequest {
    FailedRequest { category: FailureCategory::Server, message }
}

/// The request, if the engine can carry it out.
///
/// # Errors
/// What is wrong with it, and the remedy.
pub(super) fn checked(
    request: SamplingRequest,
    limits: RequestLimits,
    prefix_cache: Option<u64>,
) -> Result<CheckedRequest, FailedRequest> {
    let length = request.prompt.len();
    check_tokens("the prompt", &request.prompt, limits)?;
    if length == 0 {
        return Err(user_failure("the prompt has no tokens; a model continues at least one".to_owned()));
    }
    let max_samples = limits.max_samples;
    if request.samples == 0 || request.samples > max_samples {
        let asked = request.samples;
        return Err(user_failure(format!(
            "{asked} samples were asked for; ask for 1 to {max_samples} in one request"
        )));
    }
    let is_scored =
        request.prompt_logprobs || request.prompt_alternatives > 0 || request.prompt_targets.is_some();
    let max_completion_length = match request.max_tokens {
        // Clients that want log-probabilities ask for a completion of one token, and do not read it.
        None | Some(1) if is_scored && length == limits.max_context => 0,
        asked => completion_length(length, asked, limits)?,
    };
    let sampling = sampling(&request)?;
    let most = RequestOptions::MAX_ALTERNATIVES;
    for asked in [request.alternatives, request.prompt_alternatives] {
        if asked > most {
            return Err(user_failure(format!(
                "the {asked} most likely tokens were asked for; ask for at most {most}"
            )));
        }
    }
    let stop = stop(&request.stop, limits)?;
    if let Some((targets, width)) = &request.prompt_targets {
        check_targets(targets, *width, length, limits)?;
    }
    let query = PromptQuery {
        logprobs: request.prompt_logprobs,
        alternatives: request.prompt_alternatives,
        last: request.prompt_last,
        targets: request.prompt_targets,
    };
    let seed = match request.seed {
        Some(seed) => seed,
        None => getrandom::u64().map_err(|error| {
            server_failure(format!("the system has no random numbers: {error}; try again"))
        })?,
    };
    let options = RequestOptions {
        stop,
        seed: Some(seed),
        alternatives: request.alternatives,
        score_greedy: true,
        prefix_cache,
        ..RequestOptions::default()
    };
    Ok(CheckedRequest {
        prompt: request.prompt.into(),
        samples: request.samples,
        sampling,
        max_completion_length,
        options,
        query: is_scored.then_some(query),
    })
}

fn check_tokens(what: &str, tokens: &[u32], limits: RequestLimits) -> Result<(), FailedRequest> {
    let vocabulary = limits.vocabulary;
    match tokens.iter().position(|token| *token as usize >= vocabulary) {
        None => Ok(()),
        Some(at) => Err(user_failure(format!(
            "{what} has the token {} at position {at}, and the vocabulary of the model has {vocabulary}; use its tokenizer",
            tokens[at]
        ))),
    }
}

/// The longest completion of a prompt of `length` tokens.
fn completion_length(
    length: usize,
    asked: Option<usize>,
    limits: RequestLimits,
) -> Result<usize, FailedRequest> {
    let context = limits.max_context;
    let left = context.saturating_sub(length);
    if left == 0 {
        return Err(user_failure(format!(
            "the prompt has {length} tokens and the longest sequence {context}, which leaves none for a completion; \
             shorten the prompt"
        )));
    }
    match asked {
        None => Ok(left),
        Some(0) => Err(user_failure("max_tokens is 0; ask for at least 1".to_owned())),
        Some(asked) if asked > left => Err(user_failure(format!(
            "the prompt has {length} tokens and max_tokens is {asked}, and the longest sequence has {context}; lower \
             max_tokens to {left} or shorten the prompt"
        ))),
        Some(asked) => Ok(asked),
    }
}

fn sampling(request: &SamplingRequest) -> Result<Sampling, FailedRequest> {
    let SamplingRequest { temperature, top_p, top_k, .. } = *request;
    if !temperature.is_finite() || (temperature != 0.0 && temperature < MIN_TEMPERATURE) {
        return Err(user_failure(format!(
            "the temperature is {temperature}; use 0 for the most likely token, or at least {MIN_TEMPERATURE}"
        )));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(user_failure(format!("top_p is {top_p}; use a probability above 0, 1 for all tokens")));
    }
    if top_k == Some(0) {
        return Err(user_failure("top_k is 0; use at least 1, or -1 for all tokens".to_owned()));
    }
    // A greedy choice is among all tokens.
    let truncates = temperature > 0.0;
    let top_k = top_k.filter(|_| truncates).unwrap_or(0);
    Ok(Sampling { temperature, top_p: if truncates { top_p } else { 1.0 }, top_k, min_p: 0.0 })
}

fn stop(form: &StopForm, limits: RequestLimits) -> Result<RequestStop, FailedRequest> {
    let count = match form {
        StopForm::Model => 0,
        StopForm::Strings(strings) => strings.len(),
        StopForm::Tokens(tokens) => tokens.len(),
    };
    if count > MAX_STOPS {
        return Err(user_failure(format!("{count} stops were given; give at most {MAX_STOPS}")));
    }
    Ok(match form {
        StopForm::Model => RequestStop::default(),
        StopForm::Strings(strings) => {
            if strings.iter().any(String::is_empty) {
                return Err(user_failure(
                    "a stop string is empty, and would end every completion; leave it out".to_owned(),
                ));
            }
            RequestStop { strings: strings.clone(), ..RequestStop::default() }
        }
        StopForm::Tokens(tokens) => {
            check_tokens("the list of stop tokens", tokens, limits)?;
            RequestStop { token_ids: tokens.clone(), ignore_eos: true, ..RequestStop::default() }
        }
    })
}

/// Targets are `[length - 1][width]`.
fn check_targets(
    targets: &[i64],
    width: usize,
    length: usize,
    limits: RequestLimits,
) -> Result<(), FailedRequest> {
    let positions = length.saturating_sub(1);
    if positions.checked_mul(width) != Some(targets.len()) {
        return Err(user_failure(format!(
            "{} targets were given of a prompt of {length} tokens; give {width} for each of the {positions} positions after \
             the first",
            targets.len()
        )));
    }
    let vocabulary = limits.vocabulary;
    match targets.iter().find(|target| usize::try_from(**target).is_ok_and(|target| target >= vocabulary)) {
        None => Ok(()),
        Some(target) => Err(user_failure(format!(
            "the token {target} is a target, and the vocabulary of the model has {vocabulary}; use its tokenizer"
        ))),
    }
}
