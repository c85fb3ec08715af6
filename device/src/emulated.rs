//! The emulated backend: kernels run on the CPU, in host memory.
//!
//! Invariant: every call is complete when it returns.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use memmap2::MmapRaw;

use crate::backend::{AllocationKind, Argument, Backend, Launch, MemoryHandle, Product, Recording};
use crate::error::{DeviceError, Result};

/// Memory size that the device reports, bytes.
const TOTAL: u64 = 8 << 30;
/// Alignment of allocations, bytes; as in CUDA.
const ALIGNMENT: usize = 256;

/// Memory in use by all emulated devices of this process, bytes. They emulate one device with several streams.
static USED: AtomicU64 = AtomicU64::new(0);
/// Counter for names of shared memory.
static SHARED: AtomicU64 = AtomicU64::new(0);
/// Counter for identities.
static NAMED: AtomicU64 = AtomicU64::new(0);

/// An emulated device.
#[derive(Debug, Default)]
pub(crate) struct Emulated {
    recording: Mutex<Option<Vec<RecordedWork>>>,
    /// Number of the device in this process, assigned on first use.
    number: OnceLock<u64>,
    /// Shared memory by address; with its file if this device allocated it.
    mapped: Mutex<HashMap<u64, (MmapRaw, Option<PathBuf>)>>,
}

/// A recorded call.
#[derive(Debug)]
enum RecordedWork {
    Launch { kernel: CString, grid: [u32; 3], threads: u32, shared: usize, arguments: Vec<Argument> },
    Product(Product),
    Copy { from: u64, to: u64, bytes: usize },
    Clear { address: u64, bytes: usize },
}

#[derive(Debug)]
struct EmulatedRecording(Vec<RecordedWork>);

impl Recording for EmulatedRecording {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[expect(unsafe_code, reason = "the emulator is C++")]
unsafe extern "C" {
    fn rlrun_emulator_launch(
        name: *const c_char,
        grid: *const u32,
        threads: u32,
        shared: usize,
        arguments: *mut *mut c_void,
    ) -> c_int;
    fn rlrun_emulator_product(
        m: usize,
        n: usize,
        k: usize,
        a: *const c_void,
        a_stride: usize,
        a_transposed: c_int,
        b: *const c_void,
        b_stride: usize,
        b_transposed: c_int,
        c: *mut c_void,
        c_stride: usize,
        narrow_inputs: c_int,
        narrow_output: c_int,
        scale: f32,
        keep: f32,
    );
}

impl RecordedWork {
    #[expect(unsafe_code, reason = "kernels work on addresses")]
    fn run(&self) -> Result<()> {
        match self {
            Self::Launch { kernel, grid, threads, shared, arguments } => {
                let mut pointers: Vec<*mut c_void> =
                    arguments.iter().map(|argument| argument.bytes.as_ptr().cast_mut().cast()).collect();
                // SAFETY: the launchers pass the arguments of each kernel, with addresses of live buffers.
                let code = unsafe {
                    rlrun_emulator_launch(
                        kernel.as_ptr(),
                        grid.as_ptr(),
                        *threads,
                        *shared,
                        pointers.as_mut_ptr(),
                    )
                };
                let reason = match code {
                    0 => return Ok(()),
                    1 => "it does not exist".to_owned(),
                    _ => format!("its blocks are not as large as {threads} threads"),
                };
                let kernel = kernel.to_string_lossy().into_owned();
                Err(DeviceError::Kernel { device: "emulated".to_owned(), kernel, reason })
            }
            Self::Product(product) => {
                let Product { m, n, k, a, b, c, narrow_inputs, narrow_output, scale, keep } = *product;
                // SAFETY: shapes and strides were checked against views of live buffers.
                unsafe {
                    rlrun_emulator_product(
                        m,
                        n,
                        k,
                        a.address as *const c_void,
                        a.stride,
                        c_int::from(a.transposed),
                        b.address as *const c_void,
                        b.stride,
                        c_int::from(b.transposed),
                        c.address as *mut c_void,
                        c.stride,
                        c_int::from(narrow_inputs),
                        c_int::from(narrow_output),
                        scale,
                        keep,
                    );
                }
                Ok(())
            }
            Self::Copy { from, to, bytes } => {
                // SAFETY: both views have this length; they may be the same.
                unsafe { std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes) };
                Ok(())
            }
            Self::Clear { address, bytes } => {
                // SAFETY: the view has this length.
                unsafe { std::ptr::write_bytes(*address as *mut u8, 0, *bytes) };
                Ok(())
            }
        }
    }
}

impl Emulated {
    /// Executes the call, or appends it to the recording.
    fn submit(&self, work: RecordedWork) -> Result<()> {
        let mut recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *recording {
            Some(recorded) => {
                recorded.push(work);
                Ok(())
            }
            None => {
                drop(recording);
                work.run()
            }
        }
    }

    /// Maps a file and returns its address; removes the file when it is closed if `own`.
    fn map(&self, path: PathBuf, bytes: usize, own: bool) -> Result<u64> {
        let refused =
            |reason: String| failed("opening shared memory", format!("{}: {reason}", path.display()));
        let file = std::fs::File::options().read(true).write(true).open(&path);
        let file = file.map_err(|error| refused(error.to_string()))?;
        let map = MmapRaw::map_raw(&file).map_err(|error| refused(error.to_string()))?;
        if map.len() < bytes {
            return Err(refused(format!("it has {} bytes where {bytes} are expected", map.len())));
        }
        let address = map.as_mut_ptr() as u64;
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        mapped.insert(address, (map, own.then_some(path)));
        Ok(address)
    }

