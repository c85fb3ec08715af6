//! Quarantine of leased groups that cannot be trained on.
//!
//! Invariant: no group outside [`GroupLimits`] reaches the network. An out-of-vocabulary token would end the process,
//! and end it again after every restart.

use std::sync::Arc;

use buffer::{Consumer, ExpertLimits, GroupLimits, Lease};
use model::Config;
use trajectory::Sample;

use crate::TrainerError;
use crate::batch::unfit;
use crate::report::Quarantined;

/// Quarantined groups that a step report describes; others are only counted.
const DESCRIBED: usize = 64;
/// Groups in a row that cannot be trained on before the trainer gives up, and the same in batches.
const IN_A_ROW: u64 = 64;
const BATCHES_IN_A_ROW: u64 = 4;

/// Removes groups that cannot be trained on from batches.
#[derive(Debug)]
pub(crate) struct Quarantine {
    limits: GroupLimits,
    described: Vec<Quarantined>,
    count: u64,
    /// Quarantined groups since the last batch that could be trained on.
    in_a_row: u64,
}

/// The experts that a token of `model` can have.
#[must_use]
pub fn expert_limits(model: &Config) -> Option<ExpertLimits> {
    let slots = model.expert_slots();
    model.experts().map(|experts| ExpertLimits { count: experts.count, per_token: experts.per_token, slots })
}

impl Quarantine {
    /// Limits of the model `model`.
    pub(crate) fn new(model: &Config) -> Self {
        let limits = GroupLimits {
            vocabulary: u32::try_from(model.vocab_size).unwrap_or(u32::MAX),
            context: model.max_context(),
            // The group size needs no limit.
            trajectories: usize::MAX,
            experts: expert_limits(model),
        };
        Self { limits, described: Vec::new(), count: 0, in_a_row: 0 }
    }

    /// The lease, if all its groups can be trained on. Otherwise quarantines the others in the buffer and releases the
    /// rest, which can be leased again.
    ///
    /// # Errors
    /// If the buffer fails, and [`TrainerError::OnlyUnfit`] if no batch can be trained on any more.
    pub(crate) fn pass(
        &mut self,
        buffer: &dyn Consumer,
        lease: Lease,
    ) -> Result<Option<Lease>, TrainerError> {
        let unfit = unfit(&lease.groups, &self.limits);
        if unfit.is_empty() {
            self.in_a_row = 0;
            return Ok(Some(lease));
        }
        self.in_a_row += unfit.len() as u64;
        if self.in_a_row >= IN_A_ROW.max(BATCHES_IN_A_ROW * lease.groups.len() as u64)
            && let Some((_, reason)) = unfit.last()
        {
            return Err(TrainerError::OnlyUnfit { groups: self.in_a_row, reason: reason.clone() });
        }
        for (at, reason) in unfit {
            let group = Arc::clone(&lease.groups[at]);
            let sender = buffer.quarantine(group.id)?;
            self.count += 1;
            if self.described.len() < DESCRIBED {
                self.described.push(Quarantined { group, sender, reason });
            }
        }
        buffer.release(lease.id)?;
        Ok(None)
    }

    /// Whether a demonstration is within the limits; its text comes from the group's task.
    pub(crate) fn sees(&self, sample: &Sample) -> bool {
        let tokens = sample.token_ids();
        tokens.len() <= self.limits.context && tokens.iter().all(|id| *id < self.limits.vocabulary)
    }

    /// Takes the quarantined groups since the last call, and their number.
    pub(crate) fn take(&mut self) -> (Vec<Quarantined>, u64) {
        (std::mem::take(&mut self.described), std::mem::take(&mut self.count))
    }
}
