//! Device groups: broadcast, all-gather and reduce-scatter between devices, on the stream of each.
//!
//! ```text
//!   one member:  DeviceGroupId::new --- any channel --> all: DeviceGroupId::from_bytes, DeviceGroup::join
//!   all:         broadcast / all_gather / reduce_scatter ... wait
//! ```
//! Invariants:
//! - All members make the same calls in the same order.
//! - No call waits longer than the [`GroupTimeout`] of the group; [`DeviceGroup::wait`] waits for GPUs.
//! - A group is unusable after its first error: its devices are free for other work, every later call fails at once,
//!   and the remaining members form a new group with a new [`DeviceGroupId`].
//!
//! GPUs communicate through NCCL, which requires one GPU per member. Emulated devices communicate within their process.

#[cfg(feature = "emulator")]
mod emulated;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(any(feature = "cuda", feature = "emulator"))]
mod waiting;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::device::Device;
use crate::element::Element;
use crate::error::{DeviceError, Result};
use crate::memory::{View, ViewMut};

/// First byte of an id for NCCL.
const NCCL: u8 = 1;
/// First byte of an id for emulated devices.
const EMULATED: u8 = 2;

/// Id of a group, which its members share to rendezvous.
#[derive(Clone, PartialEq, Eq)]
pub struct DeviceGroupId(Vec<u8>);

/// What a device reports, for the decision whether devices can form a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupCandidate {
    /// The transport that connects it to others, or the reason why it has none.
    transport: std::result::Result<String, String>,
    /// Unique id of the device across processes.
    identity: String,
}

/// How long members of a group wait for each other.
#[derive(Clone)]
pub struct GroupTimeout {
    /// Deadline of every call.
    pub deadline: Duration,
    /// Polled during a wait; a reason aborts it. For failures that the group cannot detect.
    pub give_up: Option<Arc<dyn Fn() -> Option<String> + Send + Sync>>,
}

/// Membership of one device in a group. Dropping it leaves the group.
#[derive(Debug)]
pub struct DeviceGroup {
    device: Device,
    rank: usize,
    world: usize,
    /// `None` for a group of one.
    members: Option<Box<dyn GroupBackend>>,
    /// Reason why the group is unusable.
    failed_because: OnceLock<String>,
}

/// A range of device memory.
#[derive(Clone, Copy, Debug)]
struct MemoryRange {
    address: u64,
    bytes: usize,
}

impl From<Duration> for GroupTimeout {
    fn from(deadline: Duration) -> Self {
        Self { deadline, give_up: None }
    }
}

impl fmt::Debug for GroupTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupTimeout").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// Communication between the members. Ranges are in bytes; `operation` is a name for errors.
trait GroupBackend: Send + Sync + fmt::Debug {
    /// Copies `part` of `root` to `part` of all members.
    fn broadcast(&self, root: usize, part: MemoryRange) -> Result<()>;

    /// Copies `own` of each member to its range of `all` on every member.
    fn all_gather(&self, own: MemoryRange, cuts: &[Range<usize>], all: MemoryRange) -> Result<()>;

    /// Sums the f32 `values` of all members; each member receives its range in `own`.
    fn reduce_scatter(&self, values: MemoryRange, cuts: &[Range<usize>], own: MemoryRange) -> Result<()>;

    /// Copies `sends[rank]` of `values` of each member to `receives[its rank]` of `received` of the member `rank`.
    fn all_to_all(
        &self,
        values: MemoryRange,
        sends: &[Range<usize>],
        received: MemoryRange,
        receives: &[Range<usize>],
    ) -> Result<()>;

    /// Waits until all calls are complete.
    fn wait(&self, operation: &'static str) -> Result<()>;

    /// Aborts calls in progress. No other call follows.
    fn abort(&self);
}

impl DeviceGroupId {
    /// Creates an id; `device` is that of one member.
    ///
    /// # Errors
    /// If NCCL is not available.
    pub fn new(device: &Device) -> Result<Self> {
        let backend = device.inner.backend.as_any();
        #[cfg(feature = "cuda")]
        if backend.is::<crate::cuda::Cuda>() {
            return nccl::new_id(device).map(|id| Self::tagged(NCCL, &id));
        }
        #[cfg(feature = "emulator")]
        if backend.is::<crate::emulated::Emulated>() {
            return Ok(Self::tagged(EMULATED, emulated::new_id().as_bytes()));
        }
        Err(other_kind(device, backend))
    }

    /// Serializes the id for the other members.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.clone()
    }

    /// Deserializes an id; [`DeviceGroup::join`] rejects an invalid one.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    fn tagged(tag: u8, id: &[u8]) -> Self {
        Self(std::iter::once(tag).chain(id.iter().copied()).collect())
    }
}

