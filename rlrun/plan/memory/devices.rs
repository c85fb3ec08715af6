//! The memory that a run needs on every device, compared with the memory that the device has.
//!
//! Invariant: the arithmetic is that of the processor, with the number formats of the device. Memory on a device is not
//! counted on the host too. The plan includes devices that this machine does not have, without a comparison.

mod experts;
mod latents;
mod recurrence;
mod roles;

use std::collections::BTreeSet;
use std::fmt;

use device::DeviceError;
use device::device::DeviceLocation;
use device::inventory::{Inventory, NCCL_REMEDY, OLDEST_NCCL, inventory_of};
use model::on_device::DeviceDtype;
use model::{Config, Quantization, Recompute};

use self::roles::{copies, phase, sampling, training};
use super::{Part, Phase, Size, mebibytes, peak, product, shard_of};
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::recipe::words::{Ranks, WeightTransport};
use crate::settings::Devices;

/// What the driver takes for a process on a GPU: its context, kernels and the heap of the device; about 0.5 GiB.
const CONTEXT: u64 = 512 << 20;
/// Scratch of cuBLAS for each stream, as `device` allocates it.
const WORKSPACE: u64 = 32 << 20;
/// Parts that a message names.
const NAMED: usize = 3;
/// The parts of a run on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The device.
    pub place: DeviceLocation,
    /// The roles that compute on it, as text.
    pub roles: String,
    /// Their number format.
    pub dtype: DeviceDtype,
    /// What takes its memory.
    pub parts: Vec<Part>,
    /// Whether it is a device of this machine for sure; workers from elsewhere bring their own.
    pub here: bool,
}

/// How many of each role compute on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DeviceCounts {
    ranks: u64,
    samplers: u64,
    reference: bool,
    leads: bool,
}

impl DeviceCounts {
    fn of(recipe: &Recipe, devices: &Devices, place: DeviceLocation) -> Self {
        let on = |device: &Option<DeviceLocation>| *device == Some(place);
        let samplers = devices.rollouts.iter().filter(|device| recipe.supervised.is_none() && on(device));
        Self {
            ranks: devices.trainer.iter().filter(|device| on(device)).count() as u64,
            samplers: samplers.count() as u64,
            reference: on(&devices.reference),
            leads: devices.trainer.first().is_some_and(on),
        }
    }

    /// Processes that have a context on the device.
    fn processes(self, recipe: &Recipe) -> u64 {
        let ranks = if recipe.trainer.ranks == Ranks::Threads { self.ranks.min(1) } else { self.ranks };
        let lead = ranks.max(u64::from(self.reference));
        if recipe.placement.processes { lead.saturating_add(self.samplers) } else { lead.max(1) }
    }

