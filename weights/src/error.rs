//! What can go wrong between trainer and samplers. Every message says who is where and what to do about it.

use std::time::Duration;

use trajectory::PolicyVersion;

use crate::Digest;

/// Why weights did not get where they should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The published version is not newer than the last.
    #[error(
        "{version} cannot be published after {newest}: versions only go up; a run that goes back needs a new hub"
    )]
    NotNewer {
        /// The version that was to be published.
        version: PolicyVersion,
        /// The newest published.
        newest: PolicyVersion,
    },
    /// A sampler holds other weights than it says.
    #[error(
        "{subscriber} serves weights {served} as {version}, which was published as {published}: its samples would be of \
         another policy; stop the run and check its transport and memory"
    )]
    Mismatch {
        /// Who.
        subscriber: String,
        /// What it says it serves.
        version: PolicyVersion,
        /// What it serves.
        served: Digest,
        /// What it should serve.
        published: Digest,
    },
    /// A sampler reports a version that does not exist.
    #[error(
        "{subscriber} says that it serves {version}, which was never published: is it part of another run?"
    )]
    NeverPublished {
        /// Who.
        subscriber: String,
        /// What it says it serves.
        version: PolicyVersion,
    },
    /// A sampler reports an older version than before.
    #[error("{subscriber} went back from {from} to {version}: weights must only be applied in order")]
    WentBack {
        /// Who.
        subscriber: String,
        /// What it served.
        from: PolicyVersion,
        /// What it says it serves.
        version: PolicyVersion,
    },
    /// Somebody did not apply a version in time.
    #[error("{version} was not applied by all within {:.1} s: {behind}; see why they do not swap weights", .waited.as_secs_f64())]
    NotApplied {
        /// The version.
        version: PolicyVersion,
        /// How long the publisher waited.
        waited: Duration,
        /// Who is behind, and where.
        behind: String,
    },
    /// A version was published twice, with other weights.
    #[error(
        "{version} was published as {before} and is now {now}: steps that are repeated must give the same weights; \
         look at what changed since ({who} holds the first), and start samplers and trainer anew"
    )]
    Republished {
        /// The version.
        version: PolicyVersion,
        /// What it was.
        before: Digest,
        /// What it is now.
        now: Digest,
        /// Who knows it as it was.
        who: String,
    },
    /// Another process goes by this name now.
    #[error(
        "another {name} has subscribed since: this one is no longer asked; stop it, or give it another name"
    )]
    TakenOver {
        /// The name.
        name: String,
    },
    /// The caller said what cannot be true, and is no longer asked.
    #[error(
        "{name} was left out of the run because its last receipt cannot be true: see the log of the run, then start it anew"
    )]
    Rejected {
        /// Its name.
        name: String,
    },
    /// A connection that no hub has given out.
    #[error("{name} calls as connection {connection}, which no run has given out: subscribe first")]
    BadConnection {
        /// Its name.
        name: String,
        /// What it calls itself.
        connection: u64,
    },
    /// A name that nobody can have.
    #[error(
        "{name:?} is no name of a subscriber: 1 to {limit} letters, digits, spaces and -_.: are possible"
    )]
    BadName {
        /// The name, cut off.
        name: String,
        /// Most bytes of a name.
        limit: usize,
    },
    /// Too many subscribers.
    #[error(
        "there are {limit} subscribers already, the most that one trainer serves: is a worker started again and again?"
    )]
    TooMany {
        /// Most subscribers.
        limit: usize,
    },
    /// Weights that are not what they should be; they were not applied.
    #[error("the weights of {version} ({digest}) came damaged and were not applied: {what}")]
    Corrupt {
        /// Which version was to be received.
        version: PolicyVersion,
        /// What its digest should be.
        digest: Digest,
        /// What was seen.
        what: String,
    },
    /// Shared memory cannot be used.
    #[error("shared memory in {path}: cannot {what}: {reason}")]
    Shm {
        /// File or directory.
        path: String,
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        reason: String,
    },
    /// Shards that do not make up a version.
    #[error("shared memory in {path}: {reason}")]
    Shard {
        /// The file.
        path: String,
        /// What does not fit.
        reason: String,
    },
    /// Weights on a device, where weights on the host were asked for.
    #[error(
        "{version} is on a device: subscribe as its transport wants it (cuda-ipc, nccl, or within the process)"
    )]
    OnDevice {
        /// Which version.
        version: PolicyVersion,
    },
    /// Weights that come another way than the subscriber is made for.
    #[error(
        "{version} does not come by {transport}: give trainer and samplers the same weights.transport ({what})"
    )]
    OtherWay {
        /// Which version.
        version: PolicyVersion,
        /// How it was expected.
        transport: &'static str,
        /// What came.
        what: String,
    },
    /// A device that fails.
    #[error("the device cannot {what}: {reason}")]
    Device {
        /// What was tried.
        what: &'static str,
        /// What the device says.
        reason: String,
    },
    /// Memory of a device that somebody does not give back.
    #[error("{version} finds no free slot on the device for {:.1} s: {holders}; see why it does not go on", .waited.as_secs_f64())]
    Held {
        /// The version that was to be published or received.
        version: PolicyVersion,
        /// For how long.
        waited: Duration,
        /// Who holds it.
        holders: String,
    },
    /// A version that did not get to the samplers.
    #[error("{version} was not sent after {attempts} attempts: {reason}")]
    NotSent {
        /// Which version.
        version: PolicyVersion,
        /// How often it was tried, each time with those who still answered.
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
        /// Where the weights are served.
        url: String,
        /// For how long.
        waited: Duration,
        /// The last failure.
        reason: String,
    },
    /// The trainer's process answered that it will not.
    #[error("{url} refused {name}: {detail} ({code})")]
    Refused {
        /// The subscriber.
        name: String,
        /// What was asked.
        url: String,
        /// A stable word for the reason.
        code: String,
        /// The reason.
        detail: String,
    },
    /// Two subscribers would be indistinguishable.
    #[error("there already is a subscriber named {name}: give every sampler its own name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// Nothing newer will ever be published.
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
