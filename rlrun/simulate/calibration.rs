//! Measurements for a simulation: results of `rlrun-bench --json`, and metrics of an earlier run.
//!
//! Invariant: measurements of another model, or of another kind of device, are refused and never mixed in. Files are read up to a
//! size; lines that are no results are refused by their number.

use std::io::ErrorKind;
use std::path::Path;

use model::thread_pool::available_cores;
use serde_json::{Map, Value};
use simulator::{LatencyModel, LengthModel};

use super::hardware::{Hardware, HardwareKind};
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::recipe::words::WeightTransport;

/// Largest file, bytes.
const MAX_BYTES: u64 = 256 << 20;
/// Steps of a run that are left out at its start, beside one for each version of staleness.
const STARTING: usize = 3;
/// Share of the variance of the logarithm of lengths that prompts have, where no measurement says it.
pub(super) const SHARED: f64 = 0.5;
/// A device on which products are this much faster than the hardware file says is another one.
const FASTER: f64 = 1.15;
/// A device on which products reach less than this share of what the hardware file says is another one.
const SLOWER: f64 = 0.25;
/// 95th percentile of the standard normal distribution.
const P95: f64 = 1.645;

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration {
    /// Decode steps.
    pub decode: Vec<MeasuredDecode>,
    /// Mean context of a sequence meanwhile, tokens.
    pub decode_context: f64,
    /// Time of a prefilled token, seconds.
    pub prefill_token_s: Option<f64>,
    /// Training steps.
    pub training: Vec<MeasuredTraining>,
    /// Whether decoding or training was measured while the other side used the same cores.
    pub contended: bool,
    /// Share of the tokens of a batch that is trained: groups without variance are left out.
    pub trained_share: Option<f64>,
    /// Mean length of prompts, tokens.
    pub prompt_tokens: Option<f64>,
    /// Lengths of completions.
    pub lengths: Option<LengthModel>,
    /// Time of a reward.
    pub reward: Option<LatencyModel>,
    /// Time to publish weights by a transport, seconds.
    pub publish_s: Option<(WeightTransport, f64)>,
    /// Time that decoding stops for new weights, seconds.
    pub stall_s: Option<f64>,
    /// Time that a step waits for a checkpoint, seconds.
    pub checkpoint_s: Option<f64>,
    /// Time between steps, in which logs are written, seconds.
    pub logs_s: f64,
    /// Time of a commit of the journal, seconds: groups can be leased after one, and a lease is handed out after one.
    pub commit_s: f64,
    /// A training step that no sampler slowed: the mean of a synchronous run.
    pub synchronous: Option<MeasuredTraining>,
    /// What was read.
    pub sources: Vec<String>,
}

/// A decode step that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredDecode {
    /// Threads that it could use.
    pub threads: usize,
    /// Sequences that decode together.
    pub sequences: f64,
    /// Seconds of the step.
    pub seconds: f64,
}

/// A training step that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredTraining {
    /// Threads that it could use.
    pub threads: usize,
    /// Sequences.
    pub sequences: f64,
    /// Tokens of each.
    pub length: f64,
    /// Seconds of the step, optimizer included.
    pub seconds: f64,
}

