//! Ranks that are threads of one process: every rank reads directly from the slices of the others.
//!
//! In a call every rank lends its slice. When the last rank has made the call all ranks read; when the last one has read
//! all return.
//!
//! Invariant: a slice is read only between the time when all ranks have lent theirs and the time when all have read. In
//! between no rank returns from its call, neither by an error nor by a panic. A rank that waits for others to make the call
//! can return, because no rank reads yet.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::call::{CollectiveCall, Sides};
use crate::sum::sum_as_tree;
use crate::{
    Collective, CollectiveError, HostCollective, Position, all_reduce_on_host, among, even_shards, members,
};

/// One rank. Dropping it ends the calls of the others with an error.
#[derive(Debug)]
pub struct Threads {
    rank: usize,
    world: usize,
    /// Locked during a call, so that calls of one rank come one after the other.
    turn: Mutex<()>,
    shared: Arc<SharedCalls>,
    /// The numbers of the ranks among those that were split; empty without a split.
    members: Vec<usize>,
}

/// `world` ranks, one for each of `world` threads, that wait for each other for `deadline` at most.
#[must_use]
pub fn group(world: usize, deadline: Duration) -> Vec<Threads> {
    let posts = (0..world).map(|_| None).collect();
    let state =
        ThreadsState { posts, reading: false, have_read: 0, finished: 0, splits: Vec::new(), failure: None };
    let shared = Arc::new(SharedCalls { deadline, state: Mutex::new(state), changed: Condvar::new() });
    (0..world)
        .map(|rank| Threads {
            rank,
            world,
            turn: Mutex::new(()),
            shared: Arc::clone(&shared),
            members: Vec::new(),
        })
        .collect()
}

#[derive(Debug)]
struct SharedCalls {
    deadline: Duration,
    state: Mutex<ThreadsState>,
    changed: Condvar,
}

#[derive(Debug)]
struct ThreadsState {
    /// The calls of the ranks, of those that have made theirs.
    posts: Vec<Option<PostedCall>>,
    /// Whether all ranks have made the call and some may still read.
    reading: bool,
    have_read: usize,
    /// Calls of all ranks that have ended.
    finished: u64,
    /// Ranks of splits that their threads have not taken yet.
    splits: Vec<SplitRank>,
    /// Why the collective is closed; the first reason stays.
    failure: Option<CallFailure>,
}

/// A rank of a split, for the rank that it will be.
#[derive(Debug)]
struct SplitRank {
    /// The number of the call.
    number: u64,
    /// The rank that takes it.
    rank: usize,
    threads: Threads,
}

#[derive(Clone, Debug)]
struct PostedCall {
    call: CollectiveCall,
    payload: Payload,
}

#[derive(Clone, Debug)]
enum Payload {
    Values(Lent),
    /// Values of which every rank reads its part.
    Parts {
        lent: Lent,
        parts: Vec<Range<usize>>,
    },
    Bytes(Arc<Vec<u8>>),
    Nothing,
}

/// A slice of a rank that is in a call.
#[derive(Clone, Copy, Debug)]
struct Lent {
    start: *const f32,
    len: usize,
}

#[expect(unsafe_code, reason = "the slice is read by other threads while its rank waits for them")]
// SAFETY: floats may be read from any thread, and `Lending::of` says when.
unsafe impl Send for Lent {}

impl Lent {
    fn of(values: &[f32]) -> Self {
        Self { start: values.as_ptr(), len: values.len() }
    }

