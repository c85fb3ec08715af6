//! What a rank asks for in a call, checked before anything is sent.

use std::fmt;
use std::ops::Range;

use crate::{CollectiveError, Position};

/// A call of a rank; ranks that make the same call have equal ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CollectiveCall {
    pub(crate) operation: &'static str,
    /// The rank that sends or receives alone, if there is one.
    pub(crate) root: Option<usize>,
    /// Ranges of all ranks, of calls whose ranges are the same on all ranks.
    pub(crate) shards: Vec<Range<usize>>,
}

/// The ranges of an all-to-all on one rank, with the lengths of its slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sides<'a> {
    pub(crate) sends: &'a [Range<usize>],
    pub(crate) values: usize,
    pub(crate) receives: &'a [Range<usize>],
    pub(crate) received: usize,
}

impl CollectiveCall {
    pub(crate) const REDUCE_SCATTER: &str = "reduce_scatter";
    pub(crate) const ALL_GATHER: &str = "all_gather";
    pub(crate) const GATHER: &str = "gather";
    pub(crate) const BROADCAST: &str = "broadcast";
    pub(crate) const ALL_TO_ALL: &str = "all_to_all";
    pub(crate) const BROADCAST_BYTES: &str = "broadcast_bytes";
    pub(crate) const ALL_GATHER_BYTES: &str = "all_gather_bytes";
    pub(crate) const GATHER_BYTES: &str = "gather_bytes";
    pub(crate) const BARRIER: &str = "barrier";
    pub(crate) const SPLIT: &str = "split";

    pub(crate) fn of(operation: &'static str) -> Self {
        Self { operation, root: None, shards: Vec::new() }
    }

    pub(crate) fn to(self, root: usize) -> Self {
        Self { root: Some(root), ..self }
    }

    pub(crate) fn with(self, shards: &[Range<usize>]) -> Self {
        Self { shards: shards.to_vec(), ..self }
    }

    /// Checks that the root is one of the ranks.
    pub(crate) fn check_root(self, Position { rank, world }: Position) -> Result<Self, CollectiveError> {
        match self.root.filter(|root| *root >= world) {
            Some(root) => self.wrong(rank, format!("there is no rank {root} among {world}")),
            None => Ok(self),
        }
    }

    /// Checks the shards against the lengths of the slices of this rank: of its own shard, and of all values if it has them.
    pub(crate) fn check(
        self,
        position: Position,
        own: usize,
        all: Option<usize>,
    ) -> Result<Self, CollectiveError> {
        let rank = position.rank;
        let end = self.check_ranges(position, &self.shards)?;
        let shard = &self.shards[rank];
        if own != shard.len() {
            return self.wrong(rank, format!("{own} values for its shard {shard:?}"));
        }
        if let Some(all) = all.filter(|all| *all != end) {
            return self.wrong(rank, format!("{all} values in all, but the shards end at {end}"));
        }
        self.check_root(position)
    }

    /// Checks a gather, of which the root alone has all values.
    pub(crate) fn check_gather(
        self,
        position: Position,
        own: usize,
        all: Option<usize>,
    ) -> Result<Self, CollectiveError> {
        if (self.root == Some(position.rank)) != all.is_some() {
            let reason = "the root, and it alone, has to give a buffer for all values".to_owned();
            return self.wrong(position.rank, reason);
        }
        self.check(position, own, all)
    }

    /// Checks the ranges of an all-to-all; the range that this rank sends to itself.
    pub(crate) fn check_all_to_all(
        &self,
        position: Position,
        sides: Sides<'_>,
    ) -> Result<Range<usize>, CollectiveError> {
        let Sides { sends, values, receives, received } = sides;
        let rank = position.rank;
        for (ranges, len) in [(sends, values), (receives, received)] {
            let end = self.check_ranges(position, ranges)?;
            if end != len {
                return self.wrong(rank, format!("{len} values in all, but the shards end at {end}"));
            }
        }
        let (sent, expected) = (sends[rank].len(), receives[rank].len());
        if sent != expected {
            return self.wrong(rank, format!("it sends itself {sent} values and expects {expected}"));
        }
        Ok(sends[rank].clone())
    }

    /// Checks that there is one range per rank, without gaps from 0 on; where the last one ends.
    fn check_ranges(
        &self,
        Position { rank, world }: Position,
        ranges: &[Range<usize>],
    ) -> Result<usize, CollectiveError> {
        if ranges.len() != world {
            return self.wrong(rank, format!("{} shards for {world} ranks", ranges.len()));
        }
        let mut end = 0;
        for range in ranges {
            if range.start != end || range.end < range.start {
                return self.wrong(
                    rank,
                    format!("the shard {range:?} does not begin at {end}, where the one before ends"),
                );
            }
            end = range.end;
        }
        Ok(end)
    }

    /// The error that the arguments do not fit.
    pub(crate) fn wrong<T>(&self, rank: usize, reason: String) -> Result<T, CollectiveError> {
        Err(CollectiveError::Arguments { rank, operation: self.operation, reason })
    }
}

impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.operation)?;
        if let Some(root) = self.root {
            write!(f, " with root {root}")?;
        }
        if self.shards.is_empty() { Ok(()) } else { write!(f, " of {:?}", self.shards) }
    }
}
