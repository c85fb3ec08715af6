//! Finds a Python interpreter and the directories of its installation.
//!
//! Invariant: the interpreter itself reports them, outside of the sandbox and with the variables of the user, so that launchers
//! and virtual environments work. The user chose the interpreter; no program of the policy runs here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::{ProgramEnd, ReadableFiles, Sandbox, SandboxChoice, SandboxJob, SandboxLimits, readable};

/// Prints the fields of [`Interpreter`].
const QUESTION: &str = "import json, sys; print(json.dumps({'executable': sys.executable, 'directories': \
    [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]}))";
/// Longest start, also from the slow disks of clusters.
const PATIENCE: Duration = Duration::from_secs(60);

/// An interpreter.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Interpreter {
    /// The file that runs.
    pub executable: PathBuf,
    /// Where its library and its packages are.
    pub directories: Vec<PathBuf>,
}

impl Interpreter {
    /// Runs `python`, a name to be found on `PATH` or a path.
    ///
    /// # Errors
    /// It does not exist, or it is not Python 3; the text has the reason and the remedy.
    pub fn find(python: &str, variables: &BTreeMap<String, String>, scratch: &Path) -> Result<Self, String> {
        let path = variables.get("PATH").map_or("", String::as_str);
        let advice = "name an interpreter of Python 3 in `python`";
        let program = readable::find(python, path)
            .ok_or_else(|| format!("there is no program `{python}` in `PATH`; {advice}"))?;
        let failed = |reason: String| {
            format!("`{}` does not answer as Python does: {reason}; {advice}", program.display())
        };
        let sandbox = Sandbox::open(SandboxChoice::Unconfined, &ReadableFiles::default(), "", scratch);
        let sandbox = sandbox.map_err(|error| failed(error.to_string()))?;
        let job = SandboxJob {
            argv: vec![program.display().to_string(), "-c".to_owned(), QUESTION.to_owned()],
            environment: variables.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
            ..SandboxJob::default()
        };
        let limits = SandboxLimits {
            wall: PATIENCE,
            cpu: PATIENCE,
            memory: 4 << 30,
            output: 1 << 14,
            processes: u64::MAX,
        };
        let ran = sandbox.run(job, &limits).map_err(|error| failed(error.to_string()))?;
        if ran.end != ProgramEnd::Exit(0) {
            return Err(failed(format!("{:?}: {}", ran.end, String::from_utf8_lossy(&ran.stderr).trim())));
        }
        let mut found: Self =
            serde_json::from_slice(&ran.stdout).map_err(|error| failed(error.to_string()))?;
        let real = found.executable.canonicalize().map_err(|error| failed(error.to_string()))?;
        // A virtual environment links to an interpreter that lies elsewhere, in `bin` of its own directory.
        found.directories.extend(real.parent().and_then(Path::parent).map(Path::to_path_buf));
        found.directories.retain(|directory| directory.is_dir());
        Ok(found)
    }
}
