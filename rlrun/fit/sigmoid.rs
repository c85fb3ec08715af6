//! The scaling curve of ScaleRL (arXiv 2510.13786, equation 1) and its fit by least squares.
//!
//! R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B): R_0 before training, A the asymptote, C_mid the compute of half the
//! gain, B how steeply it is gained. The paper's method: a grid over A and C_mid, at each of its places the best B by a
//! search in one dimension, the place with the least squared error, then a local refinement. R_0 enters linearly and is
//! solved for at every place; a measurement before training (C = 0) is one observation of it among the others.
//!
//! Margins are profile likelihoods: a value of a parameter is inside its 95 % margin if the best fit that has it is
//! not worse than the best of all by more than the F distribution (1, n - 4 degrees of freedom) allows. They take the
//! noise to be normal, equal at all points and independent; they need no random numbers, so that they repeat exactly.
//!
//! Invariant: every parameter stays inside its bounds, and a margin that only a bound has ended says so.

use super::numeric::{minimum, solve, student_95};

/// Places of the grid in A, in C_mid, and those in ln B that the search of each place narrows down.
const GRID: (usize, usize, usize) = (41, 40, 16);

/// More points than this are averaged in runs of neighbours for the grid; the refinement sees all.
const GRID_POINTS: usize = 128;

/// Best places of the grid that are refined.
const STARTS: usize = 4;

/// Fewest points of a fit: four parameters, and as many again to tell noise from shape.
pub const MIN_POINTS: usize = 8;

/// Bounds of B.
const EXPONENT: (f64, f64) = (0.05, 20.0);

/// How far C_mid may lie outside of the compute that was measured, as a factor.
const BEYOND: f64 = 100.0;

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Compute spent, 0 or more, in the unit of the curve.
    pub compute: f64,
    /// The metric then.
    pub value: f64,
}

/// A value with the ends of its 95 % margin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Margin {
    /// The best value.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Whether the data end the margin below; else `low` is only the bound of the search.
    pub closed_below: bool,
    /// Whether the data end the margin above; else `high` is only the bound of the search.
    pub closed_above: bool,
}

/// A scaling curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sigmoid {
    /// A, the value at unlimited compute.
    pub asymptote: f64,
    /// `R_0`, the value before training.
    pub start: f64,
    /// `C_mid`, the compute of half the gain.
    pub half_gain: f64,
    /// B.
    pub exponent: f64,
}

impl Sigmoid {
    /// The value at `compute`.
    #[must_use]
    pub fn at(&self, compute: f64) -> f64 {
        self.start + (self.asymptote - self.start) * gained((self.half_gain / compute).ln() * self.exponent)
    }
}

/// A fitted curve with its margins.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    /// The curve of least squared error.
    pub curve: Sigmoid,
    /// Squared error over the points.
    pub error: f64,
    /// A with its margin.
    pub asymptote: Margin,
    /// B with its margin.
    pub exponent: Margin,
    /// `C_mid` with its margin.
    pub half_gain: Margin,
}

/// Share of the gain at ln((C_mid / C)^B), from 0 to 1.
fn gained(log_ratio: f64) -> f64 {
    1.0 / (1.0 + log_ratio.exp())
}

/// The parameters as they are searched: value at `FitProblem::pivot`, `R_0`, ln `C_mid`, ln B.
type Params = [f64; 4];
const TOP: usize = 0;
const HALF: usize = 2;
const STEEP: usize = 3;

#[derive(Clone, Copy, Debug)]
struct Solution {
    params: Params,
    error: f64,
}

/// Points and the box that parameters are searched in.
#[derive(Clone, Debug)]
pub(super) struct FitProblem<'a> {
    points: &'a [Point],
    bounds: [(f64, f64); 4],
    /// The compute at which the first parameter is the curve's value: infinite for A itself, finite for the margin of
    /// a prediction.
    pivot: f64,
}

impl<'a> FitProblem<'a> {
    /// The fit of `points`, with no asymptote above `ceiling`. Call it with [`MIN_POINTS`] points or more, of which
    /// some have compute above 0.
    pub(super) fn new(points: &'a [Point], ceiling: f64) -> Self {
        let (low, high) = range(points.iter().map(|point| point.value));
        let (first, last) = range(points.iter().map(|point| point.compute).filter(|compute| *compute > 0.0));
        let bounds = [
            (low.min(ceiling), ceiling),
            (low - (high - low), high),
            ((first / BEYOND).ln(), (last * BEYOND).ln()),
            (EXPONENT.0.ln(), EXPONENT.1.ln()),
        ];
        Self { points, bounds, pivot: f64::INFINITY }
    }

    /// The curve of least squared error with its margins.
    pub(super) fn fit(&self) -> Fit {
        let best = self.best();
        let curve = self.curve(&best.params);
        let margin = |index, show: fn(f64) -> f64| {
            let ((low, closed_below), (high, closed_above)) =
                (self.edge(&best, index, -1.0), self.edge(&best, index, 1.0));
            let value = show(best.params[index]);
            Margin { value, low: show(low), high: show(high), closed_below, closed_above }
        };
        Fit {
            curve,
            error: best.error,
            asymptote: margin(TOP, |x| x),
            exponent: margin(STEEP, f64::exp),
            half_gain: margin(HALF, f64::exp),
        }
    }

