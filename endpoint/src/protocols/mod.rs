//! The protocols that clients speak.
//!
//! Invariant: they translate and decide nothing: every protocol becomes the same request to the same sampler.
//!
//! - `chat`: OpenAI's `/v1/chat/completions`; `completions`: `/v1/completions`; `responses`: `/v1/responses`
//! - `messages`: Anthropic's `/v1/messages`; `generate`: vLLM's `/inference/v1/generate`; `sglang`: SGLang's `/generate`
//! - `parts`: fields that OpenAI's answers share; `plain`: routes that do not sample

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod generate;
pub(crate) mod messages;
mod parts;
pub(crate) mod plain;
pub(crate) mod responses;
pub(crate) mod sglang;
