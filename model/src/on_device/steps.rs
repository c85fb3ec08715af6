//! One decode step: its memory, and its recording.
//!
//! A step in which every sequence has one new token is recorded for its number of tokens, rounded up, and replayed, so that
//! hundreds of launches cost as much as one. Tokens that only fill up write to a page of their own and are never read.
//! Of a step that also prefills, sequences with one new token come first and attend as in a recorded one; the chunks behind
//! them attend in tiles of many queries.

use std::collections::HashMap;

use device::ops::heads::{HeadNorm, angles, prepare};
use device::ops::norm::rms_norm;
use device::ops::paged::{PagedTokens, paged_attention, scratch_len, write_pages};
use device::ops::prefill::{Chunk, Chunks, prefill_attention};
use device::ops::rows::{add_bias, gather_rows};
use device::ops::swiglu::swiglu;
use device::{Buffer, Device, Graph, Result, Storage, View, ViewMut};

use super::DeviceDecoder;
use super::layer::linear;
use super::units::{FlatWeights, UnitWeights};
use crate::decoder::Places;
use crate::{KvCache, StepSequence, Unit};

/// Recordings that are kept: sizes of steps, times two sets of weights that alternate.
const RECORDED: usize = 64;
/// Most recordings that fail in a row without an error.
const MAX_FAILED: usize = 8;

/// Size of the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Pages of a layer, with the one that fills up.
    pub(super) pages: usize,
    /// Values of a page of one layer.
    pub(super) page_len: usize,
}

/// Steps that were made, for those to come.
///
/// Invariant: what is recorded works in `memory`, and is forgotten when there has to be more of it.
#[derive(Debug)]
pub(super) struct Steps<T: Storage> {
    recorded: HashMap<Key, Graph>,
    memory: Option<Memory<T>>,
    /// `[wanted, d]` of the last step, after the final norm.
    hidden: Option<Buffer<T>>,
    /// Recordings that failed in a row.
    failed: usize,
}

/// What a recording is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    tokens: usize,
    /// Of the longest sequence, rounded up.
    pages: usize,
    /// Address of the weights.
    weights: u64,
}

/// How large a step is.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    tokens: usize,
    /// The first of them, which are the only ones of their sequences.
    single: usize,
    /// Rows of the table of pages, and its columns.
    sequences: usize,
    columns: usize,
}

impl Sizes {
    /// Ids, positions, slots and sequences of the tokens, and the table of pages.
    fn numbers(self) -> usize {
        4 * self.tokens + self.sequences * self.columns
    }
}

/// Everything that steps of at most `tokens` write, and their tokens. One step after the other does.
#[derive(Debug)]
struct Memory<T: Storage> {
    tokens: usize,
    numbers: Buffer<u32>,
    cos: Rows<f32>,
    sin: Rows<f32>,
    x: Rows<T>,
    normed: Rows<T>,
    qkv: Rows<T>,
    attended: Rows<T>,
    gate_up: Rows<T>,
    activated: Rows<T>,
    scratch: Buffer<f32>,
}

/// A row for each token.
#[derive(Debug)]
struct Rows<T: Storage> {
    buffer: Buffer<T>,
    width: usize,
}

impl<T: Storage> Rows<T> {
    fn new(device: &Device, tokens: usize, width: usize) -> Result<Self> {
        Ok(Self { buffer: device.uninit(tokens * width)?, width })
    }

    fn of(&self, tokens: usize) -> View<'_, T> {
        self.buffer.view(0..tokens * self.width)
    }

    fn of_mut(&mut self, tokens: usize) -> ViewMut<'_, T> {
        self.buffer.view_mut(0..tokens * self.width)
    }
}

impl<T: Storage> Default for Steps<T> {
    fn default() -> Self {
        Self { recorded: HashMap::new(), memory: None, hidden: None, failed: 0 }
    }
}

