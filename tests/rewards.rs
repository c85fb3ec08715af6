//! Rewards in whole runs: reward models, custom programs, rewards without a model, Python functions, slow rewards.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Done, Home, Run, Running, repository};

/// `rlrun serve reward`, until it is dropped.
struct Served {
    url: String,
    _process: Running,
}

impl Served {
    fn start(home: &Home, args: &[&str]) -> Self {
        let mut process = home.start(&[&["serve", "reward", "--listen", "127.0.0.1:0"], args].concat());
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Self { url, _process: process }
    }
}

/// Requests in OpenRLHF's form are answered; requests without a token and malformed requests are refused.
#[test]
fn a_served_reward_model_answers_valid_requests_and_refuses_others() {
    let home = Home::new();
    let model = repository().join("model/tests/goldens/scorer_qwen2");
    home.write("token", "s3cret\n");
    let args = ["--model", model.to_str().unwrap(), "--token-file", "token"];
    let open = ["serve", "reward", "--model", args[1], "--listen", "0.0.0.0:0"];
    home.rlrun(&open).refused(&["not on loopback", "--token-file"]);
    let served = Served::start(&home, &args);
    let cases: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(model.join("scores.json")).unwrap()).unwrap();
    // The golden model reads characters, and its last token ends the text.
    let query = |case: &Value| {
        format!("{}{}</s>", case["prompt"].as_str().unwrap(), case["completion"].as_str().unwrap())
    };
    let asked = serde_json::json!({ "query": cases.iter().map(query).collect::<Vec<_>>() });
    let (status, said) = post(&format!("{}/get_reward", served.url), Some("s3cret"), &asked.to_string());
    assert_eq!(status, 200, "{said}");
    let rewards = said["rewards"].as_array().unwrap();
    assert_eq!(rewards.len(), cases.len());
    for (reward, case) in rewards.iter().zip(&cases) {
        assert!((reward.as_f64().unwrap() - case["score"].as_f64().unwrap()).abs() < 2e-5, "{reward} {case}");
    }
    for (token, body, status) in [
        (None, asked.to_string(), 401),
        (Some("s3cres"), asked.to_string(), 401),
        (Some("s3cret"), "{".to_owned(), 422),
        (Some("s3cret"), "{\"query\": [\"\"]}".to_owned(), 422),
        (Some("s3cret"), format!("{{\"query\": [{}]}}", ["\"\""; 5000].join(",")), 422),
        (Some("s3cret"), format!("{{\"query\": [{:?}]}}", "x".repeat(1000)), 422),
    ] {
        let (found, said) = post(&format!("{}/get_reward", served.url), token, &body);
        assert_eq!(found, status, "{said}");
        assert!(said["detail"].is_string(), "{said}");
    }
    let host = served.url.strip_prefix("http://").unwrap();
    let mut stream = std::net::TcpStream::connect(host).unwrap();
    let head = format!("GET /healthz HTTP/1.1\r\nhost: {host}\r\nhost: other\r\nconnection: close\r\n\r\n");
    std::io::Write::write_all(&mut stream, head.as_bytes()).unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    // As a reward, with the token from the environment; without the token the run is refused.
    let rewards =
        format!("[[rewards]]\nkind = \"model\"\nurl = \"{}\"\ntoken_env = \"RM_TOKEN\"\n", served.url);
    home.write("remote.toml", format!("extends = \"small.toml\"\n{rewards}"));
    home.rlrun(&["check", "remote.toml"]).refused(&["`RM_TOKEN`, which is not set"]);
}

/// Status and body of a request.
fn post(url: &str, token: Option<&str>, body: &str) -> (u16, Value) {
    let rest = url.strip_prefix("http://").unwrap();
    let (host, path) = rest.split_once('/').unwrap();
    let mut stream = std::net::TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    let token = token.map_or(String::new(), |token| format!("authorization: Bearer {token}\r\n"));
    let head = format!("POST /{path} HTTP/1.1\r\nhost: {host}\r\n{token}connection: close\r\n");
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap())
}

/// Trains a small reward model and returns the `[[rewards]]` entry that asks it.
fn reward_model(home: &Home, keys: &str) -> String {
    let base = repository().join("recipes/reward_model_math.toml");
    let text = format!(
        "extends = {base:?}\n[data.arithmetic]\ntrain_tasks = 800\neval_tasks = 50\n[trainer]\nsteps = 25\n"
    );
    home.write("rm.toml", text);
    if !home.path("rm").exists() {
        home.rlrun(&["rm.toml", "--run-dir", "rm", "--quiet"]).ok();
    }
    let path = home.run("rm").checkpoint(25).join("model");
    format!("[[rewards]]\nkind = \"model\"\npath = {path:?}\n{keys}\n")
}

