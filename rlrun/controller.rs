//! The controller of a run whose roles are separate processes (`placement.processes`).
//!
//! ```text
//! controller -- owns the sockets, starts and watches --> lead (buffer, trainer, weights, report) on its socket
//!                                                    \-> rollout 0, rollout 1, ... (join over that socket)
//!                                                    \-> reward NAME, ... (the same, and serve on theirs)
//! ```
//!
//! The controller starts the processes of a run, detects those that die or stop answering, restarts them within a budget,
//! and stops all of them. It owns the listening sockets, so connections wait while a server restarts instead of being
//! refused.
//!
//! Invariant: no data of the run passes through the controller, and it has no state that a crash could lose. If it is
//! killed, its children notice it, save and end; `rlrun resume` continues the run.

mod child;
mod health;

use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use crate::args::Loudness;
use crate::credentials::{Credentials, ServerAccess};
use crate::failure::{Failure, REQUEUE};
use crate::pipeline::Ending;
use crate::recipe::Recipe;
use crate::recipe::words::Ranks;
use crate::run_dir::{JsonLines, RunDir};
use crate::signals::{INTERRUPTED, Signals};
use crate::workers::registry::WorkerRole;
use crate::workers::reward::is_served;
use child::{Child, ExitReason};
use health::Health;

/// How often it looks.
const EVERY: Duration = Duration::from_millis(20);
/// How long samplers may take to end when the lead has ended; they have nothing to save.
const LEAVING: Duration = Duration::from_secs(10);
/// In which time restarts are counted.
const WINDOW: Duration = Duration::from_secs(600);
/// Name of the process that leads.
const LEAD: &str = "the trainer";

/// Runs `recipe` in `run_dir` as processes.
///
/// # Errors
/// Whatever ended the run; a process that cannot be kept alive.
pub(crate) fn run(recipe: &Recipe, run_dir: RunDir, loudness: Loudness) -> Result<Ending, Failure> {
    let path = std::path::absolute(run_dir.path()).map_err(system("find the run directory"))?;
    let events = JsonLines::open(&run_dir.logs().join("controller.jsonl"), None)?;
    let recipe_file =
        std::path::absolute(run_dir.resolved_recipe()).map_err(system("find the recipe of the run"))?;
    // The lead holds it.
    drop(run_dir);
    let signals = Signals::listen_with_children()?;
    let listen = recipe.buffer.listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0)));
    let listener = TcpListener::bind(listen).map_err(system(&format!("listen on {listen}")))?;
    let address = listener.local_addr().map_err(system("read the address of the run's socket"))?;
    let access = ServerAccess::of(&recipe.buffer, address, &path)?;
    // On loopback too: the processes of other users could connect.
    let own = Credentials::of_run(&path);
    let token_file = access.token_file.clone().map_or_else(|| own.tokens(), Ok)?;
    let ca = access.ca()?;
    let scheme = if ca.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{}", reachable(address));
    let program = std::env::current_exe().map_err(system("find the program that is running"))?;
    let shares = Shares::of(recipe);
    let workers = workers(recipe)?;
    let start = Start {
        program,
        path,
        recipe_file,
        url,
        token_file,
        ca,
        listener,
        workers,
        shares,
        loudness,
        recipe,
    };
    let health = Health::start(&start.url, &start.token_file, start.ca.as_deref())?;
    Controller { start: &start, events, health, lead: None, workers: Vec::new(), began: Instant::now() }
        .go(&signals)
}

/// An address that listens everywhere is reached on loopback.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => SocketAddr::from(([127, 0, 0, 1], v4.port())),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => {
            SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, v6.port()))
        }
        address => address,
    }
}

fn system(what: &str) -> impl FnOnce(std::io::Error) -> Failure + use<> {
    let what = what.to_owned();
    move |source| Failure::System { what, source }
}

