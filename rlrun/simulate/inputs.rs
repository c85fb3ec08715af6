//! The scenario of a recipe, from its keys, measurements and hardware.
//!
//! Invariant: a measurement wins over an estimate. An estimate of decoding or of training has a note with the command that measures it;
//! those of prefill, of weights and of what both sides share have none.

use model::thread_pool::available_cores;
use model::{Config, Layout, Recompute};
use simulator::{
    ApplyRule, DecodeCurve, LatencyModel, LengthModel, PrefillCost, ResourceSharing, RewardService,
    SamplerFleet, Scenario, SimulationError, ToolCalls, TrainingCost, WeightDelivery,
};

use super::calibration::{Calibration, MeasuredTraining, SHARED, longest_completion, trains_critic};
use super::exchange::{RankExchange, SamplerExchange, VersionTransfer};
use super::hardware::{Hardware, HardwareKind};
use crate::failure::Failure;
use crate::plan::memory::reference_shape;
use crate::plan::traffic::trained_values;
use crate::plan::{BatchPlan, refuse_degrees};
use crate::recipe::Recipe;
use crate::recipe::words::{ModelDtype, OnUpdate, WeightDtypeWord};

/// Bytes that an update with AdamW reads and writes for a weight: weight, gradient and two moments in f32 are read, three written.
const UPDATE_BYTES: f64 = 28.0;
const F32: f64 = 4.0;
/// Passes of a forward and its backward, which has twice its products.
const PASSES: f64 = 3.0;

/// What a recipe is simulated with.
#[derive(Debug)]
pub struct ScenarioInputs {
    /// The hardware.
    pub hardware: Hardware,
    /// The measurements.
    pub calibration: Calibration,
    /// The weights of the model.
    pub layout: Layout,
    factors: TimeFactors,
    /// Work of a forward pass of the reference over that of the policy: a teacher may have another shape.
    reference_work: f64,
}

/// Factors of times, as runs have measured them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TimeFactors {
    /// Of decode steps and prefills, which benchmarks have measured.
    sampling: f64,
    /// Of a sampler and of the trainer while both have all cores; `None` if no run has measured them.
    contention: Option<[f64; 2]>,
}

/// Work of a token, by the shape of a model.
#[derive(Clone, Copy, Debug)]
struct TokenWork {
    parameters: f64,
    /// Multiply-adds of a token, without attention.
    products: f64,
    /// Operations of attention for a token and each token that it sees.
    seen: f64,
    /// Bytes of keys and values of a token.
    cached: f64,
    /// Bytes of a weight.
    width: f64,
    /// Operations per second of the hardware in the number format of the weights.
    flops: f64,
}

/// The passes of a step, and how ranks divide them.
#[derive(Clone, Copy, Debug)]
struct StepSplit {
    /// Passes over a token, each as long as a forward of the policy: forwards, and backwards as two each, of the policy, the reference and
    /// a critic of the policy's shape.
    passes: f64,
    /// Ranks that share a pass over the same tokens.
    sharing: f64,
    /// Groups of such ranks, which have tokens of their own.
    ranks: f64,
    /// Time of the work of a rank, as a multiple of that with the hardware to itself: ranks on a processor divide its cores.
    slowdown: f64,
}

/// Seconds of a step of one rank, without what ranks exchange.
#[derive(Clone, Copy, Debug)]
struct StepCost {
    token_s: f64,
    /// Of a sequence, by the square of its tokens.
    square_s: f64,
    fixed_s: f64,
    /// Of the optimizer.
    update_s: f64,
}