impl GroupCandidate {
    /// The report of `device`.
    ///
    /// # Errors
    /// If the driver does not report the device's id.
    pub fn new(device: &Device) -> Result<Self> {
        let backend = &device.inner.backend;
        let transport = match backend.as_any() {
            #[cfg(feature = "cuda")]
            any if any.is::<crate::cuda::Cuda>() => match nccl::check(device) {
                Ok(()) => Ok("NCCL".to_owned()),
                Err(error) => Err(error.to_string()),
            },
            #[cfg(feature = "emulator")]
            any if any.is::<crate::emulated::Emulated>() => Ok(format!("process {}", std::process::id())),
            _ => Err(format!("{} has no transport to other devices", backend.name())),
        };
        Ok(Self { transport, identity: backend.identity()? })
    }

    /// Serializes the report for the other members.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let (word, transport) = match &self.transport {
            Ok(transport) => ("transport", transport),
            Err(reason) => ("none", reason),
        };
        format!("{word}\n{}\n{transport}", self.identity).into_bytes()
    }

    /// Deserializes a report.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.splitn(3, '\n');
        let mut next = || lines.next().unwrap_or_default().to_owned();
        let (word, identity, transport) = (next(), next(), next());
        Self { transport: if word == "transport" { Ok(transport) } else { Err(transport) }, identity }
    }

    /// Why devices, in order of rank, cannot form a group; `None` if they can.
    #[must_use]
    pub fn obstacle(all: &[Self]) -> Option<String> {
        for (rank, candidate) in all.iter().enumerate() {
            let transport = match &candidate.transport {
                Ok(transport) => transport,
                Err(reason) => return Some(format!("rank {rank}: {reason}")),
            };
            for (other, before) in all[..rank].iter().enumerate() {
                if before.identity == candidate.identity {
                    return Some(format!("ranks {other} and {rank} share one device"));
                }
                if before.transport.as_ref() != Ok(transport) {
                    return Some(format!(
                        "ranks {other} and {rank} are on devices that cannot reach each other"
                    ));
                }
            }
        }
        None
    }
}

impl fmt::Debug for DeviceGroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceGroupId({} bytes)", self.0.len())
    }
}

impl DeviceGroup {
    /// Joins `device` to the group `id` and waits for all members. `timeout` applies to all later calls too.
    ///
    /// # Errors
    /// If NCCL is not available, a member does not join, or two members have one GPU or rank.
    ///
    /// # Panics
    /// If the rank is not below the world size.
    pub fn join(
        device: &Device,
        id: &DeviceGroupId,
        rank: usize,
        world: usize,
        timeout: impl Into<GroupTimeout>,
    ) -> Result<Self> {
        assert!(rank < world, "rank {rank} of world size {world}");
        let members = if world == 1 { None } else { Some(connect(device, id, rank, world, timeout.into())?) };
        Ok(Self { device: device.clone(), rank, world, members, failed_because: OnceLock::new() })
    }

    /// Rank of this member.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// World size: the number of members.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// The device, whose stream runs the operations.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Broadcasts `values [n]` of `root` to all members.
    ///
    /// # Errors
    /// If the group is or becomes unusable.
    ///
    /// # Panics
    /// If `root` is not below the world size.
    #[expect(clippy::needless_pass_by_value, reason = "the view is written")]
    pub fn broadcast<T: Element>(&self, root: usize, values: ViewMut<'_, T>) -> Result<()> {
        self.broadcast_part(root, part(values.as_view()))
    }

    /// Broadcasts the root's own `values [n]`; called by the root, which does not need a mutable view.
    ///
    /// # Errors
    /// If the group is or becomes unusable.
    pub fn broadcast_own<T: Element>(&self, values: View<'_, T>) -> Result<()> {
        self.broadcast_part(self.rank, part(values))
    }

    /// All-gather: copies `own [cuts[rank]]` of each member to its range of `all [n]` on every member. `cuts` has one
    /// range per member, of any length, without overlap.
    ///
    /// # Errors
    /// If the group is or becomes unusable.
    ///
    /// # Panics
    /// If there is not one range per member, a range is outside `all`, or `own` has another length than its range.
    #[expect(clippy::needless_pass_by_value, reason = "the view is written")]
    pub fn all_gather<T: Element>(
        &self,
        own: View<'_, T>,
        cuts: &[Range<usize>],
        all: ViewMut<'_, T>,
    ) -> Result<()> {
        self.check_cuts(cuts, own.len(), all.len());
        self.gather_parts(part(own), &in_bytes::<T>(cuts), part(all.as_view()))
    }

