//! Forward and backward of a rank, wherever its weights are.
//!
//! Invariant: a pass that is skipped asks for the same weights and hands on the same units as one that is made, so that
//! ranks with different numbers of micro-batches stay in step.

use model::{
    Config, Decoder, GradientSink, LayerSource, Layout, Parameters, Prediction, PredictionGradient,
    Recompute, Team, Trace, Unit,
};
use std::sync::Arc;

use crate::TrainerError;
use crate::exchange::Gathering;
use crate::packing::Packed;

/// The network of a rank.
pub(crate) enum Pass<'a> {
    /// All weights are there.
    Whole(Decoder),
    /// Layers are gathered from all ranks.
    Gathered(Decoder, Gathering<'a>),
}

impl<'a> Pass<'a> {
    /// A network whose weights are all there.
    pub(crate) fn whole(model: &Config, parameters: &Arc<Parameters>, recompute: Recompute) -> Self {
        Self::Whole(Decoder::trainable(model, parameters, recompute))
    }

    /// A network whose layers are gathered; embedding and tail stay as long as it does.
    ///
    /// # Errors
    /// If they do not come.
    pub(crate) fn gathered(
        model: &Config,
        layout: &Arc<Layout>,
        mut source: Gathering<'a>,
        recompute: Recompute,
    ) -> Result<Self, TrainerError> {
        let [embedding, tail] = source.ends()?;
        let decoder = Decoder::without_layers(model, layout, (&embedding, &tail), recompute);
        Ok(Self::Gathered(decoder, source))
    }

    /// Predictions, and what the backward needs.
    pub(crate) fn forward(
        &mut self,
        packed: &Packed<'_>,
        team: &Team,
    ) -> Result<(Vec<Prediction>, Trace), TrainerError> {
        let Packed { pack, positions, targets, .. } = packed;
        Ok(match self {
            Self::Whole(decoder) => decoder.forward(pack, positions, targets, team)?,
            Self::Gathered(decoder, source) => {
                source.backward = false;
                decoder.forward_through(source, pack, positions, targets, team)?
            }
        })
    }

    /// Adds the gradients of `slopes * predictions` to `sink`.
    pub(crate) fn backward(
        &mut self,
        packed: &Packed<'_>,
        trace: Trace,
        slopes: &[PredictionGradient],
        sink: &mut dyn GradientSink,
        team: &Team,
    ) -> Result<(), TrainerError> {
        let Packed { pack, targets, .. } = packed;
        match self {
            Self::Whole(decoder) => decoder.backward(pack, trace, targets, slopes, sink, team)?,
            Self::Gathered(decoder, source) => {
                source.backward = true;
                decoder.backward_through(source, (pack, trace), targets, slopes, sink, team)?;
            }
        }
        Ok(())
    }

    /// Predictions alone.
    pub(crate) fn score(
        &mut self,
        packed: &Packed<'_>,
        team: &Team,
    ) -> Result<Vec<Prediction>, TrainerError> {
        let Packed { pack, positions, targets, .. } = packed;
        Ok(match self {
            Self::Whole(decoder) => decoder.score(pack, positions, targets, team)?,
            Self::Gathered(decoder, source) => {
                source.backward = false;
                decoder.score_through(source, pack, positions, targets, team)?
            }
        })
    }

    /// Takes part in a forward that only others make.
    pub(crate) fn skip_forward(&mut self) -> Result<(), TrainerError> {
        if let Self::Gathered(decoder, source) = self {
            source.backward = false;
            for index in 0..decoder.config().num_layers {
                source.layer(index)?;
            }
        }
        Ok(())
    }

    /// Takes part in a backward that only others make, with gradients of zero.
    pub(crate) fn skip_backward(&mut self, sink: &mut dyn GradientSink) -> Result<(), TrainerError> {
        let mut hand_on = |unit| {
            sink.unit(unit);
            sink.done(unit);
        };
        hand_on(Unit::Tail);
        let layers = match self {
            Self::Whole(decoder) | Self::Gathered(decoder, _) => decoder.config().num_layers,
        };
        for index in (0..layers).rev() {
            if let Self::Gathered(_, source) = self {
                source.backward = true;
                source.layer(index)?;
            }
            hand_on(Unit::Layer(index));
        }
        hand_on(Unit::Embedding);
        Ok(())
    }
}
