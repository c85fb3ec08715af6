//! A device with one stream: operations run in the order of the calls.
//!
//! Invariant: a call waits only if its comment says so; an error of a kernel is returned by the next call that waits.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::backend::{AllocationKind, Argument, Backend, Launch, MemoryHandle};
use crate::element::Element;
use crate::error::{ByteCount, DeviceError, MemoryUsage, Result};
use crate::memory::{DeviceBuffer, View, ViewMut};

/// Largest number of blocks in the second and third dimension of a grid.
const MAX_BLOCKS: usize = 65_535;
/// Number of memory labels that an error names.
const NAMED: usize = 4;

/// A device with one stream. Clones share device and stream.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) inner: Arc<DeviceInner>,
    label: &'static str,
}

/// State that all clones share.
#[derive(Debug)]
pub(crate) struct DeviceInner {
    pub(crate) backend: Box<dyn Backend>,
    /// Unique id of the device across processes.
    identity: String,
    /// Allocated bytes by label.
    usage: Mutex<BTreeMap<&'static str, u64>>,
}

/// Location of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceLocation {
    /// The GPU with this CUDA ordinal, among the visible ones.
    Cuda(usize),
    /// The emulator.
    Emulated,
}

impl DeviceLocation {
    /// Where tests compute that any device has to pass: on the first GPU, or on the emulator if there is none. Compiled kernels
    /// are kept in the directory for temporary files, because every test opens a device.
    #[must_use]
    pub fn of_tests() -> Self {
        if crate::inventory::inventory().gpus.is_empty() {
            return Self::Emulated;
        }
        crate::inventory::keep_kernels_in(std::env::temp_dir().join("rlrun-test-kernels"));
        Self::Cuda(0)
    }
}

impl fmt::Display for DeviceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Emulated => f.write_str("emulated"),
        }
    }
}

impl std::str::FromStr for DeviceLocation {
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
    /// Opens a device with a new stream.
    ///
    /// # Errors
    /// If the device is not available, or the program was built without the feature for it.
    pub fn open(place: DeviceLocation) -> Result<Self> {
        let backend = open(place)?;
        let inner = Arc::new(DeviceInner { identity: backend.identity()?, backend, usage: Mutex::default() });
        let mut opened = opened();
        opened.retain(|device| device.strong_count() > 0);
        opened.push(Arc::downgrade(&inner));
        Ok(Self { inner, label: "other allocations" })
    }

    /// The same device and stream; allocations through this value count as `label`.
    #[must_use]
    pub fn labelled(&self, label: &'static str) -> Self {
        Self { inner: Arc::clone(&self.inner), label }
    }

    /// Name, as in a recipe.
    #[must_use]
    pub fn name(&self) -> String {
        self.inner.backend.name()
    }

    /// Free and total memory, bytes.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.inner.backend.memory()
    }

    /// Memory allocated through this device and its clones, by label, largest first.
    #[must_use]
    pub fn memory_usage(&self) -> MemoryUsage {
        MemoryUsage::of(&self.inner.usage())
    }

    /// Allocates `[len]` uninitialised values.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn uninit<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::allocate(&self.inner, self.label, len, AllocationKind::Own)
    }

    /// Allocates `[len]` zeros.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn zeros<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let mut buffer = self.uninit(len)?;
        self.clear(buffer.all_mut())?;
        Ok(buffer)
    }

    /// Allocates `[len]` zeros that other processes can open.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn shared<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        let mut buffer = DeviceBuffer::allocate(&self.inner, self.label, len, AllocationKind::Shared)?;
        self.clear(buffer.all_mut())?;
        Ok(buffer)
    }

    /// Opens `[len]` values of another process, on the same device or on a peer. That process must keep them allocated
    /// while this buffer exists.
    ///
    /// # Errors
    /// If the handle is of another kind of device, or its process has ended.
    pub fn open_shared<T: Element>(&self, handle: &MemoryHandle, len: usize) -> Result<DeviceBuffer<T>> {
        let address = self.inner.backend.open(handle, len * size_of::<T>())?;
        Ok(DeviceBuffer::opened(&self.inner, address, len))
    }

    /// Allocates and uploads `values [n]`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<DeviceBuffer<T>> {
        let mut buffer = self.uninit(values.len())?;
        self.upload_to(values, buffer.all_mut())?;
        Ok(buffer)
    }

    /// Uploads `values [n]` to `to [n]`; `values` may change when this returns.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn upload_to<T: Element>(&self, values: &[T], to: ViewMut<'_, T>) -> Result<()> {
        assert_eq!(values.len(), to.len(), "source and destination have one length");
        if values.is_empty() {
            return Ok(());
        }
        self.inner.backend.upload(bytemuck::cast_slice(values), to.address())
    }

    /// Downloads `from [n]`. Waits.
    ///
    /// # Errors
    /// If the driver or an earlier operation fails.
    pub fn download<T: Element>(&self, from: View<'_, T>) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); from.len()];
        self.download_to(from, &mut values)?;
        Ok(values)
    }

    /// Downloads `from [n]` to `to [n]`. Waits.
    ///
    /// # Errors
    /// If the driver or an earlier operation fails.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn download_to<T: Element>(&self, from: View<'_, T>, to: &mut [T]) -> Result<()> {
        assert_eq!(from.len(), to.len(), "source and destination have one length");
        if to.is_empty() {
            return Ok(());
        }
        self.inner.backend.download(from.address(), bytemuck::cast_slice_mut(to))
    }

    /// Copies `from [n]` to `to [n]` within the device, or from memory that it opened.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy<T: Element>(&self, from: View<'_, T>, to: ViewMut<'_, T>) -> Result<()> {
        assert_eq!(from.len(), to.len(), "source and destination have one length");
        if from.is_empty() {
            return Ok(());
        }
        self.inner.backend.copy(from.address(), to.address(), from.len() * size_of::<T>())
    }

    /// Copies `from [n]` of this device to `to [n]` of `other`, on the stream of this one.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to<T: Element>(&self, other: &Self, from: View<'_, T>, to: ViewMut<'_, T>) -> Result<()> {
        assert_eq!(from.len(), to.len(), "source and destination have one length");
        if from.is_empty() {
            return Ok(());
        }
        let bytes = from.len() * size_of::<T>();
        self.inner.backend.copy_to(&*other.inner.backend, from.address(), to.address(), bytes)
    }

    /// Sets `what [n]` to zero.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn clear<T: Element>(&self, what: ViewMut<'_, T>) -> Result<()> {
        if what.is_empty() {
            return Ok(());
        }
        self.inner.backend.clear(what.address(), what.len() * size_of::<T>())
    }

    /// Waits until the stream is idle.
    ///
    /// # Errors
    /// If an earlier operation failed.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.backend.synchronize()
    }

    /// Launches a kernel with `grid` blocks of `threads` threads and `shared` bytes of dynamic shared memory.
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
                reason: format!("{grid:?} blocks of {threads} threads exceed the limits of a GPU"),
            });
        }
        let grid = grid.map(|blocks| blocks as u32);
        self.inner.backend.launch(&Launch { kernel, grid, threads: threads as u32, shared, arguments })
    }
}

