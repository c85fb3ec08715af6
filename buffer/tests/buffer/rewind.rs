//! Going on from an older checkpoint than the last that was acknowledged.

use std::collections::BTreeSet;

use buffer::{Buffer, Consumer, Producer, Rewound};

use super::{NOW, TRAINER, admit, config, generate, group, lease, leased, v};

/// Steps 0 to 3 of two groups, acknowledged through step 2; step 3 is leased, and two more groups are there.
fn four_steps(buffer: &Buffer) -> BTreeSet<u64> {
    let mut trained = BTreeSet::new();
    generate(buffer, v(0), 4);
    for step in 0..4 {
        trained.extend(leased(buffer, step));
        if step < 3 {
            buffer.set_version(v(step + 1), false).unwrap();
            generate(buffer, v(step + 1), 2);
        }
    }
    buffer.ack_through(TRAINER, v(3)).unwrap();
    trained
}

#[test]
fn a_rewind_samples_groups_of_later_versions_again_and_counts_lost_ones() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("buffer.redb");
    let open = || Buffer::open(&path, config(2, 1)).unwrap();
    let first = open();
    four_steps(&first);
    let (stored, next) = (first.stats().unwrap(), first.stats().unwrap().next_id);
    assert_eq!((stored.leased, stored.finalized), (2, 2));
    drop(first);

    // From the checkpoint that was acknowledged, everything is still there.
    let buffer = open();
    assert_eq!(buffer.rewind(TRAINER, v(3)).unwrap(), None);
    assert_eq!(leased(&buffer, 3).len(), 2);

    // Steps 1 and 2 were acknowledged: four groups. Those of step 3 and the two behind it were sampled by versions 2 and 3.
    let rewound = buffer.rewind(TRAINER, v(1)).unwrap().unwrap();
    assert_eq!((rewound.gone, rewound.again, rewound.dropped), (4, 4, 0));
    assert_eq!(buffer.rewind(TRAINER, v(1)).unwrap(), None, "once is enough");
    drop(buffer);
    let buffer = open();
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.policy_version, stats.leased), (v(1), 0));
    assert_eq!((stats.again as u64, stats.finalized as u64), (rewound.again, 4 - rewound.again));
    let left = buffer.lease(&buffer::LeaseRequest::step(TRAINER, v(1)), NOW);
    let of_later = |lease: &buffer::Lease| {
        let samples = lease.groups.iter().flat_map(|group| &group.trajectories).map(|found| &found.sample);
        samples.flat_map(|sample| sample.versions()).any(|run| run.version > v(1))
    };
    assert!(!left.iter().any(of_later));

    // Queued ids come before new ids, and training continues.
    let ids = admit(&buffer, v(1), 2);
    assert!(ids.iter().all(|id| *id < next), "{ids:?}");
    for id in ids {
        buffer.claim(id, v(1)).unwrap();
        buffer.finalize(group(id, v(1))).unwrap();
    }
    assert_eq!(lease(&buffer, 1, NOW).unwrap().groups.len(), 2);
    assert_eq!(buffer.rewind(TRAINER, v(1)).unwrap(), None);

    // Step 3 was leased before the rewind: it gets a batch of its own, since that lease is no longer stored either.
    for step in 2..4 {
        buffer.set_version(v(step), false).unwrap();
        generate(&buffer, v(step), 2);
        assert_eq!(leased(&buffer, step).len(), 2, "step {step}");
    }
}

#[test]
fn a_trainer_that_acknowledged_nothing_loses_nothing() {
    let buffer = Buffer::in_memory(config(2, 1)).unwrap();
    generate(&buffer, v(0), 4);
    let first = leased(&buffer, 0);
    buffer.set_version(v(1), false).unwrap();
    let second = leased(&buffer, 1);
    assert_eq!(buffer.rewind(TRAINER, v(0)).unwrap(), None);
    assert_eq!((leased(&buffer, 0), leased(&buffer, 1)), (first, second));
    assert_eq!(Rewound::default().gone, 0);
}
