//! The network of an engine: a decoder on the processor or on a device.
//!
//! Invariant: both draw from the same distributions with the same uniform numbers.

use device::ops::digest::digest;
use device::ops::vectors::cast;
use device::{Device, DeviceBuffer};
use model::on_device::{DeviceDtype, DeviceSampler, DrawRequest, StagedWeights};
use std::sync::Arc;

use model::{
    AdaptedBase, Config, Decoder, Draw, KvCache, Layout, LowRank, ModelError, Parameters, Quantization,
    StepSequence, ThreadPool, TokenLogprob, most_likely,
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
    quantization: Quantization,
}

impl UnpackedWeights {
    /// The decoder of these weights, packed by the threads of `pool`.
    pub(super) fn pack(&self, config: &Config, pool: &ThreadPool) -> Decoder {
        Decoder::packed(config, &self.layout, &self.values, self.quantization, pool)
    }
}

impl ServeOn {
    /// The same place for factors of `policy` over a base that stays quantised.
    #[must_use]
    pub fn adapted(self, policy: AdaptedBase) -> Self {
        match self {
            Self::Host(_) => Self::Adapted(policy, None),
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
                let digest = Digest::of(&values);
                let (layout, quantization) = (whole()?, *quantization);
                Ok((ServedWeights::Unpacked(UnpackedWeights { layout, values, quantization }), digest))
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
            ServeOn::Adapted(..) => return Err(NOT_FACTORS),
            ServeOn::Device(device, dtype) => {
                let (staged, _) = stage(device, *dtype, parameters.values())?;
                Self::Device(Box::new(DeviceSampler::new(device, config, staged)?))
            }
        })
    }

    /// A network that serves `policy` at this place, on a stream of its own if it is on a device.
    ///
    /// # Errors
    /// If the device fails or has no memory.
    pub fn adapted(on: &ServeOn, policy: &AdaptedBase) -> Result<Self, RolloutError> {
        Ok(match on {
            ServeOn::Host(_) | ServeOn::Adapted(_, None) => policy.decoder().into(),
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
            Self::Device(sampler) => sampler.config(),
        }
    }

    /// Serves `adapters` beside its weights, in place of those before.
    ///
    /// # Errors
    /// If it is on a device that fails or has no memory for them, or has no operation for some of their factors.
    pub(super) fn set_adapters(&mut self, adapters: &[Arc<LowRank>]) -> Result<(), RolloutError> {
        match self {
            Self::Host { decoder, .. } => decoder.set_adapters(adapters),
            Self::Device(sampler) => sampler.set_adapters(adapters)?,
        }
        Ok(())
    }

    /// Memory of its own, bytes; with its cache if it is on a device.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Host { decoder, .. } => decoder.bytes(),
            Self::Device(sampler) => sampler.bytes(),
        }
    }

    /// A cache for this network.
    pub(super) fn cache(&self, positions: usize) -> KvCache {
        match self {
            Self::Host { decoder, .. } => KvCache::new(decoder.config(), positions),
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
            (Self::Host { .. }, ServedWeights::Device(_)) => {
                Err(RolloutError::Misplaced { weights: "on a device", engine: "on the host" })
            }
            (_, ServedWeights::Host(_) | ServedWeights::Unpacked(_)) => {
                Err(RolloutError::Misplaced { weights: "on the host", engine: "on a device" })
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
        match self {
            Self::Device(sampler) => {
                let draws: Vec<DrawRequest> = requests.iter().map(|request| request.draw).collect();
                let drawn = sampler.draw(&draws)?.into_iter();
                Ok(drawn.map(|draw| DrawnToken { draw, alternatives: Vec::new() }).collect())
            }
            Self::Host { decoder, logits } => {
                let (vocabulary, logits) = (decoder.config().vocab_size, std::mem::take(logits));
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
    }
}
