//! The CUDA backend: NVIDIA GPUs through the driver, nvrtc and cuBLAS, which are opened at run time.
//!
//! Invariant: every driver call is made with the device's context current on the calling thread. An error while memory
//! is freed is dropped; the next call reports it again.

mod captures;
mod libraries;
mod listing;
mod modules;

use std::any::Any;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cudarc::cublas::{result as cublas, sys as cublas_sys};
use cudarc::driver::result::{self as driver, DriverError};
use cudarc::driver::sys;

pub(crate) use self::libraries::Library;
pub(crate) use self::listing::inventory;
use self::modules::Modules;
pub(crate) use self::modules::{compile_all, keep_in};
use crate::backend::{AllocationKind, Backend, Launch, MemoryHandle, Product, ProductOperand, Recording};
use crate::error::{DeviceError, Result};

/// Out of memory.
const NO_MEMORY: DriverError = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
/// Workspace of cuBLAS, bytes: NVIDIA's recommendation for Hopper. Allocated in advance, so that products can be
/// recorded.
const WORKSPACE: usize = 32 << 20;

/// Whether a GPU reads pageable host memory through the host's page tables.
const READS_HOST: sys::CUdevice_attribute =
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;

/// How long an allocation waits for pending frees, and how often it checks.
const FREEING: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_micros(50);

thread_local! {
    /// The context that is current on this thread, if known.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// A GPU with one stream.
#[derive(Debug)]
pub(crate) struct Cuda {
    name: String,
    context: sys::CUcontext,
    device: sys::CUdevice,
    stream: sys::CUstream,
    cublas: Mutex<Cublas>,
    modules: Modules,
    /// Whether the GPU reads pageable host memory in place; an upload then has to wait.
    reads_host: bool,
    /// All its memory, bytes.
    total: u64,
}

#[derive(Debug)]
struct Cublas {
    handle: cublas_sys::cublasHandle_t,
    workspace: u64,
}

// SAFETY: CUDA contexts, streams and handles may be used from any thread; the cuBLAS handle is used under a lock.
#[expect(unsafe_code, reason = "pointers of the driver")]
unsafe impl Send for Cuda {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "pointers of the driver")]
unsafe impl Sync for Cuda {}

#[derive(Debug)]
struct CudaGraph {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: a graph may be launched and destroyed from any thread, one at a time.
#[expect(unsafe_code, reason = "pointers of the driver")]
unsafe impl Send for CudaGraph {}

impl Recording for CudaGraph {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaGraph {
    #[expect(unsafe_code, reason = "calls of the driver")]
    fn drop(&mut self) {
        // SAFETY: the driver created both, and they are not used again.
        unsafe {
            let _ = driver::graph::exec_destroy(self.executable);
            let _ = driver::graph::destroy(self.graph);
        }
    }
}

/// Adds the name of the call to its error.
trait Named<T> {
    fn named(self, device: &str, call: &'static str) -> Result<T>;
}

impl<T> Named<T> for std::result::Result<T, DriverError> {
    fn named(self, device: &str, call: &'static str) -> Result<T> {
        self.map_err(|error| DeviceError::Call { device: device.to_owned(), call, reason: text(error) })
    }
}

fn text(error: DriverError) -> String {
    let of = |text: std::result::Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| "unknown".to_owned(), |text| text.to_string_lossy().into_owned())
    };
    format!("{}: {}", of(error.error_name()), of(error.error_string()))
}

impl Cuda {
    #[expect(unsafe_code, reason = "calls of the driver")]
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        let name = format!("cuda:{ordinal}");
        let unavailable = |reason: String| DeviceError::Unavailable { device: name.clone(), reason };
        for library in [Library::Driver, Library::Nvrtc, Library::Cublas] {
            library.check().map_err(unavailable)?;
        }
        driver::init().map_err(|error| unavailable(text(error)))?;
        let count = driver::device::get_count().named(&name, "cuDeviceGetCount")?;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        if number >= count {
            let remedy =
                "look at CUDA_VISIBLE_DEVICES, or name a device for each rank in placement.trainer_devices";
            return Err(unavailable(format!("there are {count}; {remedy}")));
        }
        if let Some(version_conflict) = libraries::version_conflicts().into_iter().next() {
            return Err(unavailable(version_conflict));
        }
        let device = driver::device::get(number).named(&name, "cuDeviceGet")?;
        // SAFETY: the device is valid; the context is released with this value, or here after an error.
        unsafe {
            let context = driver::primary_ctx::retain(device).named(&name, "cuDevicePrimaryCtxRetain")?;
            Self::within(name, device, context).inspect_err(|_| {
                let _ = driver::primary_ctx::release(device);
            })
        }
    }

