//! A process that outlives this one for a moment, and kills what this one has started.
//!
//! ```text
//!   rlrun, or a child of it before its exec --(pipe: "7 4711", "7 m0f..", "7")--> /bin/sh, which reads to the end
//! ```
//! The kernel closes the pipe however this process ends, so `kill -9` is seen too. A signal at the death of a parent
//! (`PR_SET_PDEATHSIG`) is not enough: a program can take it off, and one that executes from another thread than its
//! first loses it.
//!
//! Invariant: what is registered when this process ends gets SIGKILL: a process with its process group, and every process
//! that has a registered mark in its environment. It is registered before it runs foreign code and taken out before its
//! number is free again, so that no other process is hit. The shell decides nothing while this process lives.

use std::io::{self, Cursor, PipeWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::OFlags;

/// Name of the variable that a mark is the value of.
pub(crate) const MARK: &str = "RLRUN_REWARD_POOL";
/// Random bytes of a mark.
const MARK_BYTES: usize = 16;
/// Longest line, bytes: two numbers of 20 digits, or one and a mark. Below `PIPE_BUF`, so that a line is never torn.
const LINE: usize = 64;

/// Collects lines `TICKET PROCESS`, `TICKET MARK` and `TICKET`, which ends a ticket, and kills what is left at the end.
/// Marks begin with a letter. What has one gets two seconds to end by itself, as the parent of a pool knows more of what has
/// to end than can be told from environments. These are looked through again until nothing is found, as more may have been
/// forked meanwhile.
const SCRIPT: &str = r#"
trap '' HUP INT TERM
PATH=/usr/bin:/bin:/run/current-system/sw/bin
all=' '
while read -r ticket value; do
  if [ "$value" ]; then all="$all$ticket/$value "; continue; fi
  while :; do
    case $all in *" $ticket/"*) ;; *) break ;; esac
    rest=${all#*" $ticket/"}
    all="${all%%" $ticket/"*} ${rest#* }"
  done
done
marks=
for entry in $all; do
  value=${entry#*/}
  case $value in
    m*) marks="$marks $value" ;;
    *) kill -KILL "-$value"; kill -KILL "$value" ;;
  esac
done
look() {
  found=
  for mark in $marks; do
    for file in $(grep -lF "RLRUN_REWARD_POOL=$mark" /proc/[0-9]*/environ); do
      process=${file%/environ}
      kill "$1" "${process#/proc/}" && found=yes
    done
  done
}
tries=0
while [ "$marks" ] && [ "$tries" -lt 2 ]; do
  tries=$((tries + 1))
  look -0
  [ "$found" ] || exit 0
  sleep 1
done
while [ "$marks" ] && [ "$tries" -lt 1000 ]; do
  tries=$((tries + 1))
  look -KILL
  [ "$found" ] || exit 0
done
"#;

/// See the module.
#[derive(Debug)]
pub(crate) struct Reaper {
    shell: Mutex<Shell>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Shell {
    process: Child,
    pipe: Arc<PipeWriter>,
}

/// What is killed with this process until it is dropped, which has to be before the process that it is about is waited
/// for.
#[derive(Debug)]
pub(crate) struct Ticket {
    number: u64,
    pipe: Arc<PipeWriter>,
}

impl Reaper {
    /// Starts the shell.
    ///
    /// # Errors
    /// There is no `/bin/sh`, or no process can be started.
    pub(crate) fn start() -> io::Result<Self> {
        Ok(Self { shell: Mutex::new(Shell::start()?), next: AtomicU64::new(0) })
    }

