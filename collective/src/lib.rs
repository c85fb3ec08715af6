//! Collective operations of ranks: sums, gathers, broadcasts and all-to-all.
//!
//! Ranks are SPMD: all ranks make the same calls in the same order, and a call returns when this rank has its result.
//! [`Collective`] has one set of operations for values in the memory of hosts ([`InHostMemory`]) and of devices ([`InDeviceMemory`]).
//!
//! # Layout
//! - [`threads`]: ranks that are threads of one process
//! - [`tcp`]: ranks that are processes, connected in pairs over TCP; `mpi`: ranks that `mpirun` starts, with the feature
//!   `mpi`; [`mesh`]: what both share
//! - [`devices`]: ranks that are devices, over a [`device::DeviceGroup`] (NCCL, or emulated devices)
//!
//! # Invariants
//! - On hosts a sum is a balanced binary tree over the ranks (TBIK, arXiv 2511.17826). Its bits depend neither on which
//!   rank comes first nor on the implementation, and `2n` ranks give the sum that `n` ranks give of sums of neighbours.
//! - Every wait has a deadline. The loss of a rank is noticed at once, a rank that hangs at the deadline; the error names
//!   the rank. After an error a collective is closed for all ranks.

mod call;
pub mod devices;
mod error;
pub mod mesh;
#[cfg(feature = "mpi")]
pub mod mpi;
mod sum;
pub mod tcp;
pub mod threads;

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use device::{Element, View, ViewMut};

pub use error::CollectiveError;

/// The rank of one participant, and the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// From 0.
    pub rank: usize,
    /// World size: the number of ranks.
    pub world: usize,
}

/// Where the values of ranks are.
pub trait ValueMemory: fmt::Debug + 'static {
    /// Element of values that are moved unchanged. Sums are of f32.
    type Element: Element;
    /// `[n]` values to read.
    type Values<'a, T: Element>;
    /// `[n]` values to write.
    type ValuesMut<'a, T: Element>;
}

/// The memory of a host: slices of f32.
#[derive(Clone, Copy, Debug)]
pub struct InHostMemory;

/// The memory of a device, whose values are moved as `T`.
#[derive(Clone, Copy, Debug)]
pub struct InDeviceMemory<T>(PhantomData<T>);

/// `[n]` elements to read.
pub type ValuesIn<'a, M> = <M as ValueMemory>::Values<'a, <M as ValueMemory>::Element>;
/// `[n]` elements to write.
pub type ValuesInMut<'a, M> = <M as ValueMemory>::ValuesMut<'a, <M as ValueMemory>::Element>;

impl ValueMemory for InHostMemory {
    type Element = f32;
    type Values<'a, T: Element> = &'a [T];
    type ValuesMut<'a, T: Element> = &'a mut [T];
}

impl<E: Element> ValueMemory for InDeviceMemory<E> {
    type Element = E;
    type Values<'a, T: Element> = View<'a, T>;
    type ValuesMut<'a, T: Element> = ViewMut<'a, T>;
}

/// The calls of one rank, which come one after the other. Ranges are in elements: one per rank, ascending, without gaps from
/// 0 to the number of all elements; ranges may be empty. On devices a call returns when it is on the stream of the device.
pub trait Collective<M: ValueMemory = InHostMemory>: Send + Sync + fmt::Debug {
    /// This rank and the number of ranks.
    fn position(&self) -> Position;

    /// Sums `values`, `[n]`, of all ranks in place. The sum is that of [`Self::reduce_scatter`].
    ///
    /// # Errors
    /// If a rank is gone, does not come before the deadline or makes another call, or the lengths do not fit.
    fn all_reduce(&self, values: M::ValuesMut<'_, f32>) -> Result<(), CollectiveError>;

    /// Sums `values`, `[n]`, of all ranks; `own` receives the sums at `shards[rank]`. On hosts every element is a balanced
    /// binary tree over the ranks whose left part is the largest power of two.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn reduce_scatter(
        &self,
        values: M::Values<'_, f32>,
        shards: &[Range<usize>],
        own: M::ValuesMut<'_, f32>,
    ) -> Result<(), CollectiveError>;

