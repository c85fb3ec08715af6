//! Errors of the buffer. Each message states the evidence, then the remedy.

use std::path::PathBuf;
use std::time::Duration;

use trajectory::{GroupId, PolicyVersion};

use crate::{LeaseId, Order, Stats};

/// Why a buffer call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// The configuration admits no group, or more groups than fit.
    #[error(
        "batch_groups = {batch_groups} with max_staleness = {max_staleness} makes (max_staleness + 1) * batch_groups \
         slots; there must be between 1 and {limit}"
    )]
    Config {
        /// Groups per step.
        batch_groups: usize,
        /// The staleness bound, in versions.
        max_staleness: u64,
        /// Maximum number of slots.
        limit: usize,
    },
    /// Replay leases out of order, so waiting cannot keep slow groups within the staleness bound.
    #[error(
        "on_stale = \"wait\" needs order = \"fifo\" and max_uses = 1, but order = \"{order}\" and max_uses = {max_uses}: \
         set on_stale = \"drop\""
    )]
    ReplayWaits {
        /// The order of leases.
        order: Order,
        /// Uses of each group.
        max_uses: u32,
    },
    /// A setting with an unusable value.
    #[error("{key} = {value} is not usable: it must be above 0")]
    Unusable {
        /// The setting.
        key: &'static str,
        /// Its value.
        value: String,
    },
    /// A group without trajectories has no policy version and trains nothing.
    #[error("{group} has no trajectories: abort it instead of finalizing it")]
    EmptyGroup {
        /// The group.
        group: GroupId,
    },
    /// The group is in another state than the call needs.
    #[error("{group} is {is}, but must be {needs}: discard what was generated for it and ask for admission")]
    WrongState {
        /// The group.
        group: GroupId,
        /// Its current state.
        is: &'static str,
        /// The state that the call needs.
        needs: &'static str,
    },
    /// No batch was complete before the deadline.
    #[error("no batch for the step from {step} within {:.1} s: {stats}; {}", .waited.as_secs_f64(), remedy(*.held_for_slow))]
    LeaseTimeout {
        /// The requested step.
        step: PolicyVersion,
        /// How long the call waited.
        waited: Duration,
        /// Whether enough groups were finalized, but the lease waited for slow groups to keep them within the bound.
        held_for_slow: bool,
        /// Counts at the deadline.
        stats: Box<Stats>,
    },
    /// The groups of the step were acknowledged, or released, and later steps were leased.
    #[error(
        "the step from {step} cannot be leased: the next is {next}, and what was leased for earlier steps was \
         acknowledged with a checkpoint or went to others; resume from a later checkpoint, set the version back, or start \
         with an empty buffer"
    )]
    StepPassed {
        /// The requested step.
        step: PolicyVersion,
        /// The lowest step that can be leased.
        next: PolicyVersion,
    },
    /// A version that the trainer cannot have produced yet.
    #[error(
        "{version} is ahead of the trainer, which is at {known}: tell the buffer the new version first, or see which \
         trainer the sampler gets its weights from"
    )]
    FutureVersion {
        /// The requested version.
        version: PolicyVersion,
        /// The newest version that can exist.
        known: PolicyVersion,
    },
    /// A version older than the trainer's.
    #[error(
        "{version} is behind the trainer, which is at {known}: to start again from an older checkpoint, rewind"
    )]
    VersionBehind {
        /// The requested version.
        version: PolicyVersion,
        /// The newest version that can exist.
        known: PolicyVersion,
    },
    /// A version so far ahead that every group in the buffer would exceed the staleness bound.
    #[error(
        "{version} is too far ahead of the trainer, which is at {known}: every group here would be over max_staleness; to \
         start from another checkpoint, rewind to its version"
    )]
    VersionJump {
        /// The requested version.
        version: PolicyVersion,
        /// The newest version that can exist.
        known: PolicyVersion,
    },
    /// The lease already ended in another way than this call would end it.
    #[error("{lease} was {how} already, so that nothing is done now: lease again")]
    LeaseOver {
        /// The lease.
        lease: LeaseId,
        /// How it ended.
        how: &'static str,
    },
    /// The lease expired, and its groups were leased again or became stale.
    #[error(
        "{lease} is lost: its hold was over and its groups have gone to others, or out of the bound; do not count what \
         was trained on it as done, and lease again with a longer hold"
    )]
    LeaseLost {
        /// The lease.
        lease: LeaseId,
    },
    /// A lease id that was never issued.
    #[error("{lease} was never given, the next one is {next}: see whether it is of another buffer")]
    UnknownLease {
        /// The lease.
        lease: LeaseId,
        /// The next id to be issued.
        next: LeaseId,
    },
    /// A group id that was never admitted.
    #[error(
        "{group} was never admitted, the next one is {next}: ask for admission, or submit the group under a key"
    )]
    UnknownGroup {
        /// The group.
        group: GroupId,
        /// The next id to be admitted.
        next: GroupId,
    },
    /// A group larger than the whole buffer.
    #[error(
        "a group of {bytes} bytes is larger than the whole buffer may be ({limit} bytes): raise max_bytes"
    )]
    GroupTooLarge {
        /// Its size as encoded, bytes.
        bytes: u64,
        /// Maximum number of bytes stored.
        limit: u64,
    },
    /// A group that cannot be encoded.
    #[error("{group} cannot be encoded: {reason}")]
    NotEncodable {
        /// The group.
        group: GroupId,
        /// The reason.
        reason: String,
    },
    /// Back-pressure: too many writes wait for the store. A sender receives
    /// [`Finalized::Full`](crate::Finalized::Full).
    #[error("{waiting} writes wait for the disk already: try again later")]
    QueueFull {
        /// Number of waiting writes.
        waiting: usize,
    },
    /// A group was evicted between two steps of a call.
    #[error("{group} was evicted meanwhile: ask again")]
    Gone {
        /// The group.
        group: GroupId,
    },
    /// A consumer with an unusable name.
    #[error("the name of a consumer has {length} bytes; it must have 1 to {limit}")]
    Consumer {
        /// Bytes of the name.
        length: usize,
        /// Maximum number of bytes.
        limit: usize,
    },
    /// An unusable idempotency key.
    #[error("a key has {length} bytes; it must have 1 to {limit}")]
    Key {
        /// Bytes of the key.
        length: usize,
        /// Maximum number of bytes.
        limit: usize,
    },
    /// Another process has the journal open.
    #[error("journal {} is open in another process: stop that run, or use another run directory", .path.display())]
    Locked {
        /// The journal.
        path: PathBuf,
    },
    /// The journal or its directory is not writable.
    #[error("journal {} cannot be written ({source}): make it and its directory writable, or use another", .path.display())]
    NotWritable {
        /// The journal.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A stored group differs from what was written.
    #[error(
        "journal {}: {group} is damaged ({reason}): check the disk; evict the group to continue without it",
        .path.display()
    )]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// The group.
        group: GroupId,
        /// What is wrong with it.
        reason: String,
    },
    /// The file is not a journal.
    #[error("{} is not a journal of this program ({found}): move it away, or use another run directory", .path.display())]
    NotAJournal {
        /// The file.
        path: PathBuf,
        /// What it is instead.
        found: String,
    },
    /// The file of an open journal was moved, replaced or removed.
    #[error(
        "journal {} {found} while it was open: nothing is acknowledged any more, and what was acknowledged is only in the \
         file that was there; put that file back before it is opened again, or continue without its groups",
        .path.display()
    )]
    JournalMoved {
        /// The journal.
        path: PathBuf,
        /// What is at its path now.
        found: String,
    },
    /// An older program wrote the journal.
    #[error(
        "journal {} has format {found}, which was never released; this program reads {known} and later: finish the run with the \
         program that wrote it, or use another directory",
        .path.display()
    )]
    OlderFormat {
        /// The journal.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The oldest format known here.
        known: u64,
    },
    /// A newer program wrote the journal.
    #[error(
        "journal {} has format {found}, this program reads up to {known}: use the program that wrote it, or a newer one",
        .path.display()
    )]
    NewerFormat {
        /// The journal.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The newest format known here.
        known: u64,
    },
    /// The journal cannot be read or written.
    #[error("journal {}: {action}: {source}; check the disk, then resume the run", .path.display())]
    Journal {
        /// The journal.
        path: PathBuf,
        /// The operation that failed.
        action: &'static str,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A store other than the journal failed.
    #[error("store {store}: {action}: {source}; see whether it runs and can be reached, then resume the run")]
    Store {
        /// Name of the store, as in its configuration.
        store: String,
        /// The operation that failed.
        action: &'static str,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A store in a database that cannot be used as it is configured.
    #[error("store {store} cannot be used: {reason}")]
    StoreSetup {
        /// Name of the store: the servers, the database and the schema.
        store: String,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// Another process has the store open.
    #[error("store {store} is open in another process ({by}): stop that process, or use another schema")]
    StoreInUse {
        /// Name of the store.
        store: String,
        /// The database's description of the other process.
        by: String,
    },
    /// Another process has taken the store over.
    #[error(
        "store {store}: another process has taken it over (this was opening {opening}, now it is {now}): nothing is \
         acknowledged here any more, and what was acknowledged is stored; leave the work to the other process, or stop it \
         and resume the run"
    )]
    Deposed {
        /// Name of the store.
        store: String,
        /// The number of this opening, which fences its writes.
        opening: u64,
        /// The number of the newest opening.
        now: u64,
    },
    /// The journal writer failed earlier; nothing is acknowledged any more.
    #[error("journal {}: the writer has stopped: {cause}; nothing that was acknowledged is lost: check the disk, then resume the run", .path.display())]
    WriterStopped {
        /// The journal.
        path: PathBuf,
        /// The first failure.
        cause: String,
    },
    /// The disk did not acknowledge a write in time.
    #[error("journal {}: no write was acknowledged within {} s: check the disk, then resume the run", .path.display(), .waited.as_secs())]
    WriteTimeout {
        /// The journal.
        path: PathBuf,
        /// How long the call waited.
        waited: Duration,
    },
    /// Two calls finalize the same group, and the first one does not finish.
    #[error("{group} is being written by another call, which did not end within {} s: check the disk", .waited.as_secs())]
    StillWriting {
        /// The group.
        group: GroupId,
        /// How long the call waited.
        waited: Duration,
    },
    /// The client cannot use this configuration.
    #[error("the buffer at {url} cannot be used: {reason}")]
    Client {
        /// The server.
        url: String,
        /// The reason, and the remedy.
        reason: String,
    },
    /// The server did not answer within the deadline, over all attempts.
    #[error(
        "{request}: no answer in {:.0} s and {attempts} attempts ({reason}): see whether the server runs and can be reached",
        .waited.as_secs_f64()
    )]
    Unreachable {
        /// Method and URL.
        request: String,
        /// Number of attempts.
        attempts: u32,
        /// Time over all attempts.
        waited: Duration,
        /// Why the last attempt failed.
        reason: String,
    },
    /// The answer was lost, and repeating the request could apply it twice.
    #[error(
        "{request}: it is not known whether it was done ({reason}); what was taken by it is free again when its hold is over"
    )]
    Unclear {
        /// Method and URL.
        request: String,
        /// Why the attempt failed.
        reason: String,
    },
    /// The server refused the request.
    #[error("{detail} ({request}: {status} {code})")]
    Refused {
        /// Method and URL.
        request: String,
        /// The HTTP status.
        status: u16,
        /// The stable error code.
        code: String,
        /// The evidence, and the remedy.
        detail: String,
    },
    /// An answer that cannot be decoded.
    #[error(
        "{request}: the answer cannot be read ({reason}): see whether a buffer of this version is at this address"
    )]
    BadAnswer {
        /// Method and URL.
        request: String,
        /// The reason.
        reason: String,
    },
    /// A thread panicked in the middle of a change.
    #[error("a thread panicked while it changed the buffer: see its message, then resume the run")]
    Poisoned,
}

impl BufferError {
    /// States of a group in errors.
    pub(crate) const STATES: [&'static str; 7] = [
        "admitted",
        "claimed",
        "being written",
        "finalized",
        "queued for re-admission",
        "not yet admitted",
        "leased, trained or evicted",
    ];
    /// States that calls need a group to be in.
    pub(crate) const NEEDS: [&'static str; 2] = ["admitted", "admitted or claimed"];
}

fn remedy(held_for_slow: bool) -> &'static str {
    if held_for_slow {
        "a complete batch waits so that the oldest in flight stay within max_staleness: see why they are slow, or set \
         on_stale = \"drop\""
    } else {
        "the trainer waits for the samplers: see why the oldest in flight are slow, or give rollout more devices"
    }
}
