//! How well environments are used under three schedules of the same episodes: simulated environments and a simulated
//! engine, driven by the episode driver of a run.
//!
//! The number of turns has a heavy tail (a bounded Pareto distribution), the time of a tool is log-normal. An environment is in
//! use while its episode is sampled or its tool works; what it waits for beyond that is no use. The schedules are those that DART
//! (arXiv 2509.23866) compares:
//!
//! | `schedule` | the next episode begins |
//! |---|---|
//! | `rollout` | as soon as an environment is free: what a run does |
//! | `task` | in place of a group that has ended as a whole |
//! | `batch` | when all environments are free |
//!
//! With `--path` the environments are those of a Python file, and the measure is how many turns they answer.
//!
//! # Fields of the objects
//! | field | is |
//! |---|---|
//! | `measure` | `episodes` |
//! | `schedule`, `episodes`, `turns` | which schedule, and what it played: the same for all |
//! | `seconds`, `least_seconds` | wall time, and the least that any schedule could take: all episodes packed without a gap, and no less than the longest |
//! | `utilisation` | the time that completions and tools of all episodes take, by the number of environments and the wall time |
//! | `faster_than_batch`, `faster_than_task` | by how much it is faster than these |
//! | `most_faster_than_batch` | by how much any schedule could be faster than `batch`: its time by `least_seconds` |
//! | `turns_per_s` | with `--path`: turns per second |
//!
//! Invariant: all schedules play the same episodes: the n-th has the same turns and times in each.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use environments::{
    Action, BoxFuture, Environment, EnvironmentContext, EnvironmentError, EnvironmentFactory,
    EnvironmentLimits, EnvironmentRegistry, EnvironmentSpec, Observation,
};
use model::Sampling;
use rlrun::failure::Failure;
use rollout::{
    AppliedWeights, Completion, EngineCounts, EpisodeConfig, EpisodeDriver, EpisodeEnvironment,
    MessageEncoder, OnUpdate, RequestOptions, RolloutError, SampleRequest, Sampler,
};
use serde_json::json;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use trajectory::{GroupId, Message, PolicyVersion, Prompt, StopReason, Task, TaskId, VersionRun};

use crate::args::EpisodesBenchArgs;

/// Longest wait of a poll.
const LOOK_UP: Duration = Duration::from_millis(1);
/// Exponent of the distribution of turns: its mean is near the lower bound, its longest episodes at the upper.
const TAIL: f64 = 1.2;

/// Plays the episodes under every schedule and writes the results to `out`.
///
/// # Errors
/// An output that cannot be written.
pub fn run(args: &EpisodesBenchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let system = |what: &str, source| Failure::System { what: what.to_owned(), source };
    let write = |source| system("write the result", source);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|source| system("start the environments", source))?;
    if let Some(path) = &args.path {
        let played = play_python(args, path, runtime.handle())?;
        let (turns, seconds) = (played.turns, played.seconds);
        let rate = turns as f64 / seconds;
        let line = match args.json {
            true => json!({"measure": "episodes", "schedule": "rollout", "turns": turns, "seconds": seconds,
                           "turns_per_s": rate})
            .to_string(),
            false => format!("{turns} turns in {seconds:.2} s: {rate:.0} turns/s"),
        };
        return writeln!(out, "{line}").map_err(write);
    }
    let mut played = Vec::new();
    for schedule in [Schedule::Batch, Schedule::Task, Schedule::Rollout] {
        played.push((schedule, play(args, schedule, runtime.handle())?));
    }
    show(args, &played, out).map_err(write)
}

