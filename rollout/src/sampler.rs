//! The interface between rollout workers and rollout engines: requests to a sampler, and its completions.
//!
//! A [`Sampler`] batches requests continuously, samples completions of them, and applies newer weights. The rollout
//! worker and the evaluation drive one through this trait alone. [`LocalSampler`](crate::LocalSampler) is the engine of
//! this process; an engine in another process (vLLM, SGLang) is another implementation.
//!
//! # Invariants
//! - A submitted request ends in one completion per sequence, in an abort, or in an error of [`Sampler::poll`].
//! - No method blocks for longer than the wait that it is given, except for one decode step of an engine in this process.
//! - The served version never goes back.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use model::{Sampling, TokenLogprob};
use serde::{Deserialize, Serialize};
use trajectory::{
    GroupId, KeptTokens, PolicyVersion, Sample, SampleError, StopReason, TokenExperts, VersionRun,
};

use crate::RolloutError;
use crate::activity::LimitChange;
use crate::episode::Episode;
use crate::requests::RequestHandle;

/// A rollout engine, in this process or another one.
///
/// The order of calls between two polls is: [`Sampler::newer_weights`], [`Sampler::apply_weights`] if a version is
/// staged, [`Sampler::submit`] while there is [`Sampler::has_capacity`], [`Sampler::poll`].
pub trait Sampler: Send + fmt::Debug {
    /// The policy version that the next token is sampled from.
    fn version(&self) -> PolicyVersion;

    /// Admission control: whether a request for `completions` sequences of the longest kind should be submitted now. An
    /// idle sampler accepts every request within its bounds.
    fn has_capacity(&self, completions: usize) -> bool;

    /// Admission control for one request of known length, such as a later turn of an episode.
    fn has_capacity_for(&self, request: &SampleRequest) -> bool {
        self.has_capacity(request.sequences())
    }

    /// Sequences that were submitted and have not ended.
    fn in_flight(&self) -> usize;

    /// Takes a request. Prefill and decoding happen in [`Sampler::poll`], or beside it in an engine of another process.
    ///
    /// # Errors
    /// A request that the engine can never serve: an empty prompt, a prompt beyond the context, more sequences than its
    /// KV cache has pages for.
    fn submit(&mut self, request: SampleRequest) -> Result<(), RolloutError>;

    /// Advances the sequences in flight and returns the completions that ended. An engine of this process makes one decode
    /// step; an engine of another process returns at the first completion, or after `wait`.
    ///
    /// # Errors
    /// If the engine fails or cannot be reached. [`RolloutError::Sampler`] has its answer.
    fn poll(&mut self, wait: Duration) -> Result<Vec<Completion>, RolloutError>;

    /// Drops the sequences of `group` that have not ended, and returns their number. No completion of the group follows.
    ///
    /// # Errors
    /// An engine that cannot be reached.
    fn abort(&mut self, group: GroupId) -> Result<usize, RolloutError>;

    /// What was sampled since the last call for requests that stream ([`RequestOptions::stream`]) and have not ended. The
    /// rest of their tokens comes with their completions. Empty for an engine that reports completions alone.
    fn partials(&mut self) -> Vec<PartialCompletion> {
        Vec::new()
    }

    /// A handle of the queue of requests that is in front of it; `None` without one.
    fn requests(&self) -> Option<RequestHandle> {
        None
    }

    /// Part of the KV cache that is in use, from 0 to 1; `None` for an engine that does not report it.
    fn cache_usage(&self) -> Option<f64> {
        None
    }

    /// Episode `index` of `group` has ended: nothing has to be kept for a next turn, which
    /// [`SampleRequest::keep_cache`] asked for.
    fn end_episode(&mut self, _group: GroupId, _index: u32) {}

    /// The newest version that is staged: received and ready to be applied. Waits up to `wait` if none is. Always `None` for
    /// a sampler with fixed weights.
    ///
    /// # Errors
    /// Weights that could not be received or staged.
    fn newer_weights(&mut self, wait: Duration) -> Result<Option<PolicyVersion>, RolloutError>;

