//! Linear layers `y = x W^T + b`.
//!
//! A sampler packs a weight once per policy version. The trainer reads it in the flat parameters and packs it block by block
//! during a product: with hundreds of rows that costs a few percent of the time and saves two more copies of the model and
//! their packing after every update. A frozen weight may stay quantised, and has low-rank factors that are not merged into it:
//! `y = x W^T + s (x A^T) B^T + b`. Samplers and trainers compute it with the same operations.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use collective::{Collective, Position};

use super::adapters::{LinearFactors, LinearPass, add_products};
use super::bf16::Bf16Linear;
use super::blocks::BlockRows;
use super::dot::StoreMode;
use super::gemm::{
    CHUNKS, NR, Panels, ProductOut, ProductStart, Right, StridedMatrix, TreeChunks, TreePart, WHOLE,
    multiply_add, product, product_from, tree_product,
};
use super::int8::Int8Linear;
use super::simd::vectorized;
use super::{matrix, row_ranges, unwritten, values};
use crate::pass_ranks::failed;
use crate::{LowRank, Parameters};

/// One linear layer. Its weight is `[out, in]`, as Hugging Face stores it.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    weight: Weight,
    input: usize,
    output: usize,
    bias: Option<Vec<f32>>,
    tree: TreeSum,
    /// The part of the layer that this is, of those of tensor-parallel ranks.
    shard: Position,
    /// The tensor-parallel ranks that have the other parts of the layer, if it sums over them itself.
    ranks: Option<Arc<dyn Collective>>,
    /// The range of the weight in the flat parameters of its model; empty if its factors are not asked for.
    place: Range<usize>,
    /// Low-rank factors that are not merged into the weight.
    factors: Vec<LinearFactors>,
}

/// Which sums of a layer are balanced binary trees over fixed chunks ([`crate::Reduction::Tree`]): those whose terms
/// tensor-parallel ranks would share. All others are one chain.
#[derive(Clone, Debug, Default)]
pub(crate) enum TreeSum {
    /// None.
    #[default]
    None,
    /// The forward of a row-parallel layer: over its inputs.
    Inputs,
    /// The input gradient of a column-parallel layer: over its outputs.
    Outputs(Vec<TreePart>),
}

impl Default for Linear {
    /// A layer without inputs and outputs.
    fn default() -> Self {
        Self {
            weight: Weight::Packed(Panels::default()),
            input: 0,
            output: 0,
            bias: None,
            tree: TreeSum::None,
            shard: WHOLE,
            ranks: None,
            place: 0..0,
            factors: Vec::new(),
        }
    }
}

/// The flat values that a trainable layer reads its weights from.
#[derive(Clone, Debug)]
pub(crate) enum FlatValues {
    /// Those of a whole model.
    Model(Arc<Parameters>),
    /// Those of one unit of its layout.
    Unit(Arc<Vec<f32>>),
}

impl FlatValues {
    pub(crate) fn values(&self) -> &[f32] {
        match self {
            Self::Model(parameters) => parameters.values(),
            Self::Unit(values) => values,
        }
    }
}

#[derive(Clone, Debug)]
enum Weight {
    Packed(Panels),
    /// A range of flat values.
    Flat(FlatValues, Range<usize>),
    /// Quantised, for training and sampling.
    Blocks(BlockRows),
    /// With its bias.
    Int8(Int8Linear),
    /// With its bias.
    Bf16(Bf16Linear),
}

impl Linear {
    /// A layer to sample with: packs `weight [out, in]`.
    pub(crate) fn packed(weight: &[f32], input: usize, bias: Option<&[f32]>) -> Self {
        let panels = Panels::new(StridedMatrix::new(weight, input).transposed());
        Self {
            output: panels.columns(),
            weight: Weight::Packed(panels),
            input,
            bias: bias.map(<[f32]>::to_vec),
            ..Self::default()
        }
    }

