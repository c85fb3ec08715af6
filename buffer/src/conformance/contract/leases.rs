//! Leases: what they contain, how they end, expire and wait, and what a step gets again.

use trajectory::GroupId;

use super::super::BothSides;
use super::super::fixtures::{
    HOLD, NOW, SOON, TRAINER, admit, generate, group, lease, leased, v, wait_for_expiry,
};
use crate::{AdmitRequest, BufferError, Finalized, LeaseId, LeaseRequest};

pub(super) fn a_leased_group_equals_the_finalized_one(buffer: &dyn BothSides) {
    let ids = generate(buffer, v(0), 2);
    let lease = lease(buffer, 0, NOW).unwrap();
    assert_eq!((lease.step, lease.dropped_stale), (v(0), 0));
    for (id, out) in ids.iter().zip(&lease.groups) {
        assert_eq!(**out, group(*id, v(0)));
    }
}

pub(super) fn an_expired_lease_is_fenced_once_its_groups_are_leased_again(buffer: &dyn BothSides) {
    let ids = generate(buffer, v(0), 2);
    let short = Some(HOLD);
    let ended = LeaseRequest { hold: short, ..LeaseRequest::step("ended", v(0)) };
    let lost = buffer.lease(&ended, NOW).unwrap();
    let other = LeaseRequest::step("other", v(0));
    let taken = buffer.lease(&other, SOON).unwrap();
    assert_eq!(taken.groups, lost.groups);
    for result in [buffer.ack(lost.id), buffer.extend(lost.id, SOON), buffer.release(lost.id)] {
        assert!(matches!(result, Err(BufferError::LeaseLost { lease }) if lease == lost.id), "{result:?}");
    }
    buffer.ack(taken.id).unwrap();
    buffer.ack(taken.id).unwrap();
    assert_eq!(buffer.finalize(group(ids[0], v(0))).unwrap(), Finalized::Duplicate);
    assert!(matches!(buffer.ack(LeaseId(77)), Err(BufferError::UnknownLease { .. })));
    assert!(buffer.stats().unwrap().expired > 0);
}

pub(super) fn an_expired_lease_can_be_resumed_before_its_groups_are_leased_again(buffer: &dyn BothSides) {
    generate(buffer, v(0), 2);
    let request = LeaseRequest { hold: Some(HOLD), ..LeaseRequest::step("late", v(0)) };
    let first = buffer.lease(&request, NOW).unwrap();
    wait_for_expiry(buffer);
    assert_eq!(buffer.stats().unwrap().finalized, 2, "they can be leased again");
    assert_eq!(buffer.lease(&request, NOW).unwrap(), first, "the same groups in the same order");
    wait_for_expiry(buffer);
    buffer.extend(first.id, SOON).unwrap();
    assert_eq!(buffer.stats().unwrap().finalized, 0);
    buffer.ack(first.id).unwrap();
    assert_eq!(buffer.stats().unwrap().leased, 0);
}

pub(super) fn several_consumers_share_a_step(buffer: &dyn BothSides) {
    let ids = generate(buffer, v(0), 4);
    let part = |rank: &str, step| LeaseRequest { groups: Some(1), ..LeaseRequest::step(rank, v(step)) };
    let ranks = ["rank 0", "rank 1"];
    let parts = ranks.map(|rank| buffer.lease(&part(rank, 0), NOW).unwrap());
    assert_eq!(parts.each_ref().map(|lease| lease.groups[0].id), [ids[0], ids[1]]);
    let second = buffer.lease(&part("rank 0", 1), NOW).unwrap();
    assert_eq!(second.groups[0].id, ids[2]);
    buffer.ack_through("rank 0", v(1)).unwrap();
    assert_eq!(buffer.stats().unwrap().leased, 2, "rank 1 keeps its lease, and rank 0 that of the next step");
    assert_eq!(buffer.lease(&part("rank 1", 0), NOW).unwrap(), parts[1]);
}