    fn words(self) -> String {
        let count = |n: u64, one: &str, many: &str| match n {
            0 => None,
            1 => Some(one.to_owned()),
            n => Some(format!("{n} {many}")),
        };
        let roles = [
            count(self.ranks, "the trainer", "ranks of the trainer"),
            count(self.samplers, "the sampler", "samplers"),
            self.reference.then(|| "the reference".to_owned()),
        ];
        roles.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

impl DeviceMemory {
    /// The devices of `recipe` with what a model of the shape `config` needs there; none for a run on the processor. Sums
    /// saturate.
    #[must_use]
    pub fn of(recipe: &Recipe, config: &Config) -> Vec<Self> {
        let devices = recipe.devices();
        let on = |place| Self::on(place, recipe, config, &devices);
        places(recipe, &devices).into_iter().map(on).collect()
    }

    /// Bytes of the device that needs the most; 0 for a run on the processor. Devices with the same roles need the same.
    #[must_use]
    pub fn fullest(recipe: &Recipe, config: &Config) -> u64 {
        let devices = recipe.devices();
        let mut seen: Vec<(DeviceCounts, DeviceDtype)> = Vec::new();
        let mut most = 0;
        for place in places(recipe, &devices) {
            let roles = (DeviceCounts::of(recipe, &devices, place), recipe.dtype_on(Some(place)));
            if !seen.contains(&roles) {
                seen.push(roles);
                most = most.max(Self::on(place, recipe, config, &devices).total());
            }
        }
        most
    }

    fn on(place: DeviceLocation, recipe: &Recipe, config: &Config, devices: &Devices) -> Self {
        let (counts, dtype) = (DeviceCounts::of(recipe, devices, place), recipe.dtype_on(Some(place)));
        // Devices recompute whole blocks only.
        let keeps_all = recipe.trainer.recompute == Recompute::None;
        let recompute = if keeps_all { Recompute::None } else { Recompute::Block };
        let size_of = |config: &Config| {
            let size = Size::of(config, recompute, Quantization::None, width(dtype));
            let size = experts::with_experts(size, config, recompute, width(dtype));
            let size = latents::with_latents(size, config, width(dtype));
            recurrence::with_recurrence(size, config, width(dtype))
        };
        let size = size_of(config);
        let mut parts = Vec::new();
        if counts.ranks > 0 {
            let shard = shard_of(config, recipe.trainer.parallel.tensor);
            let of_pass = Size { activations_per_token: size_of(&shard).activations_per_token, ..size };
            training(&mut parts, recipe, config, counts, &of_pass, devices);
            parts.extend(copies(recipe, config, counts.ranks, width(dtype)));
        }
        if counts.reference {
            parts.push(part("reference", "the frozen policy", size.weights));
        }
        if counts.samplers > 0 {
            sampling(&mut parts, recipe, config, counts.samplers, &size);
        }
        if matches!(place, DeviceLocation::Cuda(_)) {
            let opened = counts.ranks.saturating_add(counts.samplers).max(1);
            let bytes =
                product(&[CONTEXT, counts.processes(recipe)]).saturating_add(product(&[WORKSPACE, opened]));
            parts.push(part("cuda", "contexts of its processes, scratch of cuBLAS", bytes));
        }
        if recipe.is_colocated() && counts.ranks > 0 && counts.samplers > 0 {
            parts.iter_mut().for_each(|part| part.phase = phase(part.name));
        }
        let started = recipe.trainer.ranks == Ranks::Threads || recipe.placement.processes;
        let here = counts.leads || counts.samplers > 0 || counts.reference || started;
        Self { place, roles: counts.words(), dtype, parts, here }
    }

    /// The most that is needed at the same time, bytes.
    #[must_use]
    pub fn total(&self) -> u64 {
        peak(&self.parts)
    }

    /// Why the run does not fit `free` bytes, and what helps; `None` if it does.
    #[must_use]
    pub fn shortage(&self, free: u64) -> Option<String> {
        let needed = self.total();
        if needed <= free {
            return None;
        }
        let mut largest: Vec<&Part> = self.parts.iter().collect();
        largest.sort_by_key(|part| std::cmp::Reverse(part.bytes));
        let named = largest.iter().take(NAMED);
        let named: Vec<_> = named.map(|part| format!("{} {}", part.name, mebibytes(part.bytes))).collect();
        let mut remedies: Vec<&str> =
            largest.iter().take(NAMED).filter_map(|part| self.remedy(part.name)).collect();
        remedies.dedup();
        Some(format!(
            "does not fit: needs {} of {} free; the largest: {}; {}",
            mebibytes(needed),
            mebibytes(free),
            named.join(", "),
            remedies.join(", or ")
        ))
    }

    /// The keys that make a part smaller.
    fn remedy(&self, part: &str) -> Option<&'static str> {
        match part {
            "activations" => {
                Some("lower `trainer.microbatch_tokens`, or set `trainer.recompute = \"block\"`")
            }
            "kv cache" => Some("lower `rollout.kv_cache_tokens` or `rollout.max_running`"),
            "decoding" => Some("lower `rollout.prefill_chunk` or `rollout.max_running`"),
            "master" | "optimizer" => Some("set `placement.optimizer = \"host\"`, or raise `trainer.world`"),
            "gradients" => Some("share them over more ranks (`trainer.world`, `trainer.zero = 2`)"),
            "policy" | "served" | "next" | "slots" | "reference" if self.dtype == DeviceDtype::F32 => {
                Some("set `model.dtype = \"bf16\"`")
            }
            "policy" | "reference" => Some("share it over more ranks (`trainer.world`, `trainer.zero = 3`)"),
            "served" | "next" => Some(
                "give the sampler another device (`placement.rollout_device`, or `placement.rollout_devices` for several)",
            ),
            _ => None,
        }
    }
}

impl fmt::Display for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = match self.dtype {
            DeviceDtype::F32 => "f32",
            DeviceDtype::Bf16 => "bf16",
        };
        writeln!(f, "{}: {}, in {dtype}", self.place, self.roles)?;
        self.parts.iter().try_for_each(|part| writeln!(f, "{part}"))?;
        write!(f, "  {:12} {:>10}  most at the same time", "total", mebibytes(self.total()))
    }
}

