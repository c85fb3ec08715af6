//! The messages of package `tinker_public`, with the field numbers of the descriptor in tinker's SDK 0.38.0.
//!
//! Invariant: `bytes` of numbers are little-endian arrays. Messages are decoded only after `scan` has counted them.

use std::collections::BTreeMap;

/// Media type of these messages.
pub const MEDIA_TYPE: &str = "application/x-protobuf";

/// Type of the numbers of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ElementType {
    /// None was given.
    Unspecified = 0,
    /// f32.
    Float32 = 1,
    /// i64.
    Int64 = 2,
    /// i32.
    Int32 = 3,
    /// The upper half of an f32.
    Bfloat16 = 4,
}

/// A request for a pass, `ForwardBackwardRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PassMessage {
    /// The model.
    #[prost(string, tag = "1")]
    pub model_id: String,
    /// Number of the request, from 1.
    #[prost(int32, tag = "2")]
    pub seq_id: i32,
    /// The sequences.
    #[prost(message, repeated, tag = "3")]
    pub data: Vec<DatumMessage>,
    /// Name of the loss.
    #[prost(string, tag = "4")]
    pub loss_fn: String,
    /// Settings of the loss that are numbers, for servers that do not know [`Self::loss_fn_config_v2`].
    #[prost(btree_map = "string, double", tag = "5")]
    pub loss_fn_config: BTreeMap<String, f64>,
    /// Whether there is no backward pass.
    #[prost(bool, tag = "6")]
    pub forward_only: bool,
    /// Settings of the loss.
    #[prost(btree_map = "string, message", tag = "7")]
    pub loss_fn_config_v2: BTreeMap<String, SettingMessage>,
}

/// A setting of a loss, `LossConfigValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SettingMessage {
    /// Its value.
    #[prost(oneof = "SettingKind", tags = "1, 2")]
    pub value: Option<SettingKind>,
}

/// What a setting is.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum SettingKind {
    /// A number.
    #[prost(double, tag = "1")]
    Number(f64),
    /// A text.
    #[prost(string, tag = "2")]
    Text(String),
}

/// A sequence, `Datum`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DatumMessage {
    /// Its input, in pieces.
    #[prost(message, repeated, tag = "1")]
    pub model_input: Vec<ChunkMessage>,
    /// Inputs of the loss by name.
    #[prost(btree_map = "string, message", tag = "2")]
    pub loss_fn_inputs: BTreeMap<String, TensorMessage>,
    /// Where the input comes from, piece by piece.
    #[prost(message, repeated, tag = "3")]
    pub model_input_spans: Vec<SpanMessage>,
    /// Where the targets come from, piece by piece.
    #[prost(message, repeated, tag = "4")]
    pub loss_fn_input_spans: Vec<SpanMessage>,
}

/// A piece of an input, `Chunk`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ChunkMessage {
    /// What it is.
    #[prost(oneof = "ChunkKind", tags = "1, 2, 3")]
    pub kind: Option<ChunkKind>,
}

/// What a piece of an input is.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum ChunkKind {
    /// Tokens.
    #[prost(message, tag = "1")]
    EncodedText(TextMessage),
    /// An image.
    #[prost(message, tag = "2")]
    Image(ImageMessage),
    /// Sound.
    #[prost(message, tag = "3")]
    Dmel(DmelMessage),
}

/// Tokens, `EncodedTextChunk`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TextMessage {
    /// `[tokens]` i32.
    #[prost(bytes = "vec", tag = "1")]
    pub tokens: Vec<u8>,
}

/// An image, `ImageChunk`; its other fields are not read.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImageMessage {
    /// Such as `png`.
    #[prost(string, tag = "2")]
    pub format: String,
}

/// Sound, `DmelChunk`; its field is not read.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct DmelMessage {}

/// Where consecutive tokens come from, `ProvenanceSpan`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SpanMessage {
    /// Which of a request's tokens they are.
    #[prost(oneof = "SpanKind", tags = "1, 2")]
    pub kind: Option<SpanKind>,
}

/// Which tokens of a sampling request others are.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum SpanKind {
    /// Of its prompt.
    #[prost(message, tag = "1")]
    Prompt(SpanRange),
    /// Of a sampled sequence.
    #[prost(message, tag = "2")]
    Sampled(SpanRange),
}

/// Tokens of a sequence, `PromptProvenanceSpan` and `SampledProvenanceSpan`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SpanRange {
    /// The sequence.
    #[prost(string, tag = "1")]
    pub sequence_id: String,
    /// The first one.
    #[prost(int64, tag = "2")]
    pub offset: i64,
    /// How many.
    #[prost(int64, tag = "3")]
    pub length: i64,
}

