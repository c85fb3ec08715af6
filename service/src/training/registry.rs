//! Who has what: sessions, models and their requests.
//!
//! Invariant: a model is with the registry or with the trainer, which carries out one request of it and gives it back.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use super::calls::{CallQueue, NumberedCall};
use super::futures::FutureTable;
use super::saved::ModelRecord;
use super::{ModelInfo, UserId};
use crate::base::BaseModel;
use crate::outcome::{FailedRequest, FutureState, Refusal, WaitState};
use crate::trained::TrainedModel;

/// Sampled sequences whose version is remembered.
const SEQUENCES: usize = 1 << 18;

/// A session of a client.
#[derive(Debug)]
pub(super) struct ClientSession {
    pub(super) user: UserId,
    /// When its last heartbeat or request came.
    pub(super) seen: Instant,
}

/// A model, loaded or not.
#[derive(Debug)]
pub(super) struct ModelEntry {
    pub(super) record: ModelRecord,
    /// The session that it belongs to; `None` if that has ended, and for models of earlier processes.
    pub(super) session: Option<String>,
    pub(super) calls: CallQueue,
    pub(super) state: ModelState,
    /// Seconds since 1970.
    pub(super) last_request: u64,
    /// Memory that it takes, bytes.
    pub(super) bytes: u64,
    /// Since when it is unloaded.
    pub(super) unloaded: Option<Instant>,
}

/// Where a model is.
#[derive(Debug)]
pub(super) enum ModelState {
    /// Its first request makes it.
    New,
    /// Loaded, between two requests.
    Idle(Box<TrainedModel>),
    /// With the trainer.
    Busy,
    /// Saved weights at most are left of it.
    Unloaded,
}

/// All that is known.
#[derive(Debug, Default)]
pub(super) struct ServiceRegistry {
    pub(super) sessions: HashMap<String, ClientSession>,
    pub(super) models: BTreeMap<String, ModelEntry>,
    pub(super) futures: FutureTable,
    /// The model and the version that sampled a sequence.
    sequences: HashMap<String, (String, u64)>,
    /// Those of `sequences`, oldest first.
    sequence_order: VecDeque<String>,
    /// Numbers of data that wait.
    pub(super) queued_numbers: usize,
    /// When users had their last turn, as numbers of turns.
    turns: HashMap<UserId, u64>,
    turn: u64,
}

impl ServiceRegistry {
    /// What earlier processes saved in `dir`.
    pub(super) fn of_saved(dir: &Path) -> Self {
        let entry = |record: ModelRecord| {
            let entry = ModelEntry {
                session: None,
                calls: CallQueue::starting_at(0),
                state: ModelState::Unloaded,
                last_request: record.created,
                bytes: 0,
                unloaded: None,
                record,
            };
            (entry.record.model_id.clone(), entry)
        };
        Self { models: ModelRecord::read_all(dir).into_iter().map(entry).collect(), ..Self::default() }
    }

    /// The session of a user.
    ///
    /// # Errors
    /// 410 if it has ended, or is another user's.
    pub(super) fn session(&mut self, user: UserId, id: &str) -> Result<&mut ClientSession, Refusal> {
        let session = self.sessions.get_mut(id).filter(|session| session.user == user);
        session.ok_or_else(|| Refusal::new(410, "the session has ended; make a new client"))
    }

    /// The model of a user.
    ///
    /// # Errors
    /// 404 if there is none, or it is another user's.
    pub(super) fn model(&mut self, user: UserId, id: &str) -> Result<&mut ModelEntry, Refusal> {
        let entry = self.models.get_mut(id).filter(|entry| entry.record.owner() == user);
        entry.ok_or_else(|| {
            let id: String = id.chars().take(200).collect();
            Refusal::new(404, format!("there is no model `{id}`"))
        })
    }

    /// Models that are loaded or will be.
    pub(super) fn loaded(&self) -> usize {
        self.models.values().filter(|entry| !matches!(entry.state, ModelState::Unloaded)).count()
    }

    /// Memory of the models that are loaded or will be, bytes.
    pub(super) fn loaded_bytes(&self) -> u64 {
        let loaded = self.models.values().filter(|entry| !matches!(entry.state, ModelState::Unloaded));
        loaded.map(|entry| entry.bytes).sum()
    }

    /// Forgets models without saved weights that were unloaded longer ago than `keep`.
    pub(super) fn forget_models(&mut self, keep: Duration) {
        let is_old = |entry: &ModelEntry| entry.unloaded.is_some_and(|since| since.elapsed() > keep);
        self.models.retain(|_, entry| !entry.record.saved.is_empty() || !is_old(entry));
    }

    /// Forgets the turns of users without a session.
    pub(super) fn forget_turns(&mut self) {
        let sessions = &self.sessions;
        self.turns.retain(|user, _| sessions.values().any(|session| session.user == *user));
    }

