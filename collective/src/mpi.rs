//! Ranks that `mpirun` starts, over the MPI library of the machine.
//!
//! MPI is the transport of the frames of [`Mesh`](crate::mesh::Mesh) alone: the order of its sums is that of its
//! implementation, and its collective calls have no deadline.
//!
//! Invariant: MPI reads and writes only memory that no other code uses until the transfer is complete. After an error some
//! transfers never complete. Their memory is leaked then, and MPI is not finalized, because that would wait for them: the
//! process has to exit with its error, and `mpirun` then ends the other processes.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::mpi::Threading;
use ::mpi::environment::Universe;
use ::mpi::request::{Request, StaticScope};
use ::mpi::topology::{Color, Communicator, SimpleCommunicator};
use ::mpi::traits::{Destination, Source};

use crate::CollectiveError;
use crate::call::CollectiveCall;
use crate::mesh::{FrameTransport, HEADER, Mesh, MeshFrameHeader, Receive, Stamp};

/// A rank that exchanges frames with the others over MPI.
pub type Mpi = Mesh<Transfers>;

/// Longest message; lengths are 32-bit numbers in MPI.
const MAX_MESSAGE: usize = 1 << 28;
/// Polls of a transfer before the thread sleeps between polls.
const POLLS: u32 = 2000;
/// Sleep between polls.
const SLEEP: Duration = Duration::from_micros(100);
/// Locked in every call of MPI: collectives that a split has made are used from several threads.
static TURN: Mutex<()> = Mutex::new(());

/// The turn of this thread to call MPI.
fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts MPI, once in a process, with the rank that `mpirun` has assigned. Ranks wait for each other for `deadline` at
/// most. The value is dropped on the thread that made it, because MPI is finalized on the thread that initialized it. A process
/// that ends with an error of its own does not drop it: to finalize MPI is to wait for the other ranks.
///
/// # Errors
/// If MPI was started before, or cannot be called from several threads, one after the other.
pub fn start(deadline: Duration) -> Result<Mpi, CollectiveError> {
    let fail = |reason: &str| {
        Err(CollectiveError::Join { address: "MPI_COMM_WORLD".to_owned(), reason: reason.to_owned() })
    };
    let Some((universe, threading)) = ::mpi::initialize_with_threading(Threading::Serialized) else {
        return fail("MPI was started before in this process");
    };
    if threading < Threading::Serialized {
        return fail("this MPI library allows calls from one thread alone; install one built with threads");
    }
    // A communicator of its own, so that no other user of MPI receives these messages.
    let ranks = universe.world().duplicate();
    let place = |place: i32| usize::try_from(place).unwrap_or_default();
    let (rank, world) = (place(ranks.rank()), place(ranks.size()));
    let mpi = ManuallyDrop::new(MpiRuntime { ranks, universe: Arc::new(universe) });
    Ok(Mesh::new(Transfers { rank, world, deadline, mpi, failed: false }))
}

/// The transfers of one rank.
#[derive(Debug)]
pub struct Transfers {
    rank: usize,
    world: usize,
    deadline: Duration,
    /// Dropped only if no call has failed.
    mpi: ManuallyDrop<MpiRuntime>,
    failed: bool,
}

/// MPI; the fields are dropped in this order.
struct MpiRuntime {
    ranks: SimpleCommunicator,
    /// Shared with the parts of a split; MPI is finalized with the last of them.
    universe: Arc<Universe>,
}

#[expect(unsafe_code, reason = "a handle of MPI is a pointer, which is not Send")]
// SAFETY: MPI was started with calls from any thread, one after the other, and `turn` is locked in every call.
unsafe impl Send for MpiRuntime {}

impl std::fmt::Debug for MpiRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MpiRuntime")
    }
}

impl Drop for Transfers {
    #[expect(unsafe_code, reason = "drops what is kept after an error")]
    fn drop(&mut self) {
        if !self.failed {
            let _turn = turn();
            // SAFETY: it is dropped here alone, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.mpi) }
        }
    }
}

