//! Cache of decoded groups between their append and their first lease. Invariant: it is bounded in bytes; a group beyond the
//! bound is read from the store instead.

use std::collections::HashMap;
use std::sync::Arc;

use trajectory::{Group, GroupId};

/// Bytes of decoded groups that are cached until their first lease, which then does not read the store.
const AT_HAND_BYTES: u64 = 256 << 20;

/// Cache of decoded groups, bounded in bytes.
#[derive(Debug, Default)]
pub(crate) struct PayloadCache {
    groups: HashMap<GroupId, (Arc<Group>, u64)>,
    bytes: u64,
}

/// A group for the cache.
pub(crate) struct CachedGroup {
    pub(crate) id: GroupId,
    pub(crate) group: Arc<Group>,
    pub(crate) bytes: u64,
}

impl PayloadCache {
    pub(crate) fn put(&mut self, CachedGroup { id, group, bytes }: CachedGroup) {
        if self.bytes + bytes <= AT_HAND_BYTES {
            self.bytes += bytes;
            self.groups.insert(id, (group, bytes));
        }
    }

    pub(crate) fn get(&self, id: GroupId) -> Option<Arc<Group>> {
        self.groups.get(&id).map(|(group, _)| Arc::clone(group))
    }

    pub(crate) fn take(&mut self, id: GroupId) -> Option<Arc<Group>> {
        let (group, bytes) = self.groups.remove(&id)?;
        self.bytes -= bytes;
        Some(group)
    }

    /// Whether all groups `ids` are cached.
    pub(crate) fn has(&self, ids: &[GroupId]) -> bool {
        ids.iter().all(|id| self.groups.contains_key(id))
    }

    /// The cached ones of the groups `ids`, in this order. `last_read`: they leave the cache.
    pub(crate) fn find(&mut self, ids: &[GroupId], last_read: bool) -> Vec<Option<Arc<Group>>> {
        ids.iter().map(|id| if last_read { self.take(*id) } else { self.get(*id) }).collect()
    }
}
