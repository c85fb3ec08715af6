//! Experts that ranks divide (expert parallel; GShard, Lepikhin et al. 2020, arXiv 2006.16668).
//!
//! A rank has some neighbouring experts. The rows of tokens go to the ranks of their experts, and results come back: dispatch and
//! combine, each an all-to-all. Routes, weights of slots and sums of results are of the rank that has the token.
//!
//! Invariant: a row of any product depends on nothing but itself, so that results have the bits of one rank. The gradients of the
//! weights of an expert are a sum for each section of the tokens of each rank, in the order of tokens, and a balanced binary tree over
//! these sums, as a reduce-scatter gives it.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Result;
use collective::Collective;

use super::block::{GradientJob, OperandGradients};
use super::feed_forward::{FeedForwardOperands, FeedForwardWeights, GatedOperands, parts};
use crate::layer::Operand;
use crate::low_rank::WeightGradient;
use crate::ops::experts::ExpertRoutes;
use crate::pass_ranks::failed;

/// The rows that the experts of this rank compute: by the rank of the token, then by expert, then in the order of tokens.
#[derive(Clone, Debug)]
pub(super) struct ExpertRows {
    /// Experts with the rows that are theirs, none of them empty, in the order of rows.
    runs: Vec<(usize, Range<usize>)>,
    len: usize,
    /// `None` if this rank has all experts.
    exchange: Option<RowExchange>,
}

/// What ranks that divide experts send each other, in rows.
#[derive(Clone, Debug)]
struct RowExchange {
    ranks: Arc<dyn Collective>,
    /// Rows of the tokens of this rank, by the rank of their experts.
    sent: Vec<Range<usize>>,
    /// Rows of the experts of this rank, by the rank of their tokens.
    received: Vec<Range<usize>>,
}

/// A sum of gradients as a balanced binary tree whose left part is the largest power of two. What is absent is zero.
#[derive(Default)]
struct LeafSums {
    waiting: Vec<Option<Vec<f32>>>,
    leaves: usize,
}

impl ExpertRows {
    /// The rows for the `routes` of the tokens of this rank; all `ranks` that divide the experts make the call.
    pub(super) fn new(routes: &ExpertRoutes, ranks: Option<&Arc<dyn Collective>>) -> Result<Self> {
        let Some(ranks) = ranks else {
            return Ok(Self { runs: routes.busy().collect(), len: routes.len(), exchange: None });
        };
        let (rank, world, load) = (ranks.rank(), ranks.world(), routes.load());
        let each = load.len() / world;
        let of_peers: Vec<_> = (0..world).map(|peer| peer * each..(peer + 1) * each).collect();
        // Values are moved unchanged, whatever their bits mean.
        let counts: Vec<f32> = load.iter().map(|rows| f32::from_bits(*rows as u32)).collect();
        let mut of_own = vec![0.0; load.len()];
        ranks.all_to_all(&counts, &of_peers, &mut of_own, &of_peers).map_err(failed)?;
        let (mut runs, mut received, mut end) = (Vec::new(), Vec::with_capacity(world), 0);
        for counts in of_own.chunks_exact(each) {
            let start = end;
            for (expert, count) in (rank * each..).zip(counts) {
                let rows = end..end + count.to_bits() as usize;
                end = rows.end;
                if !rows.is_empty() {
                    runs.push((expert, rows));
                }
            }
            received.push(start..end);
        }
        let of_peer = |experts: Range<usize>| routes.of_experts(experts);
        let sent = of_peers.into_iter().map(of_peer).collect();
        Ok(Self { runs, len: end, exchange: Some(RowExchange { ranks: Arc::clone(ranks), sent, received }) })
    }

