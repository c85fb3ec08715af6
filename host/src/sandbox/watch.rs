//! Watches a program until it ends: feeds it, reads what it writes, and kills it where a limit is passed.
//!
//! Invariant: this ends at the time limit and a grace of seconds at the latest, whatever the program does with its pipes. It
//! never waits for one pipe while another is full.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::spawn::{Spawned, Talk, ours};
use super::{Dialog, End, Job, Limits, Ran, SandboxError};

/// How often a cancellation is looked for.
const TICK: Duration = Duration::from_millis(50);
/// How long a killed program may take to be gone before what watches over it is killed too.
const GRACE: Duration = Duration::from_secs(2);
/// Longest status of a sandbox, bytes.
const MAX_STATUS: usize = 1 << 14;

/// Something that is told what the sandbox says of itself and knows how to kill what is in it.
pub(super) trait Warden {
    /// All that was said so far.
    fn said(&mut self, status: &[u8]) -> Result<(), SandboxError>;
    /// Kills the program, now or as soon as it is known how.
    fn kill(&mut self);
}

/// Where the pipes of a program go.
pub(super) struct Ends<'a> {
    pub(super) talk: Option<Talk>,
    pub(super) status: Option<OwnedFd>,
    pub(super) warden: Option<&'a mut dyn Warden>,
}

/// Watches a process, which leads its own process group, to its end.
pub(super) fn watch(
    Spawned { mut child, registration }: Spawned,
    job: Job<'_>,
    limits: &Limits,
    ends: Ends<'_>,
) -> Result<Ran, SandboxError> {
    let started = Instant::now();
    let result = Watch::new(&mut child, job, limits, ends).and_then(|mut watch| {
        let exit = child_exit(&child)?;
        watch.run(&child, &exit, started)?;
        Ok((watch.killed, watch.stdout.bytes, watch.stderr.bytes))
    });
    // Also where watching failed: nothing of it stays.
    kill_group(&child);
    // Its number is its own until it is waited for.
    drop(registration);
    let status = child.wait()?;
    let (killed, stdout, stderr) = result?;
    let end = killed.map_or_else(
        || status.signal().map_or_else(|| End::Exit(status.code().unwrap_or(-1)), End::Signal),
        |(end, _)| end,
    );
    Ok(Ran { end, stdout, stderr })
}

fn child_exit(child: &Child) -> Result<OwnedFd, SandboxError> {
    Ok(rustix::process::pidfd_open(pid(child)?, PidfdFlags::empty())?)
}

fn pid(child: &Child) -> Result<Pid, Errno> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)
}

/// Kills the group of `child`, which is not reaped yet, so the number is still its own.
fn kill_group(child: &Child) {
    if let Ok(pid) = pid(child) {
        // It may have no process any more; then there is nothing to do.
        let _gone = rustix::process::kill_process_group(pid, Signal::KILL);
    }
}

/// A pipe that we write to.
struct Feed<'a> {
    fd: Option<OwnedFd>,
    waiting: std::borrow::Cow<'a, [u8]>,
    written: usize,
    /// Whether more may come when all is written.
    open: bool,
}

impl Feed<'_> {
    fn wants(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().filter(|_| self.written < self.waiting.len()).map(AsFd::as_fd)
    }

    fn push(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.waiting.to_mut().extend_from_slice(bytes);
        }
    }

    fn pump(&mut self) {
        while let Some(fd) = &self.fd {
            if self.written == self.waiting.len() {
                if !self.open {
                    self.fd = None;
                }
                return;
            }
            match rustix::io::write(fd, &self.waiting[self.written..]) {
                Ok(count) => self.written += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // The program does not read it: its own choice.
                Err(_) => self.fd = None,
            }
        }
    }
}

/// A pipe that we read from, up to a limit.
struct Drain {
    fd: Option<OwnedFd>,
    bytes: Vec<u8>,
    limit: usize,
}

impl Drain {
    fn new(fd: Option<OwnedFd>, limit: usize) -> Self {
        Self { fd, bytes: Vec::new(), limit }
    }

