//! New weights on their way to a sampler, by every transport, against the speed of a copy.
//!
//! - [`receiver`]: a sampler's side as a separate process; [`density`]: how many weights a step of training changes
//! - `devices`: pushes that stay on devices, with `--device`
//!
//! Invariant: a push is timed from the call that publishes to the moment at which a subscriber has weights that it can
//! pack, with the publisher and the subscriber that runs use. Copies are timed in between, so that both see the machine
//! in the same state.
//!
//! # Fields of the objects
//! | field | is |
//! |---|---|
//! | `measure` | `weights` |
//! | `of` | `copy`, `memory`, `shm`, `http_full`, `http_delta`, `sampler`, `stall` or `density`; `device_copy`, `device_memory`, `device_ipc` or `device_nccl` |
//! | `megabytes`, `threads`, `repeats` | the model as f32, 10^6 bytes; threads that copy and digest; pushes behind a median |
//! | `ready_s`, `gbytes_per_s` | median time until it is ready; weights as f32 per second of it, 10^9 bytes |
//! | `of_copy_threads`, `of_copy_one` | `gbytes_per_s` by that of a copy between buffers in use, by all threads and by one |
//! | `push_s`, `copied_s`, `digested_s`, `encoded_s` | the publisher's call in all, and its parts; it digests when samplers already read |
//! | `bytes`, `density` | bytes moved to the subscriber; share of the weights that changed |
//! | `digest_s`, `private_copy_s`, `packing_s` | what a sampler does with weights once they are ready: on one thread |
//! | `device`, `moved_s` | where it is measured, in bf16: `bytes` are those of all weights, and `gbytes_per_s` those; until samplers could read it, or had received it |
//! | `of_device_copy`, `moved_of_device_copy` | bytes per second until it is ready, digested; the same until it is moved; both by those of a copy on the device |
//! | `swap_s`, `decode_step_s`, `of_step` | the pause of the decoding for new weights, a step of a tiny model, their ratio |

pub mod density;
mod devices;
pub mod receiver;

use std::hint::black_box;
use std::io::Write;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::{Config, Decoder, Layout, ModelDirectory, Parameters, Quantization, SharedCores, Sizes};
use rlrun::args::DeviceArgs;
use rlrun::failure::Failure;
use serde_json::{Map, Value};
use trajectory::PolicyVersion;
use weights::{
    DeltaConfig, Digest, Dtype, Hub, HubConfig, HubPublisher, PublishConfig, Publisher, PushCost, Receipt,
    Subscriber,
};

use crate::args::{BenchModel, BenchOutput, GenerateBenchArgs, WeightsBenchArgs};
use crate::generate;
use crate::measure::median;
use receiver::Receiver;

/// Pushes before the clock starts: memory is mapped and used in turn from then on.
const WARM_UP: u64 = 3;
/// How long a push may take.
const SOON: Duration = Duration::from_secs(120);

/// Measures what `args` ask for and writes every result to `out` as soon as it is there.
///
/// # Errors
/// Too little memory, a directory that cannot be used, a process that does not start.
pub fn run(args: &WeightsBenchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    if let Some(url) = &args.receive_from {
        return match args.device {
            Some(place) => receiver::receive_on_device(url, place, &args.shm, out),
            None => receiver::receive(url, args.over_http, &args.shm, out),
        };
    }
    let threads = args.threads.unwrap_or(PublishConfig::default().threads);
    let mut bench = WeightsBench { args, out, threads, copy_one: f64::NAN, copy_threads: f64::NAN };
    if args.density {
        return density::measure(&mut bench);
    }
    if let Some(place) = args.device {
        return devices::measure(&mut bench, place);
    }
    let mut values = random_values(args.megabytes * 1_000_000 / 4);
    bench.copies(&values)?;
    bench.memory(&values)?;
    bench.pushes("shm", &mut values, Some(0.0), false)?;
    bench.pushes("http_full", &mut values, None, true)?;
    bench.pushes("http_delta", &mut values, Some(args.changed), true)?;
    drop(values);
    bench.sampler()?;
    bench.stall()
}

