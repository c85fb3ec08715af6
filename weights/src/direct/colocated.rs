//! One process: the publisher copies on the device into buffers that samplers swap in.
//!
//! Invariant: one copy per push and sampler, and neither side waits for the other. A version that a sampler has not
//! taken is overwritten by a newer one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use device::{Device, DeviceBuffer, Storage, View};
use trajectory::PolicyVersion;

use super::hub_connection::{HubConnection, OVERTAKEN};
use super::spare_buffers::SpareBuffers;
use super::{
    DevicePublisher, DevicePush, DeviceSubscriber, DeviceWeights, WeightsLocation, announce, digest, failed,
    is_new,
};
use crate::hub::After;
use crate::{Hub, Receipt, Received, WeightsError};

/// The publisher of a hub, for samplers of its process.
#[derive(Debug)]
pub struct ColocatedPublisher<T: Storage> {
    hub: Hub,
    device: Device,
    pushing: Mutex<ColocatedState<T>>,
}

#[derive(Debug)]
struct ColocatedState<T: Storage> {
    samplers: Vec<Weak<Mailbox<T>>>,
    last: Option<DevicePush>,
}

/// The newest version for one sampler.
#[derive(Debug)]
struct Mailbox<T: Storage> {
    spares: SpareBuffers<T>,
    newest: Mutex<Option<(PolicyVersion, DeviceBuffer<T>)>>,
    /// The last version that was put here.
    put: Mutex<Option<PolicyVersion>>,
}

/// A subscriber in the publisher's process.
#[derive(Debug)]
pub struct ColocatedSubscriber<T: Storage> {
    control: HubConnection,
    device: Device,
    mailbox: Arc<Mailbox<T>>,
}

impl<T: Storage> ColocatedPublisher<T> {
    /// Publishes to `hub`, which must have no other publisher. Copies are made on the stream of `device`, in its order.
    #[must_use]
    pub fn new(hub: Hub, device: &Device) -> Self {
        let pushing = Mutex::new(ColocatedState { samplers: Vec::new(), last: None });
        Self { hub, device: device.clone(), pushing }
    }

    /// Registers a subscriber, whose name must be free. `device` is the publisher's GPU or one that it reaches, with
    /// another stream than decoding. [`DevicePublisher::resend`] sends what was published before.
    ///
    /// # Errors
    /// As [`Hub::subscribe`].
    pub fn subscribe(&self, name: &str, device: &Device) -> Result<ColocatedSubscriber<T>, WeightsError> {
        let control = HubConnection::here(&self.hub, name)?;
        let spares = SpareBuffers::new(device);
        let mailbox = Arc::new(Mailbox { spares, newest: Mutex::default(), put: Mutex::default() });
        self.pushing()?.samplers.push(Arc::downgrade(&mailbox));
        Ok(ColocatedSubscriber { control, device: device.clone(), mailbox })
    }

    /// Copies a version to all samplers that do not have it; their number.
    fn put(
        &self,
        pushing: &mut ColocatedState<T>,
        version: PolicyVersion,
        values: View<'_, T>,
    ) -> Result<usize, WeightsError> {
        pushing.samplers.retain(|mailbox| mailbox.strong_count() > 0);
        let there = pushing.samplers.iter().filter_map(Weak::upgrade);
        let late: Vec<_> = there.filter(|mailbox| *lock(&mailbox.put) < Some(version)).collect();
        if late.is_empty() {
            return Ok(0);
        }
        let mut copies = Vec::with_capacity(late.len());
        for mailbox in &late {
            let untaken = lock(&mailbox.newest).take().map(|(_, buffer)| buffer);
            let untaken = untaken.filter(|buffer| buffer.len() == values.len());
            let mut copy = untaken.map_or_else(|| mailbox.spares.take(values.len()), Ok)?;
            let copied = self.device.copy_to(mailbox.spares.device(), values, copy.all_mut());
            copied.map_err(failed("copy weights"))?;
            copies.push(copy);
        }
        // Samplers read the copies on other streams.
        self.device.synchronize().map_err(failed("copy weights"))?;
        for (mailbox, copy) in late.iter().zip(copies) {
            *lock(&mailbox.newest) = Some((version, copy));
            *lock(&mailbox.put) = Some(version);
        }
        Ok(late.len())
    }

    fn pushing(&self) -> Result<MutexGuard<'_, ColocatedState<T>>, WeightsError> {
        self.pushing.lock().map_err(|_| WeightsError::Poisoned)
    }
}

/// Ignores poisoning: every change is complete.
fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Storage> DevicePublisher<T> for ColocatedPublisher<T> {
    fn publish(&self, version: PolicyVersion, values: View<'_, T>) -> Result<(), WeightsError> {
        let started = Instant::now();
        let mut pushing = self.pushing()?;
        if !is_new(&self.hub, &self.device, version, values)? {
            return Ok(());
        }
        self.put(&mut pushing, version, values)?;
        let location = WeightsLocation::within::<T>();
        pushing.last = Some(announce(&self.hub, &self.device, version, location, values, started)?);
        Ok(())
    }

    fn resend(&self, values: View<'_, T>) -> Result<bool, WeightsError> {
        let mut pushing = self.pushing()?;
        let Some(version) = pushing.last.map(|last| last.version) else { return Ok(false) };
        Ok(self.put(&mut pushing, version, values)? > 0)
    }

    fn last_push(&self) -> Result<Option<DevicePush>, WeightsError> {
        Ok(self.pushing()?.last)
    }

    fn hub(&self) -> &Hub {
        &self.hub
    }
}

impl<T: Storage> Drop for ColocatedPublisher<T> {
    fn drop(&mut self) {
        self.hub.publisher_gone();
    }
}

impl<T: Storage> DeviceSubscriber<T> for ColocatedSubscriber<T> {
    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<DeviceWeights<T>>, WeightsError> {
        let deadline = Instant::now() + wait;
        loop {
            let Some(notice) = self.control.next_notice(After::Version(after), deadline)? else {
                return Ok(None);
            };
            notice.check::<T>("the memory of the process")?;
            let (version, started) = (notice.version, Instant::now());
            // A buffer that was not announced yet is not taken.
            if let Some((_, values)) = lock(&self.mailbox.newest).take_if(|(there, _)| *there == version) {
                let digest = digest(&self.device, values.all())?;
                let bytes = values.bytes();
                let received = Received { bytes, took: started.elapsed() };
                return Ok(Some(DeviceWeights { version, values, digest, received }));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(OVERTAKEN);
        }
    }

    fn give_back(&self, values: DeviceBuffer<T>) {
        self.mailbox.spares.give_back(values);
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        self.control.applied(receipt)
    }
}
