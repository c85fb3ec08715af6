//! The command line of `rlrun explain`.

use clap::Args;

/// `rlrun explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Keys (trainer.steps, steps), sections (trainer), words (grpo), or keys of other frameworks [default: a list
    /// of all sections]
    #[arg(value_name = "KEY")]
    pub names: Vec<String>,
}
