//! Low-rank factors on a device, and the place of the gradients of a unit: of its values, or of its factors alone.
//!
//! The formulas are those of [`crate::low_rank`] (LoRA, Hu et al. 2021, arXiv 2106.09685). Gradients of experts alone are formed
//! whole first, one operand of one layer at a time, and then projected on the factors.
//!
//! Invariant: with factors, weights without any are frozen: they have no gradient, and so do norms, biases and sinks.

use std::ops::Range;
use std::sync::Arc;

use device::ops::rows::{RowGroups, add_rows, gather_rows};
use device::{Device, DeviceBuffer, Matrix, MatrixMut, Result, Storage, View, ViewMut};

use super::DeviceDecoder;
use super::layer::weight_gradient;
use super::units::{UnitGradients, upload_as};
use crate::{FactorPair, Layout, LowRank, Unit};

/// The factors of some weights of a model, on a device.
#[derive(Debug)]
pub struct DeviceFactors<T: Storage> {
    low_rank: Arc<LowRank>,
    /// `[n]` all factors.
    values: DeviceBuffer<T>,
    embedding: Option<DeviceEmbeddingFactors<T>>,
}

/// What the factors of an embedding need besides themselves.
#[derive(Debug)]
struct DeviceEmbeddingFactors<T: Storage> {
    /// `[vocabulary, rank]` the transposed `A`, whose rows are looked up.
    table: DeviceBuffer<T>,
    /// `[rank, rank]`, the identity: a product with it adds a transposed matrix.
    identity: DeviceBuffer<f32>,
}

/// The gradients of a pass, with the factors that they are of, if there are any.
pub(super) struct PassGradients<'a, T: Storage> {
    pub(super) sink: &'a mut dyn UnitGradients,
    pub(super) factors: Option<&'a DeviceFactors<T>>,
    pub(super) layout: &'a Layout,
}

/// The place of the gradients of a unit.
#[derive(Debug)]
pub(super) struct GradientPlace<'a, T: Storage> {
    /// `[n]` those of all values of the unit, or of its factors.
    values: ViewMut<'a, f32>,
    factors: Option<&'a DeviceFactors<T>>,
    /// The unit in the flat parameters.
    unit: Range<usize>,
}

/// The factors of one weight of an operand.
struct OperandFactors<'a> {
    pair: &'a FactorPair,
    /// The weight among the values of the operand.
    within: Range<usize>,
    /// Gradients of `A` and `B` among those of the unit.
    gradients: [Range<usize>; 2],
}

impl<T: Storage> DeviceDecoder<T> {
    /// A copy of the factors `low_rank` on the device, for [`Self::backward`].
    ///
    /// # Errors
    /// [`device::DeviceError::OutOfMemory`].
    pub fn factors(&self, low_rank: &Arc<LowRank>) -> Result<DeviceFactors<T>> {
        let device = self.device.labelled("adapter");
        let rounded = |values: &[f32]| -> Result<DeviceBuffer<T>> {
            let mut buffer = device.uninit(values.len())?;
            upload_as(&device, values, &mut buffer)?;
            Ok(buffer)
        };
        let rank = low_rank.rank();
        let of_embedding = |pair: &FactorPair| -> Result<DeviceEmbeddingFactors<T>> {
            let a = &low_rank.values()[pair.a.clone()];
            let rows = (0..pair.rows).flat_map(|id| a[id..].iter().step_by(pair.rows).copied());
            let mut identity = vec![0.0_f32; rank * rank];
            identity.iter_mut().step_by(rank + 1).for_each(|value| *value = 1.0);
            Ok(DeviceEmbeddingFactors {
                table: rounded(&rows.collect::<Vec<_>>())?,
                identity: device.upload(&identity)?,
            })
        };
        let embedding = low_rank.pairs().iter().find(|pair| pair.is_embedding);
        Ok(DeviceFactors {
            low_rank: Arc::clone(low_rank),
            values: rounded(low_rank.values())?,
            embedding: embedding.map(of_embedding).transpose()?,
        })
    }
}

impl<T: Storage> DeviceFactors<T> {
    /// `A [rank, in]` and `B [out, rank]` of `pair`, for an embedding `A [rank, vocabulary]` and `B [hidden, rank]`.
    fn matrices(&self, pair: &FactorPair) -> [Matrix<'_, T>; 2] {
        let input = if pair.is_embedding { pair.rows } else { pair.columns };
        let (a, b) = (self.values.view(pair.a.clone()), self.values.view(pair.b.clone()));
        [Matrix::new(a, input), Matrix::new(b, self.low_rank.rank())]
    }

    /// The factors of the weights at `operand` in the values of `unit`.
    fn of<'f>(
        &'f self,
        unit: &Range<usize>,
        operand: &Range<usize>,
    ) -> impl Iterator<Item = OperandFactors<'f>> {
        let first = self.low_rank.within(unit).start;
        let (start, end) = (unit.start + operand.start, unit.start + operand.end);
        let inside = move |pair: &&FactorPair| (start..end).contains(&pair.weight.start);
        self.low_rank.pairs().iter().filter(inside).map(move |pair| OperandFactors {
            pair,
            within: pair.weight.start - start..pair.weight.end - start,
            gradients: [&pair.a, &pair.b].map(|range| range.start - first..range.end - first),
        })
    }
}

/// `[T, rank]` product `scale left [T, n] x right [n, rank]`.
fn scaled<T: Storage>(
    device: &Device,
    left: Matrix<'_, T>,
    right: Matrix<'_, T>,
    scale: f32,
) -> Result<DeviceBuffer<T>> {
    let mut out = device.uninit(left.rows() * right.columns())?;
    device.product(left, right, MatrixMut::new(out.all_mut(), right.columns()), scale, 0.0)?;
    Ok(out)
}

