//! `rlrun report`: runs as one HTML file that opens without a server.

use dashboard::ReportError;

use crate::args::ReportArgs;
use crate::failure::Failure;

/// Writes the file.
pub(super) fn report(args: &ReportArgs) -> Result<String, Failure> {
    let html = dashboard::report(&args.runs).map_err(|error| match error {
        ReportError::Unreadable { path, source } => {
            Failure::System { what: format!("read {}", path.display()), source }
        }
        other => Failure::NotThere(other.to_string()),
    })?;
    let out = args.output.display();
    let failed = |source| Failure::System { what: format!("write {out}"), source };
    // A reader sees the old file or the new one.
    let temporary = args.output.with_extension("html.tmp");
    std::fs::write(&temporary, html.as_bytes()).map_err(failed)?;
    std::fs::rename(&temporary, &args.output).map_err(failed)?;
    Ok(format!("wrote {out}, {} KB; open it in a browser", html.len() / 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_whole_and_what_is_no_run_is_refused() {
        let files = tempfile::tempdir().unwrap();
        let (run, output) = (files.path().join("run"), files.path().join("report.html"));
        std::fs::create_dir(&run).unwrap();
        let args = ReportArgs { runs: vec![run.clone()], output: output.clone() };
        assert!(report(&args).unwrap_err().to_string().contains("is no run directory"));
        assert!(!output.exists());
        std::fs::write(run.join("metrics.jsonl"), "{\"step\":1,\"reward/mean\":0.625}\n").unwrap();
        assert!(report(&args).unwrap().starts_with("wrote "));
        let html = std::fs::read_to_string(&output).unwrap();
        assert!(html.contains("0.625") && html.trim_end().ends_with("</html>"));
        assert_eq!(std::fs::read_dir(files.path()).unwrap().count(), 2);
    }
}
