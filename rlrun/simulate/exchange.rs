//! Seconds of what ranks send each other, and of new weights on their way to samplers.
//!
//! Invariant: bytes and calls are those that `rlrun plan` shows ([`Traffic`], [`SamplerRankPlan`]); here they are divided by the speed of
//! the link that they take. Nothing is sent while a rank computes: times are added, and none is negative.

use model::{Config, Layout, Reduction};
use trainer::CollectivePlace;

use super::hardware::{Hardware, HardwareKind};
use crate::plan::sampler_ranks::SamplerRankPlan;
use crate::plan::traffic::{Traffic, expert_values};
use crate::recipe::Recipe;
use crate::recipe::words::WeightTransport;

/// Bytes of a value.
const F32: f64 = size_of::<f32>() as f64;

/// Times of what the ranks of a trainer send in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RankExchange {
    /// For a token of a rank that divides the data, seconds.
    pub(super) token_s: f64,
    /// Latency of the calls in passes, seconds.
    pub(super) calls_s: f64,
    /// Gradients and weights among ZeRO ranks, seconds.
    pub(super) weights_s: f64,
    /// Time of passes over that of stages with equal work that are never idle, at least 1.
    pub(super) stretch: f64,
}

impl RankExchange {
    /// Of a single rank, which sends nothing.
    const NONE: Self = Self { token_s: 0.0, calls_s: 0.0, weights_s: 0.0, stretch: 1.0 };

    /// In a step of `step_tokens` tokens of all ranks.
    pub(super) fn of(
        hardware: &Hardware,
        recipe: &Recipe,
        (config, layout): (&Config, &Layout),
        step_tokens: f64,
    ) -> Self {
        let (world, parallel) = (recipe.trainer.world, recipe.trainer.parallel.config());
        let Some(traffic) = Traffic::over(recipe, config, layout, step_tokens) else { return Self::NONE };
        // Tensor ranks are neighbours; context ranks are around them, then stages, then the ranks that divide the data.
        let (context, expert) = (parallel.context.degree, parallel.expert);
        let of_stage = parallel.tensor * context;
        // Neighbours among the ranks that divide tokens and data; those of several passes unless they divide the ranks of one.
        let of_experts = match context.is_multiple_of(expert) {
            true => parallel.tensor * expert,
            false => parallel.of_pass() * expert.div_ceil(context).max(2),
        };
        let sent = [
            (parallel.tensor, traffic.tensor, traffic.calls.tensor),
            (of_stage, traffic.context, traffic.calls.context),
            (parallel.of_pass(), traffic.pipeline, traffic.calls.pipeline),
            (of_experts, traffic.expert, traffic.calls.expert),
        ];
        let tokens = step_tokens / parallel.data(world).max(1) as f64;
        let bytes_s: f64 = sent.iter().map(|&(span, bytes, _)| hardware.exchange_s(span, bytes, 0.0)).sum();
        let calls_s: f64 = sent.iter().map(|&(span, _, calls)| hardware.exchange_s(span, 0.0, calls)).sum();
        let [weights_by_host_s, exchanges_by_host_s] =
            by_host_s(hardware, recipe, (config, layout), &traffic);
        // What a stage sends for a micro-batch delays those after it, as its work does.
        let busy = 1.0 - traffic.idle;
        Self {
            token_s: (bytes_s + exchanges_by_host_s) / tokens.max(1.0) / busy,
            calls_s: calls_s / busy,
            // Few calls: an update waits for the last of them alone.
            weights_s: hardware.exchange_s(world, traffic.zero, 0.0) + weights_by_host_s,
            stretch: slowest_stage(config, parallel.pipeline) / busy,
        }
    }
}

/// What goes to the host and back where ranks on devices compute passes together, seconds of a step: gradients and weights, which are updated
/// on the host; and in passes what stages send, and others if they do not exchange from device to device. 0 for all others.
fn by_host_s(
    hardware: &Hardware,
    recipe: &Recipe,
    (config, layout): (&Config, &Layout),
    traffic: &Traffic,
) -> [f64; 2] {
    let parallel = recipe.trainer.parallel.config();
    let on_devices = hardware.kind == HardwareKind::Gpu && config.reduction == Reduction::Chain;
    if (parallel.of_pass() <= 1 && parallel.expert <= 1) || !on_devices {
        return [0.0; 2];
    }
    let ([passes, updates], zero) = (traffic.passes, recipe.trainer.zero);
    let gradients = if zero >= 2 { passes } else { updates };
    // Layers are gathered for the forward and for the backward.
    let weights = if zero >= 3 { 2.0 * passes } else { updates };
    // Of experts that ranks divide a rank has its own.
    let of_others = expert_values(layout, parallel.expert) / parallel.expert * (parallel.expert - 1);
    let moved = (gradients + weights) * F32 * ((layout.len() - of_others) / parallel.shards()) as f64;
    let all = recipe.collective() == CollectivePlace::Host;
    let in_passes = traffic.tensor + traffic.context + traffic.expert;
    let exchanged = traffic.pipeline + if all { in_passes } else { 0.0 };
    // What is sent was downloaded, and is uploaded.
    [moved, 2.0 * exchanged].map(|bytes| bytes / hardware.host_bytes_per_s.value)
}

