//! The command line of `rlrun explain`.

use clap::{Args, ValueEnum};

/// `rlrun explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Keys (trainer.steps, steps), sections (trainer), words (grpo), metrics (reward/mean), or keys of other frameworks
    /// [default: a list of all sections]
    #[arg(value_name = "KEY")]
    pub names: Vec<String>,
    /// Print a reference chapter of the documentation as Markdown
    #[arg(long, value_enum, value_name = "CHAPTER", conflicts_with = "names")]
    pub markdown: Option<MarkdownChapter>,
}

/// A reference chapter of the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MarkdownChapter {
    /// Every key of a recipe.
    Keys,
    /// Every metric of a run.
    Metrics,
    /// Names of other frameworks.
    Peers,
    /// Every algorithm.
    Algorithms,
    /// Every kind of reward.
    Rewards,
}
