//! Which samplers get slots, where not all of them may.
//!
//! Invariant: slots go to the samplers with the lowest numbers, which have joined first. One that is lost, or lets the hold of a group
//! expire, frees its place for the next, and requests that it has sent before do not count. A sampler without a number is in the process of
//! the trainer, and always gets slots.

use std::collections::{BTreeMap, BTreeSet};

use super::Ledger;

/// Most samplers that are counted; others get no slots while there are so many.
const MOST_COUNTED: usize = 4096;
/// Milliseconds in which a sampler that was lost is not counted, and gets only slots that no other can have: its last request may still wait
/// for some, and one that is excluded asks until its next heartbeat. One that was only silent asks for longer.
const LOST_MS: u64 = 30_000;

/// The samplers that have asked for slots.
#[derive(Clone, Debug, Default)]
pub(super) struct CountedSamplers {
    known: BTreeSet<u64>,
    /// Those that were lost, and until when they count as such, milliseconds.
    lost: BTreeMap<u64, u64>,
    /// How many of `known` get slots.
    most: usize,
}

impl Ledger {
    /// Gives slots to `most` samplers alone, and counts them from the first call on. No lease and no group in flight changes.
    pub(crate) fn limit_samplers(&mut self, most: usize) {
        self.samplers.get_or_insert_default().most = most;
    }

    /// Samplers that have asked for slots and were not lost since; 0 if they are not counted.
    pub(crate) fn counted_samplers(&self) -> usize {
        self.samplers.as_ref().map_or(0, |samplers| samplers.known.len())
    }

    /// Whether `holder`, which asks for slots, gets any.
    pub(super) fn may_hold(&mut self, holder: Option<u64>, now: u64) -> bool {
        let (Some(samplers), Some(holder)) = (&mut self.samplers, holder) else { return true };
        if samplers.lost.get(&holder).is_some_and(|until| now < *until) {
            // Slots that no other can have, and no place.
            return samplers.known.len() < samplers.most;
        }
        if samplers.known.len() >= MOST_COUNTED && !samplers.known.contains(&holder) {
            return false;
        }
        samplers.known.insert(holder);
        samplers.known.range(..holder).count() < samplers.most
    }

    /// Frees the place of a sampler.
    pub(super) fn lose_sampler(&mut self, holder: u64, now: u64) {
        let Some(samplers) = &mut self.samplers else { return };
        samplers.known.remove(&holder);
        samplers.lost.retain(|_, until| now < *until);
        if samplers.lost.len() < MOST_COUNTED {
            samplers.lost.insert(holder, now.saturating_add(LOST_MS));
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
    fn those_that_joined_first_get_slots_and_a_lost_one_frees_its_place() {
        let mut ledger =
            Ledger::restore(BufferConfig::new(64, 0).checked().unwrap(), Recovered::default(), 0);
        assert_eq!((slots(&mut ledger, Some(9)), ledger.counted_samplers()), (1, 0), "not limited");
        ledger.limit_samplers(2);
        assert_eq!([5, 7, 9, 6].map(|holder| slots(&mut ledger, Some(holder))), [1, 1, 0, 1]);
        assert_eq!([5, 7, 9, 6].map(|holder| slots(&mut ledger, Some(holder))), [1, 0, 0, 1]);
        assert_eq!(
            (slots(&mut ledger, None), ledger.counted_samplers()),
            (1, 4),
            "the sampler of this process is not one of them"
        );
        assert_eq!(ledger.abandon(5, 0), 2);
        assert_eq!([7, 9, 6].map(|holder| slots(&mut ledger, Some(holder))), [1, 0, 1]);
        ledger.limit_samplers(3);
        assert_eq!((slots(&mut ledger, Some(9)), ledger.counted_samplers()), (1, 3));
    }

    /// The last request of a sampler may be answered after its loss was noticed.
    #[test]
    fn a_request_of_a_lost_sampler_takes_no_place() {
        let mut ledger =
            Ledger::restore(BufferConfig::new(64, 0).checked().unwrap(), Recovered::default(), 0);
        ledger.limit_samplers(1);
        assert_eq!((slots(&mut ledger, Some(1)), slots(&mut ledger, Some(2))), (1, 0));
        ledger.abandon(1, 500);
        assert_eq!((slots_at(&mut ledger, Some(1), 501), slots_at(&mut ledger, Some(2), 501)), (0, 1));
        let later = 500 + LOST_MS;
        assert_eq!(slots_at(&mut ledger, Some(1), later), 1, "it was only silent");
        assert_eq!((slots_at(&mut ledger, Some(2), later), ledger.counted_samplers()), (0, 2));
    }

    #[test]
    fn a_sampler_that_lets_a_hold_expire_frees_its_place() {
        let mut ledger =
            Ledger::restore(BufferConfig::new(64, 0).checked().unwrap(), Recovered::default(), 0);
        ledger.limit_samplers(1);
        let hold = Some(std::time::Duration::from_millis(100));
        let request = AdmitRequest { served: PolicyVersion(0), limit: 1, hold, holder: Some(1) };
        assert_eq!(ledger.admit(request, 0).unwrap().len(), 1);
        assert_eq!(slots_at(&mut ledger, Some(2), 99), 0);
        assert!(ledger.expire(100));
        assert_eq!((slots_at(&mut ledger, Some(1), 101), slots_at(&mut ledger, Some(2), 101)), (0, 1));
    }

    #[test]
    fn a_lost_sampler_gets_what_no_other_needs_and_takes_no_place() {
        let mut ledger =
            Ledger::restore(BufferConfig::new(64, 0).checked().unwrap(), Recovered::default(), 0);
        ledger.limit_samplers(usize::MAX);
        assert_eq!([1, 2].map(|holder| slots(&mut ledger, Some(holder))), [1, 1]);
        [1, 2].iter().for_each(|holder| _ = ledger.abandon(*holder, 500));
        assert_eq!([2, 1].map(|holder| slots_at(&mut ledger, Some(holder), 501)), [1, 1]);
        assert_eq!(ledger.counted_samplers(), 0);
        ledger.limit_samplers(1);
        assert_eq!([1, 3, 1].map(|holder| slots_at(&mut ledger, Some(holder), 502)), [1, 1, 0]);
    }

    #[test]
    fn more_samplers_than_are_counted_take_no_memory() {
        let mut ledger =
            Ledger::restore(BufferConfig::new(9000, 0).checked().unwrap(), Recovered::default(), 0);
        ledger.limit_samplers(usize::MAX);
        let got: usize = (0..5000).map(|holder| slots(&mut ledger, Some(holder))).sum();
        assert_eq!((got, ledger.counted_samplers()), (MOST_COUNTED, MOST_COUNTED));
        assert_eq!(slots(&mut ledger, Some(3)), 1);
    }
}