/// Work of the stage with the most, over the mean of `count` stages; a layer counts as the mean of all.
fn slowest_stage(config: &Config, count: usize) -> f64 {
    let Some(stages) = model::stages(config, count).ok().filter(|_| count > 1) else { return 1.0 };
    let head = (config.vocab_size * config.hidden_size) as f64;
    let layer = config.layer_multiply_adds() as f64 / config.num_layers() as f64;
    // The first stage has the head.
    let heads = [head].into_iter().chain(std::iter::repeat(0.0));
    let work: Vec<f64> =
        stages.iter().zip(heads).map(|(layers, head)| layers.len() as f64 * layer + head).collect();
    let all: f64 = work.iter().sum();
    work.into_iter().fold(0.0, f64::max) * count as f64 / all.max(f64::MIN_POSITIVE)
}

/// Times of what the ranks of a sampler send, and the part of the work that each has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SamplerExchange {
    /// Of a decode step, and of a sequence in it, seconds.
    pub(super) decode_s: [f64; 2],
    /// Of a token of a prompt, seconds.
    pub(super) prefill_token_s: f64,
    /// Time of the work of a rank over that of one rank alone: ranks on a processor divide its cores.
    pub(super) share: f64,
}

impl SamplerExchange {
    /// Of the ranks of each sampler.
    pub(super) fn of(hardware: &Hardware, recipe: &Recipe, config: &Config) -> Self {
        let Some(plan) = SamplerRankPlan::of(recipe, config) else {
            return Self { decode_s: [0.0; 2], prefill_token_s: 0.0, share: 1.0 };
        };
        let sums_s = hardware.exchange_s(plan.degree, plan.sums, 0.0);
        let share = if hardware.kind == HardwareKind::Gpu { 1.0 / plan.degree as f64 } else { 1.0 };
        Self {
            decode_s: [
                hardware.exchange_s(plan.degree, 0.0, plan.calls),
                sums_s + hardware.exchange_s(plan.degree, plan.logits as f64, 0.0),
            ],
            prefill_token_s: sums_s,
            share,
        }
    }
}

/// A version of the weights that goes to samplers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct VersionTransfer {
    /// Bytes of the weights that are computed with.
    pub(super) computed: f64,
    /// Bytes of what is sent through the memory of the host (`weights.dtype`).
    pub(super) sent: f64,
    /// Seconds of a copy in the memory of a device.
    pub(super) copy_s: f64,
}

impl VersionTransfer {
    /// Seconds in which the trainer publishes and does nothing else, and seconds until the last sampler has the version.
    pub(super) fn seconds(&self, recipe: &Recipe, hardware: &Hardware) -> [f64; 2] {
        let gpu = hardware.kind == HardwareKind::Gpu;
        if !recipe.placement.processes {
            return [self.copy_s, if gpu { self.computed / hardware.link_bytes_per_s.value } else { 0.0 }];
        }
        let samplers = recipe.rollout_workers().max(1);
        let devices = recipe.trainer.world + samplers;
        let over_http = samplers as f64 * self.sent / hardware.network_bytes_per_s.value;
        // A device publishes to the memory of its host, from which every device of a sampler reads by its own link.
        let by_host = if gpu { self.sent / hardware.host_bytes_per_s.value } else { 0.0 };
        let published = if gpu { by_host } else { self.copy_s };
        match recipe.weights.transport {
            WeightTransport::Auto if hardware.is_one_machine(devices) => {
                let mapped = if gpu { by_host } else { self.sent / hardware.link_bytes_per_s.value };
                [published, mapped]
            }
            WeightTransport::Auto | WeightTransport::Http => [published, over_http + by_host],
            // All samplers read from one device.
            WeightTransport::CudaIpc => {
                [self.copy_s, hardware.exchange_s(devices, samplers as f64 * self.computed, 0.0)]
            }
            // A broadcast passes through the samplers, each of which sends what it receives.
            WeightTransport::Nccl => [self.copy_s, hardware.exchange_s(devices, self.computed, 1.0)],
        }
    }
}

#[cfg(test)]
mod tests;
