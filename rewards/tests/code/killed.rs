//! A run that is killed leaves no program behind.
//!
//! Invariant: what is killed is a second copy of this test binary, which runs one endless program in each sandbox.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::escapes::processes_with;
use crate::{CodeFixture, stream};

/// The variables by which the copy knows what it is: the mark of its programs, the keys of its reward, and the program.
const MARK: &str = "RLRUN_TEST_MARK";
const KEYS: &str = "RLRUN_TEST_KEYS";
const PROGRAM: &str = "RLRUN_TEST_PROGRAM";

/// Long enough for any machine; a program starts and ends in a fraction of it.
const DEADLINE: Duration = Duration::from_secs(60);

/// Kills a copy of this binary with `kill -9` as soon as there is a process with the mark, after `pause`, and waits until
/// none is left.
fn kill_9(mark: &str, keys: &Value, program: &str, pause: Duration) {
    let this = std::env::current_exe().unwrap();
    // The files that the killed copy leaves are in this directory.
    let scratch = tempfile::tempdir().unwrap();
    let mut copy = Command::new(this)
        .args(["--exact", "killed::runs_an_endless_program_if_the_variables_are_set"])
        .envs([(MARK, mark), (KEYS, &keys.to_string()), (PROGRAM, program)])
        .env("TMPDIR", scratch.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while processes_with(mark).is_empty() {
        assert!(copy.try_wait().unwrap().is_none(), "{keys}: it ended by itself");
        assert!(begun.elapsed() < DEADLINE, "{keys}: no program was started");
    }
    std::thread::sleep(pause);
    copy.kill().unwrap();
    copy.wait().unwrap();
    let killed = Instant::now();
    while !processes_with(mark).is_empty() {
        assert!(killed.elapsed() < DEADLINE, "{keys}: {:?} runs on", processes_with(mark));
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn works(sandbox: &str) -> bool {
    CodeFixture::open(&json!({"sandbox": sandbox}))
        .map_err(|error| eprintln!("SKIPPED in {sandbox}: {error}"))
        .is_ok()
}

fn unique(name: &str) -> String {
    format!("rlrun-test-{}-{name}", std::process::id())
}

/// The program removes the signal that it would get when its parent dies, closes its standard streams, and executes
/// another program from a thread, which has no such signal at all.
#[test]
fn kill_9_leaves_no_program() {
    for sandbox in ["bubblewrap", "landlock", "none"].into_iter().filter(|sandbox| works(sandbox)) {
        let mark = unique(sandbox);
        let program = format!(
            "import ctypes, os, threading\n\
             ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n\
             os.closerange(0, 3)\n\
             loop = ['sh', '-c', 'while :; do :; done', {mark:?}]\n\
             threading.Thread(target=os.execv, args=('/bin/sh', loop)).start()"
        );
        let keys = json!({"sandbox": sandbox, "timeout_s": 120, "cpu_s": 120});
        kill_9(&mark, &keys, &format!("```python\n{program}\n```"), Duration::from_millis(100));
    }
}

/// A kill at any moment of a start, also before the sandbox is complete.
#[test]
fn kill_9_while_a_program_starts_leaves_none() {
    for sandbox in ["bubblewrap", "landlock"].into_iter().filter(|sandbox| works(sandbox)) {
        for attempt in 0..8 {
            let mark = unique(&format!("{sandbox}-{attempt}"));
            // The mark is an argument, so that `bwrap` is seen with it too.
            let command = json!(["/bin/sh", "{file}", mark]);
            let keys = json!({
                "sandbox": sandbox, "timeout_s": 120, "cpu_s": 120, "language": "sh", "command": command
            });
            let pause = Duration::from_millis(attempt);
            kill_9(&mark, &keys, "```sh\nwhile :; do :; done\n```", pause);
        }
    }
}

#[test]
fn runs_an_endless_program_if_the_variables_are_set() {
    let variable = |name: &str| std::env::vars().find(|(found, _)| found == name).map(|(_, value)| value);
    let (Some(keys), Some(program)) = (variable(KEYS), variable(PROGRAM)) else { return };
    let bench = CodeFixture::open(&serde_json::from_str(&keys).unwrap()).unwrap();
    // Killed, or ended by its limits.
    let _ = bench.judge(&stream("", ""), &program);
}
