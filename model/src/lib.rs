//! One decoder for sampling, training and scoring, with its Hugging Face files.
//!
//! # Layout
//! - [`config`], [`parameters`]: what a model is, and its weights as one flat buffer
//! - [`decoder`]: the network, for whole sequences and for decoding from a paged cache
//! - `ops`: its hot operations, each with its backward
//! - [`sampling`]: from logits to a token and its log-probability

pub mod config;
mod config_keys;
pub mod decoder;
pub mod error;
mod ops;
pub mod parameters;
pub mod sampling;

pub use config::{Architecture, Config, RopeScaling, Sizes};
pub use decoder::{Decoder, Gradients, KvCache, Pack, PackError, Purpose, StepRow, Trace};
pub use error::ModelError;
pub use ops::head::{Prediction, PredictionGradient, Target};
pub use parameters::{Layout, ParameterSpec, Parameters};
pub use sampling::{Draw, Sampling};
