//! Devices that work together: they broadcast, gather and sum up, each on its own stream.
//!
//! ```text
//!   one member:  GroupId::new --- any channel --> all: GroupId::from_bytes, Group::join
//!   all:         broadcast / all_gather / reduce_scatter ... wait
//! ```
//! Invariants:
//! - All members make the same calls in the same order.
//! - No call waits longer than the [`Patience`] that the group was joined with; [`Group::wait`] is where GPUs are waited for.
//! - A group that failed once is dead: its devices are free for other work, every later call fails at once, and a new
//!   [`GroupId`] makes a new group of whoever is still there.
//!
//! GPUs talk by NCCL, which wants one GPU for every member. Emulated devices talk within their process.

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

/// First byte of an identifier of NCCL.
const NCCL: u8 = 1;
/// First byte of one of emulated devices.
const EMULATED: u8 = 2;

/// What the members of a group find each other by.
#[derive(Clone, PartialEq, Eq)]
pub struct GroupId(Vec<u8>);

/// What a device says of itself, for all to see whether they can make a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Where those are that it can meet; or why it can meet nobody.
    ground: std::result::Result<String, String>,
    /// Which device it is.
    identity: String,
}

/// How long the members of a group wait for each other.
#[derive(Clone)]
pub struct Patience {
    /// At most.
    pub deadline: Duration,
    /// Asked now and then while a member waits: why it should not, if there is a reason that the group cannot see.
    pub give_up: Option<Arc<dyn Fn() -> Option<String> + Send + Sync>>,
}

/// The membership of one device in a group. Dropping it leaves.
#[derive(Debug)]
pub struct Group {
    device: Device,
    rank: usize,
    world: usize,
    /// `None`: there is nobody else.
    members: Option<Box<dyn Members>>,
    /// Why it is dead.
    dead: OnceLock<String>,
}

/// Memory by its address.
#[derive(Clone, Copy, Debug)]
struct Part {
    address: u64,
    bytes: usize,
}

impl From<Duration> for Patience {
    fn from(deadline: Duration) -> Self {
        Self { deadline, give_up: None }
    }
}

impl fmt::Debug for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Patience").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// What connects the members. Ranges are bytes; `operation` stands in errors.
trait Members: Send + Sync + fmt::Debug {
    /// What the root has at `part` goes to everybody's.
    fn broadcast(&self, root: usize, part: Part) -> Result<()>;

    /// Every member's `own` goes to its range of everybody's `all`.
    fn all_gather(&self, own: Part, cuts: &[Range<usize>], all: Part) -> Result<()>;

    /// The sums over all members of their range of `values`, f32, go to `own`.
    fn reduce_scatter(&self, values: Part, cuts: &[Range<usize>], own: Part) -> Result<()>;

    /// Waits until all of it is done.
    fn wait(&self, operation: &'static str) -> Result<()>;

    /// Ends what is under way. No other call follows.
    fn abort(&self);
}

impl GroupId {
    /// A new identifier, by the device of one of the members to be.
    ///
    /// # Errors
    /// NCCL that is not there.
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

    /// For the channel to the others.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.clone()
    }

    /// From that channel; what is no identifier is refused by [`Group::join`].
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    fn tagged(tag: u8, id: &[u8]) -> Self {
        Self(std::iter::once(tag).chain(id.iter().copied()).collect())
    }
}

impl Candidate {
    /// What `device` says.
    ///
    /// # Errors
    /// If the driver does not say which it is.
    pub fn new(device: &Device) -> Result<Self> {
        let backend = &device.inner.backend;
        let ground = match backend.as_any() {
            #[cfg(feature = "cuda")]
            any if any.is::<crate::cuda::Cuda>() => match nccl::check(device) {
                Ok(()) => Ok("NCCL".to_owned()),
                Err(error) => Err(error.to_string()),
            },
            #[cfg(feature = "emulator")]
            any if any.is::<crate::emulated::Emulated>() => Ok(format!("process {}", std::process::id())),
            _ => Err(format!("{} cannot meet others", backend.name())),
        };
        Ok(Self { ground, identity: backend.identity()? })
    }