/// Measurements one after the other.
struct WeightsBench<'a> {
    args: &'a WeightsBenchArgs,
    out: &'a mut dyn Write,
    threads: usize,
    /// Copies by one thread and by all, 10^9 bytes per second.
    copy_one: f64,
    copy_threads: f64,
}

impl WeightsBench<'_> {
    /// Copies between two buffers that are in use.
    fn copies(&mut self, values: &[f32]) -> Result<(), Failure> {
        let mut target = values.to_vec();
        for threads in [1, self.threads] {
            let seconds: Vec<f64> = (0..self.args.repeats)
                .map(|_| {
                    let clock = Instant::now();
                    copy(values, black_box(&mut target), threads);
                    clock.elapsed().as_secs_f64()
                })
                .collect();
            let rate = size_of_val(values) as f64 / median(&seconds) / 1e9;
            let mut fields = self.fields("copy");
            set(&mut fields, "threads", threads);
            set(&mut fields, "ready_s", median(&seconds));
            set(&mut fields, "gbytes_per_s", rate);
            self.write(&fields)?;
            if threads == 1 {
                self.copy_one = rate;
            }
            self.copy_threads = rate;
        }
        Ok(())
    }

    /// Pushes to a subscriber within the process.
    fn memory(&mut self, values: &[f32]) -> Result<(), Failure> {
        let hub = Hub::new(HubConfig::default());
        let publisher = HubPublisher::new(hub.clone(), self.publishing(None, false))?;
        let subscriber = hub.subscribe("sampler")?;
        let (mut ready, mut costs) = (Vec::new(), Vec::new());
        for version in (0..self.args.repeats as u64 + WARM_UP).map(PolicyVersion) {
            let started = Instant::now();
            let received = std::thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    let new = subscriber.wait_newer(version.0.checked_sub(1).map(PolicyVersion), SOON);
                    (new.map(|_| ()), started.elapsed())
                });
                publisher.publish_values(version, values)?;
                let (received, after) =
                    waiting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                received.map(|()| after)
            })?;
            if version.0 >= WARM_UP {
                ready.push(received.as_secs_f64());
                costs.extend(publisher.last_push()?);
            }
        }
        self.report("memory", size_of_val(values), &ready, &costs, 0)
    }

    /// Pushes to a subscriber in a separate process: with `changed` as deltas, with such a share of weights changed.
    fn pushes(
        &mut self,
        of: &'static str,
        values: &mut [f32],
        changed: Option<f64>,
        http: bool,
    ) -> Result<(), Failure> {
        let dtype = if http { Dtype::Bf16 } else { Dtype::F32 };
        let hub = Hub::new(HubConfig { dtype, ..HubConfig::default() });
        let publisher = HubPublisher::new(hub.clone(), self.publishing(changed.filter(|_| http), !http))?;
        let mut receiver = Receiver::start(hub, &self.args.shm, if http { &["--over-http"] } else { &[] })?;
        let (mut ready, mut costs, mut bytes) = (Vec::new(), Vec::new(), 0);
        for version in 0..self.args.repeats as u64 + WARM_UP {
            change(values, changed.unwrap_or(0.0), version);
            let started = receiver::now_ns();
            publisher.publish_values(PolicyVersion(version), values)?;
            let received = receiver.wait(version)?;
            if version >= WARM_UP {
                ready.push(received.at_ns.saturating_sub(started) as f64 / 1e9);
                costs.extend(publisher.last_push()?);
                bytes = received.bytes;
            }
        }
        self.report(of, size_of_val(values), &ready, &costs, bytes)
    }

    fn publishing(&self, changed: Option<f64>, shm: bool) -> PublishConfig {
        let deltas = changed.map(|_| DeltaConfig { full_every: NonZeroUsize::MAX, compress: false });
        PublishConfig {
            threads: self.threads,
            deltas,
            shm: shm.then(|| self.args.shm.clone()),
            ..PublishConfig::default()
        }
    }

    fn report(
        &mut self,
        of: &str,
        model: usize,
        ready: &[f64],
        costs: &[PushCost],
        bytes: u64,
    ) -> Result<(), Failure> {
        let part = |part: fn(&PushCost) -> Duration| {
            median(&costs.iter().map(|cost| part(cost).as_secs_f64()).collect::<Vec<_>>())
        };
        let rate = model as f64 / median(ready) / 1e9;
        let mut fields = self.fields(of);
        set(&mut fields, "ready_s", median(ready));
        set(&mut fields, "gbytes_per_s", rate);
        set(&mut fields, "of_copy_threads", rate / self.copy_threads);
        set(&mut fields, "of_copy_one", rate / self.copy_one);
        set(&mut fields, "push_s", part(|cost| cost.took));
        set(&mut fields, "copied_s", part(|cost| cost.copied));
        set(&mut fields, "digested_s", part(|cost| cost.digested));
        set(&mut fields, "encoded_s", part(|cost| cost.encoded));
        set(&mut fields, "bytes", bytes);
        if let Some(density) = costs.last().and_then(|cost| cost.density) {
            set(&mut fields, "density", density);
        }
        self.write(&fields)
    }

    /// The work of a sampler on received weights: a copy, its digest, a packed decoder.
    fn sampler(&mut self) -> Result<(), Failure> {
        let config = config(self.args.megabytes * 1_000_000 / 4);
        let layout = Arc::new(Layout::new(&config));
        let values = random_values(layout.len());
        let clock = Instant::now();
        let own = black_box(values.clone());
        let copied = clock.elapsed().as_secs_f64();
        let digested = Instant::now();
        black_box(Digest::of(&own));
        let digested = digested.elapsed().as_secs_f64();
        let parameters = Parameters::from_values(layout, own)?;
        let clock = Instant::now();
        black_box(Decoder::sampler(&config, &parameters, Quantization::None));
        let mut fields = self.fields("sampler");
        set(&mut fields, "megabytes", values.len() as f64 * 4e-6);
        set(&mut fields, "threads", 1);
        set(&mut fields, "private_copy_s", copied);
        set(&mut fields, "digest_s", digested);
        set(&mut fields, "packing_s", clock.elapsed().as_secs_f64());
        self.write(&fields)
    }

    /// The pause between two decoding steps in which weights are swapped, against a step of a tiny model.
    fn stall(&mut self) -> Result<(), Failure> {
        let scratch = tempfile::tempdir();
        let scratch =
            scratch.map_err(|source| Failure::System { what: "make a directory".to_owned(), source })?;
        let path = scratch.path().join("tiny");
        let tiny = Sizes { max_position_embeddings: 256, ..sizes(64, 4, model::CHARACTERS) };
        let directory = ModelDirectory::fresh(&path, &Config::fresh(&tiny), 1)?;
        let parameters = directory.load_parameters()?;
        let decoder = || Decoder::sampler(directory.config(), &parameters, Quantization::None);
        let hub = Hub::new(HubConfig::default());
        let publisher = HubPublisher::new(hub.clone(), self.publishing(None, false))?;
        let subscriber = hub.subscribe("sampler")?;
        let mut serving = decoder();
        let mut swaps = Vec::new();
        for version in (0..self.args.repeats as u64).map(PolicyVersion) {
            publisher.publish_values(version, parameters.values())?;
            let (new, digest, none) = (decoder(), Digest::of(parameters.values()), Duration::ZERO);
            let clock = Instant::now();
            // The previous version is dropped in the pause too.
            serving = black_box(new);
            subscriber.applied(Receipt { version, digest, took: none, stalled: none, bytes: 0, taken: 0 })?;
            swaps.push(clock.elapsed().as_secs_f64());
        }
        drop(serving);
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let (batch, new) = (64, 64);
        let output = BenchOutput { threads: None, json: false };
        let generate = GenerateBenchArgs {
            on: DeviceArgs::default(),
            target: BenchModel { model: path, output },
            batch,
            group: 8,
            prompt: 16,
            new,
            repeats: 3,
            quantization: Quantization::None,
            sweep: false,
            plot: None,
        };
        let work = generate::work(&generate, batch, &SharedCores::new(threads), None)?;
        let (swap, step) = (median(&swaps), median(&work.seconds) / new as f64);
        let mut fields = self.fields("stall");
        set(&mut fields, "megabytes", parameters.values().len() as f64 * 4e-6);
        set(&mut fields, "threads", threads);
        set(&mut fields, "swap_s", swap);
        set(&mut fields, "decode_step_s", step);
        set(&mut fields, "of_step", swap / step);
        self.write(&fields)
    }

    fn fields(&self, of: &str) -> Map<String, Value> {
        let mut fields = Map::new();
        set(&mut fields, "measure", "weights");
        set(&mut fields, "of", of);
        set(&mut fields, "megabytes", self.args.megabytes as f64);
        set(&mut fields, "threads", self.threads);
        set(&mut fields, "repeats", self.args.repeats);
        fields
    }

    fn write(&mut self, fields: &Map<String, Value>) -> Result<(), Failure> {
        let written = if self.args.json {
            writeln!(self.out, "{}", Value::Object(fields.clone()))
        } else {
            writeln!(self.out, "{}", line(fields))
        };
        let system = |source| Failure::System { what: "write a result".to_owned(), source };
        written.and_then(|()| self.out.flush()).map_err(system)
    }
}

