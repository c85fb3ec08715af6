//! The graders against data that others made: Math-Verify's test cases and the GSM8K test set.
//!
//! These tests read `../shared/data` beside the repository, and say so and pass where it is not there; CI makes sure that
//! it is.

use std::path::Path;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use rewards::{Registry, Reward, RewardContext, RewardInput, RewardSpec};
use serde_json::Value;
use trajectory::{Prompt, Task, TaskId};

/// The rows of a file; none where there is no such data beside the repository.
fn rows(file: &str) -> Option<Vec<Value>> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data");
    if !data.exists() {
        eprintln!("SKIPPED: there is no {}", data.display());
        return None;
    }
    let path = data.join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Some(text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn reward(kind: &str) -> Box<dyn Reward> {
    Registry::builtin().build(&RewardSpec::new(kind), &RewardContext::default()).unwrap()
}

fn correct(reward: &dyn Reward, answer: &str, text: &str) -> bool {
    let task = Task {
        id: TaskId(0),
        prompt: Prompt::Text(String::new()),
        answer: Some(answer.to_owned()),
        columns: serde_json::Map::new(),
    };
    let inputs = [RewardInput::text(&task, text)];
    let score = pin!(reward.score(&inputs)).poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(mut score) = score else { panic!("a built-in waits") };
    score.remove(0).unwrap().value == Some(1.0)
}

fn field<'a>(row: &'a Value, name: &str) -> &'a str {
    row[name].as_str().unwrap()
}

/// Of the strict cases, none that Math-Verify's authors call wrong may pass. The grader does no algebra, so that many
/// right ones fail; how many pass may only rise.
#[test]
fn math_agrees_with_math_verify_where_it_says_yes() {
    const TRUE_POSITIVES: usize = 77;
    let Some(cases) = rows("math_verify/cases.jsonl") else { return };
    let math = reward("math");
    let (mut right, mut found, mut wrong) = (0, 0, vec![]);
    for case in cases.iter().filter(|case| case["strict"] == true) {
        let equal = correct(&*math, field(case, "gold"), field(case, "pred"));
        match (case["expect"].as_bool().unwrap(), equal) {
            (false, true) => wrong.push(case.to_string()),
            (true, equal) => {
                right += 1;
                found += usize::from(equal);
            }
            (false, false) => {}
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(found >= TRUE_POSITIVES, "{found} of {right} right answers were recognised");
}

/// Every reference solution passes, in three phrasings, and no solution with another number does.
#[test]
fn math_tells_the_answers_of_gsm8k_apart() {
    let Some(rows) = rows("gsm8k/test.jsonl") else { return };
    assert_eq!(rows.len(), 1319);
    for kind in ["math", "gsm8k"] {
        let reward = reward(kind);
        for row in &rows {
            let answer = field(row, "answer");
            let (work, number) = answer.rsplit_once("#### ").unwrap();
            assert!(correct(&*reward, answer, answer), "{kind}: {answer}");
            let value: i64 = number.replace(',', "").parse().unwrap();
            for wrong in [value + 1, value * 10, -value - 1] {
                let text = format!("{work}#### {wrong}");
                assert!(!correct(&*reward, answer, &text), "{kind}: {text}");
            }
            if kind == "math" {
                assert!(correct(&*reward, number, &format!("{work}So it is \\boxed{{{value}}}.")));
                assert!(correct(&*reward, number, &format!("{work}The answer is ${number}.")));
                assert!(!correct(&*reward, number, &format!("{work}The answer is {}.", value + 1)));
            }
        }
    }
}
