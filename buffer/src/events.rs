//! What happened, for those who watch. Invariant: ids ascend, also over restarts; the last [`Events::KEPT`] can be read
//! again, and who missed more is told so.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use trajectory::{GroupId, PolicyVersion};

use crate::LeaseId;
use crate::ledger::Occurrence;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A group was stored.
    Finalized,
    /// Groups were handed out.
    Leased,
    /// A lease was acknowledged.
    Acked,
    /// A lease was given back.
    Released,
    /// The hold of a lease or of an admission was over.
    Expired,
    /// Groups over the bound were dropped.
    Dropped,
    /// Groups were removed for good.
    Evicted,
    /// Groups were set aside: they cannot be trained on.
    Quarantined,
    /// The trainer has a new version.
    Version,
}

/// Something that happened, after it was durable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Ascending.
    pub id: u64,
    /// What happened.
    pub kind: EventKind,
    /// To which groups.
    pub groups: Vec<GroupId>,
    /// By which lease.
    pub lease: Option<LeaseId>,
    /// At which version or step.
    pub version: Option<PolicyVersion>,
}

/// What a watcher gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replay {
    /// All after the id that it named, oldest first; perhaps none yet.
    Events(Vec<Event>),
    /// Some are gone: what it knows is out of date. It can go on after this id.
    Gap(u64),
}

/// The latest events.
#[derive(Debug)]
pub struct Events {
    ring: Mutex<Ring>,
    changed: Notify,
}

#[derive(Debug)]
struct Ring {
    next: u64,
    /// Contiguous, the last one is `next - 1`.
    events: VecDeque<Event>,
}

impl Events {
    /// Events that can be read again.
    pub const KEPT: usize = 8192;
    /// Ids that one opening of a buffer has.
    const PER_OPENING: u64 = 1 << 32;

    /// Of the `opening`-th opening of a buffer, from 1.
    pub(crate) fn new(opening: u64) -> Self {
        let ring = Ring { next: opening.saturating_mul(Self::PER_OPENING), events: VecDeque::new() };
        Self { ring: Mutex::new(ring), changed: Notify::new() }
    }

    pub(crate) fn publish(&self, occurrences: Vec<Occurrence>) {
        if occurrences.is_empty() {
            return;
        }
        // A ring that a panic left is still a ring.
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        for Occurrence { kind, groups, lease, version } in occurrences {
            let id = ring.next;
            ring.next += 1;
            if ring.events.len() == Self::KEPT {
                ring.events.pop_front();
            }
            ring.events.push_back(Event { id, kind, groups, lease, version });
        }
        drop(ring);
        self.changed.notify_waiters();
    }

    /// At most `limit` events after the one with id `after`; `None`: what comes from now on.
    pub fn after(&self, after: Option<u64>, limit: usize) -> Replay {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = ring.next - 1;
        let Some(after) = after else { return Replay::Gap(newest) };
        let oldest = ring.events.front().map_or(ring.next, |event| event.id);
        if after > newest || after + 1 < oldest {
            return Replay::Gap(newest);
        }
        let skip = usize::try_from(after + 1 - oldest).unwrap_or(usize::MAX);
        Replay::Events(ring.events.iter().skip(skip).take(limit).cloned().collect())
    }

    /// Resolves when something happened after this was called; call it before [`Events::after`].
    pub fn changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.changed.notified()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn happened(n: u64) -> Occurrence {
        Occurrence { kind: EventKind::Finalized, groups: vec![GroupId(n)], lease: None, version: None }
    }

    fn groups(replay: Replay) -> Vec<u64> {
        let Replay::Events(events) = replay else { panic!("a gap where there is none") };
        assert!(events.windows(2).all(|pair| pair[0].id + 1 == pair[1].id));
        events.iter().map(|event| event.groups[0].0).collect()
    }

    #[test]
    fn who_missed_nothing_goes_on_and_who_missed_some_is_told() {
        let events = Events::new(3);
        let Replay::Gap(start) = events.after(None, 9) else { panic!("from now on") };
        events.publish((0..5).map(happened).collect());
        assert_eq!(groups(events.after(Some(start), 9)), [0, 1, 2, 3, 4]);
        assert_eq!(groups(events.after(Some(start + 2), 2)), [2, 3]);
        assert_eq!(groups(events.after(Some(start + 5), 9)), [0u64; 0]);
        events.publish((5..5 + Events::KEPT as u64).map(happened).collect());
        assert_eq!(groups(events.after(Some(start + 5), 1)), [5]);
        assert_eq!(events.after(Some(start + 4), 9), Replay::Gap(start + 5 + Events::KEPT as u64));
        assert!(matches!(Events::new(4).after(Some(start + 5), 9), Replay::Gap(_)), "of an earlier opening");
    }
}
