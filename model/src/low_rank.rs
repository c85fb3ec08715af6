//! Low-rank factors that are trained in place of frozen weights (LoRA, Hu et al. 2021, arXiv 2106.09685).
//!
//! ```text
//! W = W0 + s B A,   A [rank, in], B [out, rank]
//! ```
//!
//! For the input `x [T, in]` of a linear layer and the gradient `g [T, out]` of its result, the gradients are
//! `dA = s (g B)^T x` and `dB = s g^T (x A^T)`. The gradient of `W` is never formed: a backward pass has memory for the
//! factors, and does `rank (in + out)` multiply-adds per token in place of `in out`. The table `[vocabulary, hidden]` of an
//! embedding has the transpose of such a product: `A` is `[rank, vocabulary]` and `B` is `[hidden, rank]`, as in PEFT.
//!
//! Invariant: gradients are sums over tokens in their order, so that their bits do not depend on how tokens are shared among
//! threads. A weight without factors is frozen: it has no gradient.

use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::ThreadPool;
use crate::ops::embedding::embed_backward;
use crate::ops::gemm::{ProductOut, Right, product};
use crate::ops::linear::weight_gradient;
use crate::ops::values;
use crate::products::{StridedMatrix, multiply, multiply_add};

/// The factors of some weights of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRank {
    rank: usize,
    /// What the product `B A` is multiplied with.
    scale: f32,
    /// In the order of the model's layout.
    pairs: Vec<FactorPair>,
    /// All factors, `A` before `B`.
    values: Vec<f32>,
}

/// The factors of one weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FactorPair {
    /// The weight, in the flat parameters.
    pub weight: Range<usize>,
    /// `A [rank, in]`, in the flat factors.
    pub a: Range<usize>,
    /// `B [out, rank]`, directly after `A`.
    pub b: Range<usize>,
    /// Rows of the weight.
    pub rows: usize,
    /// Columns of the weight.
    pub columns: usize,
    /// Whether the weight is an embedding, which has the transpose of the product.
    pub is_embedding: bool,
}

impl LowRank {
    /// Factors of zero, in `pairs` in the order of the model's layout, one after the other.
    #[must_use]
    pub fn zeros(rank: usize, scale: f32, pairs: Vec<FactorPair>) -> Self {
        let values = vec![0.0; pairs.last().map_or(0, |last| last.b.end)];
        Self { rank, scale, pairs, values }
    }

    /// The factors of every weight that has some.
    #[must_use]
    pub fn pairs(&self) -> &[FactorPair] {
        &self.pairs
    }

    /// `[n]` all factors.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// `[n]` all factors, for updates in place.
    #[must_use]
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// The factors of the weight that has the value `place` of the flat parameters, if it has some.
    pub(crate) fn pair_of(&self, place: usize) -> Option<&FactorPair> {
        let after = self.pairs.partition_point(|pair| pair.weight.start <= place);
        self.pairs[..after].last().filter(|pair| pair.weight.contains(&place))
    }

    /// Rank of every pair.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// What the product `B A` is multiplied with.
    pub(crate) fn scale(&self) -> f32 {
        self.scale
    }

    /// Range among [`Self::values`] of the factors of the weights in the range `place` of the flat parameters.
    #[must_use]
    pub fn within(&self, place: &Range<usize>) -> Range<usize> {
        let mut before = self.pairs.iter().filter(|pair| pair.weight.start < place.start);
        let start = before.next_back().map_or(0, |pair| pair.b.end);
        let mut inside = self.pairs.iter().filter(|pair| place.contains(&pair.weight.start));
        start..inside.next_back().map_or(start, |pair| pair.b.end)
    }

