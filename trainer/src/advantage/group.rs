//! Group-relative advantage estimators: the baseline is computed from the trajectories of the same task.
//!
//! Invariant: the advantage in a group of one is its reward, because no baseline exists. A batch skips such groups if
//! the algorithm needs groups.

use serde::{Deserialize, Serialize};

use super::{EPSILON, mean, sample_std};

/// What the deviation from the group mean is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The standard deviation of the group (GRPO, DeepSeekMath, arXiv 2402.03300).
    #[default]
    Group,
    /// The standard deviation of all deviations in the batch (ScaleRL, arXiv 2510.13786).
    Batch,
    /// Nothing (Dr.GRPO, arXiv 2503.20783).
    None,
}

/// `(r - mean) / (std + 1e-6)` with the sample standard deviation (n - 1); with [`ScaleRewards::None`] `r - mean`.
/// `rewards` and the result are `[groups][G]`.
#[must_use]
pub fn relative(rewards: &[Vec<f64>], scale: ScaleRewards) -> Vec<Vec<f64>> {
    let deviations: Vec<Vec<f64>> = rewards.iter().map(|rewards| centred(rewards)).collect();
    let divisor = |group: &[f64]| match scale {
        ScaleRewards::None => 1.0,
        // One value has no deviation.
        ScaleRewards::Group if group.len() < 2 => 1.0,
        ScaleRewards::Group => sample_std(group) + EPSILON,
        ScaleRewards::Batch => sample_std(&deviations.concat()) + EPSILON,
    };
    let scaled = |group: &Vec<f64>| {
        let divisor = divisor(group);
        group.iter().map(|deviation| deviation / divisor).collect()
    };
    deviations.iter().map(scaled).collect()
}

/// RLOO (arXiv 2402.14740): `(r - mean) * n / (n - 1)`, which is the reward minus the mean of the other rewards.
/// `rewards` and the result are `[trajectories]`.
#[must_use]
pub fn leave_one_out(rewards: &[f64]) -> Vec<f64> {
    let n = rewards.len() as f64;
    let stretch = if rewards.len() < 2 { 1.0 } else { n / (n - 1.0) };
    centred(rewards).iter().map(|deviation| deviation * stretch).collect()
}

/// OPO (arXiv 2505.23585): `r - sum(len * r) / sum(len)`, the baseline of minimum variance if gradient norms grow with
/// length. `rewards`, `lengths` (tokens) and the result are `[trajectories]`.
#[must_use]
pub fn length_weighted(rewards: &[f64], lengths: &[f64]) -> Vec<f64> {
    let total: f64 = lengths.iter().sum();
    if rewards.len() < 2 || total == 0.0 {
        return centred(rewards);
    }
    let baseline = rewards.iter().zip(lengths).map(|(reward, length)| reward * length).sum::<f64>() / total;
    rewards.iter().map(|reward| reward - baseline).collect()
}

/// `rewards [G]` minus their mean; a single reward is unchanged.
pub(super) fn centred(rewards: &[f64]) -> Vec<f64> {
    let mean = if rewards.len() < 2 { 0.0 } else { mean(rewards.iter().copied()) };
    rewards.iter().map(|reward| reward - mean).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn centred_and_invariant(rewards in prop::collection::vec(-5.0..5.0f64, 2..20), shift in -3.0..3.0f64, stretch in 0.5..4.0f64) {
            let spread = rewards.iter().fold(0.0_f64, |a, r| a.max((r - rewards[0]).abs()));
            prop_assume!(spread > 0.1);
            let ours = relative(std::slice::from_ref(&rewards), ScaleRewards::Group).remove(0);
            prop_assert!(ours.iter().sum::<f64>().abs() < 1e-9);
            let moved: Vec<f64> = rewards.iter().map(|r| shift + stretch * r).collect();
            for (a, b) in ours.iter().zip(&relative(&[moved], ScaleRewards::Group)[0]) {
                prop_assert!((a - b).abs() < 1e-3);
            }
        }

        #[test]
        fn leave_one_out_subtracts_the_mean_of_the_others(rewards in prop::collection::vec(-5.0..5.0f64, 2..20)) {
            for (i, advantage) in leave_one_out(&rewards).into_iter().enumerate() {
                let others = rewards.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, r)| *r);
                prop_assert!((advantage - (rewards[i] - mean(others))).abs() < 1e-9);
            }
        }
    }
}
