//! The side of a worker: it joins a run, says each second what it does, and hears when to end.
//!
//! Invariant: a worker that cannot reach its run for as long as it is patient ends, and says that it can be started again
//! (exit status 75). One that the run does not know any more goes on: the run was started again and hears of it by its
//! next word.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ::rewards::LoadCounts;
use ::rewards::reward_model::ModelServer;
use ::rollout::Progress;
use buffer::BufferError;
use buffer::http::{Client, ClientConfig};

use super::permissions::Permissions;
use super::roster::{Beat, Orders, Role};
use super::routes::{Answer, DESCRIBING, Join, Joined, PROTOCOL};
use crate::args::JoinArgs;
use crate::failure::Failure;
use crate::recipe::schema::RawRecipe;

/// How often a worker says what it does.
const EVERY: Duration = Duration::from_secs(1);
/// How often it looks whether it should end meanwhile.
const LOOK_UP: Duration = Duration::from_millis(50);
/// Longest time for one word; the next one says the same.
const ANSWER: Duration = Duration::from_secs(5);
/// Longest name of a worker, bytes.
const MAX_NAME: usize = 512;
/// How soon others do what a worker began that is gone.
const HOLD: Duration = Duration::from_secs(15);

/// What a worker says of itself when it is asked.
pub(crate) trait Account: Send + 'static {
    /// What it does just now, as the rest of a sentence.
    fn doing(&self) -> String;
    /// What it has done, if it samples.
    fn progress(&self) -> Option<Progress>;
    /// What its rewards had to do since this was asked last.
    fn take_loads(&self) -> Vec<(String, LoadCounts)>;
    /// The reward that it serves, and where.
    fn serves(&self) -> Option<(String, ModelServer)>;
}

/// A place in a run.
pub(crate) struct Membership {
    client: Arc<Client>,
    token: Option<String>,
    /// What the run says.
    pub(crate) joined: Joined,
    role: Role,
    lost: Arc<Mutex<Option<BufferError>>>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    patience: Duration,
}

