//! Samplers: an engine for each network, with adapters of many models over one base, and requests of many users in turn.
//!
//! # Layout
//! - `checked`: requests before the engine sees them; `waiting`: those that wait for their turn
//! - `serving`: the thread of the engine; `prompt_scores`: log-probabilities of prompts, by another thread; `host_thread`: both
//!
//! # Invariants
//! - A completion, a scored prompt and a training pass over the same weights have the same log-probabilities, bit for bit.
//! - A user whose requests fill the engine delays a request of another by about one turn.
//! - Adding a request never waits; what waits is bounded, and what a client has given up is dropped.

mod checked;
mod host_thread;
mod prompt_scores;
mod serving;
#[cfg(test)]
mod tests;
mod waiting;

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::{
    Config, Decoder, FrozenParameters, KvCache, Layout, LowRank, ModelDirectory, ModelError, Parameters,
    Quantization, Recompute, SharedCores, ThreadPool,
};
use rollout::{
    AdapterSlots, Completion, Engine, EngineConfig, EngineCounts, LocalSampler, Network, PendingReceipt,
    RolloutError, ServeOn, StopRules, check_adapter,
};
use tokio::sync::oneshot;
use trajectory::{PolicyVersion, StopReason, VersionRun};
use weights::{Values, WeightMemory};

use crate::data::{SampledTokens, SamplingOutput, SamplingRequest};
use crate::fair_queue::FairBounds;
use crate::outcome::{FailedRequest, Refusal};
use crate::training::UserId;
use checked::{CheckedRequest, RequestLimits, checked, server_failure, user_failure};
use host_thread::HostThread;
use prompt_scores::{ScoreJob, ScoredPrompt, ScoredWeights};
use serving::{EngineActivity, EngineThread, SamplingPart};
use waiting::WaitingRequests;

/// What a [`SamplerHost`] samples from.
#[derive(Clone, Debug)]
pub enum HostedNetwork {
    /// A base, whose adapters come and go.
    Base(Arc<FrozenParameters>),
    /// All weights of a model, of this version.
    Whole(Arc<Parameters>, PolicyVersion),
}

impl HostedNetwork {
    fn layout(&self) -> &Layout {
        match self {
            Self::Base(base) => base.layout(),
            Self::Whole(parameters, _) => parameters.layout(),
        }
    }
}

/// Bounds of a [`SamplerHost`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Sequences decoded together.
    pub max_running: usize,
    /// Longest prompt and completion together, tokens; lowered to what the model allows.
    pub max_context: usize,
    /// Tokens of the KV cache; raised to those of one longest sequence.
    pub kv_cache_tokens: usize,
    /// Prompt tokens that a step prefills along with decoding.
    pub prefill_chunk: usize,
    /// Most completions of one request.
    pub max_samples: usize,
    /// Threads that compute a step, and as many that score a prompt.
    pub threads: usize,
    /// Requests that wait, in all and of each user: those for completions, and as many whose prompt is scored. Each has memory for a
    /// prompt.
    pub waiting: FairBounds,
}

/// What a [`SamplerHost`] does at the moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostStatus {
    /// Requests that wait for the engine; one that wants many completions counts several times.
    pub waiting: usize,
    /// Users of these.
    pub waiting_users: usize,
    /// Prompts that wait to be scored.
    pub waiting_scores: usize,
    /// Sequences in flight.
    pub running: usize,
    /// Adapter slots in use.
    pub adapters: usize,
    /// The version of the weights under the adapters.
    pub version: PolicyVersion,
    /// What the engine has done.
    pub counts: EngineCounts,
    /// Part of the KV cache that is in use, from 0 to 1.
    pub cache_usage: f64,
    /// Why it completes or scores nothing any more; `None` while it does both.
    pub ended: Option<String>,
}

/// An engine for one network, with its threads. Dropping it ends them; what is in progress fails.
#[derive(Debug)]
pub struct SamplerHost {
    name: String,
    config: HostConfig,
    model: Arc<Config>,
    served: Mutex<HostedModel>,
    slots: AdapterSlots,
    parts: Arc<WaitingRequests<SamplingPart>>,
    scores: Arc<WaitingRequests<ScoreJob>>,
    activity: Arc<Mutex<EngineActivity>>,
    threads: [HostThread; 2],
}

