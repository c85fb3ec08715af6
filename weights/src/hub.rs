//! The hub: the registry of subscribers, published versions and receipts, for every transport.
//!
//! Invariant: the newest version and the served version of each subscriber never decrease, and a receipt counts only
//! after its digest was compared. Of older versions only digests are stored. An impossible receipt of this process
//! stops the run; a subscriber in another process is rejected for it, and the run continues.
//!
//! A *registration* is a name and a connection id. Connection ids come from the clock, so they increase over restarts
//! of the trainer's process: a restarted hub registers any caller again, and of two callers with one name the later
//! connection wins. Receipts for versions of an earlier incarnation of the hub (`life` on the wire) are compared when
//! the version is published again.

mod relays;
mod state;
mod tree;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::Notify;
use trajectory::PolicyVersion;

pub(crate) use self::relays::{AssignedRelay, MAX_RELAY_WAIT};
pub use self::relays::{Distribution, FallbackReason, RelayAddress, RelayFallback};
pub(crate) use self::state::{Availability, PublicationStatus, SubscriberId};
use self::state::{HubState, Registration};
use crate::delta::DeltaFrame;
use crate::direct::WeightsLocation;
use crate::memory::MemorySubscriber;
use crate::{Digest, Dtype, Lag, Receipt, Snapshot, WeightsError};

/// Longest wait of any call.
const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum length of a name, bytes.
const MAX_NAME: usize = 128;
/// Maximum number of subscribers.
const MAX_SUBSCRIBERS: usize = 4096;
/// Longest delay with which a publisher notices that a subscriber called.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Maximum number of unread reports of rejected subscribers.
const MAX_REPORTED: usize = 256;
/// Tolerated difference between the clock of an earlier trainer process and this one, nanoseconds.
const CLOCK_SKEW: u64 = 3_600_000_000_000;

/// Configuration of a hub.
#[derive(Clone, Copy, Debug)]
pub struct HubConfig {
    /// A subscriber in another process that is silent for longer is not waited for any more.
    pub hold: Duration,
    /// Precision of published weights.
    pub dtype: Dtype,
    /// Most subscribers that fetch a version from the hub, or from one relay, if there are relays; 0: all from the hub.
    pub fanout: usize,
    /// How long a subscriber waits for its relay before it asks the hub: once for each relay between them, and the time to
    /// transfer the version at 4 MiB per second in addition.
    pub relay_wait: Duration,
}

impl Default for HubConfig {
    fn default() -> Self {
        let (hold, relay_wait) = (Duration::from_secs(60), Duration::from_secs(5));
        Self { hold, dtype: Dtype::F32, fanout: 4, relay_wait }
    }
}

/// A hub; clones are the same hub.
#[derive(Clone, Debug)]
pub struct Hub {
    shared: Arc<HubShared>,
}

/// A subscriber in another process that was rejected for an impossible receipt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedSubscriber {
    /// Its name.
    pub subscriber: String,
    /// What is wrong with its receipt.
    pub error: WeightsError,
}

/// The newest version, as announced to subscribers.
#[derive(Clone, Debug)]
pub(crate) struct Announcement {
    pub(crate) newest: PublishedVersion,
    /// `None` until it is computed; from then on the version can be fetched over HTTP.
    pub(crate) digest: Option<Digest>,
    /// The relay to fetch it from; `None`: the hub.
    pub(crate) relay: Option<AssignedRelay>,
}

/// The newest version, and where its weights are.
#[derive(Clone, Debug)]
pub(crate) enum PublishedVersion {
    /// In host memory, and perhaps in a file that can be mapped.
    Host(Arc<Snapshot>, Option<PathBuf>),
    /// On a device: version, number of weights, and how subscribers get them.
    Device(PolicyVersion, usize, WeightsLocation),
    /// Only where subscribers have them: version and number of weights.
    Taken(PolicyVersion, usize),
}

/// What a subscriber already has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// Its version, if any.
    Version(Option<PolicyVersion>),
    /// The number of its last broadcast round. It is notified of every round, also of one that repeats a version.
    Round(u64),
}

#[derive(Debug)]
struct HubShared {
    config: HubConfig,
    /// The incarnation of this hub, which receipts name.
    life: u64,
    state: Mutex<HubState>,
    changed: Condvar,
    /// The same for async waits.
    changed_async: Notify,
}

impl Hub {
    /// A hub without a published version.
    #[must_use]
    pub fn new(config: HubConfig) -> Self {
        let (state, changed, changed_async) = (Mutex::default(), Condvar::new(), Notify::new());
        Self { shared: Arc::new(HubShared { config, life: clock(), state, changed, changed_async }) }
    }

