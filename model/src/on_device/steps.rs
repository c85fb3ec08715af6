//! One decode step: its memory, and its recording as a graph of launches (CUDA graph).
//!
//! A step in which every sequence has one new token is recorded for its number of tokens, rounded up, and replayed, so that
//! hundreds of launches cost as much as one. Padding tokens write to a page of their own, which is never read. In a step that
//! also prefills, sequences with one new token come first and attend as in a recorded step; prefill chunks follow and attend
//! in tiles of many queries.
//!
//! `mixer` and `feed_forward` are the halves of a layer; the kinds of mixers are `attention` and `latent`. `linear` has
//! the linear operations, with the adapters of tokens.

mod attention;
mod delta_net;
mod feed_forward;
mod latent;
mod linear;
mod mixer;

use std::collections::HashMap;
use std::ops::Range;

use device::ops::norm::{add_rms_norm, rms_norm};
use device::ops::paged::scratch_len;
use device::ops::prefill::{Chunk, Chunks};
use device::ops::rows::gather_rows;
use device::ops::vectors::add_multiple;
use device::{Device, DeviceBuffer, DeviceError, Graph, Matrix, Result, Storage, View, ViewMut};

use self::delta_net::DeltaNetMemory;
use self::feed_forward::FeedForwardMemory;
use self::latent::LatentMemory;
use self::linear::{AdapterMemory, wanted_adapters};
use super::DeviceDecoder;
use super::adapters::DeviceAdapters;
use super::operands::{DeviceAngles, multiply_embedded};
use super::sampler::DecodeWeights;
use super::units::UnitWeights;
use crate::layer::Operand;
use crate::{KvCache, StepSequence, Unit};

/// Largest number of recordings: sizes of steps with and without adapters, times two alternating sets of weights.
const RECORDED: usize = 64;
/// Failed recordings in a row before an error.
const MAX_FAILED: usize = 8;

/// Size of the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheShape {
    /// Pages of a layer, with the page of padding tokens.
    pub(super) pages: usize,
    /// Values of a page of one layer.
    pub(super) page_len: usize,
}

/// What sequences keep between steps, on the device.
#[derive(Debug)]
pub(super) struct StepCache<'a, T: Storage> {
    /// `[attention layers, pages, page_len]` keys and values.
    pub(super) values: &'a mut DeviceBuffer<T>,
    pub(super) shape: CacheShape,
    /// `[slots, slot_len]` what layers with a recurrence keep; slot 0 is that of padding tokens.
    pub(super) states: &'a mut DeviceBuffer<f32>,
}

impl<T: Storage> StepCache<'_, T> {
    /// The pages of layer `index`.
    fn pages(&mut self, decoder: &DeviceDecoder<T>, index: usize) -> ViewMut<'_, T> {
        let number =
            decoder.config().layers[..index].iter().filter(|layer| layer.delta_net.is_none()).count();
        let len = self.shape.pages * self.shape.page_len;
        self.values.view_mut(number * len..(number + 1) * len)
    }
}

/// Recorded steps, and the memory that all steps share.
///
/// Invariant: recordings use `memory`, and are dropped when it is reallocated.
#[derive(Debug)]
pub(super) struct RecordedSteps<T: Storage> {
    recorded: HashMap<RecordingKey, Graph>,
    memory: Option<StepMemory<T>>,
    /// `[wanted, d]` of the last step, after the final norm.
    hidden: Option<DeviceBuffer<T>>,
    /// `[wanted]` adapters of their tokens.
    adapters: Vec<u32>,
    /// Recordings that failed in a row.
    failed: usize,
    /// Tokens of the last step with its padding.
    tokens: usize,
}

/// Key of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RecordingKey {
    tokens: usize,
    /// Of the longest sequence, rounded up.
    pages: usize,
    /// Address of the weights.
    weights: u64,
    /// Whether a token may have an adapter.
    adapted: bool,
}

/// A decoder with the adapters that tokens of a step may have.
#[derive(Debug)]
pub(super) struct AdaptedDecoder<'a, T: Storage> {
    pub(super) decoder: &'a DeviceDecoder<T>,
    pub(super) adapters: Option<&'a DeviceAdapters<T>>,
}

impl<T: Storage> Clone for AdaptedDecoder<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Storage> Copy for AdaptedDecoder<'_, T> {}

