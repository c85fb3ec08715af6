//! `rlrun completions`: scripts of shells and manual pages, made of the definition of the command line.

use std::io;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::{Shell, generate};

use crate::args::{Cli, CompletionKind, CompletionsArgs};
use crate::failure::Failure;

/// The script or page, or which pages were written.
pub(super) fn completions(args: &CompletionsArgs) -> Result<String, Failure> {
    let shell = match args.kind {
        CompletionKind::Bash => Shell::Bash,
        CompletionKind::Elvish => Shell::Elvish,
        CompletionKind::Fish => Shell::Fish,
        CompletionKind::PowerShell => Shell::PowerShell,
        CompletionKind::Zsh => Shell::Zsh,
        CompletionKind::Man => return manual(args.out.as_deref()),
    };
    let mut script = Vec::new();
    generate(shell, &mut Cli::command(), "rlrun", &mut script);
    Ok(text(&script))
}

fn manual(directory: Option<&Path>) -> Result<String, Failure> {
    let failed = |source: io::Error| Failure::System { what: "write the manual pages".to_owned(), source };
    let Some(directory) = directory else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(failed)?;
        return Ok(text(&page));
    };
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), directory).map_err(failed)?;
    Ok(format!("wrote the manual pages to {}; read one with `man ./FILE`", directory.display()))
}

/// Bytes that a generator of text wrote, without the line end that printing adds.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_kind_names_the_commands() {
        for kind in CompletionKind::value_variants() {
            let written = completions(&CompletionsArgs { kind: *kind, out: None }).unwrap();
            assert!(written.contains("resume") && written.contains("explain"), "{kind:?}: {written}");
        }
    }

    #[test]
    fn every_command_has_a_manual_page() {
        let directory = tempfile::tempdir().unwrap();
        let pages = directory.path().join("man");
        completions(&CompletionsArgs { kind: CompletionKind::Man, out: Some(pages.clone()) }).unwrap();
        for page in ["rlrun.1", "rlrun-resume.1", "rlrun-serve-policy.1"] {
            assert!(std::fs::read_to_string(pages.join(page)).unwrap().contains(".TH"), "{page}");
        }
    }
}
