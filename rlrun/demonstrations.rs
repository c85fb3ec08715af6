//! Demonstrations as samples.
//!
//! Invariant: the tokens of a demonstration are those that sampling would produce: the encoded prompt, the encoded text, the
//! token that ends a completion.

use model::{ModelDirectory, SpecialTokens};
use rollout::tasks::arithmetic::{Demonstration, Sum};
use serde_json::Value;
use trajectory::{PolicyVersion, Prompt, Sample, SampleStreams, Task, VersionRun};

use crate::failure::Failure;

/// The text of a task's demonstration: a column of its row, or the worked answer of a generated addition.
///
/// # Errors
/// If the task has no such column, or the column is no text.
pub(crate) fn text(task: &Task, column: Option<&str>) -> Result<String, Failure> {
    let Some(column) = column else { return Ok(Sum::of(task)?.demonstration(Demonstration::Right)) };
    match task.columns.get(column) {
        Some(Value::String(text)) => Ok(text.clone()),
        found => {
            let found = found.map_or("is not there".to_owned(), |value| format!("is {value}"));
            let columns: Vec<&str> = task.columns.keys().map(String::as_str).collect();
            let there = columns.join(", ");
            Err(Failure::Argument(format!(
                "task {} has no text in column `{column}`: it {found}; its columns are {there}",
                task.id.0
            )))
        }
    }
}

/// Prompt, text and the token that ends it, as something to learn.
///
/// # Errors
/// If the prompt cannot be encoded.
pub(crate) fn sample(directory: &ModelDirectory, prompt: &Prompt, text: &str) -> Result<Sample, Failure> {
    let prompt = directory.encode_prompt(prompt)?;
    let mut token_ids = prompt.clone();
    token_ids.extend(directory.tokenizer().encode(text, SpecialTokens::Omit)?);
    token_ids.extend(directory.stop_token_ids().first());
    masked(token_ids, prompt.len())
}

/// Tokens of which those from `trained` on are in the loss.
///
/// # Errors
/// If there is nothing before them.
pub(crate) fn masked(token_ids: Vec<u32>, trained: usize) -> Result<Sample, Failure> {
    let loss_mask = (0..token_ids.len()).map(|t| t >= trained).collect();
    learnt(token_ids, loss_mask)
}

/// Tokens of which those of `loss_mask` are in the loss.
///
/// # Errors
/// If none is, or the first.
pub(crate) fn learnt(token_ids: Vec<u32>, loss_mask: Vec<bool>) -> Result<Sample, Failure> {
    let tokens = token_ids.len();
    let streams = SampleStreams {
        loss_mask,
        behavior_logprobs: vec![0.0; tokens],
        versions: vec![VersionRun { version: PolicyVersion::default(), len: tokens as u32 }],
        kept: None,
        temperature: 1.0,
        token_ids,
    };
    Sample::new(streams).map_err(|error| Failure::Internal(format!("a demonstration is no sample: {error}")))
}
