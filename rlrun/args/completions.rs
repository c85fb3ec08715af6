//! The command line of `rlrun completions`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// `rlrun completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// What to write
    #[arg(value_enum)]
    pub kind: CompletionKind,
    /// Directory for the manual pages, one for each command [default: the page of `rlrun` alone, on standard output]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// A shell, or manual pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompletionKind {
    /// Completions of Bash
    Bash,
    /// Completions of Elvish
    Elvish,
    /// Completions of Fish
    Fish,
    /// Completions of PowerShell
    #[value(name = "powershell")]
    PowerShell,
    /// Completions of Zsh
    Zsh,
    /// Manual pages
    Man,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_that_documents_and_releases_name_are_accepted() {
        let between = |text: &'static str, before: &str, after: char| -> &'static str {
            let (_, rest) = text.split_once(before).expect("the text names the shells");
            rest.split_once(after).expect("the list of shells ends").0
        };
        let documented = between(include_str!("../../README.md"), "prints completions for ", ';');
        let released = between(include_str!("../../.github/workflows/release.yml"), "for shell in ", ';');
        for list in [documented, released] {
            let shells = list.split([' ', ',']).filter(|word| !word.is_empty() && *word != "or");
            let mut count = 0;
            for shell in shells {
                assert!(
                    CompletionKind::from_str(shell, false).is_ok(),
                    "`rlrun completions {shell}` is refused"
                );
                count += 1;
            }
            assert_eq!(count, 5, "{list}");
        }
    }
}
