//! Products against f64, against one chain per element and against trees of chunks, for every layout and instruction set.

use collective::Position;
use proptest::prelude::*;

use super::*;
use crate::machine::{Level, level};
use crate::ops::check::noise;

fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
}

/// The form of `multiply_blocks`.
type Blocks =
    fn(StridedMatrix<'_>, Right<'_>, &mut ProductOut<'_>, ProductStart<'_>, &mut [f32], &mut Vec<f32>);

fn blocks_of(level: Level) -> Blocks {
    match level {
        Level::Portable => blocks::<[f32; 4], 4, 6>,
        _ => multiply_blocks,
    }
}

proptest! {
    #[test]
    fn agrees_with_f64_and_does_not_depend_on_the_batch(m in 1..120usize, k in 1..800usize, n in 1..130usize) {
        let (a, w) = (noise(m * k, 1), noise(n * k, 2));
        let right = StridedMatrix::new(&w, k).transposed();
        let mut out = vec![f32::NAN; m * n];
        multiply(StridedMatrix::new(&a, k), Right::Unpacked(right), &mut out);
        for r in 0..m {
            for c in 0..n {
                let exact: f64 = (0..k).map(|i| f64::from(a[r * k + i]) * f64::from(w[c * k + i])).sum();
                prop_assert!((f64::from(out[r * n + c]) - exact).abs() < 1e-5 * k as f64);
            }
        }
        let row = m / 2;
        let mut alone = vec![f32::NAN; n];
        multiply(StridedMatrix::new(&a[row * k..][..k], k), Panels::new(right).whole(), &mut alone);
        prop_assert_eq!(&alone[..], &out[row * n..(row + 1) * n]);
    }

    /// However the operands lie in memory, and whatever the registers: one chain per element.
    #[test]
    fn layouts_and_machines_give_the_same_bits(m in 1..40usize, k in 1..40usize, n in 1..110usize) {
        let (a, b, c) = (noise(m * k, 3), noise(k * n, 4), noise(m * n, 5));
        let (at, bt) = (transposed(&a, m, k), transposed(&b, k, n));
        let expected: Vec<f32> = (0..m * n)
            .map(|i| (0..k).fold(c[i], |sum, l| a[i / n * k + l].mul_add(b[l * n + i % n], sum)))
            .collect();
        let panels = Panels::new(StridedMatrix::new(&b, n));
        for left in [StridedMatrix::new(&a, k), StridedMatrix::new(&at, m).transposed()] {
            for right in [Right::Unpacked(StridedMatrix::new(&b, n)), Right::Unpacked(StridedMatrix::new(&bt, k).transposed()), panels.whole()] {
                for level in [Level::Portable, level()] {
                    let starts = [(c.clone(), ProductStart::Result), (vec![f32::NAN; m * n], ProductStart::Values(&c))];
                    for (mut out, start) in starts {
                        let (mut buffer, mut tiles) = (vec![0.0; block_values()], Vec::new());
                        let to = &mut ProductOut::new(&mut out, n);
                        blocks_of(level)(left, right, to, start, &mut buffer, &mut tiles);
                        prop_assert_eq!(&out, &expected);
                    }
                }
            }
        }
    }

    /// The first pass over the inner dimension begins with other values, and the next with the result.
    #[test]
    fn other_values_begin_the_chains_of_long_and_empty_products(m in 1..10usize, k in 0..1400usize, n in 1..60usize) {
        let (a, b, c) = (noise(m * k, 3), noise(k * n, 4), noise(m * n, 5));
        let left = StridedMatrix { rows: m, ..StridedMatrix::new(&a, k) };
        let right = Right::Unpacked(StridedMatrix { columns: n, row_stride: n, ..StridedMatrix::new(&b, n) });
        let mut expected = c.clone();
        product(left, right, ProductOut::new(&mut expected, n), false);
        let mut out = vec![f32::NAN; m * n];
        product_from(left, right, ProductOut::new(&mut out, n), ProductStart::Values(&c));
        prop_assert_eq!(out, expected);
    }

    /// Threads that each compute some columns.
    #[test]
    fn columns_by_several_writers_are_the_whole(m in 1..20usize, k in 1..40usize, n in 1..300usize, parts in 1..5usize) {
        let (a, b) = (noise(m * k, 3), noise(k * n, 4));
        let panels = Panels::new(StridedMatrix::new(&b, n));
        let mut expected = vec![f32::NAN; m * n];
        multiply(StridedMatrix::new(&a, k), panels.whole(), &mut expected);
        let mut out = vec![f32::NAN; m * n];
        let ranges = panels.split(parts);
        for (columns, to) in ranges.iter().zip(ProductOut::columns(&mut out, n, &ranges)) {
            product(StridedMatrix::new(&a, k), panels.columns_of(columns.clone()), to, true);
        }
        prop_assert_eq!(out, expected);
    }

    #[test]
    fn a_part_of_panels_is_the_product_of_that_part(k in 1..60usize, n in 1..110usize, m in 1..10usize, cut in 0..100usize) {
        let b = noise(k * n, 6);
        let (inner, columns) = (1 + cut % k, 1 + (cut * 7) % n);
        let a = noise(m * inner, 7);
        let part: Vec<f32> = (0..inner).flat_map(|r| b[r * n..][..columns].to_vec()).collect();
        let (mut out, mut expected) = (vec![f32::NAN; m * (columns + 3)], vec![0.0; m * columns]);
        multiply(StridedMatrix::new(&a, inner), Right::Unpacked(StridedMatrix::new(&part, columns)), &mut expected);
        let to = ProductOut::new(&mut out, columns + 3);
        product(StridedMatrix::new(&a, inner), Panels::new(StridedMatrix::new(&b, n)).part(inner, columns), to, true);
        for (row, expected) in out.chunks(columns + 3).zip(expected.chunks(columns)) {
            prop_assert_eq!(&row[..columns], expected);
            prop_assert!(row[columns..].iter().all(|v| v.is_nan()), "nothing is written beyond the result");
        }
    }
}

