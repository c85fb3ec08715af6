//! Requests and answers, except weights. Invariant: fields are added, never changed; unknown fields are ignored.

use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use crate::direct::WeightsLocation;
use crate::hub::{After, AssignedRelay};
use crate::{FallbackReason, Lag, RelayAddress, WeightsError};

/// Registers a subscriber.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SubscribeRequest {
    pub(super) name: String,
}

/// The registration.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SubscribeAnswer {
    pub(super) connection: u64,
    /// The registration expires after this time without a call, milliseconds.
    pub(super) hold_ms: u64,
}

/// Unregisters a subscriber.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct UnsubscribeQuery {
    pub(super) name: String,
    pub(super) connection: u64,
}

/// Polls for the newest version.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NewestQuery {
    pub(super) name: String,
    pub(super) connection: u64,
    pub(super) after: Option<u64>,
    #[serde(default)]
    pub(super) wait_ms: u64,
    /// Whether a version that is only in shared memory can be announced.
    #[serde(default)]
    pub(super) shm: bool,
    /// The subscriber's last broadcast round, if it takes part in broadcasts; `after` is then ignored.
    #[serde(default)]
    pub(super) round: Option<u64>,
}

/// Polls for the newest version, and sends a receipt first.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReceiptAndPoll {
    pub(super) receipt: ReceiptBody,
    pub(super) newest: NewestQuery,
}

/// Answer of a poll.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NewestAnswer {
    /// Incarnation of the hub, which changes with a restart.
    pub(super) life: u64,
    /// The version of the caller's last receipt.
    pub(super) served: Option<u64>,
    /// Whether the caller is registered as a relay.
    #[serde(default)]
    pub(super) relays: bool,
    pub(super) news: Option<VersionNotice>,
}

/// Announcement of a version.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct VersionNotice {
    pub(super) version: u64,
    /// `None` while it is available from shared memory only.
    pub(super) digest: Option<String>,
    pub(super) parameters: u64,
    pub(super) dtype: String,
    /// File to map on the trainer's host.
    pub(super) shm: Option<String>,
    /// How to get it from a device.
    #[serde(default)]
    pub(super) direct: Option<WeightsLocation>,
    /// The relay to fetch it from; `None`: the hub.
    #[serde(default)]
    pub(super) relay: Option<RelayNotice>,
}

/// The relay that a subscriber is to fetch a version from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RelayNotice {
    pub(super) name: String,
    pub(super) address: RelayAddress,
    /// How long to wait for the whole version, milliseconds.
    pub(super) wait_ms: u64,
}

/// Registers the caller as a relay.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RelayBody {
    pub(super) name: String,
    pub(super) connection: u64,
    pub(super) address: RelayAddress,
}

/// Reports that a relay failed, and that the version is fetched from the hub.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct FallbackBody {
    pub(super) name: String,
    pub(super) connection: u64,
    pub(super) relay: String,
    pub(super) version: u64,
    pub(super) reason: FallbackReason,
    pub(super) detail: String,
}

/// Requests all weights.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct FullQuery {
    pub(super) version: u64,
    /// How long to wait for it, if the server may get it.
    #[serde(default)]
    pub(super) wait_ms: u64,
}

/// Requests a delta.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DeltaQuery {
    pub(super) from: u64,
    /// How long to wait for it, if the server may get it.
    #[serde(default)]
    pub(super) wait_ms: u64,
}

/// A receipt.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReceiptBody {
    pub(super) name: String,
    pub(super) connection: u64,
    /// Incarnation of the hub that announced the version.
    pub(super) life: u64,
    pub(super) version: u64,
    pub(super) digest: String,
    pub(super) took_us: u64,
    pub(super) stalled_us: u64,
    pub(super) bytes: u64,
    #[serde(default)]
    pub(super) taken: u64,
}

/// An answer without fields: success.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Acknowledged {}

/// Lag of a subscriber.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LagBody {
    pub(super) subscriber: String,
    /// The version that it serves; `None` until it applied one.
    pub(super) version: Option<u64>,
    /// Number of versions behind the newest.
    pub(super) lag: u64,
    pub(super) took_s: Option<f64>,
    pub(super) stalled_s: Option<f64>,
    pub(super) bytes: Option<u64>,
}

/// A problem document.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WeightsProblem {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) title: String,
    pub(super) status: u16,
    pub(super) code: String,
    pub(super) detail: String,
    /// The newest version, if the publisher has ended.
    #[serde(default)]
    pub(super) newest: Option<u64>,
}

impl WeightsProblem {
    pub(super) const TYPE: &str = "application/problem+json";
    pub(super) const PUBLISHER_GONE: &str = "publisher_gone";
    pub(super) const TAKEN_OVER: &str = "taken_over";
    pub(super) const VERSION_GONE: &str = "version_gone";
    pub(super) const NOT_YET: &str = "not_yet";

    pub(super) fn new(status: u16, code: &str, detail: String) -> Self {
        let title = code.replace('_', " ");
        Self { kind: "about:blank".to_owned(), title, status, code: code.to_owned(), detail, newest: None }
    }
}

impl From<WeightsError> for WeightsProblem {
    fn from(error: WeightsError) -> Self {
        let (status, code) = match &error {
            WeightsError::PublisherGone { newest } => {
                let problem = Self::new(410, Self::PUBLISHER_GONE, error.to_string());
                return Self { newest: newest.map(|version| version.0), ..problem };
            }
            WeightsError::TakenOver { .. } => (409, Self::TAKEN_OVER),
            WeightsError::BadName { .. } => (400, "bad_name"),
            WeightsError::BadConnection { .. } => (400, "bad_connection"),
            WeightsError::BadRelay { .. } => (400, "bad_relay"),
            WeightsError::NameTaken { .. } => (409, "name_taken"),
            WeightsError::Rejected { .. } => (409, "left_out"),
            WeightsError::TooMany { .. } => (429, "too_many_subscribers"),
            WeightsError::Mismatch { .. } => (409, "mismatch"),
            WeightsError::NeverPublished { .. } => (409, "never_published"),
            WeightsError::WentBack { .. } => (409, "went_back"),
            WeightsError::Republished { .. } => (409, "republished"),
            _ => (500, "failed"),
        };
        Self::new(status, code, error.to_string())
    }
}

impl From<&Lag> for LagBody {
    fn from(lag: &Lag) -> Self {
        Self {
            subscriber: lag.subscriber.clone(),
            version: lag.receipt.map(|receipt| receipt.version.0),
            lag: lag.versions,
            took_s: lag.receipt.map(|receipt| receipt.took.as_secs_f64()),
            stalled_s: lag.receipt.map(|receipt| receipt.stalled.as_secs_f64()),
            bytes: lag.receipt.map(|receipt| receipt.bytes),
        }
    }
}

impl NewestQuery {
    pub(super) fn known(&self) -> After {
        self.round.map_or(After::Version(self.after.map(PolicyVersion)), After::Round)
    }
}

impl From<AssignedRelay> for RelayNotice {
    fn from(AssignedRelay { name, address, wait }: AssignedRelay) -> Self {
        Self { name, address, wait_ms: wait.as_millis() as u64 }
    }
}

impl From<RelayNotice> for AssignedRelay {
    fn from(RelayNotice { name, address, wait_ms }: RelayNotice) -> Self {
        Self { name, address, wait: std::time::Duration::from_millis(wait_ms) }
    }
}
