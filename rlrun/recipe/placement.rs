//! The rules of `[placement]`: processes here, and in modules
//!
//! - `ranks`: trainer and sampler ranks
//! - `devices`: what devices are named, and what they can do
//! - `transport`: how weights go from device to device
//!
//! Invariant: what this program was not built for, and what a device cannot do, is refused here, before anything is opened;
//! whether a device is there shows when it is looked for (`rlrun/plan/memory/devices.rs`).

mod devices;
mod ranks;
mod transport;

use super::Recipe;
use super::ranges::Checker;
use super::words::{CriticKind, PlaceWord};

/// What a program without CUDA says about GPUs.
pub(crate) const WITHOUT_CUDA: &str = "this program was built without CUDA";

/// Only what a run has can be placed.
pub(super) fn check_placement(recipe: &Recipe, checker: &mut Checker<'_>) {
    let own_critic = recipe.critic.as_ref().is_some_and(|critic| critic.kind == CriticKind::Separate);
    for (path, there, what) in [
        ("placement.reference", recipe.needs_reference(), "compares with no reference"),
        ("placement.critic", own_critic, "has no critic with a network of its own"),
    ] {
        if checker.given(path) && !there {
            checker.report(path, format!("`{path}` has no effect: the run {what}"), "remove it");
        }
    }
    let devices = recipe.devices();
    if recipe.placement.reference_weights == PlaceWord::Host && !devices.reference {
        let path = "placement.reference_weights";
        let (why, help) = if !devices.trains() {
            ("the trainer computes on the processor", "remove it, or set `placement.device`")
        } else if recipe.needs_reference() {
            ("the reference shares the quantized base of the policy", "remove it")
        } else {
            ("the run compares with no reference", "remove it")
        };
        checker.report(path, format!("`{path}` has no effect: {why}"), help);
    }
    check_processes(recipe, checker);
    ranks::check(recipe, checker);
    devices::check(recipe, checker);
    transport::check(recipe, checker);
    super::quantized_base::check(recipe, checker);
    super::adapted::check(recipe, checker);
}

/// Refuses settings that do not work when the roles of a run are separate processes.
fn check_processes(recipe: &Recipe, checker: &mut Checker<'_>) {
    if !recipe.placement.processes {
        for key in ["rollout_workers", "rollout_devices", "restarts"] {
            let path = format!("placement.{key}");
            if checker.first_given(&path).is_some() {
                let help = "remove it, or set `placement.processes = true`";
                checker.report(&path, format!("`{path}` has no effect without `placement.processes`"), help);
            }
        }
        return;
    }
    let mut cannot = |path: &str, message: &str, help: &str| {
        checker.report_latest(&[path, "placement.processes"], message, help);
    };
    if recipe.is_colocated() {
        let message = "sampler and trainer take turns in one process (`placement.policy`), not as processes of their own";
        cannot("placement.policy", message, "remove one of the two");
    }
    if recipe.supervised.is_some() {
        cannot("supervised", "`placement.processes` has no effect without sampling", "remove it");
    }
    if !recipe.buffer.store.is_durable() || recipe.buffer.store.is_remote() {
        let message = "processes of a run (`placement.processes`) share its journal, so that nothing is lost when one dies";
        cannot("buffer.store", message, "set `buffer.store` to \"redb\" or \"postgres\"");
    }
    if recipe.curation.is_on() {
        let message = "curation (`[curation]`) decides with what one sampler knows, which processes of their own \
                       (`placement.processes`) do not share";
        cannot("curation", message, "remove one of the two");
    }
}

/// The keys that say where the trainer computes, the most specific last.
const OF_TRAINER: [&str; 3] = ["placement.device", "placement.trainer_device", "placement.trainer_devices"];
/// The same of the sampler.
const OF_SAMPLER: [&str; 3] = ["placement.device", "placement.rollout_device", "placement.rollout_devices"];

/// The deciding key: the most specific one that is given.
fn deciding<'a>(keys: &[&'a str], checker: &Checker<'_>) -> &'a str {
    let given = keys.iter().rev().find(|key| checker.first_given(key).is_some());
    given.or(keys.first()).copied().unwrap_or_default()
}
