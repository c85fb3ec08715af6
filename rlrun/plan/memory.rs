//! The peak memory of a run, part by part.
//!
//! Invariant: every part has a name and follows from the recipe and the shape of the model; `tests/memory.rs` compares the
//! sum with a real run. The sum assumes that all parts exist at the same time, which happens in a run that samples and
//! trains at the same time. If sampler and trainer alternate, the sum is that of the larger phase. A copy of weights that are
//! still being read when an update begins is not in the sum, but in the bound behind it. Memory that grows with the dataset is
//! not counted.

pub mod devices;
mod gradients;
mod turns;

use std::borrow::Cow;
use std::fmt;

use collective::Position;
use model::{Config, KvCache, LayerSpec, Layout, ParameterSpec, Quantization, Recompute};
use trainer::lora::LoraConfig;

use super::layouts::layout_of;
use super::sampler_ranks::shard_of;
use crate::allocator::SPARE;
use crate::recipe::words::{CriticKind, Ranks};
use crate::recipe::{Model, Recipe};

/// What a process takes whose model takes nothing: program, libraries, threads and the heap that the allocator keeps for each
/// of them in pages of 2 MiB, measured with a model of 20 thousand weights: 70 to 100 MiB.
const PROCESS: u64 = 72 << 20;
/// Resident memory of an open tokenizer per byte of its `tokenizer.json`, measured with vocabularies of 50 000 and
/// 150 000 tokens: 12 to 16.
const TOKENIZER: u64 = 13;
/// Memory of an empty journal.
const JOURNAL: u64 = 4 << 20;
/// Memory that the journal's cache uses for each written token until the cache is full, bytes.
const JOURNAL_PER_TOKEN: u64 = 16;
/// Free memory that the allocator keeps beyond [`SPARE`], in hundredths of what is in use.
const SLACK: u64 = 2;
const F32: u64 = 4;
/// Parts that a run without sampling does not have.
const SAMPLING: [&str; 3] = ["published", "served", "kv cache"];

/// Something that takes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Short name.
    pub name: &'static str,
    /// What it is.
    pub what: &'static str,
    /// Bytes at the peak.
    pub bytes: u64,
    /// When it is there.
    pub phase: Phase,
}

/// The phase in which a part of the memory is allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// All the time.
    #[default]
    Always,
    /// While the trainer has the device.
    Training,
    /// While the sampler has it.
    Sampling,
    /// If a reader of weights or moments has not finished when an update of them begins.
    SlowReader,
}

/// The memory of the processes that sample and train, of samplers as far as the run starts them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// All parts, largest idea first: the process, the trainer, the sampler.
    pub parts: Vec<Part>,
}

