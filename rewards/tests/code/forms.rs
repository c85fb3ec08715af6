//! Forms of tests, from the row of a data set to the score.
//!
//! Invariant: a right program gets 1, a wrong one less, in each form; what cannot be tested is an error.

use rewards::RewardError;
use serde_json::{Value, json};

use crate::{CodeFixture, in_each_sandbox, stream, why};

fn fenced(program: &str) -> String {
    format!("```python\n{program}\n```\n")
}

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
fn a_check_needs_no_name_where_there_is_only_one_function() {
    let check = "def check(candidate):\n    assert candidate(1, 2) == 3";
    let (right, wrong) = ("def add(a, b): return a + b", "def add(a, b): return 0");
    in_each_sandbox(&json!({}), |bench| {
        for tests in [
            json!({"tests": check}),
            json!({"tests": check, "fn_name": "add"}),
            json!({"tests": check, "metadata": {"func_name": "add"}}),
            json!({"tests": format!("{check}\ncheck(add)")}),
            json!({"tests": "def check():\n    assert add(1, 2) == 3"}),
        ] {
            assert_eq!(bench.program(&tests, right).value, Some(1.0), "{tests}");
            let outcome = bench.program(&tests, wrong);
            assert_eq!(outcome.value, Some(0.0), "{tests}");
            assert!(why(&outcome).contains("AssertionError"), "{tests}: {}", why(&outcome));
        }
        let two = format!("def helper(): pass\n{right}");
        assert_eq!(bench.program(&json!({"tests": check, "entry_point": "add"}), &two).value, Some(1.0));
        for program in [two.as_str(), "add = 1"] {
            let error = bench.judge(&json!({"tests": check}), &fenced(program)).unwrap_err().to_string();
            assert!(error.contains("`entry_point`"), "{error}");
        }
    });
}

#[test]
fn tests_in_which_nothing_could_fail_are_an_error() {
    let program = fenced("def add(a, b): return a + b");
    in_each_sandbox(&json!({}), |bench| {
        for (tests, word) in [
            ("# assert nothing\nadd(1, 2)", "nothing that could fail"),
            ("def check(candidate):\n    assert True, 'so'", "nothing that could fail"),
            ("for x in []:\n    assert add(x, x) == 0", "nothing that could fail"),
            ("if False:\n    assert add(1, 2) == 3", "nothing that could fail"),
            (
                "class TestAdd:\n    def test_it(self):\n        assert add(1, 2) == 4",
                "nothing that could fail",
            ),
            ("import unittest\nclass Test(unittest.TestCase):\n    pass", "nothing that could fail"),
            ("assert add(1, 2 == 3", "cannot be read as Python"),
        ] {
            match bench.judge(&json!({"tests": [tests]}), &program) {
                Err(RewardError::Failed { reason, .. }) => {
                    assert!(reason.starts_with("test 1 ") && reason.contains(word), "{tests}: {reason}");
                }
                other => panic!("{tests}: {other:?}"),
            }
        }
        for tests in [
            "if add(1, 2) != 3:\n    raise ValueError('wrong')",
            "try:\n    add(1)\n    assert False, 'must raise'\nexcept TypeError:\n    pass",
            "def assert_sum(a, b, c):\n    if a + b != c: raise ValueError\nassert_sum(1, 2, add(1, 2))",
            "def test_it():\n    for x in range(3):\n        assert add(x, x) == 2 * x",
        ] {
            let outcome = bench.judge(&json!({"tests": tests}), &program).unwrap();
            assert_eq!(outcome.value, Some(1.0), "{tests}: {}", why(&outcome));
        }
        let helper = json!({"tests": ["same(add(1, 2), 3)  # assert"], "test_setup_code": "def same(a, b):\n    assert a == b"});
        assert_eq!(bench.judge(&helper, &program).unwrap().value, Some(1.0));
    });
}

