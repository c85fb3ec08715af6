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

use self::roles::{copies, phase, reference, sampling, training};
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
            reference: devices.reference && devices.trainer.iter().any(on),
            leads: devices.trainer.first().is_some_and(on),
        }
    }

    /// Processes that have a context on the device.
    fn processes(self, recipe: &Recipe) -> u64 {
        let ranks = if recipe.trainer.ranks == Ranks::Threads { self.ranks.min(1) } else { self.ranks };
        if recipe.placement.processes { ranks.saturating_add(self.samplers) } else { ranks.max(1) }
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
            parts.push(reference(recipe, config, counts.ranks, width(dtype)));
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
        let here = counts.leads || counts.samplers > 0 || started;
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
            "policy" | "served" | "next" | "slots" if self.dtype == DeviceDtype::F32 => {
                Some("set `model.dtype = \"bf16\"`")
            }
            "reference" => Some("set `placement.reference_weights = \"host\"`"),
            "policy" => Some("share it over more ranks (`trainer.world`, `trainer.zero = 3`)"),
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
mod tests;
