//! Prefill: attention of chunks of new tokens over a paged KV cache (chunked prefill, Sarathi-Serve, arXiv 2403.02310),
//! with the tiles of [`attention`](super::attention).
//!
//! Invariant: the result of a token has the bits of [`attention`](super::attention::attention) over its whole sequence,
//! for every division into chunks and every batch.

use std::cmp::Reverse;
use std::ops::Range;

use super::attention::{AttentionHeads, Kernels, QUERIES};
use super::paged::{PAGE, PageTable, page_len};
use super::{rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{DeviceBuffer, View, ViewMut};

/// Consecutive new tokens of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Rows of the tokens in the batch.
    pub rows: Range<usize>,
    /// Position of the first token in the sequence.
    pub position: usize,
    /// Row of the sequence in the page table.
    pub sequence: usize,
}

/// The chunks of a batch, divided into tiles, on the device.
#[derive(Debug)]
pub struct Chunks {
    /// `[tiles, 4]`: start and end of rows, position of the first, sequence.
    tiles: DeviceBuffer<i32>,
    /// End of the last row.
    end: usize,
    /// Sequences that the page table must have, and pages of the longest.
    sequences: usize,
    pages: usize,
}

impl Chunks {
    /// Work list for the chunks of a batch.
    ///
    /// # Errors
    /// If device memory is full.
    pub fn new(device: &Device, chunks: &[Chunk]) -> Result<Self> {
        // Longest tiles first (number of keys of the last query), so that no long tile is left for the end.
        let mut tiles = Vec::new();
        for Chunk { rows, position, sequence } in chunks {
            for first in rows.clone().step_by(QUERIES) {
                let (end, place) = ((first + QUERIES).min(rows.end), position + first - rows.start);
                tiles.push((place + end - first, [first, end, place, *sequence].map(size)));
            }
        }
        tiles.sort_by_key(|(seen, _)| Reverse(*seen));
        let pages = tiles.first().map_or(0, |(seen, _)| seen.div_ceil(PAGE));
        let tiles: Vec<[i32; 4]> = tiles.into_iter().map(|(_, tile)| tile).collect();
        Ok(Self {
            tiles: device.upload(tiles.as_flattened())?,
            end: chunks.iter().map(|chunk| chunk.rows.end).max().unwrap_or(0),
            sequences: chunks.iter().map(|chunk| chunk.sequence + 1).max().unwrap_or(0),
            pages,
        })
    }
}

/// Attention of the queries of `chunks` in `qkv [rows, width]` over the `cache` of one layer, which contains their own
/// keys and values, into the same rows of `out [rows, query_width]`; other rows are unchanged.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn prefill_attention<T: Storage>(
    device: &Device,
    qkv: View<'_, T>,
    cache: View<'_, T>,
    chunks: &Chunks,
    table: PageTable<'_>,
    heads: AttentionHeads<'_, T>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let PageTable { pages: tables, columns: max_pages } = table;
    let (kernels, shape) = (Kernels::new(&heads), heads.shape);
    let rows = rows_of(qkv.len(), shape.width());
    assert!(chunks.end <= rows, "chunks of {} rows among {rows}", chunks.end);
    assert_eq!(out.len(), rows * shape.query_width(), "the result is [rows, query_width]");
    assert!(chunks.pages <= max_pages, "chunks see {} pages of {max_pages}", chunks.pages);
    let sequences = rows_of(tables.len(), max_pages);
    assert!(chunks.sequences <= sequences, "chunks of {} sequences of {sequences}", chunks.sequences);
    rows_of(cache.len(), page_len(shape));
    [qkv, cache, out.as_view()].into_iter().for_each(|view| kernels.check(view));
    let (tiles, pages) = (chunks.tiles.all().into(), size(max_pages).into());
    let mut arguments: Vec<Argument> = vec![qkv.into(), cache.into(), tiles, tables.into(), pages];
    arguments.extend(heads.arguments());
    arguments.push(out.into());
    let grid = kernels.query_grid(shape.heads, chunks.tiles.len() / 4);
    device.launch(&kernels.name("prefill_attention"), grid, kernels.threads(), kernels.forward(), &arguments)
}
