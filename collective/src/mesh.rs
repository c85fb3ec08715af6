//! Ranks that send each other frames: every call is one exchange of frames between pairs of ranks.
//!
//! Invariant: every rank counts its calls. A frame has the number of its call, and a digest of the operation, the root and
//! the shards; a frame of another call is an error. Sums are computed here, so every [`FrameTransport`] gives the same bits.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::call::{CollectiveCall, Sides};
use crate::sum::sum_as_tree;
use crate::{Collective, CollectiveError, HostCollective, Position, all_reduce_on_host, among, members};

/// Transport of frames between this rank and the others.
pub trait FrameTransport: Send + fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// Sends `sends[peer]` to every peer that has some, and receives from every peer what `receives[peer]` expects, at the
    /// same time. Every frame has `stamp`. The rank sends nothing to itself. Returns when all frames are received and no
    /// buffer of the caller is read any more. If `patient`, the deadline begins with the first byte that is received.
    ///
    /// # Errors
    /// If a peer is gone, does not answer before the deadline, or sends another frame than is expected.
    fn exchange(
        &mut self,
        stamp: &Stamp,
        sends: &[Option<&[u8]>],
        receives: &mut [Receive<'_>],
        patient: bool,
    ) -> Result<(), CollectiveError>;

    /// What the first rank of a split keeps until the others have connected.
    type Entrance;

    /// Prepares this rank for the others of `members`, of which it is the first. Returns also what they have to know.
    ///
    /// # Errors
    /// If the rank cannot wait for connections.
    fn open(&self, members: &[usize]) -> Result<(Self::Entrance, Vec<u8>), CollectiveError>;

    /// The transport among `members`, one of which is this rank. `first` is what the first of them has to let know; that one
    /// has the `entrance`. All ranks make this call, each with the members of its own part.
    ///
    /// # Errors
    /// If the ranks cannot connect before the deadline.
    fn connect(
        &self,
        members: &[usize],
        entrance: Option<Self::Entrance>,
        first: &[u8],
    ) -> Result<Self, CollectiveError>
    where
        Self: Sized;
}

/// The call that a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The operation.
    pub operation: &'static str,
    /// Calls of the rank before.
    pub number: u64,
    /// Digest of operation, root and shards.
    pub digest: u64,
}

/// The frame that is expected of a peer.
#[derive(Debug)]
pub enum Receive<'a> {
    /// No frame.
    Nothing,
    /// A frame of this length.
    Exactly(&'a mut [u8]),
    /// A frame of any length, put in place of the empty vector.
    Any(Vec<u8>),
}

/// A rank that exchanges frames with the others over `W`.
#[derive(Debug)]
pub struct Mesh<W> {
    rank: usize,
    world: usize,
    /// The numbers of the ranks among those that were split; empty without a split.
    members: Vec<usize>,
    state: Mutex<MeshState<W>>,
}

#[derive(Debug)]
struct MeshState<W> {
    wire: W,
    /// Calls so far.
    number: u64,
    /// The error that has closed the collective, as text.
    failure: Option<String>,
    /// Shards of the other ranks that are summed, kept from call to call.
    parts: Vec<f32>,
}

impl<W: FrameTransport> Mesh<W> {
    pub(crate) fn new(wire: W) -> Self {
        let (rank, world) = (wire.rank(), wire.world());
        let state = MeshState { wire, number: 0, failure: None, parts: Vec::new() };
        Self { rank, world, members: Vec::new(), state: Mutex::new(state) }
    }

    /// The error of a call, with the ranks that a split has made.
    fn named(&self, error: CollectiveError) -> CollectiveError {
        if self.members.is_empty() { error } else { among(&self.members, error) }
    }

    /// Makes `call` with the other ranks.
    fn exchange(
        &self,
        call: &CollectiveCall,
        sends: &[Option<&[u8]>],
        receives: &mut [Receive<'_>],
    ) -> Result<(), CollectiveError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.exchange(call, sends, receives).map_err(|error| self.named(error))
    }

