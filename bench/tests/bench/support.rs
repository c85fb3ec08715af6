//! `rlrun-bench` as a user calls it, in a separate directory.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A working directory, which disappears with the test.
pub(crate) struct Home {
    root: tempfile::TempDir,
}

/// A finished command.
pub(crate) struct Done {
    output: Output,
}

impl Home {
    pub(crate) fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: &str) {
        std::fs::write(self.path(name), content).unwrap();
    }

    /// Runs `rlrun-bench` to its end.
    pub(crate) fn bench(&self, args: &[&str]) -> Done {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rlrun-bench"));
        let command = command.args(args).current_dir(self.root.path()).stdin(Stdio::null());
        Done { output: command.output().unwrap() }
    }
}

impl Done {
    /// The standard output.
    ///
    /// # Panics
    /// If the exit status is not 0.
    pub(crate) fn ok(self) -> String {
        let Output { status, stdout, stderr } = self.output;
        let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
        assert!(status.success(), "{status:?}\n{stdout}\n{stderr}");
        stdout
    }

    /// # Panics
    /// If the exit status is not 2 or `evidence` is missing in the message.
    pub(crate) fn refused(self, evidence: &str) {
        let stderr = String::from_utf8(self.output.stderr).unwrap();
        assert_eq!(self.output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(evidence), "`{evidence}` is missing in:\n{stderr}");
    }
}

/// The root of the repository.
pub(crate) fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}
