//! Generalised advantage estimation (GAE, arXiv 1506.02438), with a separate lambda for the critic (VC-PPO, arXiv
//! 2503.01491) and a length-adaptive lambda for the policy (VAPO, arXiv 2504.05118).
//!
//! Invariant: values and rewards are per trained token; tokens that the policy did not sample (prompts, tool output)
//! are skipped.

use serde::{Deserialize, Serialize};

use super::{Advantages, GroupOutcome, batch, per_token};

/// Discount and lambdas of GAE.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gae {
    /// Discount of a reward per token.
    pub gamma: f64,
    /// Lambda of the policy's advantages; 1 gives the return minus the value.
    pub lambda_policy: f64,
    /// `alpha` of VAPO: if above 0, the policy's lambda is `1 - 1 / (alpha * T)` for a trajectory of `T` tokens, at
    /// least 0.
    pub length_adaptive: f64,
    /// Lambda of the critic's value targets.
    pub lambda_critic: f64,
    /// Whether advantages are whitened over the batch.
    pub whiten: bool,
}

impl Gae {
    /// Advantages of the policy, `[groups][G][T]`.
    #[must_use]
    pub fn advantages(&self, groups: &[GroupOutcome]) -> Advantages {
        let raw = per_token(groups, |outcome| {
            let lambda = self.policy_lambda(outcome.tokens);
            generalised(&outcome.token_rewards(), &outcome.values, Discount { gamma: self.gamma, lambda })
        });
        if self.whiten { batch::whiten(&raw) } else { raw }
    }

    /// Value targets of the critic, `[groups][G][T]`: GAE with `lambda_critic`, plus the values before the step.
    #[must_use]
    pub fn returns(&self, groups: &[GroupOutcome]) -> Advantages {
        per_token(groups, |outcome| {
            let (rewards, values) = (outcome.token_rewards(), &outcome.values);
            let discount = Discount { gamma: self.gamma, lambda: self.lambda_critic };
            let advantages = generalised(&rewards, values, discount);
            advantages.iter().zip(values).map(|(advantage, value)| advantage + value).collect()
        })
    }

    fn policy_lambda(&self, tokens: usize) -> f64 {
        if self.length_adaptive > 0.0 && tokens > 0 {
            (1.0 - 1.0 / (self.length_adaptive * tokens as f64)).max(0.0)
        } else {
            self.lambda_policy
        }
    }
}

/// Discount and lambda of one GAE pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Discount {
    /// Discount of a reward per token.
    pub gamma: f64,
    /// Weight of longer estimates; 1 gives the return minus the value.
    pub lambda: f64,
}

/// `A_t = d_t + gamma lambda A_{t+1}` with `d_t = r_t + gamma V_{t+1} - V_t`; the value after the last token is 0.
/// `rewards [tokens]`, `values [tokens]`; the result is `[tokens]`.
#[must_use]
pub fn generalised(rewards: &[f64], values: &[f64], Discount { gamma, lambda }: Discount) -> Vec<f64> {
    let mut advantages = vec![0.0; rewards.len()];
    let (mut next_value, mut next) = (0.0, 0.0);
    for (t, (reward, value)) in rewards.iter().zip(values).enumerate().rev() {
        next = reward + gamma * next_value - value + gamma * lambda * next;
        next_value = *value;
        advantages[t] = next;
    }
    advantages
}

/// Discounted returns `R_t = r_t + gamma R_{t+1}` of `rewards [tokens]`; the result is `[tokens]`.
#[must_use]
pub fn discounted(rewards: &[f64], gamma: f64) -> Vec<f64> {
    generalised(rewards, &vec![0.0; rewards.len()], Discount { gamma, lambda: 1.0 })
}
