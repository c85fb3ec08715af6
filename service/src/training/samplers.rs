//! What sampling sessions sample from: base models, published weights, saved ones.
//!
//! Engines of base models serve the adapters that were used last; others get a slot when they are used again. Weights that exceed
//! the memory for them are forgotten, those that were used the longest ago first, and read again if they are saved.
//!
//! Invariant: a request is sampled with the weights of its session as they were when it came, or newer ones of an in-flight sampler.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use model::{Layout, ModelDirectory};
use trainer::checkpoint::adapter_path;
use trajectory::PolicyVersion;
use weights::Digest;

use super::saved::{SavedPath, run_dir};
use super::{SampleFrom, ServiceShared, UserId};
use crate::base::BaseModel;
use crate::data::{SamplingOutput, SamplingRequest};
use crate::outcome::{FailedRequest, Refusal};
use crate::sampling::{HostedNetwork, SamplerHost};
use crate::trained::{SamplingWeights, TrainedModel};

/// Requests of a sampling session that are remembered.
const REMEMBERED: usize = 8192;
/// Longest wait for an engine to serve weights that were published in flight.
const RECEIPT: Duration = Duration::from_secs(60);

/// A sampling session.
#[derive(Debug)]
pub(super) struct SamplerEntry {
    pub(super) user: UserId,
    /// The session that it belongs to.
    pub(super) session: String,
    pub(super) base: String,
    /// The weights; `None` for those of the base model.
    pub(super) published: Option<u64>,
    /// Where they are saved, as `tinker://`.
    pub(super) path: Option<String>,
    /// The model that they are of.
    pub(super) model: Option<String>,
    known: HashMap<u64, KnownSample>,
    order: VecDeque<u64>,
}

/// A sampling request that came before.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct KnownSample {
    pub(super) request_id: String,
    pub(super) sequence_ids: Vec<String>,
    pub(super) request: SamplingRequest,
}

/// Weights that can be sampled from.
#[derive(Debug)]
struct PublishedWeights {
    base: String,
    /// `None` if they are not in memory.
    weights: Option<SamplingWeights>,
    /// Where they are saved.
    files: Option<PathBuf>,
    version: PolicyVersion,
    /// Their slot in the engine of the base model.
    slot: Option<usize>,
    /// The engine of whole weights.
    host: Option<Arc<SamplerHost>>,
    /// When they were used last, as a number of uses.
    used: u64,
    /// Whether later versions take their place.
    inflight: bool,
}

/// The engine of a base model.
#[derive(Debug)]
struct BaseHost {
    host: Arc<SamplerHost>,
    /// What each slot has.
    slots: Vec<Option<u64>>,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct SamplerTable {
    sessions: HashMap<String, SamplerEntry>,
    published: HashMap<u64, PublishedWeights>,
    /// Saved weights that are published, by directory and time.
    by_files: HashMap<(PathBuf, u64), u64>,
    hosts: HashMap<String, BaseHost>,
    /// The in-flight samplers of models.
    inflight: HashMap<String, u64>,
    next: u64,
    uses: u64,
}

/// A session, and the engine that its requests go to.
struct ReadySampler {
    host: Arc<SamplerHost>,
    slot: Option<usize>,
}

impl SamplerEntry {
    /// The request that came before with this number.
    pub(super) fn known(&self, number: u64) -> Option<&KnownSample> {
        self.known.get(&number)
    }

    /// Remembers a request.
    pub(super) fn remember(&mut self, number: u64, known: KnownSample) {
        if self.known.insert(number, known).is_none() {
            self.order.push_back(number);
        }
        while self.order.len() > REMEMBERED {
            let Some(oldest) = self.order.pop_front() else { break };
            self.known.remove(&oldest);
        }
    }
}

impl PublishedWeights {
    fn bytes(&self) -> u64 {
        match &self.weights {
            None => 0,
            Some(SamplingWeights::Factors(factors)) => size_of_val(factors.values()) as u64,
            Some(SamplingWeights::Whole(parameters)) => size_of_val(parameters.values()) as u64,
        }
    }
}

impl SamplerTable {
    /// The sampling session of a user.
    ///
    /// # Errors
    /// 404 if there is none, or it is another user's.
    pub(super) fn session(&mut self, user: UserId, id: &str) -> Result<&mut SamplerEntry, Refusal> {
        let entry = self.sessions.get_mut(id).filter(|entry| entry.user == user);
        entry.ok_or_else(|| {
            let id: String = id.chars().take(200).collect();
            Refusal::new(404, format!("there is no sampling session `{id}`"))
        })
    }