    fn not_while_recording(&self, call: &'static str) -> Result<()> {
        if self.recording.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            return Ok(());
        }
        Err(failed(call, "it cannot be recorded"))
    }
}

/// An error of `call`.
fn failed(call: &'static str, reason: impl ToString) -> DeviceError {
    DeviceError::Call { device: "emulated".to_owned(), call, reason: reason.to_string() }
}

fn layout(bytes: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(bytes, ALIGNMENT).unwrap_or(std::alloc::Layout::new::<u64>())
}

impl Backend for Emulated {
    fn name(&self) -> String {
        "emulated".to_owned()
    }

    fn identity(&self) -> Result<String> {
        let number = self.number.get_or_init(|| NAMED.fetch_add(1, Ordering::Relaxed));
        Ok(format!("{}-{number}", std::process::id()))
    }

    #[expect(unsafe_code, reason = "memory by address")]
    fn allocate(&self, bytes: usize, usage: AllocationKind) -> Result<Option<u64>> {
        self.not_while_recording("an allocation")?;
        if USED.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64 > TOTAL {
            USED.fetch_sub(bytes as u64, Ordering::Relaxed);
            return Ok(None);
        }
        if usage == AllocationKind::Own {
            // SAFETY: the size is not 0.
            let address = unsafe { std::alloc::alloc(layout(bytes)) };
            // Uninitialised memory is filled with NaN, which tests notice.
            if !address.is_null() {
                // SAFETY: it was just allocated with this size.
                unsafe { std::ptr::write_bytes(address, 0xff, bytes) };
            }
            return Ok((!address.is_null()).then_some(address as u64));
        }
        let number = SHARED.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("rlrun-emulated-{}-{number}", std::process::id()));
        let file = std::fs::File::create_new(&path).map_err(|error| failed("an allocation", error))?;
        file.set_len(bytes as u64).map_err(|error| failed("an allocation", error))?;
        self.map(path, bytes, true).map(Some)
    }

    #[expect(unsafe_code, reason = "memory by address")]
    fn free(&self, address: u64, bytes: usize, usage: AllocationKind) {
        USED.fetch_sub(bytes as u64, Ordering::Relaxed);
        if usage == AllocationKind::Own {
            // SAFETY: it was allocated with this layout, and its buffer is dropped.
            unsafe { std::alloc::dealloc(address as *mut u8, layout(bytes)) };
            return;
        }
        self.close(address, bytes);
    }

    fn memory(&self) -> Result<(u64, u64)> {
        Ok((TOTAL.saturating_sub(USED.load(Ordering::Relaxed)), TOTAL))
    }

    #[expect(unsafe_code, reason = "memory by address")]
    fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        self.not_while_recording("an upload")?;
        // SAFETY: the view has this length.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    #[expect(unsafe_code, reason = "memory by address")]
    fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.not_while_recording("a download")?;
        // SAFETY: the view has this length.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.submit(RecordedWork::Copy { from, to, bytes })
    }

    fn copy_to(&self, _other: &dyn Backend, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.copy(from, to, bytes)
    }

    fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        self.submit(RecordedWork::Clear { address, bytes })
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let Launch { kernel, grid, threads, shared, arguments } = *launch;
        let kernel = CString::new(kernel).map_err(|error| failed("a launch", error))?;
        self.submit(RecordedWork::Launch { kernel, grid, threads, shared, arguments: arguments.to_vec() })
    }

    fn product(&self, product: &Product) -> Result<()> {
        self.submit(RecordedWork::Product(*product))
    }

    fn synchronize(&self) -> Result<()> {
        self.not_while_recording("a wait")
    }

    fn begin_recording(&self) -> Result<()> {
        self.not_while_recording("a recording")?;
        *self.recording.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
        Ok(())
    }

    fn end_recording(&self) -> Result<Box<dyn Recording>> {
        let recorded = self.recording.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok(Box::new(EmulatedRecording(recorded.unwrap_or_default())))
    }

    fn replay(&self, recording: &dyn Recording) -> Result<()> {
        let recorded = recording.as_any().downcast_ref::<EmulatedRecording>();
        let EmulatedRecording(work) =
            recorded.ok_or_else(|| failed("a replay", "it was recorded by another device"))?;
        work.iter().try_for_each(RecordedWork::run)
    }

    fn share(&self, address: u64) -> Result<MemoryHandle> {
        let mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let path = mapped.get(&address).and_then(|(_, path)| path.clone());
        path.map(MemoryHandle::File).ok_or_else(|| failed("sharing", "the memory is not for that"))
    }

    fn open(&self, handle: &MemoryHandle, bytes: usize) -> Result<u64> {
        match handle {
            MemoryHandle::File(path) => self.map(path.clone(), bytes, false),
            MemoryHandle::Cuda(_) => Err(failed("opening shared memory", "it is that of a GPU")),
        }
    }

    fn close(&self, address: u64, _bytes: usize) {
        let mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
        if let Some((_, Some(path))) = mapped {
            // The file may be removed already.
            let _ = std::fs::remove_file(path);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
