//! Passes over packs: the forward with its activations, and the backward that accumulates gradients.
//!
//! Invariants:
//! - What is computed again instead of kept changes no bit of any result, but for [`Recompute::Sequence`] on a GPU, whose
//!   library may add up the products of fewer rows in another order.
//! - Everything that a forward needs of the host, and what its backward hands on after it, is on its way before the first
//!   layer is asked for: layers may come from other devices, and an upload may wait for them without a deadline.

use std::ops::Range;

use device::ops::attention::Segments;
use device::ops::delta_rule::DeltaRuns;
use device::ops::norm::{rms_norm, rms_norm_backward};
use device::ops::routes::GivenSlots;
use device::ops::rows::{RowGroups, gather_rows, scatter_rows};
use device::{DeviceBuffer, Matrix, Result, Storage};

use super::DeviceDecoder;
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
    /// `[T]`
    ids: DeviceBuffer<u32>,
    /// Of each rotary embedding.
    angles: Vec<DeviceAngles>,
    segments: Segments,
    /// The same for layers with a recurrence.
    runs: Option<DeltaRuns>,
    /// `[T, slots]` the experts that are given to the tokens in all layers.
    given: Option<DeviceBuffer<u16>>,
    layers: Vec<DeviceLayerTrace<T>>,
    asked: DeviceTargets,
    groups: Groups,
    /// `[rows, d]` before and after the final norm.
    picked: DeviceBuffer<T>,
    normed: DeviceBuffer<T>,
}

/// Rows that are added to one row.
#[derive(Debug)]
struct Groups {
    /// By the row that they were picked from.
    picked: RowGroups,
    /// By token id.
    ids: RowGroups,
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
        assert_eq!(rows.len(), targets.len(), "one row per target");
        let (device, width) = (&self.activations, self.config.hidden_size);
        let tokens = pack.token_ids().len();
        // Scoring has no backward.
        let windows = if recompute.is_some() { self.windows() } else { Vec::new() };
        let segments = Segments::new(device, pack.segments(), tokens, &windows)?;
        let taps = self.config.delta_net().map(|spec| spec.taps);
        let runs = taps.map(|taps| DeltaRuns::new(device, pack.segments(), tokens, taps)).transpose()?;
        let angles = self.angles(pack.positions())?;
        let (ids, mut asked) = (self.ids(pack.token_ids())?, self.ask(targets)?);
        let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
        let rows_there = device.upload(&rows)?;
        let given = self.given(pack)?;
        let (of_rows, of_ids): (&[u32], &[u32]) =
            if recompute.is_some() { (&rows, pack.token_ids()) } else { (&[], &[]) };
        let groups =
            Groups { picked: RowGroups::new(device, of_rows)?, ids: RowGroups::new(device, of_ids)? };
        let mut x = device.uninit(tokens * width)?;
        let table = weights.unit(Unit::Embedding)?.slice(0..self.config.vocab_size * width);
        gather_rows(device, table, ids.all(), width, x.all_mut())?;
        multiply_embedded(device, &self.config, x.all_mut())?;

