//! The buffer in this process: the ledger behind a lock, a store behind the ledger.
//!
//! Invariant: changes reach the store in the order of the ledger, and no caller sees a group or a batch before it is
//! durable. No call waits without a deadline. The ledger alone decides what is allowed.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use trajectory::{Group, GroupId, PolicyVersion};

use crate::journal::{JournalStore, OpenFile};
use crate::ledger::{ArrivalDecision, GrantedLease, Ledger, Rewound};
use crate::memory::MemoryStore;
use crate::payload::{IncomingGroup, PreparedGroup};
use crate::store::{AppendGroup, CommitTime, OpenedStore, Store, WRITE_WAIT, WriteCompletion};
use crate::{
    AdmitRequest, BufferConfig, BufferError, Consumer, Events, Finalized, GroupEntry, GroupFilter, GroupPage,
    Lease, LeaseEntry, LeaseId, LeaseRequest, Producer, Stats, Submitted,
};

mod completion;
mod serving;
mod slots;

use completion::{CompletionReceiver, completion};

/// Longest wait of any call.
const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// A buffer over a store: memory, the journal, or another.
pub struct Buffer {
    config: BufferConfig,
    shared: Arc<BufferShared>,
    store: Box<dyn Store>,
    /// The journal's file, if it is in one.
    file: Option<Arc<OpenFile>>,
}

/// A group, and its payload if it is finalized.
#[derive(Clone, Debug)]
pub struct WithPayload {
    /// The group.
    pub entry: GroupEntry,
    /// Its payload.
    pub payload: Option<Arc<Group>>,
}

/// State shared with the completions of the store.
struct BufferShared {
    ledger: Mutex<Ledger>,
    /// Signalled when a slot or bytes may be free.
    slots_freed: Signal,
    /// Signalled when a batch may be complete.
    batch_changed: Signal,
    events: Events,
    opened: Instant,
}

/// Wakes threads and tasks that wait for a change of the ledger.
#[derive(Debug, Default)]
struct Signal {
    threads: Condvar,
    tasks: Notify,
}

impl Buffer {
    /// An empty buffer in memory, which is lost when its process ends.
    ///
    /// # Errors
    /// A configuration that admits nothing or too much, or contradicts itself.
    pub fn in_memory(config: BufferConfig) -> Result<Self, BufferError> {
        let config = config.checked()?;
        Self::with_store(config, MemoryStore::open())
    }

    /// The buffer in the journal at `path`, a new one if there is none; it survives kill -9. The directory must exist.
    ///
    /// # Errors
    /// Those of [`Buffer::in_memory`]; a file that is locked by another process, not a journal, of another format, or
    /// not readable and writable.
    pub fn open(path: impl AsRef<Path>, config: BufferConfig) -> Result<Self, BufferError> {
        let config = config.checked()?;
        let (opened, file) = JournalStore::open(path.as_ref(), config.compact_above)?;
        Ok(Self { file, ..Self::with_store(config, opened)? })
    }

    /// A journal in another storage than a file, such as one that fails on purpose.
    ///
    /// # Errors
    /// Those of [`Buffer::open`].
    pub fn open_on(backend: impl redb::StorageBackend, config: BufferConfig) -> Result<Self, BufferError> {
        let config = config.checked()?;
        Self::with_store(config, JournalStore::open_on(backend, config.compact_above)?)
    }