    /// For the channel to the others.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let (word, ground) = match &self.ground {
            Ok(ground) => ("meets", ground),
            Err(reason) => ("cannot", reason),
        };
        format!("{word}\n{}\n{ground}", self.identity).into_bytes()
    }

    /// From that channel.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.splitn(3, '\n');
        let mut next = || lines.next().unwrap_or_default().to_owned();
        let (word, identity, ground) = (next(), next(), next());
        Self { ground: if word == "meets" { Ok(ground) } else { Err(ground) }, identity }
    }

    /// Why these, in order of rank, cannot make a group; `None` if they can.
    #[must_use]
    pub fn obstacle(all: &[Self]) -> Option<String> {
        for (rank, candidate) in all.iter().enumerate() {
            let ground = match &candidate.ground {
                Ok(ground) => ground,
                Err(reason) => return Some(format!("rank {rank}: {reason}")),
            };
            for (other, before) in all[..rank].iter().enumerate() {
                if before.identity == candidate.identity {
                    return Some(format!("ranks {other} and {rank} compute on one device"));
                }
                if before.ground.as_ref() != Ok(ground) {
                    return Some(format!(
                        "ranks {other} and {rank} are on devices that cannot reach each other"
                    ));
                }
            }
        }
        None
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupId({} bytes)", self.0.len())
    }
}

impl Group {
    /// Makes `device` member `rank` of the `world` members of the group `id`, and waits until all have come. Nothing of
    /// the group waits longer than `patience` from then on.
    ///
    /// # Errors
    /// NCCL that is not there; members that do not come, two on one GPU, or several with one rank.
    ///
    /// # Panics
    /// If `rank` is not below `world`.
    pub fn join(
        device: &Device,
        id: &GroupId,
        rank: usize,
        world: usize,
        patience: impl Into<Patience>,
    ) -> Result<Self> {
        assert!(rank < world, "member {rank} of {world}");
        let members =
            if world == 1 { None } else { Some(connect(device, id, (rank, world), patience.into())?) };
        Ok(Self { device: device.clone(), rank, world, members, dead: OnceLock::new() })
    }

    /// Which member this is.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// The device, on whose stream all of it happens.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Puts the values of `root` into everybody's, which are as many.
    ///
    /// # Errors
    /// A group that is dead or dies.
    ///
    /// # Panics
    /// If there is no such member.
    #[expect(clippy::needless_pass_by_value, reason = "what is given is written")]
    pub fn broadcast<T: Element>(&self, root: usize, values: ViewMut<'_, T>) -> Result<()> {
        self.broadcast_part(root, part(values.as_view()))
    }

    /// The same by the root itself, which only reads its values.
    ///
    /// # Errors
    /// A group that is dead or dies.
    pub fn broadcast_own<T: Element>(&self, values: View<'_, T>) -> Result<()> {
        self.broadcast_part(self.rank, part(values))
    }

    /// Puts every member's `own` at its range of `cuts` in everybody's `all`. The ranges are one per member, of any length,
    /// and do not overlap.
    ///
    /// # Errors
    /// A group that is dead or dies.
    ///
    /// # Panics
    /// If the ranges are not one per member, lie outside `all`, or that of this member is not as long as `own`.
    #[expect(clippy::needless_pass_by_value, reason = "what is given is written")]
    pub fn all_gather<T: Element>(
        &self,
        own: View<'_, T>,
        cuts: &[Range<usize>],
        all: ViewMut<'_, T>,
    ) -> Result<()> {
        self.check_cuts(cuts, own.len(), all.len());
        self.gather_parts(part(own), &in_bytes::<T>(cuts), part(all.as_view()))
    }

