//! Computes rewards concurrently with generation: an episode is scored as soon as it ends, a group goes to the buffer as soon as it is
//! complete.
//!
//! Invariant: a reward that runs over its time is a failed component of one trajectory, never a stalled run. What waits
//! to be scored is bounded: when the queue is full, back-pressure stops the sampler.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use buffer::{BufferError, Finalized, Producer};
use rewards::load::unix_seconds;
use rewards::{PartScore, RewardInput, RewardSet};
use serde_json::{Map, Value};
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use trajectory::{Component, Group, GroupId, Score, Task, Trajectory};

use crate::RolloutError;
use crate::activity::{ActivityLog, EpisodeTimes};
use crate::curation::{Curation, CurationVerdict};
use crate::episode::{Episode, EpisodeEnd, EpisodeFailure, FailureKind};

/// Name of the component that says how an episode went in its environment. It has no value.
pub const ENVIRONMENT: &str = "environment";

/// What the details of that component begin with that say how the environment failed: each is the share of failures.
pub const FAILED: &str = "failed/";

/// An episode that is to be scored, with its task.
#[derive(Debug)]
pub struct ScoreRequest {
    /// What was asked.
    pub task: Arc<Task>,
    /// Episodes of the whole group, its baseline and all roles included.
    pub group_size: usize,
    /// Longest completion allowed, tokens.
    pub max_completion_length: usize,
    /// The episode.
    pub episode: Episode,
    /// When its group got a slot, seconds since 1970.
    pub admitted: f64,
    /// When its last token was sampled, seconds since 1970.
    pub sampled: f64,
}

/// Scores episodes and sends complete groups to the buffer.
#[derive(Debug)]
pub struct Scorer {
    sender: mpsc::Sender<ScoreRequest>,
    task: JoinHandle<Result<(), RolloutError>>,
    give_up: Arc<Notify>,
    runtime: Handle,
    open: GroupsInScoring,
    activity: Arc<ActivityLog>,
}

/// Groups of which an episode has come and which are not with the buffer yet.
type GroupsInScoring = Arc<Mutex<HashSet<GroupId>>>;

