//! Episodes over their time, whatever they wait for, and episodes that end before they have a token.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use environments::{
    Action, BoxFuture, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits, Observation,
};
use model::Sampling;
use rollout::{
    AppliedWeights, Completion, EngineCounts, Episode, EpisodeDriver, EpisodeEnd, FailureKind, LocalSampler,
    OnUpdate, RequestOptions, RolloutError, SampleRequest, Sampler,
};
use tokio::runtime::Runtime;
use trajectory::{GroupId, Message, PolicyVersion, Prompt, StopReason, Task, TaskId, VersionRun};

use crate::Model;
use crate::episodes::{LONG, STOPS, chatting_of, play_with, played_in, question, said};

/// Longest episode.
const LIMIT: Duration = Duration::from_millis(300);
const SOON: Duration = Duration::from_secs(20);

/// An environment that opens, or does not, and never answers a turn.
#[derive(Clone, Debug, Default)]
struct Silent {
    fails: bool,
    /// Whether one of its episodes was dropped.
    dropped: Arc<AtomicBool>,
}

#[derive(Debug)]
struct SilentEpisode(Silent);

impl EnvironmentFactory for Silent {
    fn name(&self) -> &str {
        "silent"
    }

    fn limits(&self) -> EnvironmentLimits {
        EnvironmentLimits { max_turns: 4, episode_timeout: LIMIT, ..EnvironmentLimits::default() }
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(SilentEpisode(self.clone()))
    }
}

impl Environment for SilentEpisode {
    fn reset<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        let evidence = "there is no board".to_owned();
        let failed = EnvironmentError::Failed { environment: "silent".to_owned(), turn: 0, evidence };
        Box::pin(std::future::ready(if self.0.fails { Err(failed) } else { Ok(vec![said("go")]) }))
    }

    fn step<'a>(&'a mut self, _: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        Box::pin(std::future::pending())
    }
}