impl StepSplit {
    /// With a reference whose forward pass has `reference_work` times the work of the policy's.
    fn of(recipe: &Recipe, hardware: HardwareKind, reference_work: f64) -> Self {
        let trainer = &recipe.trainer;
        let recomputed = if trainer.recompute == Recompute::None { 0.0 } else { 1.0 };
        let reference = if recipe.needs_reference() { reference_work } else { 0.0 };
        let trained = if trains_critic(recipe) { 2.0 } else { 1.0 };
        let sharing = trainer.parallel.config().of_pass().max(1) as f64;
        let ranks = (trainer.world as f64 / sharing).max(1.0);
        Self {
            passes: trained * trainer.epochs as f64 * (PASSES + recomputed) + reference,
            sharing,
            ranks,
            slowdown: if hardware == HardwareKind::Gpu { 1.0 } else { sharing * ranks },
        }
    }
}

impl ScenarioInputs {
    /// Without factors of runs, and with a reference of the policy's shape.
    #[must_use]
    pub fn new(hardware: Hardware, calibration: Calibration, layout: Layout) -> Self {
        let factors = TimeFactors { sampling: 1.0, contention: None };
        Self { hardware, calibration, layout, factors, reference_work: 1.0 }
    }

    /// With the factors that the runs of the calibration have measured, which ran this `recipe` on all cores: a synchronous one what
    /// sampling takes, an asynchronous one what both sides lose while the other one computes. The reference has its own shape.
    ///
    /// # Errors
    /// As [`Self::scenario`].
    pub fn with_runs(mut self, recipe: &Recipe, config: &Config) -> Result<Self, Failure> {
        /// Steps of the scenario, which are not simulated.
        const STEPS: u64 = 10;
        self.reference_work =
            multiply_adds(&reference_shape(recipe, config)) / multiply_adds(config).max(1.0);
        let Some(sampling) = self.calibration.synchronous_sampling else { return Ok(self) };
        let mut on_all_cores = recipe.clone();
        on_all_cores.placement.rollout_threads = None;
        on_all_cores.placement.trainer_threads = None;
        on_all_cores.placement.processes = false;
        on_all_cores.rollout.tensor = 1;
        let (scenario, _) = self.scenario(&on_all_cores, config, STEPS)?;
        self.factors.sampling = sampling.time_ratio(&scenario).map_err(|error| refused(&error))?;
        let (Some(alone), Some(contention)) = (self.calibration.synchronous, self.calibration.contention)
        else {
            return Ok(self);
        };
        if let Some(trainer) = contention.trainer_factor(&alone) {
            let (scenario, _) = self.scenario(&on_all_cores, config, STEPS)?;
            let sampler = contention.sampler_factor(&scenario, trainer).map_err(|error| refused(&error))?;
            self.factors.contention = Some([sampler, trainer]);
        }
        Ok(self)
    }

    /// The scenario of `recipe` over `steps` steps, and what about it is an estimate.
    ///
    /// # Errors
    /// A recipe whose groups or buffer cannot be simulated, or whose ranks cannot share the model.
    pub fn scenario(
        &self,
        recipe: &Recipe,
        config: &Config,
        steps: u64,
    ) -> Result<(Scenario, Vec<String>), Failure> {
        refuse_degrees(recipe, config)?;
        let mut notes = Vec::new();
        let work = self.work(recipe, config);
        let prompt_tokens = self.calibration.prompt_tokens(recipe);
        let longest = longest_completion(recipe, config, prompt_tokens);
        let lengths = self.lengths(recipe, longest, &mut notes);
        let samplers = if recipe.placement.processes { recipe.rollout_workers().max(1) } else { 1 };
        let cores = self.cores_factor(recipe, samplers);
        let sums = SamplerExchange::of(&self.hardware, recipe, config);
        let factor = cores[0] * self.factors.sampling;
        let decode = self.decode(&work, &sums, &mut notes).times(factor).plus(sums.decode_s);
        let prefill = self
            .calibration
            .parts
            .prefill_token_s
            .unwrap_or_else(|| 2.0 * work.products / (work.flops * self.hardware.prefill_share.value));
        let prefill = PrefillCost {
            fixed_s: sums.decode_s[0],
            per_token_s: prefill * sums.share * factor + sums.prefill_token_s,
        };
        let warm_steps = (recipe.buffer.max_staleness + 3).min(steps / 2);
        let scenario = Scenario {
            steps,
            warm_steps,
            batch_groups: recipe.buffer.batch_groups,
            group_size: completions_of_group(recipe),
            max_staleness: recipe.buffer.max_staleness,
            on_stale: recipe.buffer.on_stale,
            slots: None,
            lead_adapts: recipe.buffer.adapt_staleness,
            prompt_tokens,
            tools: recipe.environment.as_ref().map(|environment| ToolCalls {
                turns: environment.max_turns.max(1),
                time: LatencyModel::NONE,
                answer_tokens: prompt_tokens,
            }),
            rewards: RewardService { time: self.reward_time(), concurrency: usize::MAX },
            samplers: SamplerFleet {
                count: samplers,
                decode,
                prefill,
                max_running: recipe.rollout.max_running,
                count_adapts: recipe.placement.adapt_samplers,
                running_adapts: recipe.rollout.adapt_running,
                kv_tokens: recipe.rollout.kv_cache_tokens.map_or(f64::INFINITY, |tokens| tokens as f64),
                absences: Vec::new(),
            },
            trainer: {
                let mean_tokens = lengths.mean() + prompt_tokens;
                self.training(recipe, config, &work, mean_tokens, cores[1], &mut notes)
            },
            weights: self.weights(recipe, &work),
            sharing: self.sharing(recipe, &work),
            lengths,
        };
        self.note_assumptions(recipe, &mut notes);
        scenario.check().map_err(|error| refused(&error))?;
        Ok((scenario, notes))
    }

