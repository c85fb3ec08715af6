//! Adapters that an engine serves beside its weights. They come and go while it runs, each with a version of its own.
//!
//! A request names a slot. The network computes with entries, and a slot has the entry of its adapter: that of an adapter which was
//! freed stays until its sequences have ended, and the slot can have another adapter at once.
//!
//! Invariant: a sequence is sampled to its end with the adapter that its slot had when it was accepted, in the newest version of that
//! adapter. No sequence continues keys and values of another adapter or version, but for those that it has itself.

use std::sync::Arc;

use model::{AdaptedMatrix, Config, FactorPair, Layout, LowRank};
use trajectory::PolicyVersion;

use super::{Engine, Network};
use crate::RolloutError;

/// Most adapters of an engine, those that were freed and have sequences in flight included.
const MOST: usize = 1024;

/// The adapters of an engine.
#[derive(Debug, Default)]
pub(super) struct AdapterTable {
    /// Sequences have the indices of them.
    entries: Vec<AdapterEntry>,
}

/// What the network has under one index.
#[derive(Debug)]
struct AdapterEntry {
    /// Without pairs if it is free.
    factors: Arc<LowRank>,
    /// Its own version; `None` for that of the engine.
    version: Option<PolicyVersion>,
    state: EntryState,
}

/// Who an entry is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryState {
    Free,
    /// Requests name it by this slot.
    InSlot(usize),
    /// Its slot was freed, and sequences of it are in flight.
    Ending,
}

impl AdapterEntry {
    fn free() -> Self {
        Self { factors: Arc::new(LowRank::zeros(1, 0.0, Vec::new())), version: None, state: EntryState::Free }
    }
}

impl AdapterTable {
    /// `adapters` in slots of their indices, with the versions of the engine.
    fn new(adapters: Vec<Arc<LowRank>>) -> Self {
        let entry =
            |(slot, factors)| AdapterEntry { factors, version: None, state: EntryState::InSlot(slot) };
        Self { entries: adapters.into_iter().enumerate().map(entry).collect() }
    }

    /// Whether no sequence can have an adapter.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adapters that requests can name.
    fn served(&self) -> usize {
        self.entries.iter().filter(|entry| matches!(entry.state, EntryState::InSlot(_))).count()
    }

    fn of_slot(&self, slot: usize) -> Option<usize> {
        self.entries.iter().position(|entry| entry.state == EntryState::InSlot(slot))
    }

    /// The entry of the slot that a request names.
    ///
    /// # Errors
    /// If the slot has no adapter.
    pub(super) fn entry(&self, slot: Option<usize>) -> Result<Option<usize>, RolloutError> {
        let Some(slot) = slot else { return Ok(None) };
        let unknown = || RolloutError::UnknownAdapter { adapter: slot, served: self.served() };
        self.of_slot(slot).ok_or_else(unknown).map(Some)
    }

    /// The version that tokens of an entry have, where the engine has `of_engine`.
    pub(super) fn version(&self, entry: Option<usize>, of_engine: PolicyVersion) -> PolicyVersion {
        entry.and_then(|entry| self.entries.get(entry)?.version).unwrap_or(of_engine)
    }

    /// What the network gets: none if no sequence has any.
    fn factors(&self) -> Vec<Arc<LowRank>> {
        if self.entries.iter().all(|entry| entry.state == EntryState::Free) {
            return Vec::new();
        }
        self.entries.iter().map(|entry| Arc::clone(&entry.factors)).collect()
    }

    /// A free entry.
    fn take_free(&mut self) -> Option<usize> {
        let free = self.entries.iter().position(|entry| entry.state == EntryState::Free);
        if free.is_none() && self.entries.len() < MOST {
            self.entries.push(AdapterEntry::free());
            return Some(self.entries.len() - 1);
        }
        free
    }
}

impl Engine {
    /// The same, serving `adapters` of the model beside its weights, in one batch: a request names its adapter
    /// ([`RequestOptions::adapter`](crate::RequestOptions::adapter)). They have the versions of the engine until
    /// [`Engine::set_adapter`] gives them others.
    ///
    /// # Errors
    /// If the network is on a device that fails or has no memory for them, or has no operation for some of their factors.
    ///
    /// # Panics
    /// If an adapter is of another model.
    pub fn with_adapters(mut self, adapters: Vec<Arc<LowRank>>) -> Result<Self, RolloutError> {
        self.adapters = AdapterTable::new(adapters);
        self.adapt()?;
        Ok(self)
    }