    /// Creates a stream in a context that outlives the value.
    #[expect(unsafe_code, reason = "calls of the driver")]
    unsafe fn within(name: String, device: sys::CUdevice, context: sys::CUcontext) -> Result<Self> {
        // SAFETY: the caller guarantees the context. Objects are destroyed with this value, or with the context after
        // an error.
        unsafe {
            driver::ctx::set_current(context).named(&name, "cuCtxSetCurrent")?;
            CURRENT.set(context as usize);
            keep_freed_memory(device).named(&name, "cuMemPoolSetAttribute")?;
            let kind = driver::stream::StreamKind::NonBlocking;
            let stream = driver::stream::create(kind).named(&name, "cuStreamCreate")?;
            let cublas = {
                let _no_captures = captures::exclude();
                Mutex::new(Cublas::new(&name, stream)?)
            };
            let modules = Modules::compile(&name, capability(device).named(&name, "cuDeviceGetAttribute")?)?;
            let reads_host = driver::device::get_attribute(device, READS_HOST).is_ok_and(|reads| reads != 0);
            let (_, total) = driver::mem_get_info().named(&name, "cuMemGetInfo")?;
            let total = total as u64;
            Ok(Self { name, context, device, stream, cublas, modules, reads_host, total })
        }
    }

    /// The stream, for other libraries.
    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Whether the stream is idle.
    #[expect(unsafe_code, reason = "calls of the driver")]
    pub(crate) fn is_idle(&self) -> Result<bool> {
        self.bind()?;
        // SAFETY: the stream is valid.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_SUCCESS => Ok(true),
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            error => Err(DriverError(error)).named(&self.name, "cuStreamQuery"),
        }
    }

    /// Makes the context current on this thread.
    #[expect(unsafe_code, reason = "calls of the driver")]
    pub(crate) fn bind(&self) -> Result<()> {
        if CURRENT.get() == self.context as usize {
            return Ok(());
        }
        // SAFETY: the context outlives this value.
        unsafe { driver::ctx::set_current(self.context) }.named(&self.name, "cuCtxSetCurrent")?;
        CURRENT.set(self.context as usize);
        Ok(())
    }

    /// Lets another GPU access the memory of this one's pool, if it can: between GPUs of one process NCCL reads and writes
    /// the buffers of its callers directly, and the memory of a pool is closed to others at first.
    #[expect(unsafe_code, reason = "calls of the driver")]
    pub(crate) fn open_pool_to(&self, other: &Self) -> Result<()> {
        if other.device == self.device {
            return Ok(());
        }
        self.bind()?;
        let mut reaches = 0;
        // SAFETY: both devices are valid.
        unsafe { sys::cuDeviceCanAccessPeer(&raw mut reaches, other.device, self.device) }
            .result()
            .named(&self.name, "cuDeviceCanAccessPeer")?;
        if reaches == 0 {
            return Ok(());
        }
        let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let access = sys::CUmemAccessDesc {
            location: sys::CUmemLocation { type_, id: other.device },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pool belongs to the device, and the call reads one description.
        let opened = unsafe {
            driver::device::get_default_mem_pool(self.device)
                .and_then(|pool| sys::cuMemPoolSetAccess(pool, &raw const access, 1).result())
        };
        opened.named(&self.name, "cuMemPoolSetAccess")
    }
}

