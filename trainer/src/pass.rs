//! Forward and backward pass of a rank, on the processor or on a device.
//!
//! Invariant: a skipped pass makes the same all-gather and reduce-scatter calls as a computed one, so that ranks with
//! different numbers of micro-batches make the same calls.

use model::{
    Config, Decoder, GradientSink, LayerSource, Layout, Parameters, Prediction, PredictionGradient,
    Recompute, ThreadPool, Trace, TracedPack, Unit,
};
use std::sync::Arc;

use crate::TrainerError;
use crate::on_device::DevicePass;
use crate::packing::Packed;
use crate::zero::ParameterGathering;

/// The network of a rank.
pub(crate) enum Pass<'a> {
    /// All weights are on the host.
    Whole(Decoder),
    /// Layers are gathered from all ranks.
    Gathered(Decoder, ParameterGathering<'a>),
    /// The network is on a device.
    Device(Box<dyn DevicePass + 'a>),
}

/// Activations of a forward pass for its backward pass.
pub(crate) enum Traced {
    Host(Trace),
    /// The activations are on the device.
    Device,
}

impl<'a> Pass<'a> {
    /// A network with all weights.
    pub(crate) fn whole(model: &Config, parameters: &Arc<Parameters>, recompute: Recompute) -> Self {
        Self::Whole(Decoder::trainable(model, parameters, recompute))
    }

    /// A network whose layers are gathered. Embedding and tail stay in memory for its life.
    ///
    /// # Errors
    /// If the all-gather fails.
    pub(crate) fn gathered(
        model: &Config,
        layout: &Arc<Layout>,
        mut source: ParameterGathering<'a>,
        recompute: Recompute,
    ) -> Result<Self, TrainerError> {
        let [embedding, tail] = source.ends()?;
        let decoder = Decoder::without_layers(model, layout, &embedding, &tail, recompute);
        Ok(Self::Gathered(decoder, source))
    }

    /// Predictions, and the activations for the backward pass.
    pub(crate) fn forward(
        &mut self,
        packed: &Packed<'_>,
        pool: &ThreadPool,
    ) -> Result<(Vec<Prediction>, Traced), TrainerError> {
        let Packed { pack, positions, targets, .. } = packed;
        let (predictions, trace) = match self {
            Self::Whole(decoder) => decoder.forward(pack, positions, targets, pool)?,
            Self::Gathered(decoder, source) => {
                source.backward = false;
                decoder.forward_through(source, pack, positions, targets, pool)?
            }
            Self::Device(pass) => return Ok((pass.forward(packed)?, Traced::Device)),
        };
        Ok((predictions, Traced::Host(trace)))
    }

    /// Adds the gradients of `slopes * predictions` to `sink`. Without `sink` they stay on the device.
    pub(crate) fn backward(
        &mut self,
        packed: &Packed<'_>,
        trace: Traced,
        slopes: &[PredictionGradient],
        sink: Option<&mut dyn GradientSink>,
        pool: &ThreadPool,
    ) -> Result<(), TrainerError> {
        let Packed { pack, targets, .. } = packed;
        match (self, trace, sink) {
            (Self::Whole(decoder), Traced::Host(trace), Some(sink)) => {
                decoder.backward(pack, trace, targets, slopes, sink, pool)?;
            }
            (Self::Gathered(decoder, source), Traced::Host(trace), Some(sink)) => {
                source.backward = true;
                let traced = TracedPack { pack, trace };
                decoder.backward_through(source, traced, targets, slopes, sink, pool)?;
            }
            (Self::Device(pass), _, sink) => pass.backward(packed, slopes, sink)?,
            _ => unreachable!("what is computed on the host has a trace and a sink there"),
        }
        Ok(())
    }

    /// Predictions without activations.
    pub(crate) fn score(
        &mut self,
        packed: &Packed<'_>,
        pool: &ThreadPool,
    ) -> Result<Vec<Prediction>, TrainerError> {
        let Packed { pack, positions, targets, .. } = packed;
        Ok(match self {
            Self::Whole(decoder) => decoder.score(pack, positions, targets, pool)?,
            Self::Gathered(decoder, source) => {
                source.backward = false;
                decoder.score_through(source, pack, positions, targets, pool)?
            }
            Self::Device(pass) => pass.score(packed)?,
        })
    }

    /// Takes part in a forward pass of other ranks.
    pub(crate) fn skip_forward(&mut self) -> Result<(), TrainerError> {
        (0..self.layers()).try_for_each(|index| self.skip_layer(index, false))
    }

    /// Takes part in a forward and a backward pass of other ranks.
    pub(crate) fn skip(&mut self, sink: Option<&mut dyn GradientSink>) -> Result<(), TrainerError> {
        self.skip_forward()?;
        self.skip_backward(sink)
    }

    /// Takes part in a backward pass of other ranks with gradients of zero, through `sink` or from device to device.
    fn skip_backward(&mut self, mut sink: Option<&mut dyn GradientSink>) -> Result<(), TrainerError> {
        let mut hand_on = |pass: &mut Self, unit| match (&mut sink, pass) {
            (Some(sink), _) => {
                sink.unit(unit);
                sink.done(unit);
                Ok(())
            }
            (None, Self::Device(pass)) => pass.skip_unit(unit),
            (None, _) => unreachable!("what is computed on the host has a sink there"),
        };
        hand_on(self, Unit::Tail)?;
        for index in (0..self.layers()).rev() {
            self.skip_layer(index, true)?;
            hand_on(self, Unit::Layer(index))?;
        }
        hand_on(self, Unit::Embedding)
    }

    /// In a device group, whether the next backward pass reduces its gradients (`leave`), and is the `first` of the step
    /// that does.
    pub(crate) fn reduces(&mut self, leave: bool, first: bool) {
        if let Self::Device(pass) = self {
            pass.reduces(leave, first);
        }
    }

    /// Takes part in the all-gather of a layer.
    fn skip_layer(&mut self, index: usize, backward: bool) -> Result<(), TrainerError> {
        match self {
            Self::Whole(_) => {}
            Self::Gathered(_, source) => {
                source.backward = backward;
                source.layer(index)?;
            }
            Self::Device(pass) => pass.skip_layer(index, backward)?,
        }
        Ok(())
    }

    fn layers(&self) -> usize {
        match self {
            Self::Whole(decoder) | Self::Gathered(decoder, _) => decoder.config().num_layers,
            Self::Device(pass) => pass.layers(),
        }
    }
}
