//! Ranks on devices that share the tokens of a pass: each computes neighbouring tokens of the pack, and for attention some heads of all
//! tokens (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv 2309.14509).
//!
//! Invariant: the tokens of a rank are a function of the pack, the model and the number of ranks, so that every rank knows those of all.

use std::ops::Range;
use std::sync::Arc;

use collective::{Collective, CollectiveError, even_shards};
use device::ops::heads::HeadShape;
use device::ops::rows::gather_rows;
use device::{Device, DeviceBuffer, Result, Storage, View};

use super::ranks::{DevicePassRanks, DeviceRanks};
use crate::decoder::context_rows;
use crate::{Config, Pack, Prediction};

/// The calls of the ranks that share the tokens of a pass.
#[derive(Clone, Debug)]
pub struct DeviceContextRanks {
    /// Of queries, keys, values and results.
    pub exchange: DeviceRanks,
    /// Of predictions, which are on the host.
    pub predictions: Arc<dyn Collective>,
    /// The configuration with all layers, if the decoder has those of a stage.
    pub all_layers: Option<Arc<Config>>,
    /// Ranks that share the weights.
    pub tensor: usize,
}

/// How ranks divide the tokens of a pack.
#[derive(Debug)]
pub(super) struct ContextPass {
    ranks: DeviceContextRanks,
    /// The tokens of each rank.
    rows: Vec<Range<usize>>,
}

/// How rows of heads go from ranks with tokens to ranks with heads, and back.
#[derive(Debug)]
pub(super) struct HeadExchange {
    ranks: DevicePassRanks,
    /// The calls of the ranks that share the tokens.
    calls: DeviceRanks,
    /// Of all ranks together.
    shape: HeadShape,
    rank: usize,
    /// The tokens of each rank.
    rows: Vec<Range<usize>>,
    projected: HeadOrder,
    results: HeadOrder,
}

/// The order of heads, as rows of `head_dim` values, on the way to ranks, and back in tokens.
#[derive(Debug)]
struct HeadOrder {
    to_ranks: DeviceBuffer<u32>,
    to_tokens: DeviceBuffer<u32>,
}

/// What heads are exchanged of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchanged {
    /// Queries, keys and values.
    Projected,
    /// Results.
    Results,
}

/// The targets that ranks predict, of the rows that they have.
#[derive(Debug)]
pub(super) struct DividedTargets {
    /// Numbers of targets, rank by rank.
    order: Vec<usize>,
    /// Places in `order` of each rank.
    of_ranks: Vec<Range<usize>>,
    rank: usize,
}

impl ContextPass {
    pub(super) fn new(ranks: &DeviceContextRanks, config: &Config, pack: &Pack) -> Self {
        let config = ranks.all_layers.as_deref().unwrap_or(config);
        let rows = context_rows(config, pack.segments(), ranks.predictions.world(), ranks.tensor);
        Self { ranks: ranks.clone(), rows }
    }

    /// The exchanges of the heads of all layers of `config`: one for each shape.
    pub(super) fn exchanges(
        &self,
        device: &Device,
        config: &Config,
        ranks: &DevicePassRanks,
    ) -> Result<Vec<HeadExchange>> {
        let mut shapes: Vec<HeadShape> =
            (0..config.num_layers()).map(|index| config.attention_rule(index).shape).collect();
        shapes.dedup();
        let rank = self.ranks.predictions.rank();
        let calls = &self.ranks.exchange;
        let exchange = |shape| HeadExchange::new(device, (ranks, calls), shape, (rank, &self.rows));
        shapes.into_iter().map(exchange).collect()
    }

    /// The tokens of this rank.
    pub(super) fn own(&self) -> Range<usize> {
        self.rows[self.ranks.predictions.rank()].clone()
    }

    /// Which rank predicts each of the targets with these `rows`.
    pub(super) fn divide(&self, rows: &[usize]) -> DividedTargets {
        let mut order = Vec::with_capacity(rows.len());
        let of_rank = |of: &Range<usize>| {
            let first = order.len();
            order.extend((0..rows.len()).filter(|at| of.contains(&rows[*at])));
            first..order.len()
        };
        let of_ranks = self.rows.iter().map(of_rank).collect();
        DividedTargets { of_ranks, order, rank: self.ranks.predictions.rank() }
    }

    /// The predictions of all `targets`, of which this rank has `own`.
    ///
    /// # Errors
    /// If a rank is gone or late.
    pub(super) fn gather(&self, own: &[Prediction], targets: &DividedTargets) -> Result<Vec<Prediction>> {
        let each = Prediction::NUMBERS;
        let cuts = targets.of_ranks.iter().map(|of| of.start * each..of.end * each);
        let mut all = vec![0.0; targets.order.len() * each];
        self.ranks
            .predictions
            .all_gather(&Prediction::to_numbers(own), &cuts.collect::<Vec<_>>(), &mut all)
            .map_err(CollectiveError::into_device_error)?;
        let mut predictions = vec![Prediction::default(); targets.order.len()];
        for (at, prediction) in targets.order.iter().zip(Prediction::of_numbers(&all)) {
            predictions[*at] = prediction;
        }
        Ok(predictions)
    }
}