    /// Writes `W = W0 + s B A` to the flat `parameters [n]` of the model. `base` gives the frozen `W0` of the pair of an index.
    ///
    /// # Panics
    /// If `parameters` or a frozen weight is of another model.
    pub fn merge<'a>(
        &self,
        parameters: &mut [f32],
        base: impl Fn(usize) -> &'a [f32] + Sync,
        pool: &ThreadPool,
    ) {
        let mut parts = Vec::with_capacity(self.pairs.len());
        let (mut rest, mut at) = (parameters, 0);
        for (index, pair) in self.pairs.iter().enumerate() {
            let (weight, after) = rest[pair.weight.start - at..].split_at_mut(pair.weight.len());
            parts.push((index, pair, weight));
            (rest, at) = (after, pair.weight.end);
        }
        pool.map(parts, |(index, pair, weight)| {
            let (a, b) = self.matrices(pair);
            if pair.is_embedding {
                multiply(a.transposed(), b.transposed(), weight);
            } else {
                multiply(b, a, weight);
            }
            let base = base(index);
            assert_eq!(base.len(), weight.len(), "the frozen weight is of the same model");
            weight.iter_mut().zip(base).for_each(|(w, base)| *w = base + self.scale * *w);
        });
    }

    /// Gradients of the factors of the weights in the range `place` of the flat parameters, from the gradients `of_weights
    /// [place]` of these weights: for passes that compute those.
    ///
    /// # Panics
    /// If `of_weights` has another length.
    #[must_use]
    pub fn projected(&self, place: &Range<usize>, of_weights: &[f32], pool: &ThreadPool) -> Vec<f32> {
        assert_eq!(of_weights.len(), place.len(), "they are the gradients of these weights");
        let mut gradients = vec![0.0; self.within(place).len()];
        let parts = self.gradients(place, &mut gradients);
        pool.map(parts, |FactorGradient { low_rank, pair, da, db }| {
            let (a, b) = low_rank.matrices(pair);
            let weight = pair.weight.start - place.start..pair.weight.end - place.start;
            let dw = StridedMatrix::new(&of_weights[weight], pair.columns);
            let dw = if pair.is_embedding { dw.transposed() } else { dw };
            multiply(b.transposed(), dw, da);
            multiply(dw, a.transposed(), db);
            da.iter_mut().chain(db).for_each(|g| *g *= low_rank.scale);
        });
        gradients
    }

    /// `A [rank, in]` and `B [out, rank]`.
    fn matrices(&self, pair: &FactorPair) -> (StridedMatrix<'_>, StridedMatrix<'_>) {
        let (a, b) = (&self.values[pair.a.clone()], &self.values[pair.b.clone()]);
        let input = if pair.is_embedding { pair.rows } else { pair.columns };
        (StridedMatrix::new(a, input), StridedMatrix::new(b, self.rank))
    }

    /// The factors of the weights in `place`, with their parts of `gradients`, which are of [`Self::within`].
    fn gradients<'a>(
        &'a self,
        place: &Range<usize>,
        mut gradients: &'a mut [f32],
    ) -> Vec<FactorGradient<'a>> {
        let inside = self.pairs.iter().filter(|pair| place.contains(&pair.weight.start));
        inside
            .map(|pair| {
                let (da, rest) = std::mem::take(&mut gradients).split_at_mut(pair.a.len());
                let (db, rest) = rest.split_at_mut(pair.b.len());
                gradients = rest;
                FactorGradient { low_rank: self, pair, da, db }
            })
            .collect()
    }
}

/// The factors of one weight, with the place of their gradients.
#[derive(Debug)]
struct FactorGradient<'a> {
    low_rank: &'a LowRank,
    pair: &'a FactorPair,
    da: &'a mut [f32],
    db: &'a mut [f32],
}

