//! What each rank of a sampler has in memory, and what it sends for a token.
//!
//! Invariant: the weights are those of the largest shard, the keys and values those of all positions of the cache, and the traffic
//! that of the collective calls of a decode step.

use std::fmt;

use collective::{Position, even_shards};
use model::{Config, ModelShard};

use super::layouts::layout_of;
use super::memory::cache_positions;
use super::traffic::layer_sums;
use crate::recipe::Recipe;

/// Bytes of a value.
const F32: u64 = size_of::<f32>() as u64;

/// One of the ranks that share the weights of a sampler.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerRankPlan {
    /// Number of ranks.
    pub degree: usize,
    /// Its packed weights, bytes.
    pub weights: u64,
    /// Keys and values of its heads, bytes.
    pub cache: u64,
    /// Bytes that it sends for a token: its parts of the sums of hidden states.
    pub sums: f64,
    /// Bytes of logits that it sends to the first rank for a token that is sampled; the first sends none.
    pub logits: u64,
    /// Collective calls of a decode step.
    pub calls: f64,
}

impl SamplerRankPlan {
    /// The ranks of a sampler of `recipe` with a model of the shape `config`; `None` for one rank, or if they cannot share it.
    #[must_use]
    pub fn of(recipe: &Recipe, config: &Config) -> Option<Self> {
        let degree = recipe.rollout.tensor;
        if degree <= 1 {
            return None;
        }
        let vocabulary = even_shards(config.vocab_size, degree);
        let (rank, tokens) = vocabulary.iter().enumerate().max_by_key(|(_, tokens)| tokens.len())?;
        let shard = ModelShard::new(config, Position { rank, world: degree }).ok()?;
        let of_rank = shard.config();
        let keys = (of_rank.num_kv_heads * of_rank.head_dim * of_rank.attention_layers()) as u64;
        let sent = (degree as f64 - 1.0) / degree as f64;
        Some(Self {
            degree,
            weights: F32 * layout_of(of_rank).len() as u64,
            cache: (2 * F32 * keys).saturating_mul(cache_positions(recipe, config)),
            // Of the layers, and of the embedding: a reduce-scatter and an all-gather.
            sums: 2.0 * sent * (F32 * config.hidden_size as u64) as f64 * (layer_sums(config) + 1.0),
            logits: F32 * tokens.len() as u64,
            // After attention and after the feed-forward network; of the embedding and of the logits.
            calls: 2.0 * config.num_layers() as f64 + 2.0,
        })
    }
}

/// What a rank has of a model that `degree` ranks of a sampler share; all of one that they cannot.
pub(super) fn shard_of(config: &Config, degree: usize) -> Config {
    let shard = ModelShard::new(config, Position { rank: 0, world: degree });
    shard.map_or_else(|_| config.clone(), |shard| shard.config().clone())
}

impl fmt::Display for SamplerRankPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { degree, weights, cache, sums, logits, .. } = *self;
        let mib = |bytes: u64| format!("{:9.1} MiB", bytes as f64 / 1_048_576.0);
        writeln!(f, "each of the {degree} ranks of a sampler (`rollout.tensor`)")?;
        writeln!(f, "  weights     {}  its part of the version that is sampled from, packed", mib(weights))?;
        writeln!(f, "  kv cache    {}  keys and values of its heads", mib(cache))?;
        writeln!(f, "  sums        {:9.1} KiB  sent for a token, prompts included", sums / 1024.0)?;
        write!(
            f,
            "  logits      {:9.1} KiB  sent to the first rank for a token that is sampled",
            logits as f64 / 1024.0
        )
    }
}

#[cfg(test)]
mod tests {
    use model::{Reduction, Sizes};

    use super::super::tests::recipe;
    use super::*;

    #[test]
    fn a_rank_has_and_sends_what_its_shard_says() {
        let config = Config::fresh(&Sizes {
            vocab_size: 10,
            hidden_size: 8,
            intermediate_size: 16,
            num_layers: 3,
            num_heads: 4,
            num_kv_heads: 4,
            max_position_embeddings: 64,
        });
        let config = Config { reduction: Reduction::Tree, ..config };
        let mut recipe = recipe();
        recipe.rollout.kv_cache_tokens = Some(640);
        assert_eq!(SamplerRankPlan::of(&recipe, &config), None);
        recipe.rollout.tensor = 4;
        let plan = SamplerRankPlan::of(&recipe, &config).unwrap();
        // Of q, k, v (with biases) and o two columns or rows each, and four of gate, up and down; norms are whole.
        let layer = 4 * 2 * 8 + 3 * 2 + 3 * 4 * 8 + 2 * 8;
        assert_eq!(plan.weights, 4 * (3 * 8 + 3 * layer + 8));
        assert_eq!(plan.cache, 2 * 4 * 2 * 3 * 640);
        assert_eq!((plan.sums, plan.logits, plan.calls), (2.0 * 0.75 * 32.0 * 7.0, 12, 8.0));
        assert!(plan.to_string().contains("each of the 4 ranks"));
        recipe.rollout.tensor = 8;
        assert_eq!(SamplerRankPlan::of(&recipe, &config), None, "4 heads are not shared by 8");
        recipe.rollout.tensor = 4;
        let copied = SamplerRankPlan::of(&recipe, &Config { num_kv_heads: 2, ..config }).unwrap();
        assert_eq!(copied, plan, "two ranks have one key-value head");
    }
}