    /// All-gather of `all [n]` in place: each member's values are already in its range.
    ///
    /// # Errors
    /// If the group is or becomes unusable.
    ///
    /// # Panics
    /// If there is not one range per member, or a range is outside `all`.
    #[expect(clippy::needless_pass_by_value, reason = "the view is written")]
    pub fn all_gather_in_place<T: Element>(&self, cuts: &[Range<usize>], all: ViewMut<'_, T>) -> Result<()> {
        let own = cuts.get(self.rank).cloned().unwrap_or_default();
        self.check_cuts(cuts, own.len(), all.len());
        self.gather_parts(part(all.as_view().slice(own)), &in_bytes::<T>(cuts), part(all.as_view()))
    }

    /// Reduce-scatter: sums `values [n]` of all members; each receives its range in `own [cuts[rank]]`. `cuts` has one
    /// range per member, of any length, without overlap. The order of the sum is fixed for a group and these lengths.
    ///
    /// # Errors
    /// If the group is or becomes unusable.
    ///
    /// # Panics
    /// If there is not one range per member, a range is outside `values`, or `own` has another length than its range.
    #[expect(clippy::needless_pass_by_value, reason = "the view is written")]
    pub fn reduce_scatter(
        &self,
        values: View<'_, f32>,
        cuts: &[Range<usize>],
        own: ViewMut<'_, f32>,
    ) -> Result<()> {
        self.check_cuts(cuts, own.len(), values.len());
        let (values, own) = (part(values), part(own.as_view()));
        match self.backend("reduce_scatter")? {
            Some(members) => self.fail_on_error(members.reduce_scatter(values, &in_bytes::<f32>(cuts), own)),
            None => self.move_part(values.slice(&in_bytes::<f32>(cuts)[0]), own),
        }
    }

    /// All-to-all: copies `sends[rank]` of `values [n]` to the member `rank`, which receives it in its `received [m]` at
    /// `receives` of the sender. There is one range per member on each side, without overlap, and the sender's is as long as
    /// the receiver's.
    ///
    /// # Errors
    /// If the group is or becomes unusable, or, on emulated devices, two lengths differ.
    ///
    /// # Panics
    /// If there is not one range per member, or a range is outside the values.
    pub fn all_to_all<T: Element>(
        &self,
        values: View<'_, T>,
        sends: &[Range<usize>],
        received: ViewMut<'_, T>,
        receives: &[Range<usize>],
    ) -> Result<()> {
        let own = |ranges: &[Range<usize>]| ranges.get(self.rank).map_or(0, Range::len);
        self.check_cuts(sends, own(sends), values.len());
        self.check_cuts(receives, own(receives), received.len());
        assert_eq!(own(sends), own(receives), "what member {} sends itself", self.rank);
        let (from, to) = (part(values), part(received.as_view()));
        let (sends, receives) = (in_bytes::<T>(sends), in_bytes::<T>(receives));
        match self.backend("all_to_all")? {
            Some(members) => self.fail_on_error(members.all_to_all(from, &sends, to, &receives)),
            None => self.move_part(from.slice(&sends[0]), to.slice(&receives[0])),
        }
    }

    /// Waits until the stream is idle. `operation` is a name for errors.
    ///
    /// # Errors
    /// [`DeviceError::Group`] at the deadline or if a member has left; the group is unusable then.
    pub fn wait(&self, operation: &'static str) -> Result<()> {
        match self.backend(operation)? {
            Some(members) => self.fail_on_error(members.wait(operation)),
            None => self.device.synchronize(),
        }
    }

    /// Leaves the group and aborts calls in progress. Other members notice at their deadline at the latest.
    pub fn abort(&self) {
        if self.failed_because.set("this member has left".to_owned()).is_ok()
            && let Some(members) = &self.members
        {
            members.abort();
        }
    }

    fn broadcast_part(&self, root: usize, part: MemoryRange) -> Result<()> {
        let (world, rank) = (self.world, self.rank);
        assert!(root < world, "root {root} of world size {world}, called by rank {rank}");
        match self.backend("broadcast")? {
            Some(members) if part.bytes > 0 => self.fail_on_error(members.broadcast(root, part)),
            _ => Ok(()),
        }
    }

    fn gather_parts(&self, own: MemoryRange, cuts: &[Range<usize>], all: MemoryRange) -> Result<()> {
        match self.backend("all_gather")? {
            Some(members) => self.fail_on_error(members.all_gather(own, cuts, all)),
            None => self.move_part(own, all.slice(&cuts[0])),
        }
    }

    fn move_part(&self, from: MemoryRange, to: MemoryRange) -> Result<()> {
        if from.bytes == 0 || from.address == to.address {
            return Ok(());
        }
        self.device.inner.backend.copy(from.address, to.address, from.bytes)
    }

