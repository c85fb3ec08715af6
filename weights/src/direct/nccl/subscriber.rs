//! A subscriber of broadcasts. Invariant: it takes part in every round that names it, also in one that repeats its
//! version, because the others cannot continue without it. It waits for no peer once there is a newer round.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use device::{Device, DeviceBuffer, DeviceError, DeviceGroup, GroupTimeout, Storage};
use trajectory::PolicyVersion;

use super::super::hub_connection::HubConnection;
use super::super::round::{BroadcastRound, EpochGroups, combined};
use super::super::spare_buffers::SpareBuffers;
use super::super::{DeviceSubscriber, DeviceWeights, PushNotice, digest, failed};
use super::TRANSPORT;
use crate::http::RemoteConfig;
use crate::hub::After;
use crate::{Hub, Receipt, Received, WeightsError};

/// Maximum number of unread reports of failed rounds.
const MAX_FAILED: usize = 64;
/// Interval of polls for a newer round during a round, which are also the heartbeat.
const ASK: Duration = Duration::from_millis(500);

/// A subscriber on its own GPU.
#[derive(Debug)]
pub struct NcclSubscriber<T: Storage> {
    control: Arc<HubConnection>,
    device: Device,
    spares: SpareBuffers<T>,
    receive: Mutex<ReceiveState>,
}

#[derive(Debug, Default)]
struct ReceiveState {
    /// The last round that it was notified of.
    round: Arc<AtomicU64>,
    joined: Option<EpochGroups>,
    failed: Vec<String>,
}

/// Why a round failed.
enum RoundFailure {
    /// A peer departed or is late: a new round follows.
    Peers(DeviceError),
    Local(WeightsError),
}

impl<T: Storage> NcclSubscriber<T> {
    /// Subscribes to a hub in another process. `device` has a stream that is not the one that decodes.
    ///
    /// # Errors
    /// As [`RemoteSubscriber::connect`](crate::http::RemoteSubscriber::connect).
    pub fn connect(config: RemoteConfig, device: &Device) -> Result<Self, WeightsError> {
        Ok(Self::new(HubConnection::there(config)?, device))
    }

    /// Subscribes to a hub of this process.
    ///
    /// # Errors
    /// As [`Hub::subscribe`].
    pub fn within(hub: &Hub, name: &str, device: &Device) -> Result<Self, WeightsError> {
        Ok(Self::new(HubConnection::here(hub, name)?, device))
    }

    /// Sends the last receipt now if the hub may not know it; calls that ask for versions do so by themselves.
    ///
    /// # Errors
    /// As [`DeviceSubscriber::applied`].
    pub fn flush(&self) -> Result<(), WeightsError> {
        self.control.flush()
    }

    /// Why rounds failed since the last call; each was repeated.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a round.
    pub fn take_failed(&self) -> Result<Vec<String>, WeightsError> {
        let mut receive = self.receive.lock().map_err(|_| WeightsError::Poisoned)?;
        Ok(std::mem::take(&mut receive.failed))
    }

    fn new(control: HubConnection, device: &Device) -> Self {
        let (control, receive) = (Arc::new(control), Mutex::default());
        Self { control, device: device.clone(), spares: SpareBuffers::new(device), receive }
    }

    /// Takes part in a round; `None` if it is not a member, or the round failed.
    fn take_part(
        &self,
        notice: &PushNotice,
        receive: &mut ReceiveState,
    ) -> Result<Option<DeviceWeights<T>>, WeightsError> {
        let (version, started) = (notice.version, Instant::now());
        let wrong = |what: String| WeightsError::OtherWay { version, transport: TRANSPORT, what };
        notice.check::<T>(TRANSPORT)?;
        let round = notice.direct.round.as_ref().ok_or_else(|| wrong("it comes otherwise".to_owned()))?;
        receive.round.store(round.number, Ordering::Relaxed);
        let Some(place) = round.members.iter().position(|member| self.control.is(member)) else {
            receive.leave();
            return Ok(None);
        };
        round.check(notice.parameters).map_err(wrong)?;
        let mut values = self.spares.take(notice.parameters)?;
        match receive.receive(&self.device, &self.control, round, place + 1, &mut values) {
            Ok(()) => {}
            Err(RoundFailure::Local(error)) => {
                receive.leave();
                return Err(error);
            }
            Err(RoundFailure::Peers(error)) => {
                receive.leave();
                self.spares.give_back(values);
                if receive.failed.len() < MAX_FAILED {
                    receive.failed.push(format!("{version}: {error}"));
                }
                return Ok(None);
            }
        }
        let shards = round.cuts.iter().map(|(start, end)| digest(&self.device, values.view(*start..*end)));
        let digest = combined(&shards.collect::<Result<Vec<_>, _>>()?);
        let bytes = values.bytes();
        let received = Received { bytes, took: started.elapsed() };
        Ok(Some(DeviceWeights { version, values, digest, received }))
    }
}

