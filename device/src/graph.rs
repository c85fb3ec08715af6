//! Launches that are recorded once and replayed as one: a CUDA graph.

use crate::backend::{Backend, Recording};
use crate::device::Device;
use crate::error::Result;

/// Recorded work. Whatever memory it works on has to live for as long as it does.
#[derive(Debug)]
pub struct Graph {
    // Goes before the device.
    recording: Box<dyn Recording>,
    device: Device,
}

impl Device {
    /// Records what `work` asks of the device; nothing of it is done. `work` may not allocate, free, upload, download or
    /// wait, and has to have been done once before, because drivers before CUDA 12.3 cannot load a kernel while they record.
    ///
    /// # Errors
    /// That of `work`, or if it did something that cannot be recorded.
    pub fn record(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.inner.backend.begin_recording()?;
        let mut ends = Ends(Some(&*self.inner.backend));
        let done = work();
        let Some(backend) = ends.0.take() else { unreachable!("it is taken once") };
        let recording = backend.end_recording();
        done?;
        Ok(Graph { recording: recording?, device: self.clone() })
    }
}

/// Ends a recording in the middle of which somebody panics.
struct Ends<'a>(Option<&'a dyn Backend>);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        if let Some(backend) = self.0 {
            drop(backend.end_recording());
        }
    }
}

impl Graph {
    /// Does what was recorded.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn replay(&self) -> Result<()> {
        self.device.inner.backend.replay(&*self.recording)
    }
}
