//! Ranges of single values.
//!
//! Invariant: defaults are inside their ranges, so an error always has a line to point at. Rules between keys stand
//! in `checks.rs`.

use super::diagnostic::Diagnostic;
use super::layers::Origins;
use model::config::{MAX_LAYERS, MAX_WEIGHTS};
use rewards::RewardSpec;

use super::schema::{CheckpointSection, RandomModel, RawRecipe};
use crate::archive::{self, ArchiveUrl};

/// Collects what is wrong.
#[derive(Debug)]
pub(super) struct Checker<'a> {
    pub(super) origins: &'a Origins,
    pub(super) errors: Vec<Diagnostic>,
}

/// Numbers that a key accepts, in words and as a test.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    words: &'static str,
    hold: fn(f64) -> bool,
}

pub(super) const POSITIVE: Bounds = Bounds { words: "above 0", hold: |x| x > 0.0 };
pub(super) const NOT_NEGATIVE: Bounds = Bounds { words: "0 or more", hold: |x| x >= 0.0 };
pub(super) const SHARE: Bounds =
    Bounds { words: "at least 0 and below 1", hold: |x| (0.0..1.0).contains(&x) };
pub(super) const FRACTION: Bounds = Bounds { words: "above 0 and at most 1", hold: |x| x > 0.0 && x <= 1.0 };
pub(super) const ANY: Bounds = Bounds { words: "a finite number", hold: |_| true };
pub(super) const UNIT: Bounds =
    Bounds { words: "at least 0 and at most 1", hold: |x| (0.0..=1.0).contains(&x) };

impl Checker<'_> {
    /// Reports `message` at the value of `path`.
    pub(super) fn report(&mut self, path: &str, message: impl Into<String>, help: &str) {
        let place = self.origins.get(path).map(|origin| origin.value.clone());
        let diagnostic = Diagnostic::new(message, place);
        self.errors.push(if help.is_empty() { diagnostic } else { diagnostic.help(help) });
    }

    /// Reports a rule between keys at the one that was written in the highest layer, the first of them if several
    /// were: what was written last broke the rule.
    pub(super) fn report_latest(&mut self, paths: &[&str], message: impl Into<String>, help: &str) {
        let layer = |path: &&&str| self.origins.get(path).map(|origin| origin.layer);
        let latest = paths.iter().rev().max_by_key(layer).copied().unwrap_or_default();
        self.report(latest, message, help);
    }

    /// Whether the user wrote this key in some layer.
    pub(super) fn given(&self, path: &str) -> bool {
        self.origins.get(path).is_some()
    }

    /// The key `path`, or the first key under it, if the user wrote one.
    pub(super) fn first_given(&self, path: &str) -> Option<String> {
        self.origins.first_under(path)
    }

    pub(super) fn number(&mut self, path: &str, value: f64, bounds: Bounds) {
        if !(value.is_finite() && (bounds.hold)(value)) {
            self.report(path, format!("`{path}` is {value}; it must be {}", bounds.words), "");
        }
    }

    pub(super) fn at_least_one(&mut self, path: &str, value: usize) {
        if value == 0 {
            self.report(path, format!("`{path}` is 0; it must be 1 or more"), "");
        }
    }
}

