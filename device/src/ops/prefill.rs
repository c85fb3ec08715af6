//! Attention of the new tokens of sequences over a key-value cache in pages, several tokens of each.
//!
//! Invariant: the result of a token has the bits of [`attention`](super::attention::attention) over its whole sequence,
//! wherever the sequence is cut into chunks and whatever else is in the batch.

use std::cmp::Reverse;
use std::ops::Range;

use super::attention::{Kernels, TILE, scale, shape_arguments};
use super::heads::HeadShape;
use super::paged::{PAGE, page_len};
use super::{rows_of, size};
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{Buffer, View, ViewMut};

/// New tokens of a sequence, one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The tokens, as rows of a batch.
    pub rows: Range<usize>,
    /// Where in the sequence the first of them is.
    pub position: usize,
    /// The sequence, as a row of the table of pages.
    pub sequence: usize,
}

/// Chunks, cut into what one block takes.
#[derive(Debug)]
pub struct Chunks {
    /// `[tiles, 4]`: rows from and to, position of the first, sequence.
    tiles: Buffer<i32>,
    /// Behind the last row of all.
    end: usize,
    /// Sequences that the table of pages has to have, and pages of the longest.
    sequences: usize,
    pages: usize,
}

impl Chunks {
    /// The chunks of a batch.
    ///
    /// # Errors
    /// If there is no memory for the list.
    pub fn new(device: &Device, chunks: &[Chunk]) -> Result<Self> {
        // How many keys the tile's last query sees: the longest come first, so that none is left for the end.
        let mut tiles = Vec::new();
        for Chunk { rows, position, sequence } in chunks {
            for first in rows.clone().step_by(TILE) {
                let (end, place) = ((first + TILE).min(rows.end), position + first - rows.start);
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

/// Attention of the queries of `chunks` in `qkv [rows, width]` over the `cache` of one layer, in which their own keys and
/// values are, into those rows of `out [rows, query_width]`; others stay as they are. `tables [sequences, max_pages]` are
/// the pages of each sequence, in the order of positions.
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
    (tables, max_pages): (View<'_, u32>, usize),
    shape: HeadShape,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let kernels = Kernels::<T>::new(shape);
    let rows = rows_of(qkv.len(), shape.width());
    assert!(chunks.end <= rows, "chunks of {} rows among {rows}", chunks.end);
    assert_eq!(out.len(), rows * shape.query_width(), "the result is [rows, query_width]");
    assert!(chunks.pages <= max_pages, "chunks see {} pages of {max_pages}", chunks.pages);
    let sequences = rows_of(tables.len(), max_pages);
    assert!(chunks.sequences <= sequences, "chunks of {} sequences of {sequences}", chunks.sequences);
    rows_of(cache.len(), page_len(shape));
    [qkv, cache, out.as_view()].into_iter().for_each(|view| kernels.check(view));
    let [heads, kv_heads, dim] = shape_arguments(shape);
    let (tiles, tables, pages) = (chunks.tiles.all().into(), tables.into(), size(max_pages).into());
    let arguments =
        [qkv.into(), cache.into(), tiles, tables, pages, heads, kv_heads, dim, scale(shape), out.into()];
    let grid = [shape.heads, chunks.tiles.len() / 4, 1];
    device.launch(&kernels.name("prefill_attention"), grid, kernels.threads(), kernels.forward(), &arguments)
}
