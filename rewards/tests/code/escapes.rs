//! Attacks of programs on the sandbox: each scores 0, and the next program is not affected.
//!
//! Invariant: each attempt is a score of 0 with a reason, or an output that says what was refused; never an error of the reward.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::{CodeFixture, in_each_sandbox, stream, why};

/// Short limits, so that what never ends is over soon.
fn tight() -> serde_json::Value {
    json!({"cpu_s": 1, "timeout_s": 20, "memory_mb": 256, "max_output_kib": 16, "max_processes": 8})
}

/// The output of a program whose attempts are all refused.
const REFUSED: &str = "refused";

/// A program that tries `attempt` and says so if that raises OSError.
fn attempt(attempt: &str) -> String {
    format!(
        "import os, socket, ctypes\ntry:\n    {attempt}\n    print('done')\nexcept OSError:\n    print('{REFUSED}')"
    )
}

fn assert_refused(bench: &CodeFixture, attempts: &[&str]) {
    for tried in attempts {
        let outcome = bench.program(&stream("", REFUSED), &attempt(tried));
        assert_eq!(outcome.value, Some(1.0), "{tried}: {}", why(&outcome));
    }
}

#[test]
fn files_of_other_programs_are_hidden() {
    let secret = tempfile::tempdir().unwrap();
    let file = secret.path().join("secret");
    std::fs::write(&file, "the answer").unwrap();
    let (read, write) = (format!("open({file:?}).read()"), format!("open({file:?}, 'w').write('x')"));
    let (cut, remove, mode) = (
        format!("os.truncate({file:?}, 0)"),
        format!("os.remove({file:?})"),
        format!("os.chmod({file:?}, 0)"),
    );
    let link = format!("os.link({file:?}, '/tmp/link')");
    in_each_sandbox(&tight(), |bench| {
        assert_refused(
            bench,
            &[
                &read,
                &write,
                &cut,
                &remove,
                &mode,
                &link,
                "open('/etc/passwd').read()",
                "open('/etc/shadow').read()",
                "os.listdir(os.path.expanduser('~root'))",
                "open('/proc/1/environ', 'rb').read()",
                "open('/proc/self/mem', 'r+b')",
                "open('/usr/written', 'w')",
                "open('/dev/shm/written', 'w')",
                "open('/written', 'w')",
                "os.mkdir('/usr/made')",
                "os.mknod('/tmp/sda', 0o60600, 2048)",
            ],
        );
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "the answer");
    });
}

#[test]
fn the_environment_is_empty() {
    in_each_sandbox(&tight(), |bench| {
        let names =
            "import os; print(sorted(name for name in os.environ if name not in ('PWD', 'LC_CTYPE')))";
        let all = "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'PYTHONHASHSEED']";
        let outcome = bench.program(&stream("", all), names);
        assert_eq!(outcome.value, Some(1.0), "{}", why(&outcome));
    });
}

#[test]
fn there_is_no_network() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let local = format!("socket.create_connection({:?}, 3)", ());
    let local = local.replace("()", &format!("('127.0.0.1', {})", listener.local_addr().unwrap().port()));
    in_each_sandbox(&tight(), |bench| {
        assert_refused(
            bench,
            &[
                &local,
                "socket.create_connection(('1.1.1.1', 80), 3)",
                "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
                "socket.socket(socket.AF_UNIX)",
                "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            ],
        );
        assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    });
}

#[test]
fn other_processes_are_out_of_reach() {
    let me = std::process::id();
    let signal = format!("os.kill({me}, 0)");
    let limits = format!("__import__('resource').prlimit({me}, 7, (64, 64))");
    let call = |number: i64, arguments: &str| {
        format!("os.close(ctypes.CDLL(None, use_errno=True).syscall({number}, {arguments}))")
    };
    // ptrace(ATTACH), unshare(NEWUSER), memfd_create.
    let traced = call(if cfg!(target_arch = "x86_64") { 101 } else { 117 }, &format!("16, {me}, 0, 0"));
    let apart = call(if cfg!(target_arch = "x86_64") { 272 } else { 97 }, "0x10000000");
    let memory = call(if cfg!(target_arch = "x86_64") { 319 } else { 279 }, "b'x', 0");
    in_each_sandbox(&tight(), |bench| {
        assert_refused(bench, &[&signal, &limits, &traced, &apart, &memory]);
    });
}

