//! A gated DeltaNet as the mixer of a layer (Yang et al. 2024, arXiv 2412.06464).
//!
//! What the projections give and what the recurrence reads of its states are kept; queries, keys, values and gates are computed again
//! in the backward. The inputs of the gates are f32, whatever weights are stored in.

use device::ops::convolution::{
    ConvolutionInputs, HeadGradients, convolution_inputs_backward, convolution_kernel_gradient, convolve,
    convolve_backward, open_gates, open_gates_backward,
};
use device::ops::delta_rule::{
    DeltaOperandGradients, DeltaOperands, DeltaRuns, delta_rule, delta_rule_backward,
};
use device::ops::norm::{rms_norm, rms_norm_backward};
use device::ops::result_gate::{gate_result, gate_result_backward};
use device::ops::rows::column_sums;
use device::ops::vectors::add_multiple;
use device::{DeviceBuffer, Matrix, MatrixMut, Result, Storage, View};

use super::{DeviceLayer, input_gradient, linear};
use crate::layer::{DeltaNetSpec, Operand};
use crate::on_device::factors::GradientPlace;
use crate::on_device::operands::DeviceRows;

/// Activations of a DeltaNet.
#[derive(Debug)]
pub(super) struct DeltaNetActivations<T: Storage> {
    spec: DeltaNetSpec,
    /// `[T, channels + values]` inputs of the convolution, then the gate of the result.
    projected: DeviceBuffer<T>,
    /// `[T, 2, value_heads]` before their activations.
    gates: DeviceBuffer<f32>,
    /// `[T, values]` before norm and gate.
    mixed: DeviceBuffer<T>,
}

/// What the recurrence reads.
struct Opened<T: Storage> {
    /// `[T, channels]`
    heads: DeviceBuffer<T>,
    /// `[T, 2, value_heads]`
    gates: DeviceBuffer<f32>,
}

impl<T: Storage> DeltaNetActivations<T> {
    /// `[T, values]` what was mixed, normalised and through its gate.
    pub(super) fn result(&self, layer: &DeviceLayer<'_, T>) -> Result<DeviceRows<'_, T>> {
        let (device, normed) = (layer.on(), self.normed(layer)?);
        let mut out = device.uninit(normed.len())?;
        gate_result(device, normed.all(), self.projected.all(), self.spec.value_width(), out.all_mut())?;
        Ok(DeviceRows::Computed(out))
    }

    fn normed(&self, layer: &DeviceLayer<'_, T>) -> Result<DeviceBuffer<T>> {
        let mut normed = layer.on().uninit(self.mixed.len())?;
        let norm = layer.decoder.result_norm(layer.index, layer.weights);
        rms_norm(layer.on(), self.mixed.all(), norm, normed.all_mut())?;
        Ok(normed)
    }
}

impl<T: Storage> Opened<T> {
    fn operands(&self, spec: &DeltaNetSpec) -> DeltaOperands<'_, T> {
        DeltaOperands { shape: spec.shape(), heads: self.heads.all(), opened: self.gates.all() }
    }
}