    /// The value of `curve` at `compute` with its margin: the profile of the same curve, described by that value in the
    /// place of A.
    pub(super) fn predict(&self, curve: &Sigmoid, compute: f64) -> Margin {
        let problem = FitProblem { pivot: compute, ..self.clone() };
        let value = curve.at(compute);
        let start = [value, curve.start, curve.half_gain.ln(), curve.exponent.ln()];
        let best = problem.refined(start, None);
        let ((low, closed_below), (high, closed_above)) =
            (problem.edge(&best, TOP, -1.0), problem.edge(&best, TOP, 1.0));
        Margin { value, low: low.min(value), high: high.max(value), closed_below, closed_above }
    }

    /// The curve of least squared error with this asymptote, and that error; the search starts at `near`.
    pub(super) fn with_asymptote(&self, asymptote: f64, near: &Sigmoid) -> (Sigmoid, f64) {
        let start = [asymptote, near.start, near.half_gain.ln(), near.exponent.ln()];
        let found = self.refined(start, Some(TOP));
        (self.curve(&found.params), found.error)
    }

    fn curve(&self, params: &Params) -> Sigmoid {
        let [top, start, half, steep] = *params;
        let (half_gain, exponent) = (half.exp(), steep.exp());
        let at_pivot = gained((half - self.pivot.ln()) * exponent);
        Sigmoid { asymptote: start + (top - start) / at_pivot, start, half_gain, exponent }
    }

    /// The best of the refined places of the grid.
    fn best(&self) -> Solution {
        let coarse = averaged(self.points);
        let (half, steep) = (self.bounds[HALF], self.bounds[STEEP]);
        let mut places = Vec::new();
        for ln_half in spread(half, GRID.1) {
            for asymptote in spread(self.bounds[TOP], GRID.0) {
                let of = |ln_steep| start_and_error(&coarse, asymptote, ln_half, ln_steep).1;
                let (ln_steep, error) = minimum(steep.0, steep.1, GRID.2, of);
                let start = start_and_error(&coarse, asymptote, ln_half, ln_steep).0;
                places.push(Solution { params: [asymptote, start, ln_half, ln_steep], error });
            }
        }
        places.sort_by(|a, b| a.error.total_cmp(&b.error));
        let refined = places.iter().take(STARTS).map(|place| self.refined(place.params, None));
        // The grid has places, so that there is a first one.
        refined.min_by(|a, b| a.error.total_cmp(&b.error)).unwrap_or(places[0])
    }

    /// Levenberg-Marquardt from `start` inside the bounds, with the parameter at index `fixed` kept constant.
    fn refined(&self, start: Params, fixed: Option<usize>) -> Solution {
        let mut here = self.clamped(start);
        if let Some(index) = fixed {
            here[index] = start[index];
        }
        let mut best = Solution { params: here, error: self.error(&here) };
        let mut damping = 1e-3;
        for _ in 0..200 {
            let (normal, slope) = self.normal(&best.params, fixed);
            let mut damped = normal;
            for (index, row) in damped.iter_mut().enumerate() {
                row[index] += damping * row[index] + 1e-300;
            }
            let next = solve(damped, slope).map(|step| {
                let mut next = best.params;
                next.iter_mut().zip(step).for_each(|(param, step)| *param += step);
                let mut clamped = self.clamped(next);
                if let Some(index) = fixed {
                    clamped[index] = start[index];
                }
                Solution { params: clamped, error: self.error(&clamped) }
            });
            match next {
                Some(next) if next.error < best.error => {
                    let gain = best.error - next.error;
                    best = next;
                    damping = (damping * 0.2).max(1e-12);
                    if gain < 1e-13 * best.error {
                        break;
                    }
                }
                _ if damping > 1e9 => break,
                _ => damping *= 5.0,
            }
        }
        best
    }

    /// The normal matrix of the linearised errors and their slope; a row of the identity for a parameter that
    /// is fixed or would leave its bounds.
    fn normal(&self, params: &Params, fixed: Option<usize>) -> ([[f64; 4]; 4], Params) {
        let (mut normal, mut slope) = ([[0.0; 4]; 4], [0.0; 4]);
        for point in self.points {
            let (value, gradient) = self.value(params, point.compute);
            for row in 0..4 {
                slope[row] += gradient[row] * (point.value - value);
                for column in 0..4 {
                    normal[row][column] += gradient[row] * gradient[column];
                }
            }
        }
        for index in 0..4 {
            let (low, high) = self.bounds[index];
            let outwards =
                (params[index] <= low && slope[index] < 0.0) || (params[index] >= high && slope[index] > 0.0);
            if outwards || fixed == Some(index) || normal[index][index] == 0.0 {
                normal.iter_mut().for_each(|row| row[index] = 0.0);
                normal[index] = [0.0; 4];
                normal[index][index] = 1.0;
                slope[index] = 0.0;
            }
        }
        (normal, slope)
    }

