//! A rank among several: its number, the collective and the shards of all ranks.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use collective::HostCollective;
use model::ThreadPool;

use crate::TrainerError;
use crate::learner::OwnedValues;
use crate::norm::{SquareSum, squares};
use crate::rank_spans::{RankClock, RankPhase};
use crate::zero::{Fragment, Shards};

#[derive(Debug)]
pub(super) struct RankMembership {
    pub(super) rank: usize,
    /// `None` after an error; dropping it ends the calls of the other ranks.
    collective: Mutex<Option<Arc<dyn HostCollective>>>,
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
    pub(super) fn new(collective: Arc<dyn HostCollective>, trained: Shards, weights: Shards) -> Self {
        let (rank, clock) = (collective.rank(), Arc::default());
        Self { rank, collective: Mutex::new(Some(collective)), clock, trained, weights }
    }

    /// The collective of the ranks.
    ///
    /// # Errors
    /// If an earlier error has closed it.
    pub(super) fn collective(&self) -> Result<Arc<dyn HostCollective>, TrainerError> {
        let collective = self.collective.lock().unwrap_or_else(PoisonError::into_inner);
        collective.clone().ok_or(TrainerError::RanksEnded)
    }

    /// Closes the collective. The calls of the other ranks end with an error.
    pub(super) fn leave(&self) {
        self.collective.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// The parts of the trained tensors that this rank owns.
    pub(super) fn fragments(&self) -> &[Fragment] {
        self.trained.fragments(self.rank)
    }

    /// Ranges in the flat parameters of this rank's shards, one per unit.
    pub(super) fn owned(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.weights.units()).map(|unit| self.weights.owned(self.rank, unit))
    }

    /// The sum of squares of the gradients `own`, `[trained values of this rank]`.
    pub(super) fn squares(&self, own: &[f32], pool: &ThreadPool) -> SquareSum {
        let mut end = 0;
        let part = |fragment: &Fragment| {
            end += fragment.within.len();
            &own[end - fragment.within.len()..end]
        };
        squares(self.fragments().iter().map(part), pool)
    }

    /// The norm of the gradient over all ranks. `squares` is the sum of squares of this rank's part.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(super) fn norm(&self, squares: &SquareSum) -> Result<f32, TrainerError> {
        let mut sum = SquareSum::default();
        let collective = self.collective()?;
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
        let packed = |unit| &values[membership.weights.packed(membership.rank, unit)];
        membership.owned().enumerate().map(|(unit, range)| (range, packed(unit))).collect()
    }

    /// Gathers the weights of all ranks into `all` of rank 0, `[weights]`. `all` is `None` on the other ranks.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(super) fn gather(&self, mut all: Option<&mut [f32]>) -> Result<(), TrainerError> {
        let RankMembership { rank, weights, .. } = self.membership;
        let collective = self.membership.collective()?;
        for unit in 0..weights.units() {
            let all = all.as_deref_mut().map(|all| &mut all[weights.place(unit)]);
            collective.gather(0, &self.values[weights.packed(*rank, unit)], weights.cuts(unit), all)?;
        }
        Ok(())
    }
}
