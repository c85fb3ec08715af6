//! Newer weights that come between two turns of an episode, under every `on_update`, in a whole rollout worker; and turns that are
//! left out of the training.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use buffer::{Buffer, BufferConfig, Consumer, LeaseRequest, Producer};
use environments::{
    Action, BoxFuture, Environment, EnvironmentError, EnvironmentFactory, EnvironmentLimits, Observation,
};
use model::{Decoder, ModelDirectory, Pack, Sampling, Target, ThreadPool};
use rewards::RewardSet;
use rollout::scoring::Scorer;
use rollout::tasks::TaskOrder;
use rollout::{
    AppliedWeights, Completion, Engine, EngineCounts, EpisodeConfig, EpisodeDriver, EpisodeEnd, LocalSampler,
    OnUpdate, PromptSet, RolloutError, SampleRequest, Sampler, Worker, WorkerConfig,
};
use trajectory::{GroupId, Message, PolicyVersion, Task, Trajectory};

use crate::Model;
use crate::episodes::{LONG, STOPS, TRUNCATED, chatting_of, played_in, question, recomputed, said};
use crate::roles::played_as;

const SOON: Duration = Duration::from_secs(20);
const NEWER: PolicyVersion = PolicyVersion(1);

/// Two turns with a pause between them.
#[derive(Clone, Debug)]
struct Slow;

impl EnvironmentFactory for Slow {
    fn name(&self) -> &str {
        "slow"
    }

    fn limits(&self) -> EnvironmentLimits {
        EnvironmentLimits { max_turns: 2, ..EnvironmentLimits::default() }
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(Self)
    }
}

impl Environment for Slow {
    fn reset<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        Box::pin(async move {
            if action.turn == 0 {
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            let (messages, done) = (vec![said("again")], action.turn == 1);
            Ok(Observation { messages, reward: Some(1.0), done, ..Observation::default() })
        })
    }
}

/// An engine for which newer weights come as soon as every completion of a first turn has ended.
#[derive(Debug)]
struct Updating {
    engine: Engine,
    newer: Option<Decoder>,
    polled: bool,
}

impl Sampler for Updating {
    fn version(&self) -> PolicyVersion {
        self.engine.version()
    }

    fn has_capacity(&self, completions: usize) -> bool {
        self.engine.has_capacity(completions)
    }

    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    fn submit(&mut self, request: SampleRequest) -> Result<(), RolloutError> {
        self.engine.submit(request)
    }

    fn poll(&mut self, _: Duration) -> Result<Vec<Completion>, RolloutError> {
        self.polled = true;
        self.engine.step()
    }

    fn abort(&mut self, group: GroupId) -> Result<usize, RolloutError> {
        Ok(self.engine.abort(group))
    }

    fn end_episode(&mut self, group: GroupId, index: u32) {
        self.engine.end_episode(group, index);
    }

    fn newer_weights(&mut self, wait: Duration) -> Result<Option<PolicyVersion>, RolloutError> {
        std::thread::sleep(wait);
        Ok((self.polled && self.engine.is_idle() && self.newer.is_some()).then_some(NEWER))
    }

    fn apply_weights(&mut self, on_update: OnUpdate) -> Result<Option<AppliedWeights>, RolloutError> {
        let Some(newer) = self.newer.take() else { return Ok(None) };
        self.engine.apply(newer, NEWER)?;
        if on_update == OnUpdate::Recompute {
            self.engine.recompute()?;
        }
        Ok(Some(AppliedWeights { version: NEWER, stalled: Duration::ZERO }))
    }

    fn sleep(&mut self) -> Result<u64, RolloutError> {
        Ok(0)
    }

    fn is_asleep(&self) -> bool {
        false
    }

    fn counts(&self) -> EngineCounts {
        self.engine.counts()
    }
}

