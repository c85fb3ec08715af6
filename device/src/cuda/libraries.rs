//! Detection of the CUDA libraries.
//!
//! Invariant: no function of cudarc is called before its library is found, because cudarc panics otherwise.

use std::ffi::c_int;

use cudarc::cublas::sys as cublas_sys;
use cudarc::driver::sys;

use super::modules;
use crate::inventory::NCCL_REMEDY;

/// A library that is opened at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    Driver,
    Nvrtc,
    Cublas,
    Nccl,
}

impl Library {
    /// Whether the library can be opened.
    #[expect(unsafe_code, reason = "opens a library")]
    pub(crate) fn is_available(self) -> bool {
        // SAFETY: CUDA libraries run no code when they are opened.
        unsafe {
            match self {
                Self::Driver => sys::is_culib_present(),
                Self::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                Self::Cublas => cudarc::cublas::sys::is_culib_present(),
                Self::Nccl => cudarc::nccl::sys::is_culib_present(),
            }
        }
    }

    /// How to install the library.
    fn remedy(self) -> String {
        let remedy = match self {
            Self::Driver => "libcuda.so is not found: install NVIDIA's driver",
            Self::Nvrtc => {
                "libnvrtc.so is not found: install the CUDA toolkit 12 or 13 (or `pip install nvidia-cuda-nvrtc`, for a driver of CUDA 12 `nvidia-cuda-nvrtc-cu12`), and put its directory into LD_LIBRARY_PATH"
            }
            Self::Cublas => {
                "libcublas.so is not found: install the CUDA toolkit 12 or 13 (or `pip install nvidia-cublas`, for a driver of CUDA 12 `nvidia-cublas-cu12`), and put its directory into LD_LIBRARY_PATH"
            }
            Self::Nccl => return format!("libnccl.so is not found: {NCCL_REMEDY}"),
        };
        remedy.to_owned()
    }

    /// An error with a remedy if the library is missing.
    pub(crate) fn check(self) -> Result<(), String> {
        if self.is_available() { Ok(()) } else { Err(self.remedy()) }
    }
}

/// CUDA version that the driver supports, such as 13000 for 13.0.
#[expect(unsafe_code, reason = "calls of the driver")]
pub(crate) fn version_of_driver() -> Option<i32> {
    if !Library::Driver.is_available() {
        return None;
    }
    let mut version: c_int = 0;
    // SAFETY: the driver is loaded.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().ok()?;
    Some(version)
}

/// Libraries that are newer than the driver supports, each with a remedy: a driver does not run code of a later major
/// version.
pub(crate) fn version_conflicts() -> Vec<String> {
    let Some(driver) = version_of_driver() else { return Vec::new() };
    let nvrtc = Library::Nvrtc
        .is_available()
        .then(|| (modules::version() / 1000, "libnvrtc.so", "nvidia-cuda-nvrtc"));
    let cublas =
        Library::Cublas.is_available().then(|| (version_of_cublas(), "libcublas.so", "nvidia-cublas"));
    let found = [nvrtc, cublas].into_iter().flatten();
    found.filter_map(|(major, file, package)| version_conflict(driver, major, file, package)).collect()
}

fn version_conflict(driver: c_int, major: c_int, file: &str, package: &str) -> Option<String> {
    let (wanted, minor) = (driver / 1000, driver % 1000 / 10);
    (major > wanted).then(|| {
        format!(
            "{file} is of CUDA {major}, and the driver of CUDA {wanted}.{minor}: update the driver, or `pip install \
             {package}-cu{wanted}`, `ln -s {file}.{wanted} {file}` in its directory, and put that first into LD_LIBRARY_PATH"
        )
    })
}

/// Major version of cuBLAS.
#[expect(unsafe_code, reason = "calls of cuBLAS")]
fn version_of_cublas() -> c_int {
    let mut major = 0;
    // SAFETY: the library is loaded.
    let _ = unsafe {
        cublas_sys::cublasGetProperty(cublas_sys::libraryPropertyType_t::MAJOR_VERSION, &raw mut major)
    };
    major
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_may_not_be_newer_than_the_driver() {
        assert_eq!(version_conflict(13_000, 13, "libnvrtc.so", "nvidia-cuda-nvrtc"), None);
        assert_eq!(version_conflict(13_000, 12, "libnvrtc.so", "nvidia-cuda-nvrtc"), None);
        let said = version_conflict(12_040, 13, "libnvrtc.so", "nvidia-cuda-nvrtc").expect("too new");
        assert!(
            said.contains("driver of CUDA 12.4")
                && said.contains("nvidia-cuda-nvrtc-cu12`, `ln -s libnvrtc.so.12 libnvrtc.so`"),
            "{said}"
        );
    }
}
