//! Starts a program: pipes, limits, and the steps between fork and exec.
//!
//! Invariant: between fork and exec there are only system calls, on values made before the fork: no allocation, no lock. A
//! program inherits the descriptors of a list and no others. Before it runs it registers with the reaper, so that it ends with
//! this process whatever it does to its signals, descriptors and threads.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::FdFlags;
use rustix::pipe::PipeFlags;
use rustix::process::{Resource, Rlimit, Signal};

use super::{SandboxJob, SandboxLimits};
use crate::reaper::{Reaper, ReaperRegistration};

/// Largest file, bytes.
const FILE_BYTES: u64 = 16 << 20;
/// Most descriptors.
const OPEN_FILES: u64 = 256;
/// The lowest number of an inherited descriptor, above those that programs use by convention.
const FIRST_FD: RawFd = 10;

/// Restrictions that are applied before the program runs.
#[derive(Debug, Default)]
pub(super) struct Confinement {
    /// Landlock's rules.
    pub(super) ruleset: Option<OwnedFd>,
    /// Filter of system calls.
    pub(super) filter: seccompiler::BpfProgram,
    /// Whether all privileges are dropped, also those of root.
    pub(super) unprivileged: bool,
}

/// A running process, and its registration with the reaper.
#[derive(Debug)]
pub(super) struct SpawnedProgram {
    pub(super) child: Child,
    pub(super) registration: Arc<ReaperRegistration>,
}

/// Both ends of a pipe: the end of this process does not block, the program inherits the other.
#[derive(Debug)]
pub(super) struct PipePair {
    pub(super) ours: OwnedFd,
    pub(super) theirs: OwnedFd,
}

impl PipePair {
    /// This process reads.
    pub(super) fn from_program() -> io::Result<Self> {
        let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        Self::new(ours, &theirs)
    }

    /// This process writes.
    pub(super) fn to_program() -> io::Result<Self> {
        let (theirs, ours) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        Self::new(ours, &theirs)
    }

    fn new(ours: OwnedFd, theirs: &OwnedFd) -> io::Result<Self> {
        rustix::fs::fcntl_setfl(&ours, OFlags::NONBLOCK)?;
        Ok(Self { ours, theirs: raised(theirs)? })
    }

    /// The number of the inherited descriptor.
    pub(super) fn number(&self) -> String {
        self.theirs.as_raw_fd().to_string()
    }
}

/// A copy of a descriptor with a number of at least [`FIRST_FD`].
pub(super) fn raised(fd: &impl AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, FIRST_FD)?)
}

/// A pipe whose reader also keeps it open for writing: if this process dies, the reader blocks and never reads an end of file.
pub(super) fn gate() -> io::Result<PipePair> {
    let PipePair { ours, theirs } = PipePair::to_program()?;
    let both = rustix::fs::open(
        format!("/proc/self/fd/{}", theirs.as_raw_fd()),
        OFlags::RDWR | OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    Ok(PipePair { ours, theirs: raised(&both)? })
}

/// The pipes of a dialog.
#[derive(Debug)]
pub(super) struct DialogPipes {
    pub(super) orders: PipePair,
    pub(super) report: PipePair,
}

impl DialogPipes {
    /// The pipes, if the job has a dialog.
    pub(super) fn open(job: &SandboxJob<'_>) -> io::Result<Option<Self>> {
        if job.dialog.is_none() {
            return Ok(None);
        }
        Ok(Some(Self { orders: PipePair::to_program()?, report: PipePair::from_program()? }))
    }
}

/// The arguments of a job with the placeholders for its file and its pipes replaced.
pub(super) fn arguments(
    job: &SandboxJob<'_>,
    file: Option<&str>,
    dialog: Option<&DialogPipes>,
) -> Vec<String> {
    let fill = |argument: &String| match dialog {
        _ if argument.contains("{file}") => argument.replace("{file}", file.unwrap_or_default()),
        Some(pipes) if argument == "{orders}" => pipes.orders.number(),
        Some(pipes) if argument == "{report}" => pipes.report.number(),
        _ => argument.clone(),
    };
    job.argv.iter().map(fill).collect()
}

/// Starts `command` with pipes for its standard streams. It inherits the descriptors in `inherited`.
pub(super) fn spawn(
    mut command: Command,
    inherited: &[&OwnedFd],
    limits: &SandboxLimits,
    reaper: &Reaper,
    confinement: Confinement,
) -> io::Result<SpawnedProgram> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let parent = rustix::process::getpid();
    let kept: Vec<RawFd> = inherited.iter().map(|fd| fd.as_raw_fd()).collect();
    let limits = resource_limits(limits);
    let registration = Arc::new(reaper.register()?);
    let theirs = Arc::clone(&registration);
    let prepare = move || {
        theirs.add_process(rustix::process::getpid().as_raw_nonzero().get())?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the call.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        close_on_exec_from(3)?;
        for fd in &kept {
            keep(*fd)?;
        }
        for (resource, value) in limits {
            let value = Rlimit { current: Some(value), maximum: Some(value) };
            rustix::process::setrlimit(resource, value)?;
        }
        confine(&confinement)
    };
    #[expect(unsafe_code, reason = "the closure runs between fork and exec; it makes system calls only")]
    unsafe {
        command.pre_exec(prepare);
    }
    let child = command.spawn()?;
    Ok(SpawnedProgram { child, registration })
}

