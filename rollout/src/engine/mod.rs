//! Continuous batching: a running set of sequences, refilled at every step, over a paged cache of keys and values.
//!
//! One [`Engine::step`] is one pass of the network over one new token of every running sequence and a bounded chunk of
//! prompt tokens. A prompt is prefilled once and its pages are shared by all completions of the group; the page that
//! prompt and completion meet in is copied at the first write.
//!
//! # Invariants
//! - A completion depends on the weights, the prompt and its own random stream, bit for bit, never on what it was
//!   batched with; on a GPU up to rounding, because its library multiplies few rows otherwise than many.
//! - Every token remembers the policy version that sampled it.
//! - The pages that an accepted request may ever need are reserved when it is accepted: no sequence is preempted and
//!   none waits for pages in the middle.

mod interrupt;
mod network;
mod prompt;
mod sequence;
mod stop;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use device::Device;
use model::on_device::{DeviceSampler, DrawRequest, StagedWeights};
use model::{Config, KvCache, Sampling, StepSequence, ThreadPool};
use trajectory::{GroupId, PolicyVersion};

use crate::RolloutError;
pub use interrupt::Interruption;
use network::Logits;
pub use network::{Network, ServeOn, Served};
use prompt::PromptJob;
use sequence::Sequence;
pub use sequence::{Completion, Request, random_stream, uniform};
pub use stop::StopRules;

/// What a caller has overlooked.
const PARKED: &str = "a parked engine is given weights before it goes on";

/// Bounds of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Sequences decoded together.
    pub max_running: usize,
    /// Prompt tokens prefilled in one step beside the decoding.
    pub prefill_chunk: usize,
    /// Positions of the cache; `None` for what `max_running` sequences of the longest kind need at most.
    pub kv_cache_tokens: Option<usize>,
    /// Longest prompt that will be asked for, tokens.
    pub max_prompt_length: usize,
    /// Longest completion that will be asked for, tokens.
    pub max_completion_length: usize,
    /// Most completions of one prompt that will be asked for, a baseline included.
    pub max_samples: usize,
    /// Seed of all random streams.
    pub seed: u64,
}

impl EngineConfig {
    /// What [`Self::prefill_chunk`] is where nobody says it. On the processor it keeps steps short for the sequences that
    /// decode beside it; a device has to read all weights in every step, and what is not one token of each sequence is not
    /// replayed: few large chunks cost it less than many small ones.
    #[must_use]
    pub fn usual_prefill_chunk(on_device: bool) -> usize {
        if on_device { 2048 } else { 256 }
    }
}

/// What an engine has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct EngineCounts {
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Prompt tokens prefilled.
    pub prefilled_tokens: u64,
    /// Passes of the network.
    pub steps: u64,
    /// Completions that a text was put into.
    pub interrupted: u64,
}

impl std::ops::AddAssign for EngineCounts {
    fn add_assign(&mut self, other: Self) {
        self.sampled_tokens = self.sampled_tokens.saturating_add(other.sampled_tokens);
        self.prefilled_tokens = self.prefilled_tokens.saturating_add(other.prefilled_tokens);
        self.steps = self.steps.saturating_add(other.steps);
        self.interrupted = self.interrupted.saturating_add(other.interrupted);
    }
}

/// A sampler of completions for the weights that it serves.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    stop: StopRules,
    model: Config,
    /// `None` while the engine is parked.
    network: Option<Network>,
    /// Where networks are made that follow a parked one.
    device: Option<Device>,
    version: PolicyVersion,
    cache: KvCache,
    /// Pages that accepted requests may hold at the same time, at worst.
    reserved: usize,
    /// Per group: completions that have not ended, and the pages of its prompt.
    groups: HashMap<GroupId, (usize, usize)>,
    prompts: VecDeque<PromptJob>,
    running: Vec<Sequence>,
    counts: EngineCounts,
    interruption: Option<Interruption>,
    pool: Arc<ThreadPool>,
}

