//! A process that outlives this one for a moment and kills the processes that this one started.
//!
//! ```text
//!   rlrun, or a child of it before its exec --(pipe: "7 4711", "7 m0f..", "7")--> /bin/sh, which reads to the end
//! ```
//! The kernel closes the pipe however this process ends, so the shell also sees `kill -9`. A signal at the death of the parent
//! (`PR_SET_PDEATHSIG`) is not enough: a program can remove it, and one that calls exec from another thread than its first
//! loses it.
//!
//! Invariant: what is registered when this process ends gets SIGKILL: a process with its process group, and every process
//! that has a registered tag in its environment. It is registered before it runs foreign code and removed before its process
//! id is free again, so that no other process is hit. The shell decides nothing while this process lives.

use std::io::{self, Cursor, PipeWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::OFlags;

/// Environment variable that holds the tag of a pool.
pub(crate) const TAG_VARIABLE: &str = "RLRUN_PROCESS_POOL";
/// Random bytes of a tag.
const TAG_BYTES: usize = 16;
/// Longest line, bytes: two numbers of 20 digits, or one and a tag. Below `PIPE_BUF`, so that each line is written whole.
const LINE: usize = 64;

/// Reads lines `REGISTRATION PROCESS` and `REGISTRATION TAG`, and `REGISTRATION` alone, which removes it; at the end it kills
/// what is left. Tags begin with a letter. Processes with a tag get two seconds to end, because the fork server of a pool knows
/// processes that have lost the tag. The environments are searched until none has a tag: processes may have forked meanwhile.
const SCRIPT: &str = r#"
trap '' HUP INT TERM
PATH=/usr/bin:/bin:/run/current-system/sw/bin
all=' '
while read -r entry value; do
  if [ "$value" ]; then all="$all$entry/$value "; continue; fi
  while :; do
    case $all in *" $entry/"*) ;; *) break ;; esac
    rest=${all#*" $entry/"}
    all="${all%%" $entry/"*} ${rest#* }"
  done
done
tags=
for item in $all; do
  value=${item#*/}
  case $value in
    m*) tags="$tags $value" ;;
    *) kill -KILL "-$value"; kill -KILL "$value" ;;
  esac
done
look() {
  found=
  for tag in $tags; do
    for file in $(grep -lF "RLRUN_PROCESS_POOL=$tag" /proc/[0-9]*/environ); do
      process=${file%/environ}
      kill "$1" "${process#/proc/}" && found=yes
    done
  done
}
tries=0
while [ "$tags" ] && [ "$tries" -lt 2 ]; do
  tries=$((tries + 1))
  look -0
  [ "$found" ] || exit 0
  sleep 1
done
while [ "$tags" ] && [ "$tries" -lt 1000 ]; do
  tries=$((tries + 1))
  look -KILL
  [ "$found" ] || exit 0
done
"#;

/// The shell process, and the numbers of the registrations.
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

/// Processes that are killed with this one until this is dropped. It has to be dropped before they are waited for.
#[derive(Debug)]
pub(crate) struct ReaperRegistration {
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

    /// A registration without processes.
    ///
    /// # Errors
    /// The shell was killed, and no other can be started.
    pub(crate) fn register(&self) -> io::Result<ReaperRegistration> {
        let mut shell = self.shell.lock().unwrap_or_else(PoisonError::into_inner);
        if shell.process.try_wait()?.is_some() {
            // Processes of earlier registrations are no longer watched; those that start from here on are.
            *shell = Shell::start()?;
        }
        Ok(ReaperRegistration {
            number: self.next.fetch_add(1, Ordering::Relaxed),
            pipe: Arc::clone(&shell.pipe),
        })
    }
}

impl Shell {
    fn start() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        // A shell that does not read must not block this process.
        let flags = rustix::fs::fcntl_getfl(&writer)?;
        rustix::fs::fcntl_setfl(&writer, flags | OFlags::NONBLOCK)?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT]).env_clear().current_dir("/");
        command.stdin(OwnedFd::from(reader)).stdout(Stdio::null()).stderr(Stdio::null());
        // A process group of its own: it gets no signals of the terminal.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let process = command
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("/bin/sh cannot be started: {error}")))?;
        Ok(Self { process, pipe: Arc::new(writer) })
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl ReaperRegistration {
    /// Adds the process `process` and its process group. Can be called between fork and exec: it allocates nothing.
    pub(crate) fn add_process(&self, process: i32) -> io::Result<()> {
        self.send(format_args!("{} {process}\n", self.number))
    }

    /// Adds every process with this tag.
    pub(crate) fn add_tag(&self, tag: &PoolTag) -> io::Result<()> {
        self.send(format_args!("{} {}\n", self.number, tag.0))
    }

    fn send(&self, line: std::fmt::Arguments<'_>) -> io::Result<()> {
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

impl Drop for ReaperRegistration {
    fn drop(&mut self) {
        // A shell that has ended has no registrations.
        let _ = self.send(format_args!("{}\n", self.number));
    }
}

/// The value of [`TAG_VARIABLE`] in the environment of the processes of one pool; random, so that no other process has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolTag(String);

impl PoolTag {
    /// A new tag.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(format!("m{}", crate::random::hex(TAG_BYTES)?)))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::time::{Duration, Instant};

    use super::*;

    /// A shell that waits for the end of its input, in a process group of its own.
    fn idle(tag: Option<&PoolTag>) -> Child {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "while read -r line; do :; done"]).stdin(Stdio::piped()).process_group(0);
        command.envs(tag.map(|tag| (TAG_VARIABLE, tag.as_str())));
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
    fn registered_processes_are_killed_when_the_pipe_closes_and_no_others() {
        let (tag, other) = (PoolTag::new().unwrap(), PoolTag::new().unwrap());
        assert_ne!(tag, other);
        let [mut registered, mut ended, mut second] = [idle(None), idle(None), idle(None)];
        let [mut tagged, mut foreign] = [idle(Some(&tag)), idle(Some(&other))];
        let mut member = Command::new("/bin/sh");
        member.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
        let mut member = member.process_group(registered.id().try_into().unwrap()).spawn().unwrap();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", SCRIPT]).stdin(Stdio::piped()).stderr(Stdio::null());
        let mut shell = shell.spawn().unwrap();
        // ReaperRegistration 1 has a prefix of the number 11 and is removed; 2 has two processes.
        let lines = format!(
            "1 {}\n11 {}\n2 1{}\n12 {}\n11 {}\n3 {}\n2\n1\n",
            ended.id(),
            registered.id(),
            i32::MAX,
            second.id(),
            i32::MAX,
            tag.as_str()
        );
        shell.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        assert!(shell.wait().unwrap().success());
        [&mut registered, &mut second, &mut tagged, &mut member].into_iter().for_each(ends);
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
        let registration = reaper.register().unwrap();
        registration.add_process(i32::MAX).unwrap();
        assert_ne!(reaper.shell.lock().unwrap().process.id(), before);
    }
}
