//! Several GPUs: every shard owner broadcasts its shard in buckets to all samplers (NCCL broadcast groups).
//!
//! ```text
//!   lead:     plan(v) --- hub: round, members, groups ---> samplers;  the plan --- ranks' own channel ---> owners
//!   owners:   send(plan, shard)          group of owner 0: bucket, bucket, ...   group of owner 1: ...
//!   samplers: receive into spare buffers, in the order of the owners
//!   lead:     done(plan, digests of the shards), or again(plan): the live members form a new epoch with new groups
//! ```
//! A [`NcclPublisher`] is the lead, and the only owner by default. With several owners,
//! [`NcclPublisher::publish_shards`] makes the plan; its caller sends it to all ranks and gathers the results, and
//! all repeat the round if one failed.
//! Invariants:
//! - No member waits for a peer longer than the deadline of the round, or after its hold expired at the hub. Samplers
//!   poll the hub meanwhile for a newer round. A failed group is not used again.
//! - The other owners of a process do not wait for a failed owner: the hub notifies them.
//! - Partly received weights are never returned.
//! - Later subscribers are members of the next round; [`DevicePublisher::resend`] makes one at once.

mod subscriber;

pub use self::subscriber::NcclSubscriber;

use std::marker::PhantomData;
use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use device::{Device, DeviceGroup, DeviceGroupId, GroupTimeout, Storage, View};
use trajectory::PolicyVersion;

use super::round::{BroadcastRound, EpochGroups, PushPlan, combined, hex};
use super::{DevicePublisher, DevicePush, digest, dtype, failed};
use crate::hub::{PublicationStatus, PublishedVersion, SubscriberId};
use crate::publisher::same;
use crate::{Digest, Hub, WeightsError};

/// Its name in a recipe.
const TRANSPORT: &str = "nccl";

/// Configuration of broadcasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclConfig {
    /// Bytes per broadcast.
    pub bucket_bytes: usize,
    /// Deadline of every wait for a peer.
    pub deadline: Duration,
    /// How long to wait for samplers after a failed round, before those without a call are dropped. A sampler calls
    /// at least every half second.
    pub grace: Duration,
    /// Number of attempts to send a version, each to the members that still answer.
    pub attempts: usize,
}

impl Default for NcclConfig {
    fn default() -> Self {
        Self {
            bucket_bytes: 64 << 20,
            deadline: Duration::from_secs(30),
            grace: Duration::from_secs(3),
            attempts: 4,
        }
    }
}

/// Decides the members of broadcasts, for all owners of a hub's publisher.
#[derive(Debug)]
pub struct PushLead<T: Storage> {
    hub: Hub,
    device: Device,
    config: NcclConfig,
    state: Mutex<LeadState>,
    values: PhantomData<fn(T)>,
}

#[derive(Debug, Default)]
struct LeadState {
    /// The last plan.
    plan: Option<PushPlan>,
    /// Its groups have failed.
    broken: bool,
    /// The newest version whose digest the hub has.
    digested: Option<PolicyVersion>,
}

/// An owner of a shard.
#[derive(Debug)]
pub struct PushOwner<T: Storage> {
    device: Device,
    index: usize,
    joined: Option<EpochGroups>,
    /// The hub, which knows departed members and failed owners, if it is in this process.
    hub: Option<Hub>,
    /// The number of its current round.
    round: Arc<AtomicU64>,
    values: PhantomData<fn(T)>,
}

/// The publisher of a hub, which owns all weights or leads the shard owners.
#[derive(Debug)]
pub struct NcclPublisher<T: Storage> {
    lead: PushLead<T>,
    pushing: Mutex<BroadcastState<T>>,
}

#[derive(Debug)]
struct BroadcastState<T: Storage> {
    owner: PushOwner<T>,
    last: Option<DevicePush>,
}

impl<T: Storage> PushLead<T> {
    /// For `hub`, which must have no other publisher. `device` is that of the lead's shard.
    #[must_use]
    pub fn new(hub: Hub, device: &Device, config: NcclConfig) -> Self {
        Self { hub, device: device.clone(), config, state: Mutex::default(), values: PhantomData }
    }

