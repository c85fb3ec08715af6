//! ZeRO over ranks that are devices: reduce-scatter of gradients and all-gather of weights from device to device.
//!
//! All calls are enqueued on the stream of the rank's device, in the order of the passes. A rank without rows makes the same
//! calls with gradients of zero.
//!
//! Invariant: after a call of the collective, [`DeviceSharding::wait`] is the first operation that waits for the device. It
//! knows the deadline and the operation. A copy from the host also waits for the device.

use std::sync::Arc;

use collective::{Collective, CollectiveError, InDeviceMemory};
use device::ops::vectors::add;
use device::{Device, DeviceBuffer, Storage, View, ViewMut};
use model::{Layout, Unit};

use super::{Shards, number};

/// The shards of a rank that is a device, and the collective of all ranks.
#[derive(Debug)]
pub(crate) struct DeviceSharding<T: Storage> {
    collective: Arc<dyn Collective<InDeviceMemory<T>>>,
    /// Shards of the weights and of the gradients. Every unit is one range.
    shards: Shards,
}

/// Reduce-scatter of gradients to their owners.
pub(crate) struct DeviceReduction<'a, T: Storage> {
    pub(crate) sharding: &'a DeviceSharding<T>,
    /// The sums that this rank owns, concatenated.
    pub(crate) own: &'a mut DeviceBuffer<f32>,
    /// Whether the units of a pass are complete and reduced, or accumulated for a later pass.
    pub(crate) complete: bool,
    /// Whether this reduction is the first of the step.
    pub(crate) first: bool,
}

/// All-gather of layers from their owners when they are needed.
pub(crate) struct DeviceGathering<'a, T: Storage> {
    sharding: &'a DeviceSharding<T>,
    layout: &'a Layout,
    /// The shards of this rank, concatenated.
    own: View<'a, T>,
    /// Embedding and tail, which stay gathered.
    ends: [DeviceBuffer<T>; 2],
    /// The last gathered layer.
    layer: DeviceBuffer<T>,
    index: Option<usize>,
    /// Whether a backward pass follows or is in progress.
    pub(crate) backward: bool,
}

impl<T: Storage> DeviceSharding<T> {
    /// The sharding of this rank of `collective`. `shards` are those of the trained model.
    pub(crate) fn new(collective: Arc<dyn Collective<InDeviceMemory<T>>>, shards: Shards) -> Self {
        Self { collective, shards }
    }

    /// Gathers the shards of all ranks of every unit into `all`.
    pub(crate) fn gather(&self, own: View<'_, T>, all: &mut DeviceBuffer<T>) -> device::Result<()> {
        for unit in 0..self.shards.ranges() {
            self.gather_unit(unit, own, all.view_mut(self.shards.place(unit)))?;
        }
        self.wait("gather weights")
    }

    fn gather_unit(&self, unit: usize, own: View<'_, T>, all: ViewMut<'_, T>) -> device::Result<()> {
        let own = own.slice(self.shards.packed(self.collective.rank(), unit));
        self.collective
            .all_gather(own, self.shards.cuts(unit), all)
            .map_err(CollectiveError::into_device_error)
    }

    /// Waits until all enqueued calls are complete.
    pub(crate) fn wait(&self, operation: &'static str) -> device::Result<()> {
        self.collective.wait(operation).map_err(CollectiveError::into_device_error)
    }
}

impl<T: Storage> DeviceReduction<'_, T> {
    /// Sums a unit over all ranks. `values` are the gradients of this rank; `None` for zeros.
    pub(crate) fn unit(
        &mut self,
        device: &Device,
        unit: usize,
        values: Option<View<'_, f32>>,
    ) -> device::Result<()> {
        let DeviceSharding { collective, shards } = self.sharding;
        let (gradients, cuts) = (device.labelled("gradients"), shards.cuts(unit));
        let zeros;
        let values = match values {
            Some(values) => values,
            None => {
                zeros = gradients.zeros(shards.place(unit).len())?;
                zeros.all()
            }
        };
        let mut own = self.own.view_mut(shards.packed(collective.rank(), unit));
        if self.first {
            return collective.reduce_scatter(values, cuts, own).map_err(CollectiveError::into_device_error);
        }
        let mut sums = gradients.uninit::<f32>(own.len())?;
        collective
            .reduce_scatter(values, cuts, sums.all_mut())
            .map_err(CollectiveError::into_device_error)?;
        add(device, sums.all(), own.reborrow())
    }
}

impl<'a, T: Storage> DeviceGathering<'a, T> {
    /// Layers of `layout`, of which this rank owns `own`.
    pub(crate) fn new(
        device: &Device,
        layout: &'a Layout,
        sharding: &'a DeviceSharding<T>,
        own: View<'a, T>,
    ) -> device::Result<Self> {
        let weights = device.labelled("weights");
        let end = |unit| {
            let mut values = weights.uninit(layout.unit(unit).len())?;
            sharding.gather_unit(number(layout, unit), own, values.all_mut())?;
            Ok(values)
        };
        let ends = [end(Unit::Embedding)?, end(Unit::Tail)?];
        sharding.wait("gather weights")?;
        let largest = layout.layers().iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let layer = weights.uninit(largest)?;
        Ok(Self { sharding, layout, own, ends, layer, index: None, backward: false })
    }

    /// Takes part in the all-gather of a layer that only other ranks need.
    pub(crate) fn skip(&mut self, index: usize) -> device::Result<()> {
        self.unit(Unit::Layer(index))?;
        if !self.backward && index + 1 == self.layout.layers().len() {
            self.sharding.wait("gather layers")?;
        }
        Ok(())
    }

    pub(crate) fn unit(&mut self, unit: Unit) -> device::Result<View<'_, T>> {
        let index = match unit {
            Unit::Embedding => return Ok(self.ends[0].all()),
            Unit::Tail => {
                // The copy of the predictions to the host follows, which waits for the device.
                if !self.backward {
                    self.sharding.wait("gather layers")?;
                }
                return Ok(self.ends[1].all());
            }
            Unit::Layer(index) => index,
        };
        let len = self.layout.unit(unit).len();
        if self.index != Some(index) {
            self.sharding.gather_unit(number(self.layout, unit), self.own, self.layer.view_mut(0..len))?;
            self.index = Some(index);
        }
        Ok(self.layer.view(0..len))
    }
}
