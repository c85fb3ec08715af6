//! The worker's side of the protocol: it joins a run, sends a heartbeat each second, and learns when to end.
//!
//! Invariant: a worker that cannot reach its run for its `--patience` ends with exit status 75: start it again. One whose run is done
//! ends with 0. A worker that the run does not know continues: the run was started again, and the next heartbeat registers the worker.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ::rewards::LoadCounts;
use ::rewards::reward_model::ModelServer;
use ::rollout::{Activity, Progress};
use buffer::BufferError;
use buffer::http::{Client, ClientConfig};
use model::DESCRIPTION_FILES;

use super::api::{JoinReply, JoinRequest, PROTOCOL, WorkerAssignment};
use super::pauses::PauseMonitor;
use super::permissions::Permissions;
use super::registry::{Heartbeat, HeartbeatReply, WorkerRole};
use crate::args::JoinArgs;
use crate::failure::Failure;
use crate::launchers::network::host_name;
use crate::lead_address::{JoinTarget, LeadAddress};
use crate::program::Program;
use crate::recipe::schema::RawRecipe;

/// Pause between two heartbeats.
const EVERY: Duration = Duration::from_secs(1);
/// Longest wait for a run that is done to be resumed with more steps, beside its workers.
const RESUMED: Duration = Duration::from_secs(15);
/// Pause between two looks at the stop flag.
const LOOK_UP: Duration = Duration::from_millis(50);
/// Timeout of a heartbeat; the next one carries the same counters and number.
const ANSWER: Duration = Duration::from_secs(5);
/// Longest name of a worker, bytes.
const MAX_NAME: usize = 512;
/// Lifetime of a lease whose worker is lost.
const HOLD: Duration = Duration::from_secs(15);

/// The state of a worker in a heartbeat.
pub(crate) trait WorkerReport: Send + 'static {
    /// Its phase, as the rest of a sentence.
    fn doing(&self) -> String;
    /// Its counters, if it samples.
    fn progress(&self) -> Option<Progress>;
    /// What it has done since the last call, if it samples.
    fn take_activity(&self) -> Activity {
        Activity::default()
    }
    /// The counters of its rewards since the last call.
    fn take_loads(&self) -> Vec<(String, LoadCounts)>;
    /// The reward that it serves, and the server's address.
    fn serves(&self) -> Option<(String, ModelServer)>;
}

/// A worker's membership in a run.
pub(crate) struct Membership {
    client: Arc<Client>,
    /// The client's configuration, for other connections to the run.
    pub(crate) config: ClientConfig,
    /// The answer of the run.
    pub(crate) joined: WorkerAssignment,
    role: WorkerRole,
    lost: Arc<Mutex<Option<BufferError>>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    patience: Duration,
}

/// The client for the routes of the run at `address`.
fn client_config(address: LeadAddress, patience: Duration) -> Result<ClientConfig, Failure> {
    let token = address.token_file.as_deref().map(|file| token(file, "writer")).transpose()?;
    Ok(ClientConfig { token, roots: address.tls_ca, patience, hold: HOLD, ..ClientConfig::new(address.url) })
}

/// The token of `role` in a file of lines `ROLE TOKEN`, that of an admin if there is none, or the only word of the file.
///
/// # Errors
/// A file that cannot be read or has neither.
pub(crate) fn token(file: &Path, role: &str) -> Result<String, Failure> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| Failure::System { what: format!("read {}", file.display()), source })?;
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let of = |role: &str| lines().find_map(|line| Some(line.strip_prefix(role)?.strip_prefix(' ')?.trim()));
    let alone = || lines().next().filter(|line| !line.contains(char::is_whitespace));
    of(role).or_else(|| of("admin")).or_else(alone).map(str::to_owned).ok_or_else(|| {
        Failure::Argument(format!(
            "{}: it has neither a line `{role} TOKEN` nor `admin TOKEN`, nor a token alone",
            file.display()
        ))
    })
}

/// A shared secret of the processes of a run, derived from its token for one `purpose`. Without a token every process of this
/// machine may connect.
pub(crate) fn derived(token: Option<&str>, purpose: &str) -> Option<String> {
    token.map(|token| blake3::Hash::from(blake3::derive_key(purpose, token.as_bytes())).to_string())
}

