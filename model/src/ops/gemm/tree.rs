//! Matrix products that sum the inner dimension as a balanced binary tree over fixed chunks.
//!
//! The inner dimension has one or more parts (query, key and value of a fused projection), and each part is cut into the
//! same number of chunks. Sum `i` is one chain of fused multiply-adds over chunk `i` of every part, in ascending order. The
//! sums are added as a balanced binary tree: `((s0 + s1) + (s2 + s3)) + ...`.
//!
//! Invariant: let `t` be a power of two that divides [`CHUNKS`]. The products of the `t` contiguous shards of the parts
//! ([`collective::even_shards`]), with `CHUNKS / t` chunks each, added as a balanced binary tree, have the bits of the whole product, also
//! where a rank has the shards of its neighbours too, and sums its own. These are
//! the partial sums of tensor-parallel ranks (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053), reduced in an order that
//! does not depend on the number of ranks (TBIK, arXiv 2511.17826).

use std::cell::RefCell;
use std::ops::Range;

use collective::Position;

use super::pack::pack_block;
use super::tile::{PREFETCH_STEPS, load_row, store_row};
use super::{
    NR, PackedPanel, ProductOut, ROW_BLOCK, Right, STEP, StridedMatrix, block_columns, block_values,
    line_start,
};
use crate::ops::simd::{LANES, Vector, prefetch, vectorized, widest};

/// Chunks that each part of a whole inner dimension is cut into.
pub(crate) const CHUNKS: usize = 16;
/// Longest inner length of one pass over a block of rows.
const PASS: usize = 512;
/// Levels of a tree of [`CHUNKS`] leaves.
const LEVELS: usize = CHUNKS.ilog2() as usize;

/// One shard, which is all.
pub(crate) const WHOLE: Position = Position { rank: 0, world: 1 };

/// How the inner dimension of a product is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TreeChunks<'a> {
    /// In their order.
    pub(crate) parts: &'a [TreePart],
    /// Chunks of each part in all shards: a power of two, at most [`CHUNKS`].
    pub(crate) count: usize,
    /// The shard that is summed, and the number of shards, which divides `count`.
    pub(crate) shard: Position,
}

/// A part of the inner dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TreePart {
    /// Its length in all shards.
    pub(crate) len: usize,
    /// Neighbouring shards, each of which has the steps of all of them, and sums its own.
    pub(crate) copies: usize,
}

/// A contiguous range of the inner dimension: a chunk of one part.
#[derive(Clone, Debug)]
struct ChunkRun {
    steps: Range<usize>,
    /// Whether the sum of the chunk is complete after it.
    ends_sum: bool,
}

/// What a pass does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TreeStore {
    /// Overwrites the result.
    Write,
    /// Adds its sum to the result.
    Add,
    /// Continues the chains in the result.
    Continue,
}

impl TreePart {
    /// Of which every shard has its own steps only.
    pub(crate) fn of(len: usize) -> Self {
        Self { len, copies: 1 }
    }
}

impl TreeChunks<'_> {
    /// Chunks of the shard.
    fn own(self) -> usize {
        self.count / self.shard.world
    }

    /// The steps of a part that the shard has.
    fn own_steps(self, TreePart { len, copies }: TreePart) -> Range<usize> {
        let first = self.shard.rank / copies * copies;
        let at = |shard: usize| shard * self.own() * len / self.count;
        at(first)..at(first + copies)
    }

    /// Chunk `chunk` of the shard, of the steps of a part that it has.
    fn of_part(self, chunk: usize, part: TreePart) -> Range<usize> {
        let start = self.own_steps(part).start;
        let at = |chunk: usize| (self.shard.rank * self.own() + chunk) * part.len / self.count - start;
        at(chunk)..at(chunk + 1)
    }

    /// Inner length of `chunks` in all parts.
    fn len(self, chunks: &Range<usize>) -> usize {
        let (first, last) = (chunks.start, chunks.end - 1);
        self.parts.iter().map(|part| self.of_part(last, *part).end - self.of_part(first, *part).start).sum()
    }

    /// The ranges of `chunks`, in the order of summation.
    fn runs(self, chunks: Range<usize>, runs: &mut Vec<ChunkRun>) {
        runs.clear();
        for chunk in chunks {
            let mut start = 0;
            for (index, part) in self.parts.iter().enumerate() {
                let steps = self.of_part(chunk, *part);
                let ends_sum = index + 1 == self.parts.len();
                runs.push(ChunkRun { steps: start + steps.start..start + steps.end, ends_sum });
                start += self.own_steps(*part).len();
            }
        }
    }
}

