//! Generalised advantage estimation against a critic (arXiv 1506.02438), with a lambda of its own for the critic
//! (VC-PPO, arXiv 2503.01491) and one that grows with the length for the policy (VAPO, arXiv 2504.05118).
//!
//! Invariant: values and rewards are per trained token; what the policy did not choose (prompts, tool output) is skipped.

use serde::{Deserialize, Serialize};

use super::{Advantages, GroupOutcome, batch, per_token};

/// How far rewards reach back.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gae {
    /// What a reward is worth one token earlier.
    pub gamma: f64,
    /// Weight of longer estimates in the policy's advantages; 1 is the return minus the value.
    pub lambda_policy: f64,
    /// VAPO's `alpha`: if above 0, the policy's lambda is `1 - 1 / (alpha * T)` of a trajectory of `T` tokens, at
    /// least 0.
    pub length_adaptive: f64,
    /// Weight of longer estimates in the critic's targets.
    pub lambda_critic: f64,
    /// Whether advantages are whitened over the batch.
    pub whiten: bool,
}

impl Gae {
    /// Advantages of the policy.
    #[must_use]
    pub fn advantages(&self, groups: &[GroupOutcome]) -> Advantages {
        let raw = per_token(groups, |outcome| {
            let lambda = self.policy_lambda(outcome.tokens);
            generalised(&outcome.token_rewards(), &outcome.values, self.gamma, lambda)
        });
        if self.whiten { batch::whiten(&raw) } else { raw }
    }

    /// What the critic learns to expect: its advantages plus what it expected.
    #[must_use]
    pub fn returns(&self, groups: &[GroupOutcome]) -> Advantages {
        per_token(groups, |outcome| {
            let (rewards, values) = (outcome.token_rewards(), &outcome.values);
            let advantages = generalised(&rewards, values, self.gamma, self.lambda_critic);
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

/// `A_t = d_t + gamma lambda A_{t+1}` with `d_t = r_t + gamma V_{t+1} - V_t`; after the last token the value is 0.
/// `rewards`, `values` and the result are `[T]`.
#[must_use]
pub fn generalised(rewards: &[f64], values: &[f64], gamma: f64, lambda: f64) -> Vec<f64> {
    let mut advantages = vec![0.0; rewards.len()];
    let (mut next_value, mut next) = (0.0, 0.0);
    for (t, (reward, value)) in rewards.iter().zip(values).enumerate().rev() {
        next = reward + gamma * next_value - value + gamma * lambda * next;
        next_value = *value;
        advantages[t] = next;
    }
    advantages
}

/// `R_t = r_t + gamma R_{t+1}`, `[T]`.
#[must_use]
pub fn discounted(rewards: &[f64], gamma: f64) -> Vec<f64> {
    generalised(rewards, &vec![0.0; rewards.len()], gamma, 1.0)
}
