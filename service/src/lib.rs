//! The trainer as a service: tinker's API on one's own machine, and the same operations as a Rust library.
//!
//! # Layout
//! - [`data`]: what is trained on and what comes out of it; [`outcome`]: what a request of the service ends in
//! - [`training`]: the service without its listener: sessions, models, samplers, futures
//! - [`wire`]: tinker's requests and results in protobuf and JSON; [`http`]: its routes; [`server`]: the listener
//!
//! # Invariants
//! - Requests of a model run in the order of their `seq_id`. A repeated request gets the answer of the first one.
//! - What waits is bounded, has a deadline, and waits in turn with the requests of other users.

pub mod data;
pub mod http;
pub mod outcome;
pub mod server;
pub mod training;
pub mod wire;
