//! Credit: what each interaction of a session is worth.
//!
//! Invariant: the sum of the rewards of a session does not depend on which of its interactions are trained on.

use super::{Interaction, InteractionRole};

/// Rewards `[interactions]` in the order of the calls, discounted backward: each has its own reward and `discount` times
/// what the one after it has (as AReaL exports them). No reward counts as 0.
#[must_use]
pub fn discounted(interactions: &[Interaction], discount: f64) -> Vec<f64> {
    let mut later = 0.0;
    let mut rewards: Vec<f64> = interactions
        .iter()
        .rev()
        .map(|interaction| {
            later = interaction.reward.unwrap_or(0.0) + discount * later;
            later
        })
        .collect();
    rewards.reverse();
    rewards
}

/// Rewards `[interactions]` of the turns that are `trained`: that of another interaction is added to the last trained one
/// before it, or to the first.
#[must_use]
pub fn of_trained(interactions: &[Interaction], trained: &[bool]) -> Vec<Option<f64>> {
    let mut rewards: Vec<Option<f64>> = vec![None; interactions.len()];
    let first = trained.iter().position(|trained| *trained);
    for (n, interaction) in interactions.iter().enumerate() {
        let Some(reward) = interaction.reward else { continue };
        let place = (0..=n).rev().find(|m| trained[*m]).or(first);
        if let Some(place) = place {
            rewards[place] = Some(rewards[place].unwrap_or(0.0) + reward);
        }
    }
    rewards
}

/// Number of interactions of each role: of the agent, auxiliary, discarded.
#[must_use]
pub fn counts(roles: &[InteractionRole]) -> [u64; 3] {
    let of = |wanted: InteractionRole| roles.iter().filter(|role| **role == wanted).count() as u64;
    [InteractionRole::Agent, InteractionRole::Auxiliary, InteractionRole::Discarded].map(of)
}
