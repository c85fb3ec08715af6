//! Rows of a pack that some queries need: ascending ranges, and their places in a buffer of these rows alone.

use std::ops::Range;

use crate::ops::attention::{Segment, SegmentRows};

/// Ascending, disjoint, non-empty ranges of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RowRanges {
    ranges: Vec<Range<usize>>,
    /// Rows before each range, and all.
    starts: Vec<usize>,
}

impl RowRanges {
    /// The rows that are in some of `ranges`.
    pub(super) fn union(mut ranges: Vec<Range<usize>>) -> Self {
        ranges.retain(|rows| !rows.is_empty());
        ranges.sort_unstable_by_key(|rows| rows.start);
        let mut joined: Vec<Range<usize>> = Vec::new();
        for rows in ranges {
            match joined.last_mut() {
                Some(last) if rows.start <= last.end => last.end = last.end.max(rows.end),
                _ => joined.push(rows),
            }
        }
        let mut starts = vec![0];
        starts.extend(joined.iter().scan(0, |end, rows| {
            *end += rows.len();
            Some(*end)
        }));
        Self { ranges: joined, starts }
    }

    /// Number of rows.
    pub(super) fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// The ranges.
    pub(super) fn iter(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.ranges.iter().cloned()
    }

    /// Those of its rows that lie in `rows`.
    pub(super) fn within(&self, rows: &Range<usize>) -> Self {
        Self::union(self.iter().map(|own| own.start.max(rows.start)..own.end.min(rows.end)).collect())
    }

    /// Where `rows`, which lie in one range, are in a buffer of these rows.
    pub(super) fn place(&self, rows: &Range<usize>) -> Range<usize> {
        if rows.is_empty() {
            return 0..0;
        }
        let range = self.ranges.partition_point(|own| own.end <= rows.start);
        let start = self.starts[range] + rows.start - self.ranges[range].start;
        start..start + rows.len()
    }
}

/// The queries of `section` in each of `segments`, with the keys that they see: the last `window` of each, its own with them.
pub(super) fn section_segments(
    segments: &[Segment],
    section: &Range<usize>,
    window: usize,
) -> Vec<SegmentRows> {
    let first = segments.partition_point(|segment| segment.rows.end <= section.start);
    let inside = segments[first..].iter().take_while(|segment| segment.rows.start < section.end);
    let of = |Segment { rows, prefix }: &Segment| {
        let queries = rows.start.max(section.start)..rows.end.min(section.end);
        // Tokens of the sequence that the first query does not see, so that no other does.
        let hidden = (prefix.len() + queries.start - rows.start + 1).saturating_sub(window);
        SegmentRows {
            prefix: prefix.start + hidden.min(prefix.len())..prefix.end,
            own: rows.start + hidden.saturating_sub(prefix.len())..queries.end,
            queries,
        }
    };
    inside.map(of).filter(|rows| !rows.queries.is_empty()).collect()
}

/// The rows of keys that queries see.
pub(super) fn needed(segments: &[SegmentRows]) -> RowRanges {
    RowRanges::union(segments.iter().flat_map(|rows| [rows.prefix.clone(), rows.own.clone()]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_places_in_their_buffer() {
        let rows = RowRanges::union(vec![7..9, 0..2, 8..12, 5..5, 2..3]);
        assert_eq!(rows.iter().collect::<Vec<_>>(), [0..3, 7..12]);
        assert_eq!((rows.len(), rows.place(&(8..10)), rows.place(&(4..4))), (8, 4..6, 0..0));
        assert_eq!(rows.within(&(2..8)), RowRanges::union(vec![2..3, 7..8]));
        assert_eq!(RowRanges::union(vec![1..1, 3..3]).len(), 0);
    }

    #[test]
    fn queries_see_their_prefix_and_what_is_before_them_in_the_window() {
        let segments = [
            Segment { rows: 0..4, prefix: 0..0 },
            Segment { rows: 4..10, prefix: 0..4 },
            Segment { rows: 10..12, prefix: 0..4 },
        ];
        let found = section_segments(&segments, &(6..11), usize::MAX);
        assert_eq!(found.iter().map(|rows| rows.queries.clone()).collect::<Vec<_>>(), [6..10, 10..11]);
        assert_eq!((found[0].prefix.clone(), found[0].own.clone()), (0..4, 4..10));
        assert_eq!(needed(&found), RowRanges::union(vec![0..4, 4..11]));
        let found = section_segments(&segments, &(6..11), 2);
        assert_eq!((found[0].prefix.clone(), found[0].own.clone()), (4..4, 5..10));
        assert_eq!((found[1].prefix.clone(), found[1].own.clone()), (3..4, 10..11));
    }
}
