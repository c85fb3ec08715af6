//! One decoder for sampling, training and scoring, with its Hugging Face files.

mod atomic;
pub mod characters;
pub mod chat;
pub mod config;
pub mod directory;
pub mod error;
pub mod parameters;
pub mod tokenizer;
mod weight_files;

pub use characters::{CHARACTERS, characters};
pub use chat::ChatTemplate;
pub use config::{Architecture, Config, RopeScaling, Sizes};
pub use directory::ModelDirectory;
pub use error::ModelError;
pub use parameters::{Layout, ParameterSpec, Parameters};
pub use tokenizer::{DecodeStream, SpecialTokens, Tokenizer};
