//! The weights of one version. Invariant: the digest of a [`Snapshot`] is that of its values.

use std::fmt;
use std::sync::Arc;

use trajectory::PolicyVersion;

/// BLAKE3 over weights as little-endian f32, in the canonical order of the model.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `[parameters]` weights.
    #[must_use]
    pub fn of(values: &[f32]) -> Self {
        if cfg!(target_endian = "little") {
            return Self(*blake3::hash(bytemuck::cast_slice(values)).as_bytes());
        }
        let mut hasher = blake3::Hasher::new();
        for value in values {
            hasher.update(&value.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
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

/// The weights of one version.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// Which version.
    pub version: PolicyVersion,
    /// The digest of `values`.
    pub digest: Digest,
    /// `[parameters]` all weights, flat, in the canonical order of the model.
    pub values: Arc<[f32]>,
}

impl Snapshot {
    /// Digests the values.
    #[must_use]
    pub fn new(version: PolicyVersion, values: Arc<[f32]>) -> Self {
        Self { version, digest: Digest::of(&values), values }
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
}
