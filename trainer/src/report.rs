//! Statistics of one training step.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use buffer::Unfit;
use model::RoutedTokens;
use serde::{Deserialize, Serialize};
use trajectory::{Component, Group, PolicyVersion, Trajectory};

use crate::batch::BatchCounts;
use crate::loss::{Clipped, MAX_LOG_RATIO};
use crate::microbatch::MicrobatchReport;
use crate::outer_exchange::ExchangeReport;
use crate::rank_spans::RankSpan;
use crate::token_log::RowTokens;
use crate::trainer::elastic::Regrouping;

/// Statistics of one training step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Version that the step produced.
    pub version: PolicyVersion,
    /// Groups of the batch.
    pub groups: Vec<Arc<Group>>,
    /// Counts of the batch.
    pub counts: BatchCounts,
    /// Groups in the buffer that can be leased, at the end of the step.
    pub buffer_size: usize,
    /// Groups that were dropped as stale while the batch was assembled.
    pub dropped_stale: u64,
    /// Sums over the trained tokens.
    pub sums: TokenSums,
    /// Statistics of the critic; `None` without one.
    pub critic: Option<CriticReport>,
    /// Tokens of the first groups, as many groups as the configuration asks for.
    pub tokens: Vec<RowTokens>,
    /// What every rank of the policy did from [`StepTime::updated_from`] on, by rank; empty for a single rank.
    pub ranks: Vec<Vec<RankSpan>>,
    /// Gradient norm of the last update, before clipping.
    pub grad_norm: f32,
    /// Optimizer updates of the policy: one for each minibatch and epoch that has a gradient. With 0 the new version
    /// has the same weights.
    pub updates: u64,
    /// Learning rate of the step.
    pub learning_rate: f32,
    /// Statistics of the batch.
    pub batch: BatchStatistics,
    /// Memory that the trainer freed for the sampler in the last turn, bytes; 0 without colocation.
    pub freed_bytes: u64,
    /// Groups that were quarantined since the previous step; the first of them.
    pub quarantined: Vec<Quarantined>,
    /// Number of quarantined groups.
    pub quarantined_groups: u64,
    /// The exchange of outer gradients that the step has applied.
    pub exchange: Option<ExchangeReport>,
    /// Changes of the ranks since the previous step.
    pub regroupings: Vec<Regrouping>,
    /// When the state of all ranks was gathered in the memory of the first since the previous step, seconds of the run.
    pub snapshots: Vec<Range<f64>>,
    /// The micro-batch of the step, if its size adapts.
    pub microbatch: Option<MicrobatchReport>,
    /// Ranks of the trainer.
    pub world: usize,
    /// Time of the phases, seconds.
    pub time: StepTime,
}

/// A group that was quarantined because it cannot be trained on.
#[derive(Clone, Debug, PartialEq)]
pub struct Quarantined {
    /// The group.
    pub group: Arc<Group>,
    /// Name of the sender, if known; the run's own sampler has none.
    pub sender: Option<String>,
    /// Reason.
    pub reason: Unfit,
}

/// A token whose behavior log-probability differs in bits from the trainer's, with the same weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogprobMismatch {
    /// Row in the minibatch.
    pub row: usize,
    /// Index among the row's trained tokens.
    pub token: usize,
    /// Log-probability recorded by the sampler, nats.
    pub behavior: f32,
    /// Log-probability computed by the trainer, nats.
    pub proximal: f32,
}

/// Tokens by importance ratio `exp(current - behavior)`. The ends of the buckets on either side of ratio 1 are
/// `exp(+-0.001 * 2^k)`: fine near 1, and wide enough for all ratios.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RatioCounts {
    /// `[RATIO_BUCKETS]` tokens, by ascending ratio.
    counts: [u64; RATIO_BUCKETS],
}

/// Buckets of importance ratios; half of them are below 1.
const RATIO_BUCKETS: usize = 32;
/// The log-ratio at which the bucket next to ratio 1 ends, nats.
const FIRST_RATIO: f64 = 1e-3;