impl Calibration {
    /// Adds the results in the file, or the metrics of the run directory, at `path`.
    ///
    /// # Errors
    /// A path that is neither, and measurements that are not of the model of `recipe` (its shape is `config`) on `hardware`.
    pub fn read(
        &mut self,
        path: &Path,
        recipe: &Recipe,
        config: &model::Config,
        hardware: &Hardware,
    ) -> Result<(), Failure> {
        self.sources.push(path.display().to_string());
        if path.is_dir() {
            return self.read_run(path, recipe);
        }
        let text = read_limited(path)?;
        let expected =
            Expected { path, recipe, parameters: model::Layout::new(config).len() as f64, hardware };
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
            let row: Map<String, Value> = serde_json::from_str(line).map_err(|error| {
                Failure::Argument(format!(
                    "line {number} of {} is no result of `rlrun-bench --json` ({error}); name a file with one object per line",
                    path.display()
                ))
            })?;
            self.add(&row, &expected)?;
        }
        Ok(())
    }

    fn add(&mut self, row: &Map<String, Value>, expected: &Expected<'_>) -> Result<(), Failure> {
        let measure = row.get("measure").and_then(Value::as_str).unwrap_or_default();
        if !["generate", "train", "loop"].contains(&measure) {
            return Ok(());
        }
        expected.check(row)?;
        let number = |name: &str| {
            row.get(name).and_then(Value::as_f64).filter(|value| value.is_finite() && *value > 0.0)
        };
        let threads = number("threads").map_or_else(available_cores, |threads| threads as usize);
        match measure {
            "generate" => {
                let prefilled = number("prefill_tokens_per_s").map(|speed| 1.0 / speed);
                self.prefill_token_s = prefilled.or(self.prefill_token_s);
                if let (Some(batch), Some(ms)) = (number("batch"), number("decode_ms")) {
                    let context = number("prompt").unwrap_or(0.0) + number("new").unwrap_or(0.0) / 2.0;
                    // The mean over the points.
                    let points = self.decode.len() as f64;
                    self.decode_context = (self.decode_context * points + context) / (points + 1.0);
                    self.decode.push(MeasuredDecode { threads, sequences: batch, seconds: ms / 1e3 });
                }
            }
            "train" => {
                let step = (number("sequences"), number("length"), number("seconds"));
                if let (Some(sequences), Some(length), Some(seconds)) = step {
                    self.training.push(MeasuredTraining { threads, sequences, length, seconds });
                }
            }
            _ => {
                if let (None, Some(mean)) = (&self.lengths, number("mean_length")) {
                    let cap = expected.recipe.rollout.max_completion_length as f64;
                    let forced = row.get("forced") == Some(&Value::Bool(true));
                    let sigma = if forced { 0.0 } else { 0.6 };
                    self.lengths = Some(LengthModel::with_mean(mean, cap, sigma, SHARED));
                }
            }
        }
        Ok(())
    }

    /// Mean length of prompts, tokens; half of the longest if none was measured.
    pub(super) fn prompt_tokens(&self, recipe: &Recipe) -> f64 {
        self.prompt_tokens.unwrap_or(recipe.data.max_prompt_length as f64 / 2.0)
    }

    /// Decode steps on `threads` threads, or on the most of all if it is `None`: sequences that decode together, and seconds.
    pub(super) fn decode_on(&self, threads: Option<usize>) -> Vec<(f64, f64)> {
        let most = self.decode.iter().map(|step| step.threads).max().unwrap_or_default();
        let steps = self.decode.iter().filter(|step| step.threads == threads.unwrap_or(most));
        steps.map(|step| (step.sequences, step.seconds)).collect()
    }

    /// Training steps on `threads` threads, or on the most of all if it is `None`.
    pub(super) fn training_on(&self, threads: Option<usize>) -> Vec<MeasuredTraining> {
        let most = self.training.iter().map(|step| step.threads).max().unwrap_or_default();
        self.training.iter().filter(|step| step.threads == threads.unwrap_or(most)).copied().collect()
    }

    /// The steps of a run: lengths, rewards, weights; decoding and training where no benchmark has measured them.
    fn read_run(&mut self, run: &Path, recipe: &Recipe) -> Result<(), Failure> {
        let resolved = checked_run(run, recipe)?;
        let path = run.join("metrics.jsonl");
        if !path.is_file() {
            let what = format!("`{}` is no run with metrics: it has no `metrics.jsonl`", run.display());
            return Err(Failure::NotThere(what));
        }
        let text = read_limited(&path)?;
        // A last line of a run in progress may not be whole.
        let rows = text.lines().filter_map(|line| serde_json::from_str::<Map<String, Value>>(line).ok());
        let steps: Vec<Map<String, Value>> = rows.filter(|row| row.contains_key("reward/mean")).collect();
        let starting = (STARTING + recipe.buffer.max_staleness as usize).min(steps.len() / 2);
        let steps = &steps[starting..];
        let mean = |name: &str| {
            let values: Vec<f64> = steps.iter().filter_map(|step| step.get(name)?.as_f64()).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        let (Some(length), Some(longest)) = (mean("completions/mean_length"), mean("completions/max_length"))
        else {
            let what = format!(
                "`{}` has no finished step to calibrate with; let it train a few steps first",
                run.display()
            );
            return Err(Failure::Argument(what));
        };
        let completions = (recipe.buffer.batch_groups * recipe.rollout.group_size) as f64;
        let cap = recipe.rollout.max_completion_length as f64;
        self.lengths =
            Some(LengthModel::from_longest([length.max(1.0), longest.max(1.0), cap], completions, SHARED));
        let trained = |step: &Map<String, Value>| {
            let [speed, seconds, mean] =
                ["trainer/tokens_per_s", "time/forward_backward", "completions/mean_length"]
                    .map(|name| step.get(name).and_then(Value::as_f64));
            Some([speed? * seconds?, recipe.trainer.epochs as f64 * completions * mean?])
        };
        let [trained, sampled] =
            steps.iter().filter_map(trained).fold([0.0; 2], |[a, b], [c, d]| [a + c, b + d]);
        let trained_share = if trained > 0.0 && sampled > 0.0 { (trained / sampled).min(1.0) } else { 1.0 };
        self.trained_share = Some(trained_share);
        self.prompt_tokens = mean("prompts/mean_length");
        self.publish_s = mean("time/weight_sync").map(|seconds| (recipe.weights.transport, seconds));
        self.stall_s = mean("time/decode_stall");
        let saves = steps.iter().filter_map(|step| step.get("time/save_ckpt")?.as_f64());
        self.checkpoint_s = saves.fold(None, |most: Option<f64>, value| Some(most.unwrap_or(0.0).max(value)));
        self.reward = slowest_reward(steps).or(self.reward);
        self.logs_s = time_between(steps);
        self.commit_s = mean_commit(run).unwrap_or(self.commit_s);
        if let Some(seconds) = mean("time/forward_backward").filter(|seconds| *seconds > 0.0) {
            let length = length + self.prompt_tokens(recipe);
            let (threads, sequences) = (available_cores(), completions * trained_share);
            let step = MeasuredTraining { threads, sequences, length, seconds };
            let alone = trains_alone(&resolved) && !recipe.needs_reference();
            self.synchronous = Some(step).filter(|_| alone).or(self.synchronous);
            if self.training.is_empty() {
                self.training.push(step);
                self.contended = true;
            }
        }
        if self.decode.is_empty()
            && let Some(speed) = mean("rollout/tokens_per_s").filter(|speed| *speed > 0.0)
        {
            let slots = completions * (recipe.buffer.max_staleness + 1) as f64;
            let running = slots.min(recipe.rollout.max_running as f64);
            self.decode_context = length / 2.0;
            let (threads, seconds) = (available_cores(), running / speed);
            self.decode.push(MeasuredDecode { threads, sequences: running, seconds });
            self.contended = true;
        }
        Ok(())
    }
}

