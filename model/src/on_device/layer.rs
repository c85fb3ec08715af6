//! One layer on a device: the halves of `decoder::block`, with the same formulas.
//!
//! Invariant: the backward needs no other layer. It adds to gradients of weights, and returns the gradient of its input.

use std::ops::Range;

use device::ops::attention::{Segments, attention, attention_backward};
use device::ops::heads::{HeadNorm, head_norm_gradient, prepare, prepare_backward};
use device::ops::norm::{rms_norm, rms_norm_backward, rms_norm_weight_gradient};
use device::ops::rows::{add_bias, column_sums};
use device::ops::swiglu::{swiglu, swiglu_backward};
use device::{Device, DeviceBuffer, Matrix, MatrixMut, Result, Storage, View, ViewMut};

use super::{DeviceAngles, DeviceDecoder};
use crate::layer::{LayerRanges, Operand};

/// Activations of a layer's forward, for its backward. `T` tokens.
#[derive(Debug)]
pub(super) struct LayerActivations<T: Storage> {
    attention: AttentionActivations<T>,
    /// `[T, 2 m]`
    gate_up: DeviceBuffer<T>,
}

/// Activations of the attention half.
#[derive(Debug)]
pub(super) struct AttentionActivations<T: Storage> {
    /// `[T, width]` the projection before norm and rotation, if heads are normalised.
    raw: Option<DeviceBuffer<T>>,
    /// `[T, width]`
    prepared: DeviceBuffer<T>,
    /// `[T, heads * head_dim]`
    attended: DeviceBuffer<T>,
    /// `[heads, T]`
    log_sums: DeviceBuffer<f32>,
    /// `[T, d]` the residual stream after this half.
    middle: DeviceBuffer<T>,
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

