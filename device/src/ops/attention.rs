//! Causal attention of packed segments with grouped key-value heads (GQA, arXiv 2305.13245), forward and backward:
//! tiled with an online softmax, as in FlashAttention-2 (Dao 2023, arXiv 2307.08691). A query sees all keys up to its
//! own, or the last of them: a sliding window (Beltagy et al. 2020, arXiv 2004.05150). A head may have a sink, a logit
//! of the softmax that has no key and the value zero (gpt-oss, OpenAI 2025, arXiv 2508.10925).
//!
//! Invariant: the result of a query has the same bits for every packing of its sequence: as one segment, or after a
//! prefix that other segments share. Gradients have the same bits for equal segments in equal order.

use std::ops::Range;

use super::heads::HeadShape;
use super::rows::add_partial_sums;
use super::{THREADS, rows_of, size, slabs};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::{DeviceError, Result};
use crate::memory::{DeviceBuffer, View, ViewMut};

/// Keys per block, as in `kernels/attention.cuh`.
const TILE: usize = 64;
/// Queries per entry of the work lists, as in `kernels/attention.cuh`.
pub(super) const QUERIES: usize = 128;
/// Keys, or queries, per step of a warp of the f32 kernels.
const LANES: usize = 32;
/// Padding of the rows of a shared-memory tile for the tensor cores, values.
const PAD: usize = 8;
/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = 256;
/// Smallest number of rows per block in the gradient of the sinks.
const SLAB: usize = 1024;
/// Largest number of queries that one block processes for its keys. All completions attend to the keys of a prompt:
/// without a bound the block with these keys would run long after the others.
const MAX_QUERIES: usize = 1024;

/// Tokens that attend to a prefix and, causally, to each other; as rows of a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Rows of the tokens.
    pub rows: Range<usize>,
    /// Rows of the prefix, which are in earlier segments; empty for none.
    pub prefix: Range<usize>,
}

/// The segments of a pack, with the work lists of the kernels, on the device.
#[derive(Debug)]
pub struct Segments {
    rows: usize,
    /// Whether every row is in a segment.
    whole: bool,
    /// `[segments, 4]`: start and end of rows, start and end of prefix.
    segments: DeviceBuffer<i32>,
    /// `[tiles, 2]`: segment, first query.
    tiles: DeviceBuffer<i32>,
    /// One per window.
    keys: Vec<KeyLists>,
}

/// The work lists of the gradient of keys and values under a window.
#[derive(Debug)]
struct KeyLists {
    window: usize,
    /// `[jobs, 5]`: first key, number of keys, start and end in `seen`, slot in the scratch or -1.
    jobs: DeviceBuffer<i32>,
    /// `[_, 5]`: start and end of queries, start and end of keys, and what places differ by beyond rows.
    seen: DeviceBuffer<i32>,
    /// `[_, 4]`: first key, number of keys, start and end of slots.
    splits: DeviceBuffer<i32>,
    slots: usize,
}

impl Segments {
    /// Work lists for the segments of a pack of `rows`, in row order, and for a backward under each of `windows`. Rows
    /// outside all segments have results and gradients of 0.
    ///
    /// # Errors
    /// If device memory is full.
    ///
    /// # Panics
    /// If segments overlap or are out of order, or a prefix has rows outside earlier segments.
    pub fn new(device: &Device, segments: &[Segment], rows: usize, windows: &[usize]) -> Result<Self> {
        let plan = QueryPlan::new(segments, rows);
        let lists = |window: &usize| {
            let plan = KeyPlan::new(segments, *window);
            Ok(KeyLists {
                window: *window,
                jobs: device.upload(plan.jobs.as_flattened())?,
                seen: device.upload(plan.seen.as_flattened())?,
                splits: device.upload(plan.splits.as_flattened())?,
                slots: plan.slots,
            })
        };
        Ok(Self {
            rows,
            whole: plan.whole,
            segments: device.upload(plan.segments.as_flattened())?,
            tiles: device.upload(plan.tiles.as_flattened())?,
            keys: windows.iter().map(lists).collect::<Result<_>>()?,
        })
    }

