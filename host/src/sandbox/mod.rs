//! Runs an untrusted program: no network, no files, no environment, and limits on all that it can use up.
//!
//! Invariant: a program that misbehaves ends as a [`ProgramRun`] like any other; only a failure of the sandbox itself is a
//! [`SandboxError`]. When [`Sandbox::run`] returns, no process of the program is left; the same holds if this process is killed
//! before. The sandbox reports what the program did and does not judge it.
//!
//! | | `bubblewrap` | `landlock` | `none` |
//! |---|---|---|---|
//! | needs | `bwrap`, user namespaces | Linux 6.2 with Landlock | Linux |
//! | files | system libraries and interpreter, read-only; 64 MiB in `/tmp` | system libraries and interpreter, read-only; names and sizes of other files can be seen | all of the user |
//! | network | an empty network namespace, and no sockets | no sockets | all |
//! | processes | a namespace, at most `processes` | one, with any number of threads | all |
//!
//! Both sandboxes add a seccomp filter, see `filter`, and resource limits.

mod bubblewrap;
mod filter;
mod interpreter;
mod landlock;
mod monitor;
pub mod readable;
mod spawn;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub use self::interpreter::Interpreter;
pub use self::readable::ReadableFiles;
use crate::reaper::Reaper;

/// How a program is confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxMethod {
    /// In new namespaces, by `bwrap`.
    Bubblewrap {
        /// Whether it runs as user 65534. Then the kernel counts its processes also if this process is root.
        unprivileged: bool,
        /// Whether it may start processes.
        processes: bool,
    },
    /// Landlock and seccomp.
    Landlock,
    /// Resource limits only.
    Unconfined,
}

/// The sandbox that a recipe names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxChoice {
    /// The strongest that works on this machine.
    Auto,
    /// `bwrap`; an error if it does not work.
    Bubblewrap,
    /// Landlock; an error if it does not work.
    Landlock,
    /// No sandbox.
    Unconfined,
}