impl Drop for Cuda {
    #[expect(unsafe_code, reason = "calls of the driver")]
    fn drop(&mut self) {
        if self.bind().is_err() {
            return;
        }
        let cublas = self.cublas.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        // SAFETY: buffers and graphs of the stream keep this value alive, so none is left.
        unsafe {
            let _ = driver::stream::synchronize(self.stream);
            let _no_captures = captures::exclude();
            let _ = cublas::destroy_handle(cublas.handle);
            let _ = driver::free_sync(cublas.workspace);
            self.modules.unload();
            let _ = driver::stream::destroy(self.stream);
            let _ = driver::primary_ctx::release(self.device);
        }
        // A new context may have the same address and has to be made current again.
        CURRENT.set(0);
    }
}

/// Compute capability, as 90 for 9.0.
#[expect(unsafe_code, reason = "calls of the driver")]
fn capability(device: sys::CUdevice) -> std::result::Result<i32, DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    // SAFETY: the device is valid.
    let [major, minor] = [MAJOR, MINOR].map(|what| unsafe { driver::device::get_attribute(device, what) });
    Ok(major? * 10 + minor?)
}

/// Keeps freed memory in the device's pool, for the next step.
#[expect(unsafe_code, reason = "calls of the driver")]
unsafe fn keep_freed_memory(device: sys::CUdevice) -> std::result::Result<(), DriverError> {
    let mut threshold = u64::MAX;
    let value = std::ptr::from_mut(&mut threshold).cast::<c_void>();
    let what = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the device is valid, and the value has the attribute's type.
    unsafe { driver::mem_pool::set_attribute(driver::device::get_default_mem_pool(device)?, what, value) }
}

impl Cublas {
    #[expect(unsafe_code, reason = "calls of cuBLAS")]
    fn new(name: &str, stream: sys::CUstream) -> Result<Self> {
        let failed = |error: cublas::CublasError| DeviceError::Call {
            device: name.to_owned(),
            call: "cublasCreate",
            reason: format!("{error:?}"),
        };
        let handle = cublas::create_handle().map_err(failed)?;
        // SAFETY: stream and memory outlive the handle.
        unsafe {
            cublas::set_stream(handle, stream.cast()).map_err(failed)?;
            // Sums are f32 throughout, also in products that are split along the inner dimension.
            let mode = cublas_sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
            cublas_sys::cublasSetMathMode(handle, mode).result().map_err(failed)?;
            let workspace = driver::malloc_sync(WORKSPACE).named(name, "cuMemAlloc")?;
            cublas_sys::cublasSetWorkspace_v2(handle, workspace as *mut c_void, WORKSPACE)
                .result()
                .map_err(failed)?;
            Ok(Self { handle, workspace })
        }
    }
}

