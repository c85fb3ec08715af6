//! The one place that knows what is published and who serves what, for every transport.
//!
//! Invariant: the newest version and what each subscriber serves only go up, and a receipt counts only once its digest
//! was compared. Of older versions only digests are kept. A receipt that cannot be true stops the run if it is of this
//! process; a subscriber in another process is left out for it, named, and the run goes on.
//!
//! A subscriber is a *seat* with a name and the number of its connection. Connections are numbered by the clock, so that
//! they go up also from one life of the trainer's process to the next: a hub that has just started seats whoever calls,
//! and of two that go by one name the later keeps the seat. What samplers apply of a former life is compared when the
//! version is published again.

mod state;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::Notify;
use trajectory::PolicyVersion;

use self::state::{HubState, Registration};
pub(crate) use self::state::{PublicationStatus, SubscriberId};
use crate::delta::DeltaFrame;
use crate::direct::WeightsLocation;
use crate::memory::MemorySubscriber;
use crate::{Digest, Dtype, Lag, Receipt, Snapshot, WeightsError};

/// The longest that any call waits, whatever it was told.
const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// Most bytes of a name.
const MAX_NAME: usize = 128;
/// Most subscribers.
const MAX_SUBSCRIBERS: usize = 4096;
/// How late a publisher that waits for subscribers can be.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Most subscribers that were given up, or left out, and not yet asked for.
const MAX_REPORTED: usize = 256;
/// How far the clock of an earlier life of the trainer's process may have been ahead of that of this one, nanoseconds.
const CLOCK_SKEW: u64 = 3_600_000_000_000;

/// What a hub may decide.
#[derive(Clone, Copy, Debug)]
pub struct HubConfig {
    /// How long a subscriber in another process may be silent before it is no longer waited for.
    pub hold: Duration,
    /// What published weights are rounded to.
    pub dtype: Dtype,
}

impl Default for HubConfig {
    fn default() -> Self {
        Self { hold: Duration::from_secs(60), dtype: Dtype::F32 }
    }
}

/// Where samplers subscribe; clones are the same hub.
#[derive(Clone, Debug)]
pub struct Hub {
    shared: Arc<HubShared>,
}

/// A subscriber that was silent for too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SilentSubscriber {
    /// Its name.
    pub subscriber: String,
    /// What it served, if it applied anything.
    pub served: Option<PolicyVersion>,
    /// For how long nothing was heard of it.
    pub silent: Duration,
}

/// A subscriber in another process that was left out, because it said what cannot be true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedSubscriber {
    /// Its name.
    pub subscriber: String,
    /// What it said.
    pub error: WeightsError,
}

/// The newest version, as subscribers are told of it.
#[derive(Clone, Debug)]
pub(crate) struct Announcement {
    pub(crate) newest: PublishedVersion,
    /// `None` until it is digested; it can be fetched over the network from then on.
    pub(crate) digest: Option<Digest>,
}

/// The newest version, where it is.
#[derive(Clone, Debug)]
pub(crate) enum PublishedVersion {
    /// In memory of the host, and perhaps in a file that can be mapped there.
    Host(Arc<Snapshot>, Option<PathBuf>),
    /// On a device: version, number of weights, and how samplers get them.
    Device(PolicyVersion, usize, WeightsLocation),
}

/// What a subscriber knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// The version, if it has any.
    Version(Option<PolicyVersion>),
    /// The number of the last round that it was told of. It is told of every round, also of one that repeats a version.
    Round(u64),
}

#[derive(Debug)]
struct HubShared {
    config: HubConfig,
    /// The life of this hub, which receipts name.
    life: u64,
    state: Mutex<HubState>,
    changed: Condvar,
    /// The same for those who wait without a thread.
    changed_async: Notify,
}

impl Hub {
    /// A hub to which nothing was published.
    #[must_use]
    pub fn new(config: HubConfig) -> Self {
        let (state, changed, changed_async) = (Mutex::default(), Condvar::new(), Notify::new());
        Self { shared: Arc::new(HubShared { config, life: clock(), state, changed, changed_async }) }
    }

    /// Adds a subscriber within this process, whose name must be free; it stands in receipts and errors.
    ///
    /// # Errors
    /// [`WeightsError::NameTaken`] if the name is in use; one that nobody can have.
    pub fn subscribe(&self, name: impl Into<String>) -> Result<MemorySubscriber, WeightsError> {
        let caller = self.connect(name.into(), false)?;
        Ok(MemorySubscriber::new(self.clone(), caller))
    }

