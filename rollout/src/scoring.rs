//! Rewards beside the generation: a completion is scored as soon as it ends, a group goes to the buffer as soon as it is
//! complete.
//!
//! Invariant: a reward that runs over its time is a failed component of one trajectory, never a stalled run. What waits
//! to be scored is bounded; when it is full, the sampler waits.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use buffer::{BufferError, Finalized, Producer};
use rewards::{BoxFuture, Reward, RewardError, RewardInput, RewardSet, WeightedReward};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use trajectory::{Group, GroupId, Task, Trajectory, Turn};

use crate::RolloutError;
use crate::curation::{Curation, Verdict};
use crate::engine::Completion;

/// Limits of one reward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RewardLimits {
    /// Longest time for one trajectory.
    pub timeout: Duration,
    /// Trajectories scored at the same time.
    pub concurrency: usize,
}

/// Puts `limits` around each of `rewards`.
///
/// # Errors
/// Those of [`RewardSet::new`].
pub fn limited(rewards: Vec<(WeightedReward, RewardLimits)>) -> Result<RewardSet, RewardError> {
    let limit = |(weighted, limits): (WeightedReward, RewardLimits)| WeightedReward {
        reward: Box::new(Limited {
            inner: weighted.reward,
            running: Semaphore::new(limits.concurrency.max(1)),
            timeout: limits.timeout,
        }),
        ..weighted
    };
    RewardSet::new(rewards.into_iter().map(limit).collect())
}

/// A reward with a timeout and a bound on how many trajectories it sees at a time.
struct Limited {
    inner: Box<dyn Reward>,
    running: Semaphore,
    timeout: Duration,
}

impl fmt::Debug for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limited")
            .field("inner", &self.inner)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl Reward for Limited {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn score<'a>(&'a self, input: &'a RewardInput<'a>) -> BoxFuture<'a, Result<f64, RewardError>> {
        Box::pin(async move {
            // The semaphore is never closed, so a permit always comes; waiting for it is not the reward's time.
            let _permit = self.running.acquire().await;
            match tokio::time::timeout(self.timeout, self.inner.score(input)).await {
                Ok(result) => result,
                Err(_) => Err(RewardError::Failed {
                    reward: self.name().to_owned(),
                    trajectory: input.trajectory(),
                    reason: format!("no answer within {:.1} s", self.timeout.as_secs_f64()),
                }),
            }
        })
    }
}

/// A completion with the task that it answers.
#[derive(Debug)]
pub struct Ended {
    /// What was asked.
    pub task: Arc<Task>,
    /// Completions of the whole group, its baseline included.
    pub group_size: usize,
    /// Longest completion allowed, tokens.
    pub max_completion_length: usize,
    /// The completion.
    pub completion: Completion,
}

/// Scores completions and hands complete groups to the buffer.
#[derive(Debug)]
pub struct Scorer {
    sender: mpsc::Sender<Ended>,
    task: JoinHandle<Result<(), RolloutError>>,
    runtime: Handle,
}

impl Scorer {
    /// Starts scoring on `runtime`; at most `capacity` completions wait or are being scored. `curation` says which groups
    /// are kept.
    #[must_use]
    pub fn start(
        runtime: &Handle,
        rewards: Arc<RewardSet>,
        buffer: Arc<dyn Producer>,
        curation: Option<Curation>,
        capacity: usize,
    ) -> Self {
        let (sender, receiver) = mpsc::channel(capacity.max(1));
        let task = runtime.spawn(score_all(receiver, rewards, (buffer, curation), capacity.max(1)));
        Self { sender, task, runtime: runtime.clone() }
    }

    /// Hands over a completion, waiting up to `wait` while too many are being scored.
    ///
    /// # Errors
    /// If the scoring has ended or is stuck.
    pub fn submit(&self, ended: Ended, wait: Duration) -> Result<(), RolloutError> {
        let sent = self.runtime.block_on(async { tokio::time::timeout(wait, self.sender.send(ended)).await });
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(RolloutError::Ended { who: "the scoring of trajectories" }),
            Err(_) => Err(RolloutError::Deadline {
                who: "a sampler",
                whom: "rewards: too many trajectories wait to be scored".to_owned(),
                seconds: wait.as_secs_f64(),
            }),
        }
    }

    /// Whether it ended before it was asked to: only an error does that.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.task.is_finished()
    }

    /// Scores what was handed over and stops.
    ///
    /// # Errors
    /// What ended the scoring; a deadline.
    pub fn finish(self, wait: Duration) -> Result<(), RolloutError> {
        drop(self.sender);
        match self.runtime.block_on(async { tokio::time::timeout(wait, self.task).await }) {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(RolloutError::Ended { who: "the scoring of trajectories" }),
            Err(_) => Err(RolloutError::Deadline {
                who: "the end of a sampler",
                whom: "rewards that are still running".to_owned(),
                seconds: wait.as_secs_f64(),
            }),
        }
    }
}

