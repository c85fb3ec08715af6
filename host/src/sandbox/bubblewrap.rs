//! A program in new namespaces, made by `bwrap`.
//!
//! Invariant: the program sees its readable files, a `/tmp` of limited size and four devices. Its process namespace, with all
//! processes in it, ends with the program or with this process: until the gate opens, its first process is in the process group
//! of `bwrap`, and it is registered with the reaper before the gate opens. Whether the program was started is known from
//! `bwrap`, which reports an exit code only after a successful exec, never from the output of the program.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Weak};

use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal};
use serde::Deserialize;

use super::filter::{self, AllowedCalls};
use super::monitor::{ProgramPipes, SandboxSupervisor, monitor};
use super::readable::DEVICES;
use super::spawn::{Confinement, DialogPipes, PipePair, arguments, gate, in_memory, spawn};
use super::{ProgramEnd, ProgramRun, ReadableFiles, SandboxError, SandboxJob, SandboxLimits};
use crate::reaper::{Reaper, ReaperRegistration};

/// Bytes of files that the program may write.
const TMP_BYTES: u32 = 64 << 20;
/// User and group id of the program: those without privileges.
const UNPRIVILEGED: u32 = 65_534;
/// Directory of its file.
const BOX: &str = "/box";

/// Runs `job`; `unprivileged` and `processes` are those of [`super::SandboxMethod::Bubblewrap`].
pub(super) fn run(
    bwrap: &Path,
    readable: &ReadableFiles,
    unprivileged: bool,
    processes: bool,
    job: SandboxJob<'_>,
    limits: &SandboxLimits,
    reaper: &Reaper,
) -> Result<ProgramRun, SandboxError> {
    use std::os::unix::process::CommandExt;
    let allowed = AllowedCalls { processes, signals: true };
    let filter = in_memory("filter", &filter::bytes(&filter::program(allowed)))?;
    let file = job.file.map(|(name, contents)| in_memory(name, contents)).transpose()?;
    let inside = job.file.map(|(name, _)| format!("{BOX}/{name}"));
    let (status, gate) = (PipePair::from_program()?, gate()?);
    let dialog = DialogPipes::open(&job)?;
    let mut command = Command::new(bwrap);
    command.env_clear().args(namespaces()).args(mounts(readable));
    if let (Some(file), Some(inside)) = (&file, &inside) {
        command.args(["--ro-bind-data", &number(file), inside]);
    }
    command.args(["--remount-ro", "/", "--chdir", "/tmp"]);
    command.args(["--seccomp", &number(&filter), "--json-status-fd", &status.number()]);
    command.args(["--block-fd", &gate.number(), "--clearenv"]);
    for (name, value) in &job.environment {
        command.args(["--setenv", name, value]);
    }
    command.arg("--").args(arguments(&job, inside.as_deref(), dialog.as_ref()));
    if unprivileged {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    let mut inherited = vec![&filter, &status.theirs, &gate.theirs];
    inherited.extend(&file);
    inherited.extend(dialog.iter().flat_map(|pipes| [&pipes.orders.theirs, &pipes.report.theirs]));
    let child = spawn(command, &inherited, limits, reaper, Confinement::default())?;
    let registration = Arc::downgrade(&child.registration);
    let mut init = NamespaceInit {
        gate: Some(gate.ours),
        processes: limits.processes,
        registration,
        ..NamespaceInit::default()
    };
    drop((filter, file, status.theirs, gate.theirs));
    let pipes = ProgramPipes { dialog, status: Some(status.ours), supervisor: Some(&mut init) };
    let ran = monitor(child, job, limits, pipes)?;
    init.program_run(ran)
}

fn number(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    fd.as_raw_fd().to_string()
}

fn namespaces() -> Vec<String> {
    let id = UNPRIVILEGED.to_string();
    [
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--uid",
        &id,
        "--gid",
        &id,
        "--cap-drop",
        "ALL",
        "--die-with-parent",
        "--new-session",
    ]
    .map(str::to_owned)
    .to_vec()
}

fn mounts(readable: &ReadableFiles) -> Vec<String> {
    let mut words = Vec::new();
    let mut add = |parts: &[&str]| words.extend(parts.iter().map(|part| (*part).to_owned()));
    for path in readable.paths() {
        let shown = path.display().to_string();
        // `/lib` is often a link into `/usr`, which is mounted.
        match (path.parent() == Some(Path::new("/"))).then(|| std::fs::read_link(&path).ok()).flatten() {
            Some(target) => add(&["--symlink", &target.display().to_string(), &shown]),
            None => {
                let real = path.canonicalize().unwrap_or_else(|_| PathBuf::from(&path));
                add(&["--ro-bind", &real.display().to_string(), &shown]);
            }
        }
    }
    for device in DEVICES {
        add(&["--dev-bind", device, device]);
    }
    add(&["--size", &TMP_BYTES.to_string(), "--tmpfs", "/tmp"]);
    words
}

/// The first process of the namespace; when it ends, the kernel kills all others.
#[derive(Debug, Default)]
struct NamespaceInit {
    process: Option<OwnedFd>,
    /// `bwrap` waits for a byte from here before it starts the program.
    gate: Option<OwnedFd>,
    processes: u64,
    /// The registration of `bwrap`, as long as it is monitored.
    registration: Weak<ReaperRegistration>,
    exit_code: Option<i32>,
    killed: bool,
}

/// A line of `bwrap --json-status-fd`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct BwrapStatus {
    child_pid: Option<i32>,
    exit_code: Option<i32>,
}

