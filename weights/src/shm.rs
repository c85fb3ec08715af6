//! Weights in shared memory of one host, double buffered.
//!
//! ```text
//!   /dev/shm/rlrun-weights-PID-NUMBER/     of one publisher, which holds `owner` locked for as long as it lives
//!     owner
//!     slot-0   slot-1                      one is the newest version, the other is written next
//! ```
//! A publisher writes the slot that is not the newest, then announces it. A sampler maps it read-only and reads it in
//! place, with a shared lock on the file, which the system releases if the sampler is killed. If the slot to be
//! written next is still locked, the publisher does not wait: it leaves it to its readers, whose memory is freed with
//! the last of them, and makes a new slot.
//!
//! Invariants:
//! - The slot that a sampler has mapped and locked does not change: no torn reads, no retries.
//! - If an announced slot is written again before a sampler locks it, the sampler finds another sequence number or a
//!   lock, and asks for the newest version.
//! - A sampler never delays the publisher.
//! - The directory of a killed publisher is removed by the next publisher that starts there.
//!
//! - [`directory`]: the directory of a publisher; [`slot`]: one file; [`store`]: the writer; [`reader`]: the reader;
//!   [`shard`]: an owner of a shard

mod directory;
mod reader;
mod shard;
mod slot;
mod store;

pub(crate) use self::directory::{PublisherDirectory, is_left, is_of_publisher};
pub(crate) use self::reader::SlotReader;
pub use self::shard::{ShardOwner, WritableSlot};
pub(crate) use self::slot::failed;
pub(crate) use self::store::SlotWriter;

#[cfg(test)]
mod tests;
