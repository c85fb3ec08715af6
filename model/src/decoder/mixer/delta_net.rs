//! A gated DeltaNet as a mixer (Yang et al. 2024, arXiv 2412.06464): projections, and the vectors of its recurrence.

use candle_core::{Result, Tensor};

use super::{MixerOperands, MixerReverse, MixerTrace, MixerVectors, Projected};
use crate::layer::DeltaNetSpec;
use crate::ops::adapters::LinearPass;
use crate::ops::delta_net::{DeltaReverse, DeltaRule, convolution_gradient};
use crate::ops::linear::{Linear, bias_gradient};
use crate::ops::result_gate::{ResultNorm, norm_weight_gradient};
use crate::ops::{matrix, values};

/// The weights of a DeltaNet without those of its output projection.
#[derive(Clone, Debug)]
pub(in crate::decoder) struct DeltaNetWeights {
    pub(in crate::decoder) spec: DeltaNetSpec,
    /// Queries, keys, values and the gate of the result.
    pub(in crate::decoder) projection: Linear,
    /// Strength of updates, and decay.
    pub(in crate::decoder) gates: Linear,
    /// `[taps, channels]`
    pub(in crate::decoder) kernel: Vec<f32>,
    /// `[value_heads]` rates of decay, above 0.
    pub(in crate::decoder) rates: Vec<f32>,
    /// `[value_heads]`
    pub(in crate::decoder) time_bias: Vec<f32>,
    /// `[value_dim]`
    pub(in crate::decoder) result_norm: Vec<f32>,
    pub(in crate::decoder) eps: f32,
}

impl DeltaNetWeights {
    pub(super) fn rule(&self) -> DeltaRule<'_> {
        let Self { spec, kernel, rates, time_bias, .. } = self;
        DeltaRule { spec: *spec, kernel, rates, time_bias }
    }

    pub(super) fn bytes(&self) -> usize {
        self.projection.bytes() + self.gates.bytes()
    }

    pub(super) fn result_norm(&self) -> ResultNorm<'_> {
        ResultNorm { weight: &self.result_norm, eps: self.eps }
    }

    /// What the recurrence reads of the normalised input `x [T, d]`, and the gate of the result.
    pub(super) fn project(&self, x: &Tensor, on: LinearPass<'_>) -> Result<Projected> {
        let (channels, width) = (self.spec.channels(), self.spec.value_width());
        let projected = self.projection.apply_values(x, on)?;
        let gates = self.gates.apply_values(x, on)?;
        let rows = projected.len() / (channels + width);
        let mut prepared = Vec::with_capacity(rows * self.spec.input_width());
        let mut gate = Vec::with_capacity(rows * width);
        let rows = projected.chunks_exact(channels + width);
        for (row, gates) in rows.zip(gates.chunks_exact(2 * self.spec.value_heads)) {
            prepared.extend_from_slice(&row[..channels]);
            prepared.extend_from_slice(gates);
            gate.extend_from_slice(&row[channels..]);
        }
        let prepared = matrix(prepared, self.spec.input_width())?;
        Ok(Projected { raw: None, latent: None, prepared, gate: Some(matrix(gate, width)?) })
    }

    /// Backward for the gradients of what was prepared, of the gate of the result, and of the result.
    pub(super) fn backward(
        &self,
        reverse: DeltaReverse,
        d_gate: &Tensor,
        d_result: &Tensor,
    ) -> Result<MixerReverse> {
        let DeltaReverse { d_inputs, d_rates, d_sums, runs } = reverse;
        let (channels, width) = (self.spec.channels(), self.spec.value_width());
        let rows = d_inputs.len() / self.spec.input_width();
        let mut d_projected = Vec::with_capacity(rows * (channels + width));
        let mut d_gates = Vec::with_capacity(rows * 2 * self.spec.value_heads);
        let of_result = values(d_gate)?;
        for (row, d_gate) in d_inputs.chunks_exact(self.spec.input_width()).zip(of_result.chunks_exact(width))
        {
            d_projected.extend_from_slice(&row[..channels]);
            d_projected.extend_from_slice(d_gate);
            d_gates.extend_from_slice(&row[channels..]);
        }
        let d_projected = matrix(d_projected, channels + width)?;
        let d_gates = matrix(d_gates, 2 * self.spec.value_heads)?;
        let d_normed =
            (self.projection.input_gradient(&d_projected)? + self.gates.input_gradient(&d_gates)?)?;
        let d_rates = matrix(d_rates, self.spec.value_heads)?;
        let operands = MixerOperands::DeltaNet { d_gates, d_rates, d_sums, runs, d_result: d_result.clone() };
        Ok(MixerReverse { d_normed, d_projected, operands })
    }

    pub(super) fn vector_gradients(
        &self,
        trace: &MixerTrace,
        reverse: &MixerReverse,
        gradients: &mut MixerVectors<'_>,
    ) -> Result<()> {
        let MixerOperands::DeltaNet { d_gates, d_rates, d_sums, runs, d_result } = &reverse.operands else {
            candle_core::bail!("the gradients are of another kind of layer")
        };
        bias_gradient(d_rates, gradients.decay_rate)?;
        let heads = self.spec.value_heads;
        for d_gates in values(d_gates)?.chunks_exact(2 * heads) {
            gradients.time_bias.iter_mut().zip(&d_gates[heads..]).for_each(|(sum, g)| *sum += g);
        }
        let inputs = &trace.projected.prepared;
        convolution_gradient(inputs, (runs, d_sums), self.rule(), gradients.convolution)?;
        let (Some(mixed), Some(gate)) = (&trace.mixed, &trace.projected.gate) else {
            candle_core::bail!("the activations are of another kind of layer")
        };
        norm_weight_gradient(mixed, gate, self.result_norm(), d_result, gradients.result_norm)
    }
}
