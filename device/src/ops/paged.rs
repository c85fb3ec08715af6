//! Attention of single tokens over a key-value cache in pages, with grouped key-value heads.
//!
//! The cache of one layer is `[pages, 2, kv_heads, PAGE, head_dim]`: of each page the keys and then the values.
//!
//! Invariant: the result of a token does not depend on what else is in the batch, and nothing here waits or allocates, so
//! all of it can be recorded and replayed while positions grow.

use super::heads::HeadShape;
use super::{PACK, THREADS, rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Positions of one page of the cache.
pub const PAGE: usize = 16;
/// The slot of a token that is not to be written.
pub const NO_SLOT: u32 = u32::MAX;

/// Pages of one block, each of which leaves a part of the result of a token in scratch.
pub const PART: usize = 16;
/// Threads of a block, and warps.
const THREADS_OF_PART: usize = 128;
const WARPS: usize = 4;
/// The widest head.
const MAX_HEAD_DIM: usize = 256;

/// Tokens that attend to what is in the cache.
#[derive(Clone, Copy, Debug)]
pub struct PagedTokens<'a> {
    /// `[tokens]`: each attends to positions `0..=position` of its sequence.
    pub positions: View<'a, u32>,
    /// `[sequences, max_pages]`: the pages of each sequence, in the order of positions. Anything behind its last one.
    pub tables: View<'a, u32>,
    /// `[tokens]`: row of `tables`.
    pub sequence_of: View<'a, u32>,
    /// Pages of the longest sequence that there may be.
    pub max_pages: usize,
}

/// Values of one page of one layer.
#[must_use]
pub fn page_len(shape: HeadShape) -> usize {
    2 * PAGE * shape.kv_width()
}

/// Values of scratch that [`paged_attention`] needs.
#[must_use]
pub fn scratch_len(tokens: usize, max_pages: usize, shape: HeadShape) -> usize {
    // Of each part its sums, the highest score, and the sum of weights.
    tokens * shape.heads * max_pages.div_ceil(PART) * (shape.head_dim + 2)
}

/// Writes keys and values of `qkv [tokens, width]` to the `cache` of one layer: of each token to its slot of
/// `slots [tokens]`, `page * PAGE + position % PAGE`, or [`NO_SLOT`].
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn write_pages<T: Storage>(
    device: &Device,
    qkv: View<'_, T>,
    slots: View<'_, u32>,
    shape: HeadShape,
    cache: ViewMut<'_, T>,
) -> Result<()> {
    let tokens = rows_of(qkv.len(), shape.width());
    assert_eq!(slots.len(), tokens, "each token has a slot");
    rows_of(cache.len(), page_len(shape));
    let pack = PACK / size_of::<T>();
    let packed =
        shape.head_dim.is_multiple_of(pack) && begins_on_pack(qkv) && begins_on_pack(cache.as_view());
    let (name, unit) = if packed {
        ("write_pages_pack".to_owned(), pack)
    } else {
        (format!("write_pages_{}", T::SUFFIX), 1)
    };
    let count = tokens * 2 * shape.kv_width() / unit;
    let [heads, kv_heads, dim] =
        [shape.heads, shape.kv_heads, shape.head_dim / unit].map(|n| Argument::from(size(n)));
    let arguments = [qkv.into(), slots.into(), (count as i64).into(), heads, kv_heads, dim, cache.into()];
    device.launch(&name, [count.div_ceil(THREADS), 1, 1], THREADS, 0, &arguments)
}

