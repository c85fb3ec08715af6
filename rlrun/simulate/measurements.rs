//! Measurements for a simulation: results of `rlrun-bench --json`, and metrics of an earlier run.
//!
//! Invariant: measurements of another model, or of another kind of device, are refused and never mixed in. Files are read up to a
//! size; lines that are no results are refused by their number.

use std::io::ErrorKind;
use std::path::Path;

use model::thread_pool::available_cores;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::calibration::{MeasuredDecode, MeasuredTraining};
use super::hardware::{Hardware, HardwareKind};
use super::measured_run::{MeasuredRun, RecipeValues};
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::recipe::words::ModelDtype;

/// Largest file, bytes.
const MAX_BYTES: u64 = 256 << 20;
/// A device on which products are this much faster than the hardware file says is another one.
const FASTER: f64 = 1.15;
/// A device on which products reach less than this share of what the hardware file says is another one.
const SLOWER: f64 = 0.25;

/// Measurements in the files that were named.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measurements {
    /// Decode steps and training steps alone.
    pub benchmarks: BenchmarkResults,
    /// Runs, in the order in which they were read.
    runs: Vec<MeasuredRun>,
    /// Loops of benchmarks, in the same order.
    loops: Vec<MeasuredRun>,
}

/// Benchmarks of the parts of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BenchmarkResults {
    /// Decode steps.
    pub decode: Vec<MeasuredDecode>,
    /// Mean context of a sequence meanwhile, tokens.
    pub decode_context: f64,
    /// Time of a prefilled token, seconds.
    pub prefill_token_s: Option<f64>,
    /// Training steps.
    pub training: Vec<MeasuredTraining>,
}

