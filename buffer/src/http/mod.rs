//! The buffer over HTTP: a [`Server`] in front of a [`Buffer`](crate::Buffer), and a [`Client`] that is a
//! [`Producer`](crate::Producer) and a [`Consumer`](crate::Consumer) like the buffer itself.
//!
//! # Layout
//! - `server`: connections, from the listener to the last answer; `tls`: certificates
//! - `routes`: what is asked of the buffer; `auth`: who may ask; `events`: what happens, as a stream
//! - `wire`: requests and answers; `body`: their bytes; `cost`: what those take decoded; `problem`: errors
//! - `state`: the buffer that is served, also after its storage failed; `limits`: what requests may take
//! - `openapi`: the document of all this, made from the routes; `metrics`: what was counted
//! - `client`: the other side
//!
//! # Invariants
//! - Everything has a limit in [`ServerLimits`]: what a client sends, how long it takes, how many there are.
//! - What is answered with success is as durable as the buffer makes it.

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
mod tls;
mod wire;
mod write_deadline;

pub use auth::{Role, TokenError, Tokens};
pub use client::{Client, ClientConfig};
pub use limits::ServerLimits;
pub use server::{Reopen, Server, ServerConfig, ServerError, StorageNotice};
pub use state::{OnRefused, RefusedGroup};
pub use tls::{Tls, TlsError};