    /// Makes `call`, and receives a message of any length from every other rank; that of this rank is empty.
    fn messages(
        &self,
        call: &CollectiveCall,
        sends: &[Option<&[u8]>],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let receive = |peer| if peer == self.rank { Receive::Nothing } else { Receive::Any(Vec::new()) };
        let mut receives: Vec<_> = (0..self.world).map(receive).collect();
        self.exchange(call, sends, &mut receives)?;
        Ok(receives.into_iter().map(Receive::into_bytes).collect())
    }

    /// Sends `own` to every other rank.
    fn to_all<'a>(&self, own: &'a [u8]) -> Vec<Option<&'a [u8]>> {
        (0..self.world).map(|peer| (peer != self.rank).then_some(own)).collect()
    }

    /// Receives the shard of every other rank into `all`; copies `own` to the shard of this rank.
    fn shards_to_fill<'a>(
        &self,
        own: &[f32],
        shards: &[Range<usize>],
        mut all: &'a mut [f32],
    ) -> Vec<Receive<'a>> {
        let mut receives = Vec::with_capacity(self.world);
        for (peer, shard) in shards.iter().enumerate() {
            let (part, rest) = all.split_at_mut(shard.len());
            all = rest;
            if peer == self.rank {
                part.copy_from_slice(own);
                receives.push(Receive::Nothing);
            } else {
                receives.push(Receive::Exactly(bytemuck::cast_slice_mut(part)));
            }
        }
        receives
    }
}

impl<W: FrameTransport> MeshState<W> {
    fn exchange(
        &mut self,
        call: &CollectiveCall,
        sends: &[Option<&[u8]>],
        receives: &mut [Receive<'_>],
    ) -> Result<(), CollectiveError> {
        let (rank, operation) = (self.wire.rank(), call.operation);
        if let Some(reason) = self.failure.clone() {
            return Err(CollectiveError::GivenUp { rank, peer: rank, operation, reason });
        }
        let stamp = Stamp { operation, number: self.number, digest: call.digest() };
        self.number += 1;
        let patient = operation == CollectiveCall::BROADCAST_BYTES && call.root != Some(rank);
        let done = self.wire.exchange(&stamp, sends, receives, patient);
        self.failure = done.as_ref().err().map(ToString::to_string);
        done
    }
}

impl CollectiveCall {
    /// 64-bit FNV-1a digest of everything that is the same on all ranks.
    fn digest(&self) -> u64 {
        let root = self.root.map_or(u64::MAX, |root| root as u64);
        let ends = self.shards.iter().map(|shard| shard.end as u64);
        let numbers = ends.chain([root]).flat_map(u64::to_le_bytes);
        let bytes = self.operation.bytes().chain(numbers);
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }
}

impl<W: FrameTransport> Collective for Mesh<W> {
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
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut parts = std::mem::take(&mut state.parts);
        parts.resize((self.world - 1) * own.len(), 0.0);
        let (mut sends, mut receives, mut rest) = (Vec::new(), Vec::new(), &mut parts[..]);
        for (peer, shard) in shards.iter().enumerate() {
            if peer == self.rank {
                sends.push(None);
                receives.push(Receive::Nothing);
                continue;
            }
            sends.push(Some(bytemuck::cast_slice(&values[shard.clone()])));
            let (part, others) = rest.split_at_mut(own.len());
            rest = others;
            receives.push(Receive::Exactly(bytemuck::cast_slice_mut(part)));
        }
        let done = state.exchange(&call, &sends, &mut receives);
        drop(receives);
        if done.is_ok() {
            let part = |peer: usize| match peer.cmp(&self.rank) {
                std::cmp::Ordering::Less => &parts[peer * own.len()..][..own.len()],
                std::cmp::Ordering::Equal => &values[shards[peer].clone()],
                std::cmp::Ordering::Greater => &parts[(peer - 1) * own.len()..][..own.len()],
            };
            let slices: Vec<&[f32]> = (0..self.world).map(part).collect();
            sum_as_tree(&slices, own);
        }
        state.parts = parts;
        done.map_err(|error| self.named(error))
    }

