//! The fit against curves with known parameters. Seeds are fixed, so that no test fails by chance. The failure rate for
//! other seeds is noted where it matters.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::*;
use crate::fit::power::PowerLaw;

/// The curve that ScaleRL reports for its long run (arXiv 2510.13786).
const TRUTH: Sigmoid = Sigmoid { asymptote: 0.645, start: 0.27, half_gain: 3000.0, exponent: 1.7 };

/// A standard normal number (Box and Muller).
fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let mut uniform = || (rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
    (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()
}

/// The start and `count` points of [`TRUTH`], evenly spread up to `last`, with normal noise.
fn noisy(seed: u64, count: usize, last: f64, noise: f64) -> Vec<Point> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let compute = |n: usize| last * n as f64 / count as f64;
    (0..=count)
        .map(|n| Point { compute: compute(n), value: TRUTH.at(compute(n)) + noise * normal(&mut rng) })
        .collect()
}

#[test]
fn a_curve_without_noise_is_recovered() {
    let points = noisy(0, 40, 20_000.0, 0.0);
    let problem = FitProblem::new(&points, 1.0);
    let fit = problem.fit();
    let Sigmoid { asymptote, start, half_gain, exponent } = fit.curve;
    assert!((asymptote - 0.645).abs() < 1e-6 && (start - 0.27).abs() < 1e-6, "{fit:?}");
    assert!((half_gain / 3000.0 - 1.0).abs() < 1e-5 && (exponent - 1.7).abs() < 1e-5, "{fit:?}");
    assert!(fit.asymptote.closed_above && fit.asymptote.high - fit.asymptote.low < 1e-4, "{fit:?}");
    let predicted = problem.predict(&fit.curve, 200_000.0);
    assert!((predicted.value - TRUTH.at(200_000.0)).abs() < 1e-6, "{predicted:?}");
}

/// One standard deviation of the asymptote is 0.0035 here, as measured over the seeds 0 to 299; one of those 300 is off by
/// more than 0.02, so that another choice of 20 seeds fails in about 6 of 100 cases.
#[test]
fn the_asymptote_is_recovered_from_noise_within_the_margin_of_the_paper() {
    for seed in 0..20 {
        let points = noisy(seed, 60, 30_000.0, 0.01);
        let fit = FitProblem::new(&points, 1.0).fit();
        assert!((fit.curve.asymptote - TRUTH.asymptote).abs() < 0.02, "seed {seed}: {fit:?}");
    }
}

/// With a true coverage of 95 % fewer than 88 of 100 would come in 15 of 10,000 choices of seeds, 100 of 100 in 59.
/// (Over 400 other seeds between 375 and 386 of each margin cover the truth, from 12 to 100 points.)
#[test]
fn a_margin_covers_the_truth_as_often_as_it_says() {
    let mut covered = [0; 4];
    for seed in 100..200 {
        let points = noisy(seed, 40, 25_000.0, 0.01);
        let problem = FitProblem::new(&points, 1.0);
        let fit = problem.fit();
        let far = problem.predict(&fit.curve, 250_000.0);
        let truths = [
            (fit.asymptote, 0.645),
            (fit.exponent, 1.7),
            (fit.half_gain, 3000.0),
            (far, TRUTH.at(250_000.0)),
        ];
        for (count, (margin, truth)) in covered.iter_mut().zip(truths) {
            assert!(margin.low <= margin.value && margin.value <= margin.high, "{margin:?}");
            *count += u32::from(margin.low <= truth && truth <= margin.high);
        }
    }
    assert!(covered.iter().all(|count| (88..100).contains(count)), "{covered:?}");
}

#[test]
fn the_power_law_promises_too_much_where_the_sigmoid_does_not() {
    for seed in 0..10 {
        let points = noisy(seed, 60, 30_000.0, 0.005).into_iter();
        let early: Vec<Point> = points.filter(|p| (1000.0..12_000.0).contains(&p.compute)).collect();
        let power = PowerLaw::fit(&early).unwrap();
        let sigmoid = FitProblem::new(&early, 1.0).fit();
        assert!(power.asymptote > TRUTH.asymptote + 0.2, "seed {seed}: {power:?}");
        assert!((sigmoid.curve.asymptote - TRUTH.asymptote).abs() < 0.05, "seed {seed}: {sigmoid:?}");
        assert!(sigmoid.asymptote.high < power.asymptote, "seed {seed}: {power:?} {sigmoid:?}");
    }
}

#[test]
fn a_curve_that_has_not_bent_has_no_upper_margin_and_stops_at_the_ceiling() {
    let early: Vec<Point> =
        noisy(3, 200, 30_000.0, 0.01).into_iter().filter(|p| p.compute < 3000.0).collect();
    let fit = FitProblem::new(&early, 1.0).fit();
    assert!(!fit.asymptote.closed_above && fit.asymptote.high == 1.0, "{fit:?}");
    assert!(fit.asymptote.low < TRUTH.asymptote, "{fit:?}");
}

#[test]
fn the_same_points_give_the_same_bits_also_when_many_are_averaged_for_the_grid() {
    let points = noisy(5, 1000, 30_000.0, 0.02);
    let fit = |points: &[Point]| format!("{:?}", FitProblem::new(points, 1.0).fit());
    assert_eq!(fit(&points), fit(&points));
    assert!(averaged(&points).len() <= GRID_POINTS + 1);
    let found = FitProblem::new(&points, 1.0).fit().curve.asymptote;
    assert!((found - TRUTH.asymptote).abs() < 0.02, "{found}");
}

#[test]
fn a_flat_or_falling_curve_is_fitted_without_a_number_that_is_not_finite() {
    for slope in [0.0, -0.01] {
        let points: Vec<Point> =
            (0..10).map(|n| Point { compute: f64::from(n), value: 0.5 + slope * f64::from(n) }).collect();
        let fit = FitProblem::new(&points, 1.0).fit();
        let Sigmoid { asymptote, start, half_gain, exponent } = fit.curve;
        assert!([asymptote, start, half_gain, exponent].iter().all(|x| x.is_finite()), "{fit:?}");
    }
}
