//! Leased groups that cannot be trained on, whoever let them into the buffer.
//!
//! Invariant: no group that fails [`GroupLimits`] reaches the network: a token without a row in the embedding would end the
//! process, and again whenever the step is done again.

use std::sync::Arc;

use buffer::{Consumer, GroupLimits, Lease};
use model::Config;
use trajectory::Sample;

use crate::TrainerError;
use crate::batch::unfit;
use crate::report::Quarantined;

/// Groups that are described until the next step; more are only counted.
const DESCRIBED: usize = 64;

/// Keeps what cannot be trained on out of batches.
#[derive(Debug)]
pub(crate) struct Quarantine {
    limits: GroupLimits,
    described: Vec<Quarantined>,
    count: u64,
}

impl Quarantine {
    /// For groups that are trained on with `model`.
    pub(crate) fn new(model: &Config) -> Self {
        let limits = GroupLimits {
            vocabulary: u32::try_from(model.vocab_size).unwrap_or(u32::MAX),
            context: model.max_context(),
            // A larger group is no danger.
            trajectories: usize::MAX,
        };
        Self { limits, described: Vec::new(), count: 0 }
    }

    /// The lease, if all its groups can be trained on. What cannot is set aside in the buffer, and the others go back, to
    /// be leased with more.
    ///
    /// # Errors
    /// If the buffer fails.
    pub(crate) fn pass(
        &mut self,
        buffer: &dyn Consumer,
        lease: Lease,
    ) -> Result<Option<Lease>, TrainerError> {
        let unfit = unfit(&lease.groups, &self.limits);
        if unfit.is_empty() {
            return Ok(Some(lease));
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

    /// Whether the network can compute a demonstration: it is made of what a task says, which came with its group.
    pub(crate) fn sees(&self, sample: &Sample) -> bool {
        let tokens = sample.token_ids();
        tokens.len() <= self.limits.context && tokens.iter().all(|id| *id < self.limits.vocabulary)
    }

    /// What was set aside since this was last asked, and how many groups that are.
    pub(crate) fn take(&mut self) -> (Vec<Quarantined>, u64) {
        (std::mem::take(&mut self.described), std::mem::take(&mut self.count))
    }
}