    /// A buffer over another store, such as a database. It continues from the recovered records: finalized groups,
    /// leases and idempotency keys as they were; groups in flight are admitted again.
    ///
    /// # Errors
    /// Those of [`Buffer::in_memory`].
    pub fn with_store(config: BufferConfig, opened: OpenedStore) -> Result<Self, BufferError> {
        let config = config.checked()?;
        let OpenedStore { store, recovered, opening } = opened;
        let shared = BufferShared {
            ledger: Mutex::new(Ledger::restore(config, recovered, 0)),
            slots_freed: Signal::default(),
            batch_changed: Signal::default(),
            events: Events::new(opening),
            opened: Instant::now(),
        };
        Ok(Self { config, shared: Arc::new(shared), store, file: None })
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> BufferConfig {
        self.config
    }

    /// Recent events.
    #[must_use]
    pub fn events(&self) -> &Events {
        &self.shared.events
    }

    /// Why nothing can be written any more; `None` while the store works. A failed journal has to be opened again.
    #[must_use]
    pub fn failure(&self) -> Option<BufferError> {
        self.store.failure()
    }

    /// The longest commits of the store since the last call, at most 64, in order.
    #[must_use]
    pub fn take_commits(&self) -> Vec<CommitTime> {
        self.store.take_commits()
    }

    /// Up to `limit` groups in flight or stored that match `filter`, ascending by id, after `after`. A page that is
    /// not full can have a next page.
    ///
    /// # Errors
    /// A failed buffer.
    pub fn list(
        &self,
        filter: &GroupFilter,
        after: Option<GroupId>,
        limit: usize,
    ) -> Result<GroupPage, BufferError> {
        Ok(self.shared.ledger()?.list(filter, after, limit, self.shared.now()))
    }

    /// One group, with its payload once it is finalized, which may be read from disk.
    ///
    /// # Errors
    /// A group that cannot be read.
    pub fn get(&self, id: GroupId) -> Result<Option<WithPayload>, BufferError> {
        let ledger = self.shared.ledger()?;
        let Some(entry) = ledger.entry(id, self.shared.now()) else { return Ok(None) };
        let stored = ledger.is_stored(id);
        drop(ledger);
        let payload = if stored { self.store.read(&[id], false)?.pop() } else { None };
        Ok(Some(WithPayload { entry, payload }))
    }

    /// The sender of a stored group, if it came from another process and is known.
    #[must_use]
    pub fn sender(&self, id: GroupId) -> Option<String> {
        self.store.sender(id)
    }

    /// The leases that are not acknowledged, of one consumer or of all.
    ///
    /// # Errors
    /// A failed buffer.
    pub fn leases(&self, consumer: Option<&str>) -> Result<Vec<LeaseEntry>, BufferError> {
        Ok(self.shared.ledger()?.leases(consumer, self.shared.now()))
    }

    /// Evicts a group in any state; false if it is unknown.
    ///
    /// # Errors
    /// A store that cannot write.
    pub fn evict(&self, group: GroupId) -> Result<bool, BufferError> {
        self.settle(|ledger, _| Ok(ledger.evict(group)))
    }

    /// Evicts groups that can be leased and are older than `version`; their number.
    ///
    /// # Errors
    /// A store that cannot write.
    pub fn evict_below(&self, version: PolicyVersion) -> Result<u64, BufferError> {
        self.settle(|ledger, _| Ok(ledger.evict_below(version)))
    }

    /// Rewinds to `version` for `consumer`, which resumes from an older checkpoint than the last one that it
    /// acknowledged. Returns `None`, and changes nothing, if all groups that it needs are stored. Groups sampled by
    /// later versions are generated again, because the trainer will produce those versions again, as other policies.
    ///
    /// # Errors
    /// A group that cannot be read, a store that cannot write.
    pub fn rewind(&self, consumer: &str, version: PolicyVersion) -> Result<Option<Rewound>, BufferError> {
        let ledger = self.shared.ledger()?;
        let (gone, groups) = (ledger.lost_since(consumer, version), ledger.stored_groups());
        drop(ledger);
        if gone == 0 {
            return Ok(None);
        }
        let mut rewound = Rewound { gone, ..Rewound::default() };
        for group in groups {
            let read = self.store.read(&[group], false)?;
            let trajectories = read.iter().flat_map(|group| &group.trajectories);
            let samples = trajectories.flat_map(|found| found.samples());
            if samples.flat_map(|sample| sample.versions()).all(|run| run.version <= version) {
                continue;
            }
            let again = self.settle(|ledger, _| Ok(ledger.sample_again(group)))?;
            *(if again { &mut rewound.again } else { &mut rewound.dropped }) += 1;
        }
        // The version is set last: an interrupted rewind then starts again.
        self.settle(|ledger, _| {
            ledger.rewind(version);
            Ok(())
        })?;
        Ok(Some(rewound))
    }

    /// Expires every hold that has ended. Waiting calls do this too; without any, a maintenance task calls it.
    ///
    /// # Errors
    /// A store that cannot write.
    pub fn expire(&self) -> Result<(), BufferError> {
        let mut ledger = self.shared.ledger()?;
        self.store.check_capacity()?;
        if ledger.next_expiry().is_some_and(|until| until <= self.shared.now()) {
            ledger.expire(self.shared.now());
            self.commit(&mut ledger, Box::new(|_| ()));
            drop(ledger);
            self.shared.notify();
        }
        Ok(())
    }

    /// Changes the ledger and waits until the change is durable.
    fn settle<T>(
        &self,
        change: impl FnOnce(&mut Ledger, u64) -> Result<T, BufferError>,
    ) -> Result<T, BufferError> {
        let (done, completed) = completion();
        let mut ledger = self.shared.ledger()?;
        self.store.check_capacity()?;
        let result = change(&mut ledger, self.shared.now());
        self.commit(&mut ledger, done);
        drop(ledger);
        self.shared.notify();
        self.wait_for(&completed)?;
        result
    }

    /// Commits the ledger's change. `done` is called once it is durable, or now if there is no change.
    fn commit(&self, ledger: &mut Ledger, done: WriteCompletion) {
        let (change, occurrences) = ledger.take_change();
        let Some(change) = change else {
            self.shared.events.publish(occurrences);
            return done(Ok(()));
        };
        let shared = Arc::clone(&self.shared);
        let durable = Box::new(move |result: Result<(), BufferError>| {
            if result.is_ok() {
                shared.events.publish(occurrences);
            }
            done(result);
        });
        self.store.commit(change, durable);
    }

    fn wait_for(&self, completed: &CompletionReceiver) -> Result<(), BufferError> {
        completed.wait(WRITE_WAIT).unwrap_or_else(|waited| Err(self.store.unacknowledged(waited)))
    }

    /// Asks the ledger about an arrival, which may free another group's slot.
    fn begin(&self, prepared: &PreparedGroup) -> Result<ArrivalDecision, BufferError> {
        let mut ledger = self.shared.ledger()?;
        self.begin_in(&mut ledger, prepared)
    }

    /// [`Buffer::begin`] for a caller that keeps the lock until it waits.
    fn begin_in(
        &self,
        ledger: &mut Ledger,
        prepared: &PreparedGroup,
    ) -> Result<ArrivalDecision, BufferError> {
        let begin = ledger.begin(&prepared.arrival(), self.shared.now());
        self.shared.events.publish(ledger.take_occurrences());
        if matches!(begin, Ok(ArrivalDecision::Answer(_, Finalized::Stale | Finalized::Duplicate))) {
            self.shared.slots_freed.all();
        }
        begin
    }

    /// Writes the group of a decision.
    fn write(&self, prepared: PreparedGroup, group: GroupId, keep: &[bool], done: WriteCompletion) {
        let shared = Arc::clone(&self.shared);
        let written = match prepared.finish(group, keep) {
            Ok(written) => written,
            Err(error) => {
                shared.end(group, None);
                return done(Err(error));
            }
        };
        let row = written.row.clone();
        let ended = Box::new(move |result: Result<(), BufferError>| {
            shared.end(group, result.is_ok().then_some(row));
            done(result);
        });
        self.store.append(AppendGroup {
            row: written.row,
            key: written.key,
            payload: written.payload,
            group: Arc::new(written.group),
            sender: written.sender,
            done: ended,
        });
    }

    /// Stores a group. Waits for free bytes, and for another call that writes the same group.
    fn store(&self, incoming: IncomingGroup) -> Result<Submitted, BufferError> {
        let prepared = PreparedGroup::new(incoming, self.config.dedup)?;
        let deadline = Instant::now() + 2 * WRITE_WAIT;
        loop {
            // Locked from the decision to the wait, so that no signal between them is missed.
            let mut ledger = self.shared.ledger()?;
            let (group, keep) = match self.begin_in(&mut ledger, &prepared)? {
                ArrivalDecision::Write { group, keep } => (group, keep),
                ArrivalDecision::Answer(Some(group), Finalized::Full) if Instant::now() < deadline => {
                    if !ledger.is_in_flight(group) {
                        return Ok(Submitted { answer: Finalized::Full, group: Some(group) });
                    }
                    // It has a slot, so only bytes are missing.
                    drop(self.shared.wait(&self.shared.slots_freed, ledger, deadline)?);
                    continue;
                }
                ArrivalDecision::Answer(group, answer) => return Ok(Submitted { answer, group }),
                ArrivalDecision::Elsewhere(group) if Instant::now() >= deadline => {
                    return Err(BufferError::StillWriting { group, waited: 2 * WRITE_WAIT });
                }
                ArrivalDecision::Elsewhere(_) => {
                    drop(self.shared.wait(&self.shared.batch_changed, ledger, deadline)?);
                    continue;
                }
            };
            drop(ledger);
            let (done, completed) = completion();
            self.write(prepared, group, &keep, done);
            return match self.wait_for(&completed) {
                Ok(()) => Ok(Submitted { answer: Finalized::Accepted, group: Some(group) }),
                Err(BufferError::QueueFull { .. }) => Ok(Submitted { answer: Finalized::Full, group: None }),
                Err(error) => Err(error),
            };
        }
    }

    fn handed_out(&self, request: &LeaseRequest, leased: GrantedLease) -> Result<Lease, BufferError> {
        let GrantedLease { id, step, groups, dropped_stale } = leased;
        let groups = self.store.read(&groups, self.config.max_uses == 1)?;
        let (consumer, hold) = (request.consumer.clone(), request.hold);
        Ok(Lease { id, consumer, step, groups, hold, dropped_stale })
    }

    fn no_batch(&self, ledger: &Ledger, request: &LeaseRequest, waited: Duration) -> BufferError {
        let stats = Box::new(ledger.stats());
        let step = request.step.unwrap_or(stats.policy_version);
        BufferError::LeaseTimeout { step, waited, held_for_slow: ledger.held_for_slow(request), stats }
    }
}

impl Producer for Buffer {
    fn admit(&self, request: AdmitRequest, wait: Duration) -> Result<Vec<GroupId>, BufferError> {
        let deadline = Instant::now() + wait.min(MAX_WAIT);
        let mut ledger = self.shared.ledger()?;
        loop {
            let ids = self.try_admit(&mut ledger, request)?;
            if request.limit == 0 || !ids.is_empty() || Instant::now() >= deadline {
                return Ok(ids);
            }
            ledger = self.shared.wait(&self.shared.slots_freed, ledger, deadline)?;
        }
    }

