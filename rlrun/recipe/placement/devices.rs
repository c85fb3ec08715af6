//! The rules of devices: lists of them, what this program was built for, and what a device cannot do.

use super::{OF_SAMPLER, OF_TRAINER, WITHOUT_CUDA, deciding};
use crate::recipe::Recipe;
use crate::recipe::ranges::Checker;
use crate::recipe::words::{
    CollectiveWord, DeviceLocation, DeviceWord, ModelDtype, OptimizerKind, PlaceWord, Quantization, Ranks,
    Reduction, Speculation,
};

/// Warnings about devices, and settings that they do not support.
pub(super) fn check(recipe: &Recipe, checker: &mut Checker<'_>) {
    check_ranks_on_devices(recipe, checker);
    check_samplers_on_devices(recipe, checker);
    check_features(recipe, checker);
    check_dtype(recipe, checker);
    check_reduction(recipe, checker);
    check_optimizer(recipe, checker);
    check_collective(recipe, checker);
    check_sampler(recipe, checker);
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
