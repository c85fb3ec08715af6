//! Two buffers that are used in turn. Invariant: one is written only while nobody else holds it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use device::{Buffer, Device, Storage};
use trajectory::PolicyVersion;

use super::failed;
use crate::WeightsError;

/// Buffers: what is decoded from, and what comes next.
const KEPT: usize = 2;
/// Pause between two looks whether one is free.
const PAUSE: Duration = Duration::from_millis(1);

/// Buffers for weights.
#[derive(Debug)]
pub(super) struct Spares<T: Storage> {
    device: Device,
    kept: Vec<Arc<Buffer<T>>>,
}

impl<T: Storage> Spares<T> {
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.labelled("pushed weights"), kept: Vec::with_capacity(KEPT) }
    }

    /// A buffer that nobody else holds, with anything in it; it has to be given back by [`Spares::keep`]. While there is
    /// none, `let_go` is asked to let go of what it can, for up to `wait`.
    pub(super) fn take(
        &mut self,
        version: PolicyVersion,
        len: usize,
        wait: Duration,
        mut let_go: impl FnMut(),
    ) -> Result<Buffer<T>, WeightsError> {
        self.kept.retain(|kept| kept.len() == len);
        let started = Instant::now();
        loop {
            let free = self.kept.iter_mut().position(|kept| Arc::get_mut(kept).is_some());
            if let Some(free) = free.and_then(|index| Arc::into_inner(self.kept.swap_remove(index))) {
                return Ok(free);
            }
            if self.kept.len() < KEPT {
                let buffer = self.device.uninit(len).map_err(failed("make room for new weights"))?;
                // Its first use may be on another stream.
                self.device.synchronize().map_err(failed("make room for new weights"))?;
                return Ok(buffer);
            }
            let waited = started.elapsed();
            if waited >= wait {
                let holders = format!("{KEPT} versions before it are still held by samplers of this process");
                return Err(WeightsError::Held { version, waited, holders });
            }
            let_go();
            std::thread::sleep(PAUSE);
        }
    }

    /// Uses a buffer again when its other holders are gone.
    pub(super) fn keep(&mut self, buffer: Buffer<T>) -> Arc<Buffer<T>> {
        let buffer = Arc::new(buffer);
        self.kept.push(Arc::clone(&buffer));
        buffer
    }
}
