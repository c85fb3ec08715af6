//! The endless order of tasks: the place of every group's task in the dataset.
//!
//! Invariant: group `g` gets the task at position `g % n` of epoch `g / n`, and every epoch is a permutation of all
//! `n` tasks that depends on the seed and the epoch alone. Nothing is consumed: groups may be looked up
//! in any order, from any thread.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use trajectory::GroupId;

use super::random::{Purpose, RandomStream};

/// Epochs whose order is cached: groups of two neighbouring epochs are in flight at the same time.
const CACHED_EPOCHS: usize = 2;

/// An endless order of a number of tasks.
#[derive(Debug)]
pub struct TaskStream {
    len: NonZeroUsize,
    order: TaskOrder,
    epochs: Mutex<[Option<Epoch>; CACHED_EPOCHS]>,
}

/// In which order an epoch goes through the tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskOrder {
    /// As they were read.
    File,
    /// In another random order every epoch.
    Shuffled {
        /// Seed of the order.
        seed: u64,
    },
}

#[derive(Clone, Debug)]
struct Epoch {
    number: u64,
    /// Position in the epoch to index of the task.
    permutation: Arc<[usize]>,
}

impl TaskStream {
    /// Puts `len` tasks in order.
    #[must_use]
    pub fn new(len: NonZeroUsize, order: TaskOrder) -> Self {
        Self { len, order, epochs: Mutex::new([const { None }; CACHED_EPOCHS]) }
    }

    /// Place of the task of a group in the list of tasks as they were read.
    pub fn place(&self, group: GroupId) -> usize {
        let len = self.len.get() as u64;
        let (epoch, position) = (group.0 / len, (group.0 % len) as usize);
        match self.order {
            TaskOrder::File => position,
            TaskOrder::Shuffled { seed } => self.permutation(seed, epoch)[position],
        }
    }

    fn permutation(&self, seed: u64, epoch: u64) -> Arc<[usize]> {
        // A poisoned cache is still a valid one: an entry is written whole.
        let mut epochs = self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &mut epochs[(epoch % CACHED_EPOCHS as u64) as usize];
        if let Some(cached) = slot.as_ref().filter(|cached| cached.number == epoch) {
            return cached.permutation.clone();
        }
        let mut permutation: Vec<usize> = (0..self.len.get()).collect();
        RandomStream::new(seed, &Purpose { name: *b"tasks...", number: epoch }).shuffle(&mut permutation);
        let permutation: Arc<[usize]> = permutation.into();
        *slot = Some(Epoch { number: epoch, permutation: permutation.clone() });
        permutation
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stream(len: usize, order: TaskOrder) -> TaskStream {
        TaskStream::new(len.try_into().unwrap(), order)
    }

    fn epoch(stream: &TaskStream, number: u64) -> Vec<usize> {
        let len = stream.len.get() as u64;
        (number * len..(number + 1) * len).map(|group| stream.place(GroupId(group))).collect()
    }

    proptest! {
        #[test]
        fn every_epoch_is_a_permutation_named_by_seed_and_epoch(len in 1..60usize, seed: u64, number in 0..1_000u64) {
            let (a, b) = (stream(len, TaskOrder::Shuffled { seed }), stream(len, TaskOrder::Shuffled { seed }));
            let order = epoch(&a, number);
            // The second stream meets other epochs in between, forwards and backwards.
            for other in [number + 1, number + 2, number / 2] {
                epoch(&b, other);
            }
            prop_assert_eq!(&order, &epoch(&b, number));
            let mut sorted = order;
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn seeds_and_epochs_differ() {
        let one = stream(50, TaskOrder::Shuffled { seed: 1 });
        let two = stream(50, TaskOrder::Shuffled { seed: 2 });
        assert_ne!(epoch(&one, 0), epoch(&two, 0));
        assert_ne!(epoch(&one, 0), epoch(&one, 1));
    }

    #[test]
    fn file_order_is_file_order() {
        let stream = stream(4, TaskOrder::File);
        assert_eq!((epoch(&stream, 0), epoch(&stream, 9)), (vec![0, 1, 2, 3], vec![0, 1, 2, 3]));
        assert_eq!(stream.place(GroupId(u64::MAX)), 3);
    }

    /// A resumed run must meet the same tasks as the release that started it. The order is from `golden.py`.
    #[test]
    fn the_order_of_a_seed_is_fixed_for_good() {
        assert_eq!(epoch(&stream(8, TaskOrder::Shuffled { seed: 42 }), 3), [0, 2, 3, 4, 1, 5, 7, 6]);
    }
}
