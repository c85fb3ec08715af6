//! The attention half of a layer.

use device::ops::attention::{attention, attention_backward};
use device::ops::heads::{HeadNorm, head_norm_gradient, prepare, prepare_backward};
use device::ops::norm::{rms_norm_backward, rms_norm_weight_gradient};
use device::ops::rows::{add_bias, column_sums};
use device::{DeviceBuffer, Matrix, Result, Storage, ViewMut};

use super::{DeviceLayer, input_gradient, linear, weight_gradient};
use crate::layer::Operand;

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
    pub(super) middle: DeviceBuffer<T>,
}

impl<'a, T: Storage> DeviceLayer<'a, T> {
    fn head_norm(&self) -> Option<HeadNorm<'a, T>> {
        let range = &self.ranges()[Operand::QueryKeyNorm];
        if range.is_empty() {
            return None;
        }
        let (both, dim) = (self.at(range), self.decoder.shape.head_dim);
        let (query, key) = (both.slice(0..dim), both.slice(dim..2 * dim));
        Some(HeadNorm { query, key, eps: self.eps() })
    }

    /// Forward of the attention half.
    pub(super) fn attention(&self, x: &DeviceBuffer<T>) -> Result<AttentionActivations<T>> {
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

    /// Backward of the attention half: the gradient of `x`.
    pub(super) fn attention_backward(
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
