//! What sampling sessions sample from: base models, published weights, saved ones.
//!
//! Engines of base models serve the adapters that were used last; others get a slot when they are used again. Weights that exceed
//! the memory for them are evicted, least recently used first, and read again if they are saved.
//!
//! Invariant: a request is sampled with the weights of its session as they were when it came, or newer ones of an in-flight sampler.
//! Weights that a request uses keep their engine.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use trajectory::PolicyVersion;

use super::{SampleFrom, UserId};
use crate::outcome::{FailedRequest, Refusal};
use crate::sampling::SamplerHost;
use crate::trained::SamplingWeights;

/// Requests of a sampling session that are remembered.
const REMEMBERED: usize = 8192;
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
    /// When its last request came, or it was begun.
    used: Instant,
    known: HashMap<u64, KnownSample>,
    order: VecDeque<u64>,
}

/// A sampling request that came before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KnownSample {
    pub(super) request_id: String,
    pub(super) sequence_ids: Vec<String>,
    pub(super) digest: u64,
}

/// Weights that can be sampled from.
#[derive(Debug)]
pub(super) struct PublishedWeights {
    pub(super) base: String,
    /// `None` if they are not in memory.
    pub(super) weights: Option<SamplingWeights>,
    /// Where they are saved.
    pub(super) files: Option<PathBuf>,
    pub(super) version: PolicyVersion,
    /// Their slot in the engine of the base model.
    pub(super) slot: Option<usize>,
    /// The engine of whole weights.
    pub(super) host: Option<Arc<SamplerHost>>,
    /// When they were used last, as a number of uses.
    pub(super) used: u64,
    /// Whether later versions take their place.
    pub(super) inflight: bool,
    /// Cloned by every request in progress: weights in use keep their engine.
    pub(super) in_use: Arc<()>,
    /// Digest of the base model that they were trained over; empty if that is not known.
    pub(super) base_digest: String,
}

/// The engine of a base model.
#[derive(Debug)]
pub(super) struct BaseHost {
    pub(super) host: Arc<SamplerHost>,
    /// What each slot has.
    pub(super) slots: Vec<Option<u64>>,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct SamplerTable {
    pub(super) sessions: HashMap<String, SamplerEntry>,
    pub(super) published: HashMap<u64, PublishedWeights>,
    /// Saved weights that are published, by their directory.
    pub(super) by_files: HashMap<PathBuf, u64>,
    pub(super) hosts: HashMap<String, BaseHost>,
    /// The in-flight samplers of models.
    pub(super) inflight: HashMap<String, u64>,
    next: u64,
    uses: u64,
}

impl SamplerEntry {
    pub(super) fn new(
        user: UserId,
        session: &str,
        base: &str,
        published: Option<u64>,
        path: Option<String>,
        model: Option<String>,
    ) -> Self {
        let (known, order) = (HashMap::new(), VecDeque::new());
        Self {
            user,
            session: session.to_owned(),
            base: base.to_owned(),
            published,
            path,
            model,
            used: Instant::now(),
            known,
            order,
        }
    }

    /// Whether it samples from the same as one that is begun with `from`.
    pub(super) fn samples_from(&self, from: &SampleFrom) -> bool {
        match from {
            SampleFrom::Base(name) => self.published.is_none() && self.base == *name,
            SampleFrom::Saved(path) => self.path.as_ref() == Some(path),
        }
    }

    /// The request that came before with this number.
    pub(super) fn known(&self, number: u64) -> Option<&KnownSample> {
        self.known.get(&number)
    }

    /// Remembers a request.
    pub(super) fn remember(&mut self, number: u64, known: KnownSample) {
        self.used = Instant::now();
        if self.known.insert(number, known).is_none() {
            self.order.push_back(number);
        }
        while self.order.len() > REMEMBERED {
            let Some(oldest) = self.order.pop_front() else { break };
            self.known.remove(&oldest);
        }
    }

