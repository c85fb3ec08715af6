//! Which samplers get slots, where not all of them may.
//!
//! Invariant: slots go to the samplers with the lowest numbers, which have joined first. One that is lost makes place for the next. A
//! sampler without a number is in the process of the trainer, and always gets slots.

use std::collections::BTreeSet;

use super::Ledger;

/// Most samplers that are counted; others get no slots while there are so many.
const MOST_COUNTED: usize = 4096;

/// The samplers that have asked for slots.
#[derive(Clone, Debug)]
pub(super) struct SlotHolders {
    known: BTreeSet<u64>,
    /// How many of them get slots.
    most: usize,
}

impl Ledger {
    /// Gives slots to `most` samplers alone, and counts them from the first call on. No lease and no group in flight changes.
    pub(crate) fn limit_holders(&mut self, most: usize) {
        match &mut self.holders {
            Some(holders) => holders.most = most,
            None => self.holders = Some(SlotHolders { known: BTreeSet::new(), most }),
        }
    }

    /// Samplers that have asked for slots and were not lost since; 0 if they are not counted.
    pub(crate) fn holders(&self) -> usize {
        self.holders.as_ref().map_or(0, |holders| holders.known.len())
    }

    /// Whether `holder`, which asks for slots, gets any.
    pub(super) fn may_hold(&mut self, holder: Option<u64>) -> bool {
        let (Some(holders), Some(holder)) = (&mut self.holders, holder) else { return true };
        if holders.known.len() >= MOST_COUNTED && !holders.known.contains(&holder) {
            return false;
        }
        holders.known.insert(holder);
        holders.known.range(..holder).count() < holders.most
    }

    pub(super) fn forget_holder(&mut self, holder: u64) {
        if let Some(holders) = &mut self.holders {
            holders.known.remove(&holder);
        }
    }
}

#[cfg(test)]
mod tests {
    use trajectory::PolicyVersion;

    use super::*;
    use crate::store::Recovered;
    use crate::{AdmitRequest, BufferConfig};

    fn slots(ledger: &mut Ledger, holder: Option<u64>) -> usize {
        let request = AdmitRequest { served: PolicyVersion(0), limit: 1, hold: None, holder };
        ledger.admit(request, 0).unwrap().len()
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
        assert_eq!(ledger.abandon(5), 2);
        assert_eq!([7, 9, 6].map(|holder| slots(&mut ledger, Some(holder))), [1, 0, 1]);
        ledger.limit_holders(3);
        assert_eq!((slots(&mut ledger, Some(9)), ledger.holders()), (1, 3));
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