/// The first group of a worker, and what its engine had done when the group was complete.
fn first_group(
    model: &Model,
    directory: &Arc<ModelDirectory>,
    on_update: OnUpdate,
) -> (Vec<Trajectory>, EngineCounts) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let buffer = Arc::new(Buffer::in_memory(BufferConfig::new(1, 1)).unwrap());
    // The trainer is ahead: it has published what the engine gets between the turns.
    buffer.set_version(NEWER, false).unwrap();
    let producer: Arc<dyn Producer> = Arc::clone(&buffer) as Arc<dyn Producer>;
    let scorer = Scorer::start(runtime.handle(), Arc::new(RewardSet::none()), producer, None, 8);
    let task = Task::clone(&question(1));
    let prompt = directory.encode_prompt(&task.prompt).unwrap();
    let prompts = PromptSet::from_tokens(vec![(task, prompt)], TaskOrder::File).unwrap();
    let config = WorkerConfig {
        // Both groups that have a slot are sampled together.
        group_size: 4,
        greedy_baseline: false,
        sampling: Sampling::PLAIN,
        max_completion_length: 24,
        on_update,
        wait: SOON,
        holder: None,
    };
    let newer = Some(model.decoder(&model.other_parameters()));
    let sampler = Box::new(Updating { engine: model.engine(LONG, &STOPS), newer, polled: false });
    let episodes = played_in(directory, Arc::new(Slow));
    let worker = Worker::new(config, sampler, Arc::new(prompts), scorer).acting_in(episodes);
    let (progress, stop) = (worker.progress(), AtomicBool::new(false));
    let group = std::thread::scope(|scope| {
        let working = scope.spawn(|| worker.run(&*buffer, &stop));
        let lease = buffer.lease(&LeaseRequest::step("trainer", NEWER), SOON);
        stop.store(true, Ordering::Relaxed);
        working.join().unwrap().unwrap();
        Arc::clone(&lease.unwrap().groups[0])
    });
    let counts = progress.lock().unwrap().engine;
    (group.trajectories.clone(), counts)
}

/// The behavior log-probabilities of the second turn, and those that `decoder` gives in one pass over the whole episode.
fn second_turn(decoder: &Decoder, trajectory: &Trajectory) -> (Vec<f32>, Vec<f32>) {
    let (ids, turn) = (trajectory.sample.token_ids(), trajectory.turns[1].completion.clone());
    let rows: Vec<usize> = (turn.start - 1..turn.end - 1).collect();
    let target = |row: &usize| Target { token: ids[row + 1], temperature: 1.0, kept: None };
    let targets: Vec<_> = rows.iter().map(target).collect();
    let mut pack = Pack::new();
    pack.push(ids).unwrap();
    let scored = decoder.score(&pack, &rows, &targets, &ThreadPool::single()).unwrap();
    (trajectory.sample.behavior_logprobs()[turn].to_vec(), scored.iter().map(|p| p.logprob).collect())
}

/// The versions of the tokens of a turn.
fn versions(trajectory: &Trajectory, turn: usize) -> Vec<u64> {
    let runs = trajectory.sample.versions().iter();
    let each: Vec<u64> = runs.flat_map(|run| vec![run.version.0; run.len as usize]).collect();
    let mut of_turn = each[trajectory.turns[turn].completion.clone()].to_vec();
    of_turn.dedup();
    of_turn
}

#[test]
fn weights_that_come_between_two_turns() {
    let (model, directory) = chatting_of(Model::new());
    let (old, new) = (model.decoder(&model.parameters()), model.decoder(&model.other_parameters()));
    for on_update in [OnUpdate::Keep, OnUpdate::Recompute, OnUpdate::Drain] {
        let (trajectories, counts) = first_group(&model, &directory, on_update);
        let two: Vec<&Trajectory> = trajectories.iter().filter(|t| t.turns.len() == 2).collect();
        assert!(two.len() > 1, "{} of four episodes have two turns", two.len());
        let mut as_of_a_whole_pass = 0;
        for trajectory in &two {
            assert_eq!(versions(trajectory, 0), [0]);
            assert_eq!(trajectory.sample.oldest_version(), PolicyVersion(0));
            let drained = on_update == OnUpdate::Drain;
            assert_eq!(versions(trajectory, 1), [if drained { 0 } else { NEWER.0 }], "{on_update:?}");
            let (sampled, whole) = second_turn(if drained { &old } else { &new }, trajectory);
            as_of_a_whole_pass += usize::from(sampled == whole);
        }
        match on_update {
            // The keys and values of the first turn are those of the old weights.
            OnUpdate::Keep => assert!(as_of_a_whole_pass == 0 && counts.reused_tokens > 0, "{counts:?}"),
            OnUpdate::Recompute => assert_eq!(as_of_a_whole_pass, two.len()),
            OnUpdate::Drain => {
                assert!(as_of_a_whole_pass == two.len() && counts.reused_tokens > 0, "{counts:?}")
            }
        }
    }
}

/// Masks its turns but the second.
#[derive(Clone, Debug)]
struct MasksOthers;

impl EnvironmentFactory for MasksOthers {
    fn name(&self) -> &str {
        "masks_others"
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(Self)
    }
}

