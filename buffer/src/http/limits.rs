//! What one request, and all of them together, may take. Invariant: nothing that the server keeps for its clients grows
//! without one of these numbers.

use std::time::Duration;

/// What one request, and all of them together, may take.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Bytes of a body, after decompression.
    pub body_bytes: usize,
    /// Bytes that a body takes decoded, counted before it is: more than it has, since what can have any shape takes many
    /// times what it is sent as.
    pub decoded_bytes: usize,
    /// Bytes of all bodies together that are above [`ServerLimits::SMALL_BODY`], as they come and decoded; at least
    /// `body_bytes` and `decoded_bytes`.
    pub bodies_bytes: usize,
    /// How long a body may take to arrive, and then to find room.
    pub body_read: Duration,
    /// How long the head of a request may take to arrive, and how long a connection may be idle.
    pub head_read: Duration,
    /// How long a client may read nothing of an answer.
    pub write_stall: Duration,
    /// How long a TLS handshake may take.
    pub handshake: Duration,
    /// How long requests may go on once the server was asked to stop.
    pub stop: Duration,
    /// Connections at the same time.
    pub connections: usize,
    /// Trajectories in a group.
    pub trajectories: usize,
    /// Tokens in a trajectory.
    pub tokens: usize,
    /// Values in the columns of a group and the details of its rewards.
    pub values: usize,
    /// Bytes of the name of a column, a detail or a reward.
    pub name_bytes: usize,
    /// Lists and objects within each other in a column or a detail.
    pub depth: usize,
    /// Token ids are below; `None`: any id.
    pub vocabulary: Option<u32>,
    /// Whether every trajectory with a reward has to say whether it is correct.
    pub correct: bool,
}

impl ServerLimits {
    /// Bodies up to here are not counted among all bodies: all connections together hold little of them.
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
