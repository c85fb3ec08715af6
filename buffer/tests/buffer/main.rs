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
mod waits;

use buffer::conformance::fixtures::{NOW, SOON, TRAINER, admit, config, generate, group, lease, leased, v};

/// The number in a variable, which `tests/run --all` sets, or else `default`.
fn number(variable: &str, default: u64) -> u64 {
    std::env::var_os(variable).map_or(default, |number| number.to_str().unwrap().parse().unwrap())
}
