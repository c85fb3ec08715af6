//! Ranks that are devices, over a [`device::DeviceGroup`]: NCCL, or emulated devices of one process.
//!
//! A call enqueues work on the stream of the device and returns; [`Collective::wait`] waits for it. Sums over GPUs are
//! those of NCCL: they repeat with the same number of ranks and the same lengths, and differ by rounding from sums on hosts.

use std::ops::Range;

use device::{DeviceGroup, Element, View, ViewMut};

use crate::{Collective, CollectiveError, InDeviceMemory, Position, even_shards};

impl<T: Element> Collective<InDeviceMemory<T>> for DeviceGroup {
    fn position(&self) -> Position {
        Position { rank: DeviceGroup::rank(self), world: DeviceGroup::world(self) }
    }

    fn all_reduce(&self, values: ViewMut<'_, f32>) -> Result<(), CollectiveError> {
        let shards = even_shards(values.len(), DeviceGroup::world(self));
        let mut own = self.device().labelled("sums").uninit::<f32>(shards[DeviceGroup::rank(self)].len())?;
        DeviceGroup::reduce_scatter(self, values.as_view(), &shards, own.all_mut())?;
        Ok(DeviceGroup::all_gather(self, own.all(), &shards, values)?)
    }

    fn reduce_scatter(
        &self,
        values: View<'_, f32>,
        shards: &[Range<usize>],
        own: ViewMut<'_, f32>,
    ) -> Result<(), CollectiveError> {
        Ok(DeviceGroup::reduce_scatter(self, values, shards, own)?)
    }

    fn all_gather(
        &self,
        own: View<'_, T>,
        shards: &[Range<usize>],
        all: ViewMut<'_, T>,
    ) -> Result<(), CollectiveError> {
        Ok(DeviceGroup::all_gather(self, own, shards, all)?)
    }

    fn broadcast(&self, root: usize, values: ViewMut<'_, T>) -> Result<(), CollectiveError> {
        Ok(DeviceGroup::broadcast(self, root, values)?)
    }

    fn all_to_all(
        &self,
        values: View<'_, T>,
        sends: &[Range<usize>],
        received: ViewMut<'_, T>,
        receives: &[Range<usize>],
    ) -> Result<(), CollectiveError> {
        Ok(DeviceGroup::all_to_all(self, values, sends, received, receives)?)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        let world = DeviceGroup::world(self);
        let mut marks = self.device().labelled("barrier").zeros::<u8>(world)?;
        DeviceGroup::all_gather_in_place(self, &even_shards(world, world), marks.all_mut())?;
        Ok(DeviceGroup::wait(self, "barrier")?)
    }

    fn wait(&self, operation: &'static str) -> Result<(), CollectiveError> {
        Ok(DeviceGroup::wait(self, operation)?)
    }
}
