//! Attention as the mixer of a layer.

use device::ops::attention::{AttentionForward, AttentionHeads, attention, attention_backward};
use device::ops::gates::{gate, gate_backward, join_gates, split_gates};
use device::ops::heads::{HeadAngles, HeadNormBackward, Preparation, prepare, prepare_backward};
use device::ops::rows::{add_bias, column_sums};
use device::ops::vectors::add;
use device::{DeviceBuffer, Matrix, Result, Storage, View, ViewMut};

use super::{DeviceLayer, input_gradient, linear};
use crate::layer::Operand;
use crate::on_device::context::{Exchanged, HeadExchange};
use crate::on_device::factors::GradientPlace;
use crate::on_device::operands::{DeviceRows, copied};

/// Activations of attention.
#[derive(Debug)]
pub(super) struct AttentionActivations<T: Storage> {
    /// `[T, width]` the projection before norm and rotation, if heads are normalised.
    raw: Option<DeviceBuffer<T>>,
    /// `[T, heads * head_dim]` gates of what was attended, if the layer has any.
    gates: Option<DeviceBuffer<T>>,
    /// `[T, heads * head_dim]`
    attended: DeviceBuffer<T>,
    heads: AttendedHeads<T>,
}

/// What attention of the heads of this rank leaves to its backward. Of ranks that share the tokens each has some heads of all tokens.
#[derive(Debug)]
pub(super) struct AttendedHeads<T: Storage> {
    /// `[T, width]`
    qkv: DeviceBuffer<T>,
    /// `[T, heads * head_dim]` the result, if it is not that of the tokens of this rank.
    out: Option<DeviceBuffer<T>>,
    /// `[heads, T]`
    log_sums: DeviceBuffer<f32>,
}

/// Queries, keys and values, gates, and a bias that is still to be added.
type ProjectedHeads<'a, T> = (DeviceBuffer<T>, Option<DeviceBuffer<T>>, Option<View<'a, T>>);

impl<T: Storage> AttentionActivations<T> {
    /// `[T, heads * head_dim]` what was attended, through its gates if there are any.
    pub(super) fn result(&self, layer: &DeviceLayer<'_, T>) -> Result<DeviceRows<'_, T>> {
        let (device, attended) = (layer.on(), &self.attended);
        let Some(gates) = &self.gates else { return Ok(DeviceRows::Same(attended.all())) };
        let mut out = device.uninit(attended.len())?;
        gate(device, attended.all(), gates.all(), out.all_mut())?;
        Ok(DeviceRows::Computed(out))
    }
}

impl<T: Storage> DeviceLayer<'_, T> {
    /// Forward of the residual stream `x [T, d]`.
    pub(super) fn attention(&self, x: View<'_, T>) -> Result<AttentionActivations<T>> {
        let (device, shape) = (self.on(), self.decoder.shape);
        let rows = x.len() / self.hidden();
        let (mut prepared, gates, mut bias) = self.project(x)?;
        let norm = self.decoder.head_norm(self.index, self.weights);
        if let Some(bias) = bias.take_if(|_| norm.is_some()) {
            add_bias(device, prepared.all_mut(), bias)?;
        }
        let raw = norm.map(|_| copied(device, prepared.all())).transpose()?;
        let how = Preparation { bias, norm, angles: self.head_angles(rows) };
        prepare(device, prepared.all_mut(), shape, how)?;
        let (attended, heads) = self.attend(prepared)?;
        Ok(AttentionActivations { raw, gates, attended, heads })
    }

    /// Attention of `prepared [T, width]`: its result `[T, heads * head_dim]`, and what the backward needs.
    pub(super) fn attend(&self, prepared: DeviceBuffer<T>) -> Result<(DeviceBuffer<T>, AttendedHeads<T>)> {
        let device = self.on();
        let qkv = match self.exchange {
            Some(exchange) => exchange.to_heads(device, prepared.all(), Exchanged::Projected)?,
            None => prepared,
        };
        let heads = self.attention_heads();
        let rows = qkv.len() / heads.shape.width();
        let mut out = device.uninit(rows * heads.shape.query_width())?;
        let mut log_sums = device.uninit(rows * heads.shape.heads)?;
        attention(device, qkv.all(), self.segments, heads, out.all_mut(), log_sums.all_mut())?;
        let Some(exchange) = self.exchange else {
            return Ok((out, AttendedHeads { qkv, out: None, log_sums }));
        };
        let attended = exchange.to_tokens(device, out.all(), Exchanged::Results)?;
        Ok((attended, AttendedHeads { qkv, out: Some(out), log_sums }))
    }

    /// `[T, width]` gradient of what was prepared, for the gradient `g [T, heads * head_dim]` of the result `attended` of
    /// [`Self::attend`]. Adds that of the sinks.
    pub(super) fn attend_backward(
        &self,
        kept: AttendedHeads<T>,
        attended: &DeviceBuffer<T>,
        g: View<'_, T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, heads) = (self.on(), self.attention_heads());
        let AttendedHeads { qkv, out, log_sums } = kept;
        let of_heads = |exchange: &HeadExchange| exchange.to_heads(device, g, Exchanged::Results);
        let exchanged = self.exchange.map(of_heads).transpose()?;
        let g = exchanged.as_ref().map_or(g, DeviceBuffer::all);
        let out = out.as_ref().unwrap_or(attended).all();
        let forward = AttentionForward { qkv: qkv.all(), out, log_sums: log_sums.all() };
        let mut d_qkv = device.uninit(qkv.len())?;
        let mut frozen = device.uninit(0)?;
        let mut of_sinks = gradients.vector(&self.ranges()[Operand::Sinks]);
        let of_sinks = match (&mut of_sinks, self.exchange) {
            (Some(all), Some(exchange)) => all.slice_mut(exchange.own_heads()),
            (Some(all), _) => all.reborrow(),
            (None, _) => frozen.all_mut(),
        };
        attention_backward(device, forward, self.segments, heads, g, d_qkv.all_mut(), of_sinks)?;
        match self.exchange {
            Some(exchange) => exchange.to_tokens(device, d_qkv.all(), Exchanged::Projected),
            None => Ok(d_qkv),
        }
    }

