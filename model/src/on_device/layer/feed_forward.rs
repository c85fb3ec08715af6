//! The feed-forward half of a layer.

use device::ops::swiglu::{swiglu, swiglu_backward};
use device::{DeviceBuffer, Matrix, Result, Storage, View, ViewMut};

use super::{DeviceLayer, input_gradient, linear, weight_gradient};
use crate::layer::Operand;

impl<T: Storage> DeviceLayer<'_, T> {
    /// `[T, 2 m]` of the second half for its input `middle [T, d]`.
    pub(super) fn gate_up(&self, middle: View<'_, T>) -> Result<DeviceBuffer<T>> {
        let normed = self.normed(middle, &self.ranges()[Operand::FeedForwardNorm])?;
        self.gate_up_of(normed.all())
    }

    fn gate_up_of(&self, normed: View<'_, T>) -> Result<DeviceBuffer<T>> {
        let rows = normed.len() / self.hidden();
        let mut out = self.on().uninit(rows * 2 * self.decoder.config.intermediate_size)?;
        linear(self.on(), normed, self.matrix(Operand::GateUp, self.hidden()), out.all_mut(), false)?;
        Ok(out)
    }

    /// `[T, m]`
    pub(super) fn activated(&self, gate_up: View<'_, T>) -> Result<DeviceBuffer<T>> {
        let mut out = self.on().uninit(gate_up.len() / 2)?;
        swiglu(self.on(), gate_up, self.decoder.config.intermediate_size, out.all_mut())?;
        Ok(out)
    }

    /// The result of the half for `activated [T, m]`, into `to [T, d]`, or added to it if `kept`.
    pub(super) fn down(&self, activated: View<'_, T>, to: ViewMut<'_, T>, kept: bool) -> Result<()> {
        let down = self.matrix(Operand::Down, self.decoder.config.intermediate_size);
        linear(self.on(), activated, down, to, kept)
    }

    /// Backward of the feed-forward half: the gradient of `middle`.
    pub(super) fn feed_forward_backward(
        &self,
        middle: &DeviceBuffer<T>,
        gate_up: Option<&DeviceBuffer<T>>,
        g: &DeviceBuffer<T>,
        gradients: &mut ViewMut<'_, f32>,
        chunk: usize,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges, hidden) = (self.on(), self.ranges(), self.hidden());
        let width = self.decoder.config.intermediate_size;
        let mut d_middle = device.uninit(middle.len())?;
        let rows = middle.len() / hidden;
        for start in (0..rows).step_by(chunk.max(1)) {
            let piece = start * hidden..(start + chunk).min(rows) * hidden;
            let (middle, g) = (middle.view(piece.clone()), g.view(piece.clone()));
            let normed = self.normed(middle, &ranges[Operand::FeedForwardNorm])?;
            let mut computed = None;
            let gate_up = match gate_up {
                Some(kept) => kept.view(piece.start / hidden * 2 * width..piece.end / hidden * 2 * width),
                None => computed.insert(self.gate_up_of(normed.all())?).all(),
            };
            let activated = self.activated(gate_up)?;
            let after = &ranges[Operand::FeedForwardAfterNorm];
            let again = |to: ViewMut<'_, T>| self.down(activated.all(), to, false);
            let d_result = self.result_gradient(after, g, gradients, again)?;
            let of_down = gradients.slice_mut(ranges[Operand::Down].clone());
            weight_gradient(device, Matrix::new(activated.all(), width), d_result.all(), of_down)?;
            drop(activated);
            let d_activated = input_gradient(device, d_result.all(), self.matrix(Operand::Down, width))?;
            drop(d_result);
            let mut d_gate_up = device.uninit(gate_up.len())?;
            swiglu_backward(device, gate_up, width, d_activated.all(), d_gate_up.all_mut())?;
            drop((d_activated, computed));
            let of_gate_up = gradients.slice_mut(ranges[Operand::GateUp].clone());
            weight_gradient(device, Matrix::new(normed.all(), hidden), d_gate_up.all(), of_gate_up)?;
            let d_normed = input_gradient(device, d_gate_up.all(), self.matrix(Operand::GateUp, hidden))?;
            let norm = &ranges[Operand::FeedForwardNorm];
            let d_piece = d_middle.view_mut(piece);
            self.normed_backward(middle, norm, d_normed.all(), g, d_piece, gradients)?;
        }
        Ok(d_middle)
    }
}
