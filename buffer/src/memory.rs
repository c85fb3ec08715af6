//! Groups in memory, for runs that need not survive their process. Invariant: one entry per group that the ledger keeps.
//! Nothing here is durable.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use trajectory::{Group, GroupId};

use crate::BufferError;
use crate::ledger::Change;
use crate::store::{Append, Done, Store};

/// A group and who sent it.
type Sent = (Arc<Group>, Option<String>);

/// A store that forgets everything with its process.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    groups: Mutex<HashMap<GroupId, Sent>>,
}

impl Store for Memory {
    fn append(&self, append: Append) {
        let Append { row, group, sender, done, .. } = append;
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).insert(row.id, (group, sender));
        done(Ok(()));
    }

    fn ready(&self) -> Result<(), BufferError> {
        Ok(())
    }

    fn submit(&self, change: Change, done: Done) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        change.forget.iter().for_each(|(_, id)| drop(groups.remove(id)));
        drop(groups);
        done(Ok(()));
    }

    fn read(&self, ids: &[GroupId], _last: bool) -> Result<Vec<Arc<Group>>, BufferError> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |id: &GroupId| {
            groups.get(id).map(|(group, _)| Arc::clone(group)).ok_or(BufferError::Gone { group: *id })
        };
        ids.iter().map(read).collect()
    }

    fn sender(&self, id: GroupId) -> Option<String> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).get(&id)?.1.clone()
    }

    fn at_hand(&self, _ids: &[GroupId]) -> bool {
        true
    }

    fn unanswered(&self, _waited: Option<Duration>) -> BufferError {
        BufferError::Poisoned
    }

    fn failure(&self) -> Option<BufferError> {
        None
    }
}
