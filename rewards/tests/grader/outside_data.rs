//! The graders against data that others made: Math-Verify's test cases and the GSM8K test set.
//!
//! These tests read `../shared/data` beside the repository, and say so and pass where it is not there; CI makes sure that
//! it is.

use std::path::Path;

use rewards::RewardSpec;
use rewards::math::grade;
use serde_json::Value;

use crate::outcome;

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

/// References of different cases that are the same answer: one, and how the other begins.
const SAME: [(&str, &str); 17] = [
    ("$$f(x)=1$$", "$1$"),
    ("$$|AB|=1$$", "$1$"),
    ("$0.28$", "$28/100$"),
    ("$0.28$", "$28\\%$"),
    ("$0.28$", "Let's assume the stock's"),
    ("$1/3$", "$\\frac{1}{3}$"),
    ("$11$", "$x = 11$"),
    ("$14916$", "In order for $N$"),
    ("$2$", "$z = 1 + 1 = 2$"),
    ("$28$", "$28\\%$"),
    ("$28$", "Let's assume the stock's"),
    ("$28/100$", "$28\\%$"),
    ("$28/100$", "Let's assume the stock's"),
    ("$28\\%$", "Let's assume the stock's"),
    ("$\\boxed{1}\\boxed{2}$", "\\boxed{1} papers"),
    ("$x >= 5$", "$x \\geq 5$"),
    ("1000", "1000.0"),
];

fn field<'a>(row: &'a Value, name: &str) -> &'a str {
    row[name].as_str().unwrap()
}

/// Nothing that Math-Verify's authors call wrong may pass; how much of what they call right passes may only rise.
/// (One of their cases is a mistake: `1 - 1/e` is not `1 + 1/e`.)
#[test]
fn math_agrees_with_math_verify() {
    const AGREE: usize = 137;
    let Some(cases) = rows("math_verify/cases.jsonl") else { return };
    let (mut agree, mut wrong, mut missed) = (0, vec![], vec![]);
    for case in &cases {
        let strict = case["strict"] == true;
        let verdict = grade(field(case, "gold"), field(case, "pred"), false, strict);
        match (case["expect"].as_bool().unwrap(), verdict.equal == Some(true)) {
            (false, true) => wrong.push(case.to_string()),
            (true, false) => missed.push(case.to_string()),
            _ => agree += 1,
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(agree >= AGREE, "agrees on {agree} of {}, misses {missed:#?}", cases.len());
}

/// A reference of one case is not the answer of another, unless Math-Verify says that they are the same.
#[test]
fn references_of_different_cases_differ() {
    let Some(cases) = rows("math_verify/cases.jsonl") else { return };
    let mut golds: Vec<&str> = cases.iter().map(|case| field(case, "gold")).collect();
    golds.sort_unstable();
    golds.dedup();
    let mut equal = vec![];
    for (at, gold) in golds.iter().enumerate() {
        // One reference is a box that is never closed, which is no answer of a completion.
        let closed = gold.matches('{').count() == gold.matches('}').count();
        assert!(!closed || grade(gold, gold, false, true).equal == Some(true), "{gold}");
        for other in &golds[at + 1..] {
            if grade(gold, other, false, true).equal == Some(true) {
                equal.push((*gold, *other));
            }
        }
    }
    let known = |(a, b): &(&str, &str)| SAME.iter().any(|(one, other)| a == one && b.starts_with(other));
    equal.retain(|pair| !known(pair));
    assert!(equal.is_empty(), "{equal:#?}");
}

/// Every reference solution passes, in three phrasings, and no solution with another number does.
#[test]
fn math_tells_the_answers_of_gsm8k_apart() {
    let Some(rows) = rows("gsm8k/test.jsonl") else { return };
    assert_eq!(rows.len(), 1319);
    for kind in ["math", "gsm8k"] {
        let spec = RewardSpec::new(kind);
        let correct = |answer: &str, text: &str| outcome(&spec, answer, text).value == Some(1.0);
        for row in &rows {
            let answer = field(row, "answer");
            let (work, number) = answer.rsplit_once("#### ").unwrap();
            assert!(correct(answer, answer), "{kind}: {answer}");
            let value: i64 = number.replace(',', "").parse().unwrap();
            for wrong in [value + 1, value * 10, -value - 1] {
                let text = format!("{work}#### {wrong}");
                assert!(!correct(answer, &text), "{kind}: {text}");
            }
            if kind == "math" {
                assert!(correct(number, &format!("{work}So it is \\boxed{{{value}}}.")));
                assert!(correct(number, &format!("{work}The answer is ${number}.")));
                assert!(!correct(number, &format!("{work}The answer is {}.", value + 1)));
            }
        }
    }
}

/// Every answer passes as models state it, and the next number in the same words does not.
#[test]
fn math_reads_gsm8k_answers_in_the_phrasings_of_models() {
    let Some(rows) = rows("gsm8k/test.jsonl") else { return };
    let phrasings = [
        "So the total is **N**.",
        "The answer is N.",
        "Therefore, she needs N bolts of fabric. The final answer is $\\boxed{N}$.",
        "\\[ \\boxed{N \\text{ dollars}} \\]",
        "**Final Answer:** N",
        "Final Answer: The final answer is $N$. I hope it is correct.",
        "... = N\n\n#### N",
        "It costs $N.00",
        "\\( x = N \\)",
        "The answer is: $N per day.",
        "<think>5 or 6?</think>\nThe total cost is $N.<|im_end|>",
        "N",
    ];
    for row in &rows {
        let (_, number) = field(row, "answer").rsplit_once("#### ").unwrap();
        let value: i64 = number.replace(',', "").parse().unwrap();
        for phrasing in phrasings {
            for (stated, expected) in [(value, true), (value + 1, false), (value * 10 + 3, false)] {
                let text = phrasing.replace('N', &stated.to_string());
                let verdict = grade(field(row, "answer"), &text, false, true);
                assert_eq!(verdict.equal, Some(expected), "{number}: {text}");
            }
        }
    }
}
