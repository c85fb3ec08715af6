//! The mixer half of a layer: what lets a token see those before it, by its kind, and the output projection.
//!
//! A mixer gives the input of the output projection. Its backward gives the gradient of the normalised input, which it computes
//! again where it needs it.

use device::ops::rows::{add_bias, column_sums};
use device::{DeviceBuffer, Matrix, Result, Storage, View, ViewMut};

use super::attention::AttentionActivations;
use super::delta_net::DeltaNetActivations;
use super::latent::LatentActivations;
use super::{DeviceLayer, input_gradient, linear};
use crate::layer::Operand;
use crate::on_device::factors::GradientPlace;
use crate::on_device::operands::{DeviceRows, MixerKind, copied};

/// Activations of the mixer half.
#[derive(Debug)]
pub(super) struct MixedActivations<T: Storage> {
    mixer: MixerActivations<T>,
    /// `[T, d]` the residual stream after this half.
    pub(super) middle: DeviceBuffer<T>,
}

/// Activations of a mixer, boxed: the kinds differ in size.
#[derive(Debug)]
enum MixerActivations<T: Storage> {
    Attention(Box<AttentionActivations<T>>),
    Latent(Box<LatentActivations<T>>),
    DeltaNet(Box<DeltaNetActivations<T>>),
}

impl<T: Storage> DeviceLayer<'_, T> {
    /// Forward of the half, for the residual stream `x [T, d]`.
    pub(super) fn mixed(&self, x: &DeviceBuffer<T>) -> Result<MixedActivations<T>> {
        let mixer = match self.decoder.mixer_kind(self.index) {
            MixerKind::Attention => MixerActivations::Attention(Box::new(self.attention(x.all())?)),
            MixerKind::Latent(spec) => {
                MixerActivations::Latent(Box::new(self.latent_attention(spec, x.all())?))
            }
            MixerKind::DeltaNet(spec) => MixerActivations::DeltaNet(Box::new(self.delta_net(spec, x.all())?)),
        };
        let mut middle = copied(self.on(), x.all())?;
        let result = self.mixer_result(&mixer)?;
        let after = &self.ranges()[Operand::AttentionAfterNorm];
        self.add_result(after, middle.all_mut(), |to, kept| self.output(result.all(), to, kept))?;
        drop(result);
        Ok(MixedActivations { mixer, middle })
    }

    /// `[T, d]` the normalised input of the mixer, for the residual stream `x [T, d]`.
    pub(super) fn mixer_input<'x>(&self, x: View<'x, T>) -> Result<DeviceRows<'x, T>> {
        self.normed(x, &self.ranges()[Operand::AttentionNorm])
    }

    /// `[T, mixed]` the input of the output projection.
    fn mixer_result<'x>(&self, mixer: &'x MixerActivations<T>) -> Result<DeviceRows<'x, T>> {
        match mixer {
            MixerActivations::Attention(kept) => kept.result(self),
            MixerActivations::Latent(kept) => kept.result(self),
            MixerActivations::DeltaNet(kept) => kept.result(self),
        }
    }

    /// The output projection `[d, mixed]`.
    fn output_weight(&self) -> Matrix<'_, T> {
        self.matrix(Operand::Output, self.ranges()[Operand::Output].len() / self.hidden())
    }

    /// The output projection of `x [T, mixed]` into `to [T, d]`, or added to it if `kept`.
    fn output(&self, x: View<'_, T>, mut to: ViewMut<'_, T>, kept: bool) -> Result<()> {
        linear(self.on(), x, self.output_weight(), to.reborrow(), kept)?;
        self.decoder.sum_over_ranks(to.reborrow())?;
        let bias = &self.ranges()[Operand::OutputBias];
        if bias.is_empty() { Ok(()) } else { add_bias(self.on(), to, self.at(bias)) }
    }

    /// Backward of the half: the gradient of `x [T, d]` for that of `middle`, `g [T, d]`.
    pub(super) fn mixed_backward(
        &self,
        x: &DeviceBuffer<T>,
        kept: MixedActivations<T>,
        g: &DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let MixedActivations { mixer, middle } = kept;
        drop(middle);
        let d_mixed = self.output_backward(&mixer, g, gradients)?;
        let d_normed = match mixer {
            MixerActivations::Attention(kept) => {
                self.attention_backward(x.all(), *kept, d_mixed, gradients)?
            }
            MixerActivations::Latent(kept) => self.latent_backward(x.all(), *kept, d_mixed, gradients)?,
            MixerActivations::DeltaNet(kept) => {
                self.delta_net_backward(x.all(), *kept, d_mixed, gradients)?
            }
        };
        let mut d_x = self.on().uninit(x.len())?;
        let norm = &self.ranges()[Operand::AttentionNorm];
        self.normed_backward(x.all(), norm, d_normed.all(), g.all(), d_x.all_mut(), gradients)?;
        Ok(d_x)
    }

    /// `[T, mixed]` gradient of the input of the output projection, for that of the residual stream, `g [T, d]`.
    fn output_backward(
        &self,
        mixer: &MixerActivations<T>,
        g: &DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges, weight) = (self.on(), self.ranges(), self.output_weight());
        let result = self.mixer_result(mixer)?;
        let again = |to: ViewMut<'_, T>| self.output(result.all(), to, false);
        let after = &ranges[Operand::AttentionAfterNorm];
        let d_result = self.result_gradient(after, g.all(), gradients, again)?;
        let x = Matrix::new(result.all(), weight.columns());
        gradients.add(device, &ranges[Operand::Output], x, d_result.all())?;
        if let Some(of_bias) = gradients.vector(&ranges[Operand::OutputBias]) {
            column_sums(device, d_result.all(), of_bias)?;
        }
        input_gradient(device, d_result.all(), weight)
    }
}
