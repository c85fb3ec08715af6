//! What can go wrong at the buffer. Every message says what was found and what to do about it.

use std::path::PathBuf;
use std::time::Duration;

use trajectory::{GroupId, PolicyVersion};

use crate::{LeaseId, Order, Stats};

/// Why the buffer did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// The configuration admits nothing, or more than can be kept.
    #[error(
        "batch_groups = {batch_groups} with max_staleness = {max_staleness} makes (max_staleness + 1) * batch_groups \
         slots; there must be between 1 and {limit}"
    )]
    Config {
        /// Groups per step.
        batch_groups: usize,
        /// The bound, in versions.
        max_staleness: u64,
        /// Most slots there can be.
        limit: usize,
    },
    /// Replay hands out of order, so that no waiting keeps slow groups within the bound.
    #[error(
        "on_stale = \"wait\" needs order = \"fifo\" and max_uses = 1, but order = \"{order}\" and max_uses = {max_uses}: \
         set on_stale = \"drop\""
    )]
    ReplayWaits {
        /// The order.
        order: Order,
        /// Uses of each group.
        max_uses: u32,
    },
    /// A value that no buffer can work with.
    #[error("{key} = {value} is not usable: it must be above 0")]
    Unusable {
        /// Which setting.
        key: &'static str,
        /// Its value.
        value: String,
    },
    /// A group without trajectories has no version and trains nothing.
    #[error("{group} has no trajectories: abort it instead of finalizing it")]
    EmptyGroup {
        /// Which one.
        group: GroupId,
    },
    /// The verb does not fit the life of the group.
    #[error("{group} is {is}, but must be {needs}: discard what was generated for it and ask for admission")]
    WrongState {
        /// Which one.
        group: GroupId,
        /// Where it is in its life.
        is: &'static str,
        /// Where it would have to be.
        needs: &'static str,
    },
    /// No batch could be put together in time.
    #[error("no batch for the step from {step} within {:.1} s: {stats}; {}", .waited.as_secs_f64(), remedy(*.held_for_slow))]
    LeaseTimeout {
        /// The step that asked.
        step: PolicyVersion,
        /// How long it waited.
        waited: Duration,
        /// Whether a batch was there, but held back so that slow groups stay within the bound.
        held_for_slow: bool,
        /// Who waits for whom.
        stats: Box<Stats>,
    },
    /// The groups of the step were forgotten or given back, and later steps were leased.
    #[error(
        "the step from {step} cannot be leased: the next is {next}, and what was leased for earlier steps was \
         acknowledged with a checkpoint or went to others; resume from a later checkpoint, set the version back, or start \
         with an empty buffer"
    )]
    StepPassed {
        /// The step that asked.
        step: PolicyVersion,
        /// The lowest step that can be leased.
        next: PolicyVersion,
    },
    /// A version that the trainer cannot have made.
    #[error(
        "{version} is ahead of the trainer, which is at {known}: tell the buffer the new version first, or see which \
         trainer the sampler gets its weights from"
    )]
    FutureVersion {
        /// The version that was named.
        version: PolicyVersion,
        /// The latest that anybody can have.
        known: PolicyVersion,
    },
    /// A version that is over.
    #[error(
        "{version} is behind the trainer, which is at {known}: to start again from an older checkpoint, rewind"
    )]
    VersionBehind {
        /// The version that was named.
        version: PolicyVersion,
        /// The latest that anybody can have.
        known: PolicyVersion,
    },
    /// A version that would put everything in the buffer over the bound.
    #[error(
        "{version} is too far ahead of the trainer, which is at {known}: every group here would be over max_staleness; to \
         start from another checkpoint, rewind to its version"
    )]
    VersionJump {
        /// The version that was named.
        version: PolicyVersion,
        /// The latest that anybody can have.
        known: PolicyVersion,
    },
    /// A lease that ended otherwise than the request would end it.
    #[error("{lease} was {how} already, so that nothing is done now: lease again")]
    LeaseOver {
        /// Which one.
        lease: LeaseId,
        /// How it ended.
        how: &'static str,
    },
    /// A lease whose groups others have.
    #[error(
        "{lease} is lost: its hold was over and its groups have gone to others, or out of the bound; do not count what \
         was trained on it as done, and lease again with a longer hold"
    )]
    LeaseLost {
        /// Which one.
        lease: LeaseId,
    },
    /// A lease that was never given.
    #[error("{lease} was never given, the next one is {next}: see whether it is of another buffer")]
    UnknownLease {
        /// Which one.
        lease: LeaseId,
        /// The next to be given.
        next: LeaseId,
    },
    /// A group that was never admitted.
    #[error(
        "{group} was never admitted, the next one is {next}: ask for admission, or submit the group under a key"
    )]
    UnknownGroup {
        /// Which one.
        group: GroupId,
        /// The next to be admitted.
        next: GroupId,
    },
    /// A group that the buffer could not even keep alone.
    #[error(
        "a group of {bytes} bytes is larger than the whole buffer may be ({limit} bytes): raise max_bytes"
    )]
    GroupTooLarge {
        /// Its size as encoded.
        bytes: u64,
        /// Most bytes that may be kept.
        limit: u64,
    },
    /// A group that has no encoding.
    #[error("{group} cannot be encoded: {reason}")]
    NotEncodable {
        /// Which one.
        group: GroupId,
        /// Why.
        reason: String,
    },
    /// Too many writes wait for the disk; a sender hears of it as [`Finalized::Full`](crate::Finalized::Full).
    #[error("{waiting} writes wait for the disk already: try again later")]
    QueueFull {
        /// How many.
        waiting: usize,
    },
    /// A group was forgotten between two steps of a call.
    #[error("{group} was evicted meanwhile: ask again")]
    Gone {
        /// Which one.
        group: GroupId,
    },
    /// A consumer without a usable name.
    #[error("the name of a consumer has {length} bytes; it must have 1 to {limit}")]
    Consumer {
        /// Bytes of the name.
        length: usize,
        /// Most bytes.
        limit: usize,
    },
    /// A key that cannot be used.
    #[error("a key has {length} bytes; it must have 1 to {limit}")]
    Key {
        /// Bytes of the key.
        length: usize,
        /// Most bytes.
        limit: usize,
    },
    /// Another process has the journal open.
    #[error("journal {} is open in another process: stop that run, or use another run directory", .path.display())]
    Locked {
        /// The journal.
        path: PathBuf,
    },
    /// The journal or its directory cannot be written.
    #[error("journal {} cannot be written ({source}): make it and its directory writable, or use another", .path.display())]
    NotWritable {
        /// The journal.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A group is not what was written.
    #[error(
        "journal {}: {group} is damaged ({reason}): see to the disk; evict the group to go on without it",
        .path.display()
    )]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// Which one.
        group: GroupId,
        /// How it shows.
        reason: String,
    },
    /// The file is something else.
    #[error("{} is not a journal of this program ({found}): move it away, or use another run directory", .path.display())]
    NotAJournal {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        found: String,
    },
    /// The file of an open journal is not where it was.
    #[error(
        "journal {} {found} while it was open: nothing is acknowledged any more, and what was acknowledged is only in the \
         file that was there; put that file back before it is opened again, or go on without its groups",
        .path.display()
    )]
    JournalMoved {
        /// The journal.
        path: PathBuf,
        /// What is found in its place.
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
        /// What was being done.
        action: &'static str,
        /// What the store said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An earlier failure of the writer; nothing is acknowledged any more.
    #[error("journal {}: the writer has stopped: {cause}; nothing that was acknowledged is lost: see to the disk, then go on", .path.display())]
    WriterStopped {
        /// The journal.
        path: PathBuf,
        /// The first failure.
        cause: String,
    },
    /// The disk did not answer.
    #[error("journal {}: no write was acknowledged within {} s: check the disk, then resume the run", .path.display(), .waited.as_secs())]
    WriteTimeout {
        /// The journal.
        path: PathBuf,
        /// How long it waited.
        waited: Duration,
    },
    /// Two calls finalize the same group and the first does not come back.
    #[error("{group} is being written by another call, which did not end within {} s: check the disk", .waited.as_secs())]
    StillWriting {
        /// Which one.
        group: GroupId,
        /// How long it waited.
        waited: Duration,
    },
    /// A client was told to do what it cannot.
    #[error("the buffer at {url} cannot be used: {reason}")]
    Client {
        /// The server.
        url: String,
        /// Why not, and what to do about it.
        reason: String,
    },
    /// A server did not answer, however often it was asked.
    #[error(
        "{request}: no answer in {:.0} s and {attempts} attempts ({reason}): see whether the server runs and can be reached",
        .waited.as_secs_f64()
    )]
    Unreachable {
        /// Method and URL.
        request: String,
        /// How often it was asked.
        attempts: u32,
        /// How long it took in all.
        waited: Duration,
        /// How the last attempt ended.
        reason: String,
    },
    /// The answer was lost, and to ask again could do the same twice.
    #[error(
        "{request}: it is not known whether it was done ({reason}); what was taken by it is free again when its hold is over"
    )]
    Unclear {
        /// Method and URL.
        request: String,
        /// How the attempt ended.
        reason: String,
    },
    /// A server refused.
    #[error("{detail} ({request}: {status} {code})")]
    Refused {
        /// Method and URL.
        request: String,
        /// The HTTP status.
        status: u16,
        /// The stable name of what is wrong.
        code: String,
        /// What was found and what to do about it.
        detail: String,
    },
    /// An answer that is none.
    #[error(
        "{request}: the answer cannot be read ({reason}): see whether a buffer of this version is at this address"
    )]
    BadAnswer {
        /// Method and URL.
        request: String,
        /// Why not.
        reason: String,
    },
    /// A thread panicked in the middle of a change.
    #[error("a thread panicked while it changed the buffer: see its message, then resume the run")]
    Poisoned,
}

impl BufferError {
    /// Where a group can be that is not where a verb needs it.
    pub(crate) const STATES: [&'static str; 7] = [
        "admitted",
        "claimed",
        "being written",
        "finalized",
        "in line to be admitted again",
        "not yet admitted",
        "leased, trained or evicted",
    ];
    /// Where verbs need a group.
    pub(crate) const NEEDS: [&'static str; 2] = ["admitted", "admitted or claimed"];
}

fn remedy(held_for_slow: bool) -> &'static str {
    if held_for_slow {
        "a batch is held back so that the oldest in flight stay within max_staleness: see why they are slow, or set \
         on_stale = \"drop\""
    } else {
        "the trainer waits for the samplers: see why the oldest in flight are slow, or give rollout more devices"
    }
}
