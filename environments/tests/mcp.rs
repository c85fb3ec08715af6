//! Tools of servers of the Model Context Protocol: on standard input and output, and at an address; what they do wrong.
//!
//! Invariant: without python3 every test prints SKIPPED and passes. Servers end with their test.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use environments::{
    Action, EnvironmentContext, EnvironmentError, EnvironmentFactory, EnvironmentRegistry, EnvironmentSpec,
    EnvironmentSpecError, ToolCallFormat, ToolSpec,
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use trajectory::StopReason;

/// Variable with the token of the server at an address.
const TOKEN: &str = "RLRUN_TEST_MCP_TOKEN";
/// Limit of a call in tests in which one runs over it.
const HASTY_S: f64 = 3.0;

struct Fixture {
    factory: Arc<dyn EnvironmentFactory>,
    runtime: Runtime,
    _scratch: tempfile::TempDir,
}

fn has_python() -> bool {
    let recent = ["-c", "import sys; sys.exit(sys.version_info < (3, 9))"];
    let found = Command::new("python3").args(recent).status().is_ok_and(|status| status.success());
    if !found {
        eprintln!("SKIPPED: there is no python3, or it is older than 3.9");
    }
    found
}

fn spec(tool: ToolSpec, tool_timeout_s: f64) -> EnvironmentSpec {
    let tools = vec![ToolSpec { kind: "mcp".to_owned(), ..tool }];
    EnvironmentSpec { kind: "tools".to_owned(), tools, tool_timeout_s, ..EnvironmentSpec::default() }
}

fn program(file: &str) -> ToolSpec {
    let file = format!("{}/tests/python/{file}", env!("CARGO_MANIFEST_DIR"));
    ToolSpec { command: Some(vec!["python3".to_owned(), file]), ..ToolSpec::default() }
}

fn address(url: &str, token: Option<&str>) -> ToolSpec {
    ToolSpec { url: Some(url.to_owned()), token_env: token.map(str::to_owned), ..ToolSpec::default() }
}

fn build(spec: &EnvironmentSpec) -> Result<Fixture, EnvironmentSpecError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let token = (TOKEN.to_owned(), "open sesame".to_owned());
    let context = EnvironmentContext {
        format: Some(ToolCallFormat::Hermes),
        runtime: Some(runtime.handle().clone()),
        variables: Arc::new(std::env::vars().chain([token]).collect::<BTreeMap<_, _>>()),
        scratch: scratch.path().to_path_buf(),
    };
    let factory = EnvironmentRegistry::builtin().build(spec, &context)?;
    Ok(Fixture { factory, runtime, _scratch: scratch })
}

impl Fixture {
    /// What the model reads after a call, in an episode of its own.
    async fn called(&self, name: &str, arguments: Value) -> Result<String, EnvironmentError> {
        let text = format!("<tool_call>{}</tool_call>", json!({"name": name, "arguments": arguments}));
        let action = Action { turn: 0, role: 0, text: &text, stop: StopReason::StopToken, last: false };
        let observation = self.factory.create().step(action).await?;
        Ok(observation.messages[0].content.clone())
    }

    fn call(&self, name: &str, arguments: Value) -> Result<String, EnvironmentError> {
        self.runtime.block_on(self.called(name, arguments))
    }
}

#[test]
fn tools_of_a_program() {
    if !has_python() {
        return;
    }
    let fixture = build(&spec(program("mcp_server.py"), 60.0)).unwrap();
    let names: Vec<&str> = fixture.factory.tools().iter().map(|tool| &tool.name[..]).collect();
    assert_eq!(names, ["add", "liar", "die", "wait", "flood", "process"]);
    assert_eq!(fixture.call("add", json!({"a": 2, "b": 40})).unwrap(), "42");
    assert_eq!(fixture.call("liar", json!({})).unwrap(), "error: an argument is missing after all");
    assert!(fixture.call("add", json!({"a": 2})).unwrap().contains("lacks the argument \"b\""));
    let ended = fixture.call("die", json!({})).unwrap_err().to_string();
    assert!(ended.contains("the server of die failed"), "{ended}");
    assert_eq!(fixture.call("add", json!({"a": 1, "b": 1})).unwrap(), "2", "it is started again");
    let refused = build(&spec(program("nothing.py"), 60.0)).map(|_| ()).unwrap_err();
    assert_eq!(refused.key(), "tools[0].command");
    assert!(refused.to_string().contains("does not speak the Model Context Protocol"), "{refused}");
}

