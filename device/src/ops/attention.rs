//! Causal attention of packed segments with grouped key-value heads (GQA, arXiv 2305.13245), forward and backward:
//! tiled with an online softmax, as in FlashAttention-2 (Dao 2023, arXiv 2307.08691).
//!
//! Invariant: the result of a query has the same bits for every packing of its sequence: as one segment, or after a
//! prefix that other segments share. Gradients have the same bits for equal segments in equal order.

use std::ops::Range;

use super::heads::HeadShape;
use super::{rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{DeviceBuffer, View, ViewMut};

/// Queries, and keys, per block, as in `kernels/attention.cu`.
pub(super) const TILE: usize = 64;
/// Keys, or queries, per step of a warp of the f32 kernels.
const LANES: usize = 32;
/// Padding of the rows of a shared-memory tile for the tensor cores, values.
const PAD: usize = 8;
/// Largest head dimension.
const MAX_HEAD_DIM: usize = 256;
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
    /// `[jobs, 5]`: first key, number of keys, start and end in `seen`, slot in the scratch or -1.
    jobs: DeviceBuffer<i32>,
    /// `[_, 4]`: start and end of queries, start and end of keys.
    seen: DeviceBuffer<i32>,
    /// `[_, 4]`: first key, number of keys, start and end of slots.
    splits: DeviceBuffer<i32>,
    slots: usize,
}

impl Segments {
    /// Work lists for the segments of a pack of `rows`, in row order. Rows outside all segments have results and
    /// gradients of 0.
    ///
    /// # Errors
    /// If device memory is full.
    ///
    /// # Panics
    /// If segments overlap or are out of order, or a prefix has rows outside earlier segments.
    pub fn new(device: &Device, segments: &[Segment], rows: usize) -> Result<Self> {
        let plan = SegmentPlan::new(segments, rows);
        Ok(Self {
            rows,
            whole: plan.whole,
            segments: device.upload(plan.segments.as_flattened())?,
            tiles: device.upload(plan.tiles.as_flattened())?,
            jobs: device.upload(plan.jobs.as_flattened())?,
            seen: device.upload(plan.seen.as_flattened())?,
            splits: device.upload(plan.splits.as_flattened())?,
            slots: plan.slots,
        })
    }

