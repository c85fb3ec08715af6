//! What one training step tells.

use std::collections::BTreeMap;
use std::sync::Arc;

use trajectory::{Group, PolicyVersion};

use crate::batch::BatchCounts;
use crate::policy_loss::TokenSums;

/// What one training step tells.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// The version that the step produced.
    pub version: PolicyVersion,
    /// What it was trained on.
    pub groups: Vec<Arc<Group>>,
    /// What became of the groups.
    pub counts: BatchCounts,
    /// Groups that could have been leased when the step ended.
    pub buffer_size: usize,
    /// Groups that were too old when the batch was put together.
    pub dropped_stale: u64,
    /// Sums over the trained tokens.
    pub sums: TokenSums,
    /// Norm of the last gradient before clipping.
    pub grad_norm: f32,
    /// Learning rate of the step.
    pub learning_rate: f32,
    /// What the batch was made of.
    pub batch: BatchStatistics,
    /// Where the time went, seconds.
    pub time: StepTime,
}

/// Where the time of a step went, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Waiting for a batch.
    pub wait_for_batch: f64,
    /// Packing, forward, backward, optimizer.
    pub forward_backward: f64,
    /// Writing the checkpoint of the step before, if it was due.
    pub save_checkpoint: f64,
    /// Publishing the weights.
    pub weight_sync: f64,
}

/// Mean and spread of something.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Arithmetic mean.
    pub mean: f64,
    /// Standard deviation (n).
    pub std: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// 95 of 100 are at most this.
    pub p95: f64,
}

/// What a batch was made of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchStatistics {
    /// Total rewards.
    pub reward: Spread,
    /// Each reward by name, before weighting: values, and how many failed.
    pub components: BTreeMap<String, (Spread, usize)>,
    /// Completion lengths, tokens.
    pub length: Spread,
    /// Share of completions cut off by the length limit.
    pub clipped_ratio: f64,
    /// Staleness of the samples, versions.
    pub staleness: Spread,
    /// Mean number of policy versions in a sample.
    pub versions_per_sample: f64,
}

impl Spread {
    /// The spread of `values`; all zero for none.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let std = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt();
        let p95 = values[((values.len() as f64 * 0.95).ceil() as usize).clamp(1, values.len()) - 1];
        Self { mean, std, min: values[0], max: values[values.len() - 1], p95 }
    }
}

impl BatchStatistics {
    /// Statistics of `groups` as the step that starts from `version` consumes them; baselines are left out.
    #[must_use]
    pub fn of(groups: &[Arc<Group>], version: PolicyVersion) -> Self {
        let all = || groups.iter().flat_map(|group| group.sampled());
        let count = all().count().max(1) as f64;
        let mut components: BTreeMap<String, (Vec<f64>, usize)> = BTreeMap::new();
        for component in all().flat_map(|trajectory| &trajectory.score.components) {
            let (values, failed) = components.entry(component.name.clone()).or_default();
            match component.value {
                Some(value) => values.push(value),
                None => *failed += 1,
            }
        }
        Self {
            reward: Spread::of(all().filter_map(|t| t.score.total).collect()),
            components: components
                .into_iter()
                .map(|(name, (v, failed))| (name, (Spread::of(v), failed)))
                .collect(),
            length: Spread::of(all().map(|t| t.completion_tokens() as f64).collect()),
            clipped_ratio: all().filter(|t| t.truncated()).count() as f64 / count,
            staleness: Spread::of(
                all().map(|t| t.sample.oldest_version().staleness_at(version) as f64).collect(),
            ),
            versions_per_sample: all().map(|t| t.sample.versions().len() as f64).sum::<f64>() / count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::tests::group;

    #[test]
    fn spread_of_known_numbers() {
        let spread = Spread::of((1..=20).rev().map(f64::from).collect());
        assert_eq!((spread.mean, spread.min, spread.max, spread.p95), (10.5, 1.0, 20.0, 19.0));
        assert_eq!(Spread::of(vec![3.0]).p95, 3.0);
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }

    #[test]
    fn statistics_of_a_batch() {
        let groups = [Arc::new(group(0, &[(Some(1.0), 3), (None, 5)]))];
        let statistics = BatchStatistics::of(&groups, PolicyVersion(2));
        assert_eq!(
            (statistics.reward.mean, statistics.length.mean, statistics.staleness.max),
            (1.0, 4.0, 2.0)
        );
    }
}