impl<T: Storage> Steps<T> {
    /// Makes a step.
    pub(super) fn run(
        &mut self,
        decoder: &DeviceDecoder<T>,
        weights: &mut FlatWeights<T>,
        cache: &mut Buffer<T>,
        shape: Shape,
        sequences: &[StepSequence<'_>],
    ) -> Result<()> {
        let tokens: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let single = sequences.iter().take_while(|sequence| sequence.tokens.len() == 1).count();
        let columns = sequences.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(0).max(1);
        let decodes = single == sequences.len();
        let sizes = if decodes {
            let tokens = recorded_tokens(tokens);
            Sizes { tokens, single: tokens, sequences: tokens, columns: columns.next_power_of_two() }
        } else {
            Sizes { tokens, single, sequences: sequences.len(), columns }
        };
        let device = decoder.device().labelled("steps");
        let memory = room(&mut self.memory, &mut self.recorded, decoder, sizes)?;
        memory.fill(&device, shape, sizes, sequences)?;
        let key = Key { tokens: sizes.tokens, pages: sizes.columns, weights: weights.buffer().id() };
        if !decodes {
            let chunks = Chunks::new(&device, &chunks_of(sequences, single))?;
            layers(decoder, weights, cache, shape, (memory, sizes, Some(&chunks)))?;
        } else if let Some(graph) = self.recorded.get(&key) {
            graph.replay()?;
        } else {
            if self.recorded.len() >= RECORDED {
                self.recorded.clear();
            }
            // Kernels are loaded when they are first launched, which a recording does not allow.
            layers(decoder, weights, cache, shape, (memory, sizes, None))?;
            match device.record(|| layers(decoder, weights, cache, shape, (memory, sizes, None))) {
                Ok(graph) => {
                    self.recorded.insert(key, graph);
                    self.failed = 0;
                }
                // Whatever else of the process uses the GPU may spoil a recording; the step is made nevertheless.
                Err(_) if self.failed < MAX_FAILED => self.failed += 1,
                Err(error) => return Err(error),
            }
        }
        self.hidden = Some(pick(decoder, memory.normed.of(tokens), sequences)?);
        Ok(())
    }

    /// Hidden states of the last step: of those that were wanted, the ones with these numbers, each below
    /// [`Self::wanted`].
    pub(super) fn hidden(&self, decoder: &DeviceDecoder<T>, rows: View<'_, u32>) -> Result<Buffer<T>> {
        let width = decoder.config().hidden_size;
        let hidden = self.hidden.as_ref().map_or_else(|| unreachable!("a step was made"), Buffer::all);
        let device = decoder.device().labelled("steps");
        let mut out = device.uninit(rows.len() * width)?;
        gather_rows(&device, hidden, rows, width, out.all_mut())?;
        Ok(out)
    }

    /// How many hidden states of the last step were wanted.
    pub(super) fn wanted(&self, decoder: &DeviceDecoder<T>) -> usize {
        self.hidden.as_ref().map_or(0, Buffer::len) / decoder.config().hidden_size
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
) -> Result<Buffer<T>> {
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

/// The memory, with room for a step of these sizes. What was recorded in less is forgotten.
fn room<'a, T: Storage>(
    memory: &'a mut Option<Memory<T>>,
    recorded: &mut HashMap<Key, Graph>,
    decoder: &DeviceDecoder<T>,
    sizes: Sizes,
) -> Result<&'a mut Memory<T>> {
    // Contexts grow page by page: what depends on them grows in few steps.
    let [numbers, scratch] = [sizes.numbers(), scratch_len(sizes.single, sizes.columns, decoder.shape)]
        .map(usize::next_power_of_two);
    let mut needed = [sizes.tokens, numbers, scratch];
    let there = memory.as_ref().map_or([0; 3], |all| [all.tokens, all.numbers.len(), all.scratch.len()]);
    if needed.iter().zip(there).any(|(needed, there)| *needed > there) {
        needed.iter_mut().zip(there).for_each(|(needed, there)| *needed = there.max(*needed));
        recorded.clear();
        *memory = None;
        *memory = Some(Memory::new(decoder, needed)?);
    }
    Ok(memory.as_mut().unwrap_or_else(|| unreachable!("a step has tokens, for which there is room now")))
}

impl<T: Storage> Memory<T> {
    fn new(decoder: &DeviceDecoder<T>, [tokens, numbers, scratch]: [usize; 3]) -> Result<Self> {
        let (config, shape, device) = (decoder.config(), decoder.shape, decoder.device().labelled("steps"));
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let half = config.head_dim / 2;
        Ok(Self {
            tokens,
            numbers: device.uninit(numbers)?,
            cos: Rows::new(&device, tokens, half)?,
            sin: Rows::new(&device, tokens, half)?,
            x: Rows::new(&device, tokens, hidden)?,
            normed: Rows::new(&device, tokens, hidden)?,
            qkv: Rows::new(&device, tokens, shape.width())?,
            attended: Rows::new(&device, tokens, shape.query_width())?,
            gate_up: Rows::new(&device, tokens, 2 * width)?,
            activated: Rows::new(&device, tokens, width)?,
            scratch: device.uninit(scratch)?,
        })
    }

