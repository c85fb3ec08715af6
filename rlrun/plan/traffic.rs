//! What the ranks of a trainer send in a training step.
//!
//! Invariant: counts are those of the collective calls that a rank makes, for the most tokens of a step; a byte that is sent is
//! counted once, where it is sent.

use std::fmt;

use collective::Position;
use model::{Config, ContextExchange, FeedForward, ModelShard, Recompute};

use super::BatchPlan;
use crate::recipe::Recipe;

/// Bytes of a value.
const F32: f64 = 4.0;

/// What one rank sends in a step, bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    /// Ranks that divide the data, share tokens, share weights, and stages.
    degrees: [usize; 4],
    /// Reduce-scatter of gradients and all-gather of weights among the ZeRO ranks.
    pub zero: f64,
    /// Sums of partial results among tensor ranks, and logits.
    pub tensor: f64,
    /// What attention needs, among context ranks.
    pub context: f64,
    /// Residual streams and their gradients, to the stages beside it.
    pub pipeline: f64,
    /// Seconds of each second of an update in which the stages of a pipeline wait for the first or the last micro-batch.
    pub idle: f64,
}

impl Traffic {
    /// The traffic of a trainer with several ranks; `None` for one rank.
    #[must_use]
    pub fn of(recipe: &Recipe, config: &Config) -> Option<Self> {
        let (world, parallel) = (recipe.trainer.world, recipe.trainer.parallel.config());
        if world <= 1 || recipe.lora.is_some() {
            return None;
        }
        let (tensor, context, data) = (parallel.tensor, parallel.context.degree, parallel.data(world));
        let shard = ModelShard::new(config, Position { rank: 0, world: tensor }).ok()?;
        let stage = |stage: usize| parallel.shard(config, stage * tensor).ok();
        let stages = (0..parallel.pipeline).map(stage).collect::<Option<Vec<_>>>()?;
        let values = stages.iter().map(|stage| stage.layout().len()).max()?;
        // The stage with the most layers.
        let layers =
            stages.iter().map(|stage| stage.layers().len()).max()? as f64 / config.num_layers() as f64;
        let (config, whole) = (shard.config(), config);
        let plan = BatchPlan::of(recipe);
        // Of a rank, in a step.
        let passed = recipe.trainer.epochs as f64 * plan.max_tokens as f64 / data as f64;
        let tokens = passed / context as f64;
        let of_shares = |n: usize| (n as f64 - 1.0) / n as f64;
        let weights = F32 * values as f64 * of_shares(data * context);
        let updates = plan.updates as f64;
        let passes = (passed / recipe.trainer.microbatch_tokens as f64).ceil().max(updates);
        let zero = match recipe.trainer.zero {
            3.. => 3.0 * passes * weights,
            2 => (passes + updates) * weights,
            _ => 2.0 * updates * weights,
        };
        let forwards = if recipe.trainer.recompute == Recompute::None { 1.0 } else { 2.0 };
        Some(Self {
            degrees: [data, context, tensor, parallel.pipeline],
            zero,
            tensor: tokens * of_tensor(whole, forwards, layers) * of_shares(tensor),
            context: tokens
                * layers
                * of_context(config, parallel.context.exchange(config), context, forwards),
            idle: idle(parallel.pipeline, passes / updates),
            pipeline: if parallel.pipeline > 1 {
                tokens * 2.0 * F32 * config.hidden_size as f64
            } else {
                0.0
            },
        })
    }
}

/// Share of the time in which `stages` stages are idle if `batches` micro-batches pass through them: `(p - 1) / (m + p - 1)` (PipeDream-Flush,
/// Narayanan et al. 2021, arXiv 2006.09503).
fn idle(stages: usize, batches: f64) -> f64 {
    let others = stages as f64 - 1.0;
    others / (batches + others)
}

