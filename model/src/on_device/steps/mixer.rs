//! The mixer half of a layer in a step, by the kind of its mixer, with the output projection.

use device::ops::prefill::Chunks;
use device::{Matrix, Result, Storage, ViewMut};

use super::{StepCache, StepLayer, StepMemory, StepSizes};
use crate::layer::Operand;
use crate::on_device::operands::MixerKind;

impl<T: Storage> StepLayer<'_, T> {
    pub(super) fn mix(
        &self,
        memory: &mut StepMemory<T>,
        sizes: StepSizes,
        chunks: Option<&Chunks>,
        cache: &mut StepCache<'_, T>,
    ) -> Result<()> {
        let (decoder, ranges) = (self.decoder, self.decoder.layout().ranges(self.index));
        let (tokens, kind) = (sizes.tokens, decoder.mixer_kind(self.index));
        self.normalise(memory, tokens, &ranges[Operand::AttentionNorm])?;
        match kind {
            MixerKind::Attention => self.attend(memory, sizes, chunks, cache.pages(decoder, self.index))?,
            MixerKind::Latent(spec) => {
                self.attend_latents(&spec, memory, sizes, chunks, cache.pages(decoder, self.index))?;
            }
            MixerKind::DeltaNet(spec) => self.recur(&spec, memory, sizes, cache.states)?,
        }
        let StepMemory { x, result, attended, latents, recurrence, adapters, .. } = memory;
        let mixed = match kind {
            MixerKind::Attention => attended.of(tokens),
            MixerKind::Latent(_) => latents.narrowed.of(tokens),
            MixerKind::DeltaNet(_) => recurrence.result.of(tokens),
        };
        let width = ranges[Operand::Output].len() / decoder.config().hidden_size;
        let output = |to: ViewMut<'_, T>, kept: bool| {
            self.linear(Operand::Output, Matrix::new(mixed, width), (to, kept), adapters)
        };
        self.add_result((x, result), tokens, &ranges[Operand::AttentionAfterNorm], output)
    }
}
