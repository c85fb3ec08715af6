//! Devices of this machine, and reasons why devices cannot be used.

use std::path::PathBuf;

use crate::device::DeviceLocation;

/// The oldest NCCL version with non-blocking communicators: 2.14.
pub const OLDEST_NCCL: i32 = 21_400;
/// Remedy if NCCL is not found.
pub const NCCL_REMEDY: &str = "install NCCL (or `pip install nvidia-nccl-cu13`, for a driver of CUDA 12 `nvidia-nccl-cu12`), and put its directory into LD_LIBRARY_PATH; where only libnccl.so.2 is in it, `ln -s libnccl.so.2 libnccl.so` there";

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// CUDA ordinal, as in `cuda:N`.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Free memory, bytes.
    pub free: u64,
    /// All memory, bytes.
    pub total: u64,
}

/// The CUDA installation and its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// CUDA version that the driver supports, such as 13000 for 13.0; `None` without a driver.
    pub driver: Option<i32>,
    /// NCCL version, such as 22809 for 2.28.9; `None` if NCCL is not found.
    pub nccl: Option<i32>,
    /// Number of GPUs that the driver lists.
    pub visible: usize,
    /// GPUs that can be used, among those that were checked.
    pub gpus: Vec<Gpu>,
    /// GPUs that cannot be used, by ordinal, with the reason.
    pub unusable: Vec<(usize, String)>,
    /// Why CUDA cannot be used, each with a remedy; empty if it can.
    pub missing: Vec<String>,
}

/// Sets the cache directory for compiled kernels, used by devices that are opened later.
pub fn keep_kernels_in(directory: PathBuf) {
    #[cfg(feature = "cuda")]
    crate::cuda::keep_in(directory);
    #[cfg(not(feature = "cuda"))]
    drop(directory);
}

/// Compiles all kernels for a compute capability (90 for 9.0); needs nvrtc but no GPU.
///
/// # Errors
/// If nvrtc is not available, or a kernel does not compile.
#[cfg(feature = "cuda")]
pub fn compile_kernels(capability: i32) -> crate::Result<()> {
    crate::cuda::compile_all(capability)
}

/// Lists all devices.
#[must_use]
pub fn inventory() -> Inventory {
    look(None)
}

/// Lists the GPUs among `places` only; checking a GPU needs some of its memory for a moment.
#[must_use]
pub fn inventory_of(places: &[DeviceLocation]) -> Inventory {
    look(Some(places))
}

fn look(at: Option<&[DeviceLocation]>) -> Inventory {
    #[cfg(feature = "cuda")]
    {
        crate::cuda::inventory(at)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = at;
        let missing = vec!["this program was built without CUDA; build it with `--features cuda`".to_owned()];
        Inventory { missing, ..Inventory::default() }
    }
}
