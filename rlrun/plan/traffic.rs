//! What the ranks of a trainer send in a training step.
//!
//! Invariant: counts are those of the collective calls that a rank makes, for the most tokens of a step; a byte that is sent is
//! counted once, where it is sent.

use std::fmt;

use collective::Position;
use model::{Config, ContextExchange, FeedForward, Layout, ModelShard, ParameterSpec, Recompute, Reduction};
use trainer::ParallelConfig;

use super::BatchPlan;
use super::layouts::layout_of;
use crate::recipe::Recipe;

/// Bytes of a value.
const F32: f64 = 4.0;

/// What one rank sends in a step, bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    /// Ranks that divide the data, share tokens, share weights, and stages.
    degrees: [usize; 4],
    /// Ranks that divide experts.
    experts: usize,
    /// Reduce-scatter of gradients and all-gather of weights among the ZeRO ranks.
    pub zero: f64,
    /// Sums of partial results among tensor ranks, residual streams for the backward, and logits.
    pub tensor: f64,
    /// What attention needs, among context ranks.
    pub context: f64,
    /// Residual streams and their gradients, to the stages beside it.
    pub pipeline: f64,
    /// Rows of tokens for the experts of other ranks, results, and their gradients.
    pub expert: f64,
    /// Collective calls in passes, each of which has a latency.
    pub calls: PassCallCounts,
    /// Micro-batches of a rank in a step, and updates.
    pub(crate) passes: [f64; 2],
    /// Seconds of each second of an update in which the stages of a pipeline wait for the first or the last micro-batch.
    pub idle: f64,
}

/// Collective calls that one rank makes in the passes of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassCallCounts {
    /// Among tensor ranks.
    pub tensor: f64,
    /// Among context ranks.
    pub context: f64,
    /// With the stages beside it.
    pub pipeline: f64,
    /// Among expert ranks.
    pub expert: f64,
}

impl Traffic {
    /// The traffic of a trainer with several ranks, for the most tokens of a step; `None` for one rank, and with an adapter.
    #[must_use]
    pub fn of(recipe: &Recipe, config: &Config) -> Option<Self> {
        if recipe.lora.is_some() {
            return None;
        }
        Self::over(recipe, config, &layout_of(config), BatchPlan::of(recipe).max_tokens as f64)
    }

    /// The same of a model of this `layout` for `step_tokens` tokens of a step, and with an adapter too.
    /// `None` for one rank, and for ranks that cannot divide the model.
    #[must_use]
    pub fn over(recipe: &Recipe, config: &Config, layout: &Layout, step_tokens: f64) -> Option<Self> {
        let (world, parallel) = (recipe.trainer.world, recipe.trainer.parallel.config());
        if world <= 1 {
            return None;
        }
        let (tensor, context, data) = (parallel.tensor, parallel.context.degree, parallel.data(world));
        let (shards, whole) = (ModelShares::of(parallel, world, config, layout)?, config);
        let (config, layers) = (&shards.of_tensor, shards.layers);
        // Of a rank, in a step.
        let passed = recipe.trainer.epochs as f64 * step_tokens / data as f64;
        let tokens = passed / context as f64;
        let updates = BatchPlan::of(recipe).updates as f64;
        let passes = (passed / recipe.trainer.microbatch_tokens as f64).ceil().max(updates);
        let forwards = if recipe.trainer.recompute == Recompute::None { 1.0 } else { 2.0 };
        let on_devices = recipe.devices().trains();
        let exchange = if on_devices { ContextExchange::Heads } else { parallel.context.exchange(config) };
        // Copies of keys sum the gradients of what tokens have of them, and on devices, when they are complete, those of their weights.
        let complete = if on_devices && recipe.trainer.zero < 2 { updates } else { passes };
        let [of_keys, of_projections] = match on_devices {
            true => [0.0, complete * of_key_weights(config, layers)],
            false => [of_key_copies(config, layers), 0.0],
        };
        // Of an adapter the gradients alone are exchanged.
        let adapter = trained_values(recipe, layout).map(|values| values as f64 * of_shares(data * context));
        let gathered = adapter.unwrap_or(shards.gathered);
        Some(Self {
            degrees: [data, context, tensor, parallel.pipeline],
            experts: parallel.expert,
            zero: of_zero(recipe, [passes, updates]) * F32 * gathered,
            tensor: tokens
                * (of_tensor(whole, forwards, layers) * of_shares(tensor)
                    + of_keys * of_shares(shards.key_copies))
                + of_projections * of_shares(shards.key_copies),
            context: tokens * layers * of_context(config, exchange, context, forwards),
            pipeline: if parallel.pipeline > 1 {
                tokens * 2.0 * F32 * config.hidden_size as f64
            } else {
                0.0
            },
            expert: tokens * layers * of_experts(whole, forwards) * of_shares(parallel.expert),
            calls: PassCallCounts::of(
                parallel,
                whole,
                exchange,
                [passes, forwards, layers],
                (shards.key_copies, complete),
                on_devices,
            ),
            passes: [passes, updates],
            idle: idle(parallel.pipeline, passes / updates),
        })
    }
}