    /// Takes the next request and its model: of the user whose last turn was the longest ago, and of its models of that whose next
    /// request waits the longest.
    pub(super) fn take_work(&mut self) -> Option<(String, Option<Box<TrainedModel>>, NumberedCall)> {
        let ready = self.models.iter().filter(|(_, entry)| {
            matches!(entry.state, ModelState::New | ModelState::Idle(_)) && entry.calls.is_ready()
        });
        let turn = |entry: &ModelEntry| self.turns.get(&entry.record.owner()).copied().unwrap_or(0);
        let (id, _) = ready.min_by_key(|(_, entry)| (turn(entry), entry.calls.ready_since()))?;
        let id = id.clone();
        let entry = self.models.get_mut(&id)?;
        let queued = entry.calls.take()?;
        self.turn += 1;
        self.turns.insert(entry.record.owner(), self.turn);
        self.queued_numbers -= queued.call.numbers();
        let model = match std::mem::replace(&mut entry.state, ModelState::Busy) {
            ModelState::Idle(model) => Some(model),
            _ => None,
        };
        Some((id, model, queued))
    }

    /// Gives a model back after a request. `None` if it could not be made. One that was unloaded meanwhile is dropped.
    pub(super) fn give_back(&mut self, id: &str, model: Option<Box<TrainedModel>>) {
        let Some(entry) = self.models.get_mut(id).filter(|entry| matches!(entry.state, ModelState::Busy))
        else {
            return;
        };
        match model {
            Some(model) => entry.state = ModelState::Idle(model),
            None => self.unload(id, &FailedRequest::user("the model could not be made; make another one")),
        }
    }

    /// Unloads a model; its requests that wait fail with `failure`.
    pub(super) fn unload(&mut self, id: &str, failure: &FailedRequest) {
        let Some(entry) = self.models.get_mut(id) else { return };
        entry.state = ModelState::Unloaded;
        entry.session = None;
        entry.unloaded.get_or_insert_with(Instant::now);
        let waiting = entry.calls.take_all();
        entry.calls.forget();
        self.fail(waiting, failure);
    }

    /// Ends requests that were taken from their queue with a failure.
    pub(super) fn fail(&mut self, calls: Vec<NumberedCall>, failure: &FailedRequest) {
        for queued in calls {
            self.queued_numbers -= queued.call.numbers();
            self.futures.end(&queued.request_id, Err(failure.clone()));
        }
    }

    /// Remembers which version of a model sampled a sequence.
    pub(super) fn sampled(&mut self, sequence_id: &str, model_id: &str, version: u64) {
        self.sequences.insert(sequence_id.to_owned(), (model_id.to_owned(), version));
        self.sequence_order.push_back(sequence_id.to_owned());
        while self.sequence_order.len() > SEQUENCES {
            let Some(oldest) = self.sequence_order.pop_front() else { break };
            self.sequences.remove(&oldest);
        }
    }

    /// The version of `model_id` that sampled a sequence, if that is known.
    pub(super) fn version_of(&self, sequence_id: &str, model_id: &str) -> Option<u64> {
        self.sequences.get(sequence_id).filter(|(of, _)| of == model_id).map(|(_, version)| *version)
    }

    /// Why a request has not ended.
    pub(super) fn pending(&self, request_id: &str, model: Option<&str>) -> FutureState {
        let active = |reason: String| FutureState::Pending { queue: WaitState::Active, reason };
        let Some(entry) = model.and_then(|model| self.models.get(model)) else {
            return active("it waits for the engine that samples".to_owned());
        };
        if !entry.calls.has(request_id) {
            return active("it is carried out".to_owned());
        }
        if entry.calls.is_ready() || matches!(entry.state, ModelState::Busy) {
            return active(format!("{} requests of the model wait, in order", entry.calls.waiting()));
        }
        active(format!("it waits for request {} of the model, which has not come", entry.calls.next()))
    }
}

impl ModelEntry {
    /// What is said about it; `base` is its base model.
    pub(super) fn info(&self, base: &BaseModel) -> ModelInfo {
        ModelInfo {
            model_id: self.record.model_id.clone(),
            base: base.info().clone(),
            lora: self.record.lora,
            last_request: self.last_request,
            loaded: !matches!(self.state, ModelState::Unloaded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_of_users_without_a_session_are_forgotten() {
        let (ada, bob) = (UserId([1; 16]), UserId([2; 16]));
        let session = ClientSession { user: ada, seen: Instant::now() };
        let mut registry = ServiceRegistry {
            sessions: HashMap::from([("s1".to_owned(), session)]),
            turns: HashMap::from([(ada, 1), (bob, 2)]),
            ..ServiceRegistry::default()
        };
        registry.forget_turns();
        assert_eq!(registry.turns, HashMap::from([(ada, 1)]));
    }
}
