//! Kernels, each against a reference in f64.

mod adamw;
mod adapters;
mod attention;
mod blocks;
mod delta_net;
mod digest;
mod experts;
mod gated_unit;
mod gates;
mod head;
mod heads;
mod latent;
mod norm;
mod paged;
mod prefill;
mod result_gate;
mod routes;
mod rows;
mod sampling;
mod support;
mod vectors;
