//! Processes of one host (CUDA IPC): two slots of device memory that other processes open, on one GPU or on GPUs with
//! peer access.
//!
//! ```text
//!   DIR/rlrun-weights-PID-NUMBER/     as of `shm`, of one publisher
//!     owner
//!     slot-0   slot-1                 the lock of each slot, with the version that lies in it
//!     slot-0.NAME                     locked by the sampler NAME while it copies out of the slot
//! ```
//! A publisher copies a version into the slot that is not the newest (double buffering), under the exclusive lock of
//! its file, and announces the handle of its memory. A sampler opens the handle once, and copies out of the slot
//! under the shared lock, which the system releases if the sampler is killed. Copies are short, so the publisher
//! waits for them, up to its deadline.
//!
//! Invariants:
//! - Neither the slot of the newest version nor a slot that is being copied is written.
//! - A copied version is the one that the file names, because it is read under the lock.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use device::{Device, DeviceBuffer, Storage, View};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use super::hub_connection::{HubConnection, OVERTAKEN};
use super::spare_buffers::SpareBuffers;
use super::{
    DevicePublisher, DevicePush, DeviceSubscriber, DeviceWeights, PushNotice, WeightsLocation, announce,
    digest, failed, is_new,
};
use crate::http::RemoteConfig;
use crate::hub::After;
use crate::shm::{self, PublisherDirectory};
use crate::{Hub, Receipt, Received, WeightsError};

/// Its name in a recipe.
const TRANSPORT: &str = "cuda-ipc";
/// Content of the file while its slot has no version.
const NONE: u64 = u64::MAX;
/// Interval of attempts to lock a slot.
const PAUSE: Duration = Duration::from_millis(1);
/// Number of slots that stay open: a publisher alternates between two.
const OPENED: usize = 2;

/// Address of a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SlotAddress {
    /// The lock file.
    pub(super) lock: PathBuf,
    /// The handle of its memory.
    handle: String,
}

/// Configuration of the publisher.
#[derive(Clone, Debug)]
pub struct IpcConfig {
    /// Directory for locks that samplers can access too, such as `/dev/shm`.
    pub directory: PathBuf,
    /// How long a push waits for samplers that copy out of a slot.
    pub wait: Duration,
}

/// The publisher of a hub, for other processes of its host.
#[derive(Debug)]
pub struct IpcPublisher<T: Storage> {
    hub: Hub,
    device: Device,
    wait: Duration,
    slots: Mutex<DeviceSlots<T>>,
}

#[derive(Debug)]
struct DeviceSlots<T: Storage> {
    directory: PublisherDirectory,
    slots: [Option<DeviceSlot<T>>; 2],
    /// Index of the slot with the newest version.
    current: Option<usize>,
    /// Number of files made so far.
    made: u64,
    last: Option<DevicePush>,
}

#[derive(Debug)]
struct DeviceSlot<T: Storage> {
    path: PathBuf,
    file: File,
    buffer: DeviceBuffer<T>,
    handle: String,
}

/// A subscriber in another process of the host.
#[derive(Debug)]
pub struct IpcSubscriber<T: Storage> {
    control: HubConnection,
    device: Device,
    spares: SpareBuffers<T>,
    opened: Mutex<OpenedSlots<T>>,
}

/// Opened slots of publishers.
#[derive(Debug)]
struct OpenedSlots<T: Storage>(Vec<OpenedSlot<T>>);

#[derive(Debug)]
struct OpenedSlot<T: Storage> {
    handle: String,
    /// Its lock file, which shows whether the publisher lives.
    lock: PathBuf,
    buffer: DeviceBuffer<T>,
}

impl<T: Storage> IpcPublisher<T> {
    /// Publishes to `hub`, which must have no other publisher. Copies are made on the stream of `device`, in its order.
    ///
    /// # Errors
    /// A directory that cannot be used.
    pub fn new(hub: Hub, device: &Device, config: &IpcConfig) -> Result<Self, WeightsError> {
        let directory = PublisherDirectory::create(&config.directory)?;
        let slots =
            Mutex::new(DeviceSlots { directory, slots: [None, None], current: None, made: 0, last: None });
        Ok(Self { hub, device: device.labelled("slots of pushed weights"), wait: config.wait, slots })
    }