    /// Adds what is assumed without a measurement.
    fn note_assumptions(&self, recipe: &Recipe, notes: &mut Vec<String>) {
        if recipe.environment.is_some() {
            notes.push("turns of the environment are assumed to be all of `max_turns`, and its answers to take no time".to_owned());
        }
        if self.hardware.kind == HardwareKind::Gpu && !recipe.devices().any() {
            notes.push(
                "the recipe names no GPU: both sides are simulated on one, at the same time".to_owned(),
            );
        }
        if self.hardware.flops(recipe.dtype).is_none() {
            notes.push(format!(
                "products in f32 are assumed to be as fast as in bf16: the hardware file of {} has no flops_f32_per_s",
                self.hardware.name
            ));
        }
        if self.calibration.reward.is_none() {
            notes.push("rewards are assumed to take no time; `--calibration RUN` takes their times from an earlier run".to_owned());
        }
    }

    fn work(&self, recipe: &Recipe, config: &Config) -> TokenWork {
        let gpu = self.hardware.kind == HardwareKind::Gpu;
        let width = if gpu && recipe.dtype != ModelDtype::F32 { 2.0 } else { F32 };
        let layers = config.attention_layers() as f64;
        TokenWork {
            parameters: self.layout.len() as f64,
            products: multiply_adds(config),
            seen: 4.0 * layers * (config.num_heads * config.head_dim) as f64,
            cached: 2.0 * layers * (config.num_kv_heads * config.head_dim) as f64 * width,
            width,
            flops: self.hardware.flops(recipe.dtype).unwrap_or(self.hardware.flops_per_s.value),
        }
    }

    /// Lengths of what a trajectory samples, at most `cap` tokens.
    fn lengths(&self, recipe: &Recipe, cap: f64, notes: &mut Vec<String>) -> LengthModel {
        /// Standard deviation of the logarithm of lengths, where nothing was measured.
        const SPREAD: f64 = 0.6;
        if recipe.rollout.ignore_stop {
            return LengthModel::constant(cap);
        }
        self.calibration.lengths.clone().unwrap_or_else(|| {
            notes.push(format!(
                "lengths of completions are assumed: log-normal with a mean of {:.0} tokens, a third of the longest; `--calibration RUN` \
                 takes them from an earlier run",
                cap / 3.0
            ));
            LengthModel::with_mean((cap / 3.0).max(1.0), cap, SPREAD, SHARED)
        })
    }