/// What was given to the engine, for scores.
#[derive(Debug)]
struct HostedModel {
    network: HostedNetwork,
    /// By slot.
    adapters: HashMap<usize, HostedAdapter>,
    /// Adapters so far; numbers the next one.
    numbered: usize,
}

/// An adapter in a slot. The engine knows it by a number that no other adapter ever has, so that a request which waits while its
/// slot gets another adapter is not sampled with that.
#[derive(Debug)]
struct HostedAdapter {
    number: usize,
    factors: Arc<LowRank>,
    version: PolicyVersion,
}

/// All weights as the engine packs them.
struct HostedValues(Arc<Parameters>);

impl WeightMemory for HostedValues {
    fn values(&self) -> &[f32] {
        self.0.values()
    }
}

/// Where the answers of a request come.
type Answers = (
    Vec<oneshot::Receiver<Result<Vec<Completion>, FailedRequest>>>,
    Option<oneshot::Receiver<Result<ScoredPrompt, FailedRequest>>>,
);

impl SamplerHost {
    /// Starts the engine of `network`, whose files are in `directory`, with its threads `sampler NAME` and `scorer NAME` on `cores`.
    ///
    /// # Errors
    /// If the network is of another model, or a thread cannot be started.
    pub fn start(
        name: &str,
        directory: &ModelDirectory,
        network: HostedNetwork,
        config: HostConfig,
        cores: &Arc<SharedCores>,
    ) -> Result<Self, RolloutError> {
        let model = Arc::new(directory.config().clone());
        check_layout(&model, network.layout())?;
        let config = HostConfig { max_context: config.max_context.min(model.max_context()), ..config };
        let pool = || Arc::new(ThreadPool::new(cores, config.threads));
        let engine = engine(directory, &network, config)?.on(pool());
        let (sampler, slots) = LocalSampler::fixed(engine).with_slots();
        let parts = Arc::new(WaitingRequests::new(config.waiting));
        let scores = Arc::new(WaitingRequests::new(config.waiting));
        let activity = Arc::new(Mutex::new(EngineActivity::default()));
        let serving = EngineThread::new(sampler, Arc::clone(&parts), Arc::clone(&activity));
        let engine = HostThread::spawn(&format!("sampler {name}"), move || serving.serve())?;
        let (jobs, pool) = (Arc::clone(&scores), pool());
        let scorer = HostThread::spawn(&format!("scorer {name}"), move || {
            let ended = CloseScores(jobs);
            prompt_scores::serve(&ended.0, &pool);
        })?;
        let served = Mutex::new(HostedModel { network, adapters: HashMap::new(), numbered: 0 });
        let (name, threads) = (name.to_owned(), [engine, scorer]);
        Ok(Self { name, config, model, served, slots, parts, scores, activity, threads })
    }

    /// Serves `factors` as `version` in `slot`, for every request after this call; an older version of the same adapter is replaced
    /// between two steps. The receipt comes once the engine serves them.
    ///
    /// # Errors
    /// If the network is no base, the factors are of another model, the version goes back, or the engine has ended.
    pub fn set_adapter(
        &self,
        slot: usize,
        factors: Arc<LowRank>,
        version: PolicyVersion,
    ) -> Result<PendingReceipt, RolloutError> {
        check_adapter(&self.model, slot, &factors)?;
        let mut served = self.served();
        if let HostedNetwork::Whole(..) = served.network {
            return Err(RolloutError::Misplaced { weights: "of an adapter", engine: "with whole weights" });
        }
        let before = served.adapters.get(&slot);
        let is_newer = |before: &HostedAdapter| {
            before.version < version || (before.version == version && before.factors == factors)
        };
        if let Some(before) = before.filter(|before| !is_newer(before)) {
            let (what, served) = (format!("adapter slot {slot}"), before.version);
            return Err(RolloutError::OlderVersion { what, served, asked: version });
        }
        let number = before.map_or(served.numbered, |before| before.number);
        let receipt = self.slots.set(number, Arc::clone(&factors), version)?;
        served.numbered = served.numbered.max(number + 1);
        served.adapters.insert(slot, HostedAdapter { number, factors, version });
        drop(served);
        self.parts.wake();
        Ok(receipt)
    }

