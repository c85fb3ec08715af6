//! The rules of `[trainer]` and `[lora]`.
//!
//! Invariant: a key that says nothing about the optimizer, the schedule or the layers that were chosen is an error, and is
//! left out where the recipe is written down.

use super::checks::model_or_dataset;
use super::ranges::Checker;
use super::schema::{Lora, TrainerSection};
use super::words::{OptimizerKind, ScheduleShape};
use crate::huggingface::RepositoryKind;

/// Largest rank of an adapter: more than any layer is wide.
const MAX_RANK: usize = 1 << 16;

impl TrainerSection {
    /// The keys that say nothing here, each with what it would need.
    pub(super) fn keys_without_effect(&self) -> Vec<(&'static str, &'static str)> {
        let mut keys = Vec::new();
        if self.schedule != ScheduleShape::Wsd {
            keys.push(("decay_steps", "`trainer.schedule = \"wsd\"`"));
        }
        if !matches!(self.optimizer, OptimizerKind::Muon | OptimizerKind::Dion) {
            keys.push(("momentum", "`trainer.optimizer = \"muon\"` or \"dion\""));
        }
        if self.optimizer != OptimizerKind::Dion {
            keys.push(("dion_rank_fraction", "`trainer.optimizer = \"dion\"`"));
        }
        keys
    }
}

/// Keys of an optimizer or a schedule, and how long a schedule is.
pub(super) fn check_trainer(trainer: &TrainerSection, checker: &mut Checker<'_>) {
    for (key, needs) in trainer.keys_without_effect() {
        let path = format!("trainer.{key}");
        if checker.given(&path) {
            checker.report(&path, format!("`{path}` has no effect without {needs}"), "remove it");
        }
    }
    if trainer.schedule != ScheduleShape::Wsd {
        return;
    }
    let Some(decay) = trainer.decay_steps else {
        let help = "write over how many steps at the end the learning rate falls, such as `decay_steps = 20`";
        checker.report(
            "trainer.schedule",
            "`trainer.schedule` is \"wsd\", but there is no `trainer.decay_steps`",
            help,
        );
        return;
    };
    let (warmup, steps) = (trainer.warmup_steps, trainer.steps);
    // A warm-up that alone is too long is reported as such.
    if warmup <= steps && warmup.saturating_add(decay) > steps {
        let message = format!(
            "`trainer.warmup_steps`, {warmup}, and `trainer.decay_steps`, {decay}, are more than the {steps} steps of the \
             run"
        );
        let paths = ["trainer.decay_steps", "trainer.warmup_steps", "trainer.steps"];
        checker.report_latest(&paths, message, "");
    }
}

/// The layers are named, once each, and the initial adapter exists.
pub(super) fn check_lora(lora: Option<&mut Lora>, checker: &mut Checker<'_>) {
    let Some(lora) = lora else { return };
    if lora.rank > MAX_RANK {
        let message = format!("`lora.rank` is {}; no layer is that wide", lora.rank);
        checker.report("lora.rank", message, "usual ranks are 8 to 256");
    }
    let path = "lora.target_modules";
    if lora.target_modules.is_empty() {
        checker.report(
            path,
            "`lora.target_modules` is empty: nothing would be trained",
            "name layers, or remove it for all of them",
        );
    }
    for (index, module) in lora.target_modules.iter().enumerate() {
        if lora.target_modules[..index].contains(module) {
            let message = format!("`lora.target_modules` names \"{}\" twice", module.as_str());
            checker.report(&format!("{path}[{index}]"), message, "remove one of them");
        }
    }
    if let Some(adapter) = lora.path.take() {
        let help =
            "name a directory with `adapter_config.json` and `adapter_model.safetensors`, or hf:OWNER/NAME";
        lora.path = model_or_dataset(&adapter, RepositoryKind::Model, "lora.path", help, checker);
    }
}