/// A worker that a run has.
enum ChildWorker {
    Rollout(usize),
    /// This rank of the trainer; the lead is the first.
    Rank(usize),
    /// The reward of this name, on this socket.
    Reward(String, TcpListener),
}

/// The processes of the recipe in the order of their start: the lead waits for rewards.
fn workers(recipe: &Recipe) -> Result<Vec<ChildWorker>, Failure> {
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let reward = |spec: &rewards::RewardSpec| {
        let socket = TcpListener::bind(loopback).map_err(system("listen on a port of loopback"))?;
        Ok(ChildWorker::Reward(spec.name().to_owned(), socket))
    };
    let rewards = recipe.rewards.iter().filter(|spec| is_served(spec)).map(reward);
    let ranks = if recipe.trainer.ranks == Ranks::Processes { 1..recipe.trainer.world } else { 0..0 };
    let ranks = ranks.map(|rank| Ok(ChildWorker::Rank(rank)));
    let rollouts = (0..recipe.rollout_workers()).map(|number| Ok(ChildWorker::Rollout(number)));
    rewards.chain(ranks).chain(rollouts).collect()
}

/// SharedCores of every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shares {
    rollout: usize,
    lead: usize,
}

impl Shares {
    fn of(recipe: &Recipe) -> Self {
        let ranks = if recipe.trainer.ranks == Ranks::Processes { recipe.trainer.world } else { 1 };
        let (all, rollouts) = (model::SharedCores::all().total(), recipe.rollout_workers());
        let rollout = recipe.placement.rollout_threads.unwrap_or((all / (rollouts + ranks)).max(1));
        let rest = (all.saturating_sub(rollout * rollouts) / ranks).max(1);
        Self { rollout, lead: recipe.placement.trainer_threads.unwrap_or(rest) }
    }
}

/// How processes are started.
struct Start<'a> {
    program: PathBuf,
    path: PathBuf,
    /// The recipe of the run, every value spelled out.
    recipe_file: PathBuf,
    url: String,
    token_file: PathBuf,
    /// The certificate to trust, if the run encrypts.
    ca: Option<PathBuf>,
    listener: TcpListener,
    workers: Vec<ChildWorker>,
    shares: Shares,
    loudness: Loudness,
    recipe: &'a Recipe,
}

impl Start<'_> {
    fn lead(&self) -> Result<Child, Failure> {
        let mut args =
            vec!["worker".into(), "lead".into(), "--run".into(), self.path.clone().into_os_string()];
        args.extend(["--token-file".into(), self.token_file.clone().into_os_string()]);
        args.extend(["--threads".into(), self.shares.lead.to_string().into()]);
        args.extend(self.loudness.quiet.then(|| "--quiet".into()));
        let width = self.loudness.width.map(|width| ["--width".into(), width.to_string().into()]);
        args.extend(width.into_iter().flatten());
        let socket = self.listener.try_clone().map_err(system("share the run's socket"))?;
        Child::start(LEAD, &self.program, args, child::Output::Terminal { socket })
    }

    fn worker(&self, number: usize) -> Result<Child, Failure> {
        let (name, mut args, socket) = match &self.workers[number] {
            ChildWorker::Rollout(number) => {
                let threads = self.shares.rollout.to_string();
                let mut args: Vec<OsString> = vec!["rollout".into(), "--threads".into(), threads.into()];
                let devices = self.recipe.placement.rollout_devices.as_ref();
                if let Some(device) = devices.and_then(|devices| devices.get(*number)) {
                    args.extend(["--device".into(), device.to_string().into()]);
                }
                (format!("rollout {number}"), args, None)
            }
            ChildWorker::Rank(rank) => {
                let (rank, threads) = (rank.to_string(), self.shares.lead.to_string());
                let args = ["trainer", "--rank", &rank, "--threads", &threads].map(OsString::from);
                (format!("trainer {rank}"), args.to_vec(), None)
            }
            ChildWorker::Reward(reward, socket) => {
                let args = vec!["reward".into(), "--socket".into(), "--reward".into(), reward.into()];
                let socket = socket.try_clone().map_err(system("share the socket of a reward"))?;
                (format!("reward {reward}"), args, Some(socket))
            }
        };
        args.insert(0, "worker".into());
        args.extend(["--join".into(), (&self.url).into()]);
        args.extend(["--token-file".into(), self.token_file.clone().into_os_string()]);
        args.extend(["--name".into(), (&name).into()]);
        if !matches!(self.workers[number], ChildWorker::Rank(_)) {
            // The owner of the recipe may use every file of this machine.
            args.extend(["--recipe".into(), self.recipe_file.clone().into_os_string()]);
        }
        args.extend(["--patience".into(), self.recipe.deadlines.wait_s.to_string().into()]);
        if let Some(certificate) = &self.ca {
            args.extend(["--tls-ca".into(), certificate.clone().into_os_string()]);
        }
        let file = name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        let log = self.path.join("logs").join(format!("{file}.log"));
        Child::start(&name, &self.program, args, child::Output::Log { path: log, socket })
    }
}