/// A recipe like `small.toml` with these rewards, run with `sets`.
fn run_with(home: &Home, name: &str, rewards: &str, sets: &[&str]) -> (Run, Done) {
    home.write(&format!("{name}.toml"), format!("extends = \"small.toml\"\n{rewards}"));
    let file = format!("{name}.toml");
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let args: Vec<&str> = [&file[..], "--run-dir", name].into_iter().chain(sets).collect();
    let done = home.rlrun(&args).ok();
    (home.run(name), done)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The run does not depend on where a reward model computes, nor on whether it stays in memory.
#[test]
fn a_reward_model_gives_equal_scores_in_every_placement() {
    let home = Home::new();
    let sync = ["buffer.max_staleness=0", "trainer.steps=2"];
    let run = |name: &str, keys: &str, sets: &[&str]| {
        let rewards = reward_model(&home, keys);
        let (run, _) = run_with(&home, name, &rewards, &[&sync, sets].concat());
        let weights = std::fs::read(run.checkpoint(2).join("model/model.safetensors")).unwrap();
        (run.values("reward/model/mean"), weights)
    };
    let separated = run("separated", "placement = \"separated\"\nthreads = 1", &[]);
    let swapped =
        run("swapped", "placement = \"colocated\"\nbatch_tokens = 100", &["placement.memory_mib=0"]);
    // Samplers ask it for training, the trainer for evaluations.
    let process = run("process", "placement = \"separated\"\nthreads = 1", &["placement.processes=true"]);
    let served = Served::start(&home, &["--model", "rm/checkpoints/step_000025/model"]);
    let rewards = format!("[[rewards]]\nkind = \"model\"\nurl = \"{}\"\n", served.url);
    let (elsewhere, _) = run_with(&home, "elsewhere", &rewards, &sync);
    let weights = std::fs::read(elsewhere.checkpoint(2).join("model/model.safetensors")).unwrap();
    assert_eq!(separated, (elsewhere.values("reward/model/mean"), weights));
    assert_eq!(separated, swapped);
    assert_eq!(separated, process);
    assert!(separated.0.iter().any(|mean| *mean != separated.0[0]), "{:?}", separated.0);
}

/// A policy that is trained against a reward model learns to answer better.
#[test]
fn a_policy_learns_from_a_reward_model() {
    let home = Home::new();
    let rewards = reward_model(&home, "[[rewards]]\nkind = \"math\"\nweight = 0");
    // Synchronous, so that the numbers compared here are always the same.
    let sets =
        ["trainer.steps=20", "trainer.learning_rate=3e-3", "warmup.steps=200", "buffer.max_staleness=0"];
    let (run, _) = run_with(&home, "run", &rewards, &sets);
    let scores = run.values("reward/model/mean");
    let (before, after) = (mean(&scores[..5]), mean(&scores[15..]));
    assert!(after > before + 0.5, "the score of the model: {scores:?}");
    assert!(run.values("reward/model/latency_p50_s").iter().all(|seconds| *seconds > 0.0));
    assert_eq!(run.values("reward/math/weight"), vec![0.0; 20]);
}

/// Reference and critic give the same bits in memory beside the policy and in turns with it.
#[test]
fn reference_and_critic_give_equal_results_in_every_placement() {
    let home = Home::new();
    let base = [
        "buffer.max_staleness=0",
        "trainer.steps=3",
        "algorithm.kind=\"ppo\"",
        "algorithm.kl_coef=0.05",
        "critic.learning_rate=1e-3",
        "critic.pretrain_steps=1",
    ];
    let run = |name: &str, sets: &[&str]| {
        let run = home.small(name, &[&base, sets].concat());
        let read = |file: &str| std::fs::read(run.checkpoint(3).join(file)).unwrap();
        (read("model/model.safetensors"), read("critic/model/model.safetensors"), run.values("kl/ref"))
    };
    let turns = run("turns", &[]);
    let beside = run("beside", &["placement.reference=\"separated\"", "placement.critic=\"separated\""]);
    let swapped = run("swapped", &["placement.memory_mib=0"]);
    assert!(turns == beside, "separated differs");
    assert!(turns == swapped, "swapped differs");
    assert!(turns.2.iter().any(|kl| *kl != 0.0), "{:?}", turns.2);
    let idle = ["check", "small.toml", "--set", "placement.critic=\"separated\""];
    home.rlrun(&idle).refused(&["`placement.critic` has no effect"]);
}

/// `examples/custom_reward.rs` as cargo built it beside the program.
fn custom_program() -> std::path::PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_rlrun"));
    program.parent().unwrap().join("examples/custom_reward")
}