    /// The version of published weights; 0 for those of a base model.
    pub(super) fn version_of(&self, published: Option<u64>) -> u64 {
        let published = published.and_then(|id| self.published.get(&id));
        published.map_or(0, |published| published.version.0)
    }

    /// Sampling sessions.
    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// The engines.
    pub(super) fn hosts(&self) -> Vec<Arc<SamplerHost>> {
        let whole = self.published.values().filter_map(|published| published.host.clone());
        self.hosts.values().map(|base| Arc::clone(&base.host)).chain(whole).collect()
    }

    /// Forgets the sampling sessions of sessions that are over, and weights that no other has. Returns engines that are to be ended.
    pub(super) fn end_sessions(&mut self, over: &[String]) -> Vec<Arc<SamplerHost>> {
        self.sessions.retain(|_, entry| !over.contains(&entry.session));
        let in_use: Vec<u64> = self.sessions.values().filter_map(|entry| entry.published).collect();
        let idle: Vec<u64> = self.published.keys().filter(|id| !in_use.contains(id)).copied().collect();
        let mut ended = Vec::new();
        for id in idle {
            self.leave_engine(id, &mut ended);
            self.published.remove(&id);
        }
        self.inflight.retain(|_, id| self.published.contains_key(id));
        self.by_files.retain(|_, id| self.published.contains_key(id));
        ended
    }

    /// Takes published weights out of their engine.
    fn leave_engine(&mut self, id: u64, ended: &mut Vec<Arc<SamplerHost>>) {
        let Some(published) = self.published.get_mut(&id) else { return };
        ended.extend(published.host.take());
        let (base, slot) = (published.base.clone(), published.slot.take());
        if let (Some(slot), Some(of_base)) = (slot, self.hosts.get_mut(&base)) {
            of_base.slots[slot] = None;
            // If the engine has ended, its requests say why.
            let _ = of_base.host.free_adapter(slot);
        }
    }

    fn add(&mut self, published: PublishedWeights) -> u64 {
        self.next += 1;
        self.published.insert(self.next, published);
        self.next
    }

    /// Forgets weights beyond `most` bytes, but for those of `keep`. Returns engines that are to be ended.
    fn forget(&mut self, most: u64, keep: u64) -> Vec<Arc<SamplerHost>> {
        let mut ended = Vec::new();
        while self.published.values().map(PublishedWeights::bytes).sum::<u64>() > most {
            let can_go = |(id, published): &(&u64, &PublishedWeights)| {
                **id != keep && !published.inflight && published.weights.is_some()
            };
            let oldest = self.published.iter().filter(can_go).min_by_key(|(_, published)| published.used);
            let Some(id) = oldest.map(|(id, _)| *id) else { break };
            self.leave_engine(id, &mut ended);
            if let Some(published) = self.published.get_mut(&id) {
                published.weights = None;
            }
        }
        ended
    }
}

impl ServiceShared {
    /// Publishes `weights` of `model`, the model `id`, for a sampling session with this number in its session. Returns its id.
    ///
    /// # Errors
    /// If the session is over, or an engine does not serve the weights in time.
    pub(super) fn publish(
        &self,
        id: &str,
        model: &TrainedModel,
        weights: SamplingWeights,
        number: u64,
        inflight: bool,
    ) -> Result<String, FailedRequest> {
        let (user, session) = {
            let registry = self.registry();
            let entry = registry.models.get(id);
            let entry = entry.and_then(|entry| Some((entry.record.owner(), entry.session.clone()?)));
            entry.ok_or_else(|| FailedRequest::user("the session of the model is over"))?
        };
        let sampling_session_id = format!("{session}:sample:{number}");
        let (version, base) = (model.version(), model.base().info().name.clone());
        let mut table = self.samplers();
        let served = table.inflight.get(id).copied().filter(|_| inflight);
        let mut receipt = None;
        let published = match served {
            Some(served) => {
                if let Some(published) = table.published.get_mut(&served) {
                    published.weights = Some(weights.clone());
                    published.version = version;
                }
                receipt = self.serve_newer(&table, served, &weights, version)?;
                served
            }
            None => {
                table.uses += 1;
                let used = table.uses;
                let new = PublishedWeights {
                    base: base.clone(),
                    weights: Some(weights.clone()),
                    files: None,
                    version,
                    slot: None,
                    host: None,
                    used,
                    inflight,
                };
                let added = table.add(new);
                if inflight {
                    table.inflight.insert(id.to_owned(), added);
                }
                added
            }
        };
        let entry = SamplerEntry {
            user,
            session,
            base,
            published: Some(published),
            path: None,
            model: Some(id.to_owned()),
            known: HashMap::new(),
            order: VecDeque::new(),
        };
        table.sessions.insert(sampling_session_id.clone(), entry);
        let ended = table.forget(self.config.limits.sampler_bytes, published);
        drop(table);
        drop(ended);
        if let Some(receipt) = receipt {
            let receipt = receipt.wait(RECEIPT).map_err(|error| FailedRequest::server(error.to_string()))?;
            let sent = match &weights {
                SamplingWeights::Factors(factors) => Digest::of(factors.values()),
                SamplingWeights::Whole(parameters) => Digest::of(parameters.values()),
            };
            if receipt.digest != sent {
                return Err(FailedRequest::server(format!(
                    "the sampler serves weights with the digest {:?}, and those of version {version} have {sent:?}",
                    receipt.digest
                )));
            }
        }
        Ok(sampling_session_id)
    }

