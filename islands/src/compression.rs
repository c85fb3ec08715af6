//! The values of an outer gradient or an outer update as bytes.
//!
//! | form | bytes of `n` values | largest error of a value |
//! |---|---|---|
//! | `none` | `4 n` | 0 |
//! | `int8` | `n + 4 ceil(n / 256)` | `s / 2`, `s` = largest magnitude of its block / 127 |
//! | `int4` | `ceil(n / 2) + 4 ceil(n / 64)` | `s / 2`, `s` = largest magnitude of its block / 7 |
//!
//! Blocks have a scale `s` in f32, and values are whole multiples of it. What a message loses is the residual, which is added to the
//! next one (error feedback, Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847): the sum of all messages and the last
//! residual is the sum of all values, up to rounding in f32.
//!
//! Invariant: bytes that came from elsewhere are checked for their length and for scales that are not finite.

use serde::{Deserialize, Serialize};

use crate::IslandError;

/// Form of the values of outer gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientCompression {
    /// f32.
    #[default]
    None,
    /// 8 bits, and a scale for each 256 values.
    Int8,
    /// 4 bits, and a scale for each 64 values.
    Int4,
}

/// Bytes of a scale.
const SCALE: usize = 4;

impl GradientCompression {
    /// Its name in a recipe.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Values of a block, and the largest multiple of its scale.
    fn block(self) -> (usize, f32) {
        match self {
            Self::None => (usize::MAX, 0.0),
            Self::Int8 => (256, 127.0),
            Self::Int4 => (64, 7.0),
        }
    }

    /// Bytes of `values` values.
    #[must_use]
    pub fn bytes(self, values: usize) -> usize {
        let (block, _) = self.block();
        match self {
            Self::None => 4 * values,
            Self::Int8 => values + SCALE * values.div_ceil(block),
            Self::Int4 => values.div_ceil(2) + SCALE * values.div_ceil(block),
        }
    }

    /// The bytes of `values`, `[values]`.
    ///
    /// # Errors
    /// A value that is not finite.
    pub fn encode(self, values: &[f32]) -> Result<Vec<u8>, IslandError> {
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            return Err(IslandError::NotFinite { index, value: values[index] });
        }
        let mut bytes = Vec::with_capacity(self.bytes(values.len()));
        if self == Self::None {
            values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
            return Ok(bytes);
        }
        let (block, most) = self.block();
        for values in values.chunks(block) {
            let scale = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs())) / most;
            bytes.extend(scale.to_le_bytes());
            let level = |value: &f32| {
                let level = if scale > 0.0 { (value / scale).round().clamp(-most, most) } else { 0.0 };
                level as i8
            };
            match self {
                Self::Int4 => bytes.extend(values.chunks(2).map(|pair| {
                    let second = pair.get(1).map_or(0, level);
                    (level(&pair[0]) & 0xf) as u8 | ((second & 0xf) as u8) << 4
                })),
                _ => bytes.extend(values.iter().map(|value| level(value).cast_unsigned())),
            }
        }
        Ok(bytes)
    }

    /// The numbers of `bytes`, `[values]`.
    ///
    /// # Errors
    /// Bytes of another length, or a value that is not finite.
    pub fn decode(self, bytes: &[u8], values: usize) -> Result<Vec<f32>, IslandError> {
        let expected = self.bytes(values);
        if bytes.len() != expected {
            return Err(IslandError::Length { values, expected, found: bytes.len() });
        }
        let number = |bytes: &[u8]| bytes.try_into().map_or(f32::NAN, f32::from_le_bytes);
        let mut decoded = Vec::with_capacity(values);
        if self == Self::None {
            decoded.extend(bytes.chunks(4).map(number));
        } else {
            let (block, _) = self.block();
            for block in bytes.chunks(self.bytes(block)) {
                let (scale, levels) = block.split_at(SCALE);
                let scale = number(scale);
                match self {
                    Self::Int4 => decoded.extend(
                        levels
                            .iter()
                            .flat_map(|pair| [pair << 4, *pair].map(|half| half.cast_signed() >> 4))
                            .map(|level| scale * f32::from(level)),
                    ),
                    _ => decoded.extend(levels.iter().map(|level| scale * f32::from(level.cast_signed()))),
                }
            }
            // The last of an odd number of values in 4 bits has a half byte for company.
            decoded.truncate(values);
        }
        match decoded.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(IslandError::NotFinite { index, value: decoded[index] }),
            None => Ok(decoded),
        }
    }

    /// The bytes of `values` plus `residual`, `[values]` each, and the values that they decode to. The residual becomes what they
    /// lack.
    ///
    /// # Errors
    /// A value that is not finite; the residual is then unchanged.
    pub fn encode_with(
        self,
        values: &[f32],
        residual: &mut [f32],
    ) -> Result<(Vec<u8>, Vec<f32>), IslandError> {
        let sums: Vec<f32> =
            values.iter().zip(&*residual).map(|(value, residual)| value + residual).collect();
        let bytes = self.encode(&sums)?;
        let decoded = self.decode(&bytes, values.len())?;
        for ((residual, sum), decoded) in residual.iter_mut().zip(sums).zip(&decoded) {
            *residual = sum - decoded;
        }
        Ok((bytes, decoded))
    }
}
