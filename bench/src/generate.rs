//! Sampling alone: random prompts at temperature 1, every completion at full length.
//!
//! Invariant: a repeat is a whole call, with the prefill of its prompts and the text of its completions, in the engine
//! that runs use. Weights are packed and one call is made before the clock starts.

use std::sync::Arc;
use std::time::Instant;

use device::Device;
use model::{ModelDirectory, Quantization, SharedCores, ThreadPool};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rlrun::failure::Failure;
use rollout::{Engine, EngineConfig, Network, RequestOptions, SampleRequest, ServeOn, StopRules};
use serde_json::json;
use trajectory::{GroupId, PolicyVersion};

use crate::accelerator::Accelerator;
use crate::args::GenerateBenchArgs;
use crate::cost::{SamplingWork, Shape};
use crate::measure::Work;
use crate::suite::{device_mib, model_name, shape_of, with_device};

/// Samples `batch` completions at the same time, as often as `args` say, on all of `cores` or on a device.
///
/// # Errors
/// A batch that is not whole groups, a model that cannot be used, or lengths beyond its context.
pub fn work(
    args: &GenerateBenchArgs,
    batch: usize,
    cores: &Arc<SharedCores>,
    on: Option<&Accelerator>,
) -> Result<Work, Failure> {
    let group = args.group.min(batch);
    if !batch.is_multiple_of(group) {
        return Err(Failure::Argument(format!(
            "--batch {batch} does not divide into groups of --group {group}"
        )));
    }
    let directory = ModelDirectory::open(&args.target.model)?;
    let (network, device) = network(args, on, &directory)?;
    let config = EngineConfig {
        max_running: batch,
        prefill_chunk: EngineConfig::default_prefill_chunk(on.is_some()),
        kv_cache_tokens: None,
        max_prompt_length: args.prompt,
        max_completion_length: args.new,
        max_episode_length: 0,
        max_samples: group,
        seed: 0,
    };
    let stop =
        StopRules { token_ids: Vec::new(), strings: Vec::new(), tokenizer: directory.tokenizer().clone() };
    let pool = Arc::new(ThreadPool::new(cores, cores.total()));
    let mut engine = Engine::new(config, stop, network, PolicyVersion::default())?.on(pool);
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let vocabulary = directory.config().vocab_size;
    let (mut seconds, mut passes, mut phases) =
        (Vec::with_capacity(args.repeats), 0, SamplingPhases::default());
    let shape = shape_of(&directory, on);
    for repeat in 0..=args.repeats {
        let prompts: Vec<Vec<u32>> =
            (0..batch / group).map(|_| random_tokens(&mut rng, args.prompt, vocabulary)).collect();
        let before = engine.counts().steps;
        let clock = Instant::now();
        submit(&mut engine, prompts, group, args.new)?;
        let of_repeat = run(&mut engine, (args.prompt, batch), &shape, args.quantization)?;
        if repeat > 0 {
            phases.add(&of_repeat);
            seconds.push(clock.elapsed().as_secs_f64());
        }
        passes = engine.counts().steps - before;
    }
    let sampling = SamplingWork {
        prompts: (batch / group) as f64,
        prompt: args.prompt as f64,
        completions: batch as f64,
        new: args.new as f64,
        passes: passes as f64,
        quantization: args.quantization,
    };
    Ok(Work {
        name: "generate",
        model: model_name(&args.target.model),
        parameters: shape.parameters as usize,
        settings: with_device(
            on,
            vec![
                ("batch", json!(batch)),
                ("group", json!(group)),
                ("prompt", json!(args.prompt)),
                ("new", json!(args.new)),
                ("quantization", json!(args.quantization)),
            ],
        ),
        seconds,
        tokens: (batch * args.new) as f64,
        cost: shape.sampling(&sampling),
        further: phases.further(device.as_ref())?,
        run: None,
    })
}