impl PassCallCounts {
    /// Calls in `passes` micro-batches with `forwards` forward passes each, over a part `layers` of the layers. Of `key_copies` of keys the
    /// gradients are summed `key_sums` times.
    fn of(
        parallel: ParallelConfig,
        config: &Config,
        exchange: ContextExchange,
        [passes, forwards, layers]: [f64; 3],
        (key_copies, key_sums): (usize, f64),
        on_devices: bool,
    ) -> Self {
        let if_shared = |degree: usize, calls: f64| if degree > 1 { passes * calls } else { 0.0 };
        let of_layers = (forwards + 1.0) * layers;
        let attention = match exchange {
            // Before and after attention.
            ContextExchange::Heads => 2.0,
            ContextExchange::Keys => 1.0,
        };
        // To the experts and back. A device sends the numbers of rows, and in the backward the weights of rows, apart.
        let of_rows = if on_devices { 2.0 * forwards + 5.0 } else { 2.0 * (forwards + 1.0) };
        let with_experts =
            config.layers.iter().filter(|layer| layer.feed_forward.experts().is_some()).count();
        let [kept, ends] = match config.reduction {
            // What the backward gathers; embedding and head, forward and backward.
            Reduction::Tree => [kept_streams(forwards) * layers, 4.0],
            Reduction::Chain => [0.0; 2],
        };
        Self {
            // After attention and after the feed-forward network.
            tensor: if_shared(parallel.tensor, (2.0 * of_layers + kept) * config.num_layers() as f64 + ends)
                + if key_copies > 1 { key_sums * layers * config.attention_layers() as f64 } else { 0.0 },
            context: if_shared(
                parallel.context.degree,
                attention * of_layers * config.attention_layers() as f64,
            ),
            // The residual stream and its gradient.
            pipeline: if_shared(parallel.pipeline, 2.0),
            expert: if_shared(parallel.expert, of_rows * layers * with_experts as f64),
        }
    }
}

/// What the rank with the most has of a model.
#[derive(Clone, Debug)]
struct ModelShares {
    /// The configuration of a tensor rank with all layers.
    of_tensor: Config,
    /// Tensor ranks that have the same key-value heads.
    key_copies: usize,
    /// Values that it gets from its ZeRO ranks when they gather all once.
    gathered: f64,
    /// Its part of the layers.
    layers: f64,
}

