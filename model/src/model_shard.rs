//! The part of a model that one tensor-parallel rank has (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053).
//!
//! A shard is a model: it has a [`Config`] with fewer heads, narrower feed-forward networks and fewer tokens, and the layout of that
//! configuration. So the code that sums, updates and shards flat parameters is the same for a shard. [`ModelShard::pieces`] say
//! where its values are in the whole model.
//!
//! Invariant: every value of the whole model is an owned value of exactly one rank. Ranks that have copies of a value compute the
//! same gradient for it, bit for bit.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use collective::{Position, even_shards};

use crate::layer::{FeedForward, LayerSpec, QueryKeyNorm, Sharding};
use crate::ops::gemm::CHUNKS;
use crate::{Config, Layout, ModelError, Reduction, Unit};

/// The part of a model that one rank has.
#[derive(Clone, Debug)]
pub struct ModelShard {
    config: Config,
    layout: Arc<Layout>,
    whole: Arc<Layout>,
    pieces: Vec<ShardPiece>,
}

/// Rows of equal length that are neighbours in a shard, and at equal distances in the whole model: those of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPiece {
    /// Index of the tensor, which is the same in both layouts.
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
    /// The part of the rank at `position` of a model of this `config`; all of it for one rank.
    ///
    /// # Errors
    /// [`ModelError::Shard`] if the model cannot be divided among so many ranks.
    pub fn new(config: &Config, position: Position) -> Result<Self, ModelError> {
        Self::with_copies(config, position, 1)
    }

    /// The same of a rank that only samples: where ranks are more than key-value heads, several have copies of one, if they are a
    /// multiple.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_sampler(config: &Config, position: Position) -> Result<Self, ModelError> {
        let (degree, heads) = (position.world, config.num_kv_heads.max(1));
        let copies = if degree > heads && degree.is_multiple_of(heads) { degree / heads } else { 1 };
        Self::with_copies(config, position, copies)
    }

    /// The same, with every key-value head on `copies` ranks.
    fn with_copies(config: &Config, position: Position, copies: usize) -> Result<Self, ModelError> {
        check(config, position.world, copies)?;
        let part = shard_config(config, position, copies);
        let (layout, whole) = (Arc::new(Layout::new(&part)), Arc::new(Layout::new(config)));
        let tokens = even_shards(config.vocab_size, position.world)[position.rank].start;
        let shardings = shardings(&part);
        let pieces = layout.specs().iter().zip(whole.specs()).zip(shardings).enumerate();
        let pieces = pieces.map(|(tensor, ((own, whole), sharding))| {
            let [rows, row] = match own.shape[..] {
                [rows, row] if sharding == Sharding::Inputs => [rows, row],
                _ => [1, own.len()],
            };
            let copies = if is_of_keys(&whole.name) { copies } else { 1 };
            let first = match sharding {
                Sharding::Replicated => 0,
                Sharding::Outputs if is_of_tokens(&whole.name) => tokens * config.hidden_size,
                Sharding::Outputs | Sharding::Inputs => position.rank / copies * row,
            };
            ShardPiece {
                tensor,
                own: own.offset,
                whole: whole.offset + first,
                row,
                rows,
                stride: whole.len() / rows,
                owned: match sharding {
                    Sharding::Replicated => position.rank == 0,
                    Sharding::Outputs | Sharding::Inputs => position.rank.is_multiple_of(copies),
                },
            }
        });
        let pieces = pieces.collect();
        Ok(Self { config: part, layout, whole, pieces })
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

/// Whether a tensor has a row for each token of the vocabulary.
fn is_of_tokens(name: &str) -> bool {
    name == "model.embed_tokens.weight" || name == "lm_head.weight"
}

/// Whether a tensor makes keys or values.
fn is_of_keys(name: &str) -> bool {
    [".k_proj.", ".v_proj."].into_iter().any(|projection| name.contains(projection))
}

/// How ranks share each tensor, in the order of the layout.
fn shardings(config: &Config) -> Vec<Sharding> {
    let mut all = vec![Sharding::Outputs];
    for index in 0..config.num_layers() {
        all.extend(config.layer_tensors(index).iter().map(|tensor| tensor.sharding));
    }
    let layout = Layout::new(config);
    let tail = layout.specs()[all.len()..].iter();
    // The head has the rows of the embedding.
    all.extend(tail.map(
        |spec| {
            if is_of_tokens(&spec.name) { Sharding::Outputs } else { Sharding::Replicated }
        },
    ));
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
        vocab_size: even_shards(config.vocab_size, degree)[position.rank].len(),
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
    if config.reduction != Reduction::Tree {
        return refused(
            "its sums have no order that is the same for all degrees; set model.reduction = \"tree\"".into(),
        );
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
            let fits = (1..degree).rev().find(|fewer| fewer.is_power_of_two() && nearest(*fewer));
            let fits = fits.unwrap_or(1);
            refused(format!("its {size} {what} are not divisible by {degree}; {fits} divides everything"))
        }
    }
}

/// What a degree divides, with its name.
fn divisors(config: &Config, copies: usize) -> Vec<(&'static str, usize)> {
    let mut all = vec![("query heads", config.num_heads), ("key-value heads", config.num_kv_heads * copies)];
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
        for config in of_every_family() {
            let config = Config { reduction: Reduction::Tree, ..config };
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
        assert!(shared >= 10, "{shared} families and degrees are shared");
    }

    /// Eight ranks of a model with two key-value heads: four have a copy of one, with the queries that read it.
    #[test]
    fn ranks_of_a_sampler_may_be_more_than_key_value_heads() {
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
        for rank in 0..8 {
            let shard = ModelShard::of_sampler(&config, Position { rank, world: 8 }).unwrap();
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
        let error = |world| ModelShard::new(&config, Position { rank: 0, world }).unwrap_err().to_string();
        assert!(error(8).contains("2 key-value heads are not divisible by 8; 2 divides everything"));
        let sampler =
            ModelShard::of_sampler(&config, Position { rank: 0, world: 16 }).unwrap_err().to_string();
        assert!(sampler.contains("8 query heads are not divisible by 16; 8 divides everything"), "{sampler}");
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
        assert!(error(&chain, 2).contains("set model.reduction = \"tree\""));
        assert!(error(&tree, 3).contains("power of two"));
        let text = error(&tree, 4);
        assert!(text.contains("2 key-value heads are not divisible by 4; 2 divides everything"), "{text}");
    }
}
