//! The command line of `rlrun export-logs`.

use std::path::PathBuf;

use clap::Args;

/// `rlrun export-logs`.
#[derive(Debug, Args)]
pub struct ExportLogsArgs {
    /// Run directory
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Write metrics, recipe and samples into a project of Trackio; needs Python 3.11 or newer
    #[arg(long, required = true)]
    pub trackio: bool,
    /// The project
    #[arg(long, value_name = "NAME", default_value = "rlrun", value_parser = project)]
    pub project: String,
    /// Trackio's directory [default: TRACKIO_DIR, or trackio in HF_HOME or ~/.cache/huggingface]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Python interpreter
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub python: PathBuf,
}

/// A name that Trackio takes.
fn project(name: &str) -> Result<String, String> {
    let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    if name.is_empty() || !plain || name.starts_with("registry-") {
        let rule = "a project has letters, digits, `-` and `_`, and does not begin with `registry-`";
        return Err(rule.to_owned());
    }
    Ok(name.to_owned())
}
