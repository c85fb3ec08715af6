//! Rollout engines of others behind [`Sampler`]: vLLM and SGLang over HTTP.
//!
//! - `protocol`: what they are asked, and what they answer; `client`: requests to one engine
//! - `engine`: an engine that joins, loads weights, or is gone
//! - `experts`: the experts of tokens in their answers
//! - `push`: weights, from a directory that all see, and the proof that an engine serves them
//!
//! Requests go to the engine with the fewest sequences, and none to one in which requests wait. An engine that is gone is left out,
//! and its requests begin again on another one; it is tried again every few seconds, and gets the current weights before its first
//! request.
//!
//! # Invariants
//! - No token is sampled from an engine before it has proven to serve weights that this sampler has pushed.
//! - At most [`RemoteEnginesConfig::max_running`] sequences are in flight in each engine, and every request has a deadline.
//! - Requests, weights and looks at an engine run in threads of their own; no method waits for an engine.

mod client;
mod engine;
mod experts;
mod protocol;
mod push;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};
use model::{ModelDirectory, ThreadPool};
use trajectory::{GroupId, PolicyVersion, TokenExperts, VersionRun};
use weights::{Digest, Receipt, Snapshot, Subscriber};

use self::client::{EngineClient, EngineFailure};
use self::engine::{EngineState, LOOK, RemoteEngine};
use self::experts::RoutedLayers;
use self::protocol::{EngineCompletion, EngineEnd, EngineRequest, push_run};
use self::push::{ProvenLoad, WeightPusher, WrittenVersion};
use crate::RolloutError;
use crate::engine::StopRules;
use crate::sampler::{AppliedWeights, Completion, EngineCounts, OnUpdate, SampleRequest, Sampler};

pub use self::protocol::EngineKind;
pub use self::push::PushConfig;

/// Events that wait; a thread with a further one waits with it.
const EVENTS: usize = 1024;

/// Called with what people should know of the engines.
pub type EngineNotice = Box<dyn Fn(&str) + Send + Sync>;

/// Engines, and how they are used.
pub struct RemoteEnginesConfig {
    /// Their kind.
    pub kind: EngineKind,
    /// Their addresses, such as `http://127.0.0.1:8000`.
    pub urls: Vec<String>,
    /// Most sequences in flight in each.
    pub max_running: usize,
    /// Longest prompt and completion together, tokens.
    pub max_length: usize,
    /// Seed of the run.
    pub seed: u64,
    /// Temperature of training samples.
    pub temperature: f32,
    /// What ends a completion.
    pub stop_rules: StopRules,
    /// Whether completions name the experts of their tokens, if the model has any.
    pub experts: bool,
    /// How weights reach them.
    pub push: PushConfig,
    /// Longest time without any engine, and for a request.
    pub wait: Duration,
    /// Time without an answer after which an engine is asked whether something has paused it.
    pub quiet: Duration,
    /// Called when an engine is lost, found again or resumed.
    pub notice: EngineNotice,
}

impl fmt::Debug for RemoteEnginesConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteEnginesConfig")
            .field("kind", &self.kind)
            .field("urls", &self.urls)
            .finish_non_exhaustive()
    }
}

/// Engines of others as a sampler.
pub struct RemoteSampler {
    config: RemoteEnginesConfig,
    /// The layers with experts, if these are wanted.
    routed: Option<RoutedLayers>,
    pusher: Arc<WeightPusher>,
    subscriber: Arc<dyn Subscriber>,
    engines: Vec<RemoteEngine>,
    /// The newest snapshot that is not on the disk.
    staged: Option<Arc<Snapshot>>,
    /// The newest version that was received.
    received: Option<PolicyVersion>,
    /// The version that engines load or have loaded.
    current: Option<Arc<WrittenVersion>>,
    /// A version that is being written or loaded.
    update: Option<WeightUpdate>,
    /// The version that every engine in use serves.
    served: PolicyVersion,
    on_update: OnUpdate,
    waiting: VecDeque<RemoteJob>,
    flying: HashMap<u64, FlyingJob>,
    next_job: u64,
    /// Since when there has been no engine.
    without_engine: Option<Instant>,
    events: (Sender<EngineEvent>, Receiver<EngineEvent>),
    counts: EngineCounts,
}

/// A version on its way into the engines.
struct WeightUpdate {
    snapshot: Arc<Snapshot>,
    begun: Instant,
    /// Engines that load it.
    loading: HashSet<usize>,
    /// Longest time that an engine stood still.
    stalled: Duration,
}

