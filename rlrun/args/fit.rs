//! The command line of `rlrun fit`.

use std::path::PathBuf;

use clap::Args;

/// `rlrun fit`.
#[derive(Debug, Args)]
pub struct FitArgs {
    /// Run directories; several are also compared with each other
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// Metric to fit, by its name in metrics.jsonl
    #[arg(long, default_value = "eval/accuracy")]
    pub metric: String,
    /// Measure of compute: tokens (trained on), step, time_s, or another increasing metric [default: tokens, or step if a
    /// run has not counted tokens]
    #[arg(long, value_name = "COMPUTE")]
    pub compute: Option<String>,
    /// Ignore points below this compute, except the point before training
    #[arg(long, value_name = "X", value_parser = amount)]
    pub skip: Option<f64>,
    /// Fit points up to this compute only, and report the prediction error for the others
    #[arg(long, value_name = "X", value_parser = amount)]
    pub until: Option<f64>,
    /// Upper bound of the asymptote [default: 1 for an accuracy, else twice the range seen above the highest
    /// value]
    #[arg(long, value_name = "VALUE", value_parser = finite, allow_negative_numbers = true)]
    pub ceiling: Option<f64>,
    /// Draw points and curves into an SVG file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print one JSON object per run instead of text
    #[arg(long)]
    pub json: bool,
}

fn amount(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("it must be a number, 0 or more".to_owned()),
    }
}

fn finite(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|value| value.is_finite()).ok_or_else(|| "it must be a number".to_owned())
}