impl SandboxSupervisor for NamespaceInit {
    fn read_status(&mut self, status: &[u8]) -> Result<(), SandboxError> {
        for line in status.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
            let Ok(line) = serde_json::from_slice::<BwrapStatus>(line) else { continue };
            self.exit_code = self.exit_code.or(line.exit_code);
            let Some((pid, gate)) = line.child_pid.and_then(Pid::from_raw).zip(self.gate.take()) else {
                continue;
            };
            // The process waits at the gate, so its id is not reused.
            self.process = Some(rustix::process::pidfd_open(pid, PidfdFlags::empty())?);
            // The first process counts as one. If the limit were set before the namespace is made, all processes of the user
            // would count.
            let most = Some(self.processes + 1);
            let limit = Rlimit { current: most, maximum: most };
            rustix::process::prlimit(Some(pid), Resource::Nproc, limit)?;
            if let Some(registration) = self.registration.upgrade() {
                // After the gate the process leaves the group of `bwrap`; its parent death signal is set only later.
                registration.add_process(pid.as_raw_nonzero().get())?;
            }
            rustix::io::write(&gate, b"1")?;
        }
        if self.killed {
            self.kill();
        }
        Ok(())
    }

    fn kill(&mut self) {
        self.killed = true;
        if let Some(process) = &self.process {
            // It may have ended meanwhile.
            let _ended = rustix::process::pidfd_send_signal(process, Signal::KILL);
        }
    }
}

impl NamespaceInit {
    /// How the program ended, if it was started.
    fn program_run(&self, ran: ProgramRun) -> Result<ProgramRun, SandboxError> {
        let Some(code) = self.exit_code else {
            let output = String::from_utf8_lossy(&ran.stderr);
            let reason = match output.trim() {
                "" => format!("`bwrap` ended with {:?} before it started the program", ran.end),
                output => output.to_owned(),
            };
            return Err(SandboxError::Failed { reason });
        };
        let reported = if code > 128 { ProgramEnd::Signal(code - 128) } else { ProgramEnd::Exit(code) };
        let end =
            if matches!(ran.end, ProgramEnd::Exit(_) | ProgramEnd::Signal(_)) { reported } else { ran.end };
        Ok(ProgramRun { end, ..ran })
    }
}
