//! Ranks that are processes and are lost, or join, while the training goes on.
//!
//! The first rank keeps a snapshot in its memory: the state after a step, gathered from the ranks every few steps, and the batches
//! that were trained on since. When a rank is lost it makes a group of the ranks that are there, gives them the snapshot, and
//! repeats the updates of those batches. Nothing is read from disk, leased or published again. REFT (arXiv 2310.12670) keeps the
//! shard of a rank at the ranks of other hosts; here all are at the first, which also has the buffer and cannot be replaced.
//!
//! Invariant: repeated updates have the batches, the order and the learning rates of the first time. So the weights have the bits of a
//! run without a loss, if the numbers of ranks are powers of two and at most [`LearnerConfig::leaves`](crate::LearnerConfig).

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use trajectory::{Group, PolicyVersion};

use super::Trainer;
use crate::TrainerError;
use crate::checkpoint::{NetworkCopy, NetworkState};
use crate::lead::Leader;
use crate::learner::Learner;

/// Losses of ranks in one step after which the run ends: the step itself may be what ends them.
const MOST_LOSSES: usize = 3;

/// Where the first rank finds the others.
pub trait RankMeeting: Debug + Send {
    /// The most ranks that a group could have now, if `world` are in one.
    fn possible(&self, world: usize) -> usize;

    /// The first rank of a new group of at most `most` ranks.
    ///
    /// # Errors
    /// If too few ranks join before a deadline of its own.
    fn meet(&self, most: usize) -> Result<Arc<Leader>, TrainerError>;
}

/// How a trainer whose ranks are processes continues without some of them.
#[derive(Debug)]
pub struct Elasticity {
    /// Where it finds ranks.
    pub meeting: Box<dyn RankMeeting>,
    /// Steps between snapshots, at least 1.
    pub snapshot_every: u64,
}

/// A change of the ranks of a trainer.
#[derive(Clone, Debug, PartialEq)]
pub struct Regrouping {
    /// Error of the rank that was lost first; `None` if ranks have joined.
    pub lost: Option<String>,
    /// Ranks before.
    pub before: usize,
    /// Ranks from now on.
    pub after: usize,
    /// Version of the snapshot that training continued from.
    pub snapshot: PolicyVersion,
    /// Steps whose updates were repeated.
    pub repeated_steps: u64,
    /// When it began, seconds of the run.
    pub start: f64,
    /// Time until training could continue, seconds.
    pub seconds: f64,
}

/// What a trainer needs to continue with other ranks.
#[derive(Debug)]
pub(super) struct ElasticState {
    config: Elasticity,
    snapshot: Option<StateSnapshot>,
    /// The batches of the steps after the snapshot, in order.
    since: Vec<TrainedBatch>,
    /// Since the last report.
    regroupings: Vec<Regrouping>,
    /// Losses in this step.
    losses: usize,
    /// When snapshots were taken since the last report, seconds of the run.
    snapshots: Vec<Range<f64>>,
}

#[derive(Debug)]
struct StateSnapshot {
    version: PolicyVersion,
    policy: NetworkCopy,
    critic: Option<NetworkCopy>,
}

#[derive(Debug)]
struct TrainedBatch {
    groups: Vec<Arc<Group>>,
    learning_rate: f32,
}

impl ElasticState {
    pub(super) fn new(config: Elasticity) -> Self {
        Self {
            config,
            snapshot: None,
            since: Vec::new(),
            regroupings: Vec::new(),
            losses: 0,
            snapshots: Vec::new(),
        }
    }

    /// The states of policy and critic in the snapshot, if it is of `version`.
    pub(super) fn states_at(
        &self,
        version: PolicyVersion,
    ) -> Option<(NetworkState<'_>, Option<NetworkState<'_>>)> {
        let snapshot = self.snapshot.as_ref().filter(|snapshot| snapshot.version == version)?;
        Some((snapshot.policy.state(), snapshot.critic.as_ref().map(NetworkCopy::state)))
    }
}

impl Trainer {
    /// Changes of the ranks, and when snapshots were taken (seconds of the run), since the last call.
    pub(super) fn take_regroupings(&mut self) -> (Vec<Regrouping>, Vec<Range<f64>>) {
        self.elastic.as_mut().map_or_else(Default::default, |elastic| {
            elastic.losses = 0;
            (std::mem::take(&mut elastic.regroupings), std::mem::take(&mut elastic.snapshots))
        })
    }

