//! The ranks that compute one pass together, and how the tokens of the pass are shared among them.
//!
//! The token stream of a [`Pack`](crate::Pack) is cut into sections. Context ranks have the same number of neighbouring sections
//! each, and all weights. The gradients of a section are summed apart ([`GradientSink::section`](crate::GradientSink::section)).
//!
//! Invariant: the bits of predictions and of the gradients of a section depend on the number of sections, and neither on the
//! number of ranks nor on how they exchange what attention needs.

use std::ops::Range;
use std::sync::Arc;

use collective::{Collective, CollectiveError, Position, even_shards};
use serde::{Deserialize, Serialize};

use crate::Config;
use crate::decoder::context_rows;
use crate::ops::attention::Segment;

/// The ranks of a pass.
#[derive(Clone, Debug)]
pub struct PassRanks {
    /// The ranks that share the tokens of a pass; `None` for one rank. They make the calls of the pass in the same order, on the
    /// thread that computes.
    pub context: Option<Arc<dyn Collective>>,
    /// The ranks that share the weights of a pass (tensor parallel; see [`ModelShard`](crate::ModelShard)); `None` for one rank.
    /// They make the calls of the pass in the same order, on the thread that computes.
    pub tensor: Option<TensorRanks>,
    /// The ranks that divide the experts of every layer (expert parallel), neighbouring experts each; `None` for one rank. They have
    /// tokens of their own, and make the calls of their passes in the same order, on the thread that computes: a rank without
    /// tokens makes passes over an empty pack.
    pub expert: Option<Arc<dyn Collective>>,
    /// The configuration with all layers, if the decoder is one of a stage of a pipeline: sections are cut by the cost of all layers.
    pub all_layers: Option<Arc<Config>>,
    /// Sections of the token stream: a power of two, a multiple of the number of context ranks.
    pub sections: usize,
    /// What context ranks exchange for attention.
    pub exchange: ContextExchange,
}

/// The ranks that share the weights of a pass.
#[derive(Clone, Debug)]
pub struct TensorRanks {
    /// Their calls.
    pub ranks: Arc<dyn Collective>,
    /// Those of them that have copies of the same key-value heads, neighbours, in a training pass; `None` if each has its own.
    pub same_keys: Option<Arc<dyn Collective>>,
    /// Tokens of the whole vocabulary, of which each has an even share.
    pub vocabulary: usize,
}

/// What context ranks exchange for the attention of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextExchange {
    /// Queries, keys, values and results: a rank has some heads of all tokens (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv
    /// 2309.14509).
    Heads,
    /// Keys and values: a rank has those that its tokens attend to (Llama 3, Grattafiori et al. 2024, arXiv 2407.21783, section
    /// 3.3.2).
    #[default]
    Keys,
}

impl Default for PassRanks {
    fn default() -> Self {
        Self {
            context: None,
            tensor: None,
            expert: None,
            all_layers: None,
            sections: 1,
            exchange: ContextExchange::Keys,
        }
    }
}

impl PassRanks {
    /// This rank among those that share the weights, and their number.
    #[must_use]
    pub fn tensor_position(&self) -> Position {
        self.tensor.as_ref().map_or(Position { rank: 0, world: 1 }, |tensor| tensor.ranks.position())
    }

    /// Parts of a pack that threads compute apart, of at most `threads`: calls of ranks are of the whole pack.
    pub(crate) fn parts(&self, threads: usize) -> usize {
        if self.calls_in_parts() { 1 } else { threads }
    }

    /// Whether the passes of parts of a pack make calls.
    pub(crate) fn calls_in_parts(&self) -> bool {
        self.tensor.is_some() || self.expert.is_some()
    }

    /// Why `degree` ranks cannot divide the experts of a model of this `config`; `None` if they can.
    #[must_use]
    pub fn expert_obstacle(config: &Config, degree: usize) -> Option<String> {
        let counts: Vec<usize> =
            config.layers.iter().filter_map(|layer| Some(layer.feed_forward.experts()?.count)).collect();
        if degree <= 1 {
            return None;
        }
        let Some(count) = counts.iter().find(|count| !count.is_multiple_of(degree)) else {
            return counts.is_empty().then(|| "the model has no experts".to_owned());
        };
        let divides = |fewer: &usize| counts.iter().all(|count| count.is_multiple_of(*fewer));
        let nearest = (1..degree).rev().find(divides).unwrap_or(1);
        Some(format!("{count} experts are not divisible by {degree}; {nearest} divides them"))
    }

