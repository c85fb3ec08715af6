//! A device with one stream: what is asked of it happens in the order in which it is asked.
//!
//! Invariant: nothing here waits but what says so; a kernel that fails is noticed by the next call that waits.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::backend::{Argument, Backend, Handle, Launch, Use};
use crate::element::Element;
use crate::error::{Bytes, DeviceError, Held, Result};
use crate::memory::{Buffer, View, ViewMut};

/// Most blocks of a grid along its second and third dimension.
const MAX_BLOCKS: usize = 65_535;
/// Consumers that an error names.
const NAMED: usize = 4;

/// A device with a stream of its own. Clones are the same device and stream.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) inner: Arc<Inner>,
    label: &'static str,
}

/// What all clones share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) backend: Box<dyn Backend>,
    /// Which device of all machines it is.
    identity: String,
    /// Bytes by what they are for.
    held: Mutex<BTreeMap<&'static str, u64>>,
}

/// Which device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The GPU with this number, as CUDA counts the visible ones.
    Cuda(usize),
    /// The emulator.
    Emulated,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Emulated => f.write_str("emulated"),
        }
    }
}

impl std::str::FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "cuda" => Ok(Self::Cuda(0)),
            "emulated" => Ok(Self::Emulated),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|number| number.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| {
                    format!(
                        "`{text}` is no device; write \"cuda\" for the first GPU or \"cuda:1\" for the second"
                    )
                }),
        }
    }
}

impl Device {
    /// Opens a device with a stream of its own.
    ///
    /// # Errors
    /// If it is not there, or this program was built without what it needs; the error says what is missing.
    pub fn open(place: Place) -> Result<Self> {
        let backend = open(place)?;
        let inner = Arc::new(Inner { identity: backend.identity()?, backend, held: Mutex::default() });
        let mut opened = opened();
        opened.retain(|device| device.strong_count() > 0);
        opened.push(Arc::downgrade(&inner));
        Ok(Self { inner, label: "other things" })
    }

    /// The same device; what is allocated through this value counts as `label`.
    #[must_use]
    pub fn labelled(&self, label: &'static str) -> Self {
        Self { inner: Arc::clone(&self.inner), label }
    }

    /// As people call it.
    #[must_use]
    pub fn name(&self) -> String {
        self.inner.backend.name()
    }

    /// Free and total memory, bytes.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.inner.backend.memory()
    }

    /// What was allocated through this device and its clones, the largest first.
    #[must_use]
    pub fn held(&self) -> Held {
        Held::of(&self.inner.held())
    }

    /// New values with anything in them.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn uninit<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        Buffer::allocate(&self.inner, self.label, len, Use::Own)
    }

    /// New values, all zero.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let mut buffer = self.uninit(len)?;
        self.clear(buffer.all_mut())?;
        Ok(buffer)
    }

    /// New values that other processes can open, all zero.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn shared<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let mut buffer = Buffer::allocate(&self.inner, self.label, len, Use::Shared)?;
        self.clear(buffer.all_mut())?;
        Ok(buffer)
    }

    /// The `len` values of another process, which has them on the same device or on one that this one reaches. That
    /// process must keep them for as long as this buffer lives.
    ///
    /// # Errors
    /// If the handle is of another kind of device, or of a process that is gone.
    pub fn open_shared<T: Element>(&self, handle: &Handle, len: usize) -> Result<Buffer<T>> {
        let address = self.inner.backend.open(handle, len * size_of::<T>())?;
        Ok(Buffer::opened(&self.inner, address, len))
    }

    /// New values from the host.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.uninit(values.len())?;
        self.upload_to(values, buffer.all_mut())?;
        Ok(buffer)
    }

    /// Writes values from the host, which are free to change when this returns.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Panics
    /// If there is not room for as many.
    pub fn upload_to<T: Element>(&self, values: &[T], to: ViewMut<'_, T>) -> Result<()> {
        assert_eq!(values.len(), to.len(), "values go where as many are");
        if values.is_empty() {
            return Ok(());
        }
        self.inner.backend.upload(bytemuck::cast_slice(values), to.address())
    }

    /// Values to the host. Waits.
    ///
    /// # Errors
    /// If the driver or something before fails.
    pub fn download<T: Element>(&self, from: View<'_, T>) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); from.len()];
        self.download_to(from, &mut values)?;
        Ok(values)
    }

    /// Values to a place of the host. Waits.
    ///
    /// # Errors
    /// If the driver or something before fails.
    ///
    /// # Panics
    /// If there is not room for as many.
    pub fn download_to<T: Element>(&self, from: View<'_, T>, to: &mut [T]) -> Result<()> {
        assert_eq!(from.len(), to.len(), "values go where as many are");
        if to.is_empty() {
            return Ok(());
        }
        self.inner.backend.download(from.address(), bytemuck::cast_slice_mut(to))
    }

    /// Copies values within the device, or from what it has opened.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Panics
    /// If there is not room for as many.
    pub fn copy<T: Element>(&self, from: View<'_, T>, to: ViewMut<'_, T>) -> Result<()> {
        assert_eq!(from.len(), to.len(), "values go where as many are");
        if from.is_empty() {
            return Ok(());
        }
        self.inner.backend.copy(from.address(), to.address(), from.len() * size_of::<T>())
    }

    /// Copies values of this device to what `other` has, on the stream of this one.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Panics
    /// If there is not room for as many.
    pub fn copy_to<T: Element>(&self, other: &Self, from: View<'_, T>, to: ViewMut<'_, T>) -> Result<()> {
        assert_eq!(from.len(), to.len(), "values go where as many are");
        if from.is_empty() {
            return Ok(());
        }
        let bytes = from.len() * size_of::<T>();
        self.inner.backend.copy_to(&*other.inner.backend, from.address(), to.address(), bytes)
    }

    /// Sets values to zero.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn clear<T: Element>(&self, what: ViewMut<'_, T>) -> Result<()> {
        if what.is_empty() {
            return Ok(());
        }
        self.inner.backend.clear(what.address(), what.len() * size_of::<T>())
    }

    /// Waits until everything is done.
    ///
    /// # Errors
    /// If something of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.backend.synchronize()
    }

    /// Runs a kernel in `grid` blocks of `threads` with `shared` bytes of dynamic shared memory.
    pub(crate) fn launch(
        &self,
        kernel: &str,
        grid: [usize; 3],
        threads: usize,
        shared: usize,
        arguments: &[Argument],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let fits = grid[0] <= i32::MAX as usize && grid[1] <= MAX_BLOCKS && grid[2] <= MAX_BLOCKS;
        if !fits || threads > 1024 {
            return Err(DeviceError::Kernel {
                device: self.name(),
                kernel: kernel.to_owned(),
                reason: format!("{grid:?} blocks of {threads} threads are more than a device takes"),
            });
        }
        let grid = grid.map(|blocks| blocks as u32);
        self.inner.backend.launch(&Launch { kernel, grid, threads: threads as u32, shared, arguments })
    }
}

