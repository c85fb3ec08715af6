//! The attention half of a layer in a step.

use device::ops::heads::{HeadNorm, prepare};
use device::ops::paged::{PageTable, PagedTokens, paged_attention, write_pages};
use device::ops::prefill::{Chunks, prefill_attention};
use device::ops::rows::add_bias;
use device::{Result, Storage, ViewMut};

use super::{StepLayer, StepMemory, StepSizes};
use crate::layer::Operand;
use crate::on_device::layer::linear;

impl<T: Storage> StepLayer<'_, T> {
    pub(super) fn attend(
        &self,
        memory: &mut StepMemory<T>,
        sizes: StepSizes,
        chunks: Option<&Chunks>,
        mut cache: ViewMut<'_, T>,
    ) -> Result<()> {
        let (decoder, ranges) = (self.decoder, self.decoder.layout().ranges(self.index));
        let (device, config, shape) = (decoder.device(), decoder.config(), decoder.shape);
        let StepSizes { tokens, single, columns, .. } = sizes;
        self.normalise(memory, tokens, &ranges[Operand::AttentionNorm])?;
        let qkv = self.matrix(Operand::Qkv, config.hidden_size);
        linear(device, memory.normed.of(tokens), qkv, memory.qkv.of_mut(tokens), false)?;
        if !ranges[Operand::QkvBias].is_empty() {
            add_bias(device, memory.qkv.of_mut(tokens), self.at(&ranges[Operand::QkvBias]))?;
        }
        let norm = (!ranges[Operand::QueryKeyNorm].is_empty()).then(|| {
            let (both, dim) = (self.at(&ranges[Operand::QueryKeyNorm]), shape.head_dim);
            HeadNorm { query: both.slice(0..dim), key: both.slice(dim..2 * dim), eps: config.rms_norm_eps }
        });
        prepare(
            device,
            memory.qkv.of_mut(tokens),
            shape,
            norm,
            memory.cos.of(tokens),
            memory.sin.of(tokens),
        )?;
        let numbers = memory.numbers.view(0..sizes.numbers());
        let part = |number: usize| numbers.slice(number * tokens..(number + 1) * tokens);
        write_pages(device, memory.qkv.of(tokens), part(2), shape, cache.reborrow())?;
        let table = PageTable { pages: numbers.slice(4 * tokens..numbers.len()), columns };
        let paged =
            PagedTokens { positions: part(1).slice(0..single), table, sequence_of: part(3).slice(0..single) };
        let (qkv, cache) = (memory.qkv.of(tokens), cache.as_view());
        let (first, scratch) = (memory.qkv.of(single), memory.scratch.all_mut());
        paged_attention(device, first, cache, &paged, shape, memory.attended.of_mut(single), scratch)?;
        if let Some(chunks) = chunks {
            let out = memory.attended.of_mut(tokens);
            prefill_attention(device, qkv, cache, chunks, table, shape, out)?;
        }
        let output = self.matrix(Operand::Output, shape.query_width());
        linear(device, memory.attended.of(tokens), output, memory.x.of_mut(tokens), true)?;
        if !ranges[Operand::OutputBias].is_empty() {
            add_bias(device, memory.x.of_mut(tokens), self.at(&ranges[Operand::OutputBias]))?;
        }
        Ok(())
    }
}
