//! What every buffer must do, whatever it is made of. A new store joins the suite with one line at the end.

mod quarantine;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use buffer::{
    AdmitRequest, BufferConfig, BufferError, Consumer, Finalized, LeaseId, LeaseRequest, OnStale, Order,
    Producer,
};
use quarantine::what_cannot_be_trained_on_leaves_its_lease_and_its_slot;
use trajectory::{Group, GroupId, Trajectory};

use super::{NOW, SOON, TRAINER, admit, config, generate, group, lease, leased, v};

/// A hold that ends at once, and that a server also accepts.
const HOLD: Duration = Duration::from_millis(100);

/// Both sides of one buffer.
trait ProducerAndConsumer: Producer + Consumer {}
impl<T: Producer + Consumer> ProducerAndConsumer for T {}

fn a_group_comes_out_as_it_went_in(buffer: &impl ProducerAndConsumer) {
    let ids = generate(buffer, v(0), 2);
    let lease = lease(buffer, 0, NOW).unwrap();
    assert_eq!((lease.step, lease.dropped_stale), (v(0), 0));
    for (id, out) in ids.iter().zip(&lease.groups) {
        assert_eq!(**out, group(*id, v(0)));
    }
}

fn finalizing_is_idempotent(buffer: &impl ProducerAndConsumer) {
    let ids = generate(buffer, v(0), 2);
    let again = || buffer.finalize(group(ids[0], v(0))).unwrap();
    assert_eq!(again(), Finalized::Duplicate, "finalized");
    lease(buffer, 0, NOW).unwrap();
    assert_eq!(again(), Finalized::Duplicate, "leased");
    buffer.ack_through(TRAINER, v(1)).unwrap();
    assert_eq!(again(), Finalized::Duplicate, "forgotten");
    let error = buffer.finalize(group(GroupId(99), v(0))).unwrap_err().to_string();
    assert!(error.starts_with("group 99 was never admitted, the next one is group 2: ask"), "{error}");
}

