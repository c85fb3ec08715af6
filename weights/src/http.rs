//! The hub for other processes, and the weights themselves for other hosts.
//!
//! | route under `/v1/weights` | does |
//! |---|---|
//! | `POST subscribers` | gives a name a seat; answers the number of the connection, which all calls carry |
//! | `DELETE subscribers` | leaves |
//! | `GET newest` | the newest version that is newer than `after`, as soon as there is one, for up to `wait_ms` |
//! | `GET full` | a version in full, as long as it is the newest; 410 otherwise |
//! | `GET delta` | what changed after the version `from`; 410 if that is gone, or in full it would be less |
//! | `POST receipts` | says what a sampler serves |
//! | `GET lags` | what every subscriber serves |
//!
//! Weights are frames (`weights/src/frame.rs`); everything else is JSON, errors are `application/problem+json`
//! with a stable `code`. Who may call, and over which connections, is up to the server that the routes are mounted in.
//!
//! Invariants:
//! - Nothing waits on a thread of the server: calls that wait do so as tasks, and for no longer than `MAX_WAIT`.
//! - Weights are sent from where they lie; what a call sends beside them is bounded.
//! - A sampler serves nothing that it has not digested.
//!
//! - `routes`: the server's side; [`remote`]: a sampler's; `plane`: how it gets weights; `line`: how it asks
//! - `wire`: requests and answers

mod client;
mod receiver;
pub mod remote;
mod routes;
mod wire;

pub use remote::{RemoteConfig, RemoteSubscriber};
pub use routes::router;

use std::time::Duration;

/// The longest that a call waits at the server.
const MAX_WAIT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