    /// A layer to sample with: quantises `weight [out, in]`.
    pub(crate) fn int8(weight: &[f32], input: usize, bias: Option<&[f32]>) -> Self {
        let layer = Int8Linear::new(weight, input, bias);
        Self { output: layer.output(), weight: Weight::Int8(layer), input, ..Self::default() }
    }

    /// A layer to sample with: rounds `weight [out, in]` to bf16.
    pub(crate) fn bf16(weight: &[f32], input: usize, bias: Option<&[f32]>) -> Self {
        let layer = Bf16Linear::new(weight, input, bias);
        Self { output: layer.output(), weight: Weight::Bf16(layer), input, ..Self::default() }
    }

    /// A layer to train: `weight [out, in]` and `bias [out]`, empty for none, are ranges of `flat`.
    pub(crate) fn flat(flat: &FlatValues, weight: Range<usize>, input: usize, bias: &Range<usize>) -> Self {
        let bias = (!bias.is_empty()).then(|| flat.values()[bias.clone()].to_vec());
        let output = weight.len() / input;
        Self { weight: Weight::Flat(flat.clone(), weight), input, output, bias, ..Self::default() }
    }

    /// A frozen layer with quantised rows and `bias [out]`, empty for none.
    pub(crate) fn frozen(rows: BlockRows, input: usize, bias: Vec<f32>) -> Self {
        let (output, bias) = (rows.len(), (!bias.is_empty()).then_some(bias));
        Self { weight: Weight::Blocks(rows), input, output, bias, ..Self::default() }
    }

    /// The same layer, with trees for these sums. Those of int8 and bf16 weights stay as they are.
    #[must_use]
    pub(crate) fn with_tree(self, tree: TreeSum) -> Self {
        Self { tree, ..self }
    }

    /// Makes it the part of one of `ranks`. Its results and input gradients are sums over the ranks if it `sums`, and partial sums
    /// otherwise; neither applies to a layer without a tree, of which every rank has all or its own outputs.
    pub(crate) fn share(&mut self, ranks: &Arc<dyn Collective>, sums: bool) {
        self.shard = ranks.position();
        self.ranks = sums.then(|| Arc::clone(ranks));
        if let TreeSum::Outputs(parts) = &mut self.tree {
            parts.iter_mut().for_each(|part| part.len *= self.shard.world);
        }
    }

    /// Says that all parts of the outputs but the first, keys and values, are those of `copies` neighbouring ranks, each of which has
    /// them all.
    pub(crate) fn copy_keys(&mut self, copies: usize) {
        if let TreeSum::Outputs(parts) = &mut self.tree {
            parts[1..].iter_mut().for_each(|part| *part = TreePart { len: part.len / copies, copies });
        }
    }

    /// Makes it the part of one rank of a head with `vocabulary` outputs, which ranks have even shares of.
    pub(crate) fn share_vocabulary(&mut self, shard: Position, vocabulary: usize) {
        self.shard = shard;
        if let TreeSum::Outputs(parts) = &mut self.tree {
            *parts = vec![TreePart::of(vocabulary)];
        }
    }

    /// The same layer, whose weight has the range `place` in the flat parameters of its model.
    #[must_use]
    pub(crate) fn at(self, place: Range<usize>) -> Self {
        Self { place, ..self }
    }

    /// Adds the factors of rows with `adapter`, which are not merged into the weight.
    pub(crate) fn adapt(&mut self, adapter: Option<usize>, factors: &Arc<LowRank>) {
        self.factors.extend(LinearFactors::of(factors, adapter, &self.place));
    }

    /// Removes the factors of all adapters.
    pub(crate) fn without_adapters(&mut self) {
        self.factors.retain(|factors| factors.adapter.is_none());
    }

    /// Memory in bytes, without weights in the flat parameters or in frozen ones.
    pub(crate) fn bytes(&self) -> usize {
        let weight = match &self.weight {
            Weight::Packed(panels) => panels.bytes(),
            Weight::Flat(..) | Weight::Blocks(_) => 0,
            Weight::Int8(layer) => layer.bytes(),
            Weight::Bf16(layer) => layer.bytes(),
        };
        weight + self.bias.as_deref().map_or(0, size_of_val)
    }

