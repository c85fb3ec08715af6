//! The network: one decoder for prefill, decode, training and scoring.
//!
//! [`Decoder`] is immutable: one policy version. [`Decoder::train`] runs a [`Pack`] of whole sequences forward and
//! then backward layer by layer, [`Decoder::score`] forward only, [`Decoder::step`] continues sequences whose keys
//! and values are in a [`KvCache`]. All three run the same blocks, on the threads of a [`ThreadPool`].
//!
//! # Layout
//! - `block`: one layer, forward and backward; `mixer`: its attention or recurrence; `feed_forward`: its feed-forward network, which may be
//!   experts; `shared_experts`: those that ranks divide
//! - `pack`: sequences one after the other
//! - `train`: the walk over the layers, forward and backward; `ends`: embedding and head; `parts`: passes in parts for the threads;
//!   `sections`: the same of sections of the tokens, on one rank or among several
//! - `gradients`: gradient sinks and layer sources; with low-rank factors gradients are those of the factors
//! - `cache`: the paged cache; `states`: its recurrent states; `decode`: the decode step

mod block;
mod cache;
mod decode;
mod ends;
mod feed_forward;
mod gradients;
mod mixer;
mod pack;
mod parts;
mod sections;
mod shared_experts;
mod states;
mod train;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::low_rank::{FactorPair, LowRank, UnitFactors};
use crate::ops::blocks::BlockRows;
use crate::ops::gemm::TreePart;
use crate::ops::heads::{Angles, Frequencies, HeadShape};
use crate::ops::linear::{FlatValues, Linear, TreeSum};
use crate::ops::residual::multiple;
use crate::ops::{embedding, matrix, values};
use crate::pass_ranks::failed;
use crate::{
    AdaptedMatrix, Config, FrozenParameters, Head, Layout, Parameters, PassRanks, Reduction, Rotary,
    ThreadPool, Unit,
};
use block::TransformerBlock;
pub use cache::KvCache;
pub use decode::StepSequence;
pub use gradients::{GradientSink, Gradients, LayerSource, RoutedTokens};
pub use pack::{Pack, PackError};
pub(crate) use sections::context_rows;
pub(crate) use states::StatePlace;
pub use train::{PackPass, PassLayers, Recompute};

/// Quantization of a sampler's weights.
///
/// A quantized sampler samples from a policy close to the trained one, and its behavior log-probabilities are those of the
/// quantized policy. Embedding, norms and attention are f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantization {
    /// None: f32, the same bits as in training.
    #[default]
    None,
    /// The matrices of the layers in 8 bits, with a scale per output; activations in 8 bits with a range per token. The
    /// head is f32.
    Int8,
    /// The matrices of the layers and the head in bf16, and their activations; sums are f32.
    Bf16,
}

/// The network of one policy version.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: Config,
    shape: HeadShape,
    /// Of [`Config::rotaries`].
    frequencies: Vec<Frequencies>,
    embedding: Embedding,
    /// Those that are not merged into the embedding.
    embedding_factors: Vec<EmbeddingFactors>,
    blocks: Vec<TransformerBlock>,
    /// `[d]` weights of the final norm, with their offset, divided as logits are.
    final_norm: Vec<f32>,
    head: Linear,
    /// `[d]` weights of the value head; empty without one.
    value_head: Vec<f32>,
    layout: Arc<Layout>,
    recompute: Recompute,
    /// The factors that are trained in place of the weights.
    factors: Option<Arc<LowRank>>,
    /// Number of adapters that a sequence can name.
    adapters: usize,
    /// Whether the threads of a decode step share the columns of the weights, or each computes some of the sequences.
    columns_are_shared: bool,
    /// The ranks that compute passes together.
    ranks: PassRanks,
}

/// Number of weights up to which reading them once per thread costs less than a synchronisation per layer: measured with 1,
/// 6 and 358 million.
const SMALL: usize = 1 << 24;

/// `[V, d]`
#[derive(Clone, Debug)]
enum Embedding {
    /// A copy, for a decoder that outlives its parameters.
    Own(Vec<f32>),
    /// The packed weight of the head, which is tied to it.
    Head,
    /// The first of flat values.
    Flat(FlatValues),
    /// A quantised table.
    Frozen(BlockRows),
}