    /// Time from the end of a completion until its group can be leased: its reward, and a commit of the journal.
    fn reward_time(&self) -> LatencyModel {
        let (time, commit_s) =
            (self.calibration.reward.unwrap_or(LatencyModel::NONE), self.calibration.commit_s);
        LatencyModel { median_s: time.median_s + commit_s, longest_s: time.longest_s + commit_s, ..time }
    }

    fn not_calibrated(&self, what: &str, measure: &str) -> String {
        format!(
            "not calibrated for {what}: its times are estimates of `{}`; measure with `rlrun-bench {measure} --model DIR --json > FILE`, \
             then `--calibration FILE`",
            self.hardware.name
        )
    }

    /// Decode steps of one of the ranks of a sampler, without what they send.
    fn decode(&self, work: &TokenWork, sums: &SamplerExchange, notes: &mut Vec<String>) -> DecodeCurve {
        let hardware = &self.hardware;
        let bandwidth = hardware.bandwidth_bytes_per_s.value * hardware.decoding_share.value;
        let flops = work.flops * hardware.prefill_share.value;
        let token = work.cached / bandwidth;
        let measured = DecodeCurve::measured(
            &self.calibration.decode_on(None),
            self.calibration.parts.decode_context,
            token,
        );
        measured.map(|curve| curve.times(sums.share)).unwrap_or_else(|| {
            notes.push(self.not_calibrated("decoding", "generate --sweep"));
            let read_s = work.parameters * work.width / bandwidth * sums.share;
            let [sequence, token] = [2.0 * work.products / flops, token].map(|seconds| seconds * sums.share);
            DecodeCurve::linear([read_s.max(hardware.launch_s.value), sequence, token])
        })
    }

    /// A step of the trainer for sequences of `mean_tokens`, prompts included.
    fn training(
        &self,
        recipe: &Recipe,
        config: &Config,
        work: &TokenWork,
        mean_tokens: f64,
        cores: f64,
        notes: &mut Vec<String>,
    ) -> TrainingCost {
        let step_tokens =
            mean_tokens * recipe.buffer.batch_groups as f64 * completions_of_group(recipe) as f64;
        let split = StepSplit::of(recipe, self.hardware.kind, self.reference_work);
        let estimated = self.estimated_step(recipe, work, &split, step_tokens);
        let cost = self.measured_step(&split, &estimated).unwrap_or_else(|| {
            notes.push(self.not_calibrated("training", "train"));
            estimated
        });
        let exchange = RankExchange::of(&self.hardware, recipe, (config, &self.layout), step_tokens);
        let factor = cores * exchange.stretch * self.calibration.trained_share.unwrap_or(1.0);
        TrainingCost {
            fixed_s: cost.fixed_s * factor + exchange.calls_s,
            per_token_s: cost.token_s * factor + exchange.token_s,
            per_square_s: cost.square_s * factor,
            optimizer_s: cost.update_s * cores + exchange.weights_s,
            lease_s: self.calibration.commit_s,
            logs_s: self.calibration.logs_s,
            ranks: split.ranks as usize,
            checkpoint_every: if self.calibration.checkpoint_s.is_some() {
                recipe.checkpoint.interval
            } else {
                0
            },
            checkpoint_s: self.calibration.checkpoint_s.unwrap_or(0.0),
            leases: 1,
        }
    }

    /// The step by the arithmetic and the bandwidth of the hardware.
    fn estimated_step(
        &self,
        recipe: &Recipe,
        work: &TokenWork,
        split: &StepSplit,
        step_tokens: f64,
    ) -> StepCost {
        let (hardware, trainer) = (&self.hardware, &recipe.trainer);
        let flops = work.flops * hardware.training_share.value;
        let [token_s, square_s] = [2.0 * work.products, work.seen / 2.0]
            .map(|operations| split.passes * operations * split.slowdown / flops / split.sharing);
        let bandwidth = hardware.bandwidth_bytes_per_s.value * hardware.decoding_share.value;
        // Each rank updates its part of all values. Ranks on a processor have one memory.
        let trained = trained_values(recipe, &self.layout).map_or(work.parameters, |values| values as f64);
        let gpu = hardware.kind == HardwareKind::Gpu;
        let updated = if gpu { trained / trainer.world.max(1) as f64 } else { trained };
        let micro_batches = (step_tokens / split.ranks / trainer.microbatch_tokens as f64).ceil();
        StepCost {
            token_s,
            square_s,
            fixed_s: micro_batches * split.passes * hardware.launch_s.value,
            update_s: BatchPlan::of(recipe).updates as f64 * UPDATE_BYTES * updated / bandwidth,
        }
    }

