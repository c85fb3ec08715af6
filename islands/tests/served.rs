//! Islands and a coordinator over a socket.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use islands::frame::{RoundMessage, to_bytes};
use islands::server::CoordinatorServer;
use islands::{
    Coordinator, CoordinatorAddress, CoordinatorClient, CoordinatorConfig, GradientCompression, Island,
    IslandError, IslandSchedule, IslandTerms,
};

use super::{SOON, config, open, run, terms};

const NONE: GradientCompression = GradientCompression::None;
const TOKEN: &str = "a-token-of-islands";

/// A coordinator that is served until it is dropped.
struct ServedCoordinator {
    url: String,
    _stop: tokio::sync::oneshot::Sender<()>,
    thread: Option<std::thread::JoinHandle<()>>,
    dir: PathBuf,
}

impl ServedCoordinator {
    fn start(dir: &Path, deadline: Duration, port: u16) -> Self {
        Self::of(open(dir, deadline), dir, port)
    }

    /// One whose first round waits for two islands.
    fn for_two(dir: &Path) -> Self {
        let config = CoordinatorConfig { first_islands: 2, ..config(dir, SOON) };
        Self::of(Coordinator::open(config).unwrap(), dir, 0)
    }

    fn of(coordinator: Coordinator, dir: &Path, port: u16) -> Self {
        let coordinator = Arc::new(coordinator);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (sender, address) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.unwrap().block_on(async {
                let listen = ([127, 0, 0, 1], port).into();
                let server = CoordinatorServer::bind(coordinator, listen, Some(TOKEN), None).await.unwrap();
                sender.send(server.local_addr()).unwrap();
                server.serve(async { drop(stopped.await) }).await;
            });
        });
        let url = format!("http://{}", address.recv().unwrap());
        Self { url, _stop: stop, thread: Some(thread), dir: dir.to_owned() }
    }

    fn port(&self) -> u16 {
        self.url.rsplit_once(':').unwrap().1.parse().unwrap()
    }

    fn client(&self, name: &str, run: &str) -> CoordinatorClient {
        client(&self.url, name, run, Some(TOKEN), SOON)
    }

    /// Joins with the trained values `values`.
    fn island(
        &self,
        name: &str,
        terms: &IslandTerms,
        schedule: IslandSchedule,
        values: &mut [f32],
    ) -> Island {
        let answers = self.dir.join(format!("answers-{name}"));
        Island::join(self.client(name, &run()), terms.clone(), schedule, answers, 0, values).unwrap().0
    }
}

impl Drop for ServedCoordinator {
    fn drop(&mut self) {
        self._stop = tokio::sync::oneshot::channel().0;
        self.thread.take().unwrap().join().unwrap();
    }
}

fn client(url: &str, name: &str, run: &str, token: Option<&str>, wait: Duration) -> CoordinatorClient {
    CoordinatorClient::new(CoordinatorAddress {
        url: url.to_owned(),
        token: token.map(str::to_owned),
        roots: None,
        island: name.to_owned(),
        run: run.to_owned(),
        wait,
    })
    .unwrap()
}

/// Makes `steps` local steps, each of which moves all values by `by`, and exchanges.
fn train(island: &mut Island, steps: std::ops::RangeInclusive<u64>, by: f32, values: &mut [f32]) -> u64 {
    let mut received = 0;
    for step in steps {
        values.iter_mut().for_each(|value| *value += by);
        if let Some(report) = island.after_step(step, values).unwrap() {
            assert!(!report.is_replaced, "{report:?}");
            received += report.bytes.received;
        }
    }
    received
}

#[test]
fn two_islands_have_the_same_weights_after_every_round() {
    for (compression, fragments) in
        [(NONE, 1), (GradientCompression::Int8, 2), (GradientCompression::Int4, 3)]
    {
        let dir = tempfile::tempdir().unwrap();
        let served = ServedCoordinator::for_two(dir.path());
        let terms = terms(300, fragments, compression);
        let (mut first, mut second) = (vec![1.0; 300], vec![9.0; 300]);
        let mut a = served.island("a", &terms, IslandSchedule::default(), &mut first);
        let mut b = served.island("b", &terms, IslandSchedule::default(), &mut second);
        assert_eq!(first, second, "the second one takes the weights of the first");
        let rounds = 2 * fragments;
        let other = std::thread::spawn(move || {
            train(&mut b, 1..=rounds, 0.5, &mut second);
            second
        });
        let received = train(&mut a, 1..=rounds, 0.25, &mut first);
        let second = other.join().unwrap();
        // Since their exchange the other fragments have had local steps.
        let last = terms.fragment(rounds - 1);
        let outer = super::values(&served.client("x", &run()).weights(300).unwrap().payload);
        assert_eq!((&first[last.clone()], &second[last.clone()]), (&outer[last.clone()], &outer[last]));
        if fragments == 1 {
            // Two rounds, each by the mean of 0.25 and 0.5.
            assert!(first.iter().all(|value| (value - 1.75).abs() < 1e-6), "{}", first[0]);
        }
        // The updates of all rounds with their heads, and little else; joining took all weights once.
        let updates: usize = (0..rounds).map(|round| terms.message_bytes(round)).sum();
        let least = (updates + 4 * 300) as u64;
        assert!((least..least + 8000).contains(&received), "{received} of {least}");
    }
}

