//! The rules of `weights.transport`: what sends weights from device to device.

use super::{OF_SAMPLER, OF_TRAINER, deciding};
use crate::recipe::Recipe;
use crate::recipe::ranges::Checker;
use crate::recipe::words::{DeviceLocation, Ranks, WeightDtypeWord, WeightTransport};
use crate::settings::Devices;

/// A transport between devices needs a device on both sides.
pub(super) fn check(recipe: &Recipe, checker: &mut Checker<'_>) {
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
