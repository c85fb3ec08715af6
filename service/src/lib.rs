//! The trainer as a service: tinker's API on one's own machine, and the same operations as a Rust library.
//!
//! # Layout
//! - [`data`]: what is trained on and what comes out of it; [`outcome`]: what a request of the service ends in
//! - [`base`]: base models, whose frozen weights adapters share; [`trained`]: a model in training; `losses`: what it is trained by
//! - [`sampling`]: samplers, with adapters of many models over one base; [`model_sampler`]: one of a single model; [`fair_queue`]: users take turns
//! - [`training`]: the service without its listener: sessions, models, samplers, futures
//! - [`wire`]: tinker's requests and results in protobuf and JSON; [`http`]: its routes; [`server`]: the listener
//!
//! # Invariants
//! - Requests of a model run in the order of their `seq_id`. A repeated request gets the answer of the first one.
//! - What waits is bounded, has a deadline, and waits in turn with the requests of other users.

pub mod base;
mod clock;
pub mod data;
pub mod fair_queue;
pub mod http;
mod losses;
pub mod model_sampler;
pub mod outcome;
pub mod sampling;
pub mod server;
#[cfg(test)]
mod tiny_model;
pub mod trained;
pub mod training;
pub mod wire;
