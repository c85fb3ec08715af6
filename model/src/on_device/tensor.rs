//! Ranks on devices that share the weights of a pass (tensor parallel): each has its heads of attention and its part of the width of
//! the feed-forward networks, and all of embedding, head and norms.
//!
//! Invariant: residual streams and their gradients have the same bits on all ranks, because a call gives all of them the same sums and
//! kernels repeat their sums: so have the copies of embedding, head and norms after every update. Partial sums are added in f32, whatever
//! the storage.

use std::sync::Arc;

use collective::{Collective, CollectiveError, InDeviceMemory};
use device::ops::vectors::cast;
use device::{Device, DeviceBuffer, Result, Storage, ViewMut};

/// The calls of one of these ranks. All of them make the same calls in the same order.
#[derive(Clone, Debug)]
pub enum DeviceTensorRanks {
    /// Through the memory of hosts.
    ThroughHost(Arc<dyn Collective>),
    /// From device to device.
    Direct(Arc<dyn Collective<InDeviceMemory<f32>>>),
}

impl DeviceTensorRanks {
    /// Sums `values [n]` of all ranks in place.
    pub(super) fn sum<T: Storage>(&self, device: &Device, values: ViewMut<'_, T>) -> Result<()> {
        match self {
            Self::ThroughHost(ranks) => {
                let own = device.download(values.as_view())?;
                let mut sums: Vec<f32> = own.iter().map(|value| value.widen()).collect();
                ranks.all_reduce(&mut sums).map_err(CollectiveError::into_device_error)?;
                let sums: Vec<T> = sums.into_iter().map(T::narrow).collect();
                device.upload_to(&sums, values)
            }
            Self::Direct(ranks) => {
                let mut sums: DeviceBuffer<f32> = device.uninit(values.len())?;
                cast(device, values.as_view(), sums.all_mut())?;
                ranks.all_reduce(sums.all_mut()).map_err(CollectiveError::into_device_error)?;
                cast(device, sums.all(), values)
            }
        }
    }

    /// Waits for the sums that are on their way, before anything else waits for the device: a rank may be lost.
    ///
    /// # Errors
    /// If a rank is gone or late.
    pub fn wait(&self) -> Result<()> {
        match self {
            Self::ThroughHost(_) => Ok(()),
            Self::Direct(ranks) => {
                ranks.wait("add up partial sums").map_err(CollectiveError::into_device_error)
            }
        }
    }
}
