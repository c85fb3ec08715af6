//! What is asked of the service, and what it says about its models.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A user, by the digest of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UserId(pub [u8; 16]);

/// A model that is wanted.
#[derive(Clone, Debug, PartialEq)]
pub struct NewModel {
    /// The session that it belongs to.
    pub session_id: String,
    /// Its number in the session, from 0.
    pub model_seq_id: u64,
    /// Name of the base model.
    pub base_model: String,
    /// The adapter that is trained; `None` for all weights.
    pub lora: Option<LoraRequest>,
    /// Name of the optimizer.
    pub optimizer: String,
}

/// An adapter that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoraRequest {
    /// Rank of the factors.
    pub rank: usize,
    /// Seed of the first values; `None` for one of the service.
    pub seed: Option<u64>,
    /// Whether the head is adapted.
    pub train_unembed: bool,
    /// Whether the layers of feed-forward networks are adapted.
    pub train_mlp: bool,
    /// Whether the layers of attention are adapted.
    pub train_attn: bool,
}

/// Where a state is loaded to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadInto {
    /// A model that exists.
    Model {
        /// Its id.
        model_id: String,
        /// Number of the request.
        seq_id: u64,
    },
    /// A model that is made by it.
    New {
        /// The session that it belongs to.
        session_id: String,
        /// Its number in the session.
        model_seq_id: u64,
        /// Name of the base model; `None` for that of the state.
        base_model: Option<String>,
    },
}

/// What is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveRequest {
    /// Its name.
    pub name: String,
    /// Whether it may replace one of the same name.
    pub overwrite: bool,
    /// How long it is kept, seconds; `None` for ever.
    pub ttl_s: Option<u64>,
}

/// Weights that are published for sampling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplerSave {
    /// The name that they are saved under; `None` for a sampling session.
    pub save: Option<SaveRequest>,
    /// Number of the sampling session in its session, if one is wanted.
    pub sampling_session_seq_id: Option<u64>,
    /// Whether later publications are served by the same sampler.
    pub inflight: bool,
}

/// What a sampling session samples from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleFrom {
    /// A base model, by name.
    Base(String),
    /// Saved weights, as `tinker://`.
    Saved(String),
}

/// A base model of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseInfo {
    /// Its name.
    pub name: String,
    /// Its directory, with the tokenizer.
    pub path: PathBuf,
    /// Architecture, such as `qwen2`.
    pub architecture: String,
    /// Longest sequence, tokens.
    pub max_context: usize,
}

/// A model in training, or one that was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Its id.
    pub model_id: String,
    /// Its base model.
    pub base: BaseInfo,
    /// The adapter that is trained; `None` for all weights.
    pub lora: Option<LoraRequest>,
    /// When its last request came, seconds since 1970.
    pub last_request: u64,
    /// Whether it is loaded.
    pub loaded: bool,
}

/// Saved weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedInfo {
    /// As `tinker://`.
    pub path: String,
    /// Whether it has the state of the optimizer (`weights`), or is for sampling (`sampler_weights`).
    pub is_state: bool,
    /// When it was saved, seconds since 1970.
    pub saved: u64,
    /// Its files, bytes.
    pub bytes: u64,
    /// When it is deleted, seconds since 1970.
    pub expires: Option<u64>,
}

/// A sampling session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplerInfo {
    /// Its id.
    pub sampling_session_id: String,
    /// Its base model.
    pub base: BaseInfo,
    /// The saved weights that it samples from, as `tinker://`.
    pub path: Option<String>,
    /// The version that it samples from.
    pub version: u64,
}
