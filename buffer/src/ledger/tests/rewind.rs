//! Rewinds, calls on ended leases, impossible versions, and ages, step by step.

use super::*;
use crate::{Finalized, GroupFilter, LeaseRequest};

const TRAINER: &str = "trainer";

/// A synchronous ledger for two groups a step.
fn synchronous() -> Ledger {
    Ledger::restore(BufferConfig::new(2, 0), Recovered::default(), 0)
}

fn submit(ledger: &mut Ledger, key: u128, oldest: u64) -> ArrivalDecision {
    let begin = ledger.begin(&arrival(ArrivalIdentity::Keyed(key), PolicyVersion(oldest)), 0).unwrap();
    if let ArrivalDecision::Write { group, .. } = begin {
        ledger.end(group, Some(row(group, PolicyVersion(oldest))), 0);
    }
    begin
}

fn is_stored(begin: &ArrivalDecision) -> bool {
    matches!(begin, ArrivalDecision::Write { .. })
}

fn lease(ledger: &mut Ledger, consumer: &str, step: u64) -> Option<GrantedLease> {
    ledger.lease(&LeaseRequest::step(consumer, PolicyVersion(step)), 0, true).unwrap()
}

fn served(version: u64) -> AdmitRequest {
    AdmitRequest { served: PolicyVersion(version), limit: 9, hold: None, holder: None }
}

#[test]
fn submissions_after_a_rewind_need_slots_beside_the_groups_leased_again() {
    let mut ledger = synchronous();
    assert!(is_stored(&submit(&mut ledger, 1, 0)) && is_stored(&submit(&mut ledger, 2, 0)));
    let first = lease(&mut ledger, TRAINER, 0).unwrap();
    ledger.set_version(PolicyVersion(1), false).unwrap();
    ledger.set_version(PolicyVersion(0), true).unwrap();
    assert_eq!(
        submit(&mut ledger, 3, 0),
        ArrivalDecision::Answer(None, Finalized::Stale),
        "step 0 has its groups"
    );
    assert!(ledger.admit(served(0), 0).unwrap().is_empty());
    let again = lease(&mut ledger, TRAINER, 0).unwrap();
    assert_eq!((again.id, again.groups), (first.id, first.groups));
    // The step is leased again, so that a sampler can have what it makes.
    assert!(is_stored(&submit(&mut ledger, 3, 1)) && is_stored(&submit(&mut ledger, 4, 1)));
    assert_eq!(lease(&mut ledger, TRAINER, 1).unwrap().groups.len(), 2);
    assert_eq!(ledger.stats().dropped_stale, 1, "only what was refused");
}

#[test]
fn leases_of_rewound_steps_count_after_a_restart() {
    let config = BufferConfig::new(1, 1);
    let (mut ledger, mut disk) = (Ledger::restore(config, Recovered::default(), 0), RecordModel::default());
    for key in 0..2 {
        let ArrivalDecision::Write { group, .. } = submit(&mut ledger, key, 0) else {
            panic!("there is a free slot")
        };
        disk.append(row(group, PolicyVersion(0)), Some(key));
    }
    let (first, second) = (lease(&mut ledger, TRAINER, 0).unwrap(), lease(&mut ledger, TRAINER, 1).unwrap());
    ledger.set_version(PolicyVersion(0), true).unwrap();
    disk.commit(ledger.take_change().0.unwrap());
    for mut ledger in [ledger, super::reopen(&disk, config, 0)] {
        assert_eq!(
            submit(&mut ledger, 9, 0),
            ArrivalDecision::Answer(None, Finalized::Stale),
            "steps 0 and 1 have theirs"
        );
        assert_eq!(lease(&mut ledger, TRAINER, 0).unwrap().groups, first.groups);
        ledger.set_version(PolicyVersion(1), false).unwrap();
        assert!(is_stored(&submit(&mut ledger, 10, 1)));
        assert_eq!(lease(&mut ledger, TRAINER, 1).unwrap().groups, second.groups);
        assert!(is_stored(&submit(&mut ledger, 11, 2)));
        for step in 2..4 {
            assert_eq!(lease(&mut ledger, TRAINER, step).unwrap().groups.len(), 1);
        }
        assert_eq!(ledger.stats().dropped_stale, 1, "only what was refused");
    }
}

#[test]
fn a_step_whose_groups_were_acknowledged_takes_others_after_a_rewind() {
    let mut ledger = synchronous();
    assert!(is_stored(&submit(&mut ledger, 1, 0)) && is_stored(&submit(&mut ledger, 2, 0)));
    let first = lease(&mut ledger, TRAINER, 0).unwrap();
    ledger.ack(first.id).unwrap();
    // To the step that it is at.
    ledger.set_version(PolicyVersion(0), true).unwrap();
    assert!(is_stored(&submit(&mut ledger, 3, 0)) && is_stored(&submit(&mut ledger, 4, 0)));
    assert_ne!(lease(&mut ledger, TRAINER, 0).unwrap().groups, first.groups);
}

