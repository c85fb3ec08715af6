//! A simulated rollout worker: three threads and no model.
//!
//! Invariant: a receipt has the digest of the received weights, computed from them.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use buffer::http::{Client, ClientConfig};
use buffer::{AdmitRequest, BufferError, Producer};
use rlrun::failure::Failure;
use serde_json::{Map, Value, json};
use trajectory::{
    Component, Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
    Trajectory, Turn, VersionRun,
};
use weights::http::remote::RemoteTransport;
use weights::http::{RelayConfig, RelaySubscriber, RemoteConfig, RemoteSubscriber};
use weights::{Digest, Dtype, Receipt, Subscriber, WeightsError};

use crate::args::SamplersBenchArgs;

/// Protocol between workers and a run that this worker speaks.
const PROTOCOL: u32 = 1;
/// Pause between two heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Deadline of a heartbeat and of joining.
const ANSWER: Duration = Duration::from_secs(10);
/// How long a run may be busy before it lets a worker join.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a worker waits in line for a slot, and pauses first.
const IN_LINE: Duration = Duration::from_millis(20);
/// Longest sleep before a worker looks for a stop.
const LOOK_UP: Duration = Duration::from_millis(5);
/// Lifetime of a lease whose worker is lost.
const HOLD: Duration = Duration::from_secs(15);
/// Tokens of a prompt.
const PROMPT: usize = 8;

/// What a worker did.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) groups: u64,
    /// Requests for slots.
    pub(super) asked: u64,
}

/// When a version reached a worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct VersionArrival {
    pub(super) version: u64,
    /// When it asked for the weights.
    pub(super) begun: Instant,
    pub(super) ready: Instant,
    pub(super) bytes: u64,
}

/// A worker that has joined.
pub(super) struct SimulatedWorker<'a> {
    args: &'a SamplersBenchArgs,
    name: String,
    instance: u64,
    client: Arc<Client>,
    subscriber: Box<dyn Subscriber>,
    /// The version that it serves.
    served: AtomicU64,
}

