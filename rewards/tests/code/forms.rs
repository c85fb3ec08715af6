//! Forms of tests, from the row of a data set to the score.
//!
//! Invariant: a right program gets 1, a wrong one less, in each form; what cannot be tested is an error.

use rewards::RewardError;
use serde_json::{Value, json};

use crate::{Bench, in_each_sandbox, stream, why};

const ADD: &str = "print(sum(map(int, input().split())))";

#[test]
fn inputs_and_outputs() {
    in_each_sandbox(&json!({}), |bench| {
        let tests = json!({"tests": {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}});
        let right = bench.program(&tests, ADD);
        assert_eq!(right.value, Some(1.0), "{right:?}");
        assert_eq!((&right.details["passed"], &right.details["tests"]), (&json!(2), &json!(2)));
        let main = format!("def main():\n    {ADD}\nif __name__ == '__main__':\n    main()");
        assert_eq!(bench.program(&tests, &main).value, Some(1.0));
        let half = bench.program(&tests, "print(3)");
        assert_eq!(half.value, Some(0.0));
        assert_eq!(why(&half), "test 2: wrote \"3\\n\" instead of \"7\\n\"");
        let none = bench.judge(&tests, "I cannot do that.").unwrap();
        assert_eq!((none.value, why(&none)), (Some(0.0), "there is no program in the completion"));
    });
}

#[test]
fn with_partial_the_share_counts() {
    in_each_sandbox(&json!({"partial": true}), |bench| {
        let tests = json!({"tests": {"inputs": ["", "", "", ""], "outputs": ["1", "2", "1", "3"]}});
        assert_eq!(bench.program(&tests, "print(1)").value, Some(0.5));
        let calls =
            json!({"tests": {"fn_name": "f", "inputs": [[1], [2], [3], [0]], "outputs": [1, 4, 9, 7]}});
        assert_eq!(bench.program(&calls, "def f(x): return x * x").value, Some(0.75));
        let asserts = json!({"tests": ["assert f(1) == 1", "assert f(2) == 5"]});
        assert_eq!(bench.program(&asserts, "def f(x): return x * x").value, Some(0.5));
    });
}

#[test]
fn calls_of_functions_and_of_methods() {
    in_each_sandbox(&json!({}), |bench| {
        let tests =
            json!({"tests": {"fn_name": "pairs", "inputs": [[[3, 1], 2]], "outputs": [[[1, 2], [3, 2]]]}});
        let function = "def pairs(a: List[int], b): return [(x, b) for x in sorted(a)]";
        let method = "class Solution:\n    def pairs(self, a, b):\n        print('noise')\n        return [[x, b] for x in sorted(a)]";
        for program in [function, method] {
            let outcome = bench.program(&tests, program);
            assert_eq!(outcome.value, Some(1.0), "{outcome:?}");
        }
        for (program, reason) in [
            ("def pairs(a, b): return a", "returned [3,1] instead of [[1,2],[3,2]]"),
            ("def other(a, b): return a", "KeyError: 'pairs'"),
            ("def pairs(a, b): return {1}", "TypeError: set cannot be compared with JSON"),
            (
                "def pairs(a, b):\n    return 1 / 0",
                "ZeroDivisionError: division by zero (line 2 of the program)",
            ),
            ("def pairs(a, b): return float('nan')", "ValueError"),
            ("def pairs(a, b:", "SyntaxError"),
        ] {
            let outcome = bench.program(&tests, program);
            assert_eq!(outcome.value, Some(0.0), "{program}");
            assert!(why(&outcome).contains(reason), "{program}: {}", why(&outcome));
        }
    });
}

#[test]
fn asserts_checks_and_test_cases() {
    let human = "def check(candidate):\n    assert candidate(2) == 4";
    let unit = "import unittest\nclass Test(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(f(2), 4)";
    let pytest = "from solution import f\ndef test_it():\n    assert f(2) == 4";
    in_each_sandbox(&json!({}), |bench| {
        for tests in [
            json!({"tests": ["assert f(2) == 4", "assert f(3) == 9"]}),
            json!({"tests": "assert f(2) == 4"}),
            json!({"tests": human, "entry_point": "f"}),
            json!({"tests": unit}),
            json!({"tests": pytest}),
            json!({"tests": "assert f(n) == 4", "test_setup_code": "n = 2"}),
        ] {
            let right = bench.program(&tests, "def f(x): return x * x");
            assert_eq!(right.value, Some(1.0), "{tests}: {right:?}");
            let wrong = bench.program(&tests, "def f(x): return x");
            assert_eq!(wrong.value, Some(0.0), "{tests}");
            assert!(why(&wrong).contains("AssertionError"), "{tests}: {}", why(&wrong));
        }
    });
}

#[test]
fn the_answer_holds_the_tests_where_no_column_does() {
    in_each_sandbox(&json!({}), |bench| {
        let mut task = crate::task(&json!({}));
        task.answer = Some(stream("1 2", "3")["tests"].to_string());
        let text = format!("```python\n{ADD}\n```");
        let inputs = [rewards::RewardInput::text(&task, &text)];
        let judged = bench.runtime.block_on(bench.reward.score(&inputs)).pop().unwrap().unwrap();
        assert_eq!(judged.value, Some(1.0));
    });
}

#[test]
fn what_cannot_be_tested_is_an_error() {
    in_each_sandbox(&json!({"tests_column": "cases"}), |bench| {
        for (columns, word) in
            [(json!({"tests": "assert True"}), "`cases`"), (json!({"cases": 5}), "`5` is no test")]
        {
            match bench.judge(&columns, "```python\nprint(1)\n```") {
                Err(RewardError::Failed { reason, .. }) => assert!(reason.contains(word), "{reason}"),
                other => panic!("{columns}: {other:?}"),
            }
        }
    });
}

#[test]
fn an_interpreter_that_cannot_start_is_an_error_and_no_score() {
    // Python does not fit into so little memory.
    in_each_sandbox(&json!({"memory_mb": 6}), |bench| {
        let judged = bench.judge(&stream("", ""), "```python\nprint()\n```");
        assert!(matches!(&judged, Err(RewardError::Failed { .. })), "{judged:?}");
    });
}

#[test]
fn keys_that_make_no_sense_are_refused() {
    let found = |keys: Value| match Bench::open(&keys) {
        Ok(_) => panic!("{keys} was taken"),
        Err(error) => error.to_string(),
    };
    for (keys, word) in [
        (json!({"sandbox": "docker"}), "`sandbox`"),
        (json!({"language": "cobol"}), "`language`"),
        (json!({"command": []}), "`command`"),
        (json!({"command": ["sh", "-c", "true"]}), "`{file}`"),
        (json!({"command": ["no-such-program", "{file}"]}), "no-such-program"),
        (json!({"python": "no-such-python"}), "no-such-python"),
        (json!({"python": "true"}), "does not answer as Python does"),
        (json!({"url": "http://x"}), "does not take `url`"),
    ] {
        let message = found(keys.clone());
        assert!(message.contains(word), "{keys}: {message}");
    }
    if Bench::open(&json!({"sandbox": "none"})).is_ok() {
        for field in ["cpu_s", "memory_mb", "max_processes", "max_output_kib"] {
            let message = found(json!({"sandbox": "none", field: 0}));
            assert!(message.contains(field), "{field}: {message}");
        }
    }
}
