//! Policy versions and the staleness bound.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use trajectory::GroupId;

use super::super::BothSides;
use super::super::fixtures::{NOW, SOON, TRAINER, admit, generate, group, lease, leased, v};
use crate::{AdmitRequest, BufferError, Finalized, LeaseRequest};

pub(super) fn versions_from_the_future_are_refused(buffer: &dyn BothSides) {
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

pub(super) fn a_request_can_have_a_stricter_staleness_bound(buffer: &dyn BothSides) {
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

pub(super) fn impossible_versions_are_refused_and_change_nothing(buffer: &dyn BothSides) {
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

/// Configured with `OnStale::Drop`.
pub(super) fn stale_groups_are_dropped_and_generated_again(buffer: &dyn BothSides) {
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

/// Samplers and a trainer on threads; the version number stands for the weights.
pub(super) fn threads_train_every_group_once_and_within_the_bound(buffer: &dyn BothSides) {
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