#[test]
fn the_first_process_of_a_namespace_cannot_be_killed_from_within() {
    let program = "import os\ntry: os.kill(1, 9)\nexcept OSError: pass\nprint('alive')";
    in_each_sandbox(&tight(), |bench| {
        assert_eq!(bench.program(&stream("", "alive"), program).value, Some(1.0))
    });
}

#[test]
fn endless_programs_are_ended() {
    let deaf = "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n";
    in_each_sandbox(&tight(), |bench| {
        let begun = Instant::now();
        for program in [
            "while True: pass",
            &format!("{deaf}while True: pass"),
            &format!("{deaf}(lambda f: f(f))(lambda f: f(f))"),
        ] {
            let outcome = bench.program(&stream("", ""), program);
            assert_eq!(outcome.value, Some(0.0), "{program}");
        }
        assert!(begun.elapsed() < Duration::from_secs(60));
    });
    let waiting = json!({"timeout_s": 1.5});
    in_each_sandbox(&waiting, |bench| {
        let outcome = bench.program(&stream("", ""), &format!("{deaf}import time; time.sleep(1000)"));
        assert_eq!((outcome.value, why(&outcome)), (Some(0.0), "test 1: out of time"));
        let asserts = json!({"tests": ["assert f()"]});
        let outcome = bench.program(&asserts, "import time\ndef f(): time.sleep(1000)");
        assert_eq!((outcome.value, why(&outcome)), (Some(0.0), "test 1: out of time before it was over"));
    });
}

#[test]
fn memory_output_and_files_are_bounded() {
    in_each_sandbox(&tight(), |bench| {
        for (program, word) in [
            ("x = bytearray(10 << 30)", "MemoryError"),
            ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
            ("while True: print('x' * 1000)", "wrote too much"),
            ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "wrote too much"),
            ("import os\nfd = os.dup(1)\nwhile True: os.write(fd, b'x' * 4096)", "wrote too much"),
            ("f = open('/tmp/big', 'wb')\nfor _ in range(1 << 20): f.write(b'x' * (1 << 20))", "Error"),
            ("for i in range(100):\n    f = open(f'/tmp/{i}', 'wb')\n    f.write(b'x' * (8 << 20))", "Error"),
            ("import mmap\nx = [mmap.mmap(-1, 64 << 20) for _ in range(64)]", "Error"),
        ] {
            let outcome = bench.program(&stream("", ""), program);
            assert_eq!(outcome.value, Some(0.0), "{program}");
            assert!(why(&outcome).contains(word), "{program}: {}", why(&outcome));
        }
    });
}

#[test]
fn processes_are_bounded_and_end_with_the_program() {
    // The interpreter of the system can be used by any user, which lets processes be counted and so be allowed.
    for python in ["python3", "/usr/bin/python3"] {
        if python == "python3" || std::path::Path::new(python).exists() {
            processes_of(python);
        }
    }
}

fn processes_of(python: &str) {
    let count = "import os, time\nn = 0\nfor _ in range(100):\n    try:\n        if os.fork() == 0:\n            time.sleep(1000)\n        n += 1\n    except OSError:\n        break\nprint(n <= 8)";
    let bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass";
    let mut keys = tight();
    keys["python"] = json!(python);
    in_each_sandbox(&keys, |bench| {
        let outcome = bench.program(&stream("", "True"), count);
        assert_eq!(outcome.value, Some(1.0), "{}", why(&outcome));
        assert_eq!(bench.program(&stream("", ""), bomb).value, Some(0.0));
        // The name of a file that only this test looks for among all processes.
        let mark = format!("left-behind-{}-{}", std::process::id(), bench.scratch.path().display());
        let daemon = format!(
            "import os, time\nmark = {mark:?}\nif not hasattr(os, 'nothing'):\n    try:\n        if os.fork() == 0:\n            os.setsid()\n            if os.fork() == 0:\n                os.execv('/bin/sh', ['sh', '-c', 'sleep 1000; :', mark])\n            os._exit(0)\n    except OSError: pass\nprint('left')"
        );
        let outcome = bench.program(&stream("", "left"), &daemon);
        assert_eq!(outcome.value, Some(1.0), "{}", why(&outcome));
        assert_eq!(processes_with(&mark), Vec::<PathBuf>::new());
    });
}