    fn all_gather(
        &self,
        own: &[f32],
        shards: &[Range<usize>],
        all: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::ALL_GATHER).with(shards);
        let call = call.check(self.position(), own.len(), Some(all.len()))?;
        let mut receives = self.shards_to_fill(own, shards, all);
        self.exchange(&call, &self.to_all(bytemuck::cast_slice(own)), &mut receives)
    }

    fn broadcast(&self, root: usize, values: &mut [f32]) -> Result<(), CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::BROADCAST).to(root).check_root(self.position())?;
        let mut receives: Vec<_> = (0..self.world).map(|_| Receive::Nothing).collect();
        if self.rank == root {
            return self.exchange(&call, &self.to_all(bytemuck::cast_slice(values)), &mut receives);
        }
        receives[root] = Receive::Exactly(bytemuck::cast_slice_mut(values));
        self.exchange(&call, &vec![None; self.world], &mut receives)
    }

    fn all_to_all(
        &self,
        values: &[f32],
        sends: &[Range<usize>],
        received: &mut [f32],
        receives: &[Range<usize>],
    ) -> Result<(), CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::ALL_TO_ALL);
        let own = &values[call.check_all_to_all(
            self.position(),
            Sides { sends, values: values.len(), receives, received: received.len() },
        )?];
        let mut frames = self.shards_to_fill(own, receives, received);
        let sent = |(peer, range): (usize, &Range<usize>)| {
            (peer != self.rank).then(|| bytemuck::cast_slice(&values[range.clone()]))
        };
        let sends: Vec<Option<&[u8]>> = sends.iter().enumerate().map(sent).collect();
        self.exchange(&call, &sends, &mut frames)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        let receive = |peer| if peer == self.rank { Receive::Nothing } else { Receive::Exactly(&mut []) };
        let mut receives: Vec<_> = (0..self.world).map(receive).collect();
        self.exchange(&CollectiveCall::of(CollectiveCall::BARRIER), &self.to_all(&[]), &mut receives)
    }
}

impl<W: FrameTransport + 'static> HostCollective for Mesh<W> {
    fn gather(
        &self,
        root: usize,
        own: &[f32],
        shards: &[Range<usize>],
        all: Option<&mut [f32]>,
    ) -> Result<(), CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::GATHER).to(root).with(shards);
        let call = call.check_gather(self.position(), own.len(), all.as_deref().map(<[f32]>::len))?;
        let mut sends = vec![None; self.world];
        let mut receives = match all {
            Some(all) => self.shards_to_fill(own, shards, all),
            None => {
                sends[root] = Some(bytemuck::cast_slice(own));
                (0..self.world).map(|_| Receive::Nothing).collect()
            }
        };
        self.exchange(&call, &sends, &mut receives)
    }

    fn broadcast_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let call =
            CollectiveCall::of(CollectiveCall::BROADCAST_BYTES).to(root).check_root(self.position())?;
        let mut receives: Vec<_> = (0..self.world).map(|_| Receive::Nothing).collect();
        if self.rank == root {
            self.exchange(&call, &self.to_all(&bytes), &mut receives)?;
            return Ok(bytes);
        }
        receives[root] = Receive::Any(Vec::new());
        self.exchange(&call, &vec![None; self.world], &mut receives)?;
        Ok(receives.swap_remove(root).into_bytes())
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::ALL_GATHER_BYTES);
        let mut all = self.messages(&call, &self.to_all(&bytes))?;
        all[self.rank] = bytes;
        Ok(all)
    }

    fn gather_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, CollectiveError> {
        let call = CollectiveCall::of(CollectiveCall::GATHER_BYTES).to(root).check_root(self.position())?;
        let mut sends = vec![None; self.world];
        if self.rank != root {
            sends[root] = Some(&bytes[..]);
            let mut receives: Vec<_> = (0..self.world).map(|_| Receive::Nothing).collect();
            self.exchange(&call, &sends, &mut receives)?;
            return Ok(None);
        }
        let mut all = self.messages(&call, &sends)?;
        all[root] = bytes;
        Ok(Some(all))
    }

    fn split(&self, color: usize) -> Result<Box<dyn HostCollective>, CollectiveError> {
        let colors = self.all_gather_bytes(color.to_le_bytes().to_vec())?;
        let members = members(&colors, self.rank);
        let wire = || self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (entrance, own) = if members.first() == Some(&self.rank) && members.len() > 1 {
            let (entrance, own) = wire().wire.open(&members)?;
            (Some(entrance), own)
        } else {
            (None, Vec::new())
        };
        let all = self.all_gather_bytes(own)?;
        let first = members.first().map_or(&[][..], |first| &all[*first]);
        let wire = wire().wire.connect(&members, entrance, first).map_err(|error| among(&members, error))?;
        Ok(Box::new(Self { members, ..Self::new(wire) }))
    }
}

