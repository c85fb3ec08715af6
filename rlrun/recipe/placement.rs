//! The rules of `[placement]`: processes, ranks and devices.
//!
//! Invariant: what this program was not built for, and what a device cannot do, is refused here, before anything is opened;
//! whether a device is there shows when it is looked for (`rlrun/plan/memory/devices.rs`).

use model::ContextExchange;

use super::Recipe;
use super::ranges::Checker;
use super::schema::ParallelSection;
use super::words::{
    CollectiveWord, CriticKind, DeviceLocation, DeviceWord, ModelDtype, OptimizerKind, PlaceWord,
    Quantization, Ranks, Reduction, Speculation, WeightDtypeWord, WeightTransport,
};
use crate::settings::Devices;

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
    check_ranks(recipe, checker);
    check_parallel(recipe, checker);
    check_elastic(recipe, checker);
    check_sampler_ranks(recipe, checker);
    check_devices(recipe, checker);
    super::quantized_base::check(recipe, checker);
    super::adapted::check(recipe, checker);
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

/// Warnings about devices, and settings that they do not support.
fn check_devices(recipe: &Recipe, checker: &mut Checker<'_>) {
    check_ranks_on_devices(recipe, checker);
    check_samplers_on_devices(recipe, checker);
    check_features(recipe, checker);
    check_dtype(recipe, checker);
    check_reduction(recipe, checker);
    check_optimizer(recipe, checker);
    check_collective(recipe, checker);
    check_sampler(recipe, checker);
    check_transport(recipe, checker);
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

/// A list of devices names one for each rank, without duplicates.
fn check_ranks_on_devices(recipe: &Recipe, checker: &mut Checker<'_>) {
    let path = "placement.trainer_devices";
    let Some(list) = &recipe.placement.trainer_devices else { return };
    let rule = DeviceListRule {
        path,
        one: recipe.placement.trainer_device.map(|_| "placement.trainer_device"),
        count_key: "trainer.world",
        count: recipe.trainer.world,
        member: "rank",
        role: "the trainer",
    };
    rule.check(list, checker);
    // Ranks that are processes may be on machines of their own.
    let here = recipe.trainer.ranks == Ranks::Threads;
    let twice = list.iter().enumerate().find(|(rank, device)| {
        here && matches!(device, DeviceWord::At(DeviceLocation::Cuda(_))) && list[..*rank].contains(device)
    });
    if let Some((_, device)) = twice {
        let message = format!("`{path}` names \"{device}\" twice, and NCCL takes a GPU for one rank alone");
        checker.report(path, message, "name a GPU of its own for each rank, or lower `trainer.world`");
    }
}

/// A list of devices names one for each sampler; samplers may share a device.
fn check_samplers_on_devices(recipe: &Recipe, checker: &mut Checker<'_>) {
    let Some(list) = &recipe.placement.rollout_devices else { return };
    if !recipe.placement.processes {
        // It has no effect, and that was said.
        return;
    }
    let rule = DeviceListRule {
        path: "placement.rollout_devices",
        one: recipe.placement.rollout_device.map(|_| "placement.rollout_device"),
        count_key: "placement.rollout_workers",
        count: recipe.rollout_workers(),
        member: "sampler",
        role: "the sampler",
    };
    rule.check(list, checker);
}

/// A list of devices at `path` names one device for each rank or sampler.
struct DeviceListRule<'a> {
    path: &'a str,
    /// The key of a single device that is also given.
    one: Option<&'a str>,
    /// The key of the number of ranks or samplers.
    count_key: &'a str,
    count: usize,
    member: &'a str,
    role: &'a str,
}

impl DeviceListRule<'_> {
    fn check(&self, list: &[DeviceWord], checker: &mut Checker<'_>) {
        let Self { path, one, count_key, count, member, role } = *self;
        if let Some(one) = one {
            let message = format!("both `{one}` and `{path}` say where {role} computes");
            checker.report_latest(&[path, one], message, "remove one of them");
        }
        if list.len() != count {
            let message =
                format!("`{path}` names {} devices for {count} {member}s (`{count_key}`)", list.len());
            checker.report_latest(&[path, count_key], message, &format!("name one for each {member}"));
        }
        if list.len() > 1 && list.contains(&DeviceWord::Cpu) {
            let help = format!("name devices alone, or none for {member}s on the processor");
            checker.report(path, format!("`{path}` has the processor among devices"), &help);
        }
    }
}

