//! `samples/step_N_tokens.jsonl`: the trajectories of `samples/step_N.jsonl` token by token.
//!
//! Invariant: a line has one row of a trajectory, with at most [`MAX_TOKENS`] tokens. A column has a value for every token, null
//! where there is none.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use model::ModelDirectory;
use serde_json::{Value, json};
use trainer::token_log::RowTokens;
use trajectory::{Group, Sample};

use super::samples::written;
use crate::failure::Failure;

/// Most tokens of a row.
const MAX_TOKENS: usize = 8192;

/// Writes rows token by token.
#[derive(Debug)]
pub(super) struct TokenWriter {
    directory: Arc<ModelDirectory>,
    /// Texts of the tokens seen so far; at most one for each token of the vocabulary.
    texts: HashMap<u32, String>,
}

impl TokenWriter {
    /// With the tokenizer of `directory`.
    pub(super) fn new(directory: Arc<ModelDirectory>) -> Self {
        Self { directory, texts: HashMap::new() }
    }

    /// Writes the rows of `groups`, of which `rows` have the values of the trainer.
    pub(super) fn write(
        &mut self,
        path: &Path,
        groups: &[Arc<Group>],
        rows: &[RowTokens],
    ) -> Result<(), Failure> {
        written(path, |file| groups.iter().try_for_each(|group| self.group(file, group, rows)))
    }

    fn group(&mut self, out: &mut impl Write, group: &Group, rows: &[RowTokens]) -> io::Result<()> {
        for trajectory in &group.trajectories {
            for (branch, sample) in trajectory.samples().enumerate() {
                let own = rows
                    .iter()
                    .find(|row| (row.group, row.index, row.branch) == (group.id, trajectory.index, branch));
                let mut line = self.row(sample, own);
                line["group"] = json!(group.id);
                line["index"] = trajectory.index.into();
                line["branch"] = branch.into();
                writeln!(out, "{line}")?;
            }
        }
        Ok(())
    }

    fn row(&mut self, sample: &Sample, own: Option<&RowTokens>) -> Value {
        let (ids, mask) = (sample.token_ids(), sample.loss_mask());
        let shown = ids.len().min(MAX_TOKENS);
        let texts: Vec<&str> = {
            for id in &ids[..shown] {
                let decode = |directory: &ModelDirectory| directory.tokenizer().decode_special(&[*id]);
                let Self { directory, texts } = self;
                texts.entry(*id).or_insert_with(|| decode(directory).unwrap_or_default());
            }
            ids[..shown].iter().map(|id| &self.texts[id][..]).collect()
        };
        let behavior = sample.behavior_logprobs();
        let behavior = (0..shown).map(|t| mask[t].then(|| rounded(f64::from(behavior[t]))));
        let behavior: Vec<Option<f64>> = behavior.collect();
        let mut line = json!({
            "token_ids": ids[..shown],
            "texts": texts,
            "loss_mask": mask[..shown].iter().map(|trained| u8::from(*trained)).collect::<Vec<_>>(),
            "behavior_logprobs": behavior,
            "trainer_logprobs": column(mask, shown, own.and_then(|row| row.start_logprobs.as_deref())),
            "advantages": column(mask, shown, own.map(|row| &row.advantages[..])),
            "versions": sample.versions(),
        });
        if shown < ids.len() {
            line["tokens"] = ids.len().into();
        }
        line
    }
}

/// Values of the trained tokens at their places among all tokens, `[shown]`.
fn column(mask: &[bool], shown: usize, trained: Option<&[f64]>) -> Vec<Option<f64>> {
    let mut values = trained.unwrap_or_default().iter();
    let each = mask[..shown].iter().map(|trained| trained.then(|| values.next().copied().map(rounded)));
    each.map(Option::flatten).collect()
}

/// Six digits after the point; a number that is not finite is none of JSON's and becomes null.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

#[cfg(test)]
mod tests {
    use model::{Config, Sizes};
    use trajectory::{GroupId, PolicyVersion, SampleStreams, VersionRun};

    use super::*;

    #[test]
    fn columns_have_a_value_for_every_token() {
        let mask = [false, true, false, true, true];
        assert_eq!(
            column(&mask, 5, Some(&[0.5, -1.0, 0.123_456_7])),
            [None, Some(0.5), None, Some(-1.0), Some(0.123_457)]
        );
        assert_eq!(column(&mask, 2, None), [None, None]);
    }

    #[test]
    fn rows_are_written_with_their_texts_and_long_ones_are_cut() {
        let files = tempfile::tempdir().unwrap();
        let sizes = Sizes {
            vocab_size: model::CHARACTERS,
            hidden_size: 16,
            intermediate_size: 32,
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: 2,
            max_position_embeddings: 64,
        };
        let path = files.path().join("model");
        let directory = Arc::new(ModelDirectory::fresh(&path, &Config::fresh(&sizes), 1).unwrap());
        let tokens = MAX_TOKENS + 3;
        let streams = SampleStreams {
            token_ids: vec![1; tokens],
            loss_mask: (0..tokens).map(|t| t > 0).collect(),
            behavior_logprobs: (0..tokens).map(|t| if t > 0 { -0.5 } else { 0.0 }).collect(),
            versions: vec![VersionRun { version: PolicyVersion(2), len: u32::try_from(tokens).unwrap() }],
            kept: None,
            experts: None,
            temperature: 1.0,
        };
        let sample = Sample::new(streams).unwrap();
        let row = RowTokens {
            group: GroupId(0),
            index: 0,
            branch: 0,
            advantages: vec![1.5; tokens - 1],
            start_logprobs: None,
        };
        let line = TokenWriter::new(Arc::clone(&directory)).row(&sample, Some(&row));
        assert_eq!(line["tokens"], tokens);
        assert_eq!(line["texts"][0], directory.tokenizer().decode_special(&[1]).unwrap());
        for name in ["token_ids", "texts", "loss_mask", "behavior_logprobs", "trainer_logprobs", "advantages"]
        {
            assert_eq!(line[name].as_array().unwrap().len(), MAX_TOKENS, "{name}");
        }
        assert_eq!((&line["advantages"][0], &line["advantages"][1]), (&Value::Null, &json!(1.5)));
        assert_eq!(
            (&line["behavior_logprobs"][1], &line["trainer_logprobs"][1]),
            (&json!(-0.5), &Value::Null)
        );
    }
}