#[test]
fn a_run_without_a_caller_is_killed() {
    in_each_sandbox(&json!({"timeout_s": 1000, "cpu_s": 1000}), |bench| {
        let mark = format!("given-up-{}-{}", std::process::id(), bench.scratch.path().display());
        let task = crate::task(&stream("", ""));
        let text = format!(
            "```python\nimport os\nos.execv('/bin/sh', ['sh', '-c', 'while :; do :; done', {mark:?}])\n```"
        );
        let inputs = [rewards::RewardInput::text(&task, &text)];
        bench.runtime.block_on(async {
            let run = bench.reward.score(&inputs);
            let seen = async {
                while processes_with(&mark).is_empty() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            tokio::select! {
                judged = run => panic!("it ended by itself: {judged:?}"),
                () = seen => {}
            }
        });
        let begun = Instant::now();
        while !processes_with(&mark).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it runs on");
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

/// Processes that have `mark` among their arguments.
pub(crate) fn processes_with(mark: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.map(|entry| entry.path().join("cmdline"));
    lines
        .filter(|path| {
            let line = std::fs::read(path).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|argument| argument == mark.as_bytes())
        })
        .collect()
}

#[test]
fn a_verdict_cannot_be_faked() {
    let leave = [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os; os.kill(os.getpid(), 9)",
    ];
    let talk = "import os, json\nfor fd in range(3, 64):\n    for line in ({'ready': 1}, {'loaded': 1}, {'passed': 'x'}, {'passed': 1}, {'value': 4}, {'value': 4}):\n        try: os.write(fd, (json.dumps(line) + '\\n').encode())\n        except OSError: pass\n";
    let patch = "import builtins, json, os\njson.dumps = lambda *a, **k: '{\"value\": 9}'\nos.write = print\nbuiltins.AssertionError = Exception\n";
    in_each_sandbox(&tight(), |bench| {
        let asserts = json!({"tests": ["assert f(3) == 9", "assert f(4) == 16"]});
        let calls = json!({"tests": {"fn_name": "f", "inputs": [[3], [4]], "outputs": [9, 16]}});
        let wrong = "def f(x): return 9 if x == 3 else 0\n";
        for tests in [&asserts, &calls] {
            for program in leave {
                for program in [program.to_owned(), format!("def f(x):\n    {program}")] {
                    let outcome = bench.program(tests, &program);
                    assert_eq!(outcome.value, Some(0.0), "{program}");
                    assert!(!why(&outcome).is_empty());
                }
            }
            for program in [
                format!("{talk}{wrong}"),
                format!("{patch}{wrong}"),
                format!("{wrong}print('passed all tests', 'OK')"),
            ] {
                assert_eq!(bench.program(tests, &program).value, Some(0.0), "{program}");
            }
            assert_eq!(bench.program(tests, &format!("{patch}def f(x): return x * x")).value, Some(1.0));
        }
        let outcome = bench.program(&stream("", "1"), "import os, sys\nprint(1, flush=True)\nos._exit(7)");
        assert_eq!((outcome.value, why(&outcome)), (Some(0.0), "test 1: ended with exit code 7"));
    });
}

#[test]
fn expected_outputs_are_not_in_the_sandbox() {
    in_each_sandbox(&json!({}), |bench| {
        let search = "import gc, sys\ndef f(x):\n    seen = []\n    frame = sys._getframe()\n    while frame:\n        seen.append(repr(frame.f_locals))\n        frame = frame.f_back\n    seen += [repr(thing) for thing in gc.get_objects() if type(thing) in (str, dict, list)]\n    return any('needle' in text.replace('needle' + chr(39) + ' in', '') and 'hay' + 'stack' in text for text in seen)";
        let calls = json!({"tests": {"fn_name": "f", "inputs": [[1]], "outputs": ["haystack-needle"]}});
        let outcome = bench.program(&calls, search);
        assert_eq!(outcome.value, Some(0.0));
        assert!(why(&outcome).starts_with("test 1: returned false"), "{}", why(&outcome));
    });
}
