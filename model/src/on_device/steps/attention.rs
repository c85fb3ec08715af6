//! Attention as the mixer of a layer in a step.

use device::ops::gates::{gate_in_place, split_gates};
use device::ops::heads::{Preparation, prepare_to_pages};
use device::ops::paged::{PageTable, PagedTokens, paged_attention};
use device::ops::prefill::{Chunks, prefill_attention};
use device::{Matrix, Result, Storage, View, ViewMut};

use super::{StepLayer, StepMemory, StepSizes};
use crate::layer::Operand;

impl<T: Storage> StepLayer<'_, T> {
    /// Attention of the normalised input, into `memory.attended`.
    pub(super) fn attend(
        &self,
        memory: &mut StepMemory<T>,
        sizes: StepSizes,
        chunks: Option<&Chunks>,
        mut cache: ViewMut<'_, T>,
    ) -> Result<()> {
        let (decoder, tokens) = (self.decoder, sizes.tokens);
        let device = decoder.device();
        let bias = self.project(memory, tokens)?;
        let norm = decoder.head_norm(self.index, self.weights);
        let angles = decoder.rotaries.of_layer(self.index, &memory.angles, tokens);
        let (qkv, how) = (memory.qkv.of_mut(tokens), Preparation { bias, norm, angles });
        let slots = memory.numbers.view(sizes.slots());
        prepare_to_pages(device, qkv, decoder.shape, how, slots, cache.reborrow())?;
        self.attend_cached(memory, sizes, chunks, cache.as_view())?;
        if decoder.is_gated(self.index) {
            gate_in_place(device, memory.gates.of(tokens), memory.attended.of_mut(tokens))?;
        }
        Ok(())
    }

    /// Attention of the prepared queries in `memory.qkv` and of the keys and values in the cache, into `memory.attended`.
    pub(super) fn attend_cached(
        &self,
        memory: &mut StepMemory<T>,
        sizes: StepSizes,
        chunks: Option<&Chunks>,
        cache: View<'_, T>,
    ) -> Result<()> {
        let (decoder, device) = (self.decoder, self.decoder.device());
        let StepSizes { tokens, single, columns, .. } = sizes;
        let numbers = memory.numbers.view(0..sizes.numbers());
        let part = |number: usize| numbers.slice(number * tokens..(number + 1) * tokens);
        let table = PageTable { pages: numbers.slice(4 * tokens..sizes.paged_numbers()), columns };
        let paged =
            PagedTokens { positions: part(1).slice(0..single), table, sequence_of: part(3).slice(0..single) };
        let heads = decoder.attention_heads(self.index, self.weights);
        let (first, scratch) = (memory.qkv.of(single), memory.scratch.all_mut());
        paged_attention(device, first, cache, &paged, heads, memory.attended.of_mut(single), scratch)?;
        if let Some(chunks) = chunks {
            let out = memory.attended.of_mut(tokens);
            prefill_attention(device, memory.qkv.of(tokens), cache, chunks, table, heads, out)?;
        }
        Ok(())
    }

    /// Queries, keys and values of the normalised residual stream, and the gates of the result if the layer has any. Returns the
    /// bias that is still to be added.
    fn project(&self, memory: &mut StepMemory<T>, tokens: usize) -> Result<Option<View<'_, T>>> {
        let (decoder, device) = (self.decoder, self.decoder.device());
        let StepMemory { normed, projected, gates, qkv, adapters, .. } = memory;
        let input = Matrix::new(normed.of(tokens), decoder.config().hidden_size);
        if !decoder.is_gated(self.index) {
            self.linear_without_bias(Operand::Qkv, input, (qkv.of_mut(tokens), false), adapters)?;
            return Ok(self.bias(Operand::Qkv));
        }
        self.linear(Operand::Qkv, input, (projected.of_mut(tokens), false), adapters)?;
        let (qkv, gates) = (qkv.of_mut(tokens), gates.of_mut(tokens));
        split_gates(device, projected.of(tokens), decoder.shape, qkv, gates)?;
        Ok(None)
    }
}