pub(super) fn a_lease_is_limited_by_tokens_and_by_available_groups(buffer: &dyn BothSides) {
    generate(buffer, v(0), 3);
    let any = LeaseRequest { step: None, ..LeaseRequest::step(TRAINER, v(0)) };
    // Each group has two trajectories of three tokens.
    let by_tokens = LeaseRequest { tokens: Some(13), ..any.clone() };
    assert_eq!(buffer.lease(&by_tokens, NOW).unwrap().groups.len(), 2);
    let few = LeaseRequest { groups: Some(4), at_least: Some(1), ..any.clone() };
    assert_eq!(buffer.lease(&few, NOW).unwrap().groups.len(), 1);
    assert!(buffer.lease(&few, NOW).is_err());
    for consumer in [String::new(), "c".repeat(65)] {
        let unnamed = LeaseRequest { consumer, ..any.clone() };
        assert!(matches!(buffer.lease(&unnamed, NOW), Err(BufferError::Consumer { .. })));
    }
}

/// Configured with two uses and `OnStale::Drop`.
pub(super) fn a_group_is_leased_max_uses_times_and_once_a_step(buffer: &dyn BothSides) {
    generate(buffer, v(0), 2);
    assert_eq!(leased(buffer, 0), [0, 1]);
    let other = LeaseRequest::step("other", v(0));
    assert!(buffer.lease(&other, NOW).is_err(), "not twice in a step");
    assert_eq!(leased(buffer, 1), [0, 1]);
    assert!(lease(buffer, 2, NOW).is_err(), "both uses are leased");
    buffer.ack_through(TRAINER, v(2)).unwrap();
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.finalized, stats.leased, stats.bytes), (0, 0, 0));
}

pub(super) fn a_step_gets_the_same_batch_until_it_is_acknowledged(buffer: &dyn BothSides) {
    generate(buffer, v(0), 4);
    let first = lease(buffer, 0, NOW).unwrap();
    let second = leased(buffer, 1);
    assert_eq!(lease(buffer, 0, NOW).unwrap(), first);
    assert_eq!(leased(buffer, 1), second);
    buffer.ack_through(TRAINER, v(1)).unwrap();
    buffer.ack_through(TRAINER, v(1)).unwrap();
    let error = lease(buffer, 0, NOW).unwrap_err().to_string();
    assert!(error.contains("the step from v0 cannot be leased: the next is v2"), "{error}");
    assert_eq!(leased(buffer, 1), second);
    assert_eq!(buffer.stats().unwrap().leased, 2);
}

pub(super) fn a_released_lease_can_be_leased_again(buffer: &dyn BothSides) {
    generate(buffer, v(0), 4);
    let (first, second) = (leased(buffer, 0), lease(buffer, 1, NOW).unwrap());
    buffer.release(second.id).unwrap();
    buffer.release(second.id).unwrap();
    let again = lease(buffer, 1, NOW).unwrap();
    assert_eq!(again.groups, second.groups);
    assert_ne!(again.id, second.id);
    assert_eq!(leased(buffer, 0), first);
}

pub(super) fn calls_on_an_ended_lease_are_idempotent(buffer: &dyn BothSides) {
    generate(buffer, v(0), 4);
    let released = lease(buffer, 0, NOW).unwrap();
    buffer.release(released.id).unwrap();
    let acked = buffer.lease(&LeaseRequest::step("other", v(0)), NOW).unwrap();
    assert_eq!(acked.groups, released.groups, "leased again");
    buffer.ack(acked.id).unwrap();
    for _ in 0..2 {
        let error = buffer.ack(released.id).unwrap_err();
        assert!(matches!(error, BufferError::LeaseOver { how: "released", .. }), "{error}");
        buffer.release(released.id).unwrap();
        buffer.ack(acked.id).unwrap();
        for result in
            [buffer.release(acked.id), buffer.extend(acked.id, SOON), buffer.extend(released.id, SOON)]
        {
            assert!(matches!(result, Err(BufferError::LeaseOver { .. })), "{result:?}");
        }
    }
    let ended = LeaseRequest { hold: Some(HOLD), ..LeaseRequest::step("ended", v(1)) };
    let lost = buffer.lease(&ended, NOW).unwrap();
    buffer.lease(&LeaseRequest::step("other", v(1)), SOON).unwrap();
    for _ in 0..2 {
        let error = buffer.ack_through("ended", v(2)).unwrap_err();
        assert!(matches!(error, BufferError::LeaseLost { lease } if lease == lost.id), "{error}");
        assert!(matches!(buffer.ack(lost.id), Err(BufferError::LeaseLost { .. })));
    }
}