/// This program must have been built for every device that is named, and devices of two kinds do not work together.
fn check_features(recipe: &Recipe, checker: &mut Checker<'_>) {
    let devices = recipe.devices();
    let mut roles: Vec<(&str, DeviceLocation)> = Vec::new();
    roles.extend(devices.trainer.iter().flatten().map(|place| (deciding(&OF_TRAINER, checker), *place)));
    let samplers = devices.rollouts.iter().chain([&devices.rollout]).flatten();
    roles.extend(samplers.map(|place| (deciding(&OF_SAMPLER, checker), *place)));
    let is_cuda = |place: &DeviceLocation| matches!(place, DeviceLocation::Cuda(_));
    let cuda = roles.iter().find(|(_, place)| is_cuda(place));
    let emulated = roles.iter().find(|(_, place)| !is_cuda(place));
    if let Some((path, place)) = cuda.filter(|_| !cfg!(feature = "cuda")) {
        let message = format!("`{path}` is \"{place}\", and {WITHOUT_CUDA}");
        checker.report(
            path,
            message,
            "build it with `--features cuda`; `rlrun doctor` says what else is needed",
        );
    }
    if let Some((path, _)) = emulated.filter(|_| !cfg!(feature = "emulator")) {
        let message = format!("`{path}` is \"emulated\", and this program was built without the emulator");
        checker.report(path, message, "it is for tests: build it with `--features emulator`");
    }
    if let (Some((one, _)), Some((other, _))) = (cuda, emulated) {
        let message = "a GPU and the emulator have no memory in common";
        checker.report_latest(&[one, other], message, "place all roles on devices of one kind");
    }
}

/// The processor computes in f32.
fn check_dtype(recipe: &Recipe, checker: &mut Checker<'_>) {
    if recipe.dtype != ModelDtype::Bf16 {
        return;
    }
    let devices = recipe.devices();
    let who = match (devices.trains(), devices.rollout) {
        (false, _) => "the trainer computes",
        (true, None) if recipe.supervised.is_none() => "the sampler computes",
        _ => return,
    };
    let message = format!(
        "`model.dtype` is \"bf16\", but {who} on the processor, whose kernels are f32 (`placement.device`)"
    );
    let help =
        "set `model.dtype = \"auto\"`, or place it on a device; `weights.dtype` rounds what is sampled with";
    checker.report("model.dtype", message, help);
}

/// The libraries of devices choose the order of their sums.
fn check_reduction(recipe: &Recipe, checker: &mut Checker<'_>) {
    let devices = recipe.devices();
    if recipe.reduction == Reduction::Chain || (devices.rollout.is_none() && !devices.trains()) {
        return;
    }
    let key = if devices.trains() { &OF_TRAINER } else { &OF_SAMPLER };
    let message = "`model.reduction` is \"tree\", which has kernels for the processor alone";
    let help = "remove it, or set `placement.device = \"cpu\"`";
    checker.report_latest(&["model.reduction", deciding(key, checker)], message, help);
}

/// A device has AdamW alone.
fn check_optimizer(recipe: &Recipe, checker: &mut Checker<'_>) {
    let path = "placement.optimizer";
    if !recipe.devices().trains() {
        if recipe.placement.optimizer == PlaceWord::Host {
            let message = format!("`{path}` has no effect: the trainer computes on the processor");
            checker.report(path, message, "remove it, or set `placement.device`");
        }
        return;
    }
    if recipe.placement.optimizer == PlaceWord::Host {
        return;
    }
    let kind = recipe.trainer.optimizer;
    let help = "set `placement.optimizer = \"host\"`";
    if kind != OptimizerKind::Adamw {
        let message = format!(
            "`trainer.optimizer` is \"{}\", which moves weights on the host, and `{path}` is \"device\"",
            kind.as_str()
        );
        checker.report_latest(&["trainer.optimizer", path], message, help);
    }
    if recipe.lora.is_some() {
        let message = format!("`[lora]` is merged on the host, and `{path}` is \"device\"");
        checker.report_latest(&["lora.rank", "lora", path], message, help);
    }
}