/// Size of a step.
#[derive(Clone, Copy, Debug)]
struct StepSizes {
    tokens: usize,
    /// The first of them, which are the only ones of their sequences.
    single: usize,
    /// Rows of the page table, and its columns.
    sequences: usize,
    columns: usize,
    /// Tokens before each one that a convolution sees; `None` without a recurrence.
    before: Option<usize>,
}

impl StepSizes {
    /// Ids, positions, slots and sequences of the tokens, and the table of pages; of a recurrence the sources of tokens, the slots
    /// of sequences, and their first rows.
    fn numbers(self) -> usize {
        let of_recurrence = |before: usize| before * self.tokens + 2 * self.sequences + 1;
        self.paged_numbers() + self.before.map_or(0, of_recurrence)
    }

    /// Where the slots of the tokens are.
    fn slots(self) -> Range<usize> {
        2 * self.tokens..3 * self.tokens
    }

    /// Those without a recurrence.
    fn paged_numbers(self) -> usize {
        4 * self.tokens + self.sequences * self.columns
    }
}

/// Buffers of steps of at most `tokens` tokens. One step at a time uses them.
#[derive(Debug)]
struct StepMemory<T: Storage> {
    tokens: usize,
    numbers: DeviceBuffer<u32>,
    /// Of each rotary embedding.
    angles: Vec<DeviceAngles>,
    x: RowBuffer<T>,
    normed: RowBuffer<T>,
    /// The result of a half; empty if all layers add it to `x` as it is.
    result: RowBuffer<T>,
    /// Queries, keys and values with the gates of the result; empty if no layer has any.
    projected: RowBuffer<T>,
    gates: RowBuffer<T>,
    qkv: RowBuffer<T>,
    attended: RowBuffer<T>,
    latents: LatentMemory<T>,
    recurrence: DeltaNetMemory<T>,
    adapters: AdapterMemory,
    feed_forward: FeedForwardMemory<T>,
    scratch: DeviceBuffer<f32>,
}

/// A row for each token.
#[derive(Debug)]
struct RowBuffer<T: Storage> {
    buffer: DeviceBuffer<T>,
    width: usize,
}

impl<T: Storage> RowBuffer<T> {
    fn new(device: &Device, tokens: usize, width: usize) -> Result<Self> {
        Ok(Self { buffer: device.uninit(tokens * width)?, width })
    }

    fn of(&self, tokens: usize) -> View<'_, T> {
        self.buffer.view(0..tokens * self.width)
    }

    fn of_mut(&mut self, tokens: usize) -> ViewMut<'_, T> {
        self.buffer.view_mut(0..tokens * self.width)
    }

    /// `[tokens, width]` of narrower rows.
    fn narrow(&self, tokens: usize, width: usize) -> View<'_, T> {
        self.buffer.view(0..tokens * width)
    }

    fn narrow_mut(&mut self, tokens: usize, width: usize) -> ViewMut<'_, T> {
        self.buffer.view_mut(0..tokens * width)
    }
}

impl<T: Storage> Default for RecordedSteps<T> {
    fn default() -> Self {
        Self {
            recorded: HashMap::new(),
            memory: None,
            hidden: None,
            adapters: Vec::new(),
            failed: 0,
            tokens: 0,
        }
    }
}

