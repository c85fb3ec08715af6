//! Process supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.3): advantages from the rewards of turns.

use super::{EPSILON, GroupOutcome, TrajectoryOutcome, mean, sample_std};

/// Advantages `[trajectories][tokens]`: all turn rewards of the group are normalised together; the advantage of a token is
/// the sum over its own turn and all later turns. The reward of the whole is one of the last turn; a trajectory without turn
/// rewards is one turn.
#[must_use]
pub fn advantages(group: &GroupOutcome) -> Vec<Vec<f64>> {
    let turns: Vec<Vec<(usize, f64)>> = group.trajectories.iter().map(turns).collect();
    let all: Vec<f64> = turns.iter().flatten().map(|(_, reward)| *reward).collect();
    let (mean, std) = (mean(all.iter().copied()), sample_std(&all));
    let of = |turns: &Vec<(usize, f64)>| {
        let mut tokens = Vec::new();
        let mut later = 0.0;
        for (count, reward) in turns.iter().rev() {
            later += (reward - mean) / (std + EPSILON);
            tokens.extend(std::iter::repeat_n(later, *count));
        }
        tokens.reverse();
        tokens
    };
    turns.iter().map(of).collect()
}

fn turns(outcome: &TrajectoryOutcome) -> Vec<(usize, f64)> {
    match &outcome.turns[..] {
        [] => vec![(outcome.tokens, outcome.reward)],
        [before @ .., (tokens, reward)] => {
            before.iter().copied().chain([(*tokens, reward + outcome.reward)]).collect()
        }
    }
}
