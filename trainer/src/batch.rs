//! From leased groups to the rows of a training step.
//!
//! A group whose trajectories have roles becomes one [`BatchGroup`] for each role, so that every advantage estimator
//! compares a role with itself.
//!
//! Invariant: every group passes [`unfit`] before it enters a batch. A row is a branch of a trajectory with a reward, or a
//! demonstration that replaces a group. The branches of a trajectory are one outcome: their trained tokens follow each other. Skipping rows whose gradient is zero never changes the step: they still count
//! in every denominator.

use std::ops::Range;

use buffer::{GroupLimits, Unfit};
use serde::{Deserialize, Serialize};
use trajectory::{Component, Group, PolicyVersion, Sample, Trajectory, Turn};

use crate::advantage::{AdvantageEstimator, GroupOutcome, TrajectoryOutcome};
use crate::algorithm::Algorithm;

/// How a batch is divided into minibatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchSplit {
    /// Minibatches of whole groups, one optimizer step each; at least 1.
    pub minibatches: usize,
    /// Longest completion that the recipe allows, tokens.
    pub max_completion_length: usize,
}

/// Counts of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// All groups.
    pub groups: usize,
    /// Groups whose rewards are all equal.
    pub zero_variance: usize,
    /// Trajectories that were skipped: their reward failed, or that of all other trajectories of the group.
    pub unscored: usize,
    /// Trajectories that were skipped: the algorithm needs to know whether they are correct, and no reward says so.
    pub unjudged: usize,
    /// Tokens that count in the denominators, with a gradient or without.
    pub trained_tokens: usize,
    /// Groups that a demonstration replaced.
    pub demonstrated: usize,
}

/// The groups of a batch, prepared for training.
#[derive(Debug)]
pub struct Batch<'a> {
    /// In the order of the lease; the roles of a group one after the other.
    pub groups: Vec<BatchGroup<'a>>,
    /// Counts of the batch.
    pub counts: BatchCounts,
    /// `[leased groups]` the first of `groups` that each has.
    firsts: Vec<usize>,
    split: BatchSplit,
}

/// A group of a batch, or one role of it.
#[derive(Debug)]
pub struct BatchGroup<'a> {
    /// The trajectories that have a reward; none if only one has and the algorithm needs groups.
    pub trajectories: Vec<&'a Trajectory>,
    /// Their rewards and lengths, in the same order.
    pub outcome: GroupOutcome,
    /// Whether the compared quantity is equal for all: rewards, or correctness for pass@k.
    pub zero_variance: bool,
    /// The demonstration that replaces the group, if the policy did not solve the task.
    pub demonstration: Option<&'a Sample>,
}

/// One sequence of the batch: one forward pass.
#[derive(Clone, Copy, Debug)]
pub struct BatchRow<'a> {
    /// Its token streams.
    pub sample: &'a Sample,
    /// Index of its group in the batch.
    pub group: usize,
    /// Index of its trajectory in the group; `None` for a demonstration.
    pub trajectory: Option<usize>,
    /// Trained tokens of the rows before it that belong to the same trajectory.
    pub offset: usize,
}