    fn claim(&self, group: GroupId, served: PolicyVersion) -> Result<(), BufferError> {
        self.shared.ledger()?.claim(group, served, self.shared.now())?;
        self.shared.batch_changed.all();
        Ok(())
    }

    fn finalize(&self, group: Group) -> Result<Finalized, BufferError> {
        Ok(self.store(IncomingGroup::admitted(group))?.answer)
    }

    fn abort(&self, group: GroupId, retry: bool) -> Result<(), BufferError> {
        let mut ledger = self.shared.ledger()?;
        ledger.abort(group, retry)?;
        self.shared.events.publish(ledger.take_occurrences());
        drop(ledger);
        self.shared.notify();
        Ok(())
    }

    fn abandon(&self, holder: u64) -> Result<usize, BufferError> {
        let abandoned = self.shared.ledger()?.abandon(holder, self.shared.now());
        self.shared.notify();
        Ok(abandoned)
    }

    fn submit(&self, key: &str, group: Group) -> Result<Submitted, BufferError> {
        self.store(IncomingGroup::keyed(key, group))
    }
}

impl Buffer {
    fn try_admit(&self, ledger: &mut Ledger, request: AdmitRequest) -> Result<Vec<GroupId>, BufferError> {
        let now = self.shared.now();
        if self.store.check_capacity().is_ok() && ledger.expire(now) {
            self.commit(ledger, Box::new(|_| ()));
            self.shared.notify();
        }
        ledger.admit(request, now)
    }