/// Low-rank factors of the embedding.
#[derive(Clone, Debug)]
struct EmbeddingFactors {
    /// The adapter of the tokens that have them; `None` for the factors of tokens without one.
    adapter: Option<usize>,
    low_rank: Arc<LowRank>,
    /// Index of the pair.
    pair: usize,
}

impl Decoder {
    /// A decoder to sample and score with. It packs a copy of the weights for products with few rows and does not keep
    /// `parameters`.
    ///
    /// # Panics
    /// If the parameters are not those of `config`.
    #[must_use]
    pub fn new(config: &Config, parameters: &Parameters) -> Self {
        Self::sampler(config, parameters, Quantization::None)
    }

    /// The same, with quantized weights.
    ///
    /// # Panics
    /// If the parameters are not those of `config`.
    #[must_use]
    pub fn sampler(config: &Config, parameters: &Parameters, quantization: Quantization) -> Self {
        let (layout, values) = (parameters.layout(), parameters.values());
        Self::packed(config, layout, values, quantization, &ThreadPool::single())
    }

    /// The same of weights `values [layout.len()]` that lie anywhere.
    ///
    /// # Panics
    /// If the layout is not that of `config`, or the values are not of the layout.
    #[must_use]
    pub fn packed(
        config: &Config,
        layout: &Arc<Layout>,
        values: &[f32],
        quantization: Quantization,
        pool: &ThreadPool,
    ) -> Self {
        assert_eq!(values.len(), layout.len(), "the values are those of the layout");
        let unit = |unit| Cow::Borrowed(&values[layout.unit(unit)]);
        Self::of_units(config, layout, unit, quantization, pool)
    }