/// A completion that has not ended.
#[derive(Clone, Debug)]
struct RemoteSequence {
    request: Arc<SampleRequest>,
    index: u32,
    baseline: bool,
    token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    versions: Vec<VersionRun>,
    experts: Option<TokenExperts>,
}

/// One request to an engine: sequences that begin with the same tokens.
#[derive(Clone, Debug)]
struct RemoteJob {
    sequences: Vec<RemoteSequence>,
}

struct FlyingJob {
    job: RemoteJob,
    engine: usize,
    id: String,
    /// The version that the engine had when it was sent: no token of the answer is older.
    served: PolicyVersion,
    /// Its group was aborted.
    dropped: bool,
}

enum EngineEvent {
    /// A request was answered.
    Answered { job: u64, answer: Result<serde_json::Value, EngineFailure> },
    /// The version is on the disk.
    Written(Box<Result<WrittenVersion, RolloutError>>),
    /// An engine has loaded a version, and serves the model of this name.
    Loaded { engine: usize, version: PolicyVersion, loaded: Result<(String, ProvenLoad), EngineFailure> },
    /// An engine was asked how many requests wait within it.
    Measured { engine: usize, queued: u64 },
    /// An engine was asked whether it is paused, and resumed if it was.
    Looked { engine: usize, resumed: bool },
}

impl fmt::Debug for RemoteSampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteSampler")
            .field("config", &self.config)
            .field("served", &self.served)
            .finish_non_exhaustive()
    }
}

impl RemoteSampler {
    /// A sampler that pushes the versions of `subscriber` to the engines. `directory` has the files of the model.
    ///
    /// # Errors
    /// Certificates of the system that cannot be read.
    pub fn new(
        config: RemoteEnginesConfig,
        directory: Arc<ModelDirectory>,
        subscriber: Arc<dyn Subscriber>,
        pool: Arc<ThreadPool>,
    ) -> Result<Self, RolloutError> {
        let engine = |url: &String| {
            let client = EngineClient::new(url).map_err(|evidence| RolloutError::Sampler {
                engine: url.clone(),
                evidence,
                remedy: "repair the certificates of this machine".to_owned(),
            })?;
            Ok(RemoteEngine::unknown(client, Instant::now()))
        };
        let engines = config.urls.iter().map(engine).collect::<Result<Vec<_>, RolloutError>>()?;
        let routed = RoutedLayers::of(directory.config()).filter(|_| config.experts);
        let pusher = WeightPusher {
            kind: config.kind,
            config: config.push.clone(),
            model: directory,
            temperature: config.temperature,
            pool,
            quiet: config.quiet,
        };
        Ok(Self {
            routed,
            config,
            pusher: Arc::new(pusher),
            subscriber,
            engines,
            staged: None,
            received: None,
            current: None,
            update: None,
            served: PolicyVersion::default(),
            on_update: OnUpdate::default(),
            waiting: VecDeque::new(),
            flying: HashMap::new(),
            next_job: 0,
            without_engine: None,
            events: bounded(EVENTS),
            counts: EngineCounts::default(),
        })
    }