impl Inner {
    pub(crate) fn allocate(&self, bytes: usize, label: &'static str, usage: Use) -> Result<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        if let Some(address) = self.backend.allocate(bytes, usage)? {
            *self.held().entry(label).or_default() += bytes as u64;
            return Ok(address);
        }
        let (free, total) = self.backend.memory()?;
        Err(DeviceError::OutOfMemory {
            device: self.backend.name(),
            wanted: Bytes(bytes as u64),
            label,
            free: Bytes(free),
            total: Bytes(total),
            held: self.largest_of_all(),
            remedy: remedy(label),
        })
    }

    pub(crate) fn free(&self, address: u64, bytes: usize, label: &'static str, usage: Use) {
        self.backend.free(address, bytes, usage);
        if let Some(held) = self.held().get_mut(label) {
            *held = held.saturating_sub(bytes as u64);
        }
    }

    /// The largest consumers of this process on the same device, by whichever stream.
    fn largest_of_all(&self) -> Held {
        let devices: Vec<_> = opened().iter().filter_map(Weak::upgrade).collect();
        let mut all: BTreeMap<&'static str, u64> = BTreeMap::new();
        for device in devices.iter().filter(|device| device.identity == self.identity) {
            device.held().iter().for_each(|(label, bytes)| *all.entry(label).or_default() += bytes);
        }
        let mut held = Held::of(&all);
        held.0.truncate(NAMED);
        held
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        // Numbers, each change of which is whole.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All that are open in this process.
fn opened() -> MutexGuard<'static, Vec<Weak<Inner>>> {
    static OPENED: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What helps when there is no memory for something.
fn remedy(label: &str) -> &'static str {
    match label {
        "activations" => {
            "lower trainer.microbatch_tokens, or set trainer.recompute to \"block\" or \"sequence\""
        }
        "key-value cache" => "lower rollout.kv_cache_tokens or rollout.max_running",
        "optimizer" => "set placement.optimizer = \"host\", or share it over more ranks (trainer.zero)",
        _ => {
            "`rlrun plan` shows what a run needs; share the model over more ranks, or place roles on other devices"
        }
    }
}

fn open(place: Place) -> Result<Box<dyn Backend>> {
    match place {
        #[cfg(feature = "cuda")]
        Place::Cuda(ordinal) => Ok(Box::new(crate::cuda::Cuda::open(ordinal)?)),
        #[cfg(feature = "emulator")]
        Place::Emulated => Ok(Box::new(crate::emulated::Emulated::default())),
        #[cfg(not(all(feature = "cuda", feature = "emulator")))]
        _ => Err(DeviceError::Unavailable {
            device: place.to_string(),
            reason: match place {
                Place::Cuda(_) => {
                    "this program was built without CUDA; build it with `--features cuda`".to_owned()
                }
                Place::Emulated => "the emulator is for tests; build with `--features emulator`".to_owned(),
            },
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        for (text, place) in
            [("cuda", Place::Cuda(0)), ("cuda:3", Place::Cuda(3)), ("emulated", Place::Emulated)]
        {
            assert_eq!(text.parse(), Ok(place));
        }
        assert_eq!(Place::Cuda(3).to_string(), "cuda:3");
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x"] {
            assert!(text.parse::<Place>().is_err_and(|error| error.contains(text)), "{text}");
        }
    }
}
