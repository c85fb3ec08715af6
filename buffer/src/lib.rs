//! The forward edge: a staleness-bounded, leased buffer of groups between samplers and trainer.
//!
//! ```text
//!            admit          claim           finalize          lease           ack
//!   in line ------> admitted ------> claimed ------> finalized ------> leased ------> forgotten
//!     ^                |                |               ^ |               |
//!     |<-- abort(retry), hold is over --+               | |               |
//!     |<-- over the bound at a lease (counted) -----------+               |
//!                      |                |               |                 |
//!                      |                |               +<-- release, hold is over, a use left
//!                      +-> evicted <----+   abort(no retry)
//!
//!   slot  [ ============================================================ ] until a sampler serves v + 1
//!   entry                              [ durable ========================================= ] until ack
//! ```
//!
//! Two lifetimes, on purpose. A *slot* paces: there are `(max_staleness + 1) * batch_groups`, and one is taken from
//! admission until the asking sampler serves the version that the group's batch produced, so what starts now is never
//! born too old. An *entry* protects: a finalized group is kept from `finalize` until the checkpoint that contains it is
//! acknowledged, and a crash in between hands the same batches out again, in the same order.
//!
//! A group comes in by admission, with an id that names its task, or under a key of its sender's ([`Producer::submit`]).
//! A lease names its consumer and, if it is to be given again after a crash, its step; with a hold, a consumer that is
//! gone keeps its groups no longer than that.
//!
//! Everything is bounded: groups that are not leased by the slots (a batch that is released after a crash comes on
//! top, until its step is done), leased ones by the steps between two acknowledgements, all together by
//! `max_bytes`, the queue of the journal's writer by a constant, every wait by a deadline.
//!
//! # Layout
//! - `contract`: [`Producer`] and [`Consumer`], what the two sides may ask, here or over a wire
//! - `group_limits`: what a run knows of the groups that it can train on
//! - `config`: [`BufferConfig`]; `error`: [`BufferError`]; `listing`, `events`: what it shows of itself
//! - `ledger`: ids, slots, order, staleness and leases as a pure state machine, and why they keep the bound
//! - `buffer`: the ledger behind a lock and a store behind the ledger; for threads, and for the tasks of a server
//! - `memory`, `journal`: the stores; one forgets with its process, the other survives kill -9
//! - `payload`: a group as bytes
//!
//! # Invariants
//! - No group is leased for a step that starts more than `max_staleness` versions after its oldest token's.
//! - Every admitted id is in one place: in line, in flight, finalized, leased, forgotten or evicted.
//! - What is handed to a lease is durable, and so is what a `finalize` accepted.
//!
//! ```
//! use std::time::Duration;
//! use buffer::{AdmitRequest, Buffer, BufferConfig, Consumer, Finalized, LeaseRequest, Producer};
//! use trajectory::{Group, GroupId, PolicyVersion};
//! # use trajectory::{Prompt, Sample, SampleStreams, Score, Task, TaskId, Trajectory, VersionRun};
//! # fn generate(id: GroupId, version: PolicyVersion) -> Group {
//! #     let sample = Sample::new(SampleStreams {
//! #         token_ids: vec![1, 2], loss_mask: vec![false, true], behavior_logprobs: vec![0.0, -0.5],
//! #         versions: vec![VersionRun { version, len: 2 }], kept: None, temperature: 1.0,
//! #     }).unwrap();
//! #     let task = Task { id: TaskId(id.0), prompt: Prompt::Text("?".into()), answer: None, columns: Default::default() };
//! #     let score = Score::default();
//! #     let trajectory = Trajectory { index: 0, sample, turns: vec![], text: "!".into(), score, baseline: false };
//! #     Group { id, task, trajectories: vec![trajectory] }
//! # }
//! // One group a step, one version behind at most: two slots.
//! let buffer = Buffer::in_memory(BufferConfig::new(1, 1))?;
//! let (v0, v1, now) = (PolicyVersion(0), PolicyVersion(1), Duration::ZERO);
//! let slots = |served| AdmitRequest { served, limit: 9, hold: None , holder: None };
//!
//! let ids = buffer.admit(slots(v0), now)?;
//! assert_eq!(ids, [GroupId(0), GroupId(1)]);
//! for id in ids {
//!     buffer.claim(id, v0)?;
//!     assert_eq!(buffer.finalize(generate(id, v0))?, Finalized::Accepted);
//! }
//! let step = LeaseRequest::step("trainer", v0);
//! let lease = buffer.lease(&step, now)?;
//! assert_eq!(lease.groups[0].id, GroupId(0));
//!
//! // The batch is being trained on, but this sampler does not serve its version yet: no slot.
//! assert!(buffer.admit(slots(v0), now)?.is_empty());
//! assert_eq!(buffer.admit(slots(v1), now)?, [GroupId(2)]);
//!
//! // Asked again before the checkpoint, the step gets the same groups; afterwards they are gone.
//! assert_eq!(buffer.lease(&step, now)?, lease);
//! buffer.ack_through("trainer", v1)?;
//! assert!(buffer.lease(&step, now).is_err());
//! # Ok::<(), buffer::BufferError>(())
//! ```

mod buffer;
mod config;
pub mod conformance;
mod contract;
mod error;
mod events;
#[cfg(fuzzing)]
pub mod fuzzing;
mod group_limits;
pub mod http;
mod journal;
mod ledger;
mod listing;
mod memory;
mod payload;
pub mod store;

pub use buffer::{Buffer, WithPayload};
pub use config::{BufferConfig, OnStale, Order};
pub use contract::{
    AdmitRequest, Consumer, Finalized, Lease, LeaseId, LeaseRequest, Producer, Stats, Submitted,
};
pub use error::BufferError;
pub use events::{Event, EventKind, Events, Replay};
pub use group_limits::{GroupLimits, Unfit};
pub use journal::JOURNAL_CACHE_BYTES;
pub use ledger::Rewound;
pub use listing::{GroupEntry, GroupFilter, GroupPage, GroupState, LeaseEntry};