    /// Does `work` again, with the ranks that are there, after every loss of a rank. `of` is the error of the trainer in one of `work`.
    ///
    /// # Errors
    /// That of `work`, if no rank was lost or the trainer is not elastic; too few ranks; losses in every attempt.
    pub fn with_ranks<T, E: From<TrainerError>>(
        &mut self,
        of: impl Fn(&E) -> Option<&TrainerError>,
        mut work: impl FnMut(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        loop {
            let error = match work(self) {
                Err(error) => error,
                done => return done,
            };
            match of(&error).filter(|error| self.may_continue_after(error)) {
                Some(lost) => self.regroup(Some(lost), usize::MAX, self.time_s())?,
                None => return Err(error),
            }
        }
    }

    /// Lets ranks that wait take part, if a larger group is possible with them.
    ///
    /// # Errors
    /// As [`Self::with_ranks`].
    pub(super) fn let_ranks_join(&mut self) -> Result<(), TrainerError> {
        let world = self.learner.world();
        let possible = |elastic: &ElasticState| elastic.config.meeting.possible(world);
        let most = self.elastic.as_ref().map_or(world, possible);
        if most <= world {
            return Ok(());
        }
        self.with_ranks(own_error, Self::take_snapshot)?;
        let start = self.time_s();
        if let Some(remote) = self.learner.remote() {
            // A rank that is lost meanwhile does not join.
            let _ = remote.leader().regroup();
        }
        self.regroup(None, most, start)
    }

    /// Remembers what the step was trained on.
    pub(super) fn remember(&mut self, groups: &[Arc<Group>], learning_rate: f32) {
        if let Some(elastic) = &mut self.elastic {
            elastic.since.push(TrainedBatch { groups: groups.to_vec(), learning_rate });
        }
    }

    /// Takes a snapshot if one is due after the current version.
    ///
    /// # Errors
    /// As [`Self::with_ranks`].
    pub(super) fn snapshot_if_due(&mut self) -> Result<(), TrainerError> {
        let every = self.elastic.as_ref().map_or(0, |elastic| elastic.config.snapshot_every);
        if every > 0 && self.version.0.is_multiple_of(every) {
            self.with_ranks(own_error, Self::take_snapshot)?;
        }
        Ok(())
    }

    /// Gathers the state of the current version, unless the snapshot has it.
    pub(super) fn take_snapshot(&mut self) -> Result<(), TrainerError> {
        let start = self.time_s();
        let Some(elastic) = &mut self.elastic else { return Ok(()) };
        if elastic.snapshot.as_ref().is_some_and(|snapshot| snapshot.version == self.version) {
            return Ok(());
        }
        let critic = self.auxiliary.critic.as_ref().and_then(|critic| critic.network.as_ref());
        let critic =
            critic.map(|network| NetworkState::of(&network.directory, &network.learner)).transpose()?;
        let policy = NetworkState::of(&self.directory, &self.learner)?.into();
        elastic.snapshot =
            Some(StateSnapshot { version: self.version, policy, critic: critic.map(NetworkCopy::from) });
        elastic.since.clear();
        let end = self.earlier_s + self.started.elapsed().as_secs_f64();
        elastic.snapshots.push(start..end);
        Ok(())
    }

    fn may_continue_after(&self, error: &TrainerError) -> bool {
        let may = |elastic: &ElasticState| elastic.snapshot.is_some() && elastic.losses < MOST_LOSSES;
        is_loss(error) && self.elastic.as_ref().is_some_and(may)
    }

    /// Continues with the ranks that are there, at most `most`; it has begun at `start`, seconds of the run.
    fn regroup(&mut self, lost: Option<&TrainerError>, most: usize, start: f64) -> Result<(), TrainerError> {
        let (before, version) = (self.learner.world(), self.version);
        let Some(mut elastic) = self.elastic.take() else { return Ok(()) };
        elastic.losses += usize::from(lost.is_some());
        let restored = loop {
            let restored =
                elastic.config.meeting.meet(most).and_then(|leader| self.restore(&elastic, &leader));
            match restored {
                Err(error) if is_loss(&error) && elastic.losses < MOST_LOSSES => elastic.losses += 1,
                restored => break restored,
            }
        };
        // Repeated updates count versions from that of the snapshot.
        self.version = version;
        if restored.is_ok() {
            elastic.regroupings.push(Regrouping {
                lost: lost.map(ToString::to_string),
                before,
                after: self.learner.world(),
                snapshot: elastic.snapshot.as_ref().map_or(version, |snapshot| snapshot.version),
                repeated_steps: elastic.since.len() as u64,
                start,
                seconds: self.time_s() - start,
            });
        }
        self.elastic = Some(elastic);
        restored
    }

    /// Gives the ranks of `leader` the snapshot, and repeats the updates since.
    fn restore(&mut self, elastic: &ElasticState, leader: &Arc<Leader>) -> Result<(), TrainerError> {
        let Some(snapshot) = &elastic.snapshot else { return Ok(()) };
        self.learner = restored(leader, &snapshot.policy, &self.learner)?;
        let network = self.auxiliary.critic.as_mut().and_then(|critic| critic.network.as_mut());
        if let (Some(network), Some(copy)) = (network, &snapshot.critic) {
            network.learner = restored(leader, copy, &network.learner)?;
        }
        self.version = snapshot.version;
        for batch in &elastic.since {
            self.update(&batch.groups, batch.learning_rate)?;
            self.version = self.version.next();
        }
        Ok(())
    }
}

/// The learner `before` with the state in `copy`, on the ranks of `leader`.
fn restored(leader: &Arc<Leader>, copy: &NetworkCopy, before: &Learner) -> Result<Learner, TrainerError> {
    let (config, model) = (before.config().clone(), before.model().clone());
    let (weights, adapter) = (copy.weights.clone(), copy.adapter.clone());
    let learner = leader.learner(config, model, weights, adapter, Some(copy.optimizer.clone()))?;
    Ok(learner.on(Arc::clone(before.pool())))
}

/// The error of the trainer in one of its own.
pub(super) fn own_error(error: &TrainerError) -> Option<&TrainerError> {
    Some(error)
}

/// Whether ranks are lost.
fn is_loss(error: &TrainerError) -> bool {
    match error {
        TrainerError::Collective(_) | TrainerError::RanksEnded => true,
        TrainerError::Rank { source, .. } => is_loss(source),
        _ => false,
    }
}