impl<'a> Batch<'a> {
    /// Prepares a batch. `demonstrations` has an entry for every group, or is empty; a group with roles has none.
    #[must_use]
    pub fn new<G: AsRef<Group>>(
        groups: &'a [G],
        algorithm: &Algorithm,
        split: BatchSplit,
        demonstrations: &'a [Option<Sample>],
    ) -> Self {
        let mut counts = BatchCounts { groups: groups.len(), ..BatchCounts::default() };
        let mut of = |group: &'a Group, role: Option<&'a str>, demonstration: Option<&'a Sample>| {
            let scored: Vec<(&Trajectory, f64)> =
                group.sampled_as(role).filter_map(|t| Some((t, t.score.total?))).collect();
            counts.unscored += group.sampled_as(role).count() - scored.len();
            let judged = |(trajectory, reward): (&'a Trajectory, f64)| {
                let correct = trajectory.score.correct.or((!algorithm.needs_correct()).then_some(false));
                Some((trajectory, reward, correct?))
            };
            let before = scored.len();
            let scored: Vec<(&Trajectory, f64, bool)> = scored.into_iter().filter_map(judged).collect();
            counts.unjudged += before - scored.len();
            counts.trained_tokens += scored.iter().map(|(t, ..)| t.trained_tokens()).sum::<usize>();
            let solved =
                crate::advantage::mean(scored.iter().map(|(.., correct)| f64::from(u8::from(*correct))));
            let demonstration =
                demonstration.filter(|_| algorithm.demonstration_gate.is_some_and(|gate| solved <= gate));
            counts.demonstrated += usize::from(demonstration.is_some());
            BatchGroup {
                trajectories: scored.iter().map(|(t, ..)| *t).collect(),
                outcome: GroupOutcome {
                    trajectories: scored
                        .iter()
                        .map(|(t, reward, correct)| outcome(t, *reward, *correct))
                        .collect(),
                    greedy: group.baseline_reward(role),
                },
                zero_variance: match algorithm.advantage {
                    AdvantageEstimator::PassAtK { .. } => {
                        scored.windows(2).all(|pair| pair[0].2 == pair[1].2)
                    }
                    _ => group.zero_variance_of(role),
                },
                demonstration,
            }
        };
        let (mut parts, mut firsts) = (Vec::with_capacity(groups.len()), Vec::with_capacity(groups.len()));
        for (i, group) in groups.iter().enumerate() {
            let group = group.as_ref();
            firsts.push(parts.len());
            let roles = group.roles();
            let demonstration = demonstrations.get(i).and_then(Option::as_ref).filter(|_| roles.len() == 1);
            parts.extend(roles.into_iter().map(|role| of(group, role, demonstration)));
        }
        counts.zero_variance = groups.iter().filter(|group| group.as_ref().zero_variance()).count();
        if algorithm.needs_groups() {
            parts.iter_mut().for_each(|group| group.skip_lone_trajectory(&mut counts));
        }
        Self { groups: parts, counts, firsts, split }
    }

    /// Rows of the groups for which `wanted` holds, in order. Rows without a trained token are skipped; a demonstration
    /// replaces the rows of its group.
    pub fn rows(&self, wanted: impl Fn(usize) -> bool) -> Vec<BatchRow<'a>> {
        let mut rows = Vec::new();
        for (group, of) in self.groups.iter().enumerate() {
            match of.demonstration {
                Some(sample) => rows.push(BatchRow { sample, group, trajectory: None, offset: 0 }),
                None if !wanted(group) => {}
                None => {
                    for (trajectory, branches) in of.trajectories.iter().enumerate() {
                        let mut offset = 0;
                        rows.extend(branches.samples().map(|sample| {
                            let row = BatchRow { sample, group, trajectory: Some(trajectory), offset };
                            offset += sample.trained_tokens();
                            row
                        }));
                    }
                }
            }
        }
        rows.retain(|row| row.sample.trained_tokens() > 0);
        rows
    }

    /// Groups of each minibatch: whole groups, in order.
    ///
    /// # Panics
    /// If `minibatches` is 0.
    #[must_use]
    pub fn minibatches(&self) -> Vec<Range<usize>> {
        let leased = self.firsts.len();
        let each = leased.div_ceil(self.split.minibatches).max(1);
        let first = |group: usize| self.firsts.get(group).copied().unwrap_or(self.groups.len());
        (0..leased).step_by(each).map(|start| first(start)..first(start + each)).collect()
    }

    /// Longest completion that the recipe allows, tokens.
    #[must_use]
    pub fn max_completion_length(&self) -> usize {
        self.split.max_completion_length
    }
}

impl BatchGroup<'_> {
    /// Skips the only trajectory of a group: without others there is no baseline.
    fn skip_lone_trajectory(&mut self, counts: &mut BatchCounts) {
        if let [trajectory] = self.trajectories[..] {
            counts.unscored += 1;
            counts.trained_tokens -= trajectory.trained_tokens();
            self.trajectories.clear();
            self.outcome.trajectories.clear();
        }
    }
}

/// Groups that cannot be trained on, each with its index and the reason.
#[must_use]
pub fn unfit<G: AsRef<Group>>(groups: &[G], limits: &GroupLimits) -> Vec<(usize, Unfit)> {
    let check = |(at, group): (usize, &G)| Some((at, limits.check(group.as_ref()).err()?));
    groups.iter().enumerate().filter_map(check).collect()
}

