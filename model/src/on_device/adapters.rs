//! Adapters of one base in one batch of a decode step, as on the processor ([`crate::Decoder::set_adapters`]; Punica, Chen et al.
//! 2023, arXiv 2310.18547).
//!
//! The factors of all adapters are one buffer, and one table says where those of each linear operation are. A recorded step reads
//! the adapters of its tokens on the device.
//!
//! Invariant: every factor is computed with, or the adapters are refused.

use std::ops::Range;
use std::sync::Arc;

use device::ops::adapters::{AdaptedOutputs, AdapterFactors, AdapterPlace};
use device::{DeviceBuffer, DeviceError, Result, Storage};

use super::DeviceDecoder;
use super::units::upload_as;
use crate::layer::Operand;
use crate::{AdaptedMatrix, Config, FactorPair, Layout, LowRank, Unit};

/// Linear operations of a layer that can have factors.
const OPERANDS: [Operand; 11] = [
    Operand::Qkv,
    Operand::QueryDown,
    Operand::QueryUp,
    Operand::KeyDown,
    Operand::KeyUp,
    Operand::DeltaGates,
    Operand::Output,
    Operand::GateUp,
    Operand::Down,
    Operand::SharedGateUp,
    Operand::SharedDown,
];
/// Factors of an adapter begin at a multiple of so many values, which is one of 16 bytes.
const ALIGNED: usize = 8;

/// The adapters that a sampler serves.
#[derive(Debug)]
pub(super) struct DeviceAdapters<T: Storage> {
    all: Vec<Arc<LowRank>>,
    /// `[n]` the factors of all adapters.
    factors: DeviceBuffer<T>,
    table: DeviceBuffer<u32>,
    /// The operations of each layer that have factors.
    layers: Vec<Vec<(Operand, AdaptedLinear)>>,
    embedding: Option<AdaptedLinear>,
    head: Option<AdaptedLinear>,
    /// Values that a token needs while one operation is computed.
    scratch: usize,
}

/// A linear operation that some adapters have factors of.
#[derive(Debug)]
struct AdaptedLinear {
    /// Its part of the table.
    table: Range<usize>,
    sites: usize,
    /// The largest.
    rank: usize,
}

/// A linear operation in the flat parameters.
struct LinearWeight<'a> {
    /// With experts the weights of one after the other.
    place: Range<usize>,
    /// Of an embedding the size of the vocabulary.
    input: usize,
    /// Widths of the outputs of its matrices.
    outputs: &'a [usize],
    is_embedding: bool,
}

/// The table of all operations while it is made.
struct FactorTables<'a> {
    all: &'a [Arc<LowRank>],
    /// Where the factors of each adapter begin.
    starts: Vec<usize>,
    /// Number of all factors.
    len: usize,
    table: Vec<u32>,
    /// Of each adapter the pairs that an operation has.
    placed: Vec<Vec<bool>>,
}

impl<T: Storage> DeviceAdapters<T> {
    /// A copy of `all` on the device of `decoder`.
    ///
    /// # Errors
    /// If an adapter has factors of a weight that no operation of a step has them of, or the device has no memory.
    pub(super) fn new(decoder: &DeviceDecoder<T>, all: &[Arc<LowRank>]) -> Result<Self> {
        let (config, layout) = (&decoder.config, &decoder.layout);
        let mut tables = FactorTables::new(all);
        let layers: Vec<Vec<_>> =
            (0..config.num_layers()).map(|index| tables.of_layer(config, layout, index)).collect();
        let [vocabulary, hidden] = [config.vocab_size, config.hidden_size];
        let start = layout.unit(Unit::Embedding).start;
        let place = start..start + vocabulary * hidden;
        let outputs = &[hidden];
        let embedding =
            tables.linear(&LinearWeight { place, input: vocabulary, outputs, is_embedding: true });
        let (place, outputs) = (layout.head(), &[vocabulary]);
        let head = tables.linear(&LinearWeight { place, input: hidden, outputs, is_embedding: false });
        if let Some(name) = tables.left_out(layout) {
            let (device, call) = (decoder.device.name(), "serving adapters");
            let reason = format!("factors of {name} are computed on a device only if they are merged");
            return Err(DeviceError::Call { device, call, reason });
        }
        // Rows of experts, of which a token has several.
        let rows =
            |index: usize, operand: Operand| match (operand, config.layers[index].feed_forward.experts()) {
                (Operand::GateUp | Operand::Down, Some(experts)) => experts.per_token,
                _ => 1,
            };
        let of_layers = layers.iter().enumerate();
        let of_layers = of_layers.flat_map(|(index, all)| {
            all.iter().map(move |(operand, linear)| rows(index, *operand) * linear.width())
        });
        let scratch = of_layers.chain(embedding.iter().map(AdaptedLinear::width)).max().unwrap_or(0);
        let device = decoder.device.labelled("adapters");
        let mut values = vec![0.0; tables.len];
        for (start, low_rank) in tables.starts.iter().zip(all) {
            values[*start..*start + low_rank.values().len()].copy_from_slice(low_rank.values());
        }
        let mut factors = device.uninit(values.len())?;
        upload_as(&device, &values, &mut factors)?;
        let table = device.upload(&tables.table)?;
        Ok(Self { all: all.to_vec(), factors, table, layers, embedding, head, scratch })
    }

