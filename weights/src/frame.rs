//! The header of weights on the network: what follows, which version it is, and checksums of all of it.
//!
//! ```text
//!   0  "RLRUNWT1"            48  payload bytes, u64
//!   8  kind, u8              56  BLAKE3 of the base's weights, 32 bytes (full: zeros)
//!   9  bytes of a word, u8   88  BLAKE3 of the version's weights, 32 bytes
//!  10  zeros                120  BLAKE3 of the payload, 32 bytes (full: zeros, the weights' own digest says it)
//!  16  version, u64         152  BLAKE3 of the bytes before, 32 bytes
//!  24  base, u64            184  payload
//!  32  weights, u64
//!  40  changed weights, u64
//! ```
//! Numbers are little-endian. The payload of a full push is every weight as a word of its dtype; that of a delta is
//! described in [`crate::delta`]. Invariant: no byte of a frame can change without notice.

use trajectory::PolicyVersion;

use crate::{Digest, Dtype};

/// Bytes before the payload.
pub(crate) const HEADER: usize = 184;
const MAGIC: [u8; 8] = *b"RLRUNWT1";
/// Where the checksum of the header is.
const CHECKED: usize = 152;
const NO_DIGEST: [u8; 32] = [0; 32];

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// All weights.
    Full,
    /// The delta from the version `base`, whose weights have the digest `of`; `checksum` is that of the payload.
    Delta { base: PolicyVersion, of: Digest, checksum: [u8; 32] },
}

/// Header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) kind: FrameKind,
    pub(crate) dtype: Dtype,
    pub(crate) version: PolicyVersion,
    /// Digest of the version's weights, after the frame is applied.
    pub(crate) digest: Digest,
    /// Number of weights of the model.
    pub(crate) values: u64,
    /// Number of changed weights.
    pub(crate) changed: u64,
    /// Bytes of the payload.
    pub(crate) payload: u64,
}

impl FrameHeader {
    /// The header of a full frame.
    pub(crate) fn full(version: PolicyVersion, digest: Digest, values: usize, dtype: Dtype) -> Self {
        let (values, payload) = (values as u64, (values * dtype.bytes()) as u64);
        Self { kind: FrameKind::Full, dtype, version, digest, values, changed: values, payload }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let (kind, base, of, checksum) = match self.kind {
            FrameKind::Full => (1, PolicyVersion(0), NO_DIGEST, NO_DIGEST),
            FrameKind::Delta { base, of, checksum } => (2, base, *of.as_bytes(), checksum),
        };
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = kind;
        bytes[9] = self.dtype.bytes() as u8;
        let numbers = [self.version.0, base.0, self.values, self.changed, self.payload];
        for (place, number) in bytes[16..56].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes[56..88].copy_from_slice(&of);
        bytes[88..120].copy_from_slice(self.digest.as_bytes());
        bytes[120..CHECKED].copy_from_slice(&checksum);
        let check = *blake3::hash(&bytes[..CHECKED]).as_bytes();
        bytes[CHECKED..].copy_from_slice(&check);
        bytes
    }

    /// Decodes a header, or says what is wrong with it.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self, String> {
        if bytes[..8] != MAGIC {
            return Err("it does not begin as weights of this version of rlrun do".to_owned());
        }
        if blake3::hash(&bytes[..CHECKED]).as_bytes()[..] != bytes[CHECKED..] {
            return Err("its header does not have the checksum that it names".to_owned());
        }
        let number = |at: usize| bytes[at..at + 8].iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte));
        let digest = |at: usize| {
            let mut digest = NO_DIGEST;
            digest.copy_from_slice(&bytes[at..at + 32]);
            digest
        };
        let dtype = Dtype::ALL.into_iter().find(|dtype| dtype.bytes() == usize::from(bytes[9]));
        let kind = match bytes[8] {
            1 => FrameKind::Full,
            2 => FrameKind::Delta {
                base: PolicyVersion(number(24)),
                of: Digest::from_bytes(digest(56)),
                checksum: digest(120),
            },
            other => return Err(format!("a frame of kind {other} is not known here")),
        };
        Ok(Self {
            kind,
            dtype: dtype.ok_or_else(|| format!("words of {} bytes are not known here", bytes[9]))?,
            version: PolicyVersion(number(16)),
            digest: Digest::from_bytes(digest(88)),
            values: number(32),
            changed: number(40),
            payload: number(48),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written_and_not_with_another_byte() {
        let (digest, of) = (Digest::of(&[1.0]), Digest::of(&[2.0]));
        let full = FrameHeader::full(PolicyVersion(7), digest, 1000, Dtype::Bf16);
        let kind = FrameKind::Delta { base: PolicyVersion(6), of, checksum: [9; 32] };
        for header in [full, FrameHeader { kind, changed: 3, payload: 77, ..full }] {
            let bytes = header.encode();
            assert_eq!(FrameHeader::decode(&bytes), Ok(header));
            for at in 0..HEADER {
                let mut damaged = bytes;
                damaged[at] ^= 1 << (at % 8);
                assert!(FrameHeader::decode(&damaged).is_err(), "byte {at}");
            }
        }
    }
}
