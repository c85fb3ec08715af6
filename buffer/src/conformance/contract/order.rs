//! The order in which groups are leased.

use trajectory::GroupId;

use super::super::BothSides;
use super::super::fixtures::{NOW, admit, generate, group, lease, leased, v};

/// Configured with [`Order::Recency`].
pub(super) fn recency_order_leases_the_newest_groups_first(buffer: &dyn BothSides) {
    generate(buffer, v(0), 2);
    buffer.set_version(v(1), false).unwrap();
    let new = generate(buffer, v(1), 2);
    assert_eq!(leased(buffer, 1), new.iter().map(|id| id.0).collect::<Vec<_>>());
}

/// Configured with [`Order::Reward`] at a temperature that leaves nothing to chance.
pub(super) fn reward_order_leases_the_best_groups_first(buffer: &dyn BothSides) {
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

pub(super) fn fifo_order_leases_the_oldest_groups_first_sorted_by_id(buffer: &dyn BothSides) {
    let ids = admit(buffer, v(0), 4);
    buffer.set_version(v(1), false).unwrap();
    for (id, oldest) in ids.iter().zip([1, 0, 1, 0]) {
        buffer.finalize(group(*id, v(oldest))).unwrap();
    }
    assert_eq!(leased(buffer, 1), [1, 3]);
    assert_eq!(leased(buffer, 2), [0, 2]);
}

pub(super) fn synchronous_batches_are_the_tasks_in_order(buffer: &dyn BothSides) {
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
