//! Passes over packs: the forward with its activations, and the backward that accumulates gradients.
//!
//! Invariants:
//! - What is computed again instead of kept changes no bit of any result, but for [`Recompute::Sequence`] on a GPU, whose
//!   library may add up the products of fewer rows in another order.
//! - Everything that a forward needs of the host, and what its backward hands on after it, is on its way before the first
//!   layer is asked for: layers may come from other devices, and an upload may wait for them without a deadline. Rows of experts that
//!   ranks divide are the exception: before them the host waits for the ranks, with a deadline.

use std::ops::Range;

use device::ops::attention::Segments;
use device::ops::delta_rule::DeltaRuns;
use device::ops::norm::{rms_norm, rms_norm_backward};
use device::ops::routes::GivenSlots;
use device::ops::rows::{RowGroups, gather_rows, scatter_rows};
use device::{DeviceBuffer, Matrix, Result, Storage};

use super::DeviceDecoder;
use super::context::{ContextPass, DividedTargets, HeadExchange};
use super::experts::all_experts;
use super::factors::{DeviceFactors, PassGradients};
use super::head::DeviceTargets;
use super::layer::{DeviceLayer, LayerActivations, RouteCounts};
use super::operands::{DeviceAngles, multiply_embedded};
use super::units::{UnitGradients, UnitWeights};
use crate::{Pack, Prediction, PredictionGradient, Recompute, Target, Unit};

/// Tokens of a feed-forward block that are in memory at a time with [`Recompute::Sequence`].
const CHUNK: usize = 4096;

/// Activations of a forward, for its backward.
#[derive(Debug)]
pub struct DeviceTrace<T: Storage> {
    layers: DeviceLayersTrace<T>,
    head: DeviceHeadTrace<T>,
}

/// What the layers of a pass leave to their backward.
#[derive(Debug)]
pub struct DeviceLayersTrace<T: Storage> {
    /// Tokens of the pack that this rank computes.
    tokens: usize,
    /// `[T]`; empty without an embedding.
    ids: DeviceBuffer<u32>,
    /// Rows of the pack by token id.
    by_id: RowGroups,
    /// Of each rotary embedding.
    angles: Vec<DeviceAngles>,
    segments: Segments,
    /// If ranks share the tokens: the tokens of this trace are then those of this rank.
    context: Option<ContextPass>,
    /// What these ranks exchange in attention, for each shape of heads.
    exchanges: Vec<HeadExchange>,
    /// The segments for layers with a recurrence.
    runs: Option<DeltaRuns>,
    /// `[T, slots]` the experts that are given to the tokens in all layers.
    given: Option<DeviceBuffer<u16>>,
    /// What is computed again; `None` where no backward follows.
    recompute: Option<Recompute>,
    layers: Vec<DeviceLayerTrace<T>>,
}

/// The rows of a pack from which targets are predicted.
#[derive(Debug)]
pub(super) struct AskedRows {
    /// `[n]`
    rows: DeviceBuffer<u32>,
    /// Which of the targets these are, if ranks share the tokens.
    divided: Option<DividedTargets>,
    /// Predictions by the row that they are made from.
    by_row: RowGroups,
    asked: DeviceTargets,
}

/// What the final norm and the head leave to their backward.
#[derive(Debug)]
pub(super) struct DeviceHeadTrace<T: Storage> {
    divided: Option<DividedTargets>,
    by_row: RowGroups,
    asked: DeviceTargets,
    /// `[rows, d]` before and after the final norm.
    picked: DeviceBuffer<T>,
    normed: DeviceBuffer<T>,
}

impl<T: Storage> DeviceLayersTrace<T> {
    /// Tokens of the pack that this rank computes.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }
}

#[derive(Debug)]
struct DeviceLayerTrace<T: Storage> {
    input: DeviceBuffer<T>,
    /// Empty if it is computed again.
    kept: Option<LayerActivations<T>>,
}

