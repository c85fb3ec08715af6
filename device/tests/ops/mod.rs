//! Kernels, each against a reference in f64.

mod adamw;
mod attention;
mod digest;
mod gates;
mod head;
mod heads;
mod norm;
mod paged;
mod prefill;
mod rows;
mod sampling;
mod support;
mod swiglu;
mod vectors;
