//! Compiles the kernels for the GPU, with a cache on disk.
//!
//! The cache key is a digest of source, compiler version and options, which include the architecture, so a stale entry
//! is never used. An entry that cannot be loaded is compiled again.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::result::{self as driver, DriverError};
use cudarc::driver::sys;
use cudarc::nvrtc::{result as nvrtc, sys as nvrtc_sys};

use super::{Named, text};
use crate::error::{DeviceError, Result};

/// Headers of the sources; each needs only those before it.
const HEADERS: [(&str, &str); 3] = [
    ("#include \"common.cuh\"", include_str!("../../kernels/common.cuh")),
    ("#include \"attention.cuh\"", include_str!("../../kernels/attention.cuh")),
    ("#include \"distribution.cuh\"", include_str!("../../kernels/distribution.cuh")),
];
/// Shared memory of a kernel without an attribute, bytes.
const SHARED: usize = 48 << 10;

macro_rules! sources {
    ($($file:literal),* $(,)?) => {
        /// Name and text of every source file.
        const SOURCES: &[(&str, &str)] =
            &[$(($file, include_str!(concat!("../../kernels/", $file)))),*];
    };
}
sources!(
    "adamw.cu",
    "adapters.cu",
    "attention.cu",
    "blocks.cu",
    "convolution.cu",
    "delta_rule.cu",
    "digest.cu",
    "expert_products.cu",
    "expert_rows.cu",
    "gated_unit.cu",
    "gates.cu",
    "head.cu",
    "heads.cu",
    "latent.cu",
    "norm.cu",
    "paged.cu",
    "prefill.cu",
    "result_gate.cu",
    "routes.cu",
    "rows.cu",
    "sampling.cu",
    "vectors.cu",
);

/// Directory of the cache.
static CACHE: OnceLock<PathBuf> = OnceLock::new();

/// Number of entries that this process wrote.
static STORED: AtomicU64 = AtomicU64::new(0);

/// Sets the cache directory for devices that are opened later. Only the first call has an effect.
pub(crate) fn keep_in(directory: PathBuf) {
    let _ = CACHE.set(directory);
}

/// The compiled kernels of a device.
#[derive(Debug)]
pub(super) struct Modules {
    loaded: Vec<sys::CUmodule>,
    /// Functions by name, with the dynamic shared memory that was set for each.
    functions: Mutex<HashMap<String, (sys::CUfunction, usize)>>,
}

impl Modules {
    /// Compiles sources that are not cached, one thread per file, and loads all. The device's context must be current.
    pub(super) fn compile(device: &str, capability: i32) -> Result<Self> {
        let images: Vec<Result<KernelImage>> = std::thread::scope(|scope| {
            let start = |(file, source): &(&'static str, &str)| {
                let source = KernelSource { device, file, text: whole(source), capability };
                scope.spawn(move || KernelImage::of(source))
            };
            let threads: Vec<_> = SOURCES.iter().map(start).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        let _no_captures = super::captures::exclude();
        let mut modules = Self { loaded: Vec::with_capacity(images.len()), functions: Mutex::default() };
        for image in images {
            modules.loaded.push(image?.load()?);
        }
        Ok(modules)
    }

    /// The kernel `kernel`, with `shared` bytes of dynamic shared memory allowed.
    #[expect(unsafe_code, reason = "calls of the driver")]
    pub(super) fn function(&self, device: &str, kernel: &str, shared: usize) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let known = functions.get(kernel).copied();
        let (function, allowed) = match known {
            Some(known) => known,
            None => (self.find(device, kernel)?, SHARED),
        };
        if shared > allowed {
            let what = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = c_int::try_from(shared).unwrap_or(c_int::MAX);
            // SAFETY: the module of the function is loaded.
            unsafe { driver::function::set_function_attribute(function, what, bytes) }
                .named(device, "cuFuncSetAttribute")?;
        }
        if known.is_none() || shared > allowed {
            functions.insert(kernel.to_owned(), (function, allowed.max(shared)));
        }
        Ok(function)
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn find(&self, device: &str, kernel: &str) -> Result<sys::CUfunction> {
        let missing = |reason: &str| DeviceError::Kernel {
            device: device.to_owned(),
            kernel: kernel.to_owned(),
            reason: reason.to_owned(),
        };
        let name = CString::new(kernel).map_err(|_| missing("its name has a zero"))?;
        for module in &self.loaded {
            // SAFETY: the module is loaded.
            match unsafe { driver::module::get_function(*module, name.clone()) } {
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND)) => {}
                // The first use loads the kernel, which may fail for lack of memory.
                found => return found.map_err(|error| missing(&text(error))),
            }
        }
        Err(missing("it does not exist"))
    }

    /// Unloads all modules; no function may be used afterwards.
    #[expect(unsafe_code, reason = "calls of the driver")]
    pub(super) unsafe fn unload(&self) {
        for module in &self.loaded {
            // SAFETY: guaranteed by the caller.
            let _ = unsafe { driver::module::unload(*module) };
        }
    }
}

/// The source with its headers inlined: the compiler reads no files.
fn whole(source: &str) -> String {
    let included = HEADERS.iter().filter(|(line, _)| source.contains(line));
    let mut text: String = included.map(|(_, header)| *header).collect();
    text += source;
    for (line, _) in HEADERS {
        text = text.replace(line, "");
    }
    text
}

