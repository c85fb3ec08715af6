//! The registry of workers: the processes that take part in a run, and their last heartbeats.
//!
//! Invariant: the counters of a run never decrease: those of workers that left or were lost are kept. A worker that joins
//! under a known name replaces the earlier one. The number of workers, their names, texts and numbers are bounded.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ::rewards::LoadCounts;
use ::rewards::reward_model::ModelServer;
use ::rollout::{Activity, Progress};
use serde::{Deserialize, Serialize};
use trajectory::PolicyVersion;

/// Largest number of workers, and of lost instances with separate counters.
const MAX_WORKERS: usize = 4096;
/// Most bytes of the name of a worker or of a reward.
const MAX_NAME: usize = 128;
/// Most characters of any other text.
const MAX_TEXT: usize = 1024;
/// Most rewards with counters, of one worker and in all.
const MAX_REWARDS: usize = 64;

/// The role of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerRole {
    /// Samples.
    #[default]
    Rollout,
    /// A rank of the trainer.
    Trainer,
    /// Serves a reward model.
    Reward,
}

impl WorkerRole {
    /// As in names and messages.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Rollout => "rollout",
            Self::Trainer => "trainer",
            Self::Reward => "reward",
        }
    }
}

/// The heartbeat of a worker, about once a second.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    /// Its name in the run.
    pub(crate) name: String,
    /// Its role.
    pub(crate) role: WorkerRole,
    /// The instance id from [`WorkerRegistry::join`]; a restarted worker gets a new one.
    pub(crate) instance: u64,
    /// Its process id.
    pub(crate) pid: u32,
    /// Its host name.
    pub(crate) host: String,
    /// Its phase, as the rest of a sentence that begins with its name.
    pub(crate) doing: String,
    /// Its counters since it was started, if it samples.
    pub(crate) progress: Option<Progress>,
    /// What it has done since the last acknowledged heartbeat, if it samples.
    #[serde(default)]
    pub(crate) activity: Activity,
    /// The counters of its rewards since the last acknowledged heartbeat.
    pub(crate) rewards: Vec<(String, LoadCounts)>,
    /// The reward that it serves, and the server's address.
    pub(crate) serves: Option<(String, ModelServer)>,
    /// Whether this is its last heartbeat.
    pub(crate) leaves: bool,
    /// Number of what it has done, from 1. A heartbeat that is not acknowledged is repeated with its number, and counts once.
    #[serde(default)]
    pub(crate) number: u64,
}

/// Why a worker is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JoinRefused {
    /// An invalid name.
    #[error("{0:?} is no name of a worker: 1 to {MAX_NAME} bytes without control characters are possible")]
    Name(String),
    /// Too many workers.
    #[error("there are {MAX_WORKERS} workers already: is one started again and again?")]
    TooMany,
}

/// The answer to a heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HeartbeatReply {
    /// The worker has to abort its work in flight and end.
    pub(crate) stop: bool,
}

/// The status of a worker, for users and the controller.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WorkerStatus {
    /// Its name.
    pub(crate) name: String,
    /// Its role.
    pub(crate) role: WorkerRole,
    /// Its process id.
    pub(crate) pid: u32,
    /// Its instance id.
    pub(crate) instance: u64,
    /// Its host name.
    pub(crate) host: String,
    /// Its phase.
    pub(crate) doing: String,
    /// Time in this phase, seconds.
    pub(crate) doing_s: f64,
    /// Time since its last heartbeat, seconds.
    pub(crate) silent_s: f64,
    /// Tokens sampled since it was started.
    pub(crate) sampled_tokens: u64,
    /// The policy version that it serves, if it is a rollout worker.
    pub(crate) served_version: Option<u64>,
}

/// Called with the name of a lost worker, unless another worker has that name by now, and its instance id.
type OnLost = Box<dyn Fn(Option<&str>, u64) + Send + Sync>;

/// The registry.
pub(crate) struct WorkerRegistry {
    state: Mutex<RegistryState>,
    /// Releases the leases and the subscription of a lost worker.
    on_lost: OnceLock<OnLost>,
}

