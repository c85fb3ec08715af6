//! Decode: attention of single tokens over a paged KV cache (PagedAttention, Kwon et al. 2023, arXiv 2309.06180) with
//! grouped key-value heads, split along the context as in Flash-Decoding (Dao et al. 2023).
//!
//! The cache of one layer is `[pages, 2, kv_heads, PAGE, head_dim]`: keys, then values, of each page.
//!
//! Invariant: the result of a token does not depend on the rest of the batch. No function here waits or allocates, so a
//! CUDA graph of a decode step can be replayed while positions grow.

use super::attention::AttentionHeads;
use super::heads::HeadShape;
use super::{PACK, THREADS, rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Positions per page of the cache.
pub const PAGE: usize = 16;
/// Slot of a token that is not written to the cache.
pub const NO_SLOT: u32 = u32::MAX;

/// Pages per block; each block leaves a partial result in the scratch.
pub const PART: usize = 16;
/// Threads per block, and warps.
const THREADS_OF_PART: usize = 128;
const WARPS: usize = 4;

/// The pages of each sequence of a step.
#[derive(Clone, Copy, Debug)]
pub struct PageTable<'a> {
    /// `[sequences, columns]`: the pages of each sequence, in order of positions; entries after the last are unused.
    pub pages: View<'a, u32>,
    /// Pages of the longest possible sequence.
    pub columns: usize,
}

/// Tokens that attend to the cache.
#[derive(Clone, Copy, Debug)]
pub struct PagedTokens<'a> {
    /// `[tokens]`: each attends to the positions `0..=position` of its sequence.
    pub positions: View<'a, u32>,
    /// The pages of their sequences.
    pub table: PageTable<'a>,
    /// `[tokens]`: the row of each token in `table`.
    pub sequence_of: View<'a, u32>,
}

/// Number of values of one page of one layer.
#[must_use]
pub fn page_len(shape: HeadShape) -> usize {
    2 * PAGE * shape.kv_width()
}

/// Largest number of parts of a context of `max_pages` that a token sees in its `window`.
fn parts(max_pages: usize, window: usize) -> usize {
    max_pages.div_ceil(PART).min((window - 1).div_ceil(PART * PAGE) + 1)
}

/// Number of scratch values that [`paged_attention`] needs, with any window.
#[must_use]
pub fn scratch_len(tokens: usize, max_pages: usize, shape: HeadShape) -> usize {
    // Per part: weighted sums, maximal score, and sum of weights.
    tokens * shape.heads * max_pages.div_ceil(PART) * (shape.head_dim + 2)
}

/// Writes keys and values of `qkv [tokens, width]` to the `cache` of one layer, each token to its slot in `slots
/// [tokens]`: `page * PAGE + position % PAGE`, or [`NO_SLOT`].
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

/// Attention of the queries of `qkv [tokens, width]` over the `cache` of one layer, to which [`write_pages`] has
/// written their own keys and values, into `out [tokens, query_width]`. `scratch` has at least [`scratch_len`] values.
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
    rule: AttentionHeads<'_, T>,
    out: ViewMut<'_, T>,
    scratch: ViewMut<'_, f32>,
) -> Result<()> {
    rule.check();
    let shape @ HeadShape { heads, kv_heads, head_dim } = rule.shape;
    let PagedTokens { positions, table: PageTable { pages: tables, columns: max_pages }, sequence_of } =
        *tokens;
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
    // Heads of a group per block, and dynamic shared memory: queries, and the sums of each warp.
    let (name, at_once, shared) = if tensor {
        (format!("paged_attention_{}_{head_dim}", T::SUFFIX), 16, 0)
    } else {
        let at_once = 8;
        let shared = (1 + WARPS) * at_once * head_dim * size_of::<f32>();
        (format!("paged_attention_{}", T::SUFFIX), at_once, shared)
    };
    let parts = parts(max_pages, rule.window);
    let grid = [count, kv_heads * (heads / kv_heads).div_ceil(at_once), parts];
    let (out, positions, scratch) = (Argument::from(out), positions.into(), Argument::from(scratch));
    let pages = size(max_pages).into();
    let mut arguments = vec![qkv.into(), cache.into(), positions, tables.into(), sequence_of.into(), pages];
    arguments.extend(rule.arguments());
    arguments.extend([out, scratch]);
    device.launch(&name, grid, THREADS_OF_PART, shared, &arguments)?;
    if parts == 1 {
        return Ok(());
    }
    let [tokens, heads_of, dim, parts] = [count, heads, head_dim, parts].map(|n| Argument::from(size(n)));
    let (window, sinks) = (rule.window_argument(), rule.sinks.into());
    let arguments = [scratch, positions, tokens, heads_of, dim, window, sinks, parts, out];
    let grid = [(count * heads).div_ceil(WARPS), 1, 1];
    device.launch(&format!("paged_join_{}", T::SUFFIX), grid, THREADS_OF_PART, 0, &arguments)
}

/// Copies pages of all layers (copy-on-write of shared pages): `pairs [n, 2]` of source and destination page, `cache
/// [layers, layer_len]`, pages of `page_len` values. A destination page is in no other pair.
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