/// Writes what the schedules did, `batch` first and `task` second.
fn show(
    args: &EpisodesBenchArgs,
    played: &[(Schedule, PlayedSchedule)],
    out: &mut dyn Write,
) -> std::io::Result<()> {
    let seconds_of = |n: usize| played.get(n).map_or(f64::NAN, |(_, played)| played.seconds);
    let (batch, task, least) = (seconds_of(0), seconds_of(1), args.least_seconds());
    if !args.json {
        writeln!(out, "schedule   seconds  least  utilisation  faster than batch  at most  than task")?;
    }
    for (schedule, PlayedSchedule { seconds, turns }) in played {
        let name = schedule.name();
        let used = args.work_seconds() / (seconds * args.environments as f64);
        let (than_batch, than_task, most) = (batch / seconds, task / seconds, batch / least);
        if args.json {
            let row = json!({
                "measure": "episodes", "schedule": name, "episodes": args.groups * args.group,
                "turns": turns, "seconds": seconds, "least_seconds": least, "utilisation": used,
                "faster_than_batch": than_batch, "faster_than_task": than_task,
                "most_faster_than_batch": most,
            });
            writeln!(out, "{row}")?;
        } else {
            let percent = 100.0 * used;
            writeln!(
                out,
                "{name:<9} {seconds:>8.2} {least:>6.2} {percent:>10.1} % {than_batch:>18.2} {most:>8.2} {than_task:>10.2}"
            )?;
        }
    }
    Ok(())
}

/// When the next episodes begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Schedule {
    Rollout,
    Task,
    Batch,
}

impl Schedule {
    fn name(self) -> &'static str {
        match self {
            Self::Rollout => "rollout",
            Self::Task => "task",
            Self::Batch => "batch",
        }
    }

    /// Groups that begin while `open` episodes of `groups` groups have not ended.
    fn begin(self, args: &EpisodesBenchArgs, groups: usize, open: usize) -> usize {
        let at_once = (args.environments / args.group).max(1);
        match self {
            // A group waits, so that an environment that becomes free has a next episode.
            Self::Rollout => (args.environments + args.group).saturating_sub(open).div_ceil(args.group),
            Self::Task => at_once - groups.min(at_once),
            Self::Batch if groups > 0 => 0,
            Self::Batch => at_once,
        }
    }
}

/// What a schedule did.
struct PlayedSchedule {
    seconds: f64,
    turns: u64,
}

/// Episodes in processes of Python, each answered `args.action` at once.
fn play_python(args: &EpisodesBenchArgs, path: &Path, runtime: &Handle) -> Result<PlayedSchedule, Failure> {
    let scratch = tempfile::tempdir();
    let scratch =
        scratch.map_err(|source| Failure::System { what: "make a directory for logs".to_owned(), source })?;
    let spec = EnvironmentSpec {
        kind: "python".to_owned(),
        path: Some(std::path::absolute(path).unwrap_or_else(|_| path.to_owned())),
        python: Some(args.python.clone()),
        processes: Some(args.environments),
        max_turns: args.max_turns,
        ..EnvironmentSpec::default()
    };
    let context = EnvironmentContext {
        runtime: Some(runtime.clone()),
        variables: Arc::default(),
        scratch: scratch.path().to_path_buf(),
        ..EnvironmentContext::default()
    };
    let factory = EnvironmentRegistry::builtin().build(&spec, &context);
    let factory = factory.map_err(|error| Failure::Argument(error.to_string()))?;
    // The first episodes start the processes.
    let warm = EpisodesBenchArgs { groups: args.environments.div_ceil(args.group), ..args.clone() };
    play_in(&warm, Schedule::Rollout, Arc::clone(&factory), Duration::ZERO, runtime)?;
    play_in(args, Schedule::Rollout, factory, Duration::ZERO, runtime)
}

fn play(args: &EpisodesBenchArgs, schedule: Schedule, runtime: &Handle) -> Result<PlayedSchedule, Failure> {
    let pool = Arc::new(SimulatedPool {
        args: args.clone(),
        free: Arc::new(Semaphore::new(args.environments)),
        made: AtomicU64::new(0),
    });
    let factory = Arc::new(SimulatedEnvironments { pool });
    let completion = Duration::from_secs_f64(args.completion_ms / 1e3);
    play_in(args, schedule, factory, completion, runtime)
}

