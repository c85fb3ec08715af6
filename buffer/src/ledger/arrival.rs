//! Finalized groups: whether they are written, and that they were. Invariant: between [`Ledger::begin`] and
//! [`Ledger::end`] a group is in flight, its bytes and contents are counted, and no other call writes it.

use trajectory::{GroupId, PolicyVersion};

use super::{GroupHold, GroupRow, InFlightStage, KEYED, Ledger, StoredGroup};
use crate::{BufferError, EventKind, Finalized};

/// A group that arrived to be stored.
#[derive(Clone, Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) identity: ArrivalIdentity,
    pub(crate) oldest: PolicyVersion,
    pub(crate) newest: PolicyVersion,
    /// Bytes of the payload.
    pub(crate) bytes: u64,
    /// A digest for every trajectory; empty without `dedup`.
    pub(crate) contents: &'a [u128],
}

/// Identity of an arrival: admission id or idempotency key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArrivalIdentity {
    Admitted(GroupId),
    /// Digest of its idempotency key.
    Keyed(u128),
}

/// Decision about an arrival.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ArrivalDecision {
    /// Write these trajectories (all, without `dedup`) under this id, then call [`Ledger::end`].
    Write { group: GroupId, keep: Vec<bool> },
    /// Another call is writing it: retry after the next change.
    Elsewhere(GroupId),
    /// Nothing to write; this is the answer.
    Answer(Option<GroupId>, Finalized),
}

impl Ledger {
    /// Decides about an arrival before it is written.
    pub(crate) fn begin(&mut self, arrival: &Arrival<'_>, now: u64) -> Result<ArrivalDecision, BufferError> {
        self.not_from_the_future(arrival.newest)?;
        let Arrival { oldest, bytes, .. } = *arrival;
        if bytes > self.config.max_bytes {
            return Err(BufferError::GroupTooLarge { bytes, limit: self.config.max_bytes });
        }
        let group = match self.identify(arrival.identity)? {
            Ok(group) => group,
            Err(answer) => return Ok(answer),
        };
        let in_flight = self.flights.contains_key(&group);
        let known = matches!(arrival.identity, ArrivalIdentity::Admitted(_)).then_some(group);
        if oldest.staleness_at(self.next_step()) > self.config.max_staleness {
            if in_flight {
                self.land(group);
                self.again.insert(group);
            }
            self.count_dropped(1);
            return Ok(ArrivalDecision::Answer(known, Finalized::Stale));
        }
        let arrived = GroupHold { since: now, ..GroupHold::default() };
        let hold = self.flights.get(&group).map_or(arrived, |flight| flight.hold);
        self.give_up_slot_if_older(group, oldest);
        let in_flight = self.flights.contains_key(&group);
        if (!in_flight && self.free(oldest) == 0) || self.bytes + bytes > self.config.max_bytes {
            return Ok(ArrivalDecision::Answer(known, Finalized::Full));
        }
        let keep = self.contents.new_ones(arrival.contents);
        if !keep.is_empty() && !keep.contains(&true) {
            if in_flight {
                self.land(group);
            }
            self.evicted += 1;
            return Ok(ArrivalDecision::Answer(known, Finalized::Duplicate));
        }
        if in_flight {
            self.land(group);
        }
        self.again.remove(&group);
        if let ArrivalIdentity::Keyed(key) = arrival.identity {
            self.next_keyed = group.0 + 1;
            self.keys.insert(key, group);
        }
        let contents: Vec<u128> = arrival
            .contents
            .iter()
            .zip(&keep)
            .filter(|(_, keep)| **keep)
            .map(|(content, _)| *content)
            .collect();
        self.contents.add(&contents);
        self.bytes += bytes;
        self.take_off(group, InFlightStage::Writing, oldest, hold, now);
        let flight = self.flights.get_mut(&group).expect("it has just been put there");
        (flight.bytes, flight.contents) = (bytes, contents);
        Ok(ArrivalDecision::Write { group, keep })
    }

    /// The write ended. On success the group can be leased; on failure it can be finalized again.
    pub(crate) fn end(&mut self, group: GroupId, written: Option<GroupRow>, now: u64) {
        let Some(flight) = self.land(group) else { return };
        let Some(row) = written else {
            self.bytes -= flight.bytes;
            self.contents.remove(&flight.contents);
            if group.0 >= KEYED {
                self.keys.remove(group);
            } else {
                self.take_off(group, InFlightStage::Claimed, flight.version, flight.hold, now);
            }
            return;
        };
        self.bytes = self.bytes - flight.bytes + row.bytes;
        self.stored.insert(group, StoredGroup { row, out: 0, since: flight.hold.since });
        self.enter_pool(group);
        self.emit(EventKind::Finalized, vec![group], None, None);
        if let Some(below) = self.keys.trim(|group| self.stored.contains_key(&group)) {
            self.change().keys_below = Some(below);
        }
    }

    /// The id to write the arrival under, or the answer without a write.
    fn identify(&self, identity: ArrivalIdentity) -> Result<Result<GroupId, ArrivalDecision>, BufferError> {
        let known = match identity {
            ArrivalIdentity::Admitted(group) => Some(group),
            ArrivalIdentity::Keyed(key) => self.keys.group(key),
        };
        let Some(group) = known else { return Ok(Ok(GroupId(self.next_keyed))) };
        if let Some(flight) = self.flights.get(&group) {
            let writing = flight.stage == InFlightStage::Writing;
            return Ok(if writing { Err(ArrivalDecision::Elsewhere(group)) } else { Ok(group) });
        }
        if self.again.contains(&group) {
            return Ok(Ok(group));
        }
        let limit = if group.0 >= KEYED { self.next_keyed } else { self.next_id };
        if group.0 >= limit {
            return Err(BufferError::UnknownGroup { group, next: GroupId(limit) });
        }
        Ok(Err(ArrivalDecision::Answer(Some(group), Finalized::Duplicate)))
    }
}
