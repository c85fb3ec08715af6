//! Episodes of several turns on a tiny random model: their tokens, their ends, and environments that answer late or fail.

use std::sync::Arc;
use std::time::Duration;

use buffer::{AdmitRequest, Buffer, BufferConfig, Consumer, LeaseRequest, Producer};
use environments::{
    Action, BoxFuture, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits, Observation,
    Retry,
};
use model::{Decoder, ModelDirectory, Pack, Sampling, Target, ThreadPool};
use proptest::prelude::*;
use rewards::{Builtin, OnError, RewardInput, RewardSet, WeightedReward};
use rollout::scoring::{ScoreRequest, Scorer};
use rollout::{
    ChatEncoder, EngineConfig, Episode, EpisodeConfig, EpisodeDriver, EpisodeEnd, EpisodeEnvironment,
    LocalSampler, RequestOptions, RolloutError, SampleRequest, Sampler,
};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use trajectory::{GroupId, Message, PolicyVersion, Prompt, Sample, StopReason, Task, TaskId};

use crate::{CONFIG, Model};

const SOON: Duration = Duration::from_secs(20);
const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>\n{% endfor %}\
                        {% if add_generation_prompt %}[assistant]{% endif %}";
pub(crate) const TRUNCATED: Sampling = Sampling { temperature: 0.8, top_p: 0.9, top_k: 12, min_p: 0.01 };

/// Bounds for prompts that hold a first turn.
pub(crate) const LONG: EngineConfig =
    EngineConfig { max_prompt_length: 100, max_episode_length: 128, ..CONFIG };

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// The tiny model with a chat template.
fn chatting() -> (Model, Arc<ModelDirectory>) {
    chatting_of(Model::new())
}