    /// Number of rows of the pack.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// Host copy of the work lists over queries.
#[derive(Debug, Default)]
struct QueryPlan {
    whole: bool,
    segments: Vec<[i32; 4]>,
    tiles: Vec<[i32; 2]>,
}

/// Host copy of the work lists over keys.
#[derive(Debug, Default)]
struct KeyPlan {
    jobs: Vec<[i32; 5]>,
    seen: Vec<[i32; 5]>,
    splits: Vec<[i32; 4]>,
    slots: usize,
}

/// Keys of one block with the queries that attend to them.
#[derive(Debug)]
struct KeyTile {
    keys: Range<usize>,
    users: Vec<KeyUsers>,
}

/// Queries that attend to some keys of a tile.
#[derive(Debug)]
struct KeyUsers {
    queries: Range<usize>,
    keys: Range<usize>,
    /// A query is `query - key + shift` places after a key.
    shift: i32,
}

impl QueryPlan {
    fn new(segments: &[Segment], rows: usize) -> Self {
        let mut plan = Self::default();
        let mut covered = 0;
        let mut end = 0;
        // Longest tiles first (number of keys of the last query), so that no long tile is left for the end.
        let mut tiles = Vec::new();
        for Segment { rows, prefix } in segments.iter().filter(|segment| !segment.rows.is_empty()) {
            assert!(rows.start >= end, "segment {rows:?} begins before {end}, where the one before it ends");
            let prefix = if prefix.is_empty() { 0..0 } else { prefix.clone() };
            assert!(prefix.end <= rows.start, "prefix {prefix:?} is not before its segment {rows:?}");
            (covered, end) = (covered + rows.len(), rows.end);
            for first in rows.clone().step_by(QUERIES) {
                let seen = prefix.len() + (first + QUERIES).min(rows.end) - rows.start;
                tiles.push((seen, [size(plan.segments.len()), size(first)]));
            }
            plan.segments.push([rows.start, rows.end, prefix.start, prefix.end].map(size));
        }
        assert!(end <= rows, "segments end at row {end} of {rows}");
        plan.whole = covered == rows;
        tiles.sort_by_key(|(seen, _)| std::cmp::Reverse(*seen));
        plan.tiles = tiles.into_iter().map(|(_, tile)| tile).collect();
        plan
    }
}

impl KeyPlan {
    fn new(segments: &[Segment], window: usize) -> Self {
        let mut plan = Self::default();
        plan.add_jobs(&key_tiles(segments, window));
        plan
    }

    fn add_jobs(&mut self, tiles: &[KeyTile]) {
        let mut jobs = Vec::new();
        for KeyTile { keys, users } in tiles {
            let [first, count] = [keys.start, keys.len()].map(size);
            let queries: usize = users.iter().map(|of| of.queries.len()).sum();
            let parts = queries.div_ceil(MAX_QUERIES);
            let capacity = queries.div_ceil(parts).next_multiple_of(TILE);
            let (begin, first_slot) = (jobs.len(), self.slots);
            let mut entries = self.seen.len();
            let mut left = capacity;
            for KeyUsers { queries, keys, shift } in users {
                let mut queries = queries.clone();
                while !queries.is_empty() {
                    let end = queries.end.min(queries.start + left);
                    let [begin, end_of, key, key_end] = [queries.start, end, keys.start, keys.end].map(size);
                    self.seen.push([begin, end_of, key, key_end, *shift]);
                    left -= end - queries.start;
                    queries.start = end;
                    if left == 0 {
                        jobs.push((capacity, [first, count, size(entries), size(self.seen.len()), 0]));
                        (entries, left) = (self.seen.len(), capacity);
                    }
                }
            }
            if left < capacity {
                jobs.push((capacity - left, [first, count, size(entries), size(self.seen.len()), 0]));
            }
            let split = jobs.len() - begin > 1;
            for (_, job) in &mut jobs[begin..] {
                job[4] = if split { size(self.slots) } else { -1 };
                self.slots += usize::from(split);
            }
            if split {
                self.splits.push([first, count, size(first_slot), size(self.slots)]);
            }
        }
        jobs.sort_by_key(|(queries, _)| std::cmp::Reverse(*queries));
        self.jobs = jobs.into_iter().map(|(_, job)| job).collect();
    }
}

/// Tiles of all keys, each with the queries of its own segment and then those of segments whose prefix contains it, in
/// order. Queries that see no key of a tile in their `window` are left out.
fn key_tiles(segments: &[Segment], window: usize) -> Vec<KeyTile> {
    assert!(window > 0, "a query sees its own key");
    let mut tiles = Vec::new();
    for Segment { rows, .. } in segments {
        for first in rows.clone().step_by(TILE) {
            let keys = first..(first + TILE).min(rows.end);
            let queries = first..rows.end.min(keys.end.saturating_add(window - 1));
            tiles.push(KeyTile { users: vec![KeyUsers { queries, keys: keys.clone(), shift: 0 }], keys });
        }
    }
    for Segment { rows, prefix } in segments.iter().filter(|s| !s.rows.is_empty() && !s.prefix.is_empty()) {
        let mut covered = 0;
        let from = tiles.partition_point(|tile| tile.keys.end <= prefix.start);
        for tile in tiles[from..].iter_mut().take_while(|tile| tile.keys.start < prefix.end) {
            let keys = prefix.start.max(tile.keys.start)..prefix.end.min(tile.keys.end);
            covered += keys.len();
            // The last key is seen up to `window - 1` places behind it; the segment begins at place `prefix.len()`.
            let seen = (keys.end - prefix.start).saturating_add(window - 1).saturating_sub(prefix.len());
            let queries = rows.start..rows.start + seen.min(rows.len());
            if !queries.is_empty() {
                let shift = size(prefix.end) - size(rows.start);
                tile.users.push(KeyUsers { queries, keys, shift });
            }
        }
        assert_eq!(covered, prefix.len(), "rows of the prefix {prefix:?} that are in segments");
    }
    tiles
}

/// The heads of attention, and how their scores become weights.
#[derive(Clone, Copy, Debug)]
pub struct AttentionHeads<'a, T: Storage> {
    /// The heads.
    pub shape: HeadShape,
    /// Multiplies scores; positive.
    pub scale: f32,
    /// Tokens that a query sees, the last of which is its own; `usize::MAX` for all.
    pub window: usize,
    /// `[heads]` logits of the softmax that have no key; `None` for none.
    pub sinks: Option<View<'a, T>>,
}

