//! The sessions of an endpoint, by key.
//!
//! ```text
//!   start --> open --> ended --> taken
//!               \--> expired (idle, or lost): counted, nothing of it is trained on
//! ```
//!
//! Invariant: a session is taken once. Numbers of sessions,
//! interactions, messages and bytes are bounded, and so is the memory of keys that have ended.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{AgentSession, SessionCall, SessionError, SessionPurpose, SessionSampler};

/// Bytes of a key that is made here, before they are written as digits.
const KEY_BYTES: usize = 24;
/// Ended keys that are remembered, so that they are answered by 410 and not by 401.
const MOST_ENDED: usize = 65_536;
/// Length of a key of the client.
const KEY_LENGTH: std::ops::RangeInclusive<usize> = 8..=256;

/// Limits of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Most sessions at a time.
    pub max_sessions: usize,
    /// Most interactions of a session.
    pub max_calls: usize,
    /// Most messages in the tree of a session.
    pub max_messages: usize,
    /// Most bytes of messages and tokens of a session.
    pub max_bytes: usize,
    /// A session without a call for this long expires.
    pub idle: Duration,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            max_sessions: 4096,
            max_calls: 256,
            max_messages: 1024,
            max_bytes: 64 << 20,
            idle: Duration::from_secs(3600),
        }
    }
}

/// What a session is started with.
#[derive(Clone, Debug, Default)]
pub struct SessionStart {
    /// Its key; `None` for one that is made here.
    pub key: Option<String>,
    /// What it is about.
    pub task_id: Option<String>,
    /// What its export shows.
    pub metadata: Value,
    /// What it is for.
    pub purpose: SessionPurpose,
    /// Most interactions, if fewer than the limit.
    pub max_calls: Option<usize>,
    /// Of the session of an episode: how the policy is sampled.
    pub sampler: Option<Arc<SessionSampler>>,
}

/// Id and key of a session that was started.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct StartedSession {
    /// Its id.
    pub session_id: String,
    /// The API key of its agent.
    pub api_key: String,
}

/// What happened to all sessions so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SessionCounts {
    /// Sessions that were started.
    pub started: u64,
    /// Sessions that were ended by their agent or their owner.
    pub ended: u64,
    /// Sessions that expired, or whose owner gave them up.
    pub lost: u64,
    /// Interactions that were recorded.
    pub interactions: u64,
    /// Calls that were cancelled before their answer was complete.
    pub cancelled: u64,
    /// Prompts that began with all tokens before them.
    pub clean: u64,
    /// Prompts that had the last response in other words.
    pub realign: u64,
    /// Prompts that began a new branch.
    pub fork: u64,
}

/// The sessions of an endpoint.
#[derive(Clone, Debug)]
pub struct SessionStore {
    shared: Arc<StoreState>,
}

#[derive(Debug)]
struct StoreState {
    limits: SessionLimits,
    registry: Mutex<StoredSessions>,
}

#[derive(Debug, Default)]
pub(super) struct StoredSessions {
    by_key: HashMap<String, Arc<StoredSession>>,
    /// The key of every session in `by_key`.
    key_of: HashMap<String, String>,
    /// Keys of sessions that were taken or expired, oldest first, with their ids.
    gone: VecDeque<String>,
    gone_ids: HashMap<String, String>,
    pub(super) counts: SessionCounts,
    made: u64,
}

#[derive(Debug)]
pub(super) struct StoredSession {
    session: Mutex<AgentSession>,
    /// Notified when the session ends or expires.
    over: Notify,
}

impl SessionStore {
    /// A store without sessions.
    #[must_use]
    pub fn new(limits: SessionLimits) -> Self {
        Self { shared: Arc::new(StoreState { limits, registry: Mutex::default() }) }
    }

    /// Its limits.
    #[must_use]
    pub fn limits(&self) -> SessionLimits {
        self.shared.limits
    }