#[test]
fn an_overlapped_exchange_is_mixed_in_later_and_a_resume_repeats_it_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let served = ServedCoordinator::start(dir.path(), SOON, 0);
    let terms = IslandTerms { local_steps: 4, ..terms(100, 1, GradientCompression::Int4) };
    let schedule = IslandSchedule { overlap_steps: 2, local_weight: 0.5 };
    let (name, id) = ("a", run());
    let answers = dir.path().join("answers");
    let mut values: Vec<f32> = (0..100).map(|index| index as f32 / 7.0).collect();
    let joined =
        Island::join(served.client(name, &id), terms.clone(), schedule, answers.clone(), 0, &mut values);
    let mut island = joined.unwrap().0;
    train(&mut island, 1..=5, 0.3, &mut values);
    // The outer gradient of step 4 is under way.
    let (state, saved) = (island.state(), values.clone());
    train(&mut island, 6..=11, 0.3, &mut values);
    assert_eq!(served.client("x", &run()).weights(100).unwrap().round, 2);
    let again = |served: &ServedCoordinator| {
        let mut values = saved.clone();
        let resumed =
            Island::resume(served.client(name, &id), terms.clone(), schedule, answers.clone(), &state);
        let mut island = resumed.unwrap().0;
        train(&mut island, 6..=11, 0.3, &mut values);
        values
    };
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&again(&served)), bits(&values), "answers that are recorded");
    std::fs::remove_dir_all(&answers).unwrap();
    assert_eq!(bits(&again(&served)), bits(&values), "answers that the coordinator still has");
    assert_eq!(served.client("x", &run()).weights(100).unwrap().round, 2, "nothing counted twice");
    let other = IslandTerms { local_steps: 8, ..terms.clone() };
    let refused = Island::resume(served.client(name, &id), other, schedule, answers.clone(), &state);
    assert!(matches!(refused, Err(IslandError::State { .. })));
    for cut in [0, 7, 20, state.len() / 2] {
        let cut =
            Island::resume(served.client(name, &id), terms.clone(), schedule, answers.clone(), &state[..cut]);
        assert!(matches!(cut, Err(IslandError::State { .. })));
    }
}

#[test]
fn an_island_waits_for_a_coordinator_that_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let served = ServedCoordinator::start(dir.path(), SOON, 0);
    let terms = terms(10, 1, NONE);
    let mut values = vec![0.0; 10];
    let mut island = served.island("a", &terms, IslandSchedule::default(), &mut values);
    let port = served.port();
    drop(served);
    let waiting = std::thread::spawn(move || {
        train(&mut island, 1..=1, 1.0, &mut values);
        values
    });
    let _served = ServedCoordinator::start(dir.path(), SOON, port);
    assert_eq!(waiting.join().unwrap(), [1.0; 10]);
}

#[test]
fn a_wrong_token_a_silent_port_and_a_round_that_stays_open_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let served = ServedCoordinator::start(dir.path(), SOON, 0);
    let terms = terms(10, 1, NONE);
    let error = client(&served.url, "a", &run(), None, SOON).join(&terms, None).unwrap_err().to_string();
    assert!(error.contains("refuses island `a`: send the token of this coordinator"), "{error}");
    let mut values = vec![0.0; 10];
    let _a = served.island("a", &terms, IslandSchedule::default(), &mut values);
    let short = Duration::from_millis(300);
    let waiting = client(&served.url, "b", &run(), Some(TOKEN), short);
    let error = waiting.round(0, 40).unwrap_err().to_string();
    assert!(error.starts_with("island `b` has waited 0 s for the end of round 0"), "{error}");
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let error = client(&url, "a", &run(), None, short).join(&terms, None).unwrap_err();
    assert!(matches!(error, IslandError::Deadline { .. }), "{error}");
}