    /// `x [T, in]` to `[T, out]`.
    pub(crate) fn apply<'a>(&self, x: &Tensor, on: impl Into<LinearPass<'a>>) -> Result<Tensor> {
        matrix(self.apply_values(x, on)?, self.output)
    }

    /// The same, as plain values.
    pub(crate) fn apply_values<'a>(&self, x: &Tensor, on: impl Into<LinearPass<'a>>) -> Result<Vec<f32>> {
        let mut out = unwritten(x.dim(0)? * self.output);
        self.sum_over_ranks(&values(x)?, &mut out, true, on.into())?;
        Ok(out)
    }

    /// `base [T, out]` plus the layer's result for `x [T, in]`.
    pub(crate) fn add_to<'a>(
        &self,
        base: &Tensor,
        x: &Tensor,
        on: impl Into<LinearPass<'a>>,
    ) -> Result<Tensor> {
        let (base, on, rows) = (values(base)?, on.into(), x.dim(0)?);
        if base.len() != rows * self.output {
            candle_core::bail!("{} values are no base of {rows} rows of {}", base.len(), self.output);
        }
        let mut out = unwritten(base.len());
        if self.is_one_chain() {
            self.multiply(&values(x)?, &mut out, ProductStart::Values(&base), on);
            self.add_bias(&mut out);
        } else {
            out.copy_from_slice(&base);
            self.sum_over_ranks(&values(x)?, &mut out, false, on)?;
        }
        matrix(out, self.output)
    }

    /// Whether a result is one chain, which can begin with any value: of f32 products, without a tree.
    fn is_one_chain(&self) -> bool {
        let is_f32 = matches!(self.weight, Weight::Packed(_) | Weight::Flat(..) | Weight::Blocks(_));
        is_f32 && !matches!(self.tree, TreeSum::Inputs)
    }

    /// [`Self::run`], with the sum over the ranks of a row-parallel layer.
    fn sum_over_ranks(&self, x: &[f32], out: &mut [f32], fresh: bool, on: LinearPass<'_>) -> Result<()> {
        let Some(ranks) = self.ranks.as_ref().filter(|_| matches!(self.tree, TreeSum::Inputs)) else {
            self.run(x, out, fresh, on);
            return Ok(());
        };
        let mut partial = if fresh { Vec::new() } else { unwritten(out.len()) };
        let sum = if fresh { &mut *out } else { &mut partial };
        self.multiply(x, sum, ProductStart::Zero, on);
        ranks.all_reduce(sum).map_err(failed)?;
        if !fresh {
            out.iter_mut().zip(&partial).for_each(|(out, sum)| *out += sum);
        }
        self.add_bias(out);
        Ok(())
    }

    /// `x [T, in]` to `out [T, out]`; of a row-parallel layer that is shared, the partial sums of this rank.
    pub(crate) fn apply_slice<'a>(&self, x: &[f32], out: &mut [f32], on: impl Into<LinearPass<'a>>) {
        self.run(x, out, true, on.into());
    }

    /// Writes the layer's result for `x [T, in]` to `out [T, out]`, or adds it if not `fresh`. Threads share the columns of
    /// f32 weights, so that each reads and packs its part only.
    fn run(&self, x: &[f32], out: &mut [f32], fresh: bool, on: LinearPass<'_>) {
        self.multiply(x, out, ProductStart::of(fresh), on);
        self.add_bias(out);
    }

    fn add_bias(&self, out: &mut [f32]) {
        if let Some(bias) = &self.bias {
            add_rows(out, bias);
        }
    }

    /// The same without the bias. Only one chain begins with other values than those of the result.
    fn multiply(&self, x: &[f32], out: &mut [f32], start: ProductStart<'_>, on: LinearPass<'_>) {
        let pool = on.pool;
        let is_possible = self.is_one_chain() || !matches!(start, ProductStart::Values(_));
        assert!(is_possible, "only one chain begins with other values");
        let store = if matches!(start, ProductStart::Zero) { StoreMode::Replace } else { StoreMode::Add };
        match &self.weight {
            Weight::Int8(layer) => layer.run(x, out, store, pool),
            Weight::Bf16(layer) => layer.run(x, out, store, pool),
            Weight::Packed(panels) => {
                let ranges = panels.split(pool.threads());
                let outs = ProductOut::columns(out, self.output, &ranges);
                pool.map(ranges.into_iter().zip(outs).collect(), |(columns, out)| {
                    let start = start.at_column(columns.start);
                    self.sum_inputs(x, panels.columns_of(columns), out, start);
                });
            }
            Weight::Flat(..) => {
                let ranges = row_ranges(self.output, pool.threads(), NR);
                let outs = ProductOut::columns(out, self.output, &ranges);
                pool.map(ranges.into_iter().zip(outs).collect(), |(columns, out)| {
                    let start = start.at_column(columns.start);
                    let weight = StridedMatrix::new(self.weight(), self.input).rows(columns).transposed();
                    self.sum_inputs(x, Right::Unpacked(weight), out, start);
                });
            }
            Weight::Blocks(blocks) => {
                let ranges = blocks.chunks();
                let outs = ProductOut::columns(out, self.output, &ranges);
                pool.map(ranges.into_iter().zip(outs).collect(), |(rows, out)| {
                    let weight = blocks.dequantized(&rows);
                    let weight = StridedMatrix::new(&weight, self.input).transposed();
                    self.sum_inputs(x, Right::Unpacked(weight), out, start.at_column(rows.start));
                });
            }
        }
        add_products(&self.factors, x, out, self.output, on);
    }

    /// The product of `x [T, in]` and some columns of the transposed weight.
    fn sum_inputs(&self, x: &[f32], weight: Right<'_>, out: ProductOut<'_>, start: ProductStart<'_>) {
        let x = StridedMatrix::new(x, self.input);
        match self.tree {
            TreeSum::Inputs => {
                let whole = [TreePart::of(self.input * self.shard.world)];
                let chunks = TreeChunks { parts: &whole, count: CHUNKS, shard: self.shard };
                tree_product(x, weight, chunks, &out, matches!(start, ProductStart::Zero));
            }
            TreeSum::None | TreeSum::Outputs(_) => product_from(x, weight, out, start),
        }
    }

    /// `dx [T, in]` for the gradient `g [T, out]` of the result.
    ///
    /// # Panics
    /// If the layer is one to sample with.
    pub(crate) fn input_gradient(&self, g: &Tensor) -> Result<Tensor> {
        matrix(self.input_gradient_values(g)?, self.input)
    }

    /// The same, as plain values.
    ///
    /// # Panics
    /// If the layer is one to sample with.
    pub(crate) fn input_gradient_values(&self, g: &Tensor) -> Result<Vec<f32>> {
        let g = values(g)?;
        let mut dx = unwritten(g.len() / self.output * self.input);
        self.input_gradient_slice(&g, &mut dx);
        if let (Some(ranks), TreeSum::Outputs(_)) = (&self.ranks, &self.tree) {
            ranks.all_reduce(&mut dx).map_err(failed)?;
        }
        Ok(dx)
    }

    /// The same on slices: `g [T, out]` to `dx [T, in]`; of a column-parallel layer that is shared, the partial sums of this rank.
    ///
    /// # Panics
    /// If the layer is one to sample with.
    pub(crate) fn input_gradient_slice(&self, g: &[f32], dx: &mut [f32]) {
        let g = StridedMatrix::new(g, self.output);
        if let Weight::Blocks(blocks) = &self.weight {
            for rows in blocks.chunks() {
                let weight = blocks.dequantized(&rows);
                let weight = Right::Unpacked(StridedMatrix::new(&weight, self.input));
                let fresh = rows.start == 0;
                product(g.columns(rows), weight, ProductOut::new(&mut *dx, self.input), fresh);
            }
            for LinearFactors { outputs, low_rank, pair, .. } in &self.factors {
                low_rank.add_input_gradient(*pair, g.columns(outputs.clone()), dx);
            }
            return;
        }
        let weight = Right::Unpacked(StridedMatrix::new(self.weight(), self.input));
        let dx = ProductOut::new(dx, self.input);
        match &self.tree {
            TreeSum::Outputs(parts) => {
                let chunks = TreeChunks { parts, count: CHUNKS, shard: self.shard };
                tree_product(g, weight, chunks, &dx, true);
            }
            TreeSum::None | TreeSum::Inputs => product(g, weight, dx, true),
        }
    }

    /// The weight `[out, in]`, row-major.
    ///
    /// # Panics
    /// If the layer is one to sample with.
    pub(crate) fn weight(&self) -> &[f32] {
        match &self.weight {
            Weight::Flat(flat, range) => &flat.values()[range.clone()],
            Weight::Packed(_) | Weight::Int8(_) | Weight::Bf16(_) | Weight::Blocks(_) => {
                panic!("only a trainable layer has its weight in f32")
            }
        }
    }

    /// Copies row `output` of a packed f32 weight to `row [in]`.
    ///
    /// # Panics
    /// If the weight is not packed in f32.
    pub(crate) fn copy_row(&self, output: usize, row: &mut [f32]) {
        match &self.weight {
            Weight::Packed(panels) => panels.copy_column(output, row),
            Weight::Flat(..) | Weight::Int8(_) | Weight::Bf16(_) | Weight::Blocks(_) => {
                panic!("only rows of packed f32 weights are copied")
            }
        }
    }

    /// The bias `[out]` of a layer to train, if it has one.
    pub(crate) fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Number of outputs.
    pub(crate) fn output(&self) -> usize {
        self.output
    }
}

