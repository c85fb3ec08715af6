//! Helpers of the tests: a runtime, a directory for logs, and rewards made of fixtures.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use rewards::python::PythonReward;
use rewards::{BoxFuture, Judged, Outcome, Reward, RewardContext, RewardError, RewardInput, RewardSpec};
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use trajectory::{Message, PolicyVersion, Prompt, Task, TaskId};

/// A run as far as rewards see it. Dropped last, after the rewards.
pub(crate) struct PythonFixture {
    pub(crate) runtime: Runtime,
    pub(crate) directory: TempDir,
    pub(crate) context: RewardContext,
}

/// Keeps Python from writing compiled files beside the fixtures.
pub(crate) const NO_CACHE: &str = "PYTHONDONTWRITEBYTECODE";

/// `None` without python3 of 3.9 or newer, with a note on standard error.
pub(crate) fn run() -> Option<PythonFixture> {
    let recent = ["-c", "import sys; sys.exit(sys.version_info < (3, 9))"];
    if !std::process::Command::new("python3").args(recent).status().is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: there is no python3, or it is older than 3.9");
        return None;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let context = RewardContext {
        environment: Arc::new(std::env::vars().chain([(NO_CACHE.to_owned(), "1".to_owned())]).collect()),
        runtime: Some(runtime.handle().clone()),
        scratch: directory.path().to_owned(),
        max_steps: 10,
        ..RewardContext::default()
    };
    Some(PythonFixture { runtime, directory, context })
}

/// A file beside this one.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(name)
}

/// The spec of a fixture with further keys.
pub(crate) fn spec(file: &str, keys: Value) -> RewardSpec {
    let mut table = Map::new();
    table.insert("kind".into(), "python".into());
    table.insert("path".into(), fixture(file).display().to_string().into());
    table.insert("environment".into(), json!([NO_CACHE]));
    let Value::Object(keys) = keys else { panic!("keys are a table") };
    table.extend(keys);
    serde_json::from_value(Value::Object(table)).unwrap()
}

impl PythonFixture {
    pub(crate) fn reward(&self, file: &str, keys: Value) -> PythonReward {
        self.build(file, keys).unwrap_or_else(|error| panic!("{file}: {error}"))
    }

    pub(crate) fn build(&self, file: &str, keys: Value) -> Result<PythonReward, RewardError> {
        PythonReward::new(&spec(file, keys), &self.context)
    }

    /// One call with one input.
    pub(crate) fn one(&self, reward: &PythonReward, text: &str) -> Judged {
        self.runtime.block_on(judge(reward, text))
    }

    /// One call for each text, all at the same time.
    pub(crate) fn all(&self, reward: &PythonReward, texts: &[&str]) -> Vec<Judged> {
        let tasks: Vec<_> = texts.iter().map(|_| task(json!({}))).collect();
        let inputs: Vec<_> =
            tasks.iter().zip(texts).map(|(task, text)| [RewardInput::text(task, text)]).collect();
        self.together(inputs.iter().map(|input| reward.score(input)).collect())
            .into_iter()
            .flatten()
            .collect()
    }

    /// The outcomes of calls that are made at the same time.
    pub(crate) fn together(&self, mut calls: Vec<BoxFuture<'_, Vec<Judged>>>) -> Vec<Vec<Judged>> {
        let mut judged: Vec<Option<Vec<Judged>>> = calls.iter().map(|_| None).collect();
        self.runtime.block_on(std::future::poll_fn(|context| {
            for (call, judged) in calls.iter_mut().zip(&mut judged) {
                if judged.is_none()
                    && let Poll::Ready(outcomes) = call.as_mut().poll(context)
                {
                    *judged = Some(outcomes);
                }
            }
            if judged.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
        }));
        judged.into_iter().flatten().collect()
    }
}

/// The outcome of a reward for one text.
pub(crate) async fn judge(reward: &PythonReward, text: &str) -> Judged {
    let task = task(json!({}));
    reward.score(&[RewardInput::text(&task, text)]).await.pop().unwrap()
}

/// A row with a plain prompt and the answer 4.
pub(crate) fn task(columns: Value) -> Task {
    let Value::Object(columns) = columns else { panic!("columns are a table") };
    Task { id: TaskId(7), prompt: Prompt::Text("2+2=".into()), answer: Some("4".into()), columns }
}

/// The row of [`task`] as a conversation.
pub(crate) fn chat(columns: Value) -> Task {
    let messages = vec![Message::new("user", "2+2=")];
    Task { prompt: Prompt::Messages(messages), ..task(columns) }
}

/// A trajectory with token ids, sampled at step 5 of 10.
pub(crate) fn input<'a>(task: &'a Task, text: &'a str, completion_ids: &'a [u32]) -> RewardInput<'a> {
    const PROMPT: [u32; 3] = [1, 2, 3];
    RewardInput {
        prompt_ids: &PROMPT,
        completion_ids,
        version: PolicyVersion(5),
        ..RewardInput::text(task, text)
    }
}

pub(crate) fn values(judged: &[Judged]) -> Vec<Option<f64>> {
    judged.iter().map(|judged| judged.as_ref().unwrap().value).collect()
}

pub(crate) fn value(judged: &Judged) -> f64 {
    judged.as_ref().unwrap().value.unwrap()
}

pub(crate) fn outcome(judged: &Judged) -> &Outcome {
    judged.as_ref().unwrap()
}

pub(crate) fn message(judged: Judged) -> String {
    judged.unwrap_err().to_string()
}

/// Waits until a condition holds; panics with its name after a minute.
pub(crate) fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "still not: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a process exists and has not ended.
pub(crate) fn lives(pid: u32) -> bool {
    if !cfg!(target_os = "linux") {
        return std::process::Command::new("kill").args(["-0", &pid.to_string()]).status().unwrap().success();
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    state.is_some_and(|state| state != "Z" && state != "X")
}

pub(crate) fn kill(pid: u32) {
    signal(pid, "KILL");
}

pub(crate) fn signal(pid: u32, name: &str) {
    let sent = std::process::Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(sent.success(), "process {pid} is not there");
}

/// Process ids that functions wrote, one a line.
pub(crate) fn pids(file: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}
