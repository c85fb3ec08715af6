//! Environments of users in Python: the conventions of TRL, skyrl-gym, Gymnasium and plain ones, and what goes wrong.
//!
//! Invariant: without python3 every test prints SKIPPED and passes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use environments::{
    Action, Environment, EnvironmentContext, EnvironmentError, EnvironmentFactory, EnvironmentRegistry,
    EnvironmentSpec, EnvironmentSpecError, Observation, ToolCallFormat, ToolSpec,
};
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;
use trajectory::{Message, Prompt, StopReason, Task, TaskId};

struct Fixture {
    factory: Arc<dyn EnvironmentFactory>,
    runtime: Runtime,
    _scratch: tempfile::TempDir,
}

fn spec(file: &str) -> EnvironmentSpec {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(file);
    EnvironmentSpec { kind: "python".to_owned(), path: Some(path), ..EnvironmentSpec::default() }
}

fn build(spec: &EnvironmentSpec) -> Option<Result<Fixture, EnvironmentSpecError>> {
    let recent = ["-c", "import sys; sys.exit(sys.version_info < (3, 9))"];
    if !std::process::Command::new("python3").args(recent).status().is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: there is no python3, or it is older than 3.9");
        return None;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let context = EnvironmentContext {
        format: Some(ToolCallFormat::Hermes),
        runtime: Some(runtime.handle().clone()),
        variables: Arc::new(std::env::vars().collect::<BTreeMap<_, _>>()),
        scratch: scratch.path().to_path_buf(),
    };
    let built = EnvironmentRegistry::builtin().build(spec, &context);
    Some(built.map(|factory| Fixture { factory, runtime, _scratch: scratch }))
}

fn fixture(spec: &EnvironmentSpec) -> Option<Fixture> {
    Some(build(spec)?.unwrap())
}

fn task(columns: Value) -> Task {
    let Value::Object(columns) = columns else { panic!("{columns}") };
    let answer = columns.get("answer").and_then(Value::as_str).map(str::to_owned);
    let prompt = Prompt::Messages(vec![Message::new("user", "Begin.")]);
    Task { id: TaskId(5), prompt, answer, columns }
}

impl Fixture {
    fn open(&self, columns: Value) -> (Box<dyn Environment>, Vec<String>) {
        let mut environment = self.factory.create();
        let opened = self.runtime.block_on(environment.reset(&task(columns))).unwrap();
        (environment, opened.into_iter().map(|message| message.content).collect())
    }

    fn step(
        &self,
        environment: &mut dyn Environment,
        turn: usize,
        text: &str,
    ) -> Result<Observation, EnvironmentError> {
        let last = turn + 1 == self.factory.limits().max_turns;
        let action = Action { turn, role: 0, text, stop: StopReason::StopToken, last };
        self.runtime.block_on(environment.step(action))
    }
}

fn contents(observation: &Observation) -> Vec<&str> {
    observation.messages.iter().map(|message| &message.content[..]).collect()
}

#[test]
fn methods_of_an_environment_of_trl_are_tools() {
    let Some(fixture) = fixture(&spec("trl_counter.py")) else { return };
    let [increment] = fixture.factory.tools() else { panic!("{:?}", fixture.factory.tools()) };
    assert_eq!(
        serde_json::to_value(increment).unwrap(),
        json!({"name": "increment", "description": "Increments the counter.", "parameters": {
            "type": "object",
            "properties": {
                "step": {"type": "integer", "description": "how far"},
                "times": {"type": "integer", "description": "how often"},
            },
            "required": ["step"],
        }})
    );
    let about = fixture.factory.about().unwrap();
    assert!(about.contains("`CounterEnv` in the convention of trl with the tools increment"), "{about}");
    let (mut environment, opened) = fixture.open(json!({"answer": "5"}));
    assert_eq!(opened, ["Count to 5."]);
    let call = |step: i64| {
        format!(
            "<tool_call>{{\"name\": \"increment\", \"arguments\": {{\"step\": {step}, \"times\": 2}}}}</tool_call>"
        )
    };
    let observation = fixture.step(&mut *environment, 0, &call(2)).unwrap();
    assert_eq!((contents(&observation), observation.done), (vec!["4"], false));
    let observation = fixture.step(&mut *environment, 1, &call(-1)).unwrap();
    assert_eq!(contents(&observation), ["error: ValueError: a step is at least 0"]);
    assert_eq!(observation.counts["bad_calls"], 1);
    let half = "<tool_call>{\"name\": \"increment\", \"arguments\": {\"step\": 1}}</tool_call>";
    fixture.step(&mut *environment, 2, half).unwrap();
    let observation = fixture.step(&mut *environment, 3, "It is 5.").unwrap();
    assert_eq!((observation.done, observation.reward), (true, Some(1.0)));
    drop(environment);
    let (mut again, _) = fixture.open(json!({"answer": "1"}));
    let observation = fixture.step(&mut *again, 15, half).unwrap();
    assert_eq!((observation.done, observation.reward), (false, Some(1.0)), "the last turn that is allowed");
}