pub(crate) fn chatting_of(model: Model) -> (Model, Arc<ModelDirectory>) {
    std::fs::write(model.directory.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let directory = Arc::new(ModelDirectory::open(model.directory.path()).unwrap());
    (model, directory)
}

/// Most completions of the random model end soon at one of these.
pub(crate) const STOPS: [&str; 12] = ["a", "e", "i", "o", "u", "n", "r", "s", "t", "1", "2", "3"];

fn task(id: u64, prompt: Prompt) -> Arc<Task> {
    Arc::new(Task { id: TaskId(id), prompt, answer: Some("7".into()), columns: serde_json::Map::new() })
}

pub(crate) fn question(id: u64) -> Arc<Task> {
    task(id, Prompt::Messages(vec![Message::new("user", format!("{id}+{id}"))]))
}

fn request(directory: &ModelDirectory, task: &Task, samples: usize, sampling: Sampling) -> SampleRequest {
    SampleRequest {
        group: GroupId(task.id.0),
        prompt: directory.encode_prompt(&task.prompt).unwrap(),
        first_index: 0,
        turn: 0,
        samples,
        sampling,
        max_completion_length: 24,
        baseline: false,
        keep_cache: false,
        options: RequestOptions::default(),
    }
}

/// Plays a group for every task to its end.
fn play(
    model: &Model,
    directory: &ModelDirectory,
    engine: EngineConfig,
    config: EpisodeConfig,
    tasks: &[Arc<Task>],
    sampling: Sampling,
) -> Vec<Episode> {
    let mut sampler = LocalSampler::fixed(model.engine(engine, &STOPS));
    play_with(&mut sampler, directory, config, tasks, sampling)
}

pub(crate) fn play_with(
    sampler: &mut LocalSampler,
    directory: &ModelDirectory,
    config: EpisodeConfig,
    tasks: &[Arc<Task>],
    sampling: Sampling,
) -> Vec<Episode> {
    let runtime = runtime();
    let mut driver = EpisodeDriver::new(config, runtime.handle().clone());
    for task in tasks {
        driver.start(sampler, task, request(directory, task, 3, sampling)).unwrap();
    }
    let mut episodes = Vec::new();
    while !driver.is_idle() {
        episodes.extend(driver.poll(sampler, SOON).unwrap());
    }
    episodes.sort_by_key(|episode| (episode.group, episode.index));
    episodes
}

fn retry(directory: &Arc<ModelDirectory>, attempts: usize) -> EpisodeConfig {
    played_in(directory, Arc::new(Retry::attempts(attempts, "no")))
}

pub(crate) fn played_in(
    directory: &Arc<ModelDirectory>,
    factory: Arc<dyn EnvironmentFactory>,
) -> EpisodeConfig {
    let encoder = Arc::new(ChatEncoder::new(Arc::clone(directory)));
    EpisodeConfig::of(EpisodeEnvironment::new(factory, Some(encoder)), 128)
}

/// What was sampled stays, what the environment says has no loss, and one pass of the trainer over the whole episode gives
/// the log-probabilities of both turns, bit for bit.
#[test]
fn a_second_turn_continues_the_tokens_of_the_first() {
    let (model, directory) = chatting();
    let decoder = model.decoder(&model.parameters());
    let tasks: Vec<_> = (0..4).map(question).collect();
    let mut two_turns = 0;
    for sampling in [Sampling::PLAIN, TRUNCATED] {
        for episode in play(&model, &directory, LONG, retry(&directory, 2), &tasks, sampling) {
            let sample = episode.sample().unwrap();
            let (ids, mask) = (sample.token_ids(), sample.loss_mask());
            let prompt = directory.encode_prompt(&tasks[episode.group.0 as usize].prompt).unwrap();
            assert_eq!((&ids[..prompt.len()], episode.prompt_length), (&prompt[..], prompt.len()));
            for (t, trained) in mask.iter().enumerate() {
                let of_a_turn = episode.turns.iter().any(|turn| turn.completion.contains(&t));
                assert_eq!(*trained, of_a_turn);
                assert!(of_a_turn || sample.behavior_logprobs()[t] == 0.0);
            }
            recomputed(&decoder, &sample);
            let [first, second] = &episode.turns[..] else { continue };
            two_turns += 1;
            let between = &ids[first.completion.end..second.completion.start];
            let text = directory.tokenizer().decode_special(between).unwrap();
            let closed = if first.stop == StopReason::StopToken { "" } else { "<eos>" };
            assert_eq!(text, format!("{closed}\n[user]no<eos>\n[assistant]"));
            assert_eq!(first.reward, Some(0.0));
        }
    }
    assert!(two_turns > 12, "{two_turns} episodes have a second turn");
}

/// One pass of the trainer over a whole sample gives the log-probabilities of its sampled tokens, bit for bit.
pub(crate) fn recomputed(decoder: &Decoder, sample: &Sample) {
    let (ids, mask) = (sample.token_ids(), sample.loss_mask());
    let rows: Vec<usize> = (0..ids.len() - 1).filter(|row| mask[row + 1]).collect();
    let target = |(n, row): (usize, &usize)| Target {
        token: ids[row + 1],
        temperature: sample.temperature(),
        kept: sample.kept().map(|kept| kept.set(n)),
    };
    let targets: Vec<_> = rows.iter().enumerate().map(target).collect();
    let mut pack = Pack::new();
    pack.push(ids).unwrap();
    let scored = decoder.score(&pack, &rows, &targets, &ThreadPool::single()).unwrap();
    let sampled = rows.iter().map(|row| sample.behavior_logprobs()[row + 1]);
    assert!(scored.iter().map(|prediction| prediction.logprob).eq(sampled));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]
    #[test]
    fn episodes_do_not_depend_on_batching(max_running in 3..20usize, prefill_chunk in 1..50usize) {
        let (model, directory) = chatting();
        let tasks: Vec<_> = (0..4).map(question).collect();
        let play = |engine| play(&model, &directory, engine, retry(&directory, 3), &tasks, Sampling::PLAIN);
        prop_assert_eq!(play(EngineConfig { max_running, prefill_chunk, ..LONG }), play(LONG));
    }
}

