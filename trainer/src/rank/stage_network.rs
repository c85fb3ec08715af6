//! The network of a stage of a pipeline, with the micro-batches that are in flight in it.
//!
//! Invariant: a micro-batch that other ranks compute makes the same calls as one of this rank.

use std::collections::BTreeMap;

use model::{
    Decoder, GradientSink, PackPass, PassLayers, Prediction, RoutedTokens, SampleSlopes, ThreadPool,
    TrainedTargets, Unit,
};

use super::RankBase;
use super::step::RouteCounter;
use crate::TrainerError;
use crate::on_device::DevicePass;
use crate::packing::Packed;
use crate::pass::Pass;
use crate::pipeline::StageWork;
use crate::zero::{GradientReduction, add};

/// The layers of a stage, and its head if it is the first.
pub(super) enum StageNetwork<'a> {
    /// On the processor.
    Host(HostStage<'a>),
    /// On a device, which has the micro-batches in flight.
    Device(&'a mut (dyn DevicePass + 'a)),
}

/// Layers on the processor.
pub(super) struct HostStage<'a> {
    decoder: &'a Decoder,
    layers: PassLayers<'a>,
    pool: &'a ThreadPool,
    /// Values of the embedding.
    embedding: usize,
    /// Sections of the tokens of a pass of this rank.
    sections: usize,
    in_flight: BTreeMap<usize, StageBatch<'a>>,
}

/// The tables `[embedding]` of head gradients of a micro-batch, of each section of its tokens; `None` if the head has weights of its own.
type HeadTables = Vec<Option<Vec<f32>>>;

/// A micro-batch on its way through a stage.
struct StageBatch<'a> {
    pass: PackPass<'a>,
    tables: HeadTables,
}

/// Receives the gradients of a head, of which those of the embedding's table are kept apart.
struct HeadSink<'a> {
    sink: &'a mut dyn GradientSink,
    /// Values of the embedding.
    len: usize,
    section: usize,
    tables: HeadTables,
}

impl GradientSink for HeadSink<'_> {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        if unit != Unit::Embedding {
            return self.sink.unit(unit);
        }
        let table = &mut self.tables[self.section];
        table.get_or_insert_with(|| vec![0.0; self.len])
    }

    fn done(&mut self, unit: Unit) {
        self.sink.done(unit);
    }

    fn section(&mut self, index: usize) {
        self.section = index;
        self.sink.section(index);
    }
}

impl<'a> StageNetwork<'a> {
    /// The layers of the rank of `base`, whose `pass` has its network.
    pub(super) fn new(pass: &'a mut Pass<'_>, base: &RankBase, pool: &'a ThreadPool) -> Self {
        let (decoder, layers) = match pass {
            Pass::Whole(decoder) => (&*decoder, PassLayers::Own),
            Pass::Gathered(decoder, source) => (&*decoder, PassLayers::Source(source)),
            Pass::Device(pass) => return Self::Device(&mut **pass),
        };
        let (embedding, sections) = (base.layout.unit(Unit::Embedding).len(), base.passes.own_sections());
        Self::Host(HostStage { decoder, layers, pool, embedding, sections, in_flight: BTreeMap::new() })
    }

    /// Values of the residual stream of micro-batch number `at`, of the rows that this rank computes.
    pub(super) fn stream_len(&self, at: usize, packed: &Packed<'_>) -> usize {
        match self {
            Self::Host(HostStage { decoder, pool, in_flight, .. }) => {
                let fresh = || decoder.pass(&packed.pack, pool).rows();
                in_flight.get(&at).map_or_else(fresh, |batch| batch.pass.rows())
                    * decoder.config().hidden_size
            }
            Self::Device(pass) => pass.stream_len(packed),
        }
    }

    /// Runs the layers on micro-batch number `at`, of the residual stream `input` before them, or of the embedded tokens. What the backward
    /// needs is kept if it `trains`. Returns the residual stream after them.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a rank of the pass fails, or the device fails.
    pub(super) fn advance(
        &mut self,
        at: usize,
        packed: &'a Packed<'_>,
        input: Option<&[f32]>,
        trains: bool,
    ) -> Result<Vec<f32>, TrainerError> {
        match self {
            Self::Host(HostStage { decoder, layers, pool, in_flight, .. }) => {
                let mut pass = decoder.pass(&packed.pack, pool);
                let output = pass.advance(layers, input, trains)?;
                if trains {
                    in_flight.insert(at, StageBatch { pass, tables: HeadTables::new() });
                }
                Ok(output)
            }
            Self::Device(pass) => pass.advance(at, packed, input, trains),
        }
    }

    /// Predictions from the residual stream `x` after the last layer of the model.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a rank of the pass fails, or the device fails.
    pub(super) fn predict(
        &mut self,
        packed: &Packed<'_>,
        x: &[f32],
    ) -> Result<Vec<Prediction>, TrainerError> {
        match self {
            Self::Host(HostStage { decoder, pool, .. }) => {
                let pass = decoder.pass(&packed.pack, pool);
                Ok(pass.predict(Some(x), &packed.positions, &packed.targets)?)
            }
            Self::Device(pass) => pass.predict(packed, x),
        }
    }

