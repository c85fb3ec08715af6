//! Emulated devices of one process, each driven by a thread of its own, that meet at every call.
//!
//! Invariant: a sum is one chain in order of rank.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::waiting::{LOOK_UP, Waiting};
use super::{Members, Part, Patience, failed};
use crate::device::Device;
use crate::error::Result;

/// The groups of this process.
static MEETINGS: Mutex<BTreeMap<Vec<u8>, Weak<Meeting>>> = Mutex::new(BTreeMap::new());
/// Identifiers made so far.
static MADE: AtomicU64 = AtomicU64::new(0);

/// A member of a group.
#[derive(Debug)]
pub(super) struct Member {
    device: Device,
    rank: usize,
    patience: Patience,
    meeting: Arc<Meeting>,
    /// Calls made so far, which are numbered alike by all.
    calls: AtomicU64,
}

/// Where the members of a group meet.
#[derive(Debug)]
struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Who has come, by rank.
    come: Vec<bool>,
    /// Who has left.
    gone: Vec<bool>,
    /// Calls that not all have made and taken the result of, by number.
    rounds: BTreeMap<u64, Round>,
}

/// One call of all members.
#[derive(Debug)]
struct Round {
    /// What it is, and by whom it was said first.
    call: (String, usize),
    /// What each member brought.
    given: Vec<Option<Arc<[u8]>>>,
    /// Who has all of it.
    taken: usize,
}

/// A name that no other group has.
pub(super) fn new_id() -> String {
    format!("{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed))
}

impl Member {
    pub(super) fn join(
        device: &Device,
        id: &[u8],
        (rank, world): (usize, usize),
        patience: Patience,
    ) -> Result<Self> {
        let meeting = {
            let mut meetings = MEETINGS.lock().unwrap_or_else(PoisonError::into_inner);
            meetings.retain(|_, meeting| meeting.strong_count() > 0);
            let known = meetings.get(id).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let meeting = Arc::new(Meeting::new(world));
                meetings.insert(id.to_vec(), Arc::downgrade(&meeting));
                meeting
            })
        };
        let refused = |reason: String| failed(device, "join", Duration::ZERO, reason);
        let mut state = meeting.state();
        if state.come.len() != world {
            return Err(refused(format!(
                "another member was told of {} and not of {world}",
                state.come.len()
            )));
        }
        if std::mem::replace(&mut state.come[rank], true) {
            return Err(refused(format!("there is another member {rank}")));
        }
        drop(state);
        let (device, calls) = (device.clone(), AtomicU64::new(0));
        // From here on it leaves when it is dropped.
        let member = Self { device, rank, patience, meeting: Arc::clone(&meeting), calls };
        meeting.changed.notify_all();
        member.until("join", |state| {
            let missing = state.come.iter().position(|come| !come);
            missing.map_or(Ok(()), Err)
        })?;
        Ok(member)
    }

    /// What all members bring to the same call, in order of rank.
    fn meet(&self, operation: &'static str, what: &str, own: Arc<[u8]>) -> Result<Vec<Arc<[u8]>>> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let call = format!("{operation}{what}");
        let mut state = self.meeting.state();
        let world = state.come.len();
        let round = state.rounds.entry(number).or_insert_with(|| Round {
            call: (call.clone(), self.rank),
            given: vec![None; world],
            taken: 0,
        });
        if round.call.0 != call {
            let (said, by) = &round.call;
            let reason = format!("member {by} calls {said} where member {} calls {call}", self.rank);
            return Err(failed(&self.device, operation, Duration::ZERO, reason));
        }
        round.given[self.rank] = Some(own);
        drop(state);
        self.meeting.changed.notify_all();
        self.until(operation, |state| {
            let given = state.rounds.get(&number).map_or(&[][..], |round| &round.given[..]);
            let missing = given.iter().position(Option::is_none);
            missing.map_or(Ok(()), Err)
        })?;
        let mut state = self.meeting.state();
        let Some(round) = state.rounds.get_mut(&number) else { return Ok(Vec::new()) };
        let given = round.given.iter().flatten().cloned().collect();
        round.taken += 1;
        if round.taken == world {
            state.rounds.remove(&number);
        }
        Ok(given)
    }

    /// Waits until nobody is missing, as long as the patience lasts, and no longer than all who are missing are there.
    fn until(
        &self,
        operation: &'static str,
        missing: impl Fn(&State) -> std::result::Result<(), usize>,
    ) -> Result<()> {
        let mut waiting = Waiting::begin(&self.patience);
        let mut state = self.meeting.state();
        loop {
            let Err(rank) = missing(&state) else { return Ok(()) };
            let waited = waiting.started.elapsed();
            if state.gone[rank] {
                return Err(failed(&self.device, operation, waited, format!("member {rank} is gone")));
            }
            if let Some(reason) = waiting.over(|| format!("member {rank} did not come")) {
                return Err(failed(&self.device, operation, waited, reason));
            }
            let left = self.patience.deadline.saturating_sub(waited).min(LOOK_UP);
            let woken = self.meeting.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn leave(&self) {
        self.meeting.state().gone[self.rank] = true;
        self.meeting.changed.notify_all();
    }

    fn read(&self, part: Part) -> Result<Arc<[u8]>> {
        let mut bytes = vec![0; part.bytes];
        if part.bytes > 0 {
            self.device.inner.backend.download(part.address, &mut bytes)?;
        }
        Ok(bytes.into())
    }

    fn write(&self, bytes: &[u8], to: Part) -> Result<()> {
        if bytes.len() != to.bytes {
            let reason = format!("a member brought {} bytes and not {}", bytes.len(), to.bytes);
            return Err(failed(&self.device, "a collective", Duration::ZERO, reason));
        }
        if bytes.is_empty() { Ok(()) } else { self.device.inner.backend.upload(bytes, to.address) }
    }
}

impl Meeting {
    fn new(world: usize) -> Self {
        let (come, gone) = (vec![false; world], vec![false; world]);
        let state = Mutex::new(State { come, gone, rounds: BTreeMap::new() });
        Self { state, changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Members for Member {
    fn broadcast(&self, root: usize, part: Part) -> Result<()> {
        let own = if self.rank == root { self.read(part)? } else { Arc::default() };
        let given = self.meet("broadcast", &format!(" of {} bytes by {root}", part.bytes), own)?;
        if self.rank == root { Ok(()) } else { self.write(&given[root], part) }
    }

    fn all_gather(&self, own: Part, cuts: &[Range<usize>], all: Part) -> Result<()> {
        let given = self.meet("all_gather", &format!(" to {cuts:?}"), self.read(own)?)?;
        given.iter().zip(cuts).try_for_each(|(given, cut)| self.write(given, all.slice(cut)))
    }

    fn reduce_scatter(&self, values: Part, cuts: &[Range<usize>], own: Part) -> Result<()> {
        let given = self.meet("reduce_scatter", &format!(" to {cuts:?}"), self.read(values)?)?;
        let cut = &cuts[self.rank];
        let mut sums = vec![0.0_f32; cut.len() / size_of::<f32>()];
        for (rank, given) in given.iter().enumerate() {
            let given = given[cut.clone()].chunks_exact(size_of::<f32>()).map(bytemuck::pod_read_unaligned);
            for (sum, value) in sums.iter_mut().zip(given) {
                *sum = if rank == 0 { value } else { *sum + value };
            }
        }
        self.write(bytemuck::cast_slice(&sums), own)
    }

    fn wait(&self, _operation: &'static str) -> Result<()> {
        // Every call has waited.
        self.device.synchronize()
    }

    fn abort(&self) {
        self.leave();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}
