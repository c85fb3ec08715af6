//! Errors between trainer and samplers. Each message states the evidence, then the remedy.

use std::time::Duration;

use trajectory::PolicyVersion;

use crate::Digest;

/// Why weights were not distributed or applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The published version is not newer than the last.
    #[error(
        "{version} cannot be published after {newest}: versions only go up; a run that goes back needs a new hub"
    )]
    NotNewer {
        /// The version to be published.
        version: PolicyVersion,
        /// The newest published version.
        newest: PolicyVersion,
    },
    /// A sampler serves other weights than its receipt says.
    #[error(
        "{subscriber} serves weights {served} as {version}, which was published as {published}: its samples would be of \
         another policy; stop the run and check its transport and memory"
    )]
    Mismatch {
        /// The subscriber.
        subscriber: String,
        /// The reported version.
        version: PolicyVersion,
        /// The digest of the served weights.
        served: Digest,
        /// The digest of the published weights.
        published: Digest,
    },
    /// A sampler reports a version that does not exist.
    #[error(
        "{subscriber} says that it serves {version}, which was never published: is it part of another run?"
    )]
    NeverPublished {
        /// The subscriber.
        subscriber: String,
        /// The reported version.
        version: PolicyVersion,
    },
    /// A sampler reports an older version than before.
    #[error("{subscriber} went back from {from} to {version}: weights must only be applied in order")]
    WentBack {
        /// The subscriber.
        subscriber: String,
        /// The version that it served.
        from: PolicyVersion,
        /// The reported version.
        version: PolicyVersion,
    },
    /// A subscriber did not apply a version in time.
    #[error("{version} was not applied by all within {:.1} s: {behind}; see why they do not swap weights", .waited.as_secs_f64())]
    NotApplied {
        /// The version.
        version: PolicyVersion,
        /// How long the publisher waited.
        waited: Duration,
        /// The late subscribers and the versions that they serve.
        behind: String,
    },
    /// A version was published again with other weights.
    #[error(
        "{version} was published as {before} and is now {now}: steps that are repeated must give the same weights; \
         look at what changed since ({who} has the first), and restart samplers and trainer"
    )]
    Republished {
        /// The version.
        version: PolicyVersion,
        /// The first digest.
        before: Digest,
        /// The digest now.
        now: Digest,
        /// Where the first digest is known from.
        who: String,
    },
    /// A later connection has this name.
    #[error(
        "another {name} has subscribed since: this one is no longer asked; stop it, or give it another name"
    )]
    TakenOver {
        /// The name.
        name: String,
    },
    /// The subscriber was rejected for an impossible receipt.
    #[error(
        "{name} was rejected because its last receipt is impossible: see the log of the run, then start it again"
    )]
    Rejected {
        /// Its name.
        name: String,
    },
    /// A connection id that no hub has issued.
    #[error("{name} calls as connection {connection}, which no run has given out: subscribe first")]
    BadConnection {
        /// Its name.
        name: String,
        /// The connection id.
        connection: u64,
    },
    /// An invalid address of a relay.
    #[error("{name} names {url:?} as its address as a relay: write http:// or https://, a host and a port")]
    BadRelay {
        /// Its name.
        name: String,
        /// The address, truncated.
        url: String,
    },
    /// A relay that cannot serve.
    #[error("{name} cannot serve weights to others as a relay: {reason}; give it another address, or none")]
    Relay {
        /// Its name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// An invalid name.
    #[error(
        "{name:?} is no name of a subscriber: 1 to {limit} letters, digits, spaces and -_.: are possible"
    )]
    BadName {
        /// The name, truncated.
        name: String,
        /// Maximum length of a name, bytes.
        limit: usize,
    },
    /// Too many subscribers.
    #[error(
        "there are {limit} subscribers already, the most that one trainer serves: is a worker started again and again?"
    )]
    TooMany {
        /// Maximum number of subscribers.
        limit: usize,
    },
    /// Received weights are damaged; they were not applied.
    #[error("the weights of {version} ({digest}) came damaged and were not applied: {what}")]
    Corrupt {
        /// The version.
        version: PolicyVersion,
        /// Its digest.
        digest: Digest,
        /// The damage.
        what: String,
    },
    /// Shared memory cannot be used.
    #[error("shared memory in {path}: cannot {what}: {reason}")]
    Shm {
        /// File or directory.
        path: String,
        /// The operation.
        what: &'static str,
        /// The system's answer.
        reason: String,
    },
    /// Shards that do not cover a version.
    #[error("shared memory in {path}: {reason}")]
    Shard {
        /// The file.
        path: String,
        /// The reason.
        reason: String,
    },
    /// The weights are on a device, but host weights were requested.
    #[error(
        "{version} is on a device: subscribe as its transport wants it (cuda-ipc, nccl, or within the process)"
    )]
    OnDevice {
        /// The version.
        version: PolicyVersion,
    },
    /// The weights come by another transport than the subscriber's.
    #[error(
        "{version} does not come by {transport}: give trainer and samplers the same weights.transport ({what})"
    )]
    OtherWay {
        /// The version.
        version: PolicyVersion,
        /// The subscriber's transport.
        transport: &'static str,
        /// How the version is transported.
        what: String,
    },
    /// A device failed.
    #[error("the device cannot {what}: {reason}")]
    Device {
        /// The operation.
        what: &'static str,
        /// The device's error.
        reason: String,
    },
    /// Subscribers still read memory that the publisher needs.
    #[error("{version} finds no free slot on the device for {:.1} s: {holders}; see why it does not go on", .waited.as_secs_f64())]
    SlotsInUse {
        /// The version that was to be published or received.
        version: PolicyVersion,
        /// How long the publisher waited.
        waited: Duration,
        /// The subscribers.
        holders: String,
    },
    /// A version that could not be sent to the samplers.
    #[error("{version} was not sent after {attempts} attempts: {reason}")]
    NotSent {
        /// The version.
        version: PolicyVersion,
        /// Number of attempts, each with the samplers that still answered.
        attempts: usize,
        /// Why the last attempt failed.
        reason: String,
    },
    /// The trainer's process does not answer.
    #[error(
        "{name} cannot reach the trainer's weights at {url} for {:.1} s: {reason}; see whether the trainer runs and is \
         reachable from here",
        .waited.as_secs_f64()
    )]
    Unreachable {
        /// The subscriber.
        name: String,
        /// URL of the hub.
        url: String,
        /// Time without an answer.
        waited: Duration,
        /// The last failure.
        reason: String,
    },
    /// The trainer's process refused a request.
    #[error("{url} refused {name}: {detail} ({code})")]
    Refused {
        /// The subscriber.
        name: String,
        /// URL of the hub.
        url: String,
        /// The stable error code.
        code: String,
        /// The reason.
        detail: String,
    },
    /// The name of a subscriber is in use.
    #[error("there already is a subscriber named {name}: give every sampler its own name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The publisher has ended: no newer version will be published.
    #[error("the publisher is gone; the newest version is {}: the trainer has ended, see its messages", newest_or_none(*.newest))]
    PublisherGone {
        /// The newest published, if any.
        newest: Option<PolicyVersion>,
    },
    /// A thread panicked in the middle of a change.
    #[error("a thread panicked while it changed the hub: see its message, then resume the run")]
    Poisoned,
}

fn newest_or_none(newest: Option<PolicyVersion>) -> String {
    newest.map_or_else(|| "none".to_owned(), |version| version.to_string())
}
