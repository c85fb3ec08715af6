//! Decoding on a device from a paged KV cache: the same step as [`crate::Decoder::step`].
//!
//! The [`KvCache`] has the reference counts of pages, as on the processor; the keys and values are here. Tokens are sampled on
//! the device too: a step returns the tokens and their log-probabilities.
//!
//! Invariant: weights are swapped between two steps, never within one, and a recording for other weights is never replayed.

use std::sync::Arc;

use device::ops::adapters::{RowAdapters, add_adapted, shrunk_len};
use device::ops::experts::ExpertInputs;
use device::ops::paged::copy_pages;
use device::ops::sampling::{
    DRAW, KEPT, RowSampling, SETTINGS, SampledRows, SampledToken, pack_kept, sample,
};
use device::{Device, DeviceBuffer, DeviceError, Result, Storage, View, bf16};

use super::adapters::DeviceAdapters;
use super::steps::{AdaptedDecoder, CacheShape, RecordedSteps, StepCache};
use super::{DeviceDecoder, DeviceDtype, FlatWeights, StoredWeights, UnitWeights, check_ids};
use crate::decoder::StatePlace;
use crate::{
    AdaptedBase, Config, Draw, KvCache, Layout, LowRank, Parameters, Recompute, Sampling, StepSequence, Unit,
};

/// A token to draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawRequest {
    /// Number of the row of logits among those that the step wanted.
    pub row: usize,
    /// How it is drawn.
    pub sampling: Sampling,
    /// Uniform in [0, 1).
    pub uniform: f32,
}

/// Weights on a device, to sample with from the next step on.
#[derive(Debug)]
pub enum StagedWeights {
    /// Stored in f32.
    F32(DeviceBuffer<f32>),
    /// Stored in bf16.
    Bf16(DeviceBuffer<bf16>),
    /// `[factors]` low-rank factors over a base that stays quantised.
    Factors(DeviceBuffer<f32>),
}

/// The weights that a sampler computes with.
#[derive(Debug)]
pub(super) enum DecodeWeights<T: Storage> {
    /// All of them.
    Flat(FlatWeights<T>),
    /// A base that stays quantised, and factors.
    Stored(Box<StoredWeights<T>>),
}

impl<T: Storage> DecodeWeights<T> {
    /// A number that no other weights have while these are there.
    pub(super) fn id(&self) -> u64 {
        match self {
            Self::Flat(weights) => weights.buffer().id(),
            Self::Stored(weights) => weights.id(),
        }
    }

    /// Memory, bytes.
    fn bytes(&self) -> u64 {
        match self {
            Self::Flat(weights) => weights.buffer().bytes(),
            Self::Stored(weights) => weights.bytes(),
        }
    }
}

impl<T: Storage> UnitWeights<T> for DecodeWeights<T> {
    fn unit(&mut self, unit: Unit) -> Result<View<'_, T>> {
        match self {
            Self::Flat(weights) => weights.unit(unit),
            Self::Stored(weights) => weights.unit(unit),
        }
    }
}

/// A decoder to sample with on a device, with its cache.
#[derive(Debug)]
pub struct DeviceSampler {
    inner: AnySampler,
}

#[derive(Debug)]
enum AnySampler {
    F32(TypedSampler<f32>),
    Bf16(TypedSampler<bf16>),
}

/// Calls the sampler of either type.
macro_rules! either {
    ($self:expr, $sampler:ident => $work:expr) => {
        match $self {
            AnySampler::F32($sampler) => $work,
            AnySampler::Bf16($sampler) => $work,
        }
    };
}

impl StagedWeights {
    /// The weights of `parameters`, each the nearest value of `dtype`.
    ///
    /// # Errors
    /// [`device::DeviceError::OutOfMemory`].
    pub fn upload(device: &Device, dtype: DeviceDtype, parameters: &Parameters) -> Result<Self> {
        Ok(match dtype {
            DeviceDtype::F32 => Self::F32(FlatWeights::upload(device, parameters)?.into_buffer()),
            DeviceDtype::Bf16 => Self::Bf16(FlatWeights::upload(device, parameters)?.into_buffer()),
        })
    }

