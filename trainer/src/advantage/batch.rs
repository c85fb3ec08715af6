//! Advantage estimators with a baseline over the whole batch.

use super::gae::discounted;
use super::{Advantages, EPSILON, GroupOutcome, TrajectoryOutcome, group, mean, sample_std};

/// Added to a variance before its square root.
const VARIANCE_EPSILON: f64 = 1e-8;

/// REINFORCE with the batch mean as baseline: `r - mean` over all trajectories. `rewards` and the result are
/// `[groups][G]`.
#[must_use]
pub fn centred(rewards: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mean = mean(rewards.iter().flatten().copied());
    rewards.iter().map(|group| group.iter().map(|reward| reward - mean).collect()).collect()
}

/// GDPO (arXiv 2601.05242): every reward component is normalised in its group, `A_n = (r_n - mean) / (std + 1e-6)`, so
/// that a component with a large spread does not dominate; their weighted sum is normalised over the batch. `weights`
/// has one factor per component, `[components]`; the sum of the rewards of turns is one component more, of weight 1. The
/// result is `[groups][G]`.
#[must_use]
pub fn per_reward(groups: &[GroupOutcome], weights: &[f64]) -> Vec<Vec<f64>> {
    let of_group = |group: &GroupOutcome| {
        let mut sums = vec![0.0; group.trajectories.len()];
        let mut add = |weight: f64, value: &dyn Fn(&TrajectoryOutcome) -> f64| {
            let values: Vec<f64> = group.trajectories.iter().map(value).collect();
            let (mean, std) = (mean(values.iter().copied()), sample_std(&values));
            sums.iter_mut().zip(&values).for_each(|(sum, r)| *sum += weight * (r - mean) / (std + EPSILON));
        };
        for (n, weight) in weights.iter().enumerate() {
            add(*weight, &|t| t.components.get(n).copied().unwrap_or(0.0));
        }
        add(1.0, &|t| t.turns.iter().map(|(_, reward)| reward).sum());
        sums
    };
    let sums: Vec<Vec<f64>> = groups.iter().map(of_group).collect();
    let all = sums.concat();
    if all.len() < 2 {
        return sums;
    }
    let (mean, std) = (mean(all.iter().copied()), sample_std(&all));
    sums.iter().map(|group| group.iter().map(|a| (a - mean) / (std + EPSILON)).collect()).collect()
}

/// REINFORCE++ (arXiv 2501.03262): the discounted return of every token, whitened over all tokens of the batch; the
/// result is `[groups][G][T]`. With `baseline` the group mean of the rewards, those of turns included, is subtracted at the
/// last token first; in a group of one nothing is.
#[must_use]
pub fn whiten_returns(groups: &[GroupOutcome], baseline: bool, gamma: f64) -> Advantages {
    let returns: Advantages = groups
        .iter()
        .map(|outcome| {
            let rewards: Vec<f64> = outcome.trajectories.iter().map(TrajectoryOutcome::earned).collect();
            let centred = group::centred(&rewards);
            let shift = |i: usize| if baseline { rewards[i] - centred[i] } else { 0.0 };
            let of = |(i, t): (usize, &TrajectoryOutcome)| {
                let mut tokens = t.token_rewards();
                if let Some(last) = tokens.last_mut() {
                    *last -= shift(i);
                }
                discounted(&tokens, gamma)
            };
            outcome.trajectories.iter().enumerate().map(of).collect()
        })
        .collect();
    whiten(&returns)
}

/// `(x - mean) / sqrt(variance + 1e-8)` over all tokens of `[groups][G][T]`, with the population variance (n).
#[must_use]
pub fn whiten(advantages: &Advantages) -> Advantages {
    let all = || advantages.iter().flatten().flatten().copied();
    let mean_of_all = mean(all());
    let divisor = (mean(all().map(|a| (a - mean_of_all).powi(2))) + VARIANCE_EPSILON).sqrt();
    let whitened = |tokens: &Vec<f64>| tokens.iter().map(|a| (a - mean_of_all) / divisor).collect();
    advantages.iter().map(|group| group.iter().map(whitened).collect()).collect()
}