    /// Number of adapters.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Memory, bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.factors.bytes() + self.table.bytes()
    }

    /// Whether it serves these.
    pub(super) fn serves(&self, all: &[Arc<LowRank>]) -> bool {
        self.all.len() == all.len() && self.all.iter().zip(all).all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// Values that `tokens` tokens need while one operation of a step is computed.
    pub(super) fn scratch(&self, tokens: usize) -> usize {
        tokens * self.scratch
    }

    /// The factors of `operand` of layer `index`, if it has some.
    pub(super) fn of_layer(&self, index: usize, operand: Operand) -> Option<AdapterFactors<'_, T>> {
        self.layers[index].iter().find(|(of, _)| *of == operand).map(|(_, linear)| self.of(linear))
    }

    /// The factors of the embedding, if it has some.
    pub(super) fn embedding(&self) -> Option<AdapterFactors<'_, T>> {
        self.embedding.as_ref().map(|linear| self.of(linear))
    }

    /// The factors of the head, if it has some.
    pub(super) fn head(&self) -> Option<AdapterFactors<'_, T>> {
        self.head.as_ref().map(|linear| self.of(linear))
    }

    fn of(&self, linear: &AdaptedLinear) -> AdapterFactors<'_, T> {
        let AdaptedLinear { table, sites, rank } = linear;
        AdapterFactors {
            factors: self.factors.all(),
            table: self.table.view(table.clone()),
            sites: *sites,
            adapters: self.all.len(),
            rank: *rank,
        }
    }
}

impl AdaptedLinear {
    /// Values of a row between its two products.
    fn width(&self) -> usize {
        self.sites * self.rank
    }
}

impl<'a> FactorTables<'a> {
    fn new(all: &'a [Arc<LowRank>]) -> Self {
        let (mut starts, mut len) = (Vec::with_capacity(all.len()), 0);
        for low_rank in all {
            starts.push(len);
            len += low_rank.values().len().next_multiple_of(ALIGNED);
        }
        let placed = all.iter().map(|low_rank| vec![false; low_rank.pairs().len()]).collect();
        Self { all, starts, len, table: Vec::new(), placed }
    }

    /// The operations of layer `index` that have factors.
    fn of_layer(&mut self, config: &Config, layout: &Layout, index: usize) -> Vec<(Operand, AdaptedLinear)> {
        let layer = layout.unit(Unit::Layer(index));
        let [first, end] =
            [layer.start, layer.end].map(|at| layout.specs().partition_point(|spec| spec.offset < at));
        let matrices: Vec<_> = AdaptedMatrix::all(&layout.specs()[first..end]).collect();
        let of = |operand: Operand| {
            let range = &layout.ranges(index)[operand];
            if range.is_empty() {
                return None;
            }
            let spec = config.linear_spec(index, operand);
            let place = layer.start + range.start..layer.start + range.end;
            let inside = matrices.iter().filter(|matrix| place.contains(&matrix.weight.start));
            // Those of one network.
            let output: usize = spec.outputs.iter().sum();
            let mut before = 0;
            let own = inside.map(|matrix| matrix.rows).take_while(|rows| {
                before += rows;
                before <= output
            });
            let outputs = &own.collect::<Vec<_>>();
            let weight = LinearWeight { place, input: spec.input, outputs, is_embedding: false };
            Some((operand, self.linear(&weight)?))
        };
        OPERANDS.into_iter().filter_map(of).collect()
    }

    /// Adds the table of an operation, if an adapter has factors of it.
    fn linear(&mut self, weight: &LinearWeight<'_>) -> Option<AdaptedLinear> {
        let LinearWeight { place, input, outputs, is_embedding } = weight;
        let mut output = 0;
        let mut sites = Vec::with_capacity(outputs.len());
        for width in *outputs {
            sites.push(output..output + width);
            output += width;
        }
        let (adapters, networks) = (self.all.len(), place.len() / (input * output));
        let mut places = vec![None; networks * sites.len() * adapters];
        for (adapter, (low_rank, start)) in self.all.iter().zip(&self.starts).enumerate() {
            let pairs = low_rank.pairs();
            let first = pairs.partition_point(|pair| pair.weight.start < place.start);
            let inside = pairs.iter().enumerate().skip(first);
            let inside = inside.take_while(|(_, pair)| pair.weight.start < place.end);
            for (number, pair) in inside.filter(|(_, pair)| pair.is_embedding == *is_embedding) {
                let FactorPair { weight, a, b, rows, columns, .. } = pair;
                // Rows of an embedding are its inputs.
                let (row, width) =
                    if *is_embedding { (0, columns) } else { ((weight.start - place.start) / input, rows) };
                let own = row % output..row % output + width;
                let Some(site) = sites.iter().position(|site| *site == own) else { continue };
                places[(row / output * sites.len() + site) * adapters + adapter] = Some(AdapterPlace {
                    a: start + a.start,
                    b: start + b.start,
                    rank: low_rank.rank(),
                    scale: low_rank.scale(),
                });
                self.placed[adapter][number] = true;
            }
        }
        places.iter().any(Option::is_some).then(|| {
            let of = AdaptedOutputs { input: *input, output, sites, adapters, places };
            let start = self.table.len();
            self.table.extend(of.table(self.len));
            AdaptedLinear { table: start..self.table.len(), sites: of.sites.len(), rank: of.rank() }
        })
    }

    /// The name of a weight with factors that no operation has.
    fn left_out(&self, layout: &Layout) -> Option<String> {
        let (low_rank, placed) =
            self.all.iter().zip(&self.placed).find(|(_, placed)| placed.contains(&false))?;
        let pair = &low_rank.pairs()[placed.iter().position(|placed| !placed)?];
        let matrix = AdaptedMatrix::all(layout.specs()).find(|matrix| matrix.weight == pair.weight);
        Some(matrix.map_or("another model", |matrix| matrix.name).to_owned())
    }
}