impl Memory {
    /// Memory of a run of `recipe` with a model of the shape `config` and a `tokenizer.json` of `tokenizer` bytes.
    /// Sums saturate.
    #[must_use]
    pub fn of(recipe: &Recipe, config: &Config, tokenizer: u64) -> Self {
        let (recompute, quantization) = (recipe.trainer.recompute, recipe.rollout.quantization);
        let size = Size::of(config, recompute, quantization, F32);
        let (trained, [processes, ranks]) = (Trained::of(recipe, config), process_counts(recipe));
        let sampled = Size::of(&shard_of(config, recipe.rollout.tensor), recompute, quantization, F32);
        let (weights, world) = (size.weights, recipe.trainer.world as u64);
        // Over a base that stays quantised the factors are published, and the sampler computes with the base of the trainer.
        let (pushed, packed) = match recipe.has_quantized_base() {
            true => (trained.adapter, 0),
            false => (weights, product(&[ranks, sampled.packed])),
        };
        let (positions, rows, micro_batch) =
            (cache_positions(recipe, config), decoding_rows(recipe), micro_batch_tokens(recipe));
        let decoding = product(&[rows, ranks, sampled.decoding_per_token]);
        let keys = product(&[positions, ranks, sampled.cache_per_token]);
        let cache = keys.saturating_add(product(&[samplers(recipe), states(recipe, config)]));
        let part = |name, what, bytes| Part { name, what, bytes, phase: Phase::Always };
        let [activations, logits] = of_passes(recipe, config, micro_batch);
        let mut parts = vec![
            part("process", "program, libraries, threads each", product(&[processes, PROCESS])),
            part("tokenizer", "two model directories each", product(&[processes, 2, TOKENIZER, tokenizer])),
            part("policy", "the weights that are trained, as ranks have them", trained.weights),
            part(
                "gradients",
                "of the leaves of every rank, and on their way between ranks",
                trained.gradients,
            ),
            part("optimizer", "what it remembers of every tensor", trained.optimizer),
            part(
                "activations",
                "a full micro-batch of every rank, kept for its backward",
                activations.saturating_add(product(&[cores(recipe).max(world), size.recurrence])),
            ),
            part("logits", "of rows of the micro-batch of every rank", logits),
            published(recipe, pushed),
            part("served", "the version that every sampler samples from, packed", packed),
            part("kv cache", "keys and values of all running sequences, and recurrent states", cache),
            part("decoding", "one step of all running sequences", decoding),
        ];
        if trained.scratch > 0 {
            parts.push(part("update", "an update of the largest matrix on every core", trained.scratch));
        }
        if trained.adapter > 0 {
            let what = match recipe.has_quantized_base() {
                true => "A and B",
                false => "A and B, and the frozen weights under them",
            };
            parts.push(part("adapter", what, trained.adapter));
        }
        parts.extend(reference(recipe, config));
        if recipe.critic().is_some_and(|critic| critic.kind == CriticKind::Separate) {
            let what = "its weights, gradients of every rank and optimizer";
            parts.push(part("critic", what, critic(recipe, config)));
        }
        parts.extend(copies(recipe, &parts));
        let scored = reward_models(recipe);
        if scored > 0 {
            parts.push(part("rewards", "reward models, all at the same time", scored));
        }
        if recipe.supervised.is_some() {
            parts.retain(|part| !SAMPLING.contains(&part.name));
        } else if recipe.buffer.store.has_journal() {
            parts.push(part("journal", "cache of the buffer at the end of the run", journal(recipe)));
        }
        devices::leave_out(&mut parts, recipe);
        if recipe.is_colocated() {
            turns::take_turns(&mut parts, recipe, &layout_of(config));
        }
        // Roles that take turns give everything back.
        let spare = if recipe.is_colocated() { 0 } else { SPARE as u64 };
        Self { parts }.with_slack(spare)
    }

    fn with_slack(mut self, spare: u64) -> Self {
        let (name, what) = ("slack", "free memory that the allocator keeps");
        let bytes = (self.total() / 100 * SLACK).saturating_add(spare);
        self.parts.push(Part { name, what, bytes, phase: Phase::Always });
        self
    }

    /// Peak of the allocated memory, bytes, if readers of weights finish before the next update of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        peak(&self.parts)
    }

    /// The same with copies for slow readers, bytes.
    #[must_use]
    pub fn bound(&self) -> u64 {
        self.total().saturating_add(in_phase(&self.parts, Phase::SlowReader))
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.parts {
            writeln!(f, "{part}")?;
        }
        let (total, bound) = (mebibytes(self.total()), mebibytes(self.bound()));
        writeln!(
            f,
            "  {:12} {total:>10}  most resident memory of all processes; `memory/peak_mib` is that of one",
            "total"
        )?;
        write!(f, "  {:12} {bound:>10}  the same with the copies for slow readers", "at most")
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, what, bytes, phase } = self;
        let when = match phase {
            Phase::Always => "",
            Phase::Training => "; while the trainer has the device",
            Phase::Sampling => "; while the sampler has the device",
            Phase::SlowReader => "; only if reading it takes until the next update",
        };
        write!(f, "  {name:12} {:>10}  {what}{when}", mebibytes(*bytes))
    }
}

/// Samplers that a run starts: those that join from elsewhere have memory of their own.
fn samplers(recipe: &Recipe) -> u64 {
    if recipe.placement.processes { recipe.rollout_workers().max(1) as u64 } else { 1 }
}

