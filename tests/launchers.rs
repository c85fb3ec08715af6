//! Runs that a launcher starts: the same command every time and on every machine, with the run's own certificate.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{CORRECT, Done, Home, Moment, Run, Running, finish, interrupt, signal};
use crate::workers::{every_group_once, until};

/// The command of a run with `flags` and `sets`.
fn command<'a>(flags: &[&'a str], sets: &[&'a str]) -> Vec<&'a str> {
    let sets = [CORRECT].iter().chain(sets).flat_map(|set| ["--set", *set]).collect::<Vec<_>>();
    [&["-q", "small.toml", "--run-dir", "run"], flags, &sets[..]].concat()
}

/// Whether a sampler whose name begins so has applied weights, as the status file of the run says.
fn samples(run: &Run, name: &str) -> bool {
    let text = fs::read_to_string(run.path.join("status.json")).unwrap_or_default();
    let status: Value = serde_json::from_str(&text).unwrap_or_default();
    let receivers = status["weights"]["receivers"].as_array().cloned().unwrap_or_default();
    receivers.iter().any(|receiver| {
        receiver["name"].as_str().is_some_and(|other| other.starts_with(name)) && receiver["version"].is_u64()
    })
}

#[test]
fn one_command_starts_a_run_continues_it_and_finds_it_done() {
    let home = Home::new();
    let run = home.run("run");
    let start = |sets: &[&str]| home.start(&command(&["--resume-or-start"], sets));
    let mut child = start(&["trainer.steps=100000"]);
    assert!(run.wait_for(Moment::Step(3), &mut child));
    signal(&child, "TERM");
    let stopped = finish(child);
    assert_eq!(stopped.status.code(), Some(75), "{}", stopped.stderr);
    let steps = run.steps().len() as u64 + 2;
    let wanted = format!("trainer.steps={steps}");
    finish(start(&[&wanted])).ok();
    assert_eq!(run.steps().len() as u64, steps);
    every_group_once(&run, steps, 8).unwrap();
    finish(start(&[&wanted])).ok();
    assert_eq!(run.steps().len() as u64, steps);
    // The file is not what the run goes by, and says so.
    let text = fs::read_to_string(home.path("small.toml")).unwrap();
    home.write("small.toml", text.replace("[log]", "[deadlines]\nquiet_s = 50.0\n[log]"));
    let said = finish(start(&[&wanted])).ok().stderr;
    assert!(said.contains("deadlines.quiet_s 60.0 -> 50.0"), "{said}");
    // A value that a run keeps is not changed by accident.
    finish(start(&[&wanted, "seed=8"])).refused(&["`seed`"]);
}

/// Three processes of one command: the run, the second rank of its trainer, and a sampler. They share the run directory alone,
/// and speak TLS with a certificate that the run has made.
#[test]
fn processes_of_a_launcher_take_their_roles_from_their_ranks() {
    let home = Home::new();
    let run = home.run("run");
    let sets = [
        "buffer.listen=127.0.0.1:0",
        "buffer.credentials=keys",
        "trainer.world=2",
        "trainer.ranks=processes",
        "trainer.steps=100000",
        "trainer.learning_rate=1e-9",
    ];
    let start = |rank: &str| {
        let variables = [("SLURM_PROCID", rank), ("SLURM_STEP_NUM_TASKS", "3")];
        home.start_with(&variables, &command(&["--by-rank"], &sets))
    };
    // Workers may be first.
    let (sampler, rank, mut lead) = (start("2"), start("1"), start("0"));
    assert!(run.wait_for(Moment::Step(2), &mut lead));
    let address = fs::read_to_string(run.path.join("address.json")).unwrap();
    assert!(address.contains("https://127.0.0.1:"), "{address}");
    let shown = || fs::read_to_string(run.path.join("status.json")).unwrap_or_default();
    until("work of the sampler", &|| samples(&run, "guest rollout"), &shown);
    for file in ["tokens", "ca.pem", "ca.key"] {
        let mode = fs::metadata(home.path("keys").join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    interrupt(&lead);
    finish(lead).ok();
    let said = finish(sampler).ok();
    assert!(said.stderr.contains("joined https://127.0.0.1:"), "{}", said.stderr);
    let said = finish(rank).ok();
    assert!(said.stderr.contains("as rank 1"), "{}", said.stderr);
    assert!(!run.path.join("address.json").exists(), "the address of a run that has ended");
    every_group_once(&run, run.steps().len() as u64, 8).unwrap();
}

/// A worker that has the directory of a run needs nothing else, and one that has not needs the credentials.
#[test]
fn a_worker_trusts_the_certificate_of_its_run_alone() {
    let home = Home::new();
    let run = home.run("run");
    let sets = ["buffer.listen=127.0.0.1:0", "buffer.credentials=keys", "trainer.steps=100000"];
    let mut lead = home.start(&command(&[], &sets));
    assert!(run.wait_for(Moment::Step(1), &mut lead));
    let address: Value =
        serde_json::from_str(&fs::read_to_string(run.path.join("address.json")).unwrap()).unwrap();
    let url = address["url"].as_str().unwrap();
    let join = |place: &str, more: &[&str]| -> Running {
        let args = ["worker", "rollout", "--join", place, "--threads", "1"];
        home.start(&[&args[..], more].concat())
    };
    // Another authority, and none.
    home.rlrun(&["check", "small.toml", "--set", CORRECT, "--set", "buffer.listen=10.0.0.1:8700"]).ok();
    for more in [&["--patience", "1", "--token-file", "keys/tokens"][..], &["--patience", "1"]] {
        let refused = finish(join(url, more));
        assert_eq!(refused.status.code(), Some(75), "{}", refused.stderr);
        assert!(refused.stderr.contains("certificate"), "{}", refused.stderr);
    }
    let (by_directory, by_url) =
        (join("run", &["--name", "a"]), join(url, &["--credentials", "keys", "--name", "b"]));
    let shown = || fs::read_to_string(run.path.join("status.json")).unwrap_or_default();
    until("work of both", &|| samples(&run, "a") && samples(&run, "b"), &shown);
    interrupt(&lead);
    finish(lead).ok();
    finish(by_directory).ok();
    finish(by_url).ok();
}

#[test]
fn a_process_without_a_rank_or_a_run_says_what_is_missing() {
    let home = Home::new();
    home.rlrun(&command(&["--by-rank"], &[])).refused(&["--by-rank", "SLURM_PROCID", "rlrun worker rollout"]);
    home.rlrun(&["worker", "rollout"]).refused(&["--join", "RLRUN_JOIN", "SLURM_JOB_NODELIST"]);
    home.rlrun(&command(&["--interface", "ib7"], &[])).refused(&["--interface ib7", "lo"]);
    // The run has not been served yet.
    let done = home.rlrun(&["worker", "rollout", "--join", "nowhere", "--patience", "0.1"]);
    assert_eq!(done.status.code(), Some(75), "{}", done.stderr);
    assert!(done.stderr.contains("the run in nowhere"), "{}", done.stderr);
    assert!(!home.path("run").exists());
}

fn launch(home: &Home, args: &[&str]) -> Done {
    home.rlrun(&[&["launch"], args, &["--set", CORRECT, "--dry-run"]].concat())
}

/// The shell reads the script of a job, and a name of several words stays one.
#[test]
fn the_script_for_slurm_is_one_that_bash_reads() {
    let home = Home::new();
    let args = ["slurm", "small.toml", "--rollout-workers", "3", "--time", "1:00:00", "--gpus", "8"];
    let more = [
        "--set",
        "log.samples=3",
        "--run-dir",
        "a run's",
        "--sbatch=--constraint=h100",
        "--interface",
        "ib0",
    ];
    let script = launch(&home, &[&args[..], &more].concat()).ok().stdout;
    for line in [
        "#SBATCH --nodes=4",
        "#SBATCH --time=1:00:00",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --constraint=h100",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --requeue",
    ] {
        assert!(script.lines().any(|other| other == line), "{line} is missing in:\n{script}");
    }
    assert!(script.contains("for node in $(seq 1 3); do sampler \"$node\" & done"), "{script}");
    assert!(script.contains("a run'\\''s") && script.contains("--interface ib0"), "{script}");
    let mut bash = Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn().unwrap();
    bash.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(bash.wait().unwrap().success(), "{script}");
}

#[test]
fn manifests_name_the_run_its_volume_and_its_secret() {
    let home = Home::new();
    let kubernetes =
        ["kubernetes", "small.toml", "--image", "me/rlrun:1", "--volume-claim", "runs", "--name", "my-run"];
    let manifest = launch(&home, &kubernetes).ok().stdout;
    for part in [
        "kind: \"JobSet\"",
        "secretName: \"my-run-credentials\"",
        "claimName: \"runs\"",
        "\"https://my-run-lead-0-0.my-run:8700\"",
        "completions: 1",
        "batch_groups = 8",
    ] {
        assert!(manifest.contains(part), "{part} is missing in:\n{manifest}");
    }
    let port = [&kubernetes[..], &["--set", "buffer.listen=0.0.0.0:9000"]].concat();
    let manifest = launch(&home, &port).ok().stdout;
    assert!(manifest.contains("my-run:9000\"") && !manifest.contains("8700"), "{manifest}");
    let sky = [
        "skypilot",
        "small.toml",
        "--accelerators",
        "H100:8",
        "--rollout-workers",
        "2",
        "--bucket",
        "s3://b",
    ];
    let task = launch(&home, &sky).ok().stdout;
    for part in ["num_nodes: 3", "\"H100:8\"", "--by-rank", "\"s3://b\"", "75"] {
        assert!(task.contains(part), "{part} is missing in:\n{task}");
    }
    let processes: Value = serde_json::from_str(&launch(&home, &["ray", "small.toml"]).ok().stdout).unwrap();
    assert_eq!(processes["rollout_workers"], 1);
    assert!(processes["rollout"].as_array().unwrap().contains(&Value::from("URL")));
    // Nothing is written, and nothing secret is shown.
    assert!(!home.path("outputs").exists());
}

#[test]
fn the_driver_of_ray_does_not_restart_what_cannot_start() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let mut check = Command::new(python);
    check.arg(root.join("tests/launchers/driver_without_ray.py"));
    let Ok(done) = check.arg(root.join("rlrun/launchers/rlrun_ray.py")).output() else {
        eprintln!("SKIPPED: there is no python3");
        return;
    };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn what_cannot_be_launched_is_refused_before_anything_is_submitted() {
    let home = Home::new();
    launch(&home, &["slurm", "small.toml", "--set", "trainer.stepps=1"]).refused(&["trainer.stepps"]);
    launch(&home, &["skypilot", "small.toml", "--gpus", "1"]).refused(&["--accelerators"]);
    launch(&home, &["kubernetes", "small.toml", "--image", "i"]).refused(&["--volume-claim"]);
    // No client of Slurm on this path.
    let args = ["launch", "slurm", "small.toml", "--set", CORRECT];
    let done = home.rlrun_with(&[("PATH", "/nowhere")], &args);
    assert_eq!(done.status.code(), Some(1), "{}", done.stderr);
    assert!(done.stderr.contains("sbatch") && done.stderr.contains("Slurm"), "{}", done.stderr);
}
