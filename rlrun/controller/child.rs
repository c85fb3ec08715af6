//! A child process of the controller, from start to end, and its replacement after a restart.
//!
//! Invariant: the process ends when this value is dropped. It has a separate process group, so a Ctrl-C at the terminal
//! reaches only the controller, which signals its children.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::system;
use crate::failure::Failure;

/// How often the end of a process is looked for.
const LOOK_UP: Duration = Duration::from_millis(10);
/// Lines of its log that are shown of a process that died.
const LAST_WORDS: usize = 3;

/// Where a process writes its output, and the listener that it inherits as standard input.
pub(super) enum Output {
    /// The terminal of the controller.
    Terminal { socket: TcpListener },
    /// This file.
    Log { path: PathBuf, socket: Option<TcpListener> },
}

/// See the module.
pub(super) struct Child {
    name: String,
    process: Process,
    started: Instant,
    log: Option<PathBuf>,
    /// When processes of this name were started again.
    restarts: VecDeque<Instant>,
    /// Time since which its predecessor is missing.
    missing: Option<Instant>,
    /// Why it was killed from here.
    why: Option<String>,
    /// Time of its last heartbeat to the current lead; `None` if there was none.
    heard: Option<Instant>,
    /// The name of this process in the run, once it has joined one of the leads.
    instance: Option<u64>,
}

/// Killed when it is dropped.
struct Process(std::process::Child);

/// How a process ended.
pub(super) struct ExitReason {
    status: ExitStatus,
    why: Option<String>,
}

impl ExitReason {
    /// Its exit status; `None` if a signal ended it.
    pub(super) fn code(&self) -> Option<i32> {
        self.status.code()
    }
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.why, self.status.code(), self.status.signal()) {
            (Some(why), ..) => write!(f, "{why} and was killed"),
            (None, Some(code), _) => write!(f, "ended with status {code}"),
            (None, None, signal) => write!(f, "was killed by signal {}", signal.unwrap_or_default()),
        }
    }
}

impl Child {
    pub(super) fn start(
        name: &str,
        program: &Path,
        args: Vec<OsString>,
        output: Output,
    ) -> Result<Self, Failure> {
        let mut command = Command::new(program);
        command.args(args).args(["--parent", &std::process::id().to_string()]).process_group(0);
        let log = match output {
            Output::Terminal { socket } => {
                command.stdin(OwnedFd::from(socket));
                None
            }
            Output::Log { path, socket } => {
                let open = File::options().create(true).append(true).open(&path);
                let log = open.map_err(system(&format!("write {}", path.display())))?;
                let second = log.try_clone().map_err(system(&format!("write {}", path.display())))?;
                let stdin = socket.map_or_else(Stdio::null, |socket| OwnedFd::from(socket).into());
                command.stdin(stdin).stdout(log).stderr(second);
                Some(path)
            }
        };
        let process = Process(command.spawn().map_err(system(&format!("start {name}")))?);
        Ok(Self {
            name: name.to_owned(),
            process,
            started: Instant::now(),
            log,
            restarts: VecDeque::new(),
            missing: None,
            why: None,
            heard: None,
            instance: None,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.0.id()
    }

    pub(super) fn started(&self) -> Instant {
        self.started
    }

    /// The replacement of a process that was not missed, with its history.
    pub(super) fn followed_by(mut self, again: Self) -> Self {
        Self { restarts: std::mem::take(&mut self.restarts), missing: self.missing, ..again }
    }

    /// How it ended, if it has.
    pub(super) fn ended(&mut self) -> Result<Option<ExitReason>, Failure> {
        let status = self.process.0.try_wait().map_err(system(&format!("look after {}", self.name)))?;
        Ok(status.map(|status| ExitReason { status, why: self.why.take() }))
    }

    /// Counts that it is started again; how often that was within `window`.
    pub(super) fn count_restart(&mut self, window: Duration) -> usize {
        self.restarts.push_back(Instant::now());
        while self.restarts.front().is_some_and(|then| then.elapsed() > window) {
            self.restarts.pop_front();
        }
        self.restarts.len()
    }

    /// The replacement of this process, with its history.
    pub(super) fn replaced_by(mut self, again: Self) -> Self {
        let restarts = std::mem::take(&mut self.restarts);
        Self { restarts, missing: Some(self.missing.unwrap_or_else(Instant::now)), ..again }
    }

    /// Records a heartbeat at `then` of this instance.
    pub(super) fn heard(&mut self, then: Instant, instance: u64) {
        (self.heard, self.instance) = (self.heard.max(Some(then)), Some(instance));
    }

    /// The name of this process in the run, if it has joined one of the leads.
    pub(super) fn instance(&self) -> Option<u64> {
        self.instance
    }

    /// Time of its last heartbeat to the current lead.
    pub(super) fn last_heard(&self) -> Option<Instant> {
        self.heard
    }

    /// Forgets the heartbeats: a new lead has received none.
    pub(super) fn forgotten(&mut self) {
        self.heard = None;
    }

    /// How long it was missing, once, when it works again.
    pub(super) fn recovered(&mut self) -> Option<Duration> {
        self.missing.take().map(|since| since.elapsed())
    }

    pub(super) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Ends it at once, also if it is stopped.
    pub(super) fn kill(&mut self, why: &str) {
        self.why = Some(why.to_owned());
        self.signal(Signal::KILL);
    }

    /// Waits until it has ended, and ends it at the deadline, or `at_once`.
    pub(super) fn end_by(&mut self, deadline: Instant, at_once: &AtomicBool) {
        while self.process.runs() {
            if Instant::now() >= deadline || at_once.load(Ordering::Relaxed) {
                return self.process.end();
            }
            std::thread::sleep(LOOK_UP);
        }
    }

    /// The last lines that it wrote, and where there are more.
    pub(super) fn last_words(&self) -> String {
        let Some(log) = &self.log else { return "its messages stand above".to_owned() };
        let text =
            std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST_WORDS)..].join("; ");
        format!("{last} (see {})", log.display())
    }
}

impl Process {
    fn runs(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        // The signal is lost if the child has ended. Its process id stays reserved until it is waited for.
        if let Some(pid) = pid {
            let _ = kill_process(pid, signal);
        }
    }

    fn end(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.runs() {
            self.end();
        }
    }
}