    /// Gives newer weights to the engine that serves older ones of them.
    fn serve_newer(
        &self,
        table: &SamplerTable,
        id: u64,
        weights: &SamplingWeights,
        version: PolicyVersion,
    ) -> Result<Option<rollout::PendingReceipt>, FailedRequest> {
        let failed = |error: rollout::RolloutError| FailedRequest::server(error.to_string());
        let Some(published) = table.published.get(&id) else { return Ok(None) };
        match (weights, published.slot, &published.host) {
            (SamplingWeights::Factors(factors), Some(slot), _) => {
                let Some(of_base) = table.hosts.get(&published.base) else { return Ok(None) };
                of_base.host.set_adapter(slot, Arc::clone(factors), version).map(Some).map_err(failed)
            }
            (SamplingWeights::Whole(parameters), _, Some(host)) => {
                host.set_weights(Arc::clone(parameters), version).map(Some).map_err(failed)
            }
            // No engine serves them at the moment.
            _ => Ok(None),
        }
    }

    /// Begins a sampling session. Returns its id.
    ///
    /// # Errors
    /// A base model or saved weights that there are not.
    pub(super) fn begin_sampler(
        &self,
        user: UserId,
        session: &str,
        number: u64,
        from: &SampleFrom,
    ) -> Result<String, Refusal> {
        let id = format!("{session}:sample:{number}");
        let mut entry = SamplerEntry {
            user,
            session: session.to_owned(),
            base: String::new(),
            published: None,
            path: None,
            model: None,
            known: HashMap::new(),
            order: VecDeque::new(),
        };
        match from {
            SampleFrom::Base(name) => {
                self.known_base(name)?;
                entry.base.clone_from(name);
                self.samplers().sessions.insert(id.clone(), entry);
            }
            SampleFrom::Saved(path) => {
                let (record, saved) = self.find_saved(user, path)?;
                self.known_base(&record.base)?;
                let dir = record.files(&run_dir(&self.config.dir, &record.model_id), &saved);
                entry.base.clone_from(&record.base);
                (entry.path, entry.model) = (Some(path.clone()), Some(record.model_id.clone()));
                let mut table = self.samplers();
                let key = (dir.clone(), saved.saved);
                let published = match table.by_files.get(&key) {
                    Some(published) => *published,
                    None => {
                        let files = Some(match (saved.is_state, record.lora) {
                            (true, Some(_)) => adapter_path(&dir),
                            (true, None) => dir.join("model"),
                            (false, _) => dir,
                        });
                        let added = table.add(PublishedWeights {
                            base: record.base.clone(),
                            weights: None,
                            files,
                            version: PolicyVersion(saved.version),
                            slot: None,
                            host: None,
                            used: 0,
                            inflight: false,
                        });
                        table.by_files.insert(key, added);
                        added
                    }
                };
                entry.published = Some(published);
                table.sessions.insert(id.clone(), entry);
            }
        }
        Ok(id)
    }

