//! Credit: how much better a trajectory, or one of its tokens, was than what it is compared with.
//!
//! Invariant: credit is arithmetic on host numbers in f64. It sees rewards and lengths, never tokens or tensors; what
//! comes out is one advantage per trained token.
//!
//! # Layout
//! - [`group`]: against the other trajectories of the task
//! - [`batch`]: against the whole batch
//! - [`pass_at_k`]: for tasks that count as solved if one of k attempts is right
//! - [`process`]: rewards of turns
//! - [`gae`]: against a critic

pub mod batch;
pub mod gae;
pub mod group;
pub mod pass_at_k;
pub mod process;

use serde::{Deserialize, Serialize};

pub use gae::Gae;
pub use group::ScaleRewards;

/// Added to a standard deviation before it divides.
pub const EPSILON: f64 = 1e-6;

/// One trajectory as an advantage sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// What it is worth.
    pub reward: f64,
    /// Whether it is correct, whatever it is worth.
    pub correct: bool,
    /// Trained tokens, `T`.
    pub tokens: usize,
    /// Each reward by itself, before weighting, in the order of the recipe; 0 for one that failed.
    pub components: Vec<f64>,
    /// Trained tokens and reward of each turn, if turns have rewards of their own beside that of the whole.
    pub turns: Vec<(usize, f64)>,
    /// `[T]` taken off the reward at each token, such as the divergence from the reference; empty for none.
    pub penalties: Vec<f64>,
    /// `[T]` what the critic expected before each token; empty without one.
    pub values: Vec<f64>,
    /// `[T]` log-probability under the teacher minus that under the policy; empty without one.
    pub teacher_gap: Vec<f64>,
}

/// The trajectories of one task.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupOutcome {
    /// Those that have a reward.
    pub trajectories: Vec<Outcome>,
    /// Reward of the task's greedy completion, if there is one.
    pub greedy: Option<f64>,
}

/// What a trajectory is compared with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Advantage {
    /// The mean of its group (GRPO, Dr.GRPO, ScaleRL).
    Group {
        /// What the deviation is divided by.
        scale: ScaleRewards,
    },
    /// The mean of the others of its group (RLOO, arXiv 2402.14740).
    LeaveOneOut,
    /// The mean of its group weighted by length (OPO, arXiv 2505.23585).
    LengthWeighted,
    /// The greedy completion of its task (ReMax, arXiv 2310.10505); the group's mean where that has no reward.
    Greedy,
    /// The group, reward by reward, then the batch (GDPO, arXiv 2601.05242).
    PerReward {
        /// Weight of every component.
        weights: Vec<f64>,
    },
    /// The whole batch, whitened (REINFORCE++, arXiv 2501.03262).
    Whiten {
        /// Whether the group's mean is taken off first.
        baseline: bool,
        /// What a reward is worth one token earlier.
        gamma: f64,
    },
    /// The mean of the batch.
    BatchMean,
    /// Nothing: the advantage is the reward.
    None,
    /// The other ways to solve the task in `k` attempts (arXiv 2508.10751).
    PassAtK {
        /// Attempts of which one must be right.
        k: usize,
    },
    /// The turns of the whole group (process supervision of GRPO, arXiv 2402.03300).
    Process,
    /// What a critic expected.
    Gae(Gae),
    /// A teacher's log-probability of the same token (on-policy distillation).
    Teacher,
}

/// Advantages `[T]` of every trajectory of every group.
pub type Advantages = Vec<Vec<Vec<f64>>>;

impl Advantage {
    /// Whether a group whose rewards are all equal has no advantage anywhere.
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

    /// Whether what is taken off the reward changes it.
    #[must_use]
    pub fn counts_penalties(&self) -> bool {
        !matches!(self, Self::PerReward { .. } | Self::PassAtK { .. } | Self::Process | Self::Teacher)
    }

    /// Advantages of a batch. Penalties are taken off the reward, token by token where tokens are told apart.
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

impl Outcome {
    /// The reward without its penalties.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.reward - self.penalties.iter().sum::<f64>()
    }

    /// `[T]` what every token earned: turns at their last token, the reward at the very last, without penalties.
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

/// Rewards without penalties, group by group.
fn totals(groups: &[GroupOutcome]) -> Vec<Vec<f64>> {
    groups.iter().map(|group| group.trajectories.iter().map(Outcome::total).collect()).collect()
}

/// The same advantage for every token of a trajectory, from those of the groups.
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

fn per_token(groups: &[GroupOutcome], of: impl Fn(&Outcome) -> Vec<f64>) -> Advantages {
    groups.iter().map(|group| group.trajectories.iter().map(&of).collect()).collect()
}

/// Arithmetic mean; 0 of nothing.
pub(crate) fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (count, sum) = values.into_iter().fold((0u64, 0.0), |(n, sum), value| (n + 1, sum + value));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// Standard deviation of a sample (n - 1); 0 for fewer than two values.
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
    fn a_greedy_completion_without_a_reward_is_not_worth_nothing() {
        let trajectory = |reward| Outcome { reward, tokens: 1, ..Outcome::default() };
        let trajectories = vec![trajectory(1.0), trajectory(0.0)];
        let with = GroupOutcome { trajectories: trajectories.clone(), greedy: Some(1.0) };
        let without = GroupOutcome { trajectories, greedy: None };
        let expected = [vec![vec![0.0], vec![-1.0]], vec![vec![0.5], vec![-0.5]]];
        assert_eq!(Advantage::Greedy.of(&[with, without]), expected);
    }

    #[test]
    fn rewards_stand_where_they_were_earned() {
        let outcome = Outcome {
            reward: 1.0,
            tokens: 5,
            turns: vec![(2, 0.25), (3, -0.5)],
            penalties: vec![0.1; 5],
            ..Outcome::default()
        };
        let expected = [-0.1, 0.25 - 0.1, -0.1, -0.1, 1.0 - 0.5 - 0.1];
        for (ours, expected) in outcome.token_rewards().iter().zip(expected) {
            assert!((ours - expected).abs() < 1e-12, "{ours} {expected}");
        }
        assert_eq!(Outcome { tokens: 0, ..outcome }.token_rewards(), Vec::<f64>::new());
    }
}
