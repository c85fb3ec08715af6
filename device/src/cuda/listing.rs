//! Lists the GPUs of this machine.

use std::ffi::c_int;

use cudarc::driver::result as driver;
use cudarc::driver::sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
};

use super::libraries::{Library, version_conflicts, version_of_driver};
use super::text;
use crate::device::DeviceLocation;
use crate::inventory::{Gpu, Inventory};

/// Lists all GPUs, or those among `places`.
pub(crate) fn inventory(places: Option<&[DeviceLocation]>) -> Inventory {
    let needed = [Library::Driver, Library::Nvrtc, Library::Cublas];
    let mut missing: Vec<String> = needed.iter().filter_map(|library| library.check().err()).collect();
    let nccl = Library::Nccl.is_available().then(|| cudarc::nccl::result::get_nccl_version().ok()).flatten();
    let driver = version_of_driver();
    missing.extend(version_conflicts());
    let (mut gpus, mut unusable, mut visible) = (Vec::new(), Vec::new(), 0);
    if driver.is_some() {
        match driver::init().and_then(|()| driver::device::get_count()) {
            Ok(0) => missing.push("the driver shows no GPU; look at CUDA_VISIBLE_DEVICES".to_owned()),
            Ok(count) => visible = usize::try_from(count).unwrap_or_default(),
            Err(error) => missing.push(format!("the driver cannot be used: {}", text(error))),
        }
    }
    let wanted =
        |ordinal: &usize| places.is_none_or(|places| places.contains(&DeviceLocation::Cuda(*ordinal)));
    for ordinal in (0..visible).filter(wanted) {
        match look(ordinal) {
            Ok(gpu) => gpus.push(gpu),
            Err(error) => unusable.push((ordinal, text(error))),
        }
    }
    Inventory { driver, nccl, visible, gpus, unusable, missing }
}

#[expect(unsafe_code, reason = "calls of the driver")]
fn look(ordinal: usize) -> Result<Gpu, driver::DriverError> {
    let device = driver::device::get(c_int::try_from(ordinal).unwrap_or(c_int::MAX))?;
    // SAFETY: the device is valid, and its context is released below.
    unsafe {
        let attribute = |what| driver::device::get_attribute(device, what);
        let capability = (attribute(MAJOR)?, attribute(MINOR)?);
        let before = driver::ctx::get_current()?;
        let context = driver::primary_ctx::retain(device)?;
        let memory = driver::ctx::set_current(context).and_then(|()| driver::mem_get_info());
        let back = driver::ctx::set_current(before.unwrap_or(std::ptr::null_mut()));
        let released = driver::primary_ctx::release(device);
        let (free, total) = memory?;
        back.and(released)?;
        let name = driver::device::get_name(device)?;
        Ok(Gpu { ordinal, name, capability, free: free as u64, total: total as u64 })
    }
}