/// Processes of a run, and ranks of all its samplers.
fn process_counts(recipe: &Recipe) -> [u64; 2] {
    let samplers = samplers(recipe);
    let processes = if recipe.placement.processes { samplers.saturating_add(1) } else { 1 };
    [processes, product(&[samplers, recipe.rollout.tensor as u64])]
}

/// Peak of these parts, bytes.
fn peak(parts: &[Part]) -> u64 {
    let of = |phase| in_phase(parts, phase);
    of(Phase::Always).saturating_add(of(Phase::Training).max(of(Phase::Sampling)))
}

/// The parts of one phase together, bytes.
fn in_phase(parts: &[Part], phase: Phase) -> u64 {
    let parts = parts.iter().filter(|part| part.phase == phase);
    parts.fold(0_u64, |sum, part| sum.saturating_add(part.bytes))
}

/// Activations and logits of the passes of all ranks over micro-batches of `tokens` tokens, bytes. Every tensor rank has the activations
/// of its shard of all tokens, and keeps the residual streams of some; context ranks have those of some tokens each; ranks that divide
/// experts keep the rows that theirs received; a stage of a pipeline has those of its layers for every micro-batch in flight, and the
/// first stage the logits.
fn of_passes(recipe: &Recipe, config: &Config, tokens: u64) -> [u64; 2] {
    let (world, parallel) = (recipe.trainer.world as u64, recipe.trainer.parallel.config());
    let shard = shard_of(config, parallel.tensor);
    let size = Size::of(&shard, recipe.trainer.recompute, recipe.rollout.quantization, F32);
    let stages = parallel.pipeline.max(1);
    let passes = world / (parallel.context.degree.max(1) * stages) as u64;
    let in_flight = |rank| trainer::pipeline::in_flight(Position { rank, world: stages });
    let flights = if stages == 1 { 1 } else { (0..stages).map(in_flight).sum::<usize>().div_ceil(stages) };
    // Tensor ranks have the logits of their tokens, and of all tokens in some rows.
    let logits = model::logits_bytes(tokens as usize, shard.vocab_size) as u64;
    let twice = 1 + u64::from(parallel.tensor > 1);
    let others = size.streams_per_token / parallel.tensor as u64 * (parallel.tensor as u64 - 1);
    let is_kept = parallel.expert > 1 && recipe.trainer.recompute == Recompute::None;
    let received = if is_kept { F32 * received_values(&shard) } else { 0 };
    let of_token = size.activations_per_token - others + received;
    let activations = product(&[passes, flights as u64, tokens, of_token]);
    [activations, product(&[world / stages as u64, twice, logits])]
}

/// Values of a token that its experts receive in all layers.
fn received_values(config: &Config) -> u64 {
    let experts = config.layers.iter().filter_map(|layer| layer.feed_forward.experts());
    experts.map(|spec| (spec.per_token * config.hidden_size) as u64).sum()
}

/// The newest version of `weights` bytes, for samplers to read. A trainer that has all weights shares them with the sampler of
/// its process.
fn published(recipe: &Recipe, weights: u64) -> Part {
    let copies = if recipe.trainer.world == 1 && !recipe.is_colocated() { 1 } else { 2 };
    let is_shared = copies == 1 && !recipe.placement.processes && !recipe.devices().trains();
    Part {
        name: "published",
        what: "the newest version, where it is a copy",
        bytes: product(&[copies, weights]),
        phase: if is_shared { Phase::SlowReader } else { Phase::Always },
    }
}

/// A reference with weights of its own beside a policy of the shape `config`: every process of the trainer has all of them.
fn reference(recipe: &Recipe, config: &Config) -> Option<Part> {
    let values = || layout_of(&reference_shape(recipe, config)).len() as u64;
    recipe.has_own_reference().then(|| Part {
        name: "reference",
        what: "frozen weights, in every process of the trainer",
        bytes: product(&[reference_copies(recipe), F32, values()]),
        phase: Phase::Always,
    })
}

/// Processes of the trainer.
fn reference_copies(recipe: &Recipe) -> u64 {
    if recipe.trainer.ranks == Ranks::Threads { 1 } else { (recipe.trainer.world as u64).max(1) }
}