/// Checks every single value against its range.
pub(super) fn check_ranges(raw: &RawRecipe, checker: &mut Checker<'_>) {
    for (path, value, bounds) in [
        ("rollout.temperature", raw.rollout.temperature, POSITIVE),
        ("rollout.top_p", raw.rollout.top_p, FRACTION),
        ("rollout.min_p", raw.rollout.min_p, SHARE),
        ("buffer.reward_temperature", raw.buffer.reward_temperature, POSITIVE),
        ("algorithm.kl_coef", raw.algorithm.kl_coef, NOT_NEGATIVE),
        ("algorithm.entropy_coef", raw.algorithm.entropy_coef, ANY),
        ("trainer.learning_rate", raw.trainer.learning_rate, POSITIVE),
        ("trainer.weight_decay", raw.trainer.weight_decay, NOT_NEGATIVE),
        ("trainer.adam_beta1", raw.trainer.adam_beta1, SHARE),
        ("trainer.adam_beta2", raw.trainer.adam_beta2, SHARE),
        ("trainer.adam_eps", raw.trainer.adam_eps, POSITIVE),
        ("trainer.momentum", raw.trainer.momentum, SHARE),
        ("trainer.dion_rank_fraction", raw.trainer.dion_rank_fraction, FRACTION),
        ("trainer.max_grad_norm", raw.trainer.max_grad_norm, POSITIVE),
        ("trainer.router_correction_rate", raw.trainer.router_correction_rate, NOT_NEGATIVE),
        ("trainer.elastic.patience_s", raw.trainer.elastic.patience_s, NOT_NEGATIVE),
        ("eval.temperature", raw.eval.temperature, NOT_NEGATIVE),
        ("deadlines.wait_s", raw.deadlines.wait_s, POSITIVE),
        ("deadlines.quiet_s", raw.deadlines.quiet_s, POSITIVE),
        ("deadlines.heartbeat_s", raw.deadlines.heartbeat_s, POSITIVE),
    ] {
        checker.number(path, value, bounds);
    }
    for (path, value) in [
        ("data.max_prompt_length", raw.data.max_prompt_length),
        ("rollout.group_size", raw.rollout.group_size),
        ("rollout.max_completion_length", raw.rollout.max_completion_length),
        ("rollout.max_running", raw.rollout.max_running),
        ("rollout.tensor", raw.rollout.tensor),
        ("rollout.prefill_chunk", raw.rollout.prefill_chunk.unwrap_or(1)),
        ("buffer.batch_groups", raw.buffer.batch_groups),
        ("buffer.max_uses", raw.buffer.max_uses as usize),
        ("buffer.max_mib", usize::try_from(raw.buffer.max_mib).unwrap_or(usize::MAX)),
        ("trainer.minibatches", raw.trainer.minibatches),
        ("trainer.epochs", raw.trainer.epochs),
        ("trainer.microbatch_tokens", raw.trainer.microbatch_tokens),
        ("trainer.world", raw.trainer.world),
        ("trainer.parallel.tensor", raw.trainer.parallel.tensor),
        ("trainer.parallel.context", raw.trainer.parallel.context),
        ("trainer.parallel.sections", raw.trainer.parallel.sections),
        ("trainer.parallel.pipeline", raw.trainer.parallel.pipeline),
        ("trainer.parallel.expert", raw.trainer.parallel.expert),
        ("trainer.leaves", raw.trainer.leaves),
        ("trainer.elastic.min_world", raw.trainer.elastic.min_world),
        ("placement.rollout_threads", raw.placement.rollout_threads.unwrap_or(1)),
        ("placement.trainer_threads", raw.placement.trainer_threads.unwrap_or(1)),
        ("eval.tasks", raw.eval.tasks.unwrap_or(1)),
        ("checkpoint.keep_last", raw.checkpoint.keep_last),
        ("weights.full_every", raw.weights.full_every),
    ] {
        checker.at_least_one(path, value);
    }
    check_archive(&raw.checkpoint, checker);
    check_algorithm(raw, checker);
    check_seed_and_steps(raw, checker);
    check_optional_sections(raw, checker);
    for (index, reward) in raw.rewards.iter().enumerate() {
        check_reward(index, reward, checker);
    }
}

/// The address of the archive, and whether this program can open one.
fn check_archive(checkpoint: &CheckpointSection, checker: &mut Checker<'_>) {
    let Some(url) = &checkpoint.url else { return };
    if let Err(reason) = url.parse::<ArchiveUrl>() {
        let message = format!("`checkpoint.url` is {url:?}, and {reason}");
        checker.report("checkpoint.url", message, "write an address such as \"s3://BUCKET/RUN\"");
    } else if !archive::IS_BUILT {
        let message = "`checkpoint.url` needs object stores, and this program was built without them";
        checker.report("checkpoint.url", message, "build it with `--features object-store`");
    }
}

fn check_algorithm(raw: &RawRecipe, checker: &mut Checker<'_>) {
    let algorithm = &raw.algorithm;
    for (key, value, bounds) in [
        ("clip_eps_low", algorithm.clip_eps_low, FRACTION),
        ("clip_eps_high", algorithm.clip_eps_high, POSITIVE),
        ("dual_clip", algorithm.dual_clip, POSITIVE),
        ("importance_cap", algorithm.importance_cap, POSITIVE),
        ("behavior_weight_cap", algorithm.behavior_weight_cap, POSITIVE),
        ("behavior_weight_floor", algorithm.behavior_weight_floor, NOT_NEGATIVE),
        ("entropy_share", algorithm.entropy_share, FRACTION),
        ("nll_coef", algorithm.nll_coef, NOT_NEGATIVE),
        ("gamma", algorithm.gamma, FRACTION),
        ("lambda", algorithm.lambda, UNIT),
        ("length_adaptive", algorithm.length_adaptive, NOT_NEGATIVE),
        ("beta", algorithm.beta, POSITIVE),
        ("demonstration_gate", algorithm.demonstration_gate, SHARE),
    ] {
        if let Some(value) = value {
            checker.number(&format!("algorithm.{key}"), value, bounds);
        }
    }
    checker.at_least_one("algorithm.attempts", algorithm.attempts.unwrap_or(1));
    if let Some(critic) = &raw.critic {
        checker.number("critic.learning_rate", critic.learning_rate.unwrap_or(1.0), POSITIVE);
        checker.number("critic.coef", critic.coef.unwrap_or(1.0), POSITIVE);
        checker.number("critic.lambda", critic.lambda, UNIT);
        checker.number("critic.value_clip", critic.value_clip.unwrap_or(1.0), POSITIVE);
    }
}

fn check_seed_and_steps(raw: &RawRecipe, checker: &mut Checker<'_>) {
    if i64::try_from(raw.seed).is_err() {
        checker.report("seed", format!("`seed` is {}; it must be at most {}", raw.seed, i64::MAX), "");
    }
    if raw.trainer.steps == 0 {
        let message = if checker.given("trainer.steps") {
            "`trainer.steps` is 0; it must be 1 or more"
        } else {
            "`trainer.steps` is missing: how many training steps the run has"
        };
        checker.report("trainer.steps", message, "write it under `[trainer]`, such as `steps = 100`");
    }
}