struct Controller<'a> {
    start: &'a Start<'a>,
    events: JsonLines,
    health: Health,
    lead: Option<Child>,
    workers: Vec<Child>,
    began: Instant,
}

impl Controller<'_> {
    fn go(mut self, signals: &Signals) -> Result<Ending, Failure> {
        let lead = self.start.lead()?;
        self.event("start", LEAD, &json!({ "pid": lead.pid(), "url": self.start.url }))?;
        self.lead = Some(lead);
        let ended = self.watch(signals);
        if let Some(lead) = &mut self.lead {
            // The lead saves, and may need the other ranks for that.
            lead.signal(Signal::TERM);
            lead.end_by(Instant::now() + self.start.recipe.wait(), signals.at_once());
        }
        // Other processes have nothing to save: unfinished work is repeated.
        let deadline = Instant::now() + LEAVING;
        self.workers.iter().for_each(|worker| worker.signal(Signal::TERM));
        self.workers.iter_mut().for_each(|worker| worker.end_by(deadline, signals.at_once()));
        if signals.at_once().load(Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
        ended
    }

    fn watch(&mut self, signals: &Signals) -> Result<Ending, Failure> {
        let mut stopping = false;
        loop {
            std::thread::sleep(EVERY);
            if signals.at_once().load(Ordering::Relaxed) {
                return Ok(Ending::Stopped);
            }
            if signals.stop_requested() && !stopping {
                stopping = true;
                let signal = if signals.terminated() { Signal::TERM } else { Signal::INT };
                self.lead.iter().for_each(|lead| lead.signal(signal));
            }
            if let Some(ending) = self.look_at_lead(signals, stopping)? {
                return Ok(ending);
            }
            if stopping || !self.health.has_answered() {
                continue;
            }
            if self.workers.len() < self.start.workers.len() {
                let worker = self.start.worker(self.workers.len())?;
                self.event("start", worker.name(), &json!({ "pid": worker.pid() }))?;
                self.workers.push(worker);
            }
            for number in 0..self.workers.len() {
                self.look_at_worker(number)?;
            }
        }
    }

    /// Whether the lead has ended, and how.
    fn look_at_lead(&mut self, signals: &Signals, stopping: bool) -> Result<Option<Ending>, Failure> {
        let limit = Duration::from_secs_f64(self.start.recipe.deadlines.heartbeat_s);
        let Some(lead) = &mut self.lead else { return Ok(None) };
        let Some(ended) = lead.ended()? else {
            if self.health.answered_after(lead.started()) {
                let recovered = lead.recovered();
                self.recovered(LEAD, recovered)?;
            }
            let wait = self.start.recipe.wait();
            if let Some(lead) = &mut self.lead {
                let (silent, limit) = match self.health.silent_since_answer() {
                    Some(silent) => (silent, limit),
                    // The lead opens its listener before anything that takes long.
                    None => (lead.started().elapsed(), wait.max(limit)),
                };
                if silent > limit {
                    // It may be stopped, or hang; the run makes no progress without it.
                    lead.kill(&format!("did not answer for {:.0} s", silent.as_secs_f64()));
                    self.health.forget();
                }
            }
            return Ok(None);
        };
        match ended.code() {
            Some(0) if stopping => return Ok(Some(Ending::Stopped)),
            Some(0) => return Ok(Some(Ending::Done)),
            Some(code) if code == i32::from(REQUEUE) && stopping => {
                return Ok(Some(if signals.terminated() { Ending::Requeued } else { Ending::Stopped }));
            }
            // Its reason was printed. A panic is no outcome.
            Some(code @ 1..=2) => return Err(Failure::ChildFailed(u8::try_from(code).unwrap_or(1))),
            _ if stopping => return Err(Failure::Died { name: LEAD.to_owned(), how: ended.to_string() }),
            _ => {}
        }
        self.died(LEAD, &ended)?;
        let again = self.start.lead()?;
        self.event("start", LEAD, &json!({ "pid": again.pid() }))?;
        self.health.forget();
        self.workers.iter_mut().for_each(Child::forgotten);
        self.lead = self.lead.take().map(|lead| lead.replaced_by(again));
        Ok(None)
    }

    fn look_at_worker(&mut self, number: usize) -> Result<(), Failure> {
        let limit = Duration::from_secs_f64(self.start.recipe.deadlines.heartbeat_s);
        let worker = &mut self.workers[number];
        let name = worker.name().to_owned();
        if let Some(ended) = worker.ended()? {
            if ended.code() == Some(0) && worker.last_heard().is_some() {
                // The run has ended and the worker with it, or a user has stopped the worker.
                return Ok(());
            }
            if ended.code() == Some(0) {
                // A lead that has ended since has stopped it.
                return self.start_again(number, false);
            }
            if ended.code() == Some(2) {
                return Err(Failure::Died { name, how: format!("{ended}: {}", worker.last_words()) });
            }
            self.health.ended(worker);
            self.died(&name, &ended)?;
            return self.start_again(number, true);
        }
        let member = self.health.member(&name, worker.pid());
        if let Some((member, asked)) = &member {
            let then = asked.checked_sub(Duration::from_secs_f64(member.silent_s)).unwrap_or(*asked);
            worker.heard(then, member.instance);
        }
        // The lead deregisters silent workers, and a restarted lead does not know them.
        let since = match (worker.last_heard(), self.health.first_answer()) {
            (Some(heard), Some(first)) => Some(heard.max(first)),
            (None, Some(first)) if first > worker.started() => Some(first),
            _ => None,
        };
        if let Some(silent) = since.map(|since| since.elapsed()).filter(|silent| *silent > limit) {
            worker.kill(&format!("said nothing for {:.0} s", silent.as_secs_f64()));
        } else if member
            .is_some_and(|(member, _)| member.sampled_tokens > 0 || member.role != WorkerRole::Rollout)
        {
            let recovered = worker.recovered();
            return self.recovered(&name, recovered);
        }
        Ok(())
    }

    /// Starts a worker that replaces one that has ended.
    fn start_again(&mut self, number: usize, missed: bool) -> Result<(), Failure> {
        let again = self.start.worker(number)?;
        self.event("start", again.name(), &json!({ "pid": again.pid() }))?;
        let worker = self.workers.remove(number);
        let worker = if missed { worker.replaced_by(again) } else { worker.followed_by(again) };
        self.workers.insert(number, worker);
        Ok(())
    }

    /// Writes down that a process has died, and refuses to go on if that happens too often.
    fn died(&mut self, name: &str, ended: &ExitReason) -> Result<(), Failure> {
        self.event("died", name, &json!({ "how": ended.to_string() }))?;
        let child = self.lead.iter_mut().chain(&mut self.workers).find(|child| child.name() == name);
        let Some(child) = child else { return Ok(()) };
        let (restarts, allowed) = (child.count_restart(WINDOW), self.start.recipe.restarts());
        if restarts > allowed {
            let minutes = WINDOW.as_secs() / 60;
            return Err(Failure::Died {
                name: name.to_owned(),
                how: format!(
                    "{ended}, and was started again {allowed} times within {minutes} minutes (`placement.restarts`): {}",
                    child.last_words()
                ),
            });
        }
        eprintln!("{name} {ended}; it is started again");
        Ok(())
    }

    fn recovered(&mut self, name: &str, after: Option<Duration>) -> Result<(), Failure> {
        let Some(after) = after else { return Ok(()) };
        eprintln!("{name} is back after {:.1} s", after.as_secs_f64());
        self.event("recovered", name, &json!({ "after_s": after.as_secs_f64() }))
    }

    fn event(&mut self, event: &str, name: &str, fields: &serde_json::Value) -> Result<(), Failure> {
        let time_s = self.began.elapsed().as_secs_f64();
        Ok(self
            .events
            .append(&json!({ "time_s": time_s, "event": event, "name": name, "fields": fields }))?)
    }
}

