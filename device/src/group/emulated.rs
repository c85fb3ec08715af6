//! Groups of emulated devices in one process, one thread per device, which rendezvous at every call.
//!
//! Invariant: a sum is a balanced binary tree over the ranks, as it is on hosts.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::waiting::{GroupWait, POLL};
use super::{GroupBackend, GroupTimeout, MemoryRange, failed};
use crate::device::Device;
use crate::error::Result;

/// Groups of this process, by id.
static RENDEZVOUS: Mutex<BTreeMap<Vec<u8>, Weak<GroupRendezvous>>> = Mutex::new(BTreeMap::new());
/// Number of ids created.
static MADE: AtomicU64 = AtomicU64::new(0);

/// A member of a group.
#[derive(Debug)]
pub(super) struct EmulatedMember {
    device: Device,
    rank: usize,
    timeout: GroupTimeout,
    rendezvous: Arc<GroupRendezvous>,
    /// Number of calls so far; all members number their calls alike.
    calls: AtomicU64,
}

/// Shared state of a group.
#[derive(Debug)]
struct GroupRendezvous {
    state: Mutex<GroupRendezvousState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GroupRendezvousState {
    /// Ranks that have joined.
    joined: Vec<bool>,
    /// Ranks that have left.
    left_group: Vec<bool>,
    /// Calls in progress, by number.
    pending: BTreeMap<u64, EmulatedCall>,
}

/// One collective call of all members.
#[derive(Debug)]
struct EmulatedCall {
    /// Description of the call, and the first rank that made it.
    call: (String, usize),
    /// Contribution of each member.
    given: Vec<Option<Arc<[u8]>>>,
    /// Number of members that took the result.
    taken: usize,
}

/// A unique group id.
pub(super) fn new_id() -> String {
    format!("{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed))
}

impl EmulatedMember {
    pub(super) fn join(
        device: &Device,
        id: &[u8],
        rank: usize,
        world: usize,
        timeout: GroupTimeout,
    ) -> Result<Self> {
        let rendezvous = {
            let mut all = RENDEZVOUS.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|_, rendezvous| rendezvous.strong_count() > 0);
            let known = all.get(id).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let rendezvous = Arc::new(GroupRendezvous::new(world));
                all.insert(id.to_vec(), Arc::downgrade(&rendezvous));
                rendezvous
            })
        };
        let refused = |reason: String| failed(device, "join", Duration::ZERO, reason);
        let mut state = rendezvous.state();
        if state.joined.len() != world {
            return Err(refused(format!(
                "another rank joined with world size {}, this one with {world}",
                state.joined.len()
            )));
        }
        if std::mem::replace(&mut state.joined[rank], true) {
            return Err(refused(format!("rank {rank} has joined already")));
        }
        drop(state);
        let (device, calls) = (device.clone(), AtomicU64::new(0));
        // From here on, dropping the member leaves the group.
        let member = Self { device, rank, timeout, rendezvous: Arc::clone(&rendezvous), calls };
        rendezvous.changed.notify_all();
        member.until("join", |state| {
            let missing = state.joined.iter().position(|joined| !joined);
            missing.map_or(Ok(()), Err)
        })?;
        Ok(member)
    }

    /// Contributions of all members to the same call, in order of rank.
    fn exchange(&self, operation: &'static str, what: &str, own: Arc<[u8]>) -> Result<Vec<Arc<[u8]>>> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let call = format!("{operation}{what}");
        let mut state = self.rendezvous.state();
        let world = state.joined.len();
        let pending_call = state.pending.entry(number).or_insert_with(|| EmulatedCall {
            call: (call.clone(), self.rank),
            given: vec![None; world],
            taken: 0,
        });
        if pending_call.call.0 != call {
            let (said, by) = &pending_call.call;
            let reason = format!("rank {by} calls {said} where rank {} calls {call}", self.rank);
            return Err(failed(&self.device, operation, Duration::ZERO, reason));
        }
        pending_call.given[self.rank] = Some(own);
        drop(state);
        self.rendezvous.changed.notify_all();
        self.until(operation, |state| {
            let given = state.pending.get(&number).map_or(&[][..], |pending_call| &pending_call.given[..]);
            let missing = given.iter().position(Option::is_none);
            missing.map_or(Ok(()), Err)
        })?;
        let mut state = self.rendezvous.state();
        let Some(pending_call) = state.pending.get_mut(&number) else { return Ok(Vec::new()) };
        let given = pending_call.given.iter().flatten().cloned().collect();
        pending_call.taken += 1;
        if pending_call.taken == world {
            state.pending.remove(&number);
        }
        Ok(given)
    }

    /// Waits until no rank is missing; an error at the deadline, or if a missing rank has left.
    fn until(
        &self,
        operation: &'static str,
        missing: impl Fn(&GroupRendezvousState) -> std::result::Result<(), usize>,
    ) -> Result<()> {
        let mut waiting = GroupWait::begin(&self.timeout);
        let mut state = self.rendezvous.state();
        loop {
            let Err(rank) = missing(&state) else { return Ok(()) };
            let waited = waiting.started.elapsed();
            if state.left_group[rank] {
                return Err(failed(&self.device, operation, waited, format!("rank {rank} has left")));
            }
            if let Some(reason) = waiting.over(|| format!("rank {rank} did not join the call in time")) {
                return Err(failed(&self.device, operation, waited, reason));
            }
            let left = self.timeout.deadline.saturating_sub(waited).min(POLL);
            let woken = self.rendezvous.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn leave(&self) {
        self.rendezvous.state().left_group[self.rank] = true;
        self.rendezvous.changed.notify_all();
    }

    fn read(&self, part: MemoryRange) -> Result<Arc<[u8]>> {
        let mut bytes = vec![0; part.bytes];
        if part.bytes > 0 {
            self.device.inner.backend.download(part.address, &mut bytes)?;
        }
        Ok(bytes.into())
    }

    fn write(&self, bytes: &[u8], to: MemoryRange) -> Result<()> {
        if bytes.len() != to.bytes {
            let reason = format!("a rank passed {} bytes and not {}", bytes.len(), to.bytes);
            return Err(failed(&self.device, "a collective", Duration::ZERO, reason));
        }
        if bytes.is_empty() { Ok(()) } else { self.device.inner.backend.upload(bytes, to.address) }
    }
}

impl GroupRendezvous {
    fn new(world: usize) -> Self {
        let (joined, left_group) = (vec![false; world], vec![false; world]);
        let state = Mutex::new(GroupRendezvousState { joined, left_group, pending: BTreeMap::new() });
        Self { state, changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, GroupRendezvousState> {
        // Each change of the state is complete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GroupBackend for EmulatedMember {
    fn broadcast(&self, root: usize, part: MemoryRange) -> Result<()> {
        let own = if self.rank == root { self.read(part)? } else { Arc::default() };
        let given = self.exchange("broadcast", &format!(" of {} bytes by {root}", part.bytes), own)?;
        if self.rank == root { Ok(()) } else { self.write(&given[root], part) }
    }

    fn all_gather(&self, own: MemoryRange, cuts: &[Range<usize>], all: MemoryRange) -> Result<()> {
        let given = self.exchange("all_gather", &format!(" to {cuts:?}"), self.read(own)?)?;
        given.iter().zip(cuts).try_for_each(|(given, cut)| self.write(given, all.slice(cut)))
    }

    fn reduce_scatter(&self, values: MemoryRange, cuts: &[Range<usize>], own: MemoryRange) -> Result<()> {
        let given = self.exchange("reduce_scatter", &format!(" to {cuts:?}"), self.read(values)?)?;
        let cut = &cuts[self.rank];
        let floats = |bytes: &[u8]| -> Vec<f32> {
            bytes.chunks_exact(size_of::<f32>()).map(bytemuck::pod_read_unaligned).collect()
        };
        let members: Vec<Vec<f32>> = given.iter().map(|given| floats(&given[cut.clone()])).collect();
        self.write(bytemuck::cast_slice(&tree(&members)), own)
    }

    fn all_to_all(
        &self,
        values: MemoryRange,
        sends: &[Range<usize>],
        received: MemoryRange,
        receives: &[Range<usize>],
    ) -> Result<()> {
        // The ranges precede the bytes: two numbers for every member.
        let ranges = sends.iter().flat_map(|range| [range.start as u64, range.end as u64]);
        let mut message: Vec<u8> = ranges.flat_map(u64::to_le_bytes).collect();
        let header = message.len();
        message.extend_from_slice(&self.read(values)?);
        let given = self.exchange("all_to_all", "", message.into())?;
        for (given, to) in given.iter().zip(receives) {
            let number = |at: usize| {
                let bytes = given[8 * at..][..8].try_into().unwrap_or_default();
                usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX)
            };
            let sent = header + number(2 * self.rank)..header + number(2 * self.rank + 1);
            self.write(&given[sent], received.slice(to))?;
        }
        Ok(())
    }

    fn wait(&self, _operation: &'static str) -> Result<()> {
        // Calls complete before they return.
        self.device.synchronize()
    }

    fn abort(&self) {
        self.leave();
    }
}

/// The sum of the values of some members, `[members][n]`, as a tree whose left part is the largest power of two.
fn tree(members: &[Vec<f32>]) -> Vec<f32> {
    match members {
        [] => Vec::new(),
        [one] => one.clone(),
        _ => {
            let (left, right) = members.split_at(members.len().next_power_of_two() / 2);
            tree(left).iter().zip(tree(right)).map(|(left, right)| left + right).collect()
        }
    }
}

impl Drop for EmulatedMember {
    fn drop(&mut self) {
        self.leave();
    }
}