    /// One attempt to lease. `done` is called once its change is durable.
    fn try_lease(
        &self,
        ledger: &mut Ledger,
        request: &LeaseRequest,
        last_call: bool,
        done: WriteCompletion,
    ) -> Result<Option<GrantedLease>, BufferError> {
        self.store.check_capacity()?;
        let now = self.shared.now();
        if ledger.expire(now) {
            self.shared.notify();
        }
        let attempt = ledger.lease(request, now, last_call);
        self.commit(ledger, done);
        if attempt.is_ok() {
            self.shared.slots_freed.all();
        }
        attempt
    }
}

impl Consumer for Buffer {
    fn lease(&self, request: &LeaseRequest, wait: Duration) -> Result<Lease, BufferError> {
        let started = Instant::now();
        let deadline = started + wait.min(MAX_WAIT);
        let mut ledger = self.shared.ledger()?;
        loop {
            let (done, completed) = completion();
            let last_call = Instant::now() >= deadline;
            if let Some(leased) = self.try_lease(&mut ledger, request, last_call, done)? {
                drop(ledger);
                self.wait_for(&completed)?;
                return self.handed_out(request, leased);
            }
            if last_call {
                return Err(self.no_batch(&ledger, request, started.elapsed()));
            }
            ledger = self.shared.wait(&self.shared.batch_changed, ledger, deadline)?;
        }
    }