/// How to reach a run.
pub(crate) fn client_config(args: &JoinArgs) -> Result<ClientConfig, Failure> {
    let token = args.token_file.as_deref().map(|file| token(file, "writer")).transpose()?;
    let patience = Duration::from_secs_f64(args.patience);
    let roots = args.tls_ca.clone();
    Ok(ClientConfig { token, roots, patience, hold: HOLD, ..ClientConfig::new(args.join.clone()) })
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

/// What processes of a run prove to each other that they know, made of its token for one `purpose`. Without a token anybody
/// on this machine may come.
pub(crate) fn derived(token: Option<&str>, purpose: &str) -> Option<String> {
    token.map(|token| blake3::Hash::from(blake3::derive_key(purpose, token.as_bytes())).to_string())
}

impl Membership {
    /// Joins the run, as soon as it can be reached and is ready; `None` if `stop` is set before.
    ///
    /// # Errors
    /// A run that cannot be reached in time, or does not want this worker.
    pub(crate) fn join(role: Role, args: &JoinArgs, stop: &Arc<AtomicBool>) -> Result<Option<Self>, Failure> {
        let config = ClientConfig { give_up: Some(Arc::clone(stop)), ..client_config(args)? };
        let token = config.token.clone();
        let client = Arc::new(Client::new(config)?);
        let join = Join { protocol: PROTOCOL, role, name: args.name.clone() };
        let patience = Duration::from_secs_f64(args.patience);
        let mut heard = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            match client.ask_once("/v1/run/join", &join, ANSWER) {
                Ok(Answer { joined: Some(joined), .. }) if !is_plain(&joined.name) => {
                    return Err(Failure::Argument(format!(
                        "the run calls this worker {:.100?}, which is no name; it may be another version of rlrun",
                        joined.name
                    )));
                }
                Ok(Answer { joined: Some(joined), .. }) => {
                    let (lost, over) = (Arc::default(), Arc::default());
                    let thread = None;
                    return Ok(Some(Self { client, token, joined, role, lost, over, thread, patience }));
                }
                // However long a warm-up takes, that is not for want of a run.
                Ok(Answer { joined: None, .. }) => heard = Instant::now(),
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

    /// What the run wants to hear, if anything.
    pub(crate) fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// The buffer of the run.
    pub(crate) fn buffer(&self) -> Arc<Client> {
        Arc::clone(&self.client)
    }

    /// The recipe of the run as it was written, for roles that read single values of it. Nothing that it names is opened.
    ///
    /// # Errors
    /// It is no recipe of this rlrun.
    pub(crate) fn raw_recipe(&self) -> Result<RawRecipe, Failure> {
        toml::from_str(&self.joined.recipe).map_err(|error| {
            Failure::Argument(format!("the run sent what is no recipe of this rlrun: {}", error.message()))
        })
    }

    /// Writes the recipe, as far as `permissions` let the run decide it, and the files of the model to `scratch`, a fresh
    /// directory; their places.
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
        if let Some(name) = files.keys().find(|name| !DESCRIBING.contains(&&name[..])) {
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

    /// Begins to say what `account` says, each second; sets `stop` when the run wants this worker to end, or is away for
    /// too long.
    ///
    /// # Errors
    /// A system without room for a thread.
    pub(crate) fn begin(&mut self, account: impl Account, stop: Arc<AtomicBool>) -> Result<(), Failure> {
        let beats = Beats {
            client: Arc::clone(&self.client),
            beat: Beat {
                name: self.joined.name.clone(),
                role: self.role,
                instance: self.joined.instance,
                pid: std::process::id(),
                host: host(),
                ..Beat::default()
            },
            lost: Arc::clone(&self.lost),
            over: Arc::clone(&self.over),
            patience: self.patience,
        };
        let work = move || beats.go(&account, &stop);
        let system =
            |source| Failure::System { what: "start the thread that reports to the run".to_owned(), source };
        self.thread = Some(std::thread::Builder::new().name("beats".to_owned()).spawn(work).map_err(system)?);
        Ok(())
    }

    /// Leaves the run, and says how the worker ended that did `work` in it.
    pub(crate) fn leave(mut self, work: Result<(), Failure>) -> Result<(), Failure> {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner).take();
        lost.map_or_else(|| work.map_err(requeue), |lost| Err(away(lost)))
    }
}

/// Whether it can be printed and be part of the name of a file.
fn is_plain(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && !name.chars().any(|c| c.is_control() || c == '/')
}

/// A run that cannot be reached may come again.
fn away(error: BufferError) -> Failure {
    match error {
        BufferError::Unreachable { .. } | BufferError::Unclear { .. } => Failure::Requeue(error.to_string()),
        error => error.into(),
    }
}

/// The same of what is wrapped in the error of a role.
fn requeue(failure: Failure) -> Failure {
    match failure {
        Failure::Buffer(error) | Failure::Rollout(rollout::RolloutError::Buffer(error)) => away(error),
        failure => failure,
    }
}

/// Waits for so long, or until `end` is set.
fn pause(wait: Duration, end: &AtomicBool) {
    let next = Instant::now() + wait;
    while Instant::now() < next && !end.load(Ordering::Relaxed) {
        std::thread::sleep(LOOK_UP);
    }
}

/// Name of this machine; as good as none where the system does not say.
fn host() -> String {
    let name = ["/proc/sys/kernel/hostname", "/etc/hostname"]
        .iter()
        .find_map(|file| std::fs::read_to_string(file).ok());
    name.map_or_else(|| "this machine".to_owned(), |name| name.trim().to_owned())
}

/// The thread that says what a worker does.
struct Beats {
    client: Arc<Client>,
    beat: Beat,
    lost: Arc<Mutex<Option<BufferError>>>,
    over: Arc<AtomicBool>,
    patience: Duration,
}

impl Beats {
    fn go(mut self, account: &impl Account, stop: &AtomicBool) {
        let mut heard = Instant::now();
        // What was not heard is said again.
        let mut unheard: Vec<(String, LoadCounts)> = Vec::new();
        loop {
            let leaves = self.over.load(Ordering::Relaxed);
            unheard.extend(account.take_loads());
            let (doing, progress) = (account.doing(), account.progress());
            let serves = account.serves();
            self.beat = Beat { doing, progress, serves, leaves, rewards: unheard.clone(), ..self.beat };
            match self.client.ask_once::<Orders>("/v1/run/beat", &self.beat, ANSWER) {
                Ok(orders) => {
                    heard = Instant::now();
                    unheard.clear();
                    if orders.stop {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
                Err(error) if heard.elapsed() > self.patience => {
                    *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    stop.store(true, Ordering::Relaxed);
                    return;
                }
                Err(_) => {}
            }
            if leaves {
                return;
            }
            pause(EVERY, &self.over);
        }
    }
}
