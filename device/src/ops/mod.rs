//! The kernels, each with the function that launches it. What they compute is what `model::ops` and the trainer compute on
//! the processor.
//!
//! Invariant: sums are f32 or wider and in an order that follows from the shapes alone, so equal inputs give equal bits.
//!
//! # Layout
//! - [`norm`], [`heads`], [`swiglu`]: between the matrix products of a layer
//! - [`attention`]: over packed sequences; [`paged`], [`prefill`]: over a cache in pages, of one new token and of several
//! - [`head`], [`sampling`]: what logits say about tokens, and tokens drawn from them
//! - [`rows`], [`vectors`]: rows picked and summed, and flat vectors
//! - [`adamw`]: the optimizer
//! - [`digest`]: what weights are recognised by

pub mod adamw;
pub mod attention;
pub mod digest;
pub mod head;
pub mod heads;
pub mod norm;
pub mod paged;
pub mod prefill;
pub mod rows;
pub mod sampling;
pub mod swiglu;
pub mod vectors;

/// Most threads of a block.
const THREADS: usize = 256;
/// Bytes that a thread moves at once.
const PACK: usize = 16;
/// Most parts that a sum over rows is cut into.
const SLABS: usize = 512;

/// A size as kernels take it.
///
/// # Panics
/// If it does not fit.
fn size(n: usize) -> i32 {
    assert!(i32::try_from(n).is_ok(), "a size of {n} is more than a kernel takes");
    n as i32
}

/// Rows of `width` in `len` values.
///
/// # Panics
/// If they are no whole rows.
fn rows_of(len: usize, width: usize) -> usize {
    assert!(width > 0 && len.is_multiple_of(width), "{len} values in rows of {width}");
    len / width
}

/// Blocks that share a row of `width` values of `T`, and the threads of each.
fn tiles<T>(width: usize) -> (usize, usize) {
    let packs = width.div_ceil(PACK / size_of::<T>());
    let blocks = packs.div_ceil(THREADS).max(1);
    (blocks, packs.div_ceil(blocks).next_multiple_of(32).max(32))
}

/// Rows of a part of a sum over `rows`, at least `least` of them, and the number of parts.
fn slabs(rows: usize, least: usize) -> (usize, usize) {
    let slab = rows.div_ceil(SLABS).max(least);
    (slab, rows.div_ceil(slab))
}
