//! CUDA graphs: launches that are recorded once and replayed together.

use crate::backend::{Backend, Recording};
use crate::device::Device;
use crate::error::Result;

/// Recorded launches. The memory that they use must live as long as the graph.
#[derive(Debug)]
pub struct Graph {
    // Dropped before the device.
    recording: Box<dyn Recording>,
    device: Device,
}

impl Device {
    /// Records the calls of `work` without executing them (CUDA stream capture). `work` must not allocate, free,
    /// upload, download or wait. It must have run once before, because drivers before CUDA 12.3 cannot load a kernel
    /// during a capture.
    ///
    /// # Errors
    /// The error of `work`, or a call that cannot be recorded.
    pub fn record(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.inner.backend.begin_recording()?;
        let guard = RecordingGuard(&*self.inner.backend);
        let done = work();
        std::mem::forget(guard);
        let recording = self.inner.backend.end_recording();
        done?;
        Ok(Graph { recording: recording?, device: self.clone() })
    }
}

/// Ends the recording if `work` panics.
struct RecordingGuard<'a>(&'a dyn Backend);

impl Drop for RecordingGuard<'_> {
    fn drop(&mut self) {
        drop(self.0.end_recording());
    }
}

impl Graph {
    /// Executes the recorded launches.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn replay(&self) -> Result<()> {
        self.device.inner.backend.replay(&*self.recording)
    }
}