/// A turn computes what is new since the turn before, and the token that was drawn last. A cache without space for open
/// episodes changes the work, not the episodes.
#[test]
fn a_later_turn_continues_the_cache_of_the_turn_before() {
    let (model, directory) = chatting();
    let tasks: Vec<_> = (0..4).map(question).collect();
    let played = |kv_cache_tokens| {
        let engine = EngineConfig { kv_cache_tokens, max_samples: 3, ..LONG };
        let mut sampler = LocalSampler::fixed(model.engine(engine, &STOPS));
        let episodes = play_with(&mut sampler, &directory, retry(&directory, 4), &tasks, Sampling::PLAIN);
        (episodes, sampler.counts())
    };
    let (episodes, counts) = played(Some(4096));
    let later = |episode: &Episode| -> Vec<(usize, usize)> {
        let turns = episode.turns.windows(2);
        turns.map(|two| (two[0].completion.end - 1, two[1].completion.start)).collect()
    };
    let turns: Vec<(usize, usize)> = episodes.iter().flat_map(later).collect();
    assert!(turns.len() > 20, "{} later turns", turns.len());
    let first: usize = tasks.iter().map(|task| directory.encode_prompt(&task.prompt).unwrap().len()).sum();
    let new: usize = turns.iter().map(|(known, start)| start - known).sum();
    let known: usize = turns.iter().map(|(known, _)| known).sum();
    assert_eq!(counts.prefilled_tokens as usize, first + new);
    assert_eq!((counts.reused_tokens as usize, counts.evicted_tokens), (known, 0));

    let (mut crowded, counts) = played(Some(640));
    let prefilled = |episode: &Episode| episode.turns.iter().any(|turn| !turn.prefill.is_empty());
    assert!(
        !episodes.iter().any(prefilled) && crowded.iter().any(prefilled),
        "what was given up is recorded"
    );
    crowded.iter_mut().flat_map(|episode| &mut episode.turns).for_each(|turn| turn.prefill.clear());
    assert_eq!(crowded, episodes);
    assert!(counts.evicted_tokens > 0 && counts.reused_tokens > 0, "{counts:?}");
    assert_eq!((counts.prefilled_tokens + counts.reused_tokens) as usize, first + new + known);
}

#[test]
fn an_episode_ends_at_its_limits() {
    let (model, directory) = chatting();
    let tasks: Vec<_> = (0..4).map(question).collect();
    let ends = |config| play(&model, &directory, LONG, config, &tasks, Sampling::PLAIN);
    for episode in ends(retry(&directory, 3)) {
        match episode.end {
            EpisodeEnd::MaxTurns => assert_eq!(episode.turns.len(), 3),
            EpisodeEnd::Truncated => assert_eq!(episode.turns.last().unwrap().stop, StopReason::Length),
            EpisodeEnd::ContextFull => assert!(episode.token_ids().len() > 80),
            other => panic!("{other:?}"),
        }
    }
    let short = EpisodeConfig { max_tokens: 50, ..retry(&directory, 16) };
    let episodes = ends(short);
    assert!(episodes.iter().all(|episode| episode.token_ids().len() <= 50));
    let full = episodes.iter().filter(|episode| episode.end == EpisodeEnd::ContextFull);
    assert!(full.clone().count() > 3 && full.clone().all(Episode::truncated));
}

/// Answers a turn by the task: 0 at once, 1 when it is let go, 2 never; 3 does not open, 4 fails in its first turn, 5
/// rewards with NaN. Every episode opens with a message.
#[derive(Clone, Debug)]
struct ByTask {
    let_go: Arc<Semaphore>,
}

#[derive(Debug)]
struct OfTask {
    kind: u64,
    let_go: Arc<Semaphore>,
}