    /// What they are, for messages.
    fn kind(&self) -> &'static str {
        match self {
            Self::F32(_) => "weights in f32",
            Self::Bf16(_) => "weights in bf16",
            Self::Factors(_) => "factors over a base that stays quantised",
        }
    }

    /// Memory, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::F32(buffer) | Self::Factors(buffer) => buffer.bytes(),
            Self::Bf16(buffer) => buffer.bytes(),
        }
    }
}

impl DeviceSampler {
    /// A decoder that serves `weights`.
    ///
    /// # Errors
    /// If the device fails, or the weights are factors, which have a base ([`Self::over`]).
    ///
    /// # Panics
    /// If the weights are not those of `config`.
    pub fn new(device: &Device, config: &Config, weights: StagedWeights) -> Result<Self> {
        let layout = Arc::new(Layout::new(config));
        let inner = match weights {
            StagedWeights::F32(buffer) => {
                let weights = DecodeWeights::Flat(FlatWeights::of(buffer, &layout));
                AnySampler::F32(TypedSampler::new(device, config, &layout, weights)?)
            }
            StagedWeights::Bf16(buffer) => {
                let weights = DecodeWeights::Flat(FlatWeights::of(buffer, &layout));
                AnySampler::Bf16(TypedSampler::new(device, config, &layout, weights)?)
            }
            StagedWeights::Factors(_) => return Err(misplaced(device, weights.kind(), "no base")),
        };
        Ok(Self { inner })
    }

    /// A decoder that serves factors over a base that stays quantised. A layer is dequantised when a step needs it.
    ///
    /// # Errors
    /// If the device fails or has no memory.
    pub fn over(device: &Device, dtype: DeviceDtype, policy: &AdaptedBase) -> Result<Self> {
        let (base, factors) = (policy.base(), policy.factors());
        let (config, layout) = (base.config(), base.layout());
        let inner = match dtype {
            DeviceDtype::F32 => {
                let weights = DecodeWeights::Stored(Box::new(StoredWeights::new(device, base, factors)?));
                AnySampler::F32(TypedSampler::new(device, config, layout, weights)?)
            }
            DeviceDtype::Bf16 => {
                let weights = DecodeWeights::Stored(Box::new(StoredWeights::new(device, base, factors)?));
                AnySampler::Bf16(TypedSampler::new(device, config, layout, weights)?)
            }
        };
        Ok(Self { inner })
    }

    /// Where it computes.
    #[must_use]
    pub fn device(&self) -> &Device {
        either!(&self.inner, sampler => sampler.decoder.device())
    }

    /// The configuration that it was made for.
    #[must_use]
    pub fn config(&self) -> &Config {
        either!(&self.inner, sampler => sampler.decoder.config())
    }

    /// What weights are stored in.
    #[must_use]
    pub fn dtype(&self) -> DeviceDtype {
        match self.inner {
            AnySampler::F32(_) => DeviceDtype::F32,
            AnySampler::Bf16(_) => DeviceDtype::Bf16,
        }
    }