    /// Serves `factors` as `version` in a slot from the next step on, in place of an older version of the same adapter. Sequences in
    /// flight continue with the keys and values that they have. The number of a slot is chosen by the caller.
    ///
    /// # Errors
    /// If the factors are of another model or where they cannot be computed with, the version goes back, or too many slots are in use.
    /// The slot then serves what it did before.
    pub fn set_adapter(
        &mut self,
        slot: usize,
        factors: Arc<LowRank>,
        version: PolicyVersion,
    ) -> Result<(), RolloutError> {
        check_adapter(&self.model, slot, &factors)?;
        let served = self.adapters.of_slot(slot);
        if let Some(entry) = served {
            let before = self.adapters.version(served, self.version);
            if version == before && *self.adapters.entries[entry].factors == *factors {
                self.adapters.entries[entry].version = Some(version);
                return Ok(());
            }
            if version <= before {
                let what = format!("adapter slot {slot}");
                return Err(RolloutError::OlderVersion { what, served: before, asked: version });
            }
        }
        let free = served.or_else(|| self.adapters.take_free());
        let Some(entry) = free else { return Err(RolloutError::TooManyAdapters { most: MOST }) };
        let new = AdapterEntry { factors, version: Some(version), state: EntryState::InSlot(slot) };
        let before = std::mem::replace(&mut self.adapters.entries[entry], new);
        if let Err(error) = self.adapt() {
            self.adapters.entries[entry] = before;
            self.adapt()?;
            return Err(error);
        }
        self.forget_prefixes(|adapter| adapter == Some(entry));
        Ok(())
    }

    /// Frees a slot, which may have another adapter then. Sequences in flight are sampled to their end; the memory of the adapter is
    /// freed after them. False if the slot has no adapter.
    ///
    /// # Errors
    /// If the network is on a device that fails.
    pub fn free_adapter(&mut self, slot: usize) -> Result<bool, RolloutError> {
        let Some(entry) = self.adapters.of_slot(slot) else { return Ok(false) };
        self.adapters.entries[entry].state = EntryState::Ending;
        self.free_ended_adapters()?;
        Ok(true)
    }

    /// The version that a slot serves; `None` if it has no adapter.
    #[must_use]
    pub fn adapter_version(&self, slot: usize) -> Option<PolicyVersion> {
        let entry = self.adapters.of_slot(slot)?;
        Some(self.adapters.version(Some(entry), self.version))
    }

    /// Gives the network its adapters.
    pub(super) fn adapt(&mut self) -> Result<(), RolloutError> {
        let factors = self.adapters.factors();
        self.network.as_mut().map_or(Ok(()), |network: &mut Network| network.set_adapters(&factors))
    }

    /// Frees the entries of freed slots whose sequences have ended.
    pub(super) fn free_ended_adapters(&mut self) -> Result<(), RolloutError> {
        let mut freed = Vec::new();
        for (entry, AdapterEntry { state, .. }) in self.adapters.entries.iter().enumerate() {
            let decodes = || self.running.iter().any(|sequence| sequence.adapter() == Some(entry));
            let waits = || self.prompts.iter().any(|job| job.request.options.adapter == Some(entry));
            if *state == EntryState::Ending && !decodes() && !waits() {
                freed.push(entry);
            }
        }
        if freed.is_empty() {
            return Ok(());
        }
        for entry in freed {
            self.adapters.entries[entry] = AdapterEntry::free();
            // The next adapter of the entry has other keys and values.
            self.forget_prefixes(|adapter| adapter == Some(entry));
            self.retained.forget_adapter(&mut self.cache, entry);
        }
        self.adapt()
    }

    /// The weights of sequences with the adapters that `changed` names have changed: no other request may continue keys and values
    /// that were computed before.
    pub(super) fn forget_prefixes(&mut self, changed: impl Fn(Option<usize>) -> bool) {
        self.prefixes.forget(&mut self.cache, &changed);
        for sequence in self.running.iter_mut().filter(|sequence| changed(sequence.adapter())) {
            sequence.leave_prefix_cache();
        }
        for job in self.prompts.iter_mut().filter(|job| changed(job.request.options.adapter)) {
            job.leave_prefix_cache();
        }
    }
}

/// Checks that `factors` for `slot` are of matrices of the model.
///
/// # Errors
/// If one is not.
pub fn check_adapter(model: &Config, slot: usize, factors: &LowRank) -> Result<(), RolloutError> {
    let layout = Layout::new(model);
    let matrices: Vec<_> = AdaptedMatrix::all(layout.specs()).collect();
    let fits = |pair: &&FactorPair| {
        let place = matrices.binary_search_by_key(&pair.weight.start, |matrix| matrix.weight.start);
        place.is_ok_and(|place| {
            let matrix = &matrices[place];
            matrix.weight == pair.weight && (matrix.rows, matrix.columns) == (pair.rows, pair.columns)
        })
    };
    match factors.pairs().iter().find(|pair| !fits(pair)) {
        None => Ok(()),
        Some(pair) => Err(RolloutError::OtherModel { slot, weight: pair.weight.clone() }),
    }
}
