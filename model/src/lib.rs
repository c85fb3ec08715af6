//! One decoder for sampling, training and scoring, with its Hugging Face files.
//!
//! # Layout
//! - [`directory`]: a model directory in Hugging Face layout, opened, made and exported; it is made of
//!   [`config`], [`parameters`] (all weights as one flat buffer), [`tokenizer`] and [`chat`]
//! - [`frozen_parameters`]: frozen weights that stay quantised, under factors that are trained; [`adapted`]: both, as a policy
//! - `gguf`: a model in one file of llama.cpp, read as such a directory
//! - [`files`]: bounded reads of untrusted files; [`manifest`]: a digest of every file of a directory
//! - [`mod@thread_pool`]: thread pools of the roles over the cores of a process; [`mod@turns`]: one device for two roles
//! - [`decoder`]: the network, for whole sequences and for decoding from a paged cache
//! - [`on_device`]: the same network on a GPU
//! - [`scorer`]: reward models, on our decoder and of candle-transformers; [`resident`]: frozen weights, kept in memory or
//!   read for every use
//! - [`pass_ranks`]: ranks that compute one pass together; [`model_shard`]: the part of a model that one of them has
//! - [`shared_sampler`]: a sampler whose weights ranks share
//! - [`layer`]: one decoder layer as data, from which layout, files, LoRA and the decoders follow; [`rotary`]: its position embedding
//! - `ops`: its hot operations, each with its backward
//! - [`low_rank`]: trained factors of frozen weights (LoRA), and their gradients
//! - [`products`]: the decoder's matrix product, for optimizers
//! - [`machine`]: CPU features of this machine
//! - [`sampling`]: from logits to a token and its log-probability
//! - [`mod@characters`]: the character-level tokenizer of fresh models
//! - [`mod@bench`]: peak throughput of a machine
//!
//! # Example
//! An untrained model samples the token after a prompt of three:
//! ```
//! use model::{Config, Decoder, Draw, KvCache, Parameters, Sampling, Sizes, StepSequence, ThreadPool};
//!
//! let config = Config::fresh(&Sizes {
//!     vocab_size: 100,
//!     hidden_size: 16,
//!     intermediate_size: 24,
//!     num_layers: 2,
//!     num_heads: 4,
//!     num_kv_heads: 2,
//!     max_position_embeddings: 64,
//! });
//! let seed = 7;
//! let decoder = Decoder::new(&config, &Parameters::random(&config, seed));
//!
//! let mut cache = KvCache::new(&config, config.max_context());
//! let pages = [cache.take().expect("all pages of a new cache are free")];
//! let prompt = StepSequence { tokens: &[22, 16, 22], position: 0, pages: &pages, wanted: 1, adapter: None };
//! let mut logits = decoder.step(&mut cache, &[prompt], &ThreadPool::single())?;
//! let uniform = 0.5;
//! let draw = Draw::new(&mut logits, Sampling::PLAIN, uniform);
//! assert!(draw.token < 100 && draw.logprob < 0.0);
//! # Ok::<(), candle_core::Error>(())
//! ```

pub mod adapted;
pub mod adapted_matrix;
pub mod atomic;
pub mod bench;
pub mod characters;
pub mod chat;
pub mod config;
pub mod decoder;
pub mod directory;
pub mod error;
mod file_tensors;
pub mod files;
mod float8;
pub mod frozen_parameters;
mod gguf;
pub mod layer;
pub mod low_rank;
pub mod machine;
pub mod manifest;
pub mod model_shard;
mod mxfp4;
pub mod on_device;
mod ops;
pub mod parameters;
pub mod pass_ranks;
pub mod products;
pub mod resident;
pub mod rotary;
pub mod sampling;
pub mod scorer;
pub mod shared_sampler;
mod stacked_experts;
mod stored;
mod stored_loader;
pub mod thread_pool;
pub mod tokenizer;
pub mod turns;
mod weight_files;
mod weight_loader;
mod weight_writer;

pub use adapted::AdaptedBase;
pub use adapted_matrix::AdaptedMatrix;
pub use characters::{CHARACTERS, characters};
pub use chat::{ChatMessage, ChatOptions, ChatTemplate};
pub use config::{Architecture, Config, Head, Reduction, Sizes};
pub use decoder::{
    Decoder, GradientSink, Gradients, KvCache, LayerSource, Pack, PackError, PackPass, PassLayers,
    Quantization, Recompute, RoutedTokens, StepSequence,
};
pub use directory::{DESCRIPTION_FILES, ModelDirectory};
pub use error::ModelError;
pub use frozen_parameters::{FrozenParameters, stored_bytes};
pub use layer::{
    AttentionSpec, DeltaNetFiles, DeltaNetSpec, ExpertActivation, ExpertSpec, FeedForward, LatentSpec,
    LayerSpec, Norm, QueryKeyNorm, RouterKind, SwigluClamp, TargetModule,
};
pub use low_rank::{FactorPair, LowRank};
pub use model_shard::{ModelShard, ShardPiece, ShardPlace, stages};
pub use ops::experts::ANY_EXPERT;
pub use ops::head::{Prediction, PredictionGradient, SampleSlopes, Target, TrainedTargets, logits_bytes};
pub use parameters::{Layout, ParameterSpec, Parameters, Unit};
pub use pass_ranks::{ContextExchange, PassRanks, TensorRanks, failed_call};
pub use resident::{MemoryBudget, Placement, ResidentParameters};
pub use rotary::{RopeScaling, Rotary, Yarn};
pub use sampling::{Draw, Sampling, TokenLogprob, logprobs_of, most_likely};
pub use scorer::{LoadedScorer, PromptCompletion, ScoreError, SequenceScorer};
pub use shared_sampler::{SamplerRanks, SharedSampler};
pub use thread_pool::{CoreReservation, SharedCores, ThreadPool};
pub use tokenizer::{DecodeStream, SpecialTokens, Tokenizer};
pub use turns::{DeviceTurn, TurnTimeout};
pub use weight_writer::WeightDtype;
