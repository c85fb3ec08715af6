//! The interface of a backend. Calls run in order on one stream; a call is asynchronous unless its comment says that it
//! waits.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::Result;

/// Size of a CUDA IPC memory handle, bytes.
const HANDLE: usize = 64;

/// One kernel argument.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Argument {
    /// Native byte order, from the first byte.
    pub(crate) bytes: [u8; 8],
}

macro_rules! argument_from {
    ($($type:ty),*) => {$(
        impl From<$type> for Argument {
            fn from(value: $type) -> Self {
                let mut bytes = [0; 8];
                bytes[..size_of::<$type>()].copy_from_slice(&value.to_ne_bytes());
                Self { bytes }
            }
        }
    )*};
}
argument_from!(i32, u32, i64, u64, f32);

impl Argument {
    /// A null pointer.
    pub(crate) fn null() -> Self {
        Self { bytes: [0; 8] }
    }
}

/// Whether memory can be shared with other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllocationKind {
    /// Private to this process; freed in stream order.
    Own,
    /// Can be opened by other processes (CUDA IPC).
    Shared,
}

/// Handle of memory that another process can open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryHandle {
    /// CUDA IPC memory handle.
    Cuda([u8; HANDLE]),
    /// Memory-mapped file of an emulated device.
    File(PathBuf),
}

impl fmt::Display for MemoryHandle {
    /// One line, which [`MemoryHandle::from_str`] parses in another process.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(bytes) => {
                f.write_str("cuda:")?;
                bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

impl FromStr for MemoryHandle {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || format!("{text:?} is no handle of memory on a device");
        let Some(digits) = text.strip_prefix("cuda:") else {
            return text.strip_prefix("file:").map(|path| Self::File(path.into())).ok_or_else(wrong);
        };
        if digits.len() != 2 * HANDLE || !digits.is_ascii() {
            return Err(wrong());
        }
        let mut bytes = [0; HANDLE];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).map_err(|_| wrong())?;
        }
        Ok(Self::Cuda(bytes))
    }
}

/// One matrix of a product: address, row stride in values, and whether it is transposed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductOperand {
    pub(crate) address: u64,
    pub(crate) stride: usize,
    pub(crate) transposed: bool,
}

/// A matrix product (GEMM): `c [m, n] = scale * op(a) op(b) + keep * c`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: ProductOperand,
    pub(crate) b: ProductOperand,
    pub(crate) c: ProductOperand,
    /// Whether `a` and `b` are bf16.
    pub(crate) narrow_inputs: bool,
    /// Whether `c` is bf16.
    pub(crate) narrow_output: bool,
    pub(crate) scale: f32,
    pub(crate) keep: f32,
}

/// A kernel launch.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) grid: [u32; 3],
    pub(crate) threads: u32,
    /// Dynamic shared memory, bytes.
    pub(crate) shared: usize,
    pub(crate) arguments: &'a [Argument],
}

/// A device with one stream.
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    /// Name, as in a recipe.
    fn name(&self) -> String;

    /// Unique id of the device across processes; each emulated device has its own.
    fn identity(&self) -> Result<String>;

    /// Address of new, uninitialised memory; `None` if memory is full. `bytes` is not 0.
    fn allocate(&self, bytes: usize, usage: AllocationKind) -> Result<Option<u64>>;

    /// Frees memory from [`Backend::allocate`].
    fn free(&self, address: u64, bytes: usize, usage: AllocationKind);

    /// Free and total memory, bytes.
    fn memory(&self) -> Result<(u64, u64)>;

    /// Copies from host to device. `from` may change when it returns.
    fn upload(&self, from: &[u8], to: u64) -> Result<()>;

    /// Copies from device to host. Waits.
    fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;

    /// Copies within the device, or from opened memory.
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Copies from this device to `other`, on the stream of this one.
    fn copy_to(&self, other: &dyn Backend, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Sets bytes to zero.
    fn clear(&self, address: u64, bytes: usize) -> Result<()>;

    fn launch(&self, launch: &Launch<'_>) -> Result<()>;

    fn product(&self, product: &Product) -> Result<()>;

    /// Waits until the stream is idle.
    fn synchronize(&self) -> Result<()>;

    /// Begins to record calls instead of executing them.
    fn begin_recording(&self) -> Result<()>;

    /// Ends the recording and returns it.
    fn end_recording(&self) -> Result<Box<dyn Recording>>;

    fn replay(&self, recording: &dyn Recording) -> Result<()>;

    /// Handle for another process, of [`AllocationKind::Shared`] memory.
    fn share(&self, address: u64) -> Result<MemoryHandle>;

    /// Opens the memory of another process.
    fn open(&self, handle: &MemoryHandle, bytes: usize) -> Result<u64>;

    /// Closes memory from [`Backend::open`].
    fn close(&self, address: u64, bytes: usize);

    /// For a downcast to the concrete backend.
    fn as_any(&self) -> &dyn Any;
}

/// Recorded calls that can be replayed.
pub(crate) trait Recording: Send + fmt::Debug {
    fn as_any(&self) -> &dyn Any;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_round_trips_as_text() {
        let bytes = std::array::from_fn(|index| index as u8 * 4);
        for handle in [MemoryHandle::Cuda(bytes), MemoryHandle::File("/tmp/a b".into())] {
            assert_eq!(handle.to_string().parse(), Ok(handle));
        }
        for text in ["", "cuda:", "cuda:00", "memory", &format!("cuda:{}", "x".repeat(128))] {
            assert!(text.parse::<MemoryHandle>().is_err(), "{text}");
        }
    }
}