pub(super) fn a_rewound_trainer_gets_its_steps_again_and_nothing_is_dropped(buffer: &dyn BothSides) {
    let foreign = |key: &str, version: u64| buffer.submit(key, group(GroupId(0), v(version))).unwrap().answer;
    for key in ["1", "2"] {
        assert_eq!(foreign(key, 0), Finalized::Accepted);
    }
    let first = leased(buffer, 0);
    buffer.set_version(v(1), false).unwrap();
    buffer.set_version(v(0), true).unwrap();
    let accepted: Vec<String> =
        (3..9).map(|key| key.to_string()).filter(|key| foreign(key, 0) == Finalized::Accepted).collect();
    assert_eq!(accepted.len(), 2, "those of step 1, beside those of step 0");
    assert_eq!(leased(buffer, 0), first);
    assert_eq!(leased(buffer, 1).len(), 2);
    assert_eq!(leased(buffer, 0), first);
    assert_eq!(buffer.stats().unwrap().dropped_stale, 0);
}

pub(super) fn a_lease_timeout_explains_what_is_missing(buffer: &dyn BothSides) {
    generate(buffer, v(0), 1);
    let ids = admit(buffer, v(0), 2);
    buffer.claim(ids[1], v(0)).unwrap();
    let error = lease(buffer, 0, NOW).unwrap_err().to_string();
    assert_eq!(
        error,
        "no batch for the step from v0 within 0.0 s: 1 groups finalized, 1 claimed, 1 admitted, 0 to be done again; \
         1 of 4 slots free for a sampler that serves v0; oldest in flight: group 1 since v0, group 2 since v0; the \
         trainer waits for the samplers: see why the oldest in flight are slow, or give rollout more devices"
    );
}

pub(super) fn a_lease_that_waits_for_slow_groups_is_explained(buffer: &dyn BothSides) {
    let ids = admit(buffer, v(0), 4);
    for id in &ids[1..] {
        buffer.finalize(group(*id, v(0))).unwrap();
    }
    leased(buffer, 0);
    generate(buffer, v(1), 2);
    let error = lease(buffer, 1, NOW).unwrap_err().to_string();
    assert!(error.contains("oldest in flight: group 0 since v0; a complete batch waits"), "{error}");
    buffer.finalize(group(ids[0], v(0))).unwrap();
    assert_eq!(leased(buffer, 1), [0, 3]);
}

pub(super) fn waits_end_when_the_other_side_acts(buffer: &dyn BothSides) {
    std::thread::scope(|scope| {
        let lease = scope.spawn(|| lease(buffer, 0, SOON).unwrap());
        let ids = admit(buffer, v(0), 4);
        let one = AdmitRequest { served: v(0), limit: 1, hold: None, holder: None };
        let admit = scope.spawn(move || buffer.admit(one, SOON).unwrap());
        for id in &ids[..2] {
            buffer.finalize(group(*id, v(0))).unwrap();
        }
        assert_eq!(lease.join().unwrap().groups.len(), 2);
        buffer.abort(ids[2], true).unwrap();
        assert_eq!(admit.join().unwrap(), [ids[2]]);
    });
}