    #[expect(unsafe_code, reason = "reads a slice of another thread")]
    /// The slice.
    ///
    /// # Safety
    /// That of [`Lending::of`].
    unsafe fn read<'a>(self) -> &'a [f32] {
        // SAFETY: made of a slice that is still borrowed, by the condition above.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

#[derive(Clone, Debug)]
enum CallFailure {
    Gone(usize),
    GivenUp { by: usize, reason: String },
}

impl CallFailure {
    fn seen_by(&self, rank: usize, operation: &'static str) -> CollectiveError {
        match self {
            Self::Gone(peer) => CollectiveError::Gone { rank, peer: *peer, operation },
            Self::GivenUp { by, reason } => {
                CollectiveError::GivenUp { rank, peer: *by, operation, reason: reason.clone() }
            }
        }
    }
}

/// The payload of a rank, while all ranks read.
#[derive(Clone, Copy)]
enum Lending<'a> {
    Values(&'a [f32]),
    Parts(&'a [f32], &'a [Range<usize>]),
    Bytes(&'a Arc<Vec<u8>>),
    Nothing,
}

impl<'a> Lending<'a> {
    #[expect(unsafe_code, reason = "reads slices of other threads, which are borrowed until all have read")]
    /// The values of `payload`.
    ///
    /// # Safety
    /// Only while `state.reading` is true, and for a lifetime that ends before this rank counts as one that has read: until
    /// all ranks do, the call that has borrowed the slice does not return.
    unsafe fn of(payload: &'a Payload) -> Self {
        match payload {
            // SAFETY: by the condition above.
            Payload::Values(lent) => Self::Values(unsafe { lent.read() }),
            // SAFETY: by the condition above.
            Payload::Parts { lent, parts } => Self::Parts(unsafe { lent.read() }, parts),
            Payload::Bytes(bytes) => Self::Bytes(bytes),
            Payload::Nothing => Self::Nothing,
        }
    }

    /// The part of the values that `rank` reads.
    fn part(self, rank: usize) -> &'a [f32] {
        if let Self::Parts(values, parts) = self { &values[parts[rank].clone()] } else { &[] }
    }

    fn values(self) -> &'a [f32] {
        if let Self::Values(values) = self { values } else { &[] }
    }

    fn bytes(self) -> Vec<u8> {
        if let Self::Bytes(bytes) = self { bytes.as_ref().clone() } else { Vec::new() }
    }
}

impl Payload {
    fn lend(values: &[f32]) -> Self {
        Self::Values(Lent::of(values))
    }
}

/// Counts this rank as one that has read when it is dropped, and then waits until all ranks have.
struct Reading<'a> {
    shared: &'a SharedCalls,
    number: u64,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.have_read += 1;
        if state.have_read == state.posts.len() {
            state.posts.fill(None);
            (state.reading, state.have_read) = (false, 0);
            state.finished += 1;
            self.shared.changed.notify_all();
        }
        // The others only copy and add, so this wait ends; to return earlier would free what they read.
        while state.finished == self.number {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl SharedCalls {
    fn lock(&self) -> MutexGuard<'_, ThreadsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the collective because of `failure`, unless it is closed already.
    fn fail(&self, state: &mut ThreadsState, failure: CallFailure) {
        state.failure.get_or_insert(failure);
        self.changed.notify_all();
    }
}

impl ThreadsState {
    /// The first rank that has not made the call.
    fn missing(&self) -> Option<usize> {
        self.posts.iter().position(Option::is_none)
    }

    /// The first rank that has made another call than `rank`, with its call.
    fn out_of_step(&self, rank: usize) -> Option<(usize, &CollectiveCall)> {
        let call = |post: &'_ Option<PostedCall>| post.as_ref().map(|post| post.call.clone());
        let own = call(&self.posts[rank]);
        let mut posts = self.posts.iter().enumerate();
        posts.find_map(|(peer, post)| {
            post.as_ref().filter(|_| call(post) != own).map(|post| (peer, &post.call))
        })
    }
}

impl Threads {
    /// Makes `call` with `payload`, and reads the payloads of all ranks, in order of rank.
    fn call<R>(
        &self,
        call: CollectiveCall,
        payload: Payload,
        read: impl FnOnce(&[Lending<'_>]) -> R,
    ) -> Result<R, CollectiveError> {
        self.numbered(call, payload, |_, lent| read(lent))
    }

    /// The same; `read` is also given the number of the call, which is the same on all ranks.
    fn numbered<R>(
        &self,
        call: CollectiveCall,
        payload: Payload,
        read: impl FnOnce(u64, &[Lending<'_>]) -> R,
    ) -> Result<R, CollectiveError> {
        self.meet(call, payload, read).map_err(|error| self.named(error))
    }

    /// The error of a call, with the ranks that a split has made.
    fn named(&self, error: CollectiveError) -> CollectiveError {
        if self.members.is_empty() { error } else { among(&self.members, error) }
    }

    #[expect(unsafe_code, reason = "all ranks read now")]
    fn meet<R>(
        &self,
        call: CollectiveCall,
        payload: Payload,
        read: impl FnOnce(u64, &[Lending<'_>]) -> R,
    ) -> Result<R, CollectiveError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (rank, operation, shared) = (self.rank, call.operation, &*self.shared);
        let leader = call.root.filter(|_| operation == CollectiveCall::BROADCAST_BYTES);
        let mut state = shared.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.seen_by(rank, operation));
        }
        state.posts[rank] = Some(PostedCall { call, payload });
        if state.missing().is_none() {
            if let Some((peer, found)) = state.out_of_step(rank) {
                let error = CollectiveError::OutOfStep { rank, peer, operation, found: found.to_string() };
                state.posts[rank] = None;
                shared.fail(&mut state, CallFailure::GivenUp { by: rank, reason: error.to_string() });
                return Err(error);
            }
            state.reading = true;
            shared.changed.notify_all();
        } else if leader == Some(rank) {
            // From now on there is a deadline for the ranks that wait for it.
            shared.changed.notify_all();
        }
        let state = self.wait_for_all(state, operation, leader)?;
        let payloads: Vec<Payload> = state.posts.iter().flatten().map(|post| post.payload.clone()).collect();
        let number = state.finished;
        let reading = Reading { shared, number };
        drop(state);
        // SAFETY: `state.reading` was true and stays so until `reading` is dropped, below or by a panic, after `lent`.
        let lent: Vec<Lending<'_>> = payloads.iter().map(|payload| unsafe { Lending::of(payload) }).collect();
        let result = read(number, &lent);
        drop(lent);
        drop(reading);
        Ok(result)
    }

    /// Waits until all ranks have made the call. With a `leader` the deadline begins when that one has.
    fn wait_for_all<'a>(
        &'a self,
        mut state: MutexGuard<'a, ThreadsState>,
        operation: &'static str,
        leader: Option<usize>,
    ) -> Result<MutexGuard<'a, ThreadsState>, CollectiveError> {
        let (rank, shared) = (self.rank, &*self.shared);
        let mut since = None;
        while !state.reading {
            if let Some(failure) = state.failure.clone() {
                state.posts[rank] = None;
                return Err(failure.seen_by(rank, operation));
            }
            if leader.is_some_and(|leader| state.posts[leader].is_none()) {
                state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = since.get_or_insert_with(Instant::now).elapsed();
            let left = shared.deadline.saturating_sub(waited);
            if left.is_zero() {
                let waits_for = state.missing().unwrap_or(rank);
                let seconds = shared.deadline.as_secs_f64();
                let error = CollectiveError::Deadline { rank, waits_for, operation, seconds };
                state.posts[rank] = None;
                shared.fail(&mut state, CallFailure::GivenUp { by: rank, reason: error.to_string() });
                return Err(error);
            }
            state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(state)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let shared = &*self.shared;
        shared.fail(&mut shared.lock(), CallFailure::Gone(self.rank));
    }
}

impl Collective for Threads {
    fn position(&self) -> Position {
        Position { rank: self.rank, world: self.world }
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<(), CollectiveError> {
        all_reduce_on_host(self, values)
    }

    fn reduce_scatter(
        &self,
        values: &[f32],
        shards: &[Range<usize>],
        own: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::REDUCE_SCATTER).with(shards);
        let call = call.check(self.position(), own.len(), Some(values.len()))?;
        let shard = shards[self.rank].clone();
        self.call(call, Payload::lend(values), |lent| {
            let slices: Vec<&[f32]> = lent.iter().map(|one| &one.values()[shard.clone()]).collect();
            sum_as_tree(&slices, own);
        })
    }

    fn all_gather(
        &self,
        own: &[f32],
        shards: &[Range<usize>],
        all: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::ALL_GATHER).with(shards);
        let call = call.check(self.position(), own.len(), Some(all.len()))?;
        self.call(call, Payload::lend(own), |lent| collect(lent, shards, all))
    }

    fn broadcast(&self, root: usize, values: &mut [f32]) -> Result<(), CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::BROADCAST).to(root).with(&even_shards(values.len(), 1));
        let call = call.check_root(self.position())?;
        if self.rank == root {
            return self.call(call, Payload::lend(values), |_| ());
        }
        self.call(call, Payload::Nothing, |lent| values.copy_from_slice(lent[root].values()))
    }

    fn all_to_all(
        &self,
        values: &[f32],
        sends: &[Range<usize>],
        received: &mut [f32],
        receives: &[Range<usize>],
    ) -> Result<(), CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::ALL_TO_ALL);
        let (rank, operation) = (self.rank, call.operation);
        let sides = Sides { sends, values: values.len(), receives, received: received.len() };
        call.check_all_to_all(self.position(), sides)?;
        let payload = Payload::Parts { lent: Lent::of(values), parts: sends.to_vec() };
        let read = self.call(call, payload, |lent| {
            for (peer, (range, lent)) in receives.iter().zip(lent).enumerate() {
                let part = lent.part(rank);
                if part.len() != range.len() {
                    let found = format!("it with {} values where {} are expected", part.len(), range.len());
                    return Err(self.named(CollectiveError::OutOfStep { rank, peer, operation, found }));
                }
                received[range.clone()].copy_from_slice(part);
            }
            Ok(())
        })?;
        if let Err(error) = &read {
            let failure = CallFailure::GivenUp { by: rank, reason: error.to_string() };
            self.shared.fail(&mut self.shared.lock(), failure);
        }
        read
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.call(CollectiveCall::of(CollectiveCall::BARRIER), Payload::Nothing, |_| ())
    }
}