    /// Registers a subscriber within this process. Its name, which must be free, is used in receipts and errors.
    ///
    /// # Errors
    /// [`WeightsError::NameTaken`]; an invalid name.
    pub fn subscribe(&self, name: impl Into<String>) -> Result<MemorySubscriber, WeightsError> {
        let caller = self.connect(name.into(), false)?;
        Ok(MemorySubscriber::new(self.clone(), caller))
    }

    /// Subscribers in other processes that were rejected since the last call. They are neither waited for nor
    /// counted, and their calls are refused until they subscribe again.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    pub fn take_rejected(&self) -> Result<Vec<RejectedSubscriber>, WeightsError> {
        Ok(std::mem::take(&mut self.state()?.rejected))
    }

    /// Bytes of weights sent over the network so far.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a change.
    pub fn bytes_sent(&self) -> Result<u64, WeightsError> {
        Ok(self.state()?.bytes_sent)
    }

    /// The served version of every live subscriber, sorted by name.
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

    /// Registers `name`. A second subscriber of this name within the process is refused. A later one in another
    /// process replaces an earlier one: it may be the same worker after a restart.
    pub(crate) fn connect(&self, name: String, remote: bool) -> Result<SubscriberId, WeightsError> {
        check_name(&name)?;
        let mut state = self.healthy()?;
        // A registration of this process is not replaced, or a remote caller could stop the run.
        if state.registrations.get(&name).is_some_and(|registration| !remote || !registration.is_remote()) {
            return Err(WeightsError::NameTaken { name });
        }
        let previous = state.registrations.get(&name).map_or(0, |registration| registration.connection);
        let connection = clock().max(state.last_connection + 1).max(previous + 1);
        state.last_connection = connection;
        state.register(&name, Registration::new(connection, remote))?;
        drop(state);
        self.wake_publisher();
        Ok(SubscriberId { name, connection })
    }

    /// Validates the identity of a caller in another process: not a name of this process, nor a connection id that no
    /// hub can have issued yet.
    pub(crate) fn remote_caller(&self, name: String, connection: u64) -> Result<SubscriberId, WeightsError> {
        check_name(&name)?;
        let state = self.state()?;
        // After a step back of the clock, new ids continue from the last one.
        if connection > clock().saturating_add(CLOCK_SKEW).max(state.last_connection) {
            return Err(WeightsError::BadConnection { name, connection });
        }
        if state.registrations.get(&name).is_some_and(|registration| !registration.is_remote()) {
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
            state.unregister(&caller.name);
        }
        self.wake_publisher();
    }

    /// The newest version if it is newer than `after`.
    pub(crate) fn newest(
        &self,
        caller: &SubscriberId,
        after: After,
    ) -> Result<Option<Announcement>, WeightsError> {
        let mut state = self.healthy()?;
        if state.record_poll(caller, after)? {
            self.wake_publisher();
        }
        let mut newer = state.take_newer(caller, after)?;
        if let Some(newer) = &mut newer {
            newer.relay = state.assigned_relay(&caller.name, &self.shared.config);
        }
        Ok(newer)
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
                self.wake_publisher();
            }
            let newer = state.take_newer(caller, after)?;
            if newer.is_some() || Instant::now() >= deadline {
                return Ok(newer);
            }
            state = self.wait(state, deadline)?;
            state.check()?;
        }
    }

    /// Records a receipt for a version that `caller` got from the incarnation `life` of a hub. An impossible receipt
    /// stops the run if `caller` is of this process; otherwise `caller` is rejected.
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
        match &result {
            Ok(()) => self.wake_publisher(),
            Err(_) => self.wake(),
        }
        result
    }

    /// The version that `caller` serves, by its last receipt.
    pub(crate) fn served(&self, caller: &SubscriberId) -> Result<Option<PolicyVersion>, WeightsError> {
        Ok(self.state()?.served(&caller.name))
    }

    /// Resolves at the next change after the call.
    pub(crate) fn changed_async(&self) -> tokio::sync::futures::Notified<'_> {
        self.shared.changed_async.notified()
    }

    /// Publication status of a version that is about to be published.
    pub(crate) fn known(&self, version: PolicyVersion) -> Result<PublicationStatus, WeightsError> {
        self.healthy()?.known(version)
    }

    /// Announces a version to subscribers that share memory, and returns the previous one.
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

    /// Drops the weights of the newest version if all registered subscribers have taken them.
    pub(crate) fn drop_taken(&self) -> Result<(), WeightsError> {
        let dropped = self.state()?.drop_taken();
        // Memory is freed without the lock.
        drop(dropped);
        Ok(())
    }

    /// Unregisters `name`, whose process has ended. If it was only slow, its next call registers it again.
    pub fn forget(&self, name: &str) {
        if let Ok(mut state) = self.state()
            && state.registrations.get(name).is_some_and(Registration::is_remote)
        {
            state.unregister(name);
        }
        self.wake_publisher();
    }

    /// Members of broadcast rounds that called lately, sorted by name.
    pub(crate) fn receivers(&self) -> Result<Vec<SubscriberId>, WeightsError> {
        Ok(self.healthy()?.receivers(self.lately()))
    }

    /// Records that an owner of a shard cannot send it in a round, so the other owners of the round do not wait.
    pub(crate) fn fail_round(&self, round: u64, reason: String) {
        let Ok(mut state) = self.state() else { return };
        if state.failed_round.as_ref().is_none_or(|(failed, _)| *failed < round) {
            state.failed_round = Some((round, reason));
        }
    }

    /// Why a round will fail, if an owner of a shard has reported it.
    pub(crate) fn failed_round(&self, round: u64) -> Option<String> {
        let state = self.state().ok()?;
        state.failed_round.as_ref().filter(|(failed, _)| *failed == round).map(|(_, reason)| reason.clone())
    }

    /// Why the first departed one of `members` does not call any more.
    pub(crate) fn departed(&self, members: &[SubscriberId]) -> Option<String> {
        let Ok(state) = self.state() else { return Some(WeightsError::Poisoned.to_string()) };
        members.iter().find_map(|member| state.departed(member, self.lately()))
    }

    /// Waits up to `wait` until `enough` accepts the members that called since `since`; returns them.
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
            // Calls that change nothing wake no waiter.
            state = self.wait(state, deadline.min(now + LOOK_AGAIN))?;
            state.check()?;
        }
    }

    /// Records the digest of an announced version, which its receipts are compared with.
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

    /// Announces a digested version to the network, with or without the `delta` from the previous one.
    pub(crate) fn settle(&self, delta: Option<Arc<DeltaFrame>>) -> Result<(), WeightsError> {
        self.healthy()?.settle(delta, self.dtype());
        self.wake();
        Ok(())
    }

    /// The delta from `from`, if the chain from it is complete and smaller than the full weights.
    pub(crate) fn delta(&self, from: PolicyVersion) -> Result<Availability<Arc<DeltaFrame>>, WeightsError> {
        Ok(self.healthy()?.delta(from))
    }

    /// A version in full, while it is the newest and digested.
    pub(crate) fn full(&self, version: PolicyVersion) -> Result<Availability<Arc<Snapshot>>, WeightsError> {
        Ok(self.healthy()?.full(version))
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

    /// Subscribers silent since then are not waited for.
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

    /// Wakes every wait: a version has changed, or the hub has failed.
    fn wake(&self) {
        self.shared.changed.notify_all();
        self.shared.changed_async.notify_waiters();
    }

    /// Wakes the publisher: subscribers or receipts have changed. Polls of subscribers continue to wait, or every receipt would
    /// cost a look of every other subscriber.
    fn wake_publisher(&self) {
        self.shared.changed.notify_all();
    }

    /// Waits for a change or the deadline.
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
            Self::Device(version, ..) | Self::Taken(version, _) => *version,
        }
    }

    /// Number of weights.
    pub(crate) fn parameters(&self) -> usize {
        match self {
            Self::Host(snapshot, _) => snapshot.values.len(),
            Self::Device(_, parameters, _) | Self::Taken(_, parameters) => *parameters,
        }
    }

    /// The weights, if they are on the host.
    pub(crate) fn snapshot(&self) -> Option<&Arc<Snapshot>> {
        match self {
            Self::Host(snapshot, _) => Some(snapshot),
            Self::Device(..) | Self::Taken(..) => None,
        }
    }

    /// The file to map, if there is one.
    pub(crate) fn place(&self) -> Option<&Path> {
        match self {
            Self::Host(_, place) => place.as_deref(),
            Self::Device(..) | Self::Taken(..) => None,
        }
    }

    /// How to get them, if they are on a device.
    pub(crate) fn direct(&self) -> Option<&WeightsLocation> {
        match self {
            Self::Host(..) | Self::Taken(..) => None,
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
