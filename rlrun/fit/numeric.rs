//! The numerical tools of the fits: a minimum in one dimension, a small linear system, a quantile.
//!
//! Invariant: pure and deterministic; what cannot be solved is `None`, never a number that is not finite.

/// Share of an interval that golden-section search keeps, (sqrt(5) - 1) / 2.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// The minimum of `of` between `low` and `high` by golden section, where it is found, and its value. Where there are
/// several minima, one of them.
pub(super) fn minimum(low: f64, high: f64, steps: usize, of: impl Fn(f64) -> f64) -> (f64, f64) {
    let (mut low, mut high) = (low, high);
    let (mut left, mut right) = (high - GOLDEN * (high - low), low + GOLDEN * (high - low));
    let (mut at_left, mut at_right) = (of(left), of(right));
    for _ in 0..steps {
        if at_left <= at_right {
            (high, right, at_right) = (right, left, at_left);
            left = high - GOLDEN * (high - low);
            at_left = of(left);
        } else {
            (low, left, at_left) = (left, right, at_right);
            right = low + GOLDEN * (high - low);
            at_right = of(right);
        }
    }
    if at_left <= at_right { (left, at_left) } else { (right, at_right) }
}

/// The minimum over `count` places evenly spread from `low` to `high`, refined by golden section between its
/// neighbours: for functions that have several minima, none narrower than the distance of two places.
pub(super) fn scanned_minimum(low: f64, high: f64, count: usize, of: impl Fn(f64) -> f64) -> (f64, f64) {
    let width = (high - low) / (count.max(2) - 1) as f64;
    let places = (0..count.max(2)).map(|n| low + width * n as f64);
    let (best, value) = places
        .map(|x| (x, of(x)))
        .fold((low, f64::INFINITY), |best, next| if next.1 < best.1 { next } else { best });
    let refined = minimum((best - width).max(low), (best + width).min(high), 60, of);
    if refined.1 < value { refined } else { (best, value) }
}

/// Solves `matrix` x = `right` by elimination with pivots; `None` if the matrix is singular to rounding.
pub(super) fn solve<const N: usize>(mut matrix: [[f64; N]; N], mut right: [f64; N]) -> Option<[f64; N]> {
    for column in 0..N {
        let size = |row: &[f64; N]| row[column].abs();
        let pivot = (column..N).max_by(|a, b| size(&matrix[*a]).total_cmp(&size(&matrix[*b])))?;
        let largest = size(&matrix[pivot]);
        if largest.is_nan() || largest <= f64::MIN_POSITIVE {
            return None;
        }
        matrix.swap(column, pivot);
        right.swap(column, pivot);
        let (top, from_pivot) = (matrix[column], right[column]);
        for (row, value) in matrix.iter_mut().zip(&mut right).skip(column + 1) {
            let share = row[column] / top[column];
            row.iter_mut().zip(top).for_each(|(entry, above)| *entry -= share * above);
            *value -= share * from_pivot;
        }
    }
    let mut out = [0.0; N];
    for row in (0..N).rev() {
        let known: f64 = (row + 1..N).map(|k| matrix[row][k] * out[k]).sum();
        out[row] = (right[row] - known) / matrix[row][row];
    }
    out.iter().all(|x| x.is_finite()).then_some(out)
}

/// The straight line through (x, y) with the least squared error: intercept, slope, squared error.
pub(super) fn line(points: impl Iterator<Item = (f64, f64)> + Clone) -> Option<(f64, f64, f64)> {
    let mut sums = [0.0; 5];
    for (x, y) in points.clone() {
        for (sum, term) in sums.iter_mut().zip([1.0, x, x * x, y, x * y]) {
            *sum += term;
        }
    }
    let [n, x, xx, y, xy] = sums;
    let [intercept, slope] = solve([[n, x], [x, xx]], [y, xy])?;
    let error = points.map(|(x, y)| (y - intercept - slope * x).powi(2)).sum();
    Some((intercept, slope, error))
}

/// The value that the absolute value of Student's t stays below in 95 of 100 cases, from 3 degrees of freedom on.
///
/// The expansion of Abramowitz and Stegun 26.7.5; off by less than one percent at 3 degrees, less after.
pub(super) fn student_95(freedom: usize) -> f64 {
    let (z, n) = (1.959_963_984_540_054_f64, freedom.max(3) as f64);
    let powers = |coefficients: [f64; 4]| {
        let [a, b, c, d] = coefficients;
        a * z.powi(7) + b * z.powi(5) + c * z.powi(3) + d * z
    };
    z + powers([0.0, 0.0, 1.0, 1.0]) / (4.0 * n)
        + powers([0.0, 5.0, 16.0, 3.0]) / (96.0 * n * n)
        + powers([3.0, 19.0, 17.0, -15.0]) / (384.0 * n * n * n)
}

/// The value that the F distribution with 3 and `freedom` degrees of freedom stays below in 95 of 100 cases, from 4
/// degrees on; a curve through the tables, off by less than two percent.
pub(super) fn fisher_3_95(freedom: usize) -> f64 {
    2.605 * (3.7 / freedom.max(4) as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minimum_of_a_parabola_and_the_lower_of_two_are_found() {
        let (x, value) = minimum(-3.0, 9.0, 80, |x| (x - 2.0).powi(2) + 1.0);
        assert!((x - 2.0).abs() < 1e-6 && (value - 1.0).abs() < 1e-12, "{x} {value}");
        // Minima near -1 (higher) and near 2.
        let two = |x: f64| (x + 1.0).powi(2) * (x - 2.0).powi(2) - 0.1 * x;
        let (x, _) = scanned_minimum(-4.0, 4.0, 20, two);
        assert!((x - 2.0).abs() < 0.05, "{x}");
        assert_eq!(scanned_minimum(1.0, 5.0, 9, |x| x).0, 1.0);
    }

    #[test]
    fn a_system_that_needs_pivots_is_solved_and_a_singular_one_is_not() {
        let found = solve([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0], [3.0, 0.0, -1.0]], [7.0, 3.0, 0.0]).unwrap();
        assert!(found.iter().zip([1.0, 2.0, 3.0]).all(|(x, y)| (x - y).abs() < 1e-12), "{found:?}");
        assert_eq!(solve([[0.0, 0.0], [0.0, 1.0]], [1.0, 1.0]), None);
        assert_eq!(solve([[f64::NAN, 0.0], [0.0, 1.0]], [1.0, 1.0]), None);
    }

    #[test]
    fn quantiles_agree_with_the_tables() {
        for (freedom, table) in [(3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042), (100_000, 1.960)] {
            assert!((student_95(freedom) / table - 1.0).abs() < 0.01, "{freedom}");
        }
        for (freedom, table) in [(4, 6.591), (6, 4.757), (10, 3.708), (30, 2.922), (100_000, 2.605)] {
            assert!((fisher_3_95(freedom) / table - 1.0).abs() < 0.02, "{freedom}");
        }
    }
}
