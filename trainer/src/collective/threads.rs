//! Ranks that are threads of one process: everybody reads what it needs straight from the slices of the others.
//!
//! A call is a meeting. Every rank lends its slice; when the last has come all read; when the last has read all leave.
//!
//! Invariant: a slice is read only between the moment when all ranks have lent theirs and the moment when all have read,
//! and nobody who lent one leaves in between, neither by an error nor by a panic. A rank that waits for others to come
//! can leave, because then nobody reads.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Call, Collective, CollectiveError, sum_as_tree};

/// One rank; to drop it tells the others that it is gone.
#[derive(Debug)]
pub struct Threads {
    rank: usize,
    /// Held during a call, so that calls of one rank come one after the other.
    turn: Mutex<()>,
    shared: Arc<Shared>,
}

/// `world` ranks, each to be given to a thread of its own, that wait for each other for `deadline` at most.
#[must_use]
pub fn group(world: usize, deadline: Duration) -> Vec<Threads> {
    let posts = (0..world).map(|_| None).collect();
    let state = State { posts, reading: false, have_read: 0, meetings: 0, failure: None };
    let shared = Arc::new(Shared { deadline, state: Mutex::new(state), changed: Condvar::new() });
    (0..world).map(|rank| Threads { rank, turn: Mutex::new(()), shared: Arc::clone(&shared) }).collect()
}

#[derive(Debug)]
struct Shared {
    deadline: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// What the ranks have brought to the present meeting.
    posts: Vec<Option<Post>>,
    /// Whether all have come and some may still read.
    reading: bool,
    have_read: usize,
    /// Meetings that have ended.
    meetings: u64,
    /// Why there are no more meetings; the first reason stays.
    failure: Option<Failure>,
}

#[derive(Clone, Debug)]
struct Post {
    call: Call,
    payload: Payload,
}

#[derive(Clone, Debug)]
enum Payload {
    Values(Lent),
    Bytes(Arc<Vec<u8>>),
    Nothing,
}

/// A slice of a rank that is in a meeting.
#[derive(Clone, Copy, Debug)]
struct Lent {
    start: *const f32,
    len: usize,
}

#[expect(unsafe_code, reason = "the slice is read by other threads while its rank waits for them")]
// SAFETY: floats may be read from any thread, and `Brought::of` says when.
unsafe impl Send for Lent {}

#[derive(Clone, Debug)]
enum Failure {
    Gone(usize),
    GivenUp { by: usize, reason: String },
}

impl Failure {
    fn seen_by(&self, rank: usize, operation: &'static str) -> CollectiveError {
        match self {
            Self::Gone(peer) => CollectiveError::Gone { rank, peer: *peer, operation },
            Self::GivenUp { by, reason } => {
                CollectiveError::GivenUp { rank, peer: *by, operation, reason: reason.clone() }
            }
        }
    }
}

