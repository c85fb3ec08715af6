//! A program of the user that runs beside a run: an uploader, a rollout engine.
//!
//! Invariant: it ends with this process, however that ends: a shell reads a pipe from it, which the kernel closes.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Pause between two looks at the program.
const LOOK_UP: Duration = Duration::from_millis(50);
/// Time after the grace in which the program ends or is killed.
const KILLED: Duration = Duration::from_secs(15);

/// Runs the program `$2...` and exits as it does. `$1` tenths of a second after standard input has ended the program gets SIGTERM. Once it has, or ten seconds later, what is left of the process group is killed.
const SCRIPT: &str = r#"
left=$1; shift
exec 3<&0
"$@" </dev/null 3<&- &
program=$!
(
  cat <&3 >/dev/null
  trap '' TERM
  alive() { [ "$left" -gt 0 ] && kill -0 "$program"; }
  while alive; do left=$((left - 1)); sleep 0.1; done
  kill "$program" || exit
  left=100
  while alive; do left=$((left - 1)); sleep 0.1; done
  kill -KILL 0
) 2>/dev/null &
watch=$!
exec 3<&-
wait "$program"
status=$?
kill "$watch" 2>/dev/null
wait "$watch" 2>/dev/null
exit "$status"
"#;

/// The program, in a shell that ends it.
#[derive(Debug)]
pub(crate) struct Companion {
    shell: Child,
    /// Its end tells the shell that this process has ended.
    input: Option<ChildStdin>,
    grace: Duration,
}

impl Companion {
    /// Starts `program`, whose output goes to the end of `log`. Once this process has ended it has `grace` to end by itself.
    ///
    /// # Errors
    /// A program that is not installed, a log that cannot be written, a process that cannot be started.
    pub(crate) fn start(
        program: &OsStr,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
        log: &Path,
        grace: Duration,
    ) -> io::Result<Self> {
        let look =
            Command::new("sh").args(["-c", "command -v \"$0\" >/dev/null 2>&1"]).arg(program).status()?;
        if !look.success() {
            let what = format!("there is no program `{}`", program.to_string_lossy());
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
        let output = File::options().append(true).create(true).open(log)?;
        let tenths = (grace.as_millis() / 100).to_string();
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT, "sh", &tenths])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(output.try_clone()?)
            .stderr(output)
            // Ctrl-C in the terminal is for the run.
            .process_group(0)
            .spawn()?;
        let input = shell.stdin.take();
        Ok(Self { shell, input, grace })
    }

    /// How it has ended; `None` while it runs.
    ///
    /// # Errors
    /// The system cannot say.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.shell.try_wait()
    }

    /// Waits for its end, as if this process had ended. `None` if it does not end.
    ///
    /// # Errors
    /// The system cannot say how it ended.
    pub(crate) fn finish(&mut self) -> io::Result<Option<ExitStatus>> {
        drop(self.input.take());
        let deadline = Instant::now() + self.grace + KILLED;
        while Instant::now() < deadline {
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            std::thread::sleep(LOOK_UP);
        }
        self.shell.kill()?;
        self.shell.wait()?;
        Ok(None)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program that runs `text`.
    pub(crate) fn stand_in(directory: &Path, text: &str) -> String {
        let path = directory.join("stand-in");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path.display().to_string()
    }

    fn start(program: &str, directory: &Path, grace: Duration) -> io::Result<Companion> {
        Companion::start(OsStr::new(program), ["a b"], &directory.join("log"), grace)
    }

    #[test]
    fn it_is_seen_to_end_and_has_its_arguments() {
        let files = tempfile::tempdir().unwrap();
        let program = stand_in(files.path(), "echo \"$# $1\"; exit 3");
        let mut companion = start(&program, files.path(), Duration::from_secs(60)).unwrap();
        let ended = loop {
            match companion.ended().unwrap() {
                Some(ended) => break ended,
                None => std::thread::sleep(LOOK_UP),
            }
        };
        assert_eq!(ended.code(), Some(3));
        assert_eq!(std::fs::read_to_string(files.path().join("log")).unwrap(), "1 a b\n");
        let missing = start("no-such-program", files.path(), Duration::ZERO).unwrap_err();
        assert_eq!(missing.to_string(), "there is no program `no-such-program`");
    }

    #[test]
    fn it_ends_with_this_process_also_if_it_does_not_want_to() {
        for trap in ["", "trap '' TERM;"] {
            let files = tempfile::tempdir().unwrap();
            let pids = files.path().join("pids");
            let text = format!(
                "{trap} sleep 600 & echo $$ $! >{0}.part; mv {0}.part {0}; wait; sleep 600",
                pids.display()
            );
            let program = stand_in(files.path(), &text);
            let mut companion = start(&program, files.path(), Duration::from_millis(100)).unwrap();
            while !pids.exists() {
                std::thread::sleep(LOOK_UP);
            }
            // What the kernel does when this process is killed.
            assert!(companion.finish().unwrap().is_some(), "the shell ends");
            for pid in std::fs::read_to_string(&pids).unwrap().split_whitespace() {
                let begun = Instant::now();
                // A zombie has ended.
                let runs = || {
                    let state = Command::new("ps").args(["-o", "stat=", "-p", pid]).output().unwrap().stdout;
                    !state.is_empty() && !state.starts_with(b"Z")
                };
                while runs() {
                    assert!(begun.elapsed() < KILLED, "process {pid} runs on");
                    std::thread::sleep(LOOK_UP);
                }
            }
        }
    }
}