impl DividedTargets {
    /// Numbers of the targets of this rank.
    pub(super) fn own(&self) -> &[usize] {
        &self.order[self.of_ranks[self.rank].clone()]
    }
}

impl HeadExchange {
    fn new(
        device: &Device,
        (ranks, calls): (&DevicePassRanks, &DeviceRanks),
        shape: HeadShape,
        (rank, rows): (usize, &[Range<usize>]),
    ) -> Result<Self> {
        let world = rows.len();
        let order = |groups: &[usize]| -> Result<HeadOrder> {
            let to_ranks = order_of_heads(groups, world, rows[rank].len());
            let mut to_tokens = vec![0; to_ranks.len()];
            (0..).zip(&to_ranks).for_each(|(at, from)| to_tokens[*from as usize] = at);
            Ok(HeadOrder { to_ranks: device.upload(&to_ranks)?, to_tokens: device.upload(&to_tokens)? })
        };
        Ok(Self {
            projected: order(&[shape.heads, shape.kv_heads, shape.kv_heads])?,
            results: order(&[shape.heads])?,
            ranks: ranks.clone(),
            calls: calls.clone(),
            rows: rows.to_vec(),
            shape,
            rank,
        })
    }

    /// The heads of all ranks together.
    pub(super) fn shape(&self) -> HeadShape {
        self.shape
    }

    /// The heads of this rank.
    pub(super) fn own_shape(&self) -> HeadShape {
        let HeadShape { heads, kv_heads, head_dim } = self.shape;
        HeadShape { heads: heads / self.rows.len(), kv_heads: kv_heads / self.rows.len(), head_dim }
    }

    /// Numbers of the query heads of this rank.
    pub(super) fn own_heads(&self) -> Range<usize> {
        even_shards(self.shape.heads, self.rows.len())[self.rank].clone()
    }

    /// Heads of all tokens, `[T, width of own]`, from all heads of the tokens of this rank, `x [own, width]`.
    pub(super) fn to_heads<T: Storage>(
        &self,
        device: &Device,
        x: View<'_, T>,
        what: Exchanged,
    ) -> Result<DeviceBuffer<T>> {
        let mut ordered = device.uninit(x.len())?;
        gather_rows(device, x, self.order(what).to_ranks.all(), self.shape.head_dim, ordered.all_mut())?;
        let [of_own, of_all] = self.places(what);
        self.ranks.all_to_all(&self.calls, device, ordered.all(), &of_own, &of_all)
    }

    /// All heads of the tokens of this rank, `[own, width]`, from some heads of all tokens, `x [T, width of own]`.
    pub(super) fn to_tokens<T: Storage>(
        &self,
        device: &Device,
        x: View<'_, T>,
        what: Exchanged,
    ) -> Result<DeviceBuffer<T>> {
        let [of_own, of_all] = self.places(what);
        let received = self.ranks.all_to_all(&self.calls, device, x, &of_all, &of_own)?;
        let mut out = device.uninit(received.len())?;
        let order = self.order(what).to_tokens.all();
        gather_rows(device, received.all(), order, self.shape.head_dim, out.all_mut())?;
        Ok(out)
    }

    fn order(&self, what: Exchanged) -> &HeadOrder {
        match what {
            Exchanged::Projected => &self.projected,
            Exchanged::Results => &self.results,
        }
    }

    /// Where the values of each rank lie: of the tokens of this rank, and of all tokens.
    fn places(&self, what: Exchanged) -> [Vec<Range<usize>>; 2] {
        let own = self.own_shape();
        let width = match what {
            Exchanged::Projected => own.width(),
            Exchanged::Results => own.query_width(),
        };
        let each = self.rows[self.rank].len() * width;
        let of_own = (0..self.rows.len()).map(|rank| rank * each..(rank + 1) * each);
        let of_all = self.rows.iter().map(|rows| rows.start * width..rows.end * width);
        [of_own.collect(), of_all.collect()]
    }
}

/// Rows of the heads of `tokens` tokens, in which `groups` of heads follow one another, in the order of the ranks that each group is
/// divided among.
fn order_of_heads(groups: &[usize], world: usize, tokens: usize) -> Vec<u32> {
    let slots: usize = groups.iter().sum();
    let mut order = Vec::with_capacity(tokens * slots);
    for rank in 0..world {
        for token in 0..tokens {
            let mut first = token * slots;
            for heads in groups {
                let own = even_shards(*heads, world)[rank].clone();
                order.extend(own.map(|head| (first + head) as u32));
                first += heads;
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_go_to_their_ranks_in_the_order_of_tokens() {
        // Two tokens with two queries, and two keys; each of two ranks has one of both.
        assert_eq!(order_of_heads(&[2, 2], 2, 2), [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(order_of_heads(&[4], 2, 1), [0, 1, 2, 3]);
        assert!(order_of_heads(&[4], 2, 0).is_empty());
    }
}
