//! Attention through latents as the mixer of a layer (MLA, DeepSeek-V2, DeepSeek-AI 2024, arXiv 2405.04434).
//!
//! Latents are kept before their norms, and normalised again in the backward.

use device::ops::latent::{
    HeadParts, HeadPartsMut, assemble, assemble_backward, join_columns, narrow_values, split_columns,
    widen_values,
};
use device::ops::norm::{RmsNorm, rms_norm, rms_norm_backward};
use device::ops::rows::{add_bias, column_sums};
use device::{DeviceBuffer, Matrix, MatrixMut, Result, Storage, View};

use super::attention::AttendedHeads;
use super::{DeviceLayer, input_gradient, linear};
use crate::layer::{LATENT_EPS, LatentSpec, Operand};
use crate::on_device::factors::GradientPlace;
use crate::on_device::operands::DeviceRows;

/// Activations of attention through latents.
#[derive(Debug)]
pub(super) struct LatentActivations<T: Storage> {
    spec: LatentSpec,
    /// `[T, query_rank]` before its norm, if queries have a latent.
    query_latent: Option<DeviceBuffer<T>>,
    /// `[T, key_rank]` before its norm.
    key_latent: DeviceBuffer<T>,
    /// `[T, heads * head_dim]` with the padding of values.
    attended: DeviceBuffer<T>,
    heads: AttendedHeads<T>,
}

impl<T: Storage> LatentActivations<T> {
    /// `[T, heads * value]` what was attended, without the padding of values.
    pub(super) fn result(&self, layer: &DeviceLayer<'_, T>) -> Result<DeviceRows<'_, T>> {
        let (heads, attended) = (layer.decoder.latent_heads(&self.spec), &self.attended);
        if self.spec.value == self.spec.head_dim() {
            return Ok(DeviceRows::Same(attended.all()));
        }
        let mut out = layer.on().uninit(attended.len() / self.spec.head_dim() * self.spec.value)?;
        narrow_values(layer.on(), heads, attended.all(), out.all_mut())?;
        Ok(DeviceRows::Computed(out))
    }
}

impl<T: Storage> DeviceLayer<'_, T> {
    /// Forward of the residual stream `x [T, d]`.
    pub(super) fn latent_attention(&self, spec: LatentSpec, x: View<'_, T>) -> Result<LatentActivations<T>> {
        let (device, heads) = (self.on(), self.decoder.latent_heads(&spec));
        let (rows, LatentSpec { key_rank, rope, .. }) = (x.len() / self.hidden(), spec);
        let normed = self.mixer_input(x)?;
        let input = Matrix::new(normed.all(), self.hidden());
        let (query_latent, queries) = match spec.query_rank {
            None => (None, self.projected(Operand::QueryUp, input)?),
            Some(rank) => {
                let latent = self.projected(Operand::QueryDown, input)?;
                let normed = self.normed_latent(Operand::QueryLatentNorm, &latent)?;
                (Some(latent), self.projected(Operand::QueryUp, Matrix::new(normed.all(), rank))?)
            }
        };
        let both = self.projected(Operand::KeyDown, input)?;
        drop(normed);
        let mut key_latent = device.uninit(rows * key_rank)?;
        let mut rotary = device.uninit(rows * rope)?;
        split_columns(device, both.all(), key_rank, key_latent.all_mut(), rotary.all_mut())?;
        drop(both);
        let normed = self.normed_latent(Operand::KeyLatentNorm, &key_latent)?;
        let expanded = self.projected(Operand::KeyUp, Matrix::new(normed.all(), key_rank))?;
        drop(normed);
        let mut prepared = device.uninit(rows * heads.padded().width())?;
        let parts = HeadParts { queries: queries.all(), expanded: expanded.all(), rotary: rotary.all() };
        assemble(device, heads, parts, self.head_angles(rows), prepared.all_mut())?;
        drop((queries, expanded, rotary));
        let (attended, heads) = self.attend(prepared)?;
        Ok(LatentActivations { spec, query_latent, key_latent, attended, heads })
    }

    /// `[T, out]` of the linear operation `operand` for its input `x [T, in]`.
    fn projected(&self, operand: Operand, x: Matrix<'_, T>) -> Result<DeviceBuffer<T>> {
        let (device, weight) = (self.on(), self.matrix(operand, x.columns()));
        let mut out = device.uninit(x.rows() * weight.rows())?;
        linear(device, x.values(), weight, out.all_mut(), false)?;
        if let Some(bias) = operand.bias().map(|bias| &self.ranges()[bias]).filter(|bias| !bias.is_empty()) {
            add_bias(device, out.all_mut(), self.at(bias))?;
        }
        Ok(out)
    }

