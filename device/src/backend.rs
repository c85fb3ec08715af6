//! What a backend has to do. Everything happens in the order of the calls; what waits says so.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::Result;

/// Bytes of CUDA's handle of an allocation.
const HANDLE: usize = 64;

/// One argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Argument {
    /// Little-endian, from the first byte.
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
    /// A pointer to nothing.
    pub(crate) fn null() -> Self {
        Self { bytes: [0; 8] }
    }
}

/// How memory may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// By this process, freed when everything before is done.
    Own,
    /// By other processes too.
    Shared,
}

/// Where memory of another process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handle {
    /// CUDA's handle of an allocation.
    Cuda([u8; HANDLE]),
    /// A file in memory, of an emulated device.
    File(PathBuf),
}

impl fmt::Display for Handle {
    /// As one line, which [`Handle::from_str`] reads in another process.
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

impl FromStr for Handle {
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

/// One matrix of a product: address, distance of its rows in values, and whether it is taken transposed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    pub(crate) address: u64,
    pub(crate) stride: usize,
    pub(crate) transposed: bool,
}

/// `c [m, n] = scale * op(a) op(b) + keep * c`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Operand,
    pub(crate) b: Operand,
    pub(crate) c: Operand,
    /// Whether `a` and `b` are bf16.
    pub(crate) narrow_inputs: bool,
    /// Whether `c` is.
    pub(crate) narrow_output: bool,
    pub(crate) scale: f32,
    pub(crate) keep: f32,
}

/// A kernel to run.
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
    /// As people call it.
    fn name(&self) -> String;

    /// Which device of all machines it is, whoever opened it; emulated ones are as many as are opened.
    fn identity(&self) -> Result<String>;

    /// Address of new memory with anything in it; `None` if there is none. `bytes` is not 0.
    fn allocate(&self, bytes: usize, usage: Use) -> Result<Option<u64>>;

    /// Frees what [`Backend::allocate`] gave.
    fn free(&self, address: u64, bytes: usize, usage: Use);

    /// Free and total memory, bytes.
    fn memory(&self) -> Result<(u64, u64)>;

    /// Host to device. The bytes have been taken when it returns.
    fn upload(&self, from: &[u8], to: u64) -> Result<()>;

    /// Device to host. Waits.
    fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;

    /// Within the device, or from what it has opened.
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// From this device to `other`, on the stream of this one.
    fn copy_to(&self, other: &dyn Backend, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Sets bytes to zero.
    fn clear(&self, address: u64, bytes: usize) -> Result<()>;

    fn launch(&self, launch: &Launch<'_>) -> Result<()>;

    fn product(&self, product: &Product) -> Result<()>;

    /// Waits until everything is done.
    fn synchronize(&self) -> Result<()>;

    /// From now on work is recorded in place of being done.
    fn begin_recording(&self) -> Result<()>;

    /// What was recorded.
    fn end_recording(&self) -> Result<Box<dyn Recording>>;

    fn replay(&self, recording: &dyn Recording) -> Result<()>;

    /// For another process, of [`Use::Shared`] memory.
    fn share(&self, address: u64) -> Result<Handle>;

    /// Memory of another process.
    fn open(&self, handle: &Handle, bytes: usize) -> Result<u64>;

    /// Ends the use of what [`Backend::open`] gave.
    fn close(&self, address: u64, bytes: usize);

    /// For who knows which backend it is.
    fn as_any(&self) -> &dyn Any;
}

/// Work that can be replayed.
pub(crate) trait Recording: Send + fmt::Debug {
    fn as_any(&self) -> &dyn Any;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_read_as_it_is_written() {
        let bytes = std::array::from_fn(|index| index as u8 * 4);
        for handle in [Handle::Cuda(bytes), Handle::File("/tmp/a b".into())] {
            assert_eq!(handle.to_string().parse(), Ok(handle));
        }
        for text in ["", "cuda:", "cuda:00", "memory", &format!("cuda:{}", "x".repeat(128))] {
            assert!(text.parse::<Handle>().is_err(), "{text}");
        }
    }
}
