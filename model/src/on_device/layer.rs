//! One layer on a device: the halves of `decoder::block`, with the same formulas.
//!
//! `attention` is the first half, `feed_forward` the second, with the `experts` that it may have.
//!
//! Invariant: the backward needs no other layer. It adds to gradients of weights, and returns the gradient of its input.

mod attention;
mod experts;
mod feed_forward;

use std::ops::Range;

use device::ops::attention::Segments;
use device::ops::norm::rms_norm;
use device::ops::routes::GivenSlots;
use device::{Device, DeviceBuffer, Matrix, MatrixMut, Result, Storage, View, ViewMut};

use self::attention::AttentionActivations;
pub use self::experts::RouteCounts;
use self::feed_forward::FeedForwardActivations;
use super::{DeviceAngles, DeviceDecoder};
use crate::layer::{LayerRanges, Operand};

/// Activations of a layer's forward, for its backward. `T` tokens.
#[derive(Debug)]
pub(super) struct LayerActivations<T: Storage> {
    attention: AttentionActivations<T>,
    feed_forward: FeedForwardActivations<T>,
}

/// A layer in a pass over a pack.
pub(super) struct DeviceLayer<'a, T: Storage> {
    pub(super) decoder: &'a DeviceDecoder<T>,
    /// Its number.
    pub(super) index: usize,
    /// The values of its unit.
    pub(super) weights: View<'a, T>,
    pub(super) angles: &'a DeviceAngles,
    pub(super) segments: &'a Segments,
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

    fn eps(&self) -> f32 {
        self.decoder.config.rms_norm_eps
    }

    /// `[T, d]` a row of the stream, normalised by the weight at `norm`.
    fn normed(&self, x: View<'_, T>, norm: &Range<usize>) -> Result<DeviceBuffer<T>> {
        let mut out = self.on().uninit(x.len())?;
        rms_norm(self.on(), x, self.at(norm), self.eps(), out.all_mut())?;
        Ok(out)
    }

    /// Forward on `x [T, d]`. Returns the residual stream after it, and the activations for the backward if `keep`.
    pub(super) fn forward(
        &self,
        x: &DeviceBuffer<T>,
        keep: bool,
    ) -> Result<(DeviceBuffer<T>, Option<LayerActivations<T>>)> {
        let attention = self.attention(x)?;
        let feed_forward = self.feed_forward(attention.middle.all())?;
        let mut out = self.on().uninit(x.len())?;
        self.on().copy(attention.middle.all(), out.all_mut())?;
        self.finish(&feed_forward, out.all_mut())?;
        Ok((out, keep.then_some(LayerActivations { attention, feed_forward })))
    }

    /// Backward for the gradient `g [T, d]` of the residual stream after the layer. Adds the gradients of weights to `gradients`
    /// and returns that of `x`. Activations that were not kept are computed again. The feed-forward half runs in chunks of
    /// `chunk` rows, whose routes are added to `counts`.
    pub(super) fn backward(
        &self,
        x: &DeviceBuffer<T>,
        kept: Option<LayerActivations<T>>,
        g: &DeviceBuffer<T>,
        gradients: &mut ViewMut<'_, f32>,
        counts: &mut RouteCounts,
        chunk: usize,
    ) -> Result<DeviceBuffer<T>> {
        let (attention, feed_forward) = match kept {
            Some(LayerActivations { attention, feed_forward }) => (attention, Some(feed_forward)),
            None => (self.attention(x)?, None),
        };
        let d_middle =
            self.feed_forward_backward(&attention.middle, feed_forward, g, gradients, counts, chunk)?;
        self.attention_backward(x, attention, &d_middle, gradients)
    }
}
