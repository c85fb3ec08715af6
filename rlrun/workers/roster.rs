//! Who takes part in a run from other processes, and what each of them does just now.
//!
//! Invariant: nothing that a worker did is forgotten when it leaves or is killed: the counts of a run only go up. A worker
//! that comes again under a name takes the place of the one before. What workers say of themselves is bounded: how many
//! there are, their names and texts, and every number.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ::rewards::LoadCounts;
use ::rewards::reward_model::ModelServer;
use ::rollout::Progress;
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

/// Most workers, and most instances of which it is remembered what they did.
const MAX_WORKERS: usize = 4096;
/// Most bytes of a name, of a worker as of a reward.
const MAX_NAME: usize = 128;
/// Most characters of any other text.
const MAX_TEXT: usize = 1024;
/// Most rewards that one worker speaks of, and of which counts are kept.
const MAX_REWARDS: usize = 64;

/// What a worker is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    /// It samples.
    #[default]
    Rollout,
    /// It is a rank of the trainer.
    Trainer,
    /// It serves a reward model.
    Reward,
}

impl Role {
    /// As it stands in names and messages.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Rollout => "rollout",
            Self::Trainer => "trainer",
            Self::Reward => "reward",
        }
    }
}

/// What a worker says of itself, about every second.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Beat {
    /// Its name in the run.
    pub(crate) name: String,
    /// What it is.
    pub(crate) role: Role,
    /// What [`Roster::join`] gave it, so that one which comes again is told from the one before.
    pub(crate) instance: u64,
    /// Its process.
    pub(crate) pid: u32,
    /// Its machine.
    pub(crate) host: String,
    /// What it does just now, as the rest of a sentence that begins with its name.
    pub(crate) doing: String,
    /// What it has done since it was started.
    pub(crate) progress: Option<Progress>,
    /// What its rewards had to do since it said so last.
    pub(crate) rewards: Vec<(String, LoadCounts)>,
    /// The reward that it serves, and where.
    pub(crate) serves: Option<(String, ModelServer)>,
    /// This is the last one.
    pub(crate) leaves: bool,
}

/// Why a worker cannot take part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unwelcome {
    /// A name that nobody can have.
    #[error("{0:?} is no name of a worker: 1 to {MAX_NAME} bytes without control characters are possible")]
    Name(String),
    /// Too many workers.
    #[error("there are {MAX_WORKERS} workers already: is one started again and again?")]
    TooMany,
}

/// What a worker hears in return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Give back what is in flight and end.
    pub(crate) stop: bool,
}

/// A worker as people and the controller see it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Member {
    /// Its name.
    pub(crate) name: String,
    /// What it is.
    pub(crate) role: Role,
    /// Its process.
    pub(crate) pid: u32,
    /// What tells it from one before it under its name.
    pub(crate) instance: u64,
    /// Its machine.
    pub(crate) host: String,
    /// What it does.
    pub(crate) doing: String,
    /// For how long it has done that, seconds.
    pub(crate) doing_s: f64,
    /// Since when nothing was heard of it, seconds.
    pub(crate) silent_s: f64,
    /// Tokens it has sampled since it was started.
    pub(crate) sampled_tokens: u64,
}

/// Hears the name of a worker that is gone, unless another has it by now, and its instance.
type Gone = Box<dyn Fn(Option<&str>, u64) + Send + Sync>;

/// The table of workers.
pub(crate) struct Roster {
    state: Mutex<State>,
    /// So that others can go on with what it held, and without it.
    gone: OnceLock<Gone>,
}

impl fmt::Debug for Roster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Roster").field("state", &self.state).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    workers: BTreeMap<String, Worker>,
    /// What workers did that are not there any more, by instance: one that was only silent can come back.
    gone: BTreeMap<u64, Progress>,
    /// The same of earlier instances, all together.
    long_gone: Option<Progress>,
    /// Instances that were left out of the run.
    expelled: BTreeSet<u64>,
    loads: BTreeMap<String, LoadCounts>,
    /// The newest instance.
    instance: u64,
    /// Instances that are gone and of which nobody was told yet.
    left: Vec<(Option<String>, u64)>,
    stopping: bool,
}