    /// Starts a session.
    ///
    /// # Errors
    /// No capacity; a key that is in use, or cannot be one.
    pub fn start(&self, start: SessionStart, now: Instant) -> Result<StartedSession, SessionError> {
        let SessionStart { key, task_id, metadata, purpose, max_calls, sampler } = start;
        let random = |bytes| random_digits(bytes).map_err(SessionError::NoRandom);
        let key = match key {
            Some(key)
                if !KEY_LENGTH.contains(&key.len()) || !key.bytes().all(|byte| byte.is_ascii_graphic()) =>
            {
                return Err(SessionError::BadKey);
            }
            Some(key) => key,
            None => format!("sk-session-{}", random(KEY_BYTES)?),
        };
        let id = random(8)?;
        let limits = self.shared.limits;
        let mut registry = self.registry();
        let open = registry.by_key.len();
        if open >= limits.max_sessions {
            return Err(SessionError::Full { open, limit: limits.max_sessions });
        }
        if registry.by_key.contains_key(&key) {
            return Err(SessionError::KeyActive);
        }
        registry.forget(&key);
        registry.made += 1;
        let id = format!("session-{}-{id}", registry.made);
        let mut session = AgentSession::new(id.clone(), limits, now);
        session.task_id = task_id;
        session.metadata = metadata;
        session.purpose = purpose;
        session.sampler = sampler;
        session.max_calls = max_calls.unwrap_or(limits.max_calls).min(limits.max_calls);
        registry.key_of.insert(id.clone(), key.clone());
        let entry = Arc::new(StoredSession { session: Mutex::new(session), over: Notify::new() });
        registry.by_key.insert(key.clone(), entry);
        registry.counts.started += 1;
        Ok(StartedSession { session_id: id, api_key: key })
    }

    /// Begins a call of the session with `key`.
    ///
    /// # Errors
    /// A key of no session, or of one that has ended, has a call under way, or has reached a limit.
    pub fn call(&self, key: &str, now: Instant) -> Result<SessionCall, SessionError> {
        let entry = self.by_key(key)?;
        let mut session = entry.lock();
        let id = || session.id.clone();
        if session.ended {
            return Err(SessionError::Ended { session: id() });
        }
        if session.under_way > 0 {
            return Err(SessionError::Busy { session: id() });
        }
        session.fits(0)?;
        session.under_way += 1;
        session.last_used = now;
        drop(session);
        Ok(SessionCall::new(self.clone(), entry))
    }

    /// Id of the session with `key`.
    ///
    /// # Errors
    /// A key of no session, or of one that was taken.
    pub fn id_of(&self, key: &str) -> Result<String, SessionError> {
        Ok(self.by_key(key)?.lock().id.clone())
    }

    /// Reads or changes the session `id`.
    ///
    /// # Errors
    /// There is no such session.
    pub fn with<T>(&self, id: &str, read: impl FnOnce(&mut AgentSession) -> T) -> Result<T, SessionError> {
        let entry = self.by_id(id)?;
        let mut session = entry.lock();
        Ok(read(&mut session))
    }

    /// Sets a reward of the session `id`, or of the session of the caller.
    ///
    /// # Errors
    /// The session of another key; a session that has ended; an interaction that there is not.
    pub fn set_reward(
        &self,
        caller: &SessionCaller,
        id: Option<&str>,
        interaction: Option<&str>,
        reward: f64,
    ) -> Result<(), SessionError> {
        let id = self.allowed(caller, id)?;
        self.with(&id, |session| match session.ended {
            true => Err(SessionError::Ended { session: session.id.clone() }),
            false => session.set_reward(interaction, reward),
        })?
    }

    /// Ends the session `id`, or that of the caller: no call of it is answered any more. Returns its id and the number of its
    /// interactions. It can be ended again.
    ///
    /// # Errors
    /// The session of another key; no such session.
    pub fn end(&self, caller: &SessionCaller, id: Option<&str>) -> Result<(String, usize), SessionError> {
        let id = self.allowed(caller, id)?;
        let entry = self.by_id(&id)?;
        let mut session = entry.lock();
        let first = !std::mem::replace(&mut session.ended, true);
        let interactions = session.interactions().len();
        drop(session);
        entry.over.notify_waiters();
        if first {
            self.registry().counts.ended += 1;
        }
        Ok((id, interactions))
    }

    /// Waits until the session `id` has ended or is gone.
    pub async fn over(&self, id: &str) {
        let Ok(entry) = self.by_id(id) else { return };
        let mut notified = std::pin::pin!(entry.over.notified());
        notified.as_mut().enable();
        if entry.lock().ended || self.by_id(id).is_err() {
            return;
        }
        notified.await;
    }

    /// Takes the session `id` out of the store; its key is answered by 410 from now on.
    ///
    /// # Errors
    /// There is no such session; it has a call under way that is being recorded.
    pub fn take(&self, id: &str) -> Result<AgentSession, SessionError> {
        let mut registry = self.registry();
        let entry = registry.remove(id)?;
        drop(registry);
        entry.lock().ended = true;
        entry.over.notify_waiters();
        // A call that is under way refers to the entry; what it records goes nowhere.
        let now = Instant::now();
        let mut session = entry.lock();
        let limits = self.shared.limits;
        let mut empty = AgentSession::new(session.id.clone(), limits, now);
        empty.ended = true;
        empty.under_way = session.under_way;
        Ok(std::mem::replace(&mut session, empty))
    }