    /// Memory of weights, adapters and cache, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        either!(&self.inner, sampler => sampler.bytes())
    }

    /// Samples with `weights` from the next step on. Synchronises. Returns the old weights, as a buffer for the next ones.
    ///
    /// # Errors
    /// If something on the device failed, or they are of another kind than the old weights.
    ///
    /// # Panics
    /// If their number differs from that of the old weights.
    pub fn swap(&mut self, weights: StagedWeights) -> Result<StagedWeights> {
        // A step that was launched but not synchronised may still read the old weights.
        self.device().synchronize()?;
        let device = self.device().clone();
        match (&mut self.inner, weights) {
            (AnySampler::F32(sampler), StagedWeights::F32(buffer)) => {
                Ok(StagedWeights::F32(sampler.swap(buffer)?))
            }
            (AnySampler::Bf16(sampler), StagedWeights::Bf16(buffer)) => {
                Ok(StagedWeights::Bf16(sampler.swap(buffer)?))
            }
            (sampler, StagedWeights::Factors(factors)) => {
                either!(sampler, sampler => sampler.change_factors(factors.all())?);
                // Their memory is that of another stream, which may reuse it from now on.
                device.synchronize()?;
                Ok(StagedWeights::Factors(factors))
            }
            (AnySampler::F32(_), new) => Err(misplaced(&device, new.kind(), "weights in f32")),
            (AnySampler::Bf16(_), new) => Err(misplaced(&device, new.kind(), "weights in bf16")),
        }
    }

    /// Adds the tokens of `sequences` to the cache and keeps the last hidden states `[wanted, hidden]` of the tokens whose
    /// logits are wanted, in order, for [`Self::draw`]. Synchronises if the cache keeps the experts of tokens.
    ///
    /// # Errors
    /// If a token id lies beyond the vocabulary, a sequence names an adapter that is not served, one of a model with a recurrence
    /// begins where the cache has no state ([`KvCache::resumable`]), or the device fails. Then the sequences of the step may have lost
    /// their states.
    ///
    /// # Panics
    /// If the pages of a sequence do not reach its last token.
    pub fn step(&mut self, cache: &mut KvCache, sequences: &[StepSequence<'_>]) -> Result<()> {
        either!(&mut self.inner, sampler => sampler.step(cache, sequences))
    }

    /// Draws tokens from the logits of the last step. Synchronises.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If a row is not among the wanted ones.
    pub fn draw(&mut self, requests: &[DrawRequest]) -> Result<Vec<Draw>> {
        either!(&mut self.inner, sampler => sampler.draw(requests))
    }

    /// Serves `adapters` beside its weights, in place of those before: a sequence names its own by its index
    /// ([`StepSequence::adapter`]), and one that names none has the weights alone. They are not merged into the weights. Synchronises
    /// if they are others than before.
    ///
    /// # Errors
    /// If an adapter has factors of a weight that decode steps have them of merged alone, or of another model, or the device fails.
    pub fn set_adapters(&mut self, adapters: &[Arc<LowRank>]) -> Result<()> {
        either!(&mut self.inner, sampler => sampler.set_adapters(adapters))
    }

    /// Frees the memory of the KV cache and of recurrent states, which the next step allocates again. Its content has to be computed again.
    pub fn forget(&mut self) {
        either!(&mut self.inner, sampler => (sampler.cache, sampler.states) = (None, None));
    }
}

impl Drop for DeviceSampler {
    fn drop(&mut self) {
        // A step that was launched but not synchronised may still read the weights, whose memory is freed on the stream that
        // they came from. An error is that of the next call on the device.
        let _ = self.device().synchronize();
    }
}

/// Weights of another kind than the sampler's.
fn misplaced(device: &Device, new: &str, old: &str) -> DeviceError {
    let reason = format!("the sampler has {old}, the new ones are {new}");
    DeviceError::Call { device: device.name(), call: "a swap of weights", reason }
}

/// A sampler of one storage type.
#[derive(Debug)]
struct TypedSampler<T: Storage> {
    decoder: DeviceDecoder<T>,
    weights: DecodeWeights<T>,
    adapters: Option<DeviceAdapters<T>>,
    /// `[attention layers, pages + 1, 2, kv_heads, 16, head_dim]`; the last page is written by tokens that fill up a recorded step.
    cache: Option<DeviceBuffer<T>>,
    /// `[slots, slot_len]` what sequences keep in layers with a recurrence.
    states: Option<DeviceBuffer<f32>>,
    steps: RecordedSteps<T>,
    /// Memory of draws.
    drawing: Option<SampledRows>,
}

