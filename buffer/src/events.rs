//! Recent events for subscribers. Invariant: ids ascend, also over restarts; the last [`Events::KEPT`] events can be
//! replayed, and a subscriber that missed more receives a gap.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use trajectory::{GroupId, PolicyVersion};

use crate::LeaseId;
use crate::ledger::LedgerEvent;

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A group was stored.
    Finalized,
    /// Groups were leased.
    Leased,
    /// A lease was acknowledged.
    Acked,
    /// A lease was released.
    Released,
    /// A lease or an admission expired.
    Expired,
    /// Groups over the staleness bound were dropped.
    Dropped,
    /// Groups were evicted.
    Evicted,
    /// Groups were quarantined: they cannot be trained on.
    Quarantined,
    /// The trainer published a new version.
    Version,
}

/// An event, visible once the change is durable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Ascending.
    pub id: u64,
    /// Its kind.
    pub kind: EventKind,
    /// The groups concerned.
    pub groups: Vec<GroupId>,
    /// The lease concerned.
    pub lease: Option<LeaseId>,
    /// The version or step concerned.
    pub version: Option<PolicyVersion>,
}

/// Result of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replay {
    /// All events after the requested id, oldest first; may be empty.
    Events(Vec<Event>),
    /// Some events are no longer stored: the subscriber's state is out of date. It can continue after this id.
    Gap(u64),
}

/// Ring buffer of the latest events.
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
    /// Number of events that can be replayed.
    pub const KEPT: usize = 8192;
    /// Range of ids of one opening of a buffer.
    const PER_OPENING: u64 = 1 << 32;

    /// For the `opening`-th opening of a buffer, from 1.
    pub(crate) fn new(opening: u64) -> Self {
        let ring = Ring { next: opening.saturating_mul(Self::PER_OPENING), events: VecDeque::new() };
        Self { ring: Mutex::new(ring), changed: Notify::new() }
    }

    pub(crate) fn publish(&self, occurrences: Vec<LedgerEvent>) {
        if occurrences.is_empty() {
            return;
        }
        // The ring is valid after a panic of another thread.
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        for LedgerEvent { kind, groups, lease, version } in occurrences {
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

    /// At most `limit` events after the id `after`; `None`: a gap that names the newest id.
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

    /// Resolves after the next event. Call it before [`Events::after`], or events between the two calls are missed.
    pub fn changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.changed.notified()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn happened(n: u64) -> LedgerEvent {
        LedgerEvent { kind: EventKind::Finalized, groups: vec![GroupId(n)], lease: None, version: None }
    }

    fn groups(replay: Replay) -> Vec<u64> {
        let Replay::Events(events) = replay else { panic!("a gap where there is none") };
        assert!(events.windows(2).all(|pair| pair[0].id + 1 == pair[1].id));
        events.iter().map(|event| event.groups[0].0).collect()
    }

    #[test]
    fn a_subscriber_continues_after_its_last_event_or_receives_a_gap() {
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
