//! The ledger without payloads, in virtual time: the decisions of a buffer for a program that simulates a run.
//!
//! Invariant: every decision is the one that a [`Buffer`](crate::Buffer) makes; nothing is decided here. No payload is stored,
//! nothing is durable, and no call waits.

use trajectory::{GroupId, PolicyVersion, TaskId};

use crate::ledger::{Arrival, ArrivalDecision, ArrivalIdentity, GroupRow, Ledger};
use crate::store::Recovered;
use crate::{AdmitRequest, BufferConfig, BufferError, Finalized, LeaseId, LeaseRequest};

/// A ledger whose caller has the clock. Times are milliseconds of the simulation.
#[derive(Debug)]
pub struct SimulatedLedger {
    ledger: Ledger,
}

/// A finalized group as the ledger sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedArrival {
    /// Its id, of an admission.
    pub group: GroupId,
    /// The version of its oldest token.
    pub oldest: PolicyVersion,
    /// The version of its newest token.
    pub newest: PolicyVersion,
    /// Number of tokens of all its samples.
    pub tokens: u64,
}

/// A lease that was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulatedLease {
    /// Its id.
    pub id: LeaseId,
    /// Sorted by id, each with the version of its oldest token.
    pub groups: Vec<(GroupId, PolicyVersion)>,
}

impl SimulatedLedger {
    /// An empty ledger.
    ///
    /// # Errors
    /// A configuration that no buffer accepts.
    pub fn new(config: BufferConfig) -> Result<Self, BufferError> {
        Ok(Self { ledger: Ledger::restore(config.checked()?, Recovered::default(), 0) })
    }

    /// Number of groups that a sampler of `served` could start now.
    #[must_use]
    pub fn free(&self, served: PolicyVersion) -> usize {
        self.ledger.free(served)
    }

    /// Admits groups as a bound on staleness of `versions` would; at most that of the configuration.
    pub fn run_ahead(&mut self, versions: u64) {
        self.ledger.run_ahead(versions);
    }

    /// Gives slots to `most` samplers alone, those with the lowest numbers, and counts them from the first call on.
    pub fn limit_samplers(&mut self, most: usize) {
        self.ledger.limit_samplers(most);
    }

    /// Samplers that have asked for slots and were not abandoned since.
    #[must_use]
    pub fn counted_samplers(&self) -> usize {
        self.ledger.counted_samplers()
    }

    /// Number of groups that can be leased.
    #[must_use]
    pub fn finalized(&self) -> usize {
        self.ledger.finalized()
    }

    /// Groups that were dropped because they exceeded the bound, since the start.
    #[must_use]
    pub fn dropped_stale(&self) -> u64 {
        self.ledger.dropped()
    }

    /// Admits groups and claims them for the same version; their ids.
    ///
    /// # Errors
    /// A version that cannot exist yet.
    pub fn admit(&mut self, request: AdmitRequest, now_ms: u64) -> Result<Vec<GroupId>, BufferError> {
        let ids = self.ledger.admit(request, now_ms)?;
        for id in &ids {
            self.ledger.claim(*id, request.served, now_ms)?;
        }
        self.ledger.discard_change();
        Ok(ids)
    }

    /// Stores a group, if the bound still allows it.
    ///
    /// # Errors
    /// A group that was never admitted, or a version that cannot exist yet.
    pub fn finalize(&mut self, arrival: SimulatedArrival, now_ms: u64) -> Result<Finalized, BufferError> {
        let SimulatedArrival { group, oldest, newest, tokens } = arrival;
        let identity = ArrivalIdentity::Admitted(group);
        let decision =
            self.ledger.begin(&Arrival { identity, oldest, newest, bytes: 0, contents: &[] }, now_ms)?;
        let answer = match decision {
            ArrivalDecision::Write { group, .. } => {
                let row = GroupRow {
                    id: group,
                    oldest,
                    task: TaskId(group.0),
                    tokens,
                    bytes: 0,
                    reward: None,
                    uses: 0,
                    contents: Vec::new(),
                };
                self.ledger.end(group, Some(row), now_ms);
                Finalized::Accepted
            }
            ArrivalDecision::Answer(_, answer) => answer,
            // No other call can be writing: every write of this type ends in the call that began it.
            ArrivalDecision::Elsewhere(_) => Finalized::Duplicate,
        };
        self.ledger.discard_change();
        Ok(answer)
    }

    /// Tries to grant a lease; `None` if it has to wait.
    ///
    /// # Errors
    /// A step that has passed, or that cannot have begun.
    pub fn lease(
        &mut self,
        request: &LeaseRequest,
        now_ms: u64,
    ) -> Result<Option<SimulatedLease>, BufferError> {
        let granted = self.ledger.lease(request, now_ms, false)?;
        self.ledger.discard_change();
        Ok(granted.map(|granted| {
            let with_version = |id: GroupId| (id, self.ledger.oldest_of(id).unwrap_or_default());
            SimulatedLease { id: granted.id, groups: granted.groups.into_iter().map(with_version).collect() }
        }))
    }

    /// Acknowledges a lease: its groups are removed.
    ///
    /// # Errors
    /// A lease that ended otherwise.
    pub fn ack(&mut self, lease: LeaseId) -> Result<(), BufferError> {
        self.ledger.ack(lease)?;
        self.ledger.discard_change();
        Ok(())
    }

    /// Revokes all groups in flight of `holder`, which are then admitted again; their number.
    pub fn abandon(&mut self, holder: u64, now_ms: u64) -> usize {
        let groups = self.ledger.abandon(holder, now_ms);
        self.ledger.discard_change();
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_decides_as_the_buffer_of_the_crate_documentation() {
        let mut ledger = SimulatedLedger::new(BufferConfig::new(1, 1)).unwrap();
        let (v0, v1) = (PolicyVersion(0), PolicyVersion(1));
        let slots = |served| AdmitRequest { served, limit: 9, hold: None, holder: Some(7) };
        let ids = ledger.admit(slots(v0), 0).unwrap();
        assert_eq!(ids, [GroupId(0), GroupId(1)]);
        for id in ids {
            let arrival = SimulatedArrival { group: id, oldest: v0, newest: v0, tokens: 3 };
            assert_eq!(ledger.finalize(arrival, 1).unwrap(), Finalized::Accepted);
        }
        assert_eq!((ledger.finalized(), ledger.free(v0)), (2, 0));
        let lease = ledger.lease(&LeaseRequest::step("trainer", v0), 2).unwrap().unwrap();
        assert_eq!(lease.groups, [(GroupId(0), v0)]);
        assert_eq!((ledger.free(v0), ledger.free(v1)), (0, 1));
        ledger.ack(lease.id).unwrap();
        assert_eq!(ledger.admit(slots(v1), 3).unwrap(), [GroupId(2)]);
        assert_eq!(ledger.abandon(7, 3), 1);
        assert_eq!(ledger.admit(slots(v1), 4).unwrap(), [GroupId(2)], "it is admitted again");
        assert_eq!(ledger.dropped_stale(), 0);
        assert!(SimulatedLedger::new(BufferConfig::new(0, 1)).is_err());
    }
}
