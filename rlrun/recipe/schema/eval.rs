//! The section `[eval]`.
//!
//! Invariant: `data.eval` is the set named `default`. `[eval.correct]` defines a correct answer for evaluation, curation and
//! every algorithm that needs it.

use std::path::PathBuf;

use rewards::Criterion;
use serde::{Deserialize, Serialize};

use super::super::decode::one_or_many;

/// `[eval]`: accuracy on held-out tasks before, during and after training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Eval {
    /// Steps between evaluations; 0 evaluates only before and after training. TRL `eval_steps`, verl `test_freq`.
    // resume = changes, worker = ignored
    pub interval: u64,
    /// Largest number of tasks of a set. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub tasks: Option<usize>,
    /// Answers per task: n of `eval/avg@n` and of `eval/pass@k`. Several answers need a temperature above 0. verl
    /// `val_kwargs.n`, prime-rl `rollouts_per_example`.
    // resume = changes, worker = ignored
    pub samples: usize,
    /// Sampling temperature; 0 takes the most likely token. verl `val_kwargs.temperature`.
    // resume = changes, worker = ignored
    pub temperature: f64,
    /// Definition of a correct answer. Default: full value of the first verifiable reward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correct: Option<Correct>,
    /// Sets of held-out tasks in addition to the set `default` of `data.eval` or `data.arithmetic`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sets: Vec<EvalSet>,
}

impl Default for Eval {
    fn default() -> Self {
        Self { interval: 10, tasks: None, samples: 1, temperature: 0.0, correct: None, sets: Vec::new() }
    }
}

/// `[eval.correct]`: an answer is correct if the value of one reward, before weighting, is at least the threshold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Correct {
    /// Name of the reward. Default: the first verifiable reward of the recipe: `math`, `math_dapo`, `hendrycks`, `gsm8k`,
    /// `countdown`, `exact`, `code`, or `regex` with `compare = true`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = reward, worker = ignored
    pub reward: Option<String>,
    /// Smallest reward of a correct answer.
    // resume = reward, worker = ignored
    pub threshold: f64,
}

impl Default for Correct {
    fn default() -> Self {
        Self { reward: None, threshold: Criterion::FULL }
    }
}

/// One entry of `[[eval.sets]]`: a set of held-out tasks with its metrics `eval/NAME/...`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalSet {
    /// Unique name in metrics: letters, digits, `-`, `_` and `.`; not `default`.
    // resume = changes, worker = ignored
    pub name: String,
    /// Files, directories or a dataset of the Hugging Face Hub, as in `data.eval`. Default: the tasks of the set `default`, in
    /// another environment.
    #[serde(default, deserialize_with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    // resume = changes, worker = ignored
    pub path: Vec<PathBuf>,
    /// Environment of its tasks, one of `environment.named`. Default: the one that the tasks name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub environment: Option<String>,
    /// Column of the prompt. Default: that of `[data]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub prompt_column: Option<String>,
    /// Column of the answer. Default: that of `[data]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub answer_column: Option<String>,
    /// Prompt with `{column}` placeholders, used instead of a prompt column. Default: that of `[data]`, if neither is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub prompt_template: Option<String>,
    /// Largest number of tasks. Default: `eval.tasks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub tasks: Option<usize>,
    /// Answers per task. Default: `eval.samples`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub samples: Option<usize>,
}