#[test]
fn groups_in_flight_of_rewound_versions_are_admitted_again_first() {
    let mut ledger = synchronous();
    ledger.set_version(PolicyVersion(3), false).unwrap();
    let ids = ledger.admit(served(3), 0).unwrap();
    ledger.claim(ids[0], PolicyVersion(3), 0).unwrap();
    ledger.set_version(PolicyVersion(2), true).unwrap();
    assert!(matches!(ledger.claim(ids[1], PolicyVersion(2), 0), Err(BufferError::WrongState { .. })));
    assert_eq!(ledger.admit(served(2), 0).unwrap(), ids);
}

#[test]
fn a_group_that_is_older_than_its_slot_needs_a_slot_of_its_own() {
    let mut ledger = Ledger::restore(BufferConfig::new(1, 1), Recovered::default(), 0);
    assert!(is_stored(&submit(&mut ledger, 1, 0)));
    lease(&mut ledger, TRAINER, 0).unwrap();
    let ids = ledger.admit(served(1), 0).unwrap();
    assert_eq!(ids.len(), 2);
    let older = |id| arrival(ArrivalIdentity::Admitted(id), PolicyVersion(0));
    assert_eq!(
        ledger.begin(&older(ids[0]), 0).unwrap(),
        ArrivalDecision::Answer(Some(ids[0]), Finalized::Full)
    );
    assert!(!ledger.is_in_flight(ids[0]));
    assert!(ledger.abort(ids[1], false).is_ok());
    assert!(is_stored(&ledger.begin(&older(ids[0]), 0).unwrap()), "a slot is free now");
}

#[test]
fn submissions_of_dropped_groups_are_no_duplicates() {
    let mut ledger = synchronous();
    assert!(is_stored(&submit(&mut ledger, 1, 0)));
    ledger.set_version(PolicyVersion(1), false).unwrap();
    assert!(lease(&mut ledger, TRAINER, 1).is_none());
    assert_eq!(submit(&mut ledger, 1, 0), ArrivalDecision::Answer(None, Finalized::Stale));
    assert!(is_stored(&submit(&mut ledger, 1, 1)));
    assert!(matches!(submit(&mut ledger, 1, 1), ArrivalDecision::Answer(Some(_), Finalized::Duplicate)));
}

#[test]
fn only_the_call_that_ended_a_lease_succeeds_again() {
    let config = BufferConfig::new(1, 8);
    let (mut ledger, mut disk) = (Ledger::restore(config, Recovered::default(), 0), RecordModel::default());
    for key in 0..4 {
        let ArrivalDecision::Write { group, .. } = submit(&mut ledger, key, 0) else {
            panic!("there is a free slot")
        };
        disk.append(row(group, PolicyVersion(0)), Some(key));
    }
    let released = lease(&mut ledger, "a", 0).unwrap();
    ledger.release(released.id).unwrap();
    let acked = lease(&mut ledger, "b", 0).unwrap();
    assert_eq!(acked.groups, released.groups, "others have them");
    ledger.ack(acked.id).unwrap();
    let hold = Some(std::time::Duration::from_millis(1));
    let lost = LeaseRequest { hold, ..LeaseRequest::step("a", PolicyVersion(1)) };
    let lost = ledger.lease(&lost, 0, true).unwrap().unwrap();
    ledger.expire(9);
    assert_eq!(lease(&mut ledger, "b", 1).unwrap().groups, lost.groups);
    disk.commit(ledger.take_change().0.unwrap());
    for mut ledger in [ledger, super::reopen(&disk, config, 0)] {
        for _ in 0..2 {
            assert!(matches!(ledger.ack(released.id), Err(BufferError::LeaseOver { how: "released", .. })));
            assert!(ledger.release(released.id).is_ok());
            assert!(ledger.ack(acked.id).is_ok());
            let over = ledger.release(acked.id);
            assert!(matches!(over, Err(BufferError::LeaseOver { how: "acknowledged", .. })), "{over:?}");
            assert!(matches!(ledger.extend(acked.id, 9, 9), Err(BufferError::LeaseOver { .. })));
            assert!(matches!(ledger.extend(released.id, 9, 9), Err(BufferError::LeaseOver { .. })));
            for result in [ledger.ack(lost.id), ledger.release(lost.id), ledger.extend(lost.id, 9, 9)] {
                assert!(matches!(result, Err(BufferError::LeaseLost { lease }) if lease == lost.id));
            }
            // The same for those that are acknowledged together; a later version is not about it any more.
            let through = ledger.ack_through("a", PolicyVersion(2));
            assert!(
                matches!(through, Err(BufferError::LeaseLost { lease }) if lease == lost.id),
                "{through:?}"
            );
        }
        assert!(lease(&mut ledger, "a", 2).is_some());
        assert!(ledger.ack_through("a", PolicyVersion(3)).is_ok());
        assert!(ledger.ack_through("a", PolicyVersion(2)).is_err());
    }
}

