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
        let (device, dtype) = match self {
            Self::Host(quantization) => {
                let digest = Digest::of(parameters.values());
                let decoder = Decoder::sampler(config, parameters, *quantization);
                return Ok((decoder.into(), digest));
            }
            Self::Device(device, dtype) => (device, dtype),
        };
        let device = device.labelled("weights");
        let whole = device.upload(parameters.values())?;
        // The digest of the values after the upload.
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
        Ok((ServedWeights::Device(staged), digest))
    }
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
    Host(Box<Decoder>),
    /// On a device.
    Device(Box<DeviceSampler>),
}

impl From<Decoder> for Network {
    fn from(decoder: Decoder) -> Self {
        Self::Host(Box::new(decoder))
    }
}

/// The logits of a step.
#[derive(Debug)]
pub(super) enum Logits {
    /// `[wanted, V]`
    Host(Vec<f32>),
    /// Kept on the device.
    Device,
}

impl Network {
    /// A network that serves `parameters`, on a stream of its own if it is on a device.
    ///
    /// # Errors
    /// If the device fails or has no memory.
    pub fn new(on: &ServeOn, config: &Config, parameters: &Parameters) -> Result<Self, RolloutError> {
        let (served, _) = on.prepare(config, parameters)?;
        Ok(match (served, on) {
            (ServedWeights::Host(decoder), _) => Self::Host(decoder),
            (ServedWeights::Device(staged), ServeOn::Device(device, _)) => {
                Self::Device(Box::new(DeviceSampler::new(device, config, staged)?))
            }
            (ServedWeights::Device(_), ServeOn::Host(_)) => {
                unreachable!("what is prepared for the host is there")
            }
        })
    }

    /// The model that it runs.
    #[must_use]
    pub fn config(&self) -> &Config {
        match self {
            Self::Host(decoder) => decoder.config(),
            Self::Device(sampler) => sampler.config(),
        }
    }

    /// Memory of its own, bytes; with its cache if it is on a device.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Host(decoder) => decoder.bytes(),
            Self::Device(sampler) => sampler.bytes(),
        }
    }

    /// A cache for this network.
    pub(super) fn cache(&self, positions: usize) -> KvCache {
        match self {
            Self::Host(decoder) => KvCache::new(decoder.config(), positions),
            Self::Device(sampler) => KvCache::elsewhere(sampler.config(), positions),
        }
    }

    /// Serves `served` from the next step on. Returns the previous weights, if they are on a device.
    pub(super) fn serve(&mut self, served: ServedWeights) -> Result<Option<StagedWeights>, RolloutError> {
        match (self, served) {
            (Self::Host(decoder), ServedWeights::Host(new)) => *decoder = new,
            (Self::Device(sampler), ServedWeights::Device(staged)) => return Ok(Some(sampler.swap(staged)?)),
            (Self::Host(_), ServedWeights::Device(_)) | (Self::Device(_), ServedWeights::Host(_)) => {
                unreachable!("an engine and its applier are made for the same place")
            }
        }
        Ok(None)
    }

    pub(super) fn step(
        &mut self,
        cache: &mut KvCache,
        sequences: &[StepSequence<'_>],
        pool: &ThreadPool,
    ) -> Result<Logits, RolloutError> {
        Ok(match self {
            Self::Host(decoder) => Logits::Host(decoder.step(cache, sequences, pool)?),
            Self::Device(sampler) => {
                sampler.step(cache, sequences)?;
                Logits::Device
            }
        })
    }

    pub(super) fn draw(
        &mut self,
        logits: &Logits,
        requests: &[DrawRequest],
    ) -> Result<Vec<Draw>, RolloutError> {
        match (self, logits) {
            (Self::Device(sampler), Logits::Device) => Ok(sampler.draw(requests)?),
            (network, Logits::Host(logits)) => {
                let vocabulary = network.config().vocab_size;
                let mut scratch = vec![0.0; vocabulary];
                let draw = |request: &DrawRequest| {
                    let row = request.row * vocabulary;
                    scratch.copy_from_slice(&logits[row..row + vocabulary]);
                    Draw::new(&mut scratch, request.sampling, request.uniform)
                };
                Ok(requests.iter().map(draw).collect())
            }
            (Self::Host(_), Logits::Device) => unreachable!("the processor gives its logits"),
        }
    }
}
