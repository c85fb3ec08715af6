//! What a simulation takes from measurements.
//!
//! Invariant: of several measurements of one value the first in this order is taken: benchmarks of parts, runs, loops of benchmarks; of
//! several runs, or loops, the one that was read last. Steps of training and decoding are rather those of a synchronous run.

use model::Config;
use model::thread_pool::available_cores;
use simulator::{LatencyModel, LengthModel};

use super::contention::{MeasuredContention, MeasuredSampling};
use super::measured_run::MeasuredRun;
use super::measurements::{BenchmarkResults, Measurements};
use crate::recipe::Recipe;
use crate::recipe::words::{CriticKind, WeightTransport};

/// Share of the variance of the logarithm of lengths that prompts have, where no measurement says it.
pub(super) const SHARED: f64 = 0.5;

/// What a simulation takes from measurements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration {
    /// Decode steps and training steps, of benchmarks or of a run.
    pub parts: BenchmarkResults,
    /// Whether decoding or training was measured while the other side used the same cores, and no synchronous run gives the level of
    /// both.
    pub is_contended: bool,
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
    /// Sampling that no trainer slowed: of a synchronous run.
    pub synchronous_sampling: Option<MeasuredSampling>,
    /// Both sides on the same cores: of an asynchronous run.
    pub contention: Option<MeasuredContention>,
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
    /// Whether it is a step of a run, with all its passes; otherwise it is one forward and backward pass.
    pub is_of_run: bool,
}

impl Calibration {
    /// What `measurements` say about `recipe`, whose model has the shape `config`.
    #[must_use]
    pub fn of(measurements: &Measurements, recipe: &Recipe, config: &Config) -> Self {
        let Measurements { benchmarks, .. } = measurements;
        let prompt_tokens = measurements.last(|run| run.prompt_tokens);
        let prompt = prompt_tokens_of(prompt_tokens, recipe);
        let training = |run: &MeasuredRun| run.training(run.prompt_tokens.unwrap_or(prompt));
        let synchronous = measurements
            .last(|run| training(run).filter(|_| run.is_alone() && run.has_one_pass))
            .filter(|_| !recipe.needs_reference() && !trains_critic(recipe));
        let synchronous_sampling = measurements.last(|run| run.sampling().filter(|_| run.is_alone()));
        let contention = measurements.last(|run| {
            let asynchronous = run.shares_cores && run.has_one_pass && !run.is_alone();
            let (sampling, training) = (run.sampling()?, training(run)?);
            asynchronous.then_some(MeasuredContention { sampling, training, idle: run.idle })
        });
        let longest = longest_completion(recipe, config, prompt);
        // Of runs rather one in which the sides did not slow each other.
        let mut parts = benchmarks.clone();
        let mut is_contended = false;
        if parts.training.is_empty() {
            let alone = measurements.last(|run| training(run).filter(|_| run.is_alone()));
            is_contended |= alone.is_none() && measurements.last(training).is_some();
            parts.training.extend(alone.or_else(|| measurements.last(training)));
        }
        if parts.decode.is_empty() {
            let decode = |run: &MeasuredRun| Some((run.decode()?, run.lengths[0] / 2.0));
            let alone = measurements.last(|run| decode(run).filter(|_| run.is_alone()));
            is_contended |= alone.is_none() && measurements.last(decode).is_some();
            if let Some((step, context)) = alone.or_else(|| measurements.last(decode)) {
                parts.decode.push(step);
                parts.decode_context = context;
            }
        }
        Self {
            parts,
            is_contended: is_contended && (synchronous.is_none() || synchronous_sampling.is_none()),
            trained_share: measurements.last(|run| Some(run.trained_share)),
            prompt_tokens,
            lengths: measurements.last(|run| Some(run.length_model(longest))),
            reward: measurements.last(MeasuredRun::reward_time),
            publish_s: measurements.last(|run| Some((run.transport, run.publish_s?))),
            stall_s: measurements.last(|run| run.stall_s),
            checkpoint_s: measurements.last(|run| run.checkpoint_s),
            logs_s: measurements.last(|run| Some(run.logs_s)).unwrap_or(0.0),
            commit_s: measurements.last(|run| run.commit_s).unwrap_or(0.0),
            synchronous,
            synchronous_sampling,
            contention,
        }
    }

