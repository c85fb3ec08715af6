//! Limits of requests. Invariant: all memory and time that the server spends for clients is bounded by one of these
//! numbers.

use std::time::Duration;

/// Limits of one request, and of all together.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Bytes of a body after decompression.
    pub body_bytes: usize,
    /// Decoded bytes of a body, computed before it is decoded; larger than the body, since free-form values take many
    /// times their encoded size.
    pub decoded_bytes: usize,
    /// Bytes of all bodies above [`ServerLimits::SMALL_BODY`] together, encoded and decoded; at least `body_bytes`
    /// and `decoded_bytes`.
    pub bodies_bytes: usize,
    /// Deadline for a body to arrive, and then to reserve its memory.
    pub body_read: Duration,
    /// Deadline for the head of a request, and maximum idle time of a connection.
    pub head_read: Duration,
    /// Deadline for a client to read the next part of an answer.
    pub write_stall: Duration,
    /// Deadline of a TLS handshake.
    pub handshake: Duration,
    /// Grace period of running requests when the server stops.
    pub stop: Duration,
    /// Maximum number of connections.
    pub connections: usize,
    /// Maximum number of trajectories in a group.
    pub trajectories: usize,
    /// Maximum number of tokens in a trajectory.
    pub tokens: usize,
    /// Maximum number of values in the columns of a group and the details of its rewards.
    pub values: usize,
    /// Maximum bytes of the name of a column, a detail or a reward.
    pub name_bytes: usize,
    /// Maximum nesting of lists and objects in a column or a detail.
    pub depth: usize,
    /// Vocabulary size: token ids are below it; `None`: any id.
    pub vocabulary: Option<u32>,
    /// Whether every trajectory with a reward needs `correct`.
    pub correct: bool,
}

impl ServerLimits {
    /// Bodies up to this size are not counted in `bodies_bytes`, bytes: all connections together have few of them.
    pub const SMALL_BODY: usize = 128 << 10;
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            body_bytes: 64 << 20,
            decoded_bytes: 256 << 20,
            bodies_bytes: 1 << 30,
            body_read: Duration::from_secs(30),
            head_read: Duration::from_secs(10),
            write_stall: Duration::from_secs(30),
            handshake: Duration::from_secs(10),
            stop: Duration::from_secs(10),
            connections: 4096,
            trajectories: 4096,
            tokens: 1 << 20,
            values: 1 << 14,
            name_bytes: 256,
            depth: 64,
            vocabulary: None,
            correct: false,
        }
    }
}
