//! The rules of `lora.quantized_base`: what a base that stays quantised cannot be combined with.
//!
//! Invariant: everything that needs the frozen weights in f32, or in another process, is refused here and named with a remedy.

use super::ranges::Checker;
use super::words::{EngineWord, Quantization, Reduction};
use super::{Model, Recipe};

const KEY: &str = "lora.quantized_base";

/// Checks a recipe whose frozen weights stay quantised.
pub(super) fn check(recipe: &Recipe, checker: &mut Checker<'_>) {
    if !recipe.lora.as_ref().is_some_and(|lora| lora.quantized_base) {
        return;
    }
    if matches!(recipe.model, Model::Random(_)) {
        let message =
            "`lora.quantized_base` keeps the weights of files as they are, and the model is a fresh one";
        let help = "name a GGUF file or a directory in `model.path`, or remove the key";
        checker.report_latest(&["model.random", KEY], message, help);
    }
    let engine = recipe.rollout.engine != EngineWord::default();
    let reference = recipe.needs_reference() && recipe.algorithm.reference.is_none();
    let of_trainer = recipe.trainer.world != 1 || recipe.devices().any() || recipe.is_colocated();
    let processes = recipe.placement.processes || recipe.buffer.listen.is_some();
    let rules = [
        (
            of_trainer,
            ["trainer.world", "placement.device"],
            "one rank of the trainer on the processor",
            "remove them",
        ),
        (
            processes,
            ["placement.processes", "buffer.listen"],
            "a sampler in the process of the trainer",
            "remove it: samplers in other processes get whole weights",
        ),
        (
            engine,
            ["rollout.engine", "rollout.urls"],
            "rlrun's own sampler",
            "remove it: the engine would need the base in f32",
        ),
        (
            recipe.rollout.quantization != Quantization::None,
            ["rollout.quantization", "rollout.quantization"],
            "a sampler with the numbers of the trainer",
            "remove it: the weights stay as their files store them",
        ),
        (
            recipe.reduction == Reduction::Tree,
            ["model.reduction", "model.reduction"],
            "sums as chains",
            "set `model.reduction = \"chain\"`",
        ),
        (
            recipe.warmup.is_some(),
            ["warmup", "warmup.steps"],
            "no warm-up, which trains all weights",
            "remove `[warmup]`",
        ),
        (
            recipe.critic.is_some(),
            ["critic", "critic.kind"],
            "no critic, which starts from weights in f32",
            "use an `algorithm.kind` without one",
        ),
        (
            reference,
            ["algorithm.reference", "algorithm.kind"],
            "a reference policy of its own",
            "name a model in `algorithm.reference`, or use an algorithm without reference",
        ),
    ];
    for (breaks, paths, needs, help) in rules {
        if breaks {
            let message = format!("`{KEY}` needs {needs}");
            checker.report_latest(&[paths[0], paths[1], KEY], message, help);
        }
    }
}
