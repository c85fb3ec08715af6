//! Processes are killed, stopped, disconnected or delayed during a run. The run completes all steps and trains on no group
//! twice.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::{Home, Moment, Run, finish, interrupt, signal_process};
use crate::workers::{PROCESSES, every_group_once, members, pids, served_on, until};

/// Groups per step of the small recipe.
const BATCH: u64 = 8;
/// Steps between two injected failures.
const PACE: u64 = 2;

/// A failure that is injected into a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP: only its missing heartbeat shows it.
    Stop,
}

/// Recovery times of the processes with a name, seconds.
fn recoveries(run: &Run, name: &str) -> Vec<f64> {
    let back =
        run.controller().into_iter().filter(|line| line["event"] == "recovered" && line["name"] == name);
    back.filter_map(|line| line["fields"]["after_s"].as_f64()).collect()
}

/// Injects `faults` one after the other, some steps apart; every process recovers.
fn inject(run: &Run, child: &mut std::process::Child, faults: &[(&str, Fault)]) {
    let mut step = 1;
    for (name, fault) in faults {
        assert!(run.wait_for(Moment::Step(step), child), "the run ended before step {step}");
        let (before, pid) = (recoveries(run, name).len(), *pids(run, name).last().expect(name));
        signal_process(pid, if *fault == Fault::Kill { "KILL" } else { "STOP" });
        let back = || recoveries(run, name).len() > before;
        until(&format!("the recovery of {name} from {fault:?}"), &back, &|| String::new());
        step = (run.steps().len() as u64).max(step) + PACE;
    }
}

/// Runs processes under `faults` and to step `steps`, and asserts what holds for every run.
fn survives(home: &Home, name: &str, faults: &[(&str, Fault)], steps: u64) -> Run {
    let run = home.run(name);
    let sets = [
        &PROCESSES[..],
        &[
            "placement.restarts=1000",
            "deadlines.heartbeat_s=4",
            "buffer.max_staleness=2",
            "checkpoint.interval=3",
        ],
    ]
    .concat();
    let mut child = home.start_endless(name, &sets);
    inject(&run, &mut child, faults);
    assert!(run.wait_for(Moment::Step(steps), &mut child));
    interrupt(&child);
    finish(child).ok();
    let steps = run.steps().len() as u64;
    assert_eq!(run.values("step"), (1..=steps).map(|step| step as f64).collect::<Vec<_>>());
    every_group_once(&run, steps, BATCH).unwrap();
    assert!(run.values("staleness/max").iter().all(|max| *max <= 2.0), "{:?}", run.values("staleness/max"));
    run
}

/// Runs processes under `faults`, and asserts that it learns.
fn learns(home: &Home, name: &str, faults: &[(&str, Fault)]) -> Run {
    // Enough steps to learn under every injected failure.
    let run = survives(home, name, faults, 30);
    let reward = run.values("reward/mean");
    let last = &reward[reward.len() - 5..];
    assert!(last.iter().sum::<f64>() / last.len() as f64 > 0.8, "it has not learned: {reward:?}");
    run
}

/// `count` faults of each role, in turn.
fn faults(count: usize) -> Vec<(&'static str, Fault)> {
    let of = |n: usize| {
        let stopped = if n % 5 == 1 { Fault::Stop } else { Fault::Kill };
        [("rollout 0", stopped), ("the trainer", Fault::Kill), ("rollout 1", Fault::Kill)]
    };
    (0..count).flat_map(of).collect()
}

/// Recovery times, as a table.
fn recovery_table(run: &Run) -> String {
    let mut table = String::new();
    for name in ["the trainer", "rollout 0", "rollout 1"] {
        let mut times = recoveries(run, name);
        times.sort_by(f64::total_cmp);
        if let (Some(median), Some(worst)) = (times.get(times.len() / 2), times.last()) {
            let _ =
                writeln!(table, "{name}: {} times, median {median:.2} s, worst {worst:.2} s", times.len());
        }
    }
    table
}

#[test]
fn a_run_whose_processes_are_killed_completes_every_step_once() {
    let home = Home::new();
    let run = learns(&home, "killed", &faults(2));
    eprint!("{}", recovery_table(&run));
}

/// `cargo test --workspace --test tests -- --ignored --nocapture two_hundred`
#[test]
#[ignore = "takes a quarter of an hour; the same with two of each role is above"]
fn two_hundred_kills_of_every_role() {
    let home = Home::new();
    for round in 0..10 {
        let run = learns(&home, &format!("round{round}"), &faults(20));
        eprintln!("round {round}\n{}", recovery_table(&run));
    }
}

/// A stopped trainer sends no heartbeat, so the controller restarts it.
#[test]
fn the_controller_restarts_a_stopped_trainer() {
    let home = Home::new();
    survives(&home, "stopped", &[("the trainer", Fault::Stop)], 8);
}

