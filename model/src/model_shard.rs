//! The part of a model that one rank has of those that share a pass: a part of every layer (tensor parallel, Megatron-LM, Shoeybi et al.
//! 2019, arXiv 1909.08053), some layers (a stage of a pipeline, GPipe, Huang et al. 2019, arXiv 1811.06965), or both.
//!
//! A shard is a model: it has a [`Config`] with fewer heads, narrower feed-forward networks, fewer tokens and fewer layers, and the
//! layout of that configuration. So the code that sums, updates and shards flat parameters is the same for a shard.
//! [`ModelShard::pieces`] say where its values are in the whole model.
//!
//! The first stage has the embedding, the final norm and the head: the two may be one table, and its predictions are where the leader of a
//! pass needs them. Residual streams return to it after the last stage.
//!
//! Embedding and head are divided by tokens where sums are trees ([`Reduction::Tree`]): on the processor. Ranks on devices have them
//! whole.
//!
//! Invariant: every value of the whole model is an owned value of exactly one rank. Ranks that have copies of a value compute the
//! same gradient for it; with tree sums bit for bit.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use collective::{Position, even_shards};

use crate::layer::{FeedForward, LayerSpec, QueryKeyNorm, Sharding};
use crate::ops::gemm::CHUNKS;
use crate::{Config, Head, Layout, ModelError, Reduction, Unit};

/// Name of what may have copies, in errors.
const KEY_HEADS: &str = "key-value heads";

/// The part of a model that one rank has.
#[derive(Clone, Debug)]
pub struct ModelShard {
    config: Config,
    layout: Arc<Layout>,
    whole: Arc<Layout>,
    /// The layers of the whole model that it has a part of.
    layers: Range<usize>,
    slots: Range<usize>,
    pieces: Vec<ShardPiece>,
}

/// Which part of a model a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardPlace {
    /// Among the ranks that share every layer.
    pub tensor: Position,
    /// Among the stages that divide the layers.
    pub stage: Position,
}

/// Rows of equal length that are neighbours in a shard, and at equal distances in the whole model: those of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPiece {
    /// Index of the tensor in the whole model.
    pub tensor: usize,
    /// The first value in the shard.
    pub own: usize,
    /// The first value in the whole model.
    pub whole: usize,
    /// Values of a row.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Values from one row to the next in the whole model.
    pub stride: usize,
    /// Whether this rank is the one that owns the values, of those that have copies.
    pub owned: bool,
}

impl ModelShard {
    /// The part of the rank at `position` of a model of this `config`, which has all layers; all of it for one rank. Where ranks are a
    /// multiple of the key-value heads, neighbours have copies of one.
    ///
    /// # Errors
    /// [`ModelError::Shard`] if the model cannot be divided among so many ranks.
    pub fn new(config: &Config, position: Position) -> Result<Self, ModelError> {
        Self::at(config, ShardPlace { tensor: position, stage: Position { rank: 0, world: 1 } })
    }

    /// The part of the rank at `place` of a model of this `config`.
    ///
    /// # Errors
    /// [`ModelError::Shard`] or [`ModelError::Stages`] if the model cannot be divided so.
    pub fn at(config: &Config, ShardPlace { tensor, stage }: ShardPlace) -> Result<Self, ModelError> {
        let key_copies = Self::key_copies(config, tensor.world);
        check(config, tensor.world, key_copies)?;
        let layers = stages(config, stage.world)?.swap_remove(stage.rank);
        let part = shard_config(&stage_config(config, &layers, stage.rank == 0), tensor, key_copies);
        let (layout, whole) = (Arc::new(Layout::new(&part)), Arc::new(Layout::new(config)));
        let tokens = tokens_of(config, tensor).start;
        let pieces = layout.specs().iter().zip(tensors(config, &layers)).zip(shardings(&part));
        let pieces = pieces.map(|((own, index), sharding)| {
            let of_whole = &whole.specs()[index];
            let [rows, row] = match own.shape[..] {
                [rows, row] if sharding == Sharding::Inputs => [rows, row],
                _ => [1, own.len()],
            };
            let copies = if is_of_keys(&of_whole.name) { key_copies } else { 1 };
            let first = match sharding {
                Sharding::Replicated => 0,
                Sharding::Outputs if is_of_tokens(&of_whole.name) => tokens * config.hidden_size,
                Sharding::Outputs | Sharding::Inputs => tensor.rank / copies * row,
            };
            ShardPiece {
                tensor: index,
                own: own.offset,
                whole: of_whole.offset + first,
                row,
                rows,
                stride: of_whole.len() / rows,
                owned: match sharding {
                    Sharding::Replicated => tensor.rank == 0,
                    Sharding::Outputs | Sharding::Inputs => tensor.rank.is_multiple_of(copies),
                },
            }
        });
        let pieces = pieces.collect();
        let slots = config.slots_before(layers.start)..config.slots_before(layers.end);
        Ok(Self { config: part, layout, whole, layers, slots, pieces })
    }

