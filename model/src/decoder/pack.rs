//! Packs: sequences one after the other.
//!
//! Invariant: no padding. A pack is one stream of tokens; a sequence sees only itself and the prefix that it continues.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::Decoder;
use crate::ops::attention::{self, Segment};
use crate::ops::heads::Angles;

/// Sequences one after the other, without padding. Some may continue others: completions of a common prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pack {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    segments: Vec<Segment>,
}

/// Why a sequence cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// There is nothing in it.
    #[error("a sequence of a pack needs at least one token")]
    Empty,
    /// No sequence that stands alone begins there.
    #[error("row {row} of the pack does not begin a sequence that can be continued")]
    NoPrefix {
        /// The row that was named.
        row: usize,
    },
}

impl Pack {
    /// A pack without sequences.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a sequence and returns the row of its first token.
    ///
    /// # Errors
    /// If the sequence is empty.
    pub fn push(&mut self, sequence: &[u32]) -> std::result::Result<usize, PackError> {
        self.append(sequence, 0..0)
    }

    /// Appends a continuation of the sequence that begins at row `prefix`, which is computed once for all of its
    /// continuations, and returns the row of its first token. Continuations follow their prefix, before the next
    /// [`Pack::push`].
    ///
    /// # Errors
    /// If the continuation is empty, or `prefix` is not the first row of the last sequence that was pushed.
    pub fn push_continuation(
        &mut self,
        prefix: usize,
        sequence: &[u32],
    ) -> std::result::Result<usize, PackError> {
        let whole = self.segments.iter().rfind(|segment| segment.prefix.is_empty());
        let Some(found) = whole.filter(|segment| segment.rows.start == prefix) else {
            return Err(PackError::NoPrefix { row: prefix });
        };
        let prefix = found.rows.clone();
        self.append(sequence, prefix)
    }

    fn append(&mut self, sequence: &[u32], prefix: Range<usize>) -> std::result::Result<usize, PackError> {
        if sequence.is_empty() {
            return Err(PackError::Empty);
        }
        let start = self.token_ids.len();
        self.token_ids.extend_from_slice(sequence);
        self.positions.extend((prefix.len()..prefix.len() + sequence.len()).map(|p| p as u32));
        self.segments.push(Segment { rows: start..self.token_ids.len(), prefix });
        Ok(start)
    }

    /// `[T]` tokens of all sequences.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// `[T]` position of each token in its sequence.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Rows of every sequence, and those of the one that it continues, empty for none; in their order.
    pub(crate) fn segments(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        self.segments.iter().map(|segment| (segment.rows.clone(), segment.prefix.clone()))
    }

    /// Cuts the pack into at most `count` parts of about equal length, between sequences that do not see each other.
    pub(super) fn parts(&self, count: usize) -> Vec<Part<'_>> {
        let total = self.token_ids.len();
        let mut parts: Vec<Part<'_>> = Vec::new();
        let mut start = 0;
        for (i, segment) in self.segments.iter().enumerate() {
            let last = i + 1 == self.segments.len();
            let cut = last || self.segments[i + 1].prefix.is_empty();
            let due = segment.rows.end * count >= total * (parts.len() + 1);
            if cut && (last || due) {
                let rows = parts.last().map_or(0, |part| part.rows.end)..segment.rows.end;
                parts.push(Part { pack: self, rows, segments: &self.segments[start..=i] });
                start = i + 1;
            }
        }
        parts
    }

    /// The parts of the given lengths.
    pub(super) fn parts_of(&self, lengths: &[usize]) -> Vec<Part<'_>> {
        let (mut row, mut segment) = (0, 0);
        lengths
            .iter()
            .map(|length| {
                let rows = row..row + length;
                let count = self.segments[segment..].partition_point(|s| s.rows.start < rows.end);
                let segments = &self.segments[segment..segment + count];
                (row, segment) = (rows.end, segment + count);
                Part { pack: self, rows, segments }
            })
            .collect()
    }
}

/// Rows of a pack that one thread computes.
#[derive(Clone, Debug)]
pub(super) struct Part<'a> {
    pack: &'a Pack,
    pub(super) rows: Range<usize>,
    pub(super) segments: &'a [Segment],
}

impl Part<'_> {
    pub(super) fn token_ids(&self) -> &[u32] {
        &self.pack.token_ids[self.rows.clone()]
    }

    pub(super) fn angles(&self, decoder: &Decoder) -> Angles {
        Angles::new(&self.pack.positions[self.rows.clone()], &decoder.inv_freq)
    }

    pub(super) fn attend(&self, decoder: &Decoder, qkv: &Tensor) -> Result<Tensor> {
        attention::packed(qkv, self.segments, self.rows.start, decoder.shape)
    }
}
