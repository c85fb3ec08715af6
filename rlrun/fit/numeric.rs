//! The numerical tools of the fits: minima by Nelder-Mead, a straight line, a quantile.
//!
//! Invariant: pure and deterministic; what cannot be solved is `None`, never a number that is not finite.

use argmin::core::{CostFunction, Error, Executor, State};
use argmin::solver::neldermead::NelderMead;
use special::Beta;

/// Share of the interval of a parameter that the first simplex extends over.
const FIRST_STEP: f64 = 0.02;

/// Most iterations of one search.
const ITERATIONS: u64 = 300;

/// Standard deviation of the costs of a simplex at which a search ends, as a share of the cost at its start.
const TOLERANCE: f64 = 1e-12;

/// The cost of places inside an interval per parameter. A place outside costs more than the nearest one inside.
struct BoundedCost<'a, F> {
    bounds: &'a [(f64, f64)],
    of: F,
}

impl<F: Fn(&[f64]) -> f64> CostFunction for BoundedCost<'_, F> {
    type Param = Vec<f64>;
    type Output = f64;

    fn cost(&self, place: &Vec<f64>) -> Result<f64, Error> {
        let inside = clamped(place, self.bounds);
        let distance: f64 = place.iter().zip(&inside).map(|(x, inside)| (x - inside).abs()).sum();
        Ok((self.of)(&inside) * (1.0 + distance))
    }
}

/// The place `[parameters]` near `start` where `of`, which is not negative, is least inside `bounds`. Where there are
/// several minima, one of them.
pub(super) fn minimum(start: &[f64], bounds: &[(f64, f64)], of: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let start = clamped(start, bounds);
    let mut simplex = vec![start.clone()];
    for (index, (low, high)) in bounds.iter().enumerate() {
        let mut corner = start.clone();
        let step = FIRST_STEP * (high - low);
        corner[index] += if corner[index] + step <= *high { step } else { -step };
        simplex.push(corner);
    }
    let tolerance = TOLERANCE * of(&start);
    let found = NelderMead::new(simplex).with_sd_tolerance(tolerance).and_then(|solver| {
        let search = Executor::new(BoundedCost { bounds, of }, solver);
        search.configure(|state| state.max_iters(ITERATIONS)).timer(false).run()
    });
    let best = found.ok().and_then(|found| found.state().get_best_param().cloned());
    best.map_or(start, |best| clamped(&best, bounds))
}

/// The place among `count` evenly spread from `low` to `high` where `of` is least, refined near it: for functions that
/// have several minima, none narrower than the distance of two places.
pub(super) fn scanned_minimum(low: f64, high: f64, count: usize, of: impl Fn(f64) -> f64) -> f64 {
    let count = count.max(2);
    let width = (high - low) / (count - 1) as f64;
    let places = (0..count).map(|n| low + width * n as f64).map(|x| (x, of(x)));
    let (best, _) = places.fold((low, f64::INFINITY), |best, next| if next.1 < best.1 { next } else { best });
    let around = [((best - width).max(low), (best + width).min(high))];
    minimum(&[best], &around, |place| of(place[0]))[0]
}

fn clamped(place: &[f64], bounds: &[(f64, f64)]) -> Vec<f64> {
    place.iter().zip(bounds).map(|(x, (low, high))| x.clamp(*low, *high)).collect()
}

/// A straight line through points.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub(super) intercept: f64,
    pub(super) slope: f64,
    /// Squared error.
    pub(super) error: f64,
}

/// The straight line through (x, y) with the least squared error; `None` if all x are equal.
pub(super) fn line(points: impl Iterator<Item = (f64, f64)> + Clone) -> Option<Line> {
    let count = points.clone().count() as f64;
    let mean = |of: fn((f64, f64)) -> f64| points.clone().map(of).sum::<f64>() / count;
    let (mean_x, mean_y) = (mean(|(x, _)| x), mean(|(_, y)| y));
    let (mut across, mut along) = (0.0, 0.0);
    for (x, y) in points.clone() {
        across += (x - mean_x).powi(2);
        along += (x - mean_x) * (y - mean_y);
    }
    let slope = along / across;
    let intercept = mean_y - slope * mean_x;
    let error = points.map(|(x, y)| (y - intercept - slope * x).powi(2)).sum();
    (slope.is_finite() && intercept.is_finite()).then_some(Line { intercept, slope, error })
}

/// The value that the F distribution with `over` and `under` degrees of freedom stays below in 95 of 100 cases. With
/// one degree over, it is the square of what the absolute value of Student's t stays below.
pub(super) fn fisher_95(over: usize, under: usize) -> f64 {
    let (over, under) = (over as f64, under as f64);
    let (p, q) = (over / 2.0, under / 2.0);
    let share = 0.95_f64.inv_inc_beta(p, q, p.ln_beta(q));
    under * share / (over * (1.0 - share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minimum_of_a_valley_and_the_lower_of_two_are_found() {
        let valley = |place: &[f64]| {
            let (x, y) = (place[0], place[1]);
            (1.0 - x).powi(2) + 100.0 * (y - x * x).powi(2)
        };
        let found = minimum(&[-1.0, 1.0], &[(-3.0, 3.0), (-3.0, 3.0)], valley);
        assert!((found[0] - 1.0).abs() < 1e-5 && (found[1] - 1.0).abs() < 1e-5, "{found:?}");
        let ended = minimum(&[-1.0, 1.0], &[(-3.0, 0.5), (-3.0, 3.0)], valley);
        assert!((ended[0] - 0.5).abs() < 1e-5 && (ended[1] - 0.25).abs() < 1e-5, "{ended:?}");
        // Minima near -1 (higher) and near 2.
        let two = |x: f64| (x + 1.0).powi(2) * (x - 2.0).powi(2) - 0.1 * x + 1.0;
        let x = scanned_minimum(-4.0, 4.0, 20, two);
        assert!((x - 2.0).abs() < 0.05, "{x}");
        assert_eq!(scanned_minimum(1.0, 5.0, 9, |x| x), 1.0);
    }

    #[test]
    fn a_line_is_found_and_one_through_a_single_x_is_not() {
        let found = line([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)].into_iter()).unwrap();
        assert!((found.intercept - 1.0).abs() < 1e-12 && (found.slope - 2.0).abs() < 1e-12, "{found:?}");
        assert!(found.error < 1e-24, "{found:?}");
        assert!(line([(2.0, 3.0), (2.0, 5.0)].into_iter()).is_none());
        assert!(line(std::iter::empty()).is_none());
    }

    #[test]
    fn quantiles_agree_with_the_tables() {
        for (freedom, table) in [(3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042), (100_000, 1.960)] {
            assert!((fisher_95(1, freedom).sqrt() / table - 1.0).abs() < 0.001, "{freedom}");
        }
        for (freedom, table) in [(4, 6.591), (6, 4.757), (10, 3.708), (30, 2.922), (100_000, 2.605)] {
            assert!((fisher_95(3, freedom) / table - 1.0).abs() < 0.001, "{freedom}");
        }
    }
}
