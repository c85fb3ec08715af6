//! The graders of answers: pairs of references and completions, and the verdicts and data sets of others.
//!
//! Invariant: the expected verdict of a pair follows from the mathematics, not from what the grader could do when the pair was
//! written.

mod answers;
mod families;
mod grading;
mod outside_data;
mod verl_goldens;

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use rewards::math::grade;
use rewards::{Outcome, Registry, RewardContext, RewardInput, RewardSpec};
use trajectory::{Prompt, Task, TaskId};

/// Grades pairs of a reference and a completion; fails with all pairs that are not graded as expected.
#[track_caller]
fn check(same: &[(&str, &str)], different: &[(&str, &str)]) {
    let misjudged = |expected: bool| {
        move |(gold, text): &(&str, &str)| {
            let verdict = grade(gold, text, false, true);
            let wrong = (verdict.equal == Some(true)) != expected;
            wrong.then(|| format!("{gold:?} against {text:?} is {expected}, not {verdict:?}"))
        }
    };
    let wrong: Vec<String> = same
        .iter()
        .filter_map(misjudged(true))
        .chain(different.iter().filter_map(misjudged(false)))
        .collect();
    assert!(wrong.is_empty(), "{} of {}: {wrong:#?}", wrong.len(), same.len() + different.len());
}

/// The outcome of a built-in reward, which needs no runtime.
fn outcome(spec: &RewardSpec, answer: &str, text: &str) -> Outcome {
    let reward = Registry::builtin().build(spec, &RewardContext::default()).unwrap();
    let task = Task {
        id: TaskId(0),
        prompt: Prompt::Text(String::new()),
        answer: Some(answer.to_owned()),
        columns: serde_json::Map::new(),
    };
    let inputs = [RewardInput::text(&task, text)];
    let score = pin!(reward.score(&inputs)).poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(mut score) = score else { panic!("a built-in reward waits") };
    score.remove(0).unwrap()
}
