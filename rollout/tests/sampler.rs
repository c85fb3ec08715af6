//! The seam of rollout engines: a scripted sampler, without a model, drives the rollout worker and the evaluation.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use buffer::{Buffer, BufferConfig, BufferError, Consumer, LeaseRequest, Producer};
use model::Sampling;
use rewards::{Builtin, Criterion, OnError, RewardInput, RewardSet, WeightedReward};
use rollout::evaluate::{EvaluationConfig, EvaluationObserver, EvaluationProgress, EvaluationSet, evaluate};
use rollout::scoring::Scorer;
use rollout::tasks::TaskOrder;
use rollout::{
    AppliedWeights, Completion, EngineCounts, EpisodeConfig, OnUpdate, PromptSet, RolloutError,
    SampleRequest, Sampler, Worker, WorkerConfig, WorkerPhase,
};
use trajectory::{GroupId, PolicyVersion, Prompt, StopReason, Task, TaskId, VersionRun};

const SOON: Duration = Duration::from_secs(20);

/// An engine in another process, as a script: it applies weights over several calls, completes one request per poll, and
/// fails on demand.
#[derive(Debug)]
struct ScriptedSampler {
    version: PolicyVersion,
    weights: Receiver<PolicyVersion>,
    staged: Option<PolicyVersion>,
    /// Calls of `apply_weights` that a version needs; `None`: it is never applied.
    apply_calls: Option<usize>,
    calls: usize,
    /// Most sequences in flight.
    capacity: usize,
    queue: VecDeque<SampleRequest>,
    fails: Arc<AtomicBool>,
    log: Arc<Mutex<Vec<String>>>,
    counts: EngineCounts,
}

/// What a test holds of a scripted sampler.
struct Script {
    weights: Sender<PolicyVersion>,
    fails: Arc<AtomicBool>,
    log: Arc<Mutex<Vec<String>>>,
}

fn scripted(capacity: usize, apply_calls: Option<usize>) -> (ScriptedSampler, Script) {
    let (sender, weights) = channel();
    let (fails, log) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let script = Script { weights: sender, fails: Arc::clone(&fails), log: Arc::clone(&log) };
    let sampler = ScriptedSampler {
        version: PolicyVersion(0),
        weights,
        staged: None,
        apply_calls,
        calls: 0,
        capacity,
        queue: VecDeque::new(),
        fails,
        log,
        counts: EngineCounts::default(),
    };
    (sampler, script)
}

impl ScriptedSampler {
    fn completion(&self, request: &SampleRequest, index: u32) -> Completion {
        let baseline = index as usize >= request.samples;
        Completion {
            group: request.group,
            index,
            prompt_length: request.prompt.len(),
            prompt_version: self.version,
            prefill: Vec::new(),
            token_ids: [&request.prompt[..], &[50 + index, 1]].concat(),
            logprobs: vec![-0.5, -0.25],
            versions: vec![VersionRun { version: self.version, len: 2 }],
            inserted: None,
            baseline,
            kept: None,
            experts: None,
            alternatives: Vec::new(),
            sampling: if baseline { Sampling::GREEDY } else { request.sampling },
            stop: StopReason::StopToken,
            text: format!("{index}"),
        }
    }
}

impl Sampler for ScriptedSampler {
    fn version(&self) -> PolicyVersion {
        self.version
    }

    fn has_capacity(&self, completions: usize) -> bool {
        self.in_flight() + completions <= self.capacity
    }

    fn in_flight(&self) -> usize {
        self.queue.iter().map(SampleRequest::sequences).sum()
    }

    fn submit(&mut self, request: SampleRequest) -> Result<(), RolloutError> {
        self.log.lock().unwrap().push(format!("{} under {}", request.group, self.version));
        self.queue.push_back(request);
        Ok(())
    }

