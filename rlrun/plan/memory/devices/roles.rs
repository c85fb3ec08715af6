//! The memory that each role needs on a device.
//!
//! Invariant: the parts of one rank are those of all ranks together, divided by the number of ranks.

use std::ops::Range;

use collective::Position;
use device::ops::paged::{PAGE, PART};
use model::on_device::HEAD_ROWS;
use model::{Config, Layout, PassRanks, Recompute, Unit};
use trainer::lora::TargetModule;
use trainer::pipeline::in_flight;

use super::super::super::layouts::layout_of;
use super::super::{
    F32, Part, Phase, Size, Trained, cache_positions, decoding_rows, micro_batch_tokens, of_ranks, product,
    received_values, reference_shape, shard_of, states,
};
use super::{DeviceCounts, part};
use crate::recipe::words::{CriticKind, PlaceWord, WeightTransport};
use crate::recipe::{Model, Recipe};
use crate::settings::Devices;

/// The memory of trainer ranks on a device.
pub(super) fn training(
    parts: &mut Vec<Part>,
    recipe: &Recipe,
    config: &Config,
    counts: DeviceCounts,
    size: &Size,
    devices: &Devices,
) {
    let (layout, ranks, world) = (layout_of(config), counts.ranks, (recipe.trainer.world as u64).max(1));
    let width = value_bytes(&layout, size);
    // The share of the ranks on this device in the total of all ranks.
    let of_those_here = |all: u64| product(&[all.div_ceil(world), ranks]);
    let trained = Trained::of(recipe, config);
    let (whole, gradients) = of_ranks(recipe, &layout, recipe.lora().as_ref(), width);
    let stored = stored(recipe, &layout, width);
    let policy = stored.map_or(whole, |stored| product(&[world, stored]));
    let master = masters(&layout, width, recipe, devices);
    parts.push(part("policy", "the weights that are computed with", of_those_here(policy)));
    if devices.optimizer_on_device && master > 0 {
        parts.push(part("master", "the same in f32, as the optimizer moves them", of_those_here(master)));
    }
    parts.push(part("gradients", "in f32, and on their way between ranks", of_those_here(gradients)));
    if let Some(lora) = recipe.lora() {
        let values: u64 = lora.shapes(layout.specs()).0.iter().map(|spec| spec.len() as u64).sum();
        // Those of an embedding are looked up by rows too.
        let is_embedded = lora.target_modules.contains(&TargetModule::EmbedTokens);
        let table = if is_embedded { product(&[lora.rank as u64, config.vocab_size as u64]) } else { 0 };
        let what = "its factors, beside the weights that it is merged into";
        // Those of a base that stays quantised are merged in f32.
        let merged = if stored.is_some() { F32 } else { 0 };
        let bytes =
            product(&[width, values.saturating_add(table)]).saturating_add(product(&[merged, values]));
        parts.push(part("adapter", what, product(&[ranks, bytes])));
    }
    if devices.optimizer_on_device {
        let what = "what it remembers of every weight";
        parts.push(part("optimizer", what, of_those_here(trained.optimizer)));
    }
    let tokens = tokens_of_rank(recipe, config);
    // A recurrence has the states of its backward beside what it has of tokens.
    let of_states = if config.delta_net().is_some() { product(&[ranks, size.recurrence]) } else { 0 };
    let layers = (config.num_layers() as u64).max(1);
    let exchanged = exchanged_per_token(recipe, config, width);
    let of_token = size.activations_per_token + exchanged + dispatched_per_token(recipe, config, width);
    let of_token = product(&[of_token, layers_in_flight(recipe, config)]) / layers;
    let kept = product(&[ranks, tokens, of_token]).saturating_add(of_states);
    parts.push(part("activations", "full micro-batches, kept for their backward", kept));
    let logit = [ranks, tokens.min(HEAD_ROWS as u64), config.vocab_size as u64, F32 + width];
    parts.push(part("logits", "of some rows, and their gradients", product(&logit)));
    if recipe.critic().is_some_and(|critic| critic.kind == CriticKind::Separate) {
        let (own, gradients) = of_ranks(recipe, &layout, None, width);
        let state = recipe.optimizer().state_bytes(layout.specs());
        let moved = if devices.optimizer_on_device { master.saturating_add(state) } else { 0 };
        let all = own.saturating_add(gradients).saturating_add(moved);
        let what = "its weights, gradients and optimizer";
        parts.push(part("critic", what, of_those_here(all)));
    }
    if counts.leads && recipe.weights.transport == WeightTransport::CudaIpc {
        let what = "the newest version and the one before, for samplers to map";
        parts.push(part("slots", what, product(&[2, size.weights])));
    }
}

