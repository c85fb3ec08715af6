//! One layer on a device: the halves of `decoder::block`, with the same formulas.
//!
//! `mixer` is the first half, whose kinds are `attention` and `latent`; `feed_forward` is the second, with the `experts` that it may
//! have, which ranks may divide (`divided_experts`).
//!
//! Invariant: the backward needs no other layer. It adds to gradients of weights, and returns the gradient of its input.

mod attention;
mod delta_net;
mod divided_experts;
mod experts;
mod feed_forward;
mod latent;
mod mixer;

use std::ops::Range;

use device::ops::attention::Segments;
use device::ops::delta_rule::DeltaRuns;
use device::ops::norm::{RmsNorm, add_rms_norm, rms_norm, rms_norm_backward};
use device::ops::routes::GivenSlots;
use device::ops::vectors::{add_multiple, scale};
use device::{Device, DeviceBuffer, Matrix, MatrixMut, Result, Storage, View, ViewMut};

pub use self::experts::RouteCounts;
use self::feed_forward::FeedForwardActivations;
use self::mixer::MixedActivations;
use super::DeviceDecoder;
use super::context::HeadExchange;
use super::factors::GradientPlace;
use super::operands::{DeviceAngles, DeviceRows, copied};
use crate::layer::{LayerRanges, Operand};

/// Activations of a layer's forward, for its backward. `T` tokens.
#[derive(Debug)]
pub(super) struct LayerActivations<T: Storage> {
    mixed: MixedActivations<T>,
    feed_forward: FeedForwardActivations<T>,
}

/// A layer in a pass over a pack.
pub(super) struct DeviceLayer<'a, T: Storage> {
    pub(super) decoder: &'a DeviceDecoder<T>,
    /// Its number.
    pub(super) index: usize,
    /// The values of its unit.
    pub(super) weights: View<'a, T>,
    /// Of each rotary embedding.
    pub(super) angles: &'a [DeviceAngles],
    pub(super) segments: &'a Segments,
    /// How heads are exchanged, if ranks share the tokens.
    pub(super) exchange: Option<&'a HeadExchange>,
    /// The segments for layers with a recurrence; absent in a model without one.
    pub(super) runs: Option<&'a DeltaRuns>,
    /// The experts that are given to the tokens of the pack in this layer.
    pub(super) given: Option<GivenSlots<'a>>,
}

/// `out [T, out] = x [T, in] W^T`, or `out += x W^T` if `kept`; `weight` is `[out, in]`.
pub(super) fn linear<T: Storage>(
    device: &Device,
    x: View<'_, T>,
    weight: Matrix<'_, T>,
    out: ViewMut<'_, T>,
    kept: bool,
) -> Result<()> {
    let keep = if kept { 1.0 } else { 0.0 };
    let x = Matrix::new(x, weight.columns());
    device.product(x, weight.transposed(), MatrixMut::new(out, weight.rows()), 1.0, keep)
}

/// `[T, in]` gradient of the input of [`linear`] for the gradient `g [T, out]` of its result.
pub(super) fn input_gradient<T: Storage>(
    device: &Device,
    g: View<'_, T>,
    weight: Matrix<'_, T>,
) -> Result<DeviceBuffer<T>> {
    let mut out = device.uninit(g.len() / weight.rows() * weight.columns())?;
    let g = Matrix::new(g, weight.rows());
    device.product(g, weight, MatrixMut::new(out.all_mut(), weight.columns()), 1.0, 0.0)?;
    Ok(out)
}

/// Adds to `gradient [out, in]` that of the weight of [`linear`].
pub(super) fn weight_gradient<T: Storage>(
    device: &Device,
    x: Matrix<'_, T>,
    g: View<'_, T>,
    gradient: ViewMut<'_, f32>,
) -> Result<()> {
    let g = Matrix::new(g, gradient.len() / x.columns());
    device.product(g.transposed(), x, MatrixMut::new(gradient, x.columns()), 1.0, 1.0)
}