    /// Number of rows.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Experts with the rows that are theirs, none of them empty, in the order of rows.
    pub(super) fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.runs.iter().cloned()
    }

    /// Whether they are of the tokens of several ranks.
    pub(super) fn are_received(&self) -> bool {
        self.exchange.is_some()
    }

    /// Those of the tokens of `rank` that are of `expert`.
    fn of(&self, rank: usize, expert: usize) -> Range<usize> {
        let inside = self.exchange.as_ref().map_or(0..self.len, |exchange| exchange.received[rank].clone());
        let mut runs = self.runs.iter().filter(|(of, rows)| *of == expert && inside.contains(&rows.start));
        runs.next().map_or(0..0, |(_, rows)| rows.clone())
    }

    /// Sends the grouped rows of this rank's tokens, `x [rows, width]`, to their experts: `[own rows, width]`.
    pub(super) fn dispatch(&self, x: Vec<f32>, width: usize) -> Result<Vec<f32>> {
        match &self.exchange {
            None => Ok(x),
            Some(RowExchange { ranks, sent, received }) => exchanged(&**ranks, &x, [sent, received], width),
        }
    }

    /// Sends the results of own rows, `x [own rows, width]`, back: `[rows, width]` of the grouped rows of this rank's tokens.
    pub(super) fn combine(&self, x: Vec<f32>, width: usize) -> Result<Vec<f32>> {
        match &self.exchange {
            None => Ok(x),
            Some(RowExchange { ranks, sent, received }) => exchanged(&**ranks, &x, [received, sent], width),
        }
    }

    /// [`Self::dispatch`] of rows with one more value each, `of_rows [rows]`.
    pub(super) fn dispatch_with(
        &self,
        x: Vec<f32>,
        of_rows: Vec<f32>,
        width: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        self.with(x, of_rows, width, Self::dispatch)
    }

    /// [`Self::combine`] of rows with one more value each, `of_rows [own rows]`.
    pub(super) fn combine_with(
        &self,
        x: Vec<f32>,
        of_rows: Vec<f32>,
        width: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        self.with(x, of_rows, width, Self::combine)
    }

    fn with(
        &self,
        x: Vec<f32>,
        of_rows: Vec<f32>,
        width: usize,
        call: impl Fn(&Self, Vec<f32>, usize) -> Result<Vec<f32>>,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        if self.exchange.is_none() {
            return Ok((x, of_rows));
        }
        let mut both = Vec::with_capacity(x.len() + of_rows.len());
        for (row, value) in x.chunks_exact(width).zip(of_rows) {
            both.extend_from_slice(row);
            both.push(value);
        }
        drop(x);
        let both = call(self, both, width + 1)?;
        let rows = || both.chunks_exact(width + 1);
        Ok((rows().flat_map(|row| &row[..width]).copied().collect(), rows().map(|row| row[width]).collect()))
    }
}

/// The rows that `ranks` send this one, of `x [rows, width]`; `ranges` are of rows, sent and received.
fn exchanged(
    ranks: &dyn Collective,
    x: &[f32],
    ranges: [&[Range<usize>]; 2],
    width: usize,
) -> Result<Vec<f32>> {
    let [sends, receives] = ranges
        .map(|ranges| ranges.iter().map(|rows| rows.start * width..rows.end * width).collect::<Vec<_>>());
    let mut received = vec![0.0; receives.last().map_or(0, |last| last.end)];
    ranks.all_to_all(x, &sends, &mut received, &receives).map_err(failed)?;
    Ok(received)
}

impl LeafSums {
    fn push(&mut self, mut sum: Option<Vec<f32>>) {
        for _ in 0..self.leaves.trailing_ones() {
            sum = joined(self.waiting.pop().flatten(), sum);
        }
        self.waiting.push(sum);
        self.leaves += 1;
    }

    fn total(mut self) -> Option<Vec<f32>> {
        let mut sum = self.waiting.pop().flatten();
        while let Some(left) = self.waiting.pop() {
            sum = joined(left, sum);
        }
        sum
    }
}

/// `left + right`
fn joined(left: Option<Vec<f32>>, right: Option<Vec<f32>>) -> Option<Vec<f32>> {
    let (mut sum, other) = match (left, right) {
        (Some(left), right) => (left, right),
        (None, right) => (right?, None),
    };
    match other {
        Some(other) => sum.iter_mut().zip(other).for_each(|(sum, value)| *sum += value),
        // The sum of a zero and a negative zero is zero.
        None => sum.iter_mut().for_each(|sum| *sum += 0.0),
    }
    Some(sum)
}

/// The gradients of one expert: projection and bias of gate and up, and of down.
struct ExpertGradients<'a>([&'a mut [f32]; 4]);