impl Receive<'_> {
    /// The bytes that were received in place of an empty vector.
    fn into_bytes(self) -> Vec<u8> {
        if let Self::Any(bytes) = self { bytes } else { Vec::new() }
    }

    /// ValueMemory for a frame of `len` bytes; `None` if another length or no frame is expected, or memory is short.
    pub(crate) fn buffer(&mut self, len: usize) -> Option<&mut [u8]> {
        match self {
            Self::Nothing => None,
            Self::Exactly(bytes) => (bytes.len() == len).then_some(bytes),
            Self::Any(bytes) => {
                bytes.try_reserve_exact(len).ok()?;
                bytes.resize(len, 0);
                Some(bytes)
            }
        }
    }
}

/// Length of a header, bytes.
pub(crate) const HEADER: usize = 32;
/// Number of a frame that has no call: the error of a rank, as text.
pub(crate) const GIVEN_UP: u64 = u64::MAX;
/// Number of a frame without a call and without bytes: the sender has waited for half of its deadline. The digest is the
/// rank that it waits for.
pub(crate) const WAITS: u64 = u64::MAX - 1;
/// First bytes of every frame.
const MAGIC: u64 = u64::from_le_bytes(*b"rlrunfr1");

/// Header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MeshFrameHeader {
    /// Calls of the rank before, or [`GIVEN_UP`] or [`WAITS`].
    pub number: u64,
    pub digest: u64,
    /// Bytes of the frame after the header.
    pub len: u64,
}

impl MeshFrameHeader {
    pub(crate) fn of(stamp: &Stamp, len: usize) -> Self {
        Self { number: stamp.number, digest: stamp.digest, len: len as u64 }
    }

    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let numbers = [MAGIC, self.number, self.digest, self.len];
        bytes.chunks_exact_mut(8).zip(numbers).for_each(|(to, n)| to.copy_from_slice(&n.to_le_bytes()));
        bytes
    }

    /// `None` if the bytes are no header.
    pub(crate) fn from_bytes(bytes: &[u8; HEADER]) -> Option<Self> {
        let mut numbers = bytes.chunks_exact(8).map(|n| u64::from_le_bytes(n.try_into().unwrap_or_default()));
        let mut next = || numbers.next().unwrap_or_default();
        let (magic, number, digest, len) = (next(), next(), next(), next());
        (magic == MAGIC).then_some(Self { number, digest, len })
    }

    /// ValueMemory in `receive` for the frame that `peer` sends with this header, if it is the expected frame.
    pub(crate) fn buffer<'a>(
        self,
        stamp: &Stamp,
        rank: usize,
        peer: usize,
        receive: &'a mut Receive<'_>,
    ) -> Result<&'a mut [u8], CollectiveError> {
        let len = usize::try_from(self.len).unwrap_or(usize::MAX);
        let same = self.number == stamp.number && self.digest == stamp.digest;
        if let Some(buffer) = receive.buffer(len).filter(|_| same) {
            return Ok(buffer);
        }
        let found = if self.number != stamp.number {
            format!("its call number {} where this is number {}", self.number, stamp.number)
        } else if self.digest != stamp.digest {
            "something else, or with other shards or another root".to_owned()
        } else {
            format!("it with {len} bytes, which are not those expected or do not fit into memory")
        };
        Err(CollectiveError::OutOfStep { rank, peer, operation: stamp.operation, found })
    }
}
