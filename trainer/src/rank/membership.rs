//! A rank among several: its number, the collective and the shards of all ranks.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use collective::HostCollective;
use model::{Config, Layout, ModelShard, ThreadPool};

use crate::TrainerError;
use crate::lead::{decode, encode};
use crate::learner::OwnedValues;
use crate::norm::{SquareSum, squares};
use crate::optimizer::OptimizerConfig;
use crate::parallel::{RankGroups, RankPlace};
use crate::rank_spans::{RankClock, RankPhase};
use crate::zero::{Fragment, Shards};

#[derive(Debug)]
pub(super) struct RankMembership {
    /// Among all ranks.
    pub(super) number: usize,
    pub(super) place: RankPlace,
    /// Among the ZeRO ranks.
    pub(super) rank: usize,
    /// The whole model.
    pub(super) model: Config,
    /// Whether this rank owns each tensor, of those that have copies of it.
    owns: Vec<bool>,
    /// `None` after an error; dropping them ends the calls of the other ranks.
    groups: Mutex<Option<RankGroups>>,
    /// Shared with its passes, which wait for other ranks.
    pub(super) clock: Arc<RankClock>,
    /// Shards of the trained tensors.
    pub(super) trained: Shards,
    /// Shards of the weights.
    pub(super) weights: Shards,
}

/// The weights that a rank owns, if it does not have the others.
pub(super) struct OwnShards<'a> {
    pub(super) membership: &'a RankMembership,
    /// The shards of this rank, concatenated, `[owned weights]`.
    pub(super) values: &'a [f32],
}

impl RankMembership {
    /// The rank of `groups` that trains a `shard` of `model`, or all of it.
    pub(super) fn new(
        groups: RankGroups,
        place: RankPlace,
        model: Config,
        shard: Option<&ModelShard>,
        trained: Shards,
        weights: Shards,
    ) -> Self {
        let (number, rank, clock) = (groups.all.rank(), groups.zero.rank(), Arc::default());
        let owns = shard.map_or(Vec::new(), |shard| shard.pieces().iter().map(|piece| piece.owned).collect());
        let groups = Mutex::new(Some(groups));
        Self { number, place, rank, model, owns, groups, clock, trained, weights }
    }

    /// The collectives of this rank.
    ///
    /// # Errors
    /// If an earlier error has closed them.
    pub(super) fn groups(&self) -> Result<RankGroups, TrainerError> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.clone().ok_or(TrainerError::RanksEnded)
    }

    /// The collective of the ZeRO ranks.
    ///
    /// # Errors
    /// If an earlier error has closed it.
    pub(super) fn collective(&self) -> Result<Arc<dyn HostCollective>, TrainerError> {
        self.groups().map(|groups| groups.zero)
    }

    /// The collective of all ranks.
    ///
    /// # Errors
    /// If an earlier error has closed it.
    pub(super) fn all(&self) -> Result<Arc<dyn HostCollective>, TrainerError> {
        self.groups().map(|groups| groups.all)
    }

    /// Closes the collectives. The calls of the other ranks end with an error.
    pub(super) fn leave(&self) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// The ZeRO shards of a model with this `layout`, among as many ranks.
    pub(super) fn shards_of(&self, layout: &Layout, optimizer: &OptimizerConfig) -> Shards {
        Shards::of_model(layout, self.weights.world(), optimizer, self.weights.expert())
    }

    /// The parts of the trained tensors that this rank owns.
    pub(super) fn fragments(&self) -> &[Fragment] {
        self.trained.fragments(self.rank)
    }

    /// Ranges in the flat parameters of this rank's shards.
    pub(super) fn owned(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.weights.ranges()).map(|range| self.weights.owned(self.rank, range))
    }

    /// The sum of squares of the gradients `own`, `[trained values of this rank]`, without those that another rank counts.
    pub(super) fn squares(&self, own: &[f32], pool: &ThreadPool) -> SquareSum {
        let mut end = 0;
        let part = |fragment: &Fragment| {
            end += fragment.within.len();
            let owns = self.owns.get(fragment.tensor).copied().unwrap_or(true);
            owns.then_some(&own[end - fragment.within.len()..end])
        };
        squares(self.fragments().iter().filter_map(part), self.model.reduction, pool)
    }

    /// Gathers values of all ranks into `all` of rank 0, `[weights]`, of which this rank has `own`, unit by unit. `all` is `None`
    /// on the other ranks.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(super) fn gather(
        &self,
        own: &[(Range<usize>, &[f32])],
        mut all: Option<&mut [f32]>,
    ) -> Result<(), TrainerError> {
        let collective = self.all()?;
        let layout = Layout::new(&self.model);
        let mut rest = own;
        for unit in layout.units() {
            let place = layout.unit(unit);
            let (now, later) = rest.split_at(rest.partition_point(|(range, _)| range.start < place.end));
            rest = later;
            let ranges: Vec<[u64; 2]> =
                now.iter().map(|(range, _)| [range.start as u64, range.end as u64]).collect();
            let of_ranks = collective.all_gather_bytes(encode(&ranges)?)?;
            let of_ranks: Vec<Vec<[u64; 2]>> =
                of_ranks.iter().map(|bytes| decode(bytes)).collect::<Result<_, _>>()?;
            let mut end = 0;
            let shard = |ranges: &Vec<[u64; 2]>| {
                let start = end;
                end += ranges.iter().map(|[from, to]| to.saturating_sub(*from) as usize).sum::<usize>();
                start..end
            };
            let shards: Vec<Range<usize>> = of_ranks.iter().map(shard).collect();
            if end != place.len() {
                let reason = format!("the ranks have {end} values of a unit of {}", place.len());
                return Err(TrainerError::Message { reason });
            }
            let values: Vec<f32> = now.iter().flat_map(|(_, values)| *values).copied().collect();
            let mut gathered = all.is_some().then(|| vec![0.0; end]);
            collective.gather(0, &values, &shards, gathered.as_deref_mut())?;
            let (Some(all), Some(gathered)) = (all.as_deref_mut(), gathered) else { continue };
            let mut from = 0;
            for [start, to] in of_ranks.iter().flatten() {
                let (start, to) = (*start as usize, *to as usize);
                if start < place.start || to > place.end {
                    let reason = format!("a rank has weights {start}..{to} outside of {place:?}");
                    return Err(TrainerError::Message { reason });
                }
                all[start..to].copy_from_slice(&gathered[from..from + (to - start)]);
                from += to - start;
            }
        }
        Ok(())
    }

    /// The norm of the gradient over all ranks. `squares` is the sum of squares of this rank's part.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(super) fn norm(&self, squares: &SquareSum) -> Result<f32, TrainerError> {
        let mut sum = SquareSum::default();
        let collective = self.all()?;
        let all = self.clock.during(RankPhase::Wait, || collective.all_gather_bytes(squares.to_bytes()))?;
        for (rank, bytes) in all.iter().enumerate() {
            let Some(squares) = SquareSum::from_bytes(bytes) else {
                let reason = format!("rank {rank} sent {} bytes for a sum of squares", bytes.len());
                return Err(TrainerError::Message { reason });
            };
            sum.merge(&squares);
        }
        Ok(sum.norm())
    }
}

impl<'a> OwnShards<'a> {
    /// The shards with their ranges in the flat parameters.
    pub(super) fn owned(&self) -> OwnedValues<'a> {
        let Self { membership, values } = *self;
        let packed = |range| &values[membership.weights.packed(membership.rank, range)];
        membership.owned().enumerate().map(|(index, range)| (range, packed(index))).collect()
    }
}
