//! Quarantine of groups that cannot be trained on. Invariant: a quarantined group is in no lease and has no slot, and
//! an admitted task is generated again.

use trajectory::GroupId;

use super::{KEYED, LeaseState, Ledger};
use crate::EventKind;

impl Ledger {
    /// Quarantines a stored group permanently; false if it is not stored.
    pub(crate) fn quarantine(&mut self, group: GroupId) -> bool {
        if !self.stored.contains_key(&group) {
            return false;
        }
        let in_step = self.leases.values().filter(|record| {
            let row = &record.row;
            row.state == LeaseState::Open && row.step == self.step && row.groups.contains(&group)
        });
        self.taken = self.taken.saturating_sub(in_step.count());
        self.leave_leases(group);
        self.forget(group);
        if group.0 < KEYED {
            self.again.insert(group);
        }
        self.quarantined += 1;
        self.emit(EventKind::Quarantined, vec![group], None, None);
        true
    }
}