impl Drop for SilentEpisode {
    fn drop(&mut self) {
        self.0.dropped.store(true, Ordering::SeqCst);
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap()
}

fn overdue(episode: &Episode) {
    let EpisodeEnd::Failed(failure) = &episode.end else { panic!("{:?}", episode.end) };
    assert!(failure.reason.contains("was not over after 0 s"), "{failure:?}");
    assert_eq!(failure.kind, FailureKind::EpisodeTimeout);
    episode.sample().unwrap();
}

/// The call under way is dropped with the episode: a process that it holds is free again.
#[test]
fn an_episode_whose_environment_is_silent_ends_in_time() {
    let (model, directory) = chatting_of(Model::new());
    let (silent, started) = (Silent::default(), Instant::now());
    let dropped = Arc::clone(&silent.dropped);
    let mut sampler = LocalSampler::fixed(model.engine(LONG, &STOPS));
    let config = played_in(&directory, Arc::new(silent));
    let episodes = play_with(&mut sampler, &directory, config, &[question(1)], Sampling::PLAIN);
    assert!(started.elapsed() < SOON);
    let waiting: Vec<&Episode> = episodes.iter().filter(|episode| !episode.truncated()).collect();
    assert!(!waiting.is_empty());
    waiting.into_iter().for_each(overdue);
    let at = Instant::now();
    while !dropped.load(Ordering::SeqCst) {
        assert!(at.elapsed() < SOON, "the call goes on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A sampler that samples nothing until it may.
#[derive(Debug, Default)]
struct Stalled {
    samples: bool,
    requests: Vec<SampleRequest>,
    /// Sequences that nothing is kept for.
    ended: Vec<u32>,
}

impl Sampler for Stalled {
    fn version(&self) -> PolicyVersion {
        PolicyVersion(0)
    }

    fn has_capacity(&self, _: usize) -> bool {
        self.requests.len() < 2
    }

    fn in_flight(&self) -> usize {
        self.requests.iter().map(SampleRequest::sequences).sum()
    }

    fn submit(&mut self, request: SampleRequest) -> Result<(), RolloutError> {
        self.requests.push(request);
        Ok(())
    }

    fn poll(&mut self, wait: Duration) -> Result<Vec<Completion>, RolloutError> {
        if !self.samples {
            std::thread::sleep(wait);
            return Ok(Vec::new());
        }
        let requests = std::mem::take(&mut self.requests);
        let of = |request: &SampleRequest, n: u32| Completion {
            group: request.group,
            index: request.first_index + n,
            prompt_length: request.prompt.len(),
            prompt_version: PolicyVersion(0),
            prefill: Vec::new(),
            token_ids: [&request.prompt[..], &[7]].concat(),
            logprobs: vec![-1.0],
            versions: vec![VersionRun { version: PolicyVersion(0), len: 1 }],
            inserted: None,
            baseline: false,
            kept: None,
            experts: None,
            sampling: request.sampling,
            stop: StopReason::StopToken,
            text: String::new(),
            alternatives: Vec::new(),
        };
        let all = requests.iter().flat_map(|request| (0..request.samples as u32).map(|n| of(request, n)));
        Ok(all.collect())
    }

    fn abort(&mut self, _: GroupId) -> Result<usize, RolloutError> {
        Ok(0)
    }

    fn end_episode(&mut self, _: GroupId, index: u32) {
        self.ended.push(index);
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

/// An episode that waits for the sampler has a clock too. What the sampler still works at is passed over when it comes.
#[test]
fn an_episode_whose_sampler_is_silent_ends_in_time() {
    let (_model, directory) = chatting_of(Model::new());
    let (runtime, mut sampler, started) = (runtime(), Stalled::default(), Instant::now());
    let config = played_in(&directory, Arc::new(Silent::default()));
    let mut driver = EpisodeDriver::new(config, runtime.handle().clone());
    for id in 0..3 {
        let task = question(id);
        let prompt = directory.encode_prompt(&task.prompt).unwrap();
        let request = SampleRequest {
            group: GroupId(id),
            prompt,
            first_index: 0,
            turn: 0,
            samples: 1,
            sampling: Sampling::PLAIN,
            max_completion_length: 24,
            baseline: false,
            keep_cache: false,
            options: RequestOptions::default(),
        };
        driver.start(&mut sampler, &task, request).unwrap();
    }
    assert_eq!(sampler.requests.len(), 2, "the third waits for its turn");
    let mut ended = Vec::new();
    while ended.len() < 3 {
        assert!(started.elapsed() < SOON);
        ended.extend(driver.poll(&mut sampler, SOON).unwrap());
    }
    ended.iter().for_each(overdue);
    assert!(!driver.is_idle(), "two sequences come back");
    sampler.samples = true;
    sampler.ended.clear();
    assert_eq!(driver.poll(&mut sampler, SOON).unwrap(), []);
    assert!(driver.is_idle() && sampler.requests.is_empty());
    assert_eq!(sampler.ended, [0, 0], "their pages are free");
}

/// An environment that begins the conversation and cannot has no token to show; its episode fails, and the run goes on.
#[test]
fn an_environment_that_does_not_begin_the_conversation_fails_its_episode() {
    let (model, directory) = chatting_of(Model::new());
    let (runtime, mut sampler) = (runtime(), LocalSampler::fixed(model.engine(LONG, &STOPS)));
    let config = played_in(&directory, Arc::new(Silent { fails: true, ..Silent::default() }));
    let mut driver = EpisodeDriver::new(config, runtime.handle().clone());
    let prompt = Prompt::Text(String::new());
    let task = Task { id: TaskId(0), prompt, answer: None, columns: serde_json::Map::new() };
    let request = SampleRequest {
        group: GroupId(0),
        prompt: Vec::new(),
        first_index: 0,
        turn: 0,
        samples: 2,
        sampling: Sampling::PLAIN,
        max_completion_length: 24,
        baseline: false,
        keep_cache: false,
        options: RequestOptions::default(),
    };
    driver.start(&mut sampler, &Arc::new(task), request).unwrap();
    let ended = driver.poll(&mut sampler, SOON).unwrap();
    assert_eq!(ended.len(), 2);
    for episode in ended {
        assert!(matches!(episode.end, EpisodeEnd::Failed(_)) && episode.turns.is_empty());
        assert_eq!(episode.sample().unwrap().trained_tokens(), 0);
    }
}
