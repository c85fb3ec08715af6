//! Plain Python functions through the process pool, without anything that rewards add.
//!
//! Invariant: without python3 every test prints SKIPPED and passes.

use std::time::Duration;

use host::python::{
    CallError, FUNCTION_ADAPTER, ForkServer, PoolOptions, ProcessPool, PythonCode, Session, SessionOptions,
    SessionPool, environment,
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

const SOURCE: &str = r#"
import math, os, time

def search(query, limit=3):
    return {"query": query, "hits": list(range(limit)), "pid": os.getpid()}

async def wait(seconds):
    import asyncio
    await asyncio.sleep(seconds)
    return seconds

def misbehave(what):
    if what == "hang":
        time.sleep(1000)
    if what == "die":
        os._exit(3)
    if what == "nan":
        return math.nan
    return what
"#;

/// A function that counts its calls, and can hang or end its process.
const COUNTER: &str = r#"
import os, time
calls = 0

def count(what=""):
    global calls
    calls += 1
    if what == "hang":
        time.sleep(1000)
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise ValueError("no such move")
    return [calls, os.getpid()]
"#;

struct Fixture {
    pool: ProcessPool,
    loaded: Value,
    runtime: Runtime,
    _directory: tempfile::TempDir,
}

/// A pool of two workers that calls `function` of [`SOURCE`]; `None` where there is no python3 of 3.9 or newer.
fn fixture(function: &str) -> Option<Fixture> {
    let (server, runtime, directory) = server(SOURCE, function)?;
    let loaded = server.loaded().description.clone();
    let pool = ProcessPool::start(server, PoolOptions { workers: 2, max_batch: 4, whole_groups: false });
    Some(Fixture { pool, loaded, runtime, _directory: directory })
}

/// The fork server of `function` in `source`; `None` where there is no python3 of 3.9 or newer.
fn server(source: &str, function: &str) -> Option<(ForkServer, Runtime, tempfile::TempDir)> {
    let recent = ["-c", "import sys; sys.exit(sys.version_info < (3, 9))"];
    if !std::process::Command::new("python3").args(recent).status().is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: there is no python3, or it is older than 3.9");
        return None;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let config = json!({"source": source, "function": function});
    let log = directory.path().join("functions.log");
    let code = PythonCode::new("python3", FUNCTION_ADAPTER, config, log, runtime.handle().clone());
    let environment = environment(&std::env::vars().collect(), &[]);
    let server =
        ForkServer::start(PythonCode { environment, timeout: Duration::from_secs(2), ..code }).unwrap();
    Some((server, runtime, directory))
}

impl Fixture {
    /// Results of calls that are submitted together.
    fn call(&self, calls: &[Value]) -> Vec<Result<Value, CallError>> {
        let pending = self.pool.submit(calls.iter().map(Value::to_string).collect());
        assert_eq!(pending.len(), calls.len());
        self.runtime.block_on(async {
            let mut results = Vec::new();
            for call in pending {
                results.push(call.result().await);
            }
            results
        })
    }
}

#[test]
fn a_function_gets_its_arguments_and_returns_json() {
    let Some(fixture) = fixture("search") else { return };
    assert_eq!(fixture.loaded, json!({"function": "search", "signature": "(query, limit=3)"}));
    let calls = [json!({"args": ["weather"]}), json!({"kwargs": {"query": "news", "limit": 1}})];
    let results = fixture.call(&calls);
    let result = |number: usize| results[number].as_ref().unwrap();
    assert_eq!((&result(0)["query"], &result(0)["hits"]), (&json!("weather"), &json!([0, 1, 2])));
    assert_eq!((&result(1)["query"], &result(1)["hits"]), (&json!("news"), &json!([0])));
    let workers = &fixture.pool.processes()[1..];
    assert!(workers.iter().any(|pid| result(0)["pid"] == json!(pid)), "{workers:?} {results:?}");
    let Err(CallError::Failed { reason }) = &fixture.call(&[json!({"args": []})])[0] else {
        panic!("it ran")
    };
    assert!(reason.contains("missing 1 required positional argument: 'query'"), "{reason}");
}

#[test]
fn coroutines_run_together() {
    let Some(fixture) = fixture("wait") else { return };
    let calls = vec![json!({"args": [0.25]}); 20];
    assert_eq!(fixture.call(&calls), vec![Ok(json!(0.25)); 20]);
}

#[test]
fn a_failing_call_affects_no_other() {
    let Some(fixture) = fixture("misbehave") else { return };
    let calls = ["a", "hang", "b", "die", "c", "nan"].map(|what| json!({"args": [what]}));
    let results = fixture.call(&calls);
    for (number, what) in [(0, "a"), (2, "b"), (4, "c")] {
        assert_eq!(results[number], Ok(json!(what)));
    }
    assert_eq!(results[1], Err(CallError::Timeout));
    for (number, part) in [(3, "exit status 3"), (5, "cannot be written as JSON")] {
        let Err(CallError::Failed { reason }) = &results[number] else { panic!("{:?}", results[number]) };
        assert!(reason.contains(part), "{reason}");
    }
    // One worker was killed at the timeout, and the call that died was tried twice.
    assert_eq!(fixture.pool.replaced(), 3);
}

async fn count(session: &mut Session, what: &str) -> Result<(u64, u64), CallError> {
    let arguments = json!({"kwargs": {"what": what}}).to_string();
    let counted = session.call(arguments, Duration::from_millis(500)).await?;
    Ok((counted[0].as_u64().unwrap(), counted[1].as_u64().unwrap()))
}

#[test]
fn a_session_keeps_its_process_and_the_process_its_state() {
    let Some((server, runtime, _directory)) = server(COUNTER, "count") else { return };
    let pool = SessionPool::start(server, SessionOptions { processes: 2 });
    runtime.block_on(async {
        let mut first = pool.open().await.unwrap();
        let mut second = pool.open().await.unwrap();
        let (_, pid) = count(&mut first, "").await.unwrap();
        assert_eq!(count(&mut first, "").await.unwrap(), (2, pid));
        let raised = count(&mut first, "raise").await.unwrap_err().to_string();
        assert!(raised.contains("no such move"), "{raised}");
        assert_eq!(count(&mut first, "").await.unwrap(), (4, pid), "an exception ends nothing");
        let (counted, other) = count(&mut second, "").await.unwrap();
        assert!(counted == 1 && other != pid, "sessions have processes of their own");
        let third = tokio::time::timeout(Duration::from_millis(200), pool.open()).await;
        assert!(third.is_err(), "there are two processes");
        first.finish();
        let mut third = pool.open().await.unwrap();
        assert_eq!(count(&mut third, "").await.unwrap(), (5, pid), "the process is used again");
    });
}

#[test]
fn a_session_whose_process_ended_fails_and_the_next_one_does_not() {
    let Some((server, runtime, _directory)) = server(COUNTER, "count") else { return };
    let pool = SessionPool::start(server, SessionOptions { processes: 1 });
    runtime.block_on(async {
        for (what, said) in [("hang", "longer than its timeout"), ("die", "ended with exit status 3")] {
            let mut session = pool.open().await.unwrap();
            let failed = count(&mut session, what).await.unwrap_err().to_string();
            assert!(failed.contains(said), "{failed}");
            let after = count(&mut session, "").await.unwrap_err().to_string();
            assert!(after.contains("its process ended"), "{after}");
            session.finish();
        }
        let mut session = pool.open().await.unwrap();
        assert_eq!(count(&mut session, "").await.unwrap().0, 1);
    });
}
