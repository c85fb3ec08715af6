//! The attention half of a layer.

use device::ops::attention::{AttentionForward, attention, attention_backward};
use device::ops::gates::{gate, gate_backward, join_gates, split_gates};
use device::ops::heads::{HeadAngles, HeadNormBackward, prepare, prepare_backward};
use device::ops::rows::{add_bias, column_sums};
use device::{DeviceBuffer, Matrix, Result, Storage, View, ViewMut};

use super::{DeviceLayer, input_gradient, linear};
use crate::layer::Operand;
use crate::on_device::factors::GradientPlace;
use crate::on_device::operands::{DeviceRows, copied};

/// Activations of the attention half.
#[derive(Debug)]
pub(super) struct AttentionActivations<T: Storage> {
    /// `[T, width]` the projection before norm and rotation, if heads are normalised.
    raw: Option<DeviceBuffer<T>>,
    /// `[T, width]`
    prepared: DeviceBuffer<T>,
    /// `[T, heads * head_dim]` gates of what was attended, if the layer has any.
    gates: Option<DeviceBuffer<T>>,
    /// `[T, heads * head_dim]`
    attended: DeviceBuffer<T>,
    /// `[heads, T]`
    log_sums: DeviceBuffer<f32>,
    /// `[T, d]` the residual stream after this half.
    pub(super) middle: DeviceBuffer<T>,
}