    /// The heads of this rank.
    fn attention_heads(&self) -> AttentionHeads<'_, T> {
        let all = self.decoder.attention_heads(self.index, self.weights);
        match self.exchange {
            None => all,
            Some(exchange) => AttentionHeads {
                shape: exchange.own_shape(),
                sinks: all.sinks.map(|sinks| sinks.slice(exchange.own_heads())),
                ..all
            },
        }
    }

    /// Queries, keys and values `[T, width]` of `x [T, d]`, the gates of the result `[T, heads * head_dim]`, and the bias `[width]`
    /// that is still to be added.
    fn project(&self, x: View<'_, T>) -> Result<ProjectedHeads<'_, T>> {
        let (device, ranges, shape) = (self.on(), self.ranges(), self.decoder.shape);
        let normed = self.mixer_input(x)?;
        let weight = self.matrix(Operand::Qkv, self.hidden());
        let rows = x.len() / self.hidden();
        let mut projected = device.uninit(rows * weight.rows())?;
        linear(device, normed.all(), weight, projected.all_mut(), false)?;
        drop(normed);
        let bias = &ranges[Operand::QkvBias];
        let bias = (!bias.is_empty()).then(|| self.at(bias));
        if !self.decoder.is_gated(self.index) {
            return Ok((projected, None, bias));
        }
        if let Some(bias) = bias {
            add_bias(device, projected.all_mut(), bias)?;
        }
        let mut qkv = device.uninit(rows * shape.width())?;
        let mut gates = device.uninit(rows * shape.query_width())?;
        split_gates(device, projected.all(), shape, qkv.all_mut(), gates.all_mut())?;
        Ok((qkv, Some(gates), None))
    }

    /// Angles of the `rows` tokens of the pack.
    pub(super) fn head_angles(&self, rows: usize) -> Option<HeadAngles<'_>> {
        self.decoder.rotaries.of_layer(self.index, self.angles, rows)
    }

    /// `[T, d]` gradient of the normalised input of the residual stream `x [T, d]`, for the gradient `g [T, heads * head_dim]` of the
    /// result. Adds the gradients of weights.
    pub(super) fn attention_backward(
        &self,
        x: View<'_, T>,
        kept: AttentionActivations<T>,
        mut g: DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges, shape) = (self.on(), self.ranges(), self.decoder.shape);
        let AttentionActivations { raw, gates, attended, heads } = kept;
        let mut d_gates = None;
        if let Some(gates) = &gates {
            let to = d_gates.insert(device.uninit(gates.len())?).all_mut();
            gate_backward(device, attended.all(), gates.all(), g.all_mut(), to)?;
        }
        drop(gates);
        let mut d_qkv = self.attend_backward(heads, &attended, g.all(), gradients)?;
        drop((g, attended));
        self.heads_backward(raw.as_ref(), d_qkv.all_mut(), gradients)?;
        drop(raw);
        let d_projected = match d_gates {
            None => d_qkv,
            Some(d_gates) => {
                let mut joined = device.uninit(d_qkv.len() + d_gates.len())?;
                join_gates(device, d_qkv.all(), d_gates.all(), shape, joined.all_mut())?;
                joined
            }
        };
        let normed = self.mixer_input(x)?;
        let projected = Matrix::new(normed.all(), self.hidden());
        gradients.add(device, &ranges[Operand::Qkv], projected, d_projected.all())?;
        drop(normed);
        if let Some(of_bias) = gradients.vector(&ranges[Operand::QkvBias]) {
            column_sums(device, d_projected.all(), of_bias)?;
        }
        let mut d_normed =
            input_gradient(device, d_projected.all(), self.matrix(Operand::Qkv, self.hidden()))?;
        self.decoder.sum_over_ranks(d_normed.all_mut())?;
        Ok(d_normed)
    }
    /// Backward of norm and rotation of heads: turns the gradient of what was prepared, `d_qkv [T, width]`, into that of the projection
    /// `raw`, which is kept if heads are normalised. Adds the gradient of the norm, over the heads of all ranks that share the weights.
    fn heads_backward(
        &self,
        raw: Option<&DeviceBuffer<T>>,
        d_qkv: ViewMut<'_, T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<()> {
        let (device, shape) = (self.on(), self.decoder.shape);
        let angles = self.head_angles(d_qkv.len() / shape.width());
        let Some((norm, raw)) = self.decoder.head_norm(self.index, self.weights).zip(raw) else {
            return prepare_backward(device, shape, None, angles, d_qkv);
        };
        let of_heads = |gradient| Some(HeadNormBackward { norm, raw: raw.all(), gradient });
        match gradients.vector(&self.ranges()[Operand::QueryKeyNorm]) {
            Some(of_norm) if self.decoder.ranks.tensor.is_some() => {
                let mut own = device.zeros::<f32>(of_norm.len())?;
                prepare_backward(device, shape, of_heads(Some(own.all_mut())), angles, d_qkv)?;
                self.decoder.sum_over_ranks(own.all_mut())?;
                add(device, own.all(), of_norm)
            }
            of_norm => prepare_backward(device, shape, of_heads(of_norm), angles, d_qkv),
        }
    }
}