#[derive(Debug)]
struct Worker {
    beat: Beat,
    heard: Instant,
    doing_since: Instant,
}

impl Roster {
    /// A table whose first worker is that after `instance`: later than all that a table before it has counted, so that
    /// workers can go on which have not noticed that the run was started again.
    pub(crate) fn after(instance: u64) -> Self {
        Self { state: Mutex::new(State { instance, ..State::default() }), gone: OnceLock::new() }
    }

    /// Tells `gone` of every instance that is gone from now on. The first who asks hears it.
    pub(crate) fn tell(&self, gone: impl Fn(Option<&str>, u64) + Send + Sync + 'static) {
        let _ = self.gone.set(Box::new(gone));
    }

    /// The name of a worker that joins, the one it asks for or the first that is free, and its instance.
    ///
    /// # Errors
    /// A name that nobody can have, too many workers.
    pub(crate) fn join(&self, role: Role, name: Option<String>) -> Result<(String, u64), Unwelcome> {
        name.as_deref().map_or(Ok(()), check_name)?;
        let mut state = self.state();
        state.room_for(name.as_deref())?;
        // A run of processes gives names of its own, which nobody takes by chance.
        let mut names = (0..).map(|n| format!("guest {} {n}", role.as_str()));
        let name = name.or_else(|| names.find(|name| !state.workers.contains_key(name))).unwrap_or_default();
        state.leave(&name);
        state.instance += 1;
        let instance = state.instance;
        let beat =
            Beat { name: name.clone(), role, instance, doing: "is starting".to_owned(), ..Beat::default() };
        state.put(beat);
        self.settle(state);
        Ok((name, instance))
    }

    /// Leaves the worker `name` out of the run: what it held goes to others, and it is told to end.
    pub(crate) fn expel(&self, name: &str) {
        let mut state = self.state();
        let Some(instance) = state.workers.get(name).map(|worker| worker.beat.instance) else { return };
        if state.expelled.len() == MAX_WORKERS {
            state.expelled.pop_first();
        }
        state.expelled.insert(instance);
        state.leave(name);
        self.settle(state);
    }

    /// Takes down what a worker says. One that is not known was forgotten by a run that was started again.
    ///
    /// # Errors
    /// A name that nobody can have, too many workers.
    pub(crate) fn beat(&self, beat: Beat) -> Result<Orders, Unwelcome> {
        check_name(&beat.name)?;
        let beat = beat.bounded();
        let mut state = self.state();
        state.room_for(Some(&beat.name))?;
        if state.expelled.contains(&beat.instance) {
            return Ok(Orders { stop: true });
        }
        let known = state.workers.get(&beat.name).map(|worker| worker.beat.instance);
        if known.is_some_and(|known| known > beat.instance) {
            // It was replaced, and does not know it yet.
            return Ok(Orders { stop: true });
        }
        for (name, counts) in &beat.rewards {
            if state.loads.len() >= MAX_REWARDS && !state.loads.contains_key(name) {
                continue;
            }
            state.loads.entry(name.clone()).or_default().add(counts.clone());
        }
        let leaves = beat.leaves.then(|| beat.name.clone());
        state.put(beat);
        leaves.iter().for_each(|name| state.leave(name));
        let stop = state.stopping;
        self.settle(state);
        Ok(Orders { stop })
    }

    /// The process of a worker has ended, says who looks after it. A run that was started again may hear of its `instance`
    /// by this alone.
    pub(crate) fn ended(&self, name: &str, pid: u32, instance: Option<u64>) {
        let mut state = self.state();
        match state.workers.get(name) {
            Some(worker) if worker.beat.pid == pid => state.leave(name),
            there => {
                let free = there.is_none().then(|| name.to_owned());
                let gone = instance.filter(|gone| there.is_none_or(|worker| worker.beat.instance != *gone));
                state.left.extend(gone.map(|gone| (free, gone)));
            }
        }
        self.settle(state);
    }

