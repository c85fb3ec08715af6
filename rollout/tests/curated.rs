//! Scored groups on their way to the buffer, past a curator.

use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use buffer::{AdmitRequest, Buffer, BufferConfig, Consumer, LeaseRequest, Producer};
use model::Sampling;
use rewards::{BoxFuture, Criterion, Judged, Load, OnError, Reward, RewardInput, RewardSet, WeightedReward};
use rollout::curation::{Curation, CurationConfig, Curator, Decision, OutcomeSink, TaskOutcome};
use rollout::scoring::{ScoreRequest, Scorer};
use rollout::{RolloutError, SampleRequest};
use trajectory::{GroupId, PolicyVersion, Prompt, Task, TaskId};

use crate::{CONFIG, Model, complete, request};

const SOON: Duration = Duration::from_secs(20);
const V0: PolicyVersion = PolicyVersion(0);
const DYNAMIC: CurationConfig = CurationConfig {
    seed: 0,
    group_size: 3,
    batch_groups: 1,
    max_staleness: 1,
    steps: 10,
    max_refill_ratio: Some(10.0),
    max_pass_rate: None,
    filter_after: None,
    easy: None,
    hard: None,
    shrink: None,
    turn_margin: None,
    success_pool: false,
};

/// Group 0 fails, and of group 1 the first completion and the baseline pass.
#[derive(Debug, Default)]
struct ByPlace(Load);

impl Reward for ByPlace {
    fn name(&self) -> &str {
        "place"
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        let passes = |input: &RewardInput<'_>| input.task.id == TaskId(1) && [0, 3].contains(&input.index);
        let judged = inputs.iter().map(|input| Ok(f64::from(u8::from(passes(input))).into())).collect();
        Box::pin(std::future::ready(judged))
    }

    fn load(&self) -> &Load {
        &self.0
    }
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<TaskOutcome>>>);

impl OutcomeSink for Lines {
    fn append(&mut self, outcome: &TaskOutcome) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.0.lock().unwrap().push(*outcome);
        Ok(())
    }
}

/// A disk that is full.
struct Full;

impl OutcomeSink for Full {
    fn append(&mut self, _: &TaskOutcome) -> Result<(), Box<dyn Error + Send + Sync>> {
        Err("no space left".into())
    }
}

/// What remains of a run of two groups.
struct CuratedRun {
    finished: Result<(), RolloutError>,
    buffer: Arc<Buffer>,
    curation: Curation,
}

/// Samples and scores groups 0 and 1, each with a baseline.
fn two_groups(sink: Box<dyn OutcomeSink>) -> CuratedRun {
    let model = Model::new();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let buffer = Arc::new(Buffer::in_memory(BufferConfig::new(1, 1)).unwrap());
    let curation = Curation::new(Curator::new(DYNAMIC, [TaskId(0), TaskId(1)]), sink);
    let reward =
        WeightedReward { reward: Box::new(ByPlace::default()), weight: 1.0, on_error: OnError::Skip };
    let criterion = Criterion { reward: "place".to_owned(), threshold: 1.0 };
    let rewards = RewardSet::new(vec![reward]).unwrap().judged_by(Some(criterion)).unwrap();
    let rewards = Arc::new(rewards);
    let producer: Arc<dyn Producer> = Arc::clone(&buffer) as Arc<dyn Producer>;
    let scorer = Scorer::start(runtime.handle(), rewards, producer, Some(curation.clone()), 8);
    let admitted =
        buffer.admit(AdmitRequest { served: V0, limit: 2, hold: None, holder: None }, SOON).unwrap();
    assert_eq!(admitted, [GroupId(0), GroupId(1)]);
    for group in admitted {
        let id = TaskId(group.0);
        assert_eq!(curation.decide(group, id), Decision::Start { group_size: 3, max_turns: None });
        buffer.claim(group, V0).unwrap();
        let prompt = Prompt::Text("?".into());
        let task = Arc::new(Task { id, prompt, answer: None, columns: serde_json::Map::new() });
        let asked = SampleRequest { baseline: true, ..request(group.0, 3, Sampling::PLAIN) };
        for completion in complete(&mut model.engine(CONFIG, &[]), vec![asked]) {
            let task = Arc::clone(&task);
            // Once the scoring has failed it takes nothing more; the reason comes from `finish`.
            let _ = scorer.submit(
                ScoreRequest {
                    task,
                    group_size: 4,
                    max_completion_length: 24,
                    episode: completion.into(),
                    admitted: 0.0,
                    sampled: 0.0,
                },
                SOON,
            );
        }
    }
    CuratedRun { finished: scorer.finish(SOON, SOON), buffer, curation }
}

#[test]
fn a_group_that_is_all_alike_frees_its_slot_for_another() {
    let lines = Lines::default();
    let CuratedRun { finished, buffer, curation } = two_groups(Box::new(lines.clone()));
    finished.unwrap();
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.finalized, stats.evicted, stats.slots_free, stats.again), (1, 1, 1, 0));
    assert_eq!((curation.counts().refilled, curation.is_pending()), (1, false));
    let next = buffer
        .admit(AdmitRequest { served: V0, limit: 9, hold: None, holder: None }, Duration::ZERO)
        .unwrap();
    assert_eq!(next, [GroupId(2)], "the next place takes its slot");
    let mut outcomes: Vec<_> =
        lines.0.lock().unwrap().iter().map(|o| (o.task.0, o.passes, o.trajectories)).collect();
    outcomes.sort_unstable();
    assert_eq!(outcomes, [(0, 0, 3), (1, 1, 3)], "baselines do not count");
}

#[test]
fn a_baseline_reaches_the_trainer_beside_its_group() {
    let CuratedRun { finished, buffer, .. } = two_groups(Box::new(Lines::default()));
    finished.unwrap();
    let lease = buffer.lease(&LeaseRequest::step("trainer", V0), SOON).unwrap();
    let group = &lease.groups[0];
    assert_eq!(
        group.trajectories.iter().map(|t| (t.index, t.baseline)).collect::<Vec<_>>(),
        [(0, false), (1, false), (2, false), (3, true)]
    );
    assert_eq!(group.rewards().collect::<Vec<_>>(), [1.0, 0.0, 0.0]);
    assert_eq!(group.baseline_reward(None), Some(1.0));
    assert_eq!(group.trajectories[3].sample.trained_tokens(), 0);
}

#[test]
fn a_history_that_cannot_be_written_ends_the_run() {
    let CuratedRun { finished, buffer, .. } = two_groups(Box::new(Full));
    let error = finished.unwrap_err();
    assert!(
        matches!(error, RolloutError::Outcome(_)) && error.to_string().contains("no space left"),
        "{error}"
    );
    assert_eq!(buffer.stats().unwrap().finalized, 0);
}
