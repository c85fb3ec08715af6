//! The libraries of CUDA that are there.
//!
//! Invariant: nothing of cudarc is called before its library was found, because it panics then.

use std::ffi::c_int;

use cudarc::driver::sys;

/// A library that is opened at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    Driver,
    Nvrtc,
    Cublas,
    Nccl,
}

impl Library {
    /// Whether it is there.
    #[expect(unsafe_code, reason = "opens a library")]
    pub(crate) fn is_there(self) -> bool {
        // SAFETY: libraries of CUDA do nothing when they are opened.
        unsafe {
            match self {
                Self::Driver => sys::is_culib_present(),
                Self::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                Self::Cublas => cudarc::cublas::sys::is_culib_present(),
                Self::Nccl => cudarc::nccl::sys::is_culib_present(),
            }
        }
    }

    /// Where it comes from.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::Driver => "libcuda.so is not found: install NVIDIA's driver",
            Self::Nvrtc => {
                "libnvrtc.so is not found: install the CUDA toolkit 12 or 13 (or `pip install nvidia-cuda-nvrtc`), and put its directory into LD_LIBRARY_PATH"
            }
            Self::Cublas => {
                "libcublas.so is not found: install the CUDA toolkit 12 or 13 (or `pip install nvidia-cublas`), and put its directory into LD_LIBRARY_PATH"
            }
            Self::Nccl => {
                "libnccl.so is not found: install NCCL (or `pip install nvidia-nccl-cu13`), and put its directory into LD_LIBRARY_PATH; where only libnccl.so.2 is there, make a link to it"
            }
        }
    }

    /// What helps if it is not there.
    pub(crate) fn check(self) -> Result<(), String> {
        if self.is_there() { Ok(()) } else { Err(self.remedy().to_owned()) }
    }
}

/// Version of CUDA that the driver supports, as 13000 for 13.0.
#[expect(unsafe_code, reason = "calls of the driver")]
pub(crate) fn version_of_driver() -> Option<i32> {
    if !Library::Driver.is_there() {
        return None;
    }
    let mut version: c_int = 0;
    // SAFETY: the driver is there.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().ok()?;
    Some(version)
}