fn set(fields: &mut Map<String, Value>, name: &str, value: impl Into<Value>) {
    fields.insert(name.to_owned(), value.into());
}

/// A result for people: its kind, then what belongs to it.
fn line(fields: &Map<String, Value>) -> String {
    let kind = fields.get("of").and_then(Value::as_str).unwrap_or_default();
    let rest = fields.iter().filter(|(name, _)| !["measure", "of"].contains(&&name[..]));
    let rest = rest.map(|(name, value)| match value.as_f64() {
        Some(number) if value.is_f64() && number.abs() < 1e-3 => format!("{name} {number:.2e}"),
        Some(number) if value.is_f64() => format!("{name} {number:.4}"),
        _ => format!("{name} {value}"),
    });
    format!("{kind:>10}  {}", rest.collect::<Vec<_>>().join(", "))
}

/// Copies by so many threads.
fn copy(values: &[f32], target: &mut [f32], threads: usize) {
    let part = values.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let mut parts = values.chunks(part).zip(target.chunks_mut(part));
        let own = parts.next();
        parts.for_each(|(from, to)| drop(scope.spawn(|| to.copy_from_slice(from))));
        if let Some((from, to)) = own {
            to.copy_from_slice(from);
        }
    });
}

/// Weights that look random, of the size that weights have.
fn random_values(len: usize) -> Vec<f32> {
    (0..len as u64).map(|index| (hash(index) >> 40) as f32 * (0.1 / (1 << 24) as f32) - 0.05).collect()
}