#[test]
fn a_program_that_does_not_answer_a_call_is_started_again() {
    if !has_python() {
        return;
    }
    let fixture = build(&spec(program("mcp_server.py"), HASTY_S)).unwrap();
    let process = || fixture.call("process", json!({})).unwrap();
    let first = process();
    assert_eq!(process(), first);
    let late = fixture.call("wait", json!({"seconds": 1000})).unwrap();
    assert_eq!(late, "error: wait gave no answer within 3 s");
    let second = process();
    assert_ne!(second, first, "the one that hangs is left");
    // A message over the limit is passed over.
    let late = fixture.call("flood", json!({})).unwrap();
    assert_eq!(late, "error: flood gave no answer within 3 s");
    assert_ne!(process(), second);
    assert_eq!(fixture.call("add", json!({"a": 2, "b": 40})).unwrap(), "42");
}

/// The server at an address, which is ended with the test.
struct McpAtAddress {
    process: Child,
    url: String,
}

impl McpAtAddress {
    fn start() -> Self {
        let server = format!("{}/tests/python/mcp_http_server.py", env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new("python3");
        let mut process = command.arg(server).stdout(Stdio::piped()).spawn().unwrap();
        let mut port = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut port).unwrap();
        Self { process, url: format!("http://127.0.0.1:{}/mcp", port.trim()) }
    }
}

impl Drop for McpAtAddress {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn tools_of_a_server_at_an_address() {
    if !has_python() {
        return;
    }
    let server = McpAtAddress::start();
    let fixture = build(&spec(address(&server.url, Some(TOKEN)), 60.0)).unwrap();
    assert_eq!(fixture.factory.tools().len(), 6);
    assert_eq!(fixture.call("add", json!({"a": 2, "b": 40})).unwrap(), "42");
    assert_eq!(fixture.call("liar", json!({})).unwrap(), "error: an argument is missing after all");
    let ended = fixture.call("die", json!({})).unwrap_err().to_string();
    assert!(ended.contains("the server of die failed") && ended.contains("500"), "{ended}");
    assert_eq!(fixture.call("add", json!({"a": 1, "b": 1})).unwrap(), "2", "it gets a new session");
    let flood = fixture.call("flood", json!({})).unwrap();
    assert!(flood.contains("its answer has more than 8388608 bytes"), "{flood}");

    let refused = |url: &str, token: Option<&str>| {
        let error = build(&spec(address(url, token), 60.0)).map(|_| ()).unwrap_err();
        assert_eq!(error.key(), "tools[0].url");
        error.to_string()
    };
    let error = refused(&server.url, None);
    assert!(error.contains("401") && error.contains("no token"), "{error}");
    assert!(refused(&server.url, Some("RLRUN_NOT_SET")).contains("RLRUN_NOT_SET, which is not set"));
    assert!(refused("localhost", None).contains("name http://HOST:PORT/PATH"));
}

/// A call that runs over its time is over by itself: one that another episode waits for is answered after it.
#[test]
fn a_late_answer_at_an_address_costs_no_other_call() {
    if !has_python() {
        return;
    }
    let server = McpAtAddress::start();
    let fixture = build(&spec(address(&server.url, Some(TOKEN)), HASTY_S)).unwrap();
    let late = fixture.called("wait", json!({"seconds": 1000}));
    let other = async {
        tokio::time::sleep(Duration::from_secs_f64(HASTY_S / 2.0)).await;
        fixture.called("wait", json!({"seconds": HASTY_S * 0.7})).await
    };
    let (late, other) = fixture.runtime.block_on(async { tokio::join!(late, other) });
    assert_eq!(late.unwrap(), "error: wait gave no answer within 3 s");
    assert_eq!(other.unwrap(), "waited");
    assert_eq!(fixture.call("add", json!({"a": 1, "b": 1})).unwrap(), "2");
}