    /// Gives up the session `id`, whose agent is lost; nothing of it is kept. Whether there was one.
    pub fn give_up(&self, id: &str) -> bool {
        let lost = self.take(id).is_ok();
        self.registry().counts.lost += u64::from(lost);
        lost
    }

    /// Gives up all sessions that have not been used for longer than the limit and have no call under way, whether they have
    /// ended or not; their ids.
    pub fn expire(&self, now: Instant) -> Vec<String> {
        let idle = self.shared.limits.idle;
        let entries: Vec<Arc<StoredSession>> = self.registry().by_key.values().cloned().collect();
        let expired = entries.iter().filter_map(|entry| {
            let session = entry.lock();
            let late = now.saturating_duration_since(session.last_used) > idle;
            (late && session.under_way == 0).then(|| session.id.clone())
        });
        let expired: Vec<String> = expired.collect();
        expired.into_iter().filter(|id| self.give_up(id)).collect()
    }

    /// Ids of the sessions that are not taken.
    #[must_use]
    pub fn ids(&self) -> Vec<String> {
        self.registry().key_of.keys().cloned().collect()
    }

    /// Number of sessions that are not taken.
    #[must_use]
    pub fn len(&self) -> usize {
        self.registry().by_key.len()
    }

    /// Whether there is no session.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What happened so far.
    #[must_use]
    pub fn counts(&self) -> SessionCounts {
        self.registry().counts
    }

    /// The session that `caller` means by `id`, if it may.
    fn allowed(&self, caller: &SessionCaller, id: Option<&str>) -> Result<String, SessionError> {
        match (caller, id) {
            (SessionCaller::Admin, Some(id)) => Ok(id.to_owned()),
            (SessionCaller::Admin, None) => {
                Err(SessionError::NoSession { session: "without a name".to_owned() })
            }
            (SessionCaller::Agent(key), None) => self.id_of(key),
            (SessionCaller::Agent(key), Some(id)) => match self.id_of(key)? {
                own if own == id => Ok(own),
                _ => Err(SessionError::Foreign { session: id.to_owned() }),
            },
        }
    }

    fn by_key(&self, key: &str) -> Result<Arc<StoredSession>, SessionError> {
        let registry = self.registry();
        match (registry.by_key.get(key), registry.gone_ids.get(key)) {
            (Some(entry), _) => Ok(Arc::clone(entry)),
            (None, Some(id)) => Err(SessionError::Ended { session: id.clone() }),
            (None, None) => Err(SessionError::UnknownKey),
        }
    }

    fn by_id(&self, id: &str) -> Result<Arc<StoredSession>, SessionError> {
        let registry = self.registry();
        let entry = registry.key_of.get(id).and_then(|key| registry.by_key.get(key));
        entry.map(Arc::clone).ok_or_else(|| SessionError::NoSession { session: id.to_owned() })
    }

    pub(super) fn registry(&self) -> MutexGuard<'_, StoredSessions> {
        self.shared.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who calls a route of sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionCaller {
    /// The operator, with the admin key.
    Admin,
    /// An agent, with this key.
    Agent(String),
}

impl StoredSessions {
    fn remove(&mut self, id: &str) -> Result<Arc<StoredSession>, SessionError> {
        let gone = || SessionError::NoSession { session: id.to_owned() };
        let key = self.key_of.remove(id).ok_or_else(gone)?;
        let entry = self.by_key.remove(&key).ok_or_else(gone)?;
        if self.gone.len() >= MOST_ENDED
            && let Some(oldest) = self.gone.pop_front()
        {
            self.gone_ids.remove(&oldest);
        }
        self.gone.push_back(key.clone());
        self.gone_ids.insert(key, id.to_owned());
        Ok(entry)
    }

    /// A key that ended is used again.
    fn forget(&mut self, key: &str) {
        if self.gone_ids.remove(key).is_some() {
            self.gone.retain(|gone| gone != key);
        }
    }
}

impl StoredSession {
    pub(super) fn lock(&self) -> MutexGuard<'_, AgentSession> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `bytes` random bytes as hexadecimal digits.
fn random_digits(bytes: usize) -> Result<String, String> {
    let mut random = vec![0_u8; bytes];
    getrandom::fill(&mut random).map_err(|error| error.to_string())?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}
