//! The queue of events of a simulation.
//!
//! Invariant: events come in the order of their times, and at the same time in the order in which they were added.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use trajectory::PolicyVersion;

/// A point in virtual time or a duration, seconds, with a total order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct VirtualTime(pub(crate) f64);

impl Eq for VirtualTime {}

impl PartialOrd for VirtualTime {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for VirtualTime {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// A sequence of the sampler ends, or its cache is full; void if the epoch of the sampler has passed.
    Engine { sampler: usize, epoch: u64 },
    /// A trajectory was judged.
    Scored { sequence: usize, life: u64 },
    /// A tool answered.
    Answered { sequence: usize, life: u64 },
    /// The trainer ends a phase; void if its epoch has passed.
    Trainer { epoch: u64 },
    /// A version is there for the sampler.
    Weights { sampler: usize, version: PolicyVersion },
    /// The sampler goes away.
    Down { absence: usize },
    /// Its groups are revoked.
    Noticed { absence: usize },
    /// It is back.
    Up { absence: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Queued {
    at: VirtualTime,
    number: u64,
    what: Occasion,
}

impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Queued {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// Events to come.
#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    heap: BinaryHeap<Reverse<Queued>>,
    added: u64,
    taken: u64,
}

impl EventQueue {
    pub(crate) fn add(&mut self, at: f64, what: Occasion) {
        self.heap.push(Reverse(Queued { at: VirtualTime(at), number: self.added, what }));
        self.added += 1;
    }

    /// The next event, if there is one by `until` seconds.
    pub(crate) fn take(&mut self, until: f64) -> Option<(f64, Occasion)> {
        if self.heap.peek()?.0.at.0 > until {
            return None;
        }
        let Reverse(Queued { at, what, .. }) = self.heap.pop()?;
        self.taken += 1;
        Some((at.0, what))
    }

    /// Number of events taken.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order() {
        let mut queue = EventQueue::default();
        for (at, epoch) in [(2.0, 0), (1.0, 1), (1.0, 2)] {
            queue.add(at, Occasion::Trainer { epoch });
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.take(f64::INFINITY)).collect();
        let expected = [(1.0, 1), (1.0, 2), (2.0, 0)];
        assert_eq!(order, expected.map(|(at, epoch)| (at, Occasion::Trainer { epoch })));
        queue.add(5.0, Occasion::Trainer { epoch: 0 });
        assert_eq!((queue.take(4.0), queue.taken()), (None, 3));
    }
}
