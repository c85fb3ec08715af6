//! Rounds, members and files of a coordinator, without a network.

use std::time::Duration;

use islands::coordinator::{ContributionOutcome, IslandJoin, JoinAnswer, JoinedState, RoundAnswer};
use islands::frame::{RoundMessage, to_bytes};
use islands::{Coordinator, CoordinatorConfig, GradientCompression, IslandTerms};

use super::{SOON, config, open, run, terms, values};

const NONE: GradientCompression = GradientCompression::None;

fn join(coordinator: &Coordinator, name: &str, run: &str, terms: &IslandTerms) -> JoinAnswer {
    let (name, run, terms) = (name.to_owned(), run.to_owned(), terms.clone());
    coordinator.join(IslandJoin { name, run, terms, state: None }).unwrap()
}

/// A coordinator with outer weights of 0 and islands `a` and `b`, whose first round waits for both, and the ids of their runs.
fn two(dir: &std::path::Path, deadline: Duration) -> (Coordinator, [String; 2], IslandTerms) {
    let config = CoordinatorConfig { first_islands: 2, ..config(dir, deadline) };
    let (coordinator, runs, terms) = (Coordinator::open(config).unwrap(), [run(), run()], terms(4, 1, NONE));
    assert_eq!(join(&coordinator, "a", &runs[0], &terms).coordinator, "");
    coordinator.begin("a", &runs[0], terms.clone(), &to_bytes(&[0.0; 4])).unwrap();
    assert_eq!(join(&coordinator, "b", &runs[1], &terms).islands, 2);
    (coordinator, runs, terms)
}

fn gradient(round: u64, values: [f32; 4]) -> RoundMessage {
    RoundMessage { round, islands: 1, payload: to_bytes(&values) }
}

fn newest(coordinator: &Coordinator) -> RoundMessage {
    RoundMessage::from_frame(coordinator.weights().unwrap().to_vec()).unwrap()
}

fn weights(coordinator: &Coordinator) -> Vec<f32> {
    values(&newest(coordinator).payload)
}

#[test]
fn a_round_closes_with_the_last_island_and_its_mean_does_not_depend_on_the_order() {
    let gradients = [[0.1, 1e8, 3.0, 0.0], [0.7, -1.0, -3.0, 1e-8]];
    let results = [[0, 1], [1, 0]].map(|order| {
        let dir = tempfile::tempdir().unwrap();
        let (coordinator, runs, _) = two(dir.path(), SOON);
        for (already, index) in order.into_iter().enumerate() {
            assert_eq!(coordinator.round(0), Ok(RoundAnswer::Open), "{already} of 2");
            let (name, message) = (["a", "b"][index], gradient(0, gradients[index]));
            let outcome = coordinator.contribute(name, &runs[index], &message).unwrap();
            assert_eq!(outcome, ContributionOutcome::Counted);
        }
        let RoundAnswer::Closed(update) = coordinator.round(0).unwrap() else { panic!("it is open") };
        let update = RoundMessage::from_frame(update.to_vec()).unwrap();
        assert_eq!((update.round, update.islands), (0, 2));
        weights(&coordinator).into_iter().map(f32::to_bits).collect::<Vec<_>>()
    });
    assert_eq!(results[0], results[1]);
}

#[test]
fn a_repeated_contribution_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, b], _) = two(dir.path(), SOON);
    for _ in 0..3 {
        coordinator.contribute("a", &a, &gradient(0, [1.0; 4])).unwrap();
    }
    coordinator.contribute("b", &b, &gradient(0, [3.0; 4])).unwrap();
    assert_eq!(weights(&coordinator), [-2.0; 4]);
    // After the round has closed too.
    let again = coordinator.contribute("a", &a, &gradient(0, [1.0; 4])).unwrap();
    assert_eq!(again, ContributionOutcome::Counted);
    assert_eq!((weights(&coordinator), newest(&coordinator).round), (vec![-2.0; 4], 1));
}

#[test]
fn what_was_acknowledged_survives_and_the_round_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, b], terms) = two(dir.path(), SOON);
    coordinator.contribute("a", &a, &gradient(0, [1.0; 4])).unwrap();
    let other = Coordinator::open(config(dir.path(), SOON)).unwrap_err();
    assert!(other.to_string().contains("another coordinator has it open"), "{other}");
    drop(coordinator);
    let coordinator = open(dir.path(), SOON);
    let id = join(&coordinator, "b", &b, &terms).coordinator;
    coordinator.contribute("b", &b, &gradient(0, [3.0; 4])).unwrap();
    assert_eq!(weights(&coordinator), [-2.0; 4]);
    drop(coordinator);
    let coordinator = open(dir.path(), SOON);
    assert_eq!((weights(&coordinator), join(&coordinator, "a", &a, &terms).coordinator), (vec![-2.0; 4], id));
    // The update of the round is there for an island that did not get it.
    assert!(matches!(coordinator.round(0), Ok(RoundAnswer::Closed(_))));
    let state = dir.path().join("state.bin");
    drop(coordinator);
    let mut bytes = std::fs::read(&state).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&state, bytes).unwrap();
    let damaged = Coordinator::open(config(dir.path(), SOON)).unwrap_err();
    assert!(damaged.to_string().contains("is damaged"), "{damaged}");
}

