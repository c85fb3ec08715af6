//! What every buffer must do, whatever it is made of. A new store joins the suite with one line at the end.

use std::sync::atomic::{AtomicU64, Ordering};

use buffer::{BufferConfig, BufferError, Consumer, Finalized, OnStale, Producer};
use trajectory::{Group, GroupId};

use super::{NOW, SOON, config, generate, group, leased, v};

/// Both sides of one buffer.
trait Both: Producer + Consumer {}
impl<T: Producer + Consumer> Both for T {}

fn a_group_comes_out_as_it_went_in(buffer: &impl Both) {
    let ids = generate(buffer, v(0), 2);
    let lease = buffer.lease(v(0), NOW).unwrap();
    assert_eq!((lease.step, lease.dropped_stale), (v(0), 0));
    for (id, out) in ids.iter().zip(&lease.groups) {
        assert_eq!(**out, group(*id, v(0)));
    }
}

fn finalizing_is_idempotent(buffer: &impl Both) {
    let ids = generate(buffer, v(0), 2);
    let again = || buffer.finalize(group(ids[0], v(0))).unwrap();
    assert_eq!(again(), Finalized::Duplicate, "finalized");
    buffer.lease(v(0), NOW).unwrap();
    assert_eq!(again(), Finalized::Duplicate, "leased");
    buffer.ack(v(1)).unwrap();
    assert_eq!(again(), Finalized::Duplicate, "forgotten");
    assert_eq!(buffer.finalize(group(GroupId(99), v(0))).unwrap(), Finalized::Refused, "never admitted");
}

fn one_of_many_simultaneous_calls_is_accepted(buffer: &impl Both) {
    let id = buffer.admit(v(0), 1, NOW).unwrap()[0];
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

fn a_verb_out_of_turn_says_where_the_group_is(buffer: &impl Both) {
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

fn aborted_groups_free_their_slots_and_go_first_in_line(buffer: &impl Both) {
    let ids = buffer.admit(v(0), 9, NOW).unwrap();
    assert_eq!(ids, [0, 1, 2, 3].map(GroupId));
    buffer.claim(ids[2], v(0)).unwrap();
    for (id, retry) in [(ids[2], true), (ids[1], true), (ids[3], false)] {
        buffer.abort(id, retry).unwrap();
    }
    assert_eq!(
        buffer.finalize(group(ids[1], v(0))).unwrap(),
        Finalized::Refused,
        "it will be generated again"
    );
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.again, stats.evicted, stats.slots_free), (2, 1, 3));
    assert_eq!(buffer.admit(v(0), 9, NOW).unwrap(), [1, 2, 4].map(GroupId));
}

/// Two groups a step and a bound of one version: four slots.
fn a_slot_is_free_when_the_sampler_serves_what_the_batch_made(buffer: &impl Both) {
    generate(buffer, v(0), 4);
    leased(buffer, 0);
    assert!(
        buffer.admit(v(0), 1, NOW).unwrap().is_empty(),
        "it would be born stale by the lag of the sampler"
    );
    assert_eq!(buffer.admit(v(1), 9, NOW).unwrap().len(), 2);
}

fn the_oldest_leave_first_and_in_order_of_id(buffer: &impl Both) {
    let ids = buffer.admit(v(0), 4, NOW).unwrap();
    for (id, oldest) in ids.iter().zip([1, 0, 1, 0]) {
        buffer.finalize(group(*id, v(oldest))).unwrap();
    }
    assert_eq!(leased(buffer, 0), [1, 3]);
    assert_eq!(leased(buffer, 1), [0, 2]);
}

fn a_step_gets_its_batch_again_until_it_is_acknowledged(buffer: &impl Both) {
    generate(buffer, v(0), 4);
    let first = buffer.lease(v(0), NOW).unwrap();
    let second = leased(buffer, 1);
    assert_eq!(buffer.lease(v(0), NOW).unwrap(), first);
    assert_eq!(leased(buffer, 1), second);
    buffer.ack(v(1)).unwrap();
    buffer.ack(v(1)).unwrap();
    let error = buffer.lease(v(0), NOW).unwrap_err().to_string();
    assert!(error.contains("groups of steps before v1 were forgotten"), "{error}");
    assert_eq!(leased(buffer, 1), second);
    assert_eq!(buffer.stats().unwrap().leased, 2);
}

fn the_newest_lease_can_be_released(buffer: &impl Both) {
    generate(buffer, v(0), 4);
    let (first, second) = (leased(buffer, 0), leased(buffer, 1));
    assert!(matches!(buffer.release(v(0)), Err(BufferError::NotNewestLease { .. })));
    buffer.release(v(1)).unwrap();
    assert_eq!(leased(buffer, 1), second);
    assert_eq!(leased(buffer, 0), first);
}

