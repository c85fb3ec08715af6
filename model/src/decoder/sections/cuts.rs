//! Where the token stream of a pack is cut into sections.
//!
//! A section costs its tokens, which go through the matrices of all layers, and its pairs of a token and one that it attends to. Cuts
//! are where costs are equal; a cut moves to the beginning of a sequence that is near, so that short sequences stay whole and only
//! long ones lie in several sections (Zeppelin, Chen et al. 2025, arXiv 2509.21841; ByteScale, Ge et al. 2025, arXiv 2502.21231).
//!
//! Invariant: the cuts are a function of the lengths of the sequences, the model and the number of sections.

use std::ops::Range;

use crate::Config;
use crate::ops::attention::Segment;

/// A cut moves to a sequence whose beginning is nearer than this part of a section's cost.
const NEAR: u128 = 8;

/// Cost of tokens in a forward pass, multiply-adds.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenCost {
    /// The matrices of all layers.
    token: u128,
    /// A score and a value in all layers.
    pair: u128,
}

impl TokenCost {
    /// Of a model that `ranks` shards of this `config` make up.
    pub(super) fn of(config: &Config, ranks: usize) -> Self {
        let pair = config.num_layers() * 2 * config.head_shape().query_width() * ranks;
        Self { token: config.multiply_adds_of_shards(ranks) as u128, pair: pair as u128 }
    }

    /// Of the first `tokens` tokens that continue `before` others.
    fn of_tokens(self, tokens: usize, before: usize) -> u128 {
        let (tokens, before) = (tokens as u128, before as u128);
        tokens * self.token + (tokens * before + tokens * (tokens + 1) / 2) * self.pair
    }
}

/// The rows of `count` sections of the tokens of `segments`, which follow one another. Sections may be empty.
pub(super) fn section_rows(segments: &[Segment], cost: TokenCost, count: usize) -> Vec<Range<usize>> {
    // Costs before each segment.
    let mut before = Vec::with_capacity(segments.len() + 1);
    let mut total = 0;
    for segment in segments {
        before.push(total);
        total += cost.of_tokens(segment.rows.len(), segment.prefix.len());
    }
    before.push(total);
    let rows = segments.last().map_or(0, |segment| segment.rows.end);
    let mut start = 0;
    let ends = (1..=count).map(|number| {
        if number == count { rows } else { cut(segments, cost, &before, [number as u128, count as u128]) }
    });
    ends.map(|end| {
        let end = end.max(start);
        let section = start..end;
        start = end;
        section
    })
    .collect()
}

/// The row of cut `number` of `count` sections. `before` are the costs before each segment, and that of all.
fn cut(segments: &[Segment], cost: TokenCost, before: &[u128], [number, count]: [u128; 2]) -> usize {
    let total = before[segments.len()];
    let wanted = total * number / count;
    let at = before.partition_point(|before| *before <= wanted).saturating_sub(1);
    let Some(segment) = segments.get(at) else { return segments.last().map_or(0, |last| last.rows.end) };
    let (to_start, to_end) = (wanted - before[at], before[at + 1] - wanted);
    if to_start.min(to_end) * NEAR * count <= total {
        return if to_start <= to_end { segment.rows.start } else { segment.rows.end };
    }
    // The largest number of tokens that cost no more than what is wanted.
    let (mut least, mut most) = (0, segment.rows.len());
    while least < most {
        let tokens = (least + most).div_ceil(2);
        if cost.of_tokens(tokens, segment.prefix.len()) <= to_start {
            least = tokens;
        } else {
            most = tokens - 1;
        }
    }
    segment.rows.start + least
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Segments of these lengths, of which each continues the last whole one if it is asked for.
    fn segments(lengths: &[(usize, bool)]) -> Vec<Segment> {
        let (mut end, mut whole) = (0, 0..0);
        let of = |(len, continues): &(usize, bool)| {
            let rows = end..end + len;
            end += len;
            let prefix = if *continues { whole.clone() } else { 0..0 };
            if prefix.is_empty() {
                whole = rows.clone();
            }
            Segment { rows, prefix }
        };
        lengths.iter().map(of).collect()
    }

    /// Cost of rows, token by token.
    fn cost_of(segments: &[Segment], cost: TokenCost, rows: &Range<usize>) -> u128 {
        let of = |segment: &Segment| {
            let inside = segment.rows.start.max(rows.start)..segment.rows.end.min(rows.end);
            let row = |row: usize| {
                cost.token + (segment.prefix.len() + row - segment.rows.start + 1) as u128 * cost.pair
            };
            inside.map(row).sum::<u128>()
        };
        segments.iter().map(of).sum()
    }

    proptest! {
        #[test]
        fn sections_cover_the_rows_in_order_and_cost_about_the_same(
            lengths in prop::collection::vec((1..90_usize, any::<bool>()), 0..12),
            height in 0..5_u32,
            token in 0..300_u128,
            pair in 1..20_u128,
        ) {
            let (segments, cost) = (segments(&lengths), TokenCost { token, pair });
            let count = 1 << height;
            let sections = section_rows(&segments, cost, count);
            prop_assert_eq!(sections.len(), count);
            let mut end = 0;
            for section in &sections {
                prop_assert_eq!(section.start, end);
                prop_assert!(section.start <= section.end);
                end = section.end;
            }
            let rows = segments.last().map_or(0, |segment| segment.rows.end);
            prop_assert_eq!(end, rows);
            let total = cost_of(&segments, cost, &(0..rows));
            let largest = (0..rows).map(|row| cost_of(&segments, cost, &(row..row + 1))).max().unwrap_or(0);
            // Its share, what the cuts at both ends may move, and a token that is not divided.
            let bound = total / count as u128 + 2 * (total / (NEAR * count as u128)) + 2 * largest + 2;
            for section in &sections {
                let found = cost_of(&segments, cost, section);
                prop_assert!(found <= bound, "{section:?} costs {found} of {total}, more than {bound}");
            }
        }
    }

    #[test]
    fn short_sequences_stay_whole_and_a_long_one_is_divided() {
        let cost = TokenCost { token: 100, pair: 1 };
        let sections =
            section_rows(&segments(&[(30, false), (31, false), (29, false), (30, false)]), cost, 4);
        assert_eq!(sections, [0..30, 30..61, 61..90, 90..120]);
        let sections = section_rows(&segments(&[(400, false), (10, false)]), cost, 2);
        // Later tokens attend to more.
        assert!(sections[0].end > 205 && sections[0].end < 300, "{sections:?}");
    }
}