impl ExpertGradients<'_> {
    /// Those of a leaf, one after the other: of `rows` of the operands.
    fn leaf(&self, of: &GatedOperands, rows: &Range<usize>) -> Result<Option<Vec<f32>>> {
        if rows.is_empty() {
            return Ok(None);
        }
        let mut leaf = vec![0.0; self.0.iter().map(|part| part.len()).sum()];
        let mut rest = &mut leaf[..];
        let mut next = |len: usize| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            part
        };
        let [gate_up, gate_up_bias, down, down_bias] = [0, 1, 2, 3].map(|part| next(self.0[part].len()));
        let (mut gate_up, mut down) = (WeightGradient::Whole(gate_up), WeightGradient::Whole(down));
        of.add_gradients([&mut gate_up, &mut down], [gate_up_bias, down_bias], rows)?;
        Ok(Some(leaf))
    }

    fn add(&mut self, sum: &[f32]) {
        let mut rest = sum;
        for part in &mut self.0 {
            let (own, after) = rest.split_at(part.len());
            rest = after;
            part.iter_mut().zip(own).for_each(|(gradient, value)| *gradient += value);
        }
    }
}

impl FeedForwardWeights {
    /// The jobs that add the gradients of the experts of this rank, over the tokens of all ranks that divide the experts; `sections`
    /// has the operands of each section of the tokens. None if this rank has all experts.
    pub(super) fn shared_gradient_jobs<'a>(
        &self,
        sections: &'a [FeedForwardOperands],
        gradients: &mut OperandGradients<'a>,
    ) -> Vec<GradientJob<'a>> {
        let (Self::Experts(weights), Some(received)) =
            (self, sections.iter().map(FeedForwardOperands::received).collect::<Option<Vec<_>>>())
        else {
            return Vec::new();
        };
        let Some(ranks) = &weights.divided else { return Vec::new() };
        let (count, world) = (weights.spec.count, ranks.world());
        let own = |operand: Operand, gradients: &mut OperandGradients<'a>| {
            let each = count / world;
            parts(gradients.vector(operand), count).into_iter().skip(ranks.rank() * each).take(each)
        };
        let matrices = own(Operand::GateUp, gradients).zip(own(Operand::Down, gradients));
        let biases = own(Operand::GateUpBias, gradients).zip(own(Operand::DownBias, gradients));
        let first = ranks.rank() * (count / world);
        let mut jobs: Vec<GradientJob<'a>> = Vec::new();
        for (expert, ((gate_up, down), (gate_up_bias, down_bias))) in (first..).zip(matrices.zip(biases)) {
            let received = received.clone();
            let mut of_expert = ExpertGradients([gate_up, gate_up_bias, down, down_bias]);
            jobs.push(Box::new(move || {
                let mut sums = LeafSums::default();
                for rank in 0..world {
                    for (operands, rows) in &received {
                        sums.push(of_expert.leaf(operands, &rows.of(rank, expert))?);
                    }
                }
                if let Some(total) = sums.total() {
                    of_expert.add(&total);
                }
                Ok(())
            }));
        }
        jobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum whose left part is the largest power of two.
    fn tree(values: &[f32]) -> f32 {
        match values {
            [one] => *one,
            _ => {
                let left = values.len().next_power_of_two() / 2;
                tree(&values[..left]) + tree(&values[left..])
            }
        }
    }

    #[test]
    fn leaves_are_summed_as_ranks_sum_them_and_absent_ones_are_zero() {
        for count in 1..10 {
            let values: Vec<f32> =
                (0..count).map(|at| if at % 4 == 2 { 0.0 } else { 1e-3 + 10.0_f32.powi(at % 5) }).collect();
            let mut sums = LeafSums::default();
            values.iter().for_each(|value| sums.push((*value != 0.0).then(|| vec![*value])));
            assert_eq!(sums.total(), Some(vec![tree(&values)]), "{count}");
        }
        let mut sums = LeafSums::default();
        [None, Some(vec![-0.0]), None].into_iter().for_each(|leaf| sums.push(leaf));
        assert_eq!(sums.total().map(|sum| sum[0].to_bits()), Some(0));
    }
}