    /// Subscribers in other processes that were silent for longer than the hold since this was last asked.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    pub fn take_silent(&self) -> Result<Vec<SilentSubscriber>, WeightsError> {
        let mut state = self.state()?;
        state.expire_silent(self.hold());
        Ok(std::mem::take(&mut state.silent))
    }

    /// Subscribers in other processes that were left out since this was last asked. They are waited for and counted no
    /// longer, and their calls are refused until they subscribe anew.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    pub fn take_rejected(&self) -> Result<Vec<RejectedSubscriber>, WeightsError> {
        Ok(std::mem::take(&mut self.state()?.rejected))
    }

    /// Bytes of weights that were sent over the network so far.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    pub fn bytes_sent(&self) -> Result<u64, WeightsError> {
        Ok(self.state()?.bytes_sent)
    }

    /// What every subscriber that is still there serves, in the order of their names.
    ///
    /// # Errors
    /// An earlier mismatch.
    pub fn lags(&self) -> Result<Vec<Lag>, WeightsError> {
        let mut state = self.healthy()?;
        state.expire_silent(self.hold());
        Ok(state.lags())
    }

    pub(crate) fn hold(&self) -> Duration {
        self.shared.config.hold
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.shared.config.dtype
    }

    pub(crate) fn life(&self) -> u64 {
        self.shared.life
    }

    /// A seat for `name`. Of two in this process that want it the second is refused; a process that comes later takes it,
    /// because it may well be the same worker, started again.
    pub(crate) fn connect(&self, name: String, remote: bool) -> Result<SubscriberId, WeightsError> {
        check_name(&name)?;
        let mut state = self.healthy()?;
        // One of this process keeps its seat: whoever may call over the network could stop the run otherwise.
        if state.registrations.get(&name).is_some_and(|registration| !remote || !registration.is_remote()) {
            return Err(WeightsError::NameTaken { name });
        }
        let held = state.registrations.get(&name).map_or(0, |registration| registration.connection);
        let connection = clock().max(state.last_connection + 1).max(held + 1);
        state.last_connection = connection;
        state.register(&name, Registration::new(connection, remote))?;
        drop(state);
        self.wake();
        Ok(SubscriberId { name, connection })
    }

    /// A subscriber in another process, as it calls itself: neither one of this process nor a connection that no hub can
    /// have given out yet.
    pub(crate) fn remote_caller(&self, name: String, connection: u64) -> Result<SubscriberId, WeightsError> {
        check_name(&name)?;
        if connection > clock().saturating_add(CLOCK_SKEW) {
            return Err(WeightsError::BadConnection { name, connection });
        }
        if self.state()?.registrations.get(&name).is_some_and(|registration| !registration.is_remote()) {
            return Err(WeightsError::NameTaken { name });
        }
        Ok(SubscriberId { name, connection })
    }

    pub(crate) fn leave(&self, caller: &SubscriberId) {
        if let Ok(mut state) = self.state()
            && state
                .registrations
                .get(&caller.name)
                .is_some_and(|registration| registration.connection == caller.connection)
        {
            state.registrations.remove(&caller.name);
        }
        self.wake();
    }

    /// The newest version if it is newer than `after`.
    pub(crate) fn newest(
        &self,
        caller: &SubscriberId,
        after: After,
    ) -> Result<Option<Announcement>, WeightsError> {
        let mut state = self.healthy()?;
        if state.record_poll(caller, after)? {
            self.wake();
        }
        state.newer(after)
    }

    pub(crate) fn wait_newer(
        &self,
        caller: &SubscriberId,
        after: After,
        wait: Duration,
    ) -> Result<Option<Announcement>, WeightsError> {
        let deadline = Instant::now() + wait.min(MAX_WAIT);
        let mut state = self.healthy()?;
        loop {
            if state.record_poll(caller, after)? {
                self.wake();
            }
            let newer = state.newer(after)?;
            if newer.is_some() || Instant::now() >= deadline {
                return Ok(newer);
            }
            state = self.wait(state, deadline)?;
            state.check()?;
        }
    }

    /// Takes a receipt for a version that `caller` heard of in the life `life` of a hub. One that cannot be true stops the
    /// run if `caller` is of this process; otherwise `caller` is left out.
    pub(crate) fn accept(
        &self,
        caller: &SubscriberId,
        life: u64,
        receipt: Receipt,
    ) -> Result<(), WeightsError> {
        let mut state = self.healthy()?;
        state.record_call(caller)?;
        let result = state.accept(&caller.name, receipt, life == self.shared.life);
        if let Err(error) = &result
            && !state.reject(&caller.name, error)
        {
            state.failure = Some(error.clone());
        }
        drop(state);
        self.wake();
        result
    }

    /// What the hub believes that `caller` serves.
    pub(crate) fn served(&self, caller: &SubscriberId) -> Result<Option<PolicyVersion>, WeightsError> {
        Ok(self.state()?.served(&caller.name))
    }

    /// Resolves when something may have changed after the call.
    pub(crate) fn changed_async(&self) -> tokio::sync::futures::Notified<'_> {
        self.shared.changed_async.notified()
    }

    /// What is known of a version that is about to be published.
    pub(crate) fn known(&self, version: PolicyVersion) -> Result<PublicationStatus, WeightsError> {
        self.healthy()?.known(version)
    }

    /// Makes a version visible to those who share memory, and gives back the one before.
    pub(crate) fn announce(
        &self,
        newest: PublishedVersion,
    ) -> Result<Option<PublishedVersion>, WeightsError> {
        let mut state = self.healthy()?;
        let before = state.announce(newest);
        drop(state);
        self.wake();
        Ok(before)
    }

    /// Takes the seat of whoever goes by `name`, whose process has ended. One that was only slow is seated again when it calls.
    pub fn forget(&self, name: &str) {
        if let Ok(mut state) = self.state()
            && state.registrations.get(name).is_some_and(Registration::is_remote)
        {
            state.registrations.remove(name);
        }
        self.wake();
    }

    /// Who takes part in rounds and was heard of lately, in the order of their names.
    pub(crate) fn receivers(&self) -> Result<Vec<SubscriberId>, WeightsError> {
        Ok(self.healthy()?.receivers(self.lately()))
    }

    /// Notes that an owner of a shard cannot send it in a round, so that nobody waits for the others of that round.
    pub(crate) fn fail_round(&self, round: u64, reason: String) {
        let Ok(mut state) = self.state() else { return };
        if state.failed_round.as_ref().is_none_or(|(failed, _)| *failed < round) {
            state.failed_round = Some((round, reason));
        }
    }

    /// Why a round cannot end well, if an owner of a shard has said so.
    pub(crate) fn failed_round(&self, round: u64) -> Option<String> {
        let state = self.state().ok()?;
        state.failed_round.as_ref().filter(|(failed, _)| *failed == round).map(|(_, reason)| reason.clone())
    }

    /// Why the first of `members` that does not call any more does not.
    pub(crate) fn departed(&self, members: &[SubscriberId]) -> Option<String> {
        let Ok(state) = self.state() else { return Some(WeightsError::Poisoned.to_string()) };
        members.iter().find_map(|member| state.departed(member, self.lately()))
    }

    /// Waits until `enough` says so of [`Hub::receivers`] since `since`, at most for `wait`; who they are then.
    pub(crate) fn wait_receivers(
        &self,
        since: Instant,
        wait: Duration,
        enough: impl Fn(&[SubscriberId]) -> bool,
    ) -> Result<Vec<SubscriberId>, WeightsError> {
        let deadline = Instant::now() + wait.min(MAX_WAIT);
        let mut state = self.healthy()?;
        loop {
            let receivers = state.receivers(since);
            let now = Instant::now();
            if now >= deadline || enough(&receivers) {
                return Ok(receivers);
            }
            // Calls that change nothing wake nobody.
            state = self.wait(state, deadline.min(now + LOOK_AGAIN))?;
            state.check()?;
        }
    }

    /// Notes the digest of an announced version, which all receipts for it are compared with.
    pub(crate) fn digested(&self, version: PolicyVersion, digest: Digest) -> Result<(), WeightsError> {
        let mut state = self.healthy()?;
        let result = state.digested(version, digest);
        if let Err(error) = &result {
            state.failure = Some(error.clone());
        }
        drop(state);
        self.wake();
        result
    }

    /// Makes a digested version visible to the network: with the `delta` from the one before, or without.
    pub(crate) fn settle(&self, delta: Option<Arc<DeltaFrame>>) -> Result<(), WeightsError> {
        self.healthy()?.settle(delta);
        self.wake();
        Ok(())
    }

    /// The delta that begins at `from`, if it and all after it together are there and worth it.
    pub(crate) fn delta(&self, from: PolicyVersion) -> Result<Option<Arc<DeltaFrame>>, WeightsError> {
        Ok(self.healthy()?.delta(from, self.dtype()))
    }

    /// A version in full, as long as it is the newest and digested.
    pub(crate) fn full(&self, version: PolicyVersion) -> Result<Option<Arc<Snapshot>>, WeightsError> {
        let state = self.healthy()?;
        let newest = state.newest.as_ref().filter(|newest| newest.version() == version && state.settled);
        Ok(newest.and_then(PublishedVersion::snapshot).cloned())
    }

    pub(crate) fn sent(&self, bytes: u64) {
        if let Ok(mut state) = self.state() {
            state.bytes_sent += bytes;
        }
    }

    pub(crate) fn wait_applied(&self, version: PolicyVersion, wait: Duration) -> Result<(), WeightsError> {
        let started = Instant::now();
        let deadline = started + wait.min(MAX_WAIT);
        let mut state = self.healthy()?;
        loop {
            let next_silent = state.expire_silent(self.hold());
            let behind = state.behind(version);
            if behind.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(WeightsError::NotApplied { version, waited: started.elapsed(), behind });
            }
            let look_again = next_silent.map_or(deadline, |silent| deadline.min(silent));
            state = self.wait(state, look_again)?;
            state.check()?;
        }
    }

    pub(crate) fn publisher_gone(&self) {
        if let Ok(mut state) = self.state() {
            state.publisher_gone = true;
        }
        self.wake();
    }

    /// Who was not heard of since then is no longer waited for.
    fn lately(&self) -> Instant {
        let now = Instant::now();
        now.checked_sub(self.hold()).unwrap_or(now)
    }

    fn state(&self) -> Result<MutexGuard<'_, HubState>, WeightsError> {
        self.shared.state.lock().map_err(|_| WeightsError::Poisoned)
    }

    fn healthy(&self) -> Result<MutexGuard<'_, HubState>, WeightsError> {
        let state = self.state()?;
        state.check()?;
        Ok(state)
    }

    fn wake(&self) {
        self.shared.changed.notify_all();
        self.shared.changed_async.notify_waiters();
    }

    /// Waits until something changed or the deadline is over.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, HubState>,
        deadline: Instant,
    ) -> Result<MutexGuard<'a, HubState>, WeightsError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let (state, _) = self.shared.changed.wait_timeout(state, left).map_err(|_| WeightsError::Poisoned)?;
        Ok(state)
    }
}

