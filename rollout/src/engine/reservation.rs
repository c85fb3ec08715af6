//! The pages of the KV cache that requests may hold.
//!
//! Invariant: a reservation is an upper bound: a sequence that was accepted never waits for a page.

use model::KvCache;

use super::EngineConfig;

/// A request of which a sequence has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenRequest {
    /// Sequences that have not ended.
    pub(super) sequences: usize,
    /// Pages that are reserved for the prompt.
    pub(super) prompt_pages: usize,
}

/// Pages that the completions of a prompt may hold at worst.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reservation {
    /// For the prompt.
    pub(super) prompt: usize,
    /// For each completion: all pages from the one that it shares with the prompt on.
    pub(super) completion: usize,
}

impl Reservation {
    pub(super) fn new(prompt: usize, longest: usize) -> Self {
        let completion = KvCache::pages_for(longest) - prompt / KvCache::PAGE;
        Self { prompt: KvCache::pages_for(prompt), completion }
    }

    /// An upper bound for every request within the bounds of `config`: a completion that begins in the middle of a page may
    /// touch one page more than its length fills.
    pub(super) fn worst(config: &EngineConfig) -> Self {
        Self {
            prompt: KvCache::pages_for(config.max_prompt_length),
            completion: KvCache::pages_for(config.max_completion_length) + 1,
        }
    }

    pub(super) fn of(self, samples: usize) -> usize {
        self.prompt + samples * self.completion
    }
}
