//! The network of an engine: a decoder on the processor or on a device.
//!
//! Invariant: both draw from the same distributions with the same uniform numbers.

use device::Device;
use device::ops::digest::digest;
use device::ops::vectors::cast;
use model::on_device::{DeviceDtype, DeviceSampler, DrawRequest, StagedWeights};
use model::{Config, Decoder, Draw, KvCache, Parameters, Quantization, StepSequence, ThreadPool};
use weights::Digest;

use crate::RolloutError;

/// Where the served weights are, and in which number type.
#[derive(Clone, Debug)]
pub enum ServeOn {
    /// On the processor, packed, or quantised.
    Host(Quantization),
    /// On a device.
    Device(Device, DeviceDtype),
}

/// Weights that can be served at once.
#[derive(Debug)]
pub enum ServedWeights {
    /// Packed for the processor.
    Host(Box<Decoder>),
    /// On a device.
    Device(StagedWeights),
}

impl ServeOn {
    /// Stages `parameters`: packs or uploads them. Returns them with the digest of the staged values.
    ///
    /// # Errors
    /// If the device fails or has no memory.
    pub fn prepare(
        &self,
        config: &Config,
        parameters: &Parameters,
    ) -> Result<(ServedWeights, Digest), RolloutError> {
        match self {
            Self::Host(quantization) => {
                let digest = Digest::of(parameters.values());
                Ok((Decoder::sampler(config, parameters, *quantization).into(), digest))
            }
            Self::Device(device, dtype) => {
                let (staged, digest) = stage(device, *dtype, parameters)?;
                Ok((ServedWeights::Device(staged), digest))
            }
        }
    }
}

/// Uploads `parameters`. Returns them with the digest of the values after the upload.
fn stage(
    device: &Device,
    dtype: DeviceDtype,
    parameters: &Parameters,
) -> Result<(StagedWeights, Digest), RolloutError> {
    let device = device.labelled("weights");
    let whole = device.upload(parameters.values())?;
    let digest = Digest::from_bytes(digest(&device, whole.all())?);
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
    /// If the device fails or has no memory.
    pub fn new(on: &ServeOn, config: &Config, parameters: &Parameters) -> Result<Self, RolloutError> {
        Ok(match on {
            ServeOn::Host(quantization) => Decoder::sampler(config, parameters, *quantization).into(),
            ServeOn::Device(device, dtype) => {
                let (staged, _) = stage(device, *dtype, parameters)?;
                Self::Device(Box::new(DeviceSampler::new(device, config, staged)?))
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
            (Self::Device(_), ServedWeights::Host(_)) => {
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

    /// Draws tokens from the logits of the last step.
    pub(super) fn draw(&mut self, requests: &[DrawRequest]) -> Result<Vec<Draw>, RolloutError> {
        match self {
            Self::Device(sampler) => Ok(sampler.draw(requests)?),
            Self::Host { decoder, logits } => {
                let (vocabulary, logits) = (decoder.config().vocab_size, std::mem::take(logits));
                let mut scratch = vec![0.0; vocabulary];
                let draw = |request: &DrawRequest| {
                    let row = request.row * vocabulary;
                    scratch.copy_from_slice(&logits[row..row + vocabulary]);
                    Draw::new(&mut scratch, request.sampling, request.uniform)
                };
                Ok(requests.iter().map(draw).collect())
            }
        }
    }
}