/// More rows, steps and columns than one block has.
#[test]
fn blocks_follow_each_other() {
    let (m, k, n) = (ROW_BLOCK + 3, INNER_BLOCK + 9, block_values() / INNER_BLOCK + 100);
    let (a, b) = (noise(m * k, 3), noise(k * n, 4));
    let (at, bt) = (transposed(&a, m, k), transposed(&b, k, n));
    let unpacked = [StridedMatrix::new(&b, n), StridedMatrix::new(&bt, k).transposed()].map(Right::Unpacked);
    let chunks = TreeChunks { parts: &[TreePart::of(k)], count: CHUNKS, shard: WHOLE };
    let rows = [0, ROW_BLOCK - 1, ROW_BLOCK, m - 1];
    let element = |row: usize, column: usize| {
        (0..k).fold(0.0_f32, |sum, l| a[row * k + l].mul_add(b[l * n + column], sum))
    };
    for right in unpacked {
        for left in [StridedMatrix::new(&a, k), StridedMatrix::new(&at, m).transposed()] {
            let mut out = vec![f32::NAN; m * n];
            multiply(left, right, &mut out);
            for row in rows {
                let expected: Vec<f32> = (0..n).map(|column| element(row, column)).collect();
                assert_eq!(out[row * n..][..n], expected, "row {row}");
            }
        }
        let mut out = vec![f32::NAN; m * n];
        tree_product(StridedMatrix::new(&a, k), right, chunks, &ProductOut::new(&mut out, n), true);
        for row in rows {
            assert_eq!(out[row * n..][..n], tree_reference(&a[row * k..][..k], &b, n, chunks), "row {row}");
        }
    }
}

/// A balanced binary tree over `values`, a power of two of them.
fn tree_sum(values: &[f32]) -> f32 {
    match values {
        [value] => *value,
        _ => {
            let (left, right) = values.split_at(values.len() / 2);
            tree_sum(left) + tree_sum(right)
        }
    }
}

/// `[m, n]` product of `a [m, k]` and `b [k, n]` as a tree over chunks, one element after the other.
fn tree_reference(a: &[f32], b: &[f32], n: usize, chunks: TreeChunks<'_>) -> Vec<f32> {
    let k: usize = chunks.parts.iter().map(|part| part.len).sum();
    let element = |i: usize| {
        let leaf = |chunk: usize| {
            let (mut sum, mut start) = (0.0_f32, 0);
            for TreePart { len: part, .. } in chunks.parts {
                let steps = start + chunk * part / chunks.count..start + (chunk + 1) * part / chunks.count;
                sum = steps.fold(sum, |sum, l| a[i / n * k + l].mul_add(b[l * n + i % n], sum));
                start += part;
            }
            sum
        };
        tree_sum(&(0..chunks.count).map(leaf).collect::<Vec<_>>())
    };
    (0..a.len() / k * n).map(element).collect()
}

