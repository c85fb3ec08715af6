//! Simulated rollout workers for a served run: what many samplers cost the run, and how versions reach them.
//!
//! A simulated worker joins, sends heartbeats, asks for slots, claims groups and finalizes them, and receives, digests and
//! confirms weights as `rlrun worker rollout` does, with the clients that workers use. Its completions are random tokens that
//! take a time and no processor. `benches/samplers.py` starts the run and compares numbers of workers.
//!
//! Invariant: nothing is simulated towards the run: every request is that of a worker.
//!
//! # Fields of the object
//! | field | is |
//! |---|---|
//! | `measure`, `workers`, `relays` | `samplers`; how many joined, and how many of them pass weights on |
//! | `groups`, `requests_for_slots` | groups that were finalized; requests for slots, granted or not |
//! | `versions` | versions that all workers received |
//! | `all_have_it_s`, `all_have_it_max_s` | from the first request for a version until the last worker had it, digested: median and longest |
//! | `received_bytes` | bytes of weights that all workers received |

mod worker;

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use rlrun::failure::Failure;
use serde_json::json;

use crate::args::SamplersBenchArgs;
use crate::measure::median;
use worker::{Counts, SimulatedWorker, VersionArrival};

/// Joins the run with all workers until it ends, then writes what they have seen.
///
/// # Errors
/// A run that cannot be reached or refuses a worker.
pub fn run(args: &SamplersBenchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let ready = Arc::new(Barrier::new(args.workers));
    let done = std::thread::scope(|scope| {
        let work = |index: usize| {
            let (stop, ready) = (&stop, &ready);
            // Relays subscribe first: they are the inner nodes of the tree.
            let joined = SimulatedWorker::join(args, index, stop);
            if joined.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            move || -> Result<(Counts, Vec<VersionArrival>), Failure> {
                ready.wait();
                joined?.run(stop)
            }
        };
        let threads: Vec<_> = (0..args.workers).map(|index| scope.spawn(work(index))).collect();
        let ends = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ends.collect::<Result<Vec<_>, Failure>>()
    })?;
    let mut arrivals: BTreeMap<u64, Vec<VersionArrival>> = BTreeMap::new();
    let mut all = Counts::default();
    for (counts, seen) in done {
        all.groups += counts.groups;
        all.asked += counts.asked;
        seen.into_iter().for_each(|arrival| arrivals.entry(arrival.version).or_default().push(arrival));
    }
    let bytes: u64 = arrivals.values().flatten().map(|arrival| arrival.bytes).sum();
    let complete = arrivals.values().filter(|seen| seen.len() == args.workers);
    let spreads: Vec<f64> = complete.map(|seen| spread_s(seen)).collect();
    let line = json!({
        "measure": "samplers",
        "workers": args.workers,
        "relays": args.relays.min(args.workers),
        "groups": all.groups,
        "requests_for_slots": all.asked,
        "versions": spreads.len(),
        "all_have_it_s": median(&spreads),
        "all_have_it_max_s": spreads.iter().copied().fold(0.0, f64::max),
        "received_bytes": bytes,
    });
    let system = |source| Failure::System { what: "write a result".to_owned(), source };
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(system)
}

/// From the first request for a version to the last worker that has it, seconds.
fn spread_s(seen: &[VersionArrival]) -> f64 {
    let first: Option<Instant> = seen.iter().map(|arrival| arrival.begun).min();
    let last: Option<Instant> = seen.iter().map(|arrival| arrival.ready).max();
    first.zip(last).map_or(f64::NAN, |(first, last)| last.duration_since(first).as_secs_f64())
}
