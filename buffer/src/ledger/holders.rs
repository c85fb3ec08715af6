//! Which samplers get slots, where not all of them may.
//!
//! Invariant: slots go to the samplers with the lowest numbers, which have joined first. One that is lost makes place for the next, and
//! requests that it has sent before do not count. A sampler without a number is in the process of the trainer, and always gets slots.

use std::collections::{BTreeMap, BTreeSet};

use super::Ledger;

/// Most samplers that are counted; others get no slots while there are so many.
const MOST_COUNTED: usize = 4096;
/// Milliseconds in which a sampler that was lost gets no slots: its last request may still wait for some. One that was only silent asks
/// for longer.
const LOST_MS: u64 = 30_000;

/// The samplers that have asked for slots.
#[derive(Clone, Debug, Default)]
pub(super) struct SlotHolders {
    known: BTreeSet<u64>,
    /// Those that were lost, and until when they count as such, milliseconds.
    lost: BTreeMap<u64, u64>,
    /// How many of `known` get slots.
    most: usize,
}

impl Ledger {
    /// Gives slots to `most` samplers alone, and counts them from the first call on. No lease and no group in flight changes.
    pub(crate) fn limit_holders(&mut self, most: usize) {
        self.holders.get_or_insert_default().most = most;
    }

    /// Samplers that have asked for slots and were not lost since; 0 if they are not counted.
    pub(crate) fn holders(&self) -> usize {
        self.holders.as_ref().map_or(0, |holders| holders.known.len())
    }

    /// Whether `holder`, which asks for slots, gets any.
    pub(super) fn may_hold(&mut self, holder: Option<u64>, now: u64) -> bool {
        let (Some(holders), Some(holder)) = (&mut self.holders, holder) else { return true };
        if holders.lost.get(&holder).is_some_and(|until| now < *until) {
            return false;
        }
        if holders.known.len() >= MOST_COUNTED && !holders.known.contains(&holder) {
            return false;
        }
        holders.known.insert(holder);
        holders.known.range(..holder).count() < holders.most
    }

    /// Makes place for another sampler.
    pub(super) fn lose_holder(&mut self, holder: u64, now: u64) {
        let Some(holders) = &mut self.holders else { return };
        holders.known.remove(&holder);
        holders.lost.retain(|_, until| now < *until);
        if holders.lost.len() < MOST_COUNTED {
            holders.lost.insert(holder, now.saturating_add(LOST_MS));
        }
    }
}

#[cfg(test)]
mod tests {
    use trajectory::PolicyVersion;

    use super::*;
    use crate::store::Recovered;
    use crate::{AdmitRequest, BufferConfig};

    fn slots_at(ledger: &mut Ledger, holder: Option<u64>, now: u64) -> usize {
        let request = AdmitRequest { served: PolicyVersion(0), limit: 1, hold: None, holder };
        ledger.admit(request, now).unwrap().len()
    }

    fn slots(ledger: &mut Ledger, holder: Option<u64>) -> usize {
        slots_at(ledger, holder, 0)
    }

    #[test]
    fn those_that_joined_first_get_slots_and_a_lost_one_makes_place() {
        let mut ledger =
            Ledger::restore(BufferConfig::new(64, 0).checked().unwrap(), Recovered::default(), 0);
        assert_eq!((slots(&mut ledger, Some(9)), ledger.holders()), (1, 0), "not limited");
        ledger.limit_holders(2);
        assert_eq!([5, 7, 9, 6].map(|holder| slots(&mut ledger, Some(holder))), [1, 1, 0, 1]);
        assert_eq!([5, 7, 9, 6].map(|holder| slots(&mut ledger, Some(holder))), [1, 0, 0, 1]);
        assert_eq!(
            (slots(&mut ledger, None), ledger.holders()),
            (1, 4),
            "the sampler of this process is not one of them"
        );
        assert_eq!(ledger.abandon(5, 0), 2);
        assert_eq!([7, 9, 6].map(|holder| slots(&mut ledger, Some(holder))), [1, 0, 1]);
        ledger.limit_holders(3);
        assert_eq!((slots(&mut ledger, Some(9)), ledger.holders()), (1, 3));
    }

    /// The last request of a sampler may be answered after its loss was noticed.
    #[test]
    fn a_request_of_a_lost_sampler_takes_no_place() {
        let mut ledger =
            Ledger::restore(BufferConfig::new(64, 0).checked().unwrap(), Recovered::default(), 0);
        ledger.limit_holders(1);
        assert_eq!((slots(&mut ledger, Some(1)), slots(&mut ledger, Some(2))), (1, 0));
        ledger.abandon(1, 500);
        assert_eq!((slots_at(&mut ledger, Some(1), 501), slots_at(&mut ledger, Some(2), 501)), (0, 1));
        let later = 500 + LOST_MS;
        assert_eq!(slots_at(&mut ledger, Some(1), later), 1, "it was only silent");
        assert_eq!((slots_at(&mut ledger, Some(2), later), ledger.holders()), (0, 2));
    }

    #[test]
    fn more_samplers_than_are_counted_take_no_memory() {
        let mut ledger =
            Ledger::restore(BufferConfig::new(9000, 0).checked().unwrap(), Recovered::default(), 0);
        ledger.limit_holders(usize::MAX);
        let got: usize = (0..5000).map(|holder| slots(&mut ledger, Some(holder))).sum();
        assert_eq!((got, ledger.holders()), (MOST_COUNTED, MOST_COUNTED));
        assert_eq!(slots(&mut ledger, Some(3)), 1);
    }
}