#[test]
fn the_end_of_a_forgotten_lease_is_not_guessed() {
    let mut ledger = Ledger::restore(BufferConfig::new(1, 8), Recovered::default(), 0);
    assert!(is_stored(&submit(&mut ledger, 1, 0)));
    let first = lease(&mut ledger, TRAINER, 0).unwrap();
    ledger.release(first.id).unwrap();
    for _ in 0..lease::ENDED_KEPT {
        let next = lease(&mut ledger, TRAINER, 0).unwrap();
        ledger.release(next.id).unwrap();
        ledger.take_change();
    }
    assert!(matches!(ledger.ack(first.id), Err(BufferError::LeaseLost { .. })));
}

#[test]
fn versions_that_were_never_made_are_refused_and_change_nothing() {
    let mut ledger = synchronous();
    assert!(is_stored(&submit(&mut ledger, 1, 0)) && is_stored(&submit(&mut ledger, 2, 0)));
    let first = lease(&mut ledger, TRAINER, 0).unwrap();
    ledger.take_change();
    for version in [99_999, (1 << 53) - 1, 1 << 53, u64::MAX].map(PolicyVersion) {
        let refused = ledger.ack_through(TRAINER, version);
        assert!(matches!(refused, Err(BufferError::FutureVersion { .. })), "{refused:?}");
        let refused = ledger.set_version(version, false);
        assert!(matches!(refused, Err(BufferError::VersionJump { .. })), "{refused:?}");
        assert!(ledger.admit(AdmitRequest { served: version, ..served(0) }, 0).is_err());
        assert!(ledger.lease(&LeaseRequest::step(TRAINER, version), 0, true).is_err());
        assert!(ledger.begin(&arrival(ArrivalIdentity::Keyed(7), version), 0).is_err());
    }
    assert!(ledger.set_version(PolicyVersion(u64::MAX), true).is_err(), "not even for a trainer that starts");
    assert_eq!(ledger.take_change().0, None);
    assert_eq!(lease(&mut ledger, TRAINER, 0).unwrap().groups, first.groups);
    ledger.ack_through(TRAINER, PolicyVersion(1)).unwrap();
    // An empty buffer takes the version of its first trainer; the highest version has no successor.
    let last = PolicyVersion((1 << 53) - 1);
    ledger.set_version(last, false).unwrap();
    assert!(is_stored(&submit(&mut ledger, 3, last.0)) && is_stored(&submit(&mut ledger, 4, last.0)));
    assert!(lease(&mut ledger, TRAINER, last.0).is_some());
    assert!(ledger.stats().next_step > last);
}

/// From the slot on, through all states; a group of an earlier process counts from the opening.
#[test]
fn the_age_of_a_group_counts_from_its_slot() {
    let mut ledger = synchronous();
    let age = |ledger: &Ledger, id: GroupId, now: u64| ledger.entry(id, now).unwrap().age_ms;
    let [group, _] = ledger.admit(AdmitRequest { limit: 2, ..served(0) }, 100).unwrap()[..] else { panic!() };
    assert_eq!(age(&ledger, group, 150), 50);
    ledger.claim(group, PolicyVersion(0), 200).unwrap();
    ledger.begin(&arrival(ArrivalIdentity::Admitted(group), PolicyVersion(0)), 300).unwrap();
    assert_eq!(age(&ledger, group, 310), 210);
    ledger.end(group, Some(row(group, PolicyVersion(0))), 320);
    assert_eq!(ledger.list(&GroupFilter::default(), None, 1, 400).groups[0].age_ms, 300);
    ledger
        .lease(
            &LeaseRequest { at_least: Some(1), ..LeaseRequest::step(TRAINER, PolicyVersion(0)) },
            450,
            true,
        )
        .unwrap();
    assert_eq!((age(&ledger, group, 500), age(&ledger, group, 50)), (400, 0));
    let recovered = Recovered { rows: vec![row(group, PolicyVersion(0))], ..Recovered::default() };
    let reopened = Ledger::restore(BufferConfig::new(2, 0), recovered, 7);
    assert_eq!(age(&reopened, group, 9), 2);
}