impl Scorer {
    /// Starts scoring on `runtime`; at most `capacity` episodes wait or are being scored. `curation` says which groups are
    /// kept.
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
        let open = GroupsInScoring::default();
        let capacity = capacity.max(1);
        let activity = Arc::<ActivityLog>::default();
        let (times, still_open) = (Arc::clone(&activity), Arc::clone(&open));
        let scoring = Scoring { rewards, buffer, curation, capacity, open: still_open, activity: times };
        let task = runtime.spawn(scoring.run(receiver, Arc::clone(&give_up)));
        Self { sender, task, give_up, runtime: runtime.clone(), open, activity }
    }

    /// Hands over an episode. While too many are being scored it waits, up to `wait`: back-pressure from the rewards. Returns how long
    /// it waited.
    ///
    /// # Errors
    /// If the scoring has ended or is stuck.
    pub fn submit(&self, ended: ScoreRequest, wait: Duration) -> Result<Duration, RolloutError> {
        let ended = match self.sender.try_send(ended) {
            Ok(()) => return Ok(Duration::ZERO),
            Err(TrySendError::Full(ended) | TrySendError::Closed(ended)) => ended,
        };
        let start = Instant::now();
        let sent = self.runtime.block_on(async { tokio::time::timeout(wait, self.sender.send(ended)).await });
        match sent {
            Ok(Ok(())) => Ok(start.elapsed()),
            Ok(Err(_)) => Err(RolloutError::Ended { who: "the scoring of trajectories" }),
            Err(_) => Err(RolloutError::Deadline {
                who: "a sampler",
                whom: "rewards: too many trajectories wait to be scored".to_owned(),
                seconds: wait.as_secs_f64(),
            }),
        }
    }

    /// Whether an episode of the group has come, and the group is not with the buffer yet.
    #[must_use]
    pub fn holds(&self, group: GroupId) -> bool {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).contains(&group)
    }

    /// Where the times of its episodes are written down; for the worker's phases too.
    pub(crate) fn activity(&self) -> Arc<ActivityLog> {
        Arc::clone(&self.activity)
    }

    /// The runtime that rewards run on; environments run there too.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Whether it ended by itself, which only an error does.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.task.is_finished()
    }

    /// Scores what was handed over and stops. What is not scored within `grace` is cancelled: its groups are given back to be
    /// sampled again.
    ///
    /// # Errors
    /// What ended the scoring; a deadline.
    pub fn finish(self, grace: Duration, wait: Duration) -> Result<(), RolloutError> {
        let Self { sender, mut task, give_up, runtime, .. } = self;
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

/// An episode with the results of the rewards of single trajectories; `None` if the environment failed.
#[derive(Debug)]
struct JudgedEpisode {
    request: ScoreRequest,
    part: Option<PartScore>,
    /// When they had judged it, seconds since 1970.
    scored: f64,
}

impl JudgedEpisode {
    fn times(&self) -> EpisodeTimes {
        let ScoreRequest { episode, admitted, sampled, .. } = &self.request;
        let (group, index, scored) = (episode.group, episode.index, self.scored);
        let (settled, stored) = (scored, scored);
        EpisodeTimes { group, index, admitted: *admitted, sampled: *sampled, scored, settled, stored }
    }
}

/// A group of which some episodes are scored.
#[derive(Debug)]
struct PartialGroup {
    group_size: usize,
    judged: Vec<JudgedEpisode>,
}

/// What the scoring task works with.
struct Scoring {
    rewards: Arc<RewardSet>,
    buffer: Arc<dyn Producer>,
    curation: Option<Curation>,
    capacity: usize,
    open: GroupsInScoring,
    activity: Arc<ActivityLog>,
}

/// A scored group, and when its episodes passed which station.
struct TimedGroup {
    group: Group,
    times: Vec<EpisodeTimes>,
}

impl Scoring {
    async fn run(
        mut self,
        mut receiver: mpsc::Receiver<ScoreRequest>,
        give_up: Arc<Notify>,
    ) -> Result<(), RolloutError> {
        let mut partial: HashMap<GroupId, PartialGroup> = HashMap::new();
        let mut judging: JoinSet<JudgedEpisode> = JoinSet::new();
        let mut completing: JoinSet<Result<TimedGroup, RolloutError>> = JoinSet::new();
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
                        self.opened().insert(ended.episode.group);
                        judging.spawn(judge(ended, Arc::clone(&self.rewards)));
                    }
                },
                Some(judged) = judging.join_next() => {
                    let judged =
                        judged.map_err(|_| RolloutError::Ended { who: "the scoring of a trajectory" })?;
                    if let Some(group) = complete(&mut partial, judged) {
                        completing.spawn(settle(group, Arc::clone(&self.rewards)));
                    }
                }
                Some(settled) = completing.join_next() => {
                    let settled =
                        settled.map_err(|_| RolloutError::Ended { who: "the scoring of a group" })??;
                    self.opened().remove(&settled.group.id);
                    let (buffer, curation) = (Arc::clone(&self.buffer), self.curation.clone());
                    let activity = Arc::clone(&self.activity);
                    storing.spawn_blocking(move || store(&*buffer, curation.as_ref(), settled, &activity));
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

    /// Gives every group back that is not with the buffer.
    fn give_back_all(&mut self) -> impl FnOnce() -> Result<(), RolloutError> + use<> {
        let (open, buffer) = (std::mem::take(&mut *self.opened()), Arc::clone(&self.buffer));
        move || open.into_iter().try_for_each(|group| give_back(buffer.as_ref(), group, true))
    }
}

/// Hands a group to the buffer if curation keeps it; if the buffer is full, its task is sampled again first.
fn store(
    buffer: &dyn Producer,
    curation: Option<&Curation>,
    settled: TimedGroup,
    activity: &ActivityLog,
) -> Result<(), RolloutError> {
    let TimedGroup { mut group, times } = settled;
    let id = group.id;
    let verdict = curation.map_or(Ok(CurationVerdict::Keep), |curation| curation.settle(&mut group))?;
    if verdict == CurationVerdict::Drop {
        return give_back(buffer, id, false);
    }
    fail::fail_point!("group-hand-over");
    match buffer.finalize(group) {
        // A trainer that was started again from an older checkpoint has not made a version of the group yet.
        Ok(Finalized::Full) | Err(BufferError::FutureVersion { .. }) => return give_back(buffer, id, true),
        stored => stored?,
    };
    activity.stored(&times);
    Ok(())
}

/// Frees the slot of a group in flight; with `retry` its task is sampled again first.
pub(crate) fn give_back(buffer: &dyn Producer, group: GroupId, retry: bool) -> Result<(), RolloutError> {
    match buffer.abort(group, retry) {
        // The group has no slot: a buffer that was restarted has forgotten it, or its hold has expired. It will be admitted
        // again.
        Err(BufferError::Unclear { .. } | BufferError::WrongState { .. }) => Ok(()),
        aborted => Ok(aborted?),
    }
}

/// Adds a trajectory to its group; all of the group in order, if that was the last one missing.
fn complete(partial: &mut HashMap<GroupId, PartialGroup>, new: JudgedEpisode) -> Option<Vec<JudgedEpisode>> {
    let (id, group_size) = (new.request.episode.group, new.request.group_size);
    let group = partial
        .entry(id)
        .or_insert_with(|| PartialGroup { group_size, judged: Vec::with_capacity(group_size) });
    debug_assert_eq!(group.group_size, group_size, "a group has one size");
    group.judged.push(new);
    if group.judged.len() < group.group_size {
        return None;
    }
    let PartialGroup { mut judged, .. } = partial.remove(&id)?;
    judged.sort_by_key(|judged| judged.request.episode.index);
    Some(judged)
}

/// Asks the rewards that judge a trajectory by itself. Of a failed environment they would judge a fragment: none is asked.
async fn judge(request: ScoreRequest, rewards: Arc<RewardSet>) -> JudgedEpisode {
    fail::fail_point!("reward-call");
    if matches!(request.episode.end, EpisodeEnd::Failed(_)) {
        return JudgedEpisode { request, part: None, scored: unix_seconds() };
    }
    let part = Some(rewards.begin(&request.reward_input()).await);
    JudgedEpisode { request, part, scored: unix_seconds() }
}

/// Asks the rewards that judge a group, and makes it one.
async fn settle(judged: Vec<JudgedEpisode>, rewards: Arc<RewardSet>) -> Result<TimedGroup, RolloutError> {
    let mut times: Vec<EpisodeTimes> = judged.iter().map(JudgedEpisode::times).collect();
    let (requests, parts): (Vec<ScoreRequest>, Vec<Option<PartScore>>) =
        judged.into_iter().map(|judged| (judged.request, judged.part)).unzip();
    let asked: Vec<bool> = parts.iter().map(Option::is_some).collect();
    let inputs: Vec<_> =
        requests.iter().zip(&asked).filter(|(_, asked)| **asked).map(|(r, _)| r.reward_input()).collect();
    let mut scores = rewards.complete(&inputs, parts.into_iter().flatten().collect()).await?.into_iter();
    let settled = unix_seconds();
    times.iter_mut().for_each(|times| times.settled = settled);
    let Some(first) = requests.first() else {
        return Err(RolloutError::Ended { who: "a group without trajectories" });
    };
    let (id, task) = (first.episode.group, Task::clone(&first.task));
    let trajectories = requests.into_iter().zip(asked).map(|(ScoreRequest { episode, .. }, asked)| {
        let score = if asked { scores.next().unwrap_or_default() } else { unscored(&episode) };
        trajectory(episode, score)
    });
    let group = Group { id, task, trajectories: trajectories.collect::<Result<_, _>>()? };
    Ok(TimedGroup { group, times })
}

/// The score of an episode whose environment failed: it is counted as failed and not trained on.
pub(crate) fn unscored(episode: &Episode) -> Score {
    let EpisodeEnd::Failed(EpisodeFailure { kind, reason }) = &episode.end else { return Score::default() };
    let of_kind = |other: FailureKind| (format!("{FAILED}{}", other.name()), Value::from(other == *kind));
    let failed = Component {
        name: ENVIRONMENT.to_owned(),
        value: None,
        error: Some(reason.clone()),
        details: FailureKind::ALL.map(of_kind).into_iter().collect(),
    };
    Score { components: vec![failed], ..Score::default() }
}

fn trajectory(episode: Episode, score: Score) -> Result<Trajectory, RolloutError> {
    let Episode { group, index, .. } = episode;
    let sample = episode.sample().map_err(|source| RolloutError::Sample { group, index, source })?;
    let mut score = score;
    score.components.extend(environment_component(&episode));
    let Episode { turns, branches, transcript: text, baseline, role, .. } = episode;
    Ok(Trajectory { index, sample, turns, branches, text, score, baseline, role })
}

/// How an episode in an environment of several turns went, as a component without a value; `None` of other environments,
/// and of a failed one, which [`unscored`] names.
pub(crate) fn environment_component(episode: &Episode) -> Option<Component> {
    if episode.counts.is_empty() || matches!(episode.end, EpisodeEnd::Failed(_)) {
        return None;
    }
    let counts = episode.counts.iter().map(|(event, count)| ((*event).to_owned(), Value::from(*count)));
    let mut details: Map<String, Value> = counts.collect();
    for end in EpisodeEnd::NAMES {
        details.insert(format!("stop/{end}"), Value::from(end == episode.end.name()));
    }
    Some(Component { name: ENVIRONMENT.to_owned(), details, ..Component::default() })
}

impl ScoreRequest {
    fn reward_input(&self) -> RewardInput<'_> {
        reward_input(&self.task, &self.episode, self.max_completion_length)
    }
}

/// What a reward sees of an episode.
pub(crate) fn reward_input<'a>(
    task: &'a Task,
    episode: &'a Episode,
    max_completion_length: usize,
) -> RewardInput<'a> {
    let (prompt_ids, completion_ids) = episode.token_ids().split_at(episode.prompt_length);
    RewardInput {
        task,
        index: episode.index,
        text: &episode.text,
        prompt_ids,
        completion_ids,
        turns: &episode.turns,
        truncated: episode.truncated(),
        max_completion_length,
        version: episode.version(),
    }
}
