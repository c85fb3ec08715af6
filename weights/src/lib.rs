//! The backward edge: new policy versions on their way from the trainer to the samplers.
//!
//! ```text
//!   trainer: publish(v) --> newest snapshot only --> sampler: newest / wait_newer, swap between two decode steps
//!      ^                                                  |
//!      +---- wait_applied, lag <---- receipts <---- applied(name, v, digest of what it now serves)
//! ```
//!
//! # Layout
//! - [`snapshot`], [`values`]: [`Snapshot`] and [`Digest`], a version and proof of what it consists of
//! - [`contract`]: [`Publisher`], [`Subscriber`] and [`Receipt`], the same for every transport
//! - [`hub`]: [`Hub`], which knows what is published and who serves what; [`publisher`]: what fills it
//! - [`memory`]: subscribers within the process
//! - `shm`: memory that the processes of one host share; [`ShardOwner`] for trainers with several ranks
//! - [`http`]: everything for other processes, and the weights too where memory is not shared
//! - [`direct`]: weights that stay on devices
//! - `frame`, `delta`: pushes as bytes; `copier`, `digest`: all weights by several threads
//!
//! # Invariants
//! - Versions never go back; one that is published again must be what it was.
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
//! let took = Duration::ZERO;
//! sampler.applied(Receipt { version: snapshot.version, digest, took, stalled: took, bytes: 0 })?;
//! publisher.wait_applied(PolicyVersion(1), Duration::ZERO)?;
//! # Ok::<(), weights::WeightsError>(())
//! ```

pub mod contract;
mod copier;
mod delta;
mod digest;
pub mod direct;
mod error;
mod frame;
pub mod http;
pub mod hub;
pub mod memory;
pub mod publisher;
mod shm;
pub mod snapshot;
pub mod values;

pub use contract::{Lag, Publisher, Receipt, Subscriber};
pub use copier::Copier;
pub use direct::{DevicePublisher, DevicePush, DeviceSubscriber, DeviceWeights};
pub use error::WeightsError;
pub use hub::{Hub, HubConfig, RejectedSubscriber, SilentSubscriber};
pub use publisher::{DeltaConfig, HubPublisher, PublishConfig, PushCost};
pub use shm::ShardOwner;
pub use snapshot::{Digest, Received, Snapshot};
pub use values::{Dtype, Values};