    fn extend(&self, lease: LeaseId, hold: Duration) -> Result<(), BufferError> {
        let hold_ms = crate::ledger::millis(hold);
        self.settle(|ledger, now| ledger.extend(lease, hold_ms, now))
    }

    fn ack(&self, lease: LeaseId) -> Result<(), BufferError> {
        self.settle(|ledger, _| ledger.ack(lease))
    }

    fn ack_through(&self, consumer: &str, through: PolicyVersion) -> Result<(), BufferError> {
        self.settle(|ledger, _| ledger.ack_through(consumer, through))
    }

    fn release(&self, lease: LeaseId) -> Result<(), BufferError> {
        self.settle(|ledger, _| ledger.release(lease))
    }

    fn quarantine(&self, group: GroupId) -> Result<Option<String>, BufferError> {
        let sender = self.sender(group);
        self.settle(|ledger, _| Ok(ledger.quarantine(group)))?;
        Ok(sender)
    }

    fn set_version(&self, version: PolicyVersion, rewind: bool) -> Result<(), BufferError> {
        self.settle(|ledger, _| ledger.set_version(version, rewind))
    }

    fn confirm(&self) -> Result<(), BufferError> {
        if !self.store.can_be_taken_over() {
            return Ok(());
        }
        self.settle(|ledger, _| {
            ledger.write_watermarks();
            Ok(())
        })
    }

    fn stats(&self) -> Result<Stats, BufferError> {
        Ok(self.shared.ledger()?.stats())
    }
}

impl BufferShared {
    fn ledger(&self) -> Result<MutexGuard<'_, Ledger>, BufferError> {
        self.ledger.lock().map_err(|_| BufferError::Poisoned)
    }

    /// Milliseconds since the buffer was opened; holds are independent of the system's clock.
    fn now(&self) -> u64 {
        crate::ledger::millis(self.opened.elapsed())
    }

    /// The write of a group ended.
    fn end(&self, group: GroupId, written: Option<crate::ledger::GroupRow>) {
        // After a panic under the lock every other call reports it.
        let Ok(mut ledger) = self.ledger.lock() else { return };
        let failed = written.is_none();
        ledger.end(group, written, self.now());
        self.events.publish(ledger.take_occurrences());
        drop(ledger);
        self.batch_changed.all();
        if failed {
            self.slots_freed.all();
        }
    }

    fn notify(&self) {
        self.slots_freed.all();
        self.batch_changed.all();
    }

    /// When to check again at the latest: at `deadline`, or when the next hold expires.
    fn until(&self, ledger: &Ledger, deadline: Instant) -> Instant {
        let expiry =
            ledger.next_expiry().map(|until| self.opened + Duration::from_millis(until.saturating_add(1)));
        expiry.map_or(deadline, |expiry| expiry.min(deadline))
    }

    /// Waits for `signal`, the next expiry or the deadline.
    fn wait<'a>(
        &self,
        signal: &Signal,
        ledger: MutexGuard<'a, Ledger>,
        deadline: Instant,
    ) -> Result<MutexGuard<'a, Ledger>, BufferError> {
        let left = self.until(&ledger, deadline).saturating_duration_since(Instant::now());
        let (ledger, _) = signal.threads.wait_timeout(ledger, left).map_err(|_| BufferError::Poisoned)?;
        Ok(ledger)
    }
}

impl Signal {
    fn all(&self) {
        self.threads.notify_all();
        self.tasks.notify_waiters();
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("config", &self.config)
            .field("ledger", &self.shared.ledger)
            .finish_non_exhaustive()
    }
}
