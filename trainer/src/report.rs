//! What one training step tells.

use std::collections::BTreeMap;
use std::sync::Arc;

use buffer::Unfit;
use serde::{Deserialize, Serialize};
use trajectory::{Component, Group, PolicyVersion};

use crate::batch::BatchCounts;
use crate::loss::Clipped;

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
    /// What the critic did; `None` without one.
    pub critic: Option<CriticReport>,
    /// Norm of the last gradient before clipping.
    pub grad_norm: f32,
    /// Updates that the optimizer of the policy made: one for each minibatch and epoch that had a gradient. With none the
    /// version is a new one of the same weights.
    pub updates: u64,
    /// Learning rate of the step.
    pub learning_rate: f32,
    /// What the batch was made of.
    pub batch: BatchStatistics,
    /// Bytes that the trainer gave up the last time that the sampler had the device; 0 if they do not take turns.
    pub freed_bytes: u64,
    /// Groups that were set aside since the step before because they cannot be trained on; the first of them.
    pub quarantined: Vec<Quarantined>,
    /// How many groups that are.
    pub quarantined_groups: u64,
    /// Where the time went, seconds.
    pub time: StepTime,
}

/// A group that was set aside because it cannot be trained on.
#[derive(Clone, Debug, PartialEq)]
pub struct Quarantined {
    /// The group.
    pub group: Arc<Group>,
    /// Who sent it, if that is known; the run's own sampler sends without a name.
    pub sender: Option<String>,
    /// Why.
    pub reason: Unfit,
}

/// A token whose log-probability the sampler recorded with other bits than the trainer computes with the same weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Row of the minibatch.
    pub row: usize,
    /// Which of the row's trained tokens.
    pub token: usize,
    /// As the sampler recorded it, nats.
    pub behavior: f32,
    /// As the trainer computes it, nats.
    pub proximal: f32,
}

/// Sums over the trained tokens of a step. Fields that are means are divided by `tokens` when reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenSums {
    /// Number of tokens.
    pub tokens: u64,
    /// Weighted losses: already a mean over the minibatch.
    pub loss: f64,
    /// Entropy of the current policy, nats. Like all of these it is of the rows that are computed: groups that are left out
    /// because they have no gradient are not in it.
    pub entropy: f64,
    /// Divergence from the reference policy, as the algorithm estimates it, nats.
    pub reference_divergence: f64,
    /// Loss of the critic.
    pub value_loss: f64,
    /// Sampled tokens whose log-probability under the policy before the step is known: all, or those up to the first update
    /// if there are several and the algorithm makes no forward pass before them. The next three are of them.
    pub compared: u64,
    /// `|before - behavior|`, nats: of the policy before the step, however many updates it makes.
    pub logprob_abs_diff: f64,
    /// The largest of them.
    pub logprob_abs_diff_max: f64,
    /// `exp(d) - d - 1` with `d = before - behavior`: an estimate of the divergence of sampler and trainer (k3).
    pub mismatch: f64,
    /// Tokens that a policy has sampled: all but those of demonstrations. What follows is of them.
    pub sampled: u64,
    /// Weights for the behavior policy, after their bounds.
    pub behavior_weight: f64,
    /// Their squares.
    pub behavior_weight_squared: f64,
    /// The largest of them.
    pub behavior_weight_max: f64,
    /// Tokens whose gradient the lower bound of the clip took.
    pub clipped_low: u64,
    /// Tokens whose gradient the upper bound of the clip took.
    pub clipped_high: u64,
    /// Tokens whose gradient the dual clip took.
    pub clipped_dual: u64,
    /// Tokens that a correction or a selection left out.
    pub masked: u64,
    /// The first mismatch, if there must not be one.
    pub mismatched: Option<Mismatch>,
}

