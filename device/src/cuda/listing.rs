//! The GPUs of this machine.

use cudarc::driver::result as driver;
use cudarc::driver::sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
};

use super::libraries::{Library, version_of_driver};
use super::text;
use crate::inventory::{Gpu, Inventory};

/// Looks what there is.
pub(crate) fn inventory() -> Inventory {
    let needed = [Library::Driver, Library::Nvrtc, Library::Cublas];
    let mut missing: Vec<String> = needed.iter().filter_map(|library| library.check().err()).collect();
    let nccl = Library::Nccl.is_there().then(|| cudarc::nccl::result::get_nccl_version().ok()).flatten();
    let driver = version_of_driver();
    let mut gpus = Vec::new();
    if driver.is_some() {
        match list() {
            Ok(found) if found.is_empty() => {
                missing.push("the driver shows no GPU; look at CUDA_VISIBLE_DEVICES".to_owned());
            }
            Ok(found) => gpus = found,
            Err(error) => missing.push(format!("the driver cannot be used: {}", text(error))),
        }
    }
    Inventory { driver, nccl, gpus, missing }
}

#[expect(unsafe_code, reason = "calls of the driver")]
fn list() -> Result<Vec<Gpu>, driver::DriverError> {
    driver::init()?;
    let count = driver::device::get_count()?;
    (0..count)
        .map(|number| {
            let device = driver::device::get(number)?;
            // SAFETY: the device was just got; its context is released again.
            unsafe {
                let attribute = |what| driver::device::get_attribute(device, what);
                let capability = (attribute(MAJOR)?, attribute(MINOR)?);
                let context = driver::primary_ctx::retain(device)?;
                let before = driver::ctx::get_current()?;
                driver::ctx::set_current(context)?;
                let memory = driver::mem_get_info();
                driver::ctx::set_current(before.unwrap_or(std::ptr::null_mut()))?;
                driver::primary_ctx::release(device)?;
                let (free, total) = memory?;
                let name = driver::device::get_name(device)?;
                Ok(Gpu { ordinal: number as usize, name, capability, free: free as u64, total: total as u64 })
            }
        })
        .collect()
}