        let mut layers = Vec::new();
        for index in 0..self.config.num_layers() {
            let weights = weights.unit(Unit::Layer(index))?;
            let given = self.given_in(index, given.as_ref());
            let (angles, segments, runs) = (&angles, &segments, runs.as_ref());
            let layer = DeviceLayer { decoder: self, index, weights, angles, segments, runs, given };
            let (output, kept) = layer.forward(&x, recompute == Some(Recompute::None))?;
            let input = std::mem::replace(&mut x, output);
            if recompute.is_some() {
                layers.push(DeviceLayerTrace { input, kept });
            }
        }
        let mut picked = device.uninit(rows.len() * width)?;
        gather_rows(device, x.all(), rows_there.all(), width, picked.all_mut())?;
        drop((x, rows_there));
        let mut normed = device.uninit(picked.len())?;
        let norm = self.final_norm_of(weights.unit(Unit::Tail)?.slice(self.final_norm()));
        rms_norm(device, picked.all(), norm, normed.all_mut())?;
        self.wait_for_ranks()?;
        let predictions = self.predictions(weights, &normed, &mut asked)?;
        let trace = DeviceTrace { ids, angles, segments, runs, given, layers, asked, groups, picked, normed };
        Ok((predictions, trace))
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
    /// If the trace is of another pack, or the numbers of slopes and predictions differ.
    pub fn backward(
        &self,
        weights: &mut dyn UnitWeights<T>,
        pack: &Pack,
        trace: DeviceTrace<T>,
        slopes: &[PredictionGradient],
        gradients: &mut dyn UnitGradients,
        factors: Option<&DeviceFactors<T>>,
    ) -> Result<RouteCounts> {
        let mut gradients = PassGradients { sink: gradients, factors, layout: &self.layout };
        let DeviceTrace { ids, angles, segments, runs, given, layers, asked, groups, picked, normed } = trace;
        let (device, width) = (&self.activations, self.config.hidden_size);
        assert_eq!(slopes.len() * width, picked.len(), "every prediction has a slope");
        let d_normed = self.predictions_backward(weights, &normed, &asked, slopes, &mut gradients)?;
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
        let tokens = pack.token_ids().len();
        let mut d = device.uninit(tokens * width)?;
        scatter_rows(device, d_picked.all(), &groups.picked, width, d.all_mut())?;
        drop(d_picked);

        let chunk = if self.recompute == Recompute::Sequence { CHUNK } else { tokens };
        let chunks = all_experts(&self.config).count() * tokens.div_ceil(chunk.max(1));
        let experts = all_experts(&self.config).map(|experts| experts.count).max().unwrap_or(0);
        let mut counts = RouteCounts::new(device, chunks, experts)?;
        for (index, DeviceLayerTrace { input, kept }) in layers.into_iter().enumerate().rev() {
            let weights = weights.unit(Unit::Layer(index))?;
            let given = self.given_in(index, given.as_ref());
            let (angles, segments, runs) = (&angles, &segments, runs.as_ref());
            let layer = DeviceLayer { decoder: self, index, weights, angles, segments, runs, given };
            let mut unit = gradients.unit(Unit::Layer(index))?;
            d = layer.backward(&input, kept, &d, &mut unit, &mut counts, chunk)?;
            // Gradients that are complete may be copied to the host, which waits for the device.
            self.wait_for_ranks()?;
            gradients.sink.done(Unit::Layer(index))?;
        }
        multiply_embedded(device, &self.config, d.all_mut())?;
        let (table, tokens) = (0..self.config.vocab_size * width, (ids.all(), &groups.ids));
        let of_table = &mut gradients.unit(Unit::Embedding)?;
        of_table.add_embedded(device, &table, tokens, Matrix::new(d.all(), width))?;
        gradients.sink.done(Unit::Embedding)?;
        Ok(counts)
    }

    /// `[T, slots]` the experts that are given to the tokens of `pack`.
    fn given(&self, pack: &Pack) -> Result<Option<DeviceBuffer<u16>>> {
        let given = pack.experts();
        if given.is_empty() {
            return Ok(None);
        }
        let slots = self.config.expert_slots();
        assert_eq!(given.len(), pack.token_ids().len() * slots, "every token has experts of all layers");
        Ok(Some(self.activations.upload(given)?))
    }

    /// Those of layer `index`, if it has experts.
    fn given_in<'a>(&self, index: usize, given: Option<&'a DeviceBuffer<u16>>) -> Option<GivenSlots<'a>> {
        let (all, slots) = (given?.all(), self.config.expert_slots());
        self.config.layers[index].feed_forward.experts()?;
        Some(GivenSlots { all, slots, first: self.config.slots_before(index) })
    }
}
