//! One decoder for sampling, training and scoring, with its Hugging Face files.
//!
//! # Layout
//! - [`directory`]: a model directory in Hugging Face layout, opened, made and exported; it is made of
//!   [`config`], [`parameters`] (all weights as one flat buffer), [`tokenizer`] and [`chat`]
//! - [`decoder`]: the network, for whole sequences and for decoding from a paged cache
//! - `ops`: its hot operations, each with its backward
//! - [`sampling`]: from logits to a token and its log-probability
//! - [`characters`]: the character-level tokenizer of fresh models

pub mod atomic;
pub mod characters;
pub mod chat;
pub mod config;
pub mod decoder;
pub mod directory;
pub mod error;
mod ops;
pub mod parameters;
pub mod sampling;
pub mod tokenizer;
mod weight_files;

pub use characters::{CHARACTERS, characters};
pub use chat::ChatTemplate;
pub use config::{Architecture, Config, RopeScaling, Sizes};
pub use decoder::{Decoder, Gradients, KvCache, Pack, PackError, Purpose, StepRow, Trace};
pub use directory::ModelDirectory;
pub use error::ModelError;
pub use ops::head::{Prediction, PredictionGradient, Target};
pub use parameters::{Layout, ParameterSpec, Parameters};
pub use sampling::{Draw, Sampling};
pub use tokenizer::{DecodeStream, SpecialTokens, Tokenizer};