/// Attention of the queries of `qkv [tokens, width]` over the `cache` of one layer, in which [`write_pages`] has put their
/// own keys and values, into `out [tokens, query_width]`. `scratch` has at least [`scratch_len`] values.
///
/// # Errors
/// If a launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn paged_attention<T: Storage>(
    device: &Device,
    qkv: View<'_, T>,
    cache: View<'_, T>,
    tokens: &PagedTokens<'_>,
    shape: HeadShape,
    out: ViewMut<'_, T>,
    scratch: ViewMut<'_, f32>,
) -> Result<()> {
    let HeadShape { heads, kv_heads, head_dim } = shape;
    assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads in groups of {kv_heads}");
    assert!(
        (1..=MAX_HEAD_DIM).contains(&head_dim),
        "a head of {head_dim}; at most {MAX_HEAD_DIM} are supported"
    );
    let PagedTokens { positions, tables, sequence_of, max_pages } = *tokens;
    let count = rows_of(qkv.len(), shape.width());
    assert_eq!([positions.len(), sequence_of.len()], [count; 2], "each token has a position and a sequence");
    assert_eq!(out.len(), count * shape.query_width(), "the result is [tokens, query_width]");
    rows_of(tables.len(), max_pages);
    rows_of(cache.len(), page_len(shape));
    let needed = scratch_len(count, max_pages, shape);
    assert!(scratch.len() >= needed, "scratch of {} values in place of {needed}", scratch.len());

    let tensor = T::NARROW && matches!(head_dim, 64 | 128);
    assert!(
        !tensor || begins_on_pack(qkv) && begins_on_pack(cache),
        "values begin on a boundary of {PACK} bytes"
    );
    // As many heads of a group as one block takes, and its dynamic shared memory: queries, and the sums of each warp.
    let (name, at_once, shared) = if tensor {
        (format!("paged_attention_{}_{head_dim}", T::SUFFIX), 16, 0)
    } else {
        let at_once = 8;
        let shared = (1 + WARPS) * at_once * head_dim * size_of::<f32>();
        (format!("paged_attention_{}", T::SUFFIX), at_once, shared)
    };
    let parts = max_pages.div_ceil(PART);
    let grid = [count, kv_heads * (heads / kv_heads).div_ceil(at_once), parts];
    let scale = (head_dim as f32).powf(-0.5);
    let [heads_of, kv_heads, dim] = [heads, kv_heads, head_dim].map(|n| Argument::from(size(n)));
    let (qkv, cache, out) = (qkv.into(), cache.into(), Argument::from(out));
    let (positions, scratch) = (positions.into(), Argument::from(scratch));
    let (tables, sequence_of, pages) = (tables.into(), sequence_of.into(), size(max_pages).into());
    let arguments = [
        qkv,
        cache,
        positions,
        tables,
        sequence_of,
        pages,
        heads_of,
        kv_heads,
        dim,
        scale.into(),
        out,
        scratch,
    ];
    device.launch(&name, grid, THREADS_OF_PART, shared, &arguments)?;
    if parts == 1 {
        return Ok(());
    }
    let arguments = [scratch, positions, size(count).into(), heads_of, dim, size(parts).into(), out];
    let grid = [(count * heads).div_ceil(WARPS), 1, 1];
    device.launch(&format!("paged_join_{}", T::SUFFIX), grid, THREADS_OF_PART, 0, &arguments)
}

/// Copies pages of all layers, for sequences that go different ways from a page that they share: `pairs [n, 2]` of pages
/// from and to, `cache [layers, layer_len]`, pages of `page_len` values. No page is both written and in another pair.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn copy_pages<T: Storage>(
    device: &Device,
    pairs: View<'_, u32>,
    cache: ViewMut<'_, T>,
    layer_len: usize,
    page_len: usize,
) -> Result<()> {
    let layers = rows_of(cache.len(), layer_len);
    rows_of(layer_len, page_len);
    let pack = PACK / size_of::<T>();
    assert!(page_len.is_multiple_of(pack), "a page of {page_len} values; a block moves {pack} at once");
    assert!(begins_on_pack(cache.as_view()), "values begin on a boundary of {PACK} bytes");
    let arguments =
        [pairs.into(), ((layer_len / pack) as i64).into(), size(page_len / pack).into(), cache.into()];
    device.launch("copy_pages", [rows_of(pairs.len(), 2), layers, 1], THREADS, 0, &arguments)
}

fn begins_on_pack<T: Storage>(view: View<'_, T>) -> bool {
    view.address().is_multiple_of(PACK as u64)
}