impl<T: Storage> RecordedSteps<T> {
    /// Makes a step.
    pub(super) fn run(
        &mut self,
        network: AdaptedDecoder<'_, T>,
        weights: &mut DecodeWeights<T>,
        cache: &mut StepCache<'_, T>,
        sequences: &[StepSequence<'_>],
        slots: &[u32],
    ) -> Result<()> {
        let tokens: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let single = sequences.iter().take_while(|sequence| sequence.tokens.len() == 1).count();
        let columns = sequences.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(0).max(1);
        let decodes = single == sequences.len();
        let before = network.decoder.config().delta_net().map(|spec| spec.taps - 1);
        let sizes = if decodes {
            let tokens = recorded_tokens(tokens);
            let columns = columns.next_power_of_two();
            StepSizes { tokens, single: tokens, sequences: tokens, columns, before }
        } else {
            StepSizes { tokens, single, sequences: sequences.len(), columns, before }
        };
        let device = network.decoder.device().labelled("steps");
        let memory = reserve(&mut self.memory, &mut self.recorded, network, sizes)?;
        memory.fill(&device, cache.shape, sizes, sequences, slots)?;
        let adapted = sequences.iter().any(|sequence| sequence.adapter.is_some());
        let decoder = AdaptedDecoder { adapters: network.adapters.filter(|_| adapted), ..network };
        if decoder.adapters.is_some() {
            memory.adapters.fill(&device, sequences, sizes.tokens)?;
        }
        let key = RecordingKey { tokens: sizes.tokens, pages: sizes.columns, weights: weights.id(), adapted };
        if !decodes {
            let chunks = Chunks::new(&device, &chunks_of(sequences, single))?;
            layers(decoder, weights, cache, memory, sizes, Some(&chunks))?;
        } else if let Some(graph) = self.recorded.get(&key) {
            graph.replay()?;
        } else {
            if self.recorded.len() >= RECORDED {
                self.recorded.clear();
            }
            // Kernels are loaded when they are first launched, which a recording does not allow.
            layers(decoder, weights, cache, memory, sizes, None)?;
            match device.record(|| layers(decoder, weights, cache, memory, sizes, None)) {
                Ok(graph) => {
                    self.recorded.insert(key, graph);
                    self.failed = 0;
                }
                // Whatever else of the process uses the GPU may spoil a recording; the step is made nevertheless.
                Err(_) if self.failed < MAX_FAILED => self.failed += 1,
                Err(error) => return Err(error),
            }
        }
        self.tokens = sizes.tokens;
        self.hidden = Some(pick(network.decoder, memory.normed.of(tokens), sequences)?);
        self.adapters = wanted_adapters(sequences);
        Ok(())
    }

    /// `[tokens, slots]` the experts of the first `tokens` tokens of the last step, in all layers that have some. Synchronises.
    pub(super) fn routes(&self, decoder: &DeviceDecoder<T>, tokens: usize) -> Result<Vec<u16>> {
        match &self.memory {
            Some(memory) => memory.feed_forward.routes(decoder, tokens, self.tokens),
            None => Ok(Vec::new()),
        }
    }

    /// Hidden states of the last step: of those that were wanted, the ones with these numbers, each below
    /// [`Self::wanted`].
    pub(super) fn hidden(&self, decoder: &DeviceDecoder<T>, rows: View<'_, u32>) -> Result<DeviceBuffer<T>> {
        let width = decoder.config().hidden_size;
        let device = decoder.device().labelled("steps");
        let Some(hidden) = &self.hidden else {
            let (device, reason) = (device.name(), "no step was made before it".to_owned());
            return Err(DeviceError::Call { device, call: "a draw", reason });
        };
        let mut out = device.uninit(rows.len() * width)?;
        gather_rows(&device, hidden.all(), rows, width, out.all_mut())?;
        Ok(out)
    }

    /// The adapter of the token of a wanted hidden state of the last step, as kernels take it.
    pub(super) fn adapter(&self, row: usize) -> u32 {
        self.adapters[row]
    }

    /// How many hidden states of the last step were wanted.
    pub(super) fn wanted(&self, decoder: &DeviceDecoder<T>) -> usize {
        self.hidden.as_ref().map_or(0, DeviceBuffer::len) / decoder.config().hidden_size
    }
}

/// How many tokens a recording for `tokens` is made for.
#[must_use]
pub fn recorded_tokens(tokens: usize) -> usize {
    let multiple = || tokens.checked_next_multiple_of(64).unwrap_or(tokens);
    if tokens <= 64 { tokens.next_power_of_two() } else { multiple() }
}

/// What is new of the sequences behind the first `single`.
fn chunks_of(sequences: &[StepSequence<'_>], single: usize) -> Vec<Chunk> {
    let mut end = single;
    let chunk = |(number, of): (usize, &StepSequence<'_>)| {
        end += of.tokens.len();
        Chunk { rows: end - of.tokens.len()..end, position: of.position, sequence: number }
    };
    sequences.iter().enumerate().skip(single).map(chunk).collect()
}

/// The hidden states `normed [tokens, d]` that are wanted.
fn pick<T: Storage>(
    decoder: &DeviceDecoder<T>,
    normed: View<'_, T>,
    sequences: &[StepSequence<'_>],
) -> Result<DeviceBuffer<T>> {
    let (device, width) = (decoder.device().labelled("steps"), decoder.config().hidden_size);
    let mut rows: Vec<u32> = Vec::new();
    let mut end = 0;
    for sequence in sequences {
        end += sequence.tokens.len();
        rows.extend((end - sequence.wanted..end).map(|row| row as u32));
    }
    let mut out = device.uninit(rows.len() * width)?;
    gather_rows(&device, normed, device.upload(&rows)?.all(), width, out.all_mut())?;
    Ok(out)
}

/// Reserves memory for a step of these sizes. Recordings in smaller memory are dropped.
fn reserve<'a, T: Storage>(
    memory: &'a mut Option<StepMemory<T>>,
    recorded: &mut HashMap<RecordingKey, Graph>,
    network: AdaptedDecoder<'_, T>,
    sizes: StepSizes,
) -> Result<&'a mut StepMemory<T>> {
    // Contexts grow page by page: what depends on them grows in few steps.
    let [numbers, scratch] =
        [sizes.numbers(), scratch_len(sizes.single, sizes.columns, network.decoder.shape)]
            .map(usize::next_power_of_two);
    let mut needed = [sizes.tokens, numbers, scratch];
    let there = memory.as_ref().map_or([0; 3], |all| [all.tokens, all.numbers.len(), all.scratch.len()]);
    if needed.iter().zip(there).any(|(needed, there)| *needed > there) {
        needed.iter_mut().zip(there).for_each(|(needed, there)| *needed = there.max(*needed));
        recorded.clear();
        *memory = None;
    }
    let reserved = match memory.take() {
        Some(reserved) => reserved,
        None => StepMemory::new(network, needed)?,
    };
    Ok(memory.insert(reserved))
}

impl<T: Storage> StepMemory<T> {
    fn new(network: AdaptedDecoder<'_, T>, [tokens, numbers, scratch]: [usize; 3]) -> Result<Self> {
        let AdaptedDecoder { decoder, adapters } = network;
        let (config, shape, device) = (decoder.config(), decoder.shape, decoder.device().labelled("steps"));
        let hidden = config.hidden_size;
        let layers = 0..config.num_layers();
        let gates = if layers.clone().any(|index| decoder.is_gated(index)) { shape.query_width() } else { 0 };
        let projected = if gates > 0 { shape.width() + gates } else { 0 };
        let result = if layers.clone().all(|index| decoder.adds_plainly(index)) { 0 } else { hidden };
        Ok(Self {
            tokens,
            numbers: device.uninit(numbers)?,
            angles: decoder.rotaries.reserve(&device, tokens)?,
            x: RowBuffer::new(&device, tokens, hidden)?,
            normed: RowBuffer::new(&device, tokens, hidden)?,
            result: RowBuffer::new(&device, tokens, result)?,
            projected: RowBuffer::new(&device, tokens, projected)?,
            gates: RowBuffer::new(&device, tokens, gates)?,
            qkv: RowBuffer::new(&device, tokens, shape.width())?,
            attended: RowBuffer::new(&device, tokens, shape.query_width())?,
            latents: LatentMemory::new(&device, decoder, tokens)?,
            recurrence: DeltaNetMemory::new(&device, config, tokens)?,
            adapters: AdapterMemory::new(&device, adapters, tokens)?,
            feed_forward: FeedForwardMemory::new(&device, config, tokens)?,
            scratch: device.uninit(scratch)?,
        })
    }