impl DeviceInner {
    pub(crate) fn allocate(&self, bytes: usize, label: &'static str, usage: AllocationKind) -> Result<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        if let Some(address) = self.backend.allocate(bytes, usage)? {
            *self.usage().entry(label).or_default() += bytes as u64;
            return Ok(address);
        }
        let (free, total) = self.backend.memory()?;
        Err(DeviceError::OutOfMemory {
            device: self.backend.name(),
            wanted: ByteCount(bytes as u64),
            label,
            free: ByteCount(free),
            total: ByteCount(total),
            usage: self.largest_of_all(),
            remedy: remedy(label),
        })
    }

    pub(crate) fn free(&self, address: u64, bytes: usize, label: &'static str, usage: AllocationKind) {
        self.backend.free(address, bytes, usage);
        if let Some(usage) = self.usage().get_mut(label) {
            *usage = usage.saturating_sub(bytes as u64);
        }
    }

    /// Largest memory labels of this process on the same device, over all streams.
    fn largest_of_all(&self) -> MemoryUsage {
        let mut all: BTreeMap<&'static str, u64> = BTreeMap::new();
        for device in all_open().iter().filter(|device| device.identity == self.identity) {
            device.usage().iter().for_each(|(label, bytes)| *all.entry(label).or_default() += bytes);
        }
        let mut usage = MemoryUsage::of(&all);
        usage.0.truncate(NAMED);
        usage
    }

    fn usage(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        // Each update of the map is complete.
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All devices that are open in this process.
pub(crate) fn all_open() -> Vec<Arc<DeviceInner>> {
    opened().iter().filter_map(Weak::upgrade).collect()
}

/// Those, and some that were closed since.
fn opened() -> MutexGuard<'static, Vec<Weak<DeviceInner>>> {
    static OPENED: Mutex<Vec<Weak<DeviceInner>>> = Mutex::new(Vec::new());
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remedy for an allocation with this label.
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

fn open(place: DeviceLocation) -> Result<Box<dyn Backend>> {
    match place {
        #[cfg(feature = "cuda")]
        DeviceLocation::Cuda(ordinal) => Ok(Box::new(crate::cuda::Cuda::open(ordinal)?)),
        #[cfg(feature = "emulator")]
        DeviceLocation::Emulated => Ok(Box::new(crate::emulated::Emulated::default())),
        #[cfg(not(all(feature = "cuda", feature = "emulator")))]
        _ => Err(DeviceError::Unavailable {
            device: place.to_string(),
            reason: match place {
                DeviceLocation::Cuda(_) => {
                    "this program was built without CUDA; build it with `--features cuda`".to_owned()
                }
                DeviceLocation::Emulated => {
                    "the emulator is for tests; build with `--features emulator`".to_owned()
                }
            },
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_round_trip_as_text() {
        for (text, place) in [
            ("cuda", DeviceLocation::Cuda(0)),
            ("cuda:3", DeviceLocation::Cuda(3)),
            ("emulated", DeviceLocation::Emulated),
        ] {
            assert_eq!(text.parse(), Ok(place));
        }
        assert_eq!(DeviceLocation::Cuda(3).to_string(), "cuda:3");
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x"] {
            assert!(text.parse::<DeviceLocation>().is_err_and(|error| error.contains(text)), "{text}");
        }
    }
}