    /// Plans the broadcast of a version to all live samplers. `cuts` are the shards of its owners, consecutive. The
    /// samplers are notified before it returns.
    ///
    /// # Errors
    /// As [`DevicePublisher::publish`].
    pub fn plan(&self, version: PolicyVersion, cuts: &[Range<usize>]) -> Result<PushPlan, WeightsError> {
        let mut state = self.state()?;
        let cuts: Vec<_> = cuts.iter().map(|cut| (cut.start, cut.end)).collect();
        if let PublicationStatus::Published(_) = self.hub.known(version)? {
            // The version is only compared.
            state.digested = state.digested.max(Some(version));
            return self.make(&state, version, cuts, Vec::new());
        }
        let members = self.hub.receivers()?;
        let plan = self.make(&state, version, cuts, members)?;
        self.announce(&mut state, plan)
    }

    /// Plans a repetition with the members that still answer, after a failed attempt of any owner.
    ///
    /// # Errors
    /// An earlier mismatch; a device that fails.
    pub fn again(&self, plan: &PushPlan) -> Result<PushPlan, WeightsError> {
        let mut state = self.state()?;
        state.broken = true;
        let left: Vec<_> = plan
            .round
            .members
            .iter()
            .filter(|member| self.hub.departed(slice::from_ref(member)).is_none())
            .collect();
        let all = |there: &[SubscriberId]| left.iter().all(|member| there.contains(member));
        let members = self.hub.wait_receivers(Instant::now(), self.config.grace, all)?;
        let plan = self.make(&state, plan.version(), plan.round.cuts.clone(), members)?;
        self.announce(&mut state, plan)
    }

    /// Plans a broadcast of the newest version, if a live sampler was not a member of the last one.
    ///
    /// # Errors
    /// An earlier mismatch; a device that fails.
    pub fn resend(&self) -> Result<Option<PushPlan>, WeightsError> {
        let mut state = self.state()?;
        let Some(last) = &state.plan else { return Ok(None) };
        let members = self.hub.receivers()?;
        if members.iter().all(|member| last.round.members.contains(member)) {
            return Ok(None);
        }
        let (version, cuts) = (last.version(), last.round.cuts.clone());
        let plan = self.make(&state, version, cuts, members)?;
        self.announce(&mut state, plan).map(Some)
    }

    /// Records that all owners have sent their shards, with their digests in order. Receipts are compared with them.
    ///
    /// # Errors
    /// As [`DevicePublisher::publish`].
    pub fn done(&self, plan: &PushPlan, shards: &[Digest]) -> Result<(), WeightsError> {
        let mut state = self.state()?;
        let (version, digest) = (plan.version(), combined(shards));
        if state.digested >= Some(version) {
            return match self.hub.known(version)? {
                PublicationStatus::Published(before) => same(version, before, digest),
                PublicationStatus::New => Ok(()),
            };
        }
        self.hub.digested(version, digest)?;
        self.hub.settle(None)?;
        state.digested = Some(version);
        Ok(())
    }

    /// The hub.
    #[must_use]
    pub fn hub(&self) -> &Hub {
        &self.hub
    }

    fn make(
        &self,
        state: &LeadState,
        version: PolicyVersion,
        cuts: Vec<(usize, usize)>,
        members: Vec<SubscriberId>,
    ) -> Result<PushPlan, WeightsError> {
        let last = state.plan.as_ref().map(|plan| &plan.round);
        let kept =
            last.filter(|last| !state.broken && last.members == members && last.ids.len() == cuts.len());
        let (epoch, ids) = match kept {
            Some(last) => (last.epoch, last.ids.clone()),
            None if members.is_empty() => (0, Vec::new()),
            None => {
                let new = |_| DeviceGroupId::new(&self.device).map(|id| hex(&id.to_bytes()));
                let ids = (0..cuts.len()).map(new).collect::<Result<_, _>>();
                (clock(), ids.map_err(failed("make a group"))?)
            }
        };
        let number = clock().max(last.map_or(0, |last| last.number + 1));
        let bucket = (self.config.bucket_bytes / size_of::<T>()).max(1);
        let deadline_ms = self.config.deadline.as_millis() as u64;
        let round = BroadcastRound { number, epoch, ids, cuts, members, bucket, deadline_ms };
        Ok(PushPlan { version: version.0, dtype: dtype::<T>().as_str().to_owned(), round })
    }

