//! What the ranks of one trainer say to each other: sums, gathers, broadcasts.
//!
//! Ranks are SPMD: all of them make the same calls in the same order, and a call returns when this rank has what it asked
//! for. [`threads`] are ranks of one process, [`tcp`] those of many; with the feature `mpi` there are those of `mpirun`.
//! What the latter two share is in [`mesh`].
//!
//! Invariants: a sum is a balanced binary tree over the ranks, so its bits depend neither on which rank comes first nor on
//! the implementation, and ranks that are a power of two give the sum that half as many ranks give of sums of neighbours.
//! No wait is without an end: a rank that is gone is noticed at once, one that hangs at the deadline, and
//! the error names it. After an error nothing more can be done with a collective; it ends for all ranks.

pub mod mesh;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod tcp;
pub mod threads;

use std::fmt;
use std::ops::Range;

/// The calls of one rank, which come one after the other. Ranges of `shards` are in elements: one per rank, ascending,
/// without gaps from 0 to the length of the whole; ranges may be empty.
pub trait Collective: Send + Sync + fmt::Debug {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world(&self) -> usize;

    /// Sums `values` of all ranks, every element as a balanced binary tree over the ranks whose left part is the largest
    /// power of two; `own` gets the sums at `shards[rank]`.
    ///
    /// # Errors
    /// If a rank is gone, does not come in time or does something else, or the lengths do not fit `shards`.
    fn reduce_scatter(
        &self,
        values: &[f32],
        shards: &[Range<usize>],
        own: &mut [f32],
    ) -> Result<(), CollectiveError>;

    /// Puts every rank's `own` at `shards[rank]` of everybody's `all`.
    ///
    /// # Errors
    /// As [`Self::reduce_scatter`].
    fn all_gather(
        &self,
        own: &[f32],
        shards: &[Range<usize>],
        all: &mut [f32],
    ) -> Result<(), CollectiveError>;

    /// The same for `root` alone, which gives `Some(all)`; the others give `None`.
    ///
    /// # Errors
    /// As [`Self::reduce_scatter`].
    fn gather(
        &self,
        root: usize,
        own: &[f32],
        shards: &[Range<usize>],
        all: Option<&mut [f32]>,
    ) -> Result<(), CollectiveError>;

    /// `bytes` of `root` to everybody; those of the others are ignored. Whoever waits for the root to begin waits as long
    /// as the root lives, because nobody can say how long a leader has nothing to command.
    ///
    /// # Errors
    /// As [`Self::reduce_scatter`].
    fn broadcast(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError>;

    /// Every rank's `bytes` to everybody, in order of rank.
    ///
    /// # Errors
    /// As [`Self::reduce_scatter`].
    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Returns when every rank has come here.
    ///
    /// # Errors
    /// As [`Self::reduce_scatter`].
    fn barrier(&self) -> Result<(), CollectiveError>;
}

/// Why ranks could not do something together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A rank did not come in time.
    #[error(
        "rank {rank} waited {seconds} s for rank {waits_for} in `{operation}`; look whether that rank hangs or computes for longer than deadlines.wait_s"
    )]
    Deadline {
        /// Who waited.
        rank: usize,
        /// For whom.
        waits_for: usize,
        /// What they were to do together.
        operation: &'static str,
        /// How long, seconds.
        seconds: f64,
    },
    /// A rank has ended, or its connection is closed.
    #[error("rank {rank} cannot do `{operation}`: rank {peer} is gone; its own log says why it ended")]
    Gone {
        /// Who noticed.
        rank: usize,
        /// Who is gone.
        peer: usize,
        /// What they were to do together.
        operation: &'static str,
    },
    /// Another rank has met an error, which ends all.
    #[error("rank {rank} cannot do `{operation}`: rank {peer} has given up: {reason}")]
    GivenUp {
        /// Who was told.
        rank: usize,
        /// Who has given up.
        peer: usize,
        /// What they were to do together.
        operation: &'static str,
        /// The error of the other.
        reason: String,
    },
    /// Two ranks make different calls, or the same with other lengths.
    #[error(
        "rank {rank} does `{operation}`, but rank {peer} does {found}; all ranks need the same recipe and the same rlrun"
    )]
    OutOfStep {
        /// One of them.
        rank: usize,
        /// The other.
        peer: usize,
        /// What the one does.
        operation: &'static str,
        /// What the other does.
        found: String,
    },
    /// The connection to a rank has failed.
    #[error("rank {rank} cannot do `{operation}`: the connection to rank {peer} has failed: {source}")]
    Connection {
        /// Whose end.
        rank: usize,
        /// The other end.
        peer: usize,
        /// What they were to do together.
        operation: &'static str,
        /// What the system says.
        source: std::io::Error,
    },
    /// A rank could not join the others.
    #[error("cannot join the ranks at {address}: {reason}")]
    Join {
        /// Where rank 0 is, or should be.
        address: String,
        /// What went wrong and what to do.
        reason: String,
    },
    /// The arguments of a call do not fit each other.
    #[error("rank {rank} cannot do `{operation}`: {reason}")]
    Arguments {
        /// Who called.
        rank: usize,
        /// What it called.
        operation: &'static str,
        /// What does not fit.
        reason: String,
    },
}

