//! Reused buffers. Invariant: a buffer in here is unused, so it can be written.

use std::sync::{Mutex, PoisonError};

use device::{Device, DeviceBuffer, Storage};

use super::failed;
use crate::WeightsError;

/// Maximum number of unused buffers (double buffering).
const KEPT: usize = 2;

/// Unused buffers for weights.
#[derive(Debug)]
pub(super) struct SpareBuffers<T: Storage> {
    device: Device,
    free: Mutex<Vec<DeviceBuffer<T>>>,
}

impl<T: Storage> SpareBuffers<T> {
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.labelled("pushed weights"), free: Mutex::default() }
    }

    /// Their device.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// An unused buffer of `len` weights, with arbitrary content.
    pub(super) fn take(&self, len: usize) -> Result<DeviceBuffer<T>, WeightsError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.retain(|buffer| buffer.len() == len);
        if let Some(buffer) = free.pop() {
            return Ok(buffer);
        }
        drop(free);
        let buffer = self.device.uninit(len).map_err(failed("allocate memory for new weights"))?;
        // Its first use may be on another stream.
        self.device.synchronize().map_err(failed("allocate memory for new weights"))?;
        Ok(buffer)
    }

    /// Returns a buffer for reuse.
    pub(super) fn give_back(&self, buffer: DeviceBuffer<T>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() == KEPT {
            free.remove(0);
        }
        free.push(buffer);
    }
}
