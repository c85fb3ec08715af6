//! Which devices there are, and why there are none.

use std::path::PathBuf;

use crate::device::Place;

/// The oldest version of NCCL that can be told not to block: 2.14.
pub const OLDEST_NCCL: i32 = 21_400;
/// What helps where NCCL is not found.
pub const NCCL_REMEDY: &str = "install NCCL (or `pip install nvidia-nccl-cu13`, for a driver of CUDA 12 `nvidia-nccl-cu12`), and put its directory into LD_LIBRARY_PATH; where only libnccl.so.2 is in it, `ln -s libnccl.so.2 libnccl.so` there";

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its number, as `cuda:N` names it.
    pub ordinal: usize,
    /// As its maker calls it.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Free memory, bytes.
    pub free: u64,
    /// All memory, bytes.
    pub total: u64,
}

/// What there is of CUDA.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Version of CUDA that the driver supports, as 13000 for 13.0; `None` without a driver.
    pub driver: Option<i32>,
    /// Version of NCCL, as 22809 for 2.28.9; `None` if it is not found.
    pub nccl: Option<i32>,
    /// How many GPUs the driver shows.
    pub visible: usize,
    /// What is usable of those that were looked at.
    pub gpus: Vec<Gpu>,
    /// What is not, by its number, and why.
    pub unusable: Vec<(usize, String)>,
    /// Why CUDA cannot be used, and what helps; empty if it can.
    pub missing: Vec<String>,
}

/// Keeps compiled kernels in `directory`, from the next device on that is opened.
pub fn keep_kernels_in(directory: PathBuf) {
    #[cfg(feature = "cuda")]
    crate::cuda::keep_in(directory);
    #[cfg(not(feature = "cuda"))]
    drop(directory);
}

/// Compiles the kernels for a compute capability (90 for 9.0), which needs nvrtc and no GPU.
///
/// # Errors
/// If the compiler is not there, or a kernel does not compile.
#[cfg(feature = "cuda")]
pub fn compile_kernels(capability: i32) -> crate::Result<()> {
    crate::cuda::compile_all(capability)
}

/// Looks what there is.
#[must_use]
pub fn inventory() -> Inventory {
    look(None)
}

/// The same, of the GPUs among `places` alone: to look at one takes some memory of it for a moment.
#[must_use]
pub fn inventory_of(places: &[Place]) -> Inventory {
    look(Some(places))
}

fn look(at: Option<&[Place]>) -> Inventory {
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