/// All devices on which a role of `recipe` computes.
fn places(recipe: &Recipe, devices: &Devices) -> BTreeSet<DeviceLocation> {
    let mut places: BTreeSet<DeviceLocation> = devices.trainer.iter().flatten().copied().collect();
    let samplers = devices.rollouts.iter().chain([&devices.rollout]).flatten();
    places.extend(samplers.filter(|_| recipe.supervised.is_none()));
    places.extend(devices.reference);
    places
}

/// The devices of `recipe` on this machine.
#[must_use]
pub fn there(recipe: &Recipe, config: &Config) -> Inventory {
    let places: Vec<_> = DeviceMemory::of(recipe, config).iter().map(|device| device.place).collect();
    inventory_of(&places)
}

/// All devices of a run with what there is of their memory; `None` for a run on the processor.
#[must_use]
pub fn describe(recipe: &Recipe, config: &Config, there: &Inventory) -> Option<String> {
    let devices = DeviceMemory::of(recipe, config);
    let described = devices.iter().map(|device| match free(device.place, there) {
        Some(free) => {
            let fits = || format!("fits: {} are free", mebibytes(free));
            format!("{device}; {}", device.shortage(free).unwrap_or_else(fits))
        }
        None if device.place == DeviceLocation::Emulated => {
            format!("{device}; in the memory of this machine")
        }
        None => match unusable(device.place, there) {
            Some(why) => format!("{device}; it cannot be used: {why}"),
            None => format!("{device}; it is not there, so nothing is compared"),
        },
    });
    let mut described: Vec<_> = described.collect();
    if needs_nccl(recipe) && there.missing.is_empty() {
        let found = if has_nccl(there) { "it is there".to_owned() } else { no_nccl() };
        described.push(format!("weights go from GPU to GPU by NCCL: {found}"));
    }
    (!described.is_empty()).then(|| described.join("\n"))
}

/// Whether weights are broadcast between GPUs.
fn needs_nccl(recipe: &Recipe) -> bool {
    let gpu = |place: &Option<DeviceLocation>| matches!(place, Some(DeviceLocation::Cuda(_)));
    recipe.weights.transport == WeightTransport::Nccl && recipe.devices().trainer.iter().any(gpu)
}

/// Refuses a run if a device does not exist or its memory is too small.
///
/// # Errors
/// [`Failure::DoesNotFit`], or that a device cannot be used and why.
pub fn refuse(recipe: &Recipe, config: &Config, there: &Inventory) -> Result<(), Failure> {
    for device in DeviceMemory::of(recipe, config) {
        if device.place == DeviceLocation::Emulated || !device.here {
            continue;
        }
        let Some(free) = free(device.place, there).filter(|_| there.missing.is_empty()) else {
            return Err(unavailable(device.place, there).into());
        };
        if let Some(shortage) = device.shortage(free) {
            return Err(Failure::DoesNotFit(format!("{} ({}) {shortage}", device.place, device.roles)));
        }
        if needs_nccl(recipe) && !has_nccl(there) {
            let (device, reason) = (device.place.to_string(), no_nccl());
            return Err(DeviceError::Unavailable { device, reason }.into());
        }
    }
    Ok(())
}

