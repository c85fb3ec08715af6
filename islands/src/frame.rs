//! A body of the coordinator: what it belongs to, its bytes, and a digest of both.
//!
//! ```text
//! 32 bytes  BLAKE3 of all that follows
//! 8 bytes   round, little endian
//! 8 bytes   number of islands of the round, little endian
//! ...       payload
//! ```
//!
//! Invariant: a frame that was damaged on its way or on disk is an error.

use crate::IslandError;

/// Bytes before the payload.
pub const FRAME_HEAD: usize = 48;

/// Bytes of a digest of weights.
pub(crate) const WEIGHTS_DIGEST: usize = 32;

/// A message of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundMessage {
    /// Its round.
    pub round: u64,
    /// Islands whose outer gradients are in it; 1 for that of an island.
    pub islands: u64,
    /// Its bytes.
    pub payload: Vec<u8>,
}

impl RoundMessage {
    /// Its frame.
    #[must_use]
    pub fn to_frame(&self) -> Vec<u8> {
        let mut frame = vec![0; 32];
        frame.reserve_exact(FRAME_HEAD - 32 + self.payload.len());
        frame.extend(self.round.to_le_bytes());
        frame.extend(self.islands.to_le_bytes());
        frame.extend(&self.payload);
        let digest = blake3::hash(&frame[32..]);
        frame[..32].copy_from_slice(digest.as_bytes());
        frame
    }

    /// The message of a frame.
    ///
    /// # Errors
    /// One that is too short, or whose digest differs.
    pub fn from_frame(mut frame: Vec<u8>) -> Result<Self, IslandError> {
        if frame.len() < FRAME_HEAD {
            return Err(IslandError::Damaged { what: "a message".to_owned(), bytes: frame.len() });
        }
        if blake3::hash(&frame[32..]).as_bytes()[..] != frame[..32] {
            return Err(IslandError::Damaged { what: "a message".to_owned(), bytes: frame.len() });
        }
        let number = |at: usize| frame[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
        let (round, islands) = (number(32), number(40));
        frame.drain(..FRAME_HEAD);
        Ok(Self { round, islands, payload: frame })
    }
}

/// The bytes of `values`.
#[must_use]
pub fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// BLAKE3 of the bytes of `values`.
pub(crate) fn weights_digest(values: &[f32]) -> [u8; WEIGHTS_DIGEST] {
    *blake3::hash(bytemuck::cast_slice(values)).as_bytes()
}
