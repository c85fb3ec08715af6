//! The string graders against verdicts of verl's own functions, made by `tests/data/verl_goldens.py`.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use rewards::{Outcome, Registry, RewardContext, RewardInput, RewardSpec};
use serde_json::Value;
use trajectory::{Prompt, Task, TaskId};

fn judge(spec: &RewardSpec, gold: &str, text: &str) -> Outcome {
    let reward = Registry::builtin().build(spec, &RewardContext::default()).unwrap();
    let task = Task {
        id: TaskId(0),
        prompt: Prompt::Text(String::new()),
        answer: Some(gold.to_owned()),
        columns: serde_json::Map::new(),
    };
    let inputs = [RewardInput::text(&task, text)];
    let score = pin!(reward.score(&inputs)).poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(mut score) = score else { panic!("a built-in waits") };
    score.remove(0).unwrap()
}

#[test]
fn string_graders_score_as_verl_does() {
    let rows: Vec<Value> = include_str!("data/verl_goldens.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(rows.len() > 1000);
    let strict = RewardSpec { strict_box: Some(true), ..RewardSpec::new("math_dapo") };
    for row in &rows {
        let (gold, text) = (row["gold"].as_str().unwrap(), row["text"].as_str().unwrap());
        for (spec, golden) in
            [(RewardSpec::new("math_dapo"), &row["dapo"]), (strict.clone(), &row["strict_box"])]
        {
            let outcome = judge(&spec, gold, text);
            assert_eq!(outcome.value, golden["score"].as_f64(), "{row}");
            assert_eq!(
                (&outcome.details["acc"], &outcome.details["pred"]),
                (&golden["acc"], &golden["pred"]),
                "{row}"
            );
        }
        assert_eq!(
            judge(&RewardSpec::new("hendrycks"), gold, text).value,
            row["hendrycks"].as_f64(),
            "{row}"
        );
    }
}
