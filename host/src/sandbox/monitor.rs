//! Monitors a program until it ends: writes its input, reads its output, and kills it at a limit.
//!
//! Invariant: this ends at the latest [`GRACE`] after the limit on wall time, whatever the program does with its pipes. It
//! never blocks on one pipe while another is full.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::spawn::{DialogPipes, SpawnedProgram, ours};
use super::{Dialog, ProgramEnd, ProgramRun, SandboxError, SandboxJob, SandboxLimits};

/// Interval at which cancellation is checked.
const TICK: Duration = Duration::from_millis(50);
/// Longest time from the kill of a program to its end; after it the sandbox around the program is killed too.
const GRACE: Duration = Duration::from_secs(2);
/// Longest status of a sandbox, bytes.
const MAX_STATUS: usize = 1 << 14;

/// Reads the status of a sandbox and kills the program in it.
pub(super) trait SandboxSupervisor {
    /// Takes all of the status so far.
    fn read_status(&mut self, status: &[u8]) -> Result<(), SandboxError>;
    /// Kills the program, as soon as its process is known.
    fn kill(&mut self);
}

/// The pipes of a program besides its standard streams, and its supervisor.
pub(super) struct ProgramPipes<'a> {
    pub(super) dialog: Option<DialogPipes>,
    pub(super) status: Option<OwnedFd>,
    pub(super) supervisor: Option<&'a mut dyn SandboxSupervisor>,
}

/// Monitors a process, the leader of a process group, to its end.
pub(super) fn monitor(
    SpawnedProgram { mut child, registration }: SpawnedProgram,
    job: SandboxJob<'_>,
    limits: &SandboxLimits,
    pipes: ProgramPipes<'_>,
) -> Result<ProgramRun, SandboxError> {
    let started = Instant::now();
    let result = ProgramMonitor::new(&mut child, job, limits, pipes).and_then(|mut monitor| {
        let exit = child_exit(&child)?;
        monitor.run(&child, &exit, started)?;
        Ok((monitor.killed, [monitor.stdout.bytes, monitor.stderr.bytes]))
    });
    // Also if monitoring failed, so that no process is left.
    kill_group(&child);
    // The process id is reused only after the wait.
    drop(registration);
    let status = child.wait()?;
    let (killed, [stdout, stderr]) = result?;
    let end = killed.map_or_else(
        || status.signal().map_or_else(|| ProgramEnd::Exit(status.code().unwrap_or(-1)), ProgramEnd::Signal),
        |(end, _)| end,
    );
    Ok(ProgramRun { end, stdout, stderr })
}

fn child_exit(child: &Child) -> Result<OwnedFd, SandboxError> {
    Ok(rustix::process::pidfd_open(pid(child)?, PidfdFlags::empty())?)
}

fn pid(child: &Child) -> Result<Pid, Errno> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)
}

/// Kills the process group of `child`. It is not reaped yet, so its id is not reused.
fn kill_group(child: &Child) {
    if let Ok(pid) = pid(child) {
        // An error means that no process is left.
        let _ended = rustix::process::kill_process_group(pid, Signal::KILL);
    }
}

/// A pipe to the program.
struct InputPipe<'a> {
    fd: Option<OwnedFd>,
    buffer: std::borrow::Cow<'a, [u8]>,
    written: usize,
    /// Whether more bytes may follow when all are written.
    open: bool,
}

impl InputPipe<'_> {
    fn writable(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().filter(|_| self.written < self.buffer.len()).map(AsFd::as_fd)
    }

    fn push(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.buffer.to_mut().extend_from_slice(bytes);
        }
    }

    fn pump(&mut self) {
        while let Some(fd) = &self.fd {
            if self.written == self.buffer.len() {
                if !self.open {
                    self.fd = None;
                }
                return;
            }
            match rustix::io::write(fd, &self.buffer[self.written..]) {
                Ok(count) => self.written += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // The program does not read its input.
                Err(_) => self.fd = None,
            }
        }
    }
}

/// A pipe from the program, read up to a limit.
struct OutputPipe {
    fd: Option<OwnedFd>,
    bytes: Vec<u8>,
    limit: usize,
}

impl OutputPipe {
    fn new(fd: Option<OwnedFd>, limit: usize) -> Self {
        Self { fd, bytes: Vec::new(), limit }
    }

