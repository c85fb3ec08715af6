//! A gated DeltaNet as the mixer of a layer in a step (Yang et al. 2024, arXiv 2412.06464).
//!
//! What sequences keep is in slots of a pool, whose numbers are among those of the step, so that recorded steps advance the states of
//! whatever sequences they have.

use device::ops::convolution::{InputSource, SequenceSlots, convolve, keep_inputs, open_gates};
use device::ops::delta_rule::{DeltaOperands, delta_rule_decode};
use device::ops::experts::ExpertInputs;
use device::ops::norm::rms_norm;
use device::ops::result_gate::gate_result;
use device::{Device, DeviceBuffer, Matrix, MatrixMut, Result, Storage};

use super::{RowBuffer, StepLayer, StepMemory, StepSizes};
use crate::layer::{DeltaNetSpec, Operand};
use crate::{Config, StepSequence};

/// Memory of the recurrence of one layer at a time.
#[derive(Debug)]
pub(super) struct DeltaNetMemory<T: Storage> {
    /// `[T, channels + values]` inputs of the convolution, then the gate of the result.
    projected: RowBuffer<T>,
    /// `[T, 2, value_heads]` before their activations, and after.
    gates: RowBuffer<f32>,
    opened: RowBuffer<f32>,
    /// `[T, channels]` normalised queries and keys, and values.
    heads: RowBuffer<T>,
    /// `[T, values]`, also normalised.
    mixed: RowBuffer<T>,
    normed: RowBuffer<T>,
    /// `[T, values]` through the gate.
    pub(super) result: RowBuffer<T>,
}

impl<T: Storage> DeltaNetMemory<T> {
    /// Memory for `tokens` tokens; empty if no layer has a recurrence.
    pub(super) fn new(device: &Device, config: &Config, tokens: usize) -> Result<Self> {
        let widths = |spec: DeltaNetSpec| [spec.channels(), spec.value_width(), 2 * spec.value_heads];
        let [channels, values, gates] = config.delta_net().map_or([0; 3], widths);
        Ok(Self {
            projected: RowBuffer::new(device, tokens, channels + values)?,
            gates: RowBuffer::new(device, tokens, gates)?,
            opened: RowBuffer::new(device, tokens, gates)?,
            heads: RowBuffer::new(device, tokens, channels)?,
            mixed: RowBuffer::new(device, tokens, values)?,
            normed: RowBuffer::new(device, tokens, values)?,
            result: RowBuffer::new(device, tokens, values)?,
        })
    }
}

/// Where the `before` inputs before each token of a step are, then the slot of each sequence, then the first row of each and the end.
/// Padding tokens are sequences of their own, in slot 0.
pub(super) fn numbers_of(
    sizes: StepSizes,
    before: usize,
    sequences: &[StepSequence<'_>],
    slots: &[u32],
) -> Vec<u32> {
    let mut sources = Vec::with_capacity(sizes.tokens * before);
    let (mut slots, mut firsts, mut end) = (slots.to_vec(), vec![0], 0);
    for sequence in sequences {
        for token in 0..sequence.tokens.len() {
            for back in 1..=before {
                let source = if back <= token {
                    InputSource::Row(end + token - back)
                } else if back <= sequence.position + token {
                    InputSource::Kept(before + token - back)
                } else {
                    InputSource::None
                };
                sources.push(source.pack());
            }
        }
        end += sequence.tokens.len();
        firsts.push(end as u32);
    }
    sources.resize(sizes.tokens * before, InputSource::None.pack());
    slots.resize(sizes.sequences, 0);
    firsts.extend((end as u32 + 1..).take(sizes.sequences - sequences.len()));
    [sources, slots, firsts].concat()
}

impl<T: Storage> StepLayer<'_, T> {
    /// Mixes the normalised input, into `result` of `memory.recurrence`, and advances what sequences keep.
    pub(super) fn recur(
        &self,
        spec: &DeltaNetSpec,
        memory: &mut StepMemory<T>,
        sizes: StepSizes,
        pool: &mut DeviceBuffer<f32>,
    ) -> Result<()> {
        let (decoder, device, tokens) = (self.decoder, self.decoder.device(), sizes.tokens);
        let StepMemory { numbers, normed, recurrence: own, adapters, .. } = memory;
        let (before, start) = (spec.taps - 1, sizes.paged_numbers());
        let sources = numbers.view(start..start + before * tokens);
        let slots = start + before * tokens;
        let firsts = slots + sizes.sequences;
        let of = SequenceSlots {
            slots: numbers.view(slots..firsts),
            firsts: numbers.view(firsts..firsts + sizes.sequences + 1),
            owners: numbers.view(3 * tokens..4 * tokens),
            positions: numbers.view(tokens..2 * tokens),
            stride: decoder.slot_len(),
        };
        let hidden = decoder.config().hidden_size;
        let input = Matrix::new(normed.of(tokens), hidden);
        self.linear(Operand::Qkv, input, (own.projected.of_mut(tokens), false), adapters)?;
        let weight = self.matrix(Operand::DeltaGates, hidden);
        let to = MatrixMut::new(own.gates.of_mut(tokens), weight.rows());
        device.product(input, weight.transposed(), to, 1.0, 0.0)?;
        let of_tokens = ExpertInputs::OfTokens(input.values());
        self.adapt(Operand::DeltaGates, (of_tokens, hidden), None, own.gates.of_mut(tokens), adapters)?;
        let gates = decoder.delta_gates(self.index, self.weights, own.gates.of(tokens));
        open_gates(device, gates, own.opened.of_mut(tokens))?;
        let place = (self.index, spec);
        let inputs = decoder.convolution(place, self.weights, own.projected.of(tokens), sources);
        let (begin, end) = (decoder.slot_start(self.index), pool.len());
        convolve(device, inputs, Some((pool.view(begin..end), of)), own.heads.of_mut(tokens))?;
        keep_inputs(device, inputs, of, pool.view_mut(begin..end))?;
        let shape = spec.shape();
        let operands = DeltaOperands { shape, heads: own.heads.of(tokens), opened: own.opened.of(tokens) };
        let states = pool.view_mut(begin + shape.inputs_len()..end);
        delta_rule_decode(device, operands, of, states, own.mixed.of_mut(tokens))?;
        let norm = decoder.result_norm(self.index, self.weights);
        rms_norm(device, own.mixed.of(tokens), norm, own.normed.of_mut(tokens))?;
        let (normed, projected) = (own.normed.of(tokens), own.projected.of(tokens));
        gate_result(device, normed, projected, spec.value_width(), own.result.of_mut(tokens))
    }
}
