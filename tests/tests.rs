//! Whole-system tests, one binary. `reference_loop.rs` is the algorithm as one plain loop; read it first.

mod agents;
mod algorithms;
#[cfg(feature = "object-store")]
mod archive;
#[cfg(feature = "object-store")]
mod archive_s3;
mod bad_input;
mod bitwise;
mod chaos;
mod checkpoints;
mod colocated;
mod curation;
#[cfg(feature = "emulator")]
mod devices;
mod environments;
mod episodes;
mod evaluation;
mod experts;
mod failpoints;
#[expect(dead_code, reason = "the tests of samplers change what it does while it runs")]
#[path = "../rollout/tests/remote/fake_engine.rs"]
mod fake_engine;
#[cfg(feature = "object-store")]
mod faulty_proxy;
mod fit;
mod gguf;
mod hub_server;
mod huggingface;
mod islands;
mod launchers;
mod learns;
mod logs;
mod memory;
mod parallel;
mod parity;
#[cfg(feature = "postgres")]
mod postgres;
mod recipes;
mod reference_loop;
mod replay;
mod resume;
mod rewards;
mod served;
mod served_buffer;
mod served_policy;
mod served_run;
mod served_training;
mod sharded;
mod simulate;
mod staleness;
mod stops;
mod structure;
mod support;
mod why;
mod words;
mod workers;