    /// What all samplers did together, with that of `inside`, the run's own. Served is the oldest version that one of them
    /// serves.
    pub(crate) fn progress(&self, inside: Option<Progress>) -> Progress {
        let state = self.state();
        let start = inside.unwrap_or(Progress { served: PolicyVersion(u64::MAX), ..Progress::default() });
        let rollouts = state.workers.values().filter_map(|worker| worker.beat.progress.as_ref());
        let all = rollouts.fold(start, |all, progress| all.and(progress));
        let all = state.long_gone.iter().fold(all, |all, progress| all.and(progress));
        let with_gone = state.gone.values().fold(all, |all, progress| all.and(progress));
        Progress { served: all.served, ..with_gone }
    }

    /// What the rewards of all workers had to do since this was asked last, by name.
    pub(crate) fn take_loads(&self) -> Vec<(String, LoadCounts)> {
        std::mem::take(&mut self.state().loads).into_iter().collect()
    }

    /// Who serves which reward.
    pub(crate) fn servers(&self) -> BTreeMap<String, ModelServer> {
        self.state().workers.values().filter_map(|worker| worker.beat.serves.clone()).collect()
    }

    /// Everybody who takes part.
    pub(crate) fn members(&self) -> Vec<Member> {
        let member = |worker: &Worker| Member {
            name: worker.beat.name.clone(),
            role: worker.beat.role,
            pid: worker.beat.pid,
            instance: worker.beat.instance,
            host: worker.beat.host.clone(),
            doing: worker.beat.doing.clone(),
            doing_s: worker.doing_since.elapsed().as_secs_f64(),
            silent_s: worker.heard.elapsed().as_secs_f64(),
            sampled_tokens: worker.beat.progress.map_or(0, |progress| progress.engine.sampled_tokens),
        };
        self.state().workers.values().map(member).collect()
    }

    /// Forgets those that were silent for so long; their names.
    pub(crate) fn drop_silent(&self, limit: Duration) -> Vec<String> {
        let mut state = self.state();
        let silent = state.workers.iter().filter(|(_, worker)| worker.heard.elapsed() > limit);
        let silent: Vec<String> = silent.map(|(name, _)| name.clone()).collect();
        silent.iter().for_each(|name| state.leave(name));
        self.settle(state);
        silent
    }

