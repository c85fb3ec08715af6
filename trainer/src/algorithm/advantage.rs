//! How much better a trajectory is than the others of its group.

use serde::{Deserialize, Serialize};

/// What the deviation from the group's mean is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The group's standard deviation (GRPO).
    #[default]
    Group,
    /// Nothing (Dr.GRPO, arXiv 2503.20783).
    None,
}

/// Added to the standard deviation.
const EPSILON: f64 = 1e-6;

/// Group-relative advantages (GRPO, DeepSeekMath, arXiv 2402.03300): `(r - mean) / (std + 1e-6)` with the sample
/// standard deviation (n - 1); with [`ScaleRewards::None`] `r - mean`. `rewards` and the result are `[G]`.
/// A group of one has nothing to compare with: its advantage is its reward.
#[must_use]
pub fn group_relative(rewards: &[f64], scale: ScaleRewards) -> Vec<f32> {
    if let [single] = rewards {
        return vec![*single as f32];
    }
    let n = rewards.len() as f64;
    let mean = rewards.iter().sum::<f64>() / n;
    let variance = rewards.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let divisor = match scale {
        ScaleRewards::Group => variance.sqrt() + EPSILON,
        ScaleRewards::None => 1.0,
    };
    rewards.iter().map(|r| ((r - mean) / divisor) as f32).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `import torch; r = torch.tensor([1., 0., 0., 1., .5], dtype=torch.float64)`
    /// `print(((r - r.mean()) / (r.std() + 1e-6)).tolist())`
    #[test]
    fn golden() {
        let expected = [0.999_998, -0.999_998, -0.999_998, 0.999_998, 0.0];
        for (ours, torch) in
            group_relative(&[1.0, 0.0, 0.0, 1.0, 0.5], ScaleRewards::Group).iter().zip(expected)
        {
            assert!((f64::from(*ours) - torch).abs() < 1e-6, "{ours} {torch}");
        }
        assert_eq!(group_relative(&[2.0, 0.0], ScaleRewards::None), [1.0, -1.0]);
        assert_eq!(group_relative(&[0.7], ScaleRewards::Group), [0.7]);
    }

    proptest! {
        #[test]
        fn centred_and_invariant(rewards in prop::collection::vec(-5.0..5.0f64, 2..20), shift in -3.0..3.0f64, stretch in 0.5..4.0f64) {
            let spread = rewards.iter().fold(0.0_f64, |a, r| a.max((r - rewards[0]).abs()));
            prop_assume!(spread > 0.1);
            let ours = group_relative(&rewards, ScaleRewards::Group);
            prop_assert!(ours.iter().sum::<f32>().abs() < 1e-4);
            let moved: Vec<f64> = rewards.iter().map(|r| shift + stretch * r).collect();
            for (a, b) in ours.iter().zip(group_relative(&moved, ScaleRewards::Group)) {
                prop_assert!((a - b).abs() < 1e-3);
            }
        }
    }
}