/// Ranks exchange from device to device where each has one and updates weights there.
fn check_collective(recipe: &Recipe, checker: &mut Checker<'_>) {
    let (path, collective) = ("trainer.collective", recipe.trainer.collective);
    if collective == CollectiveWord::Auto {
        return;
    }
    let devices = recipe.devices();
    if !devices.trains() || recipe.trainer.world == 1 {
        let message = format!("`{path}` has no effect: it is of several trainer workers on devices");
        checker.report(path, message, "remove it, or set `placement.device` and `trainer.world`");
        return;
    }
    // Tensor, context and expert ranks exchange there in passes, and update weights on the host.
    let parallel = recipe.trainer.parallel;
    let exchanges = [parallel.tensor, parallel.context, parallel.expert].iter().any(|degree| *degree > 1);
    let exchange_there =
        exchanges && !recipe.is_colocated() && devices.reach_each_other(recipe.trainer.ranks);
    if collective == CollectiveWord::Host || devices.meets || exchange_there {
        return;
    }
    let (keys, why): (&[&str], _) = if recipe.is_colocated() {
        (&["placement.policy", path], "they take turns with a sampler, to which they leave their devices")
    } else if parallel.pipeline > 1 && !exchanges {
        (&["trainer.parallel.pipeline", path], "stages send residual streams through the host")
    } else if recipe.placement.optimizer == PlaceWord::Host {
        (&["placement.optimizer", path], "`placement.optimizer` is \"host\"")
    } else {
        (&["placement.trainer_devices", path], "some of them compute on the same device")
    };
    let message = format!("`{path}` is \"device\", but the workers cannot exchange there: {why}");
    checker.report_latest(keys, message, "set `trainer.collective = \"auto\"`, or change the other");
}

/// Settings with another effect on a device than on the processor.
fn check_sampler(recipe: &Recipe, checker: &mut Checker<'_>) {
    let devices = recipe.devices();
    let key = deciding(&OF_SAMPLER, checker);
    if devices.rollout.is_some() && recipe.rollout.quantization != Quantization::None {
        let message = "`rollout.quantization` has kernels for the processor alone, and the sampler computes on a device";
        let help = "remove it, or set `placement.rollout_device = \"cpu\"`";
        checker.report_latest(&["rollout.quantization", key], message, help);
    }
    if devices.rollout.is_some() && recipe.rollout.speculation != Speculation::None {
        let message =
            "`rollout.speculation` is for the processor alone, and the sampler computes on a device";
        let help = "remove it, or set `placement.rollout_device = \"cpu\"`";
        checker.report_latest(&["rollout.speculation", key], message, help);
    }
    if recipe.rollout.bitwise && (devices.rollout.is_some() || devices.trains()) {
        let message = "`rollout.bitwise` promises that sampler and trainer compute the same bits, which devices do not: \
                       they read a cache and a pack with different kernels";
        let key = if devices.rollout.is_some() { key } else { deciding(&OF_TRAINER, checker) };
        let help = "remove it; `algorithm.correction` corrects the loss for the difference";
        checker.report_latest(&["rollout.bitwise", key], message, help);
    }
    if recipe.is_colocated() && !devices.trainer.contains(&devices.rollout) {
        let message = "sampler and trainer take turns (`placement.policy`), but not on the same device";
        let help = "place both on one device, or remove `placement.policy`";
        checker.report_latest(&["placement.policy", key, deciding(&OF_TRAINER, checker)], message, help);
    }
}

