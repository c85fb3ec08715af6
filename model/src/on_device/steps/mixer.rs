//! The mixer half of a layer in a step, by the kind of its mixer, with the output projection.

use device::ops::prefill::Chunks;
use device::{Matrix, Result, Storage, ViewMut};

use super::{StepLayer, StepMemory, StepSizes};
use crate::layer::Operand;
use crate::on_device::operands::MixerKind;

impl<T: Storage> StepLayer<'_, T> {
    pub(super) fn mix(
        &self,
        memory: &mut StepMemory<T>,
        sizes: StepSizes,
        chunks: Option<&Chunks>,
        cache: ViewMut<'_, T>,
    ) -> Result<()> {
        let (decoder, ranges) = (self.decoder, self.decoder.layout().ranges(self.index));
        let (tokens, kind) = (sizes.tokens, decoder.mixer_kind(self.index));
        self.normalise(memory, tokens, &ranges[Operand::AttentionNorm])?;
        match kind {
            MixerKind::Attention => self.attend(memory, sizes, chunks, cache)?,
            MixerKind::Latent(spec) => self.attend_latents(&spec, memory, sizes, chunks, cache)?,
        }
        let StepMemory { x, result, attended, latents, adapters, .. } = memory;
        let mixed = match kind {
            MixerKind::Attention => attended.of(tokens),
            MixerKind::Latent(_) => latents.narrowed.of(tokens),
        };
        let width = ranges[Operand::Output].len() / decoder.config().hidden_size;
        let output = |to: ViewMut<'_, T>, kept: bool| {
            self.linear(Operand::Output, Matrix::new(mixed, width), (to, kept), adapters)
        };
        self.add_result((x, result), tokens, &ranges[Operand::AttentionAfterNorm], output)
    }
}