impl Backend for Cuda {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn identity(&self) -> Result<String> {
        let uuid = driver::device::get_uuid(self.device).named(&self.name, "cuDeviceGetUuid")?;
        Ok(uuid.bytes.iter().map(|byte| format!("{:02x}", byte.cast_unsigned())).collect())
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn allocate(&self, bytes: usize, usage: AllocationKind) -> Result<Option<u64>> {
        self.bind()?;
        // The driver would take all free memory from other processes before it finds that it is not enough.
        if bytes as u64 > self.total {
            return Ok(None);
        }
        // SAFETY: the stream is valid; the address is used by the stream only, or shared after a wait.
        let allocate = || unsafe {
            match usage {
                AllocationKind::Own => driver::malloc_async(self.stream, bytes),
                // Only these allocations have IPC handles.
                AllocationKind::Shared => driver::malloc_sync(bytes),
            }
        };
        let mut allocated = allocate();
        if matches!(allocated, Err(NO_MEMORY)) {
            // The pool may hold freed memory, which is available once the stream is idle.
            let started = Instant::now();
            while started.elapsed() < FREEING && self.is_idle().is_ok_and(|idle| !idle) {
                std::thread::sleep(LOOK);
            }
            // SAFETY: the pool belongs to the device.
            let _ = unsafe {
                driver::device::get_default_mem_pool(self.device)
                    .and_then(|pool| driver::mem_pool::trim_to(pool, 0))
            };
            allocated = allocate();
        }
        match allocated {
            Ok(address) => Ok(Some(address)),
            Err(NO_MEMORY) => Ok(None),
            Err(error) => Err(error).named(&self.name, "cuMemAlloc"),
        }
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn free(&self, address: u64, _bytes: usize, usage: AllocationKind) {
        if self.bind().is_err() {
            return;
        }
        // SAFETY: it was allocated with this call, and its buffer is dropped.
        let _ = unsafe {
            match usage {
                AllocationKind::Own => driver::free_async(address, self.stream),
                AllocationKind::Shared => driver::free_sync(address),
            }
        };
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (free, total) = driver::mem_get_info().named(&self.name, "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        self.bind()?;
        // SAFETY: the view has this length. The driver has copied pageable memory when it returns, or the code below
        // waits.
        unsafe { driver::memcpy_htod_async(to, from, self.stream) }.named(&self.name, "cuMemcpyHtoDAsync")?;
        if self.reads_host { self.synchronize() } else { Ok(()) }
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the view has this length and is borrowed until the wait is over.
        unsafe { driver::memcpy_dtoh_async(to, from, self.stream) }.named(&self.name, "cuMemcpyDtoHAsync")?;
        self.synchronize()
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: both views have this length.
        unsafe { sys::cuMemcpyAsync(to, from, bytes, self.stream) }
            .result()
            .named(&self.name, "cuMemcpyAsync")
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn copy_to(&self, other: &dyn Backend, from: u64, to: u64, bytes: usize) -> Result<()> {
        let other = other.as_any().downcast_ref::<Self>().filter(|other| other.context != self.context);
        let Some(other) = other else { return self.copy(from, to, bytes) };
        self.bind()?;
        // Memory from the pools of two GPUs may not be peer-accessible; this call copies it anyway.
        // SAFETY: both views have this length, and both contexts are valid.
        unsafe { driver::memcpy_peer_async(other.context, to, self.context, from, bytes, self.stream) }
            .named(&self.name, "cuMemcpyPeerAsync")
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the view has this length.
        unsafe { driver::memset_d8_async(address, 0, bytes, self.stream) }
            .named(&self.name, "cuMemsetD8Async")
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.bind()?;
        let Launch { kernel, grid: [x, y, z], threads, shared, arguments } = *launch;
        let function = self.modules.function(&self.name, kernel, shared)?;
        let mut pointers: Vec<*mut c_void> =
            arguments.iter().map(|argument| argument.bytes.as_ptr().cast_mut().cast()).collect();
        let shared = u32::try_from(shared).unwrap_or(u32::MAX);
        // SAFETY: the launchers pass the arguments of each kernel, with addresses of live buffers.
        let launched = unsafe {
            driver::launch_kernel(function, (x, y, z), (threads, 1, 1), shared, self.stream, &mut pointers)
        };
        launched.map_err(|error| DeviceError::Kernel {
            device: self.name.clone(),
            kernel: kernel.to_owned(),
            reason: text(error),
        })
    }

    #[expect(unsafe_code, reason = "calls of cuBLAS")]
    fn product(&self, product: &Product) -> Result<()> {
        self.bind()?;
        let Product { m, n, k, a, b, c, narrow_inputs, narrow_output, scale, keep } = *product;
        let int = |value: usize| c_int::try_from(value).unwrap_or(c_int::MAX);
        let kind = |narrow: bool| match narrow {
            true => cublas_sys::cudaDataType::CUDA_R_16BF,
            false => cublas_sys::cudaDataType::CUDA_R_32F,
        };
        let operation = |operand: ProductOperand| match operand.transposed {
            true => cublas_sys::cublasOperation_t::CUBLAS_OP_T,
            false => cublas_sys::cublasOperation_t::CUBLAS_OP_N,
        };
        let cublas = self.cublas.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // cuBLAS is column-major, so these matrices are transposed for it: c' = b' a'.
        // SAFETY: shapes and strides were checked against views of live buffers.
        let done = unsafe {
            cublas::gemm_ex(
                cublas.handle,
                operation(b),
                operation(a),
                int(n),
                int(m),
                int(k),
                std::ptr::from_ref(&scale).cast(),
                b.address as *const c_void,
                kind(narrow_inputs),
                int(b.stride),
                a.address as *const c_void,
                kind(narrow_inputs),
                int(a.stride),
                std::ptr::from_ref(&keep).cast(),
                c.address as *mut c_void,
                kind(narrow_output),
                int(c.stride),
                cublas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                cublas_sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        done.map_err(|error| DeviceError::Call {
            device: self.name.clone(),
            call: "cublasGemmEx",
            reason: format!("{error:?} for [{m}, {k}] times [{k}, {n}]"),
        })
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream is valid.
        unsafe { driver::stream::synchronize(self.stream) }.named(&self.name, "cuStreamSynchronize")
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn begin_recording(&self) -> Result<()> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        captures::begin();
        // SAFETY: the stream is valid.
        let begun = unsafe { driver::stream::begin_capture(self.stream, mode) };
        if begun.is_err() {
            captures::end();
        }
        begun.named(&self.name, "cuStreamBeginCapture")
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn end_recording(&self) -> Result<Box<dyn Recording>> {
        let bound = self.bind();
        // SAFETY: the stream is valid and capturing; the graph is destroyed with its executable.
        unsafe {
            let ended = driver::stream::end_capture(self.stream);
            captures::end();
            let graph = bound.and(ended.named(&self.name, "cuStreamEndCapture"))?;
            let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let executable =
                driver::graph::instantiate(graph, flags).named(&self.name, "cuGraphInstantiate")?;
            Ok(Box::new(CudaGraph { graph, executable }))
        }
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn replay(&self, recording: &dyn Recording) -> Result<()> {
        self.bind()?;
        let recorded = recording.as_any().downcast_ref::<CudaGraph>().ok_or_else(|| DeviceError::Call {
            device: self.name.clone(),
            call: "cuGraphLaunch",
            reason: "it was recorded by another device".to_owned(),
        })?;
        // SAFETY: graph and stream are valid.
        unsafe { driver::graph::launch(recorded.executable, self.stream) }.named(&self.name, "cuGraphLaunch")
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn share(&self, address: u64) -> Result<MemoryHandle> {
        self.bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the address is the start of an allocation for sharing.
        unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) }
            .result()
            .named(&self.name, "cuIpcGetMemHandle")?;
        Ok(MemoryHandle::Cuda(handle.reserved.map(|byte| byte.cast_unsigned())))
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn open(&self, handle: &MemoryHandle, _bytes: usize) -> Result<u64> {
        self.bind()?;
        let MemoryHandle::Cuda(bytes) = handle else {
            return Err(DeviceError::Call {
                device: self.name.clone(),
                call: "cuIpcOpenMemHandle",
                reason: "it is the memory of an emulated device".to_owned(),
            });
        };
        let handle = sys::CUipcMemHandle { reserved: bytes.map(u8::cast_signed) };
        let mut address = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: the driver validates the handle.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }
            .result()
            .named(&self.name, "cuIpcOpenMemHandle")?;
        Ok(address)
    }

    #[expect(unsafe_code, reason = "calls of the driver")]
    fn close(&self, address: u64, _bytes: usize) {
        if self.bind().is_err() || self.synchronize().is_err() {
            return;
        }
        // SAFETY: it was opened with this call, and its buffer is dropped.
        let _ = unsafe { sys::cuIpcCloseMemHandle(address) };
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