impl Environment for MasksOthers {
    fn reset<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn step<'a>(
        &'a mut self,
        Action { turn, .. }: Action<'a>,
    ) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        let messages = vec![said("again")];
        let observation =
            Observation { messages, masked: turn != 1, done: turn == 3, ..Observation::default() };
        Box::pin(std::future::ready(Ok(observation)))
    }
}

/// A turn that is not trained on has no loss, no log-probability and no kept set; those of the turns after it are their own.
#[test]
fn a_masked_turn_leaves_the_kept_sets_of_other_turns_in_their_places() {
    let (model, directory) = chatting_of(Model::with_context(crate::roles::TOKENS));
    let decoder = model.decoder(&model.parameters());
    let engine = model.engine(crate::roles::LONG, &STOPS);
    let (episodes, _) = played_as(engine, &directory, 4, Arc::new(MasksOthers), 1.0, TRUNCATED);
    let mut whole = 0;
    for episode in &episodes {
        let sample = episode.sample().unwrap();
        let kept = sample.kept().expect("sampling is truncated");
        assert_eq!(kept.offsets.len(), sample.trained_tokens() + 1);
        assert_eq!(kept.ids.len(), *kept.offsets.last().unwrap() as usize);
        for (n, turn) in episode.turns.iter().enumerate() {
            // The last turn of an episode that is cut off is never judged.
            let judged = n + 1 < episode.turns.len() || episode.end == EpisodeEnd::Done;
            let trained = n == 1 || !judged;
            for t in turn.completion.clone() {
                assert_eq!(sample.loss_mask()[t], trained, "turn {n}");
                assert!(trained || sample.behavior_logprobs()[t] == 0.0);
            }
        }
        recomputed(&decoder, &sample);
        whole += usize::from(episode.turns.len() == 4);
    }
    assert!(whole > 3, "{whole} episodes have four turns");
}

/// Keeps which turns were said to be the last ones.
#[derive(Clone, Debug, Default)]
struct Endless {
    last: Arc<Mutex<Vec<usize>>>,
}

impl EnvironmentFactory for Endless {
    fn name(&self) -> &str {
        "endless"
    }

    fn create(&self) -> Box<dyn Environment> {
        Box::new(self.clone())
    }
}

impl Environment for Endless {
    fn reset<'a>(&'a mut self, _: &'a Task) -> BoxFuture<'a, Result<Vec<Message>, EnvironmentError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn step<'a>(&'a mut self, action: Action<'a>) -> BoxFuture<'a, Result<Observation, EnvironmentError>> {
        if action.last {
            self.last.lock().unwrap().push(action.turn);
        }
        let messages = vec![said("again")];
        Box::pin(std::future::ready(Ok(Observation { messages, ..Observation::default() })))
    }
}

/// A group may be given fewer turns than its environment allows, which then knows the last one.
#[test]
fn a_group_may_be_given_fewer_turns() {
    let (model, directory) = chatting_of(Model::with_context(crate::roles::TOKENS));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let endless = Endless::default();
    let last = Arc::clone(&endless.last);
    let config =
        EpisodeConfig { max_tokens: crate::roles::TOKENS, ..played_in(&directory, Arc::new(endless)) };
    let mut driver = EpisodeDriver::new(config, runtime.handle().clone());
    let mut sampler = LocalSampler::fixed(model.engine(crate::roles::LONG, &STOPS));
    let mut ended = Vec::new();
    for (id, most) in [(0, 2), (1, 3), (2, usize::MAX)] {
        let task = question(id);
        let request = SampleRequest {
            prompt: directory.encode_prompt(&task.prompt).unwrap(),
            ..crate::request(id, 4, Sampling::PLAIN)
        };
        driver.start_within(&mut sampler, &task, request, most).unwrap();
    }
    while !driver.is_idle() {
        ended.extend(driver.poll(&mut sampler, SOON).unwrap());
    }
    let mut reached = Vec::new();
    for episode in ended.iter().filter(|episode| episode.end == EpisodeEnd::MaxTurns) {
        assert_eq!(episode.turns.len(), [2, 3, 16][episode.group.0 as usize]);
        reached.push(episode.turns.len() - 1);
    }
    let mut last = last.lock().unwrap().clone();
    last.sort_unstable();
    reached.sort_unstable();
    assert_eq!(reached, last);
    assert!(reached.contains(&1) && reached.contains(&2), "{reached:?}");
}
