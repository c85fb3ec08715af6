//! Coordinators and islands over real sockets, with files that survive.

mod compression;
mod coordinator;
mod outer;
mod served;

use std::path::Path;
use std::time::Duration;

use islands::coordinator::new_id;
use islands::{Coordinator, CoordinatorConfig, GradientCompression, IslandTerms, OuterOptimizer};

/// A wait that no test reaches.
const SOON: Duration = Duration::from_secs(60);

/// Terms of `values` values in `fragments` fragments, with one local step for each.
fn terms(values: u64, fragments: u64, compression: GradientCompression) -> IslandTerms {
    let ends = (1..=fragments).map(|index| values * index / fragments).collect();
    IslandTerms { model: "a".repeat(64), local_steps: fragments, compression, ends }
}

fn config(dir: &Path, deadline: Duration) -> CoordinatorConfig {
    CoordinatorConfig {
        dir: dir.to_owned(),
        // The outer weights move by the mean gradient.
        optimizer: OuterOptimizer { rate: 1.0, momentum: 0.0 },
        deadline,
        first_islands: 1,
        max_islands: 4,
        max_bytes: 1 << 20,
    }
}

/// The values of a payload of f32.
fn values(payload: &[u8]) -> Vec<f32> {
    GradientCompression::None.decode(payload, payload.len() / 4).unwrap()
}

/// A coordinator in `dir`.
fn open(dir: &Path, deadline: Duration) -> Coordinator {
    Coordinator::open(config(dir, deadline)).unwrap()
}

/// The id of a run, different for each call.
fn run() -> String {
    new_id()
}