    /// The same of the values of units, which `unit` gives one at a time.
    ///
    /// # Panics
    /// If a unit has another length than in the layout.
    #[must_use]
    pub fn of_units<'a>(
        config: &Config,
        layout: &Arc<Layout>,
        unit: impl Fn(Unit) -> Cow<'a, [f32]> + Sync,
        quantization: Quantization,
        pool: &ThreadPool,
    ) -> Self {
        let block = |i| TransformerBlock::sampler(config, layout, &unit(Unit::Layer(i)), i, quantization);
        let (table, tail) = (unit(Unit::Embedding), unit(Unit::Tail));
        let start = layout.unit(Unit::Tail).start;
        let of_tail = |range: Range<usize>| &tail[range.start - start..range.end - start];
        let head = if layout.head().start < start { &table } else { of_tail(layout.head()) };
        let embedding = if config.tie_word_embeddings && quantization != Quantization::Bf16 {
            Embedding::Head
        } else {
            Embedding::Own(table.to_vec())
        };
        let of = |range: Range<usize>| of_tail(range).to_vec();
        let value_head = layout.value_head().map_or(Vec::new(), of);
        let final_norm = layout.spec("model.norm.weight").map_or(Vec::new(), |norm| of(norm.range()));
        Self {
            embedding,
            blocks: pool.map((0..config.num_layers()).collect(), block),
            head: match quantization {
                Quantization::None | Quantization::Int8 => Linear::packed(head, config.hidden_size, None),
                Quantization::Bf16 => Linear::bf16(head, config.hidden_size, None),
            }
            .at(layout.head()),
            columns_are_shared: layout.len() > SMALL,
            ..Self::without(config, layout, final_norm, value_head)
        }
    }

    /// A decoder to train and score with. It reads the weights in place and copies nothing; it keeps `parameters` until it is
    /// dropped.
    ///
    /// # Panics
    /// If the parameters are not those of `config`.
    #[must_use]
    pub fn trainable(config: &Config, parameters: &Arc<Parameters>, recompute: Recompute) -> Self {
        let flat = FlatValues::Model(Arc::clone(parameters));
        Self {
            embedding: Embedding::Flat(flat.clone()),
            blocks: (0..config.num_layers())
                .map(|i| TransformerBlock::trainable(config, parameters, i))
                .collect(),
            head: Linear::flat(&flat, parameters.layout().head(), config.hidden_size, &(0..0))
                .with_tree(head_tree(config)),
            recompute,
            ..Self::bare(config, parameters.layout(), parameters.values())
        }
    }

    /// A decoder to train and score with that has only the `embedding [vocab_size, hidden]` and the `tail
    /// [layout.unit(Unit::Tail).len()]`: layers come from a [`LayerSource`].
    ///
    /// # Panics
    /// If the values are not those of `layout`, or that is not of `config`.
    #[must_use]
    pub fn without_layers(
        config: &Config,
        layout: &Arc<Layout>,
        embedding: &Arc<Vec<f32>>,
        tail: &Arc<Vec<f32>>,
        recompute: Recompute,
    ) -> Self {
        let (head, start) = (layout.head(), layout.unit(Unit::Tail).start);
        let in_tail = |range: Range<usize>| range.start - start..range.end - start;
        let (embedding, tail) = (FlatValues::Unit(Arc::clone(embedding)), FlatValues::Unit(Arc::clone(tail)));
        let head = if head.start < start {
            Linear::flat(&embedding, head, config.hidden_size, &(0..0))
        } else {
            Linear::flat(&tail, in_tail(head), config.hidden_size, &(0..0))
        }
        .with_tree(head_tree(config));
        let of_tail = |range: Range<usize>| tail.values()[in_tail(range)].to_vec();
        let value_head = layout.value_head().map_or(Vec::new(), of_tail);
        let final_norm = layout.spec("model.norm.weight").map_or(Vec::new(), |norm| of_tail(norm.range()));
        let embedding = Embedding::Flat(embedding);
        Self { embedding, head, recompute, ..Self::without(config, layout, final_norm, value_head) }
    }

    /// A decoder of frozen weights that stay quantised, with `factors` that are not merged into them: to train the factors, to
    /// score and to sample with. All three compute with the same operations, so a sampled token has the log-probability that
    /// training computes, bit for bit.
    ///
    /// # Panics
    /// If the factors are of another model.
    #[must_use]
    pub fn frozen(base: &FrozenParameters, factors: &Arc<LowRank>, recompute: Recompute) -> Self {
        let (config, layout) = (base.config(), base.layout());
        let of = |range: Range<usize>| base.vector(&range);
        let value_head = layout.value_head().map_or(Vec::new(), of);
        let final_norm = layout.spec("model.norm.weight").map_or(Vec::new(), |norm| of(norm.range()));
        let (table, head) = (layout.unit(Unit::Embedding), layout.head());
        let mut decoder = Self {
            embedding: Embedding::Frozen(base.matrices(&table)),
            blocks: (0..config.num_layers()).map(|i| TransformerBlock::frozen(base, i)).collect(),
            head: Linear::frozen(base.matrices(&head), config.hidden_size, Vec::new()).at(head),
            recompute,
            factors: Some(Arc::clone(factors)),
            columns_are_shared: layout.len() > SMALL,
            ..Self::without(config, layout, final_norm, value_head)
        };
        decoder.adapt(None, factors);
        decoder
    }

    /// Serves `adapters` beside each other, in place of those before: a sequence names its own by its index
    /// ([`StepSequence::adapter`]), and one that names none has the weights alone. They are not merged into the weights.
    ///
    /// # Panics
    /// If an adapter is of another model.
    pub fn set_adapters(&mut self, adapters: &[Arc<LowRank>]) {
        self.change_linears(&mut |linear| linear.without_adapters());
        self.embedding_factors.retain(|factors| factors.adapter.is_none());
        for (index, factors) in adapters.iter().enumerate() {
            self.adapt(Some(index), factors);
        }
        self.adapters = adapters.len();
    }

    /// Adds `factors` of the tokens with `adapter`.
    fn adapt(&mut self, adapter: Option<usize>, factors: &Arc<LowRank>) {
        let matrices: Vec<_> = AdaptedMatrix::all(self.layout.specs()).map(|matrix| matrix.weight).collect();
        let fits = |pair: &FactorPair| {
            let place = matrices.binary_search_by_key(&pair.weight.start, |weight| weight.start);
            place.is_ok_and(|place| matrices[place] == pair.weight)
        };
        assert!(factors.pairs().iter().all(fits), "the adapter is of this model");
        self.change_linears(&mut |linear| linear.adapt(adapter, factors));
        let pair = factors.pairs().iter().position(|pair| pair.is_embedding);
        let of_embedding = |pair| EmbeddingFactors { adapter, low_rank: Arc::clone(factors), pair };
        self.embedding_factors.extend(pair.map(of_embedding));
    }

    /// Calls `change` for every linear layer.
    fn change_linears(&mut self, change: &mut impl FnMut(&mut Linear)) {
        self.blocks.iter_mut().for_each(|block| block.change_linears(change));
        change(&mut self.head);
    }

    /// The same decoder with trained `factors`, which its weights have merged: [`Decoder::train`] gives the gradients of the
    /// factors of a unit to the sink, in the order of [`LowRank::within`], in place of those of the weights.
    #[must_use]
    pub fn adapting(self, factors: Arc<LowRank>) -> Self {
        Self { factors: Some(factors), ..self }
    }

    /// The same decoder, whose training and scoring passes `ranks` compute together: every rank has the whole pack, and gets all
    /// predictions and the gradients of its sections, or of its shard of the weights: then the decoder is one of a
    /// [`ModelShard`](crate::ModelShard), and tensor ranks make its decode steps together too.
    #[must_use]
    pub fn among(mut self, ranks: PassRanks) -> Self {
        if let Some(tensor) = &ranks.tensor {
            self.blocks.iter_mut().for_each(|block| block.share(tensor));
            self.head.share_vocabulary(tensor.ranks.position(), tensor.vocabulary);
        }
        if let Some(expert) = &ranks.expert {
            self.blocks.iter_mut().for_each(|block| block.divide_experts(expert));
        }
        Self { ranks, ..self }
    }

    /// Whether ranks divide the experts: all of them make every pass, over an empty pack if they have no tokens.
    #[must_use]
    pub fn divides_experts(&self) -> bool {
        self.ranks.expert.is_some()
    }

    /// The ids of this rank's rows of the embedding and the head.
    fn own_tokens(&self) -> Range<usize> {
        let tensor = self.ranks.tensor.as_ref();
        tensor.map_or(0..self.config.vocab_size, |tensor| tensor.tokens_of(tensor.ranks.rank()))
    }

    /// The trained factors of the weights of a unit.
    fn factors_of(&self, unit: Unit) -> Option<UnitFactors<'_>> {
        let place = self.layout.unit(unit);
        self.factors.as_deref().map(|low_rank| UnitFactors { low_rank, start: place.start, len: place.len() })
    }

    /// Without embedding, blocks and head.
    fn bare(config: &Config, layout: &Arc<Layout>, values: &[f32]) -> Self {
        let of = |range: Range<usize>| values[range].to_vec();
        let value_head = layout.value_head().map_or(Vec::new(), of);
        let final_norm = layout.spec("model.norm.weight").map_or(Vec::new(), |norm| of(norm.range()));
        Self::without(config, layout, final_norm, value_head)
    }

    fn without(
        config: &Config,
        layout: &Arc<Layout>,
        mut final_norm: Vec<f32>,
        value_head: Vec<f32>,
    ) -> Self {
        let factor = logit_factor(config);
        final_norm.iter_mut().for_each(|weight| *weight = (*weight + config.norm_offset) * factor);
        Self {
            config: config.clone(),
            shape: config.head_shape(),
            frequencies: frequencies(config),
            embedding: Embedding::Own(Vec::new()),
            embedding_factors: Vec::new(),
            blocks: Vec::new(),
            final_norm,
            head: Linear::default(),
            value_head,
            layout: Arc::clone(layout),
            recompute: Recompute::None,
            factors: None,
            adapters: 0,
            columns_are_shared: false,
            ranks: PassRanks::default(),
        }
    }

    /// The configuration that the decoder was made for.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Memory of its own, bytes: the packed weights of a sampler; next to nothing for a trainable decoder.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let embedding = match &self.embedding {
            Embedding::Own(table) => size_of_val(&table[..]),
            Embedding::Head | Embedding::Flat(_) | Embedding::Frozen(_) => 0,
        };
        let blocks: usize = self.blocks.iter().map(TransformerBlock::bytes).sum();
        (embedding + blocks + self.head.bytes()) as u64
    }

    /// The angles of `positions [T]`, of each rotary embedding.
    fn angles(&self, positions: &[u32]) -> LayerAngles {
        let rotaries = self.frequencies.iter().map(|of| Angles::new(positions, of)).collect();
        LayerAngles { rotaries, none: Angles::default() }
    }

    /// Hidden states `[T, d]` of tokens with `adapters [T]`, empty for none; `first` is the number of the first in its batch, for
    /// errors.
    fn embed(&self, token_ids: &[u32], first: usize, adapters: &[Option<usize>]) -> Result<Tensor> {
        let (own, width) = (self.own_tokens(), self.config.hidden_size);
        let vocabulary = self.ranks.tensor.as_ref().map_or(own.len(), |tensor| tensor.vocabulary);
        let shape = [vocabulary, width];
        let flat = |table: &[f32], id: usize, out: &mut [f32]| {
            out.copy_from_slice(&table[id * width..][..width]);
        };
        let rows = embedding::embed(token_ids, first, shape, |t, id, out| {
            let Some(id) = id.checked_sub(own.start).filter(|id| *id < own.len()) else {
                // The only number that changes no bit of another when it is added.
                return out.fill(-0.0);
            };
            match &self.embedding {
                Embedding::Own(table) => flat(table, id, out),
                Embedding::Flat(table) => flat(table.values(), id, out),
                Embedding::Head => self.head.copy_row(id, out),
                Embedding::Frozen(table) => out.copy_from_slice(&table.dequantized(&(id..id + 1))),
            }
            let adapter = adapters.get(t).copied().flatten();
            for factors in self.embedding_factors.iter().filter(|factors| factors.adapter == adapter) {
                factors.low_rank.add_row(factors.pair, id, out);
            }
        });
        let mut rows = rows?;
        if let Some(tensor) = &self.ranks.tensor {
            let mut sums = values(&rows)?.to_vec();
            tensor.ranks.all_reduce(&mut sums).map_err(failed)?;
            rows = matrix(sums, width)?;
        }
        multiple(&rows, self.config.embedding_multiplier)
    }
}

