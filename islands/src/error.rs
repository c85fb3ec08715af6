//! Why islands cannot exchange outer gradients.

use std::path::PathBuf;
use std::time::Duration;

/// Why an exchange failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IslandError {
    /// A value is infinite or no number.
    #[error(
        "value {index} of an outer gradient is {value}; lower the learning rate, or resume from an earlier checkpoint"
    )]
    NotFinite {
        /// Its index in the fragment.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A message is of another length than its values need.
    #[error(
        "a message of {values} values has {found} bytes instead of {expected}; all islands need one version of rlrun"
    )]
    Length {
        /// Number of values.
        values: usize,
        /// Bytes that they need.
        expected: usize,
        /// Bytes that came.
        found: usize,
    },
    /// An answer is of another round.
    #[error(
        "the coordinator answers the outer gradient of round {expected} with a message of round {found}; see that one \
         coordinator has the address, and that all islands and it have one version of rlrun"
    )]
    Round {
        /// The round of the outer gradient.
        expected: u64,
        /// That of the answer.
        found: u64,
    },
    /// Bytes differ from their digest.
    #[error(
        "{what} of {bytes} bytes is damaged: its digest differs; repeat the request, or restore the file from a copy"
    )]
    Damaged {
        /// What it is.
        what: String,
        /// Its length.
        bytes: usize,
    },
    /// The coordinator refuses a request, and will again.
    #[error("the coordinator at {url} refuses island `{island}`: {reason}")]
    Refused {
        /// Where the coordinator is.
        url: String,
        /// Name of the island.
        island: String,
        /// Its reason, with a remedy.
        reason: String,
    },
    /// No answer came in time.
    #[error(
        "island `{island}` has waited {} s for {what} of the coordinator at {url}: {reason}; see that it runs, and go on with \
         rlrun resume", .waited.as_secs()
    )]
    Deadline {
        /// Name of the island.
        island: String,
        /// What it waited for.
        what: String,
        /// Where the coordinator is.
        url: String,
        /// How long.
        waited: Duration,
        /// What came instead.
        reason: String,
    },
    /// The connection cannot be made with what the recipe says.
    #[error("the coordinator at {url} cannot be asked: {reason}")]
    Connection {
        /// Where it is.
        url: String,
        /// Why.
        reason: String,
    },
    /// A file of the coordinator, or of an island, cannot be read or written.
    #[error("cannot {verb} {}: {source}; check permissions and free space", .path.display())]
    File {
        /// What was tried.
        verb: &'static str,
        /// On which file.
        path: PathBuf,
        /// The answer of the system.
        source: std::io::Error,
    },
    /// A directory of a coordinator cannot be used.
    #[error("{} cannot be used by this coordinator: {reason}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A saved state does not fit the run.
    #[error(
        "the state of the island in the checkpoint {reason}; start a new run from the model of the checkpoint"
    )]
    State {
        /// What differs.
        reason: String,
    },
    /// The thread of an exchange has ended without an answer.
    #[error(
        "the exchange of round {round} ended without an answer; this is a mistake in rlrun, please report it"
    )]
    Ended {
        /// Its round.
        round: u64,
    },
    /// A server cannot listen.
    #[error("cannot listen on {address}: {source}; choose another address, or port 0 for a free one")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// The answer of the system.
        source: std::io::Error,
    },
}

impl IslandError {
    /// An error of the file system.
    pub(crate) fn file(verb: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { verb, path, source }
    }

    /// Whether what the user wrote is at fault.
    #[must_use]
    pub fn is_input(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Connection { .. } | Self::Directory { .. })
    }
}