    /// Does `work` in a thread; its result is an event.
    fn spawn(&self, work: impl FnOnce() -> EngineEvent + Send + 'static) -> Result<(), RolloutError> {
        let sender = self.events.0.clone();
        let spawned = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
            // The sampler may be gone.
            let _ = sender.send(work());
        });
        spawned.map(drop).map_err(|error| {
            self.failure(0, &format!("cannot be asked: {error}"), "lower rollout.max_running")
        })
    }

    /// How an engine has to be started, for messages.
    fn start_with(&self) -> &'static str {
        self.config.kind.start_with(self.config.push.adapter)
    }

    fn failure(&self, engine: usize, evidence: &str, remedy: &str) -> RolloutError {
        let engine =
            self.engines.get(engine).map(|engine| engine.client.url().to_owned()).unwrap_or_default();
        RolloutError::Sampler { engine, evidence: evidence.to_owned(), remedy: remedy.to_owned() }
    }

    /// Waits up to `wait` for an event, and takes all that have come.
    fn take_events(&mut self, wait: Duration, ended: &mut Vec<Completion>) -> Result<(), RolloutError> {
        let mut next = self.events.1.recv_timeout(wait).ok();
        while let Some(event) = next {
            self.take(event, ended)?;
            next = self.events.1.try_recv().ok();
        }
        self.maintain()?;
        self.dispatch()
    }

    fn take(&mut self, event: EngineEvent, ended: &mut Vec<Completion>) -> Result<(), RolloutError> {
        match event {
            EngineEvent::Answered { job, answer } => self.answered(job, answer, ended),
            EngineEvent::Written(written) => {
                let written = Arc::new((*written)?);
                let up = |engine: &RemoteEngine| engine.state == EngineState::Up;
                let loading: HashSet<usize> =
                    (0..self.engines.len()).filter(|engine| up(&self.engines[*engine])).collect();
                self.current = Some(Arc::clone(&written));
                loading.iter().try_for_each(|engine| self.load(*engine, &written))?;
                if let Some(update) = &mut self.update {
                    update.loading = loading;
                }
                Ok(())
            }
            EngineEvent::Loaded { engine, version, loaded } => self.loaded(engine, version, loaded),
            EngineEvent::Measured { engine, queued } => {
                self.engines[engine].queue.answered(queued);
                Ok(())
            }
            EngineEvent::Looked { engine, resumed } => {
                let one = &mut self.engines[engine];
                (one.asked, one.heard) = (false, Instant::now());
                if resumed {
                    self.resumed(engine);
                }
                Ok(())
            }
        }
    }

    fn answered(
        &mut self,
        number: u64,
        answer: Result<serde_json::Value, EngineFailure>,
        ended: &mut Vec<Completion>,
    ) -> Result<(), RolloutError> {
        let Some(FlyingJob { job, engine, served, dropped, .. }) = self.flying.remove(&number) else {
            return Ok(());
        };
        let one = &mut self.engines[engine];
        one.sequences = one.sequences.saturating_sub(job.sequences.len());
        one.heard = Instant::now();
        let read = answer.and_then(|answer| self.config.kind.completions(&answer, served));
        let tokens = |one: &RemoteSequence| one.request.prompt.len() + one.token_ids.len();
        let before = |number: usize| job.sequences.get(number).map_or(0, tokens);
        let read = read.and_then(|parts| match &self.routed {
            None => Ok(parts.into_iter().map(|part| (part, None)).collect::<Vec<_>>()),
            Some(layers) => layers.read_all(self.config.kind, parts, before),
        });
        match read {
            _ if dropped => Ok(()),
            Ok(completions) if completions.len() != job.sequences.len() => {
                let evidence =
                    format!("answers with {} completions for {}", completions.len(), job.sequences.len());
                Err(self.failure(engine, &evidence, self.start_with()))
            }
            Ok(completions) => {
                for (sequence, (completion, experts)) in job.sequences.into_iter().zip(completions) {
                    self.grown(sequence, completion, experts, ended)?;
                }
                Ok(())
            }
            Err(EngineFailure::Gone(reason)) => {
                self.lose(engine, &reason);
                self.waiting.push_front(job);
                Ok(())
            }
            Err(EngineFailure::Refused(evidence)) => Err(self.failure(engine, &evidence, self.start_with())),
        }
    }

    /// Appends what was sampled; a sequence that was aborted from outside goes on.
    fn grown(
        &mut self,
        mut sequence: RemoteSequence,
        part: EngineCompletion,
        experts: Option<TokenExperts>,
        ended: &mut Vec<Completion>,
    ) -> Result<(), RolloutError> {
        self.counts.sampled_tokens += part.token_ids.len() as u64;
        sequence.token_ids.extend(part.token_ids);
        sequence.logprobs.extend(part.logprobs);
        match (&mut sequence.experts, experts) {
            // What was read again keeps the experts with which it was sampled.
            (Some(before), Some(all)) => before.extend(&all),
            (before @ None, all) => *before = all,
            (Some(_), None) => {}
        }
        part.versions
            .iter()
            .for_each(|run| push_run(&mut sequence.versions, run.version, u64::from(run.len)));
        let full = sequence.token_ids.len() >= sequence.request.max_completion_length;
        let stop = match part.end {
            EngineEnd::Stopped(stop) => stop,
            EngineEnd::Aborted if full => trajectory::StopReason::Length,
            EngineEnd::Aborted => {
                self.waiting.push_back(RemoteJob { sequences: vec![sequence] });
                return Ok(());
            }
        };
        let RemoteSequence { request, index, baseline, token_ids, logprobs, versions, experts } = sequence;
        let rules = &self.config.stop_rules;
        let is_stop = |token: &u32| {
            (rules.is_stop_token(*token) && !request.options.stop.ignore_eos)
                || request.options.stop.token_ids.contains(token)
        };
        let shown = match token_ids.split_last() {
            Some((last, before)) if stop == trajectory::StopReason::StopToken && is_stop(last) => before,
            _ => &token_ids[..],
        };
        let text = rules.tokenizer.decode(shown)?;
        ended.push(Completion {
            group: request.group,
            index,
            prompt_length: request.prompt.len(),
            prompt_version: versions.first().map_or(self.served, |run| run.version),
            prefill: Vec::new(),
            token_ids: [&request.prompt[..], &token_ids].concat(),
            logprobs,
            versions,
            inserted: None,
            baseline,
            kept: None,
            experts,
            alternatives: Vec::new(),
            sampling: request.sampling,
            stop,
            text,
        });
        Ok(())
    }

    /// Sends what waits to engines with space for it.
    fn dispatch(&mut self) -> Result<(), RolloutError> {
        while let Some(job) = self.waiting.front() {
            let needed = job.sequences.len();
            let most = self.config.max_running;
            let least = self.engines.iter().enumerate().filter(|(_, engine)| engine.has_space(needed, most));
            let load = |engine: &RemoteEngine| engine.sequences as u64 + engine.queue.waiting;
            let Some((engine, _)) = least.min_by_key(|(_, engine)| load(engine)) else { return Ok(()) };
            let Some(job) = self.waiting.pop_front() else { return Ok(()) };
            self.send(engine, job)?;
        }
        Ok(())
    }

    fn send(&mut self, engine: usize, job: RemoteJob) -> Result<(), RolloutError> {
        let number = self.next_job;
        self.next_job += 1;
        let Some(first) = job.sequences.first() else { return Ok(()) };
        let request = &first.request;
        let done = first.token_ids.len();
        let id = format!("rlrun-{}-{}-{}-{number}", request.group.0, first.index, request.turn);
        let mut stop_token_ids = match request.options.stop.ignore_eos {
            true => Vec::new(),
            false => self.config.stop_rules.token_ids.clone(),
        };
        stop_token_ids.extend(&request.options.stop.token_ids);
        let place = [request.group.0, u64::from(first.index), u64::from(request.turn), done as u64];
        let asked = EngineRequest {
            id: id.clone(),
            token_ids: [&request.prompt[..], &first.token_ids].concat(),
            samples: job.sequences.len(),
            sampling: if first.baseline { model::Sampling::GREEDY } else { request.sampling },
            max_tokens: request.max_completion_length - done,
            min_tokens: request.options.stop.min_tokens.saturating_sub(done),
            stop_token_ids,
            experts: self.routed.is_some(),
            version: self.served,
            seed: request.options.seed.unwrap_or_else(|| seed_of(self.config.seed, place)),
        };
        self.counts.prefilled_tokens += asked.token_ids.len() as u64;
        let one = &mut self.engines[engine];
        if one.sequences == 0 {
            one.heard = Instant::now();
        }
        one.sequences += job.sequences.len();
        let call = self.config.kind.generate(&one.model, &asked);
        let (client, served, deadline) = (Arc::clone(&one.client), one.proven, self.config.wait);
        self.flying.insert(number, FlyingJob { job, engine, id, served, dropped: false });
        self.spawn(move || EngineEvent::Answered { job: number, answer: client.call(&call, deadline) })
    }
}

