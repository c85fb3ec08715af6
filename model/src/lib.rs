//! One decoder for sampling, training and scoring, with its Hugging Face files.

pub mod config;
mod config_keys;
pub mod error;
pub mod parameters;

pub use config::{Architecture, Config, RopeScaling, Sizes};
pub use error::ModelError;
pub use parameters::{Layout, ParameterSpec, Parameters};