/// A transfer of a message, with memory of its own.
struct Transfer {
    /// `None` when it is complete.
    request: Option<Request<'static, [u8], StaticScope>>,
    memory: *mut [u8],
}

impl Transfer {
    fn send(mpi: &MpiRuntime, peer: i32, bytes: &[u8]) -> Self {
        let memory: *mut [u8] = Box::into_raw(Box::<[u8]>::from(bytes));
        let bytes = Self::lend(memory);
        let _turn = turn();
        let request = mpi.ranks.process_at_rank(peer).immediate_send(StaticScope, &*bytes);
        Self { request: Some(request), memory }
    }

    fn receive(mpi: &MpiRuntime, peer: i32, len: usize) -> Self {
        let memory: *mut [u8] = Box::into_raw(vec![0; len].into_boxed_slice());
        let _turn = turn();
        let request = mpi.ranks.process_at_rank(peer).immediate_receive_into(StaticScope, Self::lend(memory));
        Self { request: Some(request), memory }
    }

    #[expect(unsafe_code, reason = "MPI uses the memory until the transfer is complete")]
    fn lend(memory: *mut [u8]) -> &'static mut [u8] {
        // SAFETY: made of a box that only `Drop` takes back, and only when the transfer is complete.
        unsafe { &mut *memory }
    }

    /// Whether it is complete.
    fn poll(&mut self) -> bool {
        let _turn = turn();
        self.request = self.request.take().and_then(|request| request.test().err());
        self.request.is_none()
    }

    #[expect(unsafe_code, reason = "reads what MPI has written")]
    /// The received bytes; none before the transfer is complete.
    fn bytes(&self) -> &[u8] {
        // SAFETY: complete, so that MPI no longer writes, and the box is not taken back before `Drop`.
        if self.request.is_none() { unsafe { &*self.memory } } else { &[] }
    }
}

impl Drop for Transfer {
    #[expect(unsafe_code, reason = "takes the memory back")]
    fn drop(&mut self) {
        match self.request.take() {
            // SAFETY: made by `Box::into_raw`, taken back here alone, and MPI is done with it.
            None => drop(unsafe { Box::from_raw(self.memory) }),
            // Dropping the request would end the process, and MPI still uses the memory.
            Some(request) => std::mem::forget(request),
        }
    }
}

/// A frame of a peer that is not complete.
struct IncomingFrame {
    peer: usize,
    header: Transfer,
    /// Once the header is there.
    parts: Option<Vec<Transfer>>,
}

impl IncomingFrame {
    /// Continues with what was received: whether the frame is complete, and whether bytes were received since the last poll.
    fn poll(
        &mut self,
        transfers: &Transfers,
        stamp: &Stamp,
        receive: &mut Receive<'_>,
    ) -> Result<(bool, bool), CollectiveError> {
        let (rank, peer) = (transfers.rank, self.peer);
        let Some(parts) = &mut self.parts else {
            if !self.header.poll() {
                return Ok((false, false));
            }
            let header = self.header.bytes().try_into().ok().and_then(MeshFrameHeader::from_bytes);
            let Some(header) = header else {
                let found = "something that is no frame of rlrun".to_owned();
                return Err(CollectiveError::OutOfStep { rank, peer, operation: stamp.operation, found });
            };
            let bytes = header.buffer(stamp, rank, peer, receive)?;
            let part = |part: &mut [u8]| Transfer::receive(&transfers.mpi, number(peer), part.len());
            self.parts = Some(bytes.chunks_mut(MAX_MESSAGE).map(part).collect());
            return Ok((false, true));
        };
        let before = parts.iter().filter(|part| part.request.is_some()).count();
        let left = parts.iter_mut().filter_map(|part| (!part.poll()).then_some(())).count();
        if left > 0 {
            return Ok((false, left < before));
        }
        let bytes = match receive {
            Receive::Nothing => &mut [],
            Receive::Exactly(bytes) => &mut **bytes,
            Receive::Any(bytes) => &mut bytes[..],
        };
        bytes.chunks_mut(MAX_MESSAGE).zip(parts).for_each(|(to, part)| to.copy_from_slice(part.bytes()));
        Ok((true, true))
    }
}

