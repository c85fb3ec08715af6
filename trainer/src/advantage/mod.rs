//! Advantages: how much better a trajectory, or one of its tokens, was than a baseline.
//!
//! Invariant: an advantage estimator is arithmetic on host numbers in f64. Its input is rewards and lengths, never
//! tokens or tensors; its output is one advantage per trained token.
//!
//! # Layout
//! - [`group`]: baseline from the other trajectories of the task
//! - [`batch`]: baseline from the whole batch
//! - [`pass_at_k`]: a task counts as solved if one of k attempts is correct
//! - [`process`]: rewards of turns
//! - [`gae`]: baseline from a critic

pub mod batch;
pub mod gae;
pub mod group;
pub mod pass_at_k;
pub mod process;

use serde::{Deserialize, Serialize};

pub use gae::Gae;
pub use group::ScaleRewards;

/// Added to a standard deviation before a division.
pub const EPSILON: f64 = 1e-6;

/// Rewards and lengths of one trajectory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrajectoryOutcome {
    /// Total of its rewards, without those of its turns.
    pub reward: f64,
    /// Whether the answer is correct, independent of the reward.
    pub correct: bool,
    /// Trained tokens, `T`.
    pub tokens: usize,
    /// Each reward component before weighting, in the order of the recipe; 0 for a component that failed.
    pub components: Vec<f64>,
    /// Trained tokens and reward of each turn, if turns have rewards besides the total; otherwise empty.
    pub turns: Vec<(usize, f64)>,
    /// `[T]` subtracted from the reward at each token, such as a KL penalty; empty for none.
    pub penalties: Vec<f64>,
    /// `[T]` values of the critic before each token; empty without a critic.
    pub values: Vec<f64>,
    /// `[T]` log-probability under the teacher minus that under the policy, nats; empty without a teacher.
    pub teacher_gap: Vec<f64>,
}

/// The trajectories of one task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupOutcome {
    /// The trajectories that have a reward.
    pub trajectories: Vec<TrajectoryOutcome>,
    /// Reward of the task's greedy completion, if there is one.
    pub greedy: Option<f64>,
}

/// How advantages are estimated: which baseline is subtracted from the reward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum AdvantageEstimator {
    /// The group mean (GRPO, Dr.GRPO, ScaleRL).
    Group {
        /// What the deviation is divided by.
        scale: ScaleRewards,
    },
    /// The mean of the other trajectories of the group (RLOO, arXiv 2402.14740).
    LeaveOneOut,
    /// The group mean weighted by length (OPO, arXiv 2505.23585).
    LengthWeighted,
    /// The reward of the greedy completion of the task (ReMax, arXiv 2310.10505); the group mean if it has no reward.
    Greedy,
    /// Each reward component normalised in its group, then the sum over the batch (GDPO, arXiv 2601.05242).
    PerReward {
        /// Weight of every component, `[components]`.
        weights: Vec<f64>,
    },
    /// Returns whitened over the whole batch (REINFORCE++, arXiv 2501.03262).
    Whiten {
        /// Whether the group mean is subtracted first.
        baseline: bool,
        /// Discount of a reward per token.
        gamma: f64,
    },
    /// The batch mean.
    BatchMean,
    /// No baseline: the advantage is the reward.
    None,
    /// All subsets of `k` trajectories of the group (pass@k training, arXiv 2508.10751).
    PassAtK {
        /// Number of attempts, one of which must be correct.
        k: usize,
    },
    /// All turn rewards of the group (process supervision of GRPO, arXiv 2402.03300).
    Process,
    /// The values of a critic (GAE).
    Gae(Gae),
    /// A teacher's log-probability of the same token (on-policy distillation).
    Teacher,
}

/// Advantages `[groups][G][T]`.
pub type Advantages = Vec<Vec<Vec<f64>>>;

impl AdvantageEstimator {
    /// Whether all advantages of a group are 0 if its rewards are equal.
    #[must_use]
    pub fn needs_variance(&self) -> bool {
        match self {
            Self::Group { .. } | Self::LeaveOneOut | Self::LengthWeighted | Self::PassAtK { .. } => true,
            Self::Greedy
            | Self::PerReward { .. }
            | Self::Whiten { .. }
            | Self::BatchMean
            | Self::None
            | Self::Process
            | Self::Gae(_)
            | Self::Teacher => false,
        }
    }

    /// Whether a per-token penalty changes the advantage.
    #[must_use]
    pub fn counts_penalties(&self) -> bool {
        !matches!(self, Self::PerReward { .. } | Self::PassAtK { .. } | Self::Process | Self::Teacher)
    }

    /// Advantages `[groups][G][T]` of a batch. Penalties are subtracted from the reward, per token if the estimator
    /// works per token.
    #[must_use]
    pub fn of(&self, groups: &[GroupOutcome]) -> Advantages {
        match self {
            Self::Group { scale } => each_trajectory(groups, group::relative(&totals(groups), *scale)),
            Self::LeaveOneOut => each_group(groups, |_, rewards| group::leave_one_out(rewards)),
            Self::LengthWeighted => each_group(groups, |group, rewards| {
                let lengths: Vec<f64> = group.trajectories.iter().map(|t| t.tokens as f64).collect();
                group::length_weighted(rewards, &lengths)
            }),
            Self::Greedy => each_group(groups, |group, rewards| {
                let baseline = group.greedy.unwrap_or_else(|| mean(rewards.iter().copied()));
                rewards.iter().map(|r| r - baseline).collect()
            }),
            Self::PerReward { weights } => each_trajectory(groups, batch::per_reward(groups, weights)),
            Self::Whiten { baseline, gamma } => batch::whiten_returns(groups, *baseline, *gamma),
            Self::BatchMean => each_trajectory(groups, batch::centred(&totals(groups))),
            Self::None => each_trajectory(groups, totals(groups)),
            Self::PassAtK { k } => each_group(groups, |group, _| {
                let right: Vec<bool> = group.trajectories.iter().map(|t| t.correct).collect();
                pass_at_k::advantages(&right, *k)
            }),
            Self::Process => groups.iter().map(process::advantages).collect(),
            Self::Gae(gae) => gae.advantages(groups),
            Self::Teacher => per_token(groups, |outcome| outcome.teacher_gap.clone()),
        }
    }
}

