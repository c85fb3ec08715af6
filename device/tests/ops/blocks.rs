//! Tensors in blocks against f64.

use device::ops::blocks::{BLOCK_ALIGNMENT, BlockFactors, BlockFormat, BlockTable, BlockTensor, dequantize};
use device::{Storage, bf16};

use crate::common::{assert_close, devices, noise};

use super::support::widen;

const RANK: usize = 3;
const SCALE: f32 = 0.5;

/// Rows and columns around the sizes of a tile, with and without factors, and those of an embedding.
const TENSORS: [(BlockFormat, usize, usize, Option<bool>); 6] = [
    (BlockFormat::F32, 1, 7, None),
    (BlockFormat::Q8Zero, 9, 288, Some(false)),
    (BlockFormat::Bf16, 17, 5, Some(true)),
    (BlockFormat::F16, 8, 256, None),
    (BlockFormat::F32, 3, 513, Some(false)),
    (BlockFormat::Q8Zero, 2, 32, Some(true)),
];

/// The bytes of `values [rows * columns]`, and what they stand for.
fn stored(format: BlockFormat, values: &[f32]) -> (Vec<u8>, Vec<f64>) {
    match format {
        BlockFormat::F32 => (
            values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            values.iter().map(|x| f64::from(*x)).collect(),
        ),
        BlockFormat::Bf16 => {
            let rounded: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
            let bytes = rounded.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect();
            (bytes, rounded.iter().map(|x| x.to_f64()).collect())
        }
        // Powers of two from a subnormal number on.
        BlockFormat::F16 => {
            let bits = |at: usize| if at.is_multiple_of(2) { 1_u16 << (at % 16 / 2) } else { 0xbc00 };
            let number = |bits: u16| match bits {
                0xbc00 => -1.0,
                bits => f64::from(bits) / f64::from(1_u32 << 24),
            };
            let all: Vec<u16> = (0..values.len()).map(bits).collect();
            (all.iter().flat_map(|x| x.to_le_bytes()).collect(), all.into_iter().map(number).collect())
        }
        _ => {
            let (mut bytes, mut numbers) = (Vec::new(), Vec::new());
            for block in values.chunks(32) {
                // 2^-7 as f16.
                bytes.extend(0x2000_u16.to_le_bytes());
                for value in block {
                    let quant = (value * 127.0) as i8;
                    bytes.push(quant.cast_unsigned());
                    numbers.push(f64::from(quant) / 128.0);
                }
            }
            (bytes, numbers)
        }
    }
}

/// Row `row`, column `column` of the product of factors.
fn product(factors: &[f32], of: BlockFactors, [rows, columns]: [usize; 2], row: usize, column: usize) -> f64 {
    let term = |r: usize| {
        let (a, b) = match of.transposed {
            true => (of.a + r * rows + row, of.b + column * RANK + r),
            false => (of.a + r * columns + column, of.b + row * RANK + r),
        };
        f64::from(factors[a]) * f64::from(factors[b])
    };
    f64::from(SCALE) * (0..RANK).map(term).sum::<f64>()
}

fn check<T: Storage>(tolerance: f64) {
    for device in devices() {
        let (mut bytes, mut factors) = (Vec::new(), Vec::<f32>::new());
        // A value before the first tensor and between tensors stays as it is.
        let (mut tensors, mut expected, mut to) = (Vec::new(), vec![7.0], 1);
        for (seed, (format, rows, columns, transposed)) in (1..).zip(TENSORS) {
            bytes.resize(usize::next_multiple_of(bytes.len(), BLOCK_ALIGNMENT), 0);
            let (own, numbers) = stored(format, &noise(rows * columns, seed));
            let of_tensor = transposed.map(|transposed| {
                let a = factors.len();
                factors.extend(noise(RANK * (rows + columns), 10 + seed));
                BlockFactors { a, b: a + RANK * if transposed { rows } else { columns }, transposed }
            });
            tensors.push(BlockTensor { format, rows, columns, place: bytes.len(), to, factors: of_tensor });
            bytes.extend(own);
            for (at, number) in numbers.into_iter().enumerate() {
                let added =
                    of_tensor.map(|of| product(&factors, of, [rows, columns], at / columns, at % columns));
                expected.push(number + added.unwrap_or(0.0));
            }
            expected.push(7.0);
            to = expected.len();
        }
        let table = BlockTable::new(&device, &tensors, RANK).unwrap();
        let (on_bytes, on_factors) = (device.upload(&bytes).unwrap(), device.upload(&factors).unwrap());
        let mut out = device.upload(&vec![T::narrow(7.0); expected.len()]).unwrap();
        let given = (on_factors.all(), RANK, SCALE);
        dequantize(&device, &table, on_bytes.all(), given, out.all_mut()).unwrap();
        assert_close(&widen(&device.download(out.all()).unwrap()), &expected, tolerance);
    }
}

#[test]
fn blocks_are_widened_and_the_product_of_factors_is_added() {
    check::<f32>(1e-6);
    check::<bf16>(5e-3);
}

#[test]
fn nothing_is_launched_for_no_tensors() {
    for device in devices() {
        let table = BlockTable::new(&device, &[], RANK).unwrap();
        let (bytes, factors) = (device.zeros::<u8>(0).unwrap(), device.zeros::<f32>(0).unwrap());
        let mut out = device.upload(&[1.0_f32]).unwrap();
        dequantize(&device, &table, bytes.all(), (factors.all(), RANK, SCALE), out.all_mut()).unwrap();
        assert_eq!(device.download(out.all()).unwrap(), [1.0]);
    }
}