    fn poll(&mut self, _: Duration) -> Result<Vec<Completion>, RolloutError> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(RolloutError::Sampler {
                engine: "http://10.0.0.7:8000".to_owned(),
                evidence: "answered 500 to POST /inference/v1/generate: out of memory".to_owned(),
                remedy: "lower rollout.max_running".to_owned(),
            });
        }
        let Some(request) = self.queue.pop_front() else { return Ok(Vec::new()) };
        self.counts.sampled_tokens += 2 * request.sequences() as u64;
        Ok((0..request.sequences() as u32).map(|index| self.completion(&request, index)).collect())
    }

    fn abort(&mut self, group: GroupId) -> Result<usize, RolloutError> {
        let before = self.in_flight();
        self.queue.retain(|request| request.group != group);
        Ok(before - self.in_flight())
    }

    fn newer_weights(&mut self, wait: Duration) -> Result<Option<PolicyVersion>, RolloutError> {
        if let Ok(version) = self.weights.recv_timeout(wait) {
            self.staged = Some(version);
        }
        Ok(self.staged)
    }

    fn apply_weights(&mut self, _: OnUpdate) -> Result<Option<AppliedWeights>, RolloutError> {
        self.calls += 1;
        if self.apply_calls.is_none_or(|calls| self.calls < calls) {
            return Ok(None);
        }
        self.calls = 0;
        let Some(version) = self.staged.take() else { return Ok(None) };
        self.version = version;
        Ok(Some(AppliedWeights { version, stalled: Duration::from_millis(3) }))
    }

    fn sleep(&mut self) -> Result<u64, RolloutError> {
        Ok(0)
    }

    fn is_asleep(&self) -> bool {
        false
    }

    fn counts(&self) -> EngineCounts {
        self.counts
    }
}

fn prompts(tasks: u64) -> Arc<PromptSet> {
    let task = |id| Task {
        id: TaskId(id),
        prompt: Prompt::Text("?".into()),
        answer: Some("1".into()),
        columns: serde_json::Map::new(),
    };
    let tasks = (0..tasks).map(|id| (task(id), vec![9, 8, id as u32])).collect();
    Arc::new(PromptSet::from_tokens(tasks, TaskOrder::File).unwrap())
}

/// A reward of 1 for the completion whose text is the answer of its task.
fn rewards() -> Arc<RewardSet> {
    let right =
        |input: &RewardInput<'_>| Ok(f64::from(u8::from(Some(input.text) == input.task.answer.as_deref())));
    let reward = Box::new(Builtin::new("exact", right));
    let reward = WeightedReward { reward, weight: 1.0, on_error: OnError::Skip };
    let criterion = Criterion { reward: "exact".to_owned(), threshold: 1.0 };
    Arc::new(RewardSet::new(vec![reward]).unwrap().judged_by(Some(criterion)).unwrap())
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap()
}

const WORKER: WorkerConfig = WorkerConfig {
    group_size: 3,
    greedy_baseline: false,
    sampling: Sampling::PLAIN,
    max_completion_length: 4,
    on_update: OnUpdate::Keep,
    wait: SOON,
    holder: None,
};

fn worker(
    sampler: ScriptedSampler,
    config: WorkerConfig,
    buffer: &Arc<Buffer>,
    runtime: &tokio::runtime::Runtime,
) -> Worker {
    let producer: Arc<dyn Producer> = Arc::clone(buffer) as Arc<dyn Producer>;
    let scorer = Scorer::start(runtime.handle(), rewards(), producer, None, 8);
    Worker::new(config, Box::new(sampler), prompts(5), scorer)
}

/// Runs a rollout worker around `sampler` beside `consume`, which gets the buffer and ends the run.
fn work(
    sampler: ScriptedSampler,
    config: WorkerConfig,
    consume: impl FnOnce(&Buffer) + Send,
) -> Result<(), RolloutError> {
    let runtime = runtime();
    let buffer = Arc::new(Buffer::in_memory(BufferConfig::new(2, 0)).unwrap());
    let worker = worker(sampler, config, &buffer, &runtime);
    let (progress, stop) = (worker.progress(), AtomicBool::new(false));
    let result = std::thread::scope(|scope| {
        let working = scope.spawn(|| worker.run(&*buffer, &stop));
        consume(&buffer);
        stop.store(true, Ordering::Relaxed);
        working.join().unwrap()
    });
    assert_eq!(progress.lock().unwrap().doing, WorkerPhase::Stopping);
    result
}

#[test]
fn a_worker_drives_any_sampler_and_trains_on_its_versions() {
    let (sampler, script) = scripted(6, Some(3));
    let consume = |buffer: &Buffer| {
        for step in 0..3 {
            let version = PolicyVersion(step);
            let lease = buffer.lease(&LeaseRequest::step("trainer", version), SOON).unwrap();
            assert_eq!(lease.groups.len(), 2);
            for group in &lease.groups {
                assert_eq!(group.oldest_version(), Some(version), "max_staleness = 0");
                assert_eq!(group.rewards().collect::<Vec<_>>(), [0.0, 1.0, 0.0]);
                for trajectory in &group.trajectories {
                    let sample = &trajectory.sample;
                    assert_eq!(sample.token_ids(), [9, 8, group.task.id.0 as u32, 50 + trajectory.index, 1]);
                    assert_eq!(sample.loss_mask(), [false, false, false, true, true]);
                    assert_eq!(sample.behavior_logprobs(), [0.0, 0.0, 0.0, -0.5, -0.25]);
                }
            }
            buffer.ack(lease.id).unwrap();
            buffer.set_version(version.next(), false).unwrap();
            script.weights.send(version.next()).unwrap();
        }
    };
    work(sampler, WORKER, consume).unwrap();
    let log = script.log.lock().unwrap();
    let first: Vec<_> = (0..6).map(|group| format!("group {group} under v{}", group / 2)).collect();
    assert!(log.starts_with(&first), "{log:?}");
}

