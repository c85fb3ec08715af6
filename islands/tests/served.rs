//! Islands and a coordinator over a socket.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use islands::server::CoordinatorServer;
use islands::{
    CoordinatorAddress, CoordinatorClient, GradientCompression, Island, IslandError, IslandSchedule,
    IslandTerms,
};

use super::{SOON, open, run, terms};

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
        let coordinator = Arc::new(open(dir, deadline));
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
        let served = ServedCoordinator::start(dir.path(), SOON, 0);
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
        if fragments == 1 {
            assert_eq!(first, second);
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
        let mut island = resumed.unwrap();
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