/// The sizes of a new model.
fn check_random(random: &RandomModel, checker: &mut Checker<'_>) {
    let [experts, per_token] = random.experts();
    for (path, value) in [
        ("model.random.hidden_size", random.hidden_size),
        ("model.random.intermediate_size", random.intermediate_size),
        ("model.random.num_layers", random.num_layers),
        ("model.random.num_heads", random.num_heads),
        ("model.random.num_kv_heads", random.num_kv_heads),
        ("model.random.experts", experts),
        ("model.random.experts_per_token", per_token),
    ] {
        checker.at_least_one(path, value);
    }
    check_random_size(random, checker);
    if per_token > experts {
        let message =
            format!("`model.random.experts_per_token` is {per_token}, and `model.random.experts` {experts}");
        let paths = ["model.random.experts", "model.random.experts_per_token"];
        checker.report_latest(&paths, message, "a token has at most all experts");
    }
    checker.number("model.random.initializer_range", random.initializer_range, POSITIVE);
    for (path, given) in [
        ("model.random.experts", random.experts),
        ("model.random.experts_per_token", random.experts_per_token),
    ] {
        if given.is_some() && !random.architecture.has_experts() {
            let message = format!("`{path}` has no effect: a family without experts is built");
            checker.report(
                path,
                message,
                "leave it out, or set `model.random.architecture` to a family with experts, such as \"olmoe\"",
            );
        }
    }
}

/// The limits of models in files, with which no size that is computed overflows.
fn check_random_size(random: &RandomModel, checker: &mut Checker<'_>) {
    if random.num_layers > MAX_LAYERS {
        let path = "model.random.num_layers";
        let message = format!("`{path}` is {}; it must be at most {MAX_LAYERS}", random.num_layers);
        return checker.report(path, message, "");
    }
    let experts = if random.architecture.has_experts() { random.experts()[0] } else { 1 };
    let [hidden, middle, experts, layers] =
        [random.hidden_size, random.intermediate_size, experts, random.num_layers].map(|size| size as u128);
    // An attention or a recurrence has matrices of at most twice the width of the stream each.
    let feed_forward = experts.saturating_mul(3 * middle + 1);
    let layer = (8 * hidden).saturating_add(feed_forward).saturating_mul(hidden);
    let weights = layers.saturating_mul(layer).saturating_add(2 * model::CHARACTERS as u128 * hidden);
    if weights > MAX_WEIGHTS {
        let message =
            format!("a model of these sizes has about {weights} weights, and at most {MAX_WEIGHTS}");
        let paths = [
            "model.random.hidden_size",
            "model.random.intermediate_size",
            "model.random.num_layers",
            "model.random.experts",
        ];
        checker.report_latest(&paths, message, "lower one of them");
    }
}

fn check_optional_sections(raw: &RawRecipe, checker: &mut Checker<'_>) {
    if let Some(random) = &raw.model.random {
        check_random(random, checker);
    }
    if let Some(arithmetic) = &raw.data.arithmetic {
        checker.at_least_one("data.arithmetic.max_operand", arithmetic.max_operand as usize);
        checker.at_least_one("data.arithmetic.train_tasks", arithmetic.train_tasks);
    }
    if let Some(seeds) = &raw.data.seeds {
        checker.at_least_one("data.seeds.train_tasks", seeds.train_tasks);
    }
    if raw.lora.is_some() && raw.trainer.router_correction_rate > 0.0 {
        let message =
            "`trainer.router_correction_rate` updates routers, and with `[lora]` all weights are frozen";
        checker.report("trainer.router_correction_rate", message, "leave it out");
    }
    if let Some(lora) = &raw.lora {
        checker.at_least_one("lora.rank", lora.rank);
        checker.number("lora.alpha", lora.alpha, POSITIVE);
    }
    if let Some(warmup) = &raw.warmup {
        checker.at_least_one("warmup.batch_tasks", warmup.batch_tasks);
        checker.number("warmup.learning_rate", warmup.learning_rate, POSITIVE);
        checker.number("warmup.wrong_share", warmup.wrong_share, SHARE);
        checker.number("warmup.stop_accuracy", warmup.stop_accuracy.unwrap_or(1.0), FRACTION);
    }
}

fn check_reward(index: usize, reward: &RewardSpec, checker: &mut Checker<'_>) {
    checker.number(&format!("rewards[{index}].weight"), reward.weight, ANY);
    checker.number(&format!("rewards[{index}].timeout_s"), reward.timeout_s, POSITIVE);
    checker.at_least_one(&format!("rewards[{index}].concurrency"), reward.concurrency);
    checker.at_least_one(&format!("rewards[{index}].max_length"), reward.max_length.unwrap_or(1));
    checker.at_least_one(&format!("rewards[{index}].cache"), reward.cache.unwrap_or(1));
}