    /// The same where every member's own values lie at their place in `all` already.
    ///
    /// # Errors
    /// A group that is dead or dies.
    ///
    /// # Panics
    /// If the ranges are not one per member or lie outside `all`.
    #[expect(clippy::needless_pass_by_value, reason = "what is given is written")]
    pub fn all_gather_in_place<T: Element>(&self, cuts: &[Range<usize>], all: ViewMut<'_, T>) -> Result<()> {
        let own = cuts.get(self.rank).cloned().unwrap_or_default();
        self.check_cuts(cuts, own.len(), all.len());
        self.gather_parts(part(all.as_view().slice(own)), &in_bytes::<T>(cuts), part(all.as_view()))
    }

    /// Adds up `values` of all members, and gives each the sums at its range of `cuts`. The ranges are one per member, of any
    /// length, and do not overlap. The order of the sum is the same at every call of a group with the same lengths.
    ///
    /// # Errors
    /// A group that is dead or dies.
    ///
    /// # Panics
    /// If the ranges are not one per member, lie outside `values`, or that of this member is not as long as `own`.
    #[expect(clippy::needless_pass_by_value, reason = "what is given is written")]
    pub fn reduce_scatter(
        &self,
        values: View<'_, f32>,
        cuts: &[Range<usize>],
        own: ViewMut<'_, f32>,
    ) -> Result<()> {
        self.check_cuts(cuts, own.len(), values.len());
        let (values, own) = (part(values), part(own.as_view()));
        match self.living("reduce_scatter")? {
            Some(members) => self.noted(members.reduce_scatter(values, &in_bytes::<f32>(cuts), own)),
            None => self.move_part(values.slice(&in_bytes::<f32>(cuts)[0]), own),
        }
    }

    /// Waits until everything that the stream was given is done. `operation` is what it stands for, in errors.
    ///
    /// # Errors
    /// [`DeviceError::Group`] if it is not done when the deadline is over, or a member is gone; the group is dead then.
    pub fn wait(&self, operation: &'static str) -> Result<()> {
        match self.living(operation)? {
            Some(members) => self.noted(members.wait(operation)),
            None => self.device.synchronize(),
        }
    }

    /// Leaves at once, whatever is under way. The others notice, at the latest when their deadline is over.
    pub fn abort(&self) {
        if self.dead.set("this member has left".to_owned()).is_ok()
            && let Some(members) = &self.members
        {
            members.abort();
        }
    }

    fn broadcast_part(&self, root: usize, part: Part) -> Result<()> {
        let (world, rank) = (self.world, self.rank);
        assert!(root < world, "member {root} of {world} is to broadcast to {rank}");
        match self.living("broadcast")? {
            Some(members) if part.bytes > 0 => self.noted(members.broadcast(root, part)),
            _ => Ok(()),
        }
    }

    fn gather_parts(&self, own: Part, cuts: &[Range<usize>], all: Part) -> Result<()> {
        match self.living("all_gather")? {
            Some(members) => self.noted(members.all_gather(own, cuts, all)),
            None => self.move_part(own, all.slice(&cuts[0])),
        }
    }

    fn move_part(&self, from: Part, to: Part) -> Result<()> {
        if from.bytes == 0 || from.address == to.address {
            return Ok(());
        }
        self.device.inner.backend.copy(from.address, to.address, from.bytes)
    }

    fn check_cuts(&self, cuts: &[Range<usize>], own: usize, all: usize) {
        assert_eq!(cuts.len(), self.world, "one range per member");
        assert_eq!(cuts[self.rank].len(), own, "the range of member {} and what it has", self.rank);
        let inside = |cut: &Range<usize>| cut.start <= cut.end && cut.end <= all;
        assert!(cuts.iter().all(inside), "{cuts:?} of {all} values");
    }

    /// The others, unless the group is dead.
    fn living(&self, operation: &'static str) -> Result<Option<&dyn Members>> {
        match self.dead.get() {
            None => Ok(self.members.as_deref()),
            Some(why) => {
                let reason = format!("the group is dead, because {why}; it has to be made anew");
                Err(failed(&self.device, operation, Duration::ZERO, reason))
            }
        }
    }