/// A tensor, `Tensor`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorMessage {
    /// Its numbers.
    #[prost(oneof = "TensorLayout", tags = "1, 2")]
    pub layout: Option<TensorLayout>,
    /// Their type.
    #[prost(enumeration = "ElementType", tag = "3")]
    pub dtype: i32,
    /// Its shape.
    #[prost(int64, repeated, tag = "4")]
    pub shape: Vec<i64>,
}

/// How the numbers of a tensor are stored.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum TensorLayout {
    /// All, in row-major order.
    #[prost(bytes, tag = "1")]
    Dense(Vec<u8>),
    /// Compressed rows; a number that is not listed is 0.
    #[prost(message, tag = "2")]
    SparseCsr(CsrMessage),
}

/// Compressed rows, `SparseCsr`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CsrMessage {
    /// `[listed]` numbers.
    #[prost(bytes = "vec", tag = "1")]
    pub values: Vec<u8>,
    /// `[rows + 1]` i64: where each row begins.
    #[prost(bytes = "vec", tag = "2")]
    pub crow_indices: Vec<u8>,
    /// `[listed]` i64: their columns.
    #[prost(bytes = "vec", tag = "3")]
    pub col_indices: Vec<u8>,
}

/// What a pass computed, `ForwardBackwardOutput`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PassOutputMessage {
    /// Name of the records' type.
    #[prost(string, tag = "1")]
    pub loss_fn_output_type: String,
    /// Outputs of all sequences.
    #[prost(message, repeated, tag = "2")]
    pub loss_fn_outputs: Vec<RecordMessage>,
    /// Metrics by `name:reduction`.
    #[prost(btree_map = "string, double", tag = "3")]
    pub metrics: BTreeMap<String, f64>,
}

/// Outputs of several sequences, `ArrayRecord`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RecordMessage {
    /// Name of its type.
    #[prost(string, tag = "1")]
    pub type_tag: String,
    /// Outputs by name.
    #[prost(btree_map = "string, message", tag = "2")]
    pub fields: BTreeMap<String, BatchedMessage>,
    /// Number of sequences.
    #[prost(int64, tag = "3")]
    pub num_datums: i64,
}

/// One output of several sequences, `BatchedTensor`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BatchedMessage {
    /// Numbers of one sequence after the other.
    #[prost(bytes = "vec", tag = "1")]
    pub data: Vec<u8>,
    /// `[sequences + 1]` i64: where each sequence begins, bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub offsets: Vec<u8>,
    /// Type of the numbers.
    #[prost(enumeration = "ElementType", tag = "3")]
    pub dtype: i32,
    /// Shape of the numbers of a position; empty for one number.
    #[prost(int64, repeated, tag = "4")]
    pub trailing_shape: Vec<i64>,
}

/// What was sampled, `SampleResponse`. Field 6, tokens that were drawn at positions of the prompt, is not served.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SampleMessage {
    /// The completions.
    #[prost(message, repeated, tag = "1")]
    pub sequences: Vec<SequenceMessage>,
    /// `[P]` f32, NaN where none was computed.
    #[prost(bytes = "vec", optional, tag = "2")]
    pub prompt_logprobs: Option<Vec<u8>>,
    /// `[P]` most likely tokens.
    #[prost(message, optional, tag = "3")]
    pub topk_prompt_logprobs: Option<TopkMessage>,
    /// Prompt tokens whose keys and values were in the cache.
    #[prost(int32, tag = "4")]
    pub prompt_cache_hit_tokens: i32,
    /// `[P - 1, K]` f32 of the tokens that the request named.
    #[prost(message, optional, tag = "5")]
    pub target_prompt_logprobs: Option<TensorMessage>,
}

/// A completion of `C` tokens, `SampledSequence`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SequenceMessage {
    /// 0: a stop rule ended it; 1: its length did.
    #[prost(int32, tag = "1")]
    pub stop_reason: i32,
    /// `[C]` i32.
    #[prost(bytes = "vec", tag = "2")]
    pub tokens: Vec<u8>,
    /// `[C]` f32.
    #[prost(bytes = "vec", optional, tag = "3")]
    pub logprobs: Option<Vec<u8>>,
    /// `[C]` most likely tokens.
    #[prost(message, optional, tag = "4")]
    pub topk_sampled_logprobs: Option<TopkMessage>,
}

/// The most likely tokens of positions, `TopkLogprobs`. A cell without one has token 0 and log-probability -99999.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TopkMessage {
    /// `[length, k]` i32.
    #[prost(bytes = "vec", tag = "1")]
    pub token_ids: Vec<u8>,
    /// `[length, k]` f32.
    #[prost(bytes = "vec", tag = "2")]
    pub logprobs: Vec<u8>,
    /// Tokens per position.
    #[prost(uint32, tag = "3")]
    pub k: u32,
    /// Positions.
    #[prost(uint32, tag = "4")]
    pub length: u32,
}
