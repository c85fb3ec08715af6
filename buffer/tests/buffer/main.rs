//! The buffer from outside: one conformance suite for every store, the journal over restarts, and under kill -9.

mod conformance;
mod crash;
mod formats;
mod http;
mod journal;
#[cfg(feature = "postgres")]
mod postgres;
mod rewind;
mod served;

use buffer::conformance::fixtures::{NOW, SOON, TRAINER, admit, config, generate, group, lease, leased, v};