impl Membership {
    /// Joins the run once it can be reached and is ready; `None` if `stop` is set before, or the run is done.
    ///
    /// # Errors
    /// A run that cannot be reached in time, or refuses this worker.
    pub(crate) fn join(
        role: WorkerRole,
        args: &JoinArgs,
        program: &Program,
        stop: &Arc<AtomicBool>,
    ) -> Result<Option<Self>, Failure> {
        let target = JoinTarget::of(args, program.environment())?;
        let join = JoinRequest { protocol: PROTOCOL, role, name: args.name.clone() };
        let patience = Duration::from_secs_f64(args.patience);
        let mut heard = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let Some(address) = target.address()? else {
                if heard.elapsed() > patience.min(RESUMED) && target.is_done() {
                    eprintln!("{target} is done: nothing is left to do");
                    return Ok(None);
                }
                if heard.elapsed() > patience {
                    return Err(Failure::Requeue(format!(
                        "{target} had no address for {:.0} s",
                        args.patience
                    )));
                }
                pause(EVERY, stop);
                continue;
            };
            let config = client_config(address, patience)?;
            let config = ClientConfig { give_up: Some(Arc::clone(stop)), ..config };
            let client = Arc::new(Client::new(config.clone())?);
            match client.ask_once("/v1/run/join", &join, ANSWER) {
                Ok(JoinReply { joined: Some(joined), .. }) if !is_plain(&joined.name) => {
                    return Err(Failure::Argument(format!(
                        "the run calls this worker {:.100?}, which is no name; it may be another version of rlrun",
                        joined.name
                    )));
                }
                Ok(JoinReply { joined: Some(joined), .. }) => {
                    let (lost, over) = (Arc::default(), Arc::default());
                    let thread = None;
                    return Ok(Some(Self { client, config, joined, role, lost, over, thread, patience }));
                }
                // The run answers; a warm-up may take longer than the patience.
                Ok(JoinReply { joined: None, .. }) => heard = Instant::now(),
                Err(error @ (BufferError::Unreachable { .. } | BufferError::Unclear { .. }))
                    if heard.elapsed() < patience =>
                {
                    drop(error);
                }
                Err(error) => return Err(away(error)),
            }
            pause(EVERY, stop);
        }
        Ok(None)
    }

    /// The token for the run, if it has one.
    pub(crate) fn token(&self) -> Option<&str> {
        self.config.token.as_deref()
    }

    /// The URL of the run.
    pub(crate) fn url(&self) -> &str {
        &self.config.url
    }

    /// The buffer of the run.
    pub(crate) fn buffer(&self) -> Arc<Client> {
        Arc::clone(&self.client)
    }

    /// The recipe of the run, not validated, for roles that read single values of it. No file that it names is opened.
    ///
    /// # Errors
    /// A recipe of another version of rlrun.
    pub(crate) fn raw_recipe(&self) -> Result<RawRecipe, Failure> {
        toml::from_str(&self.joined.recipe).map_err(|error| {
            Failure::Argument(format!("the run sent what is no recipe of this rlrun: {}", error.message()))
        })
    }

    /// Writes the recipe, with the values that `permissions` leave to the run, and the model's files to the new directory
    /// `scratch`; returns their paths.
    ///
    /// # Errors
    /// Values that only the operator of this machine may choose, files that describe no model, a directory that cannot be
    /// written.
    pub(crate) fn unpack(
        &self,
        permissions: &Permissions,
        scratch: &Path,
    ) -> Result<(PathBuf, PathBuf), Failure> {
        let (recipe, model) = (scratch.join("recipe.toml"), scratch.join("model"));
        let settled = permissions.settle(&self.joined.recipe, &model)?;
        let files = &self.joined.model.files;
        if let Some(name) = files.keys().find(|name| !DESCRIPTION_FILES.contains(&&name[..])) {
            return Err(Failure::Argument(format!(
                "the run sent a file {name:?}, which describes no model; it may be another version of rlrun"
            )));
        }
        let failed = |source| Failure::System { what: format!("write in {}", scratch.display()), source };
        std::fs::create_dir(&model).map_err(failed)?;
        std::fs::write(&recipe, settled).map_err(failed)?;
        for (name, text) in files {
            std::fs::write(model.join(name), text).map_err(failed)?;
        }
        Ok((recipe, model))
    }

    /// Starts the heartbeat thread; it sets `stop` when the run stops this worker or cannot be reached for too long.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub(crate) fn start_heartbeat(
        &mut self,
        report: impl WorkerReport,
        stop: Arc<AtomicBool>,
    ) -> Result<(), Failure> {
        let heartbeat = HeartbeatThread {
            client: Arc::clone(&self.client),
            beat: Heartbeat {
                name: self.joined.name.clone(),
                role: self.role,
                instance: self.joined.instance,
                pid: std::process::id(),
                host: host_name(),
                ..Heartbeat::default()
            },
            lost: Arc::clone(&self.lost),
            over: Arc::clone(&self.over),
            patience: self.patience,
        };
        let work = move || heartbeat.run(&report, &stop);
        let system =
            |source| Failure::System { what: "start the thread that reports to the run".to_owned(), source };
        self.thread =
            Some(std::thread::Builder::new().name("heartbeat".to_owned()).spawn(work).map_err(system)?);
        Ok(())
    }

    /// Leaves the run; returns the result of the worker, which is `work` unless the run was lost.
    pub(crate) fn leave(mut self, work: Result<(), Failure>) -> Result<(), Failure> {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner).take();
        lost.map_or_else(|| work.map_err(requeue), |lost| Err(away(lost)))
    }
}

