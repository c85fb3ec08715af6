//! The curve of a metric over compute, from the metrics file of a run.
//!
//! A metric of the training batch, such as `reward/mean`, is that of the policy the batch was sampled with, so that it
//! stands at the compute before its step (with asynchronous sampling up to `max_staleness` steps earlier still). A
//! metric under `eval/` is that of the policy after the step.
//!
//! Invariant: read-only, and a curve's points ascend in compute. A run in progress can be read: a last line that is not
//! whole yet is left out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::sigmoid::{MIN_POINTS, Point};
use crate::failure::Failure;

/// Name of the choice of compute that counts trained tokens, which no single metric does.
const TOKENS: &str = "tokens";

/// The metrics of a run.
#[derive(Debug)]
pub(super) struct Measured {
    run: PathBuf,
    lines: Vec<Map<String, Value>>,
}

/// The points of one run.
#[derive(Debug)]
pub(super) struct Curve {
    /// The run directory as it was named.
    pub(super) run: String,
    /// The fitted points.
    pub(super) points: Vec<Point>,
    /// The points after the end of the fitted part.
    pub(super) held_out: Vec<Point>,
    /// Whether one of `points` is from before training.
    pub(super) has_start: bool,
}

/// Which part of a curve is fitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// Least compute of a point; the point from before training is exempt.
    pub(super) skip: f64,
    /// Greatest compute of a point.
    pub(super) until: f64,
}

impl Measured {
    /// Reads the metrics of the run in `run`.
    pub(super) fn read(run: &Path) -> Result<Self, Failure> {
        let path = run.join("metrics.jsonl");
        if !path.is_file() {
            let message = format!("`{}` is no run with metrics: it has no `metrics.jsonl`", run.display());
            return Err(Failure::NotThere(message));
        }
        let text = std::fs::read_to_string(&path)
            .map_err(|source| Failure::System { what: format!("read {}", path.display()), source })?;
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut lines = Vec::new();
        for (index, line) in whole.lines().enumerate() {
            lines.push(serde_json::from_str(line).map_err(|error| {
                let place = format!("{}:{}", path.display(), index + 1);
                Failure::Argument(format!("{place} is no line of metrics: {error}; mend or remove that line"))
            })?);
        }
        Ok(Self { run: run.to_path_buf(), lines })
    }

    /// Whether every step says how many tokens it trained on.
    pub(super) fn counts_tokens(&self) -> bool {
        self.tokens().is_ok_and(|tokens| tokens.last().is_some_and(|total| *total > 0.0))
    }

    /// The curve of `metric` over `compute`.
    pub(super) fn curve(&self, metric: &str, compute: &str, window: Window) -> Result<Curve, Failure> {
        let compute_by_line = self.compute(compute)?;
        let after = metric.starts_with("eval/");
        let mut points = Vec::new();
        for (index, line) in self.lines.iter().enumerate() {
            let before = index.checked_sub(1).map_or(0.0, |last| compute_by_line[last]);
            let compute = if after { compute_by_line[index] } else { before };
            // While the buffer fills, batches hold the shortest completions, whose rewards are no point of the curve.
            let biased = metric.starts_with("reward/") && number(line, "buffer/filling") == Some(1.0);
            if let Some(value) = number(line, metric).filter(|_| !biased) {
                points.push(Point { compute, value });
            }
        }
        if points.is_empty() {
            return Err(self.unknown(metric));
        }
        let (points, held_out): (Vec<Point>, _) =
            points.into_iter().partition(|point| point.compute <= window.until);
        let all = points.len();
        let points: Vec<Point> =
            points.into_iter().filter(|p| p.compute == 0.0 || p.compute >= window.skip).collect();
        if points.len() < MIN_POINTS {
            let left_out = all - points.len() + held_out.len();
            return Err(Failure::Argument(format!(
                "`{}` has {} points of {metric} to fit ({left_out} more are left out); a fit takes at least {MIN_POINTS}: \
                 train longer, measure more often (`eval.interval`), or fit a metric that every step has (`--metric \
                 reward/mean`)",
                self.run.display(),
                points.len()
            )));
        }
        let has_start = points[0].compute == 0.0;
        Ok(Curve { run: self.run.display().to_string(), points, held_out, has_start })
    }

    /// Compute after each line.
    fn compute(&self, name: &str) -> Result<Vec<f64>, Failure> {
        if name == TOKENS {
            return self.tokens();
        }
        let refused = |line: usize, why: &str| {
            let place = self.run.join("metrics.jsonl").display().to_string();
            Failure::Argument(format!(
                "{name} is no measure of compute: in {place}:{line} {why}; there are tokens, step and time_s"
            ))
        };
        let mut out: Vec<f64> = Vec::with_capacity(self.lines.len());
        for (index, line) in self.lines.iter().enumerate() {
            // Counters that begin with the first step are 0 before it.
            let initial = (index == 0 && number(line, "step") == Some(0.0)).then_some(0.0);
            let value = number(line, name).or(initial).ok_or_else(|| refused(index + 1, "it is missing"))?;
            if value < out.last().copied().unwrap_or(0.0) {
                return Err(refused(index + 1, "it falls"));
            }
            out.push(value);
        }
        Ok(out)
    }