    fn announce(&self, state: &mut LeadState, plan: PushPlan) -> Result<PushPlan, WeightsError> {
        self.hub.announce(PublishedVersion::Device(plan.version(), plan.parameters(), plan.direct::<T>()))?;
        state.broken = false;
        state.plan = Some(plan.clone());
        Ok(plan)
    }

    fn state(&self) -> Result<MutexGuard<'_, LeadState>, WeightsError> {
        self.state.lock().map_err(|_| WeightsError::Poisoned)
    }
}

impl<T: Storage> Drop for PushLead<T> {
    fn drop(&mut self) {
        self.hub.publisher_gone();
    }
}

impl<T: Storage> PushOwner<T> {
    /// The owner of shard `index`, on the stream of `device`, in its order.
    #[must_use]
    pub fn new(device: &Device, index: usize) -> Self {
        let round = Arc::default();
        Self { device: device.clone(), index, joined: None, hub: None, round, values: PhantomData }
    }

    /// The owner in the process of `hub`: it does not wait for samplers that the hub knows to have departed, or after
    /// another owner of the process has failed.
    #[must_use]
    pub fn watching(self, hub: Hub) -> Self {
        Self { hub: Some(hub), ..self }
    }

    /// Sends `shard` (`[shard_len]`) by the plan, and waits until all samplers have it. Returns its digest.
    ///
    /// # Errors
    /// Peers that departed or missed the deadline; a plan of other weights; a device that fails.
    pub fn send(&mut self, plan: &PushPlan, shard: View<'_, T>) -> Result<Digest, WeightsError> {
        self.round.store(plan.round.number, Ordering::Relaxed);
        let sent = self.attempt(plan, shard);
        if let (Err(error), Some(hub)) = (&sent, &self.hub) {
            hub.fail_round(plan.round.number, format!("owner {} has failed: {error}", self.index));
        }
        sent
    }

    fn attempt(&mut self, plan: &PushPlan, shard: View<'_, T>) -> Result<Digest, WeightsError> {
        let round = &plan.round;
        let wrong =
            |what: String| WeightsError::OtherWay { version: plan.version(), transport: TRANSPORT, what };
        round.check(plan.parameters()).map_err(wrong)?;
        let (start, end) = round.cuts.get(self.index).copied().unwrap_or_default();
        if (end - start, plan.is_of::<T>()) != (shard.len(), true) {
            let what =
                format!("owner {} has {} weights, and the plan {:?}", self.index, shard.len(), round.cuts);
            return Err(wrong(what));
        }
        if round.members.is_empty() {
            return digest(&self.device, shard);
        }
        if let Err(error) = self.broadcast(round, shard) {
            if let Some(joined) = self.joined.take() {
                joined.abort();
            }
            return Err(error);
        }
        digest(&self.device, shard)
    }

    fn broadcast(&mut self, round: &BroadcastRound, shard: View<'_, T>) -> Result<(), WeightsError> {
        if self.joined.as_ref().is_none_or(|joined| joined.epoch != round.epoch) {
            if let Some(old) = self.joined.take() {
                old.abort();
            }
            let what = "join samplers";
            let id = round.id(self.index).map_err(|reason| WeightsError::Device { what, reason })?;
            let give_up = self.hub.clone().map(|hub| {
                let (members, round) = (round.members.clone(), Arc::clone(&self.round));
                let failed = move |hub: &Hub| hub.failed_round(round.load(Ordering::Relaxed));
                Arc::new(move || hub.departed(&members).or_else(|| failed(&hub))) as _
            });
            let timeout = GroupTimeout { deadline: round.deadline(), give_up };
            let group =
                DeviceGroup::join(&self.device, &id, 0, round.world(), timeout).map_err(failed(what))?;
            self.joined = Some(EpochGroups { epoch: round.epoch, groups: vec![group] });
        }
        let start = round.cuts[self.index].0;
        for group in self.joined.iter().flat_map(|joined| &joined.groups) {
            for bucket in round.buckets(self.index) {
                let bucket = shard.slice(bucket.start - start..bucket.end - start);
                group.broadcast_own(bucket).map_err(failed("send weights"))?;
            }
            group.wait("weight push").map_err(failed("send weights"))?;
        }
        Ok(())
    }
}