    /// Checks that a model of this `config` sums in an order that does not depend on the number of ranks: on the processor `degree` ranks
    /// can share its sums.
    ///
    /// # Errors
    /// [`ModelError::Shard`] if it does not.
    pub fn check_sums(config: &Config, degree: usize) -> Result<(), ModelError> {
        if degree <= 1 || config.reduction == Reduction::Tree {
            return Ok(());
        }
        let reason = "the order of its sums depends on the degree; set model.reduction = \"tree\"";
        Err(ModelError::Shard { degree, reason: reason.to_owned() })
    }

    /// The configuration of the shard as a model.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The layout of the shard.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The layout of the whole model.
    #[must_use]
    pub fn whole(&self) -> &Arc<Layout> {
        &self.whole
    }

    /// Ranks, of `degree` that share a model of this `config`, that have the same key-value heads: neighbours.
    #[must_use]
    pub fn key_copies(config: &Config, degree: usize) -> usize {
        let heads = config.num_kv_heads.max(1);
        if degree > heads && degree.is_multiple_of(heads) { degree / heads } else { 1 }
    }

    /// The layers of the whole model that it has a part of.
    #[must_use]
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// Its experts of a token, among those of all layers ([`Config::expert_slots`]).
    #[must_use]
    pub fn slots(&self) -> Range<usize> {
        self.slots.clone()
    }

    /// The unit of the shard that is a part of this `unit` of the whole model; `None` if it has none of it.
    #[must_use]
    pub fn own_unit(&self, unit: Unit) -> Option<Unit> {
        let own = match unit {
            Unit::Layer(index) if self.layers.contains(&index) => Unit::Layer(index - self.layers.start),
            Unit::Layer(_) => return None,
            ends => ends,
        };
        (!self.layout.unit(own).is_empty()).then_some(own)
    }

    /// Where the values of the shard are, by tensor, in the order of the layout.
    #[must_use]
    pub fn pieces(&self) -> &[ShardPiece] {
        &self.pieces
    }

    /// The values `[layout().len()]` of the shard, of those of the whole model, `[whole().len()]`.
    #[must_use]
    pub fn cut(&self, values: &[f32]) -> Vec<f32> {
        let mut own = Vec::with_capacity(self.layout.len());
        for piece in &self.pieces {
            piece.runs().for_each(|(_, whole)| own.extend_from_slice(&values[whole]));
        }
        own
    }

    /// The values `[layout().unit(unit).len()]` of a unit of the shard; `of_whole` has those of a range of the whole model.
    #[must_use]
    pub fn cut_unit<'a>(
        &self,
        unit: Unit,
        mut of_whole: impl FnMut(Range<usize>) -> Cow<'a, [f32]>,
    ) -> Vec<f32> {
        let range = self.layout.unit(unit);
        let mut own = Vec::with_capacity(range.len());
        for piece in self.pieces_within(&range) {
            piece.within(range.clone()).for_each(|(_, whole)| own.extend_from_slice(&of_whole(whole)));
        }
        own
    }

    /// The ranges in the whole model of the owned values among `own` of the shard, with their ranges in it, in order.
    pub fn owned(&self, own: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        let inside = self.pieces_within(&own);
        inside.filter(|piece| piece.owned).flat_map(move |piece| piece.within(own.clone()))
    }

    /// The pieces with values in `own` of the shard.
    fn pieces_within(&self, own: &Range<usize>) -> impl Iterator<Item = &ShardPiece> + use<'_> {
        let (first, end) =
            (self.pieces.partition_point(|piece| piece.own + piece.row * piece.rows <= own.start), own.end);
        self.pieces[first..].iter().take_while(move |piece| piece.own < end)
    }
}