/// All environment variables of a program that was not written by the user.
#[must_use]
pub fn program_environment() -> Vec<(String, String)> {
    [
        ("PATH", "/usr/local/bin:/usr/bin:/bin"),
        ("HOME", "/tmp"),
        ("LANG", "C.UTF-8"),
        // The same program gives the same output twice, and numeric libraries do not start a thread for each core.
        ("PYTHONHASHSEED", "0"),
        ("OMP_NUM_THREADS", "1"),
        ("OPENBLAS_NUM_THREADS", "1"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

impl SandboxChoice {
    /// Parses the spelling of a recipe.
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

/// Limits of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxLimits {
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

/// The side outside of the sandbox in a dialog with a harness inside, which reads lines of orders and writes lines of reports.
pub trait Dialog: Send {
    /// The first orders.
    fn opening(&mut self) -> Vec<u8>;
    /// The orders after the report `line`; may be empty.
    fn answer(&mut self, line: &[u8]) -> Vec<u8>;
}

/// One program with its input.
#[derive(Default)]
pub struct SandboxJob<'a> {
    /// Absolute path and arguments. `{file}` becomes the path of `file`, `{orders}` and `{report}` the descriptors of `dialog`.
    pub argv: Vec<String>,
    /// All environment variables.
    pub environment: Vec<(String, String)>,
    /// Name and contents of a file for the program.
    pub file: Option<(&'a str, &'a [u8])>,
    /// Standard input.
    pub stdin: &'a [u8],
    /// The other end of its harness, besides the standard streams.
    pub dialog: Option<&'a mut dyn Dialog>,
    /// Set by the caller to end the run.
    pub cancelled: Option<&'a AtomicBool>,
}

impl std::fmt::Debug for SandboxJob<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SandboxJob").field("argv", &self.argv).finish_non_exhaustive()
    }
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramEnd {
    /// It exited with this code.
    Exit(i32),
    /// A signal ended it; number 9 if it exceeded its processor time.
    Signal(i32),
    /// Killed at the limit on wall time.
    Timeout,
    /// Killed at the limit on output.
    Output,
    /// Killed because the caller cancelled the run.
    Cancelled,
}

/// The end and the output of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramRun {
    /// How it ended.
    pub end: ProgramEnd,
    /// Its standard output, up to the limit.
    pub stdout: Vec<u8>,
    /// Its standard error, up to the limit.
    pub stderr: Vec<u8>,
}

/// The sandbox failed, not the program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// No sandbox of those that the recipe allows works on this machine.
    #[error(
        "no sandbox works on this machine: {tried}; install bubblewrap and allow user namespaces, or run on Linux 6.2 or \
         newer with Landlock; only if you trust every program that the policy may write, set `sandbox = \"none\"`"
    )]
    Unavailable {
        /// Each method that was tried, with the reason why it does not work.
        tried: String,
    },
    /// A run could not be started or monitored.
    #[error("the sandbox could not run the program: {reason}")]
    Failed {
        /// The reason.
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

/// A method to run programs that was tested on this machine.
#[derive(Clone, Debug)]
pub struct Sandbox {
    method: SandboxMethod,
    readable: ReadableFiles,
    bwrap: Option<PathBuf>,
    scratch: PathBuf,
    /// Kills the programs if this process is killed.
    reaper: Arc<Reaper>,
}

/// Longest time of the test run.
const PROBE: Duration = Duration::from_secs(20);

impl Sandbox {
    /// The sandbox that `choice` names, after a test run of `true`. `path` lists the directories to search for `bwrap`, in the form
    /// of the variable `PATH`; `scratch` is an existing directory.
    ///
    /// # Errors
    /// No sandbox of the choice works on this machine; the message has the reason for each.
    pub fn open(
        choice: SandboxChoice,
        readable: &ReadableFiles,
        path: &str,
        scratch: &Path,
    ) -> Result<Self, SandboxError> {
        let bwrap = readable::find("bwrap", path);
        let root = rustix::process::geteuid().is_root();
        let namespaces = |unprivileged, processes| SandboxMethod::Bubblewrap { unprivileged, processes };
        let wrapped: &[SandboxMethod] = if root {
            &[namespaces(true, true), namespaces(false, false)]
        } else {
            &[namespaces(false, true)]
        };
        let methods = match choice {
            SandboxChoice::Auto => [wrapped, &[SandboxMethod::Landlock]].concat(),
            SandboxChoice::Bubblewrap => wrapped.to_vec(),
            SandboxChoice::Landlock => vec![SandboxMethod::Landlock],
            SandboxChoice::Unconfined => vec![SandboxMethod::Unconfined],
        };
        let mut tried = Vec::new();
        let reaper = Arc::new(Reaper::start()?);
        for method in methods {
            let (readable, bwrap, scratch) = (readable.clone(), bwrap.clone(), scratch.to_path_buf());
            let sandbox = Self { method, readable, bwrap, scratch, reaper: Arc::clone(&reaper) };
            match sandbox.probe() {
                Ok(()) => return Ok(sandbox),
                Err(reason) => tried.push(format!("{}: {reason}", method.name())),
            }
        }
        Err(SandboxError::Unavailable { tried: tried.join("; ") })
    }

    /// The method of confinement.
    #[must_use]
    pub fn method(&self) -> SandboxMethod {
        self.method
    }

    /// Runs one program to its end, on this thread.
    ///
    /// # Errors
    /// The program was not started, or could not be monitored.
    pub fn run(&self, job: SandboxJob<'_>, limits: &SandboxLimits) -> Result<ProgramRun, SandboxError> {
        let reaper = &*self.reaper;
        match (self.method, &self.bwrap) {
            (SandboxMethod::Bubblewrap { unprivileged, processes }, Some(bwrap)) => {
                bubblewrap::run(bwrap, &self.readable, unprivileged, processes, job, limits, reaper)
            }
            (SandboxMethod::Bubblewrap { .. }, None) => {
                Err(SandboxError::Failed { reason: "`bwrap` was not found in `PATH`".to_owned() })
            }
            (SandboxMethod::Landlock, _) => landlock::run(&self.readable, &self.scratch, job, limits, reaper),
            (SandboxMethod::Unconfined, _) => landlock::run_unconfined(&self.scratch, job, limits, reaper),
        }
    }

    fn probe(&self) -> Result<(), String> {
        let Some(command) = readable::find("true", "/usr/bin:/bin:/run/current-system/sw/bin") else {
            return Err("there is no program `true` to try it with".to_owned());
        };
        // User 65534 must be able to read the interpreter.
        let required = self.readable.required().map(|path| path.display().to_string());
        let argv = match (required, readable::find("test", "/usr/bin:/bin")) {
            (Some(required), Some(test)) => vec![test.display().to_string(), "-r".to_owned(), required],
            _ => vec![command.display().to_string()],
        };
        let shown = argv.join(" ");
        let limits =
            SandboxLimits { wall: PROBE, cpu: PROBE, memory: 1 << 30, output: 1 << 12, processes: 16 };
        let ran =
            self.run(SandboxJob { argv, ..SandboxJob::default() }, &limits).map_err(|error| match error {
                SandboxError::Failed { reason } | SandboxError::Unavailable { tried: reason } => reason,
            })?;
        match ran.end {
            ProgramEnd::Exit(0) => Ok(()),
            end => {
                Err(format!("`{shown}` ended with {end:?}: {}", String::from_utf8_lossy(&ran.stderr).trim()))
            }
        }
    }
}

impl SandboxMethod {
    fn name(self) -> &'static str {
        match self {
            Self::Bubblewrap { unprivileged: true, .. } => "bubblewrap as user 65534",
            Self::Bubblewrap { unprivileged: false, .. } => "bubblewrap",
            Self::Landlock => "landlock",
            Self::Unconfined => "none",
        }
    }
}
