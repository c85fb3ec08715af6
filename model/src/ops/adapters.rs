//! Low-rank factors of linear layers whose rows have different adapters, so that many adapters of one base compute in one batch
//! (Punica, Chen et al. 2023, arXiv 2310.18547).
//!
//! Neighbouring rows with one adapter are one product. With rows sorted by adapter a layer does one product per adapter beside that of
//! its weight.
//!
//! Invariant: the result of a row depends on its own adapter alone, bit for bit.

use std::ops::Range;
use std::sync::Arc;

use super::gemm::{ProductOut, StridedMatrix};
use crate::{LowRank, ThreadPool};

/// How a linear layer computes its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearPass<'a> {
    pub(crate) pool: &'a ThreadPool,
    /// `[T]` the adapter of every row; empty if no row has one.
    pub(crate) adapters: &'a [Option<usize>],
}

impl<'a> From<&'a ThreadPool> for LinearPass<'a> {
    /// Rows without adapters.
    fn from(pool: &'a ThreadPool) -> Self {
        Self { pool, adapters: &[] }
    }
}

/// Low-rank factors of some outputs of a layer.
#[derive(Clone, Debug)]
pub(crate) struct LinearFactors {
    /// The adapter of the rows that have them; `None` for the factors of rows without one.
    pub(crate) adapter: Option<usize>,
    pub(crate) outputs: Range<usize>,
    pub(crate) low_rank: Arc<LowRank>,
    /// Index of the pair.
    pub(crate) pair: usize,
}

impl LinearFactors {
    /// Those of `adapter` for a layer whose weight has the range `weight` in the flat parameters.
    pub(crate) fn of(factors: &Arc<LowRank>, adapter: Option<usize>, weight: &Range<usize>) -> Vec<Self> {
        let pairs = factors.pairs();
        // They are in the order of the layout; experts have tens of thousands.
        let first = pairs.partition_point(|pair| pair.weight.start < weight.start);
        let inside = pairs.iter().enumerate().skip(first);
        inside
            .take_while(|(_, pair)| pair.weight.start < weight.end)
            .filter(|(_, pair)| !pair.is_embedding)
            .map(|(index, pair)| {
                let first = (pair.weight.start - weight.start) / pair.columns;
                let outputs = first..first + pair.rows;
                Self { adapter, outputs, low_rank: Arc::clone(factors), pair: index }
            })
            .collect()
    }
}

/// Adds the products of `factors` with the rows of `x [T, in]` that have them to `out [T, output]`.
pub(crate) fn add_products(
    factors: &[LinearFactors],
    x: &[f32],
    out: &mut [f32],
    output: usize,
    on: LinearPass<'_>,
) {
    if factors.is_empty() || out.is_empty() {
        return;
    }
    let rows = out.len() / output;
    let input = x.len() / rows;
    let (mut rest, mut parts) = (out, Vec::new());
    for (adapter, run) in runs(on.adapters, rows) {
        let (own, after) = rest.split_at_mut(run.len() * output);
        rest = after;
        if factors.iter().any(|factors| factors.adapter == adapter) {
            parts.push((adapter, &x[run.start * input..run.end * input], own));
        }
    }
    on.pool.map(parts, |(adapter, x, out)| {
        let x = StridedMatrix::new(x, input);
        for LinearFactors { outputs, low_rank, pair, .. } in
            factors.iter().filter(|factors| factors.adapter == adapter)
        {
            let own = ProductOut::columns(out, output, std::slice::from_ref(outputs));
            own.into_iter().for_each(|own| low_rank.add_product(*pair, x, own));
        }
    });
}

/// Runs of neighbours among `rows` rows that have one adapter.
fn runs(adapters: &[Option<usize>], rows: usize) -> Vec<(Option<usize>, Range<usize>)> {
    if adapters.is_empty() {
        return vec![(None, 0..rows)];
    }
    let mut end = 0;
    let of_run = |run: &[Option<usize>]| {
        end += run.len();
        (run[0], end - run.len()..end)
    };
    adapters.chunk_by(|a, b| a == b).map(of_run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_with_one_adapter_are_one_run() {
        assert_eq!(runs(&[], 5), [(None, 0..5)]);
        let (a, b) = (Some(4), Some(0));
        assert_eq!(runs(&[a, a, None, b, a], 5), [(a, 0..2), (None, 2..3), (b, 3..4), (a, 4..5)]);
    }
}