/// A source to compile.
struct KernelSource<'a> {
    device: &'a str,
    file: &'static str,
    text: String,
    capability: i32,
}

/// A compiled source.
struct KernelImage<'a> {
    source: KernelSource<'a>,
    bytes: Vec<u8>,
    /// Whether the image came from the cache.
    kept: bool,
}

impl KernelSource<'_> {
    fn options(&self) -> [String; 2] {
        [format!("--gpu-architecture=sm_{}", self.capability), "--std=c++17".to_owned()]
    }

    /// Path in the cache.
    fn place(&self) -> Option<PathBuf> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.text.as_bytes()).update(&version().to_le_bytes());
        self.options().iter().for_each(|option| {
            hasher.update(&[0]).update(option.as_bytes());
        });
        Some(CACHE.get()?.join(format!("{}.cubin", hasher.finalize().to_hex())))
    }

    /// Compiles the source and stores it in the cache.
    fn compile(&self) -> Result<Vec<u8>> {
        let compiled = compile(self)?;
        if let Some(place) = self.place() {
            // A failure to store only makes the next start slower. An incomplete file never has the final name.
            let number = STORED.fetch_add(1, Ordering::Relaxed);
            let aside = place.with_extension(format!("{}-{number}", std::process::id()));
            let kept = place.parent().is_some_and(|parent| std::fs::create_dir_all(parent).is_ok())
                && std::fs::write(&aside, &compiled).is_ok();
            if kept {
                let _ = std::fs::rename(&aside, &place);
            }
        }
        Ok(compiled)
    }
}

impl<'a> KernelImage<'a> {
    /// Reads the image from the cache, or compiles it.
    fn of(source: KernelSource<'a>) -> Result<Self> {
        let found = source.place().and_then(|place| std::fs::read(place).ok());
        let kept = found.is_some();
        let bytes = found.map_or_else(|| source.compile(), Ok)?;
        Ok(Self { source, bytes, kept })
    }

    /// Loads the image into the current context.
    fn load(self) -> Result<sys::CUmodule> {
        match load(&self.bytes) {
            Err(_) if self.kept => load(&self.source.compile()?),
            loaded => loaded,
        }
        .named(self.source.device, "cuModuleLoadData")
    }
}

#[expect(unsafe_code, reason = "calls of the driver")]
fn load(image: &[u8]) -> std::result::Result<sys::CUmodule, DriverError> {
    // SAFETY: the image outlives the call, and the driver validates it.
    unsafe { driver::module::load_data(image.as_ptr().cast()) }
}

/// Version of nvrtc, such as 13000 for 13.0.
#[expect(unsafe_code, reason = "calls of nvrtc")]
pub(super) fn version() -> i32 {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is loaded.
    let _ = unsafe { nvrtc_sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    major * 1000 + minor * 10
}

#[expect(unsafe_code, reason = "calls of nvrtc")]
fn compile(source: &KernelSource<'_>) -> Result<Vec<u8>> {
    let (device, file) = (source.device.to_owned(), source.file);
    let failed = |log: String| DeviceError::Compile { device: device.clone(), file, log };
    let text = CString::new(source.text.as_str()).map_err(|error| failed(error.to_string()))?;
    let name = CString::new(file).map_err(|error| failed(error.to_string()))?;
    let program = nvrtc::create_program(&text, Some(&name)).map_err(|error| failed(format!("{error:?}")))?;
    // SAFETY: the program is valid, and is destroyed once.
    unsafe {
        let compiled = nvrtc::compile_program(program, &source.options());
        let result = match compiled {
            Ok(()) => image(program).map_err(&failed),
            Err(error) => {
                let log = nvrtc::get_program_log(program).unwrap_or_default();
                let log = log.iter().map(|c| c.cast_unsigned()).take_while(|c| *c != 0).collect::<Vec<u8>>();
                Err(failed(format!("{error:?}: {}", String::from_utf8_lossy(&log).trim())))
            }
        };
        let _ = nvrtc::destroy_program(program);
        result
    }
}

/// The compiled image.
#[expect(unsafe_code, reason = "calls of nvrtc")]
unsafe fn image(program: nvrtc_sys::nvrtcProgram) -> std::result::Result<Vec<u8>, String> {
    let mut len = 0;
    // SAFETY: the program was compiled; the buffer has the size that nvrtc reported.
    unsafe {
        nvrtc_sys::nvrtcGetCUBINSize(program, &raw mut len).result().map_err(|error| format!("{error:?}"))?;
        let mut image = vec![0_u8; len];
        let to = image.as_mut_ptr().cast::<c_char>();
        nvrtc_sys::nvrtcGetCUBIN(program, to).result().map_err(|error| format!("{error:?}"))?;
        Ok(image)
    }
}

/// Compiles all kernels for an architecture, without a GPU.
///
/// # Errors
/// If nvrtc is not available, or a kernel does not compile.
pub(crate) fn compile_all(capability: i32) -> Result<()> {
    super::Library::Nvrtc
        .check()
        .map_err(|reason| DeviceError::Unavailable { device: "nvrtc".to_owned(), reason })?;
    SOURCES.iter().try_for_each(|(file, source)| {
        compile(&KernelSource { device: "nvrtc", file, text: whole(source), capability }).map(drop)
    })
}
