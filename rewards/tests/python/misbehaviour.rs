//! Functions that hang, crash, print without end or return wrong values: each costs its own item, and the others continue.

use std::task::{Context, Poll, Waker};

use rewards::{Reward, RewardError, RewardInput};
use serde_json::json;

use crate::support::{PythonFixture, lives, message, outcome, pids, run, task, until, value, values};

/// Scores the odd text among four valid ones; returns its outcome.
fn among_others(run: &PythonFixture, keys: serde_json::Value, odd: &str) -> Result<f64, RewardError> {
    let reward = run.reward("misbehaving.py", keys);
    let mut judged = run.all(&reward, &["a", "bb", odd, "ccc", "dddd"]);
    let odd = judged.remove(2);
    assert_eq!(values(&judged), [Some(1.0), Some(2.0), Some(3.0), Some(4.0)]);
    // Calls after that succeed.
    assert_eq!(value(&run.one(&reward, "five5")), 5.0);
    odd.map(|outcome| outcome.value.unwrap())
}

#[test]
fn a_call_that_hangs_is_ended_and_its_item_alone_is_charged() {
    let Some(run) = run() else { return };
    for text in ["loop", "stubborn", "sleep 1000"] {
        let odd = among_others(&run, json!({"function": "compute_score", "timeout_s": 1.5}), text);
        assert!(matches!(odd, Err(RewardError::Timeout { seconds: 1.5, .. })), "{text}: {odd:?}");
    }
}

#[test]
fn everything_that_a_hanging_call_started_ends_with_it() {
    let Some(run) = run() else { return };
    let file = run.directory.path().join("children");
    let text = format!("fork {}", file.display());
    let odd = among_others(&run, json!({"function": "compute_score", "timeout_s": 1.5}), &text);
    assert!(matches!(odd, Err(RewardError::Timeout { .. })), "{odd:?}");
    let children = pids(&file);
    assert_eq!(children.len(), 4, "one in the group, one in a session, an orphan, a program");
    until("its children are gone", || !children.iter().copied().any(lives));
}

/// Elsewhere address space has no limit: the next test.
#[cfg(target_os = "linux")]
#[test]
fn memory_above_the_limit_is_an_error_of_the_call() {
    let Some(run) = run() else { return };
    for text in ["memory", "grow"] {
        let odd = among_others(&run, json!({"function": "compute_score", "memory_mb": 128}), text);
        let message = odd.unwrap_err().to_string();
        assert!(message.contains("MemoryError"), "{message}");
    }
}

#[test]
fn memory_has_a_limit_where_the_system_has_none_for_address_space() {
    let Some(run) = run() else { return };
    let reward = run.reward("other_system.py", json!({"memory_mb": 64}));
    let mut judged = run.all(&reward, &["a", "grow", "ccc"]);
    let message = judged.remove(1).unwrap_err().to_string();
    assert!(message.contains("SIGKILL") && message.contains("its limit of 64 MiB of memory"), "{message}");
    assert_eq!(values(&judged), [Some(1.0), Some(3.0)]);
}

#[test]
fn printed_text_is_kept_and_breaks_nothing() {
    let Some(run) = run() else { return };
    for text in ["print", "fd1"] {
        let odd = among_others(&run, json!({"function": "compute_score", "name": text}), text);
        assert_eq!(odd.unwrap(), text.len() as f64);
    }
    let log = |name: &str| std::fs::read(run.directory.path().join(name)).unwrap_or_default();
    until("the flood is in the log", || log("reward_print.log").len() == 40_000 * 101);
    until("the bytes are in the log", || log("reward_fd1.log").ends_with(b"\xff\xff\xff\xff"));
}

#[test]
fn a_process_that_dies_is_replaced_and_its_item_tried_once_more() {
    let Some(run) = run() else { return };
    let keys = || json!({"function": "compute_score"});
    for (text, parts) in [
        ("exit", &["SystemExit: 3"][..]),
        ("os_exit", &["ended with exit status 3", "the second time"]),
        ("segv", &["SIGSEGV", "the second time", "about to read address 0", "compute_score"]),
        ("garbage", &["wrote to the socket of its worker"]),
    ] {
        let message = among_others(&run, keys(), text).unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{text}: {message}");
    }
    let once = format!("once {}", run.directory.path().join("tried").display());
    assert_eq!(among_others(&run, keys(), &once).unwrap(), once.len() as f64);
}

