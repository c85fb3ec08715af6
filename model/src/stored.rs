//! Tensors as weight files store them: as one tensor of numbers, or as quantised values with a tensor of scales beside it.
//!
//! ```text
//! NAME            [out, in] F32, F16, BF16
//! NAME            [out, in] E4M3, with NAME_scale_inv [out / 128, in / 128]       FP8 (crate::float8)
//! NAME_blocks     [experts, out, in / 32, 16] bytes, with NAME_scales             MXFP4 (crate::mxfp4), of NAME [experts, in, out]
//! ```
//!
//! Invariant: parts of a tensor come in any order, from any file, and have the shapes that the tensor implies.

use std::path::Path;

use device::ops::blocks::BlockFormat;
use safetensors::tensor::{Dtype, TensorView};

use crate::file_tensors::{FilePart, FileTensor};
use crate::ops::blocks::BlockMatrix;
use crate::weight_files::widen;
use crate::{ModelError, float8, mxfp4};

/// What files have of one of their tensors.
#[derive(Debug, Default)]
pub(crate) struct StoredValues {
    /// The number format and the bytes; of MXFP4 the blocks, as U8.
    values: Option<(Dtype, Vec<u8>)>,
    /// Of FP8 in f32, of MXFP4 a byte each.
    scales: Option<Vec<u8>>,
}

/// What a tensor of a file is of the tensor that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoredPart {
    /// All of it, or its values in FP8.
    Values,
    Float8Scales,
    Mxfp4Blocks,
    Mxfp4Scales,
}

impl StoredPart {
    pub(crate) const ALL: [Self; 4] =
        [Self::Values, Self::Float8Scales, Self::Mxfp4Blocks, Self::Mxfp4Scales];

    /// What its name adds to that of the tensor.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::Values => "",
            Self::Float8Scales => "_scale_inv",
            Self::Mxfp4Blocks => "_blocks",
            Self::Mxfp4Scales => "_scales",
        }
    }

    /// Whether `file` can be stored with this part.
    pub(crate) fn is_of(self, file: &FileTensor) -> bool {
        match self {
            Self::Values => true,
            Self::Float8Scales => file.shape.len() == 2,
            Self::Mxfp4Blocks | Self::Mxfp4Scales => file.shape.len() == 3,
        }
    }

    /// The shape of this part of `file`, or why the tensor cannot be stored so.
    fn shape(self, file: &FileTensor) -> Result<Vec<usize>, String> {
        match (self, &file.shape[..]) {
            (Self::Float8Scales, &[rows, columns]) => Ok([rows, columns].map(float8::scales_of).to_vec()),
            (Self::Mxfp4Blocks | Self::Mxfp4Scales, &[experts, inputs, outputs]) => {
                let block = mxfp4::BLOCK;
                if !inputs.is_multiple_of(block) {
                    return Err(format!(
                        "an expert has {inputs} inputs, and blocks have {block} values of one output"
                    ));
                }
                let mut shape = vec![experts, outputs, inputs / block];
                if self == Self::Mxfp4Blocks {
                    shape.push(mxfp4::BLOCK_BYTES);
                }
                Ok(shape)
            }
            (_, shape) => Ok(shape.to_vec()),
        }
    }

    /// Whether it can have this number format.
    fn takes(self, dtype: Dtype) -> bool {
        match self {
            Self::Values => matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8_E4M3),
            Self::Float8Scales => matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16),
            Self::Mxfp4Blocks | Self::Mxfp4Scales => dtype == Dtype::U8,
        }
    }
}

impl StoredValues {
    /// Takes `part` of `file`, the tensor `name` of the file `path`.
    ///
    /// # Errors
    /// If it has another shape, or a number format that is not read.
    pub(crate) fn put(
        &mut self,
        (path, name): (&Path, &str),
        file: &FileTensor,
        part: StoredPart,
        tensor: &TensorView<'_>,
    ) -> Result<(), ModelError> {
        let (path, name) = (path.to_owned(), name.to_owned());
        let expected = match part.shape(file) {
            Ok(expected) => expected,
            Err(reason) => return Err(ModelError::Blocks { path, tensor: name, reason }),
        };
        if !part.takes(tensor.dtype()) {
            return Err(ModelError::Dtype { path, tensor: name, found: format!("{:?}", tensor.dtype()) });
        }
        if tensor.shape() != expected {
            let found = tensor.shape().to_vec();
            return Err(ModelError::Shape { path, tensor: name, expected, found });
        }
        match part {
            StoredPart::Values | StoredPart::Mxfp4Blocks => {
                self.values = Some((tensor.dtype(), tensor.data().to_vec()));
            }
            StoredPart::Mxfp4Scales => self.scales = Some(tensor.data().to_vec()),
            StoredPart::Float8Scales => {
                let mut scales = vec![0.0; expected.iter().product()];
                widen(tensor, &mut scales);
                self.scales = Some(scales.iter().flat_map(|scale| scale.to_le_bytes()).collect());
            }
        }
        Ok(())
    }

    /// What `part` is of it, as a tensor of its own; nothing of values in FP8, whose scales are not with them.
    pub(crate) fn part(&self, part: &FilePart) -> Self {
        let width = |dtype: Dtype| if dtype == Dtype::F32 { 4 } else { 2 };
        let own = self.values.as_ref().filter(|(dtype, _)| *dtype != Dtype::F8_E4M3);
        let values = own.map(|(dtype, values)| (*dtype, part.bytes(values, width(*dtype))));
        Self { values, scales: None }
    }

