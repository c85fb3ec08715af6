//! `rlrun fit`: how far runs would go with more compute.
//!
//! # Layout
//! - `curve`: the points of a run, from its metrics
//! - [`sigmoid`]: the scaling curve and its fit, with margins
//! - [`power`]: the power law, for comparison
//! - `numeric`: what both are fitted with
//! - `show`: text, JSON and picture
//!
//! Invariant: run directories are only read, and the same metrics give the same text.

mod curve;
mod numeric;
pub mod power;
mod show;
pub mod sigmoid;

use curve::{Curve, Measured, Window};
use numeric::{fisher_95, scanned_minimum};
use power::PowerLaw;
use sigmoid::{Fit, FitProblem, Margin, Point, Sigmoid};

use crate::args::FitArgs;
use crate::failure::Failure;

/// The compute of predictions, as a multiple of the compute of a run.
const MORE: f64 = 10.0;

/// Places of the scan for the common asymptote.
const COMMON_PLACES: usize = 60;

/// The metric, its measure of compute and the given ceiling.
#[derive(Debug)]
struct Plan {
    metric: String,
    compute: String,
    ceiling: Option<f64>,
}

/// A run with its fit.
#[derive(Debug)]
struct Fitted {
    measured: Curve,
    fit: Fit,
    ceiling: Ceiling,
    /// The compute of the prediction.
    far: f64,
    predicted: Margin,
    /// `None` if too few points differ in compute.
    power: Option<PowerLaw>,
}

/// The upper bound of the asymptote.
#[derive(Clone, Copy, Debug)]
struct Ceiling {
    value: f64,
    /// Whether it is the maximum of the metric; else it is only the bound of the search.
    is_real: bool,
}

/// The fits of several runs to one asymptote.
#[derive(Debug)]
struct Common {
    asymptote: f64,
    /// In the order of the runs.
    curves: Vec<Sigmoid>,
}

/// Fits the runs that `args` name and returns the report.
///
/// # Errors
/// A run or metric that is not there, too few points, a curve that does not rise, or a picture that cannot be written.
pub fn run(args: &FitArgs) -> Result<String, Failure> {
    let measured: Vec<Measured> =
        args.runs.iter().map(|run| Measured::read(run)).collect::<Result<_, _>>()?;
    let counted = if measured.iter().all(Measured::counts_tokens) { "tokens" } else { "step" };
    let compute = args.compute.clone().unwrap_or_else(|| counted.to_owned());
    let plan = Plan { metric: args.metric.clone(), compute, ceiling: args.ceiling };
    let window = Window { skip: args.skip.unwrap_or(0.0), until: args.until.unwrap_or(f64::INFINITY) };
    let curves = measured.iter().map(|run| run.curve(&plan.metric, &plan.compute, window));
    let fitted: Vec<Fitted> = curves.map(|curve| plan.fit(curve?)).collect::<Result<_, _>>()?;
    let common = (fitted.len() > 1).then(|| plan.common(&fitted));
    if let Some(file) = &args.svg {
        let system = |source| Failure::System { what: format!("write {}", file.display()), source };
        std::fs::write(file, show::svg(&plan, &fitted)).map_err(system)?;
    }
    let say = if args.json { show::json } else { show::text };
    Ok(say(&plan, &fitted, common.as_ref()))
}

impl Plan {
    fn fit(&self, measured: Curve) -> Result<Fitted, Failure> {
        let run = &measured.run;
        let ceiling = self.ceiling(&measured);
        if measured.points.iter().all(|point| point.value >= ceiling.value) {
            let message = format!(
                "all values of {} in `{run}` are at the ceiling of {} or above, so that there is no gain to fit; \
                 `--ceiling` sets another",
                self.metric, ceiling.value
            );
            return Err(Failure::Argument(message));
        }
        let last =
            measured.points.iter().chain(&measured.held_out).map(|point| point.compute).fold(0.0, f64::max);
        if measured.points.iter().all(|point| point.compute == 0.0) {
            let message = format!(
                "all points of `{run}` that are to be fitted have {} 0; raise `--until`",
                self.compute
            );
            return Err(Failure::Argument(message));
        }
        let problem = FitProblem::new(&measured.points, ceiling.value);
        let fit = problem.fit();
        let far = MORE * last;
        if fit.curve.asymptote <= fit.curve.start || !is_more_than_noise(&measured.points, &fit) {
            return Err(Failure::Argument(format!(
                "{} does not rise in `{run}` by more than its noise: the best fit goes from {:.3} to {:.3}; there is no \
                 gain to extrapolate, so \
                 train longer or choose another metric with `--metric`",
                self.metric, fit.curve.start, fit.curve.asymptote
            )));
        }
        let predicted = problem.predict(&fit.curve, far);
        let power = PowerLaw::fit(&measured.points);
        Ok(Fitted { fit, ceiling, far, predicted, power, measured })
    }

    fn ceiling(&self, curve: &Curve) -> Ceiling {
        let values = || curve.points.iter().map(|point| point.value);
        let (low, high) =
            (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        let share = self.metric.ends_with("/accuracy")
            || ["/avg@", "/pass@"].iter().any(|kind| self.metric.contains(kind));
        let accuracy = (share && high <= 1.0).then_some(1.0);
        match self.ceiling.or(accuracy) {
            Some(value) => Ceiling { value, is_real: true },
            None => Ceiling { value: high + 2.0 * (high - low), is_real: false },
        }
    }

    /// The asymptote with the least squared error over all runs together, each error in units of the run's own noise,
    /// and the curves that have it.
    fn common(&self, fitted: &[Fitted]) -> Common {
        let problems: Vec<(FitProblem<'_>, &Fitted)> = fitted
            .iter()
            .map(|fitted| (FitProblem::new(&fitted.measured.points, fitted.ceiling.value), fitted))
            .collect();
        let error = |asymptote: f64| -> f64 {
            let errors = problems.iter().map(|(problem, fitted)| {
                let noise = (fitted.fit.error / fitted.measured.points.len() as f64).max(f64::MIN_POSITIVE);
                problem.with_asymptote(asymptote, &fitted.fit.curve).1 / noise
            });
            errors.sum()
        };
        // It is between the least and the greatest asymptote of the runs.
        let own = || fitted.iter().map(|fitted| fitted.fit.curve.asymptote);
        let (low, high) = (own().fold(f64::INFINITY, f64::min), own().fold(f64::NEG_INFINITY, f64::max));
        let asymptote = scanned_minimum(low, high, COMMON_PLACES, error);
        let curves =
            problems.iter().map(|(problem, f)| problem.with_asymptote(asymptote, &f.fit.curve).0).collect();
        Common { asymptote, curves }
    }
}

/// Whether a curve explains the points better than their mean does, by the F test of its three more parameters at 5 %.
fn is_more_than_noise(points: &[Point], fit: &Fit) -> bool {
    let mean = points.iter().map(|point| point.value).sum::<f64>() / points.len() as f64;
    let without: f64 = points.iter().map(|point| (point.value - mean).powi(2)).sum();
    let freedom = points.len() - 4;
    without > fit.error * (1.0 + 3.0 * fisher_95(3, freedom) / freedom as f64)
}