impl TrajectoryOutcome {
    /// The undiscounted return: the reward of the whole and those of its turns, as
    /// [`episode_reward`](trajectory::episode_reward) defines it.
    #[must_use]
    pub fn earned(&self) -> f64 {
        self.turns.iter().fold(self.reward, |sum, (_, reward)| sum + reward)
    }

    /// The return minus the sum of its penalties.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.earned() - self.penalties.iter().sum::<f64>()
    }

    /// `[tokens]` reward of every token: the reward of a turn at its last token, the total at the last token of all, minus
    /// penalties.
    #[must_use]
    pub fn token_rewards(&self) -> Vec<f64> {
        let mut rewards = vec![0.0; self.tokens];
        let mut add = |end: usize, reward: f64| {
            if let Some(at) = end.checked_sub(1).and_then(|last| rewards.get_mut(last)) {
                *at += reward;
            }
        };
        add(self.tokens, self.reward);
        let mut end = 0;
        for (tokens, reward) in &self.turns {
            end += tokens;
            add(end, *reward);
        }
        rewards.iter_mut().zip(&self.penalties).for_each(|(reward, penalty)| *reward -= penalty);
        rewards
    }
}

/// Rewards minus penalties, `[groups][G]`.
fn totals(groups: &[GroupOutcome]) -> Vec<Vec<f64>> {
    groups.iter().map(|group| group.trajectories.iter().map(TrajectoryOutcome::total).collect()).collect()
}

/// Broadcasts `advantages [groups][G]` to the tokens: `[groups][G][T]`.
fn each_trajectory(groups: &[GroupOutcome], advantages: Vec<Vec<f64>>) -> Advantages {
    let spread = |(group, advantages): (&GroupOutcome, Vec<f64>)| {
        group.trajectories.iter().zip(advantages).map(|(t, a)| vec![a; t.tokens]).collect()
    };
    groups.iter().zip(advantages).map(spread).collect()
}

fn each_group(groups: &[GroupOutcome], of: impl Fn(&GroupOutcome, &[f64]) -> Vec<f64>) -> Advantages {
    let advantages = groups.iter().zip(totals(groups)).map(|(group, rewards)| of(group, &rewards)).collect();
    each_trajectory(groups, advantages)
}

fn per_token(groups: &[GroupOutcome], of: impl Fn(&TrajectoryOutcome) -> Vec<f64>) -> Advantages {
    groups.iter().map(|group| group.trajectories.iter().map(&of).collect()).collect()
}

/// Arithmetic mean; 0 for no values.
pub(crate) fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (count, sum) = values.into_iter().fold((0u64, 0.0), |(n, sum), value| (n + 1, sum + value));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// Sample standard deviation (n - 1); 0 for fewer than two values.
pub(crate) fn sample_std(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values.iter().copied());
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greedy_baseline_without_a_reward_falls_back_to_the_group_mean() {
        let trajectory = |reward| TrajectoryOutcome { reward, tokens: 1, ..TrajectoryOutcome::default() };
        let trajectories = vec![trajectory(1.0), trajectory(0.0)];
        let with = GroupOutcome { trajectories: trajectories.clone(), greedy: Some(1.0) };
        let without = GroupOutcome { trajectories, greedy: None };
        let expected = [vec![vec![0.0], vec![-1.0]], vec![vec![0.5], vec![-0.5]]];
        assert_eq!(AdvantageEstimator::Greedy.of(&[with, without]), expected);
    }

    #[test]
    fn rewards_of_turns_count_in_the_comparison_of_a_group() {
        let trajectory =
            |turns| TrajectoryOutcome { reward: 1.0, tokens: 2, turns, ..TrajectoryOutcome::default() };
        let trajectories = vec![trajectory(vec![(1, 0.5), (1, 0.5)]), trajectory(vec![(2, 0.0)])];
        let group = GroupOutcome { trajectories, greedy: None };
        assert_eq!(AdvantageEstimator::LeaveOneOut.of(&[group]), [vec![vec![1.0; 2], vec![-1.0; 2]]]);
    }

    #[test]
    fn rewards_are_at_the_last_token_of_their_turn() {
        let outcome = TrajectoryOutcome {
            reward: 1.0,
            tokens: 5,
            turns: vec![(2, 0.25), (3, -0.5)],
            penalties: vec![0.1; 5],
            ..TrajectoryOutcome::default()
        };
        let expected = [-0.1, 0.25 - 0.1, -0.1, -0.1, 1.0 - 0.5 - 0.1];
        for (ours, expected) in outcome.token_rewards().iter().zip(expected) {
            assert!((ours - expected).abs() < 1e-12, "{ours} {expected}");
        }
        assert_eq!(TrajectoryOutcome { tokens: 0, ..outcome }.token_rewards(), Vec::<f64>::new());
    }
}