    /// Reads the available bytes; false if they exceed the limit.
    fn pump(&mut self) -> bool {
        let mut part = [0; 1 << 13];
        while let Some(fd) = &self.fd {
            match rustix::io::read(fd, &mut part) {
                Ok(0) => self.fd = None,
                Ok(count) => {
                    let left = self.limit - self.bytes.len();
                    self.bytes.extend_from_slice(&part[..count.min(left)]);
                    if count > left {
                        return false;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                Err(_) => self.fd = None,
            }
        }
        true
    }
}

struct ProgramMonitor<'a, 'w> {
    stdin: InputPipe<'a>,
    orders: InputPipe<'a>,
    stdout: OutputPipe,
    stderr: OutputPipe,
    report: OutputPipe,
    status: OutputPipe,
    /// Bytes of the report, since the last order, that the dialog has answered.
    answered: usize,
    dialog: Option<&'a mut dyn Dialog>,
    supervisor: Option<&'w mut dyn SandboxSupervisor>,
    cancelled: Option<&'a std::sync::atomic::AtomicBool>,
    wall: Duration,
    killed: Option<(ProgramEnd, Instant)>,
}

impl<'a, 'w> ProgramMonitor<'a, 'w> {
    fn new(
        child: &mut Child,
        mut job: SandboxJob<'a>,
        limits: &SandboxLimits,
        pipes: ProgramPipes<'w>,
    ) -> Result<Self, SandboxError> {
        let stdin = child.stdin.take().map(ours).transpose()?;
        let stdout = child.stdout.take().map(ours).transpose()?;
        let stderr = child.stderr.take().map(ours).transpose()?;
        let opening = job.dialog.as_mut().map(|dialog| dialog.opening()).unwrap_or_default();
        // This drops the program's ends of the pipes, so that this process reads an end of file.
        let (orders, report) = pipes.dialog.map(|dialog| (dialog.orders.ours, dialog.report.ours)).unzip();
        Ok(Self {
            stdin: InputPipe { fd: stdin, buffer: job.stdin.into(), written: 0, open: false },
            orders: InputPipe { fd: orders, buffer: opening.into(), written: 0, open: true },
            stdout: OutputPipe::new(stdout, limits.output),
            stderr: OutputPipe::new(stderr, limits.output),
            report: OutputPipe::new(report, limits.output),
            status: OutputPipe::new(pipes.status, MAX_STATUS),
            answered: 0,
            dialog: job.dialog,
            supervisor: pipes.supervisor,
            cancelled: job.cancelled,
            wall: limits.wall,
            killed: None,
        })
    }

    fn run(&mut self, child: &Child, exit: &OwnedFd, started: Instant) -> Result<(), SandboxError> {
        loop {
            let ended = self.wait(exit, started)?;
            self.pump()?;
            if ended {
                return Ok(());
            }
            if self.killed.is_none() && started.elapsed() >= self.wall {
                self.kill(ProgramEnd::Timeout);
            }
            if self.killed.is_none() && self.cancelled.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                self.kill(ProgramEnd::Cancelled);
            }
            // A supervisor kills the program first, so that the sandbox can still report how it ended.
            if self.killed.is_some_and(|(_, at)| self.supervisor.is_none() || at.elapsed() >= GRACE) {
                kill_group(child);
            }
        }
    }

    /// Waits for an event of a pipe or the end of the program; true if the program has ended.
    fn wait(&self, exit: &OwnedFd, started: Instant) -> Result<bool, SandboxError> {
        let mut fds = vec![PollFd::new(exit, PollFlags::IN)];
        for pipe in [&self.stdout, &self.stderr, &self.report, &self.status] {
            // Children of a killed program may still write; this is no longer read.
            fds.extend(
                pipe.fd.as_ref().filter(|_| self.killed.is_none()).map(|fd| PollFd::new(fd, PollFlags::IN)),
            );
        }
        for pipe in [&self.stdin, &self.orders] {
            fds.extend(pipe.writable().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::OUT)));
        }
        let left = self.wall.saturating_sub(started.elapsed());
        let pause = if self.killed.is_some() { TICK } else { TICK.min(left) };
        let pause = Timespec { tv_sec: 0, tv_nsec: i64::from(pause.subsec_nanos()) };
        match rustix::event::poll(&mut fds, Some(&pause)) {
            Ok(_) | Err(Errno::INTR) => Ok(!fds[0].revents().is_empty()),
            Err(error) => Err(error.into()),
        }
    }

    fn pump(&mut self) -> Result<(), SandboxError> {
        let within = self.stdout.pump() & self.stderr.pump() & self.report.pump();
        if !within && self.killed.is_none() {
            self.kill(ProgramEnd::Output);
        }
        self.status.pump();
        if let Some(supervisor) = &mut self.supervisor {
            supervisor.read_status(&self.status.bytes)?;
        }
        self.answer();
        self.stdin.pump();
        self.orders.pump();
        Ok(())
    }

    /// Passes complete lines of the report to the dialog. The limit on output counts from the last order: all answers together
    /// may be longer, and one answer cannot be endless.
    fn answer(&mut self) {
        let Some(dialog) = &mut self.dialog else { return };
        while let Some(length) = self.report.bytes[self.answered..].iter().position(|byte| *byte == b'\n') {
            let line = self.answered..self.answered + length;
            self.answered = line.end + 1;
            let answer = dialog.answer(&self.report.bytes[line]);
            if !answer.is_empty() {
                self.orders.push(&answer);
                self.report.bytes.drain(..self.answered);
                self.answered = 0;
            }
        }
    }

    fn kill(&mut self, end: ProgramEnd) {
        self.killed = Some((end, Instant::now()));
        if let Some(supervisor) = &mut self.supervisor {
            supervisor.kill();
        }
    }
}
