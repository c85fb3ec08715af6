//! The queue of writes before the database. Invariant: bounded; a full queue refuses groups and always has capacity for the
//! changes that the ledger has made.

use std::collections::VecDeque;
use std::sync::Mutex;

use tokio::sync::Notify;

use super::lock;
use crate::BufferError;
use crate::store::{AppendGroup, LedgerChange, WriteCompletion};

/// Capacity, writes; groups beyond it are refused (back-pressure).
const QUEUE: usize = 8192;
/// Part of the queue that groups leave to changes, which cannot be refused.
const QUEUE_FOR_CHANGES: usize = 1024;
/// Most writes of a transaction.
const TRANSACTION_WRITES: usize = 256;
/// Most bytes of payloads in a transaction, unless its only group has more.
const TRANSACTION_BYTES: usize = 16 << 20;

/// A queued write.
pub(super) enum QueuedWrite {
    Append(Box<AppendGroup>),
    Change(LedgerChange, WriteCompletion),
}

#[derive(Default)]
pub(super) struct WriteQueue {
    state: Mutex<WriteQueueState>,
    /// Signalled when [`WriteQueue::take`] may have enough.
    arrived: Notify,
}

#[derive(Default)]
struct WriteQueueState {
    writes: VecDeque<QueuedWrite>,
    /// Number of writes that are worth a transaction; fewer wait. 0 counts as 1.
    enough: usize,
    closed: bool,
}

impl WriteQueue {
    /// Queues a group; a full queue returns it with the number of waiting writes.
    pub(super) fn push_group(&self, append: Box<AppendGroup>) -> Result<(), (Box<AppendGroup>, usize)> {
        let mut state = lock(&self.state);
        if state.writes.len() >= QUEUE - QUEUE_FOR_CHANGES {
            return Err((append, state.writes.len()));
        }
        self.push(&mut state, QueuedWrite::Append(append));
        Ok(())
    }

    /// Queues a change. Its caller has called [`WriteQueue::check_capacity`] under the same lock of the ledger.
    pub(super) fn push_change(&self, change: LedgerChange, done: WriteCompletion) {
        self.push(&mut lock(&self.state), QueuedWrite::Change(change, done));
    }

    fn push(&self, state: &mut WriteQueueState, write: QueuedWrite) {
        // A closed queue has no reader: the write is dropped, and its completion with it.
        if !state.closed {
            state.writes.push_back(write);
            if state.writes.len() >= state.enough {
                self.arrived.notify_one();
            }
        }
    }

    pub(super) fn check_capacity(&self) -> Result<(), BufferError> {
        let waiting = lock(&self.state).writes.len();
        if waiting + QUEUE_FOR_CHANGES / 2 > QUEUE { Err(BufferError::QueueFull { waiting }) } else { Ok(()) }
    }

    /// From now on [`WriteQueue::take`] waits for this number of writes.
    pub(super) fn set_enough(&self, writes: usize) {
        lock(&self.state).enough = writes;
        self.arrived.notify_one();
    }

    /// The next writes for one transaction, in order, once there are enough; `None` once the queue is closed and empty.
    /// Cancelling it loses nothing.
    pub(super) async fn take(&self) -> Option<Vec<QueuedWrite>> {
        loop {
            {
                let mut state = lock(&self.state);
                if state.writes.len() >= state.enough.max(1) || (state.closed && !state.writes.is_empty()) {
                    return Some(take_some(&mut state.writes));
                }
                if state.closed {
                    return None;
                }
            }
            self.arrived.notified().await;
        }
    }

    /// Whether it is closed and empty.
    pub(super) fn is_done(&self) -> bool {
        let state = lock(&self.state);
        state.closed && state.writes.is_empty()
    }

    /// No write is accepted any more; those that wait are still written.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
        self.arrived.notify_one();
    }

    /// No write is accepted any more; those that wait are dropped, and their completions with them.
    pub(super) fn abandon(&self) {
        let waiting = {
            let mut state = lock(&self.state);
            state.closed = true;
            std::mem::take(&mut state.writes)
        };
        self.arrived.notify_one();
        // Outside the lock: a completion that is dropped wakes its caller.
        drop(waiting);
    }
}

fn take_some(writes: &mut VecDeque<QueuedWrite>) -> Vec<QueuedWrite> {
    let (mut taken, mut bytes) = (Vec::new(), 0);
    while let Some(write) = writes.pop_front() {
        let size = match &write {
            QueuedWrite::Append(append) => append.payload.len(),
            QueuedWrite::Change(..) => 0,
        };
        if !taken.is_empty() && bytes + size > TRANSACTION_BYTES {
            writes.push_front(write);
            break;
        }
        bytes += size;
        taken.push(write);
        if taken.len() == TRANSACTION_WRITES {
            break;
        }
    }
    taken
}