    /// The step by measurements, each of one forward and backward pass with its update on one rank; attention is divided from the rest as
    /// in `estimated` if all were of one length. `None` without a measurement.
    fn measured_step(&self, split: &StepSplit, estimated: &StepCost) -> Option<StepCost> {
        let ratio = estimated.square_s / estimated.token_s.max(f64::MIN_POSITIVE);
        let [token_s, square_s] = fitted(&self.calibration.training_on(None), ratio)?;
        // Steps of a run are shorter than those of a benchmark, and compute their loss.
        let slower = self.calibration.synchronous.map_or(1.0, |step| {
            let each = token_s * step.length + square_s * step.length * step.length;
            step.seconds / (step.sequences * each).max(f64::MIN_POSITIVE)
        });
        let is_of_run = self.calibration.parts.training.iter().any(|step| step.is_of_run);
        let passes = if is_of_run { 1.0 } else { split.passes / PASSES };
        let [token_s, square_s] =
            [token_s, square_s].map(|seconds| seconds * slower * passes * split.slowdown / split.sharing);
        Some(StepCost { token_s, square_s, fixed_s: 0.0, update_s: 0.0 })
    }

    fn weights(&self, recipe: &Recipe, work: &TokenWork) -> WeightDelivery {
        let rate = self.hardware.bandwidth_bytes_per_s.value * self.hardware.decoding_share.value;
        let computed = work.parameters * work.width;
        let width = if recipe.weights.dtype == WeightDtypeWord::Bf16 { F32 / 2.0 } else { F32 };
        let transfer = VersionTransfer { computed, sent: work.parameters * width, copy_s: computed / rate };
        let [publish_s, push_s] = transfer.seconds(recipe, &self.hardware);
        // What was measured is of one transport.
        let of_transport =
            self.calibration.publish_s.filter(|(transport, _)| *transport == recipe.weights.transport);
        let measured = of_transport.map(|(_, seconds)| seconds);
        WeightDelivery {
            publish_s: measured.unwrap_or(publish_s),
            push_s,
            stall_s: self.calibration.stall_s.unwrap_or(transfer.copy_s),
            apply: match recipe.rollout.on_update {
                OnUpdate::Keep => ApplyRule::Keep,
                OnUpdate::Recompute => ApplyRule::Recompute,
                OnUpdate::Drain => ApplyRule::Drain,
            },
        }
    }

    fn sharing(&self, recipe: &Recipe, work: &TokenWork) -> ResourceSharing {
        if recipe.is_colocated() {
            let bytes = work.parameters * (work.width + 2.0 * F32);
            return ResourceSharing::Turns { switch_s: bytes / self.hardware.bandwidth_bytes_per_s.value };
        }
        let devices = recipe.devices();
        let same = devices.rollout.is_some() && devices.trainer.contains(&devices.rollout);
        let cores = devices.rollout.is_none() && !devices.trains() && !recipe.placement.processes;
        if !(same || cores) || self.calibration.is_contended {
            return ResourceSharing::Separate;
        }
        let all = available_cores() as f64;
        let of = |threads: Option<usize>| threads.map_or(1.0, |threads| (threads as f64 / all).min(1.0));
        let asked = if same {
            2.0
        } else {
            of(recipe.placement.rollout_threads) + of(recipe.placement.trainer_threads)
        };
        let asked = asked.max(1.0);
        if let (Some([sampler, trainer]), false, true) = (self.factors.contention, same, asked >= 2.0) {
            return ResourceSharing::Cores { sampler, trainer };
        }
        // Beside each other both sides have half of the cores: what they lose was measured, or is what they share.
        let half = (available_cores() / 2).max(1);
        let [sampler, trainer] = [self.decoding_beside(recipe, half), self.training_beside(half)];
        let measured = |factor: Option<f64>| {
            factor.filter(|_| !same && asked >= 2.0).map_or(asked, |factor| factor.max(1.0))
        };
        ResourceSharing::Cores { sampler: measured(sampler), trainer: measured(trainer) }
    }