impl Measurements {
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
        if path.is_dir() {
            return self.read_run(path, recipe, hardware);
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
            self.add(&row, number, &expected)?;
        }
        Ok(())
    }

    /// Adds the result in line `line`.
    fn add(&mut self, row: &Map<String, Value>, line: usize, expected: &Expected<'_>) -> Result<(), Failure> {
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
                let parts = &mut self.benchmarks;
                parts.prefill_token_s = prefilled.or(parts.prefill_token_s);
                if let (Some(batch), Some(ms)) = (number("batch"), number("decode_ms")) {
                    let context = number("prompt").unwrap_or(0.0) + number("new").unwrap_or(0.0) / 2.0;
                    // The mean over the points.
                    let points = parts.decode.len() as f64;
                    parts.decode_context = (parts.decode_context * points + context) / (points + 1.0);
                    parts.decode.push(MeasuredDecode { threads, sequences: batch, seconds: ms / 1e3 });
                }
            }
            "train" => {
                let step = (number("sequences"), number("length"), number("seconds"));
                if let (Some(sequences), Some(length), Some(seconds)) = step {
                    let is_of_run = false;
                    self.benchmarks.training.push(MeasuredTraining {
                        threads,
                        sequences,
                        length,
                        seconds,
                        is_of_run,
                    });
                }
            }
            _ => {
                let Some(run) = row.get("run") else { return Ok(()) };
                let run = MeasuredRun::deserialize(run).map_err(|error| error.to_string());
                let run = run.and_then(MeasuredRun::checked).map_err(|reason| {
                    let path = expected.path.display();
                    Failure::Argument(format!(
                        "line {line} of {path} has no measurements of a loop ({reason}); measure it again with `rlrun-bench loop --json`"
                    ))
                })?;
                self.loops.push(run.of_one_rank(expected.hardware.kind));
            }
        }
        Ok(())
    }

    /// The value of the last run that gives one, or of the last loop.
    pub(super) fn last<T>(&self, of: impl Fn(&MeasuredRun) -> Option<T>) -> Option<T> {
        self.runs.iter().rev().chain(self.loops.iter().rev()).find_map(of)
    }

    /// The steps of the run in this directory.
    fn read_run(&mut self, run: &Path, recipe: &Recipe, hardware: &Hardware) -> Result<(), Failure> {
        let values = checked_run(run, recipe, hardware)?;
        let path = run.join("metrics.jsonl");
        if !path.is_file() {
            let what = format!("`{}` is no run with metrics: it has no `metrics.jsonl`", run.display());
            return Err(Failure::NotThere(what));
        }
        // A run with `log.timeline = 0` has none.
        let timeline = read_limited(&run.join("timeline.jsonl")).unwrap_or_default();
        let measured = MeasuredRun::of(&values, &read_limited(&path)?, &timeline);
        let measured = measured.map_err(|reason| {
            let run = run.display();
            Failure::Argument(format!(
                "`{run}` {reason}; let it train a few steps first, or name another run"
            ))
        })?;
        self.runs.push(measured.of_one_rank(hardware.kind));
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
        let is_f32 = text("dtype") == "f32";
        if self.hardware.kind == HardwareKind::Gpu && is_f32 != (self.recipe.dtype == ModelDtype::F32) {
            return refuse(format!("in `{}`, and not in the number format of the recipe", text("dtype")));
        }
        let reached = row.get("peak_gflops").and_then(Value::as_f64).unwrap_or(0.0) * 1e9;
        let limit = self.hardware.flops_per_s.value;
        let is_gpu = self.hardware.kind == HardwareKind::Gpu && reached > 0.0 && !is_f32;
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

/// The recipe of a run, which is refused if it is of another model, or of a device that is not of the kind of `hardware`.
fn checked_run(run: &Path, recipe: &Recipe, hardware: &Hardware) -> Result<RecipeValues, Failure> {
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
    let resolved = match serde_json::to_value(resolved) {
        Ok(Value::Object(values)) => values,
        // A table of TOML is an object of JSON.
        _ => RecipeValues::new(),
    };
    let own = recipe.values();
    for (section, key) in [("model", "path"), ("model", "random"), ("placement", "device")] {
        let theirs = resolved.get(section).and_then(|table| table.get(key)).cloned();
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
    let on_gpus = computes_on_gpus(&resolved);
    if on_gpus != (hardware.kind == HardwareKind::Gpu) {
        return Err(Failure::Argument(format!(
            "not calibrated for {}: `{}` ran on {}; name the hardware that it ran on with `--hardware`, or another run",
            hardware.name,
            run.display(),
            if on_gpus { "GPUs" } else { "the processor" }
        )));
    }
    Ok(resolved)
}

/// Whether a role of a recipe with these `values` is on a GPU.
fn computes_on_gpus(values: &RecipeValues) -> bool {
    let Some(placement) = values.get("placement") else { return false };
    let names_gpu = |device: &Value| device.as_str().is_some_and(|name| name.starts_with("cuda"));
    ["device", "trainer_device", "trainer_devices", "rollout_device", "rollout_devices"]
        .into_iter()
        .filter_map(|key| placement.get(key))
        .any(|given| given.as_array().map_or_else(|| names_gpu(given), |list| list.iter().any(names_gpu)))
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
    use crate::recipe::Origins;
    use crate::simulate::calibration::Calibration;
    use crate::simulate::contention::MeasuredSampling;

    const TEXT: &str = "[model.random]\n[data.arithmetic]\n[buffer]\nbatch_groups = 2\nmax_staleness = 0\n[rollout]\n\
                        group_size = 4\n[[rewards]]\nkind = \"exact\"\n[trainer]\nsteps = 8\n";

    /// A directory that holds the recipe `TEXT`, and that recipe.
    fn loaded() -> (tempfile::TempDir, Recipe, Origins) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.toml");
        std::fs::write(&path, TEXT).unwrap();
        let (recipe, origins) = Recipe::load(&path, &[], &Program::default()).unwrap();
        (directory, recipe, origins)
    }

    fn calibrated(measurements: &Measurements, recipe: &Recipe) -> Calibration {
        Calibration::of(measurements, recipe, &crate::simulate::shape(recipe).unwrap())
    }

    /// A run in which a third of the tokens is trained has the time of a token, and its steps a third of the tokens.
    #[test]
    fn a_run_says_which_share_of_a_batch_is_trained() {
        let (directory, recipe, origins) = loaded();
        let run = directory.path().join("run");
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("resolved.toml"), recipe.resolved_toml(&origins)).unwrap();
        // 8 completions of 30 tokens, of which 80 are trained in 2 s.
        let step = |number: u32| {
            json!({
            "step": number, "time_s": 2.75 * f64::from(number), "time/step": 2.5, "reward/mean": 0.5, "prompts/mean_length": 5.0, "completions/mean_length": 30.0,
            "completions/max_length": 40.0,
            "trainer/tokens_per_s": 40.0, "time/forward_backward": 2.0, "rollout/tokens_per_s": 50.0,
            })
        };
        let lines: String = (1..=8).map(|number| format!("{}\n", step(number))).collect();
        std::fs::write(run.join("metrics.jsonl"), lines).unwrap();
        let commits = "{\"lane\":\"journal\",\"kind\":\"commit\",\"start\":1.0,\"end\":1.5}\n{\"lane\":\"trainer\",\"start\":1.0}\n";
        std::fs::write(run.join("timeline.jsonl"), commits).unwrap();
        let hardware = Hardware::open("cpu").unwrap();
        let mut measurements = Measurements::default();
        measurements.read_run(&run, &recipe, &hardware).unwrap();
        let calibration = calibrated(&measurements, &recipe);
        assert!((calibration.trained_share.unwrap() - 1.0 / 3.0).abs() < 1e-12, "{calibration:?}");
        let [measured] = calibration.parts.training[..] else { panic!("{calibration:?}") };
        assert_eq!((measured.sequences, measured.length, measured.seconds), (8.0 / 3.0, 35.0, 2.0));
        assert_eq!((calibration.logs_s, calibration.commit_s), (0.25, 0.5));
        assert_eq!(calibration.synchronous, Some(measured));
        let max_running = recipe.rollout.max_running;
        let sampled = MeasuredSampling { batch: [2, 4], max_staleness: 0, max_running, token_s: 0.02 };
        assert_eq!(calibration.synchronous_sampling, Some(sampled));
        let asynchronous = recipe.resolved_toml(&origins).replace("max_staleness = 0", "max_staleness = 1");
        std::fs::write(run.join("resolved.toml"), asynchronous).unwrap();
        measurements.read_run(&run, &recipe, &hardware).unwrap();
        let calibration = calibrated(&measurements, &recipe);
        assert_eq!(calibration.synchronous, Some(measured), "that of the earlier run");
        assert_eq!(calibration.synchronous_sampling, Some(sampled), "that of the earlier run");
        let mut measurements = Measurements::default();
        measurements.read_run(&run, &recipe, &hardware).unwrap();
        let other = calibrated(&measurements, &recipe);
        assert_eq!((other.synchronous, other.synchronous_sampling), (None, None), "both have the same cores");
        assert_eq!(other.contention.map(|both| both.sampling.max_staleness), Some(1));
        assert!(other.is_contended && !calibration.is_contended);
        // In the other order the two runs say the same.
        std::fs::write(run.join("resolved.toml"), recipe.resolved_toml(&origins)).unwrap();
        measurements.read_run(&run, &recipe, &hardware).unwrap();
        let other = calibrated(&measurements, &recipe);
        assert_eq!((other.synchronous, other.synchronous_sampling), (Some(measured), Some(sampled)));
        assert!(other.contention.is_some() && !other.is_contended);
    }

    /// Benchmarks of parts are taken before runs, runs before loops, and the step of a synchronous run before that of another.
    #[test]
    fn parts_are_taken_before_runs_and_runs_before_loops() {
        let (directory, recipe, origins) = loaded();
        let step = |tokens_per_s: f64, seconds: f64| {
            let step = json!({
                "reward/mean": 0.5, "completions/mean_length": 30.0, "completions/max_length": 40.0,
                "rollout/tokens_per_s": tokens_per_s, "time/forward_backward": seconds,
            });
            format!("{step}\n")
        };
        let write_run = |name: &str, max_staleness: u64, step: String| {
            let run = directory.path().join(name);
            std::fs::create_dir(&run).unwrap();
            let bound = format!("max_staleness = {max_staleness}");
            let resolved = recipe.resolved_toml(&origins).replace("max_staleness = 0", &bound);
            std::fs::write(run.join("resolved.toml"), resolved).unwrap();
            std::fs::write(run.join("metrics.jsonl"), step).unwrap();
            run
        };
        let synchronous = write_run("synchronous", 0, step(50.0, 2.0));
        let asynchronous = write_run("asynchronous", 1, step(40.0, 3.0));
        let config = crate::simulate::shape(&recipe).unwrap();
        let parameters = model::Layout::new(&config).len();
        let row = |measure: &str, key: &str, value: Value| {
            let mut row = json!({"measure": measure, "parameters": parameters, "threads": 2});
            row[key] = value;
            row
        };
        let of_loop = MeasuredRun::of(&recipe.values(), &step(20.0, 7.0), "").unwrap();
        let write_rows = |name: &str, row: &Value| {
            let file = directory.path().join(name);
            std::fs::write(&file, row.to_string()).unwrap();
            file
        };
        let loops = write_rows("loop.jsonl", &row("loop", "run", json!(of_loop)));
        let mut decode = row("generate", "batch", json!(4));
        decode["decode_ms"] = json!(500.0);
        let parts = write_rows("parts.jsonl", &decode);
        let hardware = Hardware::open("cpu").unwrap();
        let read = |files: &[&std::path::PathBuf]| {
            let mut measurements = Measurements::default();
            files.iter().for_each(|file| measurements.read(file, &recipe, &config, &hardware).unwrap());
            calibrated(&measurements, &recipe)
        };
        let all = read(&[&parts, &synchronous, &asynchronous, &loops]);
        assert_eq!(all, read(&[&loops, &asynchronous, &synchronous, &parts]));
        assert_eq!(all.parts.decode, [MeasuredDecode { threads: 2, sequences: 4.0, seconds: 0.5 }]);
        assert_eq!(all.parts.training[0].seconds, 2.0, "no benchmark has measured it");
        assert_eq!(all.synchronous_sampling.map(|of| of.token_s), Some(1.0 / 50.0));
        assert!(all.contention.is_some() && !all.is_contended);
        let of_loop = read(&[&asynchronous, &loops]);
        assert_eq!(of_loop.parts.training[0].seconds, 7.0, "the loop is synchronous, the run is not");
        assert_eq!(of_loop.trained_share, all.trained_share);
        let contended = read(&[&asynchronous]);
        assert_eq!(contended.parts.training[0].seconds, 3.0);
        assert!(contended.is_contended);
    }

    /// What a loop printed is read as it was measured, and what no run can have measured is refused.
    #[test]
    fn a_loop_calibrates_as_a_run_does_and_wrong_numbers_are_refused() {
        let (directory, recipe, _) = loaded();
        let step = "{\"reward/mean\":0.5,\"completions/mean_length\":30.0,\"completions/max_length\":40.0,\
                    \"rollout/tokens_per_s\":50.0,\"time/forward_backward\":2.0}\n";
        let run = MeasuredRun::of(&recipe.values(), step, "").unwrap();
        let config = recipe.fresh_model(match &recipe.model {
            crate::recipe::Model::Random(sizes) => sizes,
            crate::recipe::Model::Path(_) => panic!("it is random"),
        });
        let parameters = model::Layout::new(&config).len();
        let hardware = Hardware::open("cpu").unwrap();
        let read = |run: Value| {
            let row = json!({"measure": "loop", "parameters": parameters, "threads": 2, "run": run});
            let file = directory.path().join("loop.jsonl");
            std::fs::write(&file, row.to_string()).unwrap();
            let mut measurements = Measurements::default();
            measurements.read(&file, &recipe, &config, &hardware)?;
            Ok::<_, Failure>(calibrated(&measurements, &recipe))
        };
        let calibration = read(json!(run)).unwrap();
        assert_eq!(calibration.synchronous_sampling.map(|of| of.token_s), Some(0.02));
        assert_eq!(calibration.synchronous.map(|of| of.seconds), Some(2.0));
        for (key, wrong) in [
            ("batch", json!([1, 10_000_000_000_000_u64])),
            ("batch", json!([0, 4])),
            ("max_running", json!(0)),
            ("max_staleness", json!(u64::MAX)),
            ("sampled_token_s", json!(-1.0)),
            ("logs_s", json!(1e300)),
            ("idle", json!([2.0, 0.0])),
            ("lengths", json!([30.0])),
            ("unknown", json!(1)),
        ] {
            let mut changed = json!(run);
            changed[key] = wrong;
            let error = read(changed).unwrap_err().to_string();
            assert!(error.contains("line 1 of") && error.contains("rlrun-bench loop"), "{key}: {error}");
        }
    }
    /// A run is refused for hardware of another kind, wherever its recipe names the device.
    #[test]
    fn a_run_on_the_processor_says_nothing_about_gpus() {
        let (directory, recipe, origins) = loaded();
        let run = directory.path().join("run");
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("resolved.toml"), recipe.resolved_toml(&origins)).unwrap();
        let [processor, gpu] = ["cpu", "h200"].map(|name| Hardware::open(name).unwrap());
        let error = checked_run(&run, &recipe, &gpu).unwrap_err().to_string();
        assert!(error.contains("not calibrated for h200") && error.contains("on the processor"), "{error}");
        let mut values = checked_run(&run, &recipe, &processor).unwrap();
        values["placement"]["rollout_devices"] = json!(["cuda:1"]);
        assert!(computes_on_gpus(&values));
    }

    /// Two ranks on GPUs divide a step, those on a processor its cores; samplers divide the slots.
    #[test]
    fn ranks_and_samplers_of_a_run_are_counted() {
        let (_directory, recipe, _) = loaded();
        let mut values = recipe.values();
        values["trainer"]["world"] = json!(2);
        values["placement"]["processes"] = json!(true);
        values["placement"]["rollout_workers"] = json!(2);
        let step = "{\"reward/mean\":0.5,\"completions/mean_length\":30.0,\"completions/max_length\":40.0,\
                    \"rollout/tokens_per_s\":50.0,\"time/forward_backward\":2.0,\"time/decode_stall\":4.0}\n";
        let run = MeasuredRun::of(&values, step, "").unwrap();
        assert_eq!((run.ranks, run.samplers, run.stall_s), (2, 2, Some(2.0)));
        assert_eq!(run.clone().of_one_rank(HardwareKind::Gpu).training_s, Some(4.0));
        let run = run.of_one_rank(HardwareKind::Cpu);
        assert_eq!(run.training_s, Some(2.0));
        let measurements = Measurements { runs: vec![run], ..Measurements::default() };
        let calibration = calibrated(&measurements, &recipe);
        let [decode] = calibration.parts.decode[..] else { panic!("{calibration:?}") };
        assert_eq!((decode.sequences, decode.seconds), (4.0, 4.0 / 50.0));
    }
}