    /// Forward and backward of the head of micro-batch number `at`, which has been through all stages, for its residual stream `x`. Returns
    /// the gradient of `x`.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a rank of the pass fails, or the device fails.
    pub(super) fn train_head(
        &mut self,
        at: usize,
        packed: &Packed<'_>,
        x: &[f32],
        slopes: &mut SampleSlopes<'_>,
        sink: &mut GradientReduction<'_>,
    ) -> Result<Vec<f32>, TrainerError> {
        match self {
            Self::Host(HostStage { in_flight, embedding, sections, .. }) => {
                let StageBatch { pass, tables } =
                    in_flight.get_mut(&at).ok_or_else(|| TrainerError::no_forward(at))?;
                let Packed { positions, targets, trained, .. } = packed;
                let trained = TrainedTargets { rows: positions, targets, samples: trained };
                let mut of_head =
                    HeadSink { sink, len: *embedding, section: 0, tables: vec![None; *sections] };
                let d = pass.reverse_head(x, trained, slopes, &mut of_head)?;
                *tables = of_head.tables;
                Ok(d)
            }
            Self::Device(pass) => pass.train_head(packed, x, slopes, complete(sink)),
        }
    }

    /// Backward of the layers for the gradient `d` of the residual stream that micro-batch number `at` left them with. Returns the gradient
    /// of the one before them, and the tokens of experts, by layer.
    ///
    /// # Errors
    /// If a rank of the pass fails, or the device fails.
    pub(super) fn reverse(
        &mut self,
        at: usize,
        d: &[f32],
        sink: &mut GradientReduction<'_>,
    ) -> Result<(Vec<f32>, Vec<RoutedTokens>), TrainerError> {
        match self {
            Self::Host(HostStage { layers, pool, in_flight, .. }) => {
                let StageBatch { pass, tables } =
                    in_flight.remove(&at).ok_or_else(|| TrainerError::no_forward(at))?;
                add_tables(&tables, sink, pool);
                let mut counter = RouteCounter { sink, layers: Vec::new() };
                let d = pass.backward(layers, d, &mut counter)?;
                Ok((d, counter.layers))
            }
            Self::Device(pass) => pass.reverse(at, d, complete(sink)),
        }
    }

    /// Takes part in the work of other ranks with the same layers on a micro-batch, with gradients of zero of `sections` sections.
    ///
    /// # Errors
    /// If another rank does not make the calls.
    pub(super) fn skip(
        &mut self,
        work: StageWork,
        sink: &mut dyn GradientSink,
        sections: usize,
    ) -> Result<(), TrainerError> {
        let mut zeros = |unit| {
            for section in 0..sections {
                sink.section(section);
                sink.unit(unit);
                sink.done(unit);
            }
        };
        match work {
            StageWork::Forward(_) => return self.skip_forward(),
            StageWork::Head(_) => zeros(Unit::Tail),
            StageWork::Backward(_) => {
                for index in (0..self.layers()).rev() {
                    self.skip_layer(index, true)?;
                    zeros(Unit::Layer(index));
                }
                zeros(Unit::Embedding);
            }
        }
        Ok(())
    }

    /// Takes part in a forward of other ranks.
    ///
    /// # Errors
    /// If another rank does not make the calls.
    pub(super) fn skip_forward(&mut self) -> Result<(), TrainerError> {
        (0..self.layers()).try_for_each(|index| self.skip_layer(index, false))
    }

    /// Takes part in the all-gather of a layer.
    fn skip_layer(&mut self, index: usize, backward: bool) -> Result<(), TrainerError> {
        match self {
            Self::Host(HostStage { layers: PassLayers::Own, .. }) => Ok(()),
            Self::Host(HostStage { layers: PassLayers::Source(source), .. }) => {
                if backward {
                    source.reverse();
                } else {
                    source.begin();
                }
                Ok(source.layer(index).map(drop)?)
            }
            Self::Device(pass) => pass.skip_layer(index, backward),
        }
    }

    fn layers(&self) -> usize {
        match self {
            Self::Host(HostStage { decoder, .. }) => decoder.config().num_layers(),
            Self::Device(pass) => pass.layers(),
        }
    }
}

/// The sink of the gradients of a device, which keeps them until those of a slot are complete.
fn complete<'a>(sink: &'a mut GradientReduction<'_>) -> Option<&'a mut dyn GradientSink> {
    if sink.complete { Some(sink) } else { None }
}

/// Adds what the head has left for the table of the embedding.
fn add_tables(tables: &HeadTables, sink: &mut dyn GradientSink, pool: &ThreadPool) {
    for (section, table) in tables.iter().enumerate() {
        let Some(table) = table else { continue };
        sink.section(section);
        add(sink.unit(Unit::Embedding), table, pool);
    }
}