impl ShardPiece {
    /// Its rows: ranges in the shard and in the whole model.
    pub fn runs(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        self.within(self.own..self.own + self.row * self.rows)
    }

    /// The same of the values that are in `range` of the shard.
    pub fn within(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<> {
        let Self { own, whole, row, rows, stride, .. } = *self;
        let start = range.start.max(own) - own;
        let end = range.end.min(own + row * rows).saturating_sub(own).max(start);
        let of = move |index: usize| {
            let (from, to) = (start.max(index * row), end.min((index + 1) * row));
            let moved = whole + index * stride - index * row;
            (own + from..own + to, moved + from..moved + to)
        };
        (start / row.max(1)..end.div_ceil(row.max(1))).map(of)
    }
}

/// The tokens whose rows of the embedding and the head a rank has.
fn tokens_of(config: &Config, Position { rank, world }: Position) -> Range<usize> {
    match config.reduction {
        Reduction::Tree => even_shards(config.vocab_size, world)[rank].clone(),
        Reduction::Chain => 0..config.vocab_size,
    }
}

/// Whether a tensor has a row for each token of the vocabulary.
fn is_of_tokens(name: &str) -> bool {
    name == "model.embed_tokens.weight" || name == "lm_head.weight"
}

/// Whether a tensor makes keys or values.
pub(crate) fn is_of_keys(name: &str) -> bool {
    [".k_proj.", ".v_proj."].into_iter().any(|projection| name.contains(projection))
}

/// The layers of each of `stages` stages of a pipeline over a model of this `config`: neighbours, at least one for each, so that the most
/// expensive stage costs as little as it can. The first also computes the head.
///
/// # Errors
/// [`ModelError::Stages`] if there are more stages than layers.
pub fn stages(config: &Config, stages: usize) -> Result<Vec<Range<usize>>, ModelError> {
    let layers = config.num_layers();
    if !(1..=layers).contains(&stages) {
        return Err(ModelError::Stages { stages, layers });
    }
    let costs: Vec<usize> = (0..layers).map(|index| config.multiply_adds_of_layer(index, 1)).collect();
    let head = config.vocab_size * config.hidden_size;
    let divide = |most: usize| divide(&costs, head, stages, most);
    // The least limit under which the layers fit into the stages.
    let (mut least, mut enough) = (0, head + costs.iter().sum::<usize>());
    while least < enough {
        let middle = least.midpoint(enough);
        if divide(middle).is_some() { enough = middle } else { least = middle + 1 }
    }
    divide(enough).ok_or(ModelError::Stages { stages, layers })
}

/// Divides layers of these `costs` among `stages`, the first of which has `before` to do already: from the last stage to the first, as
/// many as cost at most `most` in all, at least one, and no more than leave one for each of the others. `None` if some are left.
fn divide(costs: &[usize], before: usize, stages: usize, most: usize) -> Option<Vec<Range<usize>>> {
    let (mut end, mut divided) = (costs.len(), Vec::with_capacity(stages));
    for stage in (0..stages).rev() {
        let mut cost = if stage == 0 { before } else { 0 };
        let mut start = end;
        while start > stage && (start == end || cost + costs[start - 1] <= most) {
            start -= 1;
            cost += costs[start];
        }
        if cost > most {
            return None;
        }
        divided.push(start..end);
        end = start;
    }
    divided.reverse();
    (end == 0).then_some(divided)
}

/// The configuration of some `layers` of a model, with its embedding and head if they are those of the `first` stage.
fn stage_config(config: &Config, layers: &Range<usize>, first: bool) -> Config {
    let part = Config { layers: config.layers[layers.clone()].to_vec(), ..config.clone() };
    if first { part } else { Config { vocab_size: 0, head: Head::None, ..part } }
}

/// Indices in the whole model of the tensors of some `layers`, which have the tensors of the ends if the layout of these has them.
fn tensors(config: &Config, layers: &Range<usize>) -> impl Iterator<Item = usize> + use<> {
    let count = |layers: Range<usize>| layers.map(|index| config.layer_tensors(index).len()).sum::<usize>();
    let [before, own, all] = [0..layers.start, layers.clone(), 0..config.num_layers()].map(count);
    // The embedding, which may be without rows; the layers; the tail, of which a stage may have nothing.
    std::iter::once(0).chain(1 + before..1 + before + own).chain(1 + all..)
}

/// How ranks share each tensor, in the order of the layout.
fn shardings(config: &Config) -> Vec<Sharding> {
    let of_tokens =
        if config.reduction == Reduction::Tree { Sharding::Outputs } else { Sharding::Replicated };
    let mut all = vec![of_tokens];
    for index in 0..config.num_layers() {
        all.extend(config.layer_tensors(index).iter().map(|tensor| tensor.sharding));
    }
    let layout = Layout::new(config);
    let tail = layout.specs()[all.len()..].iter();
    // The head has the rows of the embedding.
    all.extend(tail.map(|spec| if is_of_tokens(&spec.name) { of_tokens } else { Sharding::Replicated }));
    all
}

/// The configuration of the shard at `position`, of ranks of which `copies` have one key-value head.
fn shard_config(config: &Config, position: Position, copies: usize) -> Config {
    let degree = position.world;
    let narrower = |layer: LayerSpec| {
        let feed_forward = match layer.feed_forward {
            FeedForward::Experts(mut spec) => {
                (spec.width, spec.shared_width) = (spec.width / degree, spec.shared_width / degree);
                FeedForward::Experts(spec)
            }
            gated => gated,
        };
        LayerSpec { feed_forward, ..layer }
    };
    let part = Config {
        vocab_size: tokens_of(config, position).len(),
        intermediate_size: config.intermediate_size / degree,
        num_heads: config.num_heads / degree,
        num_kv_heads: config.num_kv_heads * copies / degree,
        ..config.clone()
    };
    part.map_layers(narrower)
}

/// Checks that `degree` ranks can share a model, of which `copies` have one key-value head.
fn check(config: &Config, degree: usize, copies: usize) -> Result<(), ModelError> {
    if degree == 1 {
        return Ok(());
    }
    let refused = |reason: String| Err(ModelError::Shard { degree, reason });
    if !degree.is_power_of_two() || degree > CHUNKS {
        return refused(format!("a degree is a power of two of at most {CHUNKS}"));
    }
    for (index, layer) in config.layers.iter().enumerate() {
        let missing = match layer {
            LayerSpec { delta_net: Some(_), .. } => "is a recurrence",
            LayerSpec { attention, .. } if attention.latent.is_some() => "has latents",
            LayerSpec { query_key_norm: QueryKeyNorm::Whole, .. } => "normalises all heads together",
            LayerSpec { feed_forward: FeedForward::Experts(spec), .. } if spec.bias => {
                "has experts with biases"
            }
            _ => continue,
        };
        return refused(format!("layer {index} {missing}, which only one rank computes"));
    }
    let divisible = divisors(config, copies);
    let nearest = |degree: usize| divisible.iter().all(|(_, size)| size.is_multiple_of(degree));
    match divisible.iter().find(|(_, size)| !size.is_multiple_of(degree)) {
        None => Ok(()),
        Some((what, size)) => {
            let divided = match *what {
                KEY_HEADS => format!("are neither a multiple nor a divisor of {degree}"),
                _ => format!("are not divisible by {degree}"),
            };
            let fits = (1..degree).rev().find(|fewer| fewer.is_power_of_two() && nearest(*fewer));
            let fits = fits.unwrap_or(1);
            refused(format!("its {size} {what} {divided}; {fits} divides everything"))
        }
    }
}

/// What a degree divides, with its name.
fn divisors(config: &Config, copies: usize) -> Vec<(&'static str, usize)> {
    let mut all = vec![("query heads", config.num_heads), (KEY_HEADS, config.num_kv_heads * copies)];
    for layer in &config.layers {
        let of_layer = match layer.feed_forward.experts() {
            None => [("values of the feed-forward width", config.intermediate_size), ("", 0)],
            Some(spec) => [
                ("values of an expert's width", spec.width),
                ("values of the shared width", spec.shared_width),
            ],
        };
        all.extend(of_layer.into_iter().filter(|one| one.1 > 0 && !all.contains(one)).collect::<Vec<_>>());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::of_every_family;

    #[test]
    fn every_value_has_one_owner_and_shards_make_up_the_model() {
        let mut shared = 0;
        let reductions = [Reduction::Tree, Reduction::Chain];
        let with = |config: Config| reductions.map(|reduction| Config { reduction, ..config.clone() });
        for config in of_every_family().into_iter().flat_map(with) {
            for world in [1, 2, 4] {
                let shards: Result<Vec<_>, _> =
                    (0..world).map(|rank| ModelShard::new(&config, Position { rank, world })).collect();
                let Ok(shards) = shards else { continue };
                shared += usize::from(world > 1);
                let len = shards[0].whole().len();
                let values: Vec<f32> = (0..len).map(|at| at as f32).collect();
                let mut owners = vec![0; len];
                for shard in &shards {
                    let own = shard.cut(&values);
                    assert_eq!(own.len(), shard.layout().len(), "{:?}", config.architecture);
                    // In two halves, so that pieces are cut.
                    let middle = own.len() / 2 + 1;
                    for (of_shard, of_whole) in shard.owned(0..middle).chain(shard.owned(middle..own.len())) {
                        assert_eq!(own[of_shard], values[of_whole.clone()]);
                        owners[of_whole].iter_mut().for_each(|owners| *owners += 1);
                    }
                }
                assert!(owners.iter().all(|owners| *owners == 1), "{:?} x {world}", config.architecture);
            }
        }
        assert!(shared >= 20, "{shared} families and degrees are shared");
    }

    /// Eight ranks of a model with two key-value heads: four have a copy of one, with the queries that read it.
    #[test]
    fn ranks_may_be_more_than_key_value_heads() {
        let sizes = crate::Sizes {
            vocab_size: 27,
            hidden_size: 32,
            intermediate_size: 48,
            num_layers: 1,
            num_heads: 8,
            num_kv_heads: 2,
            max_position_embeddings: 16,
        };
        let config = Config { reduction: Reduction::Tree, ..Config::fresh(&sizes) };
        let values: Vec<f32> = (0..Layout::new(&config).len()).map(|at| at as f32).collect();
        let mut owners = vec![0; values.len()];
        assert_eq!([2, 4, 8].map(|degree| ModelShard::key_copies(&config, degree)), [1, 2, 4]);
        for rank in 0..8 {
            let shard = ModelShard::new(&config, Position { rank, world: 8 }).unwrap();
            assert_eq!((shard.config().num_heads, shard.config().num_kv_heads), (1, 1));
            let own = shard.cut(&values);
            let of = |layout: &Layout, name: &str| layout.spec(name).unwrap().range();
            for name in
                ["k_proj.weight", "v_proj.bias"].map(|name| format!("model.layers.0.self_attn.{name}"))
            {
                let whole = of(shard.whole(), &name);
                let head = whole.len() / 2 * (rank / 4);
                assert_eq!(own[of(shard.layout(), &name)], values[whole.start + head..][..whole.len() / 2]);
            }
            for (_, of_whole) in shard.owned(0..own.len()) {
                owners[of_whole].iter_mut().for_each(|owners| *owners += 1);
            }
        }
        assert!(owners.iter().all(|owners| *owners == 1));
        let error = ModelShard::new(&config, Position { rank: 0, world: 16 }).unwrap_err().to_string();
        assert!(error.contains("8 query heads are not divisible by 16; 8 divides everything"), "{error}");
    }

    #[test]
    fn every_value_of_a_pipeline_has_one_owner() {
        for config in of_every_family() {
            let config = Config { reduction: Reduction::Tree, ..config };
            for (degree, world) in [(1, 1), (1, 2), (2, 2), (4, 2)] {
                let place = |rank: usize| ShardPlace {
                    tensor: Position { rank: rank % degree, world: degree },
                    stage: Position { rank: rank / degree, world },
                };
                let shards: Result<Vec<_>, _> =
                    (0..degree * world).map(|rank| ModelShard::at(&config, place(rank))).collect();
                let shards = match shards {
                    Err(_) if degree > 1 => continue,
                    shards => shards.unwrap(),
                };
                let whole = Arc::clone(shards[0].whole());
                let values: Vec<f32> = (0..whole.len()).map(|at| at as f32).collect();
                let mut owners = vec![0; whole.len()];
                for shard in &shards {
                    let own = shard.cut(&values);
                    assert_eq!(own.len(), shard.layout().len(), "{:?}", config.architecture);
                    for (spec, piece) in shard.layout().specs().iter().zip(shard.pieces()) {
                        let of_whole = &whole.specs()[piece.tensor];
                        assert_eq!(spec.shape.len(), of_whole.shape.len(), "{} {}", spec.name, of_whole.name);
                        assert_eq!(
                            spec.name.rsplit_once('.'),
                            {
                                let index = shard.layers().start;
                                let name = rename(&of_whole.name, index);
                                name.rsplit_once('.').map(|(a, b)| (a.to_owned(), b.to_owned()))
                            }
                            .as_ref()
                            .map(|(a, b)| (&a[..], &b[..]))
                        );
                    }
                    for (of_shard, of_whole) in shard.owned(0..own.len()) {
                        assert_eq!(own[of_shard], values[of_whole.clone()]);
                        owners[of_whole].iter_mut().for_each(|owners| *owners += 1);
                    }
                    for unit in whole.units() {
                        let Some(of_shard) = shard.own_unit(unit) else { continue };
                        let inside = whole.unit(unit);
                        assert!(
                            own[shard.layout().unit(of_shard)]
                                .iter()
                                .all(|at| inside.contains(&(*at as usize)))
                        );
                    }
                }
                assert!(owners.iter().all(|owners| *owners == 1), "{:?} x {world}", config.architecture);
            }
        }
    }

    /// The name of a tensor whose layer has a number that is smaller by `first`.
    fn rename(name: &str, first: usize) -> String {
        let Some(rest) = name.strip_prefix("model.layers.") else { return name.to_owned() };
        let (index, rest) = rest.split_once('.').unwrap();
        format!("model.layers.{}.{rest}", index.parse::<usize>().unwrap() - first)
    }

    #[test]
    fn stages_have_layers_of_about_the_same_cost() {
        let sizes = crate::Sizes {
            vocab_size: 4096,
            hidden_size: 32,
            intermediate_size: 96,
            num_layers: 12,
            num_heads: 4,
            num_kv_heads: 4,
            max_position_embeddings: 16,
        };
        let config = Config::fresh(&sizes);
        // The head costs as much as nine layers and a part of one.
        assert_eq!(config.vocab_size * config.hidden_size / config.multiply_adds_of_layer(0, 1), 9);
        assert_eq!(stages(&config, 2).unwrap(), [0..1, 1..12]);
        let small = Config { vocab_size: 27, ..config };
        assert_eq!(stages(&small, 4).unwrap(), [0..3, 3..6, 6..9, 9..12]);
        assert_eq!(stages(&small, 5).unwrap(), [0..1, 1..3, 3..6, 6..9, 9..12]);
        assert_eq!(stages(&small, 1).unwrap(), [0..12; 1]);
        assert_eq!(stages(&small, 12).unwrap().len(), 12);
        assert!(stages(&small, 13).unwrap_err().to_string().contains("at most 12 stages"));
    }

    #[test]
    fn what_cannot_be_divided_is_named_with_the_nearest_degree() {
        let sizes = crate::Sizes {
            vocab_size: 27,
            hidden_size: 32,
            intermediate_size: 48,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: 16,
        };
        let chain = Config::fresh(&sizes);
        let tree = Config { reduction: Reduction::Tree, ..chain.clone() };
        let error = |config: &Config, world| {
            ModelShard::new(config, Position { rank: 0, world }).expect_err("cannot be divided").to_string()
        };
        let of_chain = ModelShard::check_sums(&chain, 2).expect_err("chains cannot be shared").to_string();
        assert!(of_chain.contains("set model.reduction = \"tree\""), "{of_chain}");
        assert!(ModelShard::check_sums(&chain, 1).and(ModelShard::check_sums(&tree, 2)).is_ok());
        assert!(error(&tree, 3).contains("power of two"));
        let text = error(&tree, 8);
        assert!(text.contains("4 query heads are not divisible by 8; 4 divides everything"), "{text}");
        let text = error(&Config { num_heads: 6, num_kv_heads: 3, ..tree }, 2);
        let expected = "3 key-value heads are neither a multiple nor a divisor of 2; 1 divides everything";
        assert!(text.contains(expected), "{text}");
    }
}