impl<T: Storage> DeviceLayer<'_, T> {
    /// Forward of the attention half.
    pub(super) fn attention(&self, x: &DeviceBuffer<T>) -> Result<AttentionActivations<T>> {
        let (device, shape) = (self.on(), self.decoder.shape);
        let rows = x.len() / self.hidden();
        let (mut prepared, gates) = self.project(x)?;
        let norm = self.decoder.head_norm(self.index, self.weights);
        let raw = norm.map(|_| copied(device, prepared.all())).transpose()?;
        prepare(device, prepared.all_mut(), shape, norm, self.head_angles(rows))?;
        let mut attended = device.uninit(rows * shape.query_width())?;
        let mut log_sums = device.uninit(rows * shape.heads)?;
        let heads = self.decoder.attention_heads(self.index, self.weights);
        attention(device, prepared.all(), self.segments, heads, attended.all_mut(), log_sums.all_mut())?;
        let mut middle = copied(device, x.all())?;
        let result = self.through_gates(&attended, gates.as_ref())?;
        let after = &self.ranges()[Operand::AttentionAfterNorm];
        self.add_result(after, middle.all_mut(), |to, kept| self.output(result.all(), to, kept))?;
        drop(result);
        Ok(AttentionActivations { raw, prepared, gates, attended, log_sums, middle })
    }

    /// Queries, keys and values `[T, width]` of `x [T, d]`, and the gates of the result `[T, heads * head_dim]`.
    fn project(&self, x: &DeviceBuffer<T>) -> Result<(DeviceBuffer<T>, Option<DeviceBuffer<T>>)> {
        let (device, ranges, shape) = (self.on(), self.ranges(), self.decoder.shape);
        let normed = self.normed(x.all(), &ranges[Operand::AttentionNorm])?;
        let weight = self.matrix(Operand::Qkv, self.hidden());
        let rows = x.len() / self.hidden();
        let mut projected = device.uninit(rows * weight.rows())?;
        linear(device, normed.all(), weight, projected.all_mut(), false)?;
        drop(normed);
        if !ranges[Operand::QkvBias].is_empty() {
            add_bias(device, projected.all_mut(), self.at(&ranges[Operand::QkvBias]))?;
        }
        if !self.decoder.is_gated(self.index) {
            return Ok((projected, None));
        }
        let mut qkv = device.uninit(rows * shape.width())?;
        let mut gates = device.uninit(rows * shape.query_width())?;
        split_gates(device, projected.all(), shape, qkv.all_mut(), gates.all_mut())?;
        Ok((qkv, Some(gates)))
    }

    /// Angles of the `rows` tokens of the pack.
    fn head_angles(&self, rows: usize) -> Option<HeadAngles<'_>> {
        self.decoder.rotaries.of_layer(self.index, self.angles, rows)
    }

    /// `[T, heads * head_dim]` what was attended, through its gates if there are any.
    fn through_gates<'x>(
        &self,
        attended: &'x DeviceBuffer<T>,
        gates: Option<&DeviceBuffer<T>>,
    ) -> Result<DeviceRows<'x, T>> {
        let Some(gates) = gates else { return Ok(DeviceRows::Same(attended.all())) };
        let mut out = self.on().uninit(attended.len())?;
        gate(self.on(), attended.all(), gates.all(), out.all_mut())?;
        Ok(DeviceRows::Computed(out))
    }

    /// The output projection of `x [T, heads * head_dim]` into `to [T, d]`, or added to it if `kept`.
    fn output(&self, x: View<'_, T>, mut to: ViewMut<'_, T>, kept: bool) -> Result<()> {
        let weight = self.matrix(Operand::Output, self.decoder.shape.query_width());
        linear(self.on(), x, weight, to.reborrow(), kept)?;
        let bias = &self.ranges()[Operand::OutputBias];
        if bias.is_empty() { Ok(()) } else { add_bias(self.on(), to, self.at(bias)) }
    }

    /// Backward of the attention half: the gradient of `x`.
    pub(super) fn attention_backward(
        &self,
        x: &DeviceBuffer<T>,
        kept: AttentionActivations<T>,
        d_middle: &DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges, shape) = (self.on(), self.ranges(), self.decoder.shape);
        let AttentionActivations { raw, prepared, gates, attended, log_sums, middle } = kept;
        drop(middle);
        let mut d_attended = self.output_backward((&attended, gates.as_ref()), d_middle, gradients)?;
        let mut d_gates = None;
        if let Some(gates) = &gates {
            let to = d_gates.insert(device.uninit(gates.len())?).all_mut();
            gate_backward(device, attended.all(), gates.all(), d_attended.all_mut(), to)?;
        }
        drop(gates);
        let mut d_qkv = device.uninit(prepared.len())?;
        let forward = AttentionForward { qkv: prepared.all(), out: attended.all(), log_sums: log_sums.all() };
        let heads = self.decoder.attention_heads(self.index, self.weights);
        let mut frozen = device.uninit(0)?;
        let of_sinks = gradients.vector(&ranges[Operand::Sinks]).unwrap_or_else(|| frozen.all_mut());
        let to = d_qkv.all_mut();
        attention_backward(device, forward, self.segments, heads, d_attended.all(), to, of_sinks)?;
        drop((d_attended, attended, prepared, log_sums));
        let norm = self.decoder.head_norm(self.index, self.weights);
        let of_norm = norm.zip(raw.as_ref()).map(|(norm, raw)| HeadNormBackward {
            norm,
            raw: raw.all(),
            gradient: gradients.vector(&ranges[Operand::QueryKeyNorm]),
        });
        let rows = x.len() / self.hidden();
        prepare_backward(device, shape, of_norm, self.head_angles(rows), d_qkv.all_mut())?;
        drop(raw);
        let d_projected = match d_gates {
            None => d_qkv,
            Some(d_gates) => {
                let mut joined = device.uninit(d_qkv.len() + d_gates.len())?;
                join_gates(device, d_qkv.all(), d_gates.all(), shape, joined.all_mut())?;
                joined
            }
        };
        self.projection_backward(x, &d_projected, d_middle, gradients)
    }

    /// `[T, heads * head_dim]` gradient of what goes into the output projection, which is what was attended, through its gates.
    fn output_backward(
        &self,
        (attended, gates): (&DeviceBuffer<T>, Option<&DeviceBuffer<T>>),
        d_middle: &DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges, width) = (self.on(), self.ranges(), self.decoder.shape.query_width());
        let result = self.through_gates(attended, gates)?;
        let again = |to: ViewMut<'_, T>| self.output(result.all(), to, false);
        let after = &ranges[Operand::AttentionAfterNorm];
        let d_result = self.result_gradient(after, d_middle.all(), gradients, again)?;
        let x = Matrix::new(result.all(), width);
        gradients.add(device, &ranges[Operand::Output], x, d_result.all())?;
        if let Some(of_bias) = gradients.vector(&ranges[Operand::OutputBias]) {
            column_sums(device, d_result.all(), of_bias)?;
        }
        input_gradient(device, d_result.all(), self.matrix(Operand::Output, width))
    }

    /// `[T, d]` gradient of `x`, through the projection, with the gradient `d_middle [T, d]` of the residual stream.
    fn projection_backward(
        &self,
        x: &DeviceBuffer<T>,
        d_projected: &DeviceBuffer<T>,
        d_middle: &DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges) = (self.on(), self.ranges());
        let norm = &ranges[Operand::AttentionNorm];
        let normed = self.normed(x.all(), norm)?;
        let projected = Matrix::new(normed.all(), self.hidden());
        gradients.add(device, &ranges[Operand::Qkv], projected, d_projected.all())?;
        drop(normed);
        if let Some(of_bias) = gradients.vector(&ranges[Operand::QkvBias]) {
            column_sums(device, d_projected.all(), of_bias)?;
        }
        let d_normed = input_gradient(device, d_projected.all(), self.matrix(Operand::Qkv, self.hidden()))?;
        let mut d_x = device.uninit(x.len())?;
        self.normed_backward(x.all(), norm, d_normed.all(), d_middle.all(), d_x.all_mut(), gradients)?;
        Ok(d_x)
    }
}