/// The arguments of a lead, and its exit.
pub(crate) mod lead {
    use std::net::TcpListener;
    use std::os::fd::AsFd;

    use buffer::http::Tokens;
    use model::SharedCores;

    use super::{Arc, Ending, Failure, Recipe, RunDir, system};
    use crate::args::LeadArgs;
    use crate::huggingface::HuggingFace;
    use crate::pipeline::{self, RunOptions};
    use crate::program::Program;
    use crate::report::{Report, Style};
    use crate::run_buffer::RunListener;
    use crate::signals::end_with_parent;
    use crate::workers::membership::token;
    use crate::workers::trainer::lost;

    /// Leads the run of its arguments, served on the socket that is its standard input.
    ///
    /// # Errors
    /// Whatever ended the run.
    pub(crate) fn run(args: &LeadArgs, program: &Program) -> Result<Ending, Failure> {
        end_with_parent(args.parent)?;
        let socket =
            std::io::stdin().as_fd().try_clone_to_owned().map_err(system("take the run's socket"))?;
        let socket = TcpListener::from(socket);
        socket.local_addr().map_err(system("find a socket on standard input"))?;
        let (tokens, token) = (Tokens::read(&args.token_file)?, token(&args.token_file, "writer")?);
        let listener =
            RunListener { listener: Arc::new(socket), tokens, token, token_file: args.token_file.clone() };
        let run_dir = RunDir::open(&args.run)?;
        // It contains the controller's layers.
        let program = program.without_overrides();
        let (recipe, _) = Recipe::load(&run_dir.resolved_recipe(), &[], &program).map_err(Failure::Recipe)?;
        let recipe = HuggingFace::of(&program).fetched_for(&recipe, &run_dir.checkpoints())?;
        let style = Style::detect(args.loudness.quiet, program.environment());
        let cores = args.threads.map_or_else(SharedCores::all, SharedCores::new);
        let options = RunOptions { listener: Some(listener), ..RunOptions::new(&program).cores(cores) };
        let report = Arc::new(Report::new(style).wide(args.loudness.width));
        let ended = pipeline::run_in(&recipe, &run_dir, &report, options);
        ended.map_err(|failure| match failure {
            // All ranks are started again from the last checkpoint.
            Failure::Trainer(error) => lost(error),
            failure => failure,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_reached_where_it_listens() {
        for (listens, reached) in [
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("0.0.0.0:2", "127.0.0.1:2"),
            ("[::]:3", "[::1]:3"),
            ("10.1.2.3:4", "10.1.2.3:4"),
        ] {
            assert_eq!(reachable(listens.parse().unwrap()).to_string(), reached);
        }
    }
}