fn play_in(
    args: &EpisodesBenchArgs,
    schedule: Schedule,
    factory: Arc<dyn EnvironmentFactory>,
    completion: Duration,
    runtime: &Handle,
) -> Result<PlayedSchedule, Failure> {
    let environment = EpisodeEnvironment::new(factory, Some(Arc::new(NoText)));
    let mut driver = EpisodeDriver::new(EpisodeConfig::of(environment, usize::MAX), runtime.clone());
    let mut sampler = SimulatedSampler { time: completion, text: args.action.clone(), flight: Vec::new() };
    let (started, mut next, mut turns) = (Instant::now(), 0, 0);
    // Episodes of each group that have not ended.
    let mut open: Vec<(u64, usize)> = Vec::new();
    while next < args.groups || !driver.is_idle() {
        let left: usize = open.iter().map(|(_, left)| left).sum();
        for _ in 0..schedule.begin(args, open.len(), left).min(args.groups - next) {
            let id = next as u64;
            let task = Arc::new(Task {
                id: TaskId(id),
                prompt: Prompt::Text(String::new()),
                answer: None,
                columns: serde_json::Map::new(),
            });
            driver.start(&mut sampler, &task, request(id, args.group))?;
            open.push((id, args.group));
            next += 1;
        }
        for episode in driver.poll(&mut sampler, LOOK_UP)? {
            turns += episode.turns.len() as u64;
            if let Some(group) = open.iter_mut().find(|(id, _)| *id == episode.group.0) {
                group.1 -= 1;
            }
        }
        open.retain(|(_, left)| *left > 0);
    }
    Ok(PlayedSchedule { seconds: started.elapsed().as_secs_f64(), turns })
}

fn request(group: u64, samples: usize) -> SampleRequest {
    SampleRequest {
        group: GroupId(group),
        prompt: vec![1],
        first_index: 0,
        turn: 0,
        samples,
        sampling: Sampling::PLAIN,
        max_completion_length: 8,
        baseline: false,
        keep_cache: false,
        options: RequestOptions::default(),
    }
}

impl EpisodesBenchArgs {
    /// A number in (0, 1) for `purpose` of episode `n`.
    fn uniform(&self, n: u64, purpose: u64) -> f64 {
        let mut z = self.seed.wrapping_mul(0xd134_2543_de82_ef95) ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z ^= purpose.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) as f64 + 0.5) / 18_446_744_073_709_551_616.0
    }

    /// Turns of episode `n`, a bounded Pareto distribution.
    fn turns(&self, n: u64) -> usize {
        let (low, high) = (self.min_turns as f64, self.max_turns.max(self.min_turns) as f64 + 1.0);
        let ratio = (low / high).powf(TAIL);
        let turns = low / (1.0 - self.uniform(n, 0) * (1.0 - ratio)).powf(1.0 / TAIL);
        (turns as usize).clamp(self.min_turns, self.max_turns.max(self.min_turns))
    }

    /// Time of the tool in turn `turn` of episode `n`, by Box and Muller.
    fn tool_time(&self, n: u64, turn: usize) -> Duration {
        let (one, two) = (self.uniform(n, 1 + 2 * turn as u64), self.uniform(n, 2 + 2 * turn as u64));
        let normal = (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * two).cos();
        Duration::from_secs_f64(self.tool_ms / 1e3 * (self.tool_sigma * normal).exp())
    }

    /// What the completions and tools of each episode take, seconds.
    fn each_seconds(&self) -> impl Iterator<Item = f64> {
        let completion = self.completion_ms / 1e3;
        (0..(self.groups * self.group) as u64).map(move |n: u64| -> f64 {
            (0..self.turns(n)).map(|turn| completion + self.tool_time(n, turn).as_secs_f64()).sum()
        })
    }

    /// The same of all episodes.
    fn work_seconds(&self) -> f64 {
        self.each_seconds().sum()
    }

    /// The least wall time of any schedule.
    fn least_seconds(&self) -> f64 {
        self.each_seconds().fold(self.work_seconds() / self.environments as f64, f64::max)
    }
}

/// The environments that exist.
#[derive(Debug)]
struct SimulatedPool {
    args: EpisodesBenchArgs,
    free: Arc<Semaphore>,
    made: AtomicU64,
}

#[derive(Debug)]
struct SimulatedEnvironments {
    pool: Arc<SimulatedPool>,
}

/// One episode.
#[derive(Debug)]
struct SimulatedEnvironment {
    pool: Arc<SimulatedPool>,
    episode: u64,
    /// What it occupies until it is dropped; `None` while it waits.
    occupied: Option<OwnedSemaphorePermit>,
}

impl EnvironmentFactory for SimulatedEnvironments {
    fn name(&self) -> &str {
        "simulated"
    }

