//! New trained values from outside of the optimizer.

use model::ThreadPool;

use super::replicated::ReplicatedRank;
use super::sharded::ShardedRank;
use super::single::SingleRank;
use super::{Rank, RankKind};
use crate::TrainerError;

impl Rank {
    /// Replaces the trained values, `[trained values]` of all ranks: the weights, or the adapter, which is merged. The optimizer
    /// state stays.
    ///
    /// # Errors
    /// If the weights are updated on a device, or a device that has a copy of them fails.
    pub(crate) fn set_trained(&mut self, new: &[f32], pool: &ThreadPool) -> Result<(), TrainerError> {
        // Of tensor ranks each has its shard.
        let own = self.shard().map(|shard| shard.cut(new));
        let new = own.as_deref().unwrap_or(new);
        match &mut self.kind {
            RankKind::Single(SingleRank { weights, .. })
            | RankKind::Replicated(ReplicatedRank { weights, .. }) => {
                weights.change(pool, |_, values| {
                    values.copy_from_slice(new);
                    Ok(())
                })?;
                weights.refresh()
            }
            RankKind::Sharded(ShardedRank { own, membership, .. }) => {
                let mut rest = &mut own[..];
                for place in membership.owned() {
                    let (shard, others) = rest.split_at_mut(place.len());
                    shard.copy_from_slice(&new[place]);
                    rest = others;
                }
                Ok(())
            }
            RankKind::SingleOnDevice(_) | RankKind::Group(_) => {
                let reason = "its weights are updated on a device, and cannot be replaced there";
                Err(TrainerError::State { reason })
            }
        }
    }
}