/// What results have to be of.
struct Expected<'a> {
    path: &'a Path,
    recipe: &'a Recipe,
    parameters: f64,
    hardware: &'a Hardware,
}

impl Expected<'_> {
    fn check(&self, row: &Map<String, Value>) -> Result<(), Failure> {
        let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default();
        let measured = row.get("parameters").and_then(Value::as_f64).unwrap_or(0.0);
        let refuse = |found: String| {
            let model = match &self.recipe.model {
                crate::recipe::Model::Path(path) => path.display().to_string(),
                crate::recipe::Model::Random(_) => self.recipe.name.clone(),
            };
            Err(Failure::Argument(format!(
                "not calibrated for `{model}` ({} parameters) on {}: {} measured {found}; measure it there with \
                 `rlrun-bench generate --model DIR --sweep --json` and `rlrun-bench train --model DIR --json`",
                self.parameters,
                self.hardware.name,
                self.path.display()
            )))
        };
        if measured != self.parameters {
            return refuse(format!("`{}` ({measured} parameters)", text("model")));
        }
        let device = text("device");
        if (device.is_empty() || device == "cpu") != (self.hardware.kind == HardwareKind::Cpu) {
            let device = if device.is_empty() { "the processor" } else { device };
            return refuse(format!("on {device}"));
        }
        let reached = row.get("peak_gflops").and_then(Value::as_f64).unwrap_or(0.0) * 1e9;
        let limit = self.hardware.flops_per_s.value;
        let is_gpu = self.hardware.kind == HardwareKind::Gpu && reached > 0.0 && text("dtype") != "f32";
        if is_gpu && !(SLOWER * limit..=FASTER * limit).contains(&reached) {
            return refuse(format!(
                "where products reach {:.0} TFLOP/s of {:.0}",
                reached / 1e12,
                limit / 1e12
            ));
        }
        Ok(())
    }
}

