//! A run that is killed at once leaves no program behind.
//!
//! Invariant: what is killed is a second copy of this test binary, which runs one endless program in each sandbox.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::escapes::processes_with;
use crate::{Bench, stream};

/// The variables by which the copy knows what it is: the mark of its programs, and the sandbox.
const MARK: &str = "RLRUN_TEST_MARK";
const SANDBOX: &str = "RLRUN_TEST_SANDBOX";

/// Long enough for any machine; a program is seen and gone in a fraction of it.
const DEADLINE: Duration = Duration::from_secs(60);

#[test]
fn kill_9_leaves_no_program() {
    for sandbox in ["bubblewrap", "landlock", "none"] {
        if let Err(error) = Bench::open(&json!({"sandbox": sandbox})) {
            eprintln!("SKIPPED in {sandbox}: {error}");
            continue;
        }
        // What the copy cannot tidy up lies in here.
        let scratch = tempfile::tempdir().unwrap();
        let mark = format!("{}/killed", scratch.path().display());
        let this = std::env::current_exe().unwrap();
        let mut copy = Command::new(this)
            .args(["--exact", "killed::runs_an_endless_program_if_it_is_told_to"])
            .envs([(MARK, mark.as_str()), (SANDBOX, sandbox)])
            .env("TMPDIR", scratch.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let begun = Instant::now();
        while processes_with(&mark).is_empty() {
            assert!(copy.try_wait().unwrap().is_none(), "{sandbox}: it ended by itself");
            assert!(begun.elapsed() < DEADLINE, "{sandbox}: no program was started");
            std::thread::sleep(Duration::from_millis(20));
        }
        copy.kill().unwrap();
        copy.wait().unwrap();
        let killed = Instant::now();
        while !processes_with(&mark).is_empty() {
            assert!(killed.elapsed() < DEADLINE, "{sandbox}: {:?} runs on", processes_with(&mark));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn runs_an_endless_program_if_it_is_told_to() {
    let variable = |name: &str| std::env::vars().find(|(found, _)| found == name).map(|(_, value)| value);
    let (Some(mark), Some(sandbox)) = (variable(MARK), variable(SANDBOX)) else { return };
    let bench = Bench::open(&json!({"sandbox": sandbox, "timeout_s": 120, "cpu_s": 120})).unwrap();
    let program = format!("import os\nos.execv('/bin/sh', ['sh', '-c', 'while :; do :; done', {mark:?}])");
    bench.program(&stream("", ""), &program);
}