fn has_nccl(there: &Inventory) -> bool {
    there.nccl.is_some_and(|version| version >= OLDEST_NCCL)
}

fn no_nccl() -> String {
    format!("`weights.transport` \"nccl\" needs NCCL 2.14 or later, which was not found: {NCCL_REMEDY}")
}

/// Why the driver cannot use a GPU that it shows.
fn unusable(place: DeviceLocation, there: &Inventory) -> Option<&str> {
    there
        .unusable
        .iter()
        .find(|(ordinal, _)| place == DeviceLocation::Cuda(*ordinal))
        .map(|(_, why)| why.as_str())
}

/// Why a GPU cannot be used.
fn unavailable(place: DeviceLocation, there: &Inventory) -> DeviceError {
    let reason = match unusable(place, there) {
        _ if !there.missing.is_empty() => there.missing.join("; "),
        Some(why) => format!("{why}; `nvidia-smi` shows the processes that use it"),
        None => format!("this machine shows {} GPUs; look at CUDA_VISIBLE_DEVICES", there.visible),
    };
    DeviceError::Unavailable { device: place.to_string(), reason }
}

fn free(place: DeviceLocation, there: &Inventory) -> Option<u64> {
    let DeviceLocation::Cuda(ordinal) = place else { return None };
    there.gpus.iter().find(|gpu| gpu.ordinal == ordinal).map(|gpu| gpu.free)
}

/// Takes from the parts of the host what is on devices.
pub(super) fn leave_out(parts: &mut Vec<Part>, recipe: &Recipe) {
    let devices = recipe.devices();
    let mut gone: Vec<&str> = Vec::new();
    if devices.trains() {
        gone.extend(["activations", "logits"]);
        if devices.optimizer_on_device {
            gone.extend(["policy", "gradients", "optimizer", "update", "critic"]);
        }
    }
    if devices.rollout.is_some() {
        gone.extend(["served", "next", "kv cache", "decoding"]);
    }
    let by_the_host = recipe.placement.processes && !recipe.weights.transport.is_between_devices();
    if devices.trains() && devices.rollout.is_some() && !by_the_host {
        gone.push("published");
    }
    if devices.reference.is_some() {
        gone.push("reference");
    }
    parts.retain(|part| !gone.contains(&part.name));
}

fn part(name: &'static str, what: &'static str, bytes: u64) -> Part {
    Part { name, what, bytes, phase: Phase::Always }
}

/// Bytes of a value.
fn width(dtype: DeviceDtype) -> u64 {
    dtype.bytes() as u64
}

#[cfg(test)]
mod tests {
    use device::inventory::Gpu;
    use model::Layout;

    use super::super::Memory;

    use super::*;
    use crate::plan::tests::{SIZES, recipe};
    use crate::recipe::schema::Lora;
    use crate::recipe::words::{
        CollectiveWord, DeviceWord, ModelDtype, OptimizerHome, PolicyPlacement, WeightTransport,
    };

    const GPU: DeviceWord = DeviceWord::At(DeviceLocation::Cuda(0));
    const NEXT: DeviceWord = DeviceWord::At(DeviceLocation::Cuda(1));

    fn config() -> Config {
        Config::fresh(&SIZES)
    }

    fn on(device: DeviceWord) -> Recipe {
        let mut recipe = recipe();
        recipe.placement.device = device;
        recipe
    }

    fn bytes(device: &DeviceMemory, name: &str) -> Option<u64> {
        Some(device.parts.iter().find(|part| part.name == name)?.bytes)
    }

    fn with_free(free: u64) -> Inventory {
        let (name, capability, total) = ("a GPU".to_owned(), (9, 0), 1 << 40);
        let gpus = vec![Gpu { ordinal: 0, name, capability, free, total }];
        Inventory { driver: Some(13_000), visible: 1, gpus, ..Inventory::default() }
    }

