//! N-gram speculation: the tokens that followed the last tokens of a sequence where they occurred before are proposed, and
//! one pass of the network verifies all of them (speculative decoding, Leviathan et al. 2022, arXiv 2211.17192; proposals by
//! prompt lookup, Saxena 2023).
//!
//! Invariant: with the same weights a completion has the tokens and the log-probabilities that it has without speculation,
//! bit for bit. Every position is drawn from its own distribution with its own random number, and a proposal is accepted if
//! it is the token that was drawn. There is no draft model here.

use serde::{Deserialize, Serialize};

/// Length of the longest n-gram that is looked up, in tokens; shorter ones down to 2 follow.
const LONGEST: usize = 4;
/// Rows of a pass up to which a row more costs little, because reading the weights takes most of the time.
const ROWS: usize = 16;
/// Most tokens proposed at a time.
const MOST: usize = 7;

/// Where a sampler's proposals come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Speculation {
    /// None: one token per sequence and pass.
    #[default]
    None,
    /// Earlier occurrences of the last tokens in prompt and completion.
    Ngram,
}

impl Speculation {
    /// Most tokens proposed for each of `sequences` sequences that decode together: none if they are many.
    pub(super) fn per_sequence(self, sequences: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Ngram => (ROWS / sequences.max(1)).saturating_sub(1).min(MOST),
        }
    }
}

/// At most `most` of the tokens that followed the newest earlier occurrence of the last tokens of `token_ids [T]`.
pub(super) fn propose(token_ids: &[u32], most: usize) -> &[u32] {
    if most == 0 {
        return &[];
    }
    for n in (2..=LONGEST).rev() {
        let Some(before) = token_ids.len().checked_sub(n) else { continue };
        let last = &token_ids[before..];
        if let Some(at) = token_ids[..token_ids.len() - 1].windows(n).rposition(|ngram| ngram == last) {
            let followed = &token_ids[at + n..];
            return &followed[..most.min(followed.len())];
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_occurrence_of_the_longest_ngram_is_continued() {
        assert_eq!(propose(&[1, 2, 3, 9, 2, 3, 8, 2, 3], 2), [8, 2]);
        assert_eq!(propose(&[1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2), [9, 2], "three tokens before two");
        assert_eq!(propose(&[5, 5, 5], 4), [5], "an occurrence may overlap the end");
        assert_eq!(propose(&[1, 2, 3, 2], 4), [0; 0], "one token is no n-gram");
        assert_eq!(propose(&[1, 2, 1, 2], 0), [0; 0]);
        assert_eq!(propose(&[7], 3), [0; 0]);
    }

    #[test]
    fn many_sequences_are_not_speculated_on() {
        let most = |sequences| Speculation::Ngram.per_sequence(sequences);
        assert_eq!([1, 2, 4, 8, 9, 64].map(most), [7, 7, 3, 1, 0, 0]);
        assert_eq!(Speculation::None.per_sequence(1), 0);
    }
}
