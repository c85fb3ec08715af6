//! The arguments of `rlrun reward`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The commands of `rlrun reward`.
#[derive(Debug, Subcommand)]
pub enum RewardCommand {
    /// Grade cases from standard input, one JSON object a line, with one kind of reward
    Grade(GradeArgs),
    /// Try the rewards of a recipe on rows of its data: with the reference answer, and with a wrong one
    Test(RewardTestArgs),
}

/// `rlrun reward grade`.
#[derive(Debug, Args)]
pub struct GradeArgs {
    /// Kind of reward, such as `math`
    pub kind: String,
    /// Field of a case with the reference answer
    #[arg(long, value_name = "FIELD", default_value = "gold")]
    pub gold_field: String,
    /// Field of a case with the text to grade
    #[arg(long, value_name = "FIELD", default_value = "pred")]
    pub pred_field: String,
    /// Give the reward a key, such as `method=\"flexible\"`; can be repeated. A field of a case that is named
    /// `strict`, `method`, `strict_box`, `compare` or `format_score` counts for that case
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// `rlrun reward test`.
#[derive(Debug, Args)]
pub struct RewardTestArgs {
    /// Recipe file
    pub recipe: PathBuf,
    /// Rows of the training data
    #[arg(long, default_value_t = 3)]
    pub n: usize,
    /// Change a value, such as `data.train=other.jsonl`; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}