#[test]
fn a_long_expected_output_raises_the_limit() {
    let lines: String = (0..20_000).map(|number| format!("{number}\n")).collect();
    let numbers = |from: u64| (from..from + 1000).map(|number| 1_000_000 + number).collect::<Vec<_>>();
    let inputs: Vec<_> = (0..40).map(|from| [from]).collect();
    let outputs: Vec<_> = (0..40).map(numbers).collect();
    let long = json!((0..20_000).collect::<Vec<_>>());
    in_each_sandbox(&json!({}), |bench| {
        let outcome = bench.program(&stream("", &lines), "print(*range(20000), sep='\\n')");
        assert_eq!(outcome.value, Some(1.0), "{}", why(&outcome));
        let endless = bench.program(&stream("", &lines), "while True: print('x' * 100)");
        assert_eq!(why(&endless), "test 1: wrote too much");
        let tests = json!({"tests": {"fn_name": "f", "inputs": inputs, "outputs": outputs}});
        let outcome = bench.program(&tests, "def f(x): return [1000000 + x + i for i in range(1000)]");
        assert_eq!(outcome.value, Some(1.0), "{}", why(&outcome));
        let tests = json!({"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [long, long]}});
        let outcome = bench.program(&tests, "def f(x): return list(range(20000))");
        assert_eq!(outcome.value, Some(1.0), "{}", why(&outcome));
        let flood = "import os\ndef f(x):\n    while True:\n        for fd in range(3, 64):\n            try: os.write(fd, b'\\n' * 512)\n            except OSError: pass";
        let tests = json!({"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [1]}});
        let outcome = bench.program(&tests, flood);
        assert_eq!(
            (outcome.value, why(&outcome)),
            (Some(0.0), "test 1: wrote on the channel of the harness")
        );
    });
}

#[test]
fn an_example_of_its_use_is_not_the_program() {
    let text = "1. Code:\n   ```python:add.py\n   def add(a, b):\n       return a + b\n   ```\n2. Example usage:\n   ~~~python\n   print(add(1, 2))\n   ~~~\n";
    in_each_sandbox(&json!({}), |bench| {
        for tests in [
            json!({"tests": ["assert add(1, 2) == 3"]}),
            json!({"tests": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}}),
            json!({"tests": "def check(candidate):\n    assert candidate(1, 2) == 3"}),
        ] {
            let outcome = bench.judge(&tests, text).unwrap();
            assert_eq!(outcome.value, Some(1.0), "{tests}: {}", why(&outcome));
        }
    });
}

#[test]
fn a_value_is_not_its_list() {
    in_each_sandbox(&json!({}), |bench| {
        let functional =
            json!({"tests": [{"input": "1", "output": "[3]", "testtype": "functional"}], "fn_name": "f"});
        let wrapped = json!({"tests": {"fn_name": "f", "inputs": [[1], [1]], "outputs": [[3], [3]]}});
        for (tests, value) in [(&functional, 0.0), (&wrapped, 1.0)] {
            assert_eq!(bench.program(tests, "def f(x): return 3").value, Some(value), "{tests}");
            assert_eq!(bench.program(tests, "def f(x): return [3]").value, Some(1.0), "{tests}");
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
fn tasks_without_tests_are_an_error() {
    in_each_sandbox(&json!({"tests_column": "cases"}), |bench| {
        for (columns, word) in
            [(json!({"tests": "assert True"}), "`cases`"), (json!({"cases": 5}), "`5` is not a test")]
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
fn invalid_keys_are_refused() {
    let found = |keys: Value| match CodeFixture::open(&keys) {
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
    if CodeFixture::open(&json!({"sandbox": "none"})).is_ok() {
        for field in ["cpu_s", "memory_mb", "max_processes", "max_output_kib"] {
            let message = found(json!({"sandbox": "none", field: 0}));
            assert!(message.contains(field), "{field}: {message}");
        }
    }
}
