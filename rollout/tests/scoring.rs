//! Rewards that fail, hang or end the run.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use buffer::{AdmitRequest, Buffer, BufferConfig, Consumer, LeaseRequest, Producer};
use model::Sampling;
use rewards::{
    BoxFuture, Judged, Limited, Load, OnError, Reward, RewardInput, RewardSet, RewardSpec, WeightedReward,
};
use rollout::scoring::{ScoreRequest, Scorer};
use trajectory::{PolicyVersion, Prompt, Task, TaskId};

use crate::{CONFIG, Model, complete, request};

const SOON: Duration = Duration::from_secs(20);

/// Scores by the index of the trajectory; index 1 never gets an answer.
#[derive(Debug)]
struct Flaky {
    seen: Mutex<HashMap<u32, usize>>,
    load: Load,
}

impl Reward for Flaky {
    fn name(&self) -> &str {
        "flaky"
    }

    fn score<'a>(&'a self, inputs: &'a [RewardInput<'a>]) -> BoxFuture<'a, Vec<Judged>> {
        let index = inputs[0].index;
        *self.seen.lock().unwrap().entry(index).or_default() += 1;
        Box::pin(async move {
            if index == 1 {
                std::future::pending::<()>().await;
            }
            vec![Ok(f64::from(index).into())]
        })
    }

    fn load(&self) -> &Load {
        &self.load
    }
}

/// Scores a group of which the second reward hangs. Also returns how long the sampler waited for rewards.
fn score_one_group(on_error: OnError) -> (Result<(), rollout::RolloutError>, Buffer, Duration) {
    let model = Model::new();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let buffer = Arc::new(Buffer::in_memory(BufferConfig::new(1, 0)).unwrap());
    let flaky = Box::new(Flaky { seen: Mutex::new(HashMap::new()), load: Load::default() });
    let limits = RewardSpec { timeout_s: 0.3, concurrency: 2, ..RewardSpec::new("flaky") };
    let reward = WeightedReward { reward: Box::new(Limited::new(flaky, &limits)), weight: 2.0, on_error };
    let rewards = Arc::new(RewardSet::new(vec![reward]).unwrap());
    let group = buffer
        .admit(AdmitRequest { served: PolicyVersion(0), limit: 1, hold: None, holder: None }, SOON)
        .unwrap()[0];
    buffer.claim(group, PolicyVersion(0)).unwrap();
    let producer: Arc<dyn Producer> = Arc::clone(&buffer) as Arc<dyn Producer>;
    let scorer = Scorer::start(runtime.handle(), rewards, producer, None, 1);
    let mut waited = Duration::ZERO;
    let task = Arc::new(Task {
        id: TaskId(0),
        prompt: Prompt::Text("?".into()),
        answer: None,
        columns: serde_json::Map::new(),
    });
    for completion in complete(&mut model.engine(CONFIG, &[]), vec![request(group.0, 4, Sampling::PLAIN)]) {
        let task = Arc::clone(&task);
        // Once the scoring has failed it takes nothing more; the reason comes from `finish`.
        let submitted = scorer.submit(
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
        waited += submitted.unwrap_or_default();
    }
    let finished = scorer.finish(SOON, SOON);
    (finished, Arc::into_inner(buffer).expect("the scoring has let go of the buffer"), waited)
}

#[test]
fn a_hanging_reward_fails_only_its_trajectory() {
    let (finished, buffer, waited) = score_one_group(OnError::Skip);
    finished.unwrap();
    // One trajectory is scored and one waits for it; the sampler waits with the next.
    assert!(waited > Duration::ZERO && waited < SOON, "{waited:?}");
    let lease = buffer.lease(&LeaseRequest::step("trainer", PolicyVersion(0)), SOON).unwrap();
    let totals: Vec<_> = lease.groups[0].trajectories.iter().map(|t| t.score.total).collect();
    assert_eq!(totals, [Some(0.0), None, Some(4.0), Some(6.0)]);
    let error = lease.groups[0].trajectories[1].score.components[0].error.clone().unwrap();
    assert!(
        error.contains("flaky") && error.contains("no answer for task 0, trajectory 1 within"),
        "{error}"
    );
}

#[test]
fn a_reward_may_end_the_run() {
    let (finished, buffer, _) = score_one_group(OnError::Fail);
    let error = finished.unwrap_err().to_string();
    assert!(error.contains("flaky") && error.contains("trajectory 1"), "{error}");
    assert_eq!(buffer.stats().unwrap().finalized, 0);
}
