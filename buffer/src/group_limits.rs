//! What whoever trains on groups knows of them, so that a group which cannot be trained on is found before it is.
//!
//! Invariant: what passes reaches no index out of bounds and no infinite number in a training step. The buffer by itself
//! knows none of these numbers: it is told them, or takes any group.

use trajectory::{Group, Trajectory};

/// Lowest behavior log-probability of a trained token, nats. No sampler draws a token that improbable, and the inverse of
/// what is above fits into f32 together with any advantage.
const MIN_LOGPROB: f32 = -50.0;
/// Largest reward in absolute value, for the same reason.
const MAX_REWARD: f64 = 1e9;
/// Temperatures between which logits stay finite when they are divided.
const TEMPERATURES: std::ops::RangeInclusive<f32> = 1e-6..=1e6;

/// What whoever trains on groups knows of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    /// Token ids are below.
    pub vocabulary: u32,
    /// Most tokens of a trajectory, prompt and completion: what the model can see.
    pub context: usize,
    /// Most trajectories that are trained on; one baseline may come on top.
    pub trajectories: usize,
}

/// Why a group cannot be trained on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unfit {
    /// A token, or one that truncation kept, that the model does not have.
    #[error("trajectory {trajectory}: token id {id}; the vocabulary of the run has {vocabulary} ids, from 0")]
    Vocabulary {
        /// Its index in the group.
        trajectory: u32,
        /// The token.
        id: u32,
        /// Ids of the model.
        vocabulary: u32,
    },
    /// More tokens than the model can see.
    #[error("trajectory {trajectory} has {tokens} tokens; the model of the run sees {context}")]
    Context {
        /// Its index in the group.
        trajectory: u32,
        /// Its tokens.
        tokens: usize,
        /// Most tokens.
        context: usize,
    },
    /// More trajectories than a group of the run has.
    #[error("{found} trajectories and {baselines} baselines; a group of the run has at most {limit} and one")]
    Size {
        /// Trajectories to train on.
        found: usize,
        /// Baselines.
        baselines: usize,
        /// Most trajectories to train on.
        limit: usize,
    },
    /// A log-probability that nothing is sampled with.
    #[error(
        "trajectory {trajectory}: behavior log-probability {value} of token {token}; no sampler draws below {MIN_LOGPROB}"
    )]
    Logprob {
        /// Its index in the group.
        trajectory: u32,
        /// Position of the token.
        token: usize,
        /// Nats.
        value: f32,
    },
    /// A temperature that cannot be divided by.
    #[error(
        "trajectory {trajectory}: temperature {value}; from {:e} to {:e} is possible",
        TEMPERATURES.start(),
        TEMPERATURES.end()
    )]
    Temperature {
        /// Its index in the group.
        trajectory: u32,
        /// The temperature.
        value: f32,
    },
    /// A reward that is not finite, or too large for the arithmetic of a step.
    #[error("trajectory {trajectory}: reward {value}; from {:e} to {MAX_REWARD:e} is possible", -MAX_REWARD)]
    Reward {
        /// Its index in the group.
        trajectory: u32,
        /// The reward.
        value: f64,
    },
    /// A model call outside the tokens.
    #[error(
        "trajectory {trajectory}: turn {turn} ends at token {end} of {tokens}, or begins before the one before"
    )]
    Turn {
        /// Its index in the group.
        trajectory: u32,
        /// Which turn, from 0.
        turn: usize,
        /// Where it ends.
        end: usize,
        /// Tokens of the trajectory.
        tokens: usize,
    },
}

impl GroupLimits {
    /// Whether `group` can be trained on.
    ///
    /// # Errors
    /// The first thing that cannot.
    pub fn check(&self, group: &Group) -> Result<(), Unfit> {
        let found = group.sampled().count();
        let baselines = group.trajectories.len() - found;
        if found > self.trajectories || baselines > 1 {
            return Err(Unfit::Size { found, baselines, limit: self.trajectories });
        }
        group.trajectories.iter().try_for_each(|trajectory| self.check_trajectory(trajectory))
    }

    fn check_trajectory(&self, found: &Trajectory) -> Result<(), Unfit> {
        let (trajectory, sample) = (found.index, &found.sample);
        let tokens = sample.token_ids().len();
        if tokens > self.context {
            return Err(Unfit::Context { trajectory, tokens, context: self.context });
        }
        let kept = sample.kept().map(|kept| &kept.ids[..]).unwrap_or_default();
        if let Some(&id) = sample.token_ids().iter().chain(kept).find(|id| **id >= self.vocabulary) {
            return Err(Unfit::Vocabulary { trajectory, id, vocabulary: self.vocabulary });
        }
        let trained = sample.behavior_logprobs().iter().zip(sample.loss_mask()).enumerate();
        let improbable = |(_, (value, trained)): &(usize, (&f32, &bool))| **trained && **value < MIN_LOGPROB;
        if let Some((token, (&value, _))) = { trained }.find(improbable) {
            return Err(Unfit::Logprob { trajectory, token, value });
        }
        let value = sample.temperature();
        if !TEMPERATURES.contains(&value) {
            return Err(Unfit::Temperature { trajectory, value });
        }
        check_rewards(found)?;
        check_turns(found)
    }
}

