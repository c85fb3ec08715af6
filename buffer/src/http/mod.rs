//! The buffer over HTTP: a [`Server`] in front of a [`Buffer`](crate::Buffer), and a [`Client`] that is a
//! [`Producer`](crate::Producer) and a [`Consumer`](crate::Consumer) like the buffer itself.
//!
//! # Layout
//! - `server`: connections, from the listener to the last answer
//! - `routes`: the operations; `auth`: roles and tokens; `events`: the event stream
//! - `wire`: requests and answers; `body`: their bytes; `cost`: their decoded size; `problem`: errors
//! - `state`: the served buffer, also after its storage failed; `limits`: what requests may take
//! - `openapi`: the document, made from the routes; `metrics`: for Prometheus
//! - `client`: the client
//!
//! # Invariants
//! - Everything has a limit in [`ServerLimits`]: sizes, durations and numbers of what clients send.
//! - A successful answer is as durable as the buffer makes it.

mod auth;
mod body;
mod client;
mod cost;
mod events;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod limits;
mod metrics;
mod openapi;
mod problem;
mod routes;
mod server;
mod state;
mod wire;

pub use auth::{Role, TokenError, Tokens};
pub use client::{Client, ClientConfig};
pub use connect::tls::{Tls, TlsError};
pub use limits::ServerLimits;
pub use server::{Reopen, ServedBuffer, Server, ServerConfig, ServerError, StorageNotice};
pub use state::{OnRefused, RefusedGroup};