impl fmt::Debug for WorkerRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerRegistry").field("state", &self.state).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct RegistryState {
    workers: BTreeMap<String, RegisteredWorker>,
    /// Counters of workers that left, by instance; a worker that was only silent can return.
    gone: BTreeMap<u64, Progress>,
    /// The sum over earlier instances.
    long_gone: Option<Progress>,
    /// Instances that the run has excluded.
    excluded: BTreeSet<u64>,
    loads: BTreeMap<String, LoadCounts>,
    /// What workers have done and is not taken yet, by name.
    activity: BTreeMap<String, Activity>,
    /// The newest instance.
    instance: u64,
    /// Lost instances that `on_lost` has not been called with yet.
    left: Vec<(Option<String>, u64)>,
    stopping: bool,
}

#[derive(Debug)]
struct RegisteredWorker {
    beat: Heartbeat,
    heard: Instant,
    doing_since: Instant,
}

impl WorkerRegistry {
    /// A registry that counts instance ids from `instance` on. It must be larger than the ids of earlier processes of the
    /// run, so that workers which have not noticed a restart of the run can continue.
    pub(crate) fn after(instance: u64) -> Self {
        Self {
            state: Mutex::new(RegistryState { instance, ..RegistryState::default() }),
            on_lost: OnceLock::new(),
        }
    }

    /// Sets the function that is called for every lost worker. Only the first call counts.
    pub(crate) fn on_lost(&self, on_lost: impl Fn(Option<&str>, u64) + Send + Sync + 'static) {
        let _ = self.on_lost.set(Box::new(on_lost));
    }

    /// Registers a worker under `name`, or the first free name; replaces one of the same name. Returns name and instance id.
    ///
    /// # Errors
    /// An invalid name, too many workers.
    pub(crate) fn join(&self, role: WorkerRole, name: Option<String>) -> Result<(String, u64), JoinRefused> {
        name.as_deref().map_or(Ok(()), check_name)?;
        let mut state = self.state();
        state.check_capacity(name.as_deref())?;
        // The controller names its own workers otherwise.
        let mut names = (0..).map(|n| format!("guest {} {n}", role.as_str()));
        let name = name.or_else(|| names.find(|name| !state.workers.contains_key(name))).unwrap_or_default();
        state.leave(&name);
        state.instance += 1;
        let instance = state.instance;
        let beat = Heartbeat {
            name: name.clone(),
            role,
            instance,
            doing: "is starting".to_owned(),
            ..Heartbeat::default()
        };
        state.put(beat);
        self.notify(state);
        Ok((name, instance))
    }

    /// Excludes the worker `name`: its leases return to the buffer, and its next heartbeat is answered with stop.
    pub(crate) fn exclude(&self, name: &str) {
        let mut state = self.state();
        let Some(instance) = state.workers.get(name).map(|worker| worker.beat.instance) else { return };
        if state.excluded.len() == MAX_WORKERS {
            state.excluded.pop_first();
        }
        state.excluded.insert(instance);
        state.leave(name);
        self.notify(state);
    }

    /// Records a heartbeat. Registers a worker that is not known: the run may have been started again.
    ///
    /// # Errors
    /// An invalid name, too many workers.
    pub(crate) fn heartbeat(&self, beat: Heartbeat) -> Result<HeartbeatReply, JoinRefused> {
        check_name(&beat.name)?;
        let mut beat = beat.bounded();
        let mut state = self.state();
        state.check_capacity(Some(&beat.name))?;
        if state.excluded.contains(&beat.instance) {
            return Ok(HeartbeatReply { stop: true });
        }
        let known = state.workers.get(&beat.name).map(|worker| worker.beat.instance);
        if known.is_some_and(|known| known > beat.instance) {
            // Another worker has replaced it.
            return Ok(HeartbeatReply { stop: true });
        }
        let before = state.workers.get(&beat.name).map(|worker| (worker.beat.instance, worker.beat.number));
        if beat.number > 0 && before == Some((beat.instance, beat.number)) {
            // The answer was lost, and the counters are not.
            beat.rewards.clear();
            beat.activity = Activity::default();
        }
        for (name, counts) in &beat.rewards {
            if state.loads.len() >= MAX_REWARDS && !state.loads.contains_key(name) {
                continue;
            }
            state.loads.entry(name.clone()).or_default().add(counts.clone());
        }
        let (leaves, name) = (beat.leaves.then(|| beat.name.clone()), beat.name.clone());
        let activity = std::mem::take(&mut beat.activity);
        if state.activity.len() < MAX_WORKERS || state.activity.contains_key(&name) {
            state.activity.entry(name).or_default().append(activity);
        }
        state.put(beat);
        leaves.iter().for_each(|name| state.leave(name));
        let stop = state.stopping;
        self.notify(state);
        Ok(HeartbeatReply { stop })
    }

