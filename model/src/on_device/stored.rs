//! Weights that stay on a device as their files store them, with low-rank factors (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).
//!
//! A layer is dequantised when it is asked for, with the product of its factors added in f32 and the sum rounded once: a pass
//! computes with merged weights, which exist for one layer at a time. Embedding and tail are kept so.
//!
//! Invariant: memory is that of the files, of embedding and tail, and of one layer. The weights of a layer change only with the
//! factors, whose buffer stays the same: a recorded step reads those that are there when it is replayed.

use std::sync::Arc;

use device::ops::blocks::{BLOCK_ALIGNMENT, BlockFactors, BlockFormat, BlockTable, BlockTensor, dequantize};
use device::{Device, DeviceBuffer, Result, Storage, View};

use super::UnitWeights;
use crate::frozen_parameters::FrozenTensor;
use crate::{FrozenParameters, Layout, LowRank, Unit};

/// A base in the blocks of its files on a device, and factors over it.
#[derive(Debug)]
pub struct StoredWeights<T: Storage> {
    device: Device,
    layout: Arc<Layout>,
    bytes: DeviceBuffer<u8>,
    /// `[factors]`
    factors: DeviceBuffer<f32>,
    rank: usize,
    scale: f32,
    layers: Vec<BlockTable>,
    /// Embedding and tail.
    ends: [(BlockTable, DeviceBuffer<T>); 2],
    /// `[values of the largest layer]` the last that was asked for.
    layer: DeviceBuffer<T>,
}

/// The tensors of a unit of `base`, whose blocks are appended to `bytes`.
fn tensors_of(
    base: &FrozenParameters,
    low_rank: &LowRank,
    unit: Unit,
    bytes: &mut Vec<u8>,
) -> Vec<BlockTensor> {
    let unit = base.layout().unit(unit);
    let mut tensors = Vec::new();
    for (spec, tensor) in base.tensors().filter(|(spec, _)| unit.contains(&spec.offset)) {
        bytes.resize(bytes.len().next_multiple_of(BLOCK_ALIGNMENT), 0);
        let place = bytes.len();
        let (format, rows, columns) = match tensor {
            FrozenTensor::Vector(values) => {
                bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                (BlockFormat::F32, 1, values.len())
            }
            FrozenTensor::Matrix(matrix) => {
                bytes.extend_from_slice(&matrix.bytes);
                (matrix.format, matrix.rows, matrix.columns)
            }
        };
        let factors = low_rank.pair_of(spec.offset).map(|pair| {
            // Of some rows of a matrix, those of `B`.
            let before = (spec.offset - pair.weight.start) / pair.columns;
            let b = pair.b.start + before * low_rank.rank();
            BlockFactors { a: pair.a.start, b, transposed: pair.is_embedding }
        });
        tensors.push(BlockTensor { format, rows, columns, place, to: spec.offset - unit.start, factors });
    }
    tensors
}

impl<T: Storage> StoredWeights<T> {
    /// The weights of `base` with the factors `low_rank` over them.
    ///
    /// # Errors
    /// [`device::DeviceError::OutOfMemory`].
    pub fn new(device: &Device, base: &FrozenParameters, low_rank: &LowRank) -> Result<Self> {
        let (layout, weights) = (Arc::clone(base.layout()), device.labelled("weights"));
        let mut bytes = Vec::new();
        let mut table = |unit: Unit| {
            BlockTable::new(device, &tensors_of(base, low_rank, unit, &mut bytes), low_rank.rank())
        };
        let layers = (0..layout.layers().len()).map(|index| table(Unit::Layer(index)));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let [embedding, tail] = [table(Unit::Embedding)?, table(Unit::Tail)?];
        let uninit = |unit: Unit| weights.uninit(layout.unit(unit).len());
        let ends = [(embedding, uninit(Unit::Embedding)?), (tail, uninit(Unit::Tail)?)];
        let largest = layout.layers().iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let mut stored = Self {
            device: device.clone(),
            bytes: weights.upload(&bytes)?,
            factors: device.labelled("adapter").uninit(low_rank.values().len())?,
            rank: low_rank.rank(),
            scale: low_rank.scale(),
            layers,
            ends,
            layer: weights.uninit(largest)?,
            layout,
        };
        stored.set_factors(low_rank)?;
        Ok(stored)
    }

    /// Computes with the factors `low_rank` from the next pass on.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If they are of other weights or have another rank.
    pub fn set_factors(&mut self, low_rank: &LowRank) -> Result<()> {
        assert_eq!(
            (self.rank, self.scale),
            (low_rank.rank(), low_rank.scale()),
            "the factors have another form"
        );
        self.device.upload_to(low_rank.values(), self.factors.all_mut())?;
        self.form_ends()
    }