fn outcome(trajectory: &Trajectory, reward: f64, correct: bool) -> TrajectoryOutcome {
    let has_turns = trajectory.all_turns().any(|turn| turn.reward.is_some());
    let rows = trajectory.rows().filter(|_| has_turns);
    let of_row = |(sample, turns): (&Sample, &[Turn])| -> Vec<(usize, f64)> {
        let trained = |turn: &Turn| {
            sample.loss_mask()[turn.completion.clone()].iter().filter(|trained| **trained).count()
        };
        turns.iter().map(|turn| (trained(turn), turn.reward.unwrap_or(0.0))).collect()
    };
    let component = |component: &Component| component.value.unwrap_or(0.0);
    TrajectoryOutcome {
        reward,
        correct,
        tokens: trajectory.trained_tokens(),
        components: trajectory.score.components.iter().map(component).collect(),
        turns: rows.flat_map(of_row).collect(),
        ..TrajectoryOutcome::default()
    }
}

/// `[T]` staleness of each trained token, versions: `version` minus the version that sampled it.
#[must_use]
pub fn token_staleness(sample: &Sample, version: PolicyVersion) -> Vec<u64> {
    let runs = sample.versions().iter().flat_map(|run| std::iter::repeat_n(run.version, run.len as usize));
    let trained = runs.zip(sample.loss_mask()).filter(|(_, trained)| **trained);
    trained.map(|(sampled, _)| sampled.staleness_at(version)).collect()
}

/// Behavior log-probabilities `[tokens]` of the trained tokens (under the distribution that sampled them), nats.
#[must_use]
pub fn behavior_logprobs(sample: &Sample) -> Vec<f64> {
    let all = sample.behavior_logprobs().iter().zip(sample.loss_mask());
    all.filter(|(_, trained)| **trained).map(|(logprob, _)| f64::from(*logprob)).collect()
}

