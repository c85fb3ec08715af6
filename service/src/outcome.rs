//! What a request of the service ends in.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::data::{PassOutput, SampledTokens, SamplingOutput, ScoredToken};

/// What a request has come to.
#[derive(Clone, Debug)]
pub enum FutureState {
    /// It has not ended.
    Pending {
        /// Why it waits.
        queue: WaitState,
        /// In words.
        reason: String,
    },
    /// It failed.
    Failed(FailedRequest),
    /// It ended.
    Done(Arc<RequestOutcome>),
}

/// Why a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitState {
    /// Its turn comes.
    Active,
    /// The machine has no place for it at the moment.
    PausedCapacity,
    /// Its user has more in progress than is allowed.
    PausedRateLimit,
}

/// Why a request that was accepted has no outcome.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FailedRequest {
    /// Whose mistake it is.
    pub category: FailureCategory,
    /// What is wrong, and the remedy.
    pub message: String,
}

/// Whose mistake a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCategory {
    /// The request cannot be carried out.
    User,
    /// The service failed.
    Server,
}

/// Why a request was not accepted: an HTTP status and a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The HTTP status.
    pub status: u16,
    /// What is wrong, and the remedy.
    pub message: String,
}

/// A request that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// What its outcome is retrieved by.
    pub request_id: String,
    /// The model that it is for; `None` if it is for none.
    pub model_id: Option<String>,
    /// Of sampling requests, the names of the sequences.
    pub sequence_ids: Vec<String>,
}

/// What a request ended in.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestOutcome {
    /// A model was made.
    ModelCreated {
        /// Its id.
        model_id: String,
    },
    /// A pass over data.
    Passed(PassOutput),
    /// An update of the weights.
    Stepped {
        /// Metrics by `name:reduction`.
        metrics: BTreeMap<String, f64>,
    },
    /// Weights and optimizer were saved.
    WeightsSaved {
        /// As `tinker://`.
        path: String,
    },
    /// Weights were loaded.
    WeightsLoaded {
        /// As `tinker://`.
        path: String,
        /// The model that has them.
        model_id: String,
    },
    /// Weights for sampling were saved or published.
    SamplerSaved {
        /// As `tinker://`, if they were saved under a name.
        path: Option<String>,
        /// The sampling session, if one was made.
        sampling_session_id: Option<String>,
    },
    /// A model was unloaded.
    Unloaded {
        /// Its id.
        model_id: String,
    },
    /// Completions were sampled.
    Sampled(SamplingOutput),
}

/// Memory of an entry of a list or a map beside its numbers, bytes.
const ENTRY_BYTES: usize = 96;

impl RequestOutcome {
    /// What it takes in memory, bytes, within a small factor.
    pub(crate) fn bytes(&self) -> usize {
        let scored = |lists: &[Vec<ScoredToken>]| {
            let of = |list: &Vec<ScoredToken>| size_of_val(list) + size_of_val(&list[..]);
            lists.iter().map(of).sum::<usize>()
        };
        let numbers = match self {
            Self::Passed(passed) => {
                let fields = passed.outputs.iter().flat_map(BTreeMap::values);
                fields.map(|values| ENTRY_BYTES + size_of_val(&values[..])).sum()
            }
            Self::Sampled(sampled) => {
                let of = |sequence: &SampledTokens| {
                    let SampledTokens { tokens, logprobs, alternatives, .. } = sequence;
                    ENTRY_BYTES + size_of_val(&tokens[..]) + size_of_val(&logprobs[..]) + scored(alternatives)
                };
                let sequences: usize = sampled.sequences.iter().map(of).sum();
                let prompt = sampled.prompt_logprobs.as_ref().map_or(0, |values| size_of_val(&values[..]));
                let alternatives = sampled.prompt_alternatives.as_ref().map_or(0, |lists| scored(lists));
                let targets =
                    sampled.prompt_targets.as_ref().map_or(0, |(values, _)| size_of_val(&values[..]));
                sequences + prompt + alternatives + targets
            }
            _ => 0,
        };
        ENTRY_BYTES + numbers
    }
}

impl FailedRequest {
    /// A request that cannot be carried out.
    #[must_use]
    pub fn user(message: impl Into<String>) -> Self {
        Self { category: FailureCategory::User, message: message.into() }
    }

    /// A failure of the service.
    #[must_use]
    pub fn server(message: impl Into<String>) -> Self {
        Self { category: FailureCategory::Server, message: message.into() }
    }
}

impl Refusal {
    /// A refusal with an HTTP status.
    #[must_use]
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}