/// Buffers of one thread, which outlive a product.
#[derive(Default)]
struct TreeScratch {
    panel: Vec<f32>,
    /// Pending sums of a tile's tree.
    nodes: Vec<f32>,
    runs: Vec<ChunkRun>,
    /// Pending sums of a row block's tree, `[rows, columns]` each, by depth.
    pending: Vec<Vec<f32>>,
}

/// `out = left [rows, inner] x right [inner, columns]` if `fresh`, else `out += left x right`.
///
/// # Panics
/// If the shapes do not fit each other, or the rows of `left` are not contiguous.
pub(crate) fn tree_product(
    left: StridedMatrix<'_>,
    right: Right<'_>,
    chunks: TreeChunks<'_>,
    out: &ProductOut<'_>,
    fresh: bool,
) {
    let (inner, columns) = right.shape();
    assert_eq!(left.columns, inner, "the inner dimensions agree");
    assert_eq!(left.column_stride, 1, "rows of the left matrix are contiguous");
    let steps: usize = chunks.parts.iter().map(|part| chunks.own_steps(*part).len()).sum();
    assert_eq!(steps, inner, "the parts make up the inner dimension");
    assert!(chunks.count.is_power_of_two() && chunks.count <= CHUNKS, "{} chunks", chunks.count);
    assert!(chunks.count.is_multiple_of(chunks.shard.world), "{} shards", chunks.shard.world);
    if left.rows == 0 || columns == 0 {
        return;
    }
    let end = (left.rows - 1) * out.row_stride + columns;
    assert!(columns <= out.width && end <= out.len, "the result is [{}, {columns}]", left.rows);
    thread_local! {
        static SCRATCH: RefCell<TreeScratch> = RefCell::default();
    }
    let store = if fresh { TreeStore::Write } else { TreeStore::Add };
    SCRATCH.with_borrow_mut(|scratch| {
        for first in (0..left.rows).step_by(ROW_BLOCK) {
            let rows = first..(first + ROW_BLOCK).min(left.rows);
            let to =
                RowsOut { first: out.first.wrapping_add(first * out.row_stride), row_stride: out.row_stride };
            let block = RowBlock { left: left.rows(rows), right, chunks, columns };
            block.node(0..chunks.own(), to, store, 0, scratch);
        }
    });
}

/// Where the result of a block of rows goes.
#[derive(Clone, Copy)]
struct RowsOut {
    first: *mut f32,
    row_stride: usize,
}

/// The product of a block of rows.
struct RowBlock<'a> {
    left: StridedMatrix<'a>,
    right: Right<'a>,
    chunks: TreeChunks<'a>,
    columns: usize,
}

impl RowBlock<'_> {
    /// The sum of a node of the tree, whose leaves are `chunks`. `depth` is the number of pending sums.
    fn node(&self, chunks: Range<usize>, to: RowsOut, store: TreeStore, depth: usize, s: &mut TreeScratch) {
        if self.chunks.len(&chunks) <= PASS {
            let mut runs = std::mem::take(&mut s.runs);
            self.chunks.runs(chunks, &mut runs);
            pass(self, &runs, to, store, s);
            s.runs = runs;
        } else if store == TreeStore::Add {
            self.pending_node(chunks, to, depth, s);
        } else if chunks.len() == 1 {
            self.long_chunk(chunks, to, s);
        } else {
            let middle = chunks.start + chunks.len() / 2;
            self.node(chunks.start..middle, to, store, depth, s);
            self.node(middle..chunks.end, to, TreeStore::Add, depth, s);
        }
    }

    /// The sum of one chunk that is longer than a pass.
    fn long_chunk(&self, chunk: Range<usize>, to: RowsOut, s: &mut TreeScratch) {
        let mut runs = Vec::new();
        self.chunks.runs(chunk, &mut runs);
        let mut store = TreeStore::Write;
        for run in runs {
            for start in run.steps.clone().step_by(PASS) {
                let steps = start..(start + PASS).min(run.steps.end);
                pass(self, &[ChunkRun { steps, ends_sum: true }], to, store, s);
                store = TreeStore::Continue;
            }
        }
    }

    /// Sums a node in a separate buffer and adds it to the result.
    fn pending_node(&self, chunks: Range<usize>, to: RowsOut, depth: usize, s: &mut TreeScratch) {
        if s.pending.len() <= depth {
            s.pending.resize(depth + 1, Vec::new());
        }
        let mut sums = std::mem::take(&mut s.pending[depth]);
        sums.resize(sums.len().max(self.left.rows * self.columns), 0.0);
        let own = RowsOut { first: sums.as_mut_ptr(), row_stride: self.columns };
        self.node(chunks, own, TreeStore::Write, depth + 1, s);
        for (row, sums) in sums.chunks_exact(self.columns).take(self.left.rows).enumerate() {
            let row = to.first.wrapping_add(row * to.row_stride);
            #[expect(
                unsafe_code,
                reason = "`tree_product` checked that the result has these rows and columns"
            )]
            add(unsafe { std::slice::from_raw_parts_mut(row, self.columns) }, sums);
        }
        s.pending[depth] = sums;
    }
}

