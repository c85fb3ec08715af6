//! Episodes of a run that wait for agents of others: each is taken by one session.
//!
//! Invariant: an episode is taken once. One that was given up is never taken; one whose session cannot be started waits on.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rollout::EpisodePlace;
use tokio::sync::oneshot;
use trajectory::GroupId;

use super::{SessionError, SessionStart};

/// The episodes that wait, in the order of their groups.
#[derive(Clone, Debug, Default)]
pub struct WaitingEpisodes {
    free: Arc<Mutex<VecDeque<WaitingEpisode>>>,
}

#[derive(Debug)]
struct WaitingEpisode {
    place: EpisodePlace,
    /// What its session is started with.
    start: SessionStart,
    /// The task of the agents that share this group, in their words.
    name: Arc<Mutex<Option<String>>>,
    taken: oneshot::Sender<String>,
}

/// Which episode an agent wants.
#[derive(Clone, Debug, Default)]
pub struct EpisodeRequest {
    /// A task: the number of a row of the run's tasks, or any other name, which agents of one group have in common. `None` for
    /// the next episode.
    pub task_id: Option<String>,
}

/// Resolves to the id of the session that takes the episode.
pub(super) type EpisodeTaken = oneshot::Receiver<String>;

impl WaitingEpisodes {
    /// Offers an episode to agents.
    pub(super) fn offer(&self, place: EpisodePlace, start: SessionStart) -> EpisodeTaken {
        let (taken, waits) = oneshot::channel();
        let mut free = self.lock();
        free.retain(|episode| !episode.taken.is_closed());
        let known = free.iter().find(|episode| episode.place.group == place.group);
        let name = known.map(|episode| Arc::clone(&episode.name)).unwrap_or_default();
        // Groups are admitted in ascending order, which is the order in which they are wanted.
        let after = free.iter().position(|episode| episode.place.group > place.group).unwrap_or(free.len());
        free.insert(after, WaitingEpisode { place, start, name, taken });
        waits
    }

    /// Takes the first episode that fits, and starts its session with `start`, which returns the id of the session.
    ///
    /// # Errors
    /// No episode fits; those of `start`, after which the episode still waits.
    pub fn take<T>(
        &self,
        wanted: &EpisodeRequest,
        start: impl FnOnce(&EpisodePlace, SessionStart) -> Result<(String, T), SessionError>,
    ) -> Result<T, SessionError> {
        let mut free = self.lock();
        free.retain(|episode| !episode.taken.is_closed());
        let at = position(&free, wanted.task_id.as_deref()).ok_or_else(|| SessionError::NoEpisode {
            of_task: wanted.task_id.as_ref().map(|id| format!(" of task {id}")).unwrap_or_default(),
        })?;
        let (id, started) = start(&free[at].place, free[at].start.clone())?;
        let Some(episode) = free.remove(at) else {
            return Err(SessionError::NoEpisode { of_task: String::new() });
        };
        if let Some(task) = &wanted.task_id {
            lock_name(&episode.name).get_or_insert_with(|| task.clone());
        }
        // The episode may have been given up meanwhile; its session then expires.
        let _ = episode.taken.send(id);
        Ok(started)
    }

    /// Number of episodes that wait, and of the groups that they belong to.
    #[must_use]
    pub fn waiting(&self) -> (usize, usize) {
        let free = self.lock();
        let waiting: Vec<GroupId> = free
            .iter()
            .filter(|episode| !episode.taken.is_closed())
            .map(|episode| episode.place.group)
            .collect();
        let groups = waiting.chunk_by(|a, b| a == b).count();
        (waiting.len(), groups)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<WaitingEpisode>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock_name(name: &Mutex<Option<String>>) -> MutexGuard<'_, Option<String>> {
    name.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The episode for `task`: of the row of that number, else of the group that agents call so, else of the first group without a
/// name.
fn position(free: &VecDeque<WaitingEpisode>, task: Option<&str>) -> Option<usize> {
    let Some(task) = task else { return (!free.is_empty()).then_some(0) };
    let first = |fits: &dyn Fn(&WaitingEpisode) -> bool| free.iter().position(fits);
    let row = task.parse::<u64>().ok();
    if let Some(at) = row.and_then(|row| first(&|episode| episode.place.task.id.0 == row)) {
        return Some(at);
    }
    first(&|episode| lock_name(&episode.name).as_deref() == Some(task))
        .or_else(|| first(&|episode| lock_name(&episode.name).is_none()))
}
