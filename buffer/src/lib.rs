//! The forward edge: a staleness-bounded, leased buffer of groups between samplers and trainer.
//!
//! ```text
//!            admit          claim           finalize          lease           ack
//!   queued  ------> admitted ------> claimed ------> finalized ------> leased ------> removed
//!     ^                |                |               ^ |               |
//!     |<-- abort(retry), hold expired ---+               | |               |
//!     |<-- stale at a lease (counted) -------------------+               |
//!                      |                |               |                 |
//!                      |                |               +<-- release, hold expired, a use left
//!                      +-> evicted <----+   abort(no retry)
//!
//!   slot  [ ============================================================ ] until a sampler serves v + 1
//!   entry                              [ durable ========================================= ] until ack
//! ```
//!
//! A slot and an entry have different lifetimes. A *slot* is back-pressure on the samplers; [`BufferConfig::slots`] is their
//! number. Admission takes one, and it is free once the sampler that asks serves the version that the group's batch
//! produced. So no group is admitted that would exceed the staleness bound. An *entry* is durability: a finalized group
//! stays stored until the checkpoint that contains it is acknowledged. After a crash the same batches are leased again, in
//! the same order.
//!
//! A group enters by admission, with an id that names its task, or under an idempotency key of its sender
//! ([`Producer::submit`]). A lease names its consumer and, to be repeatable after a crash, its step. A lease with a
//! hold expires without a heartbeat, and its groups can be leased again; calls with the expired lease's id are then
//! fenced.
//!
//! Every quantity is bounded: unleased groups by the slots (a batch that is released after a crash comes on top until
//! its step is done), leased groups by the steps between two acknowledgements, all groups together by `max_bytes`,
//! the queue of the journal writer by a constant, every wait by a deadline.
//!
//! # Layout
//! - `contract`: [`Producer`] (the publisher side) and [`Consumer`] (the subscriber side), in this process or behind
//!   HTTP
//! - `group_limits`: validation of groups against the model and recipe of a run
//! - `config`: [`BufferConfig`]; `error`: [`BufferError`]; `listing`, `events`: inspection
//! - `ledger`: admission control, slots, order, staleness and leases as a state machine without I/O, with a proof of
//!   the bound
//! - `ledger_simulation`: [`SimulatedLedger`], the ledger in virtual time, for programs that simulate a run
//! - `buffer`: the ledger behind a lock, a store behind the ledger; blocking for threads, async for a server
//! - [`store`]: the trait [`store::Store`]; `memory`, `journal`: the built-in stores, the second a write-ahead
//!   journal that survives kill -9; `conformance`, behind a feature of that name: the suite that every store passes
//! - `payload`: the encoding of groups
//!
//! # Invariants
//! - No group is leased for a step that starts more than `max_staleness` versions after its oldest token's.
//! - Every admitted id is in one state: queued for re-admission, in flight, finalized, leased, removed or evicted.
//! - A leased group is durable, and so is a group once `finalize` has accepted it.
//!
//! ```
//! use std::time::Duration;
//! use buffer::{AdmitRequest, Buffer, BufferConfig, Consumer, Finalized, LeaseRequest, Producer};
//! use trajectory::{Group, GroupId, PolicyVersion};
//! # use trajectory::{Prompt, Sample, SampleStreams, Score, Task, TaskId, Trajectory, VersionRun};
//! # fn generate(id: GroupId, version: PolicyVersion) -> Group {
//! #     let sample = Sample::new(SampleStreams {
//! #         token_ids: vec![1, 2], loss_mask: vec![false, true], behavior_logprobs: vec![0.0, -0.5],
//! #         versions: vec![VersionRun { version, len: 2 }], kept: None, experts: None, temperature: 1.0,
//! #     }).unwrap();
//! #     let task = Task { id: TaskId(id.0), prompt: Prompt::Text("?".into()), answer: None, columns: Default::default() };
//! #     let score = Score::default();
//! #     let trajectory = Trajectory { index: 0, sample, turns: vec![], branches: vec![], text: "!".into(), score, baseline: false, role: None };
//! #     Group { id, task, trajectories: vec![trajectory] }
//! # }
//! // One group per step and one version of staleness: two slots.
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
//! // A repeated request before the checkpoint gets the same groups; after the acknowledgement they are removed.
//! assert_eq!(buffer.lease(&step, now)?, lease);
//! buffer.ack_through("trainer", v1)?;
//! assert!(buffer.lease(&step, now).is_err());
//! # Ok::<(), buffer::BufferError>(())
//! ```

mod admission;
mod buffer;
mod config;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod contract;
pub mod database;
mod error;
mod events;
#[cfg(fuzzing)]
pub mod fuzzing;
mod group_limits;
pub mod http;
mod journal;
mod ledger;
mod ledger_simulation;
mod listing;
mod memory;
mod payload;
mod payload_cache;
#[cfg(feature = "postgres")]
pub mod postgres;
mod running;
pub mod store;
mod trial_pause;

pub use admission::{AdmissionControl, AdmissionLimit, StepObservation};
pub use buffer::{Buffer, WithPayload};
pub use config::{BufferConfig, OnStale, Order};
pub use contract::{
    AdmitRequest, Consumer, Finalized, Lease, LeaseId, LeaseRequest, Producer, Stats, Submitted,
};
pub use error::BufferError;
pub use events::{Event, EventKind, Events, Replay};
pub use group_limits::{ExpertLimits, GroupLimits, Unfit};
pub use journal::JOURNAL_CACHE_BYTES;
pub use ledger::{KEYED as FIRST_KEYED, Rewound};
pub use ledger_simulation::{SimulatedArrival, SimulatedLease, SimulatedLedger};
pub use listing::{GroupEntry, GroupFilter, GroupPage, GroupState, LeaseEntry};
pub use running::{RunningChange, RunningControl, RunningObservation};
pub use trial_pause::TrialPause;
