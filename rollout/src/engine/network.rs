//! The network of an engine: a decoder on the processor, on several ranks there, or on a device.
//!
//! Invariant: all draw from the same distributions with the same uniform numbers.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use device::ops::digest::digest;
use device::ops::vectors::cast;
use device::{Device, DeviceBuffer};
use model::on_device::{DeviceDtype, DeviceSampler, DrawRequest, StagedWeights};
use model::{
    AdaptedBase, Config, Decoder, Draw, KvCache, Layout, LowRank, ModelError, Parameters, Quantization,
    SamplerRanks, SharedSampler, StepSequence, ThreadPool, TokenLogprob, most_likely,
};
use weights::{Digest, Values};

use crate::RolloutError;

/// A token to draw, and how many of the most likely ones are reported with it.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenRequest {
    pub(super) draw: DrawRequest,
    pub(super) alternatives: usize,
}

/// A drawn token.
#[derive(Clone, Debug)]
pub(super) struct DrawnToken {
    pub(super) draw: Draw,
    /// The most likely tokens, most likely first; empty if none were asked for, and on a device.
    pub(super) alternatives: Vec<TokenLogprob>,
}

/// Logits to draw from, per thread, below which waking another thread costs more than it saves.
const WORTH_A_THREAD: usize = 1 << 15;

/// Where the served weights are, and in which number type.
#[derive(Clone, Debug)]
pub enum ServeOn {
    /// On the processor, packed, or quantised.
    Host(Quantization),
    /// On the processor, in f32, a shard on each of several ranks.
    Ranks(SamplerRanks),
    /// On a device.
    Device(Device, DeviceDtype),
    /// As factors over a base that stays quantised, on the processor or on a device: only the factors are published.
    Adapted(AdaptedBase, Option<(Device, DeviceDtype)>),
}

/// Weights that can be served.
#[derive(Debug)]
pub enum ServedWeights {
    /// Packed for the processor.
    Host(Box<Decoder>),
    /// To be packed for the processor once the weights that are served before them are freed: a packed version has the memory of
    /// a whole model.
    Unpacked(UnpackedWeights),
    /// On a device.
    Device(StagedWeights),
}

/// Weights of a model as they were published, shared with their publisher.
#[derive(Debug)]
pub struct UnpackedWeights {
    layout: Arc<Layout>,
    /// `[layout.len()]`
    values: Values,
    packing: HostPacking,
}

/// How weights are packed for the processor.
#[derive(Clone, Copy, Debug)]
enum HostPacking {
    Whole(Quantization),
    Shards(SamplerRanks),
}

impl UnpackedWeights {
    /// The network of these weights, packed by the threads of `pool`, in place of the network `before`. The weights before are freed
    /// first; the keys and values of ranks stay.
    ///
    /// # Errors
    /// If the network before was on ranks and is not now, or the other way round.
    pub(super) fn pack(
        &self,
        before: Option<Network>,
        config: &Config,
        pool: &ThreadPool,
    ) -> Result<Network, RolloutError> {
        match (self.packing, before) {
            (HostPacking::Whole(quantization), before @ (None | Some(Network::Host { .. }))) => {
                drop(before);
                let unit = |unit| self.values.range(self.layout.unit(unit));
                Ok(Decoder::of_units(config, &self.layout, unit, quantization, pool).into())
            }
            (HostPacking::Shards(_), Some(Network::Ranks { sampler, .. })) => {
                Ok(on_ranks(sampler, |range| self.values.range(range), pool))
            }
            (HostPacking::Shards(ranks), None) => {
                let sampler = Box::new(SharedSampler::new(config, ranks)?);
                Ok(on_ranks(sampler, |range| self.values.range(range), pool))
            }
            (_, Some(network)) => {
                let weights = if matches!(network, Network::Ranks { .. }) { WHOLE } else { SHARDS };
                Err(RolloutError::Misplaced { weights, engine: network.place() })
            }
        }
    }
}

/// Where weights are, for errors.
const WHOLE: &str = "of one rank";
const SHARDS: &str = "of several ranks";

/// Weights `values [layout.len()]` to be packed, and their digest.
fn unpacked(layout: Arc<Layout>, values: Values, packing: HostPacking) -> (ServedWeights, Digest) {
    let digest = Digest::of_values(&values, 1);
    (ServedWeights::Unpacked(UnpackedWeights { layout, values, packing }), digest)
}