impl<T: Storage> TypedSampler<T> {
    fn new(
        device: &Device,
        config: &Config,
        layout: &Arc<Layout>,
        weights: DecodeWeights<T>,
    ) -> Result<Self> {
        let decoder = DeviceDecoder::new(device, config, layout, Recompute::None)?;
        Ok(Self {
            decoder,
            weights,
            adapters: None,
            cache: None,
            states: None,
            steps: RecordedSteps::default(),
            drawing: None,
        })
    }

    fn bytes(&self) -> u64 {
        let adapters = self.adapters.as_ref().map_or(0, DeviceAdapters::bytes);
        let states = self.states.as_ref().map_or(0, DeviceBuffer::bytes);
        self.weights.bytes() + adapters + self.cache.as_ref().map_or(0, DeviceBuffer::bytes) + states
    }

    fn set_adapters(&mut self, all: &[Arc<LowRank>]) -> Result<()> {
        if self.adapters.as_ref().map_or(all.is_empty(), |before| before.serves(all)) {
            return Ok(());
        }
        // A step that was launched but not synchronised may still read the old ones.
        self.decoder.device().synchronize()?;
        // Recordings have the addresses of the old ones.
        self.steps = RecordedSteps::default();
        self.adapters = None;
        if !all.is_empty() {
            self.adapters = Some(DeviceAdapters::new(&self.decoder, all)?);
        }
        Ok(())
    }

    fn swap(&mut self, weights: DeviceBuffer<T>) -> Result<DeviceBuffer<T>> {
        let layout = Arc::clone(self.decoder.layout());
        match &mut self.weights {
            DecodeWeights::Flat(old) => {
                Ok(std::mem::replace(old, FlatWeights::of(weights, &layout)).into_buffer())
            }
            DecodeWeights::Stored(_) => {
                Err(misplaced(self.decoder.device(), "whole weights", "a base that stays quantised"))
            }
        }
    }

    fn change_factors(&mut self, factors: View<'_, f32>) -> Result<()> {
        match &mut self.weights {
            DecodeWeights::Stored(weights) => weights.copy_factors(factors),
            DecodeWeights::Flat(_) => Err(misplaced(self.decoder.device(), "factors", "whole weights")),
        }
    }

    /// Values of a page of one layer.
    fn page_len(&self) -> usize {
        2 * KvCache::PAGE * self.decoder.shape.kv_width()
    }