    /// Begins to write the next slot and stops there, for tests.
    #[cfg(all(test, feature = "emulator"))]
    pub(super) fn begin_to_write(&self, version: PolicyVersion) {
        let mut slots = self.slots().expect("no thread panicked");
        let index = 1 - slots.current.unwrap_or(1);
        let len = slots.slots[index].as_ref().map_or(0, |slot| slot.buffer.len());
        let slot =
            slots.free(index, &self.device, version, len, self.wait).expect("no sampler has locked it");
        slot.says(NONE).expect("the file can be written");
    }

    fn slots(&self) -> Result<MutexGuard<'_, DeviceSlots<T>>, WeightsError> {
        self.slots.lock().map_err(|_| WeightsError::Poisoned)
    }

    /// Writes a version into a locked slot.
    fn fill(
        &self,
        slot: &mut DeviceSlot<T>,
        version: PolicyVersion,
        values: View<'_, T>,
    ) -> Result<(), WeightsError> {
        slot.says(NONE)?;
        let copied = self.device.copy(values, slot.buffer.all_mut()).and_then(|()| self.device.synchronize());
        copied.map_err(failed("copy weights"))?;
        slot.says(version.0)
    }
}

impl<T: Storage> DevicePublisher<T> for IpcPublisher<T> {
    fn publish(&self, version: PolicyVersion, values: View<'_, T>) -> Result<(), WeightsError> {
        let started = Instant::now();
        let mut slots = self.slots()?;
        if !is_new(&self.hub, &self.device, version, values)? {
            return Ok(());
        }
        let index = 1 - slots.current.unwrap_or(1);
        let slot = slots.free(index, &self.device, version, values.len(), self.wait)?;
        let filled = self.fill(slot, version, values);
        let unlocked = slot.file.unlock().map_err(|error| shm::failed(&slot.path, "unlock a file", &error));
        filled.and(unlocked)?;
        let at = SlotAddress { lock: slot.path.clone(), handle: slot.handle.clone() };
        let direct = WeightsLocation { slot: Some(at), ..WeightsLocation::within::<T>() };
        slots.current = Some(index);
        let Some(slot) = &slots.slots[index] else { return Ok(()) };
        let push = announce(&self.hub, &self.device, version, direct, slot.buffer.all(), started)?;
        slots.last = Some(push);
        Ok(())
    }

    fn resend(&self, _values: View<'_, T>) -> Result<bool, WeightsError> {
        // Later subscribers open the slot.
        Ok(false)
    }

    fn last_push(&self) -> Result<Option<DevicePush>, WeightsError> {
        Ok(self.slots()?.last)
    }

    fn hub(&self) -> &Hub {
        &self.hub
    }
}

impl<T: Storage> Drop for IpcPublisher<T> {
    fn drop(&mut self) {
        self.hub.publisher_gone();
        let Ok(slots) = self.slots.get_mut() else { return };
        // Memory must not be freed while it is copied.
        for slot in slots.slots.iter_mut().flatten() {
            let _ = slot.lock(PolicyVersion(NONE), self.wait);
        }
    }
}

impl<T: Storage> DeviceSlots<T> {
    /// The slot `index` with a capacity of `len` weights, locked.
    fn free(
        &mut self,
        index: usize,
        device: &Device,
        version: PolicyVersion,
        len: usize,
        wait: Duration,
    ) -> Result<&mut DeviceSlot<T>, WeightsError> {
        if let Some(old) = self.slots[index].take_if(|slot| slot.buffer.len() != len) {
            old.lock(version, wait)?;
            // If this fails, the file is removed with the directory.
            let _ = std::fs::remove_file(&old.path);
        }
        let slot = match self.slots[index].take() {
            Some(slot) => slot,
            None => {
                let path = self.directory.path().join(format!("slot-{}", self.made));
                self.made += 1;
                DeviceSlot::create(path, device, len)?
            }
        };
        let slot = self.slots[index].insert(slot);
        slot.lock(version, wait)?;
        Ok(slot)
    }
}