    /// Frees `slot` if it has an adapter: it may have another at once. Sequences in flight are sampled to their end; requests that wait
    /// for their turn fail.
    ///
    /// # Errors
    /// If the engine has ended.
    pub fn free_adapter(&self, slot: usize) -> Result<(), RolloutError> {
        let mut served = self.served();
        // Whatever the engine says: the next adapter of the slot gets another number.
        let freed = served.adapters.remove(&slot).map_or(Ok(()), |adapter| self.slots.free(adapter.number));
        drop(served);
        self.parts.wake();
        freed
    }

    /// Serves other weights of the whole model as `version` from the next step on. Sequences in flight keep their KV cache. The
    /// receipt comes once the engine serves them.
    ///
    /// # Errors
    /// If the network is a base, the weights are of another model, the version goes back, or the engine has ended.
    pub fn set_weights(
        &self,
        parameters: Arc<Parameters>,
        version: PolicyVersion,
    ) -> Result<PendingReceipt, RolloutError> {
        let bytes = size_of_val(parameters.values()) as u64;
        check_layout(&self.model, parameters.layout())?;
        let on = ServeOn::Host(Quantization::None);
        let (weights, digest) = on.prepare(&self.model, shared_values(&parameters))?;
        let mut served = self.served();
        match &mut served.network {
            HostedNetwork::Base(_) => {
                Err(RolloutError::Misplaced { weights: "of a whole model", engine: "with a base" })
            }
            HostedNetwork::Whole(_, before) if *before > version => {
                let what = format!("sampler {}", self.name);
                Err(RolloutError::OlderVersion { what, served: *before, asked: version })
            }
            whole @ HostedNetwork::Whole(..) => {
                let receipt = self.slots.set_weights(weights, digest, bytes, version)?;
                *whole = HostedNetwork::Whole(parameters, version);
                drop(served);
                self.parts.wake();
                Ok(receipt)
            }
        }
    }

    /// Samples completions for `user`, with the adapter in a slot or with the weights alone. The request waits for its turn from this
    /// call on; dropping the future gives it up.
    ///
    /// # Errors
    /// At once, with status 429, if too many requests wait. The future has the mistakes of the request.
    pub fn sample(
        &self,
        adapter: Option<usize>,
        user: UserId,
        request: SamplingRequest,
    ) -> Result<impl Future<Output = Result<SamplingOutput, FailedRequest>> + Send + use<>, Refusal> {
        let limits = RequestLimits {
            vocabulary: self.model.vocab_size,
            max_context: self.config.max_context,
            max_samples: self.config.max_samples,
        };
        let checked = checked(request, limits, Some(salt(user)));
        let begun = match checked.and_then(|request| Ok((self.weights(adapter)?, request))) {
            Ok(((weights, number), request)) => {
                let request = Arc::new(request);
                let answers = self.enqueue(number, user, weights, &request)?;
                Ok((request, answers))
            }
            Err(failure) => Err(failure),
        };
        let (parts, scores) = (Arc::clone(&self.parts), Arc::clone(&self.scores));
        let name = self.name.clone();
        let ended = move || {
            let reason = parts.closed().or_else(|| scores.closed());
            let reason = reason.unwrap_or_else(|| "it has stopped".to_owned());
            server_failure(format!("sampler {name} serves no requests any more: {reason}"))
        };
        Ok(async move {
            let (request, (completions, scores)) = begun?;
            let mut all = Vec::new();
            for part in completions {
                all.extend(part.await.map_err(|_| ended())??);
            }
            let scored = match scores {
                Some(scores) => scores.await.map_err(|_| ended())??,
                None => ScoredPrompt::default(),
            };
            Ok(output(&request, all, scored))
        })
    }