impl<T: Storage> DeviceLayer<'_, T> {
    /// Forward of the residual stream `x [T, d]`.
    pub(super) fn delta_net(&self, spec: DeltaNetSpec, x: View<'_, T>) -> Result<DeltaNetActivations<T>> {
        let (device, hidden) = (self.on(), self.hidden());
        let (normed, rows) = (self.mixer_input(x)?, x.len() / hidden);
        let (weight, of_gates) =
            (self.matrix(Operand::Qkv, hidden), self.matrix(Operand::DeltaGates, hidden));
        let mut projected = device.uninit(rows * weight.rows())?;
        linear(device, normed.all(), weight, projected.all_mut(), false)?;
        let mut gates = device.uninit::<f32>(rows * of_gates.rows())?;
        let to = MatrixMut::new(gates.all_mut(), of_gates.rows());
        device.product(Matrix::new(normed.all(), hidden), of_gates.transposed(), to, 1.0, 0.0)?;
        drop(normed);
        let opened = self.opened(&spec, &projected, &gates)?;
        let mixed = delta_rule(device, opened.operands(&spec), self.delta_runs())?;
        Ok(DeltaNetActivations { spec, projected, gates, mixed })
    }

    /// The sequences of the pack.
    fn delta_runs(&self) -> &DeltaRuns {
        let Some(runs) = self.runs else {
            unreachable!("a pass over layers with a recurrence has their runs")
        };
        runs
    }

    /// What the convolution sees of `projected [T, stride]`.
    fn convolution<'x>(
        &'x self,
        spec: &DeltaNetSpec,
        projected: &'x DeviceBuffer<T>,
    ) -> ConvolutionInputs<'x, T> {
        let sources = self.delta_runs().sources();
        self.decoder.convolution((self.index, spec), self.weights, projected.all(), sources)
    }

    fn opened(
        &self,
        spec: &DeltaNetSpec,
        projected: &DeviceBuffer<T>,
        gates: &DeviceBuffer<f32>,
    ) -> Result<Opened<T>> {
        let (device, inputs) = (self.on(), self.convolution(spec, projected));
        let rows = gates.len() / (2 * spec.value_heads);
        let mut opened =
            Opened { heads: device.uninit(rows * spec.channels())?, gates: device.uninit(gates.len())? };
        convolve(device, inputs, None, opened.heads.all_mut())?;
        let gates = self.decoder.delta_gates(self.index, self.weights, gates.all());
        open_gates(device, gates, opened.gates.all_mut())?;
        Ok(opened)
    }

    /// `[T, d]` gradient of the normalised input of the residual stream `x [T, d]`, for the gradient `g [T, values]` of the result. Adds
    /// the gradients of weights.
    pub(super) fn delta_net_backward(
        &self,
        x: View<'_, T>,
        kept: DeltaNetActivations<T>,
        mut g: DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges, hidden) = (self.on(), self.ranges(), self.hidden());
        let normed = kept.normed(self)?;
        let DeltaNetActivations { spec, projected, gates, mixed } = kept;
        let mut d_projected = device.uninit(projected.len())?;
        let (of_gate, width) = (d_projected.all_mut(), spec.value_width());
        gate_result_backward(device, normed.all(), projected.all(), width, g.all_mut(), of_gate)?;
        let norm = self.decoder.result_norm(self.index, self.weights);
        let mut d_mixed = normed;
        let (of_mixed, of_norm) = (d_mixed.all_mut(), gradients.vector(&ranges[Operand::ResultNorm]));
        rms_norm_backward(device, mixed.all(), norm, g.all(), None, of_mixed, of_norm)?;
        drop((mixed, g));
        let opened = self.opened(&spec, &projected, &gates)?;
        let found = delta_rule_backward(device, opened.operands(&spec), self.delta_runs(), d_mixed.all())?;
        drop((opened, d_mixed));
        let DeltaOperandGradients { pairs, values, opened } = found;
        let inputs = self.convolution(&spec, &projected);
        let mut d_sums = device.uninit::<f32>(gates.len() / (2 * spec.value_heads) * spec.channels())?;
        let of_heads = HeadGradients { pairs: pairs.all(), values: values.all() };
        convolve_backward(device, inputs, of_heads, d_sums.all_mut())?;
        drop((pairs, values));
        let uses = self.delta_runs().uses();
        convolution_inputs_backward(device, inputs, uses, d_sums.all(), d_projected.all_mut())?;
        if let Some(of_kernel) = gradients.vector(&ranges[Operand::Convolution]) {
            convolution_kernel_gradient(device, inputs, d_sums.all(), of_kernel)?;
        }
        drop((projected, d_sums));
        let d_gates = self.gates_backward(&gates, &opened, gradients)?;
        drop((gates, opened));
        let normed = self.mixer_input(x)?;
        let input = Matrix::new(normed.all(), hidden);
        gradients.add(device, &ranges[Operand::Qkv], input, d_projected.all())?;
        gradients.add(device, &ranges[Operand::DeltaGates], input, d_gates.all())?;
        drop(normed);
        let mut d_normed = input_gradient(device, d_projected.all(), self.matrix(Operand::Qkv, hidden))?;
        let of_gates = input_gradient(device, d_gates.all(), self.matrix(Operand::DeltaGates, hidden))?;
        add_multiple(device, of_gates.all(), 1.0, d_normed.all_mut())?;
        Ok(d_normed)
    }

    /// `[T, 2, value_heads]` gradient of the inputs of the gates, for that of the opened ones. Adds those of rates and biases.
    fn gates_backward(
        &self,
        gates: &DeviceBuffer<f32>,
        opened: &DeviceBuffer<f32>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges) = (self.on(), self.ranges());
        let mut d_gates = device.uninit(gates.len())?;
        let mut d_vectors = device.uninit::<f32>(gates.len())?;
        let of = self.decoder.delta_gates(self.index, self.weights, gates.all());
        open_gates_backward(device, of, opened.all(), d_gates.all_mut(), d_vectors.all_mut())?;
        // Rates and biases are neighbours.
        let both = ranges[Operand::DecayRate].start..ranges[Operand::TimeBias].end;
        if let Some(of_vectors) = gradients.vector(&both) {
            column_sums(device, d_vectors.all(), of_vectors)?;
        }
        Ok(d_gates)
    }
}