#[test]
fn a_custom_program_has_its_reward_and_every_command() {
    let home = Home::new();
    home.write(
        "own.toml",
        "extends = \"small.toml\"\n[[rewards]]\nkind = \"vowels\"\non_error = \"zero\"\n[[rewards]]\nkind = \"math\"\n",
    );
    home.rlrun(&["check", "own.toml"]).refused(&["there is no reward of kind \"vowels\""]);
    let own = |args: &[&str]| {
        let output = Command::new(custom_program()).args(args).current_dir(home.path("")).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Done { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) }
    };
    let misspelt = home.write("misspelt.toml", "extends = \"own.toml\"\n[[rewards]]\nkind = \"vowel\"\n");
    own(&["check", misspelt.to_str().unwrap()]).refused(&["did you mean \"vowels\"?"]);
    let done = own(&["own.toml", "--run-dir", "run", "--set", "trainer.steps=2"]).ok();
    let steps = home.run("run").steps();
    assert_eq!(steps.len(), 2);
    // Additions have no letters, so the function fails for every completion, and the step line names it.
    assert!(steps.iter().all(|step| step["reward/vowels/errors"].as_f64().unwrap() > 0.0), "{steps:?}");
    assert!(done.stdout.contains("reward `vowels`: "), "{}", done.stdout);
}