fn groups_with_a_key_need_no_admission_and_are_taken_once(buffer: &impl ProducerAndConsumer) {
    let foreign = group(GroupId(0), v(0));
    let first = buffer.submit("mine/1", foreign.clone()).unwrap();
    assert_eq!(first.answer, Finalized::Accepted);
    let again = buffer.submit("mine/1", foreign.clone()).unwrap();
    assert_eq!((again.answer, again.group), (Finalized::Duplicate, first.group));
    let admitted = generate(buffer, v(0), 1)[0];
    assert_ne!(Some(admitted), first.group, "ids of admissions are never those of keys");
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

fn without_a_slot_a_group_with_a_key_finds_the_buffer_full(buffer: &impl ProducerAndConsumer) {
    generate(buffer, v(0), 3);
    let last = admit(buffer, v(0), 9);
    assert_eq!(buffer.submit("late", group(GroupId(0), v(0))).unwrap().answer, Finalized::Full);
    buffer.abort(last[0], false).unwrap();
    assert_eq!(buffer.submit("late", group(GroupId(0), v(0))).unwrap().answer, Finalized::Accepted);
}

/// Set up with room for the bytes of a few groups.
fn a_buffer_that_is_full_of_bytes_admits_nothing(buffer: &impl ProducerAndConsumer) {
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

fn nothing_comes_from_the_future(buffer: &impl ProducerAndConsumer) {
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

fn the_groups_of_a_consumer_that_is_gone_go_to_others(buffer: &impl ProducerAndConsumer) {
    let ids = generate(buffer, v(0), 2);
    let short = Some(HOLD);
    let gone = LeaseRequest { hold: short, ..LeaseRequest::step("gone", v(0)) };
    let lost = buffer.lease(&gone, NOW).unwrap();
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

fn a_lease_that_nobody_took_over_can_be_taken_up_again(buffer: &impl ProducerAndConsumer) {
    generate(buffer, v(0), 2);
    let request = LeaseRequest { hold: Some(HOLD), ..LeaseRequest::step("late", v(0)) };
    let first = buffer.lease(&request, NOW).unwrap();
    wait_for_expiry(buffer);
    assert_eq!(buffer.stats().unwrap().finalized, 2, "others could have them");
    assert_eq!(buffer.lease(&request, NOW).unwrap(), first, "the same groups in the same order");
    wait_for_expiry(buffer);
    buffer.extend(first.id, SOON).unwrap();
    assert_eq!(buffer.stats().unwrap().finalized, 0);
    buffer.ack(first.id).unwrap();
    assert_eq!(buffer.stats().unwrap().leased, 0);
}

fn an_admission_that_is_over_goes_first_in_line_and_is_still_taken(buffer: &impl ProducerAndConsumer) {
    let request = AdmitRequest { served: v(0), limit: 2, hold: Some(HOLD), holder: None };
    let ids = buffer.admit(request, NOW).unwrap();
    buffer.claim(ids[0], v(0)).unwrap();
    wait_for_expiry(buffer);
    assert_eq!(buffer.finalize(group(ids[1], v(0))).unwrap(), Finalized::Accepted, "late, but it has room");
    assert_eq!(admit(buffer, v(0), 2), [ids[0], GroupId(2)]);
}

/// Waits until a hold is over, as a lease does that could have its groups then; it takes none itself.
fn wait_for_expiry(buffer: &impl ProducerAndConsumer) {
    let before = buffer.stats().unwrap().expired;
    let nothing = LeaseRequest {
        groups: Some(usize::MAX),
        at_least: Some(usize::MAX),
        step: None,
        ..LeaseRequest::step("nobody", v(0))
    };
    while buffer.stats().unwrap().expired == before {
        let error = buffer.lease(&nothing, HOLD).unwrap_err();
        assert!(matches!(error, BufferError::LeaseTimeout { .. }), "{error}");
    }
}

fn several_consumers_share_a_step(buffer: &impl ProducerAndConsumer) {
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

fn a_lease_can_be_cut_by_tokens_and_by_what_is_there(buffer: &impl ProducerAndConsumer) {
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

fn a_request_can_be_stricter_than_the_buffer(buffer: &impl ProducerAndConsumer) {
    generate(buffer, v(0), 4);
    leased(buffer, 0);
    let fresh = LeaseRequest { max_staleness: Some(0), ..LeaseRequest::step(TRAINER, v(1)) };
    assert!(matches!(buffer.lease(&fresh, NOW), Err(BufferError::LeaseTimeout { .. })));
    assert_eq!(buffer.stats().unwrap().dropped_stale, 0, "what is too old for one is not dropped for all");
    assert_eq!(leased(buffer, 1), [2, 3]);
}

/// Set up with two uses and `OnStale::Drop`.
fn a_group_is_used_as_often_as_allowed_and_once_a_step(buffer: &impl ProducerAndConsumer) {
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

/// Set up with [`Order::Recency`].
fn the_newest_leave_first_in_order_of_recency(buffer: &impl ProducerAndConsumer) {
    generate(buffer, v(0), 2);
    buffer.set_version(v(1), false).unwrap();
    let new = generate(buffer, v(1), 2);
    assert_eq!(leased(buffer, 1), new.iter().map(|id| id.0).collect::<Vec<_>>());
}

/// Set up with [`Order::Reward`] at a temperature that leaves nothing to chance.
fn the_best_leave_first_in_order_of_reward(buffer: &impl ProducerAndConsumer) {
    for (n, reward) in [0.25, 1.0, 0.5, 0.75].into_iter().enumerate() {
        let mut group = group(GroupId(0), v(0));
        group.trajectories.iter_mut().for_each(|trajectory| trajectory.score.total = Some(reward));
        buffer.submit(&n.to_string(), group).unwrap();
    }
    let batch = lease(buffer, 0, NOW).unwrap();
    let rewards: Vec<f64> = batch.groups.iter().map(|group| group.rewards().next().unwrap()).collect();
    assert_eq!(rewards, [1.0, 0.75]);
}

/// Set up with `dedup`.
fn what_is_there_already_is_left_out(buffer: &impl ProducerAndConsumer) {
    let twice = group(GroupId(0), v(0));
    assert_eq!(buffer.submit("a", twice.clone()).unwrap().answer, Finalized::Accepted);
    assert_eq!(buffer.submit("b", twice.clone()).unwrap().answer, Finalized::Duplicate, "all of it is there");
    let mut other_task = twice.clone();
    other_task.task.id.0 += 1;
    assert_eq!(buffer.submit("c", other_task).unwrap().answer, Finalized::Accepted);
    let batch = lease(buffer, 0, NOW).unwrap();
    assert_eq!(batch.groups[0].trajectories, twice.trajectories[..1], "its two trajectories were the same");
    buffer.ack(batch.id).unwrap();
    assert_eq!(buffer.submit("d", twice).unwrap().answer, Finalized::Accepted, "it is not there any more");
}

fn one_of_many_simultaneous_calls_is_accepted(buffer: &impl ProducerAndConsumer) {
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

fn a_verb_out_of_turn_says_where_the_group_is(buffer: &impl ProducerAndConsumer) {
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

fn aborted_groups_free_their_slots_and_go_first_in_line(buffer: &impl ProducerAndConsumer) {
    let ids = admit(buffer, v(0), 9);
    assert_eq!(ids, [0, 1, 2, 3].map(GroupId));
    buffer.claim(ids[2], v(0)).unwrap();
    for (id, retry) in [(ids[2], true), (ids[1], true), (ids[3], false)] {
        buffer.abort(id, retry).unwrap();
    }
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.again, stats.evicted, stats.slots_free), (2, 1, 3));
    assert_eq!(buffer.finalize(group(ids[3], v(0))).unwrap(), Finalized::Duplicate, "aborted for good");
    assert_eq!(buffer.finalize(group(ids[1], v(0))).unwrap(), Finalized::Accepted, "it has room after all");
    assert_eq!(admit(buffer, v(0), 9), [2, 4].map(GroupId));
}

/// Two groups a step and a bound of one version: four slots.
fn a_slot_is_free_when_the_sampler_serves_what_the_batch_made(buffer: &impl ProducerAndConsumer) {
    generate(buffer, v(0), 4);
    leased(buffer, 0);
    assert!(admit(buffer, v(0), 1).is_empty(), "it would be born stale by the lag of the sampler");
    assert_eq!(admit(buffer, v(1), 9).len(), 2);
}

fn the_oldest_leave_first_and_in_order_of_id(buffer: &impl ProducerAndConsumer) {
    let ids = admit(buffer, v(0), 4);
    buffer.set_version(v(1), false).unwrap();
    for (id, oldest) in ids.iter().zip([1, 0, 1, 0]) {
        buffer.finalize(group(*id, v(oldest))).unwrap();
    }
    assert_eq!(leased(buffer, 1), [1, 3]);
    assert_eq!(leased(buffer, 2), [0, 2]);
}

fn a_step_gets_its_batch_again_until_it_is_acknowledged(buffer: &impl ProducerAndConsumer) {
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

fn a_lease_can_be_released(buffer: &impl ProducerAndConsumer) {
    generate(buffer, v(0), 4);
    let (first, second) = (leased(buffer, 0), lease(buffer, 1, NOW).unwrap());
    buffer.release(second.id).unwrap();
    buffer.release(second.id).unwrap();
    let again = lease(buffer, 1, NOW).unwrap();
    assert_eq!(again.groups, second.groups);
    assert_ne!(again.id, second.id);
    assert_eq!(leased(buffer, 0), first);
}

fn a_lease_that_ended_answers_the_same_however_often_it_is_asked(buffer: &impl ProducerAndConsumer) {
    generate(buffer, v(0), 4);
    let released = lease(buffer, 0, NOW).unwrap();
    buffer.release(released.id).unwrap();
    let acked = buffer.lease(&LeaseRequest::step("other", v(0)), NOW).unwrap();
    assert_eq!(acked.groups, released.groups, "others have them now");
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
    let gone = LeaseRequest { hold: Some(HOLD), ..LeaseRequest::step("gone", v(1)) };
    let lost = buffer.lease(&gone, NOW).unwrap();
    buffer.lease(&LeaseRequest::step("other", v(1)), SOON).unwrap();
    for _ in 0..2 {
        let error = buffer.ack_through("gone", v(2)).unwrap_err();
        assert!(matches!(error, BufferError::LeaseLost { lease } if lease == lost.id), "{error}");
        assert!(matches!(buffer.ack(lost.id), Err(BufferError::LeaseLost { .. })));
    }
}

fn a_version_that_nobody_made_is_refused_and_changes_nothing(buffer: &impl ProducerAndConsumer) {
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

fn a_trainer_that_goes_back_gets_its_steps_again_and_nothing_is_dropped(buffer: &impl ProducerAndConsumer) {
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

/// Set up with `OnStale::Drop`.
fn what_is_over_the_bound_is_dropped_and_generated_again(buffer: &impl ProducerAndConsumer) {
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

fn who_waits_for_whom_is_said(buffer: &impl ProducerAndConsumer) {
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

fn a_held_batch_is_explained(buffer: &impl ProducerAndConsumer) {
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

fn waiting_ends_when_the_other_side_acts(buffer: &impl ProducerAndConsumer) {
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

/// Samplers and a trainer on threads; the version stands in for the weights.
fn threads_train_every_group_once_and_within_the_bound(buffer: &impl ProducerAndConsumer) {
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
    assert!(buffer.stats().unwrap().leased <= 6, "acknowledged groups are forgotten");
}

fn synchronous_batches_are_the_tasks_in_order(buffer: &impl ProducerAndConsumer) {
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

macro_rules! suite {
    ($($name:ident: $config:expr;)*) => {
        mod memory {
            use super::*;
            $(#[test] fn $name() { super::$name(&buffer::Buffer::in_memory($config).unwrap()); })*
        }
        mod journal {
            use super::*;
            $(#[test] fn $name() {
                let directory = tempfile::tempdir().unwrap();
                super::$name(&buffer::Buffer::open(directory.path().join("buffer.redb"), $config).unwrap());
            })*
        }
        mod served {
            use super::*;
            $(#[test] fn $name() {
                let directory = tempfile::tempdir().unwrap();
                super::$name(&crate::served::TestServer::journal(&directory, $config).client());
            })*
        }
    };
}

suite! {
    a_group_comes_out_as_it_went_in: config(2, 1);
    finalizing_is_idempotent: config(2, 1);
    one_of_many_simultaneous_calls_is_accepted: config(2, 1);
    a_verb_out_of_turn_says_where_the_group_is: config(2, 1);
    aborted_groups_free_their_slots_and_go_first_in_line: config(2, 1);
    a_slot_is_free_when_the_sampler_serves_what_the_batch_made: config(2, 1);
    the_oldest_leave_first_and_in_order_of_id: config(2, 1);
    a_step_gets_its_batch_again_until_it_is_acknowledged: config(2, 1);
    a_lease_can_be_released: config(2, 1);
    a_lease_that_ended_answers_the_same_however_often_it_is_asked: config(2, 1);
    a_version_that_nobody_made_is_refused_and_changes_nothing: config(2, 1);
    a_trainer_that_goes_back_gets_its_steps_again_and_nothing_is_dropped: config(2, 1);
    groups_with_a_key_need_no_admission_and_are_taken_once: config(2, 1);
    without_a_slot_a_group_with_a_key_finds_the_buffer_full: config(2, 1);
    a_buffer_that_is_full_of_bytes_admits_nothing: BufferConfig { max_bytes: 4096, ..config(8, 8) };
    nothing_comes_from_the_future: config(2, 1);
    the_groups_of_a_consumer_that_is_gone_go_to_others: config(2, 1);
    a_lease_that_nobody_took_over_can_be_taken_up_again: config(2, 1);
    an_admission_that_is_over_goes_first_in_line_and_is_still_taken: config(2, 1);
    several_consumers_share_a_step: config(2, 1);
    a_lease_can_be_cut_by_tokens_and_by_what_is_there: config(2, 1);
    a_request_can_be_stricter_than_the_buffer: config(2, 1);
    a_group_is_used_as_often_as_allowed_and_once_a_step:
        BufferConfig { on_stale: OnStale::Drop, max_uses: 2, ..config(2, 3) };
    the_newest_leave_first_in_order_of_recency:
        BufferConfig { on_stale: OnStale::Drop, order: Order::Recency, ..config(2, 3) };
    the_best_leave_first_in_order_of_reward:
        BufferConfig { on_stale: OnStale::Drop, order: Order::Reward { temperature: 1e-3 }, ..config(2, 3) };
    what_is_there_already_is_left_out: BufferConfig { dedup: true, ..config(2, 1) };
    what_is_over_the_bound_is_dropped_and_generated_again:
        BufferConfig { on_stale: OnStale::Drop, ..config(2, 1) };
    what_cannot_be_trained_on_leaves_its_lease_and_its_slot: config(2, 1);
    who_waits_for_whom_is_said: config(2, 1);
    a_held_batch_is_explained: config(2, 1);
    waiting_ends_when_the_other_side_acts: config(2, 1);
    threads_train_every_group_once_and_within_the_bound: config(2, 1);
    synchronous_batches_are_the_tasks_in_order: config(2, 0);
}
