//! Runs a program that nobody trusts: no network, no files, no environment, and bounds on everything it can use up.
//!
//! Invariant: what the program does ends as a [`Ran`], however badly it behaves; only a failure of the sandbox itself is a
//! [`SandboxError`]. When [`Sandbox::run`] returns, no process of the program is left, and none is if this process is killed
//! before. It judges nothing that it reports.
//!
//! | | `bubblewrap` | `landlock` | `none` |
//! |---|---|---|---|
//! | needs | `bwrap`, user namespaces | Linux 6.2 with Landlock | Linux |
//! | files | system libraries and interpreter, read-only; 64 MiB of its own in `/tmp` | the same, none of its own; names and sizes of others can be seen | all of the user |
//! | network | a namespace without any, and no sockets | no sockets | all |
//! | processes | its own namespace, at most `processes` | none beside itself, threads are free | all |
//!
//! Both sandboxes add a seccomp filter, see `filter`, and resource limits.

mod bubblewrap;
mod filter;
mod landlock;
mod spawn;
pub mod view;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub use self::view::View;
use crate::reaper::Reaper;

/// How a program is confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Namespaces of its own, by `bwrap`.
    Bubblewrap {
        /// Whether it runs as another user, so that the kernel counts its processes even if we are root.
        nobody: bool,
        /// Whether it may start processes.
        processes: bool,
    },
    /// Landlock and seccomp.
    Landlock,
    /// Limits only.
    Unconfined,
}

/// What a recipe asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The strongest that works.
    Auto,
    /// `bwrap` or nothing.
    Bubblewrap,
    /// Landlock or nothing.
    Landlock,
    /// None at all.
    Unconfined,
}

impl Choice {
    /// As a recipe spells it.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "auto" => Self::Auto,
            "bubblewrap" => Self::Bubblewrap,
            "landlock" => Self::Landlock,
            "none" => Self::Unconfined,
            _ => return None,
        })
    }
}

/// What one run may use up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// From start to end.
    pub wall: Duration,
    /// Processor time of each process, rounded up to seconds.
    pub cpu: Duration,
    /// Address space of each process, bytes.
    pub memory: u64,
    /// Standard output, standard error and report after each order, bytes each.
    pub output: usize,
    /// Processes and threads at the same time.
    pub processes: u64,
}

/// A conversation with a harness in the sandbox: it reads lines of orders and writes lines of reports.
pub trait Dialog: Send {
    /// What it reads first.
    fn opening(&mut self) -> Vec<u8>;
    /// What it reads after it wrote `line`, maybe nothing.
    fn answer(&mut self, line: &[u8]) -> Vec<u8>;
}

/// One program and what it is given.
#[derive(Default)]
pub struct Job<'a> {
    /// Absolute path and arguments. `{file}` becomes the path of `file`, `{orders}` and `{report}` the descriptors of `dialog`.
    pub argv: Vec<String>,
    /// All variables that it sees.
    pub environment: Vec<(String, String)>,
    /// Name and contents of a file that it can read.
    pub file: Option<(&'a str, &'a [u8])>,
    /// Standard input.
    pub stdin: &'a [u8],
    /// Whom it talks to, beside its standard streams.
    pub dialog: Option<&'a mut dyn Dialog>,
    /// Set by someone else: the run is to end now.
    pub cancelled: Option<&'a AtomicBool>,
}

impl std::fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("argv", &self.argv).finish_non_exhaustive()
    }
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself.
    Exit(i32),
    /// By a signal; too much processor time is number 9.
    Signal(i32),
    /// Killed, as its time was over.
    Timeout,
    /// Killed, as it wrote too much.
    Output,
    /// Killed, as nobody waited for it any more.
    Cancelled,
}

/// What a program did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    /// How it ended.
    pub end: End,
    /// What it wrote, up to the limit.
    pub stdout: Vec<u8>,
    /// What it wrote on the other stream, up to the limit.
    pub stderr: Vec<u8>,
}

/// The sandbox failed, not the program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// This machine cannot confine a program as asked.
    #[error(
        "no sandbox works on this machine: {tried}; install bubblewrap and allow user namespaces, or run on Linux 6.2 or \
         newer with Landlock; only if you trust every program that the policy may write, set `sandbox = \"none\"`"
    )]
    Unavailable {
        /// Every way that was tried and what was in the way.
        tried: String,
    },
    /// A run could not be started or watched.
    #[error("the sandbox could not run the program: {reason}")]
    Failed {
        /// What happened.
        reason: String,
    },
}

impl From<std::io::Error> for SandboxError {
    fn from(error: std::io::Error) -> Self {
        Self::Failed { reason: error.to_string() }
    }
}