impl PublishedVersion {
    pub(crate) fn version(&self) -> PolicyVersion {
        match self {
            Self::Host(snapshot, _) => snapshot.version,
            Self::Device(version, ..) => *version,
        }
    }

    /// Number of weights.
    pub(crate) fn parameters(&self) -> usize {
        match self {
            Self::Host(snapshot, _) => snapshot.values.len(),
            Self::Device(_, parameters, _) => *parameters,
        }
    }

    /// The weights, if they are on the host.
    pub(crate) fn snapshot(&self) -> Option<&Arc<Snapshot>> {
        match self {
            Self::Host(snapshot, _) => Some(snapshot),
            Self::Device(..) => None,
        }
    }

    /// The file to map, if there is one.
    pub(crate) fn place(&self) -> Option<&Path> {
        match self {
            Self::Host(_, place) => place.as_deref(),
            Self::Device(..) => None,
        }
    }

    /// How to get them, if they are on a device.
    pub(crate) fn direct(&self) -> Option<&WeightsLocation> {
        match self {
            Self::Host(..) => None,
            Self::Device(_, _, direct) => Some(direct),
        }
    }
}

fn check_name(name: &str) -> Result<(), WeightsError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || " -_.:".contains(c);
    if (1..=MAX_NAME).contains(&name.len()) && name.chars().all(allowed) {
        return Ok(());
    }
    Err(WeightsError::BadName { name: name.chars().take(MAX_NAME).collect(), limit: MAX_NAME })
}

/// Nanoseconds since 1970.
fn clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests;
