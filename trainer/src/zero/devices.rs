//! ZeRO over a device group: reduce-scatter of gradients and all-gather of weights from device to device.
//!
//! All calls are work on the stream of the rank's device, in the order of the passes. A rank without rows makes the same
//! calls with gradients of zero.
//!
//! Invariant: after a call of the group, [`DeviceSharding::wait`] is the first operation that waits for the device. It knows
//! the deadline and the operation. A copy from the host also waits for the device.

use device::ops::vectors::add;
use device::{Device, DeviceBuffer, DeviceGroup, Element, Storage, View, ViewMut};
use model::{Layout, Unit};

use super::{Fragment, Shards, number};

/// The membership of a rank in a device group.
#[derive(Debug)]
pub(crate) struct DeviceSharding {
    group: DeviceGroup,
    /// Shards of the weights and of the gradients.
    shards: Shards,
    /// Whether a rank has only its shards of the weights.
    pub(crate) weights: bool,
}

/// Reduce-scatter of gradients to their owners.
pub(crate) struct DeviceReduction<'a> {
    pub(crate) share: &'a DeviceSharding,
    /// The sums that this rank owns, concatenated.
    pub(crate) own: &'a mut DeviceBuffer<f32>,
    /// Whether complete units are reduced, or accumulated for a later pass.
    pub(crate) leave: bool,
    /// Whether this reduction is the first of the step.
    pub(crate) first: bool,
}

/// All-gather of layers from their owners when they are needed.
pub(crate) struct DeviceGathering<'a, T: Storage> {
    share: &'a DeviceSharding,
    layout: &'a Layout,
    /// The shards of this rank, concatenated.
    own: View<'a, T>,
    /// Embedding and tail, which stay gathered.
    ends: [DeviceBuffer<T>; 2],
    /// The last gathered layer.
    layer: DeviceBuffer<T>,
    index: Option<usize>,
    /// Whether a backward pass follows or is under way.
    pub(crate) backward: bool,
}

impl DeviceSharding {
    /// The membership of this rank in `group`. `shards` are those of the trained model.
    pub(crate) fn new(group: DeviceGroup, shards: Shards, weights: bool) -> Self {
        Self { group, shards, weights }
    }

    /// The fragments of this rank, in the order of its buffer.
    pub(crate) fn fragments(&self) -> &[Fragment] {
        self.shards.fragments(self.group.rank())
    }

    /// Gathers the shards of all ranks of every unit into `all`.
    pub(crate) fn gather<T: Element>(
        &self,
        own: View<'_, T>,
        all: &mut DeviceBuffer<T>,
    ) -> device::Result<()> {
        for unit in 0..self.shards.units() {
            self.gather_unit(unit, own, all.view_mut(self.shards.place(unit)))?;
        }
        self.wait("gather weights")
    }

    fn gather_unit<T: Element>(
        &self,
        unit: usize,
        own: View<'_, T>,
        all: ViewMut<'_, T>,
    ) -> device::Result<()> {
        let own = own.slice(self.shards.packed(self.group.rank(), unit));
        self.group.all_gather(own, self.shards.cuts(unit), all)
    }

    /// Waits until everything that was asked for is done.
    pub(crate) fn wait(&self, operation: &'static str) -> device::Result<()> {
        self.group.wait(operation)
    }

    /// Ends it for all ranks.
    pub(crate) fn leave(&self) {
        self.group.abort();
    }
}

impl DeviceReduction<'_> {
    /// Adds up a unit over all ranks; those of this rank are `values`, or zero.
    pub(crate) fn unit(
        &mut self,
        device: &Device,
        unit: usize,
        values: Option<View<'_, f32>>,
    ) -> device::Result<()> {
        let DeviceSharding { group, shards, .. } = self.share;
        let cuts = shards.cuts(unit);
        let zeros = match values {
            Some(_) => None,
            None => Some(device.labelled("gradients").zeros(shards.place(unit).len())?),
        };
        let Some(values) = values.or_else(|| zeros.as_ref().map(DeviceBuffer::all)) else {
            unreachable!("what has no values has zeros")
        };
        let mut own = self.own.view_mut(shards.packed(group.rank(), unit));
        if self.first {
            return group.reduce_scatter(values, cuts, own);
        }
        let mut sums = device.labelled("gradients").uninit::<f32>(own.len())?;
        group.reduce_scatter(values, cuts, sums.all_mut())?;
        add(device, sums.all(), own.reborrow())
    }
}

impl<'a, T: Storage> DeviceGathering<'a, T> {
    /// Layers of `layout`, of which this rank owns `own`.
    pub(crate) fn new(
        device: &Device,
        layout: &'a Layout,
        share: &'a DeviceSharding,
        own: View<'a, T>,
    ) -> device::Result<Self> {
        let weights = device.labelled("weights");
        let end = |unit| {
            let mut values = weights.uninit(layout.unit(unit).len())?;
            share.gather_unit(number(layout, unit), own, values.all_mut())?;
            Ok(values)
        };
        let ends = [end(Unit::Embedding)?, end(Unit::Tail)?];
        share.wait("gather weights")?;
        let largest = layout.layers().iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let layer = weights.uninit(largest)?;
        Ok(Self { share, layout, own, ends, layer, index: None, backward: false })
    }

    /// Takes part where this rank has nothing to compute.
    pub(crate) fn skip(&mut self, index: usize) -> device::Result<()> {
        self.unit(Unit::Layer(index))?;
        if !self.backward && index + 1 == self.layout.layers().len() {
            self.share.wait("gather layers")?;
        }
        Ok(())
    }

    pub(crate) fn unit(&mut self, unit: Unit) -> device::Result<View<'_, T>> {
        let index = match unit {
            Unit::Embedding => return Ok(self.ends[0].all()),
            Unit::Tail => {
                // The predictions follow, which are waited for.
                if !self.backward {
                    self.share.wait("gather layers")?;
                }
                return Ok(self.ends[1].all());
            }
            Unit::Layer(index) => index,
        };
        let len = self.layout.unit(unit).len();
        if self.index != Some(index) {
            self.share.gather_unit(number(self.layout, unit), self.own, self.layer.view_mut(0..len))?;
            self.index = Some(index);
        }
        Ok(self.layer.view(0..len))
    }
}
