//! The rules of ranks: degrees, processes, ranks that come and go, and what a sampler can share.

use model::ContextExchange;

use super::{OF_SAMPLER, deciding};
use crate::recipe::Recipe;
use crate::recipe::ranges::Checker;
use crate::recipe::schema::ParallelSection;
use crate::recipe::words::{OptimizerKind, Ranks, Reduction};

/// Checks all ranks of a recipe.
pub(super) fn check(recipe: &Recipe, checker: &mut Checker<'_>) {
    check_ranks(recipe, checker);
    check_parallel(recipe, checker);
    check_elastic(recipe, checker);
    check_sampler_ranks(recipe, checker);
}

/// Ranks that share a pass need a world that they divide, and what can be shared.
fn check_parallel(recipe: &Recipe, checker: &mut Checker<'_>) {
    let (parallel, world) = (recipe.trainer.parallel, recipe.trainer.world);
    let (tensor, context) = ("trainer.parallel.tensor", "trainer.parallel.context");
    let pipeline = "trainer.parallel.pipeline";
    for (path, degree) in [
        (tensor, parallel.tensor),
        (context, parallel.context),
        ("trainer.parallel.sections", parallel.sections),
    ] {
        if !degree.is_power_of_two() {
            let message = format!("`{path}` is {degree}, but must be a power of two");
            checker.report(path, message, &format!("the next is {}", degree.next_power_of_two()));
        }
    }
    let each = parallel.config().of_pass();
    if each > 1 && !world.is_multiple_of(each) {
        let message = format!(
            "`trainer.world` is {world}, not a multiple of {each}, the product of `tensor`, `context` and `pipeline` in \
             `[trainer.parallel]`"
        );
        let help = format!("set `trainer.world` to {}", world.next_multiple_of(each));
        checker.report_latest(&[tensor, context, pipeline, "trainer.world"], message, &help);
    }
    let on_device = recipe.trains_on().is_some();
    if parallel.pipeline > 1 && recipe.lora.is_some() {
        let message = "stages divide the layers of a model that is trained whole: not with this `lora`";
        checker.report_latest(
            &[pipeline, "lora"],
            message,
            "set `trainer.parallel.pipeline` to 1, or remove it",
        );
    }
    check_context(parallel, on_device, checker);
    if parallel.tensor <= 1 {
        return;
    }
    if recipe.reduction != Reduction::Tree && !on_device {
        let message =
            "tensor parallelism on the processor needs a summation order that does not depend on the degree";
        checker.report_latest(&[tensor, "model.reduction"], message, "set `model.reduction` to \"tree\"");
    }
    for (other, given) in [
        ("lora", recipe.lora.is_some()),
        ("trainer.optimizer", recipe.trainer.optimizer != OptimizerKind::Adamw),
    ] {
        if given {
            let message =
                format!("tensor ranks share weights that AdamW updates in f32: not with this `{other}`");
            checker.report_latest(
                &[tensor, other],
                message,
                "set `trainer.parallel.tensor` to 1, or remove it",
            );
        }
    }
}

/// Context ranks have something to exchange, and on devices one section each.
fn check_context(parallel: ParallelSection, on_device: bool, checker: &mut Checker<'_>) {
    if on_device && parallel.config().context.sections() > parallel.context {
        let message = "ranks on devices have one section of a micro-batch each";
        checker.report_latest(
            &["trainer.parallel.sections", "trainer.parallel.context", "placement.device"],
            message,
            "remove `trainer.parallel.sections`, or train on the processor",
        );
    }
    if on_device && parallel.exchange == Some(ContextExchange::Keys) {
        let message = "context ranks on devices exchange heads";
        checker.report_latest(
            &["trainer.parallel.exchange", "placement.device"],
            message,
            "set `trainer.parallel.exchange` to \"heads\", or remove it",
        );
    }
    if parallel.exchange.is_some() && parallel.context == 1 {
        let path = "trainer.parallel.exchange";
        checker.report(path, "`trainer.parallel.exchange` has no effect with one context rank", "remove it");
    }
}