impl<T: Storage> AttentionHeads<'_, T> {
    /// Without a window and sinks, with the scale `1 / sqrt(head_dim)`.
    #[must_use]
    pub fn full(shape: HeadShape) -> Self {
        Self { shape, scale: (shape.head_dim as f32).powf(-0.5), window: usize::MAX, sinks: None }
    }

    /// Checks what kernels rely on.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub(super) fn check(&self) {
        let HeadShape { heads, kv_heads, head_dim: dim } = self.shape;
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads in groups of {kv_heads}");
        assert!((1..=MAX_HEAD_DIM).contains(&dim), "a head of {dim}; at most {MAX_HEAD_DIM} are supported");
        assert!(
            self.scale > 0.0 && self.window > 0,
            "a scale of {} and a window of {}",
            self.scale,
            self.window
        );
        assert!(self.sinks.is_none_or(|sinks| sinks.len() == heads), "a sink for each of {heads} heads");
    }

    /// The window as a kernel argument.
    pub(super) fn window_argument(&self) -> Argument {
        i32::try_from(self.window).unwrap_or(i32::MAX).into()
    }

    /// Number of heads, of key-value heads and head dimension, scale, window and sinks.
    pub(super) fn arguments(&self) -> [Argument; 6] {
        let [heads, kv_heads, dim] = shape_arguments(self.shape);
        [heads, kv_heads, dim, self.scale.into(), self.window_argument(), self.sinks.into()]
    }
}

/// The kernels for a shape and storage type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernels<T> {
    /// Whether the tensor-core kernels apply.
    tensor: bool,
    dim: usize,
    storage: std::marker::PhantomData<T>,
}

impl<T: Storage> Kernels<T> {
    /// # Panics
    /// If the shapes do not fit.
    pub(super) fn new(heads: &AttentionHeads<'_, T>) -> Self {
        heads.check();
        let dim = heads.shape.head_dim;
        Self { tensor: T::NARROW && matches!(dim, 64 | 128), dim, storage: std::marker::PhantomData }
    }

    pub(super) fn name(self, what: &str) -> String {
        if self.tensor {
            format!("{what}_{}_{}", T::SUFFIX, self.dim)
        } else {
            format!("{what}_{}", T::SUFFIX)
        }
    }

    pub(super) fn threads(self) -> usize {
        if self.tensor { 128 } else { 256 }
    }

    /// Queries per block; an entry of the work lists has one block per head, or several.
    fn queries(self) -> usize {
        if self.tensor && self.dim <= 64 { QUERIES } else { QUERIES / 2 }
    }

    /// Grid of a kernel over `entries` of the work lists of queries.
    pub(super) fn query_grid(self, heads: usize, entries: usize) -> [usize; 3] {
        [heads * (QUERIES / self.queries()), entries, 1]
    }