    /// Forgets the requests whose ids are not kept any more.
    pub(super) fn forget_requests(&mut self, is_kept: impl Fn(&str) -> bool) {
        self.known.retain(|_, known| is_kept(&known.request_id));
        self.order.retain(|number| self.known.contains_key(number));
    }
}

impl PublishedWeights {
    pub(super) fn new(base: &str, version: PolicyVersion) -> Self {
        Self {
            base: base.to_owned(),
            weights: None,
            files: None,
            version,
            slot: None,
            host: None,
            used: 0,
            inflight: false,
            in_use: Arc::default(),
            base_digest: String::new(),
        }
    }

    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.in_use) > 1
    }

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
        self.drop_unused()
    }

    /// Forgets the least recently used sampling session of `user` of whose requests none `is_open`. `None` if there is none. Returns
    /// engines that are to be ended.
    pub(super) fn forget_least_used(
        &mut self,
        user: UserId,
        is_open: impl Fn(&str) -> bool,
    ) -> Option<Vec<Arc<SamplerHost>>> {
        let can_go = |(_, entry): &(&String, &SamplerEntry)| {
            entry.user == user && !entry.known.values().any(|known| is_open(&known.request_id))
        };
        let idle = self.sessions.iter().filter(can_go).min_by_key(|(_, entry)| entry.used);
        let id = idle.map(|(id, _)| id.clone())?;
        self.sessions.remove(&id);
        Some(self.drop_unused())
    }

    /// Forgets weights that no sampling session has. Returns engines that are to be ended.
    fn drop_unused(&mut self) -> Vec<Arc<SamplerHost>> {
        let in_use: HashSet<u64> = self.sessions.values().filter_map(|entry| entry.published).collect();
        let idle: Vec<u64> = self.published.keys().filter(|id| !in_use.contains(*id)).copied().collect();
        let mut ended = Vec::new();
        for id in idle {
            self.leave_engine(id, &mut ended);
            self.published.remove(&id);
        }
        self.inflight.retain(|_, id| self.published.contains_key(id));
        self.by_files.retain(|_, id| self.published.contains_key(id));
        ended
    }

    /// Forgets that published weights are saved in `files`, which get others: sampling sessions that have them keep those in memory.
    pub(super) fn forget_files(&mut self, files: &Path) {
        if let Some(id) = self.by_files.remove(files)
            && let Some(published) = self.published.get_mut(&id)
        {
            published.files = None;
        }
    }

    /// The number of the next use.
    pub(super) fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    /// Takes engines that have ended out of the table. Returns them.
    pub(super) fn drop_ended_hosts(&mut self) -> Vec<Arc<SamplerHost>> {
        let has_ended = |host: &Arc<SamplerHost>| host.status().ended.is_some();
        let bases = self.hosts.iter().filter(|(_, of_base)| has_ended(&of_base.host));
        let bases: Vec<String> = bases.map(|(base, _)| base.clone()).collect();
        let mut ended: Vec<_> = bases.iter().filter_map(|base| self.drop_base_host(base)).collect();
        for published in self.published.values_mut() {
            ended.extend(published.host.take_if(|host| has_ended(host)));
        }
        ended
    }

    /// Gives the weights `id` a slot in the engine of their base model, if they have none. False if all slots are in use.
    ///
    /// # Errors
    /// If the engine cannot serve them.
    pub(super) fn take_slot(&mut self, base: &str, id: u64, most: usize) -> Result<bool, FailedRequest> {
        let is_waiting = |published: &PublishedWeights| published.slot.is_none();
        if !self.published.get(&id).is_some_and(is_waiting) {
            return Ok(true);
        }
        let Some(slot) = self.free_slot(base, most) else { return Ok(!self.hosts.contains_key(base)) };
        let (Some(of_base), Some(published)) = (self.hosts.get_mut(base), self.published.get_mut(&id)) else {
            return Ok(true);
        };
        // Without weights they are read again first.
        let Some(SamplingWeights::Factors(factors)) = &published.weights else { return Ok(true) };
        let set = of_base.host.set_adapter(slot, Arc::clone(factors), published.version);
        set.map_err(|error| FailedRequest::server(error.to_string()))?;
        of_base.slots[slot] = Some(id);
        published.slot = Some(slot);
        Ok(true)
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

    pub(super) fn add(&mut self, published: PublishedWeights) -> u64 {
        self.next += 1;
        self.published.insert(self.next, published);
        self.next
    }

    /// Evicts weights beyond `most` bytes that no request uses, least recently used first, but for those of `keep`. Returns engines that are to be ended.
    pub(super) fn evict(&mut self, most: u64, keep: u64) -> Vec<Arc<SamplerHost>> {
        let mut ended = Vec::new();
        while self.published.values().map(PublishedWeights::bytes).sum::<u64>() > most {
            let can_go = |(id, published): &(&u64, &PublishedWeights)| {
                **id != keep && !published.inflight && !published.is_in_use() && published.weights.is_some()
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

impl SamplerTable {
    /// A free slot in the engine of a base model; that of the least recently used weights that no request uses if all are taken.
    /// `None` if all are in use.
    pub(super) fn free_slot(&mut self, base: &str, most: usize) -> Option<usize> {
        let of_base = self.hosts.get_mut(base)?;
        if let Some(free) = of_base.slots.iter().position(Option::is_none) {
            return Some(free);
        }
        if of_base.slots.len() < most.max(1) {
            of_base.slots.push(None);
            return Some(of_base.slots.len() - 1);
        }
        let idle = of_base.slots.iter().enumerate().filter_map(|(slot, id)| {
            let published = self.published.get(&(*id)?)?;
            (!published.is_in_use()).then_some((published.used, slot, (*id)?))
        });
        let (_, slot, id) = idle.min()?;
        self.leave_engine(id, &mut Vec::new());
        Some(slot)
    }

    /// Ends engines of whole models that no request uses, least recently used first, until one more may start. False if too many are
    /// in use.
    pub(super) fn end_whole(&mut self, most: usize, ended: &mut Vec<Arc<SamplerHost>>) -> bool {
        loop {
            let whole = self.published.iter().filter(|(_, published)| published.host.is_some());
            if whole.clone().count() < most.max(1) {
                return true;
            }
            let idle = whole.filter(|(_, published)| !published.is_in_use());
            let Some(id) = idle.min_by_key(|(_, published)| published.used).map(|(id, _)| *id) else {
                return false;
            };
            self.leave_engine(id, ended);
        }
    }

    /// Forgets the engine of a base model that has ended. Returns it.
    fn drop_base_host(&mut self, base: &str) -> Option<Arc<SamplerHost>> {
        let host = self.hosts.remove(base)?.host;
        let of_base = self.published.values_mut().filter(|published| published.base == base);
        of_base.for_each(|published| published.slot = None);
        Some(host)
    }
}