impl FactorGradient<'_> {
    /// Adds the gradients of tokens: `x [T, in]` is the input of the layer, and `g [T, out]` the gradient of its result.
    fn add(&mut self, x: StridedMatrix<'_>, g: StridedMatrix<'_>) {
        let Self { low_rank, pair, da, db } = self;
        let (a, b) = low_rank.matrices(pair);
        let projected = low_rank.scaled(x, a.transposed());
        let reversed = low_rank.scaled(g, b);
        multiply_add(StridedMatrix::new(&reversed, low_rank.rank).transposed(), x, da);
        multiply_add(g.transposed(), StridedMatrix::new(&projected, low_rank.rank), db);
    }

    /// The same of an embedding, for the tokens `ids [T]` and the gradient `g [T, hidden]` of their rows.
    fn add_embedded(&mut self, ids: &[u32], g: &[f32]) {
        let Self { low_rank, pair, da, db } = self;
        let (rank, vocabulary) = (low_rank.rank, pair.rows);
        let g = StridedMatrix::new(g, pair.columns);
        let (_, b) = low_rank.matrices(pair);
        let reversed = low_rank.scaled(g, b);
        let a = &low_rank.values[pair.a.clone()];
        let mut projected = vec![0.0; ids.len() * rank];
        let tokens = projected.chunks_exact_mut(rank).zip(reversed.chunks_exact(rank));
        for (id, (projected, reversed)) in ids.iter().zip(tokens) {
            let column = (*id as usize..).step_by(vocabulary);
            for (at, (projected, reversed)) in column.zip(projected.iter_mut().zip(reversed)) {
                *projected = low_rank.scale * a[at];
                da[at] += reversed;
            }
        }
        multiply_add(g.transposed(), StridedMatrix::new(&projected, rank), db);
    }
}

impl LowRank {
    /// Adds `s (x A^T) B^T` for `x [T, in]` to `out [T, out]`, for the pair of this index.
    pub(crate) fn add_product(&self, pair: usize, x: StridedMatrix<'_>, out: ProductOut<'_>) {
        let (a, b) = self.matrices(&self.pairs[pair]);
        let projected = self.scaled(x, a.transposed());
        let projected = StridedMatrix::new(&projected, self.rank);
        product(projected, Right::Unpacked(b.transposed()), out, false);
    }

    /// Adds `s (g B) A` for `g [T, out]` to `dx [T, in]`, for the pair of this index.
    pub(crate) fn add_input_gradient(&self, pair: usize, g: StridedMatrix<'_>, dx: &mut [f32]) {
        let (a, b) = self.matrices(&self.pairs[pair]);
        let reversed = self.scaled(g, b);
        multiply_add(StridedMatrix::new(&reversed, self.rank), a, dx);
    }

    /// Adds what an embedding adds to the row of token `id`, `[hidden]`, for the pair of this index.
    pub(crate) fn add_row(&self, pair: usize, id: usize, row: &mut [f32]) {
        let pair = &self.pairs[pair];
        let (a, b) = (&self.values[pair.a.clone()], &self.values[pair.b.clone()]);
        for (value, b) in row.iter_mut().zip(b.chunks_exact(self.rank)) {
            let column = a[id..].iter().step_by(pair.rows);
            *value += self.scale * b.iter().zip(column).map(|(b, a)| b * a).sum::<f32>();
        }
    }

    /// `s left [T, n] x right [n, rank]`.
    fn scaled(&self, left: StridedMatrix<'_>, right: StridedMatrix<'_>) -> Vec<f32> {
        let mut product = vec![0.0; left.height() * self.rank];
        multiply(left, right, &mut product);
        product.iter_mut().for_each(|value| *value *= self.scale);
        product
    }
}

/// The factors of the weights of one unit of a layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnitFactors<'a> {
    pub(crate) low_rank: &'a LowRank,
    /// Where the unit begins in the flat parameters.
    pub(crate) start: usize,
    /// Number of its weights.
    pub(crate) len: usize,
}

/// The place of the gradient of a matrix that a layer computes with, which may be several tensors one after the other.
#[derive(Debug)]
pub(crate) enum WeightGradient<'a> {
    /// `[out, in]` of the matrix, or `[n]` of a vector.
    Whole(&'a mut [f32]),
    /// Of the factors of its tensors; of none if all are frozen.
    Factors(Vec<RowFactors<'a>>),
}

/// Factors of some rows of a matrix.
#[derive(Debug)]
pub(crate) struct RowFactors<'a> {
    rows: Range<usize>,
    factors: FactorGradient<'a>,
}

