//! Which recipes can be replayed, what may be changed in one, and what is taken as recorded.
//!
//! Invariant: a setting with which training cannot be repeated to the bit is refused by its key, before anything is computed.

use std::io::Write;

use device::device::DeviceLocation;
use tempfile::Builder;

use super::recorded::RecordedPart;
use crate::args::ReplayArgs;
use crate::failure::Failure;
use crate::program::Program;
use crate::recipe::schema::ElasticSection;
use crate::recipe::words::{CollectiveWord, DeviceWord, Ranks, StoreWord, WandbLog, WeightTransport};
use crate::recipe::{Origins, Recipe};

/// Keys and sections that leave the bits of a replay as they are.
const SAME_BITS: [&str; 10] = [
    "placement",
    "trainer.world",
    "trainer.zero",
    "trainer.ranks",
    "trainer.elastic",
    "trainer.recompute",
    "checkpoint",
    "log",
    "deadlines",
    "name",
];
/// Further sections that an arm may change: what is computed from trajectories, not how these are sampled.
const OF_ARMS: [&str; 5] = ["trainer", "algorithm", "critic", "lora", "eval"];

/// The recipe of a recorded part with the changes of the command, as a replay runs it.
///
/// # Errors
/// A recipe that is wrong, a key that may not change, a setting that cannot be replayed.
pub(super) fn recipe(
    part: &RecordedPart,
    args: &ReplayArgs,
    program: &Program,
) -> Result<(Recipe, Origins), Failure> {
    let (recorded, _) = load(part, &[], program)?;
    let sets = [&args.sets[..], &args.what_if].concat();
    let (mut recipe, origins) = load(part, &sets, program)?;
    check_changes(&recorded, &recipe, args)?;
    if let Some((key, reason)) = unrepeatable(&recorded).or_else(|| unrepeatable(&recipe)) {
        return Err(Failure::Argument(format!("`{key}` cannot be replayed: {reason}")));
    }
    check_ranks(&recorded, &recipe, args)?;
    take_microbatch(&recorded, &mut recipe)?;
    alone(&recorded, &mut recipe);
    if !args.what_if.is_empty() {
        // The arm has other log-probabilities than the policies that sampled.
        recipe.rollout.bitwise = false;
    }
    Ok((recipe, origins))
}

/// Refuses changes of keys that say how trajectories were sampled, or, without an arm, what is computed from them.
fn check_changes(recorded: &Recipe, changed: &Recipe, args: &ReplayArgs) -> Result<(), Failure> {
    let is_arm = !args.what_if.is_empty();
    let may = |key: &str| {
        let under = |section: &&str| {
            key.strip_prefix(*section).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        // Both placements of the policy leave other keys and values in the cache, and devices sum in another order.
        let on_devices =
            key == "placement.optimizer" || (key.starts_with("placement.") && key.contains("device"));
        let of_bits = key == "placement.policy" || (on_devices && !is_arm);
        !of_bits && (SAME_BITS.iter().any(&under) || (is_arm && OF_ARMS.iter().any(&under)))
    };
    let changes = recorded.changes_to(changed);
    let Some(change) = changes.iter().find(|change| !may(&change.key)) else { return Ok(()) };
    let key = &change.key;
    let arm = OF_ARMS.iter().any(|section| key.starts_with(section)) && !is_arm;
    Err(Failure::Argument(if arm {
        format!("`{key}` changes what the run learns: try it with --what-if {key}=... instead of --set")
    } else {
        format!(
            "`{key}` cannot be changed in a replay: the run sampled, or computes, with the recorded value; start another run with it"
        )
    }))
}

/// The recorded recipe of a part, with changes.
fn load(part: &RecordedPart, sets: &[String], program: &Program) -> Result<(Recipe, Origins), Failure> {
    let system = |source| Failure::System { what: "write a temporary file".to_owned(), source };
    let mut file = Builder::new().suffix(".toml").tempfile().map_err(system)?;
    file.write_all(part.start.recipe.as_bytes()).map_err(system)?;
    Recipe::load(file.path(), sets, program).map_err(Failure::Recipe)
}

/// What sampled the tokens of a part, if it was something that a replay on the processor cannot repeat to the bit.
///
/// # Errors
/// A recipe that is wrong.
pub(super) fn sampled_elsewhere(
    part: &RecordedPart,
    program: &Program,
) -> Result<Option<&'static str>, Failure> {
    let (recipe, _) = load(part, &[], program)?;
    let devices = recipe.devices();
    Ok(if recipe.engine_kind().is_some() {
        Some("of an engine of another program")
    } else if devices.rollouts.iter().chain(&devices.trainer).any(Option::is_some) {
        // Sums on a device depend on the batch; those of a sampler on the processor would need the weights as the device has them.
        Some("of a run on devices")
    } else {
        None
    })
}

