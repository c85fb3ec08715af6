//! The shards of the ranks: every unit is cut into one contiguous shard per rank.
//!
//! A cut is possible where the optimizer allows it: between tensors, or between two blocks of 256 values of a tensor,
//! counted from its start, but never within a matrix that Muon or Dion updates as a whole. The buffer of a rank has its
//! shards of all units, concatenated in the order of the units.
//!
//! Invariant: the cuts are a function of the tensors, the optimizer and the number of ranks, so that every rank knows
//! the shards of the others. Every value has one owner.

use std::ops::Range;

use model::{Layout, ParameterSpec};

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
    units: Vec<SharedUnit>,
    /// Fragments of every rank, in the order of its buffer.
    fragments: Vec<Vec<Fragment>>,
}

/// One unit with its shards.
#[derive(Clone, Debug)]
struct SharedUnit {
    /// Range among all values.
    place: Range<usize>,
    /// Range of each rank's shard, from the start of the unit.
    cuts: Vec<Range<usize>>,
    /// Start of the shard in the buffer of each rank.
    starts: Vec<usize>,
}

impl Shards {
    /// The units of a model: the embedding, the layers, the tail, in this order.
    pub(crate) fn of_model(layout: &Layout, world: usize, config: &OptimizerConfig) -> Self {
        let units: Vec<_> = layout.units().map(|unit| layout.unit(unit)).collect();
        Self::new(layout.specs(), &units, world, config)
    }

    /// The units of an adapter: its tensors of each unit of the model.
    pub(crate) fn of_adapter(
        layout: &Layout,
        adapter: &Adapter,
        world: usize,
        config: &OptimizerConfig,
    ) -> Self {
        let within = |unit| adapter.factors().within(&layout.unit(unit));
        let units: Vec<_> = layout.units().map(within).collect();
        Self::new(adapter.specs(), &units, world, config)
    }

    /// Shards consecutive `units`, which consist of the tensors `specs`.
    fn new(specs: &[ParameterSpec], units: &[Range<usize>], world: usize, config: &OptimizerConfig) -> Self {
        let mut shards = Self { units: Vec::with_capacity(units.len()), fragments: vec![Vec::new(); world] };
        let mut owned = vec![0; world];
        for place in units {
            let inside: Vec<(usize, &ParameterSpec)> =
                specs.iter().enumerate().filter(|(_, spec)| place.contains(&spec.offset)).collect();
            let mut cuts = Vec::with_capacity(world);
            let mut from = place.start;
            for rank in 0..world {
                let wanted = place.start + place.len() * (rank + 1) / world;
                let to = if rank + 1 == world { place.end } else { cut(&inside, wanted, config).max(from) };
                cuts.push(from - place.start..to - place.start);
                shards.fragments[rank].extend(inside.iter().filter_map(|(tensor, spec)| {
                    let (start, end) = (from.max(spec.offset), to.min(spec.range().end));
                    let within = start.checked_sub(spec.offset)?..end.checked_sub(spec.offset)?;
                    (start < end).then_some(Fragment { tensor: *tensor, within })
                }));
                from = to;
            }
            shards.units.push(SharedUnit { place: place.clone(), starts: owned.clone(), cuts });
            let cuts = shards.units.last().into_iter().flat_map(|unit| &unit.cuts);
            owned.iter_mut().zip(cuts).for_each(|(owned, cut)| *owned += cut.len());
        }
        shards
    }

    /// Number of ranks.
    pub(crate) fn world(&self) -> usize {
        self.fragments.len()
    }

    /// Number of units.
    pub(crate) fn units(&self) -> usize {
        self.units.len()
    }

    /// Range of a unit among all values.
    pub(crate) fn place(&self, unit: usize) -> Range<usize> {
        self.units[unit].place.clone()
    }

    /// Range of each rank's shard of a unit, from the start of the unit.
    pub(crate) fn cuts(&self, unit: usize) -> &[Range<usize>] {
        &self.units[unit].cuts
    }

    /// Range of a rank's shard of a unit, among all values.
    pub(crate) fn owned(&self, rank: usize, unit: usize) -> Range<usize> {
        let SharedUnit { place, cuts, .. } = &self.units[unit];
        place.start + cuts[rank].start..place.start + cuts[rank].end
    }

    /// Range of a rank's shard of a unit in the rank's buffer.
    pub(crate) fn packed(&self, rank: usize, unit: usize) -> Range<usize> {
        let SharedUnit { cuts, starts, .. } = &self.units[unit];
        starts[rank]..starts[rank] + cuts[rank].len()
    }

    /// Length of the rank's buffer.
    pub(crate) fn len(&self, rank: usize) -> usize {
        self.units.iter().map(|unit| unit.cuts[rank].len()).sum()
    }

    /// The fragments of a rank, in the order of its buffer.
    pub(crate) fn fragments(&self, rank: usize) -> &[Fragment] {
        &self.fragments[rank]
    }

    /// The rank's shards of `values`, which are all, one after the other.
    pub(crate) fn pack(&self, rank: usize, values: &[f32]) -> Vec<f32> {
        let mut own = Vec::with_capacity(self.len(rank));
        (0..self.units()).for_each(|unit| own.extend_from_slice(&values[self.owned(rank, unit)]));
        own
    }
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
    use model::{Config, Sizes};
    use proptest::prelude::*;

    use super::*;
    use crate::optimizer::OptimizerKind;

    fn layout(hidden: usize, layers: usize) -> Layout {
        Layout::new(&Config::fresh(&Sizes {
            vocab_size: 50,
            hidden_size: hidden,
            intermediate_size: 3 * hidden,
            num_layers: layers,
            num_heads: 2,
            num_kv_heads: 1,
            max_position_embeddings: 8,
        }))
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
            let shards = Shards::of_model(&layout, world, &config);
            let mut owners = vec![0; layout.len()];
            for rank in 0..world {
                let mut at = 0;
                for unit in 0..shards.units() {
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
            let shards = Shards::of_model(&layout, world, &config);
            for unit in 0..shards.units() {
                let even = shards.place(unit).len() / world;
                for cut in shards.cuts(unit) {
                    prop_assert!(cut.len().abs_diff(even) <= BLOCK + 1, "{} of {even}", cut.len());
                }
            }
        }
    }
}
