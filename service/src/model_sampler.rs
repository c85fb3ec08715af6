//! A sampler of a model in training, for programs that train by hand.
//!
//! Invariant: it samples with the weights that the model had when the sampler was made.

use std::sync::Arc;

use model::SharedCores;
use rollout::{EngineConfig, RolloutError};

use crate::data::{SamplingOutput, SamplingRequest};
use crate::fair_queue::FairBounds;
use crate::outcome::FailedRequest;
use crate::sampling::{HostConfig, HostedNetwork, SamplerHost};
use crate::trained::{SamplingWeights, TrainedModel};
use crate::training::UserId;

/// Sequences decoded together.
const RUNNING: usize = 64;
/// Most tokens of the KV cache.
const CACHE_TOKENS: usize = 1 << 16;
/// Requests that may wait.
const WAITING: usize = 4096;
/// The only user.
const OWNER: UserId = UserId([0; 16]);

/// A sampler of one version of a model.
#[derive(Debug)]
pub struct ModelSampler {
    host: SamplerHost,
    adapter: Option<usize>,
    runtime: tokio::runtime::Runtime,
}

impl ModelSampler {
    /// Samples completions and returns when all of them have ended.
    ///
    /// # Errors
    /// A request that cannot be carried out, an engine that failed.
    pub fn sample(&self, request: &SamplingRequest) -> Result<SamplingOutput, FailedRequest> {
        let answer = self.host.sample(self.adapter, OWNER, request.clone());
        self.runtime.block_on(answer.map_err(|refusal| FailedRequest::user(refusal.message))?)
    }
}

impl TrainedModel {
    /// A sampler of its weights as they are, which decodes with at most `threads` of `cores`.
    ///
    /// # Errors
    /// If the engine cannot be started.
    pub fn sampler(&self, cores: &Arc<SharedCores>, threads: usize) -> Result<ModelSampler, FailedRequest> {
        let failed = |error: RolloutError| FailedRequest::server(error.to_string());
        let context = self.base().info().max_context;
        let config = HostConfig {
            max_running: RUNNING,
            max_context: context,
            kv_cache_tokens: CACHE_TOKENS.min(RUNNING.saturating_mul(context)),
            prefill_chunk: EngineConfig::default_prefill_chunk(false),
            max_samples: WAITING,
            threads,
            waiting: FairBounds { total: WAITING, per_user: WAITING },
        };
        let start = |network| {
            SamplerHost::start("model", self.base().directory(), network, config, cores).map_err(failed)
        };
        let (host, adapter) = match self.weights()? {
            SamplingWeights::Factors(factors) => {
                let frozen =
                    self.base().frozen().map_err(|error| FailedRequest::server(error.to_string()))?;
                let host = start(HostedNetwork::Base(frozen))?;
                host.set_adapter(0, factors, self.version()).map_err(failed)?;
                (host, Some(0))
            }
            SamplingWeights::Whole(parameters) => {
                (start(HostedNetwork::Whole(parameters, self.version()))?, None)
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.map_err(|error| FailedRequest::server(error.to_string()))?;
        Ok(ModelSampler { host, adapter, runtime })
    }
}
