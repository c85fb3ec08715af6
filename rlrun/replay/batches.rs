//! The recorded batches in place of a buffer.
//!
//! Invariant: a step leases the groups that were recorded for it, in their order, and nothing else.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use buffer::{BufferError, Consumer, Lease, LeaseId, LeaseRequest, Stats};
use trajectory::{Group, GroupId, PolicyVersion};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct RecordedBatches {
    next: Mutex<NextBatch>,
}

#[derive(Debug, Default)]
struct NextBatch {
    groups: Vec<Arc<Group>>,
    dropped_stale: u64,
}

impl RecordedBatches {
    /// Sets the batch of the next step.
    pub(crate) fn set(&self, groups: Vec<Arc<Group>>, dropped_stale: u64) {
        *self.next.lock().unwrap_or_else(PoisonError::into_inner) = NextBatch { groups, dropped_stale };
    }
}

impl Consumer for RecordedBatches {
    fn lease(&self, request: &LeaseRequest, _: Duration) -> Result<Lease, BufferError> {
        let step = request.step.unwrap_or_default();
        let next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Lease {
            id: LeaseId(step.0),
            consumer: request.consumer.clone(),
            step,
            groups: next.groups.clone(),
            hold: None,
            dropped_stale: next.dropped_stale,
        })
    }

    fn extend(&self, _: LeaseId, _: Duration) -> Result<(), BufferError> {
        Ok(())
    }

    fn ack(&self, _: LeaseId) -> Result<(), BufferError> {
        Ok(())
    }

    fn ack_through(&self, _: &str, _: PolicyVersion) -> Result<(), BufferError> {
        Ok(())
    }

    fn release(&self, _: LeaseId) -> Result<(), BufferError> {
        Ok(())
    }

    fn quarantine(&self, _: GroupId) -> Result<Option<String>, BufferError> {
        Ok(None)
    }

    fn set_version(&self, _: PolicyVersion, _: bool) -> Result<(), BufferError> {
        Ok(())
    }

    fn stats(&self) -> Result<Stats, BufferError> {
        let next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Stats {
            policy_version: PolicyVersion::default(),
            admitted: 0,
            claimed: 0,
            finalized: 0,
            leased: next.groups.len(),
            leases: 1,
            again: 0,
            dropped_stale: next.dropped_stale,
            evicted: 0,
            expired: 0,
            quarantined: 0,
            oldest_age: 0,
            oldest_in_flight: Vec::new(),
            batch_groups: next.groups.len(),
            max_staleness: 0,
            slots: 0,
            slots_free: 0,
            bytes: 0,
            max_bytes: 0,
            next_id: GroupId::default(),
            next_step: PolicyVersion::default(),
        })
    }
}
