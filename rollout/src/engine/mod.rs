//! Today's rollout engine: continuous batching over a paged KV cache, in this process.
//!
//! One [`Engine::step`] is one pass of the network over one new token of every running sequence (decode) and a bounded
//! chunk of prompt tokens (chunked prefill, Sarathi-Serve, arXiv 2403.02310). A prompt is prefilled once, and all
//! completions of a request share its pages; the page in which prompt and completion meet is copied at the first write
//! (paged attention with copy on write, vLLM, arXiv 2309.06180).
//!
//! # Layout
//! - `config`: its bounds; `local`: [`LocalSampler`], the engine behind [`Sampler`](crate::Sampler)
//! - `adapters`: adapters beside the weights, each with its version; `adapter_slots`: [`AdapterSlots`], changes of what is served
//! - `network`: the decoder that it runs, on the processor, on several ranks, or on a device
//! - `prompt`: a prompt during prefill; `sequence`: a completion during decode; `stop`: when it ends
//! - `reservation`: the pages that requests may hold; `retained`: pages of completions whose episode goes on; `prefixes`:
//!   pages of completions that other requests may continue
//! - `running_limit`: how many sequences run at once, if that adapts
//! - `sleep`: memory that is given back and taken again, and what is then computed again
//! - `replayed`: recorded trajectories sampled again, to be compared
//! - `interrupt`: text inserted into completions that are too long; `speculate`: proposals that one pass verifies
//!
//! # Invariants
//! - A completion depends on the weights, the prompt and its own random stream, bit for bit, never on the batch; on a
//!   GPU up to rounding, because its library chooses kernels by the number of rows.
//! - Every token carries the policy version that sampled it.
//! - Admission control reserves the pages that a request may ever need when it is accepted: no sequence is preempted, and
//!   none waits for pages during decode.

mod adapter_slots;
mod adapters;
mod config;
mod interrupt;
mod local;
mod network;
mod prefixes;
mod prompt;
mod replayed;
mod reservation;
mod retained;
mod running_limit;
mod sequence;
mod sleep;
mod speculate;
mod stop;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use device::Device;
use model::on_device::{DeviceSampler, StagedWeights};
use model::{Config, KvCache, StepSequence, ThreadPool};
use trajectory::{GroupId, PolicyVersion, StopReason, TokenExperts};

use crate::RolloutError;
use crate::sampler::{Completion, EngineCounts, PartialCompletion, SampleRequest};
pub use adapter_slots::{AdapterSlots, PendingReceipt};
use adapters::AdapterTable;
pub use adapters::check_adapter;
pub use config::{EngineConfig, check_trainable};
pub use interrupt::Interruption;
pub use local::LocalSampler;
use network::DrawnToken;
pub use network::{Network, ServeOn, ServedWeights, UnpackedWeights};
use prefixes::{MOST, PrefixCache, PrefixKey};
use prompt::PromptJob;
pub use replayed::{DifferentValues, ReplayConfig, SampledDifference, TrajectoryReplay};
use reservation::{OpenRequest, Reservation};
use retained::RetainedPages;
use running_limit::AdaptedLimit;
use sequence::Sequence;
pub use sequence::{random_stream, uniform};
pub use speculate::Speculation;
pub use stop::StopRules;

/// A call in the wrong order.
const ASLEEP: &str = "an engine that sleeps is woken up with weights before its next step";