    #[test]
    fn parts_of_a_known_shape_count_what_they_say() {
        let (config, recipe) = (config(), on(GPU));
        let weights = Layout::new(&config).len() as u64;
        let [device] = &DeviceMemory::of(&recipe, &config)[..] else { panic!("there is one device") };
        assert_eq!((device.place, &device.roles[..]), (DeviceLocation::Cuda(0), "the trainer, the sampler"));
        let (attention, gate_up) = (2 * 8 + 24 + 8, 2 * 16);
        let expected = [
            ("policy", 2 * weights),
            ("master", 4 * weights),
            ("gradients", 4 * weights),
            ("optimizer", 8 * weights),
            ("activations", 100 * 2 * (2 * (attention + gate_up) + attention + 8 + 2 * gate_up)),
            ("logits", 100 * 10 * (4 + 2)),
            ("served", 2 * weights),
            ("next", 2 * weights),
            ("kv cache", 640 * 2 * 2 * 2 * 8),
            (
                "decoding",
                (10 + 160) * (2 * (attention + gate_up) + 2 * 16 + 4 * 4) + 4 * 256 + 10 * 10 * 2 * 4,
            ),
            ("cuda", (512 + 2 * 32) << 20),
        ];
        let found: Vec<_> = device.parts.iter().map(|part| (part.name, part.bytes)).collect();
        assert_eq!(found, expected);
        assert_eq!(device.total(), expected.iter().map(|(_, bytes)| bytes).sum::<u64>());
        assert!(device.to_string().starts_with("cuda:0: the trainer, the sampler, in bf16\n"), "{device}");
        assert_eq!(device.to_string().lines().count(), expected.len() + 2);
    }

    #[test]
    fn recomputed_and_host_tensors_take_no_device_memory() {
        let (config, mut recipe) = (config(), on(GPU));
        let weights = Layout::new(&config).len() as u64;
        let of = |recipe: &Recipe, name: &str| bytes(&DeviceMemory::of(recipe, &config)[0], name);
        recipe.trainer.recompute = Recompute::Block;
        let (attention, gate_up) = (2 * 8 + 24 + 8, 2 * 16);
        let (kept, back) = (2 * 8 + attention + gate_up, attention + 8 + 2 * gate_up);
        assert_eq!(of(&recipe, "activations"), Some(100 * 2 * (kept + back)));
        recipe.placement.optimizer = OptimizerHome::Host;
        assert_eq!((of(&recipe, "master"), of(&recipe, "optimizer")), (None, None));
        recipe.placement.optimizer = OptimizerHome::Device;
        recipe.dtype = ModelDtype::F32;
        assert_eq!((of(&recipe, "policy"), of(&recipe, "master")), (Some(4 * weights), None));
        recipe.weights.transport = WeightTransport::CudaIpc;
        assert_eq!(of(&recipe, "slots"), Some(8 * weights));
        (recipe.lora, recipe.placement.optimizer) = (Some(Lora::default()), OptimizerHome::Host);
        let (factors, _) = recipe.lora().unwrap().shapes(Layout::new(&config).specs());
        let factors = 4 * factors.iter().map(model::ParameterSpec::len).sum::<usize>() as u64;
        assert_eq!((of(&recipe, "gradients"), of(&recipe, "adapter")), (Some(factors), Some(factors)));
        assert_eq!(of(&recipe, "optimizer"), None);
    }