impl ModelShares {
    fn of(parallel: ParallelConfig, world: usize, config: &Config, layout: &Layout) -> Option<Self> {
        let ParallelConfig { tensor, pipeline, expert, .. } = parallel;
        let zero_ranks = world / parallel.shards().max(1);
        if parallel.shards() <= 1 {
            return Some(Self {
                of_tensor: config.clone(),
                key_copies: 1,
                gathered: gathered_values(layout, zero_ranks, expert),
                layers: 1.0,
            });
        }
        let stages = (0..pipeline).map(|stage| parallel.shard(config, stage * tensor).ok());
        let stages = stages.collect::<Option<Vec<_>>>()?;
        // The stage with the most layers.
        let layers = stages.iter().map(|stage| stage.layers().len()).max()?;
        let of_tensor = ModelShard::new(config, Position { rank: 0, world: tensor }).ok()?;
        Some(Self {
            of_tensor: of_tensor.config().clone(),
            key_copies: ModelShard::key_copies(config, tensor),
            gathered: stages
                .iter()
                .map(|stage| gathered_values(stage.layout(), zero_ranks, expert))
                .max_by(f64::total_cmp)?,
            layers: layers as f64 / config.num_layers() as f64,
        })
    }
}

/// The part of a message that goes to others, of `n` ranks.
fn of_shares(n: usize) -> f64 {
    (n as f64 - 1.0) / n as f64
}

/// How often a rank sends all values of its shard in a step.
fn of_zero(recipe: &Recipe, [passes, updates]: [f64; 2]) -> f64 {
    // Sections on the processor are summed over all ranks in every pass.
    let sections = recipe.trainer.parallel.config().context.sections() > 1 && !recipe.devices().trains();
    match recipe.trainer.zero {
        3.. if recipe.lora.is_none() => 3.0 * passes,
        1 | 2 if sections => passes + updates,
        2 if recipe.lora.is_none() => passes + updates,
        _ => 2.0 * updates,
    }
}

/// Values of the adapter that is trained; `None` if all weights are.
#[must_use]
pub fn trained_values(recipe: &Recipe, layout: &Layout) -> Option<usize> {
    let (specs, _) = recipe.lora()?.shapes(layout.specs());
    Some(specs.iter().map(ParameterSpec::len).sum())
}

/// Values that one of `ranks` gets from the others when they gather all once. Of experts that `expert` of them divide it gets its own,
/// from the ranks that have the same.
fn gathered_values(layout: &Layout, ranks: usize, expert: usize) -> f64 {
    let divided = expert_values(layout, expert);
    let own = divided as f64 / expert as f64;
    (layout.len() - divided) as f64 * of_shares(ranks) + own * of_shares((ranks / expert).max(1))
}

/// Values of the experts that `expert` ranks divide; 0 if they are one.
pub fn expert_values(layout: &Layout, expert: usize) -> usize {
    let of_experts = |spec: &&ParameterSpec| expert > 1 && spec.name.contains(".experts.");
    layout.specs().iter().filter(of_experts).map(ParameterSpec::len).sum()
}

/// Share of the time in which `stages` stages are idle if `batches` micro-batches pass through them: `(p - 1) / (m + p - 1)` (PipeDream-Flush,
/// Narayanan et al. 2021, arXiv 2006.09503).
fn idle(stages: usize, batches: f64) -> f64 {
    let others = stages as f64 - 1.0;
    others / (batches + others)
}

/// Bytes of a token that tensor ranks sum, times 2, and of its logits: Megatron-LM's volume (arXiv 1909.08053); and of the residual streams
/// that the backward gathers. With a part `share` of the layers.
fn of_tensor(config: &Config, forwards: f64, share: f64) -> f64 {
    let hidden = F32 * config.hidden_size as f64;
    if config.reduction == Reduction::Chain {
        // Ranks on devices have embedding, head and residual streams whole, and sum the results of experts together.
        return 2.0 * hidden * (forwards + 1.0) * share * 2.0 * config.num_layers() as f64;
    }
    // Forward, maybe again, and backward; the embedding, and the head.
    let of_sums = 2.0 * hidden * ((forwards + 1.0) * share * layer_sums(config) + 2.0);
    let gathered = hidden * share * config.num_layers() as f64 * kept_streams(forwards);
    of_sums + gathered + 2.0 * F32 * config.vocab_size as f64
}