impl<T: Storage> NcclPublisher<T> {
    /// Publishes to `hub`, which must have no other publisher.
    #[must_use]
    pub fn new(hub: Hub, device: &Device, config: NcclConfig) -> Self {
        let owner = PushOwner::new(device, 0).watching(hub.clone());
        let pushing = Mutex::new(BroadcastState { owner, last: None });
        Self { lead: PushLead::new(hub, device, config), pushing }
    }

    /// Publishes a version with several owners, whose shards are `cuts`, in order. `send` makes all of them send
    /// theirs ([`PushOwner::send`]) and returns the digests, once per attempt. Otherwise as
    /// [`DevicePublisher::publish`].
    ///
    /// # Errors
    /// As [`DevicePublisher::publish`].
    pub fn publish_shards(
        &self,
        version: PolicyVersion,
        cuts: &[Range<usize>],
        mut send: impl FnMut(&PushPlan) -> Result<Vec<Digest>, WeightsError>,
    ) -> Result<(), WeightsError> {
        let (started, mut pushing) = (Instant::now(), self.pushing()?);
        let plan = self.lead.plan(version, cuts)?;
        self.push(&mut pushing, plan, started, |_, plan| send(plan))
    }

    /// The same for [`DevicePublisher::resend`].
    ///
    /// # Errors
    /// As [`DevicePublisher::publish`].
    pub fn resend_shards(
        &self,
        mut send: impl FnMut(&PushPlan) -> Result<Vec<Digest>, WeightsError>,
    ) -> Result<bool, WeightsError> {
        let (started, mut pushing) = (Instant::now(), self.pushing()?);
        let Some(plan) = self.lead.resend()? else { return Ok(false) };
        self.push(&mut pushing, plan, started, |_, plan| send(plan)).map(|()| true)
    }

    fn push(
        &self,
        pushing: &mut BroadcastState<T>,
        mut plan: PushPlan,
        started: Instant,
        mut send: impl FnMut(&mut PushOwner<T>, &PushPlan) -> Result<Vec<Digest>, WeightsError>,
    ) -> Result<(), WeightsError> {
        let (version, mut attempts) = (plan.version(), 1);
        let (digests, moved) = loop {
            match send(&mut pushing.owner, &plan) {
                Ok(digests) => break (digests, started.elapsed()),
                Err(error) if attempts >= self.lead.config.attempts => {
                    return Err(WeightsError::NotSent { version, attempts, reason: error.to_string() });
                }
                Err(_) => plan = self.lead.again(&plan)?,
            }
            attempts += 1;
        };
        self.lead.done(&plan, &digests)?;
        let bytes = (plan.parameters() * size_of::<T>()) as u64;
        pushing.last = Some(DevicePush { version, bytes, moved, took: started.elapsed(), attempts });
        Ok(())
    }

    fn pushing(&self) -> Result<MutexGuard<'_, BroadcastState<T>>, WeightsError> {
        self.pushing.lock().map_err(|_| WeightsError::Poisoned)
    }
}

impl<T: Storage> DevicePublisher<T> for NcclPublisher<T> {
    fn publish(&self, version: PolicyVersion, values: View<'_, T>) -> Result<(), WeightsError> {
        let (started, mut pushing) = (Instant::now(), self.pushing()?);
        let all = 0..values.len();
        let plan = self.lead.plan(version, slice::from_ref(&all))?;
        self.push(&mut pushing, plan, started, |owner, plan| Ok(vec![owner.send(plan, values)?]))
    }

    fn resend(&self, values: View<'_, T>) -> Result<bool, WeightsError> {
        let (started, mut pushing) = (Instant::now(), self.pushing()?);
        let Some(plan) = self.lead.resend()? else { return Ok(false) };
        let send = |owner: &mut PushOwner<T>, plan: &PushPlan| Ok(vec![owner.send(plan, values)?]);
        self.push(&mut pushing, plan, started, send).map(|()| true)
    }

    fn last_push(&self) -> Result<Option<DevicePush>, WeightsError> {
        Ok(self.pushing()?.last)
    }

    fn hub(&self) -> &Hub {
        &self.lead.hub
    }

    fn broadcasting(&self) -> Option<&NcclPublisher<T>> {
        Some(self)
    }
}

/// Nanoseconds since 1970: numbers that increase over restarts of the trainer's process.
fn clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