impl<'a> SimulatedWorker<'a> {
    /// Joins as worker `index`.
    pub(super) fn join(
        args: &'a SamplersBenchArgs,
        index: usize,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self, Failure> {
        let give_up = Some(Arc::clone(stop));
        let token = args.token_file.as_deref().map(token).transpose()?;
        let config =
            ClientConfig { token: token.clone(), hold: HOLD, give_up, ..ClientConfig::new(&args.join) };
        let client = Client::new(config)?;
        let ask = json!({ "protocol": PROTOCOL, "role": "rollout", "name": format!("simulated {index:03}") });
        let started = Instant::now();
        let joined = loop {
            match client.ask_once::<Value>("/v1/run/join", &ask, ANSWER) {
                Ok(answer) if answer["joined"].is_object() => break answer["joined"].clone(),
                Ok(_) | Err(BufferError::Unreachable { .. } | BufferError::Unclear { .. })
                    if started.elapsed() < PATIENCE => {}
                Ok(_) => return Err(Failure::NotThere("the run does not let workers join".to_owned())),
                Err(error) => return Err(error.into()),
            }
            std::thread::sleep(IN_LINE);
        };
        let name = joined["name"].as_str().unwrap_or_default().to_owned();
        let instance = joined["instance"].as_u64().unwrap_or_default();
        let recipe = joined["recipe"].as_str().unwrap_or_default();
        let dtype = if recipe.contains("dtype = \"bf16\"") { Dtype::Bf16 } else { Dtype::F32 };
        let config = RemoteConfig {
            token,
            transport: RemoteTransport::Http,
            patience: ANSWER,
            ..RemoteConfig::new(&args.join, name.clone())
        };
        let subscriber: Box<dyn Subscriber> = if index < args.relays {
            let system = |source| Failure::System { what: "listen as a relay".to_owned(), source };
            let listener = TcpListener::bind("127.0.0.1:0").map_err(system)?;
            Box::new(RelaySubscriber::start(config, RelayConfig { listener, url: None, dtype })?)
        } else {
            Box::new(RemoteSubscriber::connect(config)?)
        };
        let client = Arc::new(client);
        Ok(Self { args, name, instance, client, subscriber, served: AtomicU64::new(u64::MAX) })
    }

    /// Works until `stop`, which it sets when the run is over.
    pub(super) fn run(self, stop: &AtomicBool) -> Result<(Counts, Vec<VersionArrival>), Failure> {
        std::thread::scope(|scope| {
            let beats = scope.spawn(|| self.send_heartbeats(stop));
            let weights = scope.spawn(|| self.receive(stop));
            let counts = self.sample(stop);
            stop.store(true, Ordering::Relaxed);
            let arrivals = weights.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            beats.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok((counts?, arrivals?))
        })
    }

    fn send_heartbeats(&self, stop: &AtomicBool) {
        loop {
            let leaves = stop.load(Ordering::Relaxed);
            let beat = json!({
                "name": self.name, "role": "rollout", "instance": self.instance, "pid": std::process::id(),
                "host": "simulated", "doing": "is decoding", "progress": null, "rewards": [], "serves": null,
                "leaves": leaves,
            });
            // A run that has ended does not answer; the next heartbeat replaces a lost one.
            let answer = self.client.ask_once::<Value>("/v1/run/beat", &beat, ANSWER);
            if leaves || answer.is_ok_and(|answer| answer["stop"] == true) {
                stop.store(true, Ordering::Relaxed);
                return;
            }
            let next = Instant::now() + HEARTBEAT;
            while Instant::now() < next && !stop.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK_UP);
            }
        }
    }

    fn receive(&self, stop: &AtomicBool) -> Result<Vec<VersionArrival>, Failure> {
        let (mut after, mut arrivals) = (None, Vec::new());
        while !stop.load(Ordering::Relaxed) {
            let new = match self.subscriber.wait_newer(after, HEARTBEAT) {
                Ok(Some(new)) => new,
                Ok(None) => continue,
                Err(WeightsError::PublisherGone { .. } | WeightsError::Unreachable { .. }) => break,
                Err(error) => return Err(error.into()),
            };
            let (version, digest) = (new.version, Digest::of(&new.values));
            let ready = Instant::now();
            let (bytes, took) = (new.received.bytes, new.received.took);
            arrivals.push(VersionArrival { version: version.0, begun: ready - took, ready, bytes });
            after = Some(version);
            self.served.store(version.0, Ordering::Relaxed);
            let stalled = Duration::ZERO;
            self.subscriber.applied(Receipt { version, digest, took, stalled, bytes, taken: 0 })?;
        }
        Ok(arrivals)
    }

    fn sample(&self, stop: &AtomicBool) -> Result<Counts, Failure> {
        let longest = Duration::from_millis(self.args.longest_pause_ms);
        let (mut counts, mut running) = (Counts::default(), VecDeque::new());
        let (mut refused_at, mut pause, mut again) = (u64::MAX, IN_LINE, Instant::now());
        while !stop.load(Ordering::Relaxed) {
            while let Some(&(due, group, version)) = running.front()
                && due <= Instant::now()
            {
                running.pop_front();
                if answered(self.client.finalize(self.group(group, version)))?.is_some() {
                    counts.groups += 1;
                }
            }
            let served = self.served.load(Ordering::Relaxed);
            let capacity = served != u64::MAX && running.len() < self.args.running;
            if !capacity || (served == refused_at && Instant::now() < again) {
                std::thread::sleep(LOOK_UP);
                continue;
            }
            let version = PolicyVersion(served);
            let one = AdmitRequest { served: version, limit: 1, hold: None, holder: Some(self.instance) };
            // As a worker: only one without anything to decode waits in line.
            let wait = if running.is_empty() { IN_LINE } else { Duration::ZERO };
            counts.asked += 1;
            let granted = answered(self.client.admit(one, wait))?.and_then(|mut ids| ids.pop());
            let Some(group) = granted else {
                pause = if served == refused_at { (2 * pause).min(longest) } else { IN_LINE.min(longest) };
                (refused_at, again) = (served, Instant::now() + pause);
                continue;
            };
            refused_at = u64::MAX;
            if answered(self.client.claim(group, version))?.is_some() {
                running.push_back((
                    Instant::now() + Duration::from_millis(self.args.group_ms),
                    group,
                    version,
                ));
            }
        }
        Ok(counts)
    }

    /// Completions of random tokens, of which every other is right.
    fn group(&self, id: GroupId, version: PolicyVersion) -> Group {
        let length = PROMPT + self.args.tokens;
        let trajectory = |index: u32| {
            let token = |at: usize| 4 + (id.0 as u32 * 7 + index * 31 + at as u32 * 13) % 40;
            let trained = |at: usize| at >= PROMPT;
            let streams = SampleStreams {
                token_ids: (0..length).map(token).collect(),
                loss_mask: (0..length).map(trained).collect(),
                behavior_logprobs: (0..length).map(|at| if trained(at) { -3.0 } else { 0.0 }).collect(),
                versions: vec![VersionRun { version, len: length as u32 }],
                kept: None,
                experts: None,
                temperature: 1.0,
            };
            let sample = Sample::new(streams).expect("all streams are made for the same tokens");
            let right = (id.0 + u64::from(index)).is_multiple_of(2);
            let value = f64::from(u8::from(right));
            let component = Component { name: "math".to_owned(), value: Some(value), ..Component::default() };
            let score = Score { total: Some(value), components: vec![component], correct: Some(right) };
            let turns = vec![Turn {
                completion: PROMPT..length,
                stop: StopReason::Length,
                reward: None,
                prefill: Vec::new(),
            }];
            Trajectory {
                index,
                sample,
                turns,
                branches: vec![],
                text: String::new(),
                score,
                baseline: false,
                role: None,
            }
        };
        let prompt = Prompt::Text(String::new());
        let task = Task { id: TaskId(id.0), prompt, answer: None, columns: Map::new() };
        Group { id, task, trajectories: (0..self.args.completions as u32).map(trajectory).collect() }
    }
}

/// The token in a file of one line.
fn token(file: &Path) -> Result<String, Failure> {
    let system = |source| Failure::System { what: format!("read {}", file.display()), source };
    let text = std::fs::read_to_string(file).map_err(system)?;
    Ok(text.split_whitespace().last().unwrap_or_default().to_owned())
}

/// `None` if the run has ended or takes the group no more.
fn answered<T>(answer: Result<T, BufferError>) -> Result<Option<T>, Failure> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(
            BufferError::Unreachable { .. } | BufferError::Unclear { .. } | BufferError::WrongState { .. },
        ) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