impl TokenSums {
    /// Adds another rank's.
    pub fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.loss += other.loss;
        self.entropy += other.entropy;
        self.reference_divergence += other.reference_divergence;
        self.value_loss += other.value_loss;
        self.compared += other.compared;
        self.sampled += other.sampled;
        self.logprob_abs_diff += other.logprob_abs_diff;
        self.logprob_abs_diff_max = self.logprob_abs_diff_max.max(other.logprob_abs_diff_max);
        self.mismatch += other.mismatch;
        self.behavior_weight += other.behavior_weight;
        self.behavior_weight_squared += other.behavior_weight_squared;
        self.behavior_weight_max = self.behavior_weight_max.max(other.behavior_weight_max);
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.clipped_dual += other.clipped_dual;
        self.masked += other.masked;
        self.mismatched = self.mismatched.or(other.mismatched);
    }

    /// What the sums of an epoch start from when these are those of the epoch before: sampler and trainer are compared once.
    pub(crate) fn next_epoch(self) -> Self {
        let Self { compared, logprob_abs_diff, logprob_abs_diff_max, mismatch, .. } = self;
        Self { compared, logprob_abs_diff, logprob_abs_diff_max, mismatch, ..Self::default() }
    }

    /// Notes how far the log-probability of a token under the policy before the step is from the sampler's, nats.
    pub(crate) fn compare(&mut self, difference: f64) {
        self.compared += 1;
        self.logprob_abs_diff += difference.abs();
        self.logprob_abs_diff_max = self.logprob_abs_diff_max.max(difference.abs());
        self.mismatch += difference.exp() - difference - 1.0;
    }

    /// Notes a sampled token with the weight and bound that it was trained with; `None` if it was left out.
    pub(crate) fn weigh(&mut self, trained: Option<(f64, Clipped)>) {
        self.sampled += 1;
        let Some((weight, clipped)) = trained else {
            self.masked += 1;
            return;
        };
        self.behavior_weight += weight;
        self.behavior_weight_squared += weight * weight;
        self.behavior_weight_max = self.behavior_weight_max.max(weight);
        match clipped {
            Clipped::No => {}
            Clipped::Low => self.clipped_low += 1,
            Clipped::High => self.clipped_high += 1,
            Clipped::Dual => self.clipped_dual += 1,
        }
    }

    /// Mean of one of the sums over the tokens; 0 for none.
    #[must_use]
    pub fn mean(&self, sum: f64) -> f64 {
        if self.tokens == 0 { 0.0 } else { sum / self.tokens as f64 }
    }

    /// Mean of one of the sums over the tokens that were compared with the sampler; 0 for none.
    #[must_use]
    pub fn mean_compared(&self, sum: f64) -> f64 {
        if self.compared == 0 { 0.0 } else { sum / self.compared as f64 }
    }

    /// Mean of one of the sums over the sampled tokens; 0 for none.
    #[must_use]
    pub fn mean_sampled(&self, sum: f64) -> f64 {
        if self.sampled == 0 { 0.0 } else { sum / self.sampled as f64 }
    }

    /// Mean of one of the sums over the sampled tokens that were not masked; 0 for none.
    #[must_use]
    pub fn mean_kept(&self, sum: f64) -> f64 {
        let kept = self.sampled - self.masked;
        if kept == 0 { 0.0 } else { sum / kept as f64 }
    }

    /// Effective sample size of the behavior weights as a share of the sampled tokens that were not masked:
    /// `(sum w)^2 / (n sum w^2)`.
    #[must_use]
    pub fn effective_share(&self) -> f64 {
        let denominator = (self.sampled - self.masked) as f64 * self.behavior_weight_squared;
        if denominator == 0.0 { 1.0 } else { self.behavior_weight.powi(2) / denominator }
    }
}

/// What a critic did in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CriticReport {
    /// Mean of its loss over the tokens.
    pub loss: f64,
    /// Mean of what it expected before the step.
    pub value: f64,
    /// Share of the variance of the returns that it explained before the step: `1 - var(R - V) / var(R)`.
    pub explained_variance: f64,
    /// Norm of its gradient before clipping; that of the policy if they are one network.
    pub grad_norm: f32,
}

/// Where the time of a step went, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Waiting for a batch.
    pub wait_for_batch: f64,
    /// Packing, forward, backward, optimizer.
    pub forward_backward: f64,
    /// Taking the checkpoint of the step before, if it was due: waiting for the one before that, copying or writing.
    pub save_checkpoint: f64,
    /// Of that, waiting until the one before was on disk.
    pub wait_for_checkpoint: f64,
    /// Writing a checkpoint that has reached the disk since the step before; with `asynchronous`, beside the steps.
    pub write_checkpoint: f64,
    /// Publishing the weights.
    pub weight_sync: f64,
    /// Of a trainer that shares its device: moving out of memory for the sampler, waiting until that stands still, and
    /// moving back.
    pub phase_switch: f64,
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
    /// Trajectories that have one.
    pub scored: usize,
    /// Each reward by name.
    pub components: BTreeMap<String, ComponentStatistics>,
    /// Completion lengths, tokens.
    pub length: Spread,
    /// Share of completions cut off by the length limit.
    pub clipped_ratio: f64,
    /// Staleness of the samples, versions.
    pub staleness: Spread,
    /// Mean number of policy versions in a sample.
    pub versions_per_sample: f64,
}

/// What one reward said of a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ComponentStatistics {
    /// Its values, before weighting, where it applied.
    pub values: Spread,
    /// Trajectories to which it applied.
    pub applied: usize,
    /// Trajectories for which it failed.
    pub failed: usize,
    /// Means of the numbers that it said beside its value, where it said them.
    pub details: BTreeMap<String, f64>,
}

impl ComponentStatistics {
    fn of<'a>(components: impl Iterator<Item = &'a Component> + Clone) -> Self {
        let mut details: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for (name, value) in components.clone().flat_map(Component::numbers) {
            let (sum, count) = details.entry(name.to_owned()).or_default();
            *sum += value;
            *count += 1.0;
        }
        Self {
            values: Spread::of(components.clone().filter_map(|component| component.value).collect()),
            applied: components.clone().filter(|component| component.value.is_some()).count(),
            failed: components.filter(|component| component.error.is_some()).count(),
            details: details.into_iter().map(|(name, (sum, count))| (name, sum / count)).collect(),
        }
    }
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
        let mut components: BTreeMap<&str, Vec<&Component>> = BTreeMap::new();
        for component in all().flat_map(|trajectory| &trajectory.score.components) {
            components.entry(&component.name).or_default().push(component);
        }
        Self {
            reward: Spread::of(all().filter_map(|t| t.score.total).collect()),
            scored: all().filter(|t| t.score.total.is_some()).count(),
            components: components
                .into_iter()
                .map(|(name, all)| (name.to_owned(), ComponentStatistics::of(all.into_iter())))
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
