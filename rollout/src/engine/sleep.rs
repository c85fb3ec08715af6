//! An engine that gives its memory back for a time, and what it computes again after that or under new weights.

use model::{KvCache, StepSequence};
use trajectory::PolicyVersion;

use super::prompt::PromptJob;
use super::{ASLEEP, Engine, Network, ServedWeights};
use crate::RolloutError;

impl Engine {
    /// Memory of the packed weights and of the cache, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.network.as_ref().map_or(0, Network::bytes) + self.cache.bytes()
    }

    /// Bytes that its ranks took from the version that it serves, each its shard, all together; 0 for one rank.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.network.as_ref().map_or(0, Network::taken)
    }

    /// Frees the memory of its weights and of its KV cache until [`Engine::wake_up`]. Sequences in flight keep their tokens
    /// and their page tables. Returns the bytes freed.
    pub fn sleep(&mut self) -> u64 {
        let before = self.bytes();
        self.retained.forget(&mut self.cache, |_| true);
        self.prefixes.clear(&mut self.cache);
        self.network = None;
        self.cache.forget();
        before
    }

    /// Whether it sleeps, without weights and KV cache.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.network.is_none()
    }

    /// Serves `served` after a sleep, and recomputes the KV cache of everything in flight.
    ///
    /// # Errors
    /// If the network fails.
    ///
    /// # Panics
    /// If the version goes back.
    pub fn wake_up(
        &mut self,
        served: impl Into<ServedWeights>,
        version: PolicyVersion,
    ) -> Result<(), RolloutError> {
        self.apply(served, version)?;
        self.cache.restore(&self.model);
        self.recompute()
    }

    /// Recomputes the KV cache of everything in flight under the weights that are served now. Later turns are prefilled as a
    /// whole.
    ///
    /// # Errors
    /// If the network fails.
    ///
    /// # Panics
    /// If the engine sleeps.
    pub fn recompute(&mut self) -> Result<(), RolloutError> {
        self.retained.forget(&mut self.cache, |_| true);
        self.prefixes.clear(&mut self.cache);
        let network = self.network.as_mut().expect(ASLEEP);
        self.prompts.iter_mut().for_each(PromptJob::restart);
        let mut done: Option<u64> = None;
        for sequence in &self.running {
            // Sequences of one request are neighbours and share the full pages of their prompt: those are written once.
            let shared = sequence.prompt_length / KvCache::PAGE * KvCache::PAGE;
            let from = if done == Some(sequence.request) { shared } else { 0 };
            done = Some(sequence.request);
            let known = sequence.token_ids.len() - 1;
            let (chunk, mut position) = (self.config.prefill_chunk.max(1), from);
            while position < known {
                // A recurrent state is left where the next sequence of the request begins.
                let stop = if position < shared { shared } else { known };
                let tokens = &sequence.token_ids[position..(position + chunk).min(stop)];
                let (pages, adapter) = (&sequence.pages, sequence.adapter());
                let step = StepSequence { tokens, position, pages, wanted: 0, adapter };
                network.step(&mut self.cache, &[step], &self.pool)?;
                position += tokens.len();
            }
        }
        Ok(())
    }
}
