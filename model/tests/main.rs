//! Tests of the crate from outside, in one binary.
//!
//! Invariant: whatever is compared with another implementation is compared on the directories of `tests/goldens`, which
//! transformers wrote. Nothing here trains or needs anything beyond the repository.

mod adapters;
mod common;
mod context;
mod context_memory;
mod decoding;
mod derivative;
mod expert_files;
mod expert_ranks;
mod experts;
mod files;
mod frozen;
mod gguf;
mod gguf_tokenizer;
mod layers;
mod low_rank;
#[cfg(feature = "emulator")]
mod on_device;
mod oracle;
mod parallel;
mod parity;
mod recurrent;
mod scorers;
mod shared_sampler;
