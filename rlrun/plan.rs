//! What a recipe amounts to before it runs: batch arithmetic and memory.
//!
//! Invariant: counts follow from the recipe alone and are exact; bytes are estimates that say what they count. No
//! model or dataset is opened.

use std::fmt;

use model::KvCache;

use crate::recipe::words::Quantization;
use crate::recipe::{DataSource, Recipe};

/// The sizes of a model that memory depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSize {
    /// Weights, in numbers.
    pub parameters: u64,
    /// Decoder layers.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Width inside the feed-forward block.
    pub intermediate_size: u64,
    /// Tokens in the vocabulary.
    pub vocab_size: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
}

/// What a step consists of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchPlan {
    /// Groups per training step, `B`.
    pub groups: u64,
    /// Trajectories per training step.
    pub trajectories: u64,
    /// Most tokens per training step, prompts counted once per trajectory.
    pub max_tokens: u64,
    /// Groups that may be on their way at the same time: (staleness bound + 1) * B.
    pub slots: u64,
    /// Optimizer updates per training step.
    pub updates: u64,
    /// Groups of the whole run.
    pub total_groups: u64,
}

/// Bytes, of one process with one sampler and one trainer worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Weights: the trainer's and their packed forms for forward and backward, the published version, and the
    /// sampler's with the version that it makes ready, which is smaller if it is quantised.
    pub weights: u64,
    /// Gradients of every rank and the two moments of AdamW, as `trainer.optimizer` keeps them.
    pub optimizer: u64,
    /// The KV cache of the sampler.
    pub kv_cache: u64,
    /// What every layer keeps for its backward, for a full micro-batch of every rank.
    pub activations: u64,
    /// Logits of one decoding step.
    pub logits: u64,
}

impl BatchPlan {
    /// The batch arithmetic of a recipe. Counts saturate.
    #[must_use]
    pub fn of(recipe: &Recipe) -> Self {
        let groups = recipe.buffer.batch_groups as u64;
        let trajectories = groups.saturating_mul(recipe.rollout.group_size as u64);
        Self {
            groups,
            trajectories,
            max_tokens: trajectories.saturating_mul(longest_sequence(recipe)),
            slots: recipe.buffer.max_staleness.saturating_add(1).saturating_mul(groups),
            updates: (recipe.trainer.minibatches as u64).saturating_mul(recipe.trainer.epochs as u64),
            total_groups: groups.saturating_mul(recipe.trainer.steps),
        }
    }

    /// Passes over `tasks` training tasks that the run makes.
    #[must_use]
    pub fn epochs(&self, tasks: u64) -> f64 {
        self.total_groups as f64 / tasks.max(1) as f64
    }
}

impl Memory {
    /// Estimates what a run needs.
    #[must_use]
    pub fn of(recipe: &Recipe, model: &ModelSize) -> Self {
        const F32: u64 = 4;
        let product =
            |factors: &[u64]| factors.iter().fold(F32, |bytes, factor| bytes.saturating_mul(*factor));
        let running = recipe.rollout.max_running as u64;
        let cached = recipe.rollout.kv_cache_tokens.map_or_else(|| cache_positions(recipe), |n| n as u64);
        let queries = model.heads * model.head_dim;
        let projected = queries + 2 * model.kv_heads * model.head_dim;
        // What a layer keeps for its backward: residual stream and norm twice each, the projection raw and prepared,
        // the attention, gate and up and their product.
        // What a layer multiplies with, in numbers; a byte each if it is quantised, in two packed versions.
        let matrices = model.hidden_size * (projected + queries + 3 * model.intermediate_size);
        let saved = match recipe.rollout.quantization {
            Quantization::None => 0,
            Quantization::Int8 => 2 * (F32 - 1) * model.layers * matrices,
        };
        let layer = 4 * model.hidden_size + 2 * projected + queries + 3 * model.intermediate_size;
        let world = recipe.trainer.world as u64;
        Self {
            weights: product(&[7, model.parameters]).saturating_sub(saved),
            optimizer: product(&[world, model.parameters])
                .saturating_add(recipe.trainer.optimizer.bytes_per_value().saturating_mul(model.parameters)),
            kv_cache: product(&[2, model.layers, model.kv_heads, model.head_dim, cached]),
            activations: product(&[world, recipe.trainer.microbatch_tokens as u64, model.layers, layer]),
            logits: product(&[running, model.vocab_size]),
        }
    }

    /// The sum.
    #[must_use]
    pub fn total(&self) -> u64 {
        let Self { weights, optimizer, kv_cache, activations, logits } = *self;
        [optimizer, kv_cache, activations, logits].iter().fold(weights, |sum, part| sum.saturating_add(*part))
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes) in [
            ("weights", self.weights),
            ("optimizer", self.optimizer),
            ("kv cache", self.kv_cache),
            ("activations", self.activations),
            ("logits", self.logits),
        ] {
            writeln!(f, "  {name:12} {:>10}", mebibytes(bytes))?;
        }
        write!(f, "  {:12} {:>10}", "total", mebibytes(self.total()))
    }
}