/// The network that samples, and its device if it has one.
fn network(
    args: &GenerateBenchArgs,
    on: Option<&Accelerator>,
    directory: &ModelDirectory,
) -> Result<(Network, Option<Device>), Failure> {
    let device = on.map(|on| Device::open(on.place)).transpose()?;
    let on = match (on, &device) {
        (Some(on), Some(device)) if args.quantization == Quantization::None => {
            ServeOn::Device(device.clone(), on.dtype)
        }
        (Some(_), _) => {
            let what = "--quantization has kernels for the processor alone, and --device is given".to_owned();
            return Err(Failure::Argument(what));
        }
        (None, _) => ServeOn::Host(args.quantization),
    };
    let network = Network::new(&on, directory.config(), &directory.load_parameters()?)?;
    Ok((network, device))
}

/// Random tokens, the same for the same state of `rng`.
pub(super) fn random_tokens(rng: &mut ChaCha8Rng, count: usize, vocabulary: usize) -> Vec<u32> {
    (0..count).map(|_| ((u64::from(rng.next_u32()) * vocabulary as u64) >> 32) as u32).collect()
}

/// Two phases of sampling: passes that prefill prompts, and passes in which all completions decode. Others are in neither.
#[derive(Clone, Copy, Debug, Default)]
struct SamplingPhases {
    prefill: PassTotals,
    decode: PassTotals,
}

/// Passes of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct PassTotals {
    seconds: f64,
    /// Tokens prefilled, or sampled.
    tokens: f64,
    passes: f64,
    /// Least traffic of the memory.
    bytes: f64,
}

impl SamplingPhases {
    fn add(&mut self, other: &Self) {
        for (own, other) in [(&mut self.prefill, other.prefill), (&mut self.decode, other.decode)] {
            own.seconds += other.seconds;
            own.tokens += other.tokens;
            own.passes += other.passes;
            own.bytes += other.bytes;
        }
    }

    /// What a result says of them, and of the memory of `device`.
    fn further(&self, device: Option<&Device>) -> Result<Vec<(&'static str, f64)>, Failure> {
        let Self { prefill, decode } = self;
        let mut all = Vec::new();
        if prefill.seconds > 0.0 {
            all.push(("prefill_tokens_per_s", prefill.tokens / prefill.seconds));
        }
        if decode.seconds > 0.0 {
            all.push(("decode_ms", 1e3 * decode.seconds / decode.passes));
            all.push(("decode_tokens_per_s", decode.tokens / decode.seconds));
            all.push(("decode_gbytes_per_s", decode.bytes / decode.seconds / 1e9));
        }
        all.extend(device.map(device_mib).transpose()?);
        Ok(all)
    }
}

/// Submits requests for `samples` completions of `new` tokens for every prompt.
fn submit(engine: &mut Engine, prompts: Vec<Vec<u32>>, samples: usize, new: usize) -> Result<(), Failure> {
    for (group, prompt) in prompts.into_iter().enumerate() {
        let sampling = model::Sampling::PLAIN;
        let group = GroupId(group as u64);
        let max_completion_length = new;
        let baseline = false;
        engine.submit(SampleRequest {
            group,
            prompt,
            first_index: 0,
            turn: 0,
            samples,
            sampling,
            max_completion_length,
            baseline,
            keep_cache: false,
            options: RequestOptions::default(),
        })?;
    }
    Ok(())
}

/// Samples all that was submitted: `batch` completions of prompts of `prompt` tokens.
fn run(
    engine: &mut Engine,
    (prompt, batch): (usize, usize),
    shape: &Shape,
    quantization: Quantization,
) -> Result<SamplingPhases, Failure> {
    let (mut phases, begun) = (SamplingPhases::default(), engine.counts());
    while !engine.is_idle() {
        let (before, clock) = (engine.counts(), Instant::now());
        engine.step()?;
        let (after, seconds) = (engine.counts(), clock.elapsed().as_secs_f64());
        let prefilled = (after.prefilled_tokens - before.prefilled_tokens) as f64;
        let sampled = (after.sampled_tokens - before.sampled_tokens) as f64;
        let positions = (batch * prompt) as f64 + (before.sampled_tokens - begun.sampled_tokens) as f64;
        let (phase, tokens) = if prefilled > 0.0 {
            (&mut phases.prefill, prefilled)
        } else if sampled == batch as f64 {
            (&mut phases.decode, sampled)
        } else {
            continue;
        };
        phase.seconds += seconds;
        phase.tokens += tokens;
        phase.passes += 1.0;
        phase.bytes += shape.decoding_bytes(positions, quantization);
    }
    Ok(phases)
}
