//! One decode step: its memory, and its recording.
//!
//! A step in which every sequence has one new token is recorded for its number of tokens, rounded up, and replayed, so that
//! hundreds of launches cost as much as one. Tokens that only fill up write to a page of their own and are never read.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use device::ops::heads::{HeadNorm, angles, prepare};
use device::ops::norm::rms_norm;
use device::ops::paged::{PagedTokens, paged_attention, scratch_len, write_pages};
use device::ops::rows::{add_bias, gather_rows};
use device::ops::swiglu::swiglu;
use device::{Buffer, Device, Graph, Result, Storage, View};

use super::DeviceDecoder;
use super::layer::linear;
use super::units::{UnitWeights, Whole};
use crate::decoder::Places;
use crate::{KvCache, StepSequence, Unit};

/// Recordings that are kept: sizes of steps, times two sets of weights that alternate.
const RECORDED: usize = 64;

/// Size of the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Pages of a layer, with the one that fills up.
    pub(super) pages: usize,
    /// Values of a page of one layer.
    pub(super) page_len: usize,
}

/// Steps that were made, for those to come.
#[derive(Debug)]
pub(super) struct Steps<T: Storage> {
    recorded: HashMap<Key, Recorded<T>>,
    /// `[wanted, d]` of the last step, after the final norm.
    hidden: Option<Buffer<T>>,
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

#[derive(Debug)]
struct Recorded<T: Storage> {
    graph: Graph,
    memory: Memory<T>,
}

/// Everything that a step writes, and its tokens.
#[derive(Debug)]
struct Memory<T: Storage> {
    tokens: usize,
    /// Rows of the table of pages, and its columns.
    sequences: usize,
    columns: usize,
    /// Ids, positions, slots, sequences, and the table of pages.
    numbers: Buffer<u32>,
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    x: Buffer<T>,
    normed: Buffer<T>,
    qkv: Buffer<T>,
    attended: Buffer<T>,
    gate_up: Buffer<T>,
    activated: Buffer<T>,
    scratch: Buffer<f32>,
}

impl<T: Storage> Default for Steps<T> {
    fn default() -> Self {
        Self { recorded: HashMap::new(), hidden: None }
    }
}

impl<T: Storage> Steps<T> {
    /// Makes a step.
    pub(super) fn run(
        &mut self,
        decoder: &DeviceDecoder<T>,
        weights: &mut Whole<T>,
        cache: &mut Buffer<T>,
        shape: Shape,
        sequences: &[StepSequence<'_>],
    ) -> Result<()> {
        let device = decoder.device().labelled("steps");
        let tokens: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let columns = sequences.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(0).max(1);
        let decodes = sequences.iter().all(|sequence| sequence.tokens.len() == 1);
        let width = decoder.config().hidden_size;
        if decodes {
            let key = Key {
                tokens: rounded(tokens),
                pages: columns.next_power_of_two(),
                weights: weights.buffer().id(),
            };
            let known = self.recorded.contains_key(&key);
            if !known && self.recorded.len() >= RECORDED {
                self.recorded.clear();
            }
            let step = match self.recorded.entry(key) {
                Entry::Occupied(step) => step.into_mut(),
                Entry::Vacant(place) => {
                    let mut memory = Memory::new(&device, decoder, key.tokens, key.tokens, key.pages)?;
                    memory.fill(&device, shape, sequences)?;
                    // Kernels are loaded when they are first launched, which a recording does not allow.
                    layers(decoder, weights, cache, shape, &mut memory)?;
                    let graph = device.record(|| layers(decoder, weights, cache, shape, &mut memory))?;
                    place.insert(Recorded { graph, memory })
                }
            };
            let Recorded { graph, memory } = step;
            if known {
                memory.fill(&device, shape, sequences)?;
                graph.replay()?;
            }
            self.hidden = Some(pick(decoder, &device, memory, sequences, width)?);
        } else {
            let mut memory = Memory::new(&device, decoder, tokens, sequences.len(), columns)?;
            memory.fill(&device, shape, sequences)?;
            layers(decoder, weights, cache, shape, &mut memory)?;
            self.hidden = Some(pick(decoder, &device, &memory, sequences, width)?);
        }
        Ok(())
    }

    /// Hidden states of the last step: of those that were wanted, the ones with these numbers.
    pub(super) fn hidden(&self, decoder: &DeviceDecoder<T>, rows: &[u32]) -> Result<Buffer<T>> {
        let width = decoder.config().hidden_size;
        let hidden = self.hidden.as_ref().map_or_else(|| unreachable!("a step was made"), Buffer::all);
        let wanted = hidden.len() / width;
        assert!(rows.iter().all(|row| (*row as usize) < wanted), "rows {rows:?} of {wanted}");
        let device = decoder.device().labelled("steps");
        let mut out = device.uninit(rows.len() * width)?;
        gather_rows(&device, hidden, device.upload(rows)?.all(), width, out.all_mut())?;
        Ok(out)
    }
}

/// How many tokens a recording for `tokens` is made for.
fn rounded(tokens: usize) -> usize {
    if tokens <= 64 { tokens.next_power_of_two() } else { tokens.next_multiple_of(64) }
}

/// The hidden states that are wanted.
fn pick<T: Storage>(
    decoder: &DeviceDecoder<T>,
    device: &Device,
    memory: &Memory<T>,
    sequences: &[StepSequence<'_>],
    width: usize,
) -> Result<Buffer<T>> {
    let mut rows: Vec<u32> = Vec::new();
    let mut end = 0;
    for sequence in sequences {
        end += sequence.tokens.len();
        rows.extend((end - sequence.wanted..end).map(|row| row as u32));
    }
    let mut out = decoder.device().labelled("steps").uninit(rows.len() * width)?;
    gather_rows(device, memory.normed.all(), device.upload(&rows)?.all(), width, out.all_mut())?;
    Ok(out)
}

impl<T: Storage> Memory<T> {
    fn new(
        device: &Device,
        decoder: &DeviceDecoder<T>,
        tokens: usize,
        sequences: usize,
        columns: usize,
    ) -> Result<Self> {
        let (config, shape) = (decoder.config(), decoder.shape);
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let half = config.head_dim / 2;
        Ok(Self {
            tokens,
            sequences,
            columns,
            numbers: device.uninit(4 * tokens + sequences * columns)?,
            cos: device.uninit(tokens * half)?,
            sin: device.uninit(tokens * half)?,
            x: device.uninit(tokens * hidden)?,
            normed: device.uninit(tokens * hidden)?,
            qkv: device.uninit(tokens * shape.width())?,
            attended: device.uninit(tokens * shape.query_width())?,
            gate_up: device.uninit(tokens * 2 * width)?,
            activated: device.uninit(tokens * width)?,
            scratch: device.uninit(scratch_len(tokens, columns, shape))?,
        })
    }

    /// Tells the device what the tokens are. What is left over fills up with tokens of the last page.
    fn fill(&mut self, device: &Device, shape: Shape, sequences: &[StepSequence<'_>]) -> Result<()> {
        let spare = shape.pages - 1;
        let page = KvCache::PAGE;
        let (mut ids, mut positions) = (Vec::with_capacity(self.tokens), Vec::with_capacity(self.tokens));
        let (mut slots, mut owners) = (Vec::with_capacity(self.tokens), Vec::with_capacity(self.tokens));
        let mut table = Vec::with_capacity(self.sequences * self.columns);
        for (number, sequence) in sequences.iter().enumerate() {
            for (position, id) in (sequence.position..).zip(sequence.tokens) {
                ids.push(*id);
                positions.push(position as u32);
                slots.push(sequence.pages[position / page] * page as u32 + (position % page) as u32);
                owners.push(number as u32);
            }
            table.extend_from_slice(sequence.pages);
            table.resize((number + 1) * self.columns, spare as u32);
        }
        for number in sequences.len()..self.sequences {
            ids.push(0);
            positions.push(0);
            slots.push((spare * page) as u32);
            owners.push(number as u32);
        }
        table.resize(self.sequences * self.columns, spare as u32);
        let numbers = [ids, positions, slots, owners, table].concat();
        device.upload_to(&numbers, self.numbers.all_mut())
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
    weights: &mut Whole<T>,
    cache: &mut Buffer<T>,
    shape: Shape,
    memory: &mut Memory<T>,
) -> Result<()> {
    let (device, width, tokens) = (decoder.device(), decoder.config().hidden_size, memory.tokens);
    let numbers = &memory.numbers;
    let (ids, positions) = (numbers.view(0..tokens), numbers.view(tokens..2 * tokens));
    angles(device, positions, decoder.inv_freq.all(), memory.cos.all_mut(), memory.sin.all_mut())?;
    let table = weights.unit(Unit::Embedding)?.slice(0..decoder.config().vocab_size * width);
    gather_rows(device, table, ids, width, memory.x.all_mut())?;
    let layer_len = shape.pages * shape.page_len;
    for (index, places) in decoder.places.iter().enumerate() {
        let layer = StepLayer { decoder, places, weights: weights.unit(Unit::Layer(index))? };
        layer.attend(memory, cache, index * layer_len..(index + 1) * layer_len)?;
        layer.feed_forward(memory)?;
    }
    let norm = weights.unit(Unit::Tail)?.slice(decoder.final_norm());
    rms_norm(device, memory.x.all(), norm, decoder.config().rms_norm_eps, memory.normed.all_mut())
}

impl<T: Storage> StepLayer<'_, T> {
    fn at(&self, range: &std::ops::Range<usize>) -> View<'_, T> {
        self.weights.slice(range.clone())
    }

    fn attend(
        &self,
        memory: &mut Memory<T>,
        cache: &mut Buffer<T>,
        layer: std::ops::Range<usize>,
    ) -> Result<()> {
        let Self { decoder, places, .. } = self;
        let (device, config, shape) = (decoder.device(), decoder.config(), decoder.shape);
        let eps = config.rms_norm_eps;
        rms_norm(device, memory.x.all(), self.at(&places.attention_norm), eps, memory.normed.all_mut())?;
        let qkv = (self.at(&places.qkv), config.hidden_size);
        linear(device, memory.normed.all(), qkv, memory.qkv.all_mut(), false)?;
        if !places.qkv_bias.is_empty() {
            add_bias(device, memory.qkv.all_mut(), self.at(&places.qkv_bias))?;
        }
        let norm = (!places.head_norm.is_empty()).then(|| {
            let (both, dim) = (self.at(&places.head_norm), shape.head_dim);
            HeadNorm { query: both.slice(0..dim), key: both.slice(dim..2 * dim), eps }
        });
        prepare(device, memory.qkv.all_mut(), shape, norm, memory.cos.all(), memory.sin.all())?;
        let (tokens, numbers) = (memory.tokens, memory.numbers.all());
        let part = |number: usize| numbers.slice(number * tokens..(number + 1) * tokens);
        write_pages(device, memory.qkv.all(), part(2), shape, cache.view_mut(layer.clone()))?;
        let paged = PagedTokens {
            positions: part(1),
            tables: numbers.slice(4 * tokens..numbers.len()),
            sequence_of: part(3),
            max_pages: memory.columns,
        };
        let (out, scratch) = (memory.attended.all_mut(), memory.scratch.all_mut());
        paged_attention(device, memory.qkv.all(), cache.view(layer), &paged, shape, out, scratch)?;
        let output = (self.at(&places.output), shape.query_width());
        linear(device, memory.attended.all(), output, memory.x.all_mut(), true)?;
        if !places.output_bias.is_empty() {
            add_bias(device, memory.x.all_mut(), self.at(&places.output_bias))?;
        }
        Ok(())
    }

    fn feed_forward(&self, memory: &mut Memory<T>) -> Result<()> {
        let Self { decoder, places, .. } = self;
        let (device, config) = (decoder.device(), decoder.config());
        let (eps, width) = (config.rms_norm_eps, config.intermediate_size);
        rms_norm(device, memory.x.all(), self.at(&places.feed_forward_norm), eps, memory.normed.all_mut())?;
        let gate_up = (self.at(&places.gate_up), config.hidden_size);
        linear(device, memory.normed.all(), gate_up, memory.gate_up.all_mut(), false)?;
        swiglu(device, memory.gate_up.all(), width, memory.activated.all_mut())?;
        linear(device, memory.activated.all(), (self.at(&places.down), width), memory.x.all_mut(), true)
    }
}