    /// Ends the group if something failed.
    fn noted(&self, done: Result<()>) -> Result<()> {
        if let Err(error) = &done
            && self.dead.set(error.to_string()).is_ok()
            && let Some(members) = &self.members
        {
            members.abort();
        }
        done
    }
}

impl Part {
    /// Some of the bytes.
    fn slice(self, range: &Range<usize>) -> Self {
        Self { address: self.address + range.start as u64, bytes: range.len() }
    }
}

fn part<T: Element>(view: View<'_, T>) -> Part {
    Part { address: view.address(), bytes: view.len() * size_of::<T>() }
}

fn in_bytes<T>(cuts: &[Range<usize>]) -> Vec<Range<usize>> {
    cuts.iter().map(|cut| cut.start * size_of::<T>()..cut.end * size_of::<T>()).collect()
}

fn connect(
    device: &Device,
    id: &GroupId,
    place: (usize, usize),
    patience: Patience,
) -> Result<Box<dyn Members>> {
    let backend = device.inner.backend.as_any();
    #[cfg(feature = "cuda")]
    if let (true, Some((&NCCL, id))) = (backend.is::<crate::cuda::Cuda>(), id.0.split_first()) {
        return Ok(Box::new(nccl::Communicator::join(device, id, place, patience)?));
    }
    #[cfg(feature = "emulator")]
    if let (true, Some((&EMULATED, id))) = (backend.is::<crate::emulated::Emulated>(), id.0.split_first()) {
        return Ok(Box::new(emulated::Member::join(device, id, place, patience)?));
    }
    let (_, _, _) = (place, patience, (NCCL, EMULATED, id));
    Err(other_kind(device, backend))
}

fn other_kind(device: &Device, _backend: &dyn std::any::Any) -> DeviceError {
    let reason = "the group is one of other devices, or its identifier came damaged".to_owned();
    failed(device, "join", Duration::ZERO, reason)
}

fn failed(device: &Device, operation: &'static str, waited: Duration, reason: String) -> DeviceError {
    DeviceError::Group { device: device.name(), operation, seconds: waited.as_secs_f64(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_meet_that_are_different_and_reach_each_other() {
        let candidate = |ground: &str, identity: &str| Candidate {
            ground: Ok(ground.to_owned()),
            identity: identity.to_owned(),
        };
        let [a, b, again, elsewhere] = [("NCCL", "a"), ("NCCL", "b"), ("NCCL", "a"), ("process 1", "c")]
            .map(|(ground, identity)| candidate(ground, identity));
        let without = Candidate { ground: Err("no\nlibrary".to_owned()), identity: "d".to_owned() };
        for candidate in [&a, &elsewhere, &without] {
            assert_eq!(Candidate::from_bytes(&candidate.to_bytes()), *candidate);
        }
        let obstacle = |all: &[&Candidate]| {
            Candidate::obstacle(&all.iter().map(|candidate| (*candidate).clone()).collect::<Vec<_>>())
        };
        assert_eq!(obstacle(&[&a, &b]), None);
        assert!(obstacle(&[&a, &b, &again]).is_some_and(|why| why.contains("ranks 0 and 2 compute on one")));
        assert!(obstacle(&[&a, &elsewhere]).is_some_and(|why| why.contains("cannot reach")));
        assert!(obstacle(&[&a, &without]).is_some_and(|why| why.contains("rank 1: no\nlibrary")));
        assert_eq!(obstacle(&[]), None);
    }

    #[test]
    fn an_identifier_travels_as_bytes() {
        let id = GroupId::tagged(EMULATED, b"1-2");
        assert_eq!(GroupId::from_bytes(&id.to_bytes()), id);
        assert_ne!(GroupId::tagged(NCCL, b"1-2"), id);
    }
}