/// The network of weights on the ranks of `sampler`; `of_whole` has those of a range of the whole model.
fn on_ranks<'a>(
    mut sampler: Box<SharedSampler>,
    of_whole: impl Fn(Range<usize>) -> Cow<'a, [f32]> + Sync,
    pool: &ThreadPool,
) -> Network {
    sampler.serve(of_whole, pool);
    Network::Ranks { sampler, logits: Vec::new() }
}

impl ServeOn {
    /// The same place for factors of `policy` over a base that stays quantised.
    #[must_use]
    pub fn adapted(self, policy: AdaptedBase) -> Self {
        match self {
            Self::Host(_) | Self::Ranks(_) => Self::Adapted(policy, None),
            Self::Device(device, dtype) => Self::Adapted(policy, Some((device, dtype))),
            Self::Adapted(_, device) => Self::Adapted(policy, device),
        }
    }

    /// Stages the weights `values` of a model of `config`: uploads them to a device. Returns them with the digest of the staged
    /// values.
    ///
    /// # Errors
    /// If the number of values is not that of the model, or the device fails or has no memory.
    pub fn prepare(&self, config: &Config, values: Values) -> Result<(ServedWeights, Digest), RolloutError> {
        let whole = || {
            let layout = Arc::new(Layout::new(config));
            let (expected, found) = (layout.len(), values.len());
            if found == expected { Ok(layout) } else { Err(ModelError::Length { expected, found }) }
        };
        match self {
            Self::Adapted(before, None) => {
                let next = before.with_values(&values)?;
                Ok((next.decoder().into(), Digest::of(&values)))
            }
            Self::Adapted(before, Some((device, _))) => {
                let (expected, found) = (before.factors().values().len(), values.len());
                if expected != found {
                    return Err(ModelError::Length { expected, found }.into());
                }
                let (factors, digest) = upload(&device.labelled("adapter"), &values)?;
                device.synchronize()?;
                Ok((ServedWeights::Device(StagedWeights::Factors(factors)), digest))
            }
            Self::Host(quantization) => {
                let layout = whole()?;
                Ok(unpacked(layout, values, HostPacking::Whole(*quantization)))
            }
            Self::Ranks(ranks) => {
                let layout = whole()?;
                Ok(unpacked(layout, values, HostPacking::Shards(*ranks)))
            }
            Self::Device(device, dtype) => {
                whole()?;
                let (staged, digest) = stage(device, *dtype, &values)?;
                Ok((ServedWeights::Device(staged), digest))
            }
        }
    }
}

/// Uploads `values [n]`. Returns them with the digest of the values after the upload.
fn upload(device: &Device, values: &[f32]) -> Result<(DeviceBuffer<f32>, Digest), RolloutError> {
    let whole = device.upload(values)?;
    let digest = Digest::from_bytes(digest(device, whole.all())?);
    Ok((whole, digest))
}

/// Uploads `values [weights]` as `dtype`. Returns them with the digest of the values before they are rounded.
fn stage(
    device: &Device,
    dtype: DeviceDtype,
    values: &[f32],
) -> Result<(StagedWeights, Digest), RolloutError> {
    let device = device.labelled("weights");
    let (whole, digest) = upload(&device, values)?;
    let staged = match dtype {
        DeviceDtype::F32 => StagedWeights::F32(whole),
        DeviceDtype::Bf16 => {
            let mut narrow = device.uninit(whole.len())?;
            cast(&device, whole.all(), narrow.all_mut())?;
            StagedWeights::Bf16(narrow)
        }
    };
    // They are served on another stream.
    device.synchronize()?;
    Ok((staged, digest))
}

impl From<Decoder> for ServedWeights {
    fn from(decoder: Decoder) -> Self {
        Self::Host(Box::new(decoder))
    }
}

/// Weights in f32 for a network that serves factors.
const NOT_FACTORS: RolloutError = RolloutError::Misplaced {
    weights: "of a whole model",
    engine: "with factors over a base that stays quantised",
};