impl HostCollective for Threads {
    fn gather(
        &self,
        root: usize,
        own: &[f32],
        shards: &[Range<usize>],
        all: Option<&mut [f32]>,
    ) -> Result<(), CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::GATHER).to(root).with(shards);
        let call = call.check_gather(self.position(), own.len(), all.as_deref().map(<[f32]>::len))?;
        self.call(call, Payload::lend(own), |lent| {
            if let Some(all) = all {
                collect(lent, shards, all);
            }
        })
    }

    fn broadcast_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let call =
            CollectiveCall::of(CollectiveCall::BROADCAST_BYTES).to(root).check_root(self.position())?;
        let mine = self.rank == root;
        let payload = if mine { Payload::Bytes(Arc::new(bytes)) } else { Payload::Nothing };
        self.call(call, payload, |lent| lent[root].bytes())
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::ALL_GATHER_BYTES);
        self.call(call, Payload::Bytes(Arc::new(bytes)), |lent| lent.iter().map(|one| one.bytes()).collect())
    }

    fn gather_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::GATHER_BYTES).to(root).check_root(self.position())?;
        self.call(call, Payload::Bytes(Arc::new(bytes)), |lent| {
            (self.rank == root).then(|| lent.iter().map(|one| one.bytes()).collect())
        })
    }

    fn split(&self, color: usize) -> Result<Box<dyn HostCollective>, CollectiveError> {
        let (rank, shared) = (self.rank, &*self.shared);
        let color = Payload::Bytes(Arc::new(color.to_le_bytes().to_vec()));
        // The first rank of a color makes the ranks of all of them, before any rank returns from the call.
        let made = self.numbered(CollectiveCall::of(CollectiveCall::SPLIT), color, |number, lent| {
            let colors: Vec<_> = lent.iter().map(|one| one.bytes()).collect();
            let members = members(&colors, rank);
            if members.first() == Some(&rank) {
                let ranks = group(members.len(), shared.deadline).into_iter().zip(&members);
                let ranks = ranks.map(|(mut threads, peer)| {
                    threads.members.clone_from(&members);
                    SplitRank { number, rank: *peer, threads }
                });
                shared.lock().splits.extend(ranks.collect::<Vec<_>>());
            }
            number
        })?;
        let mut state = shared.lock();
        let own = state.splits.iter().position(|one| one.number == made && one.rank == rank);
        let reason = "the first rank of its color has not made the ranks of the split".to_owned();
        let operation = CollectiveCall::SPLIT;
        let own = own.ok_or(CollectiveError::Arguments { rank, operation, reason })?;
        Ok(Box::new(state.splits.swap_remove(own).threads))
    }
}

/// Copies the values of every rank to its shard of `all`.
fn collect(lent: &[Lending<'_>], shards: &[Range<usize>], all: &mut [f32]) {
    for (one, shard) in lent.iter().zip(shards) {
        all[shard.clone()].copy_from_slice(one.values());
    }
}
