//! The decoder's operations one by one, on one thread.
//!
//! Invariant: the functions that sampling and training call, on random numbers of the model's shapes. A repeat calls one
//! often enough for the clock, with operands that its caches hold from the call before, as far as they fit.

use std::time::Instant;

use model::Config;
use model::bench::{Operation, operations};
use rlrun::failure::Failure;
use serde_json::json;

use crate::args::OpsBenchArgs;
use crate::cost::{Cost, Shape};
use crate::measure::Work;
use crate::suite::model_name;

/// Least time of a repeat, seconds.
const REPEAT: f64 = 5e-3;

/// Times every operation for every number of rows.
///
/// # Errors
/// A model that cannot be used.
pub fn work(args: &OpsBenchArgs) -> Result<Vec<Work>, Failure> {
    let config = Config::load(&args.model)?;
    let parameters = Shape::new(&config).parameters as usize;
    let mut all = Vec::new();
    for rows in &args.rows {
        for mut operation in operations(&config, *rows)? {
            all.push(Work {
                name: "ops",
                model: model_name(&args.model),
                parameters,
                settings: vec![("op", json!(operation.name)), ("rows", json!(rows))],
                seconds: time(&mut operation, args.repeats)?,
                tokens: *rows as f64,
                cost: Cost { flops: operation.flops, bytes: operation.bytes },
                further: Vec::new(),
                run: None,
            });
        }
    }
    Ok(all)
}

/// Seconds of one call, `repeats` times.
fn time(operation: &mut Operation, repeats: usize) -> Result<Vec<f64>, Failure> {
    // Finds out how many calls fill a repeat, and warms up meanwhile.
    let mut calls = 1;
    while run(operation, calls)? < REPEAT {
        calls *= 2;
    }
    (0..repeats).map(|_| Ok(run(operation, calls)? / calls as f64)).collect()
}

/// Seconds of `calls` calls.
fn run(operation: &mut Operation, calls: usize) -> Result<f64, Failure> {
    let clock = Instant::now();
    for _ in 0..calls {
        operation.run()?;
    }
    Ok(clock.elapsed().as_secs_f64())
}
