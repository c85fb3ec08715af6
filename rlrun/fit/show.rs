//! The output of a fit: text with a chart, one JSON object per run, or a picture.
//!
//! Invariant: all three show the same numbers. An end of a confidence interval that a bound set, not the data, is never
//! shown as one.

use serde_json::{Value, json};

use super::curve::Curve;
use super::sigmoid::{Margin, Point};
use super::{Ceiling, Common, Fitted, MORE, Plan};
use crate::chart::{Chart, Scale, Series, SeriesStyle, number};

/// Share of the gain that a margin which only the ceiling ends may be wide without a warning.
const OPEN: f64 = 0.1;

/// Points of a drawn curve.
const DRAWN: usize = 200;

/// Everything in text, a chart per run.
pub(super) fn text(plan: &Plan, fitted: &[Fitted], common: Option<&Common>) -> String {
    let mut parts: Vec<String> = fitted.iter().map(|fitted| run_text(plan, fitted)).collect();
    if let Some(common) = common {
        parts.push(comparison(fitted, common));
    }
    parts.join("\n\n")
}

/// One JSON object per run, a line each.
pub(super) fn json(plan: &Plan, fitted: &[Fitted], common: Option<&Common>) -> String {
    let lines = fitted.iter().enumerate().map(|(index, fitted)| {
        let curve = &fitted.fit.curve;
        let shared = common.map(|common| {
            let curve = &common.curves[index];
            json!({ "a": common.asymptote, "b": curve.exponent, "c_mid": curve.half_gain, "r_0": curve.start })
        });
        let object = json!({
            "run": fitted.measured.run,
            "metric": plan.metric,
            "compute": plan.compute,
            "points": fitted.measured.points.len(),
            "held_out": fitted.measured.held_out.len(),
            "ceiling": fitted.ceiling.value,
            "a": margin_json(fitted.fit.asymptote),
            "b": margin_json(fitted.fit.exponent),
            "c_mid": margin_json(fitted.fit.half_gain),
            "r_0": curve.start,
            "rms": rms(&fitted.measured.points, |x| curve.at(x)),
            "held_out_rms": rms(&fitted.measured.held_out, |x| curve.at(x)),
            "predicted": { "compute": fitted.far, "value": margin_json(fitted.predicted) },
            "power_law": fitted.power.map(|power| json!({
                "a": power.asymptote,
                "b": power.exponent,
                "d": power.scale,
                "rms": rms(&after_start(&fitted.measured.points), |x| power.at(x)),
                "held_out_rms": rms(&fitted.measured.held_out, |x| power.at(x)),
                "predicted": power.at(fitted.far),
            })),
            "common_a": shared,
        });
        object.to_string()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// All runs in one picture.
pub(super) fn svg(plan: &Plan, fitted: &[Fitted]) -> String {
    let series = fitted.iter().enumerate().flat_map(|(color, fitted)| {
        let name = format!("{}: A {}", fitted.measured.run, bounded(fitted.fit.asymptote, fitted.ceiling));
        series(fitted, &name, color)
    });
    chart(plan, series.collect()).svg()
}

fn run_text(plan: &Plan, fitted: &Fitted) -> String {
    let Fitted { measured, fit, ceiling, predicted, power, far } = fitted;
    let Curve { run, points, held_out, has_start } = measured;
    let note = if held_out.is_empty() { String::new() } else { format!(", {} held-out (x)", held_out.len()) };
    let mut lines = vec![
        format!("{run}: {} over {}, {} points (o){note}", plan.metric, plan.compute, points.len()),
        String::new(),
        chart(plan, series(fitted, "", 0)).text(),
        String::new(),
        "R = R_0 + (A - R_0) / (1 + (C_mid / C)^B), with 95 % margins".to_owned(),
        format!("  A      {}", bounded(fit.asymptote, *ceiling)),
        format!("  B      {}", margin(fit.exponent)),
        format!("  C_mid  {} {}", margin(fit.half_gain), plan.compute),
        format!("  R_0    {}", number(fit.curve.start)),
        format!("  error  {}", errors(measured, points, |x| fit.curve.at(x))),
        format!(
            "  at {MORE} times the compute, {} {}: {}",
            number(*far),
            plan.compute,
            bounded(*predicted, *ceiling)
        ),
    ];
    if let Some(power) = power {
        lines.push("R = A - D / C^B, a power law, for comparison: what not to extrapolate with".to_owned());
        let (a, b, d) = (number(power.asymptote), number(power.exponent), number(power.scale));
        lines.push(format!("  A      {a}, B {b}, D {d}"));
        lines.push(format!("  error  {}", errors(measured, &after_start(points), |x| power.at(x))));
        lines.push(format!("  at {MORE} times the compute: {}", number(power.at(*far))));
    }
    let Margin { low, high, closed_above, .. } = fit.asymptote;
    if !closed_above && high - low > OPEN * (fit.curve.asymptote - fit.curve.start) {
        lines.push(
            "note: the points do not bound A from above, as the curve has not bent enough; train longer before you trust A"
                .to_owned(),
        );
    }
    if !has_start {
        lines.push(
            "note: no point is from before training, so that R_0 is a guess from the first ones".to_owned(),
        );
    }
    lines.join("\n")
}

fn comparison(fitted: &[Fitted], common: &Common) -> String {
    let width = fitted.iter().map(|fitted| fitted.measured.run.len()).max().unwrap_or(0);
    let mut lines = vec![
        format!(
            "Compared: each on its own, then with the A that fits all of them best, {}",
            number(common.asymptote)
        ),
        format!("{:width$}  {:26}  {:26}  B at common A", "run", "A", "B"),
    ];
    for (fitted, curve) in fitted.iter().zip(&common.curves) {
        let (a, b) = (bounded(fitted.fit.asymptote, fitted.ceiling), margin(fitted.fit.exponent));
        lines.push(format!("{:width$}  {a:26}  {b:26}  {}", fitted.measured.run, number(curve.exponent)));
    }
    lines.join("\n")
}

/// The margin of a value of the metric; a real ceiling closes it as points do.
fn bounded(value: Margin, ceiling: Ceiling) -> String {
    let text = margin(value);
    if ceiling.is_real { text.replace(" or more)", ", the ceiling)") } else { text }
}

fn margin(margin: Margin) -> String {
    let Margin { value, low, high, closed_below, closed_above } = margin;
    let least = if closed_below { number(low) } else { format!("{} or less", number(low)) };
    let most = if closed_above { number(high) } else { format!("{} or more", number(high)) };
    format!("{} ({least} to {most})", number(value))
}

fn margin_json(margin: Margin) -> Value {
    // An end that the data did not set is no number.
    let Margin { value, low, high, closed_below, closed_above } = margin;
    json!({ "value": value, "low": closed_below.then_some(low), "high": closed_above.then_some(high) })
}

fn errors(curve: &Curve, points: &[Point], at: impl Fn(f64) -> f64 + Copy) -> String {
    let fitted =
        rms(points, at).map_or_else(String::new, |error| format!("{} on the points fitted", number(error)));
    match rms(&curve.held_out, at) {
        Some(error) => format!("{fitted}, {} on the held-out points (root mean square)", number(error)),
        None => format!("{fitted} (root mean square)"),
    }
}

/// Root of the mean squared error; `None` without points.
fn rms(points: &[Point], at: impl Fn(f64) -> f64) -> Option<f64> {
    let sum: f64 = points.iter().map(|point| (point.value - at(point.compute)).powi(2)).sum();
    (!points.is_empty()).then(|| (sum / points.len() as f64).sqrt())
}

/// The points that a power law can be fitted to.
fn after_start(points: &[Point]) -> Vec<Point> {
    points.iter().copied().filter(|point| point.compute > 0.0).collect()
}

fn chart(plan: &Plan, series: Vec<Series>) -> Chart<'_> {
    Chart {
        x_words: &plan.compute,
        y_words: &plan.metric,
        x_scale: Scale::Logarithmic,
        y_scale: Scale::Linear,
        series,
    }
}

/// The fitted points of a run, its held-out points, and its curve up to the predicted compute.
fn series(fitted: &Fitted, name: &str, color: usize) -> Vec<Series> {
    let place = |points: &[Point]| points.iter().map(|point| (point.compute, point.value)).collect();
    let points = after_start(&fitted.measured.points);
    let (from, to) = (points.first().map_or(1.0, |point| point.compute), fitted.far);
    let xs = (0..=DRAWN).map(|n| from * (to / from).powf(n as f64 / DRAWN as f64));
    let line = xs.map(|x| (x, fitted.fit.curve.at(x))).collect();
    let one = |name: &str, points, mark| Series { name: name.to_owned(), points, mark, color };
    vec![
        one(name, line, SeriesStyle::Line),
        one("", place(&points), SeriesStyle::Dots),
        one("", place(&fitted.measured.held_out), SeriesStyle::Rings),
    ]
}
