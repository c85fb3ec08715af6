//! The size of a micro-batch of a learner, and what its updates take.

use super::Learner;
use crate::microbatch::UpdateTime;

impl Learner {
    /// Most tokens of a micro-batch.
    #[must_use]
    pub fn microbatch_tokens(&self) -> usize {
        self.config.microbatch_tokens
    }

    /// Sets the most tokens of a micro-batch. It changes the last bits of gradients. For ranks that are threads: others plan by the
    /// size of their configuration.
    ///
    /// # Panics
    /// If every rank is a process.
    pub(crate) fn set_microbatch_tokens(&mut self, tokens: usize) {
        assert!(!self.is_spread(), "ranks that are processes plan by the size of their configuration");
        self.config.microbatch_tokens = tokens;
    }

    /// What the updates since the last call took.
    pub(crate) fn take_update_time(&mut self) -> UpdateTime {
        std::mem::take(&mut self.update_time)
    }
}