/// Whether it can be printed and used in a file name.
fn is_plain(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && !name.chars().any(|c| c.is_control() || c == '/')
}

/// An unreachable run may be started again, and so should this worker; also one that serves a later version than a run that was
/// started again from an older checkpoint.
fn away(error: BufferError) -> Failure {
    match error {
        BufferError::Unreachable { .. } | BufferError::Unclear { .. } | BufferError::FutureVersion { .. } => {
            Failure::Requeue(error.to_string())
        }
        error => error.into(),
    }
}

/// [`away`] for errors that a role has wrapped.
fn requeue(failure: Failure) -> Failure {
    match failure {
        Failure::Buffer(error) | Failure::Rollout(rollout::RolloutError::Buffer(error)) => away(error),
        failure => failure,
    }
}

/// Waits for `wait`, or until `end` is set.
fn pause(wait: Duration, end: &AtomicBool) {
    let next = Instant::now() + wait;
    while Instant::now() < next && !end.load(Ordering::Relaxed) {
        std::thread::sleep(LOOK_UP);
    }
}

/// What a worker did, for one heartbeat.
#[derive(Debug, Default)]
struct DoneWork {
    rewards: BTreeMap<String, LoadCounts>,
    activity: Activity,
}

impl DoneWork {
    /// Adds the counters of rewards, of which those of a reward become one.
    fn add_loads(&mut self, loads: Vec<(String, LoadCounts)>) {
        for (name, counts) in loads {
            let sum = self.rewards.entry(name).or_default();
            // These two are of now, the others since the last call.
            (sum.waiting, sum.running) = (0, 0);
            sum.add(counts);
        }
    }
}

/// The heartbeat thread of a worker.
struct HeartbeatThread {
    client: Arc<Client>,
    beat: Heartbeat,
    lost: Arc<Mutex<Option<BufferError>>>,
    over: Arc<AtomicBool>,
    patience: Duration,
}

impl HeartbeatThread {
    fn run(mut self, report: &impl WorkerReport, stop: &AtomicBool) {
        let mut heard = Instant::now();
        let mut done = DoneWork::default();
        let mut is_acknowledged = true;
        let pauses = PauseMonitor::start();
        loop {
            let leaves = self.over.load(Ordering::Relaxed);
            done.add_loads(report.take_loads());
            done.activity.append(report.take_activity());
            let (doing, progress) = (report.doing(), report.progress());
            if progress.is_some() {
                done.activity.append(Activity { phases: pauses.take(), ..Activity::default() });
            }
            if is_acknowledged {
                // What the run may have counted is sent unchanged, with its number, until it is acknowledged.
                let DoneWork { rewards, activity } = std::mem::take(&mut done);
                let number = self.beat.number + 1;
                self.beat =
                    Heartbeat { number, rewards: rewards.into_iter().collect(), activity, ..self.beat };
            }
            self.beat = Heartbeat { doing, progress, serves: report.serves(), leaves, ..self.beat };
            match self.client.ask_once::<HeartbeatReply>("/v1/run/beat", &self.beat, ANSWER) {
                Ok(orders) => {
                    heard = Instant::now();
                    is_acknowledged = true;
                    if orders.stop {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
                Err(error) if heard.elapsed() > self.patience => {
                    *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    stop.store(true, Ordering::Relaxed);
                    return;
                }
                Err(_) => is_acknowledged = false,
            }
            if leaves {
                return;
            }
            pause(EVERY, &self.over);
        }
    }
}

#[cfg(test)]
mod tests {
    use trajectory::PolicyVersion;

    use super::*;

    #[test]
    fn counters_of_an_outage_become_one_for_each_reward() {
        let mut done = DoneWork::default();
        for second in 1..=3600 {
            let counts = LoadCounts { waiting: second, scored: 2, ..LoadCounts::default() };
            done.add_loads(vec![("math".to_owned(), counts.clone()), ("code".to_owned(), counts)]);
        }
        let counts = |name: &str| (done.rewards[name].waiting, done.rewards[name].scored);
        assert_eq!((done.rewards.len(), counts("math"), counts("code")), (2, (3600, 7200), (3600, 7200)));
    }

    #[test]
    fn a_worker_that_is_ahead_of_its_run_is_started_again() {
        let ahead = BufferError::FutureVersion { version: PolicyVersion(7), known: PolicyVersion(5) };
        let failure = requeue(Failure::Rollout(rollout::RolloutError::Buffer(ahead)));
        assert!(matches!(failure, Failure::Requeue(_)), "{failure}");
    }
}
