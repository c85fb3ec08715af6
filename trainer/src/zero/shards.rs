//! The shards of the ranks: every unit is cut into one contiguous shard per rank, or into ranges that are cut so.
//!
//! A unit is one range, unless ranks divide the experts of a layer: then every operand of all experts is a range of its own, and so is
//! what lies before, between and behind them. Ranks `m`, `m + n`, `m + 2 n`... have part `m` of the experts if `n` ranks divide them, and
//! each of them has a shard of it.
//!
//! A cut is possible where the optimizer allows it: between tensors, or between two blocks of 256 values of a tensor,
//! counted from its start, but never within a matrix that Muon or Dion updates as a whole. The buffer of a rank has its
//! shards of all ranges, concatenated in their order.
//!
//! Invariant: the cuts are a function of the tensors, the optimizer and the number of ranks, so that every rank knows
//! the shards of the others. Every value has one owner.

use std::ops::Range;

use model::{Layout, ParameterSpec, Unit};

use crate::lora::Adapter;
use crate::moments::BLOCK;
use crate::optimizer::OptimizerConfig;

/// A part of a tensor that one rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    /// Index of the tensor.
    pub(crate) tensor: usize,
    /// Range of values, from the start of the tensor.
    pub(crate) within: Range<usize>,
}

/// The shards of some tensors.
#[derive(Clone, Debug)]
pub(crate) struct Shards {
    ranges: Vec<SharedRange>,
    /// Those of each unit, at least one.
    of_units: Vec<Range<usize>>,
    /// Fragments of every rank, in the order of its buffer.
    fragments: Vec<Vec<Fragment>>,
    /// Ranks that divide experts; 1 if none do.
    expert: usize,
}

/// One range with its shards.
#[derive(Clone, Debug)]
struct SharedRange {
    /// Range among all values.
    place: Range<usize>,
    /// Whether it has experts that ranks divide: a rank needs the shards of those that have the same ones.
    divided: bool,
    /// Range of each rank's shard, from the start of the range.
    cuts: Vec<Range<usize>>,
    /// Start of the shard in the buffer of each rank.
    starts: Vec<usize>,
}

impl Shards {
    /// The units of a model: the embedding, the layers, the tail, in this order. `expert` of the ranks divide the experts, and as many
    /// after them divide them again.
    pub(crate) fn of_model(layout: &Layout, world: usize, config: &OptimizerConfig, expert: usize) -> Self {
        let ranges = |unit: Unit| {
            let Range { start, end } = layout.unit(unit);
            let experts = match unit {
                Unit::Layer(index) if expert > 1 => layout.expert_operands(index),
                _ => Vec::new(),
            };
            if experts.is_empty() {
                return vec![(start..end, false)];
            }
            let (mut ranges, mut from) = (Vec::new(), start);
            for of_operand in experts {
                let next = of_operand.end;
                ranges.extend([(from..of_operand.start, false), (of_operand, true)]);
                from = next;
            }
            ranges.push((from..end, false));
            ranges.retain(|(range, _)| !range.is_empty());
            ranges
        };
        let units: Vec<_> = layout.units().map(ranges).collect();
        Self::new(layout.specs(), &units, [world, expert], config)
    }

    /// The units of an adapter: its tensors of each unit of the model.
    pub(crate) fn of_adapter(
        layout: &Layout,
        adapter: &Adapter,
        world: usize,
        config: &OptimizerConfig,
    ) -> Self {
        let within = |unit| vec![(adapter.factors().within(&layout.unit(unit)), false)];
        let units: Vec<_> = layout.units().map(within).collect();
        Self::new(adapter.specs(), &units, [world, 1], config)
    }