    fn limits(&self) -> EnvironmentLimits {
        EnvironmentLimits { max_turns: usize::MAX, ..EnvironmentLimits::default() }
    }

    fn create(&self) -> Box<dyn Environment> {
        let episode = self.pool.made.fetch_add(1, Ordering::Relaxed);
        Box::new(SimulatedEnvironment { pool: Arc::clone(&self.pool), episode, occupied: None })
    }
}

impl Environment for SimulatedEnvironment {
    fn acquire<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<(), EnvironmentError>> {
        Box::pin(async {
            self.occupied = Arc::clone(&self.pool.free).acquire_owned().await.ok();
            Ok(())
        })
    }

    fn reset<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        Box::pin(async move {
            tokio::time::sleep(self.pool.args.tool_time(self.episode, action.turn)).await;
            let done = action.turn + 1 >= self.pool.args.turns(self.episode);
            Ok(Observation { done, ..Observation::default() })
        })
    }
}

/// Messages without tokens.
#[derive(Debug)]
struct NoText;

impl MessageEncoder for NoText {
    fn opening(&self, _: &Task, _: &[Message]) -> Result<Vec<u32>, RolloutError> {
        Ok(vec![1])
    }

    fn following(&self, _: &Task, _: u32, _: &[Message]) -> Result<Vec<u32>, RolloutError> {
        Ok(Vec::new())
    }
}

/// An engine whose completions take a time of their own, however many there are.
#[derive(Debug)]
struct SimulatedSampler {
    time: Duration,
    /// What it says.
    text: String,
    /// When each sequence ends.
    flight: Vec<(Instant, Completion)>,
}

impl Sampler for SimulatedSampler {
    fn version(&self) -> PolicyVersion {
        PolicyVersion::default()
    }

    fn has_capacity(&self, _: usize) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        self.flight.len()
    }

    fn submit(&mut self, request: SampleRequest) -> Result<(), RolloutError> {
        let ends = Instant::now() + self.time;
        let completions = (0..request.samples as u32).map(|n| Completion {
            group: request.group,
            index: request.first_index + n,
            prompt_length: request.prompt.len(),
            prompt_version: PolicyVersion::default(),
            prefill: Vec::new(),
            token_ids: [&request.prompt[..], &[2]].concat(),
            logprobs: vec![-0.5],
            versions: vec![VersionRun { version: PolicyVersion::default(), len: 1 }],
            inserted: None,
            baseline: false,
            kept: None,
            experts: None,
            alternatives: Vec::new(),
            sampling: request.sampling,
            stop: StopReason::StopToken,
            text: self.text.clone(),
        });
        self.flight.extend(completions.map(|completion| (ends, completion)));
        Ok(())
    }

    fn poll(&mut self, wait: Duration) -> Result<Vec<Completion>, RolloutError> {
        let now = Instant::now();
        if self.flight.iter().all(|(ends, _)| *ends > now) {
            let next = self.flight.iter().map(|(ends, _)| ends.saturating_duration_since(now)).min();
            std::thread::sleep(next.unwrap_or_default().min(wait));
        }
        let now = Instant::now();
        let (ended, flight) =
            std::mem::take(&mut self.flight).into_iter().partition(|(ends, _)| *ends <= now);
        self.flight = flight;
        let ended: Vec<(Instant, Completion)> = ended;
        Ok(ended.into_iter().map(|(_, completion)| completion).collect())
    }

    fn abort(&mut self, group: GroupId) -> Result<usize, RolloutError> {
        let before = self.flight.len();
        self.flight.retain(|(_, completion)| completion.group != group);
        Ok(before - self.flight.len())
    }

    fn newer_weights(&mut self, _: Duration) -> Result<Option<PolicyVersion>, RolloutError> {
        Ok(None)
    }

    fn apply_weights(&mut self, _: OnUpdate) -> Result<Option<AppliedWeights>, RolloutError> {
        Ok(None)
    }

    fn sleep(&mut self) -> Result<u64, RolloutError> {
        Ok(0)
    }

    fn is_asleep(&self) -> bool {
        false
    }

    fn counts(&self) -> EngineCounts {
        EngineCounts::default()
    }
}
