//! The policy as an endpoint: OpenAI's and Anthropic's protocols over the sampler that trains.
//!
//! Agents that exist already speak to a client of OpenAI or Anthropic. This crate answers them with completions of the policy,
//! with the tokens, log-probabilities and policy versions that training needs. Requests go to a
//! [`RequestHandle`](rollout::RequestHandle): in a run, to the sampler that trains.
//!
//! # Layout
//! - [`server`]: routes and connections; `protocol`: the path of a request; `protocols`: what each protocol reads and writes
//! - [`service`]: what all routes call; [`answer`]: what was sampled, checked and as text; `sse`: streams
//! - [`conversation`]: messages to tokens; [`tools`]: calls in what the model writes; `text`: text of a stream
//! - [`fields`], [`parameters`]: fields of a request, taken one by one; [`errors`]: errors in both forms
//! - [`auth`], [`limits`], `replay`, `metrics`: keys, bounds, repeated requests, numbers
//! - [`sessions`]: the interface to sessions of agents; [`session`]: these sessions, and the rows that are trained on
//!
//! # Invariants
//! - What a request asks for is honoured or refused by name, never ignored.
//! - A client that leaves frees its pages at the next decode step.
//! - A repeated request gets the answer of the first one: nothing is sampled twice.

pub mod answer;
pub mod auth;
pub mod conversation;
pub mod errors;
pub mod fields;
pub mod limits;
mod metrics;
pub mod parameters;
mod protocol;
mod protocols;
mod replay;
pub mod server;
pub mod service;
pub mod session;
pub mod sessions;
mod sse;
mod text;
pub mod tools;

pub use answer::{Choice, Delta, RunningAnswer, StopMatch, Usage};
pub use auth::KeyDigest;
pub use conversation::{ChatRenderer, Conversation};
pub use errors::ApiError;
pub use limits::EndpointLimits;
pub use server::{EndpointError, EndpointServer};
pub use service::{EndpointConfig, Generation, ServedAdapter, ServedPolicy, Service};
pub use sessions::{SessionRegistry, SessionTurn};