    /// Shards the consecutive ranges of `units`, which consist of the tensors `specs`, among `world` ranks, of which `expert` divide the
    /// experts evenly.
    fn new(
        specs: &[ParameterSpec],
        units: &[Vec<(Range<usize>, bool)>],
        [world, expert]: [usize; 2],
        config: &OptimizerConfig,
    ) -> Self {
        let mut end = 0;
        let of_unit = |ranges: &Vec<_>| {
            end += ranges.len();
            end - ranges.len()..end
        };
        let of_units = units.iter().map(of_unit).collect();
        let mut shards = Self { ranges: Vec::new(), of_units, fragments: vec![Vec::new(); world], expert };
        let mut owned = vec![0; world];
        for (place, divided) in units.iter().flatten() {
            let inside: Vec<(usize, &ParameterSpec)> =
                specs.iter().enumerate().filter(|(_, spec)| place.contains(&spec.offset)).collect();
            let parts = if *divided { expert } else { 1 };
            let part = |index: usize| {
                let at = |index: usize| place.start + place.len() * index / parts;
                cuts(&inside, at(index)..at(index + 1), world / parts, config)
            };
            let of_parts: Vec<Vec<Range<usize>>> = (0..parts).map(part).collect();
            let mut cuts = Vec::with_capacity(world);
            for rank in 0..world {
                let Range { start: from, end: to } = of_parts[rank % parts][rank / parts];
                cuts.push(from - place.start..to - place.start);
                shards.fragments[rank].extend(inside.iter().filter_map(|(tensor, spec)| {
                    let (start, end) = (from.max(spec.offset), to.min(spec.range().end));
                    let within = start.checked_sub(spec.offset)?..end.checked_sub(spec.offset)?;
                    (start < end).then_some(Fragment { tensor: *tensor, within })
                }));
            }
            let starts = owned.clone();
            owned.iter_mut().zip(&cuts).for_each(|(owned, cut)| *owned += cut.len());
            shards.ranges.push(SharedRange { place: place.clone(), divided: *divided, cuts, starts });
        }
        shards
    }

    /// Number of ranks.
    pub(crate) fn world(&self) -> usize {
        self.fragments.len()
    }

    /// Number of ranges.
    pub(crate) fn ranges(&self) -> usize {
        self.ranges.len()
    }

    /// The ranges of a unit.
    pub(crate) fn of_unit(&self, unit: usize) -> Range<usize> {
        self.of_units[unit].clone()
    }

    /// A unit among all values.
    pub(crate) fn unit(&self, unit: usize) -> Range<usize> {
        let Range { start, end } = self.of_unit(unit);
        self.ranges[start].place.start..self.ranges[end - 1].place.end
    }

    /// A range among all values.
    pub(crate) fn place(&self, range: usize) -> Range<usize> {
        self.ranges[range].place.clone()
    }

    /// Whether a range has experts that ranks divide.
    pub(crate) fn is_divided(&self, range: usize) -> bool {
        self.ranges[range].divided
    }

    /// Ranks that divide experts; 1 if none do.
    pub(crate) fn expert(&self) -> usize {
        self.expert
    }

    /// Each rank's shard of a range, from its start.
    pub(crate) fn cuts(&self, range: usize) -> &[Range<usize>] {
        &self.ranges[range].cuts
    }

    /// The part of a range that `rank` needs, from the start of the range, and in the order of ranks the shards of those that need the
    /// same part, from the start of the part.
    pub(crate) fn needed(&self, rank: usize, range: usize) -> (Range<usize>, Vec<Range<usize>>) {
        let SharedRange { divided, cuts, .. } = &self.ranges[range];
        let parts = if *divided { self.expert } else { 1 };
        let same = || cuts.iter().skip(rank % parts).step_by(parts);
        let start = cuts[rank % parts].start;
        let end = same().next_back().map_or(start, |last| last.end);
        (start..end, same().map(|cut| cut.start - start..cut.end - start).collect())
    }

    /// A rank's shard of a range, among all values.
    pub(crate) fn owned(&self, rank: usize, range: usize) -> Range<usize> {
        let SharedRange { place, cuts, .. } = &self.ranges[range];
        place.start + cuts[rank].start..place.start + cuts[rank].end
    }

    /// A rank's shard of a range in the rank's buffer.
    pub(crate) fn packed(&self, rank: usize, range: usize) -> Range<usize> {
        let SharedRange { cuts, starts, .. } = &self.ranges[range];
        starts[rank]..starts[rank] + cuts[rank].len()
    }