    /// What it does at the moment.
    #[must_use]
    pub fn status(&self) -> HostStatus {
        let (waiting, waiting_users) = self.parts.waiting();
        let EngineActivity { running, version, counts, cache_usage } =
            *self.activity.lock().unwrap_or_else(PoisonError::into_inner);
        HostStatus {
            waiting,
            waiting_users,
            waiting_scores: self.scores.waiting().0,
            running,
            adapters: self.served().adapters.len(),
            version,
            counts,
            cache_usage,
            ended: self.parts.closed().or_else(|| self.scores.closed()),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Puts a request into the queues, in parts that the engine can sample at a time.
    fn enqueue(
        &self,
        adapter: Option<usize>,
        user: UserId,
        weights: ScoredWeights,
        request: &Arc<CheckedRequest>,
    ) -> Result<Answers, Refusal> {
        let each = self.part_size(request);
        let samples = if request.max_completion_length == 0 { 0 } else { request.samples };
        let firsts = (0..samples).step_by(each);
        let (mut parts, mut completions) = (Vec::new(), Vec::new());
        for first_index in firsts {
            let (reply, answer) = oneshot::channel();
            let (request, samples) = (Arc::clone(request), each.min(samples - first_index));
            parts.push(SamplingPart { request, adapter, first_index, samples, reply });
            completions.push(answer);
        }
        let mut scores = None;
        if let Some(query) = &request.query {
            let (reply, answer) = oneshot::channel();
            let query = Arc::new(query.clone());
            let job = ScoreJob { weights, prompt: Arc::clone(&request.prompt), query, reply };
            self.scores.push_all(user, vec![job])?;
            scores = Some(answer);
        }
        self.parts.push_all(user, parts)?;
        Ok((completions, scores))
    }

    /// Completions of a prompt that the engine can sample at a time, at least 1.
    fn part_size(&self, request: &CheckedRequest) -> usize {
        let length = request.prompt.len();
        let each = KvCache::pages_for(length + request.max_completion_length) - length / KvCache::PAGE;
        let pages = KvCache::pages_for(cache_tokens(self.config)) - KvCache::pages_for(length);
        (pages / each.max(1)).min(self.config.max_running).max(1)
    }

    /// The weights that requests for this slot are sampled with, and the number of the adapter.
    fn weights(&self, slot: Option<usize>) -> Result<(ScoredWeights, Option<usize>), FailedRequest> {
        let served = self.served();
        match (&served.network, slot) {
            (HostedNetwork::Base(base), None) => {
                Ok((ScoredWeights::Adapted(Arc::clone(base), no_factors()), None))
            }
            (HostedNetwork::Base(base), Some(slot)) => match served.adapters.get(&slot) {
                Some(HostedAdapter { number, factors, .. }) => {
                    Ok((ScoredWeights::Adapted(Arc::clone(base), Arc::clone(factors)), Some(*number)))
                }
                None => Err(user_failure(format!(
                    "adapter slot {slot} of sampler {} is free; publish weights for it again",
                    self.name
                ))),
            },
            (HostedNetwork::Whole(parameters, _), None) => {
                Ok((ScoredWeights::Whole(Arc::clone(&self.model), Arc::clone(parameters)), None))
            }
            (HostedNetwork::Whole(..), Some(_)) => Err(user_failure(format!(
                "sampler {} has whole weights and no adapters; name none",
                self.name
            ))),
        }
    }

    fn served(&self) -> MutexGuard<'_, HostedModel> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SamplerHost {
    /// Ends the threads, which finish the step that they compute; waits for them within a limit.
    fn drop(&mut self) {
        let reason = "it was stopped";
        self.parts.close(reason);
        self.scores.close(reason);
        self.threads.iter_mut().for_each(HostThread::join);
    }
}

/// Closes the queue when the thread that scores ends, also after a panic.
struct CloseScores(Arc<WaitingRequests<ScoreJob>>);

impl Drop for CloseScores {
    fn drop(&mut self) {
        self.0.close("the thread that scores prompts ended unexpectedly");
    }
}

/// The engine of a network.
fn engine(
    directory: &ModelDirectory,
    network: &HostedNetwork,
    config: HostConfig,
) -> Result<Engine, RolloutError> {
    let stop = StopRules {
        token_ids: directory.stop_token_ids().to_vec(),
        strings: Vec::new(),
        tokenizer: directory.tokenizer().clone(),
    };
    let engine_config = EngineConfig {
        max_running: config.max_running.max(1),
        prefill_chunk: config.prefill_chunk.max(1),
        kv_cache_tokens: Some(cache_tokens(config)),
        // Requests are admitted by their own lengths.
        max_prompt_length: config.max_context,
        max_completion_length: 1,
        max_episode_length: config.max_context,
        max_samples: 1,
        // Every request has a seed of its own.
        seed: 0,
    };
    let (network, version) = match network {
        HostedNetwork::Base(base) => {
            let decoder = Decoder::frozen(base, &no_factors(), Recompute::None);
            (Network::from(decoder), PolicyVersion::default())
        }
        HostedNetwork::Whole(parameters, version) => {
            let on = ServeOn::Host(Quantization::None);
            (Network::of_version(&on, directory.config(), shared_values(parameters))?, *version)
        }
    };
    Engine::new(engine_config, stop, network, version)
}

/// An adapter of no weight.
fn no_factors() -> Arc<LowRank> {
    Arc::new(LowRank::zeros(1, 0.0, Vec::new()))
}

/// Tokens of the KV cache, at least those of one longest sequence.
fn cache_tokens(config: HostConfig) -> usize {
    config.kv_cache_tokens.max(config.max_context + 3 * KvCache::PAGE)
}

/// Checks that weights of `found` are of the model.
fn check_layout(model: &Config, found: &Layout) -> Result<(), RolloutError> {
    let expected = Layout::new(model);
    if *found == expected {
        return Ok(());
    }
    Err(ModelError::Length { expected: expected.len(), found: found.len() }.into())
}

/// Whole weights as the engine takes them.
fn shared_values(parameters: &Arc<Parameters>) -> Values {
    Values::owned_by(Arc::new(HostedValues(Arc::clone(parameters))))
}

/// What separates the prefix cache of users.
fn salt(user: UserId) -> u64 {
    let digest = blake3::hash(&user.0);
    let (numbers, _) = digest.as_bytes().as_chunks::<8>();
    numbers.first().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// What was sampled and scored of a request.
fn output(
    request: &CheckedRequest,
    mut completions: Vec<Completion>,
    scored: ScoredPrompt,
) -> SamplingOutput {
    completions.sort_by_key(|completion| completion.index);
    let length = request.prompt.len();
    let prefilled = completions
        .first()
        .map_or(length, |first| first.prefill.iter().map(|run| run.len as usize).sum::<usize>());
    let last =
        |completion: &Completion| completion.versions.last().map(|VersionRun { version, .. }| version.0);
    let version = completions.iter().filter_map(last).max().unwrap_or(0);
    let mut sequences: Vec<SampledTokens> = completions.into_iter().map(sampled_tokens).collect();
    // Without a place for a completion each is empty.
    sequences.resize_with(request.samples, SampledTokens::default);
    SamplingOutput {
        sequences,
        prompt_logprobs: scored.logprobs,
        prompt_alternatives: scored.alternatives,
        prompt_targets: scored.targets,
        cached_tokens: length.saturating_sub(prefilled),
        version,
    }
}

fn sampled_tokens(completion: Completion) -> SampledTokens {
    let Completion { prompt_length, mut token_ids, logprobs, alternatives, stop, .. } = completion;
    let scored = |likely: Vec<model::TokenLogprob>| {
        likely.into_iter().map(|likely| (likely.token, likely.logprob)).collect()
    };
    SampledTokens {
        stopped: matches!(stop, StopReason::StopToken | StopReason::StopString),
        tokens: token_ids.split_off(prompt_length),
        logprobs,
        alternatives: alternatives.into_iter().map(scored).collect(),
    }
}