    /// Dynamic shared memory of the forward kernel, bytes: two buffers of keys and values, the second of which holds
    /// the queries first; or queries, keys, values and weights.
    pub(super) fn forward(self) -> usize {
        match self.tensor {
            true => self.narrow_rows(4 * TILE),
            false => size_of::<f32>() * (TILE * self.dim + 2 * LANES * (self.dim + 1) + TILE * LANES),
        }
    }

    /// Dynamic shared memory of the query gradient, bytes: also queries and their gradients, or gradients.
    fn query_gradient(self) -> usize {
        match self.tensor {
            true => self.narrow_rows(2 * self.queries() + 4 * TILE),
            false => self.forward() + size_of::<f32>() * TILE * self.dim,
        }
    }

    /// Dynamic shared memory of the key gradient, bytes: keys, values, and two buffers of queries and gradients, which
    /// hold sums at the end; or two of weights.
    fn key_gradient(self) -> usize {
        match self.tensor {
            true => self.narrow_rows(2 * TILE + 4 * if self.dim > 64 { 32 } else { 64 }),
            false => self.query_gradient() + size_of::<f32>() * TILE * LANES,
        }
    }

    fn narrow_rows(self, rows: usize) -> usize {
        rows * (self.dim + PAD) * size_of::<T>()
    }

    /// # Panics
    /// If the values do not begin at a multiple of 16 bytes.
    pub(super) fn check(self, view: View<'_, T>) {
        assert!(!self.tensor || view.address().is_multiple_of(16), "values begin on a boundary of 16 bytes");
    }
}

fn shape_arguments(shape: HeadShape) -> [Argument; 3] {
    [shape.heads, shape.kv_heads, shape.head_dim].map(|n| size(n).into())
}

/// Attention within each segment: `qkv [rows, width]` after norm and rotary embedding, into `out [rows, query_width]`;
/// the log-sum-exp of the scores of each query, with its sink, into `log_sums [heads, rows]`, for the backward.
///
/// # Errors
/// If a launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn attention<T: Storage>(
    device: &Device,
    qkv: View<'_, T>,
    segments: &Segments,
    heads: AttentionHeads<'_, T>,
    mut out: ViewMut<'_, T>,
    log_sums: ViewMut<'_, f32>,
) -> Result<()> {
    let (kernels, shape) = (Kernels::new(&heads), heads.shape);
    let rows = rows_of(qkv.len(), shape.width());
    assert_eq!(rows, segments.rows, "the segments are those of the pack");
    assert_eq!(out.len(), rows * shape.query_width(), "the result is [rows, query_width]");
    assert_eq!(log_sums.len(), rows * shape.heads, "the sums are [heads, rows]");
    kernels.check(qkv);
    kernels.check(out.as_view());
    if !segments.whole {
        device.clear(out.reborrow())?;
    }
    let (list, tiles) = (segments.segments.all().into(), segments.tiles.all().into());
    let mut arguments = vec![qkv.into(), list, tiles, size(rows).into()];
    arguments.extend(heads.arguments());
    arguments.extend([Argument::from(out), log_sums.into()]);
    let grid = kernels.query_grid(shape.heads, segments.tiles.len() / 2);
    device.launch(&kernels.name("attention"), grid, kernels.threads(), kernels.forward(), &arguments)
}

/// The forward of a backward.
#[derive(Clone, Copy, Debug)]
pub struct AttentionForward<'a, T: Storage> {
    /// `[rows, width]` after norm and rotary embedding.
    pub qkv: View<'a, T>,
    /// `[rows, query_width]` result of [`attention`].
    pub out: View<'a, T>,
    /// `[heads, rows]` log-sum-exp of [`attention`].
    pub log_sums: View<'a, f32>,
}