impl<T: Storage> DeviceSlot<T> {
    fn create(path: PathBuf, device: &Device, len: usize) -> Result<Self, WeightsError> {
        let made = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = made.map_err(|error| shm::failed(&path, "make a file; name another directory", &error))?;
        let buffer = device.shared(len).map_err(failed("allocate memory for other processes"))?;
        device.synchronize().map_err(failed("allocate memory for other processes"))?;
        let handle = buffer.handle().map_err(failed("share memory with other processes"))?.to_string();
        let slot = Self { path, file, buffer, handle };
        slot.says(NONE)?;
        Ok(slot)
    }

    /// Locks the slot for writing, once no sampler copies out of it.
    fn lock(&self, version: PolicyVersion, wait: Duration) -> Result<(), WeightsError> {
        let started = Instant::now();
        loop {
            match self.file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::Error(error)) => {
                    return Err(shm::failed(&self.path, "lock a file", &error));
                }
                Err(TryLockError::WouldBlock) if started.elapsed() >= wait => {
                    let holders = format!("{} copies out of the slot", holders(&self.path).join(", "));
                    return Err(WeightsError::SlotsInUse { version, waited: started.elapsed(), holders });
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            }
        }
    }

    fn says(&self, version: u64) -> Result<(), WeightsError> {
        let written = self.file.write_all_at(&version.to_le_bytes(), 0);
        written.map_err(|error| shm::failed(&self.path, "write a file", &error))
    }
}

/// Names of the samplers that copy out of a slot.
fn holders(slot: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let beside = slot.parent().and_then(|directory| std::fs::read_dir(directory).ok());
    for entry in beside.into_iter().flatten().flatten() {
        let path = entry.path();
        let of_slot = path.file_stem() == slot.file_name();
        let Some(name) = path.extension().filter(|_| of_slot) else { continue };
        // An unlocked file was left by a sampler that has ended.
        let locked =
            File::open(&path).is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)));
        if locked {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    if names.is_empty() {
        names.push("a sampler".to_owned());
    }
    names
}

impl<T: Storage> IpcSubscriber<T> {
    /// Subscribes to a hub in another process. `device` has a stream that is not the one that decodes.
    ///
    /// # Errors
    /// As [`RemoteSubscriber::connect`](crate::http::RemoteSubscriber::connect).
    pub fn connect(config: RemoteConfig, device: &Device) -> Result<Self, WeightsError> {
        Ok(Self::new(HubConnection::there(config)?, device))
    }

    /// Subscribes to a hub of this process, for emulated devices: a process cannot open its own memory of a GPU.
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

    fn new(control: HubConnection, device: &Device) -> Self {
        let opened = Mutex::new(OpenedSlots(Vec::new()));
        Self { control, device: device.clone(), spares: SpareBuffers::new(device), opened }
    }

    /// Copies the announced weights; `None` if the version was replaced.
    fn copy(
        &self,
        notice: &PushNotice,
        opened: &mut OpenedSlots<T>,
    ) -> Result<Option<DeviceWeights<T>>, WeightsError> {
        notice.check::<T>(TRANSPORT)?;
        let (version, started) = (notice.version, Instant::now());
        let Some(at) = &notice.direct.slot else {
            let what = "it comes otherwise".to_owned();
            return Err(WeightsError::OtherWay { version, transport: TRANSPORT, what });
        };
        let mut values = self.spares.take(notice.parameters)?;
        if !self.control.is_shared(&at.lock) {
            let what =
                format!("the server names {:?}, which is no file of a publisher of this host", at.lock);
            return Err(WeightsError::OtherWay { version, transport: TRANSPORT, what });
        }
        if !self.copy_into(at, version, opened, &mut values)? {
            self.spares.give_back(values);
            return Ok(None);
        }
        let digest = digest(&self.device, values.all())?;
        let bytes = values.bytes();
        let received = Received { bytes, took: started.elapsed() };
        Ok(Some(DeviceWeights { version, values, digest, received }))
    }

    /// Copies out of a slot, if it still has the version.
    fn copy_into(
        &self,
        at: &SlotAddress,
        version: PolicyVersion,
        opened: &mut OpenedSlots<T>,
        spare: &mut DeviceBuffer<T>,
    ) -> Result<bool, WeightsError> {
        let Some(lock) = SlotCopyGuard::take(&at.lock, self.control.name(), version)? else {
            return Ok(false);
        };
        let slot = match opened.open(at, &self.device, spare.len()) {
            Ok(slot) => slot,
            // The memory was freed with its publisher; the next publisher announces another slot.
            Err(_) if shm::is_left(&at.lock) => return Ok(false),
            Err(error) => return Err(error),
        };
        let copied = self.device.copy(slot.all(), spare.all_mut()).and_then(|()| self.device.synchronize());
        drop(lock);
        copied.map_err(failed("copy weights of another process"))?;
        Ok(true)
    }
}