    /// Trained tokens after each line: those per second of forward and backward, times the seconds.
    fn tokens(&self) -> Result<Vec<f64>, Failure> {
        let mut total = 0.0;
        let counted = self.lines.iter().map(|line| {
            let step = number(line, "trainer/tokens_per_s").zip(number(line, "time/forward_backward"));
            let initial = (number(line, "step") == Some(0.0)).then_some(0.0);
            total += step.map(|(rate, seconds)| (rate * seconds).round()).or(initial)?;
            Some(total)
        });
        counted.collect::<Option<_>>().ok_or_else(|| {
            let run = self.run.display();
            Failure::Argument(format!(
                "the metrics of `{run}` do not count tokens; take `--compute step` or time_s"
            ))
        })
    }

    fn unknown(&self, metric: &str) -> Failure {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, _) in self.lines.iter().flatten().filter(|(_, value)| value.is_number()) {
            *counts.entry(name).or_default() += 1;
        }
        let known: Vec<&str> =
            counts.into_iter().filter(|(_, count)| *count >= MIN_POINTS).map(|(name, _)| name).collect();
        let known = if known.is_empty() { format!("none has {MIN_POINTS} points") } else { known.join(", ") };
        let run = self.run.display();
        Failure::Argument(format!(
            "`{run}` has no metric {metric}; with enough points to fit there are: {known}"
        ))
    }
}

fn number(line: &Map<String, Value>, name: &str) -> Option<f64> {
    line.get(name).and_then(Value::as_f64).filter(|value| value.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Window = Window { skip: 0.0, until: f64::INFINITY };

    fn measured(lines: &[&str]) -> Measured {
        let lines = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        Measured { run: PathBuf::from("r"), lines }
    }

    fn steps() -> Measured {
        let mut lines = vec![r#"{"step":0,"time_s":0,"eval/accuracy":0.1}"#.to_owned()];
        for n in 1..=10 {
            lines.push(format!(
                r#"{{"step":{n},"time_s":{n}.5,"reward/mean":0.{n:02},"eval/accuracy":0.{n:02},"trainer/tokens_per_s":200,
                   "time/forward_backward":0.5,"optim/lr":{}}}"#,
                11 - n
            ));
        }
        measured(&lines.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn computes(points: &[Point]) -> Vec<f64> {
        points.iter().map(|point| point.compute).collect()
    }

    #[test]
    fn an_evaluation_stands_after_its_step_and_a_batch_before_it() {
        let run = steps();
        assert!(run.counts_tokens());
        let eval = run.curve("eval/accuracy", "tokens", ALL).unwrap();
        assert!(eval.has_start);
        assert_eq!(computes(&eval.points)[..3], [0.0, 100.0, 200.0]);
        let reward = run.curve("reward/mean", "tokens", ALL).unwrap();
        assert_eq!(computes(&reward.points), computes(&eval.points)[..10]);
        assert_eq!(reward.points[0], Point { compute: 0.0, value: 0.01 });
        assert_eq!(computes(&run.curve("eval/accuracy", "time_s", ALL).unwrap().points)[..2], [0.0, 1.5]);
    }

    #[test]
    fn rewards_while_the_buffer_fills_are_left_out() {
        let mut run = steps();
        run.lines[1].insert("buffer/filling".to_owned(), 1.into());
        let first = |metric: &str| run.curve(metric, "step", ALL).unwrap().points[0].value;
        assert_eq!((first("reward/mean"), first("eval/accuracy")), (0.02, 0.1));
    }

    #[test]
    fn a_window_keeps_the_start_and_holds_out_the_end() {
        let curve = steps().curve("eval/accuracy", "step", Window { skip: 2.0, until: 8.0 }).unwrap();
        assert_eq!(computes(&curve.points), [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(computes(&curve.held_out), [9.0, 10.0]);
        let error = steps().curve("eval/accuracy", "step", Window { skip: 3.0, until: 8.0 }).unwrap_err();
        assert!(
            error.to_string().contains("has 7 points of eval/accuracy to fit (4 more are left out)"),
            "{error}"
        );
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn unknown_metrics_list_the_known_ones() {
        let text = |metric: &str, compute: &str| steps().curve(metric, compute, ALL).unwrap_err().to_string();
        assert_eq!(
            text("eval/acc", "step"),
            "`r` has no metric eval/acc; with enough points to fit there are: eval/accuracy, optim/lr, reward/mean, step, \
             time/forward_backward, time_s, trainer/tokens_per_s"
        );
        assert!(text("eval/accuracy", "optim/lr").contains("metrics.jsonl:3 it falls"));
        assert!(text("eval/accuracy", "flops").contains("metrics.jsonl:2 it is missing"));
        let bare = measured(&[r#"{"step":1,"reward/mean":0.5}"#]);
        assert!(!bare.counts_tokens());
        let error = bare.curve("reward/mean", "tokens", ALL).unwrap_err().to_string();
        assert_eq!(error, "the metrics of `r` do not count tokens; take `--compute step` or time_s");
    }

    #[test]
    fn a_run_in_progress_is_read_and_a_broken_line_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\n{\"st").unwrap();
        assert_eq!(Measured::read(directory.path()).unwrap().lines.len(), 1);
        std::fs::write(&path, "{\"step\":1}\n{\"st\n{\"step\":3}\n").unwrap();
        let error = Measured::read(directory.path()).unwrap_err();
        assert!(error.to_string().contains("metrics.jsonl:2 is no line of metrics"), "{error}");
        let error = Measured::read(&directory.path().join("none")).unwrap_err();
        assert!(error.to_string().ends_with("is no run with metrics: it has no `metrics.jsonl`"), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
}