/// Gradient of `qkv [rows, width]` from `g [rows, query_width]`, that of the result, into all of `dqkv [rows, width]`.
/// Those of the sinks are added to `d_sinks [heads]`, which is empty without sinks, or if they are frozen.
///
/// # Errors
/// If a launch fails, there is no memory for the scratch, or the segments have no work lists for the window.
///
/// # Panics
/// If the shapes do not fit.
pub fn attention_backward<T: Storage>(
    device: &Device,
    forward: AttentionForward<'_, T>,
    segments: &Segments,
    heads: AttentionHeads<'_, T>,
    g: View<'_, T>,
    mut dqkv: ViewMut<'_, T>,
    d_sinks: ViewMut<'_, f32>,
) -> Result<()> {
    let AttentionForward { qkv, out, log_sums } = forward;
    let (kernels, shape) = (Kernels::new(&heads), heads.shape);
    let rows = rows_of(qkv.len(), shape.width());
    assert_eq!(rows, segments.rows, "the segments are those of the pack");
    assert_eq!(dqkv.len(), qkv.len(), "the gradient is as large as what it is of");
    assert_eq!([out.len(), g.len()], [rows * shape.query_width(); 2], "results are [rows, query_width]");
    assert_eq!(log_sums.len(), rows * shape.heads, "the sums are [heads, rows]");
    let sinks = heads.sinks.map_or(0, |sinks| sinks.len());
    assert!(d_sinks.is_empty() || d_sinks.len() == sinks, "a gradient has the shape of what it is of");
    [qkv, out, g, dqkv.as_view()].into_iter().for_each(|view| kernels.check(view));
    let lists = segments.keys.iter().find(|lists| lists.window == heads.window);
    let Some(lists) = lists else {
        let (device, kernel) = (device.name(), kernels.name("attention_key_gradient"));
        let reason = format!("the segments have no work lists for a window of {}", heads.window);
        return Err(DeviceError::Kernel { device, kernel, reason });
    };
    let mut deltas = device.uninit::<f32>(rows * shape.heads)?;
    if !segments.whole {
        device.clear(dqkv.reborrow())?;
        device.clear(deltas.all_mut())?;
    }
    let mut scratch = device.uninit::<f32>(lists.slots * 2 * TILE * shape.kv_width())?;
    let rule = heads.arguments();
    let [heads_of, kv_heads, dim] = shape_arguments(shape);
    let (qkv, g, rows_of, to) = (qkv.into(), g.into(), size(rows).into(), Argument::from(&dqkv));
    let (deltas_of, scratch) = (Argument::from(deltas.all_mut()), Argument::from(scratch.all_mut()));

    let mut arguments = vec![qkv, segments.segments.all().into(), segments.tiles.all().into(), rows_of];
    arguments.extend(rule);
    arguments.extend([out.into(), log_sums.into(), g, deltas_of, to]);
    let grid = kernels.query_grid(shape.heads, segments.tiles.len() / 2);
    let name = kernels.name("attention_query_gradient");
    device.launch(&name, grid, kernels.threads(), kernels.query_gradient(), &arguments)?;

    let mut arguments = vec![qkv, lists.jobs.all().into(), lists.seen.all().into(), rows_of];
    arguments.extend(rule);
    arguments.extend([log_sums.into(), g, deltas_of, scratch, to]);
    let grid = [shape.kv_heads, lists.jobs.len() / 5, 1];
    let name = kernels.name("attention_key_gradient");
    device.launch(&name, grid, kernels.threads(), kernels.key_gradient(), &arguments)?;

    let arguments = [lists.splits.all().into(), heads_of, kv_heads, dim, scratch, to];
    let grid = [shape.kv_heads, lists.splits.len() / 4, 1];
    device.launch(&kernels.name("attention_join"), grid, THREADS, 0, &arguments)?;
    sink_gradient(device, heads, log_sums, deltas.all(), d_sinks)
}

/// Adds to `d_sinks [heads]`, for the `log_sums [heads, rows]` of the forward and the `deltas [heads, rows]` of the
/// backward: with `p` the weight of a sink, its derivative in a row is `-p delta`, since its value is 0.
fn sink_gradient<T: Storage>(
    device: &Device,
    heads: AttentionHeads<'_, T>,
    log_sums: View<'_, f32>,
    deltas: View<'_, f32>,
    d_sinks: ViewMut<'_, f32>,
) -> Result<()> {
    let (count, Some(sinks)) = (heads.shape.heads, heads.sinks) else { return Ok(()) };
    if d_sinks.is_empty() {
        return Ok(());
    }
    let rows = deltas.len() / count;
    if rows == 0 {
        return Ok(());
    }
    let (slab, parts) = slabs(rows, SLAB);
    let mut partial = device.uninit::<f32>(parts * count)?;
    let [rows, slab] = [rows, slab].map(|n| Argument::from(size(n)));
    let arguments = [sinks.into(), log_sums.into(), deltas.into(), rows, slab, partial.all_mut().into()];
    let name = format!("sink_gradient_{}", T::SUFFIX);
    device.launch(&name, [count, parts, 1], THREADS, 0, &arguments)?;
    add_partial_sums(device, partial.all(), d_sinks)
}