    /// Begins to serve the staged version and sends its receipt. Sequences in flight continue as `on_update` says; with
    /// [`OnUpdate::Drain`] there are none. `None` if the engine still applies it: call again, poll meanwhile. A sampler that
    /// sleeps wakes up with the applied weights and recomputes the KV cache of everything in flight.
    ///
    /// # Errors
    /// An engine that failed, or a digest that is not that of the published version.
    fn apply_weights(&mut self, on_update: OnUpdate) -> Result<Option<AppliedWeights>, RolloutError>;

    /// Frees the memory of weights and KV cache until [`Sampler::apply_weights`], and returns the bytes freed. Sequences in
    /// flight keep their tokens.
    ///
    /// # Errors
    /// An engine that failed.
    fn sleep(&mut self) -> Result<u64, RolloutError>;

    /// Whether it sleeps.
    fn is_asleep(&self) -> bool;

    /// What it has done since it was made.
    fn counts(&self) -> EngineCounts;

    /// Sequences up to which requests are admitted, if that adapts to its throughput.
    fn running_limit(&self) -> Option<usize> {
        None
    }

    /// The changes of [`Sampler::running_limit`] since the last call.
    fn take_limit_changes(&mut self) -> Vec<LimitChange> {
        Vec::new()
    }

    /// Whether no sequence is in flight.
    fn is_idle(&self) -> bool {
        self.in_flight() == 0
    }
}

/// What happens to sequences in flight when new weights are applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnUpdate {
    /// They continue with the KV cache that they have (PipelineRL, arXiv 2509.19128).
    #[default]
    Keep,
    /// Their KV cache is recomputed under the new weights (AReaL, arXiv 2505.24298).
    Recompute,
    /// They finish first, under the old weights; nothing new starts meanwhile.
    Drain,
}

/// A version that a sampler has begun to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppliedWeights {
    /// The version.
    pub version: PolicyVersion,
    /// How long decoding stood still for it.
    pub stalled: Duration,
}

/// What a sampler has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineCounts {
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Prompt tokens prefilled.
    pub prefilled_tokens: u64,
    /// Passes of the network; 0 where the engine does not count them.
    pub steps: u64,
    /// Completions that an interruption was inserted into.
    pub interrupted: u64,
    /// Tokens that speculation proposed.
    #[serde(default)]
    pub proposed_tokens: u64,
    /// Proposed tokens that were the ones drawn.
    #[serde(default)]
    pub accepted_tokens: u64,
    /// Prompt tokens of later turns that were still in the KV cache.
    #[serde(default)]
    pub reused_tokens: u64,
    /// Tokens of open episodes whose pages were given up for others; their next turns prefill them again.
    #[serde(default)]
    pub evicted_tokens: u64,
}

impl std::ops::AddAssign for EngineCounts {
    fn add_assign(&mut self, other: Self) {
        self.sampled_tokens = self.sampled_tokens.saturating_add(other.sampled_tokens);
        self.prefilled_tokens = self.prefilled_tokens.saturating_add(other.prefilled_tokens);
        self.steps = self.steps.saturating_add(other.steps);
        self.interrupted = self.interrupted.saturating_add(other.interrupted);
        self.proposed_tokens = self.proposed_tokens.saturating_add(other.proposed_tokens);
        self.accepted_tokens = self.accepted_tokens.saturating_add(other.accepted_tokens);
        self.reused_tokens = self.reused_tokens.saturating_add(other.reused_tokens);
        self.evicted_tokens = self.evicted_tokens.saturating_add(other.evicted_tokens);
    }
}

/// Completions that are wanted of one prompt. The prompt is prefilled once for all of them.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleRequest {
    /// The group that they belong to; with the seed it determines every random number.
    pub group: GroupId,
    /// `[P]` prompt tokens: of a later turn, all tokens of the episode before it.
    pub prompt: Vec<u32>,
    /// Index in the group of the first completion.
    pub first_index: u32,
    /// Which turn of their episodes the completions are, from 0.
    pub turn: u32,
    /// Number of completions that are sampled.
    pub samples: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Longest completion, tokens.
    pub max_completion_length: usize,
    /// Whether one more completion, the last, is decoded greedily as a baseline.
    pub baseline: bool,
    /// Whether the KV cache of the completions should stay for a next turn of their episodes, until
    /// [`Sampler::end_episode`].
    pub keep_cache: bool,
    /// What this request asks for beside the rules of its engine.
    pub options: RequestOptions,
}

