//! Store in memory, for runs that need not survive their process. Invariant: one entry per group of the ledger.
//! Nothing is durable.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use trajectory::{Group, GroupId};

use crate::BufferError;
use crate::store::{AppendGroup, LedgerChange, OpenedStore, Recovered, Store, WriteCompletion};

/// A group and its sender.
#[derive(Debug)]
struct MemoryGroup {
    group: Arc<Group>,
    sender: Option<String>,
}

/// A store that loses everything when its process ends.
#[derive(Debug, Default)]
pub(crate) struct MemoryStore {
    groups: Mutex<HashMap<GroupId, MemoryGroup>>,
}

impl MemoryStore {
    pub(crate) fn open() -> OpenedStore {
        OpenedStore { store: Box::<Self>::default(), recovered: Recovered::default(), opening: 1 }
    }
}

impl Store for MemoryStore {
    fn append(&self, append: AppendGroup) {
        let AppendGroup { row, group, sender, done, .. } = append;
        self.groups
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(row.id, MemoryGroup { group, sender });
        done(Ok(()));
    }

    fn check_capacity(&self) -> Result<(), BufferError> {
        Ok(())
    }

    fn commit(&self, change: LedgerChange, done: WriteCompletion) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        change.forget.iter().for_each(|(_, id)| drop(groups.remove(id)));
        drop(groups);
        done(Ok(()));
    }

    fn read(&self, ids: &[GroupId], _last_read: bool) -> Result<Vec<Arc<Group>>, BufferError> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |id: &GroupId| {
            groups.get(id).map(|found| Arc::clone(&found.group)).ok_or(BufferError::Gone { group: *id })
        };
        ids.iter().map(read).collect()
    }

    fn sender(&self, id: GroupId) -> Option<String> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).get(&id)?.sender.clone()
    }

    fn is_cached(&self, _ids: &[GroupId]) -> bool {
        true
    }

    fn unacknowledged(&self, _waited: Option<Duration>) -> BufferError {
        BufferError::Poisoned
    }

    fn failure(&self) -> Option<BufferError> {
        None
    }
}
