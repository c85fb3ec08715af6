//! The cases of the contract of `Producer` and `Consumer`. Invariant: a case uses these two traits alone, so it holds for any
//! store and over HTTP.

mod quarantine;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quarantine::a_quarantined_group_leaves_its_lease_and_frees_its_slot;
use trajectory::{Group, GroupId, Trajectory};

use super::fixtures::{
    HOLD, NOW, SOON, TRAINER, admit, config, generate, group, lease, leased, v, wait_for_expiry,
};
use super::{BothSides, ContractCase};
use crate::{AdmitRequest, BufferConfig, BufferError, Finalized, LeaseId, LeaseRequest, OnStale, Order};

/// A case is its function, its name, and the configuration of its buffer.
macro_rules! case {
    ($name:ident, $config:expr) => {
        ContractCase { name: stringify!($name), config: || $config, check: $name }
    };
}

fn a_leased_group_equals_the_finalized_one(buffer: &dyn BothSides) {
    let ids = generate(buffer, v(0), 2);
    let lease = lease(buffer, 0, NOW).unwrap();
    assert_eq!((lease.step, lease.dropped_stale), (v(0), 0));
    for (id, out) in ids.iter().zip(&lease.groups) {
        assert_eq!(**out, group(*id, v(0)));
    }
}

