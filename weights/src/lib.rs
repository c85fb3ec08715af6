//! The backward edge: distributes policy versions from the trainer to the samplers.
//!
//! ```text
//!   trainer: publish(v) --> newest snapshot only --> sampler: newest / wait_newer, swap between two decode steps
//!      ^                                                  |
//!      +---- wait_applied, lag <---- receipts <---- applied(name, v, digest of what it now serves)
//! ```
//!
//! # Layout
//! - [`snapshot`], [`values`]: [`Snapshot`] and [`Digest`], the weights of a version and their checksum
//! - [`contract`]: [`Publisher`], [`Subscriber`] and [`Receipt`], the same for every transport
//! - [`hub`]: [`Hub`], the registry of subscribers, versions and receipts; [`publisher`]: the host publisher
//! - [`memory`]: subscribers within the process; `parts`: weights that several owners publish together
//! - `shm`: shared memory of a host, double buffered; [`ShardOwner`] for trainers with several ranks
//! - [`http`]: control plane for other processes, and full or delta-encoded weights without shared memory
//! - [`direct`]: weights that stay on devices: copies, CUDA IPC slots, broadcast groups
//! - `frame`, `delta`: the wire format of weights; `copier`, `digest`: copies and digests by several threads
//!
//! # Invariants
//! - Versions never decrease; a version that is published again must have the same weights.
//! - A sampler serves what its receipt says: a receipt with another digest than the published version fails the
//!   subscriber and every later call of the publisher.
//! - Only the newest snapshot is stored, so memory is bounded and a slow sampler skips versions.
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
//! sampler.applied(Receipt { version: snapshot.version, digest, took, stalled: took, bytes: 0, taken: 0 })?;
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
mod parts;
pub mod publisher;
mod shm;
pub mod snapshot;
pub mod values;

pub use contract::{Lag, Publisher, Receipt, Subscriber};
pub use copier::Copier;
pub use direct::{DevicePublisher, DevicePush, DeviceSubscriber, DeviceWeights};
pub use error::WeightsError;
pub use hub::{
    Distribution, FallbackReason, Hub, HubConfig, RejectedSubscriber, RelayAddress, RelayFallback,
};
pub use parts::OwnedWeights;
pub use publisher::{DeltaConfig, HubPublisher, PublishConfig, PushCost};
pub use shm::{ShardOwner, WritableSlot};
pub use snapshot::{Digest, Received, Snapshot};
pub use values::{Dtype, Values, WeightAdapter, WeightMemory};