    /// Time of a decode step on `threads` threads over that on all, for half of the sequences that can run together. `None` unless both
    /// were measured.
    fn decoding_beside(&self, recipe: &Recipe, threads: usize) -> Option<f64> {
        let slots = recipe.buffer.batch_groups as u64 * recipe.buffer.max_staleness.saturating_add(1);
        let completions = slots.saturating_mul(completions_of_group(recipe) as u64);
        let limit = (recipe.rollout.max_running as u64).min(completions);
        let context = self.calibration.parts.decode_context;
        let on = |threads: Option<usize>| {
            let curve = DecodeCurve::measured(&self.calibration.decode_on(threads), context, 0.0)?;
            Some(curve.step_s(limit as f64 / 2.0, 0.0))
        };
        Some(on(Some(threads))? / on(None)?)
    }

    /// Time of a training step on `threads` threads over that on all. `None` unless both were measured.
    fn training_beside(&self, threads: usize) -> Option<f64> {
        let on = |threads: Option<usize>| Some(fitted(&self.calibration.training_on(threads), 0.0)?[0]);
        Some(on(Some(threads))? / on(None)?)
    }

    /// Factors of the times of a sampler and of the trainer that have some of the cores.
    fn cores_factor(&self, recipe: &Recipe, samplers: usize) -> [f64; 2] {
        if self.hardware.kind == HardwareKind::Gpu {
            return [1.0, 1.0];
        }
        let all = available_cores() as f64;
        let share = if recipe.placement.processes { all / (samplers as f64 + 1.0) } else { all };
        let threads = |given: Option<usize>| given.map_or(share, |threads| threads as f64).clamp(0.1, all);
        [recipe.placement.rollout_threads, recipe.placement.trainer_threads].map(|given| all / threads(given))
    }
}

/// Completions of a group: every role of an environment has one of its own.
fn completions_of_group(recipe: &Recipe) -> usize {
    recipe.rollout.group_size.saturating_mul(recipe.known_roles())
}

/// Multiply-adds of a token in a model of the shape `config`, without attention.
fn multiply_adds(config: &Config) -> f64 {
    (config.layer_multiply_adds() + config.vocab_size * config.hidden_size) as f64
}

fn refused(error: &SimulationError) -> Failure {
    Failure::Argument(error.to_string())
}

