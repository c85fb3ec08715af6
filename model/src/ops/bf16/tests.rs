//! The product of bf16 weights: the same bits in every instruction set, in every batch, and near that in f32.

use half::bf16;
use proptest::prelude::*;

use super::super::check::{noise, row_is_independent};
use super::*;

fn apply(layer: &Bf16Linear, x: &[f32]) -> Vec<f32> {
    let mut out = vec![7.0; x.len() / layer.input * layer.output];
    layer.run(x, &mut out, StoreMode::Replace, &ThreadPool::single());
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

#[cfg(target_arch = "x86_64")]
fn arms() -> Vec<Bf16Arm> {
    let all = [Bf16Arm::Avx512Bf16, Bf16Arm::Avx512, Bf16Arm::Avx2, Bf16Arm::Portable];
    all.into_iter().filter(|arm| arm.is_here()).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn arms() -> Vec<Bf16Arm> {
    vec![Bf16Arm::Portable]
}

/// Numbers without a pattern: of normal size, or of any bits (infinite, subnormal, none).
fn pairs(n: usize, seed: u64, any: bool) -> Vec<Pair> {
    let value = |i: u64| {
        let random = (i + 1).wrapping_mul(seed.wrapping_mul(2) + 0x9e37_79b9_7f4a_7c15);
        let random = (random ^ random >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
        let bits = random as u16;
        if any { bits } else { bits & 0x83ff | 0x3c00 }
    };
    (0..n as u64).map(|i| [value(2 * i), value(2 * i + 1)]).collect()
}

proptest! {
    #[test]
    fn every_arm_has_the_same_bits(
        rows in 1..20usize, steps in 1..60usize, panel_count in 1..3usize, seed in 0..u64::MAX, any: bool,
    ) {
        let weights = pairs(panel_count * steps * PANEL_WIDTH, seed, any);
        let lines: Vec<_> = weights
            .chunks_exact(PANEL_WIDTH)
            .map(|step| std::array::from_fn(|l| PanelLine(std::array::from_fn(|i| step[l * LINE + i]))))
            .collect();
        // Subnormal factors were rounded to zero.
        let normal = |v: u16| if v & 0x7f80 == 0 { v & 0x8000 } else { v };
        let lines: Vec<[PanelLine<Pair>; PANEL]> =
            lines.into_iter().map(|lines: [PanelLine<Pair>; PANEL]| lines.map(|line| PanelLine(line.0.map(|p| p.map(normal))))).collect();
        let inputs: Vec<Pair> = pairs(rows * steps, seed ^ 5, any).into_iter().map(|p| p.map(normal)).collect();
        let bias = noise(panel_count * PANEL_WIDTH, 3);
        let operands = DotOperands { lines: &lines, first: 0, inputs: &inputs, steps };
        let width = panel_count * PANEL_WIDTH;
        let mut expected: Option<Vec<u32>> = None;
        for arm in arms() {
            let mut out = vec![0.0; rows * width];
            arm.product(Bf16Product { operands, bias: &bias, store: StoreMode::Replace }, &mut ProductOut::new(&mut out, width));
            let out = bits(&out);
            let first = expected.get_or_insert_with(|| out.clone());
            prop_assert!(*first == out, "{arm:?} differs from {:?}", arms()[0]);
        }
    }

    /// Each factor is off by at most half a unit of its eight bits.
    #[test]
    fn the_error_is_that_of_rounding(m in 1..8usize, k in 1..300usize, n in 1..80usize, seed in 1..1000u32) {
        let (x, w, b) = (noise(m * k, seed), noise(n * k, seed + 1), noise(n, seed + 2));
        let out = apply(&Bf16Linear::new(&w, k, Some(&b)), &x);
        for (x, out) in x.chunks_exact(k).zip(out.chunks_exact(n)) {
            for ((w, b), out) in w.chunks_exact(k).zip(&b).zip(out) {
                let terms = || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                let error = (f64::from(*out) - terms().sum::<f64>() - f64::from(*b)).abs();
                let bound = terms().map(f64::abs).sum::<f64>() / 128.0 * 1.01 + 1e-4;
                prop_assert!(error <= bound, "{error} > {bound}");
            }
        }
    }

    #[test]
    fn a_row_depends_neither_on_its_batch_nor_on_the_threads(
        m in 1..200usize, k in 1..70usize, n in 1..300usize, seed in 1..1000u32,
    ) {
        let (x, w, b) = (noise(m * k, seed), noise(n * k, seed + 1), noise(n, seed + 2));
        let layer = Bf16Linear::new(&w, k, Some(&b));
        row_is_independent(&x, [m, n], seed as usize % m, |x, out, store, pool| layer.run(x, out, store, pool));
    }

    #[test]
    fn rounding_is_to_nearest_even(value in prop::num::f32::ANY) {
        let mut rounded = [0];
        round(&[value], &mut rounded);
        let expected = bf16::from_f32(value);
        if value.is_nan() {
            prop_assert!(widened(rounded[0]).is_nan());
        } else {
            let normal = if expected.to_f32().is_subnormal() { 0.0 } else { expected.to_f32() };
            prop_assert_eq!(widened(rounded[0]), normal);
        }
    }
}

#[test]
fn non_finite_values_stay_non_finite() {
    let (k, n) = (21, 30);
    let (x, w) = (noise(3 * k, 1), noise(n * k, 2));
    let layer = Bf16Linear::new(&w, k, None);
    let clean = apply(&layer, &x);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 16, k - 1] {
            let mut x = x.clone();
            x[k + at] = bad;
            let out = apply(&layer, &x);
            assert!(out[n..2 * n].iter().all(|y| !y.is_finite()), "{bad} at {at}");
            assert_eq!((&out[..n], &out[2 * n..]), (&clean[..n], &clean[2 * n..]));
        }
    }
}