    /// Mean length of prompts, tokens; half of the longest if none was measured.
    pub(super) fn prompt_tokens(&self, recipe: &Recipe) -> f64 {
        prompt_tokens_of(self.prompt_tokens, recipe)
    }

    /// Decode steps on `threads` threads, or on the most of all if it is `None`: sequences that decode together, and seconds.
    pub(super) fn decode_on(&self, threads: Option<usize>) -> Vec<(f64, f64)> {
        let steps = &self.parts.decode;
        let most = steps.iter().map(|step| step.threads).max().unwrap_or_default();
        let steps = steps.iter().filter(|step| step.threads == threads.unwrap_or(most));
        steps.map(|step| (step.sequences, step.seconds)).collect()
    }

    /// Training steps on `threads` threads, or on the most of all if it is `None`.
    pub(super) fn training_on(&self, threads: Option<usize>) -> Vec<MeasuredTraining> {
        let steps = &self.parts.training;
        let most = steps.iter().map(|step| step.threads).max().unwrap_or_default();
        steps.iter().filter(|step| step.threads == threads.unwrap_or(most)).copied().collect()
    }
}

fn prompt_tokens_of(measured: Option<f64>, recipe: &Recipe) -> f64 {
    measured.unwrap_or(recipe.data.max_prompt_length as f64 / 2.0)
}

/// Most tokens that a trajectory samples if its prompt has `prompt` tokens: an episode those of all its turns, as far as it has space.
pub(super) fn longest_completion(recipe: &Recipe, config: &Config, prompt: f64) -> f64 {
    let of_turn = recipe.rollout.max_completion_length as f64;
    recipe.environment.as_ref().map_or(of_turn, |environment| {
        let space = recipe.episode_tokens(config.max_context()) as f64 - prompt;
        (of_turn * environment.max_turns.max(1) as f64).min(space).max(1.0)
    })
}

/// Whether a critic with weights of its own is trained.
pub(super) fn trains_critic(recipe: &Recipe) -> bool {
    recipe.critic().is_some_and(|critic| critic.kind == CriticKind::Separate)
}

impl MeasuredRun {
    /// Whether each side had all cores while it worked.
    fn is_alone(&self) -> bool {
        self.shares_cores && self.max_staleness == 0
    }

    /// A step of its trainer, with prompts of `prompt` tokens.
    fn training(&self, prompt: f64) -> Option<MeasuredTraining> {
        Some(MeasuredTraining {
            threads: available_cores(),
            sequences: self.completions() * self.trained_share,
            length: self.lengths[0] + prompt,
            seconds: self.training_s?,
            is_of_run: true,
        })
    }

    /// What its sampler did.
    fn sampling(&self) -> Option<MeasuredSampling> {
        let MeasuredRun { batch, max_staleness, max_running, .. } = *self;
        Some(MeasuredSampling { batch, max_staleness, max_running, token_s: self.sampled_token_s? })
    }

    /// A decode step of one sampler with as many sequences as it could run.
    fn decode(&self) -> Option<MeasuredDecode> {
        let slots = self.completions() * (self.max_staleness as f64 + 1.0);
        let sequences = (slots / self.samplers as f64).min(self.max_running as f64);
        let seconds = sequences * self.sampled_token_s?;
        Some(MeasuredDecode { threads: available_cores(), sequences, seconds })
    }

    /// Lengths of its completions, for a limit of `cap` tokens.
    fn length_model(&self, cap: f64) -> LengthModel {
        let [length, longest] = self.lengths;
        LengthModel::from_longest([length.max(1.0), longest.max(1.0), cap], self.completions(), SHARED)
    }
}