/// The shape of the reference: a teacher may have another one than the policy, whose shape is `config`.
pub(crate) fn reference_shape<'a>(recipe: &Recipe, config: &'a Config) -> Cow<'a, Config> {
    let of_teacher = recipe.algorithm.reference.as_deref().and_then(|path| Config::load(path).ok());
    of_teacher.map_or(Cow::Borrowed(config), Cow::Owned)
}

/// A separate critic, bytes.
fn critic(recipe: &Recipe, config: &Config) -> u64 {
    let layout = layout_of(config);
    let (own, gradients) = of_ranks(recipe, &layout, None, F32);
    let state = recipe.optimizer().state_bytes(layout.specs());
    own.saturating_add(gradients).saturating_add(state)
}

/// All reward models, bytes.
fn reward_models(recipe: &Recipe) -> u64 {
    let models = recipe.rewards.iter().filter(|spec| spec.kind == "model");
    let configs = models.filter_map(|spec| Config::load(spec.path.as_deref()?).ok());
    let bytes = |config| product(&[F32, Layout::new(&config).len() as u64]);
    configs.map(bytes).fold(0_u64, u64::saturating_add)
}

/// Copies of the whole state: the one that is written to disk concurrently with the steps, and the one that ranks return to when one
/// of them is lost.
fn copies(recipe: &Recipe, parts: &[Part]) -> Vec<Part> {
    // A base that stays quantised is shared.
    let policy = if recipe.has_quantized_base() { None } else { Some("policy") };
    let of = |part: &&Part| {
        policy.into_iter().chain(["optimizer", "adapter", "critic"]).any(|name| name == part.name)
    };
    let bytes = parts.iter().filter(of).fold(0_u64, |sum, part| sum.saturating_add(part.bytes));
    let mut copies = Vec::new();
    if recipe.checkpoint.asynchronous && recipe.checkpoint.interval > 0 {
        let what = "a copy of what is written beside the steps";
        copies.push(Part { name: "checkpoint", what, bytes, phase: Phase::SlowReader });
    }
    if recipe.trainer.elastic.snapshot_every > 0 {
        let what = "a copy of the state, for when a rank is lost";
        copies.push(Part { name: "snapshot", what, bytes, phase: Phase::Always });
    }
    copies
}

/// Bytes that follow from what is trained, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Trained {
    /// Weights of all ranks.
    weights: u64,
    /// Gradients of all ranks.
    gradients: u64,
    /// The state of the optimizer.
    optimizer: u64,
    /// The temporary memory of an update.
    scratch: u64,
    /// A LoRA adapter.
    adapter: u64,
}

impl Trained {
    fn of(recipe: &Recipe, config: &Config) -> Self {
        let layout = layout_of(config);
        let optimizer = recipe.optimizer();
        // Ranks that share a step have a core each.
        let cores = cores(recipe);
        let threads = if recipe.trainer.world > 1 { recipe.trainer.world as u64 } else { cores };
        let changed =
            |specs: &[ParameterSpec]| specs.iter().map(|spec| spec.len() as u64).fold(0, u64::saturating_add);
        let of = |specs: &[ParameterSpec], adapter: u64, (weights, gradients)| Self {
            weights,
            gradients,
            optimizer: optimizer.state_bytes(specs),
            scratch: product(&[threads.min(specs.len() as u64), optimizer.scratch_bytes(specs)]),
            adapter,
        };
        let Some(lora) = recipe.lora() else {
            return of(layout.specs(), 0, of_ranks(recipe, &layout, None, F32));
        };
        let (specs, frozen) = lora.shapes(layout.specs());
        let changed = changed(&specs);
        if recipe.has_quantized_base() {
            let file = match &recipe.model {
                Model::Path(path) => model::stored_bytes(path),
                Model::Random(_) => 0,
            };
            let (_, gradients) = of_ranks(recipe, &layout, Some(&lora), F32);
            return of(&specs, product(&[F32, changed]), (file, gradients));
        }
        let values = changed.saturating_add(frozen as u64);
        let adapter = product(&[F32, recipe.trainer.world as u64, values]);
        of(&specs, adapter, of_ranks(recipe, &layout, Some(&lora), F32))
    }
}