fn check_rewards(found: &Trajectory) -> Result<(), Unfit> {
    let components = found.score.components.iter().filter_map(|component| component.value);
    let turns = found.turns.iter().filter_map(|turn| turn.reward);
    let mut all = found.score.total.into_iter().chain(components).chain(turns);
    // Not a number is not within either.
    match all.find(|value| !(-MAX_REWARD..=MAX_REWARD).contains(value)) {
        Some(value) => Err(Unfit::Reward { trajectory: found.index, value }),
        None => Ok(()),
    }
}

fn check_turns(found: &Trajectory) -> Result<(), Unfit> {
    let (mut free, tokens) = (0, found.sample.token_ids().len());
    for (turn, std::ops::Range { start, end }) in
        found.turns.iter().map(|turn| turn.completion.clone()).enumerate()
    {
        if start < free || end < start || end > tokens {
            return Err(Unfit::Turn { trajectory: found.index, turn, end, tokens });
        }
        free = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use trajectory::{
        GroupId, KeptTokens, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
        Turn, VersionRun,
    };

    use super::*;

    const LIMITS: GroupLimits = GroupLimits { vocabulary: 10, context: 4, trajectories: 2 };

    fn streams() -> SampleStreams {
        SampleStreams {
            token_ids: vec![1, 9],
            loss_mask: vec![false, true],
            behavior_logprobs: vec![-70.0, -49.0],
            versions: vec![VersionRun { version: PolicyVersion(0), len: 2 }],
            kept: Some(KeptTokens { offsets: vec![0, 2], ids: vec![8, 9] }),
            temperature: 1.0,
        }
    }

    fn trajectory(streams: SampleStreams) -> Trajectory {
        Trajectory {
            index: 0,
            sample: Sample::new(streams).unwrap(),
            turns: vec![Turn { completion: 1..2, stop: StopReason::Length, reward: None }],
            text: String::new(),
            score: Score { total: Some(1e9), components: Vec::new(), correct: None },
            baseline: false,
        }
    }

    fn group(trajectories: Vec<Trajectory>) -> Group {
        let task = Task {
            id: TaskId(0),
            prompt: Prompt::Text(String::new()),
            answer: None,
            columns: serde_json::Map::new(),
        };
        Group { id: GroupId(0), task, trajectories }
    }

    fn refused(change: impl FnOnce(&mut Trajectory)) -> String {
        let mut one = trajectory(streams());
        change(&mut one);
        LIMITS.check(&group(vec![one])).unwrap_err().to_string()
    }

    fn with(change: impl FnOnce(&mut SampleStreams)) -> String {
        let mut streams = streams();
        change(&mut streams);
        refused(|trajectory| trajectory.sample = Sample::new(streams).unwrap())
    }

    #[test]
    fn what_cannot_be_trained_on_is_named() {
        LIMITS.check(&group(vec![trajectory(streams()), trajectory(streams())])).unwrap();
        let mut greedy = trajectory(SampleStreams { loss_mask: vec![false; 2], kept: None, ..streams() });
        greedy.baseline = true;
        LIMITS.check(&group(vec![trajectory(streams()), trajectory(streams()), greedy.clone()])).unwrap();
        for too_many in [vec![trajectory(streams()); 3], vec![greedy; 2]] {
            assert!(matches!(LIMITS.check(&group(too_many)), Err(Unfit::Size { limit: 2, .. })));
        }
        for (said, wanted) in [
            (with(|s| s.token_ids[0] = 10), "token id 10; the vocabulary of the run has 10 ids"),
            (
                with(|s| s.kept = Some(KeptTokens { offsets: vec![0, 2], ids: vec![9, 50_000] })),
                "token id 50000",
            ),
            (
                with(|s| {
                    *s = SampleStreams {
                        token_ids: vec![1; 5],
                        loss_mask: vec![false; 5],
                        behavior_logprobs: vec![0.0; 5],
                        versions: vec![VersionRun { version: PolicyVersion(0), len: 5 }],
                        kept: None,
                        temperature: 1.0,
                    }
                }),
                "has 5 tokens; the model of the run sees 4",
            ),
            (with(|s| s.behavior_logprobs[1] = -51.0), "behavior log-probability -51 of token 1"),
            (with(|s| s.temperature = 1e-30), "temperature"),
            (refused(|t| t.score.total = Some(-2e9)), "reward -2000000000"),
            (refused(|t| t.turns[0].reward = Some(f64::NAN)), "reward NaN"),
            (refused(|t| t.turns[0].completion = 1..3), "ends at token 3 of 2"),
            (refused(|t| t.turns.push(t.turns[0].clone())), "turn 1"),
        ] {
            assert!(said.contains(wanted), "{said}");
        }
    }
}