impl RatioCounts {
    /// Counts a token with this log-ratio, nats. One that is not finite is left out.
    pub fn count(&mut self, log_ratio: f64) {
        const HALF: usize = RATIO_BUCKETS / 2;
        if !log_ratio.is_finite() {
            return;
        }
        let size = log_ratio.abs();
        let bucket =
            if size < FIRST_RATIO { 0 } else { (size / FIRST_RATIO).log2() as usize + 1 }.min(HALF - 1);
        self.counts[if log_ratio < 0.0 { HALF - 1 - bucket } else { HALF + bucket }] += 1;
    }

    /// Adds the tokens of another row, micro-batch or rank.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
    }

    /// `[n, 3]` least ratio, greatest ratio and tokens of the buckets from the first to the last one with tokens.
    #[must_use]
    pub fn buckets(&self) -> Vec<[f64; 3]> {
        let filled = |count: &u64| *count > 0;
        let Some(first) = self.counts.iter().position(filled) else { return Vec::new() };
        let last = self.counts.iter().rposition(filled).unwrap_or(first);
        let bucket = |at: usize| [ratio_edge(at), ratio_edge(at + 1), self.counts[at] as f64];
        (first..=last).map(bucket).collect()
    }
}

/// The ratio between two buckets, of which `above` is the number of the upper one.
fn ratio_edge(above: usize) -> f64 {
    let from_middle = above as i32 - RATIO_BUCKETS as i32 / 2;
    let size = FIRST_RATIO * 2.0_f64.powi(from_middle.abs() - 1);
    match from_middle {
        0 => 1.0,
        // The outermost buckets end where ratios are cut.
        _ if 2 * from_middle.unsigned_abs() as usize == RATIO_BUCKETS => {
            (MAX_LOG_RATIO * f64::from(from_middle.signum())).exp()
        }
        _ => (size * f64::from(from_middle.signum())).exp(),
    }
}

/// Tokens that the experts of each layer computed in the passes of a step, prompts included; each pass of an epoch counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertLoads {
    /// By layer; no experts in a layer without.
    layers: Vec<RoutedTokens>,
}

impl ExpertLoads {
    /// Adds the tokens of a micro-batch, leaf or rank, by layer.
    pub(crate) fn add(&mut self, layers: &[RoutedTokens]) {
        self.layers.resize(self.layers.len().max(layers.len()), RoutedTokens::default());
        self.layers.iter_mut().zip(layers).for_each(|(own, more)| own.merge(more));
    }

    /// Adds those of a leaf.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.add(&other.layers);
    }

    /// `[experts]` tokens of the experts of each layer; empty in a layer without.
    pub(crate) fn of_layers(&self) -> impl Iterator<Item = &[u64]> {
        self.layers.iter().map(|layer| &layer.of_expert[..])
    }

    /// Coefficient of variation of the tokens of a layer's experts, mean over the layers; `None` without experts.
    #[must_use]
    pub fn variation(&self) -> Option<f64> {
        self.mean_of_layers(|of_expert, mean| {
            let squares = of_expert.iter().map(|tokens| (*tokens as f64 - mean).powi(2));
            (squares.sum::<f64>() / of_expert.len() as f64).sqrt() / mean
        })
    }

    /// Tokens of the busiest expert of a layer over the mean of its experts, mean over the layers; `None` without experts.
    #[must_use]
    pub fn peak(&self) -> Option<f64> {
        self.mean_of_layers(|of_expert, mean| of_expert.iter().copied().max().unwrap_or(0) as f64 / mean)
    }

    /// Share of the tokens that had the sampler's experts, over all layers; `None` if none had.
    #[must_use]
    pub fn replayed(&self) -> Option<f64> {
        let (given, tokens) = (self.given(), self.layers.iter().map(|layer| layer.tokens).sum::<u64>());
        (given > 0).then(|| given as f64 / tokens as f64)
    }

    /// Share of these tokens for which the trainer's router prefers another expert; `None` if there are none.
    #[must_use]
    pub fn changed(&self) -> Option<f64> {
        let (given, changed) = (self.given(), self.layers.iter().map(|layer| layer.changed).sum::<u64>());
        (given > 0).then(|| changed as f64 / given as f64)
    }

    fn given(&self) -> u64 {
        self.layers.iter().map(|layer| layer.given).sum()
    }

    /// Mean of `of(tokens, mean tokens)` over the layers with experts.
    fn mean_of_layers(&self, of: impl Fn(&[u64], f64) -> f64) -> Option<f64> {
        let layer = |layer: &RoutedTokens| {
            let total: u64 = layer.of_expert.iter().sum();
            (total > 0).then(|| of(&layer.of_expert, total as f64 / layer.of_expert.len() as f64))
        };
        let all: Vec<f64> = self.layers.iter().filter_map(layer).collect();
        (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
    }
}