/// The recipe of a run, which is refused if it is of another model or device.
fn checked_run(run: &Path, recipe: &Recipe) -> Result<toml::Table, Failure> {
    let path = run.join("resolved.toml");
    let Ok(text) = read_limited(&path) else {
        let what = format!("`{}` is no run directory: it has no `resolved.toml`", run.display());
        return Err(Failure::NotThere(what));
    };
    let resolved: toml::Table = text.parse().map_err(|error| {
        Failure::Argument(format!(
            "{} is no recipe ({error}); name a run directory as it was written",
            path.display()
        ))
    })?;
    let own = recipe.values();
    for (section, key) in [("model", "path"), ("model", "random"), ("placement", "device")] {
        let theirs = resolved.get(section).and_then(|table| table.get(key));
        let theirs = theirs.map(|value| serde_json::to_value(value).unwrap_or(Value::Null));
        let ours = own.get(section).and_then(|table| table.get(key)).cloned();
        if theirs != ours {
            let shown = |value: Option<Value>| value.map_or("no value".to_owned(), |value| value.to_string());
            return Err(Failure::Argument(format!(
                "not calibrated for this recipe: `{}` ran with `{section}.{key}` {}, and the recipe has {}; name a run of the same \
                 model on the same kind of device",
                run.display(),
                shown(theirs),
                shown(ours)
            )));
        }
    }
    Ok(resolved)
}

/// Whether a training step of a run is one forward and backward pass on all cores: the sampler waits for it, and nothing is computed again.
fn trains_alone(resolved: &toml::Table) -> bool {
    let is = |section: &str, key: &str, value: toml::Value| {
        resolved.get(section).and_then(|table| table.get(key)) == Some(&value)
    };
    is("buffer", "max_staleness", 0.into())
        && is("trainer", "world", 1.into())
        && is("trainer", "epochs", 1.into())
        && is("trainer", "recompute", "none".into())
        && is("placement", "processes", false.into())
}

/// Mean time from the end of a step to the begin of the next one, seconds; 0 without two steps in a row.
fn time_between(steps: &[Map<String, Value>]) -> f64 {
    let number = |step: &Map<String, Value>, name: &str| step.get(name)?.as_f64();
    let times = steps.windows(2).filter_map(|pair| {
        let in_a_row = number(&pair[1], "step")? - number(&pair[0], "step")? == 1.0;
        let between =
            number(&pair[1], "time_s")? - number(&pair[0], "time_s")? - number(&pair[1], "time/step")?;
        in_a_row.then_some(between.max(0.0))
    });
    let times: Vec<f64> = times.collect();
    times.iter().sum::<f64>() / times.len().max(1) as f64
}

/// Mean time of a commit in the timeline of a run, seconds.
fn mean_commit(run: &Path) -> Option<f64> {
    let text = read_limited(&run.join("timeline.jsonl")).ok()?;
    let spans = text.lines().filter(|line| line.contains("\"kind\":\"commit\"")).filter_map(|line| {
        let span: Map<String, Value> = serde_json::from_str(line).ok()?;
        Some(span.get("end")?.as_f64()? - span.get("start")?.as_f64()?)
    });
    let (sum, count) =
        spans.fold((0.0, 0.0), |(sum, count), seconds: f64| (sum + seconds.max(0.0), count + 1.0));
    (count > 0.0).then(|| sum / count)
}

