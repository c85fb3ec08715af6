//! Validation of groups against the model and the recipe that train on them.
//!
//! Invariant: a group that passes causes no index out of bounds and no non-finite number in a training step. The
//! buffer does not know these limits by itself; without them it accepts any group.

use trajectory::{Group, Sample, Trajectory};

/// Minimum behavior log-probability of a trained token, nats. No sampler draws a less probable token, and the inverse
/// of a probability above it fits into f32 together with any advantage.
const MIN_LOGPROB: f32 = -50.0;
/// Maximum absolute reward, for the same reason.
const MAX_REWARD: f64 = 1e9;
/// Range of temperatures for which divided logits stay finite.
const TEMPERATURES: std::ops::RangeInclusive<f32> = 1e-6..=1e6;

/// Limits of the model and the recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    /// Vocabulary size: token ids are below it.
    pub vocabulary: u32,
    /// Context length of the model: maximum number of tokens of a branch of a trajectory, prompt and completion.
    pub context: usize,
    /// Maximum number of trained trajectories of a group, for each role; one baseline trajectory may come on top.
    pub trajectories: usize,
    /// Experts of the model; `None` if it has none.
    pub experts: Option<ExpertLimits>,
}

/// The experts that a token can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertLimits {
    /// Experts of a layer.
    pub count: usize,
    /// Experts of a token in each layer that has some.
    pub per_token: usize,
    /// Experts of a token in all layers.
    pub slots: usize,
}

/// Why a group cannot be trained on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unfit {
    /// A sampled token, or a token kept by truncation, outside the vocabulary.
    #[error("trajectory {trajectory}: token id {id}; the vocabulary of the run has {vocabulary} ids, from 0")]
    Vocabulary {
        /// Its index in the group.
        trajectory: u32,
        /// The token.
        id: u32,
        /// Vocabulary size.
        vocabulary: u32,
    },
    /// More tokens than the context length.
    #[error("trajectory {trajectory} has {tokens} tokens; the model of the run sees {context}")]
    Context {
        /// Its index in the group.
        trajectory: u32,
        /// Its tokens.
        tokens: usize,
        /// Most tokens.
        context: usize,
    },
    /// More trajectories than the run's group size.
    #[error("{found} trajectories and {baselines} baselines; a group of the run has at most {limit} and one")]
    Size {
        /// Trained trajectories.
        found: usize,
        /// Baselines.
        baselines: usize,
        /// Maximum number of trained trajectories.
        limit: usize,
    },
    /// A log-probability that no sampler produces.
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
    /// Experts of another model.
    #[error(
        "trajectory {trajectory} has {found} experts per token, {per_token} of each layer; the model of the run has {slots}"
    )]
    Experts {
        /// Its index in the group.
        trajectory: u32,
        /// Experts of a token in all layers.
        found: usize,
        /// Those of a layer.
        per_token: u32,
        /// Those of a token of the model.
        slots: usize,
    },
    /// An expert that the model does not have.
    #[error("trajectory {trajectory}: expert {id}; a layer of the run's model has {count}, from 0")]
    Expert {
        /// Its index in the group.
        trajectory: u32,
        /// The expert.
        id: u16,
        /// Experts of a layer.
        count: usize,
    },
    /// A temperature that logits cannot be divided by.
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
    /// A turn outside the tokens of its trajectory.
    #[error(
        "trajectory {trajectory}: turn {turn} ends at token {end} of {tokens}, or begins before the one before"
    )]
    Turn {
        /// Its index in the group.
        trajectory: u32,
        /// Index of the turn.
        turn: usize,
        /// Index of its last token, exclusive.
        end: usize,
        /// Tokens of the trajectory.
        tokens: usize,
    },
}

impl GroupLimits {
    /// Checks that `group` can be trained on.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self, group: &Group) -> Result<(), Unfit> {
        for role in group.roles() {
            let of_role =
                || group.trajectories.iter().filter(|trajectory| trajectory.role.as_deref() == role);
            let baselines = of_role().filter(|trajectory| trajectory.baseline).count();
            let found = of_role().count() - baselines;
            if found > self.trajectories || baselines > 1 {
                return Err(Unfit::Size { found, baselines, limit: self.trajectories });
            }
        }
        group.trajectories.iter().try_for_each(|trajectory| self.check_trajectory(trajectory))
    }

    fn check_trajectory(&self, found: &Trajectory) -> Result<(), Unfit> {
        found.samples().try_for_each(|sample| self.check_sample(found.index, sample))?;
        check_rewards(found)?;
        check_turns(found)
    }

    fn check_sample(&self, trajectory: u32, sample: &Sample) -> Result<(), Unfit> {
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
        self.check_experts(trajectory, sample)?;
        let value = sample.temperature();
        if !TEMPERATURES.contains(&value) {
            return Err(Unfit::Temperature { trajectory, value });
        }
        Ok(())
    }

    fn check_experts(&self, trajectory: u32, sample: &Sample) -> Result<(), Unfit> {
        let Some(experts) = sample.experts() else { return Ok(()) };
        let tokens = sample.token_ids().len();
        let (found, per_token) = (experts.slots(tokens), experts.per_token);
        let limits = self.experts.unwrap_or(ExpertLimits { count: 0, per_token: 0, slots: 0 });
        if tokens > 1 && (found, per_token as usize) != (limits.slots, limits.per_token) {
            return Err(Unfit::Experts { trajectory, found, per_token, slots: limits.slots });
        }
        match experts.ids.iter().find(|id| **id as usize >= limits.count) {
            Some(id) => Err(Unfit::Expert { trajectory, id: *id, count: limits.count }),
            None => Ok(()),
        }
    }
}