    /// Samples for a session. It may read weights and start an engine.
    ///
    /// # Errors
    /// Weights that are gone or cannot be read, an engine that cannot be started, a queue that is full.
    pub(super) fn begin_sampling(
        &self,
        user: UserId,
        sampler: &str,
        request: SamplingRequest,
    ) -> Result<impl Future<Output = Result<SamplingOutput, FailedRequest>> + Send + use<>, FailedRequest>
    {
        let refused = |refusal: Refusal| FailedRequest::user(refusal.message);
        let (base, published) = {
            let mut table = self.samplers();
            let entry = table.session(user, sampler).map_err(refused)?;
            (entry.base.clone(), entry.published)
        };
        let base = Arc::clone(self.known_base(&base).map_err(refused)?);
        if let Some(published) = published {
            self.read_again(published, &base)?;
        }
        let mut ended = Vec::new();
        let answer = {
            let mut table = self.samplers();
            let ready = self.ready(&mut table, &base, published, &mut ended)?;
            // The lock keeps the slot until the request has it.
            ready.host.sample(ready.slot, user, request).map_err(refused)
        };
        drop(ended);
        answer
    }

    /// Reads saved weights that are not in memory.
    fn read_again(&self, id: u64, base: &BaseModel) -> Result<(), FailedRequest> {
        let files = match self.samplers().published.get(&id) {
            Some(PublishedWeights { weights: None, files, .. }) => files.clone(),
            _ => return Ok(()),
        };
        let Some(files) = files else {
            return Err(FailedRequest::user(
                "the weights of this sampler are gone: newer ones took the memory; save weights under a name to keep them",
            ));
        };
        let failed = |error: &dyn std::fmt::Display| {
            FailedRequest::user(format!("the saved weights are gone: {error}"))
        };
        let config = base.directory().config();
        let weights = if trainer::lora::is_adapter(&files) {
            let factors =
                trainer::lora::load_factors(&files, &Layout::new(config)).map_err(|error| failed(&error))?;
            SamplingWeights::Factors(factors)
        } else {
            let directory = ModelDirectory::open(&files).map_err(|error| failed(&error))?;
            SamplingWeights::Whole(Arc::new(directory.load_parameters().map_err(|error| failed(&error))?))
        };
        let mut table = self.samplers();
        if let Some(published) = table.published.get_mut(&id) {
            published.weights.get_or_insert(weights);
        }
        let ended = table.forget(self.config.limits.sampler_bytes, id);
        drop(table);
        drop(ended);
        Ok(())
    }

    /// The engine and the slot of published weights, or of a base model.
    fn ready(
        &self,
        table: &mut SamplerTable,
        base: &Arc<BaseModel>,
        published: Option<u64>,
        ended: &mut Vec<Arc<SamplerHost>>,
    ) -> Result<ReadySampler, FailedRequest> {
        table.uses += 1;
        let uses = table.uses;
        let Some(id) = published else {
            return Ok(ReadySampler { host: self.base_host(table, base)?, slot: None });
        };
        let gone = || FailedRequest::user("the weights of this sampler are gone");
        let of = table.published.get_mut(&id).ok_or_else(gone)?;
        of.used = uses;
        match of.weights.clone().ok_or_else(gone)? {
            SamplingWeights::Factors(factors) => {
                let (version, slot) = (of.version, of.slot);
                let host = self.base_host(table, base)?;
                let slot = match slot {
                    Some(slot) => slot,
                    None => {
                        let slot = table.free_slot(&base.info().name, self.config.limits.adapters);
                        let set = host.set_adapter(slot, factors, version);
                        set.map_err(|error| FailedRequest::server(error.to_string()))?;
                        if let Some(of_base) = table.hosts.get_mut(&base.info().name) {
                            of_base.slots[slot] = Some(id);
                        }
                        slot
                    }
                };
                if let Some(of) = table.published.get_mut(&id) {
                    of.slot = Some(slot);
                }
                Ok(ReadySampler { host, slot: Some(slot) })
            }
            SamplingWeights::Whole(parameters) => {
                if let Some(host) = &of.host {
                    return Ok(ReadySampler { host: Arc::clone(host), slot: None });
                }
                let network = HostedNetwork::Whole(parameters, of.version);
                table.end_whole(self.config.limits.whole_samplers, ended);
                let host = self.start(base, network)?;
                if let Some(of) = table.published.get_mut(&id) {
                    of.host = Some(Arc::clone(&host));
                }
                Ok(ReadySampler { host, slot: None })
            }
        }
    }

