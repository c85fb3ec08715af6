//! Training alone: full random sequences, every position but the first in the loss.
//!
//! Invariant: a repeat is one step of the learner that runs use: forward, backward, clip, optimizer. One step is made
//! before the clock starts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use model::{ModelDirectory, SharedCores, TargetModule, ThreadPool};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rlrun::failure::Failure;
use serde_json::json;
use trainer::lora::{Adapter, LoraConfig};
use trainer::optimizer::OptimizerConfig;
use trainer::plan::plan;
use trainer::supervised::DemonstrationLoss;
use trainer::{DeviceConfig, Learner, LearnerConfig, ParallelConfig};
use trajectory::{PolicyVersion, Sample, SampleStreams, VersionRun};

use crate::accelerator::Accelerator;
use crate::args::TrainBenchArgs;
use crate::generate::random_tokens;
use crate::measure::Work;
use crate::suite::{device_mib, model_name, shape_of, with_device};

/// Small enough that no number of repeats changes the weights of a real model noticeably.
const LEARNING_RATE: f32 = 1e-6;

/// Takes as many optimizer steps as `args` say, on all of `cores` or on a device.
///
/// # Errors
/// A model that cannot be used, or sequences longer than its context.
pub fn work(
    args: &TrainBenchArgs,
    cores: &Arc<SharedCores>,
    on: Option<&Accelerator>,
) -> Result<Work, Failure> {
    let directory = ModelDirectory::open(&args.target.model)?;
    let context = directory.config().max_context();
    if args.length > context {
        let what = format!("--length {} is more than the model's context of {context} tokens", args.length);
        return Err(Failure::Argument(what));
    }
    let config = LearnerConfig {
        optimizer: OptimizerConfig::standard(args.optimizer, 0.999),
        max_grad_norm: 1.0,
        router_correction_rate: 0.0,
        microbatch_tokens: args.microbatch_tokens,
        recompute: args.recompute,
        world: 1,
        parallel: ParallelConfig::DATA,
        leaves: 1,
        zero: 1,
        wait: Duration::MAX,
        device: on.map(|on| DeviceConfig::new(on.place, on.dtype)),
    };
    let pool = Arc::new(ThreadPool::new(cores, cores.total()));
    let mut learner = learner(config, &directory, args.lora_rank)?.on(pool);
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let samples = (0..args.sequences)
        .map(|_| sequence(random_tokens(&mut rng, args.length + 1, directory.config().vocab_size)))
        .collect::<Result<Vec<_>, Failure>>()?;
    let rows: Vec<&Sample> = samples.iter().collect();
    let mut seconds = Vec::with_capacity(args.repeats);
    for repeat in 0..=args.repeats {
        let clock = Instant::now();
        learner.step(&rows, &DemonstrationLoss::over(&rows), LEARNING_RATE)?;
        if let Some((device, _)) = learner.device_weights() {
            device.synchronize()?;
        }
        if repeat > 0 {
            seconds.push(clock.elapsed().as_secs_f64());
        }
    }
    let lengths = vec![args.length; args.sequences];
    let shares = plan(&rows, directory.config(), args.microbatch_tokens, 1);
    let passes: usize = shares.iter().map(Vec::len).sum();
    let shape = shape_of(&directory, on);
    let tokens = (args.sequences * args.length) as f64;
    Ok(Work {
        name: "train",
        model: model_name(&args.target.model),
        parameters: shape.parameters as usize,
        settings: with_device(
            on,
            vec![
                ("sequences", json!(args.sequences)),
                ("length", json!(args.length)),
                ("microbatch_tokens", json!(args.microbatch_tokens)),
                ("optimizer", json!(args.optimizer)),
                ("recompute", json!(args.recompute)),
                ("lora_rank", json!(args.lora_rank)),
            ],
        ),
        seconds,
        tokens,
        cost: shape.training(lengths.iter().map(|length| *length as f64), tokens, passes as f64),
        further: learner
            .device_weights()
            .iter()
            .map(|(device, _)| device_mib(device))
            .collect::<Result<_, _>>()?,
        run: None,
    })
}

/// A learner of all weights, or of an adapter of `lora_rank` on the linear layers of all blocks.
fn learner(
    config: LearnerConfig,
    directory: &ModelDirectory,
    lora_rank: Option<usize>,
) -> Result<Learner, Failure> {
    let (model, parameters) = (directory.config().clone(), directory.load_parameters()?);
    let Some(rank) = lora_rank else { return Ok(Learner::new(config, model, parameters, None)?) };
    let lora = LoraConfig { rank, alpha: 2.0 * rank as f64, target_modules: TargetModule::BLOCK.to_vec() };
    let adapter = Adapter::new(lora, &parameters, 0);
    Ok(Learner::adapting(config, model, parameters, adapter, None)?)
}

/// A sequence whose every token but the first is trained on.
pub(super) fn sequence(token_ids: Vec<u32>) -> Result<Sample, Failure> {
    let tokens = token_ids.len();
    let streams = SampleStreams {
        loss_mask: (0..tokens).map(|t| t > 0).collect(),
        behavior_logprobs: vec![0.0; tokens],
        versions: vec![VersionRun { version: PolicyVersion::default(), len: tokens as u32 }],
        kept: None,
        experts: None,
        temperature: 1.0,
        token_ids,
    };
    Sample::new(streams).map_err(|error| Failure::Internal(format!("a sequence is no sample: {error}")))
}
