//! A program in namespaces of its own, made by `bwrap`.
//!
//! Invariant: the program sees the paths of its view, read-only, a `/tmp` of bounded size and four devices; its process
//! namespace ends with it or with us, and everything in it too: until it may pass the gate its first process is in the process
//! group of `bwrap`, and before it may pass the reaper knows it. That it was really started is known from `bwrap`, which reports
//! an exit code only after a successful exec, never from the output of the program.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Weak};

use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal};
use serde::Deserialize;

use super::filter::{self, AllowedCalls};
use super::spawn::{Channel, Confinement, Talk, arguments, gate, in_memory, spawn};
use super::view::DEVICES;
use super::watch::{Ends, Warden, watch};
use super::{End, Job, Limits, Ran, SandboxError, View};
use crate::reaper::{Reaper, Registration};

/// Bytes of files that the program may write.
const TMP_BYTES: u32 = 64 << 20;
/// Who the program is.
const NOBODY: u32 = 65_534;
/// Where its file lies.
const BOX: &str = "/box";

/// Runs `job`; `nobody` and `processes` are those of [`super::Method::Bubblewrap`].
pub(super) fn run(
    bwrap: &Path,
    view: &View,
    (nobody, processes): (bool, bool),
    job: Job<'_>,
    (limits, reaper): (&Limits, &Reaper),
) -> Result<Ran, SandboxError> {
    use std::os::unix::process::CommandExt;
    let allowed = AllowedCalls { processes, signals: true };
    let filter = in_memory("filter", &filter::bytes(&filter::program(allowed)))?;
    let file = job.file.map(|(name, contents)| in_memory(name, contents)).transpose()?;
    let inside = job.file.map(|(name, _)| format!("{BOX}/{name}"));
    let (status, gate) = (Channel::from_program()?, gate()?);
    let talk = Talk::open(&job)?;
    let mut command = Command::new(bwrap);
    command.env_clear().args(namespaces()).args(mounts(view));
    if let (Some(file), Some(inside)) = (&file, &inside) {
        command.args(["--ro-bind-data", &number(file), inside]);
    }
    command.args(["--remount-ro", "/", "--chdir", "/tmp"]);
    command.args(["--seccomp", &number(&filter), "--json-status-fd", &status.number()]);
    command.args(["--block-fd", &gate.number(), "--clearenv"]);
    for (name, value) in &job.environment {
        command.args(["--setenv", name, value]);
    }
    command.arg("--").args(arguments(&job, inside.as_deref(), talk.as_ref()));
    if nobody {
        command.uid(NOBODY).gid(NOBODY);
    }
    let mut inherited = vec![&filter, &status.theirs, &gate.theirs];
    inherited.extend(&file);
    inherited.extend(talk.iter().flat_map(|talk| [&talk.orders.theirs, &talk.report.theirs]));
    let child = spawn(command, &inherited, (limits, reaper), Confinement::default())?;
    let registration = Arc::downgrade(&child.registration);
    let mut warden =
        Init { gate: Some(gate.ours), processes: limits.processes, registration, ..Init::default() };
    drop((filter, file, status.theirs, gate.theirs));
    let ends = Ends { talk, status: Some(status.ours), warden: Some(&mut warden) };
    let ran = watch(child, job, limits, ends)?;
    warden.verdict(ran)
}

fn number(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    fd.as_raw_fd().to_string()
}

fn namespaces() -> Vec<String> {
    let nobody = NOBODY.to_string();
    [
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--uid",
        &nobody,
        "--gid",
        &nobody,
        "--cap-drop",
        "ALL",
        "--die-with-parent",
        "--new-session",
    ]
    .map(str::to_owned)
    .to_vec()
}

fn mounts(view: &View) -> Vec<String> {
    let mut words = Vec::new();
    let mut add = |parts: &[&str]| words.extend(parts.iter().map(|part| (*part).to_owned()));
    for path in view.paths() {
        let shown = path.display().to_string();
        // `/lib` is often a link into `/usr`, which is there already.
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

/// The first process of the namespace, which ends with all others when it ends.
#[derive(Debug, Default)]
struct Init {
    process: Option<OwnedFd>,
    /// `bwrap` waits for a byte from here before it starts the program.
    gate: Option<OwnedFd>,
    processes: u64,
    /// That of `bwrap`, for as long as it is watched.
    registration: Weak<Registration>,
    exit_code: Option<i32>,
    killed: bool,
}

/// A line of `bwrap --json-status-fd`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Status {
    child_pid: Option<i32>,
    exit_code: Option<i32>,
}

impl Warden for Init {
    fn said(&mut self, status: &[u8]) -> Result<(), SandboxError> {
        for line in status.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
            let Ok(line) = serde_json::from_slice::<Status>(line) else { continue };
            self.exit_code = self.exit_code.or(line.exit_code);
            let Some((pid, gate)) = line.child_pid.and_then(Pid::from_raw).zip(self.gate.take()) else {
                continue;
            };
            // It waits at the gate, so the number is still its own.
            self.process = Some(rustix::process::pidfd_open(pid, PidfdFlags::empty())?);
            // The first process counts as one. Set from here, since before the namespace was made it would have counted all
            // processes of the user.
            let most = Some(self.processes + 1);
            let limit = Rlimit { current: most, maximum: most };
            rustix::process::prlimit(Some(pid), Resource::Nproc, limit)?;
            if let Some(registration) = self.registration.upgrade() {
                // It leaves the group of `bwrap` beyond the gate, and asks to die with it only later.
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
            // It may have ended by itself.
            let _gone = rustix::process::pidfd_send_signal(process, Signal::KILL);
        }
    }
}

impl Init {
    /// What became of the program, if it was started.
    fn verdict(&self, ran: Ran) -> Result<Ran, SandboxError> {
        let Some(code) = self.exit_code else {
            let said = String::from_utf8_lossy(&ran.stderr);
            let reason = match said.trim() {
                "" => format!("`bwrap` ended with {:?} before it started the program", ran.end),
                said => said.to_owned(),
            };
            return Err(SandboxError::Failed { reason });
        };
        let own = if code > 128 { End::Signal(code - 128) } else { End::Exit(code) };
        let end = if matches!(ran.end, End::Exit(_) | End::Signal(_)) { own } else { ran.end };
        Ok(Ran { end, ..ran })
    }
}
