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
    PowerShell,
    /// Completions of Zsh
    Zsh,
    /// Manual pages
    Man,
}