/// Bytes of the gradients of a token's keys and values that ranks with the same ones sum, times 2, of the `config` of a rank. With a part
/// `share` of the layers.
fn of_key_copies(config: &Config, share: f64) -> f64 {
    let keys = (config.num_kv_heads * config.head_dim * config.attention_layers()) as f64;
    2.0 * 2.0 * F32 * keys * share
}

/// Bytes of the gradients of the projections to keys and values, times 2, of the `config` of a rank. With a part `share` of the layers.
fn of_key_weights(config: &Config, share: f64) -> f64 {
    let layout = Layout::new(config);
    let of_layer = |index| layout.key_values(index).map(|place| place.len()).sum::<usize>();
    let values: usize = (0..config.num_layers()).map(of_layer).sum();
    2.0 * F32 * values as f64 * share
}

/// Residual streams of a layer that are kept for the backward: its input, and what is between its halves unless it is computed again.
fn kept_streams(forwards: f64) -> f64 {
    if forwards > 1.0 { 1.0 } else { 2.0 }
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

/// Bytes of a token that expert ranks send in all layers, if all its experts are those of others: its row to each, the result of each
/// back, and the gradients of both.
fn of_experts(config: &Config, forwards: f64) -> f64 {
    let experts = config.layers.iter().filter_map(|layer| layer.feed_forward.experts());
    let rows: f64 = experts.map(|spec| spec.per_token as f64).sum();
    (forwards + 1.0) * 2.0 * F32 * config.hidden_size as f64 * rows
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
            write!(f, "\n  tensor      {}  partial sums, residual streams and logits", mib(self.tensor))?;
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
        if self.experts > 1 {
            write!(f, "\n  expert      {}  rows for experts of other ranks, and results", mib(self.expert))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{SIZES, recipe};

    fn config(num_layers: usize) -> Config {
        Config::fresh(&model::Sizes { num_layers, ..SIZES })
    }

    #[test]
    fn experts_are_gathered_by_ranks_that_have_the_same() {
        let layout = Layout::new(&config(2).of_family(model::Architecture::Qwen3Moe).with_experts(4, 2));
        let experts = layout.specs().iter().filter(|spec| spec.name.contains(".experts."));
        let experts = experts.map(ParameterSpec::len).sum::<usize>() as f64;
        let others = layout.len() as f64 - experts;
        assert_eq!(gathered_values(&layout, 8, 1), (others + experts) * 0.875);
        assert_eq!(gathered_values(&layout, 8, 4), others * 0.875 + experts / 4.0 * 0.5);
        assert_eq!(gathered_values(&layout, 4, 4), others * 0.75);
    }

    #[test]
    fn ranks_with_the_same_keys_sum_their_gradients() {
        let of = |num_kv_heads| {
            let sizes = model::Sizes { num_heads: 4, num_kv_heads, ..SIZES };
            let mut recipe = recipe();
            (recipe.trainer.world, recipe.trainer.parallel.tensor) = (4, 4);
            let config = Config { reduction: Reduction::Tree, ..Config::fresh(&sizes) };
            (
                BatchPlan::of(&recipe).max_tokens as f64,
                config.head_dim,
                Traffic::of(&recipe, &config).unwrap(),
            )
        };
        let ((tokens, width, copied), (_, _, apart)) = (of(2), of(4));
        // Two epochs, two layers; of a key and a value half is sent to sum them, and half to give the sums.
        let sent = 2.0 * tokens * 2.0 * 2.0 * (width * 4) as f64;
        assert_eq!(copied.tensor - apart.tensor, sent);
        assert_eq!(copied.context, apart.context);
        assert!(copied.calls.tensor > apart.calls.tensor);
    }

    #[test]
    fn stages_send_two_hidden_states_for_a_token_and_fewer_gradients() {
        let config = config(4);
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