/// Which call a rank makes; ranks that do the same have equal ones.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Call {
    operation: &'static str,
    /// Who gives or gets, if it is one.
    root: Option<usize>,
    /// Of calls with values, else empty.
    shards: Vec<Range<usize>>,
}

impl Call {
    const REDUCE_SCATTER: &str = "reduce_scatter";
    const ALL_GATHER: &str = "all_gather";
    const GATHER: &str = "gather";
    const BROADCAST: &str = "broadcast";
    const ALL_GATHER_BYTES: &str = "all_gather_bytes";
    const BARRIER: &str = "barrier";

    fn of(operation: &'static str) -> Self {
        Self { operation, root: None, shards: Vec::new() }
    }

    fn to(self, root: usize) -> Self {
        Self { root: Some(root), ..self }
    }

    fn with(self, shards: &[Range<usize>]) -> Self {
        Self { shards: shards.to_vec(), ..self }
    }

    /// Checks that there is the root.
    fn check_root(self, (rank, world): (usize, usize)) -> Result<Self, CollectiveError> {
        match self.root.filter(|root| *root >= world) {
            Some(root) => self.wrong(rank, format!("there is no rank {root} among {world}")),
            None => Ok(self),
        }
    }

    /// Checks the call of `rank` of `world` against the lengths of its slices: of its own shard, and of the whole where
    /// it has one.
    fn check(
        self,
        (rank, world): (usize, usize),
        own: usize,
        whole: Option<usize>,
    ) -> Result<Self, CollectiveError> {
        let wrong = |reason| self.wrong(rank, reason);
        if self.shards.len() != world {
            return wrong(format!("{} shards for {world} ranks", self.shards.len()));
        }
        let mut end = 0;
        for shard in &self.shards {
            if shard.start != end || shard.end < shard.start {
                return wrong(format!(
                    "the shard {shard:?} does not begin at {end}, where the one before ends"
                ));
            }
            end = shard.end;
        }
        let shard = &self.shards[rank];
        if own != shard.len() {
            return wrong(format!("{own} values for its shard {shard:?}"));
        }
        if let Some(whole) = whole.filter(|whole| *whole != end) {
            return wrong(format!("{whole} values in all, but the shards end at {end}"));
        }
        self.check_root((rank, world))
    }

    /// The same for a gather, of which the root alone has the whole.
    fn check_gather(
        self,
        (rank, world): (usize, usize),
        own: usize,
        whole: Option<usize>,
    ) -> Result<Self, CollectiveError> {
        if (self.root == Some(rank)) != whole.is_some() {
            return self.wrong(rank, "the root, and it alone, has to give room for the whole".to_owned());
        }
        self.check((rank, world), own, whole)
    }

    fn wrong<T>(&self, rank: usize, reason: String) -> Result<T, CollectiveError> {
        Err(CollectiveError::Arguments { rank, operation: self.operation, reason })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.operation)?;
        if let Some(root) = self.root {
            write!(f, " with root {root}")?;
        }
        if self.shards.is_empty() { Ok(()) } else { write!(f, " of {:?}", self.shards) }
    }
}

/// Elements that are summed at a time: the partial sums of a block stay in the nearest cache.
const BLOCK: usize = 1024;

/// Sums slices of the length of `own`, given in order of rank, as a balanced binary tree whose left part is the largest
/// power of two of ranks; `own` gets the sums. Ranges of `2^k` ranks that begin at a multiple of `2^k` are subtrees.
fn sum_as_tree(slices: &[&[f32]], own: &mut [f32]) {
    // Partial sums that wait for their neighbours, the highest first: a binary counter.
    let mut waiting: Vec<[f32; BLOCK]> = Vec::new();
    for (block, own) in own.chunks_mut(BLOCK).enumerate() {
        let at = block * BLOCK..block * BLOCK + own.len();
        let len = own.len();
        waiting.clear();
        for (index, slice) in slices.iter().enumerate() {
            own.copy_from_slice(&slice[at.clone()]);
            for _ in 0..index.trailing_ones() {
                add_to_last(&mut waiting, own);
            }
            if index + 1 < slices.len() {
                let mut sum = [0.0; BLOCK];
                sum[..len].copy_from_slice(own);
                waiting.push(sum);
            }
        }
        while !waiting.is_empty() {
            add_to_last(&mut waiting, own);
        }
    }
}

/// Adds the partial sum that waits last to `sums`.
fn add_to_last(waiting: &mut Vec<[f32; BLOCK]>, sums: &mut [f32]) {
    let left = waiting.pop().unwrap_or([0.0; BLOCK]);
    sums.iter_mut().zip(left).for_each(|(right, left)| *right += left);
}
