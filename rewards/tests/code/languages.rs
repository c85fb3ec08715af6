//! Programs of other languages, by a command.
//!
//! Invariant: a command that runs one process works in every sandbox; one that starts others works where processes are allowed.

use serde_json::json;

use crate::{CodeFixture, in_each_sandbox, stream, why};

fn shell(program: &str) -> String {
    format!("```bash\n{program}\n```")
}

#[test]
fn a_shell_runs_its_programs() {
    in_each_sandbox(&json!({"language": "bash", "command": ["sh", "{file}"]}), |bench| {
        let right = bench.judge(&stream("4\n", "8"), &shell("read x; echo $((x * 2))")).unwrap();
        assert_eq!(right.value, Some(1.0), "{right:?}");
        let wrong = bench.judge(&stream("4\n", "8"), &shell("echo 7; exit 3")).unwrap();
        assert_eq!((wrong.value, why(&wrong)), (Some(0.0), "test 1: ended with exit code 3"));
        let calls = json!({"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [1]}});
        assert!(bench.judge(&calls, &shell("f")).is_err());
    });
}

#[test]
fn without_a_sandbox_programs_run_if_the_recipe_says_so() {
    let keys = json!({"language": "bash", "command": ["sh", "{file}"], "sandbox": "none", "cpu_s": 1});
    let bench = CodeFixture::open(&keys).unwrap();
    let right =
        bench.judge(&stream("", "6"), &shell("echo 1 2 3 | (read a b c; echo $((a + b + c)))")).unwrap();
    assert_eq!(right.value, Some(1.0), "{right:?}");
    let endless = bench.judge(&stream("", ""), &shell("while true; do :; done")).unwrap();
    assert_eq!(endless.value, Some(0.0));
    bench.assert_clean();
}