    /// A rank's shards of all ranges of a unit in the rank's buffer.
    pub(crate) fn packed_unit(&self, rank: usize, unit: usize) -> Range<usize> {
        let Range { start, end } = self.of_unit(unit);
        self.packed(rank, start).start..self.packed(rank, end - 1).end
    }

    /// Length of the rank's buffer.
    pub(crate) fn len(&self, rank: usize) -> usize {
        self.ranges.iter().map(|range| range.cuts[rank].len()).sum()
    }

    /// The fragments of a rank, in the order of its buffer.
    pub(crate) fn fragments(&self, rank: usize) -> &[Fragment] {
        &self.fragments[rank]
    }

    /// The rank's shards of `values`, which are all, one after the other.
    pub(crate) fn pack(&self, rank: usize, values: &[f32]) -> Vec<f32> {
        let mut own = Vec::with_capacity(self.len(rank));
        (0..self.ranges()).for_each(|range| own.extend_from_slice(&values[self.owned(rank, range)]));
        own
    }
}

/// Cuts a range, which consists of the tensors `inside`, into `count` ranges as even as possible.
fn cuts(
    inside: &[(usize, &ParameterSpec)],
    Range { start, end }: Range<usize>,
    count: usize,
    config: &OptimizerConfig,
) -> Vec<Range<usize>> {
    let mut from = start;
    let next = |index: usize| {
        let to = match index == count {
            true => end,
            false => cut(inside, start + (end - start) * index / count, config).max(from),
        };
        std::mem::replace(&mut from, to)..to
    };
    (1..=count).map(next).collect()
}

/// The possible cut of these tensors of a unit that is nearest to `wanted`.
fn cut(tensors: &[(usize, &ParameterSpec)], wanted: usize, config: &OptimizerConfig) -> usize {
    let Some((_, spec)) = tensors.iter().find(|(_, spec)| spec.range().contains(&wanted)) else {
        return wanted;
    };
    let step = if config.moves_whole(spec) { spec.len() } else { BLOCK };
    let below = (wanted - spec.offset) / step * step;
    let above = (below + step).min(spec.len());
    let nearer = if wanted - spec.offset - below <= spec.offset + above - wanted { below } else { above };
    spec.offset + nearer
}

#[cfg(test)]
mod tests {
    use model::{Architecture, Config, Sizes};
    use proptest::prelude::*;

    use super::*;
    use crate::optimizer::OptimizerKind;

    fn config(hidden: usize, layers: usize) -> Config {
        Config::fresh(&Sizes {
            vocab_size: 50,
            hidden_size: hidden,
            intermediate_size: 3 * hidden,
            num_layers: layers,
            num_heads: 2,
            num_kv_heads: 1,
            max_position_embeddings: 8,
        })
    }

    fn layout(hidden: usize, layers: usize) -> Layout {
        Layout::new(&config(hidden, layers))
    }

    #[test]
    fn ranks_with_the_same_experts_share_them() {
        let layout = Layout::new(&config(24, 2).of_family(Architecture::Qwen3Moe).with_experts(4, 2));
        for kind in OptimizerKind::ALL {
            let config = OptimizerConfig::standard(kind, 0.95);
            let shards = Shards::of_model(&layout, 6, &config, 2);
            let mut owners = vec![0; layout.len()];
            for rank in 0..6 {
                for range in 0..shards.ranges() {
                    owners[shards.owned(rank, range)].iter_mut().for_each(|owners| *owners += 1);
                    let (part, cuts) = shards.needed(rank, range);
                    let place = shards.place(range);
                    let (count, index) = if shards.is_divided(range) { (3, rank / 2) } else { (6, rank) };
                    assert_eq!((cuts.len(), cuts[0].start, cuts[count - 1].end), (count, 0, part.len()));
                    let first = place.start + part.start;
                    let own = first + cuts[index].start..first + cuts[index].end;
                    assert_eq!(own, shards.owned(rank, range));
                    let half = place.len() / 2;
                    let expected = if shards.is_divided(range) {
                        rank % 2 * half..(rank % 2 + 1) * half
                    } else {
                        0..place.len()
                    };
                    assert_eq!(part, expected);
                }
                for Fragment { tensor, within } in shards.fragments(rank) {
                    let spec = &layout.specs()[*tensor];
                    assert!(
                        *within == (0..spec.len()) || !config.moves_whole(spec),
                        "{} {within:?}",
                        spec.name
                    );
                }
            }
            assert!(owners.iter().all(|owners| *owners == 1), "{kind:?}");
        }
    }

