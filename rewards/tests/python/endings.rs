//! The end of a worker, of the parent process, of the reward, or of rlrun itself.

use std::path::Path;
use std::process::{Command, Stdio};

use rewards::{Judged, Reward, RewardInput};
use serde_json::json;

use crate::support::{fixture, kill, lives, pids, run, signal, task, until, value};

/// Scores many texts while `disturb` is called with the process ids; no text is lost.
fn none_is_lost(disturb: impl Fn(&[u32]) + Send + Sync) {
    let Some(run) = run() else { return };
    let keys = json!({"function": "compute_score", "batch": 16});
    let reward = run.reward("misbehaving.py", keys);
    let texts = vec!["sleep 0.01"; 200];
    let judged: Vec<Judged> = std::thread::scope(|threads| {
        let disturbing = threads.spawn(|| {
            until("workers are there", || reward.processes().len() == 3);
            disturb(&reward.processes());
        });
        let judged = run.all(&reward, &texts);
        disturbing.join().unwrap();
        judged
    });
    assert_eq!(judged.len(), texts.len());
    for judged in &judged {
        assert_eq!(value(judged), 10.0);
    }
}

#[test]
fn killing_a_worker_loses_no_trajectory() {
    none_is_lost(|processes| kill(processes[1]));
}

#[test]
fn killing_all_workers_loses_no_trajectory() {
    none_is_lost(|processes| processes[1..].iter().copied().for_each(kill));
}

#[test]
fn killing_the_parent_process_loses_no_trajectory() {
    none_is_lost(|processes| kill(processes[0]));
}

#[test]
fn an_idle_worker_that_is_killed_is_replaced() {
    let Some(run) = run() else { return };
    let reward = run.reward("misbehaving.py", json!({"function": "compute_score", "workers": 1}));
    let before = value(&run.one(&reward, "pid"));
    kill(before as u32);
    until("another is there", || {
        reward.processes().get(1).is_some_and(|pid| f64::from(*pid) != before && lives(*pid))
    });
    assert_eq!(value(&run.one(&reward, "five5")), 5.0);
}

#[test]
fn a_parent_process_that_keeps_dying_is_given_up_with_a_reason() {
    let Some(run) = run() else { return };
    let reward = run.reward("misbehaving.py", json!({"function": "compute_score", "workers": 1}));
    for _ in 0..6 {
        let parent = reward.processes()[0];
        kill(parent);
        until("it is gone", || !lives(parent));
        // No parent process replaces the last one.
        until("its death was seen", || reward.processes()[0] != parent || run.one(&reward, "a").is_err());
    }
    let message = run.one(&reward, "a").unwrap_err().to_string();
    assert!(
        message.contains("died 6 times within 60 s") && message.contains("reward_python.log"),
        "{message}"
    );
}

#[test]
fn a_reward_that_is_dropped_leaves_no_process() {
    let Some(run) = run() else { return };
    let reward = run.reward("misbehaving.py", json!({"function": "compute_score"}));
    let file = run.directory.path().join("children");
    let row = task(json!({}));
    let text = format!("fork {}", file.display());
    let input = [RewardInput::text(&row, &text)];
    let mut call = reward.score(&input);
    let _pending = call.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    until("it has children", || pids(&file).len() >= 4);
    let processes = [reward.processes(), pids(&file)].concat();
    drop(call);
    drop(reward);
    until("no process is left", || !processes.iter().copied().any(lives));
}

#[test]
fn files_that_start_threads_get_new_processes() {
    let Some(run) = run() else { return };
    let reward = run.reward("threads.py", json!({"workers": 1}));
    let reason = if cfg!(target_os = "macos") { "after a fork" } else { "threads (ticker)" };
    assert!(reward.spawn_reason().is_some_and(|why| why.contains(reason)));
    // A fork would have the main thread alone.
    assert_eq!(value(&run.one(&reward, "x")), 2.0);
    let processes = reward.processes();
    kill(processes[1]);
    assert_eq!(value(&run.one(&reward, "x")), 2.0);
    drop(reward);
    assert!(!processes.into_iter().any(lives));
}

/// Kills a process with `kill -9` that runs the ignored test `of`, once it has written process ids to `file`, and with it
/// those that `others` chooses of what it wrote to `processes`, so that they cannot clean up.
fn killed(of: &str, file: &str, count: usize, others: fn(&[u32]) -> &[u32]) {
    let Some(run) = run() else { return };
    let directory = run.directory.path();
    std::fs::write(directory.join("go"), "").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("endings::{of}"), "--ignored"])
        .current_dir(directory)
        // What the killed process leaves is in this directory.
        .env("TMPDIR", directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("it has started what it starts", || pids(&directory.join(file)).len() == count);
    let processes = pids(&directory.join("processes"));
    let started = [pids(&directory.join(file)), processes.clone()].concat();
    others(&processes).iter().for_each(|pid| signal(*pid, "STOP"));
    child.kill().unwrap();
    child.wait().unwrap();
    others(&processes).iter().copied().for_each(kill);
    until("all that it started is gone", || !started.iter().copied().any(lives));
}

#[test]
fn when_rlrun_is_killed_nothing_is_left() {
    killed("a_run_with_a_hanging_call", "children", 4, |_| &[]);
}

#[test]
fn when_rlrun_and_the_parent_process_are_killed_at_once_nothing_is_left() {
    killed("a_run_with_hanging_programs", "programs", 2, |processes| &processes[..1]);
}

#[test]
fn when_rlrun_is_killed_during_an_import_nothing_is_left() {
    killed("a_run_with_a_hanging_import", "importing", 2, |_| &[]);
}

#[test]
#[ignore = "started, and killed, by when_rlrun_is_killed_nothing_is_left"]
fn a_run_with_a_hanging_call() {
    hang("fork children");
}

#[test]
#[ignore = "started, and killed, by when_rlrun_and_the_parent_process_are_killed_at_once_nothing_is_left"]
fn a_run_with_hanging_programs() {
    hang("programs programs");
}

/// Writes the process ids of a reward to a file and lets one of them judge `text`, which never ends.
fn hang(text: &str) {
    if !Path::new("go").exists() {
        return;
    }
    let Some(run) = run() else { return };
    let reward = run.reward("misbehaving.py", json!({"function": "compute_score", "timeout_s": 900.0}));
    until("workers are there", || reward.processes().len() == 3);
    let lines: String = reward.processes().iter().map(|pid| format!("{pid}\n")).collect();
    std::fs::write("processes", lines).unwrap();
    let _ = run.one(&reward, text);
}

#[test]
#[ignore = "started, and killed, by when_rlrun_is_killed_during_an_import_nothing_is_left"]
fn a_run_with_a_hanging_import() {
    if !Path::new("go").exists() {
        return;
    }
    let Some(run) = run() else { return };
    assert!(fixture("slow_import.py").exists());
    let _ = run.build("slow_import.py", json!({}));
}
