//! Deduplication: idempotency keys of groups, and contents of trajectories. Invariant: a key is known while its group
//! is stored, and at least for the last [`KEYS_KEPT`] groups with a key.

use std::collections::{BTreeMap, HashMap};

use trajectory::GroupId;

/// Number of keys that are remembered; older ones are removed with their groups.
pub(crate) const KEYS_KEPT: usize = 1 << 20;

/// Idempotency keys in use.
#[derive(Debug, Default)]
pub(super) struct KeyIndex {
    groups: HashMap<u128, GroupId>,
    digests: BTreeMap<GroupId, u128>,
}

impl KeyIndex {
    pub(super) fn insert(&mut self, key: u128, group: GroupId) {
        self.groups.insert(key, group);
        self.digests.insert(group, key);
    }

    pub(super) fn group(&self, key: u128) -> Option<GroupId> {
        self.groups.get(&key).copied()
    }

    pub(super) fn remove(&mut self, group: GroupId) {
        if let Some(key) = self.digests.remove(&group) {
            self.groups.remove(&key);
        }
    }

    /// Removes the oldest surplus keys, up to the first whose group is `kept`; the id below which all keys were
    /// removed.
    pub(super) fn trim(&mut self, kept: impl Fn(GroupId) -> bool) -> Option<GroupId> {
        let mut below = None;
        while self.digests.len() > KEYS_KEPT {
            let Some((&group, _)) = self.digests.first_key_value() else { break };
            if kept(group) {
                break;
            }
            self.remove(group);
            below = Some(GroupId(group.0 + 1));
        }
        below
    }
}

/// Number of stored trajectories with each content.
#[derive(Debug, Default)]
pub(super) struct ContentIndex(HashMap<u128, u32>);

impl ContentIndex {
    /// For each of `contents`, whether it is neither stored nor a repetition within the list.
    pub(super) fn new_ones(&self, contents: &[u128]) -> Vec<bool> {
        let mut here = std::collections::HashSet::new();
        contents.iter().map(|content| !self.0.contains_key(content) && here.insert(*content)).collect()
    }

    pub(super) fn add(&mut self, contents: &[u128]) {
        for content in contents {
            *self.0.entry(*content).or_default() += 1;
        }
    }

    pub(super) fn remove(&mut self, contents: &[u128]) {
        for content in contents {
            if let Some(count) = self.0.get_mut(content) {
                *count -= 1;
                if *count == 0 {
                    self.0.remove(content);
                }
            }
        }
    }
}