    /// The engine of a base model.
    fn base_host(
        &self,
        table: &mut SamplerTable,
        base: &Arc<BaseModel>,
    ) -> Result<Arc<SamplerHost>, FailedRequest> {
        let name = &base.info().name;
        if let Some(of_base) = table.hosts.get(name) {
            return Ok(Arc::clone(&of_base.host));
        }
        let frozen = base.frozen().map_err(|error| FailedRequest::server(error.to_string()))?;
        let host = self.start(base, HostedNetwork::Base(frozen))?;
        table.hosts.insert(name.clone(), BaseHost { host: Arc::clone(&host), slots: Vec::new() });
        Ok(host)
    }

    fn start(&self, base: &BaseModel, network: HostedNetwork) -> Result<Arc<SamplerHost>, FailedRequest> {
        let config = crate::sampling::HostConfig { max_context: base.info().max_context, ..self.config.host };
        let host =
            SamplerHost::start(&base.info().name, base.directory(), network, config, &self.config.cores);
        host.map(Arc::new).map_err(|error| FailedRequest::server(error.to_string()))
    }

    /// The record and the entry of saved weights of a user.
    ///
    /// # Errors
    /// 404 if there are none.
    pub(super) fn find_saved(
        &self,
        user: UserId,
        path: &str,
    ) -> Result<(super::saved::ModelRecord, super::saved::SavedRecord), Refusal> {
        let unknown = || {
            let path: String = path.chars().take(400).collect();
            Refusal::new(404, format!("there are no saved weights `{path}`"))
        };
        let parsed = SavedPath::parse(path).ok_or_else(unknown)?;
        let mut registry = self.registry();
        let record = registry.model(user, &parsed.model_id).map_err(|_| unknown())?.record.clone();
        let saved = record.find(parsed.is_state, &parsed.name).cloned().ok_or_else(unknown)?;
        Ok((record, saved))
    }

    /// Deletes saved weights. Whether there were any.
    ///
    /// # Errors
    /// If files cannot be removed.
    pub(super) fn delete(&self, model_id: &str, is_state: bool, name: &str) -> Result<bool, String> {
        let run = run_dir(&self.config.dir, model_id);
        let mut registry = self.registry();
        let Some(entry) = registry.models.get_mut(model_id) else { return Ok(false) };
        entry.record.remove(&run, is_state, name)
    }
}

impl SamplerTable {
    /// A free slot in the engine of a base model; that of the weights that were used the longest ago if all are taken.
    fn free_slot(&mut self, base: &str, most: usize) -> usize {
        let Some(of_base) = self.hosts.get_mut(base) else { return 0 };
        if let Some(free) = of_base.slots.iter().position(Option::is_none) {
            return free;
        }
        if of_base.slots.len() < most.max(1) {
            of_base.slots.push(None);
            return of_base.slots.len() - 1;
        }
        let used = |id: &Option<u64>| id.and_then(|id| Some(self.published.get(&id)?.used));
        let oldest = (0..of_base.slots.len()).min_by_key(|slot| used(&of_base.slots[*slot])).unwrap_or(0);
        if let Some(id) = of_base.slots[oldest] {
            self.leave_engine(id, &mut Vec::new());
        }
        oldest
    }

    /// Ends engines of whole models until one more may start: those that were used the longest ago.
    fn end_whole(&mut self, most: usize, ended: &mut Vec<Arc<SamplerHost>>) {
        loop {
            let whole = self.published.iter().filter(|(_, published)| published.host.is_some());
            if whole.clone().count() < most.max(1) {
                return;
            }
            let Some(id) = whole.min_by_key(|(_, published)| published.used).map(|(id, _)| *id) else {
                return;
            };
            self.leave_engine(id, ended);
        }
    }
}