/// The state of the environment is in the process that hangs: the episode cannot go on without it.
#[test]
fn a_method_that_hangs_fails_its_episode_in_time() {
    let spec = EnvironmentSpec { tool_timeout_s: 1.0, ..spec("trl_hanging.py") };
    let Some(fixture) = fixture(&spec) else { return };
    let wait = |seconds: f64| {
        format!("<tool_call>{}</tool_call>", json!({"name": "wait", "arguments": {"seconds": seconds}}))
    };
    let (mut environment, _) = fixture.open(json!({}));
    assert_eq!(contents(&fixture.step(&mut *environment, 0, &wait(0.01)).unwrap()), ["done"]);
    let failed = fixture.step(&mut *environment, 1, &wait(1000.0)).unwrap_err().to_string();
    assert!(failed.contains("wait gave no answer within 1 s"), "{failed}");
    let (mut other, _) = fixture.open(json!({}));
    assert_eq!(contents(&fixture.step(&mut *other, 0, &wait(0.01)).unwrap()), ["done"]);
}

#[test]
fn environments_of_skyrl_gym_and_gymnasium_are_played_as_they_are() {
    let Some(echo) = fixture(&spec("skyrl_echo.py")) else { return };
    let (mut environment, opened) = echo.open(json!({"answer": "whale"}));
    assert_eq!(opened, ["Say it."]);
    let observation = echo.step(&mut *environment, 0, "bird").unwrap();
    assert_eq!((contents(&observation), observation.reward), (vec!["No, not bird."], Some(0.0)));
    let observation = echo.step(&mut *environment, 1, " whale").unwrap();
    assert_eq!((observation.done, observation.reward), (true, Some(1.0)));

    let parameters = Map::from_iter([("length".to_owned(), json!(2))]);
    let line = fixture(&EnvironmentSpec { parameters, ..spec("gym_line.py") }).unwrap();
    let (mut environment, opened) = line.open(json!({}));
    assert_eq!(opened, ["place 0 of 2"]);
    assert_eq!(contents(&line.step(&mut *environment, 0, "I go 1").unwrap()), ["place 1"]);
    let observation = line.step(&mut *environment, 1, "1").unwrap();
    assert_eq!((observation.done, observation.reward), (true, Some(1.0)));
}

#[test]
fn an_environment_that_fails_fails_its_episode_alone() {
    let spec = |turn_timeout_s: f64| EnvironmentSpec {
        path: Some(PathBuf::from(format!("{}/tests/python/misbehaving.py:Bad", env!("CARGO_MANIFEST_DIR")))),
        turn_timeout_s,
        ..spec("")
    };
    let fails = |fixture: &Fixture, what: &str, said: &str| {
        let (mut environment, _) = fixture.open(json!({"what": what}));
        let failed = fixture.step(&mut *environment, 0, "go").unwrap_err().to_string();
        assert!(failed.contains(said), "{what}: {failed}");
    };
    let Some(hasty) = fixture(&spec(1.0)) else { return };
    fails(&hasty, "hang", "gave no answer in turn 0 within 1.0 s");
    let Some(fixture) = fixture(&spec(600.0)) else { return };
    for (what, said) in [
        ("die", "ended with exit status 7"),
        ("raise", "RuntimeError: the board is gone"),
        ("flood", "more than"),
        ("nan", "not a finite number"),
        ("odd", "`step` returned int"),
    ] {
        fails(&fixture, what, said);
    }
    let (mut environment, _) = fixture.open(json!({"what": "fork"}));
    fixture.step(&mut *environment, 0, "go").unwrap();
    let (mut environment, _) = fixture.open(json!({"what": "nothing"}));
    let observation = fixture.step(&mut *environment, 0, "go").unwrap();
    assert_eq!((contents(&observation), observation.reward), (vec!["again"], Some(0.5)));
}

#[test]
fn a_file_without_an_environment_is_refused() {
    let missing = spec("nothing.py");
    let Some(Err(error)) = build(&missing) else { return };
    assert_eq!(error.key(), "path");
    let named = |name: &str| {
        let path = format!("{}/tests/python/misbehaving.py:{name}", env!("CARGO_MANIFEST_DIR"));
        EnvironmentSpec { path: Some(path.into()), ..spec("") }
    };
    let refused = |spec: &EnvironmentSpec| build(spec).unwrap().map(|_| ()).unwrap_err().to_string();
    assert!(refused(&named("Nowhere")).contains("no class or function `Nowhere`"));
    assert!(
        refused(&named("NoEnvironment")).contains("fits no convention"),
        "{}",
        refused(&named("NoEnvironment"))
    );
    assert!(
        refused(&EnvironmentSpec { dialect: Some("verl".to_owned()), ..named("Bad") })
            .contains("there are trl")
    );
}