/// Samples completions under the weights that it serves.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    stop: StopRules,
    model: Config,
    /// `None` while the engine sleeps.
    network: Option<Network>,
    /// Where the network is made again after a sleep.
    device: Option<Device>,
    version: PolicyVersion,
    cache: KvCache,
    /// Pages that accepted requests may hold at the same time, at worst.
    reserved: usize,
    /// Requests accepted so far; numbers the next one.
    accepted: u64,
    /// Requests with completions that are not returned yet, by request number.
    open: HashMap<u64, OpenRequest>,
    prompts: VecDeque<PromptJob>,
    running: Vec<Sequence>,
    retained: RetainedPages,
    prefixes: PrefixCache,
    counts: EngineCounts,
    /// `None` if the bound of the configuration is the limit.
    adapted: Option<AdaptedLimit>,
    interruption: Option<Interruption>,
    speculation: Speculation,
    /// Those that requests can name.
    adapters: AdapterTable,
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
        // A later turn that begins in the middle of a page reserves that page for its prompt and for its completion.
        let later = KvCache::pages_for(config.max_episode_length) + 1;
        let positions = config.kv_cache_tokens.unwrap_or(all.max(later) * KvCache::PAGE);
        let largest = Reservation::worst(&config).of(config.max_samples).max(later) * KvCache::PAGE;
        if positions < largest {
            return Err(RolloutError::CacheTooSmall { needed: largest, positions });
        }
        let cache = network.cache(positions);
        // A recurrent state may take more memory than the pages of its sequence.
        let [retained, prefixes] =
            if cache.has_states() { [config.max_running; 2] } else { [usize::MAX, MOST] };
        let device = match &network {
            Network::Host { .. } | Network::Ranks { .. } => None,
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
            accepted: 0,
            open: HashMap::new(),
            prompts: VecDeque::new(),
            running: Vec::new(),
            retained: RetainedPages::new(retained),
            prefixes: PrefixCache::new(prefixes),
            counts: EngineCounts::default(),
            adapted: None,
            interruption: None,
            speculation: Speculation::None,
            adapters: AdapterTable::default(),
            pool: Arc::new(ThreadPool::single()),
        })
    }

    /// The same, computing on the thread pool `pool`.
    #[must_use]
    pub fn on(self, pool: Arc<ThreadPool>) -> Self {
        Self { pool, ..self }
    }

    /// The same, inserting a text into completions that do not end in time.
    #[must_use]
    pub fn interrupting(self, interruption: Option<Interruption>) -> Self {
        Self { interruption, ..self }
    }

    /// The same, with proposals that one pass verifies while few sequences decode. It has no effect on a device, and with a model
    /// that has a recurrence, whose state does not go back to before a rejected token.
    #[must_use]
    pub fn speculating(self, speculation: Speculation) -> Self {
        let off = self.device.is_some() || self.cache.has_states();
        Self { speculation: if off { Speculation::None } else { speculation }, ..self }
    }

    /// The same, with completions that name the experts of their tokens ([`TokenExperts`]). A model without experts has none.
    #[must_use]
    pub fn recording_experts(self) -> Self {
        Self { cache: self.cache.with_routes(&self.model), ..self }
    }

    /// The thread pool that it computes on.
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

    /// Whether no request is in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.prompts.is_empty() && self.running.is_empty()
    }

    /// Free pages of the KV cache, and all its pages.
    #[must_use]
    pub fn pages(&self) -> (usize, usize) {
        (self.cache.free_pages(), self.cache.total_pages())
    }

    /// Sequences in flight: those that decode and those whose prompt is prefilled or waits for it.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.running.len() + self.prompts.iter().map(|job| job.request.sequences()).sum::<usize>()
    }

    /// Admission control: whether a request for `completions` sequences, a baseline included, should be submitted now.
    #[must_use]
    pub fn has_capacity(&self, completions: usize) -> bool {
        self.fits(completions, Reservation::worst(&self.config))
    }

    /// Admission control: whether `request` should be submitted now.
    #[must_use]
    pub fn has_capacity_for(&self, request: &SampleRequest) -> bool {
        let length = request.prompt.len();
        let reservation = Reservation::new(length, length + request.max_completion_length);
        self.fits(request.sequences(), reservation)
    }

    fn fits(&self, sequences: usize, each: Reservation) -> bool {
        let limit = self.running_limit().unwrap_or(self.config.max_running);
        self.is_idle()
            || (self.in_flight() + sequences <= limit
                && self.reserved + each.of(sequences) <= self.cache.total_pages())
    }

    /// Takes a request. A later turn of an episode continues the pages of the turn before, if they are still there.
    ///
    /// # Errors
    /// An empty prompt, one that is too long, or a request that the whole cache could not hold.
    pub fn submit(&mut self, mut request: SampleRequest) -> Result<(), RolloutError> {
        let length = request.prompt.len();
        let context = self.model().max_context();
        if request.options.alternatives > 0 && self.device.is_some() {
            return Err(RolloutError::NoAlternatives);
        }
        request.options.adapter = self.adapters.entry(request.options.adapter)?;
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
        let open = OpenRequest { sequences: request.sequences(), prompt_pages: reservation.prompt };
        self.open.insert(self.accepted, open);
        let cached = match PrefixKey::of(&request.options) {
            None => self.retained.take(&request, &mut self.cache),
            Some(key) => self.prefixes.share(key, &request.prompt, &mut self.cache),
        };
        self.counts.reused_tokens += cached.tokens as u64;
        self.prompts.push_back(PromptJob::new(self.accepted, request, cached));
        self.accepted += 1;
        Ok(())
    }

    /// Serves `served` as `version` from the next step on. Sequences in flight keep their KV cache; see
    /// [`Engine::recompute`]. Returns the weights that were served before, if they are on a device.
    ///
    /// # Errors
    /// If the device fails, or the weights are not where the engine computes.
    ///
    /// # Panics
    /// If the version goes back.
    pub fn apply(
        &mut self,
        served: impl Into<ServedWeights>,
        version: PolicyVersion,
    ) -> Result<Option<StagedWeights>, RolloutError> {
        assert!(version >= self.version, "a sampler never goes back from {} to {version}", self.version);
        let before = match (&mut self.network, served.into()) {
            (network, ServedWeights::Unpacked(weights)) if self.device.is_none() => {
                *network = Some(weights.pack(network.take(), &self.model, &self.pool)?);
                None
            }
            (Some(network), served) => network.serve(served)?,
            (None, ServedWeights::Unpacked(_)) => {
                return Err(RolloutError::Misplaced { weights: "on the host", engine: "on a device" });
            }
            (asleep, ServedWeights::Host(decoder)) => {
                *asleep = Some(decoder.into());
                None
            }
            (asleep, ServedWeights::Device(staged)) => {
                let Some(device) = &self.device else {
                    return Err(RolloutError::Misplaced { weights: "on a device", engine: "on the host" });
                };
                *asleep = Some(Network::Device(Box::new(DeviceSampler::new(device, &self.model, staged)?)));
                None
            }
        };
        if version != self.version {
            self.forget_prefixes(|_| true);
        }
        self.version = version;
        self.adapt()?;
        Ok(before)
    }

    /// One pass of the network: a decode step and a chunk of prefill. Returns the completions that ended.
    ///
    /// # Errors
    /// If the network or the tokenizer fails.
    ///
    /// # Panics
    /// If the engine sleeps.
    pub fn step(&mut self) -> Result<Vec<Completion>, RolloutError> {
        let decoding = self.running.len().min(self.config.max_running);
        if !self.adapters.is_empty() {
            // Those of one adapter are one product.
            self.running[..decoding].sort_by_key(Sequence::adapter);
        }
        let proposals = self.speculation.per_sequence(decoding);
        self.evict_for(decoding, proposals);
        for sequence in &mut self.running[..decoding] {
            sequence.prepare_pass(proposals, &mut self.cache);
        }
        let prompt_jobs = self.chunk_of_prompts();
        let decoded = self.running[..decoding].iter().map(Sequence::pass);
        let prefilled = self.prompts.iter().zip(&prompt_jobs).map(|(job, tokens)| job.next(*tokens));
        let sequences: Vec<StepSequence<'_>> = decoded.chain(prefilled).collect();
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        let network = self.network.as_mut().expect(ASLEEP);
        network.step(&mut self.cache, &sequences, &self.pool)?;
        self.counts.steps += 1;
        let interrupted = self.running[..decoding].iter().filter(|sequence| sequence.is_interrupted_now());
        self.counts.interrupted += interrupted.count() as u64;
        // The rows of logits of every sequence.
        let mut end = 0;
        let mut rows: Vec<Range<usize>> = Vec::with_capacity(decoding);
        for sequence in &self.running[..decoding] {
            let start = end;
            end += sequence.pass().wanted;
            rows.push(start..end);
        }
        let waiting = self.running.split_off(decoding);
        for (row, tokens) in (end..).zip(prompt_jobs) {
            self.counts.prefilled_tokens += tokens as u64;
            let Some(mut job) = self.prompts.pop_front() else { break };
            job.advance(tokens, self.adapters.version(job.request.options.adapter, self.version));
            if job.state_at() == Some(job.prefilled) {
                self.cache.keep_state(&job.pages, job.prefilled);
            }
            if job.prefilled < job.request.prompt.len() {
                self.prompts.push_front(job);
                break;
            }
            let interruption = self.interruption.as_ref();
            let sequences = job.into_sequences(&mut self.cache, self.config.seed, &self.stop, interruption);
            rows.resize(rows.len() + sequences.len(), row..row + 1);
            self.running.extend(sequences);
        }
        self.draw(&rows)?;
        let new = self.running.split_off(decoding);
        self.running.extend(waiting);
        self.running.extend(new);
        self.collect()
    }

    /// Draws the next tokens of every running sequence from its rows of logits, or inserts one of an interruption.
    fn draw(&mut self, rows: &[Range<usize>]) -> Result<(), RolloutError> {
        let (adapters, of_engine) = (&self.adapters, self.version);
        let (mut requests, mut counts) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for (sequence, rows) in self.running.iter_mut().zip(rows) {
            let asked = sequence.asks(rows.clone(), adapters.version(sequence.adapter(), of_engine));
            counts.push(asked.len());
            requests.extend(asked);
        }
        let draws = self.network.as_mut().expect(ASLEEP).draw(&requests, &self.pool)?;
        let mut draws = draws.into_iter();
        for (sequence, count) in self.running.iter_mut().zip(counts) {
            if count == 0 {
                self.counts.sampled_tokens += 1;
                continue;
            }
            let own: Vec<DrawnToken> = draws.by_ref().take(count).collect();
            let version = adapters.version(sequence.adapter(), of_engine);
            let verified = sequence.take(own, version, &self.stop)?;
            self.counts.sampled_tokens += verified.sampled;
            self.counts.proposed_tokens += verified.proposed;
            self.counts.accepted_tokens += verified.accepted;
        }
        Ok(())
    }

    /// Frees kept pages until a pass of `decoding` sequences with `proposals` each has all pages that it may take. Every
    /// sequence begins in the middle of a page at worst.
    fn evict_for(&mut self, decoding: usize, proposals: usize) {
        let chunk = self.config.prefill_chunk.max(1);
        let prefill = KvCache::pages_for(chunk) + 2 * self.prompts.len().min(chunk);
        let needed = decoding * (KvCache::pages_for(1 + proposals) + 1) + prefill;
        // No open episode waits for a prefix.
        self.prefixes.evict(needed, &mut self.cache);
        self.counts.evicted_tokens += self.retained.evict(needed, &mut self.cache) as u64;
    }

    /// Tokens that each of the first prompts prefills in this step; takes pages for them.
    fn chunk_of_prompts(&mut self) -> Vec<usize> {
        let mut left = self.config.prefill_chunk.max(1);
        let mut chunk = Vec::new();
        for job in &mut self.prompts {
            if left == 0 {
                break;
            }
            let rest = job.request.prompt.len() - job.prefilled;
            let state_at = job.state_at().filter(|at| self.cache.has_states() && *at > job.prefilled);
            let tokens = left.min(state_at.map_or(rest, |at| at - job.prefilled));
            job.reserve_pages(tokens, &mut self.cache);
            chunk.push(tokens);
            // Prompts behind one that is not whole wait.
            left = if tokens < rest { 0 } else { left - tokens };
        }
        chunk
    }

    /// Takes the sequences that ended out of the running set.
    fn collect(&mut self) -> Result<Vec<Completion>, RolloutError> {
        let mut ended = Vec::new();
        for mut sequence in std::mem::take(&mut self.running) {
            match sequence.ended(&self.stop)? {
                None => self.running.push(sequence),
                Some(stop) => {
                    let experts = self.experts_of(&sequence);
                    self.keep_pages(&mut sequence, stop);
                    self.release(&sequence);
                    ended.push(sequence.finish(stop, experts, &self.stop)?);
                }
            }
        }
        self.free_ended_adapters()?;
        Ok(ended)
    }

    /// The experts of the tokens of a sequence, if they are recorded. The newest token was not fed to the network.
    fn experts_of(&self, sequence: &Sequence) -> Option<TokenExperts> {
        let per_token = self.model.experts()?.per_token as u32;
        let ids = self.cache.routes(&sequence.pages, sequence.token_ids.len() - 1)?;
        Some(TokenExperts { per_token, ids })
    }

    /// Keeps the pages of a sequence that ended, if a next turn or another request may continue them.
    fn keep_pages(&mut self, sequence: &mut Sequence, stop: StopReason) {
        // The newest token was drawn and not fed to the network.
        let known = &sequence.token_ids[..sequence.token_ids.len() - 1];
        if sequence.keep_cache && stop != StopReason::Length {
            let (known, pages) = (known.to_vec(), std::mem::take(&mut sequence.pages));
            let evicted = self.retained.keep(sequence, known, pages, &mut self.cache);
            self.counts.evicted_tokens += evicted as u64;
        } else if let Some(key) = sequence.prefix_key(self.adapters.version(sequence.adapter(), self.version))
        {
            let (known, pages) = (known.to_vec(), std::mem::take(&mut sequence.pages));
            self.prefixes.keep(key, known, pages, &mut self.cache);
        }
    }

    /// What was sampled since the last call for requests that stream and have not ended.
    pub fn partials(&mut self) -> Vec<PartialCompletion> {
        self.running.iter_mut().filter_map(Sequence::partial).collect()
    }

    /// Part of the KV cache that is reserved for requests in flight, from 0 to 1.
    #[must_use]
    pub fn cache_usage(&self) -> f64 {
        self.reserved as f64 / self.cache.total_pages().max(1) as f64
    }

    /// Frees the pages that are kept for a next turn of episode `index` of `group`, which has ended.
    pub fn end_episode(&mut self, group: GroupId, index: u32) {
        self.retained.forget(&mut self.cache, |kept| kept == (group, index));
    }

    /// Drops the sequences of `group` that have not ended. Returns their number.
    pub fn abort(&mut self, group: GroupId) -> usize {
        self.retained.forget(&mut self.cache, |(kept, _)| kept == group);
        let before = self.in_flight();
        for sequence in std::mem::take(&mut self.running) {
            if sequence.group == group {
                self.release(&sequence);
            } else {
                self.running.push(sequence);
            }
        }
        for job in std::mem::take(&mut self.prompts) {
            if job.request.group == group {
                self.cache.release(&job.pages);
                let longest = job.request.prompt.len() + job.request.max_completion_length;
                self.reserved -=
                    Reservation::new(job.request.prompt.len(), longest).of(job.request.sequences());
                self.open.remove(&job.number);
            } else {
                self.prompts.push_back(job);
            }
        }
        before - self.in_flight()
    }

    /// Gives back the pages and the reservation of a sequence that is in flight no longer.
    fn release(&mut self, sequence: &Sequence) {
        self.cache.release(&sequence.pages);
        self.reserved -= Reservation::new(sequence.prompt_length, sequence.longest()).completion;
        if let Some(open) = self.open.get_mut(&sequence.request) {
            open.sequences -= 1;
            if open.sequences == 0 {
                self.reserved -= open.prompt_pages;
                self.open.remove(&sequence.request);
            }
        }
    }
}
