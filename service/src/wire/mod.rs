//! Tinker's wire formats: protobuf and JSON, as the SDKs 0.24.1 and 0.38.0 write and read them.
//!
//! # Layout
//! - [`protobuf`]: the messages; `scan`: what they would take in memory; `passes`: requests for passes, in both encodings
//! - `tensors`: dense and sparse tensors; `json`: bodies; `sampling`: requests for completions
//! - `results`: what requests ended in, in both encodings; `numbers`: JSON with numbers that are not finite
//!
//! Invariant: no body panics. A body of `n` bytes takes memory in proportion to `n`, or to [`MAX_ELEMENTS`] for sparse tensors. A
//! field that is not known is refused by its name, or by its number in protobuf, as it may change a result.

mod json;
mod numbers;
mod passes;
pub mod protobuf;
mod results;
mod sampling;
mod scan;
mod tensors;
#[cfg(test)]
mod tests;

pub(crate) use json::{
    CreateModelBody, HeartbeatBody, LoadCall, ModelBody, OptimStepBody, RequestBody, RetrieveBody,
    SamplerSaveBody, SamplingSessionBody, SaveWeightsBody, WeightsInfoBody, load_from_json, read_json,
    read_request,
};
pub(crate) use passes::{forward_from_json, pass_from_json, pass_from_protobuf};
pub(crate) use results::{ResultBody, ResultEncoding, encode_failure, encode_outcome, encode_pending};
pub(crate) use sampling::{SampleCall, sample_from_json};

/// Most numbers in all tensors of a request, after sparse ones have been made dense.
pub const MAX_ELEMENTS: usize = 1 << 24;
/// Most memory that the messages of a protobuf body may take beside its bytes, bytes.
pub const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// Why a body is refused: it is not what the route reads, or asks for something that is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WireError(pub String);

/// A request of a model. Clients count its number as used, also where its content is refused.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelRequest<T> {
    pub(crate) model_id: String,
    /// From 1.
    pub(crate) seq_id: u64,
    /// What is asked for, or why it cannot be.
    pub(crate) content: Result<T, WireError>,
}

/// Refuses a body.
fn refuse<T>(message: impl Into<String>) -> Result<T, WireError> {
    Err(WireError(message.into()))
}