fn check_rewards(found: &Trajectory) -> Result<(), Unfit> {
    let components = found.score.components.iter().filter_map(|component| component.value);
    let turns = found.all_turns().filter_map(|turn| turn.reward);
    let mut all = found.score.total.into_iter().chain(components).chain(turns);
    // NaN is in no range.
    match all.find(|value| !(-MAX_REWARD..=MAX_REWARD).contains(value)) {
        Some(value) => Err(Unfit::Reward { trajectory: found.index, value }),
        None => Ok(()),
    }
}

fn check_turns(found: &Trajectory) -> Result<(), Unfit> {
    for (sample, turns) in found.rows() {
        let (mut free, tokens) = (0, sample.token_ids().len());
        for (turn, trajectory::Turn { completion, prefill, .. }) in turns.iter().enumerate() {
            let std::ops::Range { start, end } = completion.clone();
            let prefilled: u64 = prefill.iter().map(|run| u64::from(run.len)).sum();
            if start < free || end < start || end > tokens || prefilled > start as u64 {
                return Err(Unfit::Turn { trajectory: found.index, turn, end, tokens });
            }
            free = end;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use trajectory::{
        Branch, GroupId, KeptTokens, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task,
        TaskId, TokenExperts, Turn, VersionRun,
    };

    use super::*;

    const LIMITS: GroupLimits = GroupLimits {
        vocabulary: 10,
        context: 4,
        trajectories: 2,
        experts: Some(ExpertLimits { count: 4, per_token: 2, slots: 4 }),
    };

    fn streams() -> SampleStreams {
        SampleStreams {
            token_ids: vec![1, 9],
            loss_mask: vec![false, true],
            behavior_logprobs: vec![-70.0, -49.0],
            versions: vec![VersionRun { version: PolicyVersion(0), len: 2 }],
            kept: Some(KeptTokens { offsets: vec![0, 2], ids: vec![8, 9] }),
            experts: None,
            temperature: 1.0,
        }
    }

    fn trajectory(streams: SampleStreams) -> Trajectory {
        Trajectory {
            index: 0,
            sample: Sample::new(streams).unwrap(),
            turns: vec![Turn {
                completion: 1..2,
                stop: StopReason::Length,
                reward: None,
                prefill: Vec::new(),
            }],
            text: String::new(),
            score: Score { total: Some(1e9), components: Vec::new(), correct: None },
            branches: Vec::new(),
            baseline: false,
            role: None,
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

    fn experts(per_token: u32, ids: &[u16]) -> Option<TokenExperts> {
        Some(TokenExperts { per_token, ids: ids.to_vec() })
    }

    #[test]
    fn untrainable_groups_are_named() {
        let routed = SampleStreams { experts: experts(2, &[0, 3, 1, 2]), ..streams() };
        LIMITS.check(&group(vec![trajectory(routed.clone())])).unwrap();
        let dense = GroupLimits { experts: None, ..LIMITS };
        assert!(matches!(
            dense.check(&group(vec![trajectory(routed)])),
            Err(Unfit::Experts { slots: 0, .. })
        ));
        LIMITS.check(&group(vec![trajectory(streams()), trajectory(streams())])).unwrap();
        let mut greedy = trajectory(SampleStreams { loss_mask: vec![false; 2], kept: None, ..streams() });
        greedy.baseline = true;
        LIMITS.check(&group(vec![trajectory(streams()), trajectory(streams()), greedy.clone()])).unwrap();
        let mut of_roles = vec![trajectory(streams()); 4];
        of_roles.iter_mut().zip(["x", "x", "o", "o"]).for_each(|(t, role)| t.role = Some(role.to_owned()));
        // A role without a turn is no baseline.
        of_roles[2..].iter_mut().for_each(|t| t.turns.clear());
        LIMITS.check(&group(of_roles)).unwrap();
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
                        experts: None,
                        temperature: 1.0,
                    }
                }),
                "has 5 tokens; the model of the run sees 4",
            ),
            (with(|s| s.experts = experts(2, &[0, 1])), "has 2 experts per token, 2 of each layer"),
            (with(|s| s.experts = experts(1, &[0, 1, 2, 3])), "1 of each layer; the model of the run has 4"),
            (with(|s| s.experts = experts(2, &[0, 1, 2, 4])), "expert 4; a layer of the run's model has 4"),
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

    #[test]
    fn every_branch_is_checked() {
        let branch = |change: fn(&mut SampleStreams), end: usize| {
            let mut streams = streams();
            change(&mut streams);
            let turns = vec![Turn {
                completion: 1..end,
                stop: StopReason::Length,
                reward: None,
                prefill: Vec::new(),
            }];
            refused(|t| {
                let fit = Branch { sample: t.sample.clone(), turns: t.turns.clone() };
                t.branches = vec![fit, Branch { sample: Sample::new(streams).unwrap(), turns }];
            })
        };
        assert!(branch(|s| s.token_ids[0] = 10, 2).contains("token id 10"));
        assert!(branch(|s| s.behavior_logprobs[1] = -51.0, 2).contains("-51 of token 1"));
        assert!(branch(|_| (), 3).contains("ends at token 3 of 2"));
    }
}
