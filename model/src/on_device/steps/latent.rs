//! Attention through latents as the mixer of a layer in a step.
//!
//! The cache has the expanded keys and values of all heads, as on the processor.

use device::ops::latent::{HeadParts, LatentHeads, assemble, narrow_values, split_columns};
use device::ops::norm::{RmsNorm, rms_norm};
use device::ops::paged::write_pages;
use device::ops::prefill::Chunks;
use device::{Device, Matrix, Result, Storage, View, ViewMut};

use super::{RowBuffer, StepLayer, StepMemory, StepSizes};
use crate::layer::{LATENT_EPS, LatentSpec, Operand};
use crate::on_device::DeviceDecoder;

/// Memory of the latents and of what is made of them, of one layer at a time.
#[derive(Debug)]
pub(super) struct LatentMemory<T: Storage> {
    /// `[T, query_rank]` before its norm; empty if queries have no latent.
    query_latent: RowBuffer<T>,
    /// `[T, key_rank + rope]` the latent before its norm, and what is rotated of the keys.
    both: RowBuffer<T>,
    /// `[T, key_rank]` before its norm.
    key_latent: RowBuffer<T>,
    /// `[T, rank]` one of the latents, normalised.
    normed: RowBuffer<T>,
    /// `[T, heads * head_dim]`
    queries: RowBuffer<T>,
    /// `[T, heads * (nope + value)]`
    expanded: RowBuffer<T>,
    /// `[T, rope]`
    rotary: RowBuffer<T>,
    /// `[T, heads * value]` what was attended, without the padding of values.
    pub(super) narrowed: RowBuffer<T>,
}

impl<T: Storage> LatentMemory<T> {
    /// Memory for `tokens` tokens; empty if no layer has latents.
    pub(super) fn new(device: &Device, decoder: &DeviceDecoder<T>, tokens: usize) -> Result<Self> {
        let spec = decoder.config().latent();
        let [of_queries, of_keys] = spec.map_or([0; 2], |spec| [spec.query_rank.unwrap_or(0), spec.key_rank]);
        let heads = spec.map(|spec| decoder.latent_heads(&spec));
        let [queries, expanded, rotary] = heads.map_or([0; 3], LatentHeads::widths);
        let new = |width| RowBuffer::new(device, tokens, width);
        Ok(Self {
            query_latent: new(of_queries)?,
            both: new(of_keys + rotary)?,
            key_latent: new(of_keys)?,
            normed: new(of_queries.max(of_keys))?,
            queries: new(queries)?,
            expanded: new(expanded)?,
            rotary: new(rotary)?,
            narrowed: new(heads.map_or(0, LatentHeads::value_width))?,
        })
    }
}

impl<T: Storage> StepLayer<'_, T> {
    /// Attention of the normalised input, into `narrowed` of `memory.latents`.
    pub(super) fn attend_latents(
        &self,
        spec: &LatentSpec,
        memory: &mut StepMemory<T>,
        sizes: StepSizes,
        chunks: Option<&Chunks>,
        mut cache: ViewMut<'_, T>,
    ) -> Result<()> {
        let (decoder, tokens) = (self.decoder, sizes.tokens);
        let (device, heads) = (decoder.device(), decoder.latent_heads(spec));
        let StepMemory { normed, latents: own, qkv, angles, adapters, .. } = memory;
        let input = Matrix::new(normed.of(tokens), decoder.config().hidden_size);
        match spec.query_rank {
            None => self.linear(Operand::QueryUp, input, (own.queries.of_mut(tokens), false), adapters)?,
            Some(rank) => {
                self.linear(Operand::QueryDown, input, (own.query_latent.of_mut(tokens), false), adapters)?;
                let latent = own.query_latent.of(tokens);
                self.normed_latent(Operand::QueryLatentNorm, latent, own.normed.narrow_mut(tokens, rank))?;
                let normed = Matrix::new(own.normed.narrow(tokens, rank), rank);
                self.linear(Operand::QueryUp, normed, (own.queries.of_mut(tokens), false), adapters)?;
            }
        }
        self.linear(Operand::KeyDown, input, (own.both.of_mut(tokens), false), adapters)?;
        let (rank, both) = (spec.key_rank, own.both.of(tokens));
        split_columns(device, both, rank, own.key_latent.of_mut(tokens), own.rotary.of_mut(tokens))?;
        let to = own.normed.narrow_mut(tokens, rank);
        self.normed_latent(Operand::KeyLatentNorm, own.key_latent.of(tokens), to)?;
        let normed = Matrix::new(own.normed.narrow(tokens, rank), rank);
        self.linear(Operand::KeyUp, normed, (own.expanded.of_mut(tokens), false), adapters)?;
        let parts = HeadParts {
            queries: own.queries.of(tokens),
            expanded: own.expanded.of(tokens),
            rotary: own.rotary.of(tokens),
        };
        let angles = decoder.rotaries.of_layer(self.index, angles, tokens);
        assemble(device, heads, parts, angles, qkv.of_mut(tokens))?;
        let slots = memory.numbers.view(sizes.slots());
        write_pages(device, memory.qkv.of(tokens), slots, decoder.shape, cache.reborrow())?;
        self.attend_cached(memory, sizes, chunks, cache.as_view())?;
        narrow_values(device, heads, memory.attended.of(tokens), memory.latents.narrowed.of_mut(tokens))
    }

    /// The normalised `latent [T, rank]` into `to [T, rank]`.
    fn normed_latent(&self, norm: Operand, latent: View<'_, T>, to: ViewMut<'_, T>) -> Result<()> {
        let weight = self.at(&self.decoder.layout().ranges(self.index)[norm]);
        rms_norm(self.decoder.device(), latent, RmsNorm::new(weight, LATENT_EPS), to)
    }
}
