//! Interruptions: a text inserted into completions that are too long, so that they reach an answer.
//!
//! ScaleRL (Khatri et al. 2025, arXiv 2510.13786, section 5) inserts its text at a random position between 10k and 12k tokens.
//!
//! Invariant: the position depends on the seed, the group and the index alone. The tokens of the text are not sampled by the
//! policy, have no log-probability, and are masked in the loss.

use std::ops::RangeInclusive;
use std::sync::Arc;

use model::tokenizer::SpecialTokens;
use trajectory::GroupId;

use super::stop::StopRules;
use crate::RolloutError;
use crate::tasks::random::{Purpose, RandomStream};

/// The text, and the range of its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interruption {
    token_ids: Arc<[u32]>,
    /// Fewest and most sampled tokens before the text.
    after: RangeInclusive<usize>,
}

impl Interruption {
    /// `text` after a number of sampled tokens that lies in `after`, in completions of at most `max_completion_length` tokens.
    ///
    /// # Errors
    /// An empty text, one that holds a stop token or a stop string, and one that would leave no token for an answer.
    pub fn new(
        text: &str,
        after: RangeInclusive<usize>,
        stop: &StopRules,
        max_completion_length: usize,
    ) -> Result<Self, RolloutError> {
        let wrong = |reason: String| Err(RolloutError::Interruption { reason });
        let token_ids = stop.tokenizer.encode(text, SpecialTokens::Omit)?;
        if token_ids.is_empty() {
            return wrong("has no tokens; write what the policy is to read".to_owned());
        }
        if let Some(token) = token_ids.iter().find(|token| stop.is_stop_token(**token)) {
            return wrong(format!(
                "holds the stop token {token}, which would end the completion; leave it out"
            ));
        }
        if let Some(stop) = stop.strings.iter().find(|stop| text.contains(stop.as_str())) {
            return wrong(format!(
                "holds the stop string `{stop}`, which would end the completion; leave it out"
            ));
        }
        let latest = *after.end();
        if latest + token_ids.len() >= max_completion_length {
            let count = token_ids.len();
            return wrong(format!(
                "has {count} tokens; after rollout.interrupt_after_max = {latest} they leave none of \
                 rollout.max_completion_length = {max_completion_length} for an answer"
            ));
        }
        Ok(Self { token_ids: token_ids.into(), after })
    }

    /// The interruption of the `index`-th completion of `group`.
    pub(super) fn of(&self, seed: u64, group: GroupId, index: u32) -> Planned {
        let (fewest, most) = (*self.after.start(), *self.after.end());
        let places = most.saturating_sub(fewest) as u64 + 1;
        let mut stream = RandomStream::new(seed, &Purpose { name: *b"interrup", number: group.0 });
        // One draw per completion of the group; the last is that of this completion.
        let drawn = (0..=index).map(|_| stream.below(places)).last().unwrap_or(0);
        Planned { at: fewest + drawn as usize, token_ids: Arc::clone(&self.token_ids) }
    }
}

/// The interruption of one completion, which may end before it.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    /// Tokens sampled before the text.
    at: usize,
    token_ids: Arc<[u32]>,
}

impl Planned {
    /// The token of the text at position `n` of the completion; `None` outside of the text.
    pub(super) fn token(&self, n: usize) -> Option<u32> {
        self.token_ids.get(n.checked_sub(self.at)?).copied()
    }

    /// The range of the text in a completion of `length` tokens; `None` if the completion ended before.
    pub(super) fn inserted(&self, length: usize) -> Option<std::ops::Range<usize>> {
        (length > self.at).then(|| self.at..length.min(self.at + self.token_ids.len()))
    }

    /// Whether the text begins at position `n` of the completion.
    pub(super) fn begins(&self, n: usize) -> bool {
        n == self.at
    }
}
