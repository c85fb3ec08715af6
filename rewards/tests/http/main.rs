//! The rewards `http` and `judge` against working and broken servers.
//!
//! Invariant: every server is in this process and on this machine; every wait has a deadline.

mod judge;
mod remote;
mod server;

use std::sync::Arc;

use rewards::{Judged, Registry, Reward, RewardContext, RewardError, RewardInput, RewardSpec};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use trajectory::{Prompt, Task, TaskId};

/// A reward with the runtime that it needs.
struct HttpFixture {
    reward: Box<dyn Reward>,
    runtime: Runtime,
}

/// The value of the variable `RM_TOKEN`.
const TOKEN: &str = "secret-token";

impl HttpFixture {
    fn open(kind: &str, url: &str, keys: &Value) -> Self {
        Self::try_open(kind, url, keys).expect("the reward can be built")
    }

    fn try_open(kind: &str, url: &str, keys: &Value) -> Result<Self, RewardError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime starts");
        let mut table = json!({"kind": kind, "url": url, "timeout_s": 20.0});
        for (key, value) in keys.as_object().expect("keys are an object") {
            table[key] = value.clone();
        }
        let spec: RewardSpec = serde_json::from_value(table).expect("the keys are those of a reward");
        let context = RewardContext {
            environment: Arc::new([("RM_TOKEN".to_owned(), TOKEN.to_owned())].into()),
            runtime: Some(runtime.handle().clone()),
            ..RewardContext::default()
        };
        let reward = Registry::builtin().build(&spec, &context)?;
        Ok(Self { reward, runtime })
    }

    /// Judges texts concurrently.
    fn judge(&self, texts: &[&str]) -> Vec<Judged> {
        let task = task();
        let inputs: Vec<_> = texts.iter().map(|text| RewardInput::text(&task, text)).collect();
        self.runtime.block_on(self.reward.score(&inputs))
    }

    fn value(&self, text: &str) -> Option<f64> {
        self.judge(&[text]).pop().expect("there is one answer").expect("the server answers").value
    }

    fn reason(&self, text: &str) -> String {
        match self.judge(&[text]).pop() {
            Some(Err(error)) => error.to_string(),
            other => panic!("{other:?}"),
        }
    }
}

fn task() -> Task {
    Task {
        id: TaskId(7),
        prompt: Prompt::Text("2+2=".into()),
        answer: Some("4".into()),
        columns: Default::default(),
    }
}