    /// The part that has not come yet.
    pub(crate) fn missing(&self) -> Option<StoredPart> {
        match (&self.values, &self.scales) {
            (None, None) => Some(StoredPart::Values),
            (None, Some(_)) => Some(StoredPart::Mxfp4Blocks),
            (Some((Dtype::U8, _)), None) => Some(StoredPart::Mxfp4Scales),
            (Some((Dtype::F8_E4M3, _)), None) => Some(StoredPart::Float8Scales),
            (Some(_), _) => None,
        }
    }

    /// Whether there are scales of values that have none.
    pub(crate) fn has_loose_scales(&self) -> bool {
        let plain = |dtype: &Dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
        self.scales.is_some() && self.values.as_ref().is_some_and(|(dtype, _)| plain(dtype))
    }

    /// Writes the tensor of the layout that `part` of `file` is to `out [rows, columns]`, once nothing is missing; false if it cannot
    /// be read.
    pub(crate) fn write(&self, file: &FileTensor, part: &FilePart, out: &mut [f32]) -> bool {
        let matrix = match &self.values {
            Some((Dtype::F8_E4M3, values)) => {
                return float8_rows(file, part, values, self.scales.as_deref().unwrap_or_default())
                    .is_some_and(|rows| {
                        let out = out.chunks_exact_mut(part.shape[1].max(1));
                        rows.into_iter().zip(out).for_each(|((bits, scales), out)| {
                            float8::dequantize_row(bits, scales, out);
                        });
                        true
                    });
            }
            _ => self.matrix(file, part),
        };
        matrix.as_ref().is_some_and(|matrix| {
            matrix.dequantize(0..part.shape[0], out);
            true
        })
    }

    /// The same as it is stored; `None` if its rows are not whole blocks.
    pub(crate) fn matrix(&self, file: &FileTensor, part: &FilePart) -> Option<BlockMatrix> {
        let (dtype, values) = self.values.as_ref()?;
        let scales = self.scales.as_deref().unwrap_or_default();
        let (format, bytes) = match dtype {
            Dtype::F32 => (BlockFormat::F32, part.bytes(values, 4)),
            Dtype::F16 => (BlockFormat::F16, part.bytes(values, 2)),
            Dtype::BF16 => (BlockFormat::Bf16, part.bytes(values, 2)),
            Dtype::F8_E4M3 => (BlockFormat::Float8, float8_blocks(file, part, values, scales)?),
            _ => (BlockFormat::Mxfp4, mxfp4_blocks(file, part, values, scales)?),
        };
        BlockMatrix::new(format, part.shape, bytes)
    }
}

/// The bits of each row and its scales.
fn float8_rows<'a>(
    file: &FileTensor,
    part: &FilePart,
    values: &'a [u8],
    scales: &'a [u8],
) -> Option<Vec<(&'a [u8], &'a [u8])>> {
    let ([outputs, inputs], &[_, columns]) = (part.shape, &file.shape[..]) else { return None };
    if part.place.input_stride != 1 || inputs != columns {
        return None;
    }
    let per_row = 4 * float8::scales_of(columns);
    let row = |output: usize| {
        let row = part.place.output(output) / columns;
        let squares = row / float8::SQUARE * per_row;
        Some((values.get(row * columns..(row + 1) * columns)?, scales.get(squares..squares + per_row)?))
    };
    (0..outputs).map(row).collect()
}

/// Each row in blocks of a scale and its values.
fn float8_blocks(file: &FileTensor, part: &FilePart, values: &[u8], scales: &[u8]) -> Option<Vec<u8>> {
    if !part.shape[1].is_multiple_of(float8::SQUARE) {
        return None;
    }
    let mut blocks = Vec::new();
    for (bits, scales) in float8_rows(file, part, values, scales)? {
        for (bits, scale) in bits.chunks_exact(float8::SQUARE).zip(scales.chunks_exact(4)) {
            blocks.extend_from_slice(scale);
            blocks.extend_from_slice(bits);
        }
    }
    Some(blocks)
}

/// Each row in blocks of a scale and its values. Files have the transpose `[experts, out, in]` of the tensor.
fn mxfp4_blocks(file: &FileTensor, part: &FilePart, values: &[u8], scales: &[u8]) -> Option<Vec<u8>> {
    let ([outputs, inputs], &[_, _, width]) = (part.shape, &file.shape[..]) else { return None };
    let per_row = inputs / mxfp4::BLOCK;
    let mut blocks = Vec::with_capacity(outputs * per_row * (1 + mxfp4::BLOCK_BYTES));
    for output in 0..outputs {
        let first = part.place.output(output);
        let row = first / (inputs * width) * width + first % width;
        let of_row = row * per_row..(row + 1) * per_row;
        let values = values.get(of_row.start * mxfp4::BLOCK_BYTES..of_row.end * mxfp4::BLOCK_BYTES)?;
        for (values, scale) in values.chunks_exact(mxfp4::BLOCK_BYTES).zip(scales.get(of_row)?) {
            blocks.push(*scale);
            blocks.extend_from_slice(values);
        }
    }
    Some(blocks)
}