/// Adds `g^T x` to rows `rows` of the gradient of a weight `[out, in]`, for the input `x [T, in]` and the gradient
/// `g [T, out]` of the result; `gradient [rows, in]` is those rows only.
pub(crate) fn weight_gradient(
    x: &Tensor,
    g: &Tensor,
    rows: Range<usize>,
    gradient: &mut [f32],
) -> Result<()> {
    let ((_, input), (_, output)) = (x.dims2()?, g.dims2()?);
    let (x, g) = (values(x)?, values(g)?);
    let left = StridedMatrix::new(&g, output).transposed().rows(rows);
    multiply_add(left, Right::Unpacked(StridedMatrix::new(&x, input)), gradient);
    Ok(())
}

/// Adds `sum_t g[t]` of `g [T, out]` to the gradient of a bias `[out]`.
pub(crate) fn bias_gradient(g: &Tensor, gradient: &mut [f32]) -> Result<()> {
    sum_rows(&values(g)?, gradient);
    Ok(())
}

vectorized! {
    fn add_rows(out: &mut [f32], bias: &[f32]) {
        for row in out.chunks_exact_mut(bias.len()) {
            for (y, b) in row.iter_mut().zip(bias) {
                *y += b;
            }
        }
    }
}

vectorized! {
    fn sum_rows(g: &[f32], sum: &mut [f32]) {
        for g in g.chunks_exact(sum.len()) {
            for (s, g) in sum.iter_mut().zip(g) {
                *s += g;
            }
        }
    }
}