/// Steps of the inner dimension that a rank holds: shard `rank` of `world` of every part, and those of the ranks with copies of it.
fn shard(parts: &[TreePart], rank: usize, world: usize) -> Vec<usize> {
    let mut start = 0;
    let steps = parts.iter().map(|TreePart { len, copies }| {
        start += len;
        let (first, before) = (rank / copies * copies, start - len);
        before + first * len / world..before + (first + copies) * len / world
    });
    steps.flatten().collect()
}

proptest! {
    #[test]
    fn tree_products_add_chunks_as_a_balanced_tree(
        m in 1..40usize, parts in prop::collection::vec(1..900usize, 1..4), n in 1..110usize, bits in 0..5u32, add: bool,
    ) {
        let k = parts.iter().sum();
        let (a, b, c) = (noise(m * k, 1), noise(k * n, 2), noise(m * n, 3));
        let of_lens: Vec<_> = parts.iter().copied().map(TreePart::of).collect();
        let chunks = TreeChunks { parts: &of_lens, count: 1 << bits, shard: WHOLE };
        let sums = tree_reference(&a, &b, n, chunks);
        let expected: Vec<f32> = if add { sums.iter().zip(&c).map(|(s, c)| c + s).collect() } else { sums };
        let transposed = transposed(&b, k, n);
        let panels = Panels::new(StridedMatrix::new(&b, n));
        let unpacked = [StridedMatrix::new(&b, n), StridedMatrix::new(&transposed, k).transposed()];
        let rights = unpacked.into_iter().map(Right::Unpacked);
        for right in rights.chain((parts.len() == 1).then(|| panels.whole())) {
            let mut out = c.clone();
            tree_product(StridedMatrix::new(&a, k), right, chunks, &ProductOut::new(&mut out, n), !add);
            prop_assert_eq!(&out, &expected);
        }
    }

    /// Tensor-parallel ranks that each hold a shard of the inner dimension, and copies of their neighbours' of some parts, compute the
    /// bits of one rank.
    #[test]
    fn shards_reduced_as_a_tree_have_the_bits_of_the_whole(
        m in 1..20usize, lens in prop::collection::vec((8..700usize, 0..4u32), 1..4), n in 1..60usize,
    ) {
        let k: usize = lens.iter().map(|(len, _)| len).sum();
        let (a, b) = (noise(m * k, 1), noise(k * n, 2));
        let of_world = |world| -> Vec<_> {
            lens.iter().map(|(len, bits)| TreePart { len: *len, copies: (1 << bits).min(world) }).collect()
        };
        let product = |a: &[f32], b: &[f32], shard: Position| {
            let parts = of_world(shard.world);
            let mut out = vec![f32::NAN; m * n];
            let (a, b) = (StridedMatrix::new(a, b.len() / n), StridedMatrix::new(b, n));
            let chunks = TreeChunks { parts: &parts, count: CHUNKS, shard };
            tree_product(a, Right::Unpacked(b), chunks, &ProductOut::new(&mut out, n), true);
            out
        };
        let whole = product(&a, &b, WHOLE);
        for world in [2, 4, 8] {
            let partial = |rank| {
                let steps = shard(&of_world(world), rank, world);
                let a: Vec<f32> = a.chunks_exact(k).flat_map(|row| steps.iter().map(|l| row[*l])).collect();
                let b: Vec<f32> = steps.iter().flat_map(|l| b[l * n..][..n].to_vec()).collect();
                product(&a, &b, Position { rank, world })
            };
            let partials: Vec<Vec<f32>> = (0..world).map(partial).collect();
            for (i, whole) in whole.iter().enumerate() {
                let of_ranks: Vec<f32> = partials.iter().map(|partial| partial[i]).collect();
                prop_assert_eq!(tree_sum(&of_ranks).to_bits(), whole.to_bits());
            }
        }
    }
}