#[test]
fn rewards_run_without_a_model() {
    let home = Home::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_rlrun"))
        .args(["reward", "grade", "math", "--gold-field", "gold", "--pred-field", "said"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let cases = "{\"gold\": \"1/2\", \"said\": \"so \\\\boxed{0.5}\"}\n{\"gold\": \"7\", \"said\": \"8\"}\n";
    child.stdin.take().unwrap().write_all(cases.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let lines: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.iter().map(|line| line["score"].as_f64()).collect::<Vec<_>>(), [Some(1.0), Some(0.0)]);
    assert!(lines.iter().all(|line| line["decided_by"].is_string()), "{lines:?}");

    home.write("try.toml", "extends = \"small.toml\"\n[[rewards]]\nkind = \"math\"\nweight = 2\n");
    let shown = home.rlrun(&["reward", "test", "try.toml", "--n", "2"]).ok().stdout;
    assert_eq!(shown.matches("reference: ").count(), 2, "{shown}");
    assert_eq!(shown.matches("total 2").count(), 2, "{shown}");
    assert_eq!(shown.matches("total 0").count(), 2, "{shown}");
}

/// Whether there is a python3 that can run rewards; prints a note if not.
pub(crate) fn python_is_there() -> bool {
    let asked = "import sys; sys.exit(sys.version_info < (3, 9))";
    let there = Command::new("python3").args(["-c", asked]).status().is_ok_and(|status| status.success());
    if !there {
        eprintln!("SKIPPED: there is no python3, or it is older than 3.9");
    }
    there
}

/// The function of the README gives the verdicts of the built-in grader, and its logged numbers are metrics.
#[test]
fn a_python_function_is_a_reward() {
    if !python_is_there() {
        return;
    }
    let home = Home::new();
    let path = repository().join("examples/python_reward.py");
    let rewards = format!(
        "[[rewards]]\nkind = \"python\"\npath = {path:?}\n[[rewards]]\nkind = \"math\"\nweight = 0\n"
    );
    // Some answers are right in every step, and not because of the bits of this warm-up.
    let sets = ["trainer.steps=3", "warmup.steps=500", "trainer.learning_rate=1e-5"];
    let (run, _) = run_with(&home, "run", &rewards, &sets);
    // The grader requires a number between word boundaries, the function does not.
    for (python, math) in run.values("reward/python/mean").into_iter().zip(run.values("reward/math/mean")) {
        assert!(math > 0.02 && (math..math + 0.1).contains(&python), "{python} {math}");
    }
    assert!(
        run.steps().iter().all(|step| step["reward/python/answered"].is_number()),
        "{:?}",
        run.steps()[0]
    );
    let shown = home.rlrun(&["reward", "test", "run.toml", "--n", "1"]).ok().stdout;
    assert!(shown.contains("ends_with_answer") && shown.contains("trl"), "{shown}");
    assert!(shown.contains("are one group of 2"), "{shown}");
    let checked = home.rlrun(&["check", "run.toml"]).ok().stdout;
    assert!(checked.contains("called once per group: the 8 completions of a task in training"), "{checked}");
}

/// The processes whose working directory is `directory`; none on systems without `/proc`.
fn working_in(directory: &Path) -> Vec<String> {
    let directory = directory.canonicalize().unwrap();
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let here = |id: &String| std::fs::read_link(format!("/proc/{id}/cwd")).is_ok_and(|cwd| cwd == directory);
    processes.filter_map(name).filter(here).collect()
}

/// A function that hangs, exits, prints or exhausts memory on some completions: the run continues, counts and names the
/// failures, and trains on the other completions.
#[test]
fn a_run_survives_failures_of_a_python_function() {
    if !python_is_there() {
        return;
    }
    let home = Home::new();
    let function = "\
import os, signal, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print('judging', solution_str)
    os.write(1, b'no protocol here')
    kind = sum(solution_str.encode()) % 61
    if kind == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if kind == 1:
        os._exit(3)
    if kind == 2:
        if os.fork() == 0:
            time.sleep(600)
        raise ValueError('a bad day')
    if kind == 3:
        return bytearray(1 << 40)
    return 1.0 if solution_str.endswith(('0', '2', '4', '6', '8')) else 0.0
";
    home.write("bad.py", function);
    let rewards = "[[rewards]]\nkind = \"python\"\npath = \"bad.py\"\ntimeout_s = 0.4\nmemory_mb = 512\n";
    let (run, done) = run_with(&home, "run", rewards, &["trainer.steps=4"]);
    let total = |name: &str| run.values(name).iter().sum::<f64>();
    let (errors, timeouts) = (total("reward/python/errors"), total("reward/python/timeouts"));
    assert!(timeouts > 0.0 && errors > timeouts, "{errors} errors, {timeouts} timeouts");
    assert!(run.values("reward/mean").iter().all(|mean| (0.0..=1.0).contains(mean)));
    assert!(done.stdout.contains("reward `python`: "), "{}", done.stdout);
    let log = std::fs::read_to_string(run.path.join("logs/reward_python.log")).unwrap();
    assert!(log.contains("judging") && log.contains("no protocol here"));
    let all: Vec<_> = (1..=4).flat_map(|step| run.samples(step)).collect();
    let shown = serde_json::to_string(&all).unwrap();
    assert!(
        shown.contains("a bad day") || shown.contains("exit status 3") || shown.contains("within 0.4 s"),
        "{shown}"
    );
    // Neither workers nor their child processes remain.
    assert_eq!(working_in(&home.path("")), Vec::<String>::new());
}

/// Rewards still being computed when a run ends are cancelled; the training done is kept.
#[test]
fn a_slow_reward_is_named_and_does_not_delay_the_end() {
    if !python_is_there() {
        return;
    }
    let home = Home::new();
    home.write(
        "slow.py",
        "import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    \
         time.sleep(0.05)\n    return {'score': len(solution_str) % 2, 'mean': 99.0}\n",
    );
    let rewards = "[[rewards]]\nkind = \"python\"\npath = \"slow.py:compute_score\"\nname = \"patience\"\n";
    let sets = ["trainer.steps=2", "data.arithmetic.eval_tasks=4", "deadlines.wait_s=40"];
    let (run, done) = run_with(&home, "run", rewards, &sets);
    assert!(run.checkpoint(2).is_dir());
    assert!(done.stdout.contains("reward `patience` is slow"), "{}", done.stdout);
    // A detail cannot overwrite a metric of rlrun.
    assert!(run.values("reward/patience/mean").iter().all(|mean| *mean < 2.0));
    assert_eq!(run.values("reward/patience/detail/mean"), [99.0; 2]);
}

/// A run ends with the reason if its reward scores no completion.
#[test]
fn a_run_that_cannot_be_scored_ends_with_the_reason() {
    if !python_is_there() {
        return;
    }
    let home = Home::new();
    home.write(
        "bad.py",
        "def compute_score(data_source, solution_str, ground_truth):\n    raise ValueError('no scale')\n",
    );
    let rewards = "[[rewards]]\nkind = \"python\"\npath = \"bad.py\"\n";
    home.write("bad.toml", format!("extends = \"small.toml\"\n{rewards}"));
    let done = home.rlrun(&["bad.toml", "--run-dir", "run"]);
    assert_eq!(done.status.code(), Some(1), "{}{}", done.stdout, done.stderr);
    assert!(done.stdout.contains("no scale"), "{}", done.stdout);
    assert!(
        done.stderr.contains("nothing to learn from") && done.stderr.contains("`python`"),
        "{}",
        done.stderr
    );
    assert!(home.run("run").steps().iter().all(|step| step["reward/mean"].is_null()));
}

/// The content of a case never chooses the command.
#[test]
fn cases_cannot_choose_the_command() {
    let home = Home::new();
    home.write(
        "cases.jsonl",
        "{\"pred\": \"x\", \"pattern\": \"x\", \"path\": \"evil.py\", \"kind\": \"python\"}\n",
    );
    let grade = |kind: &str| {
        let input = std::fs::File::open(home.path("cases.jsonl")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun"));
        command.args(["reward", "grade", kind]).current_dir(home.path("")).stdin(input);
        let output = command.output().unwrap();
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    };
    assert!(grade("regex").contains("needs `pattern`"), "{}", grade("regex"));
    assert!(grade("python").contains("needs `path`"), "{}", grade("python"));
    // `format` needs no answer; `exact` does, and says so.
    assert_eq!(grade("format"), "{\"score\":0.0}\n");
    assert!(grade("exact").contains("needs a reference answer"), "{}", grade("exact"));
}
