//! A rank of a collective that counts what it sends.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use collective::threads::Threads;
use collective::{Collective, CollectiveError, Position, even_shards};

/// A rank that counts the values that it sends.
#[derive(Debug)]
pub(crate) struct CountingRank {
    pub(crate) ranks: Threads,
    /// In all-to-all.
    pub(crate) exchanged: Arc<AtomicUsize>,
    /// In all other calls.
    pub(crate) sent: Arc<AtomicUsize>,
}

impl CountingRank {
    pub(crate) fn new(ranks: Threads) -> Self {
        Self { ranks, exchanged: Arc::default(), sent: Arc::default() }
    }

    fn add(&self, values: usize) {
        self.sent.fetch_add(values, Ordering::Relaxed);
    }

    fn peers(&self) -> usize {
        self.ranks.world() - 1
    }
}

impl Collective for CountingRank {
    fn position(&self) -> Position {
        self.ranks.position()
    }

    // Every rank sums its shard, then gathers those of the others.
    fn all_reduce(&self, values: &mut [f32]) -> Result<(), CollectiveError> {
        let own = even_shards(values.len(), self.world())[self.rank()].len();
        self.add(values.len() - own + own * self.peers());
        self.ranks.all_reduce(values)
    }

    fn reduce_scatter(
        &self,
        values: &[f32],
        shards: &[Range<usize>],
        own: &mut [f32],
    ) -> Result<(), CollectiveError> {
        self.add(values.len() - own.len());
        self.ranks.reduce_scatter(values, shards, own)
    }

    fn all_gather(
        &self,
        own: &[f32],
        shards: &[Range<usize>],
        all: &mut [f32],
    ) -> Result<(), CollectiveError> {
        self.add(own.len() * self.peers());
        self.ranks.all_gather(own, shards, all)
    }

    fn broadcast(&self, root: usize, values: &mut [f32]) -> Result<(), CollectiveError> {
        if root == self.rank() {
            self.add(values.len() * self.peers());
        }
        self.ranks.broadcast(root, values)
    }

    fn all_to_all(
        &self,
        values: &[f32],
        sends: &[Range<usize>],
        received: &mut [f32],
        receives: &[Range<usize>],
    ) -> Result<(), CollectiveError> {
        let others = sends.iter().enumerate().filter(|(peer, _)| *peer != self.rank());
        self.exchanged.fetch_add(others.map(|(_, range)| range.len()).sum(), Ordering::Relaxed);
        self.ranks.all_to_all(values, sends, received, receives)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.ranks.barrier()
    }
}
