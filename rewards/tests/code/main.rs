//! The reward `code` from a recipe to a score, and what programs of a policy try in it.
//!
//! Invariant: every test runs in each sandbox that this machine has and says SKIPPED for the others. Nothing here depends on how
//! long a program takes, beyond deadlines against hanging.

mod escapes;
mod forms;
mod killed;
mod languages;

use std::collections::BTreeMap;
use std::sync::Arc;

use rewards::{Judged, Outcome, Registry, Reward, RewardContext, RewardError, RewardInput, RewardSpec};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use trajectory::{Prompt, Task, TaskId};

/// A reward with the runtime and the directory that it needs.
struct CodeFixture {
    reward: Box<dyn Reward>,
    scratch: TempDir,
    runtime: Runtime,
}

impl CodeFixture {
    /// The reward `code` with these keys, or why there is none.
    fn open(keys: &Value) -> Result<Self, RewardError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime starts");
        let scratch = tempfile::tempdir().expect("there is a place for temporary files");
        let mut table = json!({"kind": "code"});
        for (key, value) in keys.as_object().expect("keys are an object") {
            table[key] = value.clone();
        }
        let spec: RewardSpec = serde_json::from_value(table).expect("the keys are those of a reward");
        let context = RewardContext {
            environment: Arc::new(std::env::vars().collect::<BTreeMap<_, _>>()),
            runtime: Some(runtime.handle().clone()),
            scratch: scratch.path().to_path_buf(),
            ..RewardContext::default()
        };
        let reward = Registry::builtin().build(&spec, &context)?;
        Ok(Self { reward, scratch, runtime })
    }

    fn judge(&self, columns: &Value, text: &str) -> Judged {
        let task = task(columns);
        let mut judged = self.runtime.block_on(self.reward.score(&[RewardInput::text(&task, text)]));
        assert_eq!(judged.len(), 1);
        judged.pop().expect("there is one answer")
    }

    /// The score of a Python program.
    fn program(&self, columns: &Value, program: &str) -> Outcome {
        self.judge(columns, &format!("So:\n```python\n{program}\n```\n")).expect("the sandbox works")
    }

    fn assert_clean(&self) {
        let left: Vec<_> = std::fs::read_dir(self.scratch.path()).expect("it is still there").collect();
        assert!(left.is_empty(), "{left:?} was left behind");
    }
}

fn task(columns: &Value) -> Task {
    let columns = columns.as_object().expect("columns are an object").clone();
    Task { id: TaskId(7), prompt: Prompt::Text("write a program".into()), answer: None, columns }
}

/// Calls `test` with a bench in every sandbox that works here.
fn in_each_sandbox(keys: &Value, test: impl Fn(&CodeFixture)) {
    for sandbox in ["bubblewrap", "landlock"] {
        let mut keys = keys.clone();
        keys["sandbox"] = json!(sandbox);
        match CodeFixture::open(&keys) {
            Ok(bench) => {
                eprintln!("in {sandbox}");
                test(&bench);
                bench.assert_clean();
            }
            Err(RewardError::Start { reason, .. }) => eprintln!("SKIPPED in {sandbox}: {reason}"),
            Err(error) => panic!("{error}"),
        }
    }
}

/// One test by input and output.
fn stream(input: &str, output: &str) -> Value {
    json!({"tests": [{"input": input, "output": output}]})
}

fn why(outcome: &Outcome) -> &str {
    outcome.details.get("why").and_then(Value::as_str).unwrap_or_default()
}
