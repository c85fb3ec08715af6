//! How a service is set up, and its limits.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use model::SharedCores;

use crate::base::BaseModel;
use crate::sampling::HostConfig;

/// How a service is set up.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    /// Its base models.
    pub bases: Vec<Arc<BaseModel>>,
    /// Directory of saved weights, with a run directory for every model.
    pub dir: PathBuf,
    /// Bounds of the engines that sample.
    pub host: HostConfig,
    /// Cores that training and sampling share.
    pub cores: Arc<SharedCores>,
    /// Limits.
    pub limits: ServiceLimits,
}

/// What bounds the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceLimits {
    /// Most sessions of a user.
    pub sessions: usize,
    /// Most models that are loaded, of all users.
    pub models: usize,
    /// Most requests of a user that have not ended.
    pub open: usize,
    /// Most memory of loaded models beside their bases, bytes.
    pub model_bytes: u64,
    /// Most sampling sessions, of all users. A new one replaces the least recently used one of its user.
    pub sampling_sessions: usize,
    /// Most numbers of data that wait for their pass, of all users: tokens and inputs of losses.
    pub queued_numbers: usize,
    /// A session without a heartbeat for so long has ended.
    pub session: Duration,
    /// Requests that wait for one that never came fail after so long.
    pub gap: Duration,
    /// How long the outcome of a request can be retrieved after it ended.
    pub outcome: Duration,
    /// Memory of outcomes of a user, bytes, above which those that were retrieved make place, or new requests are refused. Requests in
    /// progress add theirs.
    pub outcome_bytes: usize,
    /// How long an outcome is kept at least after it was retrieved.
    pub retrieved: Duration,
    /// Most bytes of weights that samplers have in memory beside those of the base models.
    pub sampler_bytes: u64,
    /// Adapters that an engine serves at the same time.
    pub adapters: usize,
    /// Engines of whole models, beside those of the base models.
    pub whole_samplers: usize,
}

impl Default for ServiceLimits {
    fn default() -> Self {
        Self {
            sessions: 64,
            models: 256,
            open: 4096,
            model_bytes: 8 << 30,
            sampling_sessions: 1 << 16,
            queued_numbers: 128 << 20,
            session: Duration::from_secs(300),
            gap: Duration::from_secs(60),
            outcome: Duration::from_secs(600),
            outcome_bytes: 512 << 20,
            retrieved: Duration::from_secs(60),
            sampler_bytes: 4 << 30,
            adapters: 64,
            whole_samplers: 2,
        }
    }
}