/// Multiplies the final norm in place of the logits, which are linear in it.
pub(crate) fn logit_factor(config: &Config) -> f32 {
    match config.head {
        Head::Language | Head::LanguageAndValue => 1.0 / config.logits_scaling,
        Head::Value | Head::None => 1.0,
    }
}

/// The angles of some positions in every layer.
#[derive(Debug)]
struct LayerAngles {
    /// Of each rotary embedding.
    rotaries: Vec<Angles>,
    /// Of layers without one.
    none: Angles,
}

impl LayerAngles {
    /// Those of the rotary embedding of this number.
    fn of(&self, rotary: Option<usize>) -> &Angles {
        rotary.map_or(&self.none, |rotary| &self.rotaries[rotary])
    }
}

fn frequencies(config: &Config) -> Vec<Frequencies> {
    let rotaries = config.rotaries();
    let of = |rotary: &Rotary| Frequencies {
        inv_freq: rotary.inv_freq(config.rotary_dim()),
        amplitude: rotary.amplitude(),
    };
    rotaries.iter().map(of).collect()
}

/// The tree of the head's input gradient, over the vocabulary.
fn head_tree(config: &Config) -> TreeSum {
    match config.reduction {
        Reduction::Chain => TreeSum::None,
        Reduction::Tree => TreeSum::Outputs(vec![TreePart::of(config.vocab_size)]),
    }
}

/// `rows` of the matrices `[_, d]` of `parts`, which follow one another, in the order of `rows`.
fn gather(parts: &[&Tensor], rows: &[usize]) -> Result<Tensor> {
    let lengths = parts.iter().map(|part| part.dim(0)).collect::<Result<Vec<_>>>()?;
    let width = parts.first().map_or(Ok(0), |part| part.dim(1))?;
    let parts = parts.iter().map(|part| values(part)).collect::<Result<Vec<_>>>()?;
    let mut out = Vec::with_capacity(rows.len() * width);
    for row in rows {
        let (mut row, mut part) = (*row, 0);
        while row >= lengths[part] {
            row -= lengths[part];
            part += 1;
        }
        out.extend_from_slice(&parts[part][row * width..(row + 1) * width]);
    }
    matrix(out, width)
}