impl Engine {
    /// An engine that serves `network` as `version`.
    ///
    /// # Errors
    /// If the cache cannot hold even one request of the largest kind.
    pub fn new(
        config: EngineConfig,
        stop: StopRules,
        network: impl Into<Network>,
        version: PolicyVersion,
    ) -> Result<Self, RolloutError> {
        let network = network.into();
        // Every sequence at its longest, with a prompt of its own.
        let all = config.max_running.max(config.max_samples) * Reservation::worst(&config).of(1);
        let positions = config.kv_cache_tokens.unwrap_or(all * KvCache::PAGE);
        let largest = Reservation::worst(&config).of(config.max_samples) * KvCache::PAGE;
        if positions < largest {
            return Err(RolloutError::CacheTooSmall { needed: largest, positions });
        }
        let cache = network.cache(positions);
        let device = match &network {
            Network::Host(_) => None,
            Network::Device(sampler) => Some(sampler.device().clone()),
        };
        Ok(Self {
            config,
            stop,
            model: network.config().clone(),
            network: Some(network),
            device,
            version,
            cache,
            reserved: 0,
            groups: HashMap::new(),
            prompts: VecDeque::new(),
            running: Vec::new(),
            counts: EngineCounts::default(),
            interruption: None,
            pool: Arc::new(ThreadPool::single()),
        })
    }

    /// The same, computing on the cores of `pool`.
    #[must_use]
    pub fn on(self, pool: Arc<ThreadPool>) -> Self {
        Self { pool, ..self }
    }

    /// The same, putting a text into completions that do not end in time.
    #[must_use]
    pub fn interrupting(self, interruption: Option<Interruption>) -> Self {
        Self { interruption, ..self }
    }

    /// The cores that it computes on.
    #[must_use]
    pub fn pool(&self) -> &Arc<ThreadPool> {
        &self.pool
    }

    /// The version that it samples from.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// The model that it runs.
    #[must_use]
    pub fn model(&self) -> &Config {
        &self.model
    }

    /// What it has done.
    #[must_use]
    pub fn counts(&self) -> EngineCounts {
        self.counts
    }