vectorized! {
    fn add(out: &mut [f32], sums: &[f32]) {
        for (out, sum) in out.iter_mut().zip(sums) {
            *out += sum;
        }
    }
}

widest! {
    /// Sums `runs`, at most [`PASS`] steps, for all columns of a block of rows.
    fn pass(block: &RowBlock<'_>, runs: &[ChunkRun], to: RowsOut, store: TreeStore, scratch: &mut TreeScratch) =
        columns_of_pass::<__m512, 3, 8> | <__m256, 2, 6> | <4, 6>
}

/// `N` registers of type `V` by at most `R` rows make the largest tile.
#[inline(always)]
fn columns_of_pass<V: Vector, const N: usize, const R: usize>(
    block: &RowBlock<'_>,
    runs: &[ChunkRun],
    to: RowsOut,
    store: TreeStore,
    scratch: &mut TreeScratch,
) {
    let TreeScratch { panel: buffer, nodes, .. } = scratch;
    let len: usize = runs.iter().map(|run| run.steps.len()).sum();
    buffer.resize(block_values().max(NR * PASS) + LANES, 0.0);
    nodes.resize(LEVELS * R * NR + LANES, 0.0);
    let (start, first_node) = (line_start(buffer), line_start(nodes));
    let RowBlock { left, right, columns, .. } = *block;
    let steps = match right {
        Right::Panels { .. } => runs[0].steps.start..runs[runs.len() - 1].steps.end,
        Right::Unpacked(_) => 0..len,
    };
    assert_eq!(steps.len(), len, "the chunks of packed panels follow each other");
    let block = block_columns(right, len);
    for block_start in (0..columns).step_by(block) {
        let block = block_start..(block_start + block).min(columns);
        if let Right::Unpacked(matrix) = right {
            for first in block.clone().step_by(NR) {
                let padded = NR.min(columns - first).next_multiple_of(STEP);
                let mut at = start + (first - block_start) * len;
                for run in runs.iter().filter(|run| !run.steps.is_empty()) {
                    let to = &mut buffer[at..at + run.steps.len() * padded];
                    at += to.len();
                    pack_block::<V>(matrix, run.steps.clone(), first, to);
                }
            }
        }
        for row in (0..left.rows).step_by(R) {
            let height = (left.rows - row).min(R);
            for first in block.clone().step_by(NR) {
                let wide = NR.min(columns - first);
                let PackedPanel { values: panel, padded, next } =
                    right.panel(first, &steps, block_start, &buffer[start..]);
                if next.is_some() {
                    for below in row + height..(row + 2 * height).min(left.rows) {
                        prefetch(to.first.wrapping_add(below * to.row_stride + first), wide);
                    }
                }
                for sub in (0..wide).step_by(V::WIDTH * N) {
                    let width = (wide - sub).min(V::WIDTH * N);
                    let tile = TreeTile {
                        rows: &left.values[row * left.row_stride..],
                        row_stride: left.row_stride,
                        runs,
                        panel: &panel[sub.min(panel.len())..],
                        panel_stride: padded,
                        nodes: nodes[first_node..].as_mut_ptr(),
                        store,
                        width,
                        out: to.first.wrapping_add(row * to.row_stride + first + sub),
                        out_stride: to.row_stride,
                    };
                    let registers = width.div_ceil(V::WIDTH);
                    // Registers of one panel come in multiples of STEP columns, so few combinations exist.
                    if registers == N {
                        tile.sum_rows::<V, N, R>(height);
                    } else if registers == 2 {
                        tile.sum_rows::<V, 2, R>(height);
                    } else if registers == 3 {
                        tile.sum_rows::<V, 3, R>(height);
                    } else {
                        tile.sum_rows::<V, 1, R>(height);
                    }
                }
            }
        }
    }
}

/// One register tile of a pass.
#[derive(Clone, Copy)]
struct TreeTile<'a> {
    rows: &'a [f32],
    row_stride: usize,
    runs: &'a [ChunkRun],
    /// The steps of `runs` one after the other, `panel_stride` values each.
    panel: &'a [f32],
    panel_stride: usize,
    /// `[LEVELS, R, NR]` pending sums.
    nodes: *mut f32,
    store: TreeStore,
    /// Columns of the tile that exist.
    width: usize,
    out: *mut f32,
    out_stride: usize,
}