fn finalize_is_idempotent(buffer: &dyn BothSides) {
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

fn an_idempotency_key_stores_a_group_once_without_admission(buffer: &dyn BothSides) {
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

fn a_keyed_group_without_a_free_slot_is_refused_as_full(buffer: &dyn BothSides) {
    generate(buffer, v(0), 3);
    let last = admit(buffer, v(0), 9);
    assert_eq!(buffer.submit("late", group(GroupId(0), v(0))).unwrap().answer, Finalized::Full);
    buffer.abort(last[0], false).unwrap();
    assert_eq!(buffer.submit("late", group(GroupId(0), v(0))).unwrap().answer, Finalized::Accepted);
}

/// Configured with capacity for a few groups.
fn the_limit_of_bytes_refuses_groups_until_some_are_acknowledged(buffer: &dyn BothSides) {
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

fn versions_from_the_future_are_refused(buffer: &dyn BothSides) {
    let from_the_future = |result: Result<(), BufferError>| {
        assert!(
            matches!(result, Err(BufferError::FutureVersion { version, .. }) if version == v(1)),
            "{result:?}"
        );
    };
    let request = AdmitRequest { served: v(1), limit: 1, hold: None, holder: None };
    from_the_future(buffer.admit(request, NOW).map(drop));
    let id = admit(buffer, v(0), 1)[0];
    from_the_future(buffer.claim(id, v(1)));
    from_the_future(buffer.finalize(group(id, v(1))).map(drop));
    from_the_future(buffer.submit("key", group(id, v(1))).map(drop));
    from_the_future(lease(buffer, 1, NOW).map(drop));
    buffer.set_version(v(1), false).unwrap();
    assert_eq!(buffer.finalize(group(id, v(1))).unwrap(), Finalized::Accepted);
    let error = buffer.set_version(v(0), false).unwrap_err();
    assert!(matches!(error, BufferError::VersionBehind { .. }), "{error}");
    buffer.set_version(v(0), true).unwrap();
    assert_eq!(buffer.stats().unwrap().policy_version, v(0));
}

fn an_expired_lease_is_fenced_once_its_groups_are_leased_again(buffer: &dyn BothSides) {
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

fn an_expired_lease_can_be_resumed_before_its_groups_are_leased_again(buffer: &dyn BothSides) {
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

fn an_expired_admission_is_requeued_and_its_late_group_accepted(buffer: &dyn BothSides) {
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
fn what_a_sampler_abandons_is_admitted_again(buffer: &dyn BothSides) {
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

fn several_consumers_share_a_step(buffer: &dyn BothSides) {
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

fn a_lease_is_limited_by_tokens_and_by_available_groups(buffer: &dyn BothSides) {
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

fn a_request_can_have_a_stricter_staleness_bound(buffer: &dyn BothSides) {
    generate(buffer, v(0), 4);
    leased(buffer, 0);
    let fresh = LeaseRequest { max_staleness: Some(0), ..LeaseRequest::step(TRAINER, v(1)) };
    assert!(matches!(buffer.lease(&fresh, NOW), Err(BufferError::LeaseTimeout { .. })));
    assert_eq!(
        buffer.stats().unwrap().dropped_stale,
        0,
        "groups over the bound of one request are not dropped"
    );
    assert_eq!(leased(buffer, 1), [2, 3]);
}

/// Configured with two uses and `OnStale::Drop`.
fn a_group_is_leased_max_uses_times_and_once_a_step(buffer: &dyn BothSides) {
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

/// Configured with [`Order::Recency`].
fn recency_order_leases_the_newest_groups_first(buffer: &dyn BothSides) {
    generate(buffer, v(0), 2);
    buffer.set_version(v(1), false).unwrap();
    let new = generate(buffer, v(1), 2);
    assert_eq!(leased(buffer, 1), new.iter().map(|id| id.0).collect::<Vec<_>>());
}

/// Configured with [`Order::Reward`] at a temperature that leaves nothing to chance.
fn reward_order_leases_the_best_groups_first(buffer: &dyn BothSides) {
    for (n, reward) in [0.25, 1.0, 0.5, 0.75].into_iter().enumerate() {
        let mut group = group(GroupId(0), v(0));
        group.trajectories.iter_mut().for_each(|trajectory| trajectory.score.total = Some(reward));
        buffer.submit(&n.to_string(), group).unwrap();
    }
    let batch = lease(buffer, 0, NOW).unwrap();
    let rewards: Vec<f64> = batch.groups.iter().map(|group| group.rewards().next().unwrap()).collect();
    // The turn of the fixture has a reward of -0.5, which counts in the reward of the trajectory.
    assert_eq!(rewards, [0.5, 0.25]);
}

/// Configured with `dedup`.
fn dedup_drops_stored_trajectories(buffer: &dyn BothSides) {
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

fn one_of_many_simultaneous_finalize_calls_is_accepted(buffer: &dyn BothSides) {
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

fn a_call_in_the_wrong_state_names_the_state(buffer: &dyn BothSides) {
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

fn aborted_groups_free_their_slots_and_are_requeued(buffer: &dyn BothSides) {
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
fn a_slot_is_free_once_the_sampler_serves_the_next_version(buffer: &dyn BothSides) {
    generate(buffer, v(0), 4);
    leased(buffer, 0);
    assert!(admit(buffer, v(0), 1).is_empty(), "its groups would exceed the bound by the lag of the sampler");
    assert_eq!(admit(buffer, v(1), 9).len(), 2);
}

fn fifo_order_leases_the_oldest_groups_first_sorted_by_id(buffer: &dyn BothSides) {
    let ids = admit(buffer, v(0), 4);
    buffer.set_version(v(1), false).unwrap();
    for (id, oldest) in ids.iter().zip([1, 0, 1, 0]) {
        buffer.finalize(group(*id, v(oldest))).unwrap();
    }
    assert_eq!(leased(buffer, 1), [1, 3]);
    assert_eq!(leased(buffer, 2), [0, 2]);
}

fn a_step_gets_the_same_batch_until_it_is_acknowledged(buffer: &dyn BothSides) {
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

fn a_released_lease_can_be_leased_again(buffer: &dyn BothSides) {
    generate(buffer, v(0), 4);
    let (first, second) = (leased(buffer, 0), lease(buffer, 1, NOW).unwrap());
    buffer.release(second.id).unwrap();
    buffer.release(second.id).unwrap();
    let again = lease(buffer, 1, NOW).unwrap();
    assert_eq!(again.groups, second.groups);
    assert_ne!(again.id, second.id);
    assert_eq!(leased(buffer, 0), first);
}

fn calls_on_an_ended_lease_are_idempotent(buffer: &dyn BothSides) {
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

fn impossible_versions_are_refused_and_change_nothing(buffer: &dyn BothSides) {
    generate(buffer, v(0), 2);
    let first = lease(buffer, 0, NOW).unwrap();
    for version in [99_999, u64::MAX].map(v) {
        let error = buffer.ack_through(TRAINER, version).unwrap_err();
        assert!(matches!(error, BufferError::FutureVersion { .. }), "{error}");
        let error = buffer.set_version(version, false).unwrap_err();
        assert!(matches!(error, BufferError::VersionJump { .. }), "{error}");
        let served = AdmitRequest { served: version, limit: 1, hold: None, holder: None };
        assert!(matches!(buffer.admit(served, NOW), Err(BufferError::FutureVersion { .. })));
        let error = buffer.submit("key", group(GroupId(0), version)).unwrap_err();
        assert!(matches!(error, BufferError::FutureVersion { .. }), "{error}");
    }
    assert!(buffer.set_version(v(u64::MAX), true).is_err());
    assert_eq!(lease(buffer, 0, NOW).unwrap(), first);
    buffer.ack_through(TRAINER, v(1)).unwrap();
    assert_eq!(buffer.stats().unwrap().next_step, v(1));
}

fn a_rewound_trainer_gets_its_steps_again_and_nothing_is_dropped(buffer: &dyn BothSides) {
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

/// Configured with `OnStale::Drop`.
fn stale_groups_are_dropped_and_generated_again(buffer: &dyn BothSides) {
    let old = generate(buffer, v(0), 4);
    leased(buffer, 0);
    let new = generate(buffer, v(1), 1);
    assert_eq!(buffer.finalize(group(old[2], v(0))).unwrap(), Finalized::Duplicate);
    // Step 1 was skipped.
    let late = admit(buffer, v(1), 1);
    buffer.set_version(v(3), false).unwrap();
    assert_eq!(buffer.finalize(group(late[0], v(1))).unwrap(), Finalized::Stale);
    let error = lease(buffer, 3, NOW).unwrap_err();
    assert!(matches!(error, BufferError::LeaseTimeout { .. }));
    assert_eq!(buffer.stats().unwrap().dropped_stale, 4);
    let ids = generate(buffer, v(3), 4);
    assert_eq!(ids, [old[2], old[3], new[0], late[0]]);
    let lease = lease(buffer, 3, NOW).unwrap();
    assert_eq!(lease.dropped_stale, 4);
    assert_eq!(*lease.groups[0], group(old[2], v(3)), "the payload is the new one");
}

fn a_lease_timeout_explains_what_is_missing(buffer: &dyn BothSides) {
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

fn a_lease_that_waits_for_slow_groups_is_explained(buffer: &dyn BothSides) {
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

fn waits_end_when_the_other_side_acts(buffer: &dyn BothSides) {
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

/// Samplers and a trainer on threads; the version number stands for the weights.
fn threads_train_every_group_once_and_within_the_bound(buffer: &dyn BothSides) {
    const STEPS: u64 = 30;
    let version = AtomicU64::new(0);
    let mut trained = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while version.load(Ordering::Acquire) < STEPS {
                    let served = v(version.load(Ordering::Acquire));
                    for id in buffer
                        .admit(
                            AdmitRequest { served, limit: 2, hold: None, holder: None },
                            Duration::from_millis(1),
                        )
                        .unwrap()
                    {
                        buffer.claim(id, served).unwrap();
                        assert_eq!(buffer.finalize(group(id, served)).unwrap(), Finalized::Accepted);
                    }
                }
            });
        }
        for step in 0..STEPS {
            let lease = lease(buffer, step, SOON).unwrap();
            assert_eq!(lease.dropped_stale, 0);
            for group in &lease.groups {
                assert!(group.oldest_version().unwrap().staleness_at(v(step)) <= 1);
                trained.push(group.id);
            }
            if step % 3 == 2 {
                buffer.ack_through(TRAINER, v(step + 1)).unwrap();
            }
            version.store(step + 1, Ordering::Release);
        }
    });
    assert_eq!(trained.len() as u64, 2 * STEPS);
    trained.sort_unstable();
    trained.dedup();
    assert_eq!(trained.len() as u64, 2 * STEPS, "a group was trained on twice");
    assert!(buffer.stats().unwrap().leased <= 6, "acknowledged groups are removed");
}

fn synchronous_batches_are_the_tasks_in_order(buffer: &dyn BothSides) {
    for step in 0..3 {
        let mut ids = admit(buffer, v(step), 9);
        ids.reverse();
        for id in &ids {
            buffer.finalize(group(*id, v(step))).unwrap();
        }
        assert!(admit(buffer, v(step), 9).is_empty());
        assert_eq!(leased(buffer, step), [2 * step, 2 * step + 1]);
        assert!(admit(buffer, v(step), 9).is_empty(), "nothing runs ahead of the trainer");
    }
}

/// All cases.
pub(super) const CASES: &[ContractCase] = &[
    case!(a_leased_group_equals_the_finalized_one, config(2, 1)),
    case!(finalize_is_idempotent, config(2, 1)),
    case!(one_of_many_simultaneous_finalize_calls_is_accepted, config(2, 1)),
    case!(a_call_in_the_wrong_state_names_the_state, config(2, 1)),
    case!(aborted_groups_free_their_slots_and_are_requeued, config(2, 1)),
    case!(a_slot_is_free_once_the_sampler_serves_the_next_version, config(2, 1)),
    case!(fifo_order_leases_the_oldest_groups_first_sorted_by_id, config(2, 1)),
    case!(a_step_gets_the_same_batch_until_it_is_acknowledged, config(2, 1)),
    case!(a_released_lease_can_be_leased_again, config(2, 1)),
    case!(calls_on_an_ended_lease_are_idempotent, config(2, 1)),
    case!(impossible_versions_are_refused_and_change_nothing, config(2, 1)),
    case!(a_rewound_trainer_gets_its_steps_again_and_nothing_is_dropped, config(2, 1)),
    case!(an_idempotency_key_stores_a_group_once_without_admission, config(2, 1)),
    case!(a_keyed_group_without_a_free_slot_is_refused_as_full, config(2, 1)),
    case!(
        the_limit_of_bytes_refuses_groups_until_some_are_acknowledged,
        BufferConfig { max_bytes: 4096, ..config(8, 8) }
    ),
    case!(versions_from_the_future_are_refused, config(2, 1)),
    case!(an_expired_lease_is_fenced_once_its_groups_are_leased_again, config(2, 1)),
    case!(an_expired_lease_can_be_resumed_before_its_groups_are_leased_again, config(2, 1)),
    case!(an_expired_admission_is_requeued_and_its_late_group_accepted, config(2, 1)),
    case!(what_a_sampler_abandons_is_admitted_again, config(2, 0)),
    case!(several_consumers_share_a_step, config(2, 1)),
    case!(a_lease_is_limited_by_tokens_and_by_available_groups, config(2, 1)),
    case!(a_request_can_have_a_stricter_staleness_bound, config(2, 1)),
    case!(
        a_group_is_leased_max_uses_times_and_once_a_step,
        BufferConfig { on_stale: OnStale::Drop, max_uses: 2, ..config(2, 3) }
    ),
    case!(
        recency_order_leases_the_newest_groups_first,
        BufferConfig { on_stale: OnStale::Drop, order: Order::Recency, ..config(2, 3) }
    ),
    case!(
        reward_order_leases_the_best_groups_first,
        BufferConfig { on_stale: OnStale::Drop, order: Order::Reward { temperature: 1e-3 }, ..config(2, 3) }
    ),
    case!(dedup_drops_stored_trajectories, BufferConfig { dedup: true, ..config(2, 1) }),
    case!(
        stale_groups_are_dropped_and_generated_again,
        BufferConfig { on_stale: OnStale::Drop, ..config(2, 1) }
    ),
    case!(a_quarantined_group_leaves_its_lease_and_frees_its_slot, config(2, 1)),
    case!(a_lease_timeout_explains_what_is_missing, config(2, 1)),
    case!(a_lease_that_waits_for_slow_groups_is_explained, config(2, 1)),
    case!(waits_end_when_the_other_side_acts, config(2, 1)),
    case!(threads_train_every_group_once_and_within_the_bound, config(2, 1)),
    case!(synchronous_batches_are_the_tasks_in_order, config(2, 0)),
];
