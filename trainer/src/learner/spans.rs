//! The spans of the ranks of a learner.
//!
//! Invariant: processes exchange their spans once per batch, in the same order as their other collective calls.

use std::time::Instant;

use super::{Learner, LearnerProcesses};
use crate::TrainerError;
use crate::lead::{decode, encode};
use crate::rank_spans::RankSpan;

impl Learner {
    /// Starts the clocks of the ranks of this process, which forget their spans.
    pub(crate) fn restart_clocks(&self, begin: Instant) {
        self.ranks().for_each(|rank| rank.restart_clock(begin));
    }

    /// What every rank did since [`Self::restart_clocks`], by rank; empty for a single rank.
    ///
    /// # Errors
    /// If a rank that is a process is gone.
    pub(crate) fn rank_spans(&self) -> Result<Vec<Vec<RankSpan>>, TrainerError> {
        if let Some(LearnerProcesses { collective, .. }) = &self.spread {
            let all = collective.all_gather_bytes(encode(&self.first.take_spans())?)?;
            return all.iter().map(|spans| decode(spans)).collect();
        }
        if self.others.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.ranks().map(|rank| rank.take_spans()).collect())
    }
}