impl<T: Storage> OpenedSlots<T> {
    /// The opened memory of a slot.
    fn open(
        &mut self,
        at: &SlotAddress,
        device: &Device,
        len: usize,
    ) -> Result<&DeviceBuffer<T>, WeightsError> {
        let known = self.0.iter().position(|slot| slot.handle == at.handle && slot.buffer.len() == len);
        let index = match known {
            Some(index) => index,
            None => {
                self.close_left();
                self.0.retain(|slot| slot.handle != at.handle);
                if self.0.len() == OPENED {
                    self.0.remove(0);
                }
                let what = "open memory of another process";
                let read = at.handle.parse().map_err(|reason| WeightsError::Device { what, reason })?;
                let buffer = device.open_shared(&read, len).map_err(failed(what))?;
                self.0.push(OpenedSlot { handle: at.handle.clone(), lock: at.lock.clone(), buffer });
                self.0.len() - 1
            }
        };
        Ok(&self.0[index].buffer)
    }

    /// Closes the memory of publishers that have ended: the driver keeps it allocated while it is open, and the next
    /// publisher needs it.
    fn close_left(&mut self) {
        self.0.retain(|slot| !shm::is_left(&slot.lock));
    }
}

/// A shared lock on a slot, which keeps it from being written.
pub(super) struct SlotCopyGuard {
    _lock: File,
    /// Names the sampler in errors of the publisher, with its file.
    name: Option<(File, PathBuf)>,
}

impl SlotCopyGuard {
    /// Locks a slot if it has `version`; `None` if the version was replaced.
    pub(super) fn take(
        path: &Path,
        name: &str,
        version: PolicyVersion,
    ) -> Result<Option<Self>, WeightsError> {
        let lock = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(shm::failed(path, "open a file of the publisher", &error)),
        };
        match lock.try_lock_shared() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(shm::failed(path, "lock a file", &error)),
        }
        let mut says = [0; 8];
        let read = lock.read_exact_at(&mut says, 0);
        read.map_err(|error| shm::failed(path, "read a file of the publisher", &error))?;
        if u64::from_le_bytes(says) != version.0 {
            return Ok(None);
        }
        // Only errors use it, so it may fail.
        let mut tag = path.as_os_str().to_owned();
        tag.push(format!(".{}", name.replace(['.', '/'], "-")));
        let tag = PathBuf::from(tag);
        let made = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&tag);
        let name = made.ok().filter(|file| file.try_lock().is_ok()).map(|file| (file, tag));
        Ok(Some(Self { _lock: lock, name }))
    }
}

impl Drop for SlotCopyGuard {
    fn drop(&mut self) {
        if let Some((_, tag)) = &self.name {
            // Otherwise it is removed with the directory.
            let _ = std::fs::remove_file(tag);
        }
    }
}

impl<T: Storage> DeviceSubscriber<T> for IpcSubscriber<T> {
    fn wait_newer(
        &self,
        after: Option<PolicyVersion>,
        wait: Duration,
    ) -> Result<Option<DeviceWeights<T>>, WeightsError> {
        let deadline = Instant::now() + wait;
        let mut opened = self.opened.lock().map_err(|_| WeightsError::Poisoned)?;
        loop {
            let notice = self.control.next_notice(After::Version(after), deadline);
            match notice {
                // Its memory was freed.
                Err(WeightsError::PublisherGone { .. }) => opened.0.clear(),
                Err(_) => opened.close_left(),
                Ok(_) => {}
            }
            let Some(notice) = notice? else { return Ok(None) };
            if let Some(weights) = self.copy(&notice, &mut opened)? {
                return Ok(Some(weights));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(OVERTAKEN);
        }
    }

    fn give_back(&self, values: DeviceBuffer<T>) {
        self.spares.give_back(values);
    }

    fn applied(&self, receipt: Receipt) -> Result<(), WeightsError> {
        self.control.applied(receipt)
    }
}