impl EnvironmentFactory for ByTask {
    fn name(&self) -> &str {
        "by_task"
    }

    fn limits(&self) -> EnvironmentLimits {
        EnvironmentLimits {
            max_turns: 2,
            step_timeout: Duration::from_millis(400),
            ..EnvironmentLimits::default()
        }
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(OfTask { kind: u64::MAX, let_go: Arc::clone(&self.let_go) })
    }
}

impl OfTask {
    fn failed(&self, turn: usize) -> EnvironmentError {
        let evidence = "the server answered 503".to_owned();
        EnvironmentError::Failed { environment: "by_task".to_owned(), turn, evidence }
    }
}

impl Environment for OfTask {
    fn reset<'a>(&'a mut self, task: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        self.kind = task.id.0;
        let opened = if self.kind == 3 { Err(self.failed(0)) } else { Ok(vec![said("hello")]) };
        Box::pin(std::future::ready(opened))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        Box::pin(async move {
            match self.kind {
                1 => self.let_go.acquire().await.unwrap().forget(),
                2 => std::future::pending::<()>().await,
                4 => return Err(self.failed(action.turn)),
                _ => {}
            }
            let reward = Some(if self.kind == 5 { f64::NAN } else { action.turn as f64 });
            let messages = vec![said("and")];
            Ok(Observation { messages, reward, done: action.turn == 1, ..Observation::default() })
        })
    }
}

pub(crate) fn said(content: &str) -> Message {
    Message::new("user", content)
}

fn by_task(directory: &Arc<ModelDirectory>, let_go: &Arc<Semaphore>) -> EpisodeConfig {
    played_in(directory, Arc::new(ByTask { let_go: Arc::clone(let_go) }))
}

#[test]
fn a_slow_environment_delays_no_other_episode() {
    let (model, directory) = chatting();
    let (runtime, let_go) = (runtime(), Arc::new(Semaphore::new(0)));
    let mut sampler = LocalSampler::fixed(model.engine(EngineConfig { max_running: 3, ..LONG }, &STOPS));
    let mut driver = EpisodeDriver::new(by_task(&directory, &let_go), runtime.handle().clone());
    // Plain prompts: what the environment says is appended as it is.
    for kind in [1, 0] {
        let task = task(kind, Prompt::Text("x".into()));
        driver.start(&mut sampler, &task, request(&directory, &task, 3, Sampling::PLAIN)).unwrap();
    }
    let mut ended = Vec::new();
    while ended.iter().filter(|episode: &&Episode| episode.group == GroupId(0)).count() < 3 {
        ended.extend(driver.poll(&mut sampler, SOON).unwrap());
    }
    assert!(
        ended.iter().all(|episode| episode.group == GroupId(0) || episode.end == EpisodeEnd::Truncated),
        "the group that started first waits for its environment"
    );
    let_go.add_permits(6);
    while !driver.is_idle() {
        ended.extend(driver.poll(&mut sampler, SOON).unwrap());
    }
    assert_eq!(ended.len(), 6);
    let done = ended.iter().filter(|episode| episode.end == EpisodeEnd::Done);
    for episode in done.clone() {
        let text = directory.tokenizer().decode(&episode.token_ids()[..episode.prompt_length]).unwrap();
        assert_eq!(text, "xhello\n");
        let [first, second] = &episode.turns[..] else { panic!("{episode:?}") };
        assert_eq!((first.reward, second.reward), (Some(0.0), Some(1.0)));
        let between = &episode.token_ids()[first.completion.end..second.completion.start];
        assert_eq!(directory.tokenizer().decode(between).unwrap(), "and\n");
    }
    assert!(done.count() > 0);
}