impl TreeTile<'_> {
    #[inline(always)]
    fn sum_rows<V: Vector, const N: usize, const R: usize>(self, height: usize) {
        match height {
            1 => self.sum::<V, N, 1>(),
            2 => self.sum::<V, N, 2>(),
            3 => self.sum::<V, N, 3>(),
            4 => self.sum::<V, N, 4>(),
            5 => self.sum::<V, N, 5>(),
            6 => self.sum::<V, N, 6>(),
            7 if R > 6 => self.sum::<V, N, 7>(),
            _ => self.sum::<V, N, R>(),
        }
    }

    /// `H` rows by `N` registers. The chain of a chunk is in registers, the pending sums are in the first-level cache.
    #[inline(always)]
    fn sum<V: Vector, const N: usize, const H: usize>(self) {
        let Self { rows, row_stride, runs, panel, panel_stride, store, width, out, out_stride, .. } = self;
        let last = runs.iter().map(|run| run.steps.end).max().unwrap_or(0);
        let len: usize = runs.iter().map(|run| run.steps.len()).sum();
        assert!((H - 1) * row_stride + last <= rows.len(), "the tile lies inside the left matrix");
        assert!(len == 0 || (len - 1) * panel_stride + V::WIDTH * N <= panel.len(), "and inside the panel");
        let rows: [*const f32; H] = std::array::from_fn(|r| rows[r * row_stride..].as_ptr());
        let mut sums = [[V::zero(); N]; H];
        if store == TreeStore::Continue {
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = load_row(out.wrapping_add(r * out_stride), width);
            }
        }
        let (mut b, mut leaf) = (panel.as_ptr(), 0_usize);
        for (index, run) in runs.iter().enumerate() {
            for k in run.steps.clone() {
                #[expect(unsafe_code, reason = "both ends were checked against the lengths above")]
                unsafe {
                    prefetch(b.wrapping_add(PREFETCH_STEPS * panel_stride), V::WIDTH * N);
                    let b: [V; N] = std::array::from_fn(|n| V::load_at(b.add(n * V::WIDTH)));
                    for (sum, row) in sums.iter_mut().zip(rows) {
                        let a = *row.add(k);
                        for (sum, b) in sum.iter_mut().zip(b) {
                            *sum = b.mul_add(a, *sum);
                        }
                    }
                }
                b = b.wrapping_add(panel_stride);
            }
            if run.ends_sum {
                self.merge(leaf, &mut sums);
                leaf += 1;
                if index + 1 < runs.len() {
                    self.push(leaf.trailing_zeros() as usize, &mut sums);
                }
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            let to = out.wrapping_add(r * out_stride);
            let sum = match store {
                TreeStore::Add => {
                    let before: [V; N] = load_row(to, width);
                    std::array::from_fn(|n| before[n].mul_add(1.0, sum[n]))
                }
                TreeStore::Write | TreeStore::Continue => sum,
            };
            store_row(sum, to, width);
        }
    }

    /// Adds the pending sums that leaf `leaf` completes: one for every trailing 1 of its number.
    #[inline(always)]
    fn merge<V: Vector, const N: usize, const H: usize>(self, leaf: usize, sums: &mut [[V; N]; H]) {
        for level in 0..leaf.trailing_ones() as usize {
            for (i, sum) in sums.as_flattened_mut().iter_mut().enumerate() {
                #[expect(unsafe_code, reason = "a tile has LEVELS pending sums for its registers")]
                let pending = unsafe { V::load_at(self.nodes.add((level * N * H + i) * V::WIDTH)) };
                *sum = pending.mul_add(1.0, *sum);
            }
        }
    }

    /// Keeps the sum of a node of level `level` until its sibling is complete, and starts the next chain at zero.
    #[inline(always)]
    fn push<V: Vector, const N: usize, const H: usize>(self, level: usize, sums: &mut [[V; N]; H]) {
        assert!(level < LEVELS, "a tree of {CHUNKS} leaves");
        for (i, sum) in sums.as_flattened_mut().iter_mut().enumerate() {
            #[expect(unsafe_code, reason = "a tile has LEVELS pending sums for its registers")]
            unsafe {
                sum.store_at(self.nodes.add((level * N * H + i) * V::WIDTH));
            }
            *sum = V::zero();
        }
    }
}