    fn head_norm(&self) -> Option<HeadNorm<'a, T>> {
        let range = &self.ranges()[Operand::QueryKeyNorm];
        if range.is_empty() {
            return None;
        }
        let (both, dim) = (self.at(range), self.decoder.shape.head_dim);
        let (query, key) = (both.slice(0..dim), both.slice(dim..2 * dim));
        Some(HeadNorm { query, key, eps: self.eps() })
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
        let gate_up = self.gate_up(attention.middle.all())?;
        let mut out = self.on().uninit(x.len())?;
        self.on().copy(attention.middle.all(), out.all_mut())?;
        let activated = self.activated(gate_up.all())?;
        let down = self.matrix(Operand::Down, self.decoder.config.intermediate_size);
        linear(self.on(), activated.all(), down, out.all_mut(), true)?;
        Ok((out, keep.then_some(LayerActivations { attention, gate_up })))
    }

    /// Forward of the attention half.
    fn attention(&self, x: &DeviceBuffer<T>) -> Result<AttentionActivations<T>> {
        let (device, ranges, shape) = (self.on(), self.ranges(), self.decoder.shape);
        let rows = x.len() / self.hidden();
        let normed = self.normed(x.all(), &ranges[Operand::AttentionNorm])?;
        let mut prepared = device.uninit(rows * shape.width())?;
        linear(device, normed.all(), self.matrix(Operand::Qkv, self.hidden()), prepared.all_mut(), false)?;
        drop(normed);
        if !ranges[Operand::QkvBias].is_empty() {
            add_bias(device, prepared.all_mut(), self.at(&ranges[Operand::QkvBias]))?;
        }
        let norm = self.head_norm();
        let raw = match norm {
            Some(_) => {
                let mut raw = device.uninit(prepared.len())?;
                device.copy(prepared.all(), raw.all_mut())?;
                Some(raw)
            }
            None => None,
        };
        prepare(device, prepared.all_mut(), shape, norm, self.angles.cos.all(), self.angles.sin.all())?;
        let mut attended = device.uninit(rows * shape.query_width())?;
        let mut log_sums = device.uninit(rows * shape.heads)?;
        attention(device, prepared.all(), self.segments, shape, attended.all_mut(), log_sums.all_mut())?;
        let mut middle = device.uninit(x.len())?;
        device.copy(x.all(), middle.all_mut())?;
        let output = self.matrix(Operand::Output, shape.query_width());
        linear(device, attended.all(), output, middle.all_mut(), true)?;
        if !ranges[Operand::OutputBias].is_empty() {
            add_bias(device, middle.all_mut(), self.at(&ranges[Operand::OutputBias]))?;
        }
        Ok(AttentionActivations { raw, prepared, attended, log_sums, middle })
    }

    /// `[T, 2 m]` of the second half for its input `middle [T, d]`.
    fn gate_up(&self, middle: View<'_, T>) -> Result<DeviceBuffer<T>> {
        let normed = self.normed(middle, &self.ranges()[Operand::FeedForwardNorm])?;
        self.gate_up_of(normed.all())
    }

    fn gate_up_of(&self, normed: View<'_, T>) -> Result<DeviceBuffer<T>> {
        let rows = normed.len() / self.hidden();
        let mut out = self.on().uninit(rows * 2 * self.decoder.config.intermediate_size)?;
        linear(self.on(), normed, self.matrix(Operand::GateUp, self.hidden()), out.all_mut(), false)?;
        Ok(out)
    }

    /// `[T, m]`
    fn activated(&self, gate_up: View<'_, T>) -> Result<DeviceBuffer<T>> {
        let mut out = self.on().uninit(gate_up.len() / 2)?;
        swiglu(self.on(), gate_up, self.decoder.config.intermediate_size, out.all_mut())?;
        Ok(out)
    }

    /// Backward for the gradient `g [T, d]` of the residual stream after the layer. Adds the gradients of weights to `gradients`
    /// and returns that of `x`. Activations that were not kept are computed again. The feed-forward half runs in chunks of
    /// `chunk` rows.
    pub(super) fn backward(
        &self,
        x: &DeviceBuffer<T>,
        kept: Option<LayerActivations<T>>,
        g: &DeviceBuffer<T>,
        gradients: &mut ViewMut<'_, f32>,
        chunk: usize,
    ) -> Result<DeviceBuffer<T>> {
        let (attention, gate_up) = match kept {
            Some(LayerActivations { attention, gate_up }) => (attention, Some(gate_up)),
            None => (self.attention(x)?, None),
        };
        let d_middle =
            self.feed_forward_backward(&attention.middle, gate_up.as_ref(), g, gradients, chunk)?;
        drop(gate_up);
        self.attention_backward(x, attention, &d_middle, gradients)
    }

    /// Backward of the feed-forward half: the gradient of `middle`.
    fn feed_forward_backward(
        &self,
        middle: &DeviceBuffer<T>,
        gate_up: Option<&DeviceBuffer<T>>,
        g: &DeviceBuffer<T>,
        gradients: &mut ViewMut<'_, f32>,
        chunk: usize,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges, hidden) = (self.on(), self.ranges(), self.hidden());
        let width = self.decoder.config.intermediate_size;
        let mut d_middle = device.uninit(middle.len())?;
        let rows = middle.len() / hidden;
        for start in (0..rows).step_by(chunk.max(1)) {
            let piece = start * hidden..(start + chunk).min(rows) * hidden;
            let (middle, g) = (middle.view(piece.clone()), g.view(piece.clone()));
            let normed = self.normed(middle, &ranges[Operand::FeedForwardNorm])?;
            let mut computed = None;
            let gate_up = match gate_up {
                Some(kept) => kept.view(piece.start / hidden * 2 * width..piece.end / hidden * 2 * width),
                None => computed.insert(self.gate_up_of(normed.all())?).all(),
            };
            let activated = self.activated(gate_up)?;
            let of_down = gradients.slice_mut(ranges[Operand::Down].clone());
            weight_gradient(device, Matrix::new(activated.all(), width), g, of_down)?;
            drop(activated);
            let d_activated = input_gradient(device, g, self.matrix(Operand::Down, width))?;
            let mut d_gate_up = device.uninit(gate_up.len())?;
            swiglu_backward(device, gate_up, width, d_activated.all(), d_gate_up.all_mut())?;
            drop((d_activated, computed));
            let of_gate_up = gradients.slice_mut(ranges[Operand::GateUp].clone());
            weight_gradient(device, Matrix::new(normed.all(), hidden), d_gate_up.all(), of_gate_up)?;
            let d_normed = input_gradient(device, d_gate_up.all(), self.matrix(Operand::GateUp, hidden))?;
            let norm = &ranges[Operand::FeedForwardNorm];
            let d_piece = d_middle.view_mut(piece);
            rms_norm_backward(device, middle, self.at(norm), self.eps(), d_normed.all(), Some(g), d_piece)?;
            let of_norm = gradients.slice_mut(norm.clone());
            rms_norm_weight_gradient(device, middle, self.eps(), d_normed.all(), of_norm)?;
        }
        Ok(d_middle)
    }

    /// Backward of the attention half: the gradient of `x`.
    fn attention_backward(
        &self,
        x: &DeviceBuffer<T>,
        kept: AttentionActivations<T>,
        d_middle: &DeviceBuffer<T>,
        gradients: &mut ViewMut<'_, f32>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges, shape) = (self.on(), self.ranges(), self.decoder.shape);
        let AttentionActivations { raw, prepared, attended, log_sums, middle } = kept;
        drop(middle);
        let query_width = shape.query_width();
        let of_output = gradients.slice_mut(ranges[Operand::Output].clone());
        weight_gradient(device, Matrix::new(attended.all(), query_width), d_middle.all(), of_output)?;
        if !ranges[Operand::OutputBias].is_empty() {
            column_sums(device, d_middle.all(), gradients.slice_mut(ranges[Operand::OutputBias].clone()))?;
        }
        let d_attended = input_gradient(device, d_middle.all(), self.matrix(Operand::Output, query_width))?;
        let mut d_qkv = device.uninit(prepared.len())?;
        let (qkv, out) = (prepared.all(), attended.all());
        attention_backward(
            device,
            qkv,
            self.segments,
            shape,
            out,
            log_sums.all(),
            d_attended.all(),
            d_qkv.all_mut(),
        )?;
        drop((d_attended, attended, prepared));
        let (cos, sin) = (self.angles.cos.all(), self.angles.sin.all());
        if let Some(raw) = &raw {
            let of_norm = gradients.slice_mut(ranges[Operand::QueryKeyNorm].clone());
            head_norm_gradient(device, raw.all(), shape, self.eps(), cos, sin, d_qkv.all(), of_norm)?;
        }
        let raw = raw.as_ref().map(DeviceBuffer::all);
        prepare_backward(device, raw, shape, self.head_norm(), cos, sin, d_qkv.all_mut())?;
        let normed = self.normed(x.all(), &ranges[Operand::AttentionNorm])?;
        let of_qkv = gradients.slice_mut(ranges[Operand::Qkv].clone());
        weight_gradient(device, Matrix::new(normed.all(), self.hidden()), d_qkv.all(), of_qkv)?;
        drop(normed);
        if !ranges[Operand::QkvBias].is_empty() {
            column_sums(device, d_qkv.all(), gradients.slice_mut(ranges[Operand::QkvBias].clone()))?;
        }
        let d_normed = input_gradient(device, d_qkv.all(), self.matrix(Operand::Qkv, self.hidden()))?;
        drop(d_qkv);
        let norm = &ranges[Operand::AttentionNorm];
        let mut d_x = device.uninit(x.len())?;
        let base = Some(d_middle.all());
        rms_norm_backward(device, x.all(), self.at(norm), self.eps(), d_normed.all(), base, d_x.all_mut())?;
        let of_norm = gradients.slice_mut(norm.clone());
        rms_norm_weight_gradient(device, x.all(), self.eps(), d_normed.all(), of_norm)?;
        Ok(d_x)
    }
}