/// A worker of another process that serves a later version than the buffer knows: the run was started again from an older
/// checkpoint.
#[test]
fn a_worker_that_is_ahead_of_the_trainer_waits_for_it() {
    let (sampler, _script) = scripted(6, Some(1));
    let sampler = ScriptedSampler { version: PolicyVersion(1), ..sampler };
    let config = WorkerConfig { holder: Some(1), ..WORKER };
    work(sampler, config, |buffer| {
        let behind = LeaseRequest::step("trainer", PolicyVersion(0));
        assert!(buffer.lease(&behind, Duration::from_millis(200)).is_err());
        buffer.set_version(PolicyVersion(1), false).unwrap();
        let lease = buffer.lease(&LeaseRequest::step("trainer", PolicyVersion(1)), SOON).unwrap();
        assert_eq!(lease.groups.len(), 2);
    })
    .unwrap();
}

#[test]
fn a_trainer_that_stays_behind_ends_the_worker() {
    let (sampler, _script) = scripted(6, Some(1));
    let sampler = ScriptedSampler { version: PolicyVersion(1), ..sampler };
    let config = WorkerConfig { holder: Some(1), wait: Duration::ZERO, ..WORKER };
    let runtime = runtime();
    let buffer = Arc::new(Buffer::in_memory(BufferConfig::new(2, 0)).unwrap());
    let worker = worker(sampler, config, &buffer, &runtime);
    let error = worker.run(&*buffer, &AtomicBool::new(false)).unwrap_err();
    assert!(matches!(error, RolloutError::Buffer(BufferError::FutureVersion { .. })), "{error}");
}

#[test]
fn an_engine_that_fails_ends_the_worker_with_its_answer() {
    let (sampler, script) = scripted(6, Some(1));
    script.fails.store(true, Ordering::Relaxed);
    let error = work(sampler, WORKER, |buffer| {
        let nothing =
            buffer.lease(&LeaseRequest::step("trainer", PolicyVersion(0)), Duration::from_millis(200));
        assert!(nothing.is_err());
    })
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the rollout engine http://10.0.0.7:8000 answered 500 to POST /inference/v1/generate: out of memory; lower \
         rollout.max_running"
    );
    assert!(!error.is_input());
}

#[test]
fn an_engine_that_never_applies_a_version_ends_with_a_deadline() {
    let (sampler, script) = scripted(6, None);
    script.weights.send(PolicyVersion(0)).unwrap();
    let config = WorkerConfig { wait: Duration::from_millis(100), ..WORKER };
    let error = work(sampler, config, |_| std::thread::sleep(Duration::from_millis(400))).unwrap_err();
    assert!(error.to_string().contains("for its rollout engine to apply v0; it serves v0"), "{error}");
}

#[test]
fn an_evaluation_drives_any_sampler_within_its_capacity() {
    let (mut sampler, script) = scripted(4, Some(1));
    let (runtime, prompts) = (runtime(), prompts(5));
    let sets = [EvaluationSet { prompts: &prompts, tasks: Some(3), samples: 6 }];
    let config =
        EvaluationConfig { sampling: Sampling::PLAIN, max_completion_length: 4, max_samples: 4, wait: SOON };
    let (stop, progress) = (AtomicBool::new(false), EvaluationProgress::default());
    let watch = EvaluationObserver { stop: &stop, progress: &progress, show: &|_| () };
    let evaluations = evaluate(
        &config,
        &mut sampler,
        EpisodeConfig::single_turn(),
        &sets,
        &rewards(),
        runtime.handle(),
        &watch,
    )
    .unwrap()
    .unwrap();
    // Six answers are requests of four and of two; in each the second answer is right.
    assert_eq!((evaluations[0].tasks(), evaluations[0].accuracy()), (3, Some(1.0 / 3.0)));
    assert_eq!(evaluations[0].tokens(), 36);
    assert_eq!(script.log.lock().unwrap().len(), 6);
}
