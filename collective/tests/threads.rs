//! Ranks that are threads.

use std::thread;
use std::time::Duration;

use collective::threads::{Threads, group};
use collective::{Collective, CollectiveError, HostCollective};

use crate::suite;

/// Against hangs only.
const LONG: Duration = Duration::from_secs(60);
/// Of tests that wait for it to pass.
const SHORT: Duration = Duration::from_millis(50);

/// What every rank gets, in order of rank.
fn on_all<R: Send>(ranks: Vec<Threads>, work: impl Fn(Threads) -> R + Sync) -> Vec<R> {
    let work = &work;
    thread::scope(|scope| {
        let ranks: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || work(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect()
    })
}

#[test]
fn threads_conform() {
    for world in [1, 2, 3, 4] {
        on_all(group(world, LONG), |rank| suite::conforms(&rank));
    }
}

#[test]
fn a_rank_that_is_dropped_wakes_the_others() {
    let errors = on_all(group(3, LONG), |rank| match rank.rank() {
        1 => None,
        // One waits for a command, which has no deadline, the other in a sum.
        0 => Some(rank.barrier().expect_err("rank 1 is gone")),
        _ => Some(rank.broadcast_bytes(1, Vec::new()).expect_err("rank 1 is gone")),
    });
    for error in errors.iter().flatten() {
        assert!(error.to_string().contains("rank 1 is gone"), "{error}");
    }
    assert_eq!(errors.iter().flatten().count(), 2);
}

#[test]
fn a_rank_that_panics_wakes_the_others() {
    let mut ranks = group(2, LONG);
    let panics = ranks.pop().expect("two ranks");
    let panics = thread::spawn(move || {
        let _rank = panics;
        panic!("a panic that the test wants");
    });
    let error = ranks[0].barrier().expect_err("rank 1 has panicked");
    assert!(matches!(error, CollectiveError::Gone { rank: 0, peer: 1, operation: "barrier" }), "{error}");
    panics.join().expect_err("it has panicked");
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    let ranks = group(3, SHORT);
    let (late, waiting) = (&ranks[2], [&ranks[0], &ranks[1]]);
    let errors: Vec<_> = thread::scope(|scope| {
        let waiting = waiting.map(|rank| {
            scope.spawn(|| {
                let mut own = [0.0];
                rank.reduce_scatter(&[1.0, 2.0, 3.0], &[0..1, 1..2, 2..3], &mut own)
                    .expect_err("rank 2 is late")
            })
        });
        waiting.into_iter().map(|rank| rank.join().expect("an error, no panic")).collect()
    });
    for error in &errors {
        assert!(error.to_string().contains("0.05 s for rank 2 in `reduce_scatter`"), "{error}");
    }
    let error = late.barrier().expect_err("the others have given up");
    assert!(matches!(error, CollectiveError::GivenUp { rank: 2, .. }), "{error}");
}

#[test]
fn a_command_may_take_longer_than_the_deadline() {
    let ranks = group(2, SHORT);
    thread::scope(|scope| {
        let follower = scope.spawn(|| ranks[1].broadcast_bytes(0, Vec::new()));
        thread::sleep(SHORT * 3);
        ranks[0].broadcast_bytes(0, vec![1, 2, 3]).expect("the follower waits");
        assert_eq!(follower.join().expect("no panic").expect("a command"), [1, 2, 3]);
    });
}

#[test]
fn ranks_that_do_different_things_are_named() {
    let errors = on_all(group(2, LONG), |rank| {
        let (own, shards) = ([1.0, 2.0], if rank.rank() == 0 { [0..2, 2..4] } else { [0..1, 1..3] });
        rank.all_gather(&own[..shards[rank.rank()].len()], &shards, &mut vec![0.0; shards[1].end])
            .expect_err("the shards differ")
            .to_string()
    });
    // The second rank of the call finds the difference.
    let of = ["of [0..2, 2..4]", "of [0..1, 1..3]"];
    assert!(errors.iter().any(|error| of.iter().any(|of| error.contains(of))), "{errors:?}");
    assert!(errors.iter().all(|error| error.contains("`all_gather`")), "{errors:?}");
}

#[test]
fn the_ranks_of_a_part_end_without_the_others() {
    let errors = on_all(group(4, LONG), |rank| {
        let part = rank.split(rank.rank() / 2).expect("splits");
        let error = (rank.rank() == 2).then(|| part.barrier().expect_err("rank 3 is gone").to_string());
        if rank.rank() < 2 {
            part.barrier().expect("both come");
        }
        drop(part);
        rank.barrier().expect("all come");
        error
    });
    let text = errors[2].as_deref().expect("rank 2 waited");
    assert!(text.contains("among ranks [2, 3]") && text.contains("rank 1 is gone"), "{text}");
}