/// A transport between devices needs a device on both sides.
fn check_transport(recipe: &Recipe, checker: &mut Checker<'_>) {
    let (path, transport) = ("weights.transport", recipe.weights.transport);
    if !transport.is_between_devices() {
        return;
    }
    let (word, devices) = (transport.as_str(), recipe.devices());
    if devices.rollout.is_none() || !devices.trains() {
        let who = if devices.trains() { "the sampler" } else { "the trainer" };
        let message =
            format!("`{path}` is \"{word}\", from device to device, but {who} computes on the processor");
        checker.report(path, message, "set `placement.device`, or `weights.transport = \"auto\"`");
        return;
    }
    if recipe.trainer.parallel.config().shards() > 1 {
        let message = format!(
            "`{path}` \"{word}\" is of ranks that have the whole model, and tensor ranks and stages have parts"
        );
        let keys = [path, "trainer.parallel.tensor", "trainer.parallel.pipeline"];
        checker.report_latest(&keys, message, "use \"auto\"");
    }
    if transport == WeightTransport::Nccl {
        check_broadcast(recipe, &devices, checker);
    } else if !recipe.placement.processes {
        let message = match recipe.buffer.listen {
            None => format!("`{path}` \"{word}\" has no effect in one process: its roles share the device"),
            Some(_) => format!(
                "`{path}` \"{word}\" is for other processes, and one sampler is in that of the trainer, whose memory it \
                 cannot map"
            ),
        };
        let help = "remove it, or set `placement.processes = true`";
        checker.report(path, message, help);
    }
    if devices.trainer.len() > 1 && recipe.trainer.zero >= 3 {
        let message = format!(
            "`{path}` \"{word}\" is of a rank that has all weights, and with `trainer.zero` = {} none has",
            recipe.trainer.zero
        );
        checker.report_latest(&[path, "trainer.zero"], message, "use \"auto\", or lower `trainer.zero`");
    }
    if recipe.dtype_on(devices.rollout) != recipe.dtype_on(devices.trainer[0]) {
        let message = format!("`{path}` \"{word}\" is between devices that store weights alike");
        checker.report(path, message, "set `model.dtype`, or use \"auto\"");
    }
    if recipe.weights.dtype == WeightDtypeWord::Bf16 {
        let message = format!(
            "`weights.dtype` has no effect with `{path}` \"{word}\": what is sent is what a device has"
        );
        checker.report("weights.dtype", message, "remove it; see `model.dtype`");
    }
}

/// A broadcast is between devices that differ, each of one member.
fn check_broadcast(recipe: &Recipe, devices: &Devices, checker: &mut Checker<'_>) {
    let (path, key) = ("weights.transport", deciding(&OF_SAMPLER, checker));
    if recipe.is_colocated() {
        let message = "sampler and trainer take turns on one device (`placement.policy`), and `weights.transport` \"nccl\" \
                       is between several";
        checker.report_latest(&[path, "placement.policy"], message, "remove one of the two");
        return;
    }
    let trainer = devices.trainer.first().copied().flatten();
    let apart = recipe.placement.processes || recipe.buffer.listen.is_some();
    if apart && trainer == Some(DeviceLocation::Emulated) {
        let message = "emulated devices broadcast (`weights.transport` \"nccl\") within one process alone, and samplers \
                       are other processes (`placement.processes`, `buffer.listen`)";
        checker.report_latest(&[path, key], message, "use \"cuda-ipc\" or \"auto\"");
    }
    let gpus = devices.rollouts.iter().flatten().filter(|place| matches!(place, DeviceLocation::Cuda(_)));
    let gpus: Vec<_> = gpus.collect();
    // Other ranks may be on other machines, unless they are threads.
    let here = if recipe.trainer.ranks == Ranks::Threads { devices.trainer.len() } else { 1 };
    let trainers: Vec<_> = devices.trainer.iter().take(here).flatten().collect();
    if let Some(shared) = gpus.iter().find(|place| trainers.contains(place)) {
        let message = format!(
            "trainer and sampler are both on {shared}, and `{path}` \"nccl\" takes a GPU for one of them alone"
        );
        let help = "set `placement.trainer_device` and `placement.rollout_device` (or `placement.rollout_devices`) to GPUs \
                    that differ, or use \"cuda-ipc\"";
        checker.report_latest(&[path, key, deciding(&OF_TRAINER, checker)], message, help);
    } else if let Some((_, twice)) =
        gpus.iter().enumerate().find(|(index, place)| gpus[..*index].contains(place))
    {
        let message = format!(
            "several samplers are on {twice}, and `{path}` \"nccl\" takes a GPU for one of them alone"
        );
        let help = "name a GPU for each in `placement.rollout_devices`, or use \"cuda-ipc\"";
        checker.report_latest(&[path, key, "placement.rollout_workers"], message, help);
    }
}