#[test]
fn an_island_that_is_late_takes_the_newest_weights_and_the_others_did_not_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, b], _) = two(dir.path(), Duration::ZERO);
    coordinator.contribute("a", &a, &gradient(0, [1.0; 4])).unwrap();
    coordinator.close_if_due().unwrap();
    // Of round 1 `b` is no longer expected.
    coordinator.contribute("a", &a, &gradient(1, [1.0; 4])).unwrap();
    assert_eq!((weights(&coordinator), newest(&coordinator).round), (vec![-2.0; 4], 2));
    let late = coordinator.contribute("b", &b, &gradient(0, [100.0; 4])).unwrap();
    assert_eq!((late, weights(&coordinator)), (ContributionOutcome::Late, vec![-2.0; 4]));
    // Now it is: round 2 waits for both.
    coordinator.contribute("a", &a, &gradient(2, [1.0; 4])).unwrap();
    assert_eq!(coordinator.round(2), Ok(RoundAnswer::Open));
    coordinator.contribute("b", &b, &gradient(2, [3.0; 4])).unwrap();
    assert_eq!(weights(&coordinator), [-4.0; 4]);
}

#[test]
fn an_outer_gradient_that_is_being_received_holds_the_round_open() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, b], terms) = two(dir.path(), Duration::ZERO);
    let join_answer = join(&coordinator, "b", &b, &terms);
    assert!(join_answer.deadline_s > 0.0, "an island must wait for longer than the deadline");
    let (coming, stranger) = (coordinator.expect("b", &b), coordinator.expect("c", &run()));
    coordinator.contribute("a", &a, &gradient(0, [1.0; 4])).unwrap();
    coordinator.close_if_due().unwrap();
    assert_eq!(coordinator.round(0), Ok(RoundAnswer::Open));
    coordinator.contribute("b", &b, &gradient(0, [3.0; 4])).unwrap();
    assert_eq!(weights(&coordinator), [-2.0; 4], "both, and not the one that has not joined");
    drop((coming, stranger));
    // One that ends without an outer gradient is not waited for any longer.
    let coming = coordinator.expect("b", &b);
    coordinator.contribute("a", &a, &gradient(1, [1.0; 4])).unwrap();
    coordinator.close_if_due().unwrap();
    assert_eq!(coordinator.round(1), Ok(RoundAnswer::Open));
    drop(coming);
    coordinator.close_if_due().unwrap();
    assert_eq!(weights(&coordinator), [-3.0; 4]);
}

#[test]
fn a_round_does_not_wait_for_an_island_that_has_only_joined() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, b], terms) = (open(dir.path(), SOON), [run(), run()], terms(4, 1, NONE));
    coordinator.begin("a", &a, terms.clone(), &to_bytes(&[0.0; 4])).unwrap();
    join(&coordinator, "b", &b, &terms);
    coordinator.contribute("a", &a, &gradient(0, [1.0; 4])).unwrap();
    assert_eq!(newest(&coordinator).round, 1);
    // Late, and waited for from now on.
    let late = coordinator.contribute("b", &b, &gradient(0, [1.0; 4])).unwrap();
    assert_eq!(late, ContributionOutcome::Late);
    coordinator.contribute("a", &a, &gradient(1, [1.0; 4])).unwrap();
    assert_eq!(newest(&coordinator).round, 1);
}

#[test]
fn two_runs_of_one_name_count_one_after_the_other_and_survive() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, b], terms) = two(dir.path(), SOON);
    coordinator.contribute("a", &a, &gradient(0, [1.0; 4])).unwrap();
    coordinator.leave("a", &a).unwrap();
    let again = run();
    join(&coordinator, "a", &again, &terms);
    drop(coordinator);
    let coordinator = open(dir.path(), SOON);
    coordinator.contribute("a", &again, &gradient(0, [2.0; 4])).unwrap();
    coordinator.contribute("b", &b, &gradient(0, [3.0; 4])).unwrap();
    assert_eq!(weights(&coordinator), [-2.0; 4]);
    drop(coordinator);
    let coordinator = open(dir.path(), SOON);
    coordinator.leave("a", &again).unwrap();
    let repeated = coordinator.contribute("a", &a, &gradient(0, [1.0; 4])).unwrap();
    assert_eq!(repeated, ContributionOutcome::Counted);
}

