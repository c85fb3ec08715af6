//! Sums the gradients of the slots of a step as a balanced binary tree (TBIK, arXiv 2511.17826).
//!
//! The slots of a round arrive in order. A complete sum waits until its neighbour of the same height is complete, as in a
//! binary counter. A round of `n` slots needs `log2(n)` buffers. The sums of rounds are one chain.
//!
//! Invariant: the bits of a sum depend on the values of the slots alone. A rank that adds some neighbouring slots to one
//! sum, and sends it as one slot of a smaller tree, gives the same bits.

use std::ops::Range;

use model::ThreadPool;

use crate::plan::Slot;

/// Values that one thread adds at a time.
const BLOCK: usize = 1 << 16;

/// Sums of gradients, `[len]`, with the partial sums that wait for their neighbours.
#[derive(Debug, Default)]
pub(crate) struct TreeSums {
    len: usize,
    /// Of `len` values each: the sum, which is also the first partial sum of the first round, and further partial sums.
    buffers: Vec<Vec<f32>>,
}

/// Effect of adding a slot to the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Merge {
    /// Height of the partial sum that the slot completes: the number of waiting sums that it is added to.
    pub(crate) height: usize,
    /// Number of waiting partial sums afterwards, without the new one.
    pub(crate) below: usize,
}

impl Slot {
    /// The only slot of a sum.
    pub(crate) const ONLY: Self = Self { round: 0, index: 0, count: 1 };

    /// Whether it is the last slot of its round.
    pub(crate) fn is_last(self) -> bool {
        self.index + 1 == self.count
    }

    /// Effect of adding the slot to the tree of its round.
    pub(crate) fn merge(self) -> Merge {
        let height = self.index.trailing_ones() as usize;
        Merge { height, below: self.index.count_ones() as usize - height }
    }
}

impl TreeSums {
    /// Sums of `len` values.
    pub(crate) fn new(len: usize) -> Self {
        Self { len, buffers: Vec::new() }
    }

    /// The sums, `[len]`.
    pub(crate) fn values(&mut self) -> &mut [f32] {
        self.buffer(0)
    }

    /// The sums, `[len]`. Others are written in their place by the next pass.
    pub(crate) fn take_values(&mut self) -> Vec<f32> {
        self.buffer(0);
        self.buffers.remove(0)
    }

    /// Frees the memory. Returns its bytes.
    pub(crate) fn clear(&mut self) -> u64 {
        let bytes = self.bytes();
        self.buffers.clear();
        bytes
    }

    /// Memory, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.buffers.iter().map(|buffer| size_of_val(&buffer[..]) as u64).sum()
    }

    /// The buffer to which the values of `slot` at `range` can be written instead of [`Self::add`]. `None` if the tree adds
    /// them to other values.
    pub(crate) fn place(&mut self, range: Range<usize>, slot: Slot) -> Option<&mut [f32]> {
        let Merge { height, below } = slot.merge();
        let first = if slot.round == 0 { 0 } else { 1 };
        let written = height == 0 && (slot.round == 0 || !slot.is_last());
        written.then(|| &mut self.buffer(first + below)[range])
    }

    /// Adds the `values` of `slot`, which belong at `range`, to the tree.
    pub(crate) fn add(&mut self, range: Range<usize>, values: &[f32], slot: Slot, threads: &ThreadPool) {
        if let Some(place) = self.place(range.clone(), slot) {
            return place.copy_from_slice(values);
        }
        let Merge { height, below } = slot.merge();
        let first = if slot.round == 0 { 0 } else { 1 };
        let mut top = first + below + height;
        self.buffer(top.saturating_sub(1));
        if height > 0 {
            top -= 1;
            add(&mut self.buffers[top][range.clone()], values, threads);
            while top > first + below {
                let (lower, upper) = self.buffers.split_at_mut(top);
                top -= 1;
                add(&mut lower[top][range.clone()], &upper[0][range.clone()], threads);
            }
        }
        if slot.round > 0 && slot.is_last() {
            let (sum, round) = self.buffers.split_at_mut(1);
            let values = if height > 0 { &round[0][range.clone()] } else { values };
            add(&mut sum[0][range], values, threads);
        }
    }

    fn buffer(&mut self, index: usize) -> &mut [f32] {
        while self.buffers.len() <= index {
            self.buffers.push(vec![0.0; self.len]);
        }
        &mut self.buffers[index]
    }
}

/// Adds `values` to `sums`, both `[n]`.
pub(crate) fn add(sums: &mut [f32], values: &[f32], threads: &ThreadPool) {
    let blocks = sums.chunks_mut(BLOCK).zip(values.chunks(BLOCK)).collect();
    threads.map(blocks, |(sums, values): (&mut [f32], &[f32])| {
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::sum_buffers;

    /// The sum of `values`, whose number is a power of two, by recursion.
    fn tree(values: &[f32]) -> f32 {
        match values {
            [one] => *one,
            _ => tree(&values[..values.len() / 2]) + tree(&values[values.len() / 2..]),
        }
    }

    proptest! {
        #[test]
        fn every_division_of_the_slots_among_ranks_gives_the_sum_of_the_tree(
            seed in any::<u32>(),
            height in 0..5_u32,
            rounds in 1..4_usize,
        ) {
            let count = 1_usize << height;
            let value = |at: usize| {
                let hash = (seed as usize ^ (at + 1)).wrapping_mul(0x9e37_79b9);
                f32::from_bits((hash as u32 & 0x807f_ffff) | (115 + (hash >> 7) as u32 % 24) << 23)
            };
            let of_round = |round: usize| (0..count).map(|i| value(round * count + i)).collect::<Vec<_>>();
            let sums: Vec<f32> = (0..rounds).map(|round| tree(&of_round(round))).collect();
            let expected = sums[1..].iter().fold(sums[0], |chain, sum| chain + sum);
            for split in 0..=height {
                // Every rank adds `1 << split` neighbouring slots first.
                let (own, slots) = (1_usize << split, count >> split);
                let mut whole = TreeSums::new(3);
                for round in 0..rounds {
                    let values = of_round(round);
                    for index in 0..slots {
                        let slot = Slot { round, index, count: slots };
                        let values = [1.0_f32, 0.5, 2.0].map(|factor| {
                            factor * tree(&values[index * own..(index + 1) * own])
                        });
                        whole.add(0..1, &values[..1], slot, &ThreadPool::single());
                        whole.add(1..3, &values[1..], slot, &ThreadPool::single());
                    }
                }
                let bits = |value: f32| value.to_bits();
                let found: Vec<u32> = whole.values().iter().map(|value| bits(*value)).collect();
                prop_assert_eq!(found, [1.0, 0.5, 2.0].map(|factor| bits(factor * expected)).to_vec());
                prop_assert_eq!(whole.buffers.len(), sum_buffers(slots, rounds));
            }
        }
    }
}