    fn step(&mut self, cache: &mut KvCache, sequences: &[StepSequence<'_>]) -> Result<()> {
        let device = self.decoder.device().clone();
        let pages = cache.total_pages() + 1;
        let (page_len, layers) = (self.page_len(), self.decoder.config().attention_layers());
        let len = layers * pages * page_len;
        let values = match self.cache.take_if(|values| values.len() == len) {
            Some(values) => values,
            None => {
                self.steps = RecordedSteps::default();
                device.labelled("key-value cache").zeros(len)?
            }
        };
        let values = self.cache.insert(values);
        let copies = cache.take_copies();
        if !copies.is_empty() {
            let pairs = device.upload(copies.as_flattened())?;
            copy_pages(&device, pairs.all(), values.all_mut(), pages * page_len, page_len)?;
        }
        let served = self.adapters.as_ref().map_or(0, DeviceAdapters::len);
        for sequence in sequences {
            if let Some(adapter) = sequence.adapter.filter(|adapter| *adapter >= served) {
                let (device, call) = (device.name(), "a step");
                let reason = format!("a sequence has adapter {adapter}, and the sampler has {served}");
                return Err(DeviceError::Call { device, call, reason });
            }
            check_ids(&device, "gather_rows", sequence.tokens, self.decoder.config().vocab_size)?;
        }
        let slots = check_out(&device, cache, sequences)?;
        let states = reserve_states(&device, &mut self.states, cache.state_slots(), self.decoder.slot_len())?;
        if states.is_new {
            self.steps = RecordedSteps::default();
        }
        make_copies(&device, states.pool, &cache.take_state_copies(), self.decoder.slot_len())?;
        let shape = CacheShape { pages, page_len };
        let mut kept = StepCache { values, shape, states: states.pool };
        let network = AdaptedDecoder { decoder: &self.decoder, adapters: self.adapters.as_ref() };
        self.steps.run(network, &mut self.weights, &mut kept, sequences, &slots)?;
        for (sequence, slot) in sequences.iter().zip(slots) {
            cache.check_in_state(sequence, StatePlace::Slot(slot));
        }
        if cache.keeps_routes() {
            let tokens = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
            cache.keep_routes(sequences, &self.steps.routes(&self.decoder, tokens)?);
        }
        Ok(())
    }

    fn draw(&mut self, requests: &[DrawRequest]) -> Result<Vec<Draw>> {
        let mut draws = Vec::with_capacity(requests.len());
        for requests in requests.chunks(super::head::HEAD_ROWS) {
            self.draw_some(requests, &mut draws)?;
        }
        Ok(draws)
    }

    /// Draws at most as many tokens as have their logits in memory at a time.
    fn draw_some(&mut self, requests: &[DrawRequest], draws: &mut Vec<Draw>) -> Result<()> {
        let (decoder, device) = (&self.decoder, self.decoder.device().labelled("logits"));
        let (count, vocabulary) = (requests.len(), decoder.config().vocab_size);
        let wanted = self.steps.wanted(decoder);
        assert!(requests.iter().all(|request| request.row < wanted), "{requests:?} of {wanted} rows");
        // One upload and one download per call.
        let mut numbers: Vec<u32> = requests.iter().map(|request| request.row as u32).collect();
        numbers.extend(requests.iter().flat_map(DrawRequest::pack));
        let numbers = device.upload(&numbers)?;
        let hidden = self.steps.hidden(decoder, numbers.view(0..count))?;
        let mut logits = decoder.logits_of(&mut self.weights, hidden.all())?;
        if let Some(of) = self.adapters.as_ref().and_then(DeviceAdapters::head) {
            let of_rows: Vec<u32> = requests.iter().map(|request| self.steps.adapter(request.row)).collect();
            let of_rows = device.upload(&of_rows)?;
            let rows = RowAdapters { of_tokens: of_rows.all(), routes: None };
            let mut shrunk = device.uninit(shrunk_len(&of, count))?;
            let x = (ExpertInputs::OfTokens(hidden.all()), decoder.config().hidden_size);
            add_adapted(&device, &of, &rows, x, shrunk.all_mut(), logits.all_mut())?;
        }
        let drawn = match self.drawing.take_if(|drawing| drawing.rows() >= count) {
            Some(drawn) => drawn,
            None => SampledRows::new(&device, count.next_power_of_two())?,
        };
        let drawn = self.drawing.insert(drawn);
        sample(&device, logits.all(), vocabulary, numbers.view(count..numbers.len()), drawn)?;
        let packed = device.download(drawn.draws.view(0..DRAW * count))?;
        let found: Vec<SampledToken> = SampledToken::unpack(&packed).collect();
        let listed = requests.iter().any(|request| request.sampling.truncates());
        let mut kept = if listed { kept_of(&device, &found, drawn)? } else { Vec::new() };
        for (i, (request, found)) in requests.iter().zip(found).enumerate() {
            let truncated = request.sampling.truncates() && request.sampling.temperature != 0.0;
            let kept = match kept.get_mut(i).filter(|_| truncated) {
                // Too many to list: from the logits, as on the processor.
                Some(None) => {
                    let mut logits = device.download(logits.view(i * vocabulary..(i + 1) * vocabulary))?;
                    draws.push(Draw::new(&mut logits, request.sampling, request.uniform));
                    continue;
                }
                Some(kept) => kept.take(),
                None => None,
            };
            draws.push(Draw { token: found.token, logprob: found.logprob, kept });
        }
        Ok(())
    }
}

/// The slots of the states of `sequences`; none in a model without a recurrence.
fn check_out(device: &Device, cache: &mut KvCache, sequences: &[StepSequence<'_>]) -> Result<Vec<u32>> {
    if !cache.has_states() {
        return Ok(Vec::new());
    }
    let slot = |sequence: &StepSequence<'_>| match cache.check_out_state(sequence) {
        Some(StatePlace::Slot(slot)) => Ok(slot),
        Some(StatePlace::Host(_)) | None => Err(DeviceError::Call {
            device: device.name(),
            call: "a step",
            reason: format!("the cache has no recurrent state at position {}", sequence.position),
        }),
    };
    sequences.iter().map(slot).collect()
}

/// The pool of states.
struct StatePool<'a> {
    /// `[slots, slot_len]`
    pool: &'a mut DeviceBuffer<f32>,
    /// Whether it is at another place than before.
    is_new: bool,
}

