//! Ranks that are processes, over TCP. The test is rank 0; the others are this program again, with the one test `a_rank`.
//!
//! Invariant: whatever a test does, its processes are dead when it ends.

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use collective::tcp::{Listener, Meeting, Tcp, join};
use collective::{Collective, CollectiveError, HostCollective};
use rustix::process::{Pid, Signal, kill_process};

use crate::suite;

/// Against hangs only.
const LONG: Duration = Duration::from_secs(120);
/// Of tests that wait for it to pass.
const SHORT: Duration = Duration::from_secs(2);
/// What tells a process of this program that it is a rank: address, rank, seconds to wait, and what to do.
const RANK: &str = "RLRUN_TEST_RANK";
/// Of all tests.
const SECRET: &[u8] = b"of the tests";
/// Elements that a rank has in the exchanges that are interrupted, 16 MiB: more than sockets hold.
const MANY: usize = 4 << 20;

/// A process that is a rank.
struct RankProcess {
    process: Child,
    output: BufReader<ChildStdout>,
}

impl RankProcess {
    fn start(addr: SocketAddr, rank: usize, deadline: Duration, does: &str) -> Self {
        let mut process = Command::new(env::current_exe().expect("this program has a path"))
            .args(["--exact", "processes::a_rank", "--ignored", "--nocapture", "--quiet"])
            .env(RANK, format!("{addr} {rank} {} {does}", deadline.as_secs()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program starts");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        Self { process, output }
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw).expect("it runs");
        kill_process(pid, signal).expect("it is ours");
    }

    /// What it says until it ends.
    fn ends(mut self) -> String {
        let mut said = String::new();
        self.output.read_to_string(&mut said).expect("it says text");
        said
    }

    /// Waits until it says `word`.
    fn says(&mut self, word: &str) {
        let mut lines = self.output.by_ref().lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains(word)), "the rank ended before it said `{word}`");
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        // Dead already, or killed here.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn anywhere() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

/// RankProcess 0 in this process and the others in theirs, doing what `does` says.
fn ranks(world: usize, deadline: Duration, does: &str) -> (Tcp, Vec<RankProcess>) {
    let listener = Listener::bind(anywhere(), SECRET).expect("a port is free");
    let addr = listener.local_addr().expect("it listens");
    let others = (1..world).map(|rank| RankProcess::start(addr, rank, deadline, does)).collect();
    (listener.accept(world, deadline).expect("all join"), others)
}

#[test]
#[ignore = "is a rank of the other tests"]
fn a_rank() {
    let Some(words) = env::var_os(RANK).and_then(|words| words.into_string().ok()) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let [addr, rank, seconds, does] = words[..] else { panic!("four words, not {words:?}") };
    let deadline = Duration::from_secs(seconds.parse().expect("a number"));
    let rank = join(addr, SECRET, rank.parse().ok(), deadline).expect("joins");
    match does {
        "conform" => suite::conforms(&rank),
        "exchange" => {
            let error = exchange_until_an_error(&rank, &mut |round| {
                if round == 3 {
                    say("three rounds");
                }
            });
            say(&format!("error: {error}"));
        }
        other => panic!("a rank does not know how to {other}"),
    }
}

/// Says `words` to the process that has started this one.
fn say(words: &str) {
    writeln!(std::io::stdout(), "{words}").expect("the parent reads the output");
}

/// Makes all sums and gathers of large messages, until one fails.
fn exchange_until_an_error(rank: &Tcp, after: &mut dyn FnMut(u64)) -> CollectiveError {
    let world = rank.world();
    let shards: Vec<_> = (0..world).map(|r| MANY * r / world..MANY * (r + 1) / world).collect();
    let (mut all, mut own) = (vec![1.0; MANY], vec![0.0; shards[rank.rank()].len()]);
    let mut round = 0;
    loop {
        round += 1;
        if let Err(error) = rank.reduce_scatter(&all, &shards, &mut own) {
            return error;
        }
        own.iter_mut().for_each(|sum| *sum /= world as f32);
        if let Err(error) = rank.all_gather(&own, &shards, &mut all) {
            return error;
        }
        after(round);
    }
}

#[test]
fn processes_conform() {
    for world in [2, 4] {
        let (rank, others) = ranks(world, LONG, "conform");
        suite::conforms(&rank);
        for mut other in others {
            assert!(other.process.wait().expect("it ends").success());
        }
    }
}

#[test]
fn a_rank_that_is_killed_is_named_at_once() {
    let (rank, mut others) = ranks(3, LONG, "exchange");
    let killed = others.pop().expect("rank 2");
    let error = thread::scope(|scope| {
        let error = scope.spawn(|| exchange_until_an_error(&rank, &mut |_| ()));
        let mut killed = killed;
        killed.says("three rounds");
        killed.signal(Signal::KILL);
        error.join().expect("an error, no panic")
    });
    // No deadline passes: a rank notices closed connections, or gets the error of the rank that noticed first.
    assert!(matches!(error, CollectiveError::Gone { .. } | CollectiveError::GivenUp { .. }), "{error}");
    assert!(error.to_string().contains("rank 2 is gone"), "{error}");
    let said = others.pop().expect("rank 1").ends();
    assert!(said.contains("rank 2 is gone"), "{said}");
    assert!(rank.barrier().is_err(), "nothing goes on after an error");
}

#[test]
fn a_rank_that_is_stopped_is_named_at_the_deadline() {
    let (rank, mut others) = ranks(3, SHORT, "exchange");
    let mut stopped = others.pop().expect("rank 2");
    let error = thread::scope(|scope| {
        let error = scope.spawn(|| exchange_until_an_error(&rank, &mut |_| ()));
        stopped.says("three rounds");
        stopped.signal(Signal::STOP);
        error.join().expect("an error, no panic")
    });
    assert!(error.to_string().contains("waited 2 s for rank 2 in"), "{error}");
    let said = others.pop().expect("rank 1").ends();
    assert!(said.contains("waited 2 s for rank 2 in"), "{said}");
}

#[test]
fn a_follower_without_a_command_notices_that_the_leader_is_gone() {
    let listener = Listener::bind(anywhere(), SECRET).expect("a port is free");
    let addr = listener.local_addr().expect("it listens");
    thread::scope(|scope| {
        let follower = scope.spawn(move || {
            let rank = join(addr, SECRET, None, Duration::from_secs(1)).expect("joins");
            rank.broadcast_bytes(0, Vec::new())
        });
        let leader = listener.accept(2, LONG).expect("one joins");
        // Longer than the follower waits for anything else.
        thread::sleep(Duration::from_millis(1500));
        drop(leader);
        let error = follower.join().expect("no panic").expect_err("there is no command");
        assert!(matches!(error, CollectiveError::Gone { peer: 0, .. }), "{error}");
    });
}

#[test]
fn ranks_are_asked_for_or_assigned() {
    let listener = Listener::bind(anywhere(), SECRET).expect("a port is free");
    let addr = listener.local_addr().expect("it listens");
    thread::scope(|scope| {
        let wishes = [None, Some(1), None, Some(3)];
        let others =
            wishes.map(|wish| scope.spawn(move || (wish, join(addr, SECRET, wish, LONG).expect("joins"))));
        let leader = listener.accept(5, LONG).expect("all join");
        let mut ranks = vec![leader.rank()];
        for other in others {
            let (wish, joined) = other.join().expect("no panic");
            assert!(wish.is_none_or(|wish| wish == joined.rank()));
            assert_eq!(joined.world(), 5);
            ranks.push(joined.rank());
        }
        ranks.sort_unstable();
        assert_eq!(ranks, [0, 1, 2, 3, 4]);
    });
}

#[test]
fn unknown_connections_are_refused_and_delay_no_rank() {
    let listener = Listener::bind(anywhere(), SECRET).expect("a port is free");
    let addr = listener.local_addr().expect("it listens");
    thread::scope(|scope| {
        let leader = scope.spawn(|| listener.accept(2, LONG).expect("one joins"));
        // Two that say nothing and stay, one that goes, one that talks another protocol, one with another secret.
        let silent = [(); 2].map(|()| TcpStream::connect(addr).expect("it listens"));
        drop(TcpStream::connect(addr).expect("it listens"));
        let mut web = TcpStream::connect(addr).expect("it listens");
        web.write_all(&[b'x'; 100]).expect("it takes bytes");
        drop(web);
        let error = join(addr, b"another", None, LONG).expect_err("it does not know the secret").to_string();
        assert!(error.contains("does not know the secret"), "{error}");
        for wish in [0, 2] {
            let error = join(addr, SECRET, Some(wish), LONG).expect_err("no such rank").to_string();
            assert!(error.contains(&format!("rank {wish} of 2 does not exist")), "{error}");
        }
        let joined = join(addr, SECRET, Some(1), LONG).expect("joins");
        let leader = leader.join().expect("no panic");
        assert_eq!((leader.rank(), joined.rank()), (0, 1));
        drop(silent);
    });
}

#[test]
fn a_place_without_an_answer_is_no_matter_of_the_token() {
    let other = TcpListener::bind(anywhere()).expect("a port is free");
    let addr = other.local_addr().expect("it listens");
    thread::scope(|scope| {
        scope.spawn(|| drop(other.accept().expect("a rank connects")));
        let error = join(addr, SECRET, None, LONG).expect_err("no rank listens there").to_string();
        assert!(error.contains("got no answer") && !error.contains("token"), "{error}");
    });
}

#[test]
fn a_rank_that_never_joins_is_named() {
    let listener = Listener::bind(anywhere(), SECRET).expect("a port is free");
    let error = listener.accept(2, Duration::from_millis(50)).expect_err("no rank joins");
    assert!(error.to_string().contains("waited 0.05 s for rank 1 in `join`"), "{error}");
}

/// The largest number of ranks that is there at the end of the patience; who has gone does not count, and who is too many waits for the
/// next group.
#[test]
fn a_meeting_makes_groups_of_those_that_wait() {
    let meeting = Meeting::open(anywhere(), SECRET).expect("a port is free");
    let addr = meeting.local_addr();
    let error = meeting.group(&[4, 2], SHORT / 10, LONG).expect_err("no process waits").to_string();
    assert!(error.contains("waited 0.2 s for rank 1 in `join`"), "{error}");
    thread::scope(|scope| {
        let joins = || scope.spawn(move || join(addr, SECRET, Some(7), LONG).expect("joins"));
        let until = |count: usize| {
            while meeting.waiting() != count {
                thread::sleep(Duration::from_millis(5));
            }
        };
        // It says nothing, and delays no rank.
        let silent = TcpStream::connect(addr).expect("it listens");
        let first = [joins(), joins()];
        until(2);
        drop(silent);
        let leader = meeting.group(&[4, 2], SHORT / 10, LONG).expect("two are enough");
        assert_eq!((leader.rank(), leader.world(), meeting.waiting()), (0, 2, 1));
        let second = [joins(), joins()];
        until(3);
        let larger = meeting.group(&[4, 2], LONG, LONG).expect("all are there at once");
        assert_eq!((larger.world(), meeting.waiting()), (4, 0));
        let mut worlds: Vec<_> =
            first.into_iter().chain(second).map(|rank| rank.join().expect("no panic").world()).collect();
        worlds.sort_unstable();
        assert_eq!(worlds, [2, 4, 4, 4]);
    });
}

#[test]
fn a_rank_that_no_group_needs_can_join_again() {
    let meeting = Meeting::open(anywhere(), SECRET).expect("a port is free");
    let addr = meeting.local_addr();
    let error = join(addr, SECRET, None, SHORT / 40).expect_err("there is no group");
    assert!(matches!(error, CollectiveError::NotFormed { .. }), "{error}");
    thread::scope(|scope| {
        let other = scope.spawn(move || join(addr, SECRET, None, LONG).expect("joins"));
        let leader = meeting.group(&[2], LONG, LONG).expect("it waits");
        assert_eq!(other.join().expect("no panic").world(), leader.world());
    });
}

#[test]
fn a_process_waits_while_a_meeting_is_busy_with_others() {
    let meeting = Meeting::open(anywhere(), SECRET).expect("a port is free");
    let addr = meeting.local_addr();
    // They say nothing, and are more than it has handshakes with at a time.
    let silent = [(); 40].map(|()| TcpStream::connect(addr).expect("it listens"));
    thread::scope(|scope| {
        let other = scope.spawn(move || join(addr, SECRET, None, LONG));
        thread::sleep(SHORT / 10);
        drop(silent);
        let leader = meeting.group(&[2], SHORT * 5, LONG).expect("it waits");
        assert_eq!(other.join().expect("no panic").expect("joins").world(), leader.world());
    });
}