#[cfg(test)]
impl Linear {
    /// A trainable layer with its own weight.
    pub(crate) fn trainable(weight: &[f32], input: usize) -> Self {
        let sizes = crate::Sizes {
            vocab_size: weight.len() / input,
            hidden_size: input,
            intermediate_size: 2,
            num_layers: 1,
            num_heads: 1,
            num_kv_heads: 1,
            max_position_embeddings: 2,
        };
        let layout = Arc::new(crate::Layout::new(&crate::Config::fresh(&sizes)));
        let mut parameters = Parameters::zeros(layout);
        let range = parameters.layout().head();
        parameters.values_mut()[range.clone()].copy_from_slice(weight);
        Self::flat(&FlatValues::Model(Arc::new(parameters)), range, input, &(0..0))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::super::check::{gradient, noise, weighted};
    use super::*;
    use crate::ThreadPool;

    #[test]
    fn backward_is_the_derivative_and_adds_up() {
        let (rows, input, output) = (5, 19, 23);
        let (x, w, b, c) =
            (noise(rows * input, 1), noise(input * output, 2), noise(output, 3), noise(rows * output, 4));
        let tensor = |v: &[f32], n: usize| Tensor::from_vec(v.to_vec(), (rows, n), &Device::Cpu).unwrap();
        let loss = |x: &[f32], w: &[f32], b: &[f32]| {
            let y =
                Linear::packed(w, input, Some(b)).apply(&tensor(x, input), &ThreadPool::single()).unwrap();
            weighted(&values(&y).unwrap(), &c)
        };
        let (tx, tc) = (tensor(&x, input), tensor(&c, output));
        let (mut dw, mut db) = (vec![1.0; w.len()], vec![1.0; b.len()]);
        let (upper, lower) = dw.split_at_mut(7 * input);
        weight_gradient(&tx, &tc, 0..7, upper).unwrap();
        weight_gradient(&tx, &tc, 7..output, lower).unwrap();
        bias_gradient(&tc, &mut db).unwrap();
        dw.iter_mut().chain(&mut db).for_each(|g| *g -= 1.0);
        gradient(|w| loss(&x, w, &b), &w, &dw, 1e-3);
        gradient(|b| loss(&x, &w, b), &b, &db, 1e-3);
    }

    /// A trainable layer gives the bits of a packed one, and its input's gradient is the derivative.
    #[test]
    fn flat_weights_are_the_same_layer() {
        let weight = noise(30 * 20, 3);
        let (flat, packed) = (Linear::trainable(&weight, 20), Linear::packed(&weight, 20, None));
        let (x, c) = (noise(3 * 20, 1), noise(3 * 30, 2));
        let tensor = |v: &[f32], n: usize| Tensor::from_vec(v.to_vec(), (3, n), &Device::Cpu).unwrap();
        let base = tensor(&c, 30);
        let of =
            |layer: &Linear, x: &[f32]| layer.apply_values(&tensor(x, 20), &ThreadPool::single()).unwrap();
        assert_eq!(of(&flat, &x), of(&packed, &x));
        let added = |layer: &Linear| {
            values(&layer.add_to(&base, &tensor(&x, 20), &ThreadPool::single()).unwrap()).unwrap().to_vec()
        };
        assert_eq!(added(&flat), added(&packed));
        // Wide enough that each thread has some columns.
        let wide = Linear::trainable(&noise(200 * 20, 5), 20);
        let base = Tensor::from_vec(noise(3 * 200, 6), (3, 200), &Device::Cpu).unwrap();
        let with = |threads: usize| {
            let pool = ThreadPool::new(&crate::SharedCores::new(threads), threads);
            values(&wide.add_to(&base, &tensor(&x, 20), &pool).unwrap()).unwrap().to_vec()
        };
        let product = wide.apply_values(&tensor(&x, 20), &ThreadPool::single()).unwrap();
        let one = with(1);
        assert_eq!(one, with(3));
        let near = |(sum, (a, b)): (&f32, (&f32, &f32))| (sum - a - b).abs() < 1e-4;
        assert!(one.iter().zip(values(&base).unwrap().iter().zip(&product)).all(near));
        assert!(wide.add_to(&tensor(&x, 20), &tensor(&x, 20), &ThreadPool::single()).is_err());
        let dx = flat.input_gradient(&tensor(&c, 30)).unwrap();
        gradient(|x| weighted(&of(&flat, x), &c), &x, &values(&dx).unwrap(), 1e-3);
    }
}
