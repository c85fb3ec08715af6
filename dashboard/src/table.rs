//! The metrics of a run as columns.
//!
//! Invariant: a column has its values in the order of the lines of `metrics.jsonl`, and knows the line of each. Names and
//! values have limits; what exceeds them is left out, and [`MetricsTable::truncated`] says so.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::downsample::min_max;
use crate::events::RunHistory;
use crate::lines::LineSink;

/// Most metrics of a run.
const MAX_KEYS: usize = 4096;
/// Longest name of a metric, bytes.
const MAX_NAME_BYTES: usize = 200;
/// Most values of a run: 100,000 steps of 160 metrics, 200 MB.
const MAX_VALUES: usize = 16_000_000;

/// What a curve is drawn over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CurveAxis {
    /// Training step.
    #[default]
    Step,
    /// Seconds since the start of the run.
    Time,
    /// Tokens trained on since the start of the run.
    Tokens,
}

/// A part of a curve, and how finely it is drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CurveView {
    pub(crate) axis: CurveAxis,
    /// Width of the drawing, pixels.
    pub(crate) pixels: usize,
    /// First and last x, in units of the axis.
    pub(crate) range: Option<(f64, f64)>,
}

/// Points of a curve.
#[derive(Debug, Default, serde::Serialize)]
pub(crate) struct MetricCurve {
    x: Vec<f64>,
    /// `None` for a value that is not finite.
    y: Vec<Option<f64>>,
}

impl MetricCurve {
    /// Number of points.
    pub(crate) fn len(&self) -> usize {
        self.x.len()
    }

    /// Its points; NaN for a value that is not finite.
    pub(crate) fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.x.iter().zip(&self.y).map(|(x, y)| (*x, y.unwrap_or(f64::NAN)))
    }
}

/// The metrics of a run.
#[derive(Debug, Default)]
pub(crate) struct MetricsTable {
    /// Of every line: step, seconds, and tokens trained on so far.
    rows: Vec<[f64; 3]>,
    columns: Vec<MetricColumn>,
    by_name: HashMap<String, usize>,
    values: usize,
    truncated: bool,
}

/// One metric.
#[derive(Debug)]
struct MetricColumn {
    name: String,
    /// The line of each value.
    rows: Vec<u32>,
    /// NaN where the value was not finite.
    values: Vec<f64>,
}

impl MetricsTable {
    /// Whether metrics or values were left out.
    pub(crate) fn truncated(&self) -> bool {
        self.truncated
    }

    /// Names of all metrics, in the order of their first lines.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().map(|column| column.name.as_str())
    }

    /// Step and seconds of the last line.
    pub(crate) fn last_row(&self) -> Option<(f64, f64)> {
        self.rows.last().map(|row| (row[0], row[1]))
    }

    /// The last value of every metric, exactly as in the file.
    pub(crate) fn last_values(&self) -> Map<String, Value> {
        let last = |column: &MetricColumn| (column.name.clone(), column.values.last().copied().into());
        self.columns.iter().map(last).collect()
    }

    /// Sum, number and largest of the finite values of a metric; `None` if it has none.
    pub(crate) fn totals(&self, name: &str) -> Option<(f64, usize, f64)> {
        let column = &self.columns[*self.by_name.get(name)?];
        let finite = || column.values.iter().copied().filter(|value| value.is_finite());
        Some((finite().sum(), finite().count(), finite().reduce(f64::max)?))
    }

    /// The curve of a metric; empty if there is none of this name. Values have seven significant digits.
    pub(crate) fn curve(&self, name: &str, view: CurveView) -> MetricCurve {
        let Some(column) = self.by_name.get(name).map(|index| &self.columns[*index]) else {
            return MetricCurve::default();
        };
        let of_row = |row: u32| self.rows[row as usize][view.axis as usize];
        let mut points: Vec<(f64, f64)> =
            column.rows.iter().zip(&column.values).map(|(row, value)| (of_row(*row), *value)).collect();
        points.retain(|(x, _)| x.is_finite());
        // Lines are ascending, unless a file was edited.
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let points = match view.range {
            None => &points[..],
            // With a neighbour on either side, so that lines reach the edges.
            Some((from, to)) => {
                let start = points.partition_point(|(x, _)| *x < from).saturating_sub(1);
                let end = points.partition_point(|(x, _)| *x <= to).saturating_add(1).min(points.len());
                &points[start.min(end)..end]
            }
        };
        let (x, y): (Vec<f64>, Vec<f64>) = points.iter().copied().unzip();
        let kept = min_max(&x, &y, view.pixels);
        let seen = |value: f64| value.is_finite().then(|| seven_digits(value));
        MetricCurve {
            x: kept.iter().map(|index| seven_digits(x[*index])).collect(),
            y: kept.iter().map(|index| seen(y[*index])).collect(),
        }
    }

    /// Adds a line of `metrics.jsonl`.
    pub(crate) fn add(&mut self, line: &Map<String, Value>) {
        let number = |name: &str| line.get(name).and_then(Value::as_f64);
        let Some(step) = number("step") else { return };
        let row = self.rows.len() as u32;
        let before = self.rows.last().map_or(0.0, |row| row[2]);
        let rate = number("trainer/tokens_per_s").zip(number("time/forward_backward"));
        let tokens = before + rate.map_or(0.0, |(rate, seconds)| (rate * seconds).round());
        self.rows.push([step, number("time_s").unwrap_or(f64::NAN), tokens]);
        for (name, value) in line.iter().filter(|(name, _)| !["step", "time_s"].contains(&name.as_str())) {
            match value {
                Value::Number(value) => self.set(name, row, value.as_f64().unwrap_or(f64::NAN)),
                Value::Null => self.set(name, row, f64::NAN),
                _ => {}
            }
        }
    }

    fn set(&mut self, name: &str, row: u32, value: f64) {
        let index = match self.by_name.get(name) {
            Some(index) => *index,
            None if self.columns.len() < MAX_KEYS && name.len() <= MAX_NAME_BYTES => {
                self.by_name.insert(name.to_owned(), self.columns.len());
                self.columns.push(MetricColumn {
                    name: name.to_owned(),
                    rows: Vec::new(),
                    values: Vec::new(),
                });
                self.columns.len() - 1
            }
            None => {
                self.truncated = true;
                return;
            }
        };
        if self.values == MAX_VALUES {
            self.truncated = true;
            return;
        }
        self.values += 1;
        self.columns[index].rows.push(row);
        self.columns[index].values.push(value);
    }
}

