//! Finds an interpreter of Python and the directories that it lives in.
//!
//! Invariant: the interpreter is asked itself, outside of the sandbox and with the variables of the user, so that launchers and
//! virtual environments work; it is the user's own choice, not the policy's. No program of the policy is run here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use host::sandbox::{Choice, End, Job, Limits, Sandbox, View, view};

/// Prints what [`Interpreter`] holds.
const QUESTION: &str = "import json, sys; print(json.dumps({'executable': sys.executable, 'directories': \
    [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]}))";
/// Slow disks of clusters included.
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
    /// Asks `python`, a name to be found in the variable `PATH` or a path.
    ///
    /// # Errors
    /// It is not there, or it is no Python 3; the text says what happened and what to do.
    pub fn find(python: &str, variables: &BTreeMap<String, String>, scratch: &Path) -> Result<Self, String> {
        let path = variables.get("PATH").map_or("", String::as_str);
        let advice = "name an interpreter of Python 3 in `python`";
        let program = view::find(python, path)
            .ok_or_else(|| format!("there is no program `{python}` in `PATH`; {advice}"))?;
        let failed = |reason: String| {
            format!("`{}` does not answer as Python does: {reason}; {advice}", program.display())
        };
        let sandbox = Sandbox::open(Choice::Unconfined, &View::default(), "", scratch);
        let sandbox = sandbox.map_err(|error| failed(error.to_string()))?;
        let job = Job {
            argv: vec![program.display().to_string(), "-c".to_owned(), QUESTION.to_owned()],
            environment: variables.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
            ..Job::default()
        };
        let limits =
            Limits { wall: PATIENCE, cpu: PATIENCE, memory: 4 << 30, output: 1 << 14, processes: u64::MAX };
        let ran = sandbox.run(job, &limits).map_err(|error| failed(error.to_string()))?;
        if ran.end != End::Exit(0) {
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