/// Calls of the functions of a file and of the interpreter, as the model writes them.
#[test]
fn functions_and_programs_are_tools() {
    let tool =
        |kind: &str, path: Option<PathBuf>| ToolSpec { kind: kind.to_owned(), path, ..ToolSpec::default() };
    let functions = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/functions.py");
    let spec = |tool_timeout_s: f64| EnvironmentSpec {
        kind: "tools".to_owned(),
        tools: vec![tool("python", Some(functions.clone())), tool("code", None)],
        tool_timeout_s,
        ..EnvironmentSpec::default()
    };
    let fixture = match build(&spec(600.0)) {
        None => return,
        Some(Err(error)) if error.key() == "tools[1].kind" => {
            eprintln!("SKIPPED: no sandbox works here: {error}");
            return;
        }
        Some(built) => built.unwrap(),
    };
    let names: Vec<&str> = fixture.factory.tools().iter().map(|tool| &tool.name[..]).collect();
    assert_eq!(names, ["area", "misbehave", "python"]);
    let area = serde_json::to_value(&fixture.factory.tools()[0]).unwrap();
    assert_eq!(
        area["parameters"]["properties"]["unit"],
        json!({"enum": ["m", "km"], "type": "string", "description": "of both"})
    );
    let answers = |fixture: &Fixture, name: &str, arguments: Value, said: &str| {
        let (mut environment, _) = fixture.open(json!({}));
        let call = json!({"name": name, "arguments": arguments});
        let text = format!("<tool_call>{call}</tool_call>");
        let observation = fixture.step(&mut *environment, 0, &text).unwrap();
        let [answer] = &contents(&observation)[..] else { panic!("{observation:?}") };
        assert!(answer.contains(said), "{call}: {answer}");
        assert!(answer.len() < 20_000, "{} bytes", answer.len());
    };
    for (name, arguments, said) in [
        ("area", json!({"width": 2.5, "height": 4}), "10.0 m2"),
        ("area", json!({"width": 2.5}), "error: the call of area lacks the argument \"height\""),
        ("misbehave", json!({"what": "raise"}), "error: KeyError: 'no such key'"),
        ("misbehave", json!({"what": "die"}), "error: its process"),
        ("misbehave", json!({"what": "flood"}), "error: the result of the function is"),
        ("misbehave", json!({"what": "long"}), "characters left out"),
        ("misbehave", json!({"what": "fork"}), "characters left out"),
        ("misbehave", json!({"what": "print"}), "printed"),
        ("nothing", json!({}), "error: there is no tool \"nothing\"; the tools are area, misbehave, python"),
        ("python", json!({"code": "print(6 * 7)"}), "42"),
        ("python", json!({"code": "import socket; socket.socket()"}), "exit code 1"),
        ("python", json!({"code": "1"}), "it printed nothing"),
    ] {
        answers(&fixture, name, arguments, said);
    }
    let hasty = self::fixture(&spec(1.0)).unwrap();
    answers(&hasty, "misbehave", json!({"what": "hang"}), "error: misbehave gave no answer");
    let endless =
        "<tool_call>{\"name\": \"python\", \"arguments\": {\"code\": \"while True: pass\"}}</tool_call>";
    let (mut environment, _) = hasty.open(json!({}));
    let observation = hasty.step(&mut *environment, 0, endless).unwrap();
    let [answer] = &contents(&observation)[..] else { panic!("{observation:?}") };
    // The sandbox or the limit of the tool ends it.
    assert!(answer.contains("it took too long") || answer.contains("gave no answer"), "{answer}");
}

#[test]
fn an_environment_of_several_roles_says_who_acts_and_rewards_each() {
    let parameters = Map::from_iter([("rounds".to_owned(), json!(2))]);
    let spec = EnvironmentSpec { parameters, ..spec("debate.py") };
    let Some(fixture) = fixture(&spec) else { return };
    assert_eq!(fixture.factory.roles(), ["asker", "solver"]);
    assert!(fixture.factory.about().unwrap().contains("roles asker, solver"));
    let (mut environment, opened) = fixture.open(json!({"topic": "words"}));
    assert_eq!(opened, ["ask about words"]);
    let mut say = |turn: usize, role: usize, text: &str| {
        let action = Action { turn, role, text, stop: StopReason::StopToken, last: false };
        fixture.runtime.block_on(environment.step(action))
    };
    let asked = say(0, 0, "abc").unwrap();
    assert_eq!((asked.next_role, asked.reward, contents(&asked)), (1, Some(0.0), vec!["solve abc"]));
    let solved = say(1, 1, "cba").unwrap();
    assert_eq!((solved.next_role, solved.reward, &solved.other_rewards[..]), (0, Some(1.0), &[(0, 0.0)][..]));
    say(2, 0, "xy").unwrap();
    let wrong = say(3, 1, "cheat").unwrap_err().to_string();
    assert!(wrong.contains("names the role \"judge\"; its roles are asker, solver"), "{wrong}");
}