    fn check_cuts(&self, cuts: &[Range<usize>], own: usize, all: usize) {
        assert_eq!(cuts.len(), self.world, "one range per rank");
        assert_eq!(cuts[self.rank].len(), own, "length of the range of rank {} and of its values", self.rank);
        let inside = |cut: &Range<usize>| cut.start <= cut.end && cut.end <= all;
        assert!(cuts.iter().all(inside), "{cuts:?} of {all} values");
    }

    /// Communication with the other members; an error if the group is unusable.
    fn backend(&self, operation: &'static str) -> Result<Option<&dyn GroupBackend>> {
        match self.failed_because.get() {
            None => Ok(self.members.as_deref()),
            Some(why) => {
                let reason =
                    format!("the group is unusable after an earlier error: {why}; create a new group");
                Err(failed(&self.device, operation, Duration::ZERO, reason))
            }
        }
    }

    /// Makes the group unusable after an error.
    fn fail_on_error(&self, done: Result<()>) -> Result<()> {
        if let Err(error) = &done
            && self.failed_because.set(error.to_string()).is_ok()
            && let Some(members) = &self.members
        {
            members.abort();
        }
        done
    }
}

impl MemoryRange {
    /// A part of the range.
    fn slice(self, range: &Range<usize>) -> Self {
        Self { address: self.address + range.start as u64, bytes: range.len() }
    }
}

fn part<T: Element>(view: View<'_, T>) -> MemoryRange {
    MemoryRange { address: view.address(), bytes: view.len() * size_of::<T>() }
}

fn in_bytes<T>(cuts: &[Range<usize>]) -> Vec<Range<usize>> {
    cuts.iter().map(|cut| cut.start * size_of::<T>()..cut.end * size_of::<T>()).collect()
}

fn connect(
    device: &Device,
    id: &DeviceGroupId,
    rank: usize,
    world: usize,
    timeout: GroupTimeout,
) -> Result<Box<dyn GroupBackend>> {
    let backend = device.inner.backend.as_any();
    #[cfg(feature = "cuda")]
    if let (true, Some((&NCCL, id))) = (backend.is::<crate::cuda::Cuda>(), id.0.split_first()) {
        return Ok(Box::new(nccl::Communicator::join(device, id, rank, world, timeout)?));
    }
    #[cfg(feature = "emulator")]
    if let (true, Some((&EMULATED, id))) = (backend.is::<crate::emulated::Emulated>(), id.0.split_first()) {
        return Ok(Box::new(emulated::EmulatedMember::join(device, id, rank, world, timeout)?));
    }
    let (_, _, _) = ((rank, world), timeout, (NCCL, EMULATED, id));
    Err(other_kind(device, backend))
}

fn other_kind(device: &Device, _backend: &dyn std::any::Any) -> DeviceError {
    let reason = "the group is for another kind of device, or its id is invalid".to_owned();
    failed(device, "join", Duration::ZERO, reason)
}

fn failed(device: &Device, operation: &'static str, waited: Duration, reason: String) -> DeviceError {
    DeviceError::Group { device: device.name(), operation, seconds: waited.as_secs_f64(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_a_group_are_distinct_and_connected() {
        let candidate = |transport: &str, identity: &str| GroupCandidate {
            transport: Ok(transport.to_owned()),
            identity: identity.to_owned(),
        };
        let [a, b, again, elsewhere] = [("NCCL", "a"), ("NCCL", "b"), ("NCCL", "a"), ("process 1", "c")]
            .map(|(transport, identity)| candidate(transport, identity));
        let without = GroupCandidate { transport: Err("no\nlibrary".to_owned()), identity: "d".to_owned() };
        for candidate in [&a, &elsewhere, &without] {
            assert_eq!(GroupCandidate::from_bytes(&candidate.to_bytes()), *candidate);
        }
        let obstacle = |all: &[&GroupCandidate]| {
            GroupCandidate::obstacle(&all.iter().map(|candidate| (*candidate).clone()).collect::<Vec<_>>())
        };
        assert_eq!(obstacle(&[&a, &b]), None);
        assert!(obstacle(&[&a, &b, &again]).is_some_and(|why| why.contains("ranks 0 and 2 share one")));
        assert!(obstacle(&[&a, &elsewhere]).is_some_and(|why| why.contains("cannot reach")));
        assert!(obstacle(&[&a, &without]).is_some_and(|why| why.contains("rank 1: no\nlibrary")));
        assert_eq!(obstacle(&[]), None);
    }

    #[test]
    fn a_group_id_round_trips_as_bytes() {
        let id = DeviceGroupId::tagged(EMULATED, b"1-2");
        assert_eq!(DeviceGroupId::from_bytes(&id.to_bytes()), id);
        assert_ne!(DeviceGroupId::tagged(NCCL, b"1-2"), id);
    }
}
