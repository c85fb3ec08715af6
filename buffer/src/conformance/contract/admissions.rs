//! Admissions and finalize calls: slots, idempotency keys, aborts, expiry, the limit of bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use trajectory::{Group, GroupId, Trajectory};

use super::super::BothSides;
use super::super::fixtures::{
    HOLD, NOW, SOON, TRAINER, admit, generate, group, lease, leased, v, wait_for_expiry,
};
use crate::{AdmitRequest, BufferError, Finalized, LeaseRequest};

pub(super) fn finalize_is_idempotent(buffer: &dyn BothSides) {
    let ids = generate(buffer, v(0), 2);
    let again = || buffer.finalize(group(ids[0], v(0))).unwrap();
    assert_eq!(again(), Finalized::Duplicate, "finalized");
    lease(buffer, 0, NOW).unwrap();
    assert_eq!(again(), Finalized::Duplicate, "leased");
    buffer.ack_through(TRAINER, v(1)).unwrap();
    assert_eq!(again(), Finalized::Duplicate, "removed");
    let error = buffer.finalize(group(GroupId(99), v(0))).unwrap_err().to_string();
    assert!(error.starts_with("group 99 was never admitted, the next one is group 2: ask"), "{error}");
}

pub(super) fn an_idempotency_key_stores_a_group_once_without_admission(buffer: &dyn BothSides) {
    let foreign = group(GroupId(0), v(0));
    let first = buffer.submit("mine/1", foreign.clone()).unwrap();
    assert_eq!(first.answer, Finalized::Accepted);
    let again = buffer.submit("mine/1", foreign.clone()).unwrap();
    assert_eq!((again.answer, again.group), (Finalized::Duplicate, first.group));
    let admitted = generate(buffer, v(0), 1)[0];
    assert_ne!(Some(admitted), first.group, "ids of admissions and of keyed groups are disjoint");
    let batch = lease(buffer, 0, NOW).unwrap();
    assert_eq!(batch.groups[1].trajectories, foreign.trajectories);
    assert_eq!(Some(batch.groups[1].id), first.group);
    buffer.ack(batch.id).unwrap();
    assert_eq!(
        buffer.submit("mine/1", foreign.clone()).unwrap().answer,
        Finalized::Duplicate,
        "once trained, too"
    );
    for wrong in ["", &"k".repeat(129)] {
        assert!(matches!(buffer.submit(wrong, foreign.clone()), Err(BufferError::Key { .. })));
    }
}

pub(super) fn a_keyed_group_without_a_free_slot_is_refused_as_full(buffer: &dyn BothSides) {
    generate(buffer, v(0), 3);
    let last = admit(buffer, v(0), 9);
    assert_eq!(buffer.submit("late", group(GroupId(0), v(0))).unwrap().answer, Finalized::Full);
    buffer.abort(last[0], false).unwrap();
    assert_eq!(buffer.submit("late", group(GroupId(0), v(0))).unwrap().answer, Finalized::Accepted);
}

/// Configured with capacity for a few groups.
pub(super) fn the_limit_of_bytes_refuses_groups_until_some_are_acknowledged(buffer: &dyn BothSides) {
    let mut keys = (0..100).map(|key| key.to_string());
    let accepted = keys
        .by_ref()
        .take_while(|key| buffer.submit(key, group(GroupId(0), v(0))).unwrap().answer == Finalized::Accepted)
        .count();
    assert!((2..10).contains(&accepted), "{accepted} groups");
    let stats = buffer.stats().unwrap();
    assert!(stats.bytes <= stats.max_bytes);
    let request = LeaseRequest { groups: Some(1), ..LeaseRequest::step(TRAINER, v(0)) };
    let one = buffer.lease(&request, NOW).unwrap();
    buffer.ack(one.id).unwrap();
    assert_eq!(buffer.submit("next", group(GroupId(0), v(0))).unwrap().answer, Finalized::Accepted);
    let one = group(GroupId(0), v(0)).trajectories.remove(0);
    let huge = Group {
        trajectories: (0..99).map(|index| Trajectory { index, ..one.clone() }).collect(),
        ..group(GroupId(0), v(0))
    };
    assert!(matches!(buffer.submit("huge", huge), Err(BufferError::GroupTooLarge { .. })));
}

pub(super) fn an_expired_admission_is_requeued_and_its_late_group_accepted(buffer: &dyn BothSides) {
    let request = AdmitRequest { served: v(0), limit: 2, hold: Some(HOLD), holder: None };
    let ids = buffer.admit(request, NOW).unwrap();
    buffer.claim(ids[0], v(0)).unwrap();
    wait_for_expiry(buffer);
    assert_eq!(
        buffer.finalize(group(ids[1], v(0))).unwrap(),
        Finalized::Accepted,
        "late, but a slot is free"
    );
    assert_eq!(admit(buffer, v(0), 2), [ids[0], GroupId(2)]);
}

