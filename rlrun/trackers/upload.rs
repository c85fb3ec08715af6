//! The user's `wandb` program, which uploads an offline run while it is written.
//!
//! Invariant: it ends with the run, however the run ends, and never holds a run up but for [`LAST`] at its end.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::report::Report;

/// Time for the last uploads at the end of a run.
const LAST: Duration = Duration::from_secs(60);
/// Pause between two looks at the program.
const LOOK_UP: Duration = Duration::from_millis(50);

/// Runs the program `$2...` until it ends by itself, or `$1` tenths of a second after standard input has ended: the kernel closes
/// the pipe however the run ends.
const SCRIPT: &str = r#"
left=$1; shift
"$@" </dev/null &
program=$!
cat >/dev/null
while [ "$left" -gt 0 ] && kill -0 "$program" 2>/dev/null; do left=$((left - 1)); sleep 0.1; done
kill "$program" 2>/dev/null
wait "$program"
"#;

/// The program, in a shell that ends it.
#[derive(Debug)]
pub(super) struct Uploader {
    shell: Child,
    /// Its end tells the shell that the run is over.
    input: Option<ChildStdin>,
    log: PathBuf,
}

impl Uploader {
    /// Starts `program` for the run in `directory`. Its output goes to `log`.
    ///
    /// # Errors
    /// A program that is not installed, a log that cannot be written, a process that cannot be started.
    pub(super) fn start(program: &str, directory: &Path, log: PathBuf) -> io::Result<Self> {
        let found = Command::new("sh")
            .args(["-c", "command -v \"$0\" >/dev/null 2>&1", program])
            .stdin(Stdio::null())
            .status()?;
        if !found.success() {
            let what = format!("there is no program `{program}`; install it with `pip install wandb`");
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
        let output = File::options().append(true).create(true).open(&log)?;
        let tenths = (LAST.as_millis() / 100).to_string();
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT, "sh", &tenths, program, "beta", "sync", "--live", "--yes"])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(output.try_clone()?)
            .stderr(output)
            // Ctrl-C in the terminal is for the run.
            .process_group(0)
            .spawn()?;
        let input = shell.stdin.take();
        Ok(Self { shell, input, log })
    }

    /// Waits for the last uploads, after the run has written its last record.
    pub(super) fn finish(mut self, directory: &Path, report: &Report) {
        drop(self.input.take());
        let log = self.log.display().to_string();
        let later = format!("upload it with `wandb sync {}`", directory.display());
        let said = match self.wait() {
            Ok(Some(status)) if status.success() => "the run is uploaded to W&B".to_owned(),
            Ok(Some(status)) => format!("`wandb` has not uploaded the run ({status}; see {log}): {later}"),
            Ok(None) => format!("`wandb` does not end (see {log}): {later}"),
            Err(error) => format!("`wandb` is lost ({error}): {later}"),
        };
        report.note(&said);
    }

    fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + LAST + Duration::from_secs(5);
        while Instant::now() < deadline {
            if let Some(status) = self.shell.try_wait()? {
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
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::report::Style;

    /// A program that writes its arguments and the content of `wait` to its output, once that file is there.
    fn stand_in(directory: &Path, text: &str) -> String {
        let path = directory.join("wandb-stand-in");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path.display().to_string()
    }

    fn report() -> Report {
        Report::new(Style::detect(true, &std::collections::BTreeMap::new()))
    }

    #[test]
    fn the_program_runs_beside_the_run_and_sees_its_end() {
        let files = tempfile::tempdir().unwrap();
        let (log, record) = (files.path().join("wandb.log"), files.path().join("exit"));
        let text =
            format!("echo \"$@\"; until [ -e {0} ]; do sleep 0.02; done; echo uploaded", record.display());
        let program = stand_in(files.path(), &text);
        let uploader = Uploader::start(&program, Path::new("the run"), log.clone()).unwrap();
        std::fs::write(&record, "").unwrap();
        uploader.finish(Path::new("the run"), &report());
        assert_eq!(std::fs::read_to_string(log).unwrap(), "beta sync --live --yes the run\nuploaded\n");
    }

    #[test]
    fn a_program_that_fails_or_is_missing_says_so() {
        let files = tempfile::tempdir().unwrap();
        let missing = Uploader::start("no-such-program", Path::new("run"), files.path().join("log"));
        assert!(missing.unwrap_err().to_string().contains("install it with `pip install wandb`"));
        let program = stand_in(files.path(), "exit 3");
        let mut uploader = Uploader::start(&program, Path::new("run"), files.path().join("log")).unwrap();
        drop(uploader.input.take());
        assert_eq!(uploader.wait().unwrap().unwrap().code(), Some(3));
    }

    #[test]
    fn it_ends_with_a_run_that_is_killed() {
        let files = tempfile::tempdir().unwrap();
        let pid = files.path().join("pid");
        let text = format!("echo $$ >{0}.part; mv {0}.part {0}; exec sleep 600", pid.display());
        let program = stand_in(files.path(), &text);
        // The shell of a run that ends at once: nothing but its standard input tells it so.
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT, "sh", "1", &program])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        while !pid.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(shell.stdin.take());
        assert!(!shell.wait().unwrap().success());
        let process = std::fs::read_to_string(&pid).unwrap();
        let alive = Command::new("sh")
            .args(["-c", &format!("kill -0 {}", process.trim())])
            .stderr(Stdio::null())
            .status();
        assert!(!alive.unwrap().success());
    }
}
