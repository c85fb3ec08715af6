//! From leased groups to the rows of a training step.
//!
//! Invariant: leaving zero-variance groups and samples without trained tokens out of the computation changes nothing
//! but the cost: the counts that losses are divided by include them.

use trajectory::{Group, Sample};

use crate::algorithm::advantage::group_relative;
use crate::algorithm::grpo::Grpo;
use crate::algorithm::{Aggregation, Counts};

/// A sample with what the loss needs to know of it.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The token streams.
    pub sample: &'a Sample,
    /// How much better its trajectory was than the others of its group.
    pub advantage: f32,
    /// Factor of each token's loss.
    pub token_weight: f32,
}

/// How a batch is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Parts of whole groups, each with an optimizer step of its own; at least 1.
    pub minibatches: usize,
    /// Longest completion that the recipe allows, tokens.
    pub max_completion_length: usize,
}

/// What became of the groups of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// All groups.
    pub groups: usize,
    /// Groups whose rewards are all equal: no gradient, no compute.
    pub zero_variance: usize,
    /// Trajectories left out because a reward failed.
    pub unscored: usize,
    /// Tokens that are trained on.
    pub trained_tokens: usize,
}

/// Splits `groups` into parts of whole groups, in order, and makes rows of each.
///
/// # Panics
/// If there are to be no parts.
#[must_use]
pub fn minibatches<'a, G: AsRef<Group>>(
    groups: &'a [G],
    algorithm: &Grpo,
    split: Split,
) -> (Vec<Vec<Row<'a>>>, BatchCounts) {
    let mut counts = BatchCounts { groups: groups.len(), ..BatchCounts::default() };
    let parts = groups
        .chunks(groups.len().div_ceil(split.minibatches).max(1))
        .map(|part| rows(part, algorithm, split.max_completion_length, &mut counts))
        .collect();
    (parts, counts)
}

fn rows<'a, G: AsRef<Group>>(
    groups: &'a [G],
    algorithm: &Grpo,
    max_completion_length: usize,
    counts: &mut BatchCounts,
) -> Vec<Row<'a>> {
    let scored: Vec<Vec<(&Sample, f64)>> = groups.iter().map(|group| scored(group.as_ref())).collect();
    let tokens =
        |group: &[(&Sample, f64)]| group.iter().map(|(sample, _)| sample.trained_tokens()).sum::<usize>();
    let batch_tokens: usize = scored.iter().map(|group| tokens(group)).sum();
    let batch_sequences: usize = scored.iter().map(Vec::len).sum();
    counts.trained_tokens += batch_tokens;
    counts.unscored += groups.iter().map(|g| g.as_ref().trajectories.len()).sum::<usize>() - batch_sequences;
    let mut rows = Vec::new();
    for (group, scored) in groups.iter().zip(&scored) {
        if group.as_ref().zero_variance() {
            counts.zero_variance += 1;
            continue;
        }
        let rewards: Vec<f64> = scored.iter().map(|(_, reward)| *reward).collect();
        let advantages = group_relative(&rewards, algorithm.scale_rewards);
        for ((sample, _), advantage) in scored.iter().zip(advantages) {
            let of = Counts {
                sequence_tokens: sample.trained_tokens(),
                group_tokens: tokens(scored),
                batch_tokens,
                batch_sequences,
                batch_groups: groups.len(),
                max_completion_length,
            };
            if of.sequence_tokens > 0 {
                rows.push(Row { sample, advantage, token_weight: algorithm.loss_agg.token_weight(&of) });
            }
        }
    }
    rows
}

/// Rows of demonstrations: every trained token counts the same.
#[must_use]
pub fn demonstrations(samples: &[Sample]) -> Vec<Row<'_>> {
    let batch_tokens = samples.iter().map(Sample::trained_tokens).sum();
    let counts = Counts {
        sequence_tokens: 0,
        group_tokens: 0,
        batch_tokens,
        batch_sequences: samples.len(),
        batch_groups: samples.len(),
        max_completion_length: 0,
    };
    let token_weight = Aggregation::TokenMean.token_weight(&counts);
    samples.iter().map(|sample| Row { sample, advantage: 1.0, token_weight }).collect()
}