    /// The curve's value at `compute` and its derivatives by the parameters.
    fn value(&self, params: &Params, compute: f64) -> (f64, Params) {
        let [top, start, ..] = *params;
        let (share, by_half, by_steep) = share(params, compute);
        let (whole, whole_by_half, whole_by_steep) = share_of_pivot(params, self.pivot);
        let ratio = share / whole;
        let gain = top - start;
        let value = start + gain * ratio;
        let half = gain * (by_half - ratio * whole_by_half) / whole;
        let steep = gain * (by_steep - ratio * whole_by_steep) / whole;
        (value, [ratio, 1.0 - ratio, half, steep])
    }

    fn error(&self, params: &Params) -> f64 {
        let squares = self.points.iter().map(|p| (p.value - self.value(params, p.compute).0).powi(2));
        let sum: f64 = squares.sum();
        if sum.is_nan() { f64::INFINITY } else { sum }
    }

    fn clamped(&self, mut params: Params) -> Params {
        params.iter_mut().zip(self.bounds).for_each(|(param, (low, high))| *param = param.clamp(low, high));
        params
    }

    /// The end of the margin of a parameter in the direction `sign`, and whether the data set it.
    fn edge(&self, best: &Solution, index: usize, sign: f64) -> (f64, bool) {
        let freedom = self.points.len() - 4;
        let allowed = best.error * (1.0 + student_95(freedom).powi(2) / freedom as f64);
        let (low, high) = self.bounds[index];
        let bound = if sign > 0.0 { high } else { low };
        let profile = |value: f64, near: &Solution| {
            let mut start = near.params;
            start[index] = value;
            self.refined(start, Some(index))
        };
        let mut inside = *best;
        let mut step = (high - low) / 256.0;
        loop {
            let next = inside.params[index] + sign * step;
            let next = if sign > 0.0 { next.min(bound) } else { next.max(bound) };
            let found = profile(next, &inside);
            if found.error <= allowed {
                inside = found;
                if next == bound {
                    return (bound, false);
                }
                step *= 2.0;
                continue;
            }
            let mut outside = next;
            for _ in 0..30 {
                let middle = 0.5 * (inside.params[index] + outside);
                let found = profile(middle, &inside);
                if found.error <= allowed { inside = found } else { outside = middle }
            }
            return (inside.params[index], true);
        }
    }
}

/// Share of the gain at `compute` and its derivatives by ln `C_mid` and ln B.
fn share(params: &Params, compute: f64) -> (f64, f64, f64) {
    let [_, _, half, steep] = *params;
    let exponent = steep.exp();
    let log_ratio = (half - compute.ln()) * exponent;
    let share = gained(log_ratio);
    let slope = -share * (1.0 - share);
    // Far from C_mid the slope is 0 and the logarithm may be infinite.
    if slope == 0.0 { (share, 0.0, 0.0) } else { (share, slope * exponent, slope * log_ratio) }
}

/// [`share`] at the pivot; never quite 0, since values are divided by it.
fn share_of_pivot(params: &Params, pivot: f64) -> (f64, f64, f64) {
    let (whole, by_half, by_steep) = share(params, pivot);
    (whole.max(1e-12), by_half, by_steep)
}

/// The best `R_0` at a place of the grid, and the squared error.
fn start_and_error(points: &[Point], asymptote: f64, ln_half: f64, ln_steep: f64) -> (f64, f64) {
    let params = [0.0, 0.0, ln_half, ln_steep];
    let (mut across, mut along) = (0.0, 0.0);
    for point in points {
        let left = 1.0 - share(&params, point.compute).0;
        across += left * left;
        along += left * (point.value - asymptote * (1.0 - left));
    }
    let start = if across > 0.0 { along / across } else { asymptote };
    let squares = points.iter().map(|point| {
        let share = share(&params, point.compute).0;
        (point.value - start - (asymptote - start) * share).powi(2)
    });
    (start, squares.sum())
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)))
}

fn spread((low, high): (f64, f64), count: usize) -> impl Iterator<Item = f64> {
    (0..count).map(move |n| low + (high - low) * n as f64 / (count - 1) as f64)
}

/// Means of neighbours, at most [`GRID_POINTS`] of them; those at compute 0 stay apart from the others.
fn averaged(points: &[Point]) -> Vec<Point> {
    let size = points.len().div_ceil(GRID_POINTS);
    let before = points.iter().take_while(|point| point.compute == 0.0).count();
    let mean = |chunk: &[Point]| {
        let n = chunk.len() as f64;
        let sum = |of: fn(&Point) -> f64| chunk.iter().map(of).sum::<f64>();
        Point { compute: sum(|p| p.compute) / n, value: sum(|p| p.value) / n }
    };
    let (start, rest) = points.split_at(before);
    start.iter().copied().chain(rest.chunks(size).map(mean)).collect()
}

#[cfg(test)]
mod tests;
