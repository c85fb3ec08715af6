//! Runs the measures that the command line names, each between two measurements of the machine's limits.

use std::ffi::OsStr;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use device::Device;
use device::device::DeviceLocation;
use model::{ModelDirectory, SharedCores};
use rlrun::chart::{Chart, Scale, Series, SeriesStyle};
use rlrun::failure::Failure;
use rlrun::memory::PeakMemory;
use rlrun::program::Program;
use serde_json::Value;

use crate::accelerator::Accelerator;
use crate::args::{
    BenchArgs, BenchCommand, BenchOutput, GenerateBenchArgs, LoopBenchArgs, OpsBenchArgs, TrainBenchArgs,
};
use crate::cost::Shape;
use crate::machine::{Machine, Peaks};
use crate::measure::{self, Measure, Work};
use crate::steps::LoopRecipe;
use crate::{buffer, episodes, generate, ops, samplers, steps, train, turns, weights};

/// Runs the measures of `args` and writes each result to `out` as it is made.
///
/// # Errors
/// A model or tasks that cannot be used, numbers that do not fit each other, or a part of rlrun that fails.
pub fn run(args: &BenchArgs, program: &Program, out: &mut dyn Write) -> Result<(), Failure> {
    match &args.command {
        Some(BenchCommand::Buffer(args)) => buffer::run(args, out),
        Some(BenchCommand::Episodes(args)) => episodes::run(args, out),
        Some(BenchCommand::Samplers(args)) => samplers::run(args, out),
        Some(BenchCommand::Turns(args)) => turns::run(args, out),
        Some(BenchCommand::Weights(args)) => weights::run(args, out),
        Some(BenchCommand::ServeBuffer(args)) => rlrun::serve::buffer(args, program).map(drop),
        Some(BenchCommand::Templates) => model::chat::serve().map_err(|source| Failure::System {
            what: "render chat templates for another process".to_owned(),
            source,
        }),
        Some(BenchCommand::Generate(args)) => Bench::start(args.target.output, out)?.generate(args),
        Some(BenchCommand::Train(args)) => Bench::start(args.target.output, out)?.train(args),
        Some(BenchCommand::Loop(args)) => Bench::start(args.output, out)?.steps(args, program),
        Some(BenchCommand::Ops(args)) => {
            Bench::start(BenchOutput { threads: Some(1), json: args.json }, out)?.ops(args)
        }
        None => {
            let mut bench = Bench::start(args.output, out)?;
            // The command line requires a model where no measure is named.
            let model = args.model.as_deref().unwrap_or(Path::new(""));
            bench.generate(&defaults(model)?)?;
            bench.train(&defaults(model)?)?;
            bench.steps(&defaults(model)?, program)?;
            bench.ops(&defaults(model)?)
        }
    }
}

/// Measurements one after the other on one machine.
struct Bench<'a> {
    machine: Machine,
    json: bool,
    /// The machine or device of the rows under the last header of the table.
    described: Option<Subject>,
    /// The limits as measured after the last piece of work, which is before the next.
    peaks: Peaks,
    out: &'a mut dyn Write,
}

/// Threads of the processor, or a device.
type Subject = (usize, Option<DeviceLocation>);

impl<'a> Bench<'a> {
    fn start(output: BenchOutput, out: &'a mut dyn Write) -> Result<Self, Failure> {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let machine = Machine::new(output.threads.unwrap_or(cores));
        let peaks = machine.peaks()?;
        Ok(Self { machine, json: output.json, described: None, peaks, out })
    }

    fn generate(&mut self, args: &GenerateBenchArgs) -> Result<(), Failure> {
        let (cores, mut curve) = (self.cores(), Vec::new());
        let on = Accelerator::open(&args.on)?;
        for batch in args.batches() {
            let work = || Ok(vec![generate::work(args, batch, &cores, on.as_ref())?]);
            for measure in self.measure(on.as_ref(), work)? {
                curve.push((batch as f64, 1e3 * measure.seconds() / measure.tokens()));
            }
        }
        let Some(file) = &args.plot else { return Ok(()) };
        let series = Series { name: String::new(), points: curve, mark: SeriesStyle::Measured, color: 0 };
        let chart = Chart {
            x_words: "sequences decoded together",
            y_words: "milliseconds per token",
            x_scale: Scale::Logarithmic,
            y_scale: Scale::Logarithmic,
            series: vec![series],
        };
        let system = |source| Failure::System { what: format!("write {}", file.display()), source };
        std::fs::write(file, chart.svg()).map_err(system)
    }