impl<T: Storage> DeviceDecoder<T> {
    /// Predictions of `targets [n]`, each from the hidden state at its row of `rows [n]` of the pack. Synchronises.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, weights are not available, or the device fails.
    ///
    /// # Panics
    /// If the numbers of rows and targets differ, or the pack has experts of another model.
    pub fn score(
        &self,
        weights: &mut dyn UnitWeights<T>,
        pack: &Pack,
        rows: &[usize],
        targets: &[Target<'_>],
    ) -> Result<Vec<Prediction>> {
        Ok(self.run(weights, pack, rows, targets, None)?.0)
    }

    /// The same, with the activations for the backward. Synchronises.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, weights are not available, or the device fails.
    ///
    /// # Panics
    /// If the numbers of rows and targets differ, or the pack has experts of another model.
    pub fn forward(
        &self,
        weights: &mut dyn UnitWeights<T>,
        pack: &Pack,
        rows: &[usize],
        targets: &[Target<'_>],
    ) -> Result<(Vec<Prediction>, DeviceTrace<T>)> {
        self.run(weights, pack, rows, targets, Some(self.recompute))
    }

    /// A forward; `recompute` is `None` where no backward follows.
    fn run(
        &self,
        weights: &mut dyn UnitWeights<T>,
        pack: &Pack,
        rows: &[usize],
        targets: &[Target<'_>],
        recompute: Option<Recompute>,
    ) -> Result<(Vec<Prediction>, DeviceTrace<T>)> {
        let mut layers = self.begin(pack, recompute)?;
        let asked = self.ask_rows(layers.context.as_ref(), rows, targets, recompute.is_some())?;
        let x = self.embedded(weights, &layers)?;
        let x = self.run_layers(weights, &mut layers, x)?;
        let (predictions, head) = self.run_head(weights, x, asked, layers.context.as_ref())?;
        Ok((predictions, DeviceTrace { layers, head }))
    }

    /// What the layers of a pass need of the host.
    pub(super) fn begin(&self, pack: &Pack, recompute: Option<Recompute>) -> Result<DeviceLayersTrace<T>> {
        let (device, tokens) = (&self.activations, pack.token_ids().len());
        let context = self.context(pack);
        let own = context.as_ref().map_or(0..tokens, ContextPass::own);
        // Scoring has no backward.
        let windows = if recompute.is_some() { self.windows() } else { Vec::new() };
        let segments = Segments::new(device, pack.segments(), tokens, &windows)?;
        let taps = self.config.delta_net().map(|spec| spec.taps);
        let runs = taps.map(|taps| DeltaRuns::new(device, pack.segments(), tokens, taps)).transpose()?;
        // Of the stages of a pipeline the first alone has an embedding.
        let ids = if self.has_embedding() { &pack.token_ids()[own.clone()] } else { &[] };
        let grouped = if recompute.is_some() { ids } else { &[] };
        Ok(DeviceLayersTrace {
            tokens: own.len(),
            angles: self.angles(&pack.positions()[own.clone()])?,
            ids: self.ids(ids)?,
            by_id: RowGroups::new(device, grouped)?,
            segments,
            exchanges: match &context {
                Some(context) => context.exchanges(device, &self.config, &self.ranks)?,
                None => Vec::new(),
            },
            context,
            runs,
            given: self.given(pack, own)?,
            recompute,
            layers: Vec::new(),
        })
    }

    /// What the head of a pass needs of the host: `targets [n]`, each predicted from its row of `rows [n]` of the pack.
    pub(super) fn ask_rows(
        &self,
        context: Option<&ContextPass>,
        rows: &[usize],
        targets: &[Target<'_>],
        backward: bool,
    ) -> Result<AskedRows> {
        assert_eq!(rows.len(), targets.len(), "one row per target");
        let device = &self.activations;
        let divided = context.map(|context| context.divide(rows));
        let first = context.map_or(0, |context| context.own().start);
        let own: Vec<usize> = match &divided {
            Some(divided) => divided.own().to_vec(),
            None => (0..rows.len()).collect(),
        };
        let rows: Vec<u32> = own.iter().map(|at| (rows[*at] - first) as u32).collect();
        let targets: Vec<Target<'_>> = own.iter().map(|at| targets[*at]).collect();
        let by_row = RowGroups::new(device, if backward { &rows } else { &[] })?;
        Ok(AskedRows { asked: self.ask(&targets)?, rows: device.upload(&rows)?, divided, by_row })
    }

    /// `[T, d]` the embedded tokens of a pass.
    pub(super) fn embedded(
        &self,
        weights: &mut dyn UnitWeights<T>,
        trace: &DeviceLayersTrace<T>,
    ) -> Result<DeviceBuffer<T>> {
        let (device, width) = (&self.activations, self.config.hidden_size);
        let mut x = device.uninit(trace.ids.len() * width)?;
        let table = weights.unit(Unit::Embedding)?.slice(0..self.config.vocab_size * width);
        gather_rows(device, table, trace.ids.all(), width, x.all_mut())?;
        multiply_embedded(device, &self.config, x.all_mut())?;
        Ok(x)
    }

    /// Runs the layers of the decoder on the residual stream `x [T, d]`.
    pub(super) fn run_layers(
        &self,
        weights: &mut dyn UnitWeights<T>,
        trace: &mut DeviceLayersTrace<T>,
        mut x: DeviceBuffer<T>,
    ) -> Result<DeviceBuffer<T>> {
        for index in 0..self.config.num_layers() {
            let layer = self.layer(weights, trace, index)?;
            let (output, kept) = layer.forward(&x, trace.recompute == Some(Recompute::None))?;
            let input = std::mem::replace(&mut x, output);
            if trace.recompute.is_some() {
                trace.layers.push(DeviceLayerTrace { input, kept });
            }
        }
        Ok(x)
    }

    fn has_embedding(&self) -> bool {
        !self.layout.unit(Unit::Embedding).is_empty()
    }

    fn layer<'a>(
        &'a self,
        weights: &'a mut dyn UnitWeights<T>,
        trace: &'a DeviceLayersTrace<T>,
        index: usize,
    ) -> Result<DeviceLayer<'a, T>> {
        let DeviceLayersTrace { angles, segments, exchanges, runs, given, .. } = trace;
        let (weights, given) = (weights.unit(Unit::Layer(index))?, self.given_in(index, given.as_ref()));
        let shape = self.config.attention_rule(index).shape;
        let exchange = exchanges.iter().find(|exchange| exchange.shape() == shape);
        let runs = runs.as_ref();
        Ok(DeviceLayer { decoder: self, index, weights, angles, segments, exchange, runs, given })
    }

    /// Predictions from the residual stream `x [T, d]` after the last layer. Waits.
    pub(super) fn run_head(
        &self,
        weights: &mut dyn UnitWeights<T>,
        x: DeviceBuffer<T>,
        AskedRows { rows, divided, by_row, mut asked }: AskedRows,
        context: Option<&ContextPass>,
    ) -> Result<(Vec<Prediction>, DeviceHeadTrace<T>)> {
        let (device, width) = (&self.activations, self.config.hidden_size);
        let mut picked = device.uninit(rows.len() * width)?;
        gather_rows(device, x.all(), rows.all(), width, picked.all_mut())?;
        drop((x, rows));
        let mut normed = device.uninit(picked.len())?;
        let norm = self.final_norm_of(weights.unit(Unit::Tail)?.slice(self.final_norm()));
        rms_norm(device, picked.all(), norm, normed.all_mut())?;
        self.wait_for_ranks()?;
        let mut predictions = self.predictions(weights, &normed, &mut asked)?;
        if let (Some(context), Some(divided)) = (context, &divided) {
            predictions = context.gather(&predictions, divided)?;
        }
        Ok((predictions, DeviceHeadTrace { divided, by_row, asked, picked, normed }))
    }

    /// Angles of `positions [T]`, of each rotary embedding.
    fn angles(&self, positions: &[u32]) -> Result<Vec<DeviceAngles>> {
        let device = &self.activations;
        let mut all = self.rotaries.reserve(device, positions.len())?;
        let positions = device.upload(positions)?;
        self.rotaries.compute(device, positions.all(), &mut all)?;
        Ok(all)
    }

    /// Adds the gradients of `sum(slopes [n] * predictions [n])` to `gradients`, for the forward that returned `trace`. They are
    /// those of all weights, or of `factors` that are merged into the weights: `[factors.within(unit).len()]` of a unit. Returns
    /// the tokens of the experts of its layers.
    ///
    /// # Errors
    /// If weights are not available, a reduction of gradients fails, or the device fails.
    ///
    /// # Panics
    /// If the numbers of slopes and predictions differ.
    pub fn backward(
        &self,
        weights: &mut dyn UnitWeights<T>,
        trace: DeviceTrace<T>,
        slopes: &[PredictionGradient],
        gradients: &mut dyn UnitGradients,
        factors: Option<&DeviceFactors<T>>,
    ) -> Result<RouteCounts> {
        let mut gradients = PassGradients { sink: gradients, factors, layout: &self.layout };
        let DeviceTrace { layers, head } = trace;
        let d = self.reverse_head(weights, head, layers.tokens(), slopes, &mut gradients)?;
        Ok(self.reverse_layers(weights, layers, d, &mut gradients)?.1)
    }

    /// `[T, d]` the gradient of the residual stream of `tokens` after the last layer.
    pub(super) fn reverse_head(
        &self,
        weights: &mut dyn UnitWeights<T>,
        head: DeviceHeadTrace<T>,
        tokens: usize,
        slopes: &[PredictionGradient],
        gradients: &mut PassGradients<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let DeviceHeadTrace { divided, by_row, asked, picked, normed } = head;
        let (device, width) = (&self.activations, self.config.hidden_size);
        let of_own = |divided: &DividedTargets| divided.own().iter().map(|at| slopes[*at]).collect();
        let own: Option<Vec<PredictionGradient>> = divided.as_ref().map(of_own);
        let slopes = own.as_deref().unwrap_or(slopes);
        assert_eq!(slopes.len() * width, picked.len(), "every prediction has a slope");
        let d_normed = self.predictions_backward(weights, &normed, &asked, slopes, gradients)?;
        drop(normed);
        let place: Range<usize> = self.final_norm();
        let norm = self.final_norm_of(weights.unit(Unit::Tail)?.slice(place.clone()));
        let mut d_picked = device.uninit(picked.len())?;
        {
            let (of_picked, mut tail) = (d_picked.all_mut(), gradients.unit(Unit::Tail)?);
            let of_norm = tail.vector(&place);
            rms_norm_backward(device, picked.all(), norm, d_normed.all(), None, of_picked, of_norm)?;
        }
        gradients.sink.done(Unit::Tail)?;
        drop((d_normed, picked));
        let mut d = device.uninit(tokens * width)?;
        scatter_rows(device, d_picked.all(), &by_row, width, d.all_mut())?;
        Ok(d)
    }

    /// The gradient of the residual stream before the layers, from `d [T, d]`, that of the stream after them, and the tokens of experts. If
    /// the decoder has an embedding, its gradient too.
    pub(super) fn reverse_layers(
        &self,
        weights: &mut dyn UnitWeights<T>,
        mut trace: DeviceLayersTrace<T>,
        mut d: DeviceBuffer<T>,
        gradients: &mut PassGradients<'_, T>,
    ) -> Result<(DeviceBuffer<T>, RouteCounts)> {
        let (device, tokens) = (&self.activations, trace.tokens);
        let chunk = if self.recompute == Recompute::Sequence { CHUNK } else { tokens };
        let chunks = all_experts(&self.config).count() * tokens.div_ceil(chunk.max(1)).max(1);
        let experts = all_experts(&self.config).map(|experts| experts.count).max().unwrap_or(0);
        let mut counts = RouteCounts::new(device, chunks, experts)?;
        while let Some(DeviceLayerTrace { input, kept }) = trace.layers.pop() {
            let index = trace.layers.len();
            let layer = self.layer(weights, &trace, index)?;
            let mut unit = gradients.unit(Unit::Layer(index))?;
            d = layer.backward(&input, kept, &d, &mut unit, &mut counts, chunk)?;
            // Gradients that are complete may be copied to the host, which waits for the device.
            self.wait_for_ranks()?;
            gradients.sink.done(Unit::Layer(index))?;
        }
        if self.has_embedding() {
            let width = self.config.hidden_size;
            multiply_embedded(device, &self.config, d.all_mut())?;
            let (table, tokens) = (0..self.config.vocab_size * width, (trace.ids.all(), &trace.by_id));
            let of_table = &mut gradients.unit(Unit::Embedding)?;
            of_table.add_embedded(device, &table, tokens, Matrix::new(d.all(), width))?;
            gradients.sink.done(Unit::Embedding)?;
        }
        Ok((d, counts))
    }

    /// `[T, slots]` the experts that are given to the tokens `own` of `pack`.
    fn given(&self, pack: &Pack, own: Range<usize>) -> Result<Option<DeviceBuffer<u16>>> {
        let given = pack.experts();
        if given.is_empty() {
            return Ok(None);
        }
        let slots = self.config.expert_slots();
        assert_eq!(given.len(), pack.token_ids().len() * slots, "every token has experts of all layers");
        Ok(Some(self.activations.upload(&given[own.start * slots..own.end * slots])?))
    }

    /// Those of layer `index`, if it has experts.
    fn given_in<'a>(&self, index: usize, given: Option<&'a DeviceBuffer<u16>>) -> Option<GivenSlots<'a>> {
        let (all, slots) = (given?.all(), self.config.expert_slots());
        self.config.layers[index].feed_forward.experts()?;
        Some(GivenSlots { all, slots, first: self.config.slots_before(index) })
    }
}