/// What the trainer's `ranks` on a device have of the model beside equal parts of it, if they divide it: as much as the rank with the
/// largest part; `None` for ranks that do not.
pub(super) fn copies(recipe: &Recipe, config: &Config, ranks: u64, width: u64) -> Option<Part> {
    let parallel = recipe.trainer.parallel.config();
    let shards = parallel.shards();
    let stages = (0..parallel.pipeline).map(|stage| parallel.shard(config, stage * parallel.tensor).ok());
    let largest = stages.collect::<Option<Vec<_>>>()?.iter().map(|shard| shard.layout().len()).max()?;
    let beside = (shards * largest).saturating_sub(layout_of(config).len()) as u64;
    let models = 1 + u64::from(recipe.critic().is_some_and(|critic| critic.kind == CriticKind::Separate));
    let each = product(&[models, beside, width + F32]) / shards as u64;
    let what = "embedding, head and norms that not all ranks divide, and their gradients";
    (shards > 1).then(|| part("copies", what, product(&[each, ranks])))
}

/// Tokens of a full micro-batch of the longest sequences that a rank computes: of context ranks the one with the most.
fn tokens_of_rank(recipe: &Recipe, config: &Config) -> u64 {
    let (parallel, tokens) = (recipe.trainer.parallel, micro_batch_tokens(recipe) as usize);
    if parallel.context <= 1 {
        return tokens as u64;
    }
    let longest = recipe.data.max_prompt_length.saturating_add(recipe.rollout.max_completion_length);
    let starts = (0..tokens).step_by(longest.max(1));
    let lengths = starts.map(|start| longest.min(tokens - start));
    let shard = shard_of(config, parallel.tensor);
    PassRanks::most_tokens(&shard, lengths, parallel.context, parallel.tensor) as u64
}

/// What context ranks have of a token beside the activations of one rank, bytes: results of heads that are kept for the backward, and of one
/// layer what is sent and received, in f32 between devices.
fn exchanged_per_token(recipe: &Recipe, config: &Config, width: u64) -> u64 {
    let parallel = recipe.trainer.parallel;
    if parallel.context <= 1 {
        return 0;
    }
    let (shard, keeps_all) = (shard_of(config, parallel.tensor), recipe.trainer.recompute == Recompute::None);
    let kept = if keeps_all { shard.num_layers() } else { 1 };
    let (queries, keys) = (shard.num_heads * shard.head_dim, shard.num_kv_heads * shard.head_dim);
    let buffers = product(&[(queries + 2 * keys) as u64, 2 * (width + F32)]);
    product(&[kept as u64, queries as u64, width]).saturating_add(buffers)
}

/// What ranks that divide experts have of a token beside the activations of one rank, bytes, if all have as many rows: the inputs of its
/// experts that are kept for the backward, and of one layer what is sent and received, in f32 between devices.
fn dispatched_per_token(recipe: &Recipe, config: &Config, width: u64) -> u64 {
    if recipe.trainer.parallel.expert <= 1 {
        return 0;
    }
    let largest = config.layers.iter().filter_map(|layer| layer.feed_forward.experts());
    let largest = largest.map(|spec| (spec.per_token * config.hidden_size) as u64).max().unwrap_or(0);
    let kept = if recipe.trainer.recompute == Recompute::None { received_values(config) } else { largest };
    product(&[kept, width]).saturating_add(product(&[largest, 2 * (width + F32)]))
}

/// Micro-batches in flight times layers, of the stage where that is most; the number of layers if ranks have all of them.
fn layers_in_flight(recipe: &Recipe, config: &Config) -> u64 {
    let world = recipe.trainer.parallel.pipeline.max(1);
    let stages = model::stages(config, world).unwrap_or_default();
    let of_stage = |(rank, layers): (usize, &Range<usize>)| {
        let flights = if world > 1 { in_flight(Position { rank, world }) } else { 1 };
        flights * layers.len()
    };
    stages.iter().enumerate().map(of_stage).max().unwrap_or(config.num_layers()) as u64
}

/// A base that stays quantised, with the weights of embedding, tail and one layer, bytes; `None` for weights that do not.
fn stored(recipe: &Recipe, layout: &Layout, width: u64) -> Option<u64> {
    let Model::Path(path) = &recipe.model else { return None };
    let layers = layout.layers();
    let (largest, all) = layers
        .iter()
        .map(std::ops::Range::len)
        .fold((0, 0), |(largest, all), layer| (layer.max(largest), layer + all));
    let formed = (layout.len() - all + largest) as u64;
    recipe.has_quantized_base().then(|| model::stored_bytes(path).saturating_add(product(&[width, formed])))
}