    /// Number of rows of the pack.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// Host copy of the work lists.
#[derive(Debug, Default)]
struct SegmentPlan {
    whole: bool,
    segments: Vec<[i32; 4]>,
    tiles: Vec<[i32; 2]>,
    jobs: Vec<[i32; 5]>,
    seen: Vec<[i32; 4]>,
    splits: Vec<[i32; 4]>,
    slots: usize,
}

/// Keys of one block with the queries that attend to them.
#[derive(Debug)]
struct KeyTile {
    keys: Range<usize>,
    /// Queries, and the keys of the tile that they attend to.
    users: Vec<(Range<usize>, Range<usize>)>,
}

impl SegmentPlan {
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
            for first in rows.clone().step_by(TILE) {
                let seen = prefix.len() + (first + TILE).min(rows.end) - rows.start;
                tiles.push((seen, [size(plan.segments.len()), size(first)]));
            }
            plan.segments.push([rows.start, rows.end, prefix.start, prefix.end].map(size));
        }
        assert!(end <= rows, "segments end at row {end} of {rows}");
        plan.whole = covered == rows;
        tiles.sort_by_key(|(seen, _)| std::cmp::Reverse(*seen));
        plan.tiles = tiles.into_iter().map(|(_, tile)| tile).collect();
        plan.add_jobs(&key_tiles(segments));
        plan
    }

    fn add_jobs(&mut self, tiles: &[KeyTile]) {
        let mut jobs = Vec::new();
        for KeyTile { keys, users } in tiles {
            let [first, count] = [keys.start, keys.len()].map(size);
            let queries: usize = users.iter().map(|(queries, _)| queries.len()).sum();
            let parts = queries.div_ceil(MAX_QUERIES);
            let capacity = queries.div_ceil(parts).next_multiple_of(TILE);
            let (begin, first_slot) = (jobs.len(), self.slots);
            let mut entries = self.seen.len();
            let mut left = capacity;
            for (queries, keys) in users {
                let mut queries = queries.clone();
                while !queries.is_empty() {
                    let end = queries.end.min(queries.start + left);
                    self.seen.push([queries.start, end, keys.start, keys.end].map(size));
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
/// order.
fn key_tiles(segments: &[Segment]) -> Vec<KeyTile> {
    let mut tiles = Vec::new();
    for Segment { rows, .. } in segments {
        for first in rows.clone().step_by(TILE) {
            let keys = first..(first + TILE).min(rows.end);
            tiles.push(KeyTile { users: vec![(first..rows.end, keys.clone())], keys });
        }
    }
    for Segment { rows, prefix } in segments.iter().filter(|s| !s.rows.is_empty() && !s.prefix.is_empty()) {
        let mut covered = 0;
        let from = tiles.partition_point(|tile| tile.keys.end <= prefix.start);
        for tile in tiles[from..].iter_mut().take_while(|tile| tile.keys.start < prefix.end) {
            let keys = prefix.start.max(tile.keys.start)..prefix.end.min(tile.keys.end);
            covered += keys.len();
            tile.users.push((rows.clone(), keys));
        }
        assert_eq!(covered, prefix.len(), "rows of the prefix {prefix:?} that are in segments");
    }
    tiles
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
    pub(super) fn new(shape: HeadShape) -> Self {
        let HeadShape { heads, kv_heads, head_dim: dim } = shape;
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads in groups of {kv_heads}");
        assert!((1..=MAX_HEAD_DIM).contains(&dim), "a head of {dim}; at most {MAX_HEAD_DIM} are supported");
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

    /// Dynamic shared memory of the forward kernel, bytes: two buffers of keys and values, or queries, keys, values and
    /// weights.
    pub(super) fn forward(self) -> usize {
        match self.tensor {
            true => self.narrow_rows(4 * TILE),
            false => size_of::<f32>() * (TILE * self.dim + 2 * LANES * (self.dim + 1) + TILE * LANES),
        }
    }

    /// Dynamic shared memory of the query gradient, bytes: two more tiles, or one.
    fn query_gradient(self) -> usize {
        match self.tensor {
            true => self.narrow_rows(6 * TILE),
            false => self.forward() + size_of::<f32>() * TILE * self.dim,
        }
    }

    /// Dynamic shared memory of the key gradient, bytes: keys, values, and two buffers of queries and gradients, or two
    /// of weights.
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

pub(super) fn shape_arguments(shape: HeadShape) -> [Argument; 3] {
    [shape.heads, shape.kv_heads, shape.head_dim].map(|n| size(n).into())
}

pub(super) fn scale(shape: HeadShape) -> Argument {
    (shape.head_dim as f32).powf(-0.5).into()
}

/// Attention within each segment: `qkv [rows, width]` after norm and rotary embedding, into `out [rows, query_width]`;
/// the log-sum-exp of the scores of each query into `log_sums [heads, rows]`, for the backward.
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
    shape: HeadShape,
    mut out: ViewMut<'_, T>,
    log_sums: ViewMut<'_, f32>,
) -> Result<()> {
    let kernels = Kernels::<T>::new(shape);
    let rows = rows_of(qkv.len(), shape.width());
    assert_eq!(rows, segments.rows, "the segments are those of the pack");
    assert_eq!(out.len(), rows * shape.query_width(), "the result is [rows, query_width]");
    assert_eq!(log_sums.len(), rows * shape.heads, "the sums are [heads, rows]");
    kernels.check(qkv);
    kernels.check(out.as_view());
    if !segments.whole {
        device.clear(out.reborrow())?;
    }
    let [heads, kv_heads, dim] = shape_arguments(shape);
    let (list, tiles) = (segments.segments.all().into(), segments.tiles.all().into());
    let sums = log_sums.into();
    let arguments =
        [qkv.into(), list, tiles, size(rows).into(), heads, kv_heads, dim, scale(shape), out.into(), sums];
    let grid = [shape.heads, segments.tiles.len() / 2, 1];
    device.launch(&kernels.name("attention"), grid, kernels.threads(), kernels.forward(), &arguments)
}

/// Gradient of `qkv [rows, width]` from `g [rows, query_width]`, that of the result, into all of `dqkv [rows, width]`.
/// `out` and `log_sums` are the results of [`attention`].
///
/// # Errors
/// If a launch fails, or there is no memory for the scratch.
///
/// # Panics
/// If the shapes do not fit.
#[expect(clippy::too_many_arguments, reason = "what the forward had and made, and the two gradients")]
pub fn attention_backward<T: Storage>(
    device: &Device,
    qkv: View<'_, T>,
    segments: &Segments,
    shape: HeadShape,
    out: View<'_, T>,
    log_sums: View<'_, f32>,
    g: View<'_, T>,
    mut dqkv: ViewMut<'_, T>,
) -> Result<()> {
    let kernels = Kernels::<T>::new(shape);
    let rows = rows_of(qkv.len(), shape.width());
    assert_eq!(rows, segments.rows, "the segments are those of the pack");
    assert_eq!(dqkv.len(), qkv.len(), "the gradient is as large as what it is of");
    assert_eq!([out.len(), g.len()], [rows * shape.query_width(); 2], "results are [rows, query_width]");
    assert_eq!(log_sums.len(), rows * shape.heads, "the sums are [heads, rows]");
    [qkv, out, g, dqkv.as_view()].into_iter().for_each(|view| kernels.check(view));
    if !segments.whole {
        device.clear(dqkv.reborrow())?;
    }
    let mut deltas = device.uninit::<f32>(rows * shape.heads)?;
    let mut scratch = device.uninit::<f32>(segments.slots * 2 * TILE * shape.kv_width())?;
    let [heads, kv_heads, dim] = shape_arguments(shape);
    let (list, tiles) = (segments.segments.all().into(), segments.tiles.all().into());
    let (qkv, out, g, rows) = (qkv.into(), out.into(), g.into(), size(rows).into());
    let (log_sums, scale, to) = (log_sums.into(), scale(shape), Argument::from(&dqkv));
    let deltas = deltas.all_mut().into();
    let scratch = scratch.all_mut().into();

    let arguments = [qkv, list, tiles, rows, heads, kv_heads, dim, scale, out, log_sums, g, deltas, to];
    let grid = [shape.heads, segments.tiles.len() / 2, 1];
    let name = kernels.name("attention_query_gradient");
    device.launch(&name, grid, kernels.threads(), kernels.query_gradient(), &arguments)?;

    let (jobs, seen) = (segments.jobs.all().into(), segments.seen.all().into());
    let arguments = [qkv, jobs, seen, rows, heads, kv_heads, dim, scale, log_sums, g, deltas, scratch, to];
    let grid = [shape.kv_heads, segments.jobs.len() / 5, 1];
    let name = kernels.name("attention_key_gradient");
    device.launch(&name, grid, kernels.threads(), kernels.key_gradient(), &arguments)?;

    let arguments = [segments.splits.all().into(), heads, kv_heads, dim, scratch, to];
    let grid = [shape.kv_heads, segments.splits.len() / 4, 1];
    device.launch(&kernels.name("attention_join"), grid, 256, 0, &arguments)
}