    fn train(&mut self, args: &TrainBenchArgs) -> Result<(), Failure> {
        let (cores, on) = (self.cores(), Accelerator::open(&args.on)?);
        self.measure(on.as_ref(), || Ok(vec![train::work(args, &cores, on.as_ref())?])).map(|_| ())
    }

    fn steps(&mut self, args: &LoopBenchArgs, program: &Program) -> Result<(), Failure> {
        for staleness in &args.staleness {
            let (cores, recipe) = (self.cores(), LoopRecipe::load(args, *staleness, program)?);
            let on = recipe.accelerator()?;
            self.measure(on.as_ref(), || Ok(vec![steps::work(&recipe, &cores, on.as_ref(), program)?]))?;
        }
        Ok(())
    }

    fn ops(&mut self, args: &OpsBenchArgs) -> Result<(), Failure> {
        // Operations do not split their work, so their limits are those of one thread.
        let all = std::mem::replace(&mut self.machine, Machine::new(1));
        self.peaks = self.machine.peaks()?;
        self.measure(None, || ops::work(args))?;
        self.machine = all;
        self.peaks = self.machine.peaks()?;
        Ok(())
    }

    /// The cores for one piece of work, with their own helper threads.
    fn cores(&self) -> Arc<SharedCores> {
        SharedCores::new(self.machine.threads())
    }

    /// Does `work` between two measurements of the limits of the machine, or of its device, and writes the
    /// results.
    fn measure(
        &mut self,
        on: Option<&Accelerator>,
        work: impl FnOnce() -> Result<Vec<Work>, Failure>,
    ) -> Result<Vec<Measure>, Failure> {
        let before = on.map_or(Ok(self.peaks), Accelerator::peaks)?;
        let memory = PeakMemory::start();
        let done = work()?;
        let memory = memory.stop();
        let after = on.map_or_else(|| self.machine.peaks(), Accelerator::peaks)?;
        if on.is_none() {
            self.peaks = after;
        }
        let (peaks, threads) = ([before, after], self.machine.threads());
        let measures: Vec<Measure> =
            done.into_iter().map(|work| Measure { work, memory, peaks, threads }).collect();
        self.write(on, &measures)
            .map_err(|source| Failure::System { what: "write a result".to_owned(), source })?;
        Ok(measures)
    }

    fn write(&mut self, on: Option<&Accelerator>, measures: &[Measure]) -> std::io::Result<()> {
        let subject = (self.machine.threads(), on.map(|on| on.place));
        if !self.json && self.described.replace(subject) != Some(subject) {
            let description = match (on, measures.first()) {
                (Some(on), Some(measure)) => on.describe(&measure.peaks[1]),
                _ => self.machine.describe(&self.peaks),
            };
            writeln!(self.out, "{description}\n{}", measure::header())?;
        }
        for measure in measures {
            if self.json {
                writeln!(self.out, "{}", measure.json())?;
            } else {
                writeln!(self.out, "{}", measure.row())?;
            }
        }
        self.out.flush()
    }
}

/// The arguments of one measure as the command line has them for a model and nothing else.
fn defaults<T: clap::Args>(model: &Path) -> Result<T, Failure> {
    let line = [OsStr::new("bench"), OsStr::new("--model"), model.as_os_str()];
    let matches = T::augment_args(clap::Command::new("bench")).try_get_matches_from(line);
    let parsed = matches.and_then(|matches| T::from_arg_matches(&matches));
    parsed.map_err(|error| Failure::Internal(format!("a measure has no defaults: {error}")))
}

/// Settings, with the device that something was measured on.
pub(crate) fn with_device(
    on: Option<&Accelerator>,
    settings: Vec<(&'static str, Value)>,
) -> Vec<(&'static str, Value)> {
    settings.into_iter().chain(on.into_iter().flat_map(Accelerator::settings)).collect()
}

/// Memory of a device in use by all processes.
pub(crate) fn device_mib(device: &Device) -> Result<(&'static str, f64), Failure> {
    let (free, total) = device.memory()?;
    Ok(("device_mib", total.saturating_sub(free) as f64 / f64::from(1 << 20)))
}

/// The shape of a model, with numbers as they are stored.
pub(crate) fn shape_of(directory: &ModelDirectory, on: Option<&Accelerator>) -> Shape {
    Shape::new(directory.config()).stored_in(on.map_or(size_of::<f32>(), |on| on.dtype.bytes()))
}

/// The last part of a model's path.
pub(crate) fn model_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
