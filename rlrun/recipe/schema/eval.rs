//! The section `[eval]`.
//!
//! Invariant: `data.eval` is the set named `default`; which answers are correct is said once, here, for evaluation, curation
//! and every algorithm that asks.

use std::path::PathBuf;

use rewards::Criterion;
use serde::{Deserialize, Serialize};

use super::super::decode::one_or_many;

/// `[eval]`: accuracy on held-out tasks, before, during and after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Eval {
    /// Steps between evaluations; 0 is only before and after. TRL `eval_steps`, verl `test_freq`.
    // resume = changes, worker = ignored
    pub interval: u64,
    /// Most tasks of a set; all if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub tasks: Option<usize>,
    /// Answers per task: n of `eval/avg@n` and of `eval/pass@k`. More than one needs a temperature above 0. verl
    /// `val_kwargs.n`, prime-rl `rollouts_per_example`.
    // resume = changes, worker = ignored
    pub samples: usize,
    /// Sampling temperature; 0 takes the most likely token. verl `val_kwargs.temperature`.
    // resume = changes, worker = ignored
    pub temperature: f64,
    /// Which answers are correct; the first verifiable reward at full value if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correct: Option<Correct>,
    /// Further sets of held-out tasks, beside the one named `default` of `data.eval` or `data.arithmetic`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sets: Vec<EvalSet>,
}

impl Default for Eval {
    fn default() -> Self {
        Self { interval: 10, tasks: None, samples: 1, temperature: 0.0, correct: None, sets: Vec::new() }
    }
}

/// `[eval.correct]`: an answer is correct if one reward, before weighting, is worth at least the threshold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Correct {
    /// Name of the reward; the first verifiable one of the recipe if not given: `math`, `math_dapo`, `hendrycks`, `gsm8k`,
    /// `countdown`, `exact`, `code`, or `regex` with `compare = true`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = ignored
    pub reward: Option<String>,
    /// Least value of a correct answer.
    // resume = reward, worker = ignored
    pub threshold: f64,
}

impl Default for Correct {
    fn default() -> Self {
        Self { reward: None, threshold: Criterion::FULL }
    }
}

/// One entry of `[[eval.sets]]`: held-out tasks with metrics `eval/NAME/...` of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalSet {
    /// Name in metrics, unique: letters, digits, `-`, `_` and `.`; not `default`.
    // resume = changes, worker = ignored
    pub name: String,
    /// JSONL or Parquet files, or directories of them.
    #[serde(deserialize_with = "one_or_many")]
    // resume = changes, worker = ignored
    pub path: Vec<PathBuf>,
    /// Column of the prompt; that of `[data]` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub prompt_column: Option<String>,
    /// Column of the answer; that of `[data]` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub answer_column: Option<String>,
    /// Prompt with `{column}` placeholders, used instead of a prompt column; that of `[data]` if neither is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub prompt_template: Option<String>,
    /// Most tasks; `eval.tasks` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub tasks: Option<usize>,
    /// Answers per task; `eval.samples` if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub samples: Option<usize>,
}