/// Set up with `OnStale::Drop`.
fn what_is_over_the_bound_is_dropped_and_generated_again(buffer: &impl Both) {
    let old = generate(buffer, v(0), 4);
    leased(buffer, 0);
    let new = generate(buffer, v(1), 2);
    assert_eq!(buffer.finalize(group(old[2], v(0))).unwrap(), Finalized::Duplicate);
    // Step 1 was skipped, so that groups 2 and 3 are two versions old.
    let error = buffer.lease(v(3), NOW).unwrap_err();
    assert!(matches!(error, BufferError::LeaseTimeout { .. }));
    assert_eq!(buffer.stats().unwrap().dropped_stale, 4);
    let ids = generate(buffer, v(3), 4);
    assert_eq!(ids, [old[2], old[3], new[0], new[1]]);
    let lease = buffer.lease(v(3), NOW).unwrap();
    assert_eq!(*lease.groups[0], group(old[2], v(3)), "the payload is the new one");
}

fn who_waits_for_whom_is_said(buffer: &impl Both) {
    generate(buffer, v(0), 1);
    let ids = buffer.admit(v(0), 2, NOW).unwrap();
    buffer.claim(ids[1], v(1)).unwrap();
    let error = buffer.lease(v(0), NOW).unwrap_err().to_string();
    assert_eq!(
        error,
        "no batch for the step from v0 within 0.0 s: 1 groups finalized, 1 claimed, 1 admitted, 0 to be done again; \
         1 of 4 slots free for a sampler that serves v0; oldest in flight: group 1 since v0, group 2 since v1; the \
         trainer waits for the samplers: see why the oldest in flight are slow, or give rollout more devices"
    );
}

fn a_held_batch_is_explained(buffer: &impl Both) {
    let ids = buffer.admit(v(0), 4, NOW).unwrap();
    for id in &ids[1..] {
        buffer.finalize(group(*id, v(0))).unwrap();
    }
    leased(buffer, 0);
    generate(buffer, v(1), 2);
    let error = buffer.lease(v(1), NOW).unwrap_err().to_string();
    assert!(error.contains("oldest in flight: group 0 since v0; a batch is held back"), "{error}");
    buffer.finalize(group(ids[0], v(0))).unwrap();
    assert_eq!(leased(buffer, 1), [0, 3]);
}

fn waiting_ends_when_the_other_side_acts(buffer: &impl Both) {
    std::thread::scope(|scope| {
        let lease = scope.spawn(|| buffer.lease(v(0), SOON).unwrap());
        let ids = buffer.admit(v(0), 4, NOW).unwrap();
        let admit = scope.spawn(|| buffer.admit(v(0), 1, SOON).unwrap());
        for id in &ids[..2] {
            buffer.finalize(group(*id, v(0))).unwrap();
        }
        assert_eq!(lease.join().unwrap().groups.len(), 2);
        buffer.abort(ids[2], true).unwrap();
        assert_eq!(admit.join().unwrap(), [ids[2]]);
    });
}

/// Samplers and a trainer on threads; the version stands in for the weights.
fn threads_train_every_group_once_and_within_the_bound(buffer: &impl Both) {
    const STEPS: u64 = 30;
    let version = AtomicU64::new(0);
    let mut trained = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while version.load(Ordering::Acquire) < STEPS {
                    let served = v(version.load(Ordering::Acquire));
                    for id in buffer.admit(served, 2, std::time::Duration::from_millis(1)).unwrap() {
                        buffer.claim(id, served).unwrap();
                        assert_eq!(buffer.finalize(group(id, served)).unwrap(), Finalized::Accepted);
                    }
                }
            });
        }
        for step in 0..STEPS {
            let lease = buffer.lease(v(step), SOON).unwrap();
            assert_eq!(lease.dropped_stale, 0);
            for group in &lease.groups {
                assert!(group.oldest_version().unwrap().staleness_at(v(step)) <= 1);
                trained.push(group.id);
            }
            if step % 3 == 2 {
                buffer.ack(v(step + 1)).unwrap();
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

fn synchronous_batches_are_the_tasks_in_order(buffer: &impl Both) {
    for step in 0..3 {
        let mut ids = buffer.admit(v(step), 9, NOW).unwrap();
        ids.reverse();
        for id in &ids {
            buffer.finalize(group(*id, v(step))).unwrap();
        }
        assert!(buffer.admit(v(step), 9, NOW).unwrap().is_empty());
        assert_eq!(leased(buffer, step), [2 * step, 2 * step + 1]);
        assert!(buffer.admit(v(step), 9, NOW).unwrap().is_empty(), "nothing runs ahead of the trainer");
    }
}

macro_rules! suite {
    ($($name:ident: $config:expr;)*) => {
        mod memory {
            use super::*;
            $(#[test] fn $name() { super::$name(&buffer::Memory::new($config).unwrap()); })*
        }
        mod journal {
            use super::*;
            $(#[test] fn $name() {
                let directory = tempfile::tempdir().unwrap();
                super::$name(&buffer::Journal::open(directory.path().join("buffer.redb"), $config).unwrap());
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
    the_newest_lease_can_be_released: config(2, 1);
    what_is_over_the_bound_is_dropped_and_generated_again:
        BufferConfig { on_stale: OnStale::Drop, ..config(2, 1) };
    who_waits_for_whom_is_said: config(2, 1);
    a_held_batch_is_explained: config(2, 1);
    waiting_ends_when_the_other_side_acts: config(2, 1);
    threads_train_every_group_once_and_within_the_bound: config(2, 1);
    synchronous_batches_are_the_tasks_in_order: config(2, 0);
}
