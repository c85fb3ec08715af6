//! Buffers that are used again. Invariant: what is here is in nobody's use, so that it can be written.

use std::sync::{Mutex, PoisonError};

use device::{Buffer, Device, Storage};

use super::failed;
use crate::WeightsError;

/// Most buffers that lie ready: while one is decoded from, another is made ready.
const KEPT: usize = 2;

/// Buffers for weights.
#[derive(Debug)]
pub(super) struct SpareBuffers<T: Storage> {
    device: Device,
    free: Mutex<Vec<Buffer<T>>>,
}

impl<T: Storage> SpareBuffers<T> {
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.labelled("pushed weights"), free: Mutex::default() }
    }

    /// Where they are.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// A buffer of its own for so many weights, with anything in it.
    pub(super) fn take(&self, len: usize) -> Result<Buffer<T>, WeightsError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.retain(|buffer| buffer.len() == len);
        if let Some(buffer) = free.pop() {
            return Ok(buffer);
        }
        drop(free);
        let buffer = self.device.uninit(len).map_err(failed("make room for new weights"))?;
        // Its first use may be on another stream.
        self.device.synchronize().map_err(failed("make room for new weights"))?;
        Ok(buffer)
    }

    /// Uses a buffer again.
    pub(super) fn give_back(&self, buffer: Buffer<T>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() == KEPT {
            free.remove(0);
        }
        free.push(buffer);
    }
}
