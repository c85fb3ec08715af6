//! The feed-forward half of a layer.

use device::ops::gated_unit::{UnitKind, gated_unit, gated_unit_backward_in_place};
use device::{DeviceBuffer, Matrix, MatrixMut, Result, Storage, View, ViewMut};

use super::experts::{ExpertActivations, RouteCounts};
use super::{DeviceLayer, input_gradient, linear};
use crate::layer::Operand;
use crate::on_device::factors::GradientPlace;

/// Activations of the network of a layer.
#[derive(Debug)]
pub(super) enum FeedForwardActivations<T: Storage> {
    /// `[T, 2 m]` gate and up.
    Gated(DeviceBuffer<T>),
    /// Boxed: they have the routes.
    Experts(Box<ExpertActivations<T>>),
}

/// A gated network: `down(activation(gate(x)) * up(x))`.
#[derive(Clone, Copy, Debug)]
pub(super) struct GatedNetwork {
    pub(super) unit: UnitKind,
    pub(super) gate_up: Operand,
    pub(super) down: Operand,
    /// Width of the activation.
    pub(super) width: usize,
}

impl<T: Storage> DeviceLayer<'_, T> {
    /// The network of a layer without experts.
    fn gated(&self) -> GatedNetwork {
        let config = &self.decoder.config;
        let unit = config.layers[self.index].feed_forward.unit();
        let (gate_up, down) = (Operand::GateUp, Operand::Down);
        GatedNetwork { unit, gate_up, down, width: config.intermediate_size }
    }

    /// Forward of the half up to the activations, for its input `middle [T, d]`.
    pub(super) fn feed_forward(&self, middle: View<'_, T>) -> Result<FeedForwardActivations<T>> {
        let normed = self.normed(middle, &self.ranges()[Operand::FeedForwardNorm])?;
        self.begin(normed.all(), 0)
    }

    /// Forward of the network up to the activations, for its normalised input `x [T, d]`, whose tokens are those of the pack from
    /// `first` on.
    fn begin(&self, x: View<'_, T>, first: usize) -> Result<FeedForwardActivations<T>> {
        match self.decoder.config.layers[self.index].feed_forward.experts() {
            Some(spec) => Ok(FeedForwardActivations::Experts(Box::new(self.begin_experts(spec, x, first)?))),
            None => Ok(FeedForwardActivations::Gated(self.gate_up(&self.gated(), x)?)),
        }
    }

    /// The result of the network into `out [T, d]`, or added to it if `kept`.
    pub(super) fn finish(
        &self,
        activations: &FeedForwardActivations<T>,
        mut out: ViewMut<'_, T>,
        kept: bool,
    ) -> Result<()> {
        match activations {
            FeedForwardActivations::Experts(activations) => {
                if !kept {
                    self.on().clear(out.reborrow())?;
                }
                self.finish_experts(activations, out.reborrow())?;
                self.decoder.sum_over_ranks(out)
            }
            FeedForwardActivations::Gated(gate_up) => {
                let network = self.gated();
                let activated = self.activated(&network, gate_up.all())?;
                let down = self.matrix(network.down, network.width);
                linear(self.on(), activated.all(), down, out.reborrow(), kept)?;
                self.decoder.sum_over_ranks(out)
            }
        }
    }

    /// `[T, 2 m]` of a gated network for its input `x [T, d]`.
    pub(super) fn gate_up(&self, network: &GatedNetwork, x: View<'_, T>) -> Result<DeviceBuffer<T>> {
        let rows = x.len() / self.hidden();
        let mut out = self.on().uninit(rows * 2 * network.width)?;
        linear(self.on(), x, self.matrix(network.gate_up, self.hidden()), out.all_mut(), false)?;
        Ok(out)
    }

    /// `[T, m]`
    pub(super) fn activated(&self, network: &GatedNetwork, gate_up: View<'_, T>) -> Result<DeviceBuffer<T>> {
        let mut out = self.on().uninit(gate_up.len() / 2)?;
        gated_unit(self.on(), network.unit, gate_up, network.width, out.all_mut())?;
        Ok(out)
    }

    /// Backward of the half: the gradient of `middle`. What is `kept` is of all rows, which then are one chunk.
    pub(super) fn feed_forward_backward(
        &self,
        middle: &DeviceBuffer<T>,
        mut kept: Option<FeedForwardActivations<T>>,
        g: &DeviceBuffer<T>,
        gradients: &mut GradientPlace<'_, T>,
        counts: &mut RouteCounts,
        chunk: usize,
    ) -> Result<DeviceBuffer<T>> {
        let (device, ranges, hidden) = (self.on(), self.ranges(), self.hidden());
        let mut d_middle = device.uninit(middle.len())?;
        let rows = middle.len() / hidden;
        // Ranks that divide experts make the calls of one chunk, without tokens too.
        for start in (0..rows.max(1)).step_by(chunk.max(1)) {
            let piece = start * hidden..(start + chunk).min(rows) * hidden;
            let (middle, g) = (middle.view(piece.clone()), g.view(piece.clone()));
            let normed = self.normed(middle, &ranges[Operand::FeedForwardNorm])?;
            let activations = kept.take().map_or_else(|| self.begin(normed.all(), start), Ok)?;
            let again = |to: ViewMut<'_, T>| self.finish(&activations, to, false);
            let after = &ranges[Operand::FeedForwardAfterNorm];
            let d_result = self.result_gradient(after, g, gradients, again)?;
            let of_result = d_result.all();
            let d_normed = match activations {
                FeedForwardActivations::Experts(kept) => {
                    counts.push(device, self.index, &kept)?;
                    self.experts_backward(normed.all(), *kept, of_result, gradients)?
                }
                FeedForwardActivations::Gated(gate_up) => {
                    let mut d_x = device.uninit(middle.len())?;
                    let (network, x, of_x) = (self.gated(), normed.all(), d_x.all_mut());
                    self.gated_backward(&network, x, gate_up, of_result, gradients, of_x, false)?;
                    self.decoder.sum_over_ranks(d_x.all_mut())?;
                    d_x
                }
            };
            let norm = &ranges[Operand::FeedForwardNorm];
            let d_piece = d_middle.view_mut(piece);
            self.normed_backward(middle, norm, d_normed.all(), g, d_piece, gradients)?;
        }
        Ok(d_middle)
    }

    /// Backward of a gated network for the gradient `g [T, d]` of its result. The gradient of its input is written to `d_x [T, d]`, or
    /// added to it if that is `kept`.
    #[expect(clippy::too_many_arguments, reason = "the operands of a backward")]
    pub(super) fn gated_backward(
        &self,
        network: &GatedNetwork,
        x: View<'_, T>,
        gate_up: DeviceBuffer<T>,
        g: View<'_, T>,
        gradients: &mut GradientPlace<'_, T>,
        d_x: ViewMut<'_, T>,
        kept: bool,
    ) -> Result<()> {
        let GatedNetwork { unit, gate_up: first, down, width } = *network;
        let (device, ranges, hidden) = (self.on(), self.ranges(), self.hidden());
        // The gradient of the activations, and then the activations.
        let mut activated = input_gradient(device, g, self.matrix(down, width))?;
        let mut d_gate_up = device.uninit(gate_up.len())?;
        let (of_activated, out) = (activated.all_mut(), d_gate_up.all_mut());
        gated_unit_backward_in_place(device, unit, gate_up.all(), width, of_activated, out)?;
        drop(gate_up);
        gradients.add(device, &ranges[down], Matrix::new(activated.all(), width), g)?;
        drop(activated);
        gradients.add(device, &ranges[first], Matrix::new(x, hidden), d_gate_up.all())?;
        let (d_gate_up, weight) = (Matrix::new(d_gate_up.all(), 2 * width), self.matrix(first, hidden));
        let keep = if kept { 1.0 } else { 0.0 };
        device.product(d_gate_up, weight, MatrixMut::new(d_x, hidden), 1.0, keep)
    }
}