/// Memory for `slots` states of `len` values, with what `pool` has of them. Beside the slot of padding it grows in powers of two.
fn reserve_states<'a>(
    device: &Device,
    pool: &'a mut Option<DeviceBuffer<f32>>,
    slots: usize,
    len: usize,
) -> Result<StatePool<'a>> {
    if let Some(there) = pool.take_if(|there| there.len() >= slots * len) {
        return Ok(StatePool { pool: pool.insert(there), is_new: false });
    }
    let capacity = slots.saturating_sub(1).next_power_of_two() + 1;
    let mut grown = device.labelled("recurrent states").uninit(capacity * len)?;
    if let Some(before) = pool.take() {
        device.copy(before.all(), grown.view_mut(0..before.len()))?;
    }
    Ok(StatePool { pool: pool.insert(grown), is_new: true })
}

/// Copies slots of `len` values of `pool`, from and to, in order.
fn make_copies(device: &Device, pool: &mut DeviceBuffer<f32>, copies: &[[u32; 2]], len: usize) -> Result<()> {
    let mut between = device.uninit(if copies.is_empty() { 0 } else { len })?;
    for [from, to] in copies.iter().map(|pair| pair.map(|slot| slot as usize * len)) {
        device.copy(pool.view(from..from + len), between.all_mut())?;
        device.copy(between.all(), pool.view_mut(to..to + len))?;
    }
    Ok(())
}

/// The tokens that truncation left each row of `found`; `None` where they are too many to list.
fn kept_of(
    device: &Device,
    found: &[SampledToken],
    drawn: &mut SampledRows,
) -> Result<Vec<Option<Vec<u32>>>> {
    pack_kept(device, found.len(), drawn)?;
    let counts = found.iter().map(|draw| Some(draw.kept).filter(|kept| *kept <= KEPT));
    let counts: Vec<_> = counts.collect();
    let ids = device.download(drawn.packed_ids.view(0..counts.iter().flatten().sum()))?;
    let mut rest = ids.as_slice();
    let mut list = |count: usize| rest.split_off(..count).unwrap_or_default().to_vec();
    Ok(counts.into_iter().map(|count| count.map(&mut list)).collect())
}

impl DrawRequest {
    /// The sampling parameters, for the device.
    fn pack(&self) -> [u32; SETTINGS] {
        let Sampling { temperature, top_p, min_p, top_k } = self.sampling;
        let top_k = u32::try_from(top_k).unwrap_or(u32::MAX);
        RowSampling { temperature, top_p, min_p, uniform: self.uniform, top_k }.pack()
    }
}

impl<T: Storage> DeviceDecoder<T> {
    /// `[rows, V]` logits of normalised hidden states `[rows, d]`.
    fn logits_of(&self, weights: &mut dyn UnitWeights<T>, hidden: View<'_, T>) -> Result<DeviceBuffer<f32>> {
        let (unit, place) = self.head_place();
        let weight = weights.unit(unit)?.slice(place);
        self.logits(hidden, weight)
    }
}