impl Sampler for RemoteSampler {
    fn version(&self) -> PolicyVersion {
        self.served
    }

    fn has_capacity(&self, completions: usize) -> bool {
        let free = |engine: &RemoteEngine| engine.has_space(completions, self.config.max_running);
        self.waiting.is_empty() && self.engines.iter().any(free)
    }

    fn in_flight(&self) -> usize {
        let flying = self.flying.values().filter(|flying| !flying.dropped).map(|flying| &flying.job);
        self.waiting.iter().chain(flying).map(|job| job.sequences.len()).sum()
    }

    fn submit(&mut self, request: SampleRequest) -> Result<(), RolloutError> {
        if request.prompt.is_empty() {
            return Err(RolloutError::EmptyPrompt { group: request.group });
        }
        if request.options.alternatives > 0 || !request.options.stop.strings.is_empty() {
            let evidence = "samples tokens, and neither finds stop strings nor reports alternatives";
            return Err(self.failure(0, evidence, "leave `stop` and `logprobs` out of the request"));
        }
        let request = Arc::new(request);
        let sequence = |index: u32, baseline| RemoteSequence {
            request: Arc::clone(&request),
            index,
            baseline,
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            versions: Vec::new(),
            experts: None,
        };
        let samples = u32::try_from(request.samples).unwrap_or(u32::MAX);
        let sampled = (0..samples).map(|n| sequence(request.first_index + n, false));
        let sampled: Vec<RemoteSequence> = sampled.collect();
        if !sampled.is_empty() {
            // The engine reads their prompt once.
            self.waiting.push_back(RemoteJob { sequences: sampled });
        }
        if request.baseline {
            let greedy = sequence(request.first_index + samples, true);
            self.waiting.push_back(RemoteJob { sequences: vec![greedy] });
        }
        self.dispatch()
    }