#[test]
fn a_repetition_long_after_its_round_is_not_taken_for_a_late_one() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, b], _) = two(dir.path(), Duration::ZERO);
    coordinator.contribute("b", &b, &gradient(0, [1.0; 4])).unwrap();
    for round in 0..4 {
        coordinator.contribute("a", &a, &gradient(round, [1.0; 4])).unwrap();
        coordinator.close_if_due().unwrap();
    }
    assert_eq!((newest(&coordinator).round, coordinator.round(0)), (4, Ok(RoundAnswer::Gone)));
    drop(coordinator);
    let coordinator = open(dir.path(), Duration::ZERO);
    let outcome = |round| coordinator.contribute("b", &b, &gradient(round, [1.0; 4])).unwrap();
    assert_eq!((outcome(0), outcome(1)), (ContributionOutcome::Counted, ContributionOutcome::Late));
}

#[test]
fn an_island_that_diverges_is_refused_and_the_others_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, b], _) = two(dir.path(), Duration::ZERO);
    coordinator.contribute("a", &a, &gradient(0, [1.0; 4])).unwrap();
    let refused = coordinator.contribute("b", &b, &gradient(0, [1.0, -f32::MAX, 0.0, 0.0])).unwrap_err();
    assert_eq!(refused.status, 422);
    assert!(refused.reason.starts_with("value 1 of the outer gradient of island `b`"), "{refused:?}");
    coordinator.close_if_due().unwrap();
    assert_eq!(weights(&coordinator), [-1.0; 4]);
}

#[test]
fn an_island_that_leaves_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, b], terms) = two(dir.path(), SOON);
    coordinator.contribute("b", &b, &gradient(0, [3.0; 4])).unwrap();
    for round in 0..2 {
        coordinator.contribute("a", &a, &gradient(round, [1.0; 4])).unwrap();
    }
    coordinator.leave("b", &a).unwrap();
    assert_eq!(coordinator.round(1), Ok(RoundAnswer::Open), "another run has left");
    coordinator.leave("b", &b).unwrap();
    assert_eq!(weights(&coordinator), [-3.0; 4]);
    let joined = join(&coordinator, "c", &run(), &terms);
    assert_eq!((joined.round, joined.islands), (2, 2));
}

#[test]
fn other_terms_names_and_states_are_refused_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, [a, _], terms) = two(dir.path(), SOON);
    let files = || {
        let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
        (read("state.bin"), read("members.json"))
    };
    let before = files();
    let refused = |name: &str, run: &str, terms: IslandTerms, state: Option<JoinedState>| {
        let (name, run) = (name.to_owned(), run.to_owned());
        coordinator.join(IslandJoin { name, run, terms, state }).unwrap_err().reason
    };
    let new = run();
    for (other, words) in [
        (IslandTerms { model: "b".repeat(64), ..terms.clone() }, "model bbbbbbbbbbbb"),
        (IslandTerms { local_steps: 32, ..terms.clone() }, "`island.steps` 32, and the other islands have 1"),
        (
            IslandTerms { compression: GradientCompression::Int4, ..terms.clone() },
            "`island.compression` int4",
        ),
        (super::terms(4, 2, NONE), "`island.fragments` 2"),
        (super::terms(5, 1, NONE), "trained values 5"),
    ] {
        let reason = refused("c", &new, other, None);
        assert!(reason.contains(words), "{reason}");
    }
    let reason = refused("a", &new, terms.clone(), None);
    assert!(reason.contains("another run is live under the name `a`"), "{reason}");
    let reason = refused("../x", &new, terms.clone(), None);
    assert!(reason.contains("names of islands are"), "{reason}");
    let elsewhere = JoinedState { coordinator: run(), round: 0 };
    let reason = refused("c", &new, terms.clone(), Some(elsewhere));
    assert!(reason.contains("its checkpoint is at round 0 of coordinator"), "{reason}");
    let message = gradient(7, [0.0; 4]);
    let reason = coordinator.contribute("a", &a, &message).unwrap_err().reason;
    assert!(reason.contains("it is at round 7, and round 0 is open"), "{reason}");
    let short = RoundMessage { round: 0, islands: 1, payload: vec![0; 3] };
    assert_eq!(coordinator.contribute("a", &a, &short).unwrap_err().status, 422);
    let infinite = gradient(0, [f32::INFINITY; 4]);
    assert_eq!(coordinator.contribute("a", &a, &infinite).unwrap_err().status, 422);
    assert!(coordinator.begin("c", &new, terms, &to_bytes(&[0.0; 4])).is_err());
    assert_eq!(files(), before);
}

#[test]
fn there_is_a_limit_of_islands() {
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, _, terms) = two(dir.path(), SOON);
    join(&coordinator, "c", &run(), &terms);
    join(&coordinator, "d", &run(), &terms);
    let request = IslandJoin { name: "e".to_owned(), run: run(), terms, state: None };
    let reason = coordinator.join(request).unwrap_err().reason;
    assert!(reason.contains("4 islands are live, at most 4 may be"), "{reason}");
}
