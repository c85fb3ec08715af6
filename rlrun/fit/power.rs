//! The power law R(C) = A - D / C^B, fitted to the same points for comparison.
//!
//! ScaleRL (arXiv 2510.13786) shows that it extrapolates badly: it has no slow start, so the early part of a curve makes its
//! asymptote too high. Invariant: the asymptote is not bounded, because the fit is to show this error.

use super::numeric::{line, scanned_minimum};
use super::sigmoid::Point;

/// Bounds of B.
const EXPONENT: (f64, f64) = (0.01, 10.0);

/// Places of the scan of ln B.
const PLACES: usize = 60;

/// A fitted power law.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerLaw {
    /// A, the value at unlimited compute.
    pub asymptote: f64,
    /// D.
    pub scale: f64,
    /// B.
    pub exponent: f64,
}

impl PowerLaw {
    /// The power law of least squared error through the points with compute above 0: the best B, and at each B the
    /// line in C^-B. `None` if fewer than three such points differ in compute.
    #[must_use]
    pub fn fit(points: &[Point]) -> Option<Self> {
        let points: Vec<Point> = points.iter().copied().filter(|point| point.compute > 0.0).collect();
        let last = points.last()?.compute;
        // Relative to the last point, so that no power overflows.
        let through = |ln_exponent: f64| {
            let exponent = ln_exponent.exp();
            line(points.iter().map(move |point| ((last / point.compute).powf(exponent), point.value)))
        };
        let (low, high) = (EXPONENT.0.ln(), EXPONENT.1.ln());
        let of = |ln_exponent| through(ln_exponent).map_or(f64::INFINITY, |line| line.error);
        let ln_exponent = scanned_minimum(low, high, PLACES, of);
        let line = through(ln_exponent)?;
        let exponent = ln_exponent.exp();
        Some(Self { asymptote: line.intercept, scale: -line.slope * last.powf(exponent), exponent })
    }

    /// The value at `compute`, above 0.
    #[must_use]
    pub fn at(&self, compute: f64) -> f64 {
        self.asymptote - self.scale / compute.powf(self.exponent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_law_is_recovered_and_too_few_points_are_none() {
        let truth = PowerLaw { asymptote: 0.8, scale: 30.0, exponent: 0.7 };
        let point = |compute: f64| Point { compute, value: truth.at(compute) };
        let points: Vec<Point> = (1..30).map(|n| point(f64::from(n) * 200.0)).collect();
        let found = PowerLaw::fit(&points).unwrap();
        assert!((found.asymptote - 0.8).abs() < 1e-4 && (found.exponent - 0.7).abs() < 1e-3, "{found:?}");
        assert!((found.at(1e6) - truth.at(1e6)).abs() < 1e-4, "{found:?}");
        assert_eq!(PowerLaw::fit(&[point(5.0); 4]), None);
        assert_eq!(PowerLaw::fit(&[]), None);
    }
}