    /// Whether nothing is in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.prompts.is_empty() && self.running.is_empty()
    }

    /// Pages of the cache that nobody holds, and all pages.
    #[must_use]
    pub fn pages(&self) -> (usize, usize) {
        (self.cache.free_pages(), self.cache.total_pages())
    }

    /// Sequences in flight, those of waiting prompts included.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.running.len() + self.prompts.iter().map(|job| job.request.sequences()).sum::<usize>()
    }

    /// Whether a request for `samples` completions, a baseline included, should be submitted now.
    #[must_use]
    pub fn has_room(&self, samples: usize) -> bool {
        let needed = Reservation::worst(&self.config).of(samples);
        self.is_idle()
            || (self.in_flight() + samples <= self.config.max_running
                && self.reserved + needed <= self.cache.total_pages())
    }

    /// Takes a request.
    ///
    /// # Errors
    /// An empty prompt, one that is too long, or a request that the whole cache could not hold.
    pub fn submit(&mut self, request: Request) -> Result<(), RolloutError> {
        let length = request.prompt.len();
        let context = self.model().max_context();
        if length == 0 {
            return Err(RolloutError::EmptyPrompt { group: request.group });
        }
        if length + request.max_completion_length > context {
            return Err(RolloutError::PromptTooLong {
                group: request.group,
                prompt: length,
                completion: request.max_completion_length,
                limit: self.model().context_limit(),
            });
        }
        let reservation = Reservation::new(length, length + request.max_completion_length);
        let needed = reservation.of(request.sequences());
        if self.reserved + needed > self.cache.total_pages() {
            return Err(RolloutError::CacheTooSmall {
                needed: needed * KvCache::PAGE,
                positions: (self.cache.total_pages() - self.reserved) * KvCache::PAGE,
            });
        }
        self.reserved += needed;
        self.groups.insert(request.group, (request.sequences(), reservation.prompt));
        self.prompts.push_back(PromptJob::new(request));
        Ok(())
    }

    /// Serves `served` as `version` from the next step on. Sequences in flight go on with the keys and values that
    /// they have; see [`Engine::recompute`]. Returns the weights that were served, if they are on a device.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If the version goes back.
    pub fn apply(
        &mut self,
        served: impl Into<Served>,
        version: PolicyVersion,
    ) -> Result<Option<StagedWeights>, RolloutError> {
        assert!(version >= self.version, "a sampler never goes back from {} to {version}", self.version);
        let before = match (&mut self.network, served.into()) {
            (Some(network), served) => network.serve(served)?,
            (parked, Served::Host(decoder)) => {
                *parked = Some(Network::Host(decoder));
                None
            }
            (parked, Served::Device(staged)) => {
                let Some(device) = &self.device else { unreachable!("the engine was made on a device") };
                *parked = Some(Network::Device(Box::new(DeviceSampler::new(device, &self.model, staged)?)));
                None
            }
        };
        self.version = version;
        Ok(before)
    }

    /// Memory of the packed weights and of the cache, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.network.as_ref().map_or(0, Network::bytes) + self.cache.bytes()
    }

    /// Stands still and gives up the memory of its weights and of all keys and values, until [`Engine::unpark`]. What is
    /// in flight keeps its tokens and its pages. Returns the bytes that it has freed.
    pub fn park(&mut self) -> u64 {
        let before = self.bytes();
        self.network = None;
        self.cache.forget();
        before
    }

    /// Whether it stands still without weights.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        self.network.is_none()
    }

    /// Goes on with `served`, under which everything in flight is computed again.
    ///
    /// # Errors
    /// If the network fails.
    ///
    /// # Panics
    /// If the version goes back.
    pub fn unpark(&mut self, served: impl Into<Served>, version: PolicyVersion) -> Result<(), RolloutError> {
        self.apply(served, version)?;
        self.cache.restore(&self.model);
        self.recompute()
    }

    /// Computes the keys and values of everything in flight anew under the weights that are served now.
    ///
    /// # Errors
    /// If the network fails.
    ///
    /// # Panics
    /// If the engine is parked.
    pub fn recompute(&mut self) -> Result<(), RolloutError> {
        let network = self.network.as_mut().expect(PARKED);
        self.prompts.iter_mut().for_each(PromptJob::restart);
        let mut done: Option<GroupId> = None;
        for sequence in &self.running {
            // Siblings are neighbours and share the full pages of their prompt: rewriting those once is enough.
            let shared = sequence.prompt_length / KvCache::PAGE * KvCache::PAGE;
            let from = if done == Some(sequence.group) { shared } else { 0 };
            done = Some(sequence.group);
            let known = sequence.token_ids.len() - 1;
            let chunk = self.config.prefill_chunk.max(1);
            for position in (from..known).step_by(chunk) {
                let tokens = &sequence.token_ids[position..(position + chunk).min(known)];
                let step = StepSequence { tokens, position, pages: &sequence.pages, wanted: 0 };
                network.step(&mut self.cache, &[step], &self.pool)?;
            }
        }
        Ok(())
    }

    /// One pass of the network. Returns the completions that it ended.
    ///
    /// # Errors
    /// If the network or the tokenizer fails.
    ///
    /// # Panics
    /// If the engine is parked.
    pub fn step(&mut self) -> Result<Vec<Completion>, RolloutError> {
        let decoding = self.running.len().min(self.config.max_running);
        for sequence in &mut self.running[..decoding] {
            sequence.make_room(&mut self.cache);
        }
        let prompt_jobs = self.chunk_of_prompts();
        let decoded = self.running[..decoding].iter().map(Sequence::newest);
        let prefilled = self.prompts.iter().zip(&prompt_jobs).map(|(job, tokens)| job.next(*tokens));
        let sequences: Vec<StepSequence<'_>> = decoded.chain(prefilled).collect();
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        let network = self.network.as_mut().expect(PARKED);
        let logits = network.step(&mut self.cache, &sequences, &self.pool)?;
        self.counts.steps += 1;
        let interrupted = self.running[..decoding].iter().filter(|sequence| sequence.is_interrupted_now());
        self.counts.interrupted += interrupted.count() as u64;
        // Who goes on by which row of logits.
        let mut rows: Vec<usize> = (0..decoding).collect();
        let waiting = self.running.split_off(decoding);
        for (row, tokens) in (decoding..).zip(prompt_jobs) {
            self.counts.prefilled_tokens += tokens as u64;
            let Some(mut job) = self.prompts.pop_front() else { break };
            job.advance(tokens, self.version);
            if job.prefilled < job.request.prompt.len() {
                self.prompts.push_front(job);
                break;
            }
            let interruption = self.interruption.as_ref();
            let sequences = job.into_sequences(&mut self.cache, self.config.seed, &self.stop, interruption);
            rows.resize(rows.len() + sequences.len(), row);
            self.running.extend(sequences);
        }
        self.draw(&logits, &rows)?;
        let new = self.running.split_off(decoding);
        self.running.extend(waiting);
        self.running.extend(new);
        self.collect()
    }

    /// Lets every running sequence go on by its row of `logits`.
    fn draw(&mut self, logits: &Logits, rows: &[usize]) -> Result<(), RolloutError> {
        let version = self.version;
        let asks = self.running.iter_mut().zip(rows).enumerate();
        let asking: Vec<(usize, DrawRequest)> = asks
            .filter_map(|(index, (sequence, row))| Some((index, sequence.asks(*row, version)?)))
            .collect();
        let requests: Vec<DrawRequest> = asking.iter().map(|(_, request)| *request).collect();
        let draws = self.network.as_mut().expect(PARKED).draw(logits, &requests)?;
        for ((index, _), draw) in asking.iter().zip(draws) {
            self.running[*index].take(draw, version);
        }
        self.counts.sampled_tokens += rows.len() as u64;
        Ok(())
    }

    /// How many tokens each of the first prompts prefills in this step; pages for them are taken.
    fn chunk_of_prompts(&mut self) -> Vec<usize> {
        let mut left = self.config.prefill_chunk.max(1);
        let mut chunk = Vec::new();
        for job in &mut self.prompts {
            if left == 0 {
                break;
            }
            let tokens = left.min(job.request.prompt.len() - job.prefilled);
            job.make_room(tokens, &mut self.cache);
            chunk.push(tokens);
            left -= tokens;
        }
        chunk
    }

    /// Takes the sequences that ended out of the running set.
    fn collect(&mut self) -> Result<Vec<Completion>, RolloutError> {
        let mut ended = Vec::new();
        let mut going = Vec::with_capacity(self.running.len());
        for mut sequence in self.running.drain(..) {
            match sequence.ended(&self.stop)? {
                None => going.push(sequence),
                Some(stop) => {
                    self.cache.release(&sequence.pages);
                    let reservation = Reservation::new(sequence.prompt_length, sequence.longest());
                    self.reserved -= reservation.completion;
                    if let Some((left, prompt)) = self.groups.get_mut(&sequence.group) {
                        *left -= 1;
                        if *left == 0 {
                            self.reserved -= *prompt;
                            self.groups.remove(&sequence.group);
                        }
                    }
                    ended.push(sequence.finish(stop, &self.stop)?);
                }
            }
        }
        self.running = going;
        Ok(ended)
    }
}

