//! Weights in quantised blocks, with low-rank factors added, as QLoRA computes with a frozen base (Dettmers et al. 2023, arXiv
//! 2305.14314).
//!
//! ```text
//! W = dequantised + scale * B A,  A [rank, in], B [out, rank]
//! ```

use super::size;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{DeviceBuffer, View, ViewMut};

/// Places of tensors among the bytes of blocks are multiples of so many bytes.
pub const BLOCK_ALIGNMENT: usize = 16;

/// Rows and columns that a block of threads writes.
const TILE: [usize; 2] = [8, 256];

/// Words of a tensor in the table.
const WORDS: usize = 9;

/// What a tensor without factors has in place of their places.
const NONE: u32 = u32::MAX;

/// Added to the format of an embedding, whose product is that of its transpose.
const TRANSPOSED: u32 = 1 << 8;

/// How values are stored in blocks. The layouts of all but the last two are those of GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum BlockFormat {
    /// Single numbers.
    F32,
    /// Single numbers.
    F16,
    /// Single numbers.
    Bf16,
    /// 32 values of 8 bits.
    Q8Zero,
    /// 32 values of 4 bits.
    Q4Zero,
    /// 32 values of 4 bits, with a minimum.
    Q4One,
    /// 256 values of 4 bits.
    Q4K,
    /// 256 values of 6 bits.
    Q6K,
    /// 128 values in E4M3 after their scale, an f32.
    Float8,
    /// 32 values in E2M1 after their scale, a power of two.
    Mxfp4,
}

impl BlockFormat {
    /// All formats, in the order of their numbers.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8Zero,
        Self::Q4Zero,
        Self::Q4One,
        Self::Q4K,
        Self::Q6K,
        Self::Float8,
        Self::Mxfp4,
    ];

    /// Values and bytes of a block.
    #[must_use]
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8Zero => (32, 34),
            Self::Q4Zero => (32, 18),
            Self::Q4One => (32, 20),
            Self::Q4K => (256, 144),
            Self::Q6K => (256, 210),
            Self::Float8 => (128, 132),
            Self::Mxfp4 => (32, 17),
        }
    }
}

/// The factors of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct BlockFactors {
    /// Where `A [rank, in]` begins among the factors.
    pub a: usize,
    /// Where `B [out, rank]` begins.
    pub b: usize,
    /// Whether the product is that of the transposed tensor, as of an embedding.
    pub transposed: bool,
}

/// A tensor `[rows, columns]` in blocks.
#[derive(Clone, Copy, Debug)]
pub struct BlockTensor {
    /// How its values are stored.
    pub format: BlockFormat,
    /// Its rows, 1 for a vector.
    pub rows: usize,
    /// Its columns.
    pub columns: usize,
    /// Where its blocks begin, a multiple of [`BLOCK_ALIGNMENT`] bytes.
    pub place: usize,
    /// Where its values begin in the result.
    pub to: usize,
    /// Its factors, if it has some.
    pub factors: Option<BlockFactors>,
}

/// Tensors that are dequantised together.
#[derive(Debug)]
pub struct BlockTable {
    /// Of each tensor [`WORDS`] numbers, as the kernel reads them.
    words: DeviceBuffer<u32>,
    tensors: usize,
    tiles: usize,
    /// Bytes of blocks, factors, and values of the result that the tensors reach to.
    ends: [usize; 3],
}

impl BlockTable {
    /// Those `tensors`, each `[rows, columns]`, whose factors have `rank`.
    ///
    /// # Errors
    /// If device memory is full.
    ///
    /// # Panics
    /// If rows are not whole blocks, a place is not aligned, or a size needs more than 32 bits.
    pub fn new(device: &Device, tensors: &[BlockTensor], rank: usize) -> Result<Self> {
        let narrow = |n: usize| {
            assert!(n < NONE as usize, "{n} needs more than 32 bits");
            n as u32
        };
        let (mut words, mut tiles, mut ends) = (Vec::with_capacity(WORDS * tensors.len()), 0, [0; 3]);
        for BlockTensor { format, rows, columns, place, to, factors } in tensors {
            let (values, bytes) = format.block();
            assert!(columns.is_multiple_of(values), "{columns} columns of {format:?} are not whole blocks");
            assert!(place.is_multiple_of(BLOCK_ALIGNMENT), "blocks at {place} are not aligned");
            size(rows * columns.div_ceil(TILE[1]));
            let flag = if factors.is_some_and(|of| of.transposed) { TRANSPOSED } else { 0 };
            let (a, b) = factors.map_or((NONE, NONE), |of| (narrow(of.a), narrow(of.b)));
            words.extend([narrow(tiles), *format as u32 | flag, narrow(*rows), narrow(*columns)]);
            words.extend([narrow(place / BLOCK_ALIGNMENT), *to as u32, (*to as u64 >> 32) as u32, a, b]);
            tiles += rows.div_ceil(TILE[0]) * columns.div_ceil(TILE[1]);
            let of_factors = factors.map_or(0, |of| {
                let [a, b] = if of.transposed { [*rows, *columns] } else { [*columns, *rows] };
                (of.a + rank * a).max(of.b + rank * b)
            });
            let own = [place + rows * columns / values * bytes, of_factors, to + rows * columns];
            ends.iter_mut().zip(own).for_each(|(end, own)| *end = own.max(*end));
        }
        size(tiles);
        Ok(Self { words: device.upload(&words)?, tensors: tensors.len(), tiles, ends })
    }
}

/// Writes the tensors of `table` to `out [n]`: what `bytes` stores of them, and `scale` times the product of their `factors`, which have
/// `rank`. Only their values are written.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the tensors reach beyond a buffer.
pub fn dequantize<T: Storage>(
    device: &Device,
    table: &BlockTable,
    bytes: View<'_, u8>,
    (factors, rank, scale): (View<'_, f32>, usize, f32),
    out: ViewMut<'_, T>,
) -> Result<()> {
    let there = [bytes.len(), factors.len(), out.len()];
    assert!(table.ends.iter().zip(there).all(|(end, there)| *end <= there), "{:?} of {there:?}", table.ends);
    let arguments = [
        table.words.all().into(),
        size(table.tensors).into(),
        bytes.into(),
        factors.into(),
        size(rank).into(),
        scale.into(),
        out.into(),
    ];
    device.launch(&format!("dequantize_{}", T::SUFFIX), [table.tiles, 1, 1], TILE[1], 0, &arguments)
}