/// Sums over the trained tokens of a step. Reports divide them by `tokens` or another count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenSums {
    /// Number of tokens.
    pub tokens: u64,
    /// Weighted loss; already a mean over the minibatch.
    pub loss: f64,
    /// Entropy of the current policy, nats. Like all sums it covers computed rows only, not groups skipped for a zero
    /// gradient.
    pub entropy: f64,
    /// Estimated KL divergence from the reference policy, nats.
    pub reference_kl: f64,
    /// Value loss of the critic.
    pub value_loss: f64,
    /// Sampled tokens with known log-probabilities at the start of the step: all, or those before the second update if
    /// there is no scoring pass. The next three sums are over these tokens.
    pub compared: u64,
    /// `|start - behavior|`, nats, with the log-probabilities at the start of the step.
    pub logprob_abs_diff: f64,
    /// Largest value of `|start - behavior|`, nats.
    pub logprob_abs_diff_max: f64,
    /// `exp(d) - d - 1` with `d = start - behavior`: the k3 estimate of the KL divergence between sampler and trainer,
    /// nats.
    pub mismatch: f64,
    /// Tokens that a policy sampled, without demonstrations. The following sums are over these tokens.
    pub sampled: u64,
    /// Importance weights for the behavior policy, after truncation.
    pub behavior_weight: f64,
    /// Squared importance weights.
    pub behavior_weight_squared: f64,
    /// Largest importance weight.
    pub behavior_weight_max: f64,
    /// Tokens at the lower clip bound, without a gradient.
    pub clipped_low: u64,
    /// Tokens at the upper clip bound, without a gradient.
    pub clipped_high: u64,
    /// Tokens at the dual clip, without a gradient.
    pub clipped_dual: u64,
    /// Tokens masked by an off-policy correction or by `entropy_share`.
    pub masked: u64,
    /// Importance ratios of the sampled tokens.
    pub ratios: RatioCounts,
    /// Tokens of the experts, of a model with some.
    pub experts: ExpertLoads,
    /// The first mismatch, if bits must be equal.
    pub mismatched: Option<LogprobMismatch>,
}

impl TokenSums {
    /// Adds the sums of another row, micro-batch or rank.
    pub fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.loss += other.loss;
        self.entropy += other.entropy;
        self.reference_kl += other.reference_kl;
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
        // Sums of one token have none.
        if other.sampled > 0 {
            self.ratios.merge(&other.ratios);
        }
        self.experts.add(&other.experts.layers);
        self.mismatched = self.mismatched.or(other.mismatched);
    }

    /// Initial sums of the next epoch: the comparison of sampler and trainer is kept.
    pub(crate) fn next_epoch(self) -> Self {
        let Self { compared, logprob_abs_diff, logprob_abs_diff_max, mismatch, .. } = self;
        Self { compared, logprob_abs_diff, logprob_abs_diff_max, mismatch, ..Self::default() }
    }

    /// Counts a token with `difference = start - behavior`, nats.
    pub(crate) fn compare(&mut self, difference: f64) {
        self.compared += 1;
        self.logprob_abs_diff += difference.abs();
        self.logprob_abs_diff_max = self.logprob_abs_diff_max.max(difference.abs());
        self.mismatch += difference.exp() - difference - 1.0;
    }

    /// Counts a sampled token with its importance weight and clip; `None` if it is masked.
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

    /// `sum` per token; 0 for no tokens.
    #[must_use]
    pub fn mean(&self, sum: f64) -> f64 {
        if self.tokens == 0 { 0.0 } else { sum / self.tokens as f64 }
    }

    /// `sum` per compared token; 0 for none.
    #[must_use]
    pub fn mean_compared(&self, sum: f64) -> f64 {
        if self.compared == 0 { 0.0 } else { sum / self.compared as f64 }
    }

    /// `sum` per sampled token; 0 for none.
    #[must_use]
    pub fn mean_sampled(&self, sum: f64) -> f64 {
        if self.sampled == 0 { 0.0 } else { sum / self.sampled as f64 }
    }

    /// `sum` per sampled token that is not masked; 0 for none.
    #[must_use]
    pub fn mean_kept(&self, sum: f64) -> f64 {
        let kept = self.sampled - self.masked;
        if kept == 0 { 0.0 } else { sum / kept as f64 }
    }

    /// Effective sample size of the importance weights, as a share of the tokens that are not masked: `(sum w)^2 / (n
    /// sum w^2)`.
    #[must_use]
    pub fn effective_share(&self) -> f64 {
        let denominator = (self.sampled - self.masked) as f64 * self.behavior_weight_squared;
        if denominator == 0.0 { 1.0 } else { self.behavior_weight.powi(2) / denominator }
    }
}