fn resource_limits(limits: &SandboxLimits) -> [(Resource, u64); 5] {
    let seconds = limits.cpu.as_secs() + u64::from(limits.cpu.subsec_nanos() > 0);
    [
        (Resource::Core, 0),
        (Resource::Fsize, FILE_BYTES),
        (Resource::Nofile, OPEN_FILES),
        (Resource::As, limits.memory),
        (Resource::Cpu, seconds.max(1)),
    ]
}

/// Marks all descriptors from `first` on to be closed by exec.
#[expect(
    unsafe_code,
    reason = "close_range has no safe wrapper; it takes plain numbers and marks descriptors only"
)]
fn close_on_exec_from(first: libc::c_uint) -> io::Result<()> {
    let done =
        unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[expect(
    unsafe_code,
    reason = "borrows a descriptor by number; its owner lives in the parent until after the exec"
)]
fn keep(fd: RawFd) -> io::Result<()> {
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    Ok(rustix::io::fcntl_setfd(fd, FdFlags::empty())?)
}

/// Applies the restrictions; they cannot be undone.
fn confine(confinement: &Confinement) -> io::Result<()> {
    if confinement.unprivileged {
        let none = rustix::thread::CapabilitySet::empty();
        let none = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
        rustix::thread::set_capabilities(None, none)?;
        // After this call exec cannot restore privileges, not even for root.
        rustix::thread::set_no_new_privs(true)?;
    }
    if let Some(ruleset) = &confinement.ruleset {
        restrict(ruleset)?;
    }
    if confinement.filter.is_empty() { Ok(()) } else { load_filter(&confinement.filter) }
}

#[expect(
    unsafe_code,
    reason = "the system call has no wrapper that is safe after a fork; it takes plain numbers"
)]
fn restrict(ruleset: &OwnedFd) -> io::Result<()> {
    let done = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn load_filter(filter: &[seccompiler::sock_filter]) -> io::Result<()> {
    seccompiler::apply_filter(filter).map_err(|error| match error {
        seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
        _ => io::Error::from_raw_os_error(libc::EINVAL),
    })
}

/// A file in memory with `contents`, positioned at its start.
pub(super) fn in_memory(name: &str, contents: &[u8]) -> io::Result<OwnedFd> {
    use std::io::{Seek, Write};
    let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(raised(&fd)?);
    file.write_all(contents)?;
    file.rewind()?;
    Ok(file.into())
}

/// The end of this process of a standard stream, without blocking.
pub(super) fn ours(stream: impl Into<OwnedFd>) -> io::Result<OwnedFd> {
    let fd = stream.into();
    rustix::fs::fcntl_setfl(&fd, OFlags::NONBLOCK)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_replaced() {
        let argv = vec!["run".to_owned(), "-o{file}".to_owned(), "{orders}".to_owned()];
        let job = SandboxJob { argv, ..SandboxJob::default() };
        assert_eq!(arguments(&job, Some("/box/a.py"), None), ["run", "-o/box/a.py", "{orders}"]);
        let pipes = DialogPipes {
            orders: PipePair::to_program().unwrap(),
            report: PipePair::from_program().unwrap(),
        };
        assert_eq!(arguments(&job, None, Some(&pipes)), ["run", "-o", &pipes.orders.number()]);
        assert!(pipes.orders.theirs.as_raw_fd() >= FIRST_FD);
    }
}