    /// Records that the process of a worker has ended, as its controller reports. A run that was started again may not know
    /// the worker; then `instance` names it.
    pub(crate) fn process_ended(&self, name: &str, pid: u32, instance: Option<u64>) {
        let mut state = self.state();
        match state.workers.get(name) {
            Some(worker) if worker.beat.pid == pid => state.leave(name),
            there => {
                let free = there.is_none().then(|| name.to_owned());
                let gone = instance.filter(|gone| there.is_none_or(|worker| worker.beat.instance != *gone));
                state.left.extend(gone.map(|gone| (free, gone)));
            }
        }
        self.notify(state);
    }

    /// The counters of all samplers, with those of the `local` one. `served` is the oldest version that a sampler serves.
    pub(crate) fn progress(&self, local: Option<Progress>) -> Progress {
        let state = self.state();
        let start = local.unwrap_or(Progress { served: PolicyVersion(u64::MAX), ..Progress::default() });
        let rollouts = state.workers.values().filter_map(|worker| worker.beat.progress.as_ref());
        let all = rollouts.fold(start, |all, progress| all.and(progress));
        let all = state.long_gone.iter().fold(all, |all, progress| all.and(progress));
        let with_gone = state.gone.values().fold(all, |all, progress| all.and(progress));
        Progress { served: all.served, ..with_gone }
    }

    /// The counters of all workers' rewards since the last call, by name.
    pub(crate) fn take_loads(&self) -> Vec<(String, LoadCounts)> {
        std::mem::take(&mut self.state().loads).into_iter().collect()
    }

    /// What the workers have done since the last call, by name.
    pub(crate) fn take_activity(&self) -> Vec<(String, Activity)> {
        std::mem::take(&mut self.state().activity).into_iter().collect()
    }

    /// The reward servers, by reward.
    pub(crate) fn servers(&self) -> BTreeMap<String, ModelServer> {
        self.state().workers.values().filter_map(|worker| worker.beat.serves.clone()).collect()
    }

    /// The status of every worker.
    pub(crate) fn members(&self) -> Vec<WorkerStatus> {
        let member = |worker: &RegisteredWorker| WorkerStatus {
            name: worker.beat.name.clone(),
            role: worker.beat.role,
            pid: worker.beat.pid,
            instance: worker.beat.instance,
            host: worker.beat.host.clone(),
            doing: worker.beat.doing.clone(),
            doing_s: worker.doing_since.elapsed().as_secs_f64(),
            silent_s: worker.heard.elapsed().as_secs_f64(),
            sampled_tokens: worker.beat.progress.map_or(0, |progress| progress.engine.sampled_tokens),
            served_version: worker.beat.progress.map(|progress| progress.served.0),
        };
        self.state().workers.values().map(member).collect()
    }

    /// Removes workers without a heartbeat for `limit`; their names.
    pub(crate) fn drop_silent(&self, limit: Duration) -> Vec<String> {
        let mut state = self.state();
        let silent = state.workers.iter().filter(|(_, worker)| worker.heard.elapsed() > limit);
        let silent: Vec<String> = silent.map(|(name, _)| name.clone()).collect();
        silent.iter().for_each(|name| state.leave(name));
        self.notify(state);
        silent
    }

