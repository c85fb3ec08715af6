//! How many bf16 weights a step of training changes, by the learning rate: what a delta has to carry.
//!
//! Invariant: steps are those of the learner that runs use, with AdamW; what is counted is what the publisher counts.

use std::num::NonZeroUsize;
use std::sync::Arc;

use model::{Config, ModelDirectory, Recompute, SharedCores, Sizes, ThreadPool};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rlrun::failure::Failure;
use trainer::optimizer::{OptimizerConfig, OptimizerKind};
use trainer::supervised::DemonstrationLoss;
use trainer::{Learner, LearnerConfig, ParallelConfig};
use trajectory::{PolicyVersion, Sample};
use weights::{DeltaConfig, Dtype, Hub, HubConfig, HubPublisher, PublishConfig, Publisher};

use super::{WeightsBench, set};
use crate::generate::random_tokens;
use crate::measure::median;
use crate::train::sequence;

/// Learning rates of fine-tuning, and what is above them.
const LEARNING_RATES: [f32; 3] = [1e-6, 1e-5, 1e-4];
/// Sequences of a step, and tokens of each.
const SEQUENCES: usize = 32;
const TOKENS: usize = 32;

/// Trains a model at each learning rate, and writes what each step changed.
pub(super) fn measure(bench: &mut WeightsBench<'_>) -> Result<(), Failure> {
    let scratch = tempfile::tempdir();
    let scratch =
        scratch.map_err(|source| Failure::System { what: "make a directory".to_owned(), source })?;
    let directory = match &bench.args.model {
        Some(path) => ModelDirectory::open(path)?,
        None => ModelDirectory::fresh(&scratch.path().join("small"), &Config::fresh(&SMALL), 1)?,
    };
    for learning_rate in LEARNING_RATES {
        let hub = Hub::new(HubConfig { dtype: Dtype::Bf16, ..HubConfig::default() });
        let deltas = Some(DeltaConfig { full_every: NonZeroUsize::MAX, compress: true });
        let publisher = HubPublisher::new(hub, PublishConfig { deltas, ..PublishConfig::default() })?;
        let config = LearnerConfig {
            optimizer: OptimizerConfig::standard(OptimizerKind::Adamw, 0.999),
            max_grad_norm: 1.0,
            router_correction_rate: 0.0,
            microbatch_tokens: SEQUENCES * TOKENS,
            recompute: Recompute::None,
            world: 1,
            parallel: ParallelConfig::DATA,
            leaves: 1,
            zero: 1,
            wait: std::time::Duration::MAX,
            device: None,
        };
        let cores = SharedCores::new(std::thread::available_parallelism().map_or(1, NonZeroUsize::get));
        let pool = Arc::new(ThreadPool::new(&cores, cores.total()));
        let parameters = directory.load_parameters()?;
        let mut learner = Learner::new(config, directory.config().clone(), parameters, None)?.on(pool);
        publisher.publish_values(PolicyVersion(0), learner.parameters()?.values())?;
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let (mut densities, mut sizes) = (Vec::new(), Vec::new());
        for step in 1..=bench.args.steps as u64 {
            let vocabulary = directory.config().vocab_size;
            let samples = (0..SEQUENCES).map(|_| sequence(random_tokens(&mut rng, TOKENS + 1, vocabulary)));
            let samples = samples.collect::<Result<Vec<_>, Failure>>()?;
            let rows: Vec<&Sample> = samples.iter().collect();
            learner.step(&rows, &DemonstrationLoss::over(&rows), learning_rate)?;
            publisher.publish_values(PolicyVersion(step), learner.parameters()?.values())?;
            if let Some(cost) = publisher.last_push()? {
                densities.extend(cost.density);
                sizes.push(cost.delta_bytes.unwrap_or(cost.full_bytes) as f64 / cost.full_bytes as f64);
            }
        }
        let mut fields = bench.fields("density");
        set(&mut fields, "megabytes", learner.parameters()?.values().len() as f64 * 4e-6);
        set(&mut fields, "repeats", bench.args.steps);
        set(&mut fields, "learning_rate", f64::from(learning_rate));
        set(&mut fields, "density", median(&densities));
        set(&mut fields, "density_first", densities.first().copied().unwrap_or(f64::NAN));
        set(&mut fields, "density_last", densities.last().copied().unwrap_or(f64::NAN));
        set(&mut fields, "of_full", median(&sizes));
        bench.write(&fields)?;
    }
    Ok(())
}

/// A model that trains in seconds.
const SMALL: Sizes = Sizes {
    vocab_size: model::CHARACTERS,
    hidden_size: 256,
    intermediate_size: 704,
    num_layers: 4,
    num_heads: 4,
    num_kv_heads: 4,
    max_position_embeddings: 128,
};