impl ReceiveState {
    /// Receives all shards, in the order of their owners.
    fn receive<T: Storage>(
        &mut self,
        device: &Device,
        control: &Arc<HubConnection>,
        round: &BroadcastRound,
        rank: usize,
        into: &mut DeviceBuffer<T>,
    ) -> Result<(), RoundFailure> {
        if self.joined.as_ref().is_none_or(|joined| joined.epoch != round.epoch) {
            self.leave();
            let what = "join the owners of weights";
            let join = |owner: usize| {
                let id = round
                    .id(owner)
                    .map_err(|reason| RoundFailure::Local(WeightsError::Device { what, reason }))?;
                let give_up = other_round(Arc::clone(control), Arc::clone(&self.round));
                let timeout = GroupTimeout { deadline: round.deadline(), give_up: Some(Arc::new(give_up)) };
                DeviceGroup::join(device, &id, rank, round.world(), timeout)
                    .map_err(|error| ended(what, error))
            };
            let mut joined = EpochGroups { epoch: round.epoch, groups: Vec::new() };
            for owner in 0..round.cuts.len() {
                match join(owner) {
                    Ok(group) => joined.groups.push(group),
                    Err(error) => {
                        joined.abort();
                        return Err(error);
                    }
                }
            }
            self.joined = Some(joined);
        }
        let what = "receive weights";
        let groups = self.joined.iter().flat_map(|joined| &joined.groups);
        for (owner, group) in groups.clone().enumerate() {
            for bucket in round.buckets(owner) {
                group.broadcast(0, into.view_mut(bucket)).map_err(|error| ended(what, error))?;
            }
        }
        groups.into_iter().try_for_each(|group| group.wait("weight push").map_err(|error| ended(what, error)))
    }

    fn leave(&mut self) {
        if let Some(joined) = self.joined.take() {
            joined.abort();
        }
    }
}

/// Whether there is a newer round than `round`. Polls the hub at intervals.
fn other_round(control: Arc<HubConnection>, round: Arc<AtomicU64>) -> impl Fn() -> Option<String> {
    let asked = Mutex::new(Instant::now());
    move || {
        let mut asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.elapsed() < ASK {
            return None;
        }
        let notice = control.next_notice(After::Round(round.load(Ordering::Relaxed)), Instant::now());
        *asked = Instant::now();
        notice.map_or_else(
            |error| Some(error.to_string()),
            |notice| notice.map(|_| "there is another round".to_owned()),
        )
    }
}

fn ended(what: &'static str, error: DeviceError) -> RoundFailure {
    match error {
        DeviceError::Group { .. } => RoundFailure::Peers(error),
        error => RoundFailure::Local(failed(what)(error)),
    }
}

impl<T: Storage> DeviceSubscriber<T> for NcclSubscriber<T> {
    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<DeviceWeights<T>>, WeightsError> {
        let deadline = Instant::now() + wait;
        let mut receive = self.receive.lock().map_err(|_| WeightsError::Poisoned)?;
        loop {
            let known = After::Round(receive.round.load(Ordering::Relaxed));
            let Some(notice) = self.control.next_notice(known, deadline)? else { return Ok(None) };
            match self.take_part(&notice, &mut receive)? {
                Some(weights) if Some(weights.version) > after => return Ok(Some(weights)),
                // It is a repetition of a known version.
                Some(again) => self.spares.give_back(again.values),
                None => {}
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
    }

    fn give_back(&self, values: DeviceBuffer<T>) {
        self.spares.give_back(values);
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        self.control.applied(receipt)
    }
}