/// Cuts the gradients of ascending, disjoint `ranges` of the values of a unit out of the `gradients` of the unit, or of its
/// `factors`.
pub(crate) fn carve<'a, const N: usize>(
    mut gradients: &'a mut [f32],
    ranges: [&Range<usize>; N],
    factors: Option<UnitFactors<'a>>,
) -> [WeightGradient<'a>; N] {
    if let Some(UnitFactors { low_rank, start, len }) = factors {
        let mut all = low_rank.gradients(&(start..start + len), gradients).into_iter().peekable();
        return ranges.map(|range| {
            let mut own = Vec::new();
            while let Some(factors) = all.next_if(|next| next.pair.weight.start < start + range.end) {
                let pair = factors.pair;
                if let Some(passed) = pair.weight.start.checked_sub(start + range.start) {
                    let first = passed / pair.columns;
                    own.push(RowFactors { rows: first..first + pair.rows, factors });
                }
            }
            WeightGradient::Factors(own)
        });
    }
    let mut passed = 0;
    ranges.map(|range| {
        if range.is_empty() {
            return WeightGradient::Whole(&mut []);
        }
        let (_, rest) = std::mem::take(&mut gradients).split_at_mut(range.start - passed);
        let (cut, rest) = rest.split_at_mut(range.len());
        (gradients, passed) = (rest, range.end);
        WeightGradient::Whole(cut)
    })
}

impl<'a> WeightGradient<'a> {
    /// Of a vector, such as a bias: empty if it is frozen. Vectors have no factors.
    pub(crate) fn vector(self) -> &'a mut [f32] {
        match self {
            Self::Whole(gradient) => gradient,
            Self::Factors(_) => &mut [],
        }
    }

    /// Those of `count` matrices of `rows` rows each, one after the other.
    pub(crate) fn split(self, count: usize, rows: usize) -> Vec<Self> {
        match self {
            Self::Whole(gradient) => {
                let each = gradient.len() / count;
                gradient.chunks_exact_mut(each).map(Self::Whole).collect()
            }
            Self::Factors(all) => {
                let mut parts: Vec<Vec<RowFactors<'a>>> = (0..count).map(|_| Vec::new()).collect();
                for RowFactors { rows: of_all, factors } in all {
                    let first = of_all.start % rows;
                    let own = RowFactors { rows: first..first + of_all.len(), factors };
                    parts[of_all.start / rows].push(own);
                }
                parts.into_iter().map(Self::Factors).collect()
            }
        }
    }

    /// Adds the gradients of the rows `rows` of the input `x [_, in]` and of the gradient `g [_, out]` of the result.
    pub(crate) fn add(&mut self, x: &Tensor, g: &Tensor, rows: &Range<usize>) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let (x, g) = (x.narrow(0, rows.start, rows.len())?, g.narrow(0, rows.start, rows.len())?);
        match self {
            Self::Whole(gradient) => weight_gradient(&x, &g, 0..g.dim(1)?, gradient),
            Self::Factors(all) => all.iter_mut().try_for_each(|factors| factors.add(&x, &g)),
        }
    }

    /// Adds the gradients of an embedding for the tokens `ids [T]` and the gradient `g [T, hidden]` of their rows.
    pub(crate) fn add_embedded(&mut self, ids: &[u32], g: &Tensor) -> Result<()> {
        match self {
            Self::Whole(gradient) => embed_backward(ids, g, gradient),
            Self::Factors(all) => {
                let g = values(g)?;
                all.iter_mut().for_each(|RowFactors { factors, .. }| factors.add_embedded(ids, &g));
                Ok(())
            }
        }
    }
}

impl RowFactors<'_> {
    /// Adds the gradients of tokens, for the input `x [T, in]` of the matrix and the gradient `g [T, out]` of its result.
    pub(crate) fn add(&mut self, x: &Tensor, g: &Tensor) -> Result<()> {
        let ((_, input), (_, output)) = (x.dims2()?, g.dims2()?);
        self.add_values(&values(x)?, input, &values(g)?, output);
        Ok(())
    }

    /// The same on slices, with the widths of their rows.
    pub(crate) fn add_values(&mut self, x: &[f32], input: usize, g: &[f32], output: usize) {
        let g = StridedMatrix::new(g, output).columns(self.rows.clone());
        self.factors.add(StridedMatrix::new(x, input), g);
    }
}