    /// Tells the device what the tokens are. What is left over fills up with tokens of the last page.
    fn fill(
        &mut self,
        device: &Device,
        shape: Shape,
        sizes: Sizes,
        sequences: &[StepSequence<'_>],
    ) -> Result<()> {
        let spare = shape.pages - 1;
        let page = KvCache::PAGE;
        let Sizes { tokens, columns, .. } = sizes;
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
        let numbers = [ids, positions, slots, owners, table].concat();
        device.upload_to(&numbers, self.numbers.view_mut(0..numbers.len()))
    }
}

/// A layer's weights in a step.
struct StepLayer<'a, T: Storage> {
    decoder: &'a DeviceDecoder<T>,
    places: &'a Places,
    weights: View<'a, T>,
}

/// The whole network up to the final norm, on what `memory` was filled with. Only launches.
fn layers<T: Storage>(
    decoder: &DeviceDecoder<T>,
    weights: &mut FlatWeights<T>,
    cache: &mut Buffer<T>,
    shape: Shape,
    (memory, sizes, chunks): (&mut Memory<T>, Sizes, Option<&Chunks>),
) -> Result<()> {
    let (device, width, tokens) = (decoder.device(), decoder.config().hidden_size, sizes.tokens);
    let numbers = &memory.numbers;
    let (ids, positions) = (numbers.view(0..tokens), numbers.view(tokens..2 * tokens));
    angles(device, positions, decoder.inv_freq.all(), memory.cos.of_mut(tokens), memory.sin.of_mut(tokens))?;
    let table = weights.unit(Unit::Embedding)?.slice(0..decoder.config().vocab_size * width);
    gather_rows(device, table, ids, width, memory.x.of_mut(tokens))?;
    let layer_len = shape.pages * shape.page_len;
    for (index, places) in decoder.places.iter().enumerate() {
        let layer = StepLayer { decoder, places, weights: weights.unit(Unit::Layer(index))? };
        let cache = cache.view_mut(index * layer_len..(index + 1) * layer_len);
        layer.attend((memory, sizes, chunks), cache)?;
        layer.feed_forward(memory, tokens)?;
    }
    let norm = weights.unit(Unit::Tail)?.slice(decoder.final_norm());
    rms_norm(device, memory.x.of(tokens), norm, decoder.config().rms_norm_eps, memory.normed.of_mut(tokens))
}

impl<T: Storage> StepLayer<'_, T> {
    fn at(&self, range: &std::ops::Range<usize>) -> View<'_, T> {
        self.weights.slice(range.clone())
    }

    fn normalise(&self, memory: &mut Memory<T>, tokens: usize, by: &std::ops::Range<usize>) -> Result<()> {
        let (device, eps) = (self.decoder.device(), self.decoder.config().rms_norm_eps);
        rms_norm(device, memory.x.of(tokens), self.at(by), eps, memory.normed.of_mut(tokens))
    }

    fn attend(
        &self,
        (memory, sizes, chunks): (&mut Memory<T>, Sizes, Option<&Chunks>),
        mut cache: ViewMut<'_, T>,
    ) -> Result<()> {
        let Self { decoder, places, .. } = self;
        let (device, config, shape) = (decoder.device(), decoder.config(), decoder.shape);
        let Sizes { tokens, single, columns, .. } = sizes;
        self.normalise(memory, tokens, &places.attention_norm)?;
        let qkv = (self.at(&places.qkv), config.hidden_size);
        linear(device, memory.normed.of(tokens), qkv, memory.qkv.of_mut(tokens), false)?;
        if !places.qkv_bias.is_empty() {
            add_bias(device, memory.qkv.of_mut(tokens), self.at(&places.qkv_bias))?;
        }
        let norm = (!places.head_norm.is_empty()).then(|| {
            let (both, dim) = (self.at(&places.head_norm), shape.head_dim);
            HeadNorm { query: both.slice(0..dim), key: both.slice(dim..2 * dim), eps: config.rms_norm_eps }
        });
        prepare(
            device,
            memory.qkv.of_mut(tokens),
            shape,
            norm,
            memory.cos.of(tokens),
            memory.sin.of(tokens),
        )?;
        let numbers = memory.numbers.view(0..sizes.numbers());
        let part = |number: usize| numbers.slice(number * tokens..(number + 1) * tokens);
        write_pages(device, memory.qkv.of(tokens), part(2), shape, cache.reborrow())?;
        let tables = numbers.slice(4 * tokens..numbers.len());
        let paged = PagedTokens {
            positions: part(1).slice(0..single),
            tables,
            sequence_of: part(3).slice(0..single),
            max_pages: columns,
        };
        let (qkv, cache) = (memory.qkv.of(tokens), cache.as_view());
        let (first, scratch) = (memory.qkv.of(single), memory.scratch.all_mut());
        paged_attention(device, first, cache, &paged, shape, memory.attended.of_mut(single), scratch)?;
        if let Some(chunks) = chunks {
            let out = memory.attended.of_mut(tokens);
            prefill_attention(device, qkv, cache, chunks, (tables, columns), shape, out)?;
        }
        let output = (self.at(&places.output), shape.query_width());
        linear(device, memory.attended.of(tokens), output, memory.x.of_mut(tokens), true)?;
        if !places.output_bias.is_empty() {
            add_bias(device, memory.x.of_mut(tokens), self.at(&places.output_bias))?;
        }
        Ok(())
    }

    fn feed_forward(&self, memory: &mut Memory<T>, tokens: usize) -> Result<()> {
        let Self { decoder, places, .. } = self;
        let (device, config) = (decoder.device(), decoder.config());
        let width = config.intermediate_size;
        self.normalise(memory, tokens, &places.feed_forward_norm)?;
        let gate_up = (self.at(&places.gate_up), config.hidden_size);
        linear(device, memory.normed.of(tokens), gate_up, memory.gate_up.of_mut(tokens), false)?;
        swiglu(device, memory.gate_up.of(tokens), width, memory.activated.of_mut(tokens))?;
        linear(
            device,
            memory.activated.of(tokens),
            (self.at(&places.down), width),
            memory.x.of_mut(tokens),
            true,
        )
    }
}