    fn poll(&mut self, wait: Duration) -> Result<Vec<Completion>, RolloutError> {
        let mut ended = Vec::new();
        self.take_events(wait, &mut ended)?;
        Ok(ended)
    }

    fn abort(&mut self, group: GroupId) -> Result<usize, RolloutError> {
        let is_of = |job: &RemoteJob| job.sequences.first().is_some_and(|first| first.request.group == group);
        let before = self.in_flight();
        self.waiting.retain(|job| !is_of(job));
        let mut calls = Vec::new();
        for flying in self.flying.values_mut().filter(|flying| is_of(&flying.job) && !flying.dropped) {
            flying.dropped = true;
            let client = Arc::clone(&self.engines[flying.engine].client);
            calls.push((client, self.config.kind.abort(&flying.id, flying.job.sequences.len())));
        }
        for (client, calls) in calls {
            // Its answer comes at once then; without it, when the engine has sampled to the end.
            std::thread::spawn(move || calls.iter().for_each(|call| drop(client.call(call, LOOK))));
        }
        Ok(before - self.in_flight())
    }

    fn newer_weights(&mut self, wait: Duration) -> Result<Option<PolicyVersion>, RolloutError> {
        if let Some(update) = &self.update {
            let version = update.snapshot.version;
            if !wait.is_zero() && self.in_flight() == 0 {
                let mut ended = Vec::new();
                self.take_events(wait, &mut ended)?;
                debug_assert!(ended.is_empty(), "nothing is in flight");
            }
            return Ok(Some(version));
        }
        if let Some(snapshot) = self.subscriber.wait_newer(self.received, wait)? {
            self.received = Some(snapshot.version);
            self.staged = Some(snapshot);
        }
        if !wait.is_zero() && self.in_flight() == 0 {
            // Without a request only this looks after engines.
            let mut ended = Vec::new();
            self.take_events(Duration::ZERO, &mut ended)?;
        }
        Ok(self.staged.as_ref().map(|snapshot| snapshot.version))
    }

    fn apply_weights(&mut self, on_update: OnUpdate) -> Result<Option<AppliedWeights>, RolloutError> {
        self.on_update = on_update;
        if self.update.is_none() {
            let Some(snapshot) = self.staged.take() else { return Ok(None) };
            let (pusher, before) =
                (Arc::clone(&self.pusher), self.current.as_ref().map(|current| current.version));
            let theirs = Arc::clone(&snapshot);
            let begun = Instant::now();
            self.update =
                Some(WeightUpdate { snapshot, begun, loading: HashSet::new(), stalled: Duration::ZERO });
            self.without_engine.get_or_insert_with(Instant::now);
            self.spawn(move || EngineEvent::Written(Box::new(pusher.write(&theirs, before))))?;
            return Ok(None);
        }
        let current = self.current.as_ref().map(|current| current.version);
        let up = self.engines.iter().any(|engine| engine.state == EngineState::Up);
        let done = self
            .update
            .take_if(|update| update.loading.is_empty() && current == Some(update.snapshot.version) && up);
        let Some(WeightUpdate { snapshot, begun, stalled, .. }) = done else { return Ok(None) };
        self.without_engine = None;
        self.served = snapshot.version;
        let digest = Digest::of_values(&snapshot.values, 1);
        let took = snapshot.received.took + begun.elapsed();
        let (version, bytes) = (snapshot.version, snapshot.received.bytes);
        self.subscriber.applied(Receipt { version, digest, took, stalled, bytes, taken: 0 })?;
        Ok(Some(AppliedWeights { version, stalled }))
    }

    fn sleep(&mut self) -> Result<u64, RolloutError> {
        // Engines of others have memory of their own.
        Ok(0)
    }

    fn is_asleep(&self) -> bool {
        false
    }

    fn counts(&self) -> EngineCounts {
        self.counts
    }
}

/// The seed of a request: a function of the run's seed and its place.
fn seed_of(seed: u64, place: [u64; 4]) -> u64 {
    // SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), once for each number.
    place.iter().fold(seed, |state, number| {
        let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_add(*number);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}