    /// A ticket with nothing on it.
    ///
    /// # Errors
    /// The shell was killed, and no other can be started.
    pub(crate) fn ticket(&self) -> io::Result<Ticket> {
        let mut shell = self.shell.lock().unwrap_or_else(PoisonError::into_inner);
        if shell.process.try_wait()?.is_some() {
            // What was on earlier tickets is not watched any more; what starts from here on is.
            *shell = Shell::start()?;
        }
        Ok(Ticket { number: self.next.fetch_add(1, Ordering::Relaxed), pipe: Arc::clone(&shell.pipe) })
    }
}

impl Shell {
    fn start() -> io::Result<Self> {
        let (theirs, ours) = io::pipe()?;
        // A shell that does not read must not stop us.
        let flags = rustix::fs::fcntl_getfl(&ours)?;
        rustix::fs::fcntl_setfl(&ours, flags | OFlags::NONBLOCK)?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT]).env_clear().current_dir("/");
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        // Signals to our process group, such as those of a terminal, are not for it.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let process = command
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("/bin/sh cannot be started: {error}")))?;
        Ok(Self { process, pipe: Arc::new(ours) })
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // Tickets of it end with what they are about. An error says that it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Ticket {
    /// From now on `process` is on it, and the process group of that number. Also for use between fork and exec: it
    /// allocates nothing.
    pub(crate) fn add(&self, process: i32) -> io::Result<()> {
        self.say(format_args!("{} {process}\n", self.number))
    }

    /// From now on every process with this mark is on it.
    pub(crate) fn add_mark(&self, mark: &Mark) -> io::Result<()> {
        self.say(format_args!("{} {}\n", self.number, mark.0))
    }

    fn say(&self, line: std::fmt::Arguments<'_>) -> io::Result<()> {
        let mut bytes = [0_u8; LINE];
        let mut cursor = Cursor::new(&mut bytes[..]);
        cursor.write_fmt(line)?;
        let length = usize::try_from(cursor.position()).unwrap_or(LINE);
        loop {
            match rustix::io::write(self.pipe.as_fd(), &bytes[..length]) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // A shell that is gone has forgotten it.
        let _ = self.say(format_args!("{}\n", self.number));
    }
}

/// The value of [`MARK`] in the environment of processes that belong together; no other process has it by chance or can
/// guess it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mark(String);

impl Mark {
    /// A new one.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub(crate) fn new() -> io::Result<Self> {
        let bytes = random::<MARK_BYTES>()?;
        Ok(Self(format!("m{}", hex(&bytes))))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Bytes of the system's random source.
///
/// # Errors
/// It gives none.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| io::Error::other(format!("the system gives no random bytes: {error}")))?;
    Ok(bytes)
}

/// Two digits for each byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::time::{Duration, Instant};

    use super::*;

    /// Waits for its input to end, in a process group of its own.
    fn idle(mark: Option<&Mark>) -> Child {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "while read -r line; do :; done"]).stdin(Stdio::piped()).process_group(0);
        command.envs(mark.map(|mark| (MARK, mark.as_str())));
        command.spawn().unwrap()
    }

    fn ends(child: &mut Child) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "process {} lives", child.id());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn what_is_on_a_ticket_when_the_pipe_ends_is_killed_and_nothing_else() {
        let (mark, other) = (Mark::new().unwrap(), Mark::new().unwrap());
        assert_ne!(mark, other);
        let [mut ticketed, mut ended, mut second] = [idle(None), idle(None), idle(None)];
        let [mut marked, mut foreign] = [idle(Some(&mark)), idle(Some(&other))];
        let mut member = Command::new("/bin/sh");
        member.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
        let mut member = member.process_group(ticketed.id().try_into().unwrap()).spawn().unwrap();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", SCRIPT]).stdin(Stdio::piped()).stderr(Stdio::null());
        let mut shell = shell.spawn().unwrap();
        // Ticket 1 begins as ticket 11 does, and ends; 2 holds two processes.
        let lines = format!(
            "1 {}\n11 {}\n2 1{}\n12 {}\n11 {}\n3 {}\n2\n1\n",
            ended.id(),
            ticketed.id(),
            i32::MAX,
            second.id(),
            i32::MAX,
            mark.as_str()
        );
        shell.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        assert!(shell.wait().unwrap().success());
        [&mut ticketed, &mut second, &mut marked, &mut member].into_iter().for_each(ends);
        for survivor in [&mut ended, &mut foreign] {
            assert!(survivor.try_wait().unwrap().is_none(), "process {} was killed", survivor.id());
            survivor.kill().unwrap();
            survivor.wait().unwrap();
        }
    }

    #[test]
    fn a_shell_that_was_killed_is_replaced() {
        let reaper = Reaper::start().unwrap();
        let before = {
            let mut shell = reaper.shell.lock().unwrap();
            shell.process.kill().unwrap();
            shell.process.wait().unwrap();
            shell.process.id()
        };
        let ticket = reaper.ticket().unwrap();
        ticket.add(i32::MAX).unwrap();
        assert_ne!(reaper.shell.lock().unwrap().process.id(), before);
    }
}
