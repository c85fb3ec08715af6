//! Weights in memory that the processes of one host share.
//!
//! ```text
//!   /dev/shm/rlrun-weights-PID-NUMBER/     of one publisher, which holds `owner` locked for as long as it lives
//!     owner
//!     slot-0   slot-1                      one is the newest version, the other is written next
//! ```
//! A publisher writes the slot that is not the newest, then announces it. A sampler maps it read-only and reads it where
//! it lies; meanwhile it holds the slot by a shared lock of the file, which the system takes back if the sampler is
//! killed. A publisher that finds the slot it wants to write held does not wait: it leaves it to its readers, whose memory
//! goes with the last of them, and makes a new one.
//!
//! Invariants:
//! - What a sampler maps does not change while it holds it: no torn read, nothing to read twice.
//! - A sampler that was told of a slot which is written again meanwhile finds another sequence number or a lock, and
//!   asks for the newest.
//! - A sampler never delays the publisher.
//! - What a killed publisher leaves is removed by the next that starts in the directory.
//!
//! - [`directory`]: where it is; [`slot`]: one file; [`store`]: the publisher's side; [`reader`]: a sampler's; [`shard`]: an owner of a part

mod directory;
mod reader;
mod shard;
mod slot;
mod store;

pub(crate) use self::directory::{PublisherDirectory, is_left, is_of_publisher};
pub(crate) use self::reader::SlotReader;
pub use self::shard::ShardOwner;
pub(crate) use self::slot::failed;
pub(crate) use self::store::SlotWriter;

#[cfg(test)]
mod tests;