impl<'a, T: Storage> DeviceLayer<'a, T> {
    fn ranges(&self) -> &'a LayerRanges {
        self.decoder.layout.ranges(self.index)
    }

    fn on(&self) -> &'a Device {
        &self.decoder.activations
    }

    fn at(&self, range: &Range<usize>) -> View<'a, T> {
        self.weights.slice(range.clone())
    }

    /// The weight `[out, input]` of `operand`.
    fn matrix(&self, operand: Operand, input: usize) -> Matrix<'a, T> {
        Matrix::new(self.at(&self.ranges()[operand]), input)
    }

    fn hidden(&self) -> usize {
        self.decoder.config.hidden_size
    }

    /// The norm whose weight is at `range`.
    fn norm(&self, range: &Range<usize>) -> RmsNorm<'a, T> {
        self.decoder.norm(self.at(range))
    }

    /// `[T, d]` rows of the stream, normalised by the weight at `norm`, which is empty for none.
    fn normed<'x>(&self, x: View<'x, T>, norm: &Range<usize>) -> Result<DeviceRows<'x, T>> {
        if norm.is_empty() {
            return Ok(DeviceRows::Same(x));
        }
        let mut out = self.on().uninit(x.len())?;
        rms_norm(self.on(), x, self.norm(norm), out.all_mut())?;
        Ok(DeviceRows::Computed(out))
    }

    /// `base [T, d]` plus the gradient of `x [T, d]`, for that of [`Self::normed`], `g [T, d]`, into `d_x [T, d]`. Adds the
    /// gradient of the norm's weight.
    fn normed_backward(
        &self,
        x: View<'_, T>,
        norm: &Range<usize>,
        g: View<'_, T>,
        base: View<'_, T>,
        mut d_x: ViewMut<'_, T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<()> {
        if norm.is_empty() {
            self.on().copy(base, d_x.reborrow())?;
            return add_multiple(self.on(), g, 1.0, d_x);
        }
        rms_norm_backward(self.on(), x, self.norm(norm), g, Some(base), d_x, gradients.vector(norm))
    }

    /// Adds the result of a half, normalised by the weight at `after` and multiplied, to the residual stream `to [T, d]`.
    /// `compute` writes the result `[T, d]`, or adds it if its second argument is true.
    fn add_result(
        &self,
        after: &Range<usize>,
        to: ViewMut<'_, T>,
        compute: impl FnOnce(ViewMut<'_, T>, bool) -> Result<()>,
    ) -> Result<()> {
        // Partial results are summed over the ranks before they are added.
        if self.decoder.adds_plainly(self.index) && self.decoder.ranks.tensor.is_none() {
            return compute(to, true);
        }
        let mut result = self.on().uninit(to.len())?;
        compute(result.all_mut(), false)?;
        if after.is_empty() {
            return add_multiple(self.on(), result.all(), self.decoder.multiplier(self.index), to);
        }
        add_rms_norm(self.on(), result.all(), self.decoder.norm_after(self.index, self.at(after)), to)
    }

    /// `[T, d]` gradient of the result of a half for that of the residual stream, `g [T, d]`: the backward of
    /// [`Self::add_result`], whose `compute` writes the result again. Adds the gradient of the norm's weight.
    fn result_gradient<'x>(
        &self,
        after: &Range<usize>,
        g: View<'x, T>,
        gradients: &mut GradientPlace<'_, T>,
        compute: impl FnOnce(ViewMut<'_, T>) -> Result<()>,
    ) -> Result<DeviceRows<'x, T>> {
        let device = self.on();
        if self.decoder.adds_plainly(self.index) {
            return Ok(DeviceRows::Same(g));
        }
        if after.is_empty() {
            let mut d_result = copied(device, g)?;
            scale(device, self.decoder.multiplier(self.index), d_result.all_mut())?;
            return Ok(DeviceRows::Computed(d_result));
        }
        let [mut result, mut d_result] = [device.uninit(g.len())?, device.uninit(g.len())?];
        compute(result.all_mut())?;
        let norm = self.decoder.norm_after(self.index, self.at(after));
        let (of_result, of_norm) = (d_result.all_mut(), gradients.vector(after));
        rms_norm_backward(device, result.all(), norm, g, None, of_result, of_norm)?;
        Ok(DeviceRows::Computed(d_result))
    }

    /// Forward on `x [T, d]`. Returns the residual stream after it, and the activations for the backward if `keep`.
    pub(super) fn forward(
        &self,
        x: &DeviceBuffer<T>,
        keep: bool,
    ) -> Result<(DeviceBuffer<T>, Option<LayerActivations<T>>)> {
        let mixed = self.mixed(x)?;
        let feed_forward = self.feed_forward(mixed.middle.all())?;
        let mut out = copied(self.on(), mixed.middle.all())?;
        let after = &self.ranges()[Operand::FeedForwardAfterNorm];
        self.add_result(after, out.all_mut(), |to, kept| self.finish(&feed_forward, to, kept))?;
        Ok((out, keep.then_some(LayerActivations { mixed, feed_forward })))
    }

    /// Backward for the gradient `g [T, d]` of the residual stream after the layer. Adds the gradients of weights to `gradients`
    /// and returns that of `x`. Activations that were not kept are computed again. The feed-forward half runs in chunks of
    /// `chunk` rows, whose routes are added to `counts`.
    pub(super) fn backward(
        &self,
        x: &DeviceBuffer<T>,
        kept: Option<LayerActivations<T>>,
        g: &DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
        counts: &mut RouteCounts,
        chunk: usize,
    ) -> Result<DeviceBuffer<T>> {
        let (mixed, feed_forward) = match kept {
            Some(LayerActivations { mixed, feed_forward }) => (mixed, Some(feed_forward)),
            None => {
                let mixed = self.mixed(x)?;
                // Gradients may need values of the host, for which they wait.
                self.decoder.wait_for_ranks()?;
                (mixed, None)
            }
        };
        let d_middle =
            self.feed_forward_backward(&mixed.middle, feed_forward, g, gradients, counts, chunk)?;
        self.mixed_backward(x, mixed, &d_middle, gradients)
    }
}
