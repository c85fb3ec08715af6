//! Errors of model directories: the file, the key or tensor, and the remedy.
//!
//! Invariant: every variant carries the evidence that a user needs to act. Misuse by other crates, such as a token id beyond
//! the vocabulary, is not covered: it panics.

use std::path::PathBuf;

/// Failure to read, understand or write the files of a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file or directory cannot be read.
    #[error("cannot read {}: {source}; check that it is there and complete, and that you may read it", path.display())]
    Read {
        /// What was to be read.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A file or directory cannot be written.
    #[error("cannot write {}: {source}; check the free space and the permissions", path.display())]
    Write {
        /// What was to be written.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A file is not the JSON that it should be.
    #[error("{} is not valid: {reason}; fetch the file again or correct it there", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong, with line and column.
        reason: String,
    },
    /// A file is not the one that was written.
    #[error(
        "{} is damaged: {reason} ({}); restore it from a copy, or use an earlier checkpoint. A file that was changed on \
         purpose is accepted without the manifest",
        path.display(),
        manifest.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What differs.
        reason: String,
        /// The file that contains its digest.
        manifest: PathBuf,
    },
    /// A key that has no default is not there.
    #[error("{} has no key `{key}`, which every model of this kind needs", path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A key holds something that makes no sense.
    #[error("{}: `{key}` is {found}, expected {expected}", path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value as JSON.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A key asks for something that exists but that the decoder cannot compute.
    #[error("{}: `{key}` is {found}, which is not supported; supported: {supported}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value as JSON.
        found: String,
        /// What the decoder can compute.
        supported: String,
    },
    /// A directory holds neither `model.safetensors` nor an index of shards.
    #[error(
        "{} has neither model.safetensors nor model.safetensors.index.json; convert other weight formats with \
         transformers' save_pretrained",
        dir.display()
    )]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// A file is not a whole safetensors file.
    #[error(
        "{} is not a whole safetensors file: {reason} ({len} bytes); it was probably cut off: fetch it again",
        path.display()
    )]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// Its length in bytes.
        len: u64,
    },
    /// A tensor that another process sent is not that of the model.
    #[error(
        "tensor {tensor} {shape:?} came from another process as {found}; start the same rlrun for all ranks"
    )]
    Received {
        /// Its name.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
        /// What came.
        found: String,
    },
    /// A GGUF file is damaged, or not supported.
    #[error("{} cannot be used as a model: {reason}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and the remedy.
        reason: String,
    },
    /// The index names a shard that is not there.
    #[error("{} names the shard {shard}, which is not beside it; fetch the shard again", index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// File name of the shard.
        shard: String,
    },
    /// Parameters of the model are not in the files.
    #[error(
        "{} lacks {count} of the tensors that its config.json calls for: {names}; the weights and config.json are not \
         of the same model",
        path.display()
    )]
    MissingTensors {
        /// The weight file, index or directory.
        path: PathBuf,
        /// How many are missing.
        count: usize,
        /// The first few names.
        names: String,
    },
    /// The files hold tensors that the model has no place for.
    #[error(
        "{} holds {count} tensors that its config.json has no place for: {names}; left out, the model would compute \
         something else, so remove them or correct config.json",
        path.display()
    )]
    UnexpectedTensors {
        /// The weight file, index or directory.
        path: PathBuf,
        /// How many there are.
        count: usize,
        /// The first few names.
        names: String,
    },
    /// A tensor has another shape than config.json implies.
    #[error(
        "{}: tensor {tensor} has shape {found:?}, but config.json implies {expected:?}; the weights and config.json \
         are not of the same model",
        path.display()
    )]
    Shape {
        /// The weight file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The shape that config.json implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a number format that is not read.
    #[error(
        "{}: tensor {tensor} is stored as {found}; supported: F32, BF16, F16 (convert the model with transformers)",
        path.display()
    )]
    Dtype {
        /// The weight file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// Its number format.
        found: String,
    },
    /// Weights that stay as they are stored, in a model that sums as trees.
    #[error(
        "{}: weights that stay quantised are dequantised some rows at a time, and the sums of the model are trees over all of \
         them; use the reduction \"chain\"",
        path.display()
    )]
    TreesOfBlocks {
        /// The model.
        path: PathBuf,
    },
    /// A tensor of quantised numbers cannot be read.
    #[error("{}: tensor {tensor} cannot be read: {reason}; fetch the model again, or one in bf16", path.display())]
    Blocks {
        /// The weight file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// Weights are infinite or not a number.
    #[error(
        "{}: {count} weights are infinite or not a number, the first in tensor {tensor}; fetch the model again, or go \
         back to an earlier checkpoint",
        path.display()
    )]
    NonFinite {
        /// The weight file, or the place that it was to be written to.
        path: PathBuf,
        /// The first tensor with such a weight.
        tensor: String,
        /// How many weights of the model.
        count: usize,
    },
    /// A flat buffer does not have the length of the layout.
    #[error("a buffer of {found} weights was given for a model of {expected}")]
    Length {
        /// Weights of the model.
        expected: usize,
        /// Weights in the buffer.
        found: usize,
    },
    /// The model cannot be shared by so many tensor-parallel ranks.
    #[error("a tensor degree of {degree} is not possible for this model: {reason}")]
    Shard {
        /// Ranks that would share it.
        degree: usize,
        /// What is in the way, and what is possible.
        reason: String,
    },
    /// A rank of a sampler failed in a step.
    #[error(
        "rank {rank} of the {degree} that share the sampler's weights failed: {reason}; resume the run from its last checkpoint"
    )]
    SamplerRank {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        degree: usize,
        /// What happened.
        reason: String,
    },
    /// The layers of the model cannot be divided among so many stages of a pipeline.
    #[error(
        "a pipeline degree of {stages} is not possible for this model: its {layers} layers are divided among at most \
         {layers} stages, of one layer each"
    )]
    Stages {
        /// Stages that would divide them.
        stages: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// The target of a write is already there.
    #[error("{} exists already and is never overwritten; remove it or choose another directory", path.display())]
    Exists {
        /// The target.
        path: PathBuf,
    },
    /// `tokenizer.json` cannot be used.
    #[error("{} is not a usable tokenizer: {reason}; fetch it again, or save the tokenizer with transformers", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The error of the tokenizer library.
        reason: String,
    },
    /// The tokenizer has ids, those of added tokens aside, that the embedding has no row for.
    #[error(
        "{}: token {token:?} has id {id}, but config.json says vocab_size {vocab_size}; tokenizer and weights are not \
         of the same model",
        path.display()
    )]
    Vocabulary {
        /// The tokenizer file.
        path: PathBuf,
        /// The token with the highest of these ids.
        token: String,
        /// Its id.
        id: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The chat template cannot be used at all.
    #[error("the chat template of {} does not compile: {reason}; correct it there", path.display())]
    Template {
        /// The file it came from.
        path: PathBuf,
        /// What is wrong, with the line of the template.
        reason: String,
    },
    /// The chat template refused or failed on a conversation.
    #[error("the chat template of {} did not take messages with the roles {roles}: {reason}", path.display())]
    Render {
        /// The file it came from.
        path: PathBuf,
        /// Roles of the messages, in order.
        roles: String,
        /// The error of the template.
        reason: String,
    },
    /// Messages were given to a model that has no chat template.
    #[error(
        "{} has no chat template, so messages cannot be turned into a prompt; put a chat_template.jinja there, use an \
         instruction-tuned model, or give the prompts as text",
        dir.display()
    )]
    NoTemplate {
        /// The model directory.
        dir: PathBuf,
    },
    /// A prompt cannot be turned into tokens.
    #[error("cannot tokenize a text of {bytes} bytes that starts with {start:?}: {reason}")]
    Encode {
        /// Length of the text in bytes.
        bytes: usize,
        /// Its first characters.
        start: String,
        /// The error of the tokenizer.
        reason: String,
    },
    /// Tokens cannot be turned into text.
    #[error("cannot decode {tokens} tokens: {reason}")]
    Decode {
        /// Number of tokens.
        tokens: usize,
        /// The error of the tokenizer.
        reason: String,
    },
}
