//! Packing: sequences of different lengths as one stream of tokens, without padding.
//!
//! Invariant: a sequence attends to itself and to the prefix that it continues, and to nothing else.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::mixer::{MixingReverse, MixingRule};
use super::{Decoder, LayerAngles};
use crate::ops::attention::{self, Segment};
use crate::ops::delta_net;
use crate::ops::experts::GivenExperts;

/// Packed sequences. Some may continue others, as the completions of a group continue one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pack {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    segments: Vec<Segment>,
    /// `[tokens, slots]`, or empty.
    experts: Vec<u16>,
}

/// Why a sequence cannot be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// The sequence is empty.
    #[error("a sequence of a pack needs at least one token")]
    Empty,
    /// The row does not begin a sequence that can be continued.
    #[error("row {row} of the pack does not begin a sequence that can be continued")]
    NoPrefix {
        /// The row.
        row: usize,
    },
}

impl Pack {
    /// A pack without sequences.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends the token ids `sequence [tokens]` and returns the row of the first.
    ///
    /// # Errors
    /// If the sequence is empty.
    pub fn push(&mut self, sequence: &[u32]) -> std::result::Result<usize, PackError> {
        self.append(sequence, 0..0)
    }

    /// Appends the token ids `sequence [tokens]` as a continuation of the sequence that begins at row `prefix`, and returns
    /// the row of the first. The prefix is computed once for all of its continuations, which follow it before the next
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

    /// The same pack with the `experts [tokens, slots]` that its tokens go to in all layers with experts, ascending in each;
    /// [`ANY_EXPERT`](crate::ANY_EXPERT) where the router chooses. `slots` are those of a token
    /// ([`Config::expert_slots`](crate::Config::expert_slots)).
    #[must_use]
    pub fn routed(self, experts: Vec<u16>) -> Self {
        Self { experts, ..self }
    }

    /// The same pack for a decoder of some layers: of the experts that are given to a token, those at `slots`, which are of these
    /// layers.
    #[must_use]
    pub fn of_layers(mut self, slots: Range<usize>) -> Self {
        let all = self.experts.len() / self.token_ids.len().max(1);
        if all > 0 {
            let of_token = |experts: &[u16]| experts[slots.clone()].to_vec();
            self.experts = self.experts.chunks_exact(all).flat_map(of_token).collect();
        }
        self
    }

    /// `[tokens, slots]` the experts that are given to the tokens; empty if none are.
    pub(crate) fn experts(&self) -> &[u16] {
        &self.experts
    }

    /// `[tokens]` token ids of all sequences.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// `[tokens]` position of each token in its sequence.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// The sequences, in their order.
    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Cuts the pack into at most `count` parts of about equal length, between sequences that do not see each other.
    pub(super) fn parts(&self, count: usize) -> Vec<PackPart<'_>> {
        let total = self.token_ids.len();
        let mut parts: Vec<PackPart<'_>> = Vec::new();
        let mut start = 0;
        for (i, segment) in self.segments.iter().enumerate() {
            let last = i + 1 == self.segments.len();
            let cut = last || self.segments[i + 1].prefix.is_empty();
            let due = segment.rows.end * count >= total * (parts.len() + 1);
            if cut && (last || due) {
                let rows = parts.last().map_or(0, |part| part.rows.end)..segment.rows.end;
                parts.push(PackPart { pack: self, rows, segments: &self.segments[start..=i] });
                start = i + 1;
            }
        }
        parts
    }

    /// Rows of the pack that are computed apart from the mixing of tokens.
    pub(super) fn part(&self, rows: Range<usize>) -> PackPart<'_> {
        PackPart { pack: self, rows, segments: &[] }
    }
}

/// Rows of a pack that one thread computes.
#[derive(Clone, Debug)]
pub(super) struct PackPart<'a> {
    pack: &'a Pack,
    pub(super) rows: Range<usize>,
    pub(super) segments: &'a [Segment],
}

impl PackPart<'_> {
    pub(super) fn token_ids(&self) -> &[u32] {
        &self.pack.token_ids[self.rows.clone()]
    }

    /// The experts that are given to the tokens of this part.
    pub(super) fn given(&self) -> Option<GivenExperts<'_>> {
        let slots = self.pack.experts.len() / self.pack.token_ids.len().max(1);
        let all = GivenExperts { all: &self.pack.experts, slots, first: 0 };
        (slots > 0).then(|| all.after(self.rows.start))
    }

    pub(super) fn angles(&self, decoder: &Decoder) -> LayerAngles {
        decoder.angles(&self.pack.positions[self.rows.clone()])
    }

    /// Mixes what the mixer of a layer prepared, `[T, width]`.
    pub(super) fn mix(&self, rule: MixingRule<'_>, prepared: &Tensor) -> Result<Tensor> {
        match rule {
            MixingRule::Attention(rule) => attention::packed(prepared, self.segments, self.rows.start, rule),
            MixingRule::DeltaNet(rule) => delta_net::packed(prepared, self.segments, self.rows.start, rule),
        }
    }

    /// Backward of [`PackPart::mix`] for the gradient `g [T, mixed]` of its result.
    pub(super) fn mix_backward(
        &self,
        rule: MixingRule<'_>,
        prepared: &Tensor,
        g: &Tensor,
    ) -> Result<MixingReverse> {
        match rule {
            MixingRule::Attention(rule) => {
                let reverse = attention::packed_backward(prepared, self.segments, self.rows.start, rule, g)?;
                Ok(MixingReverse::Attention(reverse))
            }
            MixingRule::DeltaNet(rule) => {
                let reverse = delta_net::packed_backward(prepared, self.segments, self.rows.start, rule, g)?;
                Ok(MixingReverse::DeltaNet(reverse))
            }
        }
    }
}