    #[test]
    fn ranks_are_one_device_further_each_and_share_as_their_stage_says() {
        let (config, mut recipe) = (config(), on(GPU));
        let weights = Layout::new(&config).len() as u64;
        recipe.trainer.world = 2;
        recipe.placement.rollout_device = Some(DeviceWord::At(DeviceLocation::Cuda(2)));
        let devices = DeviceMemory::of(&recipe, &config);
        let places: Vec<_> = devices.iter().map(|device| (device.place, &device.roles[..])).collect();
        let expected = [
            (DeviceLocation::Cuda(0), "the trainer"),
            (DeviceLocation::Cuda(1), "the trainer"),
            (DeviceLocation::Cuda(2), "the sampler"),
        ];
        assert_eq!(places, expected);
        assert_eq!(bytes(&devices[1], "policy"), Some(2 * weights));
        assert_eq!(bytes(&devices[1], "optimizer"), Some((8 * weights).div_ceil(2)));
        let master = Some(((4 + 2) * weights).div_ceil(2));
        assert_eq!(bytes(&devices[1], "master"), master, "its part, and that rounded for the others");
        assert_eq!(bytes(&devices[1], "gradients"), Some((4 * weights + 2 * 4 * weights).div_ceil(2)));
        assert_eq!(bytes(&devices[2], "policy"), None);
        assert_eq!(bytes(&devices[2], "cuda"), Some((512 + 32) << 20));
        recipe.trainer.collective = CollectiveWord::Host;
        let by_host = &DeviceMemory::of(&recipe, &config)[1];
        assert_eq!((bytes(by_host, "master"), bytes(by_host, "optimizer")), (None, None));
        recipe.placement.trainer_devices = Some(vec![NEXT, NEXT]);
        recipe.placement.rollout_device = Some(DeviceWord::Cpu);
        let both = DeviceMemory::of(&recipe, &config);
        assert_eq!((both.len(), &both[0].roles[..]), (1, "2 ranks of the trainer"));
        assert_eq!(bytes(&both[0], "policy"), Some(4 * weights));
    }

    #[test]
    fn samplers_have_the_devices_that_are_listed() {
        let (config, mut recipe) = (config(), on(GPU));
        (recipe.placement.processes, recipe.placement.rollout_workers) = (true, Some(3));
        let roles = |recipe: &Recipe| -> Vec<String> {
            let devices = DeviceMemory::of(recipe, &config);
            devices.iter().map(|device| format!("{}: {}", device.place, device.roles)).collect()
        };
        assert_eq!(roles(&recipe), ["cuda:0: the trainer, 3 samplers"]);
        recipe.placement.rollout_devices = Some(vec![NEXT, GPU, NEXT]);
        assert_eq!(roles(&recipe), ["cuda:0: the trainer, the sampler", "cuda:1: 2 samplers"]);
        let both = DeviceMemory::of(&recipe, &config);
        assert_eq!(bytes(&both[1], "served"), bytes(&both[0], "served").map(|bytes| 2 * bytes));
    }

