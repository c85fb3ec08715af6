//! Leases and groups in flight that are held until their holder says otherwise: a thread extends them.
//!
//! Invariant: what is acknowledged, released, finalized or aborted is not extended any more, and what the server calls lost
//! is left alone; its holder hears of it when it is done with it. The thread ends with its client, and what that held comes
//! back to the others when its hold is over.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use trajectory::{GroupId, PolicyVersion};

use super::call::Core;
use super::{Done, claim, extension};
use crate::{BufferError, Lease, LeaseId};

/// See the module.
pub(super) struct Renewals {
    /// For how long something is held at a time: a holder that is gone is missed after so long.
    hold: Duration,
    shared: Arc<Shared>,
    /// `None` only while it is being dropped.
    thread: Option<JoinHandle<()>>,
}

/// Leases to be extended, and groups to be claimed again.
type Due = (Vec<LeaseId>, Vec<(GroupId, PolicyVersion)>);

#[derive(Default)]
struct Shared {
    held: Mutex<Held>,
    /// There is something to hold, or the end.
    changed: Condvar,
}

#[derive(Default)]
struct Held {
    leases: BTreeMap<LeaseId, (String, PolicyVersion)>,
    /// Claimed groups with the version that they were claimed for.
    groups: BTreeMap<GroupId, PolicyVersion>,
    ended: bool,
}

impl Renewals {
    pub(super) fn start(core: Arc<Core>, hold: Duration) -> Result<Self, BufferError> {
        let shared = Arc::new(Shared::default());
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
        self.shared.held().leases.insert(lease.id, (lease.consumer.clone(), lease.step));
        self.shared.changed.notify_one();
    }

    pub(super) fn remove(&self, lease: LeaseId) {
        self.shared.held().leases.remove(&lease);
    }

    pub(super) fn add_group(&self, group: GroupId, served: PolicyVersion) {
        self.shared.held().groups.insert(group, served);
        self.shared.changed.notify_one();
    }

    pub(super) fn remove_group(&self, group: GroupId) {
        self.shared.held().groups.remove(&group);
    }

    pub(super) fn remove_through(&self, consumer: &str, through: PolicyVersion) {
        self.shared.held().leases.retain(|_, (whose, step)| whose != consumer || *step >= through);
    }
}

impl Shared {
    /// Usable after a panic: every change of it is complete.
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `until`, or while nothing is held; what is held, or `None` at the end.
    fn due(&self, until: Instant) -> Option<Due> {
        let mut held = self.held();
        loop {
            if held.ended {
                return None;
            }
            let left = until.saturating_duration_since(Instant::now());
            if held.leases.is_empty() && held.groups.is_empty() {
                held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
            } else if left.is_zero() {
                let groups = held.groups.iter().map(|(group, served)| (*group, *served));
                return Some((held.leases.keys().copied().collect(), groups.collect()));
            } else {
                held = self.changed.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

fn renew(core: &Core, shared: &Shared, hold: Duration) {
    // Two in a row may fail.
    let every = hold / 3;
    let mut until = Instant::now() + every;
    while let Some((leases, groups)) = shared.due(until) {
        until = Instant::now() + every;
        // What fails otherwise is tried again the next time, well before the hold is over.
        for lease in leases {
            let once = extension(lease, hold).and_then(|call| core.ask_once::<Done>(&call, every));
            if let Err(BufferError::LeaseLost { .. } | BufferError::UnknownLease { .. }) = once {
                shared.held().leases.remove(&lease);
            }
        }
        for (group, served) in groups {
            let once = claim(group, served).and_then(|call| core.ask_once::<Done>(&call, every));
            if let Err(BufferError::WrongState { .. }) = once {
                shared.held().groups.remove(&group);
            }
        }
    }
}

impl Drop for Renewals {
    fn drop(&mut self) {
        self.shared.held().ended = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of it was printed.
            drop(thread.join());
        }
    }
}

impl fmt::Debug for Renewals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.shared.held();
        f.debug_struct("Renewals")
            .field("leases", &held.leases.keys())
            .field("groups", &held.groups.keys())
            .finish_non_exhaustive()
    }
}