    /// Why `degree` context ranks cannot compute passes of a model of this `config` in `sections` sections; `None` if they can.
    #[must_use]
    pub fn obstacle(
        config: &Config,
        degree: usize,
        sections: usize,
        exchange: ContextExchange,
    ) -> Option<String> {
        if sections <= 1 && degree <= 1 {
            return None;
        }
        if !sections.is_power_of_two() || !sections.is_multiple_of(degree) {
            return Some(format!(
                "{sections} sections are divided among {degree} ranks, and both have to be powers of two"
            ));
        }
        let recurrent = |index: &usize| config.layers[*index].delta_net.is_some();
        if let Some(index) = (0..config.num_layers()).find(recurrent) {
            return Some(format!(
                "layer {index} is a recurrence (gated DeltaNet), which needs whole sequences"
            ));
        }
        let heads = |index: usize| match config.layers[index].attention.latent {
            Some(_) => config.num_heads,
            None => config.num_kv_heads,
        };
        let divided =
            |index: &usize| exchange == ContextExchange::Heads && !heads(*index).is_multiple_of(degree);
        (0..config.num_layers()).find(divided).map(|index| {
            let heads = heads(index);
            format!("layer {index} has {heads} key-value heads, which {degree} ranks cannot share evenly")
        })
    }

    /// Tokens of the one of `degree` context ranks that has the most of a micro-batch of sequences with these `lengths`, of a model of
    /// which each of `tensor` ranks has a shard of this `config`.
    #[must_use]
    pub fn most_tokens(
        config: &Config,
        lengths: impl IntoIterator<Item = usize>,
        degree: usize,
        tensor: usize,
    ) -> usize {
        let mut end = 0;
        let segment = |len| {
            end += len;
            Segment { rows: end - len..end, prefix: 0..0 }
        };
        let segments: Vec<Segment> = lengths.into_iter().map(segment).collect();
        let rows = context_rows(config, &segments, degree, tensor);
        rows.iter().map(Range::len).max().unwrap_or(0)
    }

    /// Number of context ranks.
    #[must_use]
    pub fn context_degree(&self) -> usize {
        self.context.as_ref().map_or(1, |ranks| ranks.world())
    }
}

impl ContextExchange {
    /// The one with which `degree` ranks send fewer values for a model of this `config`: heads only where every rank gets the same
    /// number of key-value heads. A rank sends `(degree - 1) / degree` of the queries, keys, values and results of its tokens,
    /// or keys and values, on average, to half of the other ranks, because attention is causal.
    #[must_use]
    pub fn cheaper(config: &Config, degree: usize) -> Self {
        let shape = config.head_shape();
        let heads = 2 * (shape.query_width() + shape.kv_width());
        let keys = degree * shape.kv_width();
        if shape.kv_heads.is_multiple_of(degree) && heads < keys { Self::Heads } else { Self::Keys }
    }
}

/// The error of a pass whose ranks could not make a call.
pub(crate) fn failed(error: CollectiveError) -> candle_core::Error {
    candle_core::Error::WrappedContext {
        wrapped: Box::new(error),
        context: "in a pass among ranks".to_owned(),
    }
}

/// The failed call of ranks that ended a pass.
///
/// # Errors
/// The error of the pass itself, if no call failed.
pub fn failed_call(error: candle_core::Error) -> Result<CollectiveError, candle_core::Error> {
    let candle_core::Error::WrappedContext { wrapped, context } = error else { return Err(error) };
    match wrapped.downcast::<CollectiveError>() {
        Ok(error) => Ok(*error),
        Err(wrapped) => Err(candle_core::Error::WrappedContext { wrapped, context }),
    }
}

impl TensorRanks {
    /// Ranks that have key-value heads of their own, or only sample.
    #[must_use]
    pub fn new(ranks: Arc<dyn Collective>, vocabulary: usize) -> Self {
        Self { ranks, same_keys: None, vocabulary }
    }

    /// The tokens whose rows of the embedding and the head rank `rank` has.
    pub(crate) fn tokens_of(&self, rank: usize) -> Range<usize> {
        even_shards(self.vocabulary, self.ranks.world())[rank].clone()
    }
}
