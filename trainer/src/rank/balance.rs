//! The part of a rank in the update of what balances the loads of experts.

use super::replicated::ReplicatedRank;
use super::sharded::ShardedRank;
use super::single::SingleRank;
use super::{Rank, RankKind};
use crate::TrainerError;
use crate::learner::RouterStep;
use crate::on_device::by_dtype;

impl Rank {
    /// Adds `steps` to the weights that this rank has.
    ///
    /// # Errors
    /// If its weights are frozen or those of a device group, or a device fails.
    pub(crate) fn correct(&mut self, steps: &[RouterStep]) -> Result<(), TrainerError> {
        match &mut self.kind {
            RankKind::Single(SingleRank { weights, .. })
            | RankKind::Replicated(ReplicatedRank { weights, .. }) => {
                let values = weights.values_mut()?;
                steps.iter().for_each(|step| step.add(&(0..values.len()), values));
                weights.refresh()
            }
            RankKind::Sharded(ShardedRank { own, membership, .. }) => {
                let mut rest = &mut own[..];
                for place in membership.owned() {
                    let (shard, others) = rest.split_at_mut(place.len());
                    steps.iter().for_each(|step| step.add(&place, shard));
                    rest = others;
                }
                Ok(())
            }
            RankKind::SingleOnDevice(rank) => by_dtype!(&mut **rank, rank => rank.correct(steps)),
            // Ranks with a rate form no group.
            RankKind::Group(_) => {
                let reason = "the corrections of its routers are on the devices of a group";
                Err(TrainerError::State { reason })
            }
        }
    }
}