/// Changes a share of the weights by more than a bf16 forgives; others for every version.
fn change(values: &mut [f32], share: f64, version: u64) {
    let threshold = (share * u64::MAX as f64) as u64;
    if threshold > 0 {
        let values = values.iter_mut().zip(0u64..);
        values
            .filter(|(_, index)| hash(index ^ (version << 40)) <= threshold)
            .for_each(|(value, _)| *value *= 1.25);
    }
}

/// `SplitMix64` (Steele, Lea and Flood, 2014): a number that looks random for each number.
fn hash(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A model of about so many weights.
fn config(weights: usize) -> Config {
    // The matrices of a layer: four square ones, and three of 2.75 times the width.
    let of_layer = |width: usize| width * width * 49 / 4;
    let width = if weights > 2 * of_layer(1024) { 1024 } else { 64 };
    Config::fresh(&sizes(width, (weights / of_layer(width)).max(1), 4 * width))
}

fn sizes(hidden_size: usize, num_layers: usize, vocab_size: usize) -> Sizes {
    let (intermediate_size, num_heads) = (hidden_size * 11 / 4, (hidden_size / 64).max(2));
    let max_position_embeddings = 128;
    Sizes {
        vocab_size,
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads: num_heads,
        max_position_embeddings,
    }
}
