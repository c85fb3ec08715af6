//! Sources of the weights of a pass and sinks of its gradients.

use std::ops::Range;
use std::sync::Arc;

use device::ops::vectors::cast;
use device::{Device, DeviceBuffer, Result, Storage, View, ViewMut};

use crate::{Layout, Parameters, Unit};

/// Weights, unit by unit.
pub trait UnitWeights<T: Storage> {
    /// `[layout.unit(unit).len()]` values of a unit, in the order of the layout. They are valid until the next call.
    ///
    /// # Errors
    /// If the values are not available.
    fn unit(&mut self, unit: Unit) -> Result<View<'_, T>>;
}

/// Gradients, unit by unit: the tail, the layers from last to first, the embedding. An embedding that is also the head is
/// asked for before the tail too.
pub trait UnitGradients {
    /// `[layout.unit(unit).len()]` gradients of a unit, to add to.
    ///
    /// # Errors
    /// If there is no memory for them.
    fn unit(&mut self, unit: Unit) -> Result<ViewMut<'_, f32>>;

    /// Marks a unit as complete.
    ///
    /// # Errors
    /// If its reduction fails.
    fn done(&mut self, unit: Unit) -> Result<()>;
}

/// All weights of a model in one buffer.
#[derive(Debug)]
pub struct FlatWeights<T: Storage> {
    buffer: DeviceBuffer<T>,
    layout: Arc<Layout>,
}

/// The gradients of all weights in one buffer.
#[derive(Debug)]
pub struct FlatGradients {
    buffer: DeviceBuffer<f32>,
    layout: Arc<Layout>,
}

/// Largest number of values that are uploaded and converted at a time.
const PIECE: usize = 16 << 20;

impl<T: Storage> FlatWeights<T> {
    /// Uninitialised weights.
    ///
    /// # Errors
    /// [`device::DeviceError::OutOfMemory`].
    pub fn new(device: &Device, layout: &Arc<Layout>) -> Result<Self> {
        Ok(Self { buffer: device.labelled("weights").uninit(layout.len())?, layout: Arc::clone(layout) })
    }

    /// The weights of `parameters`, each the nearest value of `T`.
    ///
    /// # Errors
    /// [`device::DeviceError::OutOfMemory`].
    pub fn upload(device: &Device, parameters: &Parameters) -> Result<Self> {
        let mut whole = Self::new(device, parameters.layout())?;
        upload_as(device, parameters.values(), &mut whole.buffer)?;
        Ok(whole)
    }

    /// The weights in `buffer [layout.len()]`.
    ///
    /// # Panics
    /// If the buffer has another length.
    #[must_use]
    pub fn of(buffer: DeviceBuffer<T>, layout: &Arc<Layout>) -> Self {
        assert_eq!(buffer.len(), layout.len(), "weights have the length of their layout");
        Self { buffer, layout: Arc::clone(layout) }
    }

    /// `[layout.len()]` values.
    #[must_use]
    pub fn buffer(&self) -> &DeviceBuffer<T> {
        &self.buffer
    }

    /// `[layout.len()]` values, writable.
    pub fn buffer_mut(&mut self) -> &mut DeviceBuffer<T> {
        &mut self.buffer
    }

    /// Returns the buffer.
    #[must_use]
    pub fn into_buffer(self) -> DeviceBuffer<T> {
        self.buffer
    }
}

/// Writes `values` to a buffer as the nearest values of its type.
pub(super) fn upload_as<T: Storage>(device: &Device, values: &[f32], to: &mut DeviceBuffer<T>) -> Result<()> {
    for (number, piece) in values.chunks(PIECE).enumerate() {
        let start = number * PIECE;
        let staged = device.upload(piece)?;
        cast(device, staged.all(), to.view_mut(start..start + piece.len()))?;
    }
    Ok(())
}

impl<T: Storage> UnitWeights<T> for FlatWeights<T> {
    fn unit(&mut self, unit: Unit) -> Result<View<'_, T>> {
        Ok(self.buffer.view(self.layout.unit(unit)))
    }
}

impl FlatGradients {
    /// Gradients of zero.
    ///
    /// # Errors
    /// [`device::DeviceError::OutOfMemory`].
    pub fn new(device: &Device, layout: &Arc<Layout>) -> Result<Self> {
        Ok(Self { buffer: device.labelled("gradients").zeros(layout.len())?, layout: Arc::clone(layout) })
    }

    /// Sets all to zero.
    ///
    /// # Errors
    /// If the device fails.
    pub fn clear(&mut self, device: &Device) -> Result<()> {
        device.clear(self.buffer.all_mut())
    }

    /// `[layout.len()]` values.
    #[must_use]
    pub fn buffer(&self) -> &DeviceBuffer<f32> {
        &self.buffer
    }

    /// `[layout.len()]` values, writable.
    pub fn buffer_mut(&mut self) -> &mut DeviceBuffer<f32> {
        &mut self.buffer
    }
}

impl UnitGradients for FlatGradients {
    fn unit(&mut self, unit: Unit) -> Result<ViewMut<'_, f32>> {
        Ok(self.buffer.view_mut(self.layout.unit(unit)))
    }

    fn done(&mut self, _unit: Unit) -> Result<()> {
        Ok(())
    }
}

/// A range of the flat layout, relative to the start of its unit.
pub(super) fn within(layout: &Layout, unit: Unit, range: &Range<usize>) -> Range<usize> {
    let start = layout.unit(unit).start;
    range.start - start..range.end - start
}