/// Threads of the trainer, unless it has ranks.
fn cores(recipe: &Recipe) -> u64 {
    recipe.placement.trainer_threads.unwrap_or_else(model::thread_pool::available_cores) as u64
}

/// Weights and gradients of all ranks, which are threads of one process; with an adapter, the weights that it is merged into
/// and its own gradients. A stage shares what it names, and has units of every rank on their way. A weight has `width` bytes, a
/// gradient 4.
fn of_ranks(recipe: &Recipe, layout: &Layout, lora: Option<&LoraConfig>, width: u64) -> (u64, u64) {
    // Ranks with different shards have one model together.
    let parallel = recipe.trainer.parallel.config();
    let models = (recipe.trainer.world / parallel.shards().max(1)) as u64;
    let all = product(&[width, layout.len() as u64]);
    let weights = match lora {
        None if recipe.trainer.zero >= 3 && recipe.trainer.world > 1 => {
            // The next layer and the current one; every stage has some of its own.
            let gathered = gradients::units(layout, 2) / F32 * width;
            all.saturating_add(product(&[models * parallel.pipeline.max(1) as u64, gathered]))
        }
        _ => product(&[models, all]),
    };
    (weights, gradients::bytes(recipe, layout, lora))
}

/// Bytes that follow from the shape of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    /// All weights.
    weights: u64,
    /// A decoder to sample with: matrices and head as panels. An embedding that is tied to the head is not kept beside it.
    packed: u64,
    /// Activations of a token in all layers, and the temporary memory of one layer's backward pass.
    activations_per_token: u64,
    /// The residual streams that are kept for the backward among them.
    streams_per_token: u64,
    /// Key and value of a token in all layers.
    cache_per_token: u64,
    /// Temporary activations of a token in one layer.
    layer_per_token: u64,
    /// What the backward of a recurrence has on each thread, whatever the number of its tokens.
    recurrence: u64,
    /// [`Size::activations_per_token`] and the logits twice.
    decoding_per_token: u64,
}

impl Size {
    /// A weight and an activation have `width` bytes, a logit 4.
    fn of(config: &Config, recompute: Recompute, quantization: Quantization, width: u64) -> Self {
        let n = |size: usize| size as u64;
        let hidden = n(config.hidden_size);
        // With experts a token has a row for each of its experts, and the input of each is a copy. Some layers may have none.
        let (of_experts, copied) = config.experts().map_or((0, 0), |spec| {
            let rows = n(spec.per_token);
            (rows * n(spec.width) + n(spec.shared_width), rows * hidden)
        });
        let all_have = config.layers.iter().all(|layer| layer.feed_forward.experts().is_some());
        let middle = if all_have { of_experts } else { of_experts.max(n(config.intermediate_size)) };
        let keys = n(config.num_kv_heads) * n(config.head_dim);
        let [projected, mixed] = config.mixer_widths().map(n);
        let [recurrence, recurrence_in_all] = config.recurrence_scratch().map(n);
        let weights = layout_of(config).len() as u64;
        // An embedding that is tied to the head is one tensor, and two copies if the head is rounded.
        let apart = config.tie_word_embeddings && quantization == Quantization::Bf16;
        let twice = if apart { n(config.vocab_size) * hidden } else { 0 };
        // The embedding stays as it is, and with 8 bits the head.
        let matrices = n(config.layer_matrix_weights());
        let saved = match quantization {
            Quantization::None => 0,
            Quantization::Int8 => (width - 1) * matrices,
            Quantization::Bf16 => width.saturating_sub(2) * (matrices + n(config.vocab_size) * hidden),
        };
        let layers = n(config.num_layers());
        let [latents, parts] = latent_widths(config);
        // The residual stream before and between the halves, the prepared projection (and the raw one where heads are
        // normalised), the attention or the recurrence, gate and up.
        let attention = 2 * hidden + latents + projected + mixed;
        let layer = attention + 2 * middle;
        let (streams, kept) = match recompute {
            Recompute::None => (2 * layers * hidden, layers * layer),
            Recompute::Block => (layers * hidden, layers * hidden + layer),
            Recompute::Sequence => (layers * hidden, layers * hidden + attention),
        };
        // In the backward pass the gradients of all that, and the norm and the activation once more; and where results of
        // blocks are normalised or multiplied, the result, and two gradients of it.
        let joined = |layer: &LayerSpec| layer.norm.is_after() || layer.residual_multiplier != 1.0;
        let results = if config.layers.iter().any(joined) { 3 * hidden } else { 0 };
        let back = attention
            + recurrence
            + hidden
            + results
            + parts
            + match recompute {
                Recompute::None | Recompute::Block => 4 * middle + 3 * copied,
                Recompute::Sequence => 0,
            };
        Self {
            weights: width * weights,
            packed: width * (weights + twice) - saved,
            activations_per_token: product(&[width, kept + back]),
            streams_per_token: product(&[width, streams]),
            cache_per_token: product(&[width, 2, n(config.attention_layers()), keys]),
            layer_per_token: width * layer,
            recurrence: product(&[width, recurrence_in_all]),
            decoding_per_token: width * layer + product(&[F32, 2, n(config.vocab_size)]),
        }
    }
}