    #[test]
    fn ranks_that_divide_experts_have_theirs_whole() {
        let layout = Layout::new(&config(24, 2).of_family(Architecture::GptOss).with_experts(4, 2));
        for (world, kind) in
            [1, 2, 4].into_iter().flat_map(|world| OptimizerKind::ALL.map(|kind| (world, kind)))
        {
            let shards = Shards::of_model(&layout, world, &OptimizerConfig::standard(kind, 0.95), world);
            let (mut owners, mut experts) = (vec![0; layout.len()], 0);
            for rank in 0..world {
                for range in 0..shards.ranges() {
                    owners[shards.owned(rank, range)].iter_mut().for_each(|owners| *owners += 1);
                }
                for Fragment { tensor, within } in shards.fragments(rank) {
                    let spec = &layout.specs()[*tensor];
                    let Some((_, rest)) = spec.name.split_once("experts.") else { continue };
                    let expert: usize = rest.split('.').next().unwrap().parse().unwrap();
                    assert_eq!((expert * world / 4, within.clone()), (rank, 0..spec.len()), "{}", spec.name);
                    experts += 1;
                }
                let of_range = |range| shards.owned(rank, range).len();
                assert_eq!(shards.packed_unit(rank, 1).len(), shards.of_unit(1).map(of_range).sum::<usize>());
            }
            assert!(owners.iter().all(|owners| *owners == 1));
            assert_eq!(experts, 2 * 4 * 6, "tensors of 2 layers");
        }
    }

    proptest! {
        #[test]
        fn every_value_has_one_owner_and_cuts_are_allowed(
            half in 1..40usize,
            layers in 1..4usize,
            world in 1..7usize,
            kind in 0..OptimizerKind::ALL.len(),
        ) {
            let layout = layout(2 * half, layers);
            let config = OptimizerConfig::standard(OptimizerKind::ALL[kind], 0.95);
            let shards = Shards::of_model(&layout, world, &config, 1);
            let mut owners = vec![0; layout.len()];
            for rank in 0..world {
                let mut at = 0;
                for unit in 0..shards.ranges() {
                    prop_assert_eq!(shards.packed(rank, unit).start, at);
                    at = shards.packed(rank, unit).end;
                    owners[shards.owned(rank, unit)].iter_mut().for_each(|owners| *owners += 1);
                }
                prop_assert_eq!(at, shards.len(rank));
                let fragments = shards.fragments(rank);
                prop_assert_eq!(fragments.iter().map(|f| f.within.len()).sum::<usize>(), at);
                for Fragment { tensor, within } in fragments {
                    let spec = &layout.specs()[*tensor];
                    let whole = *within == (0..spec.len());
                    prop_assert!(whole || !config.moves_whole(spec), "{} {:?}", spec.name, within);
                    prop_assert!(within.start.is_multiple_of(BLOCK));
                    prop_assert!(within.end.is_multiple_of(BLOCK) || within.end == spec.len());
                }
            }
            prop_assert!(owners.iter().all(|owners| *owners == 1));
        }

        #[test]
        fn shares_are_even_to_a_block_per_unit(half in 1..60usize, world in 1..5usize) {
            let layout = layout(2 * half, 2);
            let config = OptimizerConfig::standard(OptimizerKind::Adamw, 0.95);
            let shards = Shards::of_model(&layout, world, &config, 1);
            for unit in 0..shards.ranges() {
                let even = shards.place(unit).len() / world;
                for cut in shards.cuts(unit) {
                    prop_assert!(cut.len().abs_diff(even) <= BLOCK + 1, "{} of {even}", cut.len());
                }
            }
        }
    }
}
