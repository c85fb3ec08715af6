//! `rlrun export-logs`: the logs of a run in the store of an experiment tracker.
//!
//! Trackio keeps SQLite files and is a Python package, so its users have Python, whose library writes them.
//!
//! Invariant: the run is only read.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::args::ExportLogsArgs;
use crate::failure::Failure;
use crate::program::Program;

/// Writes a run into a database of Trackio.
const TRACKIO: &str = include_str!("../trackers/write_trackio.py");

/// Writes the logs of a run for Trackio.
pub(super) fn export_logs(args: &ExportLogsArgs, program: &Program) -> Result<String, Failure> {
    if !args.run.is_dir() {
        return Err(Failure::NotThere(format!("{} is no directory of a run", args.run.display())));
    }
    let directory = args.dir.clone().map_or_else(|| directory(program), Ok)?;
    let mut command = Command::new(&args.python);
    command.args(["-c", TRACKIO]).arg(&args.run).arg(&args.project).arg(&directory).stdin(Stdio::null());
    let failed = |source| Failure::System {
        what: format!("start {}; name a Python with --python", args.python.display()),
        source,
    };
    let output = command.output().map_err(failed)?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().last().unwrap_or("it says nothing").to_owned();
        return Err(Failure::NotThere(format!("the logs are not exported: {last}")));
    }
    let shown = format!("trackio show --project {}", args.project);
    Ok(format!("{}; next: {shown}", String::from_utf8_lossy(&output.stdout).trim_end()))
}

/// Where Trackio looks.
fn directory(program: &Program) -> Result<PathBuf, Failure> {
    let set =
        |name: &str| program.environment().get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = || set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    let hub = || set("HF_HOME").or_else(|| cache().map(|cache| cache.join("huggingface")));
    let found = set("TRACKIO_DIR").or_else(|| hub().map(|hub| hub.join("trackio")));
    found.ok_or_else(|| Failure::Argument("name the directory of Trackio with --dir".to_owned()))
}