impl Transfers {
    fn serve(
        &self,
        stamp: &Stamp,
        sends: &[Option<&[u8]>],
        receives: &mut [Receive<'_>],
        mut patient: bool,
    ) -> Result<(), CollectiveError> {
        let expected = |peer: &usize| *peer != self.rank && !matches!(receives[*peer], Receive::Nothing);
        let incoming = |peer| {
            let header = Transfer::receive(&self.mpi, number(peer), HEADER);
            IncomingFrame { peer, header, parts: None }
        };
        let mut incoming: Vec<IncomingFrame> = (0..self.world).filter(expected).map(incoming).collect();
        let mut outgoing: Vec<(usize, Transfer)> = Vec::new();
        for (peer, bytes) in sends.iter().enumerate().filter(|(peer, _)| *peer != self.rank) {
            let Some(bytes) = bytes else { continue };
            let header = MeshFrameHeader::of(stamp, bytes.len()).to_bytes();
            let parts = [&header[..]].into_iter().chain(bytes.chunks(MAX_MESSAGE));
            outgoing.extend(parts.map(|part| (peer, Transfer::send(&self.mpi, number(peer), part))));
        }
        let (mut moved_at, mut polls) = (Instant::now(), 0);
        loop {
            let unsent = outgoing.len();
            outgoing.retain_mut(|(_, transfer)| !transfer.poll());
            let mut moved = outgoing.len() < unsent;
            let mut left = Vec::with_capacity(incoming.len());
            for mut one in incoming {
                let (done, came) = one.poll(self, stamp, &mut receives[one.peer])?;
                moved |= came;
                patient &= !came;
                if !done {
                    left.push(one);
                }
            }
            incoming = left;
            if incoming.is_empty() && outgoing.is_empty() {
                return Ok(());
            }
            if moved {
                (moved_at, polls) = (Instant::now(), 0);
            } else if !patient && moved_at.elapsed() >= self.deadline {
                let peer = incoming.first().map(|one| one.peer);
                let waits_for = peer.or(outgoing.first().map(|(peer, _)| *peer)).unwrap_or(self.rank);
                let (rank, operation, seconds) = (self.rank, stamp.operation, self.deadline.as_secs_f64());
                return Err(CollectiveError::Deadline { rank, waits_for, operation, seconds });
            }
            polls += 1;
            if polls < POLLS { thread::yield_now() } else { thread::sleep(SLEEP) }
        }
    }
}

impl FrameTransport for Transfers {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn exchange(
        &mut self,
        stamp: &Stamp,
        sends: &[Option<&[u8]>],
        receives: &mut [Receive<'_>],
        patient: bool,
    ) -> Result<(), CollectiveError> {
        let done = self.serve(stamp, sends, receives, patient);
        self.failed |= done.is_err();
        done
    }

    type Entrance = ();

    fn open(&self, _members: &[usize]) -> Result<((), Vec<u8>), CollectiveError> {
        Ok(((), Vec::new()))
    }

    fn connect(&self, members: &[usize], _: Option<()>, _first: &[u8]) -> Result<Self, CollectiveError> {
        let color = Color::with_value(members.first().map_or(0, |first| number(*first)));
        let part = {
            let _turn = turn();
            self.mpi.ranks.split_by_color(color)
        };
        let (rank, operation) = (self.rank, CollectiveCall::SPLIT);
        let reason = "MPI has no communicator for its part".to_owned();
        let ranks = part.ok_or(CollectiveError::Arguments { rank, operation, reason })?;
        let rank = members.iter().position(|member| *member == self.rank).unwrap_or_default();
        let universe = Arc::clone(&self.mpi.universe);
        let mpi = ManuallyDrop::new(MpiRuntime { ranks, universe });
        Ok(Self { rank, world: members.len(), deadline: self.deadline, mpi, failed: false })
    }
}

/// A rank as MPI counts.
fn number(rank: usize) -> i32 {
    i32::try_from(rank).unwrap_or(i32::MAX)
}
