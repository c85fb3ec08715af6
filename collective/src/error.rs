//! Errors of collective operations: evidence, then remedy.

/// Why a collective operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A rank did not make the call before the deadline.
    #[error(
        "rank {rank} waited {seconds} s for rank {waits_for} in `{operation}`; look whether that rank hangs or computes for longer than deadlines.wait_s"
    )]
    Deadline {
        /// The rank that waited.
        rank: usize,
        /// The rank that it waited for.
        waits_for: usize,
        /// The operation.
        operation: &'static str,
        /// The deadline, seconds.
        seconds: f64,
    },
    /// A rank has ended, or its connection is closed.
    #[error("rank {rank} cannot do `{operation}`: rank {peer} is gone; its own log says why it ended")]
    Gone {
        /// The rank that noticed.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
        /// The operation.
        operation: &'static str,
    },
    /// Another rank has failed, which closes the collective for all.
    #[error("rank {rank} cannot do `{operation}`: rank {peer} has given up: {reason}")]
    GivenUp {
        /// The rank that was notified.
        rank: usize,
        /// The rank that has given up.
        peer: usize,
        /// The operation.
        operation: &'static str,
        /// The error of the other.
        reason: String,
    },
    /// Two ranks make different calls, or the same with other lengths.
    #[error(
        "rank {rank} does `{operation}`, but rank {peer} does {found}; all ranks need the same recipe and the same rlrun"
    )]
    OutOfStep {
        /// One of the ranks.
        rank: usize,
        /// The other rank.
        peer: usize,
        /// The operation of the one.
        operation: &'static str,
        /// The call of the other.
        found: String,
    },
    /// The connection to a rank has failed.
    #[error("rank {rank} cannot do `{operation}`: the connection to rank {peer} has failed: {source}")]
    Connection {
        /// The rank of this end.
        rank: usize,
        /// The rank of the other end.
        peer: usize,
        /// The operation.
        operation: &'static str,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A rank could not join the others.
    #[error("cannot join the ranks at {address}: {reason}")]
    Join {
        /// Address of rank 0.
        address: String,
        /// Evidence and remedy.
        reason: String,
    },
    /// There is no group with this rank yet, or rank 0 has given up the one that it was to be in. It can join again.
    #[error("cannot join the ranks at {address}: {reason}")]
    NotFormed {
        /// Address of rank 0.
        address: String,
        /// Evidence and remedy.
        reason: String,
    },
    /// The arguments of a call do not fit each other.
    #[error("rank {rank} cannot do `{operation}`: {reason}")]
    Arguments {
        /// The rank that made the call.
        rank: usize,
        /// The operation.
        operation: &'static str,
        /// Which arguments do not fit.
        reason: String,
    },
    /// A call of ranks that a split has made. The ranks in `source` count from 0 among these.
    #[error("among ranks {members:?}, which count from 0 here: {source}")]
    Among {
        /// Their numbers among the ranks that were split.
        members: Vec<usize>,
        /// What failed.
        source: Box<CollectiveError>,
    },
    /// A device, or the group of devices, has failed.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
}

impl CollectiveError {
    /// The error of the device itself, where there is one; otherwise whether another rank or this one is the cause.
    #[must_use]
    pub fn into_device_error(self) -> device::DeviceError {
        match self {
            Self::Device(error) => error,
            other if other.is_of_peer() => device::DeviceError::Peer { reason: other.to_string() },
            other => {
                device::DeviceError::Unavailable { device: "group".to_owned(), reason: other.to_string() }
            }
        }
    }

    /// Whether another rank causes this error.
    fn is_of_peer(&self) -> bool {
        match self {
            Self::Deadline { .. }
            | Self::Gone { .. }
            | Self::GivenUp { .. }
            | Self::OutOfStep { .. }
            | Self::Connection { .. } => true,
            Self::Among { source, .. } => source.is_of_peer(),
            Self::Join { .. } | Self::NotFormed { .. } | Self::Arguments { .. } | Self::Device(_) => false,
        }
    }
}
