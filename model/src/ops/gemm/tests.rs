//! Products against f64 and against one chain per element, whatever the layout, the machine and the threads.

use proptest::prelude::*;

use super::*;
use crate::ops::check::noise;

fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
}

fn blocks_of(
    level: Level,
) -> fn(StridedMatrix<'_>, Right<'_>, &mut Out<'_>, bool, &mut [f32], &mut Vec<f32>) {
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
                    let mut out = c.clone();
                    let (mut buffer, mut tiles) = (vec![0.0; NR * INNER_BLOCK], Vec::new());
                    let to = &mut Out::new(&mut out, n);
                    blocks_of(level)(left, right, to, false, &mut buffer, &mut tiles);
                    prop_assert_eq!(&out, &expected);
                }
            }
        }
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
        for (columns, to) in ranges.iter().zip(Out::columns(&mut out, n, &ranges)) {
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
        let to = Out::new(&mut out, columns + 3);
        product(StridedMatrix::new(&a, inner), Panels::new(StridedMatrix::new(&b, n)).part(inner, columns), to, true);
        for (row, expected) in out.chunks(columns + 3).zip(expected.chunks(columns)) {
            prop_assert_eq!(&row[..columns], expected);
            prop_assert!(row[columns..].iter().all(|v| v.is_nan()), "nothing is written beyond the result");
        }
    }
}