/// A sampler's process begins anew: what it had in flight is admitted at once, and is accepted once, from whichever sends it first.
pub(super) fn what_a_sampler_abandons_is_admitted_again(buffer: &dyn BothSides) {
    let of = |holder| AdmitRequest { served: v(0), limit: 1, hold: Some(SOON), holder: Some(holder) };
    let ids = [5, 6].map(|holder| buffer.admit(of(holder), NOW).unwrap()[0]);
    buffer.claim(ids[0], v(0)).unwrap();
    assert_eq!([5, 5, 7].map(|holder| buffer.abandon(holder).unwrap()), [1, 0, 0]);
    assert_eq!(buffer.admit(of(5), NOW).unwrap(), [ids[0]]);
    assert_eq!(buffer.admit(of(5), NOW).unwrap(), [], "the other sampler goes on");
    let late = [(), ()].map(|()| buffer.finalize(group(ids[0], v(0))).unwrap());
    assert_eq!(late, [Finalized::Accepted, Finalized::Duplicate]);
    assert_eq!(buffer.finalize(group(ids[1], v(0))).unwrap(), Finalized::Accepted);
}

/// Configured with `dedup`.
pub(super) fn dedup_drops_stored_trajectories(buffer: &dyn BothSides) {
    let twice = group(GroupId(0), v(0));
    assert_eq!(buffer.submit("a", twice.clone()).unwrap().answer, Finalized::Accepted);
    assert_eq!(
        buffer.submit("b", twice.clone()).unwrap().answer,
        Finalized::Duplicate,
        "all trajectories are stored"
    );
    let mut other_task = twice.clone();
    other_task.task.id.0 += 1;
    assert_eq!(buffer.submit("c", other_task).unwrap().answer, Finalized::Accepted);
    let batch = lease(buffer, 0, NOW).unwrap();
    assert_eq!(batch.groups[0].trajectories, twice.trajectories[..1], "its two trajectories were the same");
    buffer.ack(batch.id).unwrap();
    assert_eq!(buffer.submit("d", twice).unwrap().answer, Finalized::Accepted, "it is no longer stored");
}

pub(super) fn one_of_many_simultaneous_finalize_calls_is_accepted(buffer: &dyn BothSides) {
    let id = admit(buffer, v(0), 1)[0];
    let accepted = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| match buffer.finalize(group(id, v(0))).unwrap() {
                Finalized::Accepted => accepted.fetch_add(1, Ordering::Relaxed),
                other => {
                    assert_eq!(other, Finalized::Duplicate);
                    0
                }
            });
        }
    });
    assert_eq!(accepted.into_inner(), 1);
    assert_eq!(buffer.stats().unwrap().finalized, 1);
}

pub(super) fn a_call_in_the_wrong_state_names_the_state(buffer: &dyn BothSides) {
    let id = generate(buffer, v(0), 1)[0];
    let error = buffer.claim(id, v(0)).unwrap_err().to_string();
    assert!(error.starts_with("group 0 is finalized, but must be admitted: discard"), "{error}");
    let error = buffer.abort(id, true).unwrap_err().to_string();
    assert!(error.contains("is finalized, but must be admitted or claimed"), "{error}");
    let error = buffer.claim(GroupId(7), v(0)).unwrap_err().to_string();
    assert!(error.contains("group 7 is not yet admitted"), "{error}");
    let empty = Group { trajectories: Vec::new(), ..group(GroupId(1), v(0)) };
    assert!(matches!(buffer.finalize(empty), Err(BufferError::EmptyGroup { group: GroupId(1) })));
}

pub(super) fn aborted_groups_free_their_slots_and_are_requeued(buffer: &dyn BothSides) {
    let ids = admit(buffer, v(0), 9);
    assert_eq!(ids, [0, 1, 2, 3].map(GroupId));
    buffer.claim(ids[2], v(0)).unwrap();
    for (id, retry) in [(ids[2], true), (ids[1], true), (ids[3], false)] {
        buffer.abort(id, retry).unwrap();
    }
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.again, stats.evicted, stats.slots_free), (2, 1, 3));
    assert_eq!(buffer.finalize(group(ids[3], v(0))).unwrap(), Finalized::Duplicate, "aborted for good");
    assert_eq!(
        buffer.finalize(group(ids[1], v(0))).unwrap(),
        Finalized::Accepted,
        "a slot is free after all"
    );
    assert_eq!(admit(buffer, v(0), 9), [2, 4].map(GroupId));
}

/// Two groups a step and a bound of one version: four slots.
pub(super) fn a_slot_is_free_once_the_sampler_serves_the_next_version(buffer: &dyn BothSides) {
    generate(buffer, v(0), 4);
    leased(buffer, 0);
    assert!(admit(buffer, v(0), 1).is_empty(), "its groups would exceed the bound by the lag of the sampler");
    assert_eq!(admit(buffer, v(1), 9).len(), 2);
}
