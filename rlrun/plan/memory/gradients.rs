//! The memory of gradients: of the micro-batch in its backward pass, of the tree over leaves, and between ranks.

use model::Layout;
use trainer::plan::sum_buffers;

use super::super::BatchPlan;
use super::{F32, product};
use crate::recipe::Recipe;

/// Bytes of the gradients of all ranks of a trainer of this `layout`; with an adapter that has `changed` values, of these.
pub(super) fn bytes(recipe: &Recipe, layout: &Layout, changed: Option<u64>) -> u64 {
    let (world, zero) = (recipe.trainer.world as u64, recipe.trainer.zero);
    let all = product(&[F32, layout.len() as u64]);
    let owned = changed.map_or(all, |changed| product(&[F32, changed]));
    let leaves = recipe.learner().step_leaves();
    let slots = leaves / recipe.trainer.world.max(1);
    let several = BatchPlan::of(recipe).max_tokens.div_ceil(leaves.max(1) as u64)
        > recipe.trainer.microbatch_tokens as u64;
    let chained = several && zero >= 2;
    let sums = product(&[owned, sum_buffers(slots, if chained { 2 } else { 1 }) as u64]);
    let on_device = recipe.devices().trains();
    if world == 1 {
        let current = match changed {
            _ if on_device => return all,
            // The first leaf of two is written where it is summed.
            None if slots == 1 && !chained => 0,
            _ if several && zero < 2 => all,
            _ => units(layout, 1),
        };
        return sums.saturating_add(current);
    }
    if zero >= 2 {
        // The layers whose gradients are being reduced, wait, and are being computed.
        return sums.saturating_add(product(&[world, units(layout, 3)]));
    }
    let waiting = product(&[owned, u64::from(slots.max(1).ilog2())]);
    owned.saturating_add(product(&[world, all.saturating_add(waiting)]))
}

/// Bytes of both ends of the model and of some layers.
pub(super) fn units(layout: &Layout, layers: usize) -> u64 {
    let layer = layout.layers().iter().map(std::ops::Range::len).max().unwrap_or(0);
    let ends = layout.len() - layout.layers().iter().map(std::ops::Range::len).sum::<usize>();
    product(&[F32, ends.saturating_add(layers * layer) as u64])
}

#[cfg(test)]
mod tests {
    use model::{Config, Sizes};

    use super::*;
    use crate::plan::tests::recipe;

    #[test]
    fn more_leaves_of_a_rank_take_a_buffer_for_each_doubling() {
        let layout = Layout::new(&Config::fresh(&Sizes {
            vocab_size: 10,
            hidden_size: 8,
            intermediate_size: 16,
            num_layers: 2,
            num_heads: 2,
            num_kv_heads: 2,
            max_position_embeddings: 64,
        }));
        let all = 4 * layout.len() as u64;
        let of = |world, leaves, zero, microbatch_tokens| {
            let mut recipe = recipe();
            (recipe.trainer.world, recipe.trainer.leaves) = (world, leaves);
            (recipe.trainer.zero, recipe.trainer.microbatch_tokens) = (zero, microbatch_tokens);
            bytes(&recipe, &layout, None)
        };
        let (one, many) = (100_000, 100);
        assert_eq!([of(1, 1, 1, one), of(1, 1, 1, many)], [all, all]);
        assert_eq!([of(1, 4, 1, one), of(1, 4, 1, many)], [2 * all + units(&layout, 1), 3 * all]);
        assert_eq!(of(1, 4, 2, many), 3 * all + units(&layout, 1));
        assert_eq!([of(2, 4, 1, many), of(4, 4, 1, many)], [all + 2 * 2 * all, all + 4 * all]);
    }
}
