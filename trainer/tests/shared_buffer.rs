//! A buffer that another process can take over while the trainer has it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use buffer::{Buffer, BufferError, Consumer, Lease, LeaseId, LeaseRequest, Stats};
use trajectory::{GroupId, PolicyVersion};

/// The buffer, which another process can take over.
pub(crate) struct SharedBuffer {
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) deposed: Arc<AtomicBool>,
}

impl Consumer for SharedBuffer {
    fn lease(&self, request: &LeaseRequest, wait: Duration) -> Result<Lease, BufferError> {
        self.buffer.lease(request, wait)
    }

    fn extend(&self, lease: LeaseId, hold: Duration) -> Result<(), BufferError> {
        self.buffer.extend(lease, hold)
    }

    fn ack(&self, lease: LeaseId) -> Result<(), BufferError> {
        self.buffer.ack(lease)
    }

    fn ack_through(&self, consumer: &str, through: PolicyVersion) -> Result<(), BufferError> {
        self.buffer.ack_through(consumer, through)
    }

    fn release(&self, lease: LeaseId) -> Result<(), BufferError> {
        self.buffer.release(lease)
    }

    fn quarantine(&self, group: GroupId) -> Result<Option<String>, BufferError> {
        self.buffer.quarantine(group)
    }

    fn set_version(&self, version: PolicyVersion, rewind: bool) -> Result<(), BufferError> {
        self.buffer.set_version(version, rewind)
    }

    fn confirm(&self) -> Result<(), BufferError> {
        if self.deposed.load(Ordering::Relaxed) {
            return Err(BufferError::Deposed { store: "a test".to_owned(), opening: 1, now: 2 });
        }
        self.buffer.confirm()
    }

    fn stats(&self) -> Result<Stats, BufferError> {
        self.buffer.stats()
    }
}