/// Values of a token in a layer with latents besides those of any attention: latents before their norms, which are kept; and, in
/// the backward pass, latents normalised, gradients of both, and those of the parts of queries, keys and values.
fn latent_widths(config: &Config) -> [u64; 2] {
    let n = |size: usize| size as u64;
    config.latent().map_or([0, 0], |latent| {
        let ranks = n(latent.query_rank.unwrap_or(0)) + n(latent.key_rank) + n(latent.rope);
        let of_head = 2 * n(latent.nope) + n(latent.rope) + n(latent.value);
        [ranks, 3 * ranks + n(config.num_heads) * of_head]
    })
}

/// Tokens of the largest micro-batch: that of a leaf with an equal part of a full batch, or the token budget.
fn micro_batch_tokens(recipe: &Recipe) -> u64 {
    let leaves = (recipe.learner().step_leaves() as u64).max(1);
    (recipe.trainer.microbatch_tokens as u64).min(super::BatchPlan::of(recipe).max_tokens.div_ceil(leaves))
}

/// Memory of the journal when all steps are made.
fn journal(recipe: &Recipe) -> u64 {
    let tokens = product(&[recipe.trainer.steps, super::BatchPlan::of(recipe).max_tokens]);
    product(&[JOURNAL_PER_TOKEN, tokens]).saturating_add(JOURNAL).min(buffer::JOURNAL_CACHE_BYTES)
}

/// Tokens of the largest step of the sampler.
fn decoding_rows(recipe: &Recipe) -> u64 {
    let (prompts, running) = (recipe.data.max_prompt_length as u64, recipe.rollout.max_running as u64);
    running.saturating_add((recipe.prefill_chunk() as u64).min(prompts.saturating_mul(running)))
}

/// Positions of the sampler's cache. When the recipe names no number: every sequence at its longest with a prompt of its
/// own, in whole pages, one more for where a completion begins in the middle of one; and at least one whole episode.
pub(super) fn cache_positions(recipe: &Recipe, config: &Config) -> u64 {
    if let Some(positions) = recipe.rollout.kv_cache_tokens {
        return positions as u64;
    }
    let pages = KvCache::pages_for(recipe.data.max_prompt_length)
        + KvCache::pages_for(recipe.rollout.max_completion_length)
        + 1;
    let sequences = recipe.rollout.max_running.max(recipe.rollout.group_size);
    let episode = match recipe.environment {
        Some(_) => KvCache::pages_for(recipe.episode_tokens(config.max_context())) + 1,
        None => 0,
    };
    product(&[pages as u64, sequences as u64]).max(episode as u64).saturating_mul(KvCache::PAGE as u64)
}

/// Recurrent states of the sampler's cache: of every running sequence, of a prompt for each, and of as many sequences whose pages are
/// kept, each with one where its prompt ends too.
fn states(recipe: &Recipe, config: &Config) -> u64 {
    product(&[F32, 4, recipe.rollout.max_running as u64, config.state_len() as u64])
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor))
}

fn mebibytes(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.1} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

#[cfg(test)]
mod tests;