/// What a rank has brought to a meeting, while all read.
#[derive(Clone, Copy)]
enum Brought<'a> {
    Values(&'a [f32]),
    Bytes(&'a Arc<Vec<u8>>),
    Nothing,
}

impl<'a> Brought<'a> {
    #[expect(unsafe_code, reason = "reads slices of other threads, which the meeting keeps there")]
    /// What lies in `payload`.
    ///
    /// # Safety
    /// Only during a meeting in which `state.reading` is true, and for a lifetime that ends before this rank says that it
    /// has read: until all have said so, the call that has borrowed the slice does not return.
    unsafe fn of(payload: &'a Payload) -> Self {
        match payload {
            // SAFETY: made of a slice that is still borrowed, by the condition above.
            Payload::Values(lent) => {
                Self::Values(unsafe { std::slice::from_raw_parts(lent.start, lent.len) })
            }
            Payload::Bytes(bytes) => Self::Bytes(bytes),
            Payload::Nothing => Self::Nothing,
        }
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
        Self::Values(Lent { start: values.as_ptr(), len: values.len() })
    }
}

/// Says at its end that this rank has read, and then waits until all have.
struct Reading<'a> {
    shared: &'a Shared,
    meeting: u64,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.have_read += 1;
        if state.have_read == state.posts.len() {
            state.posts.fill(None);
            (state.reading, state.have_read) = (false, 0);
            state.meetings += 1;
            self.shared.changed.notify_all();
        }
        // The others only copy and add, so this ends; to leave before would take away what they read.
        while state.meetings == self.meeting {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all meetings because of `failure`, unless they have ended before.
    fn fail(&self, state: &mut State, failure: Failure) {
        state.failure.get_or_insert(failure);
        self.changed.notify_all();
    }
}

impl State {
    /// The first rank that has not come.
    fn missing(&self) -> Option<usize> {
        self.posts.iter().position(Option::is_none)
    }

    /// The first rank that makes another call than `rank`, with its call.
    fn out_of_step(&self, rank: usize) -> Option<(usize, &Call)> {
        let call = |post: &'_ Option<Post>| post.as_ref().map(|post| post.call.clone());
        let own = call(&self.posts[rank]);
        let mut posts = self.posts.iter().enumerate();
        posts.find_map(|(peer, post)| {
            post.as_ref().filter(|_| call(post) != own).map(|post| (peer, &post.call))
        })
    }
}

impl Threads {
    /// Brings `payload` to the meeting of `call`, and reads what all ranks have brought, in order of rank.
    #[expect(unsafe_code, reason = "says that this is the time in which all read")]
    fn meet<R>(
        &self,
        call: Call,
        payload: Payload,
        read: impl FnOnce(&[Brought<'_>]) -> R,
    ) -> Result<R, CollectiveError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (rank, operation, shared) = (self.rank, call.operation, &*self.shared);
        let leader = call.root.filter(|_| operation == Call::BROADCAST);
        let mut state = shared.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.seen_by(rank, operation));
        }
        state.posts[rank] = Some(Post { call, payload });
        if state.missing().is_none() {
            if let Some((peer, found)) = state.out_of_step(rank) {
                let error = CollectiveError::OutOfStep { rank, peer, operation, found: found.to_string() };
                state.posts[rank] = None;
                shared.fail(&mut state, Failure::GivenUp { by: rank, reason: error.to_string() });
                return Err(error);
            }
            state.reading = true;
            shared.changed.notify_all();
        } else if leader == Some(rank) {
            // From now on there is a deadline for those who wait for it.
            shared.changed.notify_all();
        }
        let state = self.wait_for_all(state, operation, leader)?;
        let payloads: Vec<Payload> = state.posts.iter().flatten().map(|post| post.payload.clone()).collect();
        let reading = Reading { shared, meeting: state.meetings };
        drop(state);
        // SAFETY: `state.reading` was true and stays so until `reading` is dropped, below or by a panic, after `brought`.
        let brought: Vec<Brought<'_>> =
            payloads.iter().map(|payload| unsafe { Brought::of(payload) }).collect();
        let result = read(&brought);
        drop(brought);
        drop(reading);
        Ok(result)
    }

    /// Waits until all have come; with a `leader` the deadline begins when that has.
    fn wait_for_all<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        operation: &'static str,
        leader: Option<usize>,
    ) -> Result<MutexGuard<'a, State>, CollectiveError> {
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
                shared.fail(&mut state, Failure::GivenUp { by: rank, reason: error.to_string() });
                return Err(error);
            }
            state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(state)
    }

    fn place(&self) -> (usize, usize) {
        (self.rank, self.world())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let shared = &*self.shared;
        shared.fail(&mut shared.lock(), Failure::Gone(self.rank));
    }
}

impl Collective for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.shared.lock().posts.len()
    }

    fn reduce_scatter(
        &self,
        values: &[f32],
        shards: &[Range<usize>],
        own: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let call = Call::of(Call::REDUCE_SCATTER).with(shards);
        let call = call.check(self.place(), own.len(), Some(values.len()))?;
        let shard = shards[self.rank].clone();
        self.meet(call, Payload::lend(values), |brought| {
            let slices: Vec<&[f32]> = brought.iter().map(|one| &one.values()[shard.clone()]).collect();
            sum_as_tree(&slices, own);
        })
    }

    fn all_gather(
        &self,
        own: &[f32],
        shards: &[Range<usize>],
        all: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let call = Call::of(Call::ALL_GATHER).with(shards);
        let call = call.check(self.place(), own.len(), Some(all.len()))?;
        self.meet(call, Payload::lend(own), |brought| collect(brought, shards, all))
    }

    fn gather(
        &self,
        root: usize,
        own: &[f32],
        shards: &[Range<usize>],
        all: Option<&mut [f32]>,
    ) -> Result<(), CollectiveError> {
        let call = Call::of(Call::GATHER).to(root).with(shards);
        let call = call.check_gather(self.place(), own.len(), all.as_deref().map(<[f32]>::len))?;
        self.meet(call, Payload::lend(own), |brought| {
            if let Some(all) = all {
                collect(brought, shards, all);
            }
        })
    }

    fn broadcast(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let call = Call::of(Call::BROADCAST).to(root).check_root(self.place())?;
        let mine = self.rank == root;
        let payload = if mine { Payload::Bytes(Arc::new(bytes)) } else { Payload::Nothing };
        self.meet(call, payload, |brought| brought[root].bytes())
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let call = Call::of(Call::ALL_GATHER_BYTES);
        self.meet(call, Payload::Bytes(Arc::new(bytes)), |brought| {
            brought.iter().map(|one| one.bytes()).collect()
        })
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.meet(Call::of(Call::BARRIER), Payload::Nothing, |_| ())
    }
}

/// Puts what every rank has brought at its shard of `all`.
fn collect(brought: &[Brought<'_>], shards: &[Range<usize>], all: &mut [f32]) {
    for (one, shard) in brought.iter().zip(shards) {
        all[shard.clone()].copy_from_slice(one.values());
    }
}