/// A network that serves weights.
#[derive(Debug)]
pub enum Network {
    /// On the processor.
    Host {
        /// Its layers and weights.
        decoder: Box<Decoder>,
        /// `[wanted, V]` of the last step, until tokens are drawn from them.
        logits: Vec<f32>,
    },
    /// On the processor, on several ranks.
    Ranks {
        /// The ranks, with their shards of the weights and their keys and values.
        sampler: Box<SharedSampler>,
        /// `[wanted, V]` of the last step, until tokens are drawn from them.
        logits: Vec<f32>,
    },
    /// On a device.
    Device(Box<DeviceSampler>),
}

impl From<Decoder> for Network {
    fn from(decoder: Decoder) -> Self {
        Box::new(decoder).into()
    }
}

impl From<Box<Decoder>> for Network {
    fn from(decoder: Box<Decoder>) -> Self {
        Self::Host { decoder, logits: Vec::new() }
    }
}

impl Network {
    /// A network that serves `parameters`, on a stream of its own if it is on a device.
    ///
    /// # Errors
    /// If the device fails or has no memory, or only factors can be served.
    pub fn new(on: &ServeOn, config: &Config, parameters: &Parameters) -> Result<Self, RolloutError> {
        Ok(match on {
            ServeOn::Host(quantization) => Decoder::sampler(config, parameters, *quantization).into(),
            ServeOn::Ranks(ranks) => {
                let sampler = Box::new(SharedSampler::new(config, *ranks)?);
                let of_whole = |range: Range<usize>| Cow::Borrowed(&parameters.values()[range]);
                on_ranks(sampler, of_whole, &ThreadPool::single())
            }
            ServeOn::Adapted(..) => return Err(NOT_FACTORS),
            ServeOn::Device(device, dtype) => {
                let (staged, _) = stage(device, *dtype, parameters.values())?;
                Self::Device(Box::new(DeviceSampler::new(device, config, staged)?))
            }
        })
    }

    /// A network that serves the `values` of a version as they were published. No more of them is copied than it needs.
    ///
    /// # Errors
    /// As [`Self::new`], or if the number of values is not that of the model.
    pub fn of_version(on: &ServeOn, config: &Config, values: Values) -> Result<Self, RolloutError> {
        match (on.prepare(config, values)?.0, on) {
            (ServedWeights::Unpacked(weights), _) => weights.pack(None, config, &ThreadPool::single()),
            (ServedWeights::Device(staged), ServeOn::Device(device, _)) => {
                Ok(Self::Device(Box::new(DeviceSampler::new(device, config, staged)?)))
            }
            (ServedWeights::Host(_) | ServedWeights::Device(_), _) => Err(NOT_FACTORS),
        }
    }

    /// A network that serves `policy` at this place, on a stream of its own if it is on a device.
    ///
    /// # Errors
    /// If the device fails or has no memory.
    pub fn adapted(on: &ServeOn, policy: &AdaptedBase) -> Result<Self, RolloutError> {
        Ok(match on {
            ServeOn::Host(_) | ServeOn::Ranks(_) | ServeOn::Adapted(_, None) => policy.decoder().into(),
            ServeOn::Device(device, dtype) | ServeOn::Adapted(_, Some((device, dtype))) => {
                Self::Device(Box::new(DeviceSampler::over(device, *dtype, policy)?))
            }
        })
    }

    /// The model that it runs.
    #[must_use]
    pub fn config(&self) -> &Config {
        match self {
            Self::Host { decoder, .. } => decoder.config(),
            Self::Ranks { sampler, .. } => sampler.config(),
            Self::Device(sampler) => sampler.config(),
        }
    }

