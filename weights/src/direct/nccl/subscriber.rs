//! The side of one sampler. Invariant: it takes part in every round that names it, also in one of a version that it has, because
//! the others cannot go on without it.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use device::{Buffer, Device, DeviceError, Group, Storage};
use trajectory::PolicyVersion;

use super::super::control::Control;
use super::super::round::{Joined, Round, combined};
use super::super::spares::Spares;
use super::super::{DeviceSubscriber, DeviceWeights, Told, digest, failed};
use super::TRANSPORT;
use crate::http::RemoteConfig;
use crate::hub::After;
use crate::{Hub, Receipt, Received, WeightsError};

/// Rounds that failed and are kept for whoever asks.
const MAX_FAILED: usize = 64;

/// The side of one sampler, on a GPU of its own.
#[derive(Debug)]
pub struct NcclSubscriber<T: Storage> {
    control: Control,
    device: Device,
    spares: Spares<T>,
    plane: Mutex<Plane>,
}

#[derive(Debug, Default)]
struct Plane {
    /// The last round that it was told of.
    round: u64,
    joined: Option<Joined>,
    failed: Vec<String>,
}

/// Why a round did not come to its end.
enum Ended {
    /// A peer is gone or late: there will be another.
    Peers(DeviceError),
    Own(WeightsError),
}

impl<T: Storage> NcclSubscriber<T> {
    /// Subscribes to a hub in another process. `device` has a stream that is not the one that decodes.
    ///
    /// # Errors
    /// As [`RemoteSubscriber::connect`](crate::http::RemoteSubscriber::connect).
    pub fn connect(config: RemoteConfig, device: &Device) -> Result<Self, WeightsError> {
        Ok(Self::new(Control::there(config)?, device))
    }

    /// Subscribes to a hub of this process.
    ///
    /// # Errors
    /// As [`Hub::subscribe`].
    pub fn within(hub: &Hub, name: &str, device: &Device) -> Result<Self, WeightsError> {
        Ok(Self::new(Control::here(hub, name)?, device))
    }

    /// Sends the last receipt now if the hub may not know it; calls that ask for versions do so by themselves.
    ///
    /// # Errors
    /// As [`DeviceSubscriber::applied`].
    pub fn flush(&self) -> Result<(), WeightsError> {
        self.control.flush()
    }

    /// Why rounds failed since this was last asked; each was followed by another.
    ///
    /// # Errors
    /// A thread that panicked in the middle of a round.
    pub fn take_failed(&self) -> Result<Vec<String>, WeightsError> {
        let mut plane = self.plane.lock().map_err(|_| WeightsError::Poisoned)?;
        Ok(std::mem::take(&mut plane.failed))
    }

    fn new(control: Control, device: &Device) -> Self {
        Self { control, device: device.clone(), spares: Spares::new(device), plane: Mutex::default() }
    }

    /// Takes part in a round; `None` if it is one of others, or failed.
    fn take_part(&self, told: &Told, plane: &mut Plane) -> Result<Option<DeviceWeights<T>>, WeightsError> {
        let (version, started) = (told.version, Instant::now());
        let wrong = |what: String| WeightsError::OtherWay { version, transport: TRANSPORT, what };
        told.check::<T>(TRANSPORT)?;
        let round = told.direct.round.as_ref().ok_or_else(|| wrong("it comes otherwise".to_owned()))?;
        plane.round = round.number;
        let Some(place) = round.members.iter().position(|member| member == self.control.name()) else {
            plane.leave();
            return Ok(None);
        };
        round.check(told.parameters).map_err(wrong)?;
        let mut values = self.spares.take(told.parameters)?;
        match plane.receive(&self.device, round, place + 1, &mut values) {
            Ok(()) => {}
            Err(Ended::Own(error)) => {
                plane.leave();
                return Err(error);
            }
            Err(Ended::Peers(error)) => {
                plane.leave();
                self.spares.give_back(values);
                if plane.failed.len() < MAX_FAILED {
                    plane.failed.push(format!("{version}: {error}"));
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

impl Plane {
    /// Receives all shards, in the order of their owners.
    fn receive<T: Storage>(
        &mut self,
        device: &Device,
        round: &Round,
        rank: usize,
        into: &mut Buffer<T>,
    ) -> Result<(), Ended> {
        if self.joined.as_ref().is_none_or(|joined| joined.epoch != round.epoch) {
            self.leave();
            let what = "join the owners of weights";
            let join = |owner: usize| {
                let id =
                    round.id(owner).map_err(|reason| Ended::Own(WeightsError::Device { what, reason }))?;
                Group::join(device, &id, rank, round.world(), round.deadline())
                    .map_err(|error| ended(what, error))
            };
            let mut joined = Joined { epoch: round.epoch, groups: Vec::new() };
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

fn ended(what: &'static str, error: DeviceError) -> Ended {
    match error {
        DeviceError::Group { .. } => Ended::Peers(error),
        error => Ended::Own(failed(what)(error)),
    }
}

impl<T: Storage> DeviceSubscriber<T> for NcclSubscriber<T> {
    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<DeviceWeights<T>>, WeightsError> {
        let deadline = Instant::now() + wait;
        let mut plane = self.plane.lock().map_err(|_| WeightsError::Poisoned)?;
        loop {
            let Some(told) = self.control.told(After::Round(plane.round), deadline)? else { return Ok(None) };
            match self.take_part(&told, &mut plane)? {
                Some(weights) if Some(weights.version) > after => return Ok(Some(weights)),
                // It is there already.
                Some(again) => self.spares.give_back(again.values),
                None => {}
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
    }

    fn give_back(&self, values: Buffer<T>) {
        self.spares.give_back(values);
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        self.control.applied(receipt)
    }
}
