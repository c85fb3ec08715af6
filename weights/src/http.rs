//! The hub over HTTP for other processes, with the weights for other hosts.
//!
//! | route under `/v1/weights` | does |
//! |---|---|
//! | `POST subscribers` | registers a subscriber, replacing one of the same name; answers the connection id, which all calls carry |
//! | `DELETE subscribers` | unregisters |
//! | `GET newest` | the newest version that is newer than `after`, as soon as there is one, for up to `wait_ms` |
//! | `GET full` | a version in full, as long as it is the newest; 410 otherwise |
//! | `GET delta` | the delta from the version `from`; 410 if there is none, or the full weights are smaller |
//! | `POST newest` | the same, after a receipt |
//! | `POST receipts` | receipt: which version a sampler serves |
//! | `POST relays` | the caller passes versions on at this address |
//! | `POST fallbacks` | the relay of the caller failed; it fetches the version from the hub |
//! | `GET lags` | the served version of every subscriber |
//!
//! Weights are frames (`weights/src/frame.rs`); everything else is JSON, errors are `application/problem+json`
//! with a stable `code`. Authorization and TLS belong to the server that the routes are mounted in.
//!
//! With relays the hub sends a version to a few subscribers, and they send it to others (the tree is in
//! `weights/src/hub/tree.rs`). A relay serves `full` and `delta` as a hub does, with `wait_ms` for a version that it is about to
//! receive. Announcements, digests and receipts are between the hub and each subscriber.
//!
//! Invariants:
//! - Waiting calls are tasks and block no thread of the server. They wait at most `MAX_WAIT`.
//! - Weights are sent from memory in place; the other memory of a call is bounded.
//! - A sampler serves no weights without having computed their digest, and a relay passes no others on.
//!
//! - `routes`: the server; [`remote`]: the subscriber; `receiver`: its weights; `client`: its requests
//! - [`relay`]: a subscriber that passes versions on; `upstream`: where one fetches, and what happens when a relay fails
//! - `wire`: requests and answers

mod client;
mod receiver;
pub mod relay;
pub mod remote;
mod routes;
mod upstream;
mod wire;

pub use relay::{RelayConfig, RelaySubscriber};
pub use remote::{RemoteConfig, RemoteSubscriber};
pub use routes::router;

use std::time::Duration;

/// Longest wait of a call at the server.
const MAX_WAIT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