    #[test]
    fn a_broadcast_needs_nccl() {
        let (config, mut recipe) = (config(), on(GPU));
        recipe.placement.rollout_device = Some(NEXT);
        recipe.weights.transport = WeightTransport::Nccl;
        let mut found = with_free(1 << 30);
        found.gpus.push(Gpu { ordinal: 1, ..found.gpus[0].clone() });
        let error = refuse(&recipe, &config, &found).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error.to_string().contains("needs NCCL 2.14 or later, which was not found: install NCCL"),
            "{error}"
        );
        assert!(describe(&recipe, &config, &found).unwrap().contains("needs NCCL"));
        found.nccl = Some(21_304);
        refuse(&recipe, &config, &found).unwrap_err();
        found.nccl = Some(22_809);
        refuse(&recipe, &config, &found).unwrap();
        assert!(describe(&recipe, &config, &found).unwrap().ends_with("by NCCL: it is there"));
        recipe.weights.transport = WeightTransport::Auto;
        found.nccl = None;
        refuse(&recipe, &config, &found).unwrap();
    }

    #[test]
    fn roles_that_take_turns_need_the_larger_turn() {
        let (config, mut recipe) = (config(), on(GPU));
        let together = DeviceMemory::of(&recipe, &config)[0].total();
        recipe.placement.policy = Some(PolicyPlacement::Colocated);
        let device = &DeviceMemory::of(&recipe, &config)[0];
        let of = |names: &[&str]| names.iter().filter_map(|name| bytes(device, name)).sum::<u64>();
        let training = of(&["gradients", "activations", "logits"]);
        let sampling = of(&["served", "next", "kv cache", "decoding"]);
        assert_eq!(device.total(), together - training.min(sampling));
    }

    #[test]
    fn a_run_that_does_not_fit_is_refused_with_its_largest_parts_and_what_helps() {
        let (config, recipe) = (config(), on(GPU));
        refuse(&recipe, &config, &with_free(1 << 30)).unwrap();
        let error = refuse(&recipe, &config, &with_free(1 << 20)).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        let begins = "cuda:0 (the trainer, the sampler) does not fit: needs 576.2 MiB of 1.0 MiB free; the largest: \
                      cuda 576.0 MiB, activations 0.1 MiB, kv cache 0.0 MiB; ";
        assert!(text.starts_with(begins), "{text}");
        assert!(
            text.contains("`trainer.microbatch_tokens`") && text.contains("`rollout.kv_cache_tokens`"),
            "{text}"
        );
        let described = describe(&recipe, &config, &with_free(1 << 20)).unwrap();
        assert!(described.contains("does not fit: needs 576.2 MiB of 1.0 MiB free"), "{described}");
        let described = describe(&recipe, &config, &with_free(1 << 30)).unwrap();
        assert!(described.ends_with("; fits: 1.0 GiB are free"), "{described}");
        let described = describe(&recipe, &config, &Inventory::default()).unwrap();
        assert!(described.ends_with("; it is not there, so nothing is compared"), "{described}");
        assert_eq!(describe(&on(DeviceWord::Cpu), &config, &with_free(0)), None);
    }

    #[test]
    fn a_device_that_is_not_there_is_refused_with_the_reason() {
        let config = config();
        let error = refuse(&on(NEXT), &config, &with_free(1 << 30)).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("cuda:1 cannot be used: this machine shows 1 GPUs"), "{error}");
        let full = (1, "CUDA_ERROR_OUT_OF_MEMORY: out of memory".to_owned());
        let full = Inventory { visible: 2, unusable: vec![full], ..with_free(1 << 30) };
        let error = refuse(&on(NEXT), &config, &full).unwrap_err().to_string();
        assert!(error.contains("cuda:1 cannot be used: CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
        refuse(&on(GPU), &config, &full).unwrap();
        let without = Inventory { missing: vec!["no driver: install it".to_owned()], ..Inventory::default() };
        let error = refuse(&on(GPU), &config, &without).unwrap_err();
        assert_eq!(error.to_string(), "device cuda:0 cannot be used: no driver: install it");
        refuse(&on(DeviceWord::At(DeviceLocation::Emulated)), &config, &without).unwrap();
        refuse(&on(DeviceWord::Cpu), &config, &without).unwrap();
        // Ranks that join bring devices of their own.
        let mut joined = on(GPU);
        (joined.trainer.world, joined.trainer.ranks) = (2, Ranks::Processes);
        refuse(&joined, &config, &with_free(1 << 30)).unwrap();
    }

    #[test]
    fn the_host_keeps_what_no_device_has() {
        let (config, mut recipe) = (config(), on(GPU));
        let names = |recipe: &Recipe| -> Vec<&str> {
            Memory::of(recipe, &config, 0).parts.iter().map(|part| part.name).collect()
        };
        let on_device =
            ["policy", "gradients", "optimizer", "activations", "served", "next", "kv cache", "decoding"];
        assert!(names(&recipe).iter().all(|name| !on_device.contains(name)), "{:?}", names(&recipe));
        recipe.placement.optimizer = OptimizerHome::Host;
        let kept = names(&recipe);
        assert!(["policy", "gradients", "optimizer"].iter().all(|name| kept.contains(name)), "{kept:?}");
        recipe.placement.rollout_device = Some(DeviceWord::Cpu);
        assert!(names(&recipe).contains(&"kv cache") && names(&recipe).contains(&"published"));
    }

    #[test]
    fn sizes_beyond_all_bounds_saturate() {
        let mut recipe = on(GPU);
        recipe.rollout.max_running = usize::MAX;
        assert_eq!(DeviceMemory::of(&recipe, &config())[0].total(), u64::MAX);
    }
}
