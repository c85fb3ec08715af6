//! `rlrun report`: runs as one HTML file that opens without a server, and their curves as pictures.

mod pictures;

use std::path::Path;

use dashboard::ReportError;

use crate::args::ReportArgs;
use crate::failure::Failure;

/// Writes the files.
pub(super) fn report(args: &ReportArgs) -> Result<String, Failure> {
    let mut lines = Vec::new();
    let html = match (&args.output, &args.png) {
        (Some(output), _) => Some(output.as_path()),
        (None, None) => Some(Path::new("report.html")),
        (None, Some(_)) => None,
    };
    if let Some(output) = html {
        let html = dashboard::report(&args.runs).map_err(refused)?;
        write(output, html.as_bytes())?;
        lines.push(format!("wrote {}, {} KB; open it in a browser", output.display(), html.len() / 1000));
    }
    if let Some(place) = &args.png {
        lines.push(pictures::write_all(&args.runs, place)?);
    }
    Ok(lines.join("\n"))
}

fn refused(error: ReportError) -> Failure {
    match error {
        ReportError::Unreadable { path, source } => {
            Failure::System { what: format!("read {}", path.display()), source }
        }
        other => Failure::NotThere(other.to_string()),
    }
}

/// Writes a file whole: a reader sees the old one or the new one.
fn write(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let failed = |source| Failure::System { what: format!("write {}", path.display()), source };
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let temporary = path.with_extension(format!("{extension}.tmp"));
    std::fs::write(&temporary, content).map_err(failed)?;
    std::fs::rename(&temporary, path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_whole_and_what_is_no_run_is_refused() {
        let files = tempfile::tempdir().unwrap();
        let (run, output) = (files.path().join("run"), files.path().join("report.html"));
        std::fs::create_dir(&run).unwrap();
        let args = ReportArgs { runs: vec![run.clone()], output: Some(output.clone()), png: None };
        assert!(report(&args).unwrap_err().to_string().contains("is no run directory"));
        assert!(!output.exists());
        std::fs::write(run.join("metrics.jsonl"), "{\"step\":1,\"reward/mean\":0.625}\n").unwrap();
        assert!(report(&args).unwrap().starts_with("wrote "));
        let html = std::fs::read_to_string(&output).unwrap();
        assert!(html.contains("0.625") && html.trim_end().ends_with("</html>"));
        assert_eq!(std::fs::read_dir(files.path()).unwrap().count(), 2);
        let both = ReportArgs { png: Some(files.path().join("curves.png")), ..args };
        assert_eq!(report(&both).unwrap().lines().count(), 2);
        assert_eq!(std::fs::read_dir(files.path()).unwrap().count(), 3);
    }
}
