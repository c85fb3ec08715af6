//! Leases that are held until their consumer says otherwise: a thread extends them.
//!
//! Invariant: what is acknowledged or released is not extended any more, and a lease that the server calls lost is left
//! alone; its consumer hears of it when it acknowledges. The thread ends with its client.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use trajectory::PolicyVersion;

use super::call::Core;
use super::extension;
use crate::{BufferError, Lease, LeaseId};

/// See the module.
pub(super) struct Renewals {
    shared: Arc<Shared>,
    /// `None` only while it is being dropped.
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    held: Mutex<Held>,
    /// There is a first lease, or the end.
    changed: Condvar,
}

#[derive(Default)]
struct Held {
    leases: BTreeMap<LeaseId, (String, PolicyVersion)>,
    ended: bool,
}

impl Renewals {
    /// For how long a lease is held at a time: a consumer that is gone is missed after so long.
    pub(super) const HOLD: Duration = Duration::from_secs(60);
    /// Two in a row may fail.
    const EVERY: Duration = Duration::from_secs(20);

    pub(super) fn start(core: Arc<Core>) -> Result<Self, BufferError> {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let url = core.url().to_owned();
        let thread = std::thread::Builder::new()
            .name("lease-renewals".to_owned())
            .spawn(move || renew(&core, &theirs))
            .map_err(|error| BufferError::Client {
                url,
                reason: format!("no thread can be started: {error}"),
            })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(super) fn add(&self, lease: &Lease) {
        self.shared.held().leases.insert(lease.id, (lease.consumer.clone(), lease.step));
        self.shared.changed.notify_one();
    }

    pub(super) fn remove(&self, lease: LeaseId) {
        self.shared.held().leases.remove(&lease);
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

    /// Waits until `until`, or while there is no lease; the leases there are, or `None` at the end.
    fn due(&self, until: Instant) -> Option<Vec<LeaseId>> {
        let mut held = self.held();
        loop {
            if held.ended {
                return None;
            }
            let left = until.saturating_duration_since(Instant::now());
            if held.leases.is_empty() {
                held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
            } else if left.is_zero() {
                return Some(held.leases.keys().copied().collect());
            } else {
                held = self.changed.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

fn renew(core: &Core, shared: &Shared) {
    let mut until = Instant::now() + Renewals::EVERY;
    while let Some(leases) = shared.due(until) {
        until = Instant::now() + Renewals::EVERY;
        for lease in leases {
            // What fails otherwise is tried again the next time, well before the hold is over.
            let once =
                extension(lease, Renewals::HOLD).and_then(|call| core.ask_once(&call, Renewals::EVERY));
            if let Err(BufferError::LeaseLost { .. } | BufferError::UnknownLease { .. }) = once {
                shared.held().leases.remove(&lease);
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
        f.debug_list().entries(self.shared.held().leases.keys()).finish()
    }
}
