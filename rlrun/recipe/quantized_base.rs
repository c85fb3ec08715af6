//! The rules of `lora.quantized_base`: what a base that stays quantised cannot be combined with.
//!
//! Invariant: everything that needs the frozen weights in f32 is refused here and named with a remedy.

use super::ranges::Checker;
use super::words::{EngineWord, Quantization, Reduction};
use super::{Model, Recipe};

const KEY: &str = "lora.quantized_base";

/// Checks a recipe whose frozen weights stay quantised.
pub(super) fn check(recipe: &Recipe, checker: &mut Checker<'_>) {
    if !recipe.lora.as_ref().is_some_and(|lora| lora.quantized_base) {
        return;
    }
    let rollout = &recipe.rollout;
    let is_random = matches!(recipe.model, Model::Random(_));
    // What breaks a rule, the key that does, what the base needs, and what helps.
    for (breaks, path, needs, help) in [
        (is_random, "model.random", "a model of files", "name a GGUF file or a directory in `model.path`"),
        (
            recipe.is_colocated(),
            "placement.policy",
            "a sampler that does not take turns with the trainer",
            "remove it: neither has weights in f32 that the other could use the memory of",
        ),
        (
            recipe.weights.transport.is_between_devices(),
            "weights.transport",
            "factors that go through the host",
            "remove it: a version is as small as the adapter",
        ),
        (
            rollout.engine != EngineWord::default(),
            "rollout.engine",
            "rlrun's own sampler",
            "remove it: the engine would need the base in f32",
        ),
        (
            rollout.quantization != Quantization::None,
            "rollout.quantization",
            "a sampler with the numbers of the trainer",
            "remove it: the weights stay as their files store them",
        ),
        (
            recipe.reduction == Reduction::Tree,
            "model.reduction",
            "sums as chains",
            "set `model.reduction = \"chain\"`",
        ),
        (
            recipe.warmup.is_some(),
            "warmup",
            "no warm-up, which trains all weights",
            "remove `[warmup]`, or start from a model that `[supervised]` trained",
        ),
        (
            recipe.critic.is_some(),
            "critic",
            "no critic, which starts from weights in f32",
            "use an `algorithm.kind` without one",
        ),
    ] {
        if breaks {
            checker.report_latest(&[path, KEY], format!("`{KEY}` needs {needs}"), help);
        }
    }
}