/// Pages that the completions of a prompt may hold at worst.
#[derive(Clone, Copy, Debug)]
struct Reservation {
    /// For the prompt.
    prompt: usize,
    /// For each completion: everything from the page that it shares with the prompt on.
    completion: usize,
}

impl Reservation {
    fn new(prompt: usize, longest: usize) -> Self {
        let completion = KvCache::pages_for(longest) - prompt / KvCache::PAGE;
        Self { prompt: KvCache::pages_for(prompt), completion }
    }

    /// At least that of every request within the bounds of `config`: where a completion begins in the middle of a page,
    /// it may touch one page more than its length fills.
    fn worst(config: &EngineConfig) -> Self {
        Self {
            prompt: KvCache::pages_for(config.max_prompt_length),
            completion: KvCache::pages_for(config.max_completion_length) + 1,
        }
    }

    fn of(self, samples: usize) -> usize {
        self.prompt + samples * self.completion
    }
}

/// Checks that a sampling configuration can be trained on.
///
/// # Errors
/// A temperature of 0 or below: a greedy choice has no log-probability to learn from.
pub fn check_trainable(sampling: Sampling) -> Result<(), RolloutError> {
    if sampling.temperature > 0.0 {
        return Ok(());
    }
    Err(RolloutError::GreedyTraining { temperature: sampling.temperature })
}