/// Ranks that come and go need what any number of them can do.
fn check_elastic(recipe: &Recipe, checker: &mut Checker<'_>) {
    let (trainer, elastic) = (&recipe.trainer, recipe.trainer.elastic);
    if elastic.snapshot_every == 0 {
        return;
    }
    let path = "trainer.elastic.snapshot_every";
    let off = "set `trainer.elastic.snapshot_every` to 0, or remove it";
    if trainer.ranks != Ranks::Processes {
        let message =
            "ranks that can be lost alone are processes, and those of this recipe are not (`trainer.ranks`)";
        checker.report_latest(
            &[path, "trainer.ranks"],
            message,
            "set `trainer.ranks = \"processes\"`, or remove it",
        );
    }
    for (other, given) in [
        ("trainer.parallel", trainer.parallel.config().of_pass() > 1 || trainer.parallel.expert > 1),
        ("placement.device", recipe.trains_on().is_some()),
        ("placement.policy", recipe.is_colocated()),
        ("island", recipe.island.is_some()),
    ] {
        if given {
            let message = format!(
                "ranks that come and go divide the data of a step on the processor: not with this `{other}`"
            );
            checker.report_latest(&[path, other], message, off);
        }
    }
    if elastic.min_world > trainer.world {
        let message = format!(
            "`trainer.elastic.min_world` is {}, and the trainer has at most {} ranks (`trainer.world`)",
            elastic.min_world, trainer.world
        );
        checker.report("trainer.elastic.min_world", message, "lower it");
    }
}

/// Ranks that share a sampler's weights need what can be shared.
fn check_sampler_ranks(recipe: &Recipe, checker: &mut Checker<'_>) {
    let (path, degree) = ("rollout.tensor", recipe.rollout.tensor);
    if degree <= 1 {
        return;
    }
    if !degree.is_power_of_two() {
        let message = format!("`{path}` is {degree}, but must be a power of two");
        checker.report(path, message, &format!("the next is {}", degree.next_power_of_two()));
    } else if recipe.reduction != Reduction::Tree {
        let message =
            "tensor parallelism of a sampler needs a summation order that does not depend on the degree";
        checker.report_latest(&[path, "model.reduction"], message, "set `model.reduction` to \"tree\"");
    }
    if recipe.devices().rollout.is_some() {
        let message = format!(
            "the ranks of a sampler (`{path}`) compute on the processor, and it is placed on a device"
        );
        let help = format!("set `{path}` to 1, or `placement.rollout_device = \"cpu\"`");
        checker.report_latest(&[path, deciding(&OF_SAMPLER, checker)], message, &help);
    }
}

/// Ranks that are processes need a number of processes and an address to connect to.
fn check_ranks(recipe: &Recipe, checker: &mut Checker<'_>) {
    let (ranks, world) = (recipe.trainer.ranks, recipe.trainer.world);
    if ranks == Ranks::Processes && recipe.supervised.is_some() {
        let message = "ranks that are processes join a run that samples, and this one has `[supervised]`";
        checker.report_latest(
            &["trainer.ranks", "supervised"],
            message,
            "set `trainer.ranks` to \"threads\" or \"mpi\"",
        );
    }
    if ranks == Ranks::Processes && world < 2 {
        let help = "set `trainer.world` to their number, the first included";
        checker.report("trainer.ranks", "`trainer.ranks` has no effect with one rank", help);
    }
    if ranks == Ranks::Processes && !recipe.placement.processes && recipe.buffer.listen.is_none() {
        let message =
            "ranks that are processes (`trainer.ranks`) join the run at its address, and it has none";
        checker.report("trainer.ranks", message, "set `buffer.listen`, or `placement.processes = true`");
    }
    if ranks == Ranks::Mpi && !cfg!(feature = "mpi") {
        let help =
            "build it with `cargo install --path . --features mpi`, which needs an MPI library and libclang";
        checker.report("trainer.ranks", "this rlrun was built without MPI", help);
    }
    if ranks == Ranks::Mpi && recipe.placement.processes {
        let message =
            "`mpirun` starts the processes of the trainer, so a controller cannot (`placement.processes`)";
        checker.report_latest(&["trainer.ranks", "placement.processes"], message, "remove one of the two");
    }
}