/// A failure of the environment is never a reward of 0: the trajectory has no reward, and says why.
#[test]
fn a_failed_environment_fails_its_trajectory_without_a_reward() {
    let (model, directory) = chatting();
    let (runtime, let_go) = (runtime(), Arc::new(Semaphore::new(0)));
    let buffer = Arc::new(Buffer::in_memory(BufferConfig::new(6, 0)).unwrap());
    let one = WeightedReward {
        reward: Box::new(Builtin::new("one", |_: &RewardInput<'_>| Ok(1.0))),
        weight: 1.0,
        on_error: OnError::Fail,
    };
    let producer: Arc<dyn Producer> = Arc::clone(&buffer) as Arc<dyn Producer>;
    let rewards = Arc::new(RewardSet::new(vec![one]).unwrap());
    let scorer = Scorer::start(runtime.handle(), rewards, producer, None, 8);
    let served = PolicyVersion(0);
    let admit = AdmitRequest { served, limit: 6, hold: None, holder: None };
    let mut sampler = LocalSampler::fixed(model.engine(LONG, &STOPS));
    let mut driver = EpisodeDriver::new(by_task(&directory, &let_go), runtime.handle().clone());
    let_go.add_permits(100);
    for group in buffer.admit(admit, SOON).unwrap() {
        buffer.claim(group, served).unwrap();
        let task = task(group.0, Prompt::Text("x".into()));
        driver.start(&mut sampler, &task, request(&directory, &task, 3, Sampling::PLAIN)).unwrap();
    }
    while !driver.is_idle() {
        for episode in driver.poll(&mut sampler, SOON).unwrap() {
            let task = task(episode.group.0, Prompt::Text("x".into()));
            let (admitted, sampled) = (0.0, 0.0);
            let request =
                ScoreRequest { task, group_size: 3, max_completion_length: 24, episode, admitted, sampled };
            scorer.submit(request, SOON).unwrap();
        }
    }
    scorer.finish(SOON, SOON).unwrap();
    let lease = buffer.lease(&LeaseRequest::step("trainer", served), SOON).unwrap();
    let failed = [
        "gave no answer in turn 0 within 0.4 s",
        "failed in turn 0: the server answered 503",
        "failed in turn 0: the server answered 503",
        "rewards turn 0 with NaN",
    ];
    let mut failures = [0; 4];
    for group in &lease.groups {
        for trajectory in &group.trajectories {
            if trajectory.score.total.is_some() {
                assert!(group.id.0 < 2 || trajectory.truncated());
                continue;
            }
            let error = trajectory.score.components[0].error.as_deref().unwrap();
            let expected = format!("environment by_task {}", failed[group.id.0 as usize - 2]);
            assert!(error.starts_with(&expected), "{error}");
            let details = &trajectory.score.components[0].details;
            assert_eq!(details["failed/turn_timeout"], group.id.0 == 2, "{details:?}");
            assert_eq!(details["failed/error"], group.id.0 != 2, "{details:?}");
            failures[group.id.0 as usize - 2] += 1;
            if group.id.0 == 3 {
                assert_eq!((trajectory.turns.len(), trajectory.sample.trained_tokens()), (0, 0));
            }
        }
    }
    assert!(failures[1] == 3 && failures.iter().all(|count| *count > 0), "{failures:?}");
}

#[test]
fn messages_without_an_encoder_are_refused() {
    let (model, directory) = chatting();
    let runtime = runtime();
    let environment = EpisodeEnvironment::new(Arc::new(Retry::attempts(2, "no")), None);
    let config = EpisodeConfig::of(environment, 128);
    let mut driver = EpisodeDriver::new(config, runtime.handle().clone());
    let mut sampler = LocalSampler::fixed(model.engine(LONG, &STOPS));
    let task = question(1);
    driver.start(&mut sampler, &task, request(&directory, &task, 3, Sampling::PLAIN)).unwrap();
    let refused = loop {
        if let Err(error) = driver.poll(&mut sampler, SOON) {
            break error;
        }
    };
    assert!(matches!(refused, RolloutError::NoEncoder { .. }) && refused.is_input(), "{refused}");
}
