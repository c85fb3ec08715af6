//! Heartbeats: a thread that extends leases and repeats claims.
//!
//! Invariant: acknowledged, released, finalized and aborted items are not renewed any more. An item that the server
//! reports as lost is dropped, and the next call about it gets the error. The thread ends with its client; then the
//! items expire.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use trajectory::{GroupId, PolicyVersion};

use super::call::ClientCore;
use super::{EmptyAnswer, claim, extension};
use crate::{BufferError, Lease, LeaseId};

/// The heartbeats of a client.
pub(super) struct LeaseRenewal {
    /// Hold of every item: a client that ended is detected after this time.
    hold: Duration,
    shared: Arc<RenewalShared>,
    /// `None` only during drop.
    thread: Option<JoinHandle<()>>,
}

/// Leases to extend, and groups to claim again.
struct DueRenewals {
    leases: Vec<LeaseId>,
    /// With their served version.
    groups: Vec<(GroupId, PolicyVersion)>,
}

#[derive(Default)]
struct RenewalShared {
    renewed: Mutex<RenewedHolds>,
    /// Signalled when an item was added, and at the end.
    changed: Condvar,
}

#[derive(Default)]
struct RenewedHolds {
    leases: BTreeMap<LeaseId, (String, PolicyVersion)>,
    /// Claimed groups with their served version.
    groups: BTreeMap<GroupId, PolicyVersion>,
    ended: bool,
}

impl LeaseRenewal {
    pub(super) fn start(core: Arc<ClientCore>, hold: Duration) -> Result<Self, BufferError> {
        let shared = Arc::new(RenewalShared::default());
        let theirs = Arc::clone(&shared);
        let url = core.url().to_owned();
        let thread = std::thread::Builder::new()
            .name("renewals".to_owned())
            .spawn(move || renew(&core, &theirs, hold))
            .map_err(|error| BufferError::Client {
                url,
                reason: format!("no thread can be started: {error}"),
            })?;
        Ok(Self { hold, shared, thread: Some(thread) })
    }

    pub(super) fn hold(&self) -> Duration {
        self.hold
    }

    pub(super) fn add(&self, lease: &Lease) {
        self.shared.renewed().leases.insert(lease.id, (lease.consumer.clone(), lease.step));
        self.shared.changed.notify_one();
    }

    pub(super) fn remove(&self, lease: LeaseId) {
        self.shared.renewed().leases.remove(&lease);
    }

    pub(super) fn add_group(&self, group: GroupId, served: PolicyVersion) {
        self.shared.renewed().groups.insert(group, served);
        self.shared.changed.notify_one();
    }

    pub(super) fn remove_group(&self, group: GroupId) {
        self.shared.renewed().groups.remove(&group);
    }

    pub(super) fn remove_through(&self, consumer: &str, through: PolicyVersion) {
        self.shared.renewed().leases.retain(|_, (whose, step)| whose != consumer || *step >= through);
    }
}

impl RenewalShared {
    /// Ignores poisoning: every change is complete.
    fn renewed(&self) -> MutexGuard<'_, RenewedHolds> {
        self.renewed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `until`, or longer while there is no item. Returns all items; `None` at the end.
    fn due(&self, until: Instant) -> Option<DueRenewals> {
        let mut renewed = self.renewed();
        loop {
            if renewed.ended {
                return None;
            }
            let left = until.saturating_duration_since(Instant::now());
            if renewed.leases.is_empty() && renewed.groups.is_empty() {
                renewed = self.changed.wait(renewed).unwrap_or_else(PoisonError::into_inner);
            } else if left.is_zero() {
                let groups = renewed.groups.iter().map(|(group, served)| (*group, *served)).collect();
                return Some(DueRenewals { leases: renewed.leases.keys().copied().collect(), groups });
            } else {
                renewed = self.changed.wait_timeout(renewed, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

fn renew(core: &ClientCore, shared: &RenewalShared, hold: Duration) {
    // Two consecutive heartbeats may fail.
    let every = hold / 3;
    let mut until = Instant::now() + every;
    while let Some(DueRenewals { leases, groups }) = shared.due(until) {
        until = Instant::now() + every;
        // Other failures are retried at the next heartbeat, before the hold expires.
        for lease in leases {
            let once = extension(lease, hold).and_then(|call| core.ask_once::<EmptyAnswer>(&call, every));
            if let Err(BufferError::LeaseLost { .. } | BufferError::UnknownLease { .. }) = once {
                shared.renewed().leases.remove(&lease);
            }
        }
        for (group, served) in groups {
            let once = claim(group, served).and_then(|call| core.ask_once::<EmptyAnswer>(&call, every));
            if let Err(BufferError::WrongState { .. }) = once {
                shared.renewed().groups.remove(&group);
            }
        }
    }
}

impl Drop for LeaseRenewal {
    fn drop(&mut self) {
        self.shared.renewed().ended = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // Its panic was already printed.
            drop(thread.join());
        }
    }
}

impl fmt::Debug for LeaseRenewal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let renewed = self.shared.renewed();
        f.debug_struct("LeaseRenewal")
            .field("leases", &renewed.leases.keys())
            .field("groups", &renewed.groups.keys())
            .finish_non_exhaustive()
    }
}
