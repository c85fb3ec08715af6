//! One device that two roles use in turns.
//!
//! Invariant: at most one role has the device. It changes hands when its holder passes it on or leaves for good, and no
//! other way; whoever waits for it has a deadline, and its error names the other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a role waits before it looks whether it should stop.
const LOOK_UP: Duration = Duration::from_millis(20);

/// The place of one of the two roles at the device. Who drops it leaves the device to the other.
#[derive(Debug)]
pub struct Seat {
    table: Arc<Table>,
    mine: usize,
}

/// What both seats share.
#[derive(Debug)]
struct Table {
    names: [&'static str; 2],
    release: fn(),
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    holder: usize,
    waits: [bool; 2],
    gone: [bool; 2],
}

/// A role has waited too long for the other.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "{who} waited {seconds:.0} s for its turn on the device, which {whom} has and does not pass on \
     (placement.policy = \"colocated\"); raise deadlines.wait_s if that is expected"
)]
pub struct TurnTimeout {
    /// Who waited.
    pub who: &'static str,
    /// Who has the device.
    pub whom: &'static str,
    /// How long, seconds.
    pub seconds: f64,
}

/// The seats of two roles at one device, which the first has. `release` makes the allocator give back to the system what its
/// caller has freed; it is called before the device is passed on.
#[must_use]
pub fn turns(first: &'static str, second: &'static str, release: fn()) -> [Seat; 2] {
    let (state, changed) = (Mutex::default(), Condvar::new());
    let table = Arc::new(Table { names: [first, second], release, state, changed });
    [0, 1].map(|mine| Seat { table: Arc::clone(&table), mine })
}

impl Seat {
    /// Whether it is this role's turn.
    #[must_use]
    pub fn is_mine(&self) -> bool {
        self.state().holder == self.mine
    }

    /// Whether the other role waits for the device.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.state().waits[self.other()]
    }

    /// Gives the device to the other role, if this one has it and the other has not left.
    pub fn pass(&self) {
        self.release();
        let mut state = self.state();
        if state.holder == self.mine && !state.gone[self.other()] {
            state.holder = self.other();
            self.table.changed.notify_all();
        }
    }

    /// Gives back to the system what the calling thread has freed.
    pub fn release(&self) {
        (self.table.release)();
    }

    /// Waits for this role's turn; false if `stop` was set before.
    ///
    /// # Errors
    /// If the other role does not pass the device on within `wait`.
    pub fn take(&self, wait: Duration, stop: &AtomicBool) -> Result<bool, TurnTimeout> {
        let started = Instant::now();
        let mut state = self.state();
        state.waits[self.mine] = true;
        let taken = loop {
            if stop.load(Ordering::Relaxed) {
                break Ok(false);
            }
            if state.holder == self.mine {
                break Ok(true);
            }
            let waited = started.elapsed();
            if waited >= wait {
                let [who, whom] = [self.mine, self.other()].map(|role| self.table.names[role]);
                break Err(TurnTimeout { who, whom, seconds: waited.as_secs_f64() });
            }
            let next = self.table.changed.wait_timeout(state, LOOK_UP.min(wait.saturating_sub(waited)));
            state = next.unwrap_or_else(PoisonError::into_inner).0;
        };
        state.waits[self.mine] = false;
        taken
    }

    fn other(&self) -> usize {
        1 - self.mine
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A state is a few flags, each change of which is whole.
        self.table.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let other = self.other();
        let mut state = self.state();
        state.gone[self.mine] = true;
        state.holder = other;
        self.table.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    #[test]
    fn only_one_has_the_device_and_both_come_to_it() {
        let (inside, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let turn = |seat: Seat| {
            for _ in 0..200 {
                assert!(seat.take(SOON, &stop).unwrap());
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "the other is at the device");
                assert!(seat.is_mine());
                inside.fetch_sub(1, Ordering::SeqCst);
                seat.pass();
            }
        };
        std::thread::scope(|scope| {
            turns("a", "b", || ()).map(|seat| scope.spawn(|| turn(seat))).into_iter().for_each(|one| {
                one.join().unwrap();
            });
        });
    }

    #[test]
    fn who_waits_is_seen_and_has_a_deadline_with_names() {
        let [first, second] = turns("the trainer", "a sampler", || ());
        let stop = AtomicBool::new(false);
        assert!(first.is_mine() && !first.is_wanted());
        let error = second.take(Duration::from_millis(30), &stop).unwrap_err();
        assert!(error.to_string().starts_with("a sampler waited 0 s for its turn"), "{error}");
        assert!(error.to_string().contains("which the trainer has"), "{error}");
        assert!(!first.is_wanted(), "it waits no more");
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
    fn a_stop_ends_the_wait_and_who_leaves_gives_the_device_away() {
        let [first, second] = turns("a", "b", || ());
        assert_eq!(second.take(SOON, &AtomicBool::new(true)), Ok(false));
        drop(first);
        assert_eq!(second.take(SOON, &AtomicBool::new(false)), Ok(true));
        second.pass();
        assert!(second.is_mine(), "nobody is there to have it");
    }
}
