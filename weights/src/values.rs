//! Shared weights: on the heap, in memory that other processes map too, or in parts.
//!
//! Invariant: the content of [`Values`] does not change during the lifetime of any clone.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use crate::parts::{OwnedWeights, WeightParts};

/// Memory with weights that outlives every view of it, such as a mapped file that is locked against writers.
pub trait WeightMemory: Send + Sync {
    /// `[parameters]` the weights, the same at every call.
    fn values(&self) -> &[f32];

    /// The low-rank adapter that is merged into them, if one is trained.
    fn adapter(&self) -> Option<Arc<dyn WeightAdapter>> {
        None
    }
}

/// A low-rank adapter that is merged into published weights: what an engine needs that has the frozen weights already.
pub trait WeightAdapter: fmt::Debug + Send + Sync {
    /// Writes it as the new directory `directory`, in PEFT's layout.
    ///
    /// # Errors
    /// A directory that exists or cannot be written.
    fn write(&self, directory: &Path) -> io::Result<()>;
}

/// `[parameters]` weights; clones share them.
#[derive(Clone)]
pub struct Values(ValuesStorage);

#[derive(Clone)]
enum ValuesStorage {
    Heap(Arc<[f32]>),
    Owned(Arc<dyn WeightMemory>),
    Parts(Arc<WeightParts>),
}

/// Precision of published weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32 bits.
    #[default]
    F32,
    /// bfloat16: the upper 16 bits, rounded to nearest, ties to even. In memory it is an f32 whose lower half is
    /// zero.
    Bf16,
}

impl Values {
    /// Weights in memory of another owner.
    #[must_use]
    pub fn owned_by(owner: Arc<dyn WeightMemory>) -> Self {
        Self(ValuesStorage::Owned(owner))
    }

    /// A copy of the weights that each of `owners` has, in memory of its own: ranges among all weights with their values. Readers of
    /// some ranges ([`Self::range`]) get them from their owners; one that reads all as a slice copies them together first.
    ///
    /// # Panics
    /// If a weight has two owners or none.
    #[must_use]
    pub fn copied<'a>(owners: impl IntoIterator<Item = OwnedWeights<'a>>) -> Self {
        Self(ValuesStorage::Parts(Arc::new(WeightParts::copied(owners))))
    }

    /// Number of weights.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a model without weights does not exist")]
    pub fn len(&self) -> usize {
        match self.together() {
            Ok(values) => values.len(),
            Err(parts) => parts.len(),
        }
    }

    /// The weights of a range, where they lie if they are neighbours there.
    #[must_use]
    pub fn range(&self, range: Range<usize>) -> Cow<'_, [f32]> {
        match self.together() {
            Ok(values) => Cow::Borrowed(&values[range]),
            Err(parts) => parts.range(range),
        }
    }

    /// All weights, if they lie together.
    pub(crate) fn together(&self) -> Result<&[f32], &WeightParts> {
        match &self.0 {
            ValuesStorage::Heap(values) => Ok(values),
            ValuesStorage::Owned(owner) => Ok(owner.values()),
            ValuesStorage::Parts(parts) => Err(parts),
        }
    }
}

impl Deref for Values {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.together().unwrap_or_else(WeightParts::whole)
    }
}

impl AsRef<[u8]> for Values {
    /// The bytes in memory.
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

impl From<Arc<[f32]>> for Values {
    fn from(values: Arc<[f32]>) -> Self {
        Self(ValuesStorage::Heap(values))
    }
}

impl From<Vec<f32>> for Values {
    fn from(values: Vec<f32>) -> Self {
        Self(ValuesStorage::Heap(values.into()))
    }
}

impl From<&[f32]> for Values {
    fn from(values: &[f32]) -> Self {
        Self(ValuesStorage::Heap(values.into()))
    }
}

impl fmt::Debug for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match &self.0 {
            ValuesStorage::Heap(_) => "heap",
            ValuesStorage::Owned(_) => "owned memory",
            ValuesStorage::Parts(_) => "the memory of their owners",
        };
        write!(f, "Values({} in {place})", self.len())
    }
}

impl Dtype {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// Its name in a recipe.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of a published weight.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// The weight as published.
    #[must_use]
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::Bf16 => round_to_bf16(value),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The nearest bf16, ties to even; a NaN stays a quiet NaN.
fn round_to_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    if value.is_nan() {
        // The upper half of a NaN alone could be an infinity.
        return f32::from_bits((bits | 0x0040_0000) & 0xffff_0000);
    }
    let even = (bits >> 16) & 1;
    f32::from_bits((bits + 0x7fff + even) & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_bf16() {
        // Every upper half, with lower halves around the middle, where ties and carries are.
        for upper in 0..=u16::MAX {
            for lower in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                let rounded = Dtype::Bf16.round(value);
                assert_eq!(rounded.to_bits(), half::bf16::from_f32(value).to_f32().to_bits(), "{value}");
                assert_eq!(Dtype::Bf16.round(rounded).to_bits(), rounded.to_bits());
                assert_eq!(Dtype::F32.round(value).to_bits(), value.to_bits());
            }
        }
    }

    #[test]
    fn clones_share_and_both_sources_read_the_same() {
        struct OwnedVector(Vec<f32>);
        impl WeightMemory for OwnedVector {
            fn values(&self) -> &[f32] {
                &self.0
            }
        }
        let (heap, owned) =
            (Values::from(vec![1.0, 2.0]), Values::owned_by(Arc::new(OwnedVector(vec![1.0, 2.0]))));
        assert_eq!(heap[..], owned[..]);
        for values in [heap, owned] {
            assert_eq!(values.clone().as_ptr(), values.as_ptr());
        }
    }
}
