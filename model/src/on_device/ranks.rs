//! Ranks on devices that compute a pass together.
//!
//! Tensor ranks share the weights: each has its heads of attention and its part of the width of the feed-forward networks and experts, and
//! all of embedding, head, norms and routers. Context ranks share the tokens ([`super::context`]). Ranks that divide experts have tokens of
//! their own, and send the rows of each to the ranks of its experts.
//!
//! Invariant: residual streams and their gradients have the same bits on all tensor ranks, because a call gives all of them the same sums and
//! kernels repeat their sums: so have the copies of embedding, head, norms and routers after every update. Partial sums are added in f32,
//! whatever the storage.

use std::ops::Range;
use std::sync::Arc;

use collective::{Collective, CollectiveError, InDeviceMemory};
use device::ops::vectors::cast;
use device::{Device, DeviceBuffer, Result, Storage, View, ViewMut};

use super::context::DeviceContextRanks;

/// The ranks of a pass.
#[derive(Clone, Debug, Default)]
pub struct DevicePassRanks {
    /// Those that share the weights; `None` for one rank.
    pub tensor: Option<DeviceRanks>,
    /// Those of them that have copies of the same key-value heads; `None` if each has its own. A pass leaves the gradients of copies
    /// apart: who has them when they are complete sums them.
    pub same_keys: Option<Arc<dyn Collective>>,
    /// Those that share the tokens; `None` for one rank.
    pub context: Option<DeviceContextRanks>,
    /// Those that divide the experts of every layer, neighbouring experts each; `None` for one rank. All of them make as many passes: a rank
    /// without tokens makes passes over an empty pack.
    pub expert: Option<DeviceExpertRanks>,
}

/// The calls of ranks that divide experts.
#[derive(Clone, Debug)]
pub struct DeviceExpertRanks {
    /// Of rows and their results.
    pub exchange: DeviceRanks,
    /// Of numbers of rows, which are on the host.
    pub counts: Arc<dyn Collective>,
}

/// The calls of some of these ranks. All of them make the same calls in the same order.
#[derive(Clone, Debug)]
pub enum DeviceRanks {
    /// Through the memory of hosts.
    ThroughHost(Arc<dyn Collective>),
    /// From device to device.
    Direct(Arc<dyn Collective<InDeviceMemory<f32>>>),
}

impl DeviceRanks {
    /// Sums `values [n]` of all ranks in place.
    fn sum<T: Storage>(&self, device: &Device, values: ViewMut<'_, T>) -> Result<()> {
        match self {
            Self::ThroughHost(ranks) => {
                let mut sums = on_host(device, values.as_view())?;
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

    /// Sends the values at `sends[peer]` to every rank `peer`. Returns those that come from the ranks, at `receives[peer]`.
    fn all_to_all<T: Storage>(
        &self,
        device: &Device,
        values: View<'_, T>,
        sends: &[Range<usize>],
        receives: &[Range<usize>],
    ) -> Result<DeviceBuffer<T>> {
        let len = receives.last().map_or(0, |last| last.end);
        match self {
            Self::ThroughHost(ranks) => {
                let (sent, mut received) = (on_host(device, values)?, vec![0.0; len]);
                ranks
                    .all_to_all(&sent, sends, &mut received, receives)
                    .map_err(CollectiveError::into_device_error)?;
                device.upload(&received.into_iter().map(T::narrow).collect::<Vec<T>>())
            }
            Self::Direct(ranks) => {
                let mut sent: DeviceBuffer<f32> = device.uninit(values.len())?;
                cast(device, values, sent.all_mut())?;
                let mut received: DeviceBuffer<f32> = device.uninit(len)?;
                ranks
                    .all_to_all(sent.all(), sends, received.all_mut(), receives)
                    .map_err(CollectiveError::into_device_error)?;
                let mut out = device.uninit(len)?;
                cast(device, received.all(), out.all_mut())?;
                Ok(out)
            }
        }
    }

    /// Waits for the calls that are on their way, before anything else waits for the device: a rank may be lost.
    fn wait(&self) -> Result<()> {
        match self {
            Self::ThroughHost(_) => Ok(()),
            Self::Direct(ranks) => {
                ranks.wait("exchange in a pass").map_err(CollectiveError::into_device_error)
            }
        }
    }
}

impl DevicePassRanks {
    /// Sums partial results `values [n]` of the ranks that share the weights, in place.
    pub(super) fn sum<T: Storage>(&self, device: &Device, values: ViewMut<'_, T>) -> Result<()> {
        let Some(tensor) = &self.tensor else { return Ok(()) };
        self.wait_before(tensor)?;
        tensor.sum(device, values)
    }

    /// Sends the values at `sends[peer]` to every rank `peer` of `ranks`. Returns those that come from the ranks, at `receives[peer]`.
    pub(super) fn all_to_all<T: Storage>(
        &self,
        ranks: &DeviceRanks,
        device: &Device,
        values: View<'_, T>,
        sends: &[Range<usize>],
        receives: &[Range<usize>],
    ) -> Result<DeviceBuffer<T>> {
        self.wait_before(ranks)?;
        ranks.all_to_all(device, values, sends, receives)
    }

    /// A call through the host waits for the device without a deadline: calls of other ranks that are on their way come first.
    fn wait_before(&self, ranks: &DeviceRanks) -> Result<()> {
        match ranks {
            DeviceRanks::ThroughHost(_) => self.wait(),
            DeviceRanks::Direct(_) => Ok(()),
        }
    }

    /// Those of `count` experts of a layer, whose number the ranks divide, that this rank has.
    #[must_use]
    pub fn own_experts(&self, count: usize) -> Range<usize> {
        let Some(expert) = &self.expert else { return 0..count };
        let each = count / expert.counts.world();
        expert.counts.rank() * each..(expert.counts.rank() + 1) * each
    }

    /// Waits for the calls that are on their way, before anything else waits for the device.
    ///
    /// # Errors
    /// If a rank is gone or late.
    pub fn wait(&self) -> Result<()> {
        let context = self.context.as_ref().map(|context| &context.exchange);
        let expert = self.expert.as_ref().map(|expert| &expert.exchange);
        self.tensor.iter().chain(context).chain(expert).try_for_each(DeviceRanks::wait)
    }
}

/// `[n]` values in the memory of the host.
fn on_host<T: Storage>(device: &Device, values: View<'_, T>) -> Result<Vec<f32>> {
    Ok(device.download(values)?.into_iter().map(T::widen).collect())
}