/// Bytes that a weight is stored in.
fn value_bytes(layout: &Layout, size: &Size) -> u64 {
    size.weights / (layout.len() as u64).max(1)
}

/// What is moved in f32 beside what is computed with, of all ranks, bytes. Ranks that exchange from device to device have it
/// in any case, and where each computes with all weights also its own part of them once more.
fn masters(layout: &Layout, width: u64, recipe: &Recipe, devices: &Devices) -> u64 {
    let own = if devices.meets && recipe.trainer.zero < 3 { width } else { 0 };
    let moved = if devices.meets || width < F32 { F32 } else { 0 };
    product(&[own + moved, layout.len() as u64])
}

/// The memory of samplers on a device.
pub(super) fn sampling(parts: &mut Vec<Part>, recipe: &Recipe, config: &Config, samplers: u64, size: &Size) {
    let layout = layout_of(config);
    let stored = stored(recipe, &layout, value_bytes(&layout, size));
    let factors = Trained::of(recipe, config).adapter;
    let served = stored.map_or(size.weights, |stored| stored.saturating_add(factors));
    let next = if stored.is_some() { factors } else { size.weights };
    let pages = product(&[cache_positions(recipe, config), size.cache_per_token]);
    let cache = product(&[samplers, pages.saturating_add(states(recipe, config))]);
    let logits = product(&[2, F32, recipe.rollout.max_running as u64, config.vocab_size as u64]);
    let per_token = size.layer_per_token.saturating_add(activated(config, size));
    let step = product(&[decoding_rows(recipe), per_token])
        .saturating_add(parts_of_contexts(recipe, config))
        .saturating_add(logits);
    parts.push(part("served", "the version that is sampled from", product(&[samplers, served])));
    parts.push(part("next", "the version that comes in beside the decoding", product(&[samplers, next])));
    parts.push(part("kv cache", "keys and values of all running sequences, and recurrent states", cache));
    parts.push(part("decoding", "one step of all running sequences", product(&[samplers, step])));
}

/// Bytes per token of a step outside of a layer: the activation, and the angles of its position.
fn activated(config: &Config, size: &Size) -> u64 {
    let width = value_bytes(&layout_of(config), size);
    width * config.intermediate_size as u64 + F32 * config.head_dim as u64
}

/// Scratch of attention over contexts in several parts, of all running sequences at their longest, bytes. Sizes are rounded
/// up as those of the steps.
fn parts_of_contexts(recipe: &Recipe, config: &Config) -> u64 {
    let longest = recipe.data.max_prompt_length.saturating_add(recipe.rollout.max_completion_length);
    let parts = longest.div_ceil(PAGE).checked_next_power_of_two().unwrap_or(usize::MAX).div_ceil(PART);
    let of_part = config.num_heads * (config.head_dim + 2);
    let sequences = model::on_device::recorded_tokens(recipe.rollout.max_running);
    let values = product(&[sequences as u64, parts as u64, of_part as u64]);
    product(&[F32, values.checked_next_power_of_two().unwrap_or(values)])
}

/// The phase in which a part is allocated, if sampler and trainer take turns.
pub(super) fn phase(part: &str) -> Phase {
    match part {
        "gradients" | "adapter" | "activations" | "logits" | "reference" | "offloaded" => Phase::Training,
        "served" | "next" | "kv cache" | "decoding" => Phase::Sampling,
        _ => Phase::Always,
    }
}

/// What the device of `ranks` has of the reference, whose weights may stay on the host, if the policy has the shape `config`.
pub(super) fn reference(recipe: &Recipe, config: &Config, ranks: u64, width: u64) -> Part {
    let layout = layout_of(&reference_shape(recipe, config));
    if recipe.placement.reference_weights == PlaceWord::Device {
        let what = "frozen weights, all of them for every rank";
        return part("reference", what, product(&[ranks, layout.len() as u64, width]));
    }
    let ends = [Unit::Embedding, Unit::Tail].map(|unit| layout.unit(unit).len() as u64);
    let layer = layout.layers().iter().map(ExactSizeIterator::len).max().unwrap_or(0) as u64;
    let values = ends.iter().fold(layer, |sum, end| sum.saturating_add(*end));
    let what = "embedding, head and a layer of the reference";
    part("offloaded", what, product(&[ranks, values, width]))
}
