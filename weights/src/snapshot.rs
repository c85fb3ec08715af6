//! The weights of one version. Invariant: the digest of a [`Snapshot`] is that of its values.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use trajectory::PolicyVersion;

use crate::copier::Copier;
use crate::values::WeightAdapter;
use crate::{Dtype, Values, digest};

/// BLAKE3 over weights as little-endian f32, in the canonical order of the model.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `[parameters]` weights, on the calling thread.
    #[must_use]
    pub fn of(values: &[f32]) -> Self {
        Self::on(values, 1)
    }

    /// The digest of `[parameters]` weights, by up to `threads` threads.
    #[must_use]
    pub fn on(values: &[f32], threads: usize) -> Self {
        Self(digest::tree(values, threads))
    }

    /// The digest of weights wherever they lie, by up to `threads` threads.
    #[must_use]
    pub fn of_values(values: &Values, threads: usize) -> Self {
        match values.together() {
            Ok(values) => Self::on(values, threads),
            Err(parts) => Self(digest::tree_of(parts.len(), threads, |range, hasher| {
                parts.pieces(range).for_each(|piece| digest::feed(hasher, piece));
            })),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The digest with these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = String;

    /// Reads what `Display` writes.
    fn from_str(text: &str) -> Result<Self, String> {
        let hash = blake3::Hash::from_hex(text).map_err(|error| format!("{text:?} is no digest: {error}"))?;
        Ok(Self(*hash.as_bytes()))
    }
}

/// Cost of receiving a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Bytes transferred; 0 where memory is shared.
    pub bytes: u64,
    /// From the first byte to the last check.
    pub took: Duration,
}

/// The weights of one version.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// The version.
    pub version: PolicyVersion,
    /// `[parameters]` weights, flat, in the canonical order of the model.
    pub values: Values,
    /// The adapter that is merged into them, if one is trained and the snapshot comes from the trainer's process.
    pub adapter: Option<Arc<dyn WeightAdapter>>,
    /// Cost of receiving them.
    pub received: Received,
    /// The digest of `values`, once computed.
    digest: OnceLock<Digest>,
}

impl Snapshot {
    /// A snapshot of these weights; the digest is computed on demand.
    #[must_use]
    pub fn new(version: PolicyVersion, values: Values) -> Self {
        Self { version, values, adapter: None, received: Received::default(), digest: OnceLock::new() }
    }

    /// The same with the adapter that is merged into the weights.
    #[must_use]
    pub fn with_adapter(self, adapter: Option<Arc<dyn WeightAdapter>>) -> Self {
        Self { adapter, ..self }
    }

    /// A copy of `[parameters]` weights, rounded to `dtype`, as every transport gives them to samplers.
    #[must_use]
    pub fn rounded(version: PolicyVersion, values: &[f32], dtype: Dtype) -> Self {
        Self::new(version, Copier::new(1).copy(values, dtype))
    }

    /// Received weights with their digest, if it was computed meanwhile.
    pub(crate) fn received(
        version: PolicyVersion,
        values: Values,
        received: Received,
        digest: Option<Digest>,
    ) -> Self {
        let known = OnceLock::new();
        if let Some(digest) = digest {
            // The cell is new.
            let _ = known.set(digest);
        }
        Self { version, values, adapter: None, received, digest: known }
    }

    /// The digest of the values. The first call computes it on its thread; concurrent calls wait.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest_on(1)
    }

    /// The digest, computed by up to `threads` threads.
    #[must_use]
    pub fn digest_on(&self, threads: usize) -> Digest {
        *self.digest.get_or_init(|| Digest::of_values(&self.values, threads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_blake3_of_little_endian_floats() {
        let bytes: Vec<u8> = [1.0f32, -2.5, f32::NAN].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(Digest::of(&[1.0, -2.5, f32::NAN]).to_string(), blake3::hash(&bytes).to_hex().as_str());
        assert_ne!(Digest::of(&[0.0]), Digest::of(&[-0.0]), "bits count, not values");
    }

    #[test]
    fn a_digest_is_read_as_it_is_written() {
        let digest = Digest::of(&[1.0]);
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert_eq!(Digest::from_bytes(*digest.as_bytes()), digest);
        assert!("abc".parse::<Digest>().is_err() && "x".repeat(64).parse::<Digest>().is_err());
    }

    #[test]
    fn a_rounded_snapshot_has_the_digest_of_what_it_holds() {
        let values = [1.0, 1.000_1, -3.3];
        let exact = Snapshot::rounded(PolicyVersion(1), &values, Dtype::F32);
        let rounded = Snapshot::rounded(PolicyVersion(1), &values, Dtype::Bf16);
        assert_eq!(exact.digest(), Digest::of(&values));
        assert_eq!(rounded.digest(), Digest::of(&rounded.values));
        assert_eq!(rounded.values[..2], [1.0, 1.0]);
    }
}