    /// Tells everybody to end, and waits until they have left, at most for so long.
    pub(crate) fn stop(&self, wait: Duration) {
        self.state().stopping = true;
        let deadline = Instant::now() + wait;
        // Ranks of the trainer end with the first of them.
        let stay = |state: &State| state.workers.values().any(|worker| worker.beat.role != Role::Trainer);
        while Instant::now() < deadline && stay(&self.state()) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Passes on who is gone, without the lock.
    fn settle(&self, mut state: MutexGuard<'_, State>) {
        let left = std::mem::take(&mut state.left);
        drop(state);
        if let Some(gone) = self.gone.get() {
            left.iter().for_each(|(name, instance)| gone(name.as_deref(), *instance));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of it is complete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn check_name(name: &str) -> Result<(), Unwelcome> {
    if (1..=MAX_NAME).contains(&name.len()) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Unwelcome::Name(name.chars().take(MAX_NAME).collect()))
}

impl Beat {
    /// What a worker says, cut to what a run can keep and add up.
    fn bounded(mut self) -> Self {
        let cut = |text: &mut String| *text = text.chars().take(MAX_TEXT).collect();
        cut(&mut self.host);
        cut(&mut self.doing);
        self.rewards.truncate(MAX_REWARDS);
        self.rewards.retain(|(name, _)| name.len() <= MAX_NAME);
        self.rewards.iter_mut().filter_map(|(_, counts)| counts.example.as_mut()).for_each(cut);
        self.serves = self.serves.filter(|(name, _)| name.len() <= MAX_NAME);
        if let Some(progress) = &mut self.progress {
            let Progress { busy_s, idle_s, stall_s, switch_s, .. } = progress;
            for seconds in [busy_s, idle_s, stall_s, switch_s] {
                *seconds = if seconds.is_finite() { *seconds } else { 0.0 };
            }
        }
        self
    }
}

impl State {
    fn put(&mut self, beat: Beat) {
        self.gone.remove(&beat.instance);
        let now = Instant::now();
        let before = self.workers.get(&beat.name).filter(|worker| worker.beat.doing == beat.doing);
        let doing_since = before.map_or(now, |worker| worker.doing_since);
        self.workers.insert(beat.name.clone(), Worker { beat, heard: now, doing_since });
    }

    fn leave(&mut self, name: &str) {
        let Some(Worker { beat, .. }) = self.workers.remove(name) else { return };
        self.left.push((Some(beat.name), beat.instance));
        self.gone.extend(beat.progress.map(|progress| (beat.instance, progress)));
        if self.gone.len() > MAX_WORKERS
            && let Some((_, first)) = self.gone.pop_first()
        {
            self.long_gone = Some(self.long_gone.map_or(first, |before| before.and(&first)));
        }
    }

    fn room_for(&self, name: Option<&str>) -> Result<(), Unwelcome> {
        let known = name.is_some_and(|name| self.workers.contains_key(name));
        if known || self.workers.len() < MAX_WORKERS { Ok(()) } else { Err(Unwelcome::TooMany) }
    }
}

#[cfg(test)]
mod tests {
    use ::rollout::EngineCounts;

    use super::*;

    fn beat(name: &str, instance: u64, tokens: u64) -> Beat {
        let engine = EngineCounts { sampled_tokens: tokens, ..EngineCounts::default() };
        let progress = Progress { served: PolicyVersion(tokens), engine, ..Progress::default() };
        Beat { name: name.to_owned(), instance, progress: Some(progress), ..Beat::default() }
    }

    #[test]
    fn counts_only_go_up_whoever_comes_and_goes() {
        let roster = Roster::after(100);
        let gone = std::sync::Arc::new(Mutex::new(Vec::new()));
        let heard = std::sync::Arc::clone(&gone);
        roster.tell(move |_, instance| heard.lock().unwrap().push(instance));
        let sampled = || roster.progress(None).engine.sampled_tokens;
        let served = || roster.progress(None).served;
        assert_eq!(roster.join(Role::Rollout, None), Ok(("guest rollout 0".to_owned(), 101)));
        assert_eq!(roster.join(Role::Rollout, None), Ok(("guest rollout 1".to_owned(), 102)));
        assert_eq!(roster.beat(beat("guest rollout 0", 101, 10)), Ok(Orders::default()));
        roster.beat(beat("guest rollout 1", 102, 20)).unwrap();
        assert_eq!((sampled(), served()), (30, PolicyVersion(10)));
        // Killed and started again: a new process under the old name begins at zero.
        assert_eq!(
            roster.join(Role::Rollout, Some("guest rollout 0".to_owned())),
            Ok(("guest rollout 0".to_owned(), 103))
        );
        assert_eq!((sampled(), served()), (30, PolicyVersion(20)));
        roster.beat(beat("guest rollout 0", 103, 1)).unwrap();
        assert_eq!(sampled(), 31);
        // What is left of the one before is told to end, and counts nothing twice.
        assert!(roster.beat(beat("guest rollout 0", 101, 12)).unwrap().stop);
        assert_eq!(sampled(), 31);
        roster.beat(Beat { leaves: true, ..beat("guest rollout 1", 102, 25) }).unwrap();
        assert_eq!((sampled(), roster.members().len()), (36, 1));
        assert_eq!(roster.drop_silent(Duration::ZERO), ["guest rollout 0"]);
        assert_eq!((sampled(), served()), (36, PolicyVersion(u64::MAX)));
        // It was only slow: what it did is not counted again.
        roster.beat(beat("guest rollout 0", 103, 4)).unwrap();
        assert_eq!(sampled(), 39);
        assert_eq!(*gone.lock().unwrap(), [101, 102, 103]);
        roster.ended("guest rollout 0", 9, Some(103));
        roster.ended("guest rollout 0", 9, Some(98));
        assert_eq!(roster.members().len(), 1, "another process than that one has ended");
        roster.ended("guest rollout 0", 0, None);
        assert_eq!(*gone.lock().unwrap(), [101, 102, 103, 98, 103]);
        roster.ended("rollout 1", 7, None);
        roster.ended("rollout 1", 7, Some(99));
        assert_eq!(*gone.lock().unwrap(), [101, 102, 103, 98, 103, 99], "a run before this one knew it");
    }

    #[test]
    fn loads_are_taken_once_and_everybody_is_told_to_stop() {
        let roster = Roster::after(0);
        let counts = LoadCounts { scored: 2, ..LoadCounts::default() };
        for instance in 1..=2 {
            let rewards = vec![("math".to_owned(), counts.clone())];
            roster.beat(Beat { rewards, ..beat(&format!("rollout {instance}"), instance, 1) }).unwrap();
        }
        let loads = roster.take_loads();
        assert_eq!((loads.len(), loads[0].1.scored), (1, 4));
        assert!(roster.take_loads().is_empty());
        roster.stop(Duration::ZERO);
        assert!(roster.beat(beat("rollout 1", 1, 3)).unwrap().stop);
    }

    #[test]
    fn what_workers_say_of_themselves_is_bounded() {
        let roster = Roster::after(0);
        let long = "x".repeat(100_000);
        for name in [&long[..], "", "a\nb"] {
            assert!(matches!(roster.join(Role::Rollout, Some(name.to_owned())), Err(Unwelcome::Name(_))));
            assert!(matches!(roster.beat(beat(name, 1, 1)), Err(Unwelcome::Name(_))));
        }
        let counts = LoadCounts { example: Some(long.clone()), scored: u64::MAX, ..LoadCounts::default() };
        let rewards = (0..100).map(|n| (n.to_string(), counts.clone())).collect();
        let said = Beat { host: long.clone(), doing: long.clone(), rewards, ..beat("a", 1, u64::MAX) };
        roster.beat(said.clone()).unwrap();
        roster.beat(Beat { name: "b".to_owned(), instance: 2, ..said }).unwrap();
        let members = roster.members();
        assert!(members.iter().all(|member| member.host.len() + member.doing.len() == 2 * MAX_TEXT));
        assert_eq!(roster.progress(None).engine.sampled_tokens, u64::MAX, "nothing overflows");
        let loads = roster.take_loads();
        assert_eq!((loads.len(), loads[0].1.scored), (MAX_REWARDS, u64::MAX));
        assert!(loads.iter().all(|(_, load)| load.example.as_ref().unwrap().len() == MAX_TEXT));
        for n in 0..MAX_WORKERS - 2 {
            roster.join(Role::Rollout, Some(format!("w{n}"))).unwrap();
        }
        assert_eq!(roster.join(Role::Rollout, None), Err(Unwelcome::TooMany));
        assert_eq!(roster.beat(beat("another", 9, 1)), Err(Unwelcome::TooMany));
        roster.beat(beat("a", 1, u64::MAX)).unwrap();
        // What is left out stays out.
        roster.expel("a");
        assert!(roster.beat(beat("a", 1, 1)).unwrap().stop);
        assert_eq!(roster.members().len(), MAX_WORKERS - 1);
    }
}
