//! Gather, scatter and sum of rows: embedding and its gradient, selected rows, biases.

use super::{PACK, THREADS, rows_of, size, slabs, tiles};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{DeviceBuffer, View, ViewMut};

/// Smallest number of rows per block in a column sum, eight per warp.
const SLAB: usize = 64;

/// Row `rows[i]` of `from [n, width]` as row `i` of `out [rows.len(), width]`, such as the embedding of tokens. The
/// host must have checked that all `rows` are below `n`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gather_rows<T: Storage>(
    device: &Device,
    from: View<'_, T>,
    rows: View<'_, u32>,
    width: usize,
    out: ViewMut<'_, T>,
) -> Result<()> {
    rows_of(from.len(), width);
    assert_eq!(out.len(), rows.len() * width, "the result has a row for each that is picked");
    let (blocks, threads) = tiles::<T>(width);
    let arguments = [from.into(), rows.into(), size(width).into(), out.into()];
    device.launch(&format!("gather_rows_{}", T::SUFFIX), [rows.len(), blocks, 1], threads, 0, &arguments)
}

/// Positions grouped by key, on the device.
#[derive(Debug)]
pub struct RowGroups {
    /// Distinct keys, start of each group (and the end of the last), and positions in order of groups.
    lists: DeviceBuffer<u32>,
    groups: usize,
    positions: usize,
    /// One more than the largest key.
    end: usize,
}

impl RowGroups {
    /// Groups the positions of `keys [n]` by key.
    ///
    /// # Errors
    /// If device memory is full.
    ///
    /// # Panics
    /// If there are more than 2^31 of them.
    pub fn new(device: &Device, keys: &[u32]) -> Result<Self> {
        size(keys.len());
        // A key in the upper half, its position in the lower.
        let mut sorted: Vec<u64> =
            (0..).zip(keys).map(|(position, key): (u64, _)| u64::from(*key) << 32 | position).collect();
        sorted.sort_unstable();
        let key_of = |entry: &u64| (entry >> 32) as u32;
        let groups: Vec<&[u64]> = sorted.chunk_by(|a, b| key_of(a) == key_of(b)).collect();
        let mut lists: Vec<u32> = groups.iter().map(|group| key_of(&group[0])).collect();
        let mut start = 0;
        lists.push(start);
        for group in &groups {
            start += group.len() as u32;
            lists.push(start);
        }
        lists.extend(sorted.iter().map(|entry| *entry as u32));
        let end = sorted.last().map_or(0, |entry| key_of(entry) as usize + 1);
        Ok(Self { lists: device.upload(&lists)?, groups: groups.len(), positions: keys.len(), end })
    }

    /// Number of positions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.positions
    }

    /// Whether there are no positions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.positions == 0
    }

    /// Number of distinct keys.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Kernel arguments: keys, starts and positions.
    fn arguments(&self) -> [Argument; 3] {
        let (starts, positions) = (self.groups, 2 * self.groups + 1);
        let lists = self.lists.all();
        [
            lists.slice(0..starts).into(),
            lists.slice(starts..positions).into(),
            lists.slice(positions..lists.len()).into(),
        ]
    }

    fn check(&self, len: usize, width: usize, to: usize) {
        assert_eq!(len, self.positions * width, "a row for each position");
        let rows = rows_of(to, width);
        assert!(self.end <= rows, "a key is {} where {rows} rows are", self.end.saturating_sub(1));
    }
}

/// Adds to each row `key` of `to [n, width]` the rows of `g [groups.len(), width]` whose positions have that key, in
/// order: the gradient of the embedding.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn add_rows<T: Storage>(
    device: &Device,
    g: View<'_, T>,
    groups: &RowGroups,
    width: usize,
    to: ViewMut<'_, f32>,
) -> Result<()> {
    groups.check(g.len(), width, to.len());
    let (blocks, threads) = tiles::<T>(width);
    let [keys, starts, positions] = groups.arguments();
    let arguments = [g.into(), keys, starts, positions, size(width).into(), to.into()];
    device.launch(&format!("add_rows_{}", T::SUFFIX), [groups.groups, blocks, 1], threads, 0, &arguments)
}

/// Sets each row `key` of `to [n, width]` to the sum of the rows of `g [groups.len(), width]` whose positions have that
/// key, and all other rows to zero: the gradient of [`gather_rows`].
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn scatter_rows<T: Storage>(
    device: &Device,
    g: View<'_, T>,
    groups: &RowGroups,
    width: usize,
    mut to: ViewMut<'_, T>,
) -> Result<()> {
    groups.check(g.len(), width, to.len());
    device.clear(to.reborrow())?;
    let (blocks, threads) = tiles::<T>(width);
    let [keys, starts, positions] = groups.arguments();
    let arguments = [g.into(), keys, starts, positions, size(width).into(), to.into()];
    device.launch(&format!("scatter_rows_{}", T::SUFFIX), [groups.groups, blocks, 1], threads, 0, &arguments)
}

/// Adds `bias [width]` to each row of `x [rows, width]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn add_bias<T: Storage>(device: &Device, x: ViewMut<'_, T>, bias: View<'_, T>) -> Result<()> {
    let width = bias.len();
    let rows = rows_of(x.len(), width);
    let (blocks, threads) = tiles::<T>(width);
    let arguments = [bias.into(), size(width).into(), x.into()];
    device.launch(&format!("add_bias_{}", T::SUFFIX), [rows, blocks, 1], threads, 0, &arguments)
}

/// Adds the column sums of `g [rows, width]` to `to [width]`: the gradient of a bias.
///
/// # Errors
/// If a launch fails, or there is no memory for partial sums.
///
/// # Panics
/// If the shapes do not fit.
pub fn column_sums<T: Storage>(device: &Device, g: View<'_, T>, to: ViewMut<'_, f32>) -> Result<()> {
    let width = to.len();
    let rows = rows_of(g.len(), width);
    if rows == 0 {
        return Ok(());
    }
    let (slab, parts) = slabs(rows, SLAB);
    let mut partial = device.uninit::<f32>(parts * width)?;
    let arguments =
        [g.into(), size(rows).into(), size(slab).into(), size(width).into(), partial.all_mut().into()];
    let grid = [width.div_ceil(32 * PACK / size_of::<T>()), parts, 1];
    device.launch(&format!("column_parts_{}", T::SUFFIX), grid, THREADS, 0, &arguments)?;
    add_partial_sums(device, partial.all(), to)
}

/// Adds the column sums of `partial [parts, width]` to `to [width]`.
pub(super) fn add_partial_sums(device: &Device, partial: View<'_, f32>, to: ViewMut<'_, f32>) -> Result<()> {
    let width = to.len();
    let parts = rows_of(partial.len(), width);
    let arguments = [partial.into(), size(parts).into(), size(width).into(), to.into()];
    device.launch("add_partial_sums", [width.div_ceil(32), 1, 1], THREADS, 0, &arguments)
}