    /// False if there is more than the limit.
    fn pump(&mut self) -> bool {
        let mut buffer = [0; 1 << 13];
        while let Some(fd) = &self.fd {
            match rustix::io::read(fd, &mut buffer) {
                Ok(0) => self.fd = None,
                Ok(count) => {
                    let room = self.limit - self.bytes.len();
                    self.bytes.extend_from_slice(&buffer[..count.min(room)]);
                    if count > room {
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

struct Watch<'a, 'w> {
    stdin: Feed<'a>,
    orders: Feed<'a>,
    stdout: Drain,
    stderr: Drain,
    report: Drain,
    status: Drain,
    /// Bytes of the report that were heard since the last order.
    heard: usize,
    dialog: Option<&'a mut dyn Dialog>,
    warden: Option<&'w mut dyn Warden>,
    cancelled: Option<&'a std::sync::atomic::AtomicBool>,
    wall: Duration,
    killed: Option<(End, Instant)>,
}

impl<'a, 'w> Watch<'a, 'w> {
    fn new(
        child: &mut Child,
        mut job: Job<'a>,
        limits: &Limits,
        ends: Ends<'w>,
    ) -> Result<Self, SandboxError> {
        let stdin = child.stdin.take().map(ours).transpose()?;
        let stdout = child.stdout.take().map(ours).transpose()?;
        let stderr = child.stderr.take().map(ours).transpose()?;
        let opening = job.dialog.as_mut().map(|dialog| dialog.opening()).unwrap_or_default();
        // The program's ends of the pipes close here, so that ours see their end.
        let (orders, report) = ends.talk.map(|talk| (talk.orders.ours, talk.report.ours)).unzip();
        Ok(Self {
            stdin: Feed { fd: stdin, waiting: job.stdin.into(), written: 0, open: false },
            orders: Feed { fd: orders, waiting: opening.into(), written: 0, open: true },
            stdout: Drain::new(stdout, limits.output),
            stderr: Drain::new(stderr, limits.output),
            report: Drain::new(report, limits.output),
            status: Drain::new(ends.status, MAX_STATUS),
            heard: 0,
            dialog: job.dialog,
            warden: ends.warden,
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
                self.kill(End::Timeout);
            }
            if self.killed.is_none() && self.cancelled.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                self.kill(End::Cancelled);
            }
            // A warden kills first what it watches over, so that it can still say what became of it.
            if self.killed.is_some_and(|(_, at)| self.warden.is_none() || at.elapsed() >= GRACE) {
                kill_group(child);
            }
        }
    }

    /// Waits until there is something to do; true if the program has ended.
    fn wait(&self, exit: &OwnedFd, started: Instant) -> Result<bool, SandboxError> {
        let mut fds = vec![PollFd::new(exit, PollFlags::IN)];
        for drain in [&self.stdout, &self.stderr, &self.report, &self.status] {
            // A killed program may have children that write on; they are not read any more.
            fds.extend(
                drain.fd.as_ref().filter(|_| self.killed.is_none()).map(|fd| PollFd::new(fd, PollFlags::IN)),
            );
        }
        for feed in [&self.stdin, &self.orders] {
            fds.extend(feed.wants().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::OUT)));
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
            self.kill(End::Output);
        }
        self.status.pump();
        if let Some(warden) = &mut self.warden {
            warden.said(&self.status.bytes)?;
        }
        self.talk();
        self.stdin.pump();
        self.orders.pump();
        Ok(())
    }

    /// Answers the lines of the report that are complete. The limit of the report is for what follows one order, so that many
    /// answers may be longer together, and one that nobody asked for may not go on for ever.
    fn talk(&mut self) {
        let Some(dialog) = &mut self.dialog else { return };
        while let Some(length) = self.report.bytes[self.heard..].iter().position(|byte| *byte == b'\n') {
            let line = self.heard..self.heard + length;
            self.heard = line.end + 1;
            let answer = dialog.answer(&self.report.bytes[line]);
            if !answer.is_empty() {
                self.orders.push(&answer);
                self.report.bytes.drain(..self.heard);
                self.heard = 0;
            }
        }
    }

    fn kill(&mut self, end: End) {
        self.killed = Some((end, Instant::now()));
        if let Some(warden) = &mut self.warden {
            warden.kill();
        }
    }
}
