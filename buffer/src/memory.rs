//! Groups in memory, for runs that need not survive their process. Invariant: one entry per group that is finalized
//! or leased, gone with `ack`. Nothing here is durable.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use trajectory::{Group, GroupId, PolicyVersion};

use crate::ledger::{Change, Mark};
use crate::store::{Commit, Store};
use crate::{Buffer, BufferConfig, BufferError};

/// A buffer that forgets everything with its process.
pub type Memory = Buffer<MemoryStore>;

/// The store of [`Memory`].
#[derive(Debug, Default)]
pub struct MemoryStore {
    groups: Mutex<HashMap<GroupId, Arc<Group>>>,
}

impl Memory {
    /// An empty buffer.
    ///
    /// # Errors
    /// [`BufferError::Config`] if the configuration makes no slots or too many.
    pub fn new(config: BufferConfig) -> Result<Self, BufferError> {
        Ok(Self::over(MemoryStore::default(), config.checked()?, &[], Mark::default()))
    }
}

impl MemoryStore {
    fn groups(&self) -> Result<MutexGuard<'_, HashMap<GroupId, Arc<Group>>>, BufferError> {
        self.groups.lock().map_err(|_| BufferError::Poisoned)
    }
}

impl Store for MemoryStore {
    fn append(&self, group: Arc<Group>, _oldest: PolicyVersion) -> Result<(), BufferError> {
        self.groups()?.insert(group.id, group);
        Ok(())
    }

    fn submit(&self, change: Change) -> Result<Commit, BufferError> {
        let mut groups = self.groups()?;
        change.forget.iter().for_each(|id| drop(groups.remove(id)));
        Ok(Commit::Done)
    }

    fn wait(&self, _commit: &Commit) -> Result<(), BufferError> {
        Ok(())
    }

    fn read(&self, ids: &[GroupId]) -> Result<Vec<Arc<Group>>, BufferError> {
        let groups = self.groups()?;
        Ok(ids.iter().map(|id| Arc::clone(&groups[id])).collect())
    }
}