    /// The norm of a latent.
    fn latent_norm(&self, norm: Operand) -> RmsNorm<'_, T> {
        RmsNorm::new(self.at(&self.ranges()[norm]), LATENT_EPS)
    }

    /// `[T, rank]` the normalised latent.
    fn normed_latent(&self, norm: Operand, latent: &DeviceBuffer<T>) -> Result<DeviceBuffer<T>> {
        let mut out = self.on().uninit(latent.len())?;
        rms_norm(self.on(), latent.all(), self.latent_norm(norm), out.all_mut())?;
        Ok(out)
    }

    /// `[T, d]` gradient of the normalised input of the residual stream `x [T, d]`, for the gradient `g [T, heads * value]` of the
    /// result. Adds the gradients of weights.
    pub(super) fn latent_backward(
        &self,
        x: View<'_, T>,
        kept: LatentActivations<T>,
        g: DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let LatentActivations { spec, query_latent, key_latent, attended, heads: kept } = kept;
        let (device, heads, rows) = (self.on(), self.decoder.latent_heads(&spec), x.len() / self.hidden());
        let mut d_attended = device.uninit(attended.len())?;
        widen_values(device, heads, g.all(), d_attended.all_mut())?;
        drop(g);
        let d_prepared = self.attend_backward(kept, &attended, d_attended.all(), gradients)?;
        drop((d_attended, attended));
        let [queries, expanded, rotary] = heads.widths().map(|width| rows * width);
        let (mut d_queries, mut d_expanded) = (device.uninit(queries)?, device.uninit(expanded)?);
        let mut d_rotary = device.uninit(rotary)?;
        let d_parts = HeadPartsMut {
            queries: d_queries.all_mut(),
            expanded: d_expanded.all_mut(),
            rotary: d_rotary.all_mut(),
        };
        assemble_backward(device, heads, d_prepared.all(), self.head_angles(rows), d_parts)?;
        drop(d_prepared);
        let d_latent = self.through_latent(
            [Operand::KeyUp, Operand::KeyLatentNorm],
            &key_latent,
            d_expanded,
            gradients,
        )?;
        drop(key_latent);
        let mut d_both = device.uninit(d_latent.len() + d_rotary.len())?;
        join_columns(device, d_latent.all(), spec.key_rank, d_rotary.all(), d_both.all_mut())?;
        drop((d_latent, d_rotary));
        let (first, d_first) = match query_latent {
            None => (Operand::QueryUp, d_queries),
            Some(latent) => {
                let of = [Operand::QueryUp, Operand::QueryLatentNorm];
                (Operand::QueryDown, self.through_latent(of, &latent, d_queries, gradients)?)
            }
        };
        let normed = self.mixer_input(x)?;
        let mut d_normed = device.uninit(x.len())?;
        for (operand, d, keep) in [(first, d_first, 0.0), (Operand::KeyDown, d_both, 1.0)] {
            self.add_gradients(operand, Matrix::new(normed.all(), self.hidden()), d.all(), gradients)?;
            let weight = self.matrix(operand, self.hidden());
            let to = MatrixMut::new(d_normed.all_mut(), self.hidden());
            device.product(Matrix::new(d.all(), weight.rows()), weight, to, 1.0, keep)?;
        }
        Ok(d_normed)
    }

    /// `[T, rank]` gradient of a latent before its norm, for the gradient `g [T, out]` of the projection `up` of the normalised one.
    /// Adds those of the weights of both.
    fn through_latent(
        &self,
        [up, norm]: [Operand; 2],
        latent: &DeviceBuffer<T>,
        g: DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, range, by) = (self.on(), &self.ranges()[norm], self.latent_norm(norm));
        let normed = self.normed_latent(norm, latent)?;
        self.add_gradients(up, Matrix::new(normed.all(), range.len()), g.all(), gradients)?;
        drop(normed);
        let d_normed = input_gradient(device, g.all(), self.matrix(up, range.len()))?;
        drop(g);
        let mut d_latent = device.uninit(latent.len())?;
        let (of_latent, of_norm) = (d_latent.all_mut(), gradients.vector(range));
        rms_norm_backward(device, latent.all(), by, d_normed.all(), None, of_latent, of_norm)?;
        Ok(d_latent)
    }

    /// Adds the gradients of the linear operation `operand`, for its input `x [T, in]` and the gradient `g [T, out]` of its result.
    fn add_gradients(
        &self,
        operand: Operand,
        x: Matrix<'_, T>,
        g: View<'_, T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<()> {
        gradients.add(self.on(), &self.ranges()[operand], x, g)?;
        let bias = operand.bias().and_then(|bias| gradients.vector(&self.ranges()[bias]));
        bias.map_or(Ok(()), |of_bias| column_sums(self.on(), g, of_bias))
    }
}