    /// Where it computes, for errors.
    fn place(&self) -> &'static str {
        match self {
            Self::Host { .. } => "on the host",
            Self::Ranks { .. } => "on several ranks",
            Self::Device(_) => "on a device",
        }
    }

    /// Serves `adapters` beside its weights, in place of those before.
    ///
    /// # Errors
    /// If it is on a device that fails or has no memory for them, or has no operation for some of their factors, or on several ranks.
    pub(super) fn set_adapters(&mut self, adapters: &[Arc<LowRank>]) -> Result<(), RolloutError> {
        match self {
            Self::Host { decoder, .. } => decoder.set_adapters(adapters),
            Self::Ranks { .. } if adapters.is_empty() => {}
            Self::Ranks { .. } => {
                return Err(RolloutError::Misplaced { weights: "of adapters", engine: self.place() });
            }
            Self::Device(sampler) => sampler.set_adapters(adapters)?,
        }
        Ok(())
    }

    /// Memory of its own, bytes; with its cache if it is on a device, and with the keys and values of all ranks but the first.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Host { decoder, .. } => decoder.bytes(),
            Self::Ranks { sampler, .. } => sampler.bytes(),
            Self::Device(sampler) => sampler.bytes(),
        }
    }

    /// Bytes that its ranks took from the version that it serves; 0 for one rank.
    pub(super) fn taken(&self) -> u64 {
        match self {
            Self::Ranks { sampler, .. } => sampler.taken(),
            Self::Host { .. } | Self::Device(_) => 0,
        }
    }

    /// A cache for this network.
    pub(super) fn cache(&self, positions: usize) -> KvCache {
        match self {
            Self::Host { decoder, .. } => KvCache::new(decoder.config(), positions),
            Self::Ranks { sampler, .. } => sampler.cache(positions),
            Self::Device(sampler) => KvCache::elsewhere(sampler.config(), positions),
        }
    }

    /// Serves `served` from the next step on. Returns the previous weights, if they are on a device.
    pub(super) fn serve(&mut self, served: ServedWeights) -> Result<Option<StagedWeights>, RolloutError> {
        match (self, served) {
            (Self::Host { decoder, .. }, ServedWeights::Host(new)) => {
                *decoder = new;
                Ok(None)
            }
            (Self::Device(sampler), ServedWeights::Device(staged)) => Ok(Some(sampler.swap(staged)?)),
            (network, ServedWeights::Device(_)) => {
                Err(RolloutError::Misplaced { weights: "on a device", engine: network.place() })
            }
            (network, ServedWeights::Host(_) | ServedWeights::Unpacked(_)) => {
                Err(RolloutError::Misplaced { weights: "on the host", engine: network.place() })
            }
        }
    }

    pub(super) fn step(
        &mut self,
        cache: &mut KvCache,
        sequences: &[StepSequence<'_>],
        pool: &ThreadPool,
    ) -> Result<(), RolloutError> {
        match self {
            Self::Host { decoder, logits } => *logits = decoder.step(cache, sequences, pool)?,
            Self::Ranks { sampler, logits } => *logits = sampler.step(cache, sequences, pool)?,
            Self::Device(sampler) => sampler.step(cache, sequences)?,
        }
        Ok(())
    }

    /// Draws tokens from the logits of the last step, on the threads of `pool` if it is on the processor.
    pub(super) fn draw(
        &mut self,
        requests: &[TokenRequest],
        pool: &ThreadPool,
    ) -> Result<Vec<DrawnToken>, RolloutError> {
        let (config, logits) = match self {
            Self::Device(sampler) => {
                let draws: Vec<DrawRequest> = requests.iter().map(|request| request.draw).collect();
                let drawn = sampler.draw(&draws)?.into_iter();
                return Ok(drawn.map(|draw| DrawnToken { draw, alternatives: Vec::new() }).collect());
            }
            Self::Host { decoder, logits } => (decoder.config(), std::mem::take(logits)),
            Self::Ranks { sampler, logits } => (sampler.config(), std::mem::take(logits)),
        };
        let vocabulary = config.vocab_size;
        let draw = |requests: &[TokenRequest]| -> Vec<DrawnToken> {
            let mut scratch = vec![0.0; vocabulary];
            let draw = |TokenRequest { draw: request, alternatives }: &TokenRequest| {
                let row = &logits[request.row * vocabulary..][..vocabulary];
                let likely = if *alternatives > 0 {
                    scratch.copy_from_slice(row);
                    most_likely(&mut scratch, request.sampling, *alternatives)
                } else {
                    Vec::new()
                };
                scratch.copy_from_slice(row);
                let draw = Draw::new(&mut scratch, request.sampling, request.uniform);
                DrawnToken { draw, alternatives: likely }
            };
            requests.iter().map(draw).collect()
        };
        let parts = if requests.len() * vocabulary < WORTH_A_THREAD { 1 } else { pool.threads() };
        let each = requests.len().div_ceil(parts).max(1);
        Ok(pool.map(requests.chunks(each).collect(), draw).concat())
    }
}
