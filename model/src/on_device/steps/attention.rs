//! Attention as the mixer of a layer in a step.

use device::ops::gates::{gate_in_place, split_gates};
use device::ops::heads::prepare;
use device::ops::paged::{PageTable, PagedTokens, paged_attention, write_pages};
use device::ops::prefill::{Chunks, prefill_attention};
use device::{Matrix, Result, Storage, ViewMut};

use super::{StepLayer, StepMemory, StepSizes};
use crate::layer::Operand;

impl<T: Storage> StepLayer<'_, T> {
    /// Attention of the normalised input, into `memory.attended`.
    pub(super) fn attend(
        &self,
        memory: &mut StepMemory<T>,
        sizes: StepSizes,
        chunks: Option<&Chunks>,
        cache: ViewMut<'_, T>,
    ) -> Result<()> {
        let (decoder, tokens) = (self.decoder, sizes.tokens);
        let device = decoder.device();
        self.project(memory, tokens)?;
        let norm = decoder.head_norm(self.index, self.weights);
        let angles = decoder.rotaries.of_layer(self.index, &memory.angles, tokens);
        prepare(device, memory.qkv.of_mut(tokens), decoder.shape, norm, angles)?;
        self.attend_cached(memory, sizes, chunks, cache)?;
        if decoder.is_gated(self.index) {
            gate_in_place(device, memory.gates.of(tokens), memory.attended.of_mut(tokens))?;
        }
        Ok(())
    }

    /// Attention of the prepared queries, keys and values in `memory.qkv` and of those in the cache, into `memory.attended`.
    pub(super) fn attend_cached(
        &self,
        memory: &mut StepMemory<T>,
        sizes: StepSizes,
        chunks: Option<&Chunks>,
        mut cache: ViewMut<'_, T>,
    ) -> Result<()> {
        let (decoder, device) = (self.decoder, self.decoder.device());
        let StepSizes { tokens, single, columns, .. } = sizes;
        let numbers = memory.numbers.view(0..sizes.numbers());
        let part = |number: usize| numbers.slice(number * tokens..(number + 1) * tokens);
        write_pages(device, memory.qkv.of(tokens), part(2), decoder.shape, cache.reborrow())?;
        let table = PageTable { pages: numbers.slice(4 * tokens..sizes.paged_numbers()), columns };
        let paged =
            PagedTokens { positions: part(1).slice(0..single), table, sequence_of: part(3).slice(0..single) };
        let heads = decoder.attention_heads(self.index, self.weights);
        let (qkv, cache) = (memory.qkv.of(tokens), cache.as_view());
        let (first, out) = (memory.qkv.of(single), memory.attended.of_mut(single));
        paged_attention(device, first, cache, &paged, heads, out, &mut memory.scratch)?;
        if let Some(chunks) = chunks {
            let out = memory.attended.of_mut(tokens);
            prefill_attention(device, qkv, cache, chunks, table, heads, out)?;
        }
        Ok(())
    }

    /// Queries, keys and values of the normalised residual stream, and the gates of the result if the layer has any.
    fn project(&self, memory: &mut StepMemory<T>, tokens: usize) -> Result<()> {
        let (decoder, device) = (self.decoder, self.decoder.device());
        let gated = decoder.is_gated(self.index);
        let StepMemory { normed, projected, gates, qkv, adapters, .. } = memory;
        let to = if gated { &mut *projected } else { &mut *qkv };
        let input = Matrix::new(normed.of(tokens), decoder.config().hidden_size);
        self.linear(Operand::Qkv, input, (to.of_mut(tokens), false), adapters)?;
        if gated {
            let (qkv, gates) = (qkv.of_mut(tokens), gates.of_mut(tokens));
            split_gates(device, projected.of(tokens), decoder.shape, qkv, gates)?;
        }
        Ok(())
    }
}