    /// Uploads tokens, positions, slots and page table. Padding tokens belong to the last page.
    fn fill(
        &mut self,
        device: &Device,
        shape: CacheShape,
        sizes: StepSizes,
        sequences: &[StepSequence<'_>],
        state_slots: &[u32],
    ) -> Result<()> {
        let spare = shape.pages - 1;
        let page = KvCache::PAGE;
        let StepSizes { tokens, columns, .. } = sizes;
        let (mut ids, mut positions) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
        let (mut slots, mut owners) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens));
        let mut table = Vec::with_capacity(sizes.sequences * columns);
        for (number, sequence) in sequences.iter().enumerate() {
            for (position, id) in (sequence.position..).zip(sequence.tokens) {
                ids.push(*id);
                positions.push(position as u32);
                slots.push(sequence.pages[position / page] * page as u32 + (position % page) as u32);
                owners.push(number as u32);
            }
            table.extend_from_slice(sequence.pages);
            table.resize((number + 1) * columns, spare as u32);
        }
        for number in sequences.len()..sizes.sequences {
            ids.push(0);
            positions.push(0);
            slots.push((spare * page) as u32);
            owners.push(number as u32);
        }
        table.resize(sizes.sequences * columns, spare as u32);
        let of_recurrence =
            sizes.before.map(|before| delta_net::numbers_of(sizes, before, sequences, state_slots));
        let numbers = [ids, positions, slots, owners, table, of_recurrence.unwrap_or_default()].concat();
        device.upload_to(&numbers, self.numbers.view_mut(0..numbers.len()))
    }
}