/// Seconds of a token and of the square of a sequence's tokens, by least squares over what was measured; with steps of one length
/// alone, in the ratio `square` that is estimated. `None` without a measurement.
fn fitted(steps: &[MeasuredTraining], square: f64) -> Option<[f64; 2]> {
    let [mut tt, mut ts, mut ss, mut ty, mut sy] = [0.0; 5];
    for step in steps {
        let (t, s) = (step.sequences * step.length, step.sequences * step.length * step.length);
        (tt, ts, ss) = (tt + t * t, ts + t * s, ss + s * s);
        (ty, sy) = (ty + t * step.seconds, sy + s * step.seconds);
    }
    let first = steps.first()?;
    let determinant = tt * ss - ts * ts;
    if steps.iter().any(|step| step.length != first.length) && determinant > 0.0 {
        let (token, of_square) = ((ty * ss - sy * ts) / determinant, (sy * tt - ty * ts) / determinant);
        if token > 0.0 && of_square >= 0.0 {
            return Some([token, of_square]);
        }
    }
    let ratio = square.max(0.0);
    let weighted: f64 =
        steps.iter().map(|step| step.sequences * step.length * (1.0 + ratio * step.length)).sum();
    let seconds: f64 = steps.iter().map(|step| step.seconds).sum();
    (weighted > 0.0).then(|| [seconds / weighted, ratio * seconds / weighted])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::schema::CriticSection;
    use crate::recipe::words::CriticKind;

    #[test]
    fn two_lengths_give_both_costs_and_one_length_the_estimated_ratio() {
        let step = |sequences: f64, length: f64| MeasuredTraining {
            threads: 2,
            sequences,
            length,
            seconds: sequences * (2e-5 * length + 1e-9 * length * length),
            is_of_run: false,
        };
        let training = vec![step(16.0, 1024.0), step(4.0, 8192.0), step(64.0, 128.0)];
        let [token, square] = fitted(&training, 0.0).unwrap();
        assert!((token / 2e-5 - 1.0).abs() < 1e-6 && (square / 1e-9 - 1.0).abs() < 1e-6, "{token} {square}");
        let [token, square] = fitted(&[step(16.0, 1024.0)], 5e-5).unwrap();
        assert!((token / 2e-5 - 1.0).abs() < 1e-6 && (square / 1e-9 - 1.0).abs() < 1e-6, "{token} {square}");
        assert_eq!(fitted(&[], 0.0), None);
    }
    fn shipped(name: &str) -> (Recipe, Config) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes").join(name);
        let recipe = Recipe::load(&path, &[], &crate::program::Program::default()).unwrap().0;
        let config = crate::simulate::shape(&recipe).unwrap();
        (recipe, config)
    }

    fn estimates(config: &Config, hardware: &str) -> ScenarioInputs {
        ScenarioInputs::new(Hardware::open(hardware).unwrap(), Calibration::default(), Layout::new(config))
    }

    #[test]
    fn an_episode_has_the_tokens_of_its_turns_and_a_group_an_episode_of_each_role() {
        let (recipe, config) = shipped("selfplay_tictactoe.toml");
        let (scenario, _) = estimates(&config, "cpu").scenario(&recipe, &config, 10).unwrap();
        assert_eq!((scenario.group_size, scenario.lengths.longest()), (32, 36.0));
        let (mut recipe, config) = shipped("guess_number.toml");
        let inputs = estimates(&config, "cpu");
        let longest = |recipe: &Recipe| inputs.scenario(recipe, &config, 10).unwrap().0.lengths.longest();
        assert_eq!(longest(&recipe), 72.0);
        // An episode of 60 tokens has space for 40 after its prompt.
        recipe.environment.as_mut().unwrap().max_tokens = Some(60);
        assert_eq!(longest(&recipe), 40.0);
    }

    #[test]
    fn a_critic_trains_a_teacher_scores_by_its_size_and_f32_has_its_own_speed() {
        let (mut recipe, config) = shipped("guess_number.toml");
        let passes = |recipe: &Recipe| StepSplit::of(recipe, HardwareKind::Cpu, 4.0).passes;
        recipe.algorithm.kl_coef = 0.0;
        let alone = passes(&recipe);
        recipe.critic = Some(CriticSection { kind: CriticKind::Separate, ..CriticSection::default() });
        assert_eq!(passes(&recipe), 2.0 * alone);
        recipe.algorithm.kl_coef = 0.1;
        assert_eq!(passes(&recipe), 2.0 * alone + 4.0);
        recipe.dtype = ModelDtype::F32;
        let mut inputs = estimates(&config, "h200");
        assert_eq!(inputs.work(&recipe, &config).flops, 6.69e13);
        inputs.hardware.flops_f32_per_s = None;
        let (_, notes) = inputs.scenario(&recipe, &config, 10).unwrap();
        assert!(notes.iter().any(|note| note.contains("flops_f32_per_s")), "{notes:?}");
    }
}