fn scored(group: &Group) -> Vec<(&Sample, f64)> {
    group.trajectories.iter().filter_map(|t| t.score.total.map(|reward| (&t.sample, reward))).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use trajectory::{
        Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
        Trajectory, Turn, VersionRun,
    };

    use super::*;
    use crate::algorithm::advantage::ScaleRewards;

    pub(crate) const GRPO: Grpo = Grpo {
        clip_eps_low: 0.2,
        clip_eps_high: 0.2,
        behavior_weight_cap: 2.0,
        scale_rewards: ScaleRewards::Group,
        loss_agg: Aggregation::TokenMean,
    };

    fn split(minibatches: usize) -> Split {
        Split { minibatches, max_completion_length: 16 }
    }

    /// A group whose trajectories have the given rewards and numbers of completion tokens after two of prompt.
    pub(crate) fn group(id: u64, outcomes: &[(Option<f64>, usize)]) -> Group {
        let trajectory = |(index, (reward, tokens)): (usize, &(Option<f64>, usize))| Trajectory {
            index: index as u32,
            sample: Sample::new(SampleStreams {
                token_ids: (0..2 + *tokens as u32).map(|t| (t * 7 + id as u32 + index as u32) % 11).collect(),
                loss_mask: (0..2 + *tokens).map(|t| t >= 2).collect(),
                behavior_logprobs: (0..2 + *tokens).map(|t| if t >= 2 { -2.0 } else { 0.0 }).collect(),
                versions: vec![VersionRun { version: PolicyVersion(0), len: 2 + *tokens as u32 }],
                kept: None,
                temperature: 1.0,
            })
            .unwrap(),
            turns: vec![Turn { completion: 2..2 + *tokens, stop: StopReason::StopToken, reward: None }],
            text: String::new(),
            score: Score { total: *reward, components: Vec::new() },
            baseline: false,
        };
        let task = Task {
            id: TaskId(id),
            prompt: Prompt::Text(String::new()),
            answer: None,
            columns: serde_json::Map::new(),
        };
        Group { id: GroupId(id), task, trajectories: outcomes.iter().enumerate().map(trajectory).collect() }
    }

    #[test]
    fn zero_variance_groups_cost_nothing_but_count() {
        let groups =
            [group(0, &[(Some(1.0), 3), (Some(0.0), 5)]), group(1, &[(Some(1.0), 4), (Some(1.0), 4)])];
        let groups: Vec<_> = groups.into_iter().map(std::sync::Arc::new).collect();
        let (parts, counts) = minibatches(&groups, &GRPO, split(1));
        assert_eq!((parts[0].len(), counts.zero_variance, counts.trained_tokens), (2, 1, 16));
        assert!(parts[0].iter().all(|row| row.token_weight == 1.0 / 16.0));
    }

    #[test]
    fn failed_rewards_and_empty_completions_are_left_out() {
        let groups =
            [std::sync::Arc::new(group(0, &[(Some(1.0), 3), (None, 5), (Some(0.0), 0), (Some(0.5), 2)]))];
        let (parts, counts) = minibatches(&groups, &GRPO, split(1));
        assert_eq!((parts[0].len(), counts.unscored, counts.trained_tokens), (2, 1, 5));
    }

    #[test]
    fn minibatches_are_whole_groups() {
        let groups: Vec<_> =
            (0..5).map(|id| std::sync::Arc::new(group(id, &[(Some(1.0), 1), (Some(0.0), 1)]))).collect();
        let (parts, _) = minibatches(&groups, &GRPO, split(2));
        assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [6, 4]);
    }
}