    /// Computes with the factors in `values [factors]` from the next pass on.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If there are fewer or more.
    pub fn copy_factors(&mut self, values: View<'_, f32>) -> Result<()> {
        self.device.copy(values, self.factors.all_mut())?;
        self.form_ends()
    }

    fn form_ends(&mut self) -> Result<()> {
        let factors = (self.factors.all(), self.rank, self.scale);
        for (table, values) in &mut self.ends {
            dequantize(&self.device, table, self.bytes.all(), factors, values.all_mut())?;
        }
        Ok(())
    }

    /// Memory, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let ends: u64 = self.ends.iter().map(|(_, values)| values.bytes()).sum();
        self.bytes.bytes() + self.factors.bytes() + self.layer.bytes() + ends
    }

    /// Number of the buffer of a layer, which identifies these weights.
    pub(super) fn id(&self) -> u64 {
        self.layer.id()
    }
}

impl<T: Storage> UnitWeights<T> for StoredWeights<T> {
    fn unit(&mut self, unit: Unit) -> Result<View<'_, T>> {
        let index = match unit {
            Unit::Embedding => return Ok(self.ends[0].1.all()),
            Unit::Tail => return Ok(self.ends[1].1.all()),
            Unit::Layer(index) => index,
        };
        // Also if it is the last one that was asked for: a recorded step has to compute it again when factors have changed.
        let len = self.layout.unit(unit).len();
        let factors = (self.factors.all(), self.rank, self.scale);
        dequantize(
            &self.device,
            &self.layers[index],
            self.bytes.all(),
            factors,
            self.layer.view_mut(0..len),
        )?;
        Ok(self.layer.view(0..len))
    }
}

#[cfg(all(test, feature = "emulator"))]
mod tests {
    use device::device::DeviceLocation;

    use super::*;
    use crate::ops::blocks::BlockMatrix;
    use crate::ops::check::noise;

    /// Blocks of random bits under scales between 2^-6 and 2^-3.
    fn blocks(format: BlockFormat, count: usize) -> Vec<u8> {
        let bits = |n: usize, seed: usize| noise(n, seed as u32).into_iter().map(|x| (x * 1e6) as i32 as u8);
        let half = |seed: usize| (0x2400_u16 + ((seed as u16 * 37) & 0x7ff)).to_le_bytes();
        let mut bytes = Vec::new();
        for at in 0..count {
            match format {
                BlockFormat::F32 => bytes.extend((at as f32 * 0.37 - 3.0).to_le_bytes()),
                BlockFormat::F16 => bytes.extend(half(at)),
                BlockFormat::Bf16 => bytes.extend((0x3d00_u16 + at as u16 % 300).to_le_bytes()),
                BlockFormat::Q6K => {
                    bytes.extend(bits(208, at));
                    bytes.extend(half(at));
                }
                BlockFormat::Float8 => {
                    bytes.extend((0.01 + at as f32 / 64.0).to_le_bytes());
                    // All but those that are not numbers.
                    bytes.extend(bits(128, at).map(|bits| if bits & 127 == 127 { 1 } else { bits }));
                }
                BlockFormat::Mxfp4 => {
                    bytes.push([0, 1, 120, 125, 130][at % 5]);
                    bytes.extend(bits(16, at));
                }
                BlockFormat::Q4One | BlockFormat::Q4K => {
                    bytes.extend([half(at), half(at + 5)].concat());
                    bytes.extend(bits(format.block().1 - 4, at));
                }
                BlockFormat::Q8Zero | BlockFormat::Q4Zero => {
                    bytes.extend(half(at));
                    bytes.extend(bits(format.block().1 - 2, at));
                }
            }
        }
        bytes
    }

    /// Rows of two tiles, the second of which is not full.
    #[test]
    fn all_formats_have_the_values_of_the_processor() {
        let device = Device::open(DeviceLocation::of_tests()).unwrap();
        for format in BlockFormat::ALL {
            let (rows, columns) = (11, 512);
            let bytes = blocks(format, rows * columns / format.block().0);
            let matrix = BlockMatrix::new(format, [rows, columns], bytes.clone()).unwrap();
            let mut expected = vec![0.0; rows * columns];
            matrix.dequantize(0..rows, &mut expected);
            assert!(
                expected.iter().all(|x| x.is_finite()) && expected[..32] != expected[32..64],
                "{format:?}"
            );
            let tensor = BlockTensor { format, rows, columns, place: 0, to: 0, factors: None };
            let table = BlockTable::new(&device, &[tensor], 1).unwrap();
            let (on, none) = (device.upload(&bytes).unwrap(), device.zeros::<f32>(0).unwrap());
            let mut out = device.zeros::<f32>(expected.len()).unwrap();
            dequantize(&device, &table, on.all(), (none.all(), 1, 1.0), out.all_mut()).unwrap();
            assert_eq!(device.download(out.all()).unwrap(), expected, "{format:?}");
        }
    }
}