/// A run with a worker that keeps dying ends within its restart budget, with the worker's last output.
#[test]
fn a_process_that_exceeds_its_restarts_ends_the_run_with_its_output() {
    let home = Home::new();
    let run = home.run("run");
    let sets = [&PROCESSES[..], &["placement.restarts=2"]].concat();
    let mut child = home.start_endless("run", &sets);
    let mut killed = 0;
    while killed < 3 && child.try_wait().unwrap().is_none() {
        let started = pids_if_any(&run, "rollout 0");
        if started.len() > killed {
            signal_process(started[killed], "KILL");
            killed += 1;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let done = finish(child);
    assert_eq!(done.status.code(), Some(1), "{}", done.stderr);
    for part in
        ["rollout 0 was killed by signal 9", "started again 2 times", "placement.restarts", "rollout_0.log"]
    {
        assert!(done.stderr.contains(part), "`{part}` is missing in {}", done.stderr);
    }
}

fn pids_if_any(run: &Run, name: &str) -> Vec<u32> {
    if run.path.join("logs/controller.jsonl").is_file() { pids(run, name) } else { Vec::new() }
}

/// A proxy between a worker and its run: forwards bytes, delays them, or drops the connection.
struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    cut: AtomicBool,
    delay_ms: AtomicU64,
    over: AtomicBool,
}

impl Proxy {
    fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let (address, shared) = (listener.local_addr().unwrap(), Arc::new(Shared::default()));
        let theirs = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || {
            let mut pipes = Vec::new();
            while !theirs.over.load(Ordering::Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                };
                if theirs.cut.load(Ordering::Relaxed) {
                    continue;
                }
                let Ok(onwards) = TcpStream::connect(target) else { continue };
                for (from, to) in [(&stream, &onwards), (&onwards, &stream)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let shared = Arc::clone(&theirs);
                    pipes.push(std::thread::spawn(move || pass_on(from, to, &shared)));
                }
            }
            pipes.into_iter().for_each(|pipe| drop(pipe.join()));
        });
        Self { address, shared, acceptor: Some(acceptor) }
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, shared: &Shared) {
    from.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let mut bytes = vec![0; 64 << 10];
    while !shared.over.load(Ordering::Relaxed) && !shared.cut.load(Ordering::Relaxed) {
        match from.read(&mut bytes) {
            Ok(0) => break,
            Ok(n) => {
                std::thread::sleep(Duration::from_millis(shared.delay_ms.load(Ordering::Relaxed)));
                if to.write_all(&bytes[..n]).is_err() {
                    break;
                }
            }
            Err(error)
                if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
    let _ = from.shutdown(std::net::Shutdown::Both);
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        self.acceptor.take().into_iter().for_each(|acceptor| drop(acceptor.join()));
    }
}

/// A worker behind a slow network that fails for some time reconnects; the run does not wait for it.
#[test]
fn a_disconnected_worker_reconnects_and_continues() {
    let home = Home::new();
    let run = home.run("run");
    // The run's own sampler leaves free slots, and versions are not published faster than workers apply them.
    let sets = ["buffer.listen=127.0.0.1:0", "buffer.max_staleness=2", "rollout.max_running=64"];
    let sets = [&sets[..], &["deadlines.heartbeat_s=2", "trainer.learning_rate=1e-9"]].concat();
    let mut lead = home.start_endless("run", &sets);
    assert!(run.wait_for(Moment::Step(1), &mut lead));
    let url = served_on(&run);
    let target: SocketAddr = url.strip_prefix("http://").unwrap().parse().unwrap();
    let proxy = Proxy::to(target);
    proxy.shared.delay_ms.store(10, Ordering::Relaxed);
    let through = format!("http://{}", proxy.address);
    let worker = home.start(&["worker", "rollout", "--join", &through, "--name", "far", "--threads", "1"]);
    let sampled = || {
        let members = members(&url);
        members.iter().find(|member| member["name"] == "far").and_then(|far| far["sampled_tokens"].as_u64())
    };
    let show = || format!("{:?}", members(&url));
    until("work of the worker", &|| sampled() > Some(0), &show);
    proxy.shared.cut.store(true, Ordering::Relaxed);
    until("that the run forgets it", &|| sampled().is_none(), &show);
    let steps = run.steps().len() as u64;
    assert!(run.wait_for(Moment::Step(steps + 3), &mut lead), "the run waits for a worker that is away");
    proxy.shared.cut.store(false, Ordering::Relaxed);
    let before = Instant::now();
    until("that it is back", &|| sampled().is_some(), &show);
    let had = sampled().unwrap_or(0);
    until("that it samples again", &|| sampled() > Some(had), &show);
    eprintln!("back {:.1} s after the network", before.elapsed().as_secs_f64());
    interrupt(&lead);
    finish(lead).ok();
    drop(worker);
    every_group_once(&run, run.steps().len() as u64, BATCH).unwrap();
}
