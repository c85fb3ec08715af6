//! The scaling curve of ScaleRL (arXiv 2510.13786, equation 1) and its fit by least squares.
//!
//! R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B): R_0 before training, A the asymptote, C_mid the compute of half the
//! gain, B how steeply it is gained. R_0 and A enter linearly and are solved for at every place of a grid over C_mid and
//! B; the best places are refined by Nelder-Mead. A measurement before training (C = 0) is one observation of R_0 among
//! the others.
//!
//! Margins are profile likelihoods: a value of a parameter is inside its 95 % margin if the best fit that has it is
//! not worse than the best of all by more than the F distribution (1, n - 4 degrees of freedom) allows. They take the
//! noise to be normal, equal at all points and independent; they need no random numbers, so that they repeat exactly.
//!
//! Invariant: every parameter stays inside its bounds, and a margin that only a bound closes is marked.

use super::numeric::{fisher_95, line, minimum};

/// Places of the grid in ln `C_mid`, and in ln B.
const GRID: usize = 40;

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
    /// Whether the data bound the margin below; else `low` is only the bound of the search.
    pub closed_below: bool,
    /// Whether the data bound the margin above; else `high` is only the bound of the search.
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
const START: usize = 1;
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
        let curve = Self::curve(&best.params);
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
        (Self::curve(&found.params), found.error)
    }

    /// The curve of `params`, of which the first is A.
    fn curve(params: &Params) -> Sigmoid {
        let [asymptote, start, half, steep] = *params;
        Sigmoid { asymptote, start, half_gain: half.exp(), exponent: steep.exp() }
    }

    /// The best of the refined places of the grid.
    fn best(&self) -> Solution {
        let coarse = averaged(self.points);
        let problem = FitProblem { points: &coarse, ..self.clone() };
        let mut places = Vec::new();
        let [.., halves, steeps] = self.bounds;
        for half in spread(halves.0, halves.1, GRID) {
            let along = spread(steeps.0, steeps.1, GRID).map(|steep| problem.solved(half, steep, None));
            places.extend(along);
        }
        places.sort_by(|a, b| a.error.total_cmp(&b.error));
        let refined = places.iter().take(STARTS).map(|place| self.refined(place.params, None));
        // The grid is not empty.
        refined.min_by(|a, b| a.error.total_cmp(&b.error)).unwrap_or(places[0])
    }

    /// The best curve near `start` inside the bounds, with the parameter at index `fixed` kept constant.
    fn refined(&self, start: Params, fixed: Option<usize>) -> Solution {
        let free: Vec<usize> = [HALF, STEEP].into_iter().filter(|index| fixed != Some(*index)).collect();
        let top = (fixed == Some(TOP)).then_some(start[TOP]);
        let solved = |place: &[f64]| {
            let mut params = start;
            free.iter().zip(place).for_each(|(index, value)| params[*index] = *value);
            self.solved(params[HALF], params[STEEP], top)
        };
        let from: Vec<f64> = free.iter().map(|index| start[*index]).collect();
        let bounds: Vec<(f64, f64)> = free.iter().map(|index| self.bounds[*index]).collect();
        solved(&minimum(&from, &bounds, |place| solved(place).error))
    }

    /// The best curve with these ln `C_mid` and ln B inside the bounds; `top` fixes its value at the pivot. It is a straight
    /// line in the share of the gain.
    fn solved(&self, half: f64, steep: f64, top: Option<f64>) -> Solution {
        let whole = share(half, steep, self.pivot).max(1e-12);
        let points: Vec<(f64, f64)> =
            self.points.iter().map(|p| (share(half, steep, p.compute) / whole, p.value)).collect();
        let clamped = |value: f64, index: usize| value.clamp(self.bounds[index].0, self.bounds[index].1);
        let with_top = |top: f64| {
            let start = other_end(points.iter().map(|(share, value)| (1.0 - share, *value)), top);
            (top, clamped(start, START))
        };
        let with_start = |start: f64| (clamped(other_end(points.iter().copied(), start), TOP), start);
        let solution = |(top, start): (f64, f64)| {
            let error: f64 =
                points.iter().map(|(share, value)| (value - start - (top - start) * share).powi(2)).sum();
            let error = if error.is_nan() { f64::INFINITY } else { error };
            Solution { params: [top, start, half, steep], error }
        };
        if let Some(top) = top {
            return solution(with_top(top));
        }
        let free = line(points.iter().copied()).map(|line| (line.intercept + line.slope, line.intercept));
        if let Some((top, start)) = free
            && clamped(top, TOP) == top
            && clamped(start, START) == start
        {
            return solution((top, start));
        }
        // The squared error is convex, so that its minimum is on an edge of the bounds.
        let (tops, starts) = (self.bounds[TOP], self.bounds[START]);
        let least = |a: Solution, b: Solution| if b.error < a.error { b } else { a };
        [with_top(tops.1), with_start(starts.0), with_start(starts.1)]
            .into_iter()
            .map(solution)
            .fold(solution(with_top(tops.0)), least)
    }

    /// The end of the margin of a parameter in the direction `sign`, and whether the data set it.
    fn edge(&self, best: &Solution, index: usize, sign: f64) -> (f64, bool) {
        let freedom = self.points.len() - 4;
        let allowed = best.error * (1.0 + fisher_95(1, freedom) / freedom as f64);
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
            for _ in 0..20 {
                let middle = 0.5 * (inside.params[index] + outside);
                let found = profile(middle, &inside);
                if found.error <= allowed { inside = found } else { outside = middle }
            }
            return (inside.params[index], true);
        }
    }
}

/// Share of the gain at `compute`.
fn share(half: f64, steep: f64, compute: f64) -> f64 {
    gained((half - compute.ln()) * steep.exp())
}

/// The x with the least squared error of `known` * (1 - weight) + x * weight over (weight, value).
fn other_end(points: impl Iterator<Item = (f64, f64)>, known: f64) -> f64 {
    let (mut across, mut along) = (0.0, 0.0);
    for (weight, value) in points {
        across += weight * weight;
        along += weight * (value - known * (1.0 - weight));
    }
    if across > 0.0 { along / across } else { known }
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)))
}

fn spread(low: f64, high: f64, count: usize) -> impl Iterator<Item = f64> {
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