#[cfg(test)]
mod branch_tests;

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use trajectory::{
        Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
        Trajectory, Turn, VersionRun,
    };

    use super::*;
    use crate::loss::Correction;
    use crate::loss_inputs::{LossInputs, Scores, groups_to_score, groups_with_gradient, loss_inputs};

    /// A group whose trajectories have the given rewards and completion lengths, after a prompt of two tokens.
    pub(crate) fn group(id: u64, outcomes: &[(Option<f64>, usize)]) -> Group {
        let trajectory = |(index, (reward, tokens)): (usize, &(Option<f64>, usize))| Trajectory {
            index: index as u32,
            sample: Sample::new(SampleStreams {
                token_ids: (0..2 + *tokens as u32).map(|t| (t * 7 + id as u32 + index as u32) % 11).collect(),
                loss_mask: (0..2 + *tokens).map(|t| t >= 2).collect(),
                behavior_logprobs: (0..2 + *tokens).map(|t| if t >= 2 { -2.0 } else { 0.0 }).collect(),
                versions: vec![VersionRun { version: PolicyVersion(0), len: 2 + *tokens as u32 }],
                kept: None,
                experts: None,
                temperature: 1.0,
            })
            .unwrap(),
            turns: vec![Turn {
                completion: 2..2 + *tokens,
                stop: StopReason::StopToken,
                reward: None,
                prefill: Vec::new(),
            }],
            text: String::new(),
            score: Score { total: *reward, correct: reward.map(|reward| reward > 0.5), ..Score::default() },
            branches: Vec::new(),
            baseline: false,
            role: None,
        };
        let task = Task {
            id: TaskId(id),
            prompt: Prompt::Text(String::new()),
            answer: None,
            columns: serde_json::Map::new(),
        };
        Group { id: GroupId(id), task, trajectories: outcomes.iter().enumerate().map(trajectory).collect() }
    }

    pub(super) fn split(minibatches: usize) -> BatchSplit {
        BatchSplit { minibatches, max_completion_length: 16 }
    }

    pub(super) fn groups(all: &[&[(Option<f64>, usize)]]) -> Vec<Arc<Group>> {
        all.iter().enumerate().map(|(id, outcomes)| Arc::new(group(id as u64, outcomes))).collect()
    }

    /// Loss inputs of the rows that have a gradient.
    pub(super) fn inputs_with_gradient(
        batch: &Batch<'_>,
        algorithm: &Algorithm,
        scores: Scores,
    ) -> Vec<LossInputs> {
        let wanted = groups_with_gradient(batch, algorithm);
        loss_inputs(batch, &batch.rows(|group| wanted[group]), scores, algorithm, PolicyVersion(0))
    }

    #[test]
    fn zero_variance_groups_are_skipped_and_count_in_denominators() {
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 5)], &[(Some(1.0), 4), (Some(1.0), 4)]]);
        let grpo = Algorithm::grpo();
        let batch = Batch::new(&groups, &grpo, split(1), &[]);
        assert_eq!((batch.counts.zero_variance, batch.counts.trained_tokens), (1, 16));
        let all = inputs_with_gradient(&batch, &grpo, Scores::default());
        assert_eq!(all.len(), 2);
        assert!(all.iter().all(|terms| terms.weights.iter().all(|weight| *weight == 1.0 / 16.0)));
        // ScaleRL removes them from the denominators too.
        let dropping = Algorithm { drop_zero_variance: true, ..grpo.clone() };
        let all = inputs_with_gradient(&batch, &dropping, Scores::default());
        assert!(all.iter().all(|terms| terms.weights.iter().all(|weight| *weight == 1.0 / 8.0)));
        // A KL penalty has a gradient everywhere, except in dropped groups.
        let mut pulled = grpo;
        pulled.kl.coef = 0.1;
        assert_eq!(groups_with_gradient(&batch, &pulled), [true, true]);
        let pulled = Algorithm { drop_zero_variance: true, ..pulled };
        assert_eq!(groups_with_gradient(&batch, &pulled), [true, false]);
        assert!(
            inputs_with_gradient(&batch, &pulled, Scores::default())
                .iter()
                .all(|t| t.weights[0] == 1.0 / 8.0)
        );
    }

    /// ScaleRL: a dropped group is not in the batch deviation either.
    #[test]
    fn a_dropped_group_does_not_change_the_advantages() {
        let whole = groups(&[&[(Some(1.0), 3), (Some(0.0), 5)], &[(Some(1.0), 4), (Some(1.0), 4)]]);
        let algorithm = Algorithm::scale_rl();
        let advantages = |groups: &[Arc<Group>]| -> Vec<Vec<f64>> {
            let batch = Batch::new(groups, &algorithm, split(1), &[]);
            inputs_with_gradient(&batch, &algorithm, Scores::default())
                .into_iter()
                .map(|t| t.advantages)
                .collect()
        };
        assert_eq!(advantages(&whole), advantages(&whole[..1]));
        assert!((advantages(&whole)[0][0] - 0.5 / 0.5_f64.sqrt()).abs() < 1e-5);
    }

    #[test]
    fn failed_rewards_and_empty_completions_are_skipped() {
        let groups = groups(&[&[(Some(1.0), 3), (None, 5), (Some(0.0), 0), (Some(0.5), 2)]]);
        let batch = Batch::new(&groups, &Algorithm::grpo(), split(1), &[]);
        let rows = batch.rows(|_| true);
        assert_eq!((rows.len(), batch.counts.unscored, batch.counts.trained_tokens), (2, 1, 5));
        assert_eq!(rows.iter().map(|row| row.trajectory).collect::<Vec<_>>(), [Some(0), Some(2)]);
    }

    /// Also with a KL penalty, where its reward would be its advantage.
    #[test]
    fn a_lone_scored_trajectory_of_a_group_is_skipped() {
        let groups = groups(&[&[(Some(1.0), 3), (None, 5)], &[(Some(1.0), 4), (Some(0.0), 2)]]);
        let pull = crate::loss::KlPenalty { coef: 0.1, ..crate::loss::KlPenalty::OFF };
        for aggregation in [crate::loss::Aggregation::TokenMean, crate::loss::Aggregation::PromptMean] {
            for divergence in [crate::loss::KlPenalty::OFF, pull] {
                let grpo = Algorithm { aggregation, kl: divergence, ..Algorithm::grpo() };
                let batch = Batch::new(&groups, &grpo, split(1), &[]);
                assert_eq!((batch.counts.unscored, batch.counts.trained_tokens), (2, 6));
                let wanted = groups_with_gradient(&batch, &grpo);
                let rows = batch.rows(|group| wanted[group]);
                assert!(rows.iter().all(|row| row.group == 1) && rows.len() == 2, "{divergence:?}");
                let all = inputs_with_gradient(&batch, &grpo, Scores::default());
                assert_eq!(all[0].weights[0], 1.0 / 6.0, "{aggregation:?}");
            }
        }
        // With a baseline from the batch, a greedy completion or none, a lone trajectory is trained on.
        for algorithm in [Algorithm::reinforce(), Algorithm::remax(), Algorithm::ppo()] {
            let batch = Batch::new(&groups, &algorithm, split(1), &[]);
            assert_eq!((batch.counts.unscored, batch.rows(|_| true).len()), (1, 3));
        }
    }

    /// A reward weight of 0.5 or 0 does not decide correctness.
    #[test]
    fn correctness_comes_from_the_verdict_not_the_reward() {
        let mut judged = group(0, &[(Some(0.5), 2), (Some(0.0), 2), (Some(0.0), 2), (Some(0.5), 2)]);
        for (trajectory, correct) in judged.trajectories.iter_mut().zip([true, false, false, true]) {
            trajectory.score.correct = Some(correct);
        }
        // All rewards are equal, as if the reward that decides correctness had weight 0.
        let mut watched = group(1, &[(Some(1.0), 2); 4]);
        watched.trajectories[1..].iter_mut().for_each(|wrong| wrong.score.correct = Some(false));
        let groups = [Arc::new(judged), Arc::new(watched)];
        let pass = Algorithm { advantage: AdvantageEstimator::PassAtK { k: 2 }, ..Algorithm::pass_at_k() };
        let batch = Batch::new(&groups, &pass, split(1), &[]);
        assert_eq!(groups_with_gradient(&batch, &pass), [true, true]);
        let all = inputs_with_gradient(&batch, &pass, Scores::default());
        let signs: Vec<bool> = all.iter().map(|terms| terms.advantages[0] > 0.0).collect();
        assert_eq!(signs, [true, false, false, true, true, false, false, false]);
        let vapo = inputs_with_gradient(
            &batch,
            &Algorithm { nll_coef: 0.1, ..Algorithm::grpo() },
            Scores::default(),
        );
        assert_eq!(vapo.iter().map(|terms| terms.correct).collect::<Vec<_>>(), signs);
        let demonstrations = [Some(group(7, &[(None, 6)]).trajectories.remove(0).sample), None];
        let hpt = Batch::new(&groups, &Algorithm::hpt(), split(1), &demonstrations);
        assert_eq!(hpt.counts.demonstrated, 0, "half of the group is correct, though no reward is above 0.5");
    }

    #[test]
    fn trajectories_without_a_verdict_are_skipped_if_the_algorithm_needs_one() {
        let mut foreign = group(0, &[(Some(1.0), 3), (Some(0.0), 3), (Some(0.0), 3), (None, 3)]);
        foreign.trajectories[0].score.correct = None;
        let groups = [Arc::new(foreign)];
        let counts = |algorithm: &Algorithm| {
            let batch = Batch::new(&groups, algorithm, split(1), &[]);
            (batch.rows(|_| true).len(), batch.counts.unscored, batch.counts.unjudged)
        };
        assert_eq!(counts(&Algorithm::pass_at_k()), (2, 1, 1));
        assert_eq!(counts(&Algorithm::vapo()), (2, 1, 1));
        assert_eq!(counts(&Algorithm::hpt()), (2, 1, 1));
        assert_eq!(counts(&Algorithm::grpo()), (3, 1, 0));
    }

    #[test]
    fn minibatches_are_whole_groups() {
        let pair: &[_] = &[(Some(1.0), 1), (Some(0.0), 1)];
        let groups = groups(&[pair; 5]);
        let batch = Batch::new(&groups, &Algorithm::grpo(), split(2), &[]);
        assert_eq!(batch.minibatches(), [0..3, 3..5]);
        let all = inputs_with_gradient(&batch, &Algorithm::grpo(), Scores::default());
        assert_eq!((all[0].weights[0], all[9].weights[0]), (1.0 / 6.0, 1.0 / 4.0));
    }

    #[test]
    fn roles_of_a_group_are_compared_by_themselves_and_stay_together() {
        let mut game = group(1, &[(Some(1.0), 2), (Some(0.0), 2), (Some(-1.0), 2), (Some(-1.0), 2)]);
        for (trajectory, role) in game.trajectories.iter_mut().zip(["x", "x", "o", "o"]) {
            trajectory.role = Some(role.to_owned());
        }
        let groups = [Arc::new(group(0, &[(Some(1.0), 2), (Some(0.0), 2)])), Arc::new(game)];
        let algorithm = Algorithm::grpo();
        let batch = Batch::new(&groups, &algorithm, split(2), &[]);
        assert_eq!(batch.groups.iter().map(|of| of.zero_variance).collect::<Vec<_>>(), [false, false, true]);
        assert_eq!((batch.counts.groups, batch.counts.zero_variance), (2, 0));
        assert_eq!(batch.minibatches(), [0..1, 1..3]);
        let means: Vec<f64> = algorithm
            .advantage
            .of(&batch.groups.iter().map(|of| of.outcome.clone()).collect::<Vec<_>>())
            .into_iter()
            .map(|group| group.into_iter().flatten().sum())
            .collect();
        assert!(means.iter().all(|sum| sum.abs() < 1e-12), "{means:?}");
    }

    #[test]
    fn masked_tokens_leave_every_denominator() {
        // Behavior log-probabilities are -2: the second trajectory of the first group is far from them.
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 4)], &[(Some(0.0), 5), (Some(1.0), 2)]]);
        let scores = Scores {
            start_logprobs: Some(vec![vec![-2.0; 3], vec![-7.0; 4], vec![-2.0; 5], vec![-2.0; 2]]),
            ..Scores::default()
        };
        for (aggregation, expected) in [
            (crate::loss::Aggregation::TokenMean, [10.0, 10.0, 10.0]),
            (crate::loss::Aggregation::SequenceMean, [9.0, 15.0, 6.0]),
            (crate::loss::Aggregation::PromptMean, [6.0, 14.0, 14.0]),
            (crate::loss::Aggregation::Constant, [48.0, 48.0, 48.0]),
        ] {
            let masking = Algorithm {
                correction: Correction::GeometricMask { low: 0.9, high: 1.1 },
                aggregation,
                ..Algorithm::decoupled()
            };
            let batch = Batch::new(&groups, &masking, split(1), &[]);
            let all = inputs_with_gradient(&batch, &masking, scores.clone());
            assert_eq!(all[1].weights, [0.0; 4]);
            let divisors: Vec<f64> = [0, 2, 3].map(|i: usize| 1.0 / all[i].weights[0]).to_vec();
            assert_eq!(divisors.iter().map(|d| d.round()).collect::<Vec<_>>(), expected, "{aggregation:?}");
        }
    }

    #[test]
    fn only_tokens_of_high_entropy_have_a_policy_loss() {
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 2)]]);
        let scores = Scores { entropy: Some(vec![vec![0.1, 2.0, 0.3], vec![1.0, 0.2]]), ..Scores::default() };
        let selective = Algorithm { entropy_share: 0.4, ..Algorithm::grpo() };
        let batch = Batch::new(&groups, &selective, split(1), &[]);
        let all = inputs_with_gradient(&batch, &selective, scores);
        assert_eq!(
            (&all[0].selected[..], &all[1].selected[..]),
            (&[false, true, false][..], &[true, false][..])
        );
        assert!(all.iter().all(|terms| terms.weights.iter().all(|weight| *weight == 1.0 / 5.0)));
    }

    /// DART: whole turns are selected, by the mean entropy of their tokens.
    #[test]
    fn only_turns_of_high_entropy_have_a_policy_loss() {
        let mut groups = [group(0, &[(Some(1.0), 5), (Some(0.0), 2)])];
        let streams: SampleStreams = groups[0].trajectories[0].sample.clone().into();
        // The token in the middle is what the environment says: two turns of two tokens.
        let loss_mask = [false, false, true, true, false, true, true].to_vec();
        let behavior_logprobs = streams
            .behavior_logprobs
            .iter()
            .zip(&loss_mask)
            .map(|(l, m)| if *m { *l } else { 0.0 })
            .collect();
        groups[0].trajectories[0].sample =
            Sample::new(SampleStreams { loss_mask, behavior_logprobs, ..streams }).unwrap();
        let scores =
            Scores { entropy: Some(vec![vec![0.1, 3.0, 1.0, 1.2], vec![0.2, 0.4]]), ..Scores::default() };
        let entropy_unit = crate::algorithm::EntropyUnit::Turn;
        let selective = Algorithm { entropy_share: 0.4, entropy_unit, ..Algorithm::grpo() };
        let groups = groups.map(Arc::new);
        let batch = Batch::new(&groups, &selective, split(1), &[]);
        let all = inputs_with_gradient(&batch, &selective, scores);
        // Means 1.55, 1.1 and 0.3: the first turn has the token of least entropy, and is selected as a whole.
        assert_eq!(
            (&all[0].selected[..], &all[1].selected[..]),
            (&[true, true, false, false][..], &[false, false][..])
        );
    }

    /// The share does not depend on whether a tiny KL penalty makes zero-variance groups computed.
    #[test]
    fn the_entropy_share_is_of_all_tokens() {
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 2)], &[(Some(1.0), 4), (Some(1.0), 1)]]);
        let scores = Scores {
            start_logprobs: Some(vec![vec![-2.0; 3], vec![-2.0; 2], vec![-2.0; 4], vec![-2.0]]),
            entropy: Some(vec![vec![0.1, 2.0, 0.3], vec![1.0, 0.2], vec![3.0, 4.0, 0.1, 0.1], vec![5.0]]),
            ..Scores::default()
        };
        let selective = Algorithm { entropy_share: 0.4, ..Algorithm::grpo() };
        let mut pulled = selective.clone();
        pulled.kl.coef = 1e-12;
        for algorithm in [selective, pulled] {
            let batch = Batch::new(&groups, &algorithm, split(1), &[]);
            assert_eq!(groups_to_score(&batch, &algorithm), [true, true]);
            let rows = batch.rows(|_| true);
            let all = loss_inputs(&batch, &rows, scores.clone(), &algorithm, PolicyVersion(0));
            // The 0.6 quantile of ten tokens lies between 1.0 and 2.0.
            assert_eq!(
                (&all[0].selected[..], &all[1].selected[..]),
                (&[false, true, false][..], &[false; 2][..])
            );
            assert!(all[..2].iter().all(|terms| terms.weights.iter().all(|weight| *weight == 0.1)));
        }
        // Tokens of a dropped group do not count.
        let dropping = Algorithm { entropy_share: 0.4, ..Algorithm::scale_rl() };
        let batch = Batch::new(&groups, &dropping, split(1), &[]);
        assert_eq!(groups_to_score(&batch, &dropping), [true, false]);
    }

    /// VAPO: the mean is over the tokens of correct trajectories only, per minibatch.
    #[test]
    fn the_likelihood_loss_is_a_mean_over_tokens_of_correct_answers() {
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 5)], &[(Some(1.0), 4), (Some(1.0), 2)]]);
        let vapo = Algorithm::vapo();
        for (minibatches, expected) in
            [(1, [1.0 / 9.0, 0.0, 1.0 / 9.0, 1.0 / 9.0]), (2, [1.0 / 3.0, 0.0, 1.0 / 6.0, 1.0 / 6.0])]
        {
            let batch = Batch::new(&groups, &vapo, split(minibatches), &[]);
            let values = Some(vec![vec![0.0; 3], vec![0.0; 5], vec![0.0; 4], vec![0.0; 2]]);
            let all = inputs_with_gradient(&batch, &vapo, Scores { values, ..Scores::default() });
            for (terms, expected) in all.iter().zip(expected) {
                assert!(terms.likelihood_weights.iter().all(|weight| *weight == expected), "{expected}");
            }
        }
    }

    #[test]
    fn a_demonstration_replaces_a_group_that_failed() {
        let groups = groups(&[&[(Some(0.0), 3), (Some(0.0), 5)], &[(Some(1.0), 4), (Some(0.0), 4)]]);
        let hpt = Algorithm::hpt();
        let demonstration = group(7, &[(None, 6)]).trajectories.remove(0).sample;
        let demonstrations = [Some(demonstration.clone()), Some(demonstration)];
        let batch = Batch::new(&groups, &hpt, split(1), &demonstrations);
        assert_eq!(batch.counts.demonstrated, 1);
        let rows = batch.rows(|_| true);
        assert_eq!(rows.iter().map(|row| row.trajectory).collect::<Vec<_>>(), [None, Some(0), Some(1)]);
        let all = inputs_with_gradient(&batch, &hpt, Scores::default());
        // Half of the batch's tasks, over its six tokens; the others over four trajectories of at most 16 tokens.
        assert_eq!((all[0].weights[0], all[1].weights[0]), (1.0 / 12.0, 1.0 / 64.0));
        assert!(all[0].demonstration && !all[1].demonstration);
    }
}