#[test]
fn a_round_waits_for_an_outer_gradient_that_is_being_received() {
    let dir = tempfile::tempdir().unwrap();
    let served = ServedCoordinator::start(dir.path(), Duration::ZERO, 0);
    let (a, b, terms) = (served.client("a", &run()), run(), terms(4, 1, NONE));
    a.begin(&terms, &[0.0; 4]).unwrap();
    served.client("b", &b).join(&terms, None).unwrap();
    let gradient = |value: f32| RoundMessage { round: 0, islands: 1, payload: to_bytes(&[value; 4]) };
    let body = gradient(3.0).to_frame();
    let mut slow = TcpStream::connect(served.url.strip_prefix("http://").unwrap()).unwrap();
    let head = format!(
        "PUT /v1/islands/contributions/b/{b} HTTP/1.1\r\nHost: islands\r\nAuthorization: Bearer {TOKEN}\r\n\
         Content-Length: {}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n",
        body.len()
    );
    slow.write_all(head.as_bytes()).unwrap();
    // It is sent as the body begins to be read.
    let mut begun = *b"HTTP/1.1 100 Continue\r\n\r\n";
    let expected = begun;
    slow.read_exact(&mut begun).unwrap();
    assert_eq!(begun, expected);
    slow.write_all(&body[..60]).unwrap();
    a.contribute(&gradient(1.0)).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(a.weights(4).unwrap().round, 0, "it is open");
    slow.write_all(&body[60..]).unwrap();
    let mut answer = String::new();
    slow.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("counted"), "{answer}");
    assert_eq!(super::values(&a.weights(4).unwrap().payload), [-2.0; 4]);
}

#[test]
fn an_outer_gradient_that_came_late_is_in_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let served = ServedCoordinator::start(dir.path(), Duration::ZERO, 0);
    let terms = terms(4, 1, NONE);
    let (mut first, mut second) = (vec![0.0; 4], vec![0.0; 4]);
    let mut a = served.island("a", &terms, IslandSchedule::default(), &mut first);
    let mut b = served.island("b", &terms, IslandSchedule::default(), &mut second);
    train(&mut a, 1..=1, 1.0, &mut first);
    second.fill(3.0);
    let report = b.after_step(1, &mut second).unwrap().unwrap();
    assert!(report.is_late && !report.is_replaced, "{report:?}");
    assert_eq!(second, [1.0; 4], "the newest outer weights");
    train(&mut b, 2..=2, 3.0, &mut second);
    assert_eq!(second, [7.0; 4], "both outer gradients");
}

#[test]
fn an_island_with_other_outer_weights_than_the_coordinator_takes_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let served = ServedCoordinator::start(dir.path(), SOON, 0);
    let terms = IslandTerms { local_steps: 4, ..terms(4, 1, NONE) };
    let (schedule, id, answers) = (IslandSchedule::default(), run(), dir.path().join("answers"));
    let mut values = vec![1.0; 4];
    let joined =
        Island::join(served.client("a", &id), terms.clone(), schedule, answers.clone(), 0, &mut values);
    let mut state = joined.unwrap().0.state();
    let header = u64::from_le_bytes(state[..8].try_into().unwrap()) as usize;
    // The exponent of the first of the outer weights.
    state[8 + header + 3] ^= 1;
    let resumed = Island::resume(served.client("a", &id), terms, schedule, answers, &state);
    values.fill(3.0);
    let report = resumed.unwrap().0.after_step(4, &mut values).unwrap().unwrap();
    assert!(report.is_replaced && !report.is_late, "{report:?}");
    assert_eq!(values, super::values(&served.client("a", &id).weights(4).unwrap().payload));
}

#[test]
fn a_wait_that_is_stopped_is_part_of_the_state() {
    let dir = tempfile::tempdir().unwrap();
    let served = ServedCoordinator::for_two(dir.path());
    let terms = IslandTerms { local_steps: 4, ..terms(4, 1, NONE) };
    let (schedule, id, answers) = (IslandSchedule::default(), run(), dir.path().join("answers"));
    let mut values = vec![0.0; 4];
    let joined =
        Island::join(served.client("a", &id), terms.clone(), schedule, answers.clone(), 0, &mut values);
    let mut island = joined.unwrap().0.stopped_by(Arc::new(AtomicBool::new(true)));
    values.fill(1.0);
    assert_eq!(island.after_step(4, &mut values).unwrap(), None);
    assert_eq!(values, [1.0; 4]);
    let state = island.state();
    let other = RoundMessage { round: 0, islands: 1, payload: to_bytes(&[-3.0; 4]) };
    served.client("b", &run()).contribute(&other).unwrap();
    let resumed = Island::resume(served.client("a", &id), terms, schedule, answers, &state);
    values.fill(5.0);
    let mut island = resumed.unwrap().0;
    let report = island.after_step(5, &mut values).unwrap().unwrap();
    assert_eq!((report.round, report.islands, values), (1, 2, vec![2.0; 4]));
    // A resume from the checkpoint of step 4 needs the answer.
    island.forget_through(4).unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("answers")).unwrap().count(), 1);
}
