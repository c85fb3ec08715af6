//! The section `[data]`.
//!
//! Invariant: tasks come from one source: files, generated arithmetic, or seeds.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::super::decode::one_or_many;
use super::super::words::*;

/// `[data]`: files, generated arithmetic, or numbers for an environment that makes its own tasks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawData {
    /// Training tasks: files (`.jsonl`, `.json` with an array of objects or one object per line, `.csv`, `.parquet`,
    /// `.arrow`), directories of them, and what `save_to_disk` of the Python package `datasets` wrote; or
    /// `hf:OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]` on the Hugging Face Hub, by default its split `train`. TRL `dataset_name`,
    /// verl `data.train_files`.
    #[serde(deserialize_with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    // resume = tasks, worker = operator
    pub train: Vec<PathBuf>,
    /// Held-out tasks, named as in `data.train`; by default the split `test`, or else `validation`. verl `data.val_files`.
    #[serde(deserialize_with = "one_or_many", skip_serializing_if = "Vec::is_empty")]
    // resume = changes, worker = ignored
    pub eval: Vec<PathBuf>,
    /// Generated additions, or arithmetic questions in words, instead of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arithmetic: Option<ArithmeticSection>,
    /// Tasks of an environment that makes its own, instead of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seeds: Option<SeedsSection>,
    /// Column of the prompt. Default: the first usual name that the data has. verl `data.prompt_key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub prompt_column: Option<String>,
    /// Column of the answer. Default: the first usual name that the data has.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub answer_column: Option<String>,
    /// Prompt with `{column}` placeholders, used instead of a prompt column.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub prompt_template: Option<String>,
    /// System message put before every prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub system_prompt: Option<String>,
    /// Whether text prompts are rendered with the chat template of the model.
    // resume = tasks, worker = run
    pub chat: bool,
    /// Longest prompt in tokens. TRL (removed in 1.0) and verl `max_prompt_length`, prime-rl `seq_len`.
    // resume = tasks, worker = run
    pub max_prompt_length: usize,
    /// Action on longer prompts. verl `filter_overlong_prompts`.
    // resume = tasks, worker = run
    pub overlong_prompts: Overlong,
    /// Whether every epoch has a new random order of tasks. TRL `shuffle_dataset`, verl `data.shuffle`.
    // resume = tasks, worker = run
    pub shuffle: bool,
}

impl Default for RawData {
    fn default() -> Self {
        Self {
            train: Vec::new(),
            eval: Vec::new(),
            arithmetic: None,
            seeds: None,
            prompt_column: None,
            answer_column: None,
            prompt_template: None,
            system_prompt: None,
            chat: false,
            max_prompt_length: 512,
            overlong_prompts: Overlong::Error,
            shuffle: true,
        }
    }
}

/// `[data.arithmetic]`: additions such as `37+48=`, or questions in words. Training tasks and held-out tasks are disjoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ArithmeticSection {
    /// Kinds of questions in words, in turn, for a model that follows instructions. No training question has the numbers of a
    /// held-out question of its kind. Default: none; the tasks are additions such as `37+48=`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    // resume = tasks, worker = run
    pub questions: Vec<QuestionKind>,
    /// Largest operand of an addition; the smallest is 0. A third of the `questions` has operands up to this number, a third
    /// up to half of it, a third up to a quarter; factors are at most a quarter of these bounds.
    // resume = tasks, worker = run
    pub max_operand: u32,
    /// Number of training tasks.
    // resume = tasks, worker = run
    pub train_tasks: usize,
    /// Number of held-out tasks.
    // resume = tasks, worker = run
    pub eval_tasks: usize,
}

impl Default for ArithmeticSection {
    fn default() -> Self {
        Self { questions: Vec::new(), max_operand: 99, train_tasks: 8000, eval_tasks: 500 }
    }
}

/// `[data.seeds]`: tasks without data, for an environment that makes its own from the number of the task. A Python environment
/// or an OpenEnv server gets the number as `seed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SeedsSection {
    /// Number of training tasks, whose numbers begin at 0.
    // resume = tasks, worker = run
    pub train_tasks: usize,
    /// Number of held-out tasks, whose numbers follow.
    // resume = tasks, worker = run
    pub eval_tasks: usize,
    /// Prompt of every task, before what the environment says. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = tasks, worker = run
    pub prompt: Option<String>,
}

impl Default for SeedsSection {
    fn default() -> Self {
        Self { train_tasks: 10_000, eval_tasks: 200, prompt: None }
    }
}
