//! One process: samplers decode from a copy that the publisher makes on the device.
//!
//! Invariant: one copy per push, however many samplers, and none of them waits for it. What no sampler has taken yet is
//! forgotten when something newer comes.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use device::{Buffer, Device, Storage, View};
use trajectory::PolicyVersion;

use super::control::{Control, OVERTAKEN};
use super::spares::Spares;
use super::{
    DevicePublisher, DevicePush, DeviceSubscriber, DeviceWeights, Direct, announce, digest, failed, is_new,
};
use crate::hub::After;
use crate::{Hub, Lag, Receipt, Received, WeightsError};

/// The newest version, for whoever of the process wants it.
type Shelf<T> = Arc<Mutex<Option<(PolicyVersion, Arc<Buffer<T>>)>>>;

/// A hub's one publisher.
#[derive(Debug)]
pub struct DeviceMemory<T: Storage> {
    hub: Hub,
    device: Device,
    wait: Duration,
    shelf: Shelf<T>,
    pushing: Mutex<Pushing<T>>,
}

#[derive(Debug)]
struct Pushing<T: Storage> {
    spares: Spares<T>,
    last: Option<DevicePush>,
}

/// The side of one sampler.
#[derive(Debug)]
pub struct DeviceMemorySubscriber<T: Storage> {
    control: Control,
    device: Device,
    shelf: Shelf<T>,
}

impl<T: Storage> DeviceMemory<T> {
    /// Publishes to `hub`, which must have no other publisher. Copies are made on the stream of `device`, in its order; a
    /// push waits up to `wait` for samplers that hold two versions before.
    #[must_use]
    pub fn new(hub: Hub, device: &Device, wait: Duration) -> Self {
        let pushing = Mutex::new(Pushing { spares: Spares::new(device), last: None });
        Self { hub, device: device.clone(), wait, shelf: Shelf::default(), pushing }
    }

    /// Adds a subscriber, whose name must be free. `device` is the publisher's GPU, with a stream that is not the one that
    /// decodes.
    ///
    /// # Errors
    /// As [`Hub::subscribe`].
    pub fn subscribe(&self, name: &str, device: &Device) -> Result<DeviceMemorySubscriber<T>, WeightsError> {
        let control = Control::here(&self.hub, name)?;
        Ok(DeviceMemorySubscriber { control, device: device.clone(), shelf: Arc::clone(&self.shelf) })
    }

    /// The hub that is published to.
    #[must_use]
    pub fn hub(&self) -> &Hub {
        &self.hub
    }

    fn pushing(&self) -> Result<MutexGuard<'_, Pushing<T>>, WeightsError> {
        self.pushing.lock().map_err(|_| WeightsError::Poisoned)
    }
}

impl<T: Storage> DevicePublisher<T> for DeviceMemory<T> {
    fn publish(&self, version: PolicyVersion, values: View<'_, T>) -> Result<(), WeightsError> {
        let started = Instant::now();
        let mut pushing = self.pushing()?;
        if !is_new(&self.hub, &self.device, version, values)? {
            return Ok(());
        }
        let forget = || drop(self.shelf.lock().map(|mut shelf| shelf.take()));
        let mut spare = pushing.spares.take(version, values.len(), self.wait, forget)?;
        let copied = self.device.copy(values, spare.all_mut()).and_then(|()| self.device.synchronize());
        let ready = pushing.spares.keep(spare);
        copied.map_err(failed("copy weights"))?;
        *self.shelf.lock().map_err(|_| WeightsError::Poisoned)? = Some((version, Arc::clone(&ready)));
        let told = (version, Direct::within::<T>());
        pushing.last = Some(announce(&self.hub, &self.device, told, ready.all(), started)?);
        Ok(())
    }

    fn wait_applied(&self, version: PolicyVersion, wait: Duration) -> Result<(), WeightsError> {
        self.hub.wait_applied(version, wait)
    }

    fn lags(&self) -> Result<Vec<Lag>, WeightsError> {
        self.hub.lags()
    }

    fn last_push(&self) -> Result<Option<DevicePush>, WeightsError> {
        Ok(self.pushing()?.last)
    }
}

impl<T: Storage> Drop for DeviceMemory<T> {
    fn drop(&mut self) {
        self.hub.publisher_gone();
    }
}

impl<T: Storage> DeviceSubscriber<T> for DeviceMemorySubscriber<T> {
    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<DeviceWeights<T>>, WeightsError> {
        let deadline = Instant::now() + wait;
        loop {
            let Some(told) = self.control.told(After::Version(after), deadline)? else { return Ok(None) };
            let (version, started) = (told.version, Instant::now());
            let shelf = self.shelf.lock().map_err(|_| WeightsError::Poisoned)?.clone();
            if let Some((_, values)) = shelf.filter(|(there, _)| *there == version) {
                let digest = digest(&self.device, values.all())?;
                let received = Received { bytes: 0, took: started.elapsed() };
                return Ok(Some(DeviceWeights { version, values, digest, received }));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(OVERTAKEN);
        }
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        self.control.applied(receipt)
    }
}