/// Statistics of the critic in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CriticReport {
    /// Mean value loss per token.
    pub loss: f64,
    /// Mean value before the step.
    pub value: f64,
    /// Explained variance of the returns before the step: `1 - var(R - V) / var(R)`.
    pub explained_variance: f64,
    /// Gradient norm before clipping; that of the policy if it has the value head.
    pub grad_norm: f32,
}

/// Time of the phases of a step, seconds; times of day are seconds of the run, as those of [`Trainer::time_s`](crate::Trainer::time_s).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Waiting for a batch, seconds.
    pub wait_for_batch: f64,
    /// When the batch was leased.
    pub leased_at: f64,
    /// When the trainer had the device. Until packing begins, ranks may join.
    pub switched_at: f64,
    /// When packing began.
    pub trained_from: f64,
    /// When the optimizer updates began.
    pub updated_from: f64,
    /// Packing, forward, backward, optimizer.
    pub forward_backward: f64,
    /// Checkpoint of the previous step, if due: waiting for the one before, copying or writing.
    pub save_checkpoint: f64,
    /// The part of `save_checkpoint` spent waiting for the checkpoint before, seconds.
    pub wait_for_checkpoint: f64,
    /// Writing checkpoints that became durable since the previous step; concurrent with training if `asynchronous`.
    pub write_checkpoint: f64,
    /// Publishing the weights.
    pub weight_sync: f64,
    /// Colocation: moving state out of memory, waiting for the sampler to stop, moving state back.
    pub phase_switch: f64,
    /// Gathering the state of all ranks in the memory of the first.
    pub snapshot: f64,
}

/// Summary statistics of a list of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SummaryStatistics {
    /// Arithmetic mean.
    pub mean: f64,
    /// Population standard deviation (n).
    pub std: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// 95th percentile.
    pub p95: f64,
}

/// Statistics of a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchStatistics {
    /// Total rewards.
    pub reward: SummaryStatistics,
    /// Mean reward of every role, by name; empty without roles.
    pub roles: BTreeMap<String, f64>,
    /// Trajectories with a reward.
    pub scored: usize,
    /// Statistics of each reward component, by name.
    pub components: BTreeMap<String, ComponentStatistics>,
    /// Mean number of tokens before the first completion of a trajectory.
    pub prompt_length: f64,
    /// Completion lengths, tokens.
    pub length: SummaryStatistics,
    /// Share of completions truncated at the length limit.
    pub clipped_ratio: f64,
    /// Staleness of the samples, versions.
    pub staleness: SummaryStatistics,
    /// Mean number of policy versions in a sample.
    pub versions_per_sample: f64,
}

/// Statistics of one reward component.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ComponentStatistics {
    /// Values before weighting, of the trajectories to which it applies.
    pub values: SummaryStatistics,
    /// Trajectories to which it applies.
    pub applied: usize,
    /// Trajectories for which it failed.
    pub failed: usize,
    /// Means of its additional numbers, by name.
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
            values: SummaryStatistics::of(
                components.clone().filter_map(|component| component.value).collect(),
            ),
            applied: components.clone().filter(|component| component.value.is_some()).count(),
            failed: components.filter(|component| component.error.is_some()).count(),
            details: details.into_iter().map(|(name, (sum, count))| (name, sum / count)).collect(),
        }
    }
}

