//! The backward edge: new policy versions on their way from the trainer to the samplers.
//!
//! ```text
//!   trainer: publish(v) --> newest snapshot only --> sampler: newest / wait_newer, swap between two decode steps
//!      ^                                                  |
//!      +---- wait_applied, lag <---- receipts <---- applied(name, v, digest of what it now serves)
//! ```
//!
//! # Layout
//! - [`snapshot`]: [`Snapshot`] and [`Digest`], a version and proof of what it consists of
//! - [`contract`]: [`Publisher`], [`Subscriber`] and [`Receipt`], the same for every transport
//! - [`memory`]: the transport within one process
//!
//! # Invariants
//! - Versions never go back.
//! - A sampler serves exactly what it says: a receipt whose digest is not that of the published version fails the
//!   subscriber and every later call of the publisher.
//! - Only the newest snapshot is kept, so memory is bounded and a slow sampler skips versions.
//!
//! ```
//! use std::time::Duration;
//! use trajectory::PolicyVersion;
//! use weights::{Digest, Publisher, Receipt, Snapshot, Subscriber, memory};
//! let (publisher, hub) = memory::hub();
//! let sampler = hub.subscribe("sampler 0")?;
//! publisher.publish(Snapshot::new(PolicyVersion(1), vec![0.5, -0.5].into()))?;
//!
//! let snapshot = sampler.newest(None)?.expect("one was published");
//! let served = snapshot.values.to_vec();
//! let digest = Digest::of(&served);
//! sampler.applied(Receipt { version: snapshot.version, digest, took: Duration::ZERO, stalled: Duration::ZERO })?;
//! publisher.wait_applied(PolicyVersion(1), Duration::ZERO)?;
//! # Ok::<(), weights::WeightsError>(())
//! ```

pub mod contract;
mod error;
pub mod memory;
pub mod snapshot;

pub use contract::{Lag, Publisher, Receipt, Subscriber};
pub use error::WeightsError;
pub use snapshot::{Digest, Snapshot};