/// Metrics and remarks, as `metrics.jsonl` has them.
#[derive(Debug)]
pub(crate) struct MetricsSink<'a> {
    pub(crate) table: &'a mut MetricsTable,
    pub(crate) history: &'a mut RunHistory,
}

impl LineSink for MetricsSink<'_> {
    fn restart(&mut self) {
        *self.table = MetricsTable::default();
        self.history.forget_remarks();
    }

    fn line(&mut self, line: &[u8]) {
        // What is no object was not written by rlrun.
        let Ok(line) = serde_json::from_slice::<Map<String, Value>>(line) else { return };
        self.table.add(&line);
        let step = line.get("step").and_then(Value::as_f64).unwrap_or_default();
        if let Some(remark) = line.get("bottleneck").and_then(Value::as_str) {
            self.history.remark(step, remark);
        }
        self.history.measured(step);
    }
}

fn seven_digits(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() || (value.fract() == 0.0 && value.abs() < 1e15) {
        return value;
    }
    format!("{value:.6e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(lines: &[&str]) -> MetricsTable {
        let mut table = MetricsTable::default();
        lines.iter().for_each(|line| table.add(&serde_json::from_str(line).unwrap()));
        table
    }

    const WHOLE: CurveView = CurveView { axis: CurveAxis::Step, pixels: 100, range: None };

    #[test]
    fn lines_become_columns_over_three_axes() {
        let table = table(&[
            r#"{"step":0,"time_s":0,"eval/accuracy":0.25}"#,
            r#"{"step":1,"time_s":1.5,"a":1,"trainer/tokens_per_s":100,"time/forward_backward":0.5}"#,
            r#"{"step":2,"time_s":2.5,"a":null,"trainer/tokens_per_s":10,"time/forward_backward":2,"bottleneck":"x"}"#,
            r#"{"step":2,"time_s":2.75,"eval/accuracy":0.123456789012}"#,
        ]);
        let curve = table.curve("a", WHOLE);
        assert_eq!((curve.x, curve.y), (vec![1.0, 2.0], vec![Some(1.0), None]));
        let curve = table.curve("a", CurveView { axis: CurveAxis::Tokens, ..WHOLE });
        assert_eq!(curve.x, [50.0, 70.0]);
        let curve = table.curve("eval/accuracy", CurveView { axis: CurveAxis::Time, ..WHOLE });
        assert_eq!((curve.x, curve.y), (vec![0.0, 2.75], vec![Some(0.25), Some(0.1234568)]));
        assert_eq!(table.last_values()["eval/accuracy"], 0.123456789012);
        assert_eq!(table.last_values()["a"], Value::Null);
        assert_eq!(table.last_row(), Some((2.0, 2.75)));
        assert_eq!(table.curve("none", WHOLE).len(), 0);
    }

    #[test]
    fn a_range_has_its_neighbours() {
        let lines: Vec<String> = (0..10).map(|step| format!(r#"{{"step":{step},"a":{step}}}"#)).collect();
        let table = table(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        let x = |from, to| table.curve("a", CurveView { range: Some((from, to)), ..WHOLE }).x;
        assert_eq!(x(3.0, 4.0), [2.0, 3.0, 4.0, 5.0]);
        assert_eq!(x(-5.0, 0.5), [0.0, 1.0]);
        assert_eq!(x(20.0, 30.0), [9.0]);
        assert_eq!(x(4.0, 3.0), [3.0, 4.0]);
    }

    #[test]
    fn names_have_limits() {
        let mut table = MetricsTable::default();
        for index in 0..MAX_KEYS + 5 {
            table.add(&serde_json::from_str(&format!(r#"{{"step":1,"k{index}":1}}"#)).unwrap());
        }
        assert_eq!((table.names().count(), table.truncated()), (MAX_KEYS, true));
    }
}