/// The batch arithmetic in words.
#[must_use]
pub fn describe(recipe: &Recipe) -> String {
    let plan = BatchPlan::of(recipe);
    let mut lines = vec![
        format!("run           {}, {} steps, seed {}", recipe.name, recipe.trainer.steps, recipe.seed),
        format!(
            "step          {} groups x {} = {} trajectories, at most {} tokens",
            plan.groups, recipe.rollout.group_size, plan.trajectories, plan.max_tokens
        ),
        format!(
            "updates       {} per step ({} minibatches x {} epochs)",
            plan.updates, recipe.trainer.minibatches, recipe.trainer.epochs
        ),
        format!(
            "staleness     at most {} versions; {} slots = ({} + 1) x {} groups under way",
            recipe.buffer.max_staleness, plan.slots, recipe.buffer.max_staleness, plan.groups
        ),
        format!("sequence      at most {} tokens", longest_sequence(recipe)),
    ];
    match &recipe.data.source {
        DataSource::Arithmetic(arithmetic) => lines.push(format!(
            "tasks         {} groups over {} tasks: {:.2} epochs",
            plan.total_groups,
            arithmetic.train_tasks,
            plan.epochs(arithmetic.train_tasks as u64)
        )),
        DataSource::Files(files) => {
            let names: Vec<_> = files.train.iter().map(|path| path.display().to_string()).collect();
            lines.push(format!("tasks         {} groups from {}", plan.total_groups, names.join(", ")));
        }
    }
    lines.join("\n")
}

/// Tokens of the longest prompt with the longest completion.
fn longest_sequence(recipe: &Recipe) -> u64 {
    (recipe.data.max_prompt_length as u64).saturating_add(recipe.rollout.max_completion_length as u64)
}

/// Positions of the sampler's cache when the recipe names no number: every sequence at its longest with a prompt of its
/// own, in whole pages, one more for where a completion begins in the middle of one.
fn cache_positions(recipe: &Recipe) -> u64 {
    let pages = KvCache::pages_for(recipe.data.max_prompt_length)
        + KvCache::pages_for(recipe.rollout.max_completion_length)
        + 1;
    let sequences = recipe.rollout.max_running.max(recipe.rollout.group_size);
    (pages.saturating_mul(KvCache::PAGE) as u64).saturating_mul(sequences as u64)
}

fn mebibytes(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.1} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe() -> Recipe {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("r.toml");
        let text = "[model.random]\n[data]\nmax_prompt_length = 16\n[data.arithmetic]\n[rollout]\n\
                    max_completion_length = 24\nmax_running = 10\n[[rewards]]\nkind = \"exact\"\n\
                    [trainer]\nsteps = 500\nepochs = 2\nminibatches = 4\nmicrobatch_tokens = 100\n";
        std::fs::write(&path, text).unwrap();
        Recipe::load(&path, &[], []).unwrap().0
    }

    #[test]
    fn batch_arithmetic_is_exact() {
        let expected = "\
run           r, 500 steps, seed 0
step          32 groups x 8 = 256 trajectories, at most 10240 tokens
updates       8 per step (4 minibatches x 2 epochs)
staleness     at most 4 versions; 160 slots = (4 + 1) x 32 groups under way
sequence      at most 40 tokens
tasks         16000 groups over 8000 tasks: 2.00 epochs";
        assert_eq!(describe(&recipe()), expected);
    }

    #[test]
    fn memory_counts_what_it_says() {
        let model = ModelSize {
            parameters: 1000,
            layers: 2,
            hidden_size: 8,
            intermediate_size: 16,
            vocab_size: 100,
            heads: 2,
            kv_heads: 2,
            head_dim: 4,
        };
        let memory = Memory::of(&recipe(), &model);
        let expected = Memory {
            weights: 7 * 4000,
            optimizer: 3 * 4000,
            kv_cache: 2 * 2 * 2 * 4 * 640 * 4,
            activations: 100 * 2 * (4 * 8 + 2 * 24 + 8 + 3 * 16) * 4,
            logits: 10 * 100 * 4,
        };
        assert_eq!(memory, expected);
        assert_eq!(memory.total(), 28_000 + 12_000 + 81_920 + 108_800 + 4_000);
        let mut quantized = recipe();
        quantized.rollout.quantization = Quantization::Int8;
        let matrices = 8 * (24 + 8 + 3 * 16);
        let saved = memory.weights - Memory::of(&quantized, &model).weights;
        assert_eq!(saved, 2 * 3 * 2 * matrices, "two versions of two layers, three of four bytes");
        assert!(memory.to_string().ends_with("total           0.2 MiB"), "{memory}");
    }
}
