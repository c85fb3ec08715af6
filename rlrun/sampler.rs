//! The samplers of a process: of training tasks, whose weights are updated, and of an evaluation, whose weights stay.
//!
//! Invariant: the process of the trainer, rollout workers and evaluations make their samplers here alone, so a new kind
//! of sampler is chosen in this file.

use std::sync::Arc;

use model::thread_pool::available_cores;
use model::{Config, ModelDirectory};
use rollout::applier::{Applier, WeightSource};
use rollout::{Engine, EngineConfig, LocalSampler, Network, Sampler, ServeOn};
use trainer::Learner;
use trajectory::PolicyVersion;
use weights::{Copier, Dtype};

use crate::failure::Failure;
use crate::prepare::Prepared;
use crate::recipe::Recipe;

/// The inputs of a sampler.
pub(crate) struct SamplerSetup<'a> {
    pub(crate) recipe: &'a Recipe,
    /// Tokenizer and stop tokens.
    pub(crate) directory: &'a ModelDirectory,
    /// Training tasks, and the cores that the sampler may use.
    pub(crate) prepared: &'a Prepared,
}

/// The weights of a sampler of training tasks.
pub(crate) struct SamplerWeights {
    /// Version of `network`.
    pub(crate) version: PolicyVersion,
    pub(crate) network: Network,
    /// The subscription to the next versions.
    pub(crate) incoming: WeightSource,
}

/// A network that serves the weights that `learner` trains, of the shape `config`.
///
/// # Errors
/// If a rank has failed, or a device fails or has no memory.
pub(crate) fn network_of(on: &ServeOn, config: &Config, learner: &Learner) -> Result<Network, Failure> {
    Ok(match learner.snapshot_in_parts()? {
        Some(values) => Network::of_version(on, config, values)?,
        None => Network::new(on, config, &*learner.parameters()?)?,
    })
}

/// The network that samplers serve: with the weights that `learner` trains rounded to `dtype`, or with the factors over a base that
/// stays quantised. The first version has the same bits before it is pushed and after.
///
/// # Errors
/// As [`network_of`].
pub(crate) fn published_network(
    on: &ServeOn,
    config: &Config,
    learner: &Learner,
    dtype: Dtype,
) -> Result<Network, Failure> {
    if let Some(policy) = learner.adapted() {
        let factors: Vec<f32> = policy.factors().values().iter().map(|value| dtype.round(*value)).collect();
        return Ok(Network::adapted(on, &policy.with_values(&factors)?)?);
    }
    if dtype == Dtype::F32 {
        return network_of(on, config, learner);
    }
    let rounded = Copier::new(available_cores()).copy(learner.parameters()?.values(), dtype);
    Ok(Network::of_version(on, config, rounded)?)
}

impl SamplerSetup<'_> {
    /// A sampler of training tasks. With `alternates` it shares its device with the trainer and stages new versions in
    /// its own turn; otherwise a thread stages them during decoding.
    ///
    /// # Errors
    /// A cache that cannot hold one request, or an interruption that the recipe's bounds do not allow.
    pub(crate) fn updated(
        &self,
        weights: SamplerWeights,
        alternates: bool,
    ) -> Result<Box<dyn Sampler>, Failure> {
        let SamplerWeights { version, network, incoming } = weights;
        let stop_rules = self.recipe.stop_rules(self.directory);
        let interruption = self.recipe.interruption(&stop_rules)?;
        let context = self.directory.config().max_context();
        let config = self.recipe.engine(self.prepared.train.longest(), context);
        let engine = Engine::new(config, stop_rules, network, version)?
            .interrupting(interruption)
            .speculating(self.recipe.rollout.speculation)
            .adapting_running(self.recipe.rollout.adapt_running)
            .on(Arc::clone(&self.prepared.pool));
        let engine = if self.recipe.rollout.routing_replay { engine.recording_experts() } else { engine };
        let applier = if alternates { Applier::inline(incoming) } else { Applier::start(incoming) };
        Ok(Box::new(LocalSampler::new(engine, applier)))
    }

    /// A sampler that serves `network` and no other weights.
    ///
    /// # Errors
    /// A cache that cannot hold one request.
    pub(crate) fn fixed(&self, config: EngineConfig, network: Network) -> Result<Box<dyn Sampler>, Failure> {
        let stop_rules = self.recipe.stop_rules(self.directory);
        let engine = Engine::new(config, stop_rules, network, PolicyVersion::default())?
            .on(Arc::clone(&self.prepared.pool));
        let sampler: Box<dyn Sampler> = Box::new(LocalSampler::fixed(engine));
        Ok(match &self.prepared.agents {
            Some(agents) => agents.aside(sampler),
            None => sampler,
        })
    }
}
