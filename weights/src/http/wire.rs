//! Requests and answers, but for weights. Invariant: fields are added, never changed; what is not known is ignored.

use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

use crate::direct::WeightsLocation;
use crate::hub::After;
use crate::{Lag, WeightsError};

/// Wants a seat.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SubscribeRequest {
    pub(super) name: String,
}

/// Has a seat.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SubscribeAnswer {
    pub(super) connection: u64,
    /// How long the subscriber may be silent.
    pub(super) hold_ms: u64,
}

/// Leaves a seat.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct UnsubscribeQuery {
    pub(super) name: String,
    pub(super) connection: u64,
}

/// Asks for the newest version.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NewestQuery {
    pub(super) name: String,
    pub(super) connection: u64,
    pub(super) after: Option<u64>,
    #[serde(default)]
    pub(super) wait_ms: u64,
    /// A version that is only in shared memory is welcome too.
    #[serde(default)]
    pub(super) shm: bool,
    /// The last round of broadcasts that it was told of, if it takes part in them; `after` does not count then.
    #[serde(default)]
    pub(super) round: Option<u64>,
}

/// What there is.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NewestAnswer {
    /// Of the hub; another one after a restart.
    pub(super) life: u64,
    /// What the hub believes that the caller serves.
    pub(super) served: Option<u64>,
    pub(super) news: Option<VersionNotice>,
}

/// A version.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct VersionNotice {
    pub(super) version: u64,
    /// `None` if it can be had from shared memory only, so far.
    pub(super) digest: Option<String>,
    pub(super) parameters: u64,
    pub(super) dtype: String,
    /// File to map, on the trainer's host.
    pub(super) shm: Option<String>,
    /// How to get it, if it is on a device.
    #[serde(default)]
    pub(super) direct: Option<WeightsLocation>,
}

/// Asks for all weights.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct FullQuery {
    pub(super) version: u64,
}

/// Asks for changes.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DeltaQuery {
    pub(super) from: u64,
}

/// A receipt.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReceiptBody {
    pub(super) name: String,
    pub(super) connection: u64,
    /// Of the hub that told of the version.
    pub(super) life: u64,
    pub(super) version: u64,
    pub(super) digest: String,
    pub(super) took_us: u64,
    pub(super) stalled_us: u64,
    pub(super) bytes: u64,
}

/// Nothing more to say.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Acknowledged {}

/// How far a subscriber is behind.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LagBody {
    pub(super) subscriber: String,
    /// What it serves; `None` until it applied a version.
    pub(super) version: Option<u64>,
    /// How many versions it is behind.
    pub(super) lag: u64,
    pub(super) took_s: Option<f64>,
    pub(super) stalled_s: Option<f64>,
    pub(super) bytes: Option<u64>,
}

/// An error.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WeightsProblem {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) title: String,
    pub(super) status: u16,
    pub(super) code: String,
    pub(super) detail: String,
    /// The newest version, where the publisher is gone.
    #[serde(default)]
    pub(super) newest: Option<u64>,
}

impl WeightsProblem {
    pub(super) const TYPE: &str = "application/problem+json";
    pub(super) const PUBLISHER_GONE: &str = "publisher_gone";
    pub(super) const TAKEN_OVER: &str = "taken_over";
    pub(super) const VERSION_GONE: &str = "version_gone";

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
