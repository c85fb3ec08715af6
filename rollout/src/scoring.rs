//! Rewards beside the generation: a completion is scored as soon as it ends, a group goes to the buffer as soon as it is
//! complete.
//!
//! Invariant: a reward that runs over its time is a failed component of one trajectory, never a stalled run. What waits
//! to be scored is bounded; when it is full, the sampler waits.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use buffer::{BufferError, Finalized, Producer};
use rewards::{PartScore, RewardInput, RewardSet};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use trajectory::{Group, GroupId, PolicyVersion, Score, Task, Trajectory, Turn};

use crate::RolloutError;
use crate::curation::{Curation, Verdict};
use crate::sampler::Completion;

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
    give_up: Arc<Notify>,
    runtime: Handle,
    open: Open,
}

/// Groups of which a completion has come and which are not with the buffer yet.
type Open = Arc<Mutex<HashSet<GroupId>>>;

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
        let give_up = Arc::new(Notify::new());
        let open = Open::default();
        let capacity = capacity.max(1);
        let scoring = Scoring { rewards, buffer, curation, capacity, open: Arc::clone(&open) };
        let task = runtime.spawn(scoring.run(receiver, Arc::clone(&give_up)));
        Self { sender, task, give_up, runtime: runtime.clone(), open }
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

    /// Whether a completion of the group has come, and the group is not with the buffer yet.
    #[must_use]
    pub fn holds(&self, group: GroupId) -> bool {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).contains(&group)
    }

    /// Whether it ended before it was asked to: only an error does that.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.task.is_finished()
    }

    /// Scores what was handed over and stops. What is not scored within `grace` is given up: its groups are given back to
    /// be generated again.
    ///
    /// # Errors
    /// What ended the scoring; a deadline.
    pub fn finish(self, grace: Duration, wait: Duration) -> Result<(), RolloutError> {
        let Self { sender, mut task, give_up, runtime, open: _ } = self;
        drop(sender);
        let ended = runtime.block_on(async {
            match tokio::time::timeout(grace, &mut task).await {
                Ok(ended) => Ok(ended),
                Err(_) => {
                    give_up.notify_one();
                    tokio::time::timeout(wait, task).await
                }
            }
        });
        match ended {
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
    group_size: usize,
    judged: Vec<(Ended, PartScore)>,
}

/// What all scoring needs.
struct Scoring {
    rewards: Arc<RewardSet>,
    buffer: Arc<dyn Producer>,
    curation: Option<Curation>,
    capacity: usize,
    open: Open,
}

impl Scoring {
    async fn run(
        mut self,
        mut receiver: mpsc::Receiver<Ended>,
        give_up: Arc<Notify>,
    ) -> Result<(), RolloutError> {
        let mut gathering: HashMap<GroupId, Gathering> = HashMap::new();
        let mut judging: JoinSet<(Ended, PartScore)> = JoinSet::new();
        let mut completing: JoinSet<Result<Group, RolloutError>> = JoinSet::new();
        let mut storing: JoinSet<Result<(), RolloutError>> = JoinSet::new();
        let mut receiving = true;
        while receiving || !judging.is_empty() || !completing.is_empty() || !storing.is_empty() {
            tokio::select! {
                () = give_up.notified() => {
                    judging.shutdown().await;
                    completing.shutdown().await;
                    receiving = false;
                    storing.spawn_blocking(self.give_back_all());
                }
                ended = receiver.recv(), if receiving && judging.len() + completing.len() < self.capacity => match ended {
                    None => receiving = false,
                    Some(ended) => {
                        self.opened().insert(ended.completion.group);
                        judging.spawn(judge(ended, Arc::clone(&self.rewards)));
                    }
                },
                Some(judged) = judging.join_next() => {
                    let (ended, part) =
                        judged.map_err(|_| RolloutError::Ended { who: "the scoring of a trajectory" })?;
                    if let Some(group) = complete(&mut gathering, ended, part) {
                        completing.spawn(settle(group, Arc::clone(&self.rewards)));
                    }
                }
                Some(group) = completing.join_next() => {
                    let group = group.map_err(|_| RolloutError::Ended { who: "the scoring of a group" })??;
                    self.opened().remove(&group.id);
                    let (buffer, curation) = (Arc::clone(&self.buffer), self.curation.clone());
                    storing.spawn_blocking(move || store(buffer.as_ref(), curation.as_ref(), group));
                }
                Some(stored) = storing.join_next() => {
                    stored.map_err(|_| RolloutError::Ended { who: "the storing of a group" })??;
                }
            }
        }
        Ok(())
    }

    fn opened(&self) -> MutexGuard<'_, HashSet<GroupId>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives back every group that is not with the buffer.
    fn give_back_all(&mut self) -> impl FnOnce() -> Result<(), RolloutError> + use<> {
        let (open, buffer) = (std::mem::take(&mut *self.opened()), Arc::clone(&self.buffer));
        move || open.into_iter().try_for_each(|group| give_back(buffer.as_ref(), group, true))
    }
}

/// Hands a group over that is worth it; where there is no room for it in time, its task goes first in line again.
fn store(buffer: &dyn Producer, curation: Option<&Curation>, mut group: Group) -> Result<(), RolloutError> {
    let id = group.id;
    let verdict = curation.map_or(Ok(Verdict::Keep), |curation| curation.settle(&mut group))?;
    if verdict == Verdict::Drop {
        return give_back(buffer, id, false);
    }
    fail::fail_point!("group-hand-over");
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

/// Adds a trajectory to its group; all of the group in order, if that was the last one missing.
fn complete(
    gathering: &mut HashMap<GroupId, Gathering>,
    ended: Ended,
    part: PartScore,
) -> Option<Vec<(Ended, PartScore)>> {
    let (id, group_size) = (ended.completion.group, ended.group_size);
    let group = gathering
        .entry(id)
        .or_insert_with(|| Gathering { group_size, judged: Vec::with_capacity(group_size) });
    debug_assert_eq!(group.group_size, group_size, "a group has one size");
    group.judged.push((ended, part));
    if group.judged.len() < group.group_size {
        return None;
    }
    let Gathering { mut judged, .. } = gathering.remove(&id)?;
    judged.sort_by_key(|(ended, _)| ended.completion.index);
    Some(judged)
}

/// Asks the rewards that judge a trajectory by itself.
async fn judge(ended: Ended, rewards: Arc<RewardSet>) -> (Ended, PartScore) {
    fail::fail_point!("reward-call");
    let part = rewards.begin(&ended.reward_input()).await;
    (ended, part)
}

/// Asks the rewards that judge a group, and makes it one.
async fn settle(judged: Vec<(Ended, PartScore)>, rewards: Arc<RewardSet>) -> Result<Group, RolloutError> {
    let (ended, parts): (Vec<Ended>, Vec<PartScore>) = judged.into_iter().unzip();
    let inputs: Vec<_> = ended.iter().map(Ended::reward_input).collect();
    let scores = rewards.complete(&inputs, parts).await?;
    let Some(first) = ended.first() else {
        return Err(RolloutError::Ended { who: "a group without trajectories" });
    };
    let (id, task) = (first.completion.group, Task::clone(&first.task));
    let trajectories =
        ended.into_iter().zip(scores).map(|(ended, score)| trajectory(ended.completion, score));
    Ok(Group { id, task, trajectories: trajectories.collect::<Result<_, _>>()? })
}

fn trajectory(completion: Completion, score: Score) -> Result<Trajectory, RolloutError> {
    let (group, index) = (completion.group, completion.index);
    let sample = completion.sample().map_err(|source| RolloutError::Sample { group, index, source })?;
    let whole = completion.prompt_length..completion.token_ids.len();
    let turns = vec![Turn { completion: whole, stop: completion.stop, reward: None }];
    let (text, baseline) = (completion.text, completion.baseline);
    Ok(Trajectory { index, sample, turns, text, score, baseline })
}

impl Ended {
    fn reward_input(&self) -> RewardInput<'_> {
        reward_input(&self.task, &self.completion, self.max_completion_length)
    }
}

/// What a reward sees of a completion.
pub(crate) fn reward_input<'a>(
    task: &'a Task,
    completion: &'a Completion,
    max_completion_length: usize,
) -> RewardInput<'a> {
    let (prompt_ids, completion_ids) = completion.token_ids.split_at(completion.prompt_length);
    RewardInput {
        task,
        index: completion.index,
        text: &completion.text,
        prompt_ids,
        completion_ids,
        truncated: completion.stop == trajectory::StopReason::Length,
        max_completion_length,
        version: completion.versions.last().map_or_else(PolicyVersion::default, |run| run.version),
    }
}