    /// Answers every heartbeat with stop from now on, and waits up to `wait` until all workers have left.
    pub(crate) fn stop(&self, wait: Duration) {
        self.state().stopping = true;
        let deadline = Instant::now() + wait;
        // Ranks of the trainer end with rank 0.
        let stay = |state: &RegistryState| {
            state.workers.values().any(|worker| worker.beat.role != WorkerRole::Trainer)
        };
        while Instant::now() < deadline && stay(&self.state()) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Calls `on_lost` for lost workers, after the lock is released.
    fn notify(&self, mut state: MutexGuard<'_, RegistryState>) {
        let left = std::mem::take(&mut state.left);
        drop(state);
        if let Some(on_lost) = self.on_lost.get() {
            left.iter().for_each(|(name, instance)| on_lost(name.as_deref(), *instance));
        }
    }

    fn state(&self) -> MutexGuard<'_, RegistryState> {
        // A panic cannot leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn check_name(name: &str) -> Result<(), JoinRefused> {
    if (1..=MAX_NAME).contains(&name.len()) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    Err(JoinRefused::Name(name.chars().take(MAX_NAME).collect()))
}

impl Heartbeat {
    /// The heartbeat with texts cut to their limits and finite numbers.
    fn bounded(mut self) -> Self {
        let cut = |text: &mut String| *text = text.chars().take(MAX_TEXT).collect();
        cut(&mut self.host);
        cut(&mut self.doing);
        self.rewards.truncate(MAX_REWARDS);
        self.rewards.retain(|(name, _)| name.len() <= MAX_NAME);
        self.rewards.iter_mut().filter_map(|(_, counts)| counts.example.as_mut()).for_each(cut);
        self.activity = self.activity.bounded();
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

impl RegistryState {
    fn put(&mut self, beat: Heartbeat) {
        self.gone.remove(&beat.instance);
        let now = Instant::now();
        let before = self.workers.get(&beat.name).filter(|worker| worker.beat.doing == beat.doing);
        let doing_since = before.map_or(now, |worker| worker.doing_since);
        self.workers.insert(beat.name.clone(), RegisteredWorker { beat, heard: now, doing_since });
    }

    fn leave(&mut self, name: &str) {
        let Some(RegisteredWorker { beat, .. }) = self.workers.remove(name) else { return };
        self.left.push((Some(beat.name), beat.instance));
        self.gone.extend(beat.progress.map(|progress| (beat.instance, progress)));
        if self.gone.len() > MAX_WORKERS
            && let Some((_, first)) = self.gone.pop_first()
        {
            self.long_gone = Some(self.long_gone.map_or(first, |before| before.and(&first)));
        }
    }

    fn check_capacity(&self, name: Option<&str>) -> Result<(), JoinRefused> {
        let known = name.is_some_and(|name| self.workers.contains_key(name));
        if known || self.workers.len() < MAX_WORKERS { Ok(()) } else { Err(JoinRefused::TooMany) }
    }
}

#[cfg(test)]
mod tests {
    use ::rollout::EngineCounts;

    use super::*;

    fn beat(name: &str, instance: u64, tokens: u64) -> Heartbeat {
        let engine = EngineCounts { sampled_tokens: tokens, ..EngineCounts::default() };
        let progress = Progress { served: PolicyVersion(tokens), engine, ..Progress::default() };
        Heartbeat { name: name.to_owned(), instance, progress: Some(progress), ..Heartbeat::default() }
    }

    #[test]
    fn counts_only_go_up_while_workers_come_and_go() {
        let registry = WorkerRegistry::after(100);
        let gone = std::sync::Arc::new(Mutex::new(Vec::new()));
        let heard = std::sync::Arc::clone(&gone);
        registry.on_lost(move |_, instance| heard.lock().unwrap().push(instance));
        let sampled = || registry.progress(None).engine.sampled_tokens;
        let served = || registry.progress(None).served;
        assert_eq!(registry.join(WorkerRole::Rollout, None), Ok(("guest rollout 0".to_owned(), 101)));
        assert_eq!(registry.join(WorkerRole::Rollout, None), Ok(("guest rollout 1".to_owned(), 102)));
        assert_eq!(registry.heartbeat(beat("guest rollout 0", 101, 10)), Ok(HeartbeatReply::default()));
        registry.heartbeat(beat("guest rollout 1", 102, 20)).unwrap();
        assert_eq!((sampled(), served()), (30, PolicyVersion(10)));
        // Killed and started again: a new process under the old name begins at zero.
        assert_eq!(
            registry.join(WorkerRole::Rollout, Some("guest rollout 0".to_owned())),
            Ok(("guest rollout 0".to_owned(), 103))
        );
        assert_eq!((sampled(), served()), (30, PolicyVersion(20)));
        registry.heartbeat(beat("guest rollout 0", 103, 1)).unwrap();
        assert_eq!(sampled(), 31);
        // The earlier process of this name is stopped, and its samples are not counted twice.
        assert!(registry.heartbeat(beat("guest rollout 0", 101, 12)).unwrap().stop);
        assert_eq!(sampled(), 31);
        registry.heartbeat(Heartbeat { leaves: true, ..beat("guest rollout 1", 102, 25) }).unwrap();
        assert_eq!((sampled(), registry.members().len()), (36, 1));
        assert_eq!(registry.drop_silent(Duration::ZERO), ["guest rollout 0"]);
        assert_eq!((sampled(), served()), (36, PolicyVersion(u64::MAX)));
        // It was only slow: what it did is not counted again.
        registry.heartbeat(beat("guest rollout 0", 103, 4)).unwrap();
        assert_eq!(sampled(), 39);
        assert_eq!(*gone.lock().unwrap(), [101, 102, 103]);
        registry.process_ended("guest rollout 0", 9, Some(103));
        registry.process_ended("guest rollout 0", 9, Some(98));
        assert_eq!(registry.members().len(), 1, "another process than that one has ended");
        registry.process_ended("guest rollout 0", 0, None);
        assert_eq!(*gone.lock().unwrap(), [101, 102, 103, 98, 103]);
        registry.process_ended("rollout 1", 7, None);
        registry.process_ended("rollout 1", 7, Some(99));
        assert_eq!(*gone.lock().unwrap(), [101, 102, 103, 98, 103, 99], "a run before this one knew it");
    }

    #[test]
    fn loads_are_taken_once_and_all_workers_are_stopped() {
        let registry = WorkerRegistry::after(0);
        let counts = LoadCounts { scored: 2, ..LoadCounts::default() };
        for instance in 1..=2 {
            let rewards = vec![("math".to_owned(), counts.clone())];
            registry
                .heartbeat(Heartbeat { rewards, ..beat(&format!("rollout {instance}"), instance, 1) })
                .unwrap();
        }
        let loads = registry.take_loads();
        assert_eq!((loads.len(), loads[0].1.scored), (1, 4));
        assert!(registry.take_loads().is_empty());
        // The answer to the first of them was lost.
        let numbered = |number| {
            let rewards = vec![("math".to_owned(), counts.clone())];
            Heartbeat { rewards, number, ..beat("rollout 1", 1, 1) }
        };
        for number in [7, 7, 8] {
            registry.heartbeat(numbered(number)).unwrap();
        }
        assert_eq!(registry.take_loads()[0].1.scored, 4);
        registry.stop(Duration::ZERO);
        assert!(registry.heartbeat(beat("rollout 1", 1, 3)).unwrap().stop);
    }

    #[test]
    fn reports_of_workers_are_bounded() {
        let registry = WorkerRegistry::after(0);
        let long = "x".repeat(100_000);
        for name in [&long[..], "", "a\nb"] {
            assert!(matches!(
                registry.join(WorkerRole::Rollout, Some(name.to_owned())),
                Err(JoinRefused::Name(_))
            ));
            assert!(matches!(registry.heartbeat(beat(name, 1, 1)), Err(JoinRefused::Name(_))));
        }
        let counts = LoadCounts { example: Some(long.clone()), scored: u64::MAX, ..LoadCounts::default() };
        let rewards = (0..100).map(|n| (n.to_string(), counts.clone())).collect();
        let said = Heartbeat { host: long.clone(), doing: long.clone(), rewards, ..beat("a", 1, u64::MAX) };
        registry.heartbeat(said.clone()).unwrap();
        registry.heartbeat(Heartbeat { name: "b".to_owned(), instance: 2, ..said }).unwrap();
        let members = registry.members();
        assert!(members.iter().all(|member| member.host.len() + member.doing.len() == 2 * MAX_TEXT));
        assert_eq!(registry.progress(None).engine.sampled_tokens, u64::MAX, "nothing overflows");
        let loads = registry.take_loads();
        assert_eq!((loads.len(), loads[0].1.scored), (MAX_REWARDS, u64::MAX));
        assert!(loads.iter().all(|(_, load)| load.example.as_ref().unwrap().len() == MAX_TEXT));
        for n in 0..MAX_WORKERS - 2 {
            registry.join(WorkerRole::Rollout, Some(format!("w{n}"))).unwrap();
        }
        assert_eq!(registry.join(WorkerRole::Rollout, None), Err(JoinRefused::TooMany));
        assert_eq!(registry.heartbeat(beat("another", 9, 1)), Err(JoinRefused::TooMany));
        registry.heartbeat(beat("a", 1, u64::MAX)).unwrap();
        // A removed worker stays removed.
        registry.exclude("a");
        assert!(registry.heartbeat(beat("a", 1, 1)).unwrap().stop);
        assert_eq!(registry.members().len(), MAX_WORKERS - 1);
    }
}