#[test]
fn errors_show_what_a_function_raised_or_returned() {
    let Some(run) = run() else { return };
    let keys = || json!({"function": "compute_score"});
    for (text, part) in [
        ("raise seven", "ValueError: seven is no number"),
        (
            "return_none",
            "a number was expected, but NoneType None came; does the function return in every case?",
        ),
        ("return_text", "a number was expected, but str '1.0' came"),
    ] {
        let message = among_others(&run, keys(), text).unwrap_err().to_string();
        assert!(message.contains(part), "{text}: {message}");
    }
    let nan = among_others(&run, keys(), "nan");
    assert!(matches!(nan, Err(RewardError::NotFinite { value, .. }) if value.is_nan()));
}

#[test]
fn details_that_json_cannot_carry_are_text() {
    let Some(run) = run() else { return };
    let reward = run.reward("misbehaving.py", json!({"function": "compute_score", "timeout_s": 1e300}));
    let judged = run.one(&reward, "details");
    let details = json!({"huge": "an integer of 1329 bits", "inf": "inf", "text": "a?", "set": "{1}", "deep": [[[[[["[[1]]"]]]]]]});
    assert_eq!(serde_json::Value::Object(outcome(&judged).details.clone()), details);
}

#[test]
fn forks_that_come_back_and_alarms_that_stay_do_no_harm() {
    let Some(run) = run() else { return };
    let reward = run.reward("misbehaving.py", json!({"function": "compute_score", "workers": 1}));
    assert_eq!(value(&run.one(&reward, "child_returns")), 13.0);
    let worker = value(&run.one(&reward, "pid"));
    assert_eq!(value(&run.one(&reward, "alarm")), 5.0);
    assert_eq!(value(&run.one(&reward, "sleep 1.2")), 9.0);
    assert_eq!(value(&run.one(&reward, "pid")), worker, "the alarm has ended the worker");
}

#[test]
fn calls_in_one_event_loop_are_charged_one_by_one() {
    let Some(run) = run() else { return };
    let keys = || json!({"function": "awaited", "timeout_s": 1.5, "workers": 1});
    // It awaits: all other calls have been answered.
    let waits = among_others(&run, keys(), "wait 1000");
    assert!(matches!(waits, Err(RewardError::Timeout { .. })), "{waits:?}");
    // It blocks the loop: the other calls are repeated.
    for text in ["loop", "sleep 1000"] {
        let blocks = among_others(&run, keys(), text);
        assert!(matches!(blocks, Err(RewardError::Timeout { .. })), "{text}: {blocks:?}");
    }
    // All wait at the same time.
    let reward = run.reward("misbehaving.py", json!({"function": "awaited", "timeout_s": 5.0, "workers": 1}));
    assert_eq!(values(&run.all(&reward, &["wait 0.5"; 40])), [Some(8.0); 40]);
}

#[test]
fn a_batch_that_hangs_or_dies_is_called_again_one_by_one() {
    let Some(run) = run() else { return };
    let keys = json!({"function": "reward_odd", "timeout_s": 1.5, "workers": 1, "scope": "trajectory"});
    let reward = run.reward("trl_rewards.py", keys);
    let mut judged = run.all(&reward, &["a", "hang", "b", "die", "c"]);
    let died = message(judged.remove(3));
    assert!(died.contains("exit status 9"), "{died}");
    let hung = judged.remove(1);
    assert!(matches!(hung, Err(RewardError::Timeout { .. })), "{hung:?}");
    assert_eq!(values(&judged), [Some(1.0); 3]);
}

#[test]
fn a_call_without_a_caller_is_killed() {
    let Some(run) = run() else { return };
    let keys = json!({"function": "compute_score", "timeout_s": 900.0, "workers": 1});
    let reward = run.reward("misbehaving.py", keys);
    let file = run.directory.path().join("children");
    let row = task(json!({}));
    let text = format!("fork {}", file.display());
    let input = [RewardInput::text(&row, &text)];
    let mut given_up = reward.score(&input);
    let begun = given_up.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(begun, Poll::Pending));
    until("it is running", || pids(&file).len() == 4);
    assert_eq!(reward.load().take().running, 0, "nothing has polled it since it began");
    drop(given_up);
    assert_eq!(value(&run.one(&reward, "next")), 4.0);
    assert_eq!(reward.replaced(), 1);
    until("what it started is gone", || !pids(&file).into_iter().any(lives));
    let counts = reward.load().take();
    assert_eq!((counts.waiting, counts.running, counts.scored), (0, 0, 1));
}