impl From<rustix::io::Errno> for SandboxError {
    fn from(error: rustix::io::Errno) -> Self {
        std::io::Error::from(error).into()
    }
}

/// A way to run programs that was seen to work.
#[derive(Clone, Debug)]
pub struct Sandbox {
    method: Method,
    view: View,
    bwrap: Option<PathBuf>,
    scratch: PathBuf,
    /// Kills what runs when this process is killed.
    reaper: Arc<Reaper>,
}

/// Longest time of the run that shows whether a sandbox works.
const PROBE: Duration = Duration::from_secs(20);

impl Sandbox {
    /// The sandbox that `choice` names, after `true` was seen to run in it. `path` is where `bwrap` is looked for, in the form
    /// of the variable `PATH`; `scratch` is an existing directory.
    ///
    /// # Errors
    /// None of those asked for works here; the message has the reason for each.
    pub fn open(choice: Choice, view: &View, path: &str, scratch: &Path) -> Result<Self, SandboxError> {
        let bwrap = view::find("bwrap", path);
        let root = rustix::process::geteuid().is_root();
        let namespaces = |nobody, processes| Method::Bubblewrap { nobody, processes };
        let wrapped: &[Method] = if root {
            &[namespaces(true, true), namespaces(false, false)]
        } else {
            &[namespaces(false, true)]
        };
        let methods = match choice {
            Choice::Auto => [wrapped, &[Method::Landlock]].concat(),
            Choice::Bubblewrap => wrapped.to_vec(),
            Choice::Landlock => vec![Method::Landlock],
            Choice::Unconfined => vec![Method::Unconfined],
        };
        let mut tried = Vec::new();
        let reaper = Arc::new(Reaper::start()?);
        for method in methods {
            let (view, bwrap, scratch) = (view.clone(), bwrap.clone(), scratch.to_path_buf());
            let sandbox = Self { method, view, bwrap, scratch, reaper: Arc::clone(&reaper) };
            match sandbox.probe() {
                Ok(()) => return Ok(sandbox),
                Err(reason) => tried.push(format!("{}: {reason}", method.name())),
            }
        }
        Err(SandboxError::Unavailable { tried: tried.join("; ") })
    }

    /// How it confines.
    #[must_use]
    pub fn method(&self) -> Method {
        self.method
    }

    /// Runs one program to its end, on this thread.
    ///
    /// # Errors
    /// The program was not started, or could not be watched.
    pub fn run(&self, job: Job<'_>, limits: &Limits) -> Result<Ran, SandboxError> {
        let limits = (limits, &*self.reaper);
        match (self.method, &self.bwrap) {
            (Method::Bubblewrap { nobody, processes }, Some(bwrap)) => {
                bubblewrap::run(bwrap, &self.view, (nobody, processes), job, limits)
            }
            (Method::Bubblewrap { .. }, None) => {
                Err(SandboxError::Failed { reason: "`bwrap` was not found in `PATH`".to_owned() })
            }
            (Method::Landlock, _) => landlock::run(&self.view, &self.scratch, job, limits),
            (Method::Unconfined, _) => landlock::run_unconfined(&self.scratch, job, limits),
        }
    }

    fn probe(&self) -> Result<(), String> {
        let Some(command) = view::find("true", "/usr/bin:/bin:/run/current-system/sw/bin") else {
            return Err("there is no program `true` to try it with".to_owned());
        };
        // The interpreter must be there to be read, even for another user.
        let witness = self.view.witness().map(|path| path.display().to_string());
        let argv = match (witness, view::find("test", "/usr/bin:/bin")) {
            (Some(witness), Some(test)) => vec![test.display().to_string(), "-r".to_owned(), witness],
            _ => vec![command.display().to_string()],
        };
        let shown = argv.join(" ");
        let limits = Limits { wall: PROBE, cpu: PROBE, memory: 1 << 30, output: 1 << 12, processes: 16 };
        let ran = self.run(Job { argv, ..Job::default() }, &limits).map_err(|error| match error {
            SandboxError::Failed { reason } | SandboxError::Unavailable { tried: reason } => reason,
        })?;
        match ran.end {
            End::Exit(0) => Ok(()),
            end => {
                Err(format!("`{shown}` ended with {end:?}: {}", String::from_utf8_lossy(&ran.stderr).trim()))
            }
        }
    }
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Bubblewrap { nobody: true, .. } => "bubblewrap as user 65534",
            Self::Bubblewrap { nobody: false, .. } => "bubblewrap",
            Self::Landlock => "landlock",
            Self::Unconfined => "none",
        }
    }

    /// Whether a program may start others.
    #[must_use]
    pub fn allows_processes(self) -> bool {
        match self {
            Self::Bubblewrap { processes, .. } => processes,
            Self::Landlock => false,
            Self::Unconfined => true,
        }
    }
}