impl<T: Storage> PassGradients<'_, T> {
    /// The place of the gradients of a unit.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(super) fn unit(&mut self, unit: Unit) -> Result<GradientPlace<'_, T>> {
        let place = self.layout.unit(unit);
        Ok(GradientPlace { values: self.sink.unit(unit)?, factors: self.factors, unit: place })
    }
}

impl<T: Storage> GradientPlace<'_, T> {
    /// `[n]` the gradient of the vector at `range`, or `None` if it is frozen or not there.
    pub(super) fn vector(&mut self, range: &Range<usize>) -> Option<ViewMut<'_, f32>> {
        let is_trained = self.factors.is_none() && !range.is_empty();
        is_trained.then(|| self.values.slice_mut(range.clone()))
    }

    /// Adds the gradient of the matrix `[out, in]` at `operand`, for its input `x [T, in]` and the gradient `g [T, out]` of its
    /// result.
    pub(super) fn add(
        &mut self,
        device: &Device,
        operand: &Range<usize>,
        x: Matrix<'_, T>,
        g: View<'_, T>,
    ) -> Result<()> {
        let Some(factors) = self.factors else {
            return weight_gradient(device, x, g, self.values.slice_mut(operand.clone()));
        };
        let g = Matrix::new(g, operand.len() / x.columns());
        let (rank, scale) = (factors.low_rank.rank(), factors.low_rank.scale());
        for OperandFactors { pair, within, gradients: [of_a, of_b] } in factors.of(&self.unit, operand) {
            let [a, b] = factors.matrices(pair);
            let first = within.start / pair.columns;
            let g = g.columns_within(first..first + pair.rows);
            let reversed = scaled(device, g, b, scale)?;
            let da = MatrixMut::new(self.values.slice_mut(of_a), pair.columns);
            device.product(Matrix::new(reversed.all(), rank).transposed(), x, da, 1.0, 1.0)?;
            drop(reversed);
            let projected = scaled(device, x, a.transposed(), scale)?;
            let db = MatrixMut::new(self.values.slice_mut(of_b), rank);
            device.product(g.transposed(), Matrix::new(projected.all(), rank), db, 1.0, 1.0)?;
        }
        Ok(())
    }

    /// Adds the gradient of matrices at `operand`, which `form` adds to its argument. With factors that is memory of its own, which
    /// is projected: `dA = s B^T dW`, `dB = s dW A^T`.
    pub(super) fn add_formed(
        &mut self,
        device: &Device,
        operand: &Range<usize>,
        form: impl FnOnce(ViewMut<'_, f32>) -> Result<()>,
    ) -> Result<()> {
        let Some(factors) = self.factors else { return form(self.values.slice_mut(operand.clone())) };
        let mut all = factors.of(&self.unit, operand).peekable();
        if all.peek().is_none() {
            return Ok(());
        }
        let mut whole = device.labelled("gradients").zeros::<f32>(operand.len())?;
        form(whole.all_mut())?;
        let (low_rank, own) = (&factors.low_rank, factors.low_rank.within(&self.unit));
        let (rank, scale) = (low_rank.rank(), low_rank.scale());
        // In f32, as the gradient is.
        let exact = device.upload(&low_rank.values()[own])?;
        for OperandFactors { pair, within, gradients: [of_a, of_b] } in all {
            let dw = Matrix::new(whole.view(within), pair.columns);
            let a = Matrix::new(exact.view(of_a.clone()), pair.columns);
            let b = Matrix::new(exact.view(of_b.clone()), rank);
            let da = MatrixMut::new(self.values.slice_mut(of_a), pair.columns);
            device.product(b.transposed(), dw, da, scale, 1.0)?;
            let db = MatrixMut::new(self.values.slice_mut(of_b), rank);
            device.product(dw, a.transposed(), db, scale, 1.0)?;
        }
        Ok(())
    }

    /// Adds the gradient of the table `[vocabulary, d]` of an embedding at `operand`, for the tokens `ids [T]`, which `groups` has by
    /// their ids, and the gradient `g [T, d]` of their rows.
    pub(super) fn add_embedded(
        &mut self,
        device: &Device,
        operand: &Range<usize>,
        (ids, groups): (View<'_, u32>, &RowGroups),
        g: Matrix<'_, T>,
    ) -> Result<()> {
        let Some(factors) = self.factors else {
            let (width, to) = (g.columns(), self.values.slice_mut(operand.clone()));
            return add_rows(device, g.values(), groups, width, to);
        };
        let Some(DeviceEmbeddingFactors { table, identity }) = &factors.embedding else { return Ok(()) };
        let (rank, scale) = (factors.low_rank.rank(), factors.low_rank.scale());
        for OperandFactors { pair, gradients: [of_a, of_b], .. } in factors.of(&self.unit, operand) {
            let [_, b] = factors.matrices(pair);
            let reversed = scaled(device, g, b, scale)?;
            let mut rows = device.zeros::<f32>(pair.rows * rank)?;
            add_rows(device, reversed.all(), groups, rank, rows.all_mut())?;
            let da = MatrixMut::new(self.values.slice_mut(of_a), pair.rows);
            let rows = Matrix::new(rows.all(), rank).transposed();
            device.product(Matrix::new(identity.all(), rank), rows, da, 1.0, 1.0)?;
            let mut projected = device.uninit(reversed.len())?;
            gather_rows(device, table.all(), ids, rank, projected.all_mut())?;
            let db = MatrixMut::new(self.values.slice_mut(of_b), rank);
            device.product(g.transposed(), Matrix::new(projected.all(), rank), db, scale, 1.0)?;
        }
        Ok(())
    }
}