/// A group whose trajectories are being scored.
#[derive(Debug)]
struct Gathering {
    task: Arc<Task>,
    group_size: usize,
    trajectories: Vec<Trajectory>,
}

async fn score_all(
    mut receiver: mpsc::Receiver<Ended>,
    rewards: Arc<RewardSet>,
    (buffer, curation): (Arc<dyn Producer>, Option<Curation>),
    capacity: usize,
) -> Result<(), RolloutError> {
    let mut gathering: HashMap<GroupId, Gathering> = HashMap::new();
    let mut scoring = JoinSet::new();
    let mut storing: JoinSet<Result<(), RolloutError>> = JoinSet::new();
    let mut open = true;
    while open || !scoring.is_empty() || !storing.is_empty() {
        tokio::select! {
            ended = receiver.recv(), if open && scoring.len() < capacity => match ended {
                None => open = false,
                Some(ended) => {
                    let group = gathering.entry(ended.completion.group).or_insert_with(|| Gathering {
                        task: Arc::clone(&ended.task),
                        group_size: ended.group_size,
                        trajectories: Vec::with_capacity(ended.group_size),
                    });
                    debug_assert_eq!(group.group_size, ended.group_size, "a group has one size");
                    scoring.spawn(score(ended, Arc::clone(&rewards)));
                }
            },
            Some(scored) = scoring.join_next() => {
                let (id, trajectory) = scored.map_err(|_| RolloutError::Ended { who: "the scoring of a trajectory" })??;
                if let Some(group) = complete(&mut gathering, id, trajectory) {
                    let (buffer, curation) = (Arc::clone(&buffer), curation.clone());
                    storing.spawn_blocking(move || store(buffer.as_ref(), curation.as_ref(), group));
                }
            }
            Some(stored) = storing.join_next() => {
                stored.map_err(|_| RolloutError::Ended { who: "the storing of a group" })??;
            }
        }
    }
    Ok(())
}

/// Hands a group over that is worth it; where there is no room for it in time, its task goes first in line again.
fn store(buffer: &dyn Producer, curation: Option<&Curation>, mut group: Group) -> Result<(), RolloutError> {
    let id = group.id;
    let verdict = curation.map_or(Ok(Verdict::Keep), |curation| curation.settle(&mut group))?;
    if verdict == Verdict::Drop {
        return give_back(buffer, id, false);
    }
    if buffer.finalize(group)? == Finalized::Full {
        return give_back(buffer, id, true);
    }
    Ok(())
}

/// Frees the slot of a group in flight; with `retry` its task goes first in line again.
pub(crate) fn give_back(buffer: &dyn Producer, group: GroupId, retry: bool) -> Result<(), RolloutError> {
    match buffer.abort(group, retry) {
        // It has no slot either, or is forgotten by a buffer that was started again: it is in line, or will be when its
        // hold is over.
        Err(BufferError::Unclear { .. } | BufferError::WrongState { .. }) => Ok(()),
        aborted => Ok(aborted?),
    }
}

/// Adds a trajectory to its group; the group, if that was the last one missing.
fn complete(
    gathering: &mut HashMap<GroupId, Gathering>,
    id: GroupId,
    trajectory: Trajectory,
) -> Option<Group> {
    let group = gathering.get_mut(&id)?;
    group.trajectories.push(trajectory);
    if group.trajectories.len() < group.group_size {
        return None;
    }
    let Gathering { task, mut trajectories, .. } = gathering.remove(&id)?;
    trajectories.sort_by_key(|trajectory| trajectory.index);
    Some(Group { id, task: Task::clone(&task), trajectories })
}

async fn score(ended: Ended, rewards: Arc<RewardSet>) -> Result<(GroupId, Trajectory), RolloutError> {
    let Ended { task, max_completion_length, completion, .. } = ended;
    let input = reward_input(&task, &completion, max_completion_length);
    let score = rewards.score(&input).await?;
    let (group, index) = (completion.group, completion.index);
    let sample = completion.sample().map_err(|source| RolloutError::Sample { group, index, source })?;
    let whole = completion.prompt_length..completion.token_ids.len();
    let turns = vec![Turn { completion: whole, stop: completion.stop, reward: None }];
    let (text, baseline) = (completion.text, completion.baseline);
    Ok((group, Trajectory { index, sample, turns, text, score, baseline }))
}

/// What a reward sees of a completion.
pub(crate) fn reward_input<'a>(
    task: &'a Task,
    completion: &'a Completion,
    max_completion_length: usize,
) -> RewardInput<'a> {
    RewardInput {
        task,
        index: completion.index,
        text: &completion.text,
        completion_tokens: completion.logprobs.len(),
        truncated: completion.stop == trajectory::StopReason::Length,
        max_completion_length,
    }
}