/// Bytes of a token that tensor ranks sum, times 2, and of its logits: Megatron-LM's volume (arXiv 1909.08053), with a part `share` of the
/// layers.
fn of_tensor(config: &Config, forwards: f64, share: f64) -> f64 {
    let hidden = F32 * config.hidden_size as f64;
    // Forward, maybe again, and backward; the embedding, and the head.
    let of_hidden = 2.0 * hidden * ((forwards + 1.0) * share * layer_sums(config) + 2.0);
    of_hidden + 2.0 * F32 * config.vocab_size as f64
}

/// Hidden states of a token that tensor ranks sum in all layers, in a forward pass.
pub(super) fn layer_sums(config: &Config) -> f64 {
    let sums = |layer: &model::LayerSpec| match layer.feed_forward {
        // The results of every expert of the token are summed.
        FeedForward::Experts(spec) => {
            1.0 + spec.per_token as f64 + f64::from(u8::from(spec.shared_width > 0))
        }
        FeedForward::SwiGlu | FeedForward::GeGlu => 2.0,
    };
    config.layers.iter().map(sums).sum()
}

/// Bytes of a token that one of `degree` context ranks sends to the others.
fn of_context(config: &Config, exchange: ContextExchange, degree: usize, forwards: f64) -> f64 {
    let head = F32 * config.head_dim as f64 * config.attention_layers() as f64;
    let (queries, keys) = (config.num_heads as f64 * head, config.num_kv_heads as f64 * head);
    let others = degree as f64 - 1.0;
    match exchange {
        // Queries, keys, values and results, to all others.
        ContextExchange::Heads => (forwards + 1.0) * (2.0 * queries + 2.0 * keys) * others / degree as f64,
        // Keys and values, to those that come after it: half of the others on average; their gradients come back.
        ContextExchange::Keys => (forwards + 1.0) * 2.0 * keys * others / 2.0,
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [data, context, tensor, pipeline] = self.degrees;
        let mib = |bytes: f64| format!("{:9.1} MiB", bytes / 1_048_576.0);
        writeln!(
            f,
            "traffic of a rank in a step, at most (data {data} x pipeline {pipeline} x context {context} x tensor {tensor})"
        )?;
        write!(f, "  zero        {}  gradients and weights among ranks with the same shard", mib(self.zero))?;
        if tensor > 1 {
            write!(f, "\n  tensor      {}  partial sums and logits", mib(self.tensor))?;
        }
        if pipeline > 1 {
            let idle = 100.0 * self.idle;
            write!(
                f,
                "\n  pipeline    {}  residual streams and their gradients; stages are idle {idle:.0} % of the time, and less with smaller \
                 `trainer.microbatch_tokens`",
                mib(self.pipeline)
            )?;
        }
        if context > 1 {
            write!(
                f,
                "\n  context     {}  what attention needs, if every sequence lies over all ranks",
                mib(self.context)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::recipe;

    #[test]
    fn stages_send_two_hidden_states_for_a_token_and_fewer_gradients() {
        let sizes = model::Sizes {
            vocab_size: 10,
            hidden_size: 8,
            intermediate_size: 16,
            num_layers: 4,
            num_heads: 2,
            num_kv_heads: 2,
            max_position_embeddings: 64,
        };
        let config = Config::fresh(&sizes);
        let of = |world, pipeline| {
            let mut recipe = recipe();
            recipe.trainer.world = world;
            recipe.trainer.parallel.pipeline = pipeline;
            (BatchPlan::of(&recipe), Traffic::of(&recipe, &config).unwrap())
        };
        let (plan, data) = of(2, 1);
        assert_eq!((data.pipeline, data.idle), (0.0, 0.0));
        let (_, both) = of(4, 2);
        // Two epochs over half of the tokens; a hidden state has 8 values of 4 bytes.
        assert_eq!(both.pipeline, 2.0 * (plan.max_tokens as f64 / 2.0) * 2.0 * 8.0 * 4.0);
        assert!(both.zero < 0.7 * data.zero && both.zero > 0.4 * data.zero, "{both:?} {data:?}");
        assert!(both.to_string().contains("pipeline 2 x context 1"), "{both}");
        assert_eq!(idle(4, 9.0), 0.25);
    }
}