    /// Writes the `own` of every rank to `shards[rank]` of the `all`, `[n]`, of all ranks.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn all_gather(
        &self,
        own: ValuesIn<'_, M>,
        shards: &[Range<usize>],
        all: ValuesInMut<'_, M>,
    ) -> Result<(), CollectiveError>;

    /// Writes the `values`, `[n]`, of `root` to those of all ranks.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn broadcast(&self, root: usize, values: ValuesInMut<'_, M>) -> Result<(), CollectiveError>;

    /// Sends the values at `sends[peer]` to every rank `peer`, and writes those of the peer to `receives[peer]` of
    /// `received`. What one rank sends to another has the length that the other expects.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn all_to_all(
        &self,
        values: ValuesIn<'_, M>,
        sends: &[Range<usize>],
        received: ValuesInMut<'_, M>,
        receives: &[Range<usize>],
    ) -> Result<(), CollectiveError>;

    /// Returns when every rank has made this call.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn barrier(&self) -> Result<(), CollectiveError>;

    /// Waits until this rank has the results of all its calls. On hosts a call has waited when it returns. `operation` is a
    /// name for errors.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    fn wait(&self, _operation: &'static str) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// This rank, from 0.
    fn rank(&self) -> usize {
        self.position().rank
    }

    /// World size: the number of ranks.
    fn world(&self) -> usize {
        self.position().world
    }
}

/// Ranks on hosts, which also exchange messages whose length only the sender knows.
pub trait HostCollective: Collective<InHostMemory> {
    /// [`Collective::all_gather`] to `root` alone, which gives `Some(all)`; the others give `None`.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn gather(
        &self,
        root: usize,
        own: &[f32],
        shards: &[Range<usize>],
        all: Option<&mut [f32]>,
    ) -> Result<(), CollectiveError>;

    /// Sends the `bytes` of `root` to all ranks; those of the others are ignored. There is no deadline until the root makes
    /// the call: a rank waits for it as long as the root lives, because a leader may have no command for any length of time.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn broadcast_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError>;

    /// The `bytes` of every rank, in order of rank.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// [`Self::all_gather_bytes`] to `root` alone; the others give `None`.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn gather_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, CollectiveError>;

    /// The ranks that give the same `color`, in order of rank, as a collective of their own. Its calls are independent of those
    /// of this one, also from another thread. All ranks make this call.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`], or if the ranks cannot connect.
    fn split(&self, color: usize) -> Result<Box<dyn HostCollective>, CollectiveError>;
}

/// The numbers of the ranks that gave the `color` of this rank, ascending. `all` has the color of every rank as bytes.
fn members(all: &[Vec<u8>], rank: usize) -> Vec<usize> {
    (0..all.len()).filter(|peer| all[*peer] == all[rank]).collect()
}

/// An error of ranks that a split has made of `members`.
fn among(members: &[usize], source: CollectiveError) -> CollectiveError {
    CollectiveError::Among { members: members.to_vec(), source: Box::new(source) }
}

/// Ranges of `len` elements for `world` ranks, as equal as they can be.
#[must_use]
pub fn even_shards(len: usize, world: usize) -> Vec<Range<usize>> {
    (0..world).map(|rank| len * rank / world..len * (rank + 1) / world).collect()
}

/// [`Collective::all_reduce`] on a host: every rank sums its shard, then gathers those of the others.
fn all_reduce_on_host(
    ranks: &impl Collective<InHostMemory>,
    values: &mut [f32],
) -> Result<(), CollectiveError> {
    let Position { rank, world } = ranks.position();
    let shards = even_shards(values.len(), world);
    let mut own = vec![0.0; shards[rank].len()];
    ranks.reduce_scatter(values, &shards, &mut own)?;
    ranks.all_gather(&own, &shards, values)
}
