//! Time-sharing of one device by two roles: colocated placement.
//!
//! Invariant: at most one role owns the device. Ownership moves to the other role when the owner passes it on or its
//! [`DeviceTurn`] is dropped. A wait has a deadline, and its error names the owner.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Interval at which a waiting role polls its stop flag.
const POLL: Duration = Duration::from_millis(20);

/// One role's handle on the shared device. Dropping it leaves the device to the other role.
#[derive(Debug)]
pub struct DeviceTurn {
    shared: Arc<SharedTurns>,
    /// Number of this role, 0 or 1.
    role: usize,
}

/// State that both roles share.
#[derive(Debug)]
struct SharedTurns {
    names: [&'static str; 2],
    release: fn(),
    state: Mutex<TurnState>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct TurnState {
    owner: usize,
    waiting: [bool; 2],
    dropped: [bool; 2],
}

/// A role waited past its deadline for the device.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "{who} waited {seconds:.0} s for its turn on the device, which {whom} has and does not pass on \
     (placement.policy = \"colocated\"); raise deadlines.wait_s if that is expected"
)]
pub struct TurnTimeout {
    /// The role that waited.
    pub who: &'static str,
    /// The role that owns the device.
    pub whom: &'static str,
    /// Time waited, seconds.
    pub seconds: f64,
}

/// Handles for two roles that time-share one device; the first role owns it. `release` makes the allocator return freed
/// memory to the system; it is called before the device is passed on.
#[must_use]
pub fn share_device(first: &'static str, second: &'static str, release: fn()) -> [DeviceTurn; 2] {
    let (state, changed) = (Mutex::default(), Condvar::new());
    let shared = Arc::new(SharedTurns { names: [first, second], release, state, changed });
    [0, 1].map(|role| DeviceTurn { shared: Arc::clone(&shared), role })
}

impl DeviceTurn {
    /// Whether this role owns the device.
    #[must_use]
    pub fn is_mine(&self) -> bool {
        self.state().owner == self.role
    }

    /// Whether the other role waits for the device.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.state().waiting[self.other()]
    }

    /// Gives the device to the other role, if this one owns it and the other's handle is not dropped.
    pub fn pass(&self) {
        self.release();
        let mut state = self.state();
        if state.owner == self.role && !state.dropped[self.other()] {
            state.owner = self.other();
            self.shared.changed.notify_all();
        }
    }

    /// Returns memory that the calling thread has freed to the system.
    pub fn release(&self) {
        (self.shared.release)();
    }

    /// Waits until this role owns the device; false if `stop` is set first.
    ///
    /// # Errors
    /// If the other role does not pass the device on within `wait`.
    pub fn take(&self, wait: Duration, stop: &AtomicBool) -> Result<bool, TurnTimeout> {
        let started = Instant::now();
        let mut state = self.state();
        state.waiting[self.role] = true;
        let taken = loop {
            if stop.load(Ordering::Relaxed) {
                break Ok(false);
            }
            if state.owner == self.role {
                break Ok(true);
            }
            let waited = started.elapsed();
            if waited >= wait {
                let [who, whom] = [self.role, self.other()].map(|role| self.shared.names[role]);
                break Err(TurnTimeout { who, whom, seconds: waited.as_secs_f64() });
            }
            let next = self.shared.changed.wait_timeout(state, POLL.min(wait.saturating_sub(waited)));
            state = next.unwrap_or_else(PoisonError::into_inner).0;
        };
        state.waiting[self.role] = false;
        taken
    }

    fn other(&self) -> usize {
        1 - self.role
    }

    fn state(&self) -> MutexGuard<'_, TurnState> {
        // A panic cannot leave the flags half-changed, so a poisoned lock is usable.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for DeviceTurn {
    fn drop(&mut self) {
        let other = self.other();
        let mut state = self.state();
        state.dropped[self.role] = true;
        state.owner = other;
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    #[test]
    fn one_role_owns_the_device_at_a_time_and_both_get_it() {
        let (inside, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let turn = |turn: DeviceTurn| {
            for _ in 0..200 {
                assert!(turn.take(SOON, &stop).unwrap());
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "the other role owns the device");
                assert!(turn.is_mine());
                inside.fetch_sub(1, Ordering::SeqCst);
                turn.pass();
            }
        };
        std::thread::scope(|scope| {
            share_device("a", "b", || ()).map(|handle| scope.spawn(|| turn(handle))).into_iter().for_each(
                |one| {
                    one.join().unwrap();
                },
            );
        });
    }

    #[test]
    fn a_waiting_role_is_visible_and_its_deadline_names_the_owner() {
        let [first, second] = share_device("the trainer", "a sampler", || ());
        let stop = AtomicBool::new(false);
        assert!(first.is_mine() && !first.is_wanted());
        let error = second.take(Duration::from_millis(30), &stop).unwrap_err();
        assert!(error.to_string().starts_with("a sampler waited 0 s for its turn"), "{error}");
        assert!(error.to_string().contains("which the trainer has"), "{error}");
        assert!(!first.is_wanted(), "it has stopped waiting");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| second.take(SOON, &stop));
            while !first.is_wanted() {
                std::thread::yield_now();
            }
            first.pass();
            assert_eq!(waits.join().unwrap(), Ok(true));
        });
    }

    #[test]
    fn stop_ends_the_wait_and_a_dropped_handle_frees_the_device() {
        let [first, second] = share_device("a", "b", || ());
        assert_eq!(second.take(SOON, &AtomicBool::new(true)), Ok(false));
        drop(first);
        assert_eq!(second.take(SOON, &AtomicBool::new(false)), Ok(true));
        second.pass();
        assert!(second.is_mine(), "the other handle is dropped");
    }
}
