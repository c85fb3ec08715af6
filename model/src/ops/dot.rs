//! Products with weights of fewer bits than f32: one instruction multiplies neighbouring inputs of a row with their weights
//! and adds the products to a sum in 32 bits.
//!
//! Invariant: a sum runs over the inputs of its own row in ascending order, whatever the tile that it is computed in. The
//! arithmetic is that of the [`Sums`]; there is no number format here.

use super::gemm::ProductOut;

/// Outputs of a line.
pub(crate) const LINE: usize = 16;
/// Lines of a panel: with six rows their sums fill 24 of the 32 AVX-512 registers.
pub(crate) const PANEL: usize = 4;
/// Outputs of a panel.
pub(crate) const PANEL_WIDTH: usize = PANEL * LINE;

/// Weights of 16 outputs for the neighbouring inputs of one step: one AVX-512 register.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub(crate) struct PanelLine<W>(pub(crate) [W; LINE]);

/// Sums of the 16 outputs of a line.
pub(crate) trait Sums: Copy {
    /// Neighbouring inputs of a row, multiplied by one instruction.
    type Inputs: Copy + Default;
    /// Their weights for one output.
    type Weights;

    fn zero() -> Self;

    /// With the products of `inputs` and the weights of `line`.
    fn add(self, inputs: Self::Inputs, line: &PanelLine<Self::Weights>) -> Self;
}

/// What turns the sums of a line into results.
pub(crate) trait Results<S> {
    /// Results of row `row` and the 16 columns of the layer from `column` on.
    fn results(&self, row: usize, column: usize, sums: S) -> [f32; LINE];
}

/// Whether the product replaces the result or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreMode {
    Replace,
    Add,
}

/// Some panels of a layer, and the rows that they are multiplied with.
#[derive(Debug)]
pub(crate) struct DotOperands<'a, X, W> {
    /// `[panels * steps]`
    pub(crate) lines: &'a [[PanelLine<W>; PANEL]],
    /// Column of the layer that the panels begin at.
    pub(crate) first: usize,
    /// `[rows, steps]`
    pub(crate) inputs: &'a [X],
    /// Steps of a row, at least 1.
    pub(crate) steps: usize,
}

impl<X, W> Clone for DotOperands<'_, X, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<X, W> Copy for DotOperands<'_, X, W> {}

/// All panels, each with all rows: `N` lines by at most `MR` rows at a time, within the number of registers for sums.
#[inline(always)]
pub(crate) fn panels<S: Sums, const N: usize, const MR: usize>(
    operands: DotOperands<'_, S::Inputs, S::Weights>,
    results: &impl Results<S>,
    out: &mut ProductOut<'_>,
    store: StoreMode,
) {
    const { assert!(PANEL.is_multiple_of(N) && MR <= 6) };
    let DotOperands { lines, first: first_column, inputs: rows, steps } = operands;
    let height = rows.len() / steps;
    let count = height.div_ceil(MR);
    // Tiles of equal height: one of few rows would wait for the sums of the instruction before.
    let tiles = || (0..count).map(|t| t * height / count..(t + 1) * height / count);
    let mut inputs = vec![S::Inputs::default(); rows.len()];
    for tile in tiles() {
        for (row, values) in rows[tile.start * steps..tile.end * steps].chunks_exact(steps).enumerate() {
            let slots = inputs[tile.start * steps + row..].iter_mut().step_by(tile.len());
            slots.zip(values).for_each(|(slot, value)| *slot = *value);
        }
    }
    for (panel, lines) in lines.chunks_exact(steps).enumerate() {
        for line in (0..PANEL).step_by(N) {
            for (t, tile) in tiles().enumerate() {
                // Each tile fetches its share of the next panel: neighbouring lines come in pairs.
                let ahead = if count < PANEL { t * PANEL / count } else { t % PANEL };
                let inputs = &inputs[tile.start * steps..tile.end * steps];
                let column = panel * PANEL_WIDTH + line * LINE;
                let place = TilePlacement { column, first_column, row: tile.start, store };
                match tile.len() {
                    1 => finish(results, sums::<S, N, 1>(lines, line, inputs, ahead), place, out),
                    2 => finish(results, sums::<S, N, 2>(lines, line, inputs, ahead), place, out),
                    3 => finish(results, sums::<S, N, 3>(lines, line, inputs, ahead), place, out),
                    4 => finish(results, sums::<S, N, 4>(lines, line, inputs, ahead), place, out),
                    5 => finish(results, sums::<S, N, 5>(lines, line, inputs, ahead), place, out),
                    _ => finish(results, sums::<S, N, 6>(lines, line, inputs, ahead), place, out),
                }
            }
        }
    }
}

/// Position of a tile in the result.
#[derive(Clone, Copy)]
pub(crate) struct TilePlacement {
    /// Its first column in the part of the result.
    pub(crate) column: usize,
    /// Column of the layer that this part begins at.
    pub(crate) first_column: usize,
    pub(crate) row: usize,
    pub(crate) store: StoreMode,
}

/// Sums over all inputs of `N` lines of a panel, from `first` on, with `R` rows, whose `inputs` are interleaved. On the
/// way it fetches the line `ahead` of every step of the next panel.
#[inline(always)]
fn sums<S: Sums, const N: usize, const R: usize>(
    lines: &[[PanelLine<S::Weights>; PANEL]],
    first: usize,
    inputs: &[S::Inputs],
    ahead: usize,
) -> [[S; N]; R] {
    let beyond = lines.len() * PANEL;
    let mut sums = [[S::zero(); N]; R];
    for (lines, inputs) in lines.iter().zip(inputs.as_chunks::<R>().0) {
        prefetch(&lines[ahead], beyond);
        for n in 0..N {
            for r in 0..R {
                sums[r][n] = sums[r][n].add(inputs[r], &lines[first + n]);
            }
        }
    }
    sums
}

/// Asks for the line that lies `beyond` lines after `line`: while one panel is multiplied, the next one comes in from
/// memory. There need not be one: an address is all that is used.
#[inline(always)]
fn prefetch<W>(line: &PanelLine<W>, beyond: usize) {
    #[cfg(target_arch = "x86_64")]
    #[expect(unsafe_code, reason = "every x86-64 has it, and it reads nothing that the program could see")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(line).wrapping_add(beyond).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, beyond);
}

/// Puts the results of a tile into `out`.
#[inline(always)]
pub(crate) fn finish<S: Sums, const N: usize, const R: usize>(
    results: &impl Results<S>,
    sums: [[S; N]; R],
    place: TilePlacement,
    out: &mut ProductOut<'_>,
) {
    for (r, sums) in sums.into_iter().enumerate() {
        for (n, sums) in sums.into_iter().enumerate() {
            let column = place.column + n * LINE;
            let width = LINE.min(out.width().saturating_sub(column));
            if width == 0 {
                continue;
            }
            let result = results.results(place.row + r, place.first_column + column, sums);
            let out = out.row(place.row + r, column..column + width);
            match (place.store, out.as_mut_array::<LINE>()) {
                (StoreMode::Replace, Some(out)) => *out = result,
                (StoreMode::Add, Some(out)) => out.iter_mut().zip(result).for_each(|(out, y)| *out += y),
                (StoreMode::Replace, None) => out.copy_from_slice(&result[..width]),
                (StoreMode::Add, None) => out.iter_mut().zip(result).for_each(|(out, y)| *out += y),
            }
        }
    }
}
