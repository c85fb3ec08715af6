//! The user's `wandb` program, which uploads an offline run while it is written.
//!
//! Invariant: it never holds a run up but for [`LAST`] at its end.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::companion::Companion;
use crate::report::Report;

/// Time for the last uploads at the end of a run.
const LAST: Duration = Duration::from_secs(60);

/// The program.
#[derive(Debug)]
pub(super) struct Uploader {
    program: Companion,
    log: PathBuf,
}

impl Uploader {
    /// Starts `program` for the run in `directory`. Its output goes to `log`.
    ///
    /// # Errors
    /// A program that is not installed, a log that cannot be written, a process that cannot be started.
    pub(super) fn start(program: &str, directory: &Path, log: PathBuf) -> io::Result<Self> {
        let arguments = ["beta", "sync", "--live", "--yes"].map(OsStr::new);
        let arguments = arguments.into_iter().chain([directory.as_os_str()]);
        let program = Companion::start(OsStr::new(program), arguments, &log, LAST)?;
        Ok(Self { program, log })
    }

    /// Waits for the last uploads, after the run has written its last record.
    pub(super) fn finish(mut self, directory: &Path, report: &Report) {
        let log = self.log.display();
        let later = format!("upload it with `wandb sync {}`", directory.display());
        report.note(&match self.program.finish() {
            Ok(Some(status)) if status.success() => "the run is uploaded to W&B".to_owned(),
            Ok(Some(status)) => format!("`wandb` has not uploaded the run ({status}; see {log}): {later}"),
            Ok(None) => format!("`wandb` does not end (see {log}): {later}"),
            Err(error) => format!("`wandb` is lost ({error}): {later}"),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::companion::tests::stand_in;
    use crate::report::Style;

    #[test]
    fn the_program_runs_beside_the_run_and_sees_its_end() {
        let files = tempfile::tempdir().unwrap();
        let (log, record) = (files.path().join("wandb.log"), files.path().join("exit"));
        let text =
            format!("echo \"$@\"; until [ -e {0} ]; do sleep 0.02; done; echo uploaded", record.display());
        let program = stand_in(files.path(), &text);
        let uploader = Uploader::start(&program, Path::new("the run"), log.clone()).unwrap();
        std::fs::write(&record, "").unwrap();
        let report = Report::new(Style::detect(true, &std::collections::BTreeMap::new()));
        uploader.finish(Path::new("the run"), &report);
        assert_eq!(std::fs::read_to_string(log).unwrap(), "beta sync --live --yes the run\nuploaded\n");
    }
}