/// A key whose setting cannot be repeated to the bit, and why.
fn unrepeatable(recipe: &Recipe) -> Option<(&'static str, &'static str)> {
    if recipe.supervised.is_some() {
        return Some(("supervised", "the run sampled nothing, and repeats by itself"));
    }
    if recipe.island.is_some() {
        return Some(("island", "outer gradients of other islands are not recorded"));
    }
    None
}

/// Refuses ranks whose sums are rounded otherwise than those of the recorded run.
fn check_ranks(recorded: &Recipe, changed: &Recipe, args: &ReplayArgs) -> Result<(), Failure> {
    let (before, now) = (&recorded.trainer, &changed.trainer);
    if !args.what_if.is_empty() || (before.world, before.zero) == (now.world, now.zero) {
        return Ok(());
    }
    if recorded.devices().trains() {
        return Err(Failure::Argument(
            "`trainer.world` and `trainer.zero` cannot change in a replay on devices, whose ranks sum in an order of their own".to_owned(),
        ));
    }
    let most = before.leaves;
    if let Some(world) = [before.world, now.world].into_iter().find(|n| !n.is_power_of_two() || *n > most) {
        return Err(Failure::Argument(format!(
            "`trainer.world` cannot change from {} to {}: {world} ranks sum in another order; powers of two up to \
             `trainer.leaves` = {most} have the same bits",
            before.world, now.world
        )));
    }
    let accumulates = |zero: usize| zero == 1;
    if accumulates(before.zero) != accumulates(now.zero) {
        return Err(Failure::Argument(format!(
            "`trainer.zero` cannot change from {} to {}: stage 1 sums the micro-batches of a leaf in another order; stages 2 and 3 \
             have the same bits",
            before.zero, now.zero
        )));
    }
    Ok(())
}

/// An arm has the recorded sizes of micro-batches, or the one that it names: what time chooses would not be the same twice.
fn take_microbatch(recorded: &Recipe, changed: &mut Recipe) -> Result<(), Failure> {
    let (before, now) = (&recorded.trainer, &mut changed.trainer);
    if now.adapt_microbatch && !before.adapt_microbatch {
        let what = "`trainer.adapt_microbatch` chooses by time, which a replay does not repeat; name one size with \
                    `--what-if trainer.microbatch_tokens=...`";
        return Err(Failure::Argument(what.to_owned()));
    }
    now.adapt_microbatch &= now.microbatch_tokens == before.microbatch_tokens;
    Ok(())
}

/// Makes the recipe one of a single process that serves nothing and writes nowhere but to its run directory.
fn alone(recorded: &Recipe, recipe: &mut Recipe) {
    let devices = recipe.devices();
    // Emulated ranks that were processes have exchanged through the host.
    let through_host = recorded.trainer.ranks == Ranks::Processes
        && devices.trainer.contains(&Some(DeviceLocation::Emulated));
    if through_host && devices.trainer.len() > 1 {
        recipe.trainer.collective = CollectiveWord::Host;
    }
    let placement = &mut recipe.placement;
    if !devices.trains() {
        placement.device = DeviceWord::Cpu;
        placement.rollout_device = None;
    }
    placement.rollout_devices = None;
    recipe.weights.transport = WeightTransport::Auto;
    (placement.processes, placement.adapt_samplers) = (false, false);
    (placement.rollout_workers, placement.restarts) = (None, None);
    recipe.trainer.ranks = Ranks::Threads;
    recipe.trainer.elastic = ElasticSection::default();
    recipe.rollout.tensor = 1;
    let buffer = &mut recipe.buffer;
    buffer.store = StoreWord::Redb;
    (buffer.listen, buffer.url, buffer.schema, buffer.token_file) = (None, None, None, None);
    (buffer.tls_cert, buffer.tls_key) = (None, None);
    recipe.checkpoint.url = None;
    (recipe.dashboard.listen, recipe.dashboard.token_file) = (None, None);
    recipe.log.schedule = false;
    (recipe.log.wandb, recipe.log.otlp) = (WandbLog::Off, None);
}
