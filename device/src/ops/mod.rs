//! GPU kernels, each with its launcher. They compute the same as `model::ops` and the trainer on the CPU.
//!
//! Invariant: sums are f32 or wider, in an order that depends on the shapes only, so equal inputs give equal bits.
//!
//! # Layout
//! - [`norm`], [`heads`], [`latent`], [`gates`], [`gated_unit`]: elementwise operations of a layer
//! - [`routes`]: the experts of tokens; [`experts`]: what experts compute
//! - [`attention`]: packed sequences; [`paged`]: decode over a paged KV cache; [`prefill`]: prefill over a paged KV
//!   cache
//! - [`adapters`]: low-rank factors of rows with different adapters
//! - [`head`]: log-probabilities and entropies of logits; [`sampling`]: tokens sampled from logits
//! - [`delta_rule`]: a recurrence in place of attention, with [`convolution`] before it and [`result_gate`] behind it
//! - [`rows`]: gather and scatter of rows, biases; [`vectors`]: flat vectors
//! - [`adamw`]: the optimizer update
//! - [`blocks`]: weights in quantised blocks
//! - [`digest`]: BLAKE3 digest of weights

pub mod adamw;
pub mod adapters;
pub mod attention;
pub mod blocks;
pub mod convolution;
pub mod delta_rule;
pub mod digest;
pub mod experts;
pub mod gated_unit;
pub mod gates;
pub mod head;
pub mod heads;
pub mod latent;
pub mod norm;
pub mod paged;
pub mod prefill;
pub mod result_gate;
pub mod routes;
pub mod rows;
pub mod sampling;
pub mod vectors;

/// Largest number of threads per block.
const THREADS: usize = 256;
/// Bytes of a vectorised memory access.
const PACK: usize = 16;
/// Largest number of parts of a sum over rows.
const SLABS: usize = 512;

/// A size as a kernel argument.
///
/// # Panics
/// If it does not fit in 32 bits.
fn size(n: usize) -> i32 {
    assert!(i32::try_from(n).is_ok(), "a size of {n} is more than a kernel takes");
    n as i32
}

/// Number of rows of `width` in `len` values.
///
/// # Panics
/// If `len` is not a multiple of `width`.
fn rows_of(len: usize, width: usize) -> usize {
    assert!(width > 0 && len.is_multiple_of(width), "{len} values in rows of {width}");
    len / width
}

/// Blocks per row of `width` values of `T`, and threads per block.
fn tiles<T>(width: usize) -> (usize, usize) {
    let packs = width.div_ceil(PACK / size_of::<T>());
    let blocks = packs.div_ceil(THREADS).max(1);
    (blocks, packs.div_ceil(blocks).next_multiple_of(32).max(32))
}

/// Rows per part of a sum over `rows`, at least `least`, and the number of parts.
fn slabs(rows: usize, least: usize) -> (usize, usize) {
    let slab = rows.div_ceil(SLABS).max(least);
    (slab, rows.div_ceil(slab))
}
