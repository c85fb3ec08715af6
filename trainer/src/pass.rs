//! Forward and backward pass of a rank, on the processor or on a device.
//!
//! Invariant: a skipped pass makes the same all-gather and reduce-scatter calls as a computed one, so that ranks with
//! different numbers of micro-batches make the same calls. If ranks divide experts, it is a pass over an empty micro-batch, in which the
//! experts of this rank compute the tokens of others.

use model::{
    Config, Decoder, FrozenParameters, GradientSink, LayerSource, Layout, LowRank, Parameters, PassRanks,
    Prediction, Recompute, SampleSlopes, ThreadPool, TrainedTargets, Unit,
};
use std::sync::Arc;

use crate::TrainerError;
use crate::lora::Adapter;
use crate::on_device::DevicePass;
use crate::packing::Packed;
use crate::zero::ParameterGathering;

/// The network of a rank.
pub(crate) enum Pass<'a> {
    /// All weights are on the host, or a frozen base and an adapter.
    Whole(Decoder),
    /// Layers are gathered from all ranks.
    Gathered(Decoder, ParameterGathering<'a>),
    /// The network is on a device.
    Device(Box<dyn DevicePass + 'a>),
}

impl<'a> Pass<'a> {
    /// A network of `ranks` with all weights, to score, or to train them or an `adapter` that is merged into them.
    pub(crate) fn whole(
        model: &Config,
        parameters: &Arc<Parameters>,
        adapter: Option<&Adapter>,
        recompute: Recompute,
        ranks: PassRanks,
    ) -> Self {
        let decoder = Decoder::trainable(model, parameters, recompute).among(ranks);
        Self::Whole(match adapter {
            Some(adapter) => decoder.adapting(Arc::clone(adapter.factors())),
            None => decoder,
        })
    }

    /// A network with a frozen `base` and `factors` that are not merged.
    pub(crate) fn frozen(
        base: &FrozenParameters,
        factors: &Arc<LowRank>,
        recompute: Recompute,
        ranks: PassRanks,
    ) -> Self {
        Self::Whole(Decoder::frozen(base, factors, recompute).among(ranks))
    }

    /// A network of `ranks` whose layers are gathered. Embedding and tail stay in memory for its life.
    ///
    /// # Errors
    /// If the all-gather fails.
    pub(crate) fn gathered(
        model: &Config,
        layout: &Arc<Layout>,
        mut source: ParameterGathering<'a>,
        recompute: Recompute,
        ranks: PassRanks,
    ) -> Result<Self, TrainerError> {
        let [embedding, tail] = source.ends()?;
        let decoder = Decoder::without_layers(model, layout, &embedding, &tail, recompute).among(ranks);
        Ok(Self::Gathered(decoder, source))
    }

    /// A forward pass, and a backward pass with the derivatives that `slopes` returns for its predictions. Adds the gradients to `sink`. A
    /// device keeps them until the gradients of a slot are `complete`.
    pub(crate) fn train(
        &mut self,
        packed: &Packed<'_>,
        slopes: &mut SampleSlopes<'_>,
        sink: &mut dyn GradientSink,
        complete: bool,
        pool: &ThreadPool,
    ) -> Result<(), TrainerError> {
        let Packed { pack, positions, targets, trained } = packed;
        let trained = TrainedTargets { rows: positions, targets, samples: trained };
        match self {
            Self::Whole(decoder) => decoder.train(pack, trained, slopes, sink, pool)?,
            Self::Gathered(decoder, source) => {
                decoder.train_through(source, pack, trained, slopes, sink, pool)?;
            }
            Self::Device(pass) => {
                let complete: Option<&mut dyn GradientSink> = if complete { Some(&mut *sink) } else { None };
                let layers = pass.train(packed, slopes, complete)?;
                let routed = layers.iter().enumerate().filter(|(_, tokens)| !tokens.of_expert.is_empty());
                routed.for_each(|(index, tokens)| sink.routed(index, tokens));
            }
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
                decoder.score_through(source, pack, positions, targets, pool)?
            }
            Self::Device(pass) => pass.score(packed)?,
        })
    }

    /// Takes part in a forward pass of other ranks.
    pub(crate) fn skip_forward(&mut self, pool: &ThreadPool) -> Result<(), TrainerError> {
        if self.divides_experts() {
            return self.score(&Packed::empty(), pool).map(drop);
        }
        self.skip_layers()
    }

    /// Whether ranks divide the experts of the network.
    pub(crate) fn divides_experts(&self) -> bool {
        match self {
            Self::Whole(decoder) | Self::Gathered(decoder, _) => decoder.divides_experts(),
            Self::Device(pass) => pass.divides_experts(),
        }
    }

    fn skip_layers(&mut self) -> Result<(), TrainerError> {
        (0..self.layers()).try_for_each(|index| self.skip_layer(index, false))
    }

    /// Takes part in a forward and a backward pass of other ranks, with gradients of zero of `sections` sections through `sink`.
    pub(crate) fn skip(
        &mut self,
        sink: &mut dyn GradientSink,
        sections: usize,
        pool: &ThreadPool,
    ) -> Result<(), TrainerError> {
        if self.divides_experts() {
            return self.train(&Packed::empty(), &mut |_, _| Vec::new(), sink, true, pool);
        }
        let mut zeros = |unit| {
            for section in 0..sections {
                sink.section(section);
                sink.unit(unit);
                sink.done(unit);
            }
        };
        self.skip_layers()?;
        zeros(Unit::Tail);
        for index in (0..self.layers()).rev() {
            self.skip_layer(index, true)?;
            zeros(Unit::Layer(index));
        }
        zeros(Unit::Embedding);
        Ok(())
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
            Self::Whole(decoder) | Self::Gathered(decoder, _) => decoder.config().num_layers(),
            Self::Device(pass) => pass.layers(),
        }
    }
}