impl SummaryStatistics {
    /// Statistics of `values [n]`; all zero for none.
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
    /// Statistics of the groups of a step that starts from `version`, without greedy baselines.
    #[must_use]
    pub fn of(groups: &[Arc<Group>], version: PolicyVersion) -> Self {
        let all = || groups.iter().flat_map(|group| group.sampled());
        let count = all().count().max(1) as f64;
        let mut components: BTreeMap<&str, Vec<&Component>> = BTreeMap::new();
        for component in all().flat_map(|trajectory| &trajectory.score.components) {
            components.entry(&component.name).or_default().push(component);
        }
        let mut roles: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for trajectory in all().filter(|trajectory| trajectory.all_turns().next().is_some()) {
            if let (Some(role), Some(reward)) = (&trajectory.role, trajectory.reward()) {
                roles.entry(role).or_default().push(reward);
            }
        }
        Self {
            reward: SummaryStatistics::of(all().filter_map(Trajectory::reward).collect()),
            roles: roles
                .into_iter()
                .map(|(role, rewards)| (role.to_owned(), crate::advantage::mean(rewards)))
                .collect(),
            scored: all().filter(|t| t.score.total.is_some()).count(),
            components: components
                .into_iter()
                .map(|(name, all)| (name.to_owned(), ComponentStatistics::of(all.into_iter())))
                .collect(),
            prompt_length: crate::advantage::mean(
                all().filter_map(|t| Some(t.all_turns().next()?.completion.start as f64)),
            ),
            length: SummaryStatistics::of(all().map(|t| t.completion_tokens() as f64).collect()),
            clipped_ratio: all().filter(|t| t.truncated()).count() as f64 / count,
            staleness: SummaryStatistics::of(
                all().map(|t| t.oldest_version().staleness_at(version) as f64).collect(),
            ),
            versions_per_sample: crate::advantage::mean(
                all().flat_map(Trajectory::samples).map(|sample| sample.versions().len() as f64),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::tests::group;

    #[test]
    fn ratios_near_one_and_far_from_it_have_buckets_of_their_own() {
        let mut ratios = RatioCounts::default();
        assert!(ratios.buckets().is_empty());
        for ratio in [1.0, 1.0, 1.0005, 0.9995, 1.0015, 0.5, f64::NAN] {
            ratios.count(ratio.ln());
        }
        let buckets = ratios.buckets();
        assert!(
            buckets.windows(2).all(|pair| pair[0][1] == pair[1][0] && pair[0][0] < pair[0][1]),
            "{buckets:?}"
        );
        assert_eq!(buckets.iter().map(|bucket| bucket[2]).sum::<f64>(), 6.0);
        let of = |ratio: f64| buckets.iter().find(|b| b[0] <= ratio && ratio < b[1]).unwrap()[2];
        assert_eq!([of(0.5), of(0.7), of(0.9995), of(1.0), of(1.0015)], [1.0, 0.0, 1.0, 3.0, 1.0]);
        let mut all = RatioCounts::default();
        all.count(-100.0);
        all.count(100.0);
        all.merge(&ratios);
        let buckets = all.buckets();
        assert_eq!((buckets.len(), buckets[0][2], buckets[RATIO_BUCKETS - 1][2]), (RATIO_BUCKETS, 1.0, 1.0));
        assert!(
            buckets.windows(2).all(|pair| pair[0][1] == pair[1][0] && pair[0][0] < pair[0][1]),
            "{buckets:?}"
        );
        let mut sums = TokenSums { sampled: 8, ratios: all, ..TokenSums::default() };
        sums.merge(&TokenSums { tokens: 1, ..TokenSums::default() });
        sums.merge(&sums.clone());
        assert_eq!(sums.ratios.buckets().iter().map(|bucket| bucket[2]).sum::<f64>(), 16.0);
        assert_eq!(sums.next_epoch().ratios, RatioCounts::default());
    }

    #[test]
    fn summary_statistics_of_known_numbers() {
        let spread = SummaryStatistics::of((1..=20).rev().map(f64::from).collect());
        assert_eq!((spread.mean, spread.min, spread.max, spread.p95), (10.5, 1.0, 20.0, 19.0));
        assert_eq!(SummaryStatistics::of(vec![3.0]).p95, 3.0);
        assert_eq!(SummaryStatistics::of(Vec::new()), SummaryStatistics::default());
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