/// The reward that takes longest, by its 95th percentile.
fn slowest_reward(steps: &[Map<String, Value>]) -> Option<LatencyModel> {
    let names = steps.first()?.keys().filter_map(|key| key.strip_suffix("/latency_p95_s"));
    let mean = |key: String| {
        let values: Vec<f64> = steps.iter().filter_map(|step| step.get(&key)?.as_f64()).collect();
        values.iter().sum::<f64>() / values.len().max(1) as f64
    };
    let of = |name: &str| {
        let [median, high] = ["p50", "p95"].map(|share| mean(format!("{name}/latency_{share}_s")).max(0.0));
        let longest = steps
            .iter()
            .filter_map(|step| step.get(&format!("{name}/latency_max_s"))?.as_f64())
            .fold(high, f64::max);
        let sigma = if median > 0.0 { ((high / median).ln() / P95).max(0.0) } else { 0.0 };
        LatencyModel { median_s: median, sigma, longest_s: longest }
    };
    names.map(of).max_by(|a, b| a.longest_s.total_cmp(&b.longest_s))
}

/// The text of a regular file of at most [`MAX_BYTES`].
fn read_limited(path: &Path) -> Result<String, Failure> {
    model::files::read_text(path, MAX_BYTES).map_err(|source| match source.kind() {
        ErrorKind::FileTooLarge | ErrorKind::InvalidData | ErrorKind::InvalidInput => {
            let what = format!("{} cannot be a calibration: {source}; name another file", path.display());
            Failure::Argument(what)
        }
        _ => Failure::System { what: format!("read {}", path.display()), source },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::program::Program;

    const TEXT: &str = "[model.random]\n[data.arithmetic]\n[buffer]\nbatch_groups = 2\nmax_staleness = 0\n[rollout]\n\
                        group_size = 4\n[[rewards]]\nkind = \"exact\"\n[trainer]\nsteps = 8\n";

    /// A run in which a third of the tokens is trained has the time of a token, and its steps a third of the tokens.
    #[test]
    fn a_run_says_which_share_of_a_batch_is_trained() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.toml");
        std::fs::write(&path, TEXT).unwrap();
        let (recipe, origins) = Recipe::load(&path, &[], &Program::default()).unwrap();
        let run = directory.path().join("run");
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("resolved.toml"), recipe.resolved_toml(&origins)).unwrap();
        // 8 completions of 30 tokens, of which 80 are trained in 2 s.
        let step = |number: u32| {
            json!({
            "step": number, "time_s": 2.75 * f64::from(number), "time/step": 2.5, "reward/mean": 0.5, "prompts/mean_length": 5.0, "completions/mean_length": 30.0,
            "completions/max_length": 40.0,
            "trainer/tokens_per_s": 40.0, "time/forward_backward": 2.0,
            })
        };
        let lines: String = (1..=8).map(|number| format!("{}\n", step(number))).collect();
        std::fs::write(run.join("metrics.jsonl"), lines).unwrap();
        let commits = "{\"lane\":\"journal\",\"kind\":\"commit\",\"start\":1.0,\"end\":1.5}\n{\"lane\":\"trainer\",\"start\":1.0}\n";
        std::fs::write(run.join("timeline.jsonl"), commits).unwrap();
        let mut calibration = Calibration::default();
        calibration.read_run(&run, &recipe).unwrap();
        assert!((calibration.trained_share.unwrap() - 1.0 / 3.0).abs() < 1e-12, "{calibration:?}");
        let [measured] = calibration.training[..] else { panic!("{calibration:?}") };
        assert_eq!((measured.sequences, measured.length, measured.seconds), (8.0 / 3.0, 35.0, 2.0));
        assert_eq!((calibration.logs_s, calibration.commit_s), (0.25, 0.5));
        assert_eq!(calibration.synchronous, Some(measured));
        let asynchronous = recipe.resolved_toml(&origins).replace("max_staleness = 0", "max_staleness = 1");
        std::fs::write(run.join("resolved.toml"), asynchronous).unwrap();
        calibration.read_run(&run, &recipe).unwrap();
        assert_eq!(calibration.synchronous, Some(measured), "that of the earlier run");
        let mut other = Calibration::default();
        other.read_run(&run, &recipe).unwrap();
        assert_eq!(other.synchronous, None, "the sampler has the same cores");
    }
}
