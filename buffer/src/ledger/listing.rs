//! Views of the ledger for inspection. Invariant: they change nothing.

use trajectory::{GroupId, PolicyVersion};

use super::{InFlightStage, KEYED, LeaseState, Ledger, StoredGroup};
use crate::{GroupEntry, GroupFilter, GroupPage, GroupState, LeaseEntry};

/// Number of groups that one page examines, whether they match its filter or not.
const LOOKED_AT: usize = 20_000;

impl Ledger {
    /// Up to `limit` groups that match `filter`, ascending by id, after `after`. Examines at most [`LOOKED_AT`]
    /// groups, because the ledger is locked meanwhile.
    pub(crate) fn list(
        &self,
        filter: &GroupFilter,
        after: Option<GroupId>,
        limit: usize,
        now: u64,
    ) -> GroupPage {
        let from = after.map_or(GroupId(0), |id| GroupId(id.0.saturating_add(1)));
        let mut flights = self.flights.range(from..).peekable();
        let mut stored = self.stored.range(from..).peekable();
        let (mut groups, mut last) = (Vec::new(), None);
        for _ in 0..LOOKED_AT {
            if groups.len() == limit {
                break;
            }
            let flight_first = match (flights.peek(), stored.peek()) {
                (None, None) => return GroupPage { groups, next: None },
                (Some((flight, _)), Some((stored, _))) => flight < stored,
                (flight, _) => flight.is_some(),
            };
            let id = if flight_first {
                flights.next().map(|(id, _)| *id)
            } else {
                stored.next().map(|(id, _)| *id)
            };
            last = id;
            groups.extend(id.and_then(|id| self.entry(id, now)).filter(|entry| filter.passes(entry)));
        }
        let more = flights.peek().is_some() || stored.peek().is_some();
        GroupPage { groups, next: last.or(after).filter(|_| more) }
    }

    /// A group in flight or stored.
    pub(crate) fn entry(&self, id: GroupId, now: u64) -> Option<GroupEntry> {
        if let Some(flight) = self.flights.get(&id) {
            let state = if flight.stage == InFlightStage::Admitted {
                GroupState::Admitted
            } else {
                GroupState::Claimed
            };
            return Some(GroupEntry {
                id,
                state,
                policy_version: flight.version,
                task: None,
                tokens: 0,
                bytes: flight.bytes,
                reward: None,
                uses: 0,
                keyed: id.0 >= KEYED,
                age_ms: now.saturating_sub(flight.hold.since),
            });
        }
        let StoredGroup { row, out, since } = self.stored.get(&id)?;
        Some(GroupEntry {
            id,
            state: if *out > 0 { GroupState::Leased } else { GroupState::Finalized },
            policy_version: row.oldest,
            task: Some(row.task),
            tokens: row.tokens,
            bytes: row.bytes,
            reward: row.reward,
            uses: row.uses,
            keyed: id.0 >= KEYED,
            age_ms: now.saturating_sub(*since),
        })
    }

    /// The leases that are not acknowledged, of one consumer or of all.
    pub(crate) fn leases(&self, consumer: Option<&str>, now: u64) -> Vec<LeaseEntry> {
        let wanted = |name: &str| consumer.is_none_or(|consumer| consumer == name);
        self.leases
            .iter()
            .filter(|(_, record)| wanted(&record.row.consumer))
            .map(|(id, record)| LeaseEntry {
                id: *id,
                consumer: record.row.consumer.clone(),
                step: record.row.step,
                groups: record.row.groups.clone(),
                expires_in_ms: record.until.map(|until| until.saturating_sub(now)),
                expired: record.row.state == LeaseState::Expired,
            })
            .collect()
    }

    /// Whether a group is stored, so its payload can be read.
    pub(crate) fn is_stored(&self, id: GroupId) -> bool {
        self.stored.contains_key(&id)
    }
}

impl GroupFilter {
    fn passes(&self, entry: &GroupEntry) -> bool {
        let is = |version: PolicyVersion| version == entry.policy_version;
        self.policy_version.is_none_or(is)
            && self.state.is_none_or(|state| state == entry.state)
            && self.min_reward.is_none_or(|least| entry.reward.is_some_and(|reward| reward >= least))
    }
}
