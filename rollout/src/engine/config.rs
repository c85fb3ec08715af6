//! The bounds of an engine, and which sampling can be trained on.
//!
//! Invariant: no field has a default that depends on the machine.

use model::Sampling;

use crate::RolloutError;

/// Bounds of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Sequences decoded together.
    pub max_running: usize,
    /// Prompt tokens that a step prefills along with decoding.
    pub prefill_chunk: usize,
    /// Positions of the cache; `None` for what `max_running` sequences of the longest kind need at most.
    pub kv_cache_tokens: Option<usize>,
    /// Longest prompt that will be asked for, tokens.
    pub max_prompt_length: usize,
    /// Longest completion that will be asked for, tokens.
    pub max_completion_length: usize,
    /// Longest prompt and completion of a later turn of an episode, tokens; 0 if there are no later turns.
    pub max_episode_length: usize,
    /// Most completions of one prompt that will be asked for, a baseline included.
    pub max_samples: usize,
    /// Seed of all random streams.
    pub seed: u64,
}

impl EngineConfig {
    /// Default of [`Self::prefill_chunk`], tokens. On the processor a small chunk keeps steps short for the sequences that
    /// decode beside it. A device reads all weights in every step, and only steps of one token per sequence are replayed
    /// from a recording: few large chunks cost less than many small ones.
    #[must_use]
    pub fn default_prefill_chunk(on_device: bool) -> usize {
        if on_device { 2048 } else { 256 }
    }
}

/// Checks that a sampling configuration can be trained on.
///
/// # Errors
/// A temperature of 0 or below: a greedy choice has no log-probability to learn from.
pub fn check_trainable(sampling: Sampling) -> Result<(), RolloutError> {
    if sampling.temperature > 0.0 {
        return Ok(());
    }
    Err(RolloutError::GreedyTraining { temperature: sampling.temperature })
}