/// What a request asks for beside the rules of its engine. The default asks for nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestOptions {
    /// Stop rules of this request, beside those of the engine.
    pub stop: RequestStop,
    /// Seed of the random streams of its completions, which then depend on this seed and their index alone; `None` for
    /// the seed of the engine, group, index and turn.
    pub seed: Option<u64>,
    /// Number of most likely tokens that are reported for each sampled token, at most [`RequestOptions::MAX_ALTERNATIVES`].
    pub alternatives: usize,
    /// Whether a greedy choice has the log-probability of the distribution at temperature 1 instead of 0.
    pub score_greedy: bool,
    /// Whether [`Sampler::partials`] reports its tokens while it is sampled.
    pub stream: bool,
    /// Whether it continues KV pages of an earlier request with the same salt whose tokens begin as its prompt does, and
    /// leaves its own pages for later ones.
    pub prefix_cache: Option<u64>,
    /// The adapter that it is sampled with, by its index among those of the engine; `None` for the served weights alone.
    pub adapter: Option<usize>,
}

impl RequestOptions {
    /// Most tokens that are reported for each sampled token.
    pub const MAX_ALTERNATIVES: usize = 20;
}

/// Stop rules of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestStop {
    /// Strings that end a completion; the text is cut before the first of them, the tokens stay.
    pub strings: Vec<String>,
    /// Tokens that end a completion; they belong to it but not to its text.
    pub token_ids: Vec<u32>,
    /// Whether the stop tokens of the engine do not end a completion.
    pub ignore_eos: bool,
    /// Tokens before which no rule but the length ends a completion. The distribution stays as it is: an end token that is
    /// sampled before is a token like any other.
    pub min_tokens: usize,
}

/// What was sampled of a completion that has not ended. `N` new tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartialCompletion {
    /// The group that it belongs to.
    pub group: GroupId,
    /// Which of the group's completions it is.
    pub index: u32,
    /// `[N]` new tokens.
    pub token_ids: Vec<u32>,
    /// `[N]` their behavior log-probabilities, nats.
    pub logprobs: Vec<f32>,
    /// `[N]` the most likely tokens at each position; empty if none were asked for.
    pub alternatives: Vec<Vec<TokenLogprob>>,
}

impl SampleRequest {
    /// Number of completions, the baseline included.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.samples + usize::from(self.baseline)
    }
}

/// A completion that ended. `T` tokens, `C` of them after the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The group that it belongs to.
    pub group: GroupId,
    /// Which of the group's completions it is.
    pub index: u32,
    /// Number of prompt tokens.
    pub prompt_length: usize,
    /// The version that began to prefill the prompt.
    pub prompt_version: PolicyVersion,
    /// Runs of the versions that prefilled the end of the prompt; the tokens before were in the KV cache. Empty if that is not known.
    pub prefill: Vec<VersionRun>,
    /// `[T]` prompt and completion, the stop token included.
    pub token_ids: Vec<u32>,
    /// `[C]` behavior log-probabilities of the sampled tokens, nats; 0.0 where a token was inserted.
    pub logprobs: Vec<f32>,
    /// Runs of versions over the sampled tokens.
    pub versions: Vec<VersionRun>,
    /// Where in the completion, from 0, the text of an interruption is; `None` if it was not interrupted.
    pub inserted: Option<Range<usize>>,
    /// Whether it was decoded greedily as a baseline.
    pub baseline: bool,
    /// The tokens that truncation kept at each sampled token that was not inserted; `None` without truncation.
    pub kept: Option<KeptTokens>,
    /// The experts of the tokens; `None` if the sampler does not record them.
    pub experts: Option<TokenExperts>,
    /// `[C]` the most likely tokens at each position; empty if [`RequestOptions::alternatives`] is 0.
    pub alternatives: Vec<Vec<TokenLogprob>>,
    /// How tokens were chosen.
    pub sampling: Sampling,
    /// Why it ended.
    pub stop: StopReason,
    /// The completion as text, without stop token and stop string.
    pub text: String,
}

impl Completion {
    /// The token streams that are trained on if it is the whole episode; see [`Episode::sample`].
    ///
    /// # Errors
    /// Those of [`Episode::sample`].
    pub fn sample(&self) -> Result<Sample, SampleError> {
        Episode::from(self.clone()).sample()
    }
}