/// A layer's weights in a step.
struct StepLayer<'a, T: Storage> {
    decoder: &'a DeviceDecoder<T>,
    index: usize,
    weights: View<'a, T>,
    adapters: Option<&'a DeviceAdapters<T>>,
    /// Tokens of the step with its padding.
    tokens: usize,
}

/// The network up to the final norm, on the inputs in `memory`. Launches kernels and does not synchronise.
fn layers<T: Storage>(
    network: AdaptedDecoder<'_, T>,
    weights: &mut DecodeWeights<T>,
    cache: &mut StepCache<'_, T>,
    memory: &mut StepMemory<T>,
    sizes: StepSizes,
    chunks: Option<&Chunks>,
) -> Result<()> {
    let AdaptedDecoder { decoder, adapters } = network;
    let (device, width, tokens) = (decoder.device(), decoder.config().hidden_size, sizes.tokens);
    let numbers = &memory.numbers;
    let (ids, positions) = (numbers.view(0..tokens), numbers.view(tokens..2 * tokens));
    decoder.rotaries.compute(device, positions, &mut memory.angles)?;
    let table = weights.unit(Unit::Embedding)?.slice(0..decoder.config().vocab_size * width);
    gather_rows(device, table, ids, width, memory.x.of_mut(tokens))?;
    network.embed(memory.numbers.view(0..tokens), &mut memory.adapters, memory.x.of_mut(tokens))?;
    multiply_embedded(device, decoder.config(), memory.x.of_mut(tokens))?;
    for index in 0..decoder.config().num_layers() {
        let weights = weights.unit(Unit::Layer(index))?;
        let layer = StepLayer { decoder, index, weights, adapters, tokens };
        layer.mix(memory, sizes, chunks, cache)?;
        layer.feed_forward(memory, tokens, (cache.shape.pages - 1) * KvCache::PAGE)?;
    }
    let norm = decoder.final_norm_of(weights.unit(Unit::Tail)?.slice(decoder.final_norm()));
    rms_norm(device, memory.x.of(tokens), norm, memory.normed.of_mut(tokens))
}

impl<T: Storage> StepLayer<'_, T> {
    fn at(&self, range: &Range<usize>) -> View<'_, T> {
        self.weights.slice(range.clone())
    }

    /// The weight `[out, input]` of `operand`.
    fn matrix(&self, operand: Operand, input: usize) -> Matrix<'_, T> {
        Matrix::new(self.at(&self.decoder.layout().ranges(self.index)[operand]), input)
    }

    /// Writes the input of a half to `memory.normed`: the residual stream, normalised by the weight at `by`, which is empty for
    /// none.
    fn normalise(&self, memory: &mut StepMemory<T>, tokens: usize, by: &Range<usize>) -> Result<()> {
        let (device, decoder) = (self.decoder.device(), self.decoder);
        let (x, to) = (memory.x.of(tokens), memory.normed.of_mut(tokens));
        if by.is_empty() { device.copy(x, to) } else { rms_norm(device, x, decoder.norm(self.at(by)), to) }
    }

    /// Adds the result of a half, normalised by the weight at `after` and multiplied, to the residual stream `x`. `compute` writes
    /// the result of `tokens` tokens, or adds it if its second argument is true.
    fn add_result(
        &self,
        (x, result): (&mut RowBuffer<T>, &mut RowBuffer<T>),
        tokens: usize,
        after: &Range<usize>,
        compute: impl FnOnce(ViewMut<'_, T>, bool) -> Result<()>,
    ) -> Result<()> {
        let (device, decoder) = (self.decoder.device(), self.decoder);
        if decoder.adds_plainly(self.index) {
            return compute(x.of_mut(tokens), true);
        }
        compute(result.of_mut(tokens), false)?;
        let (result, to) = (result.of(tokens), x.of_mut(tokens));
        if after.is_empty() {
            return add_multiple(device, result, decoder.multiplier(self.index), to);
        }
        add_rms_norm(device, result, decoder.norm_after(self.index, self.at(after)), to)
    }
}
