//! From leased groups to the rows of a training step.
//!
//! Invariant: every group passes [`unfit`] before a batch is made of it. A row is a trajectory with a reward, or a demonstration in place of a group; which rows are computed never
//! changes the step: what is left out because its gradient is zero still counts wherever losses are divided.

use std::ops::Range;

use buffer::{GroupLimits, Unfit};
use serde::{Deserialize, Serialize};
use trajectory::{Component, Group, PolicyVersion, Sample, Trajectory};

use crate::algorithm::Algorithm;
use crate::credit::{Advantage, GroupOutcome, Outcome};

/// How a batch is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    /// Parts of whole groups, each with an optimizer step of its own; at least 1.
    pub minibatches: usize,
    /// Longest completion that the recipe allows, tokens.
    pub max_completion_length: usize,
}

/// What became of the groups of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// All groups.
    pub groups: usize,
    /// Groups whose rewards are all equal.
    pub zero_variance: usize,
    /// Trajectories left out because a reward failed: their own, or those of all others of a group that they would be
    /// compared with.
    pub unscored: usize,
    /// Trajectories left out because nothing says whether they are correct, which the algorithm asks.
    pub unjudged: usize,
    /// Tokens that count, whether they have a gradient or not.
    pub trained_tokens: usize,
    /// Groups in whose place a demonstration was trained on.
    pub demonstrated: usize,
}

/// The groups of a batch with what is trained on.
#[derive(Debug)]
pub struct Batch<'a> {
    /// In the order of the lease.
    pub groups: Vec<BatchGroup<'a>>,
    /// What became of them.
    pub counts: BatchCounts,
    split: Split,
}

/// A group of a batch.
#[derive(Debug)]
pub struct BatchGroup<'a> {
    /// Samples of the trajectories that have a reward, and one to compare it with if the algorithm does that.
    pub samples: Vec<&'a Sample>,
    /// What they achieved, in the same order.
    pub outcome: GroupOutcome,
    /// Whether what the trajectories are compared by is equal: their rewards, or whether they are correct.
    pub zero_variance: bool,
    /// What is trained on instead, if the policy did not solve the task.
    pub demonstration: Option<&'a Sample>,
}

/// One sequence that goes through the network.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// Its token streams.
    pub sample: &'a Sample,
    /// Its group in the batch.
    pub group: usize,
    /// Which of the group's samples; `None` for a demonstration.
    pub trajectory: Option<usize>,
}

impl<'a> Batch<'a> {
    /// The batch of `groups`. `demonstrations` has one for every group that may be replaced, or is empty.
    #[must_use]
    pub fn new<G: AsRef<Group>>(
        groups: &'a [G],
        algorithm: &Algorithm,
        split: Split,
        demonstrations: &'a [Option<Sample>],
    ) -> Self {
        let mut counts = BatchCounts { groups: groups.len(), ..BatchCounts::default() };
        let mut of = |(i, group): (usize, &'a G)| {
            let group = group.as_ref();
            let scored: Vec<(&Trajectory, f64)> =
                group.sampled().filter_map(|t| Some((t, t.score.total?))).collect();
            counts.unscored += group.sampled().count() - scored.len();
            let judged = |(trajectory, reward): (&'a Trajectory, f64)| {
                let correct = trajectory.score.correct.or((!algorithm.needs_correct()).then_some(false));
                Some((trajectory, reward, correct?))
            };
            let before = scored.len();
            let scored: Vec<(&Trajectory, f64, bool)> = scored.into_iter().filter_map(judged).collect();
            counts.unjudged += before - scored.len();
            counts.trained_tokens += scored.iter().map(|(t, ..)| t.sample.trained_tokens()).sum::<usize>();
            counts.zero_variance += usize::from(group.zero_variance());
            let solved =
                crate::credit::mean(scored.iter().map(|(.., correct)| f64::from(u8::from(*correct))));
            let demonstration = demonstrations.get(i).and_then(Option::as_ref);
            let demonstration =
                demonstration.filter(|_| algorithm.demonstration_gate.is_some_and(|gate| solved <= gate));
            counts.demonstrated += usize::from(demonstration.is_some());
            BatchGroup {
                samples: scored.iter().map(|(t, ..)| &t.sample).collect(),
                outcome: GroupOutcome {
                    trajectories: scored
                        .iter()
                        .map(|(t, reward, correct)| outcome(t, *reward, *correct))
                        .collect(),
                    greedy: group.baseline_reward(),
                },
                zero_variance: match algorithm.advantage {
                    Advantage::PassAtK { .. } => scored.windows(2).all(|pair| pair[0].2 == pair[1].2),
                    _ => group.zero_variance(),
                },
                demonstration,
            }
        };
        let mut groups: Vec<BatchGroup<'_>> = groups.iter().enumerate().map(&mut of).collect();
        if algorithm.needs_groups() {
            groups.iter_mut().for_each(|group| group.leave_out_alone(&mut counts));
        }
        Self { groups, counts, split }
    }

    /// Rows of the groups for which `wanted`, in order; those without a trained token are left out, and so are groups
    /// in whose place there is a demonstration.
    pub fn rows(&self, wanted: impl Fn(usize) -> bool) -> Vec<Row<'a>> {
        let mut rows = Vec::new();
        for (group, of) in self.groups.iter().enumerate() {
            match of.demonstration {
                Some(sample) => rows.push(Row { sample, group, trajectory: None }),
                None if !wanted(group) => {}
                None => rows.extend(of.samples.iter().enumerate().map(|(trajectory, sample)| Row {
                    sample,
                    group,
                    trajectory: Some(trajectory),
                })),
            }
        }
        rows.retain(|row| row.sample.trained_tokens() > 0);
        rows
    }

    /// Groups of each minibatch: whole groups, in order.
    ///
    /// # Panics
    /// If there are to be no parts.
    #[must_use]
    pub fn parts(&self) -> Vec<Range<usize>> {
        let each = self.groups.len().div_ceil(self.split.minibatches).max(1);
        let starts = (0..self.groups.len()).step_by(each);
        starts.map(|start| start..(start + each).min(self.groups.len())).collect()
    }

    /// Longest completion that the recipe allows, tokens.
    #[must_use]
    pub fn max_completion_length(&self) -> usize {
        self.split.max_completion_length
    }
}

impl BatchGroup<'_> {
    /// Leaves out a trajectory that is alone: with nothing to compare it with, its reward is no advantage.
    fn leave_out_alone(&mut self, counts: &mut BatchCounts) {
        if let [sample] = self.samples[..] {
            counts.unscored += 1;
            counts.trained_tokens -= sample.trained_tokens();
            self.samples.clear();
            self.outcome.trajectories.clear();
        }
    }
}

/// Which of `groups` cannot be trained on, and why.
#[must_use]
pub fn unfit<G: AsRef<Group>>(groups: &[G], limits: &GroupLimits) -> Vec<(usize, Unfit)> {
    let check = |(at, group): (usize, &G)| Some((at, limits.check(group.as_ref()).err()?));
    groups.iter().enumerate().filter_map(check).collect()
}

fn outcome(trajectory: &Trajectory, reward: f64, correct: bool) -> Outcome {
    let mask = trajectory.sample.loss_mask();
    let trained = |range: &Range<usize>| mask[range.clone()].iter().filter(|trained| **trained).count();
    let has_turns = trajectory.turns.iter().any(|turn| turn.reward.is_some());
    let turns = trajectory.turns.iter().filter(|_| has_turns);
    let component = |component: &Component| component.value.unwrap_or(0.0);
    Outcome {
        reward,
        correct,
        tokens: trajectory.sample.trained_tokens(),
        components: trajectory.score.components.iter().map(component).collect(),
        turns: turns.map(|turn| (trained(&turn.completion), turn.reward.unwrap_or(0.0))).collect(),
        ..Outcome::default()
    }
}

/// `[T]` how many versions before `version` each trained token was sampled.
#[must_use]
pub fn token_staleness(sample: &Sample, version: PolicyVersion) -> Vec<u64> {
    let runs = sample.versions().iter().flat_map(|run| std::iter::repeat_n(run.version, run.len as usize));
    let trained = runs.zip(sample.loss_mask()).filter(|(_, trained)| **trained);
    trained.map(|(sampled, _)| sampled.staleness_at(version)).collect()
}

/// `[T]` log-probabilities of the trained tokens under the distribution that sampled them, nats.
#[must_use]
pub fn behavior(sample: &Sample) -> Vec<f64> {
    let all = sample.behavior_logprobs().iter().zip(sample.loss_mask());
    all.filter(|(_, trained)| **trained).map(|(logprob, _)| f64::from(*logprob)).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use trajectory::{
        Group, GroupId, PolicyVersion, Prompt, Sample, SampleStreams, Score, StopReason, Task, TaskId,
        Trajectory, Turn, VersionRun,
    };

    use super::*;
    use crate::loss::Correction;
    use crate::terms::{Scores, Terms, scored, terms, wanted};

    /// A group whose trajectories have the given rewards and numbers of completion tokens after two of prompt.
    pub(crate) fn group(id: u64, outcomes: &[(Option<f64>, usize)]) -> Group {
        let trajectory = |(index, (reward, tokens)): (usize, &(Option<f64>, usize))| Trajectory {
            index: index as u32,
            sample: Sample::new(SampleStreams {
                token_ids: (0..2 + *tokens as u32).map(|t| (t * 7 + id as u32 + index as u32) % 11).collect(),
                loss_mask: (0..2 + *tokens).map(|t| t >= 2).collect(),
                behavior_logprobs: (0..2 + *tokens).map(|t| if t >= 2 { -2.0 } else { 0.0 }).collect(),
                versions: vec![VersionRun { version: PolicyVersion(0), len: 2 + *tokens as u32 }],
                kept: None,
                temperature: 1.0,
            })
            .unwrap(),
            turns: vec![Turn { completion: 2..2 + *tokens, stop: StopReason::StopToken, reward: None }],
            text: String::new(),
            score: Score { total: *reward, correct: reward.map(|reward| reward > 0.5), ..Score::default() },
            baseline: false,
        };
        let task = Task {
            id: TaskId(id),
            prompt: Prompt::Text(String::new()),
            answer: None,
            columns: serde_json::Map::new(),
        };
        Group { id: GroupId(id), task, trajectories: outcomes.iter().enumerate().map(trajectory).collect() }
    }

    fn split(minibatches: usize) -> Split {
        Split { minibatches, max_completion_length: 16 }
    }

    fn groups(all: &[&[(Option<f64>, usize)]]) -> Vec<Arc<Group>> {
        all.iter().enumerate().map(|(id, outcomes)| Arc::new(group(id as u64, outcomes))).collect()
    }

    /// The terms of the rows that have a gradient.
    fn wanted_terms(batch: &Batch<'_>, algorithm: &Algorithm, scores: Scores) -> Vec<Terms> {
        let wanted = wanted(batch, algorithm);
        terms(batch, &batch.rows(|group| wanted[group]), scores, algorithm, PolicyVersion(0))
    }

    #[test]
    fn zero_variance_groups_cost_nothing_but_count() {
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 5)], &[(Some(1.0), 4), (Some(1.0), 4)]]);
        let grpo = Algorithm::grpo();
        let batch = Batch::new(&groups, &grpo, split(1), &[]);
        assert_eq!((batch.counts.zero_variance, batch.counts.trained_tokens), (1, 16));
        let all = wanted_terms(&batch, &grpo, Scores::default());
        assert_eq!(all.len(), 2);
        assert!(all.iter().all(|terms| terms.weights.iter().all(|weight| *weight == 1.0 / 16.0)));
        // ScaleRL takes them out of the denominators too.
        let dropping = Algorithm { drop_zero_variance: true, ..grpo.clone() };
        let all = wanted_terms(&batch, &dropping, Scores::default());
        assert!(all.iter().all(|terms| terms.weights.iter().all(|weight| *weight == 1.0 / 8.0)));
        // A pull towards the reference has a gradient everywhere, but in what is dropped.
        let mut pulled = grpo;
        pulled.divergence.coef = 0.1;
        assert_eq!(wanted(&batch, &pulled), [true, true]);
        let pulled = Algorithm { drop_zero_variance: true, ..pulled };
        assert_eq!(wanted(&batch, &pulled), [true, false]);
        assert!(wanted_terms(&batch, &pulled, Scores::default()).iter().all(|t| t.weights[0] == 1.0 / 8.0));
    }

    /// ScaleRL: what is dropped leaves the batch, so it is not in its deviation either.
    #[test]
    fn a_dropped_group_does_not_change_the_advantages() {
        let whole = groups(&[&[(Some(1.0), 3), (Some(0.0), 5)], &[(Some(1.0), 4), (Some(1.0), 4)]]);
        let algorithm = Algorithm::scale_rl();
        let advantages = |groups: &[Arc<Group>]| -> Vec<Vec<f64>> {
            let batch = Batch::new(groups, &algorithm, split(1), &[]);
            wanted_terms(&batch, &algorithm, Scores::default()).into_iter().map(|t| t.advantages).collect()
        };
        assert_eq!(advantages(&whole), advantages(&whole[..1]));
        assert!((advantages(&whole)[0][0] - 0.5 / 0.5_f64.sqrt()).abs() < 1e-5);
    }

    #[test]
    fn failed_rewards_and_empty_completions_are_left_out() {
        let groups = groups(&[&[(Some(1.0), 3), (None, 5), (Some(0.0), 0), (Some(0.5), 2)]]);
        let batch = Batch::new(&groups, &Algorithm::grpo(), split(1), &[]);
        let rows = batch.rows(|_| true);
        assert_eq!((rows.len(), batch.counts.unscored, batch.counts.trained_tokens), (2, 1, 5));
        assert_eq!(rows.iter().map(|row| row.trajectory).collect::<Vec<_>>(), [Some(0), Some(2)]);
    }

    /// With a pull towards the reference too, under which its reward would have been its advantage.
    #[test]
    fn a_lone_survivor_of_its_group_is_left_out() {
        let groups = groups(&[&[(Some(1.0), 3), (None, 5)], &[(Some(1.0), 4), (Some(0.0), 2)]]);
        let pull = crate::loss::Divergence { coef: 0.1, ..crate::loss::Divergence::OFF };
        for aggregation in [crate::loss::Aggregation::TokenMean, crate::loss::Aggregation::PromptMean] {
            for divergence in [crate::loss::Divergence::OFF, pull] {
                let grpo = Algorithm { aggregation, divergence, ..Algorithm::grpo() };
                let batch = Batch::new(&groups, &grpo, split(1), &[]);
                assert_eq!((batch.counts.unscored, batch.counts.trained_tokens), (2, 6));
                let wanted = wanted(&batch, &grpo);
                let rows = batch.rows(|group| wanted[group]);
                assert!(rows.iter().all(|row| row.group == 1) && rows.len() == 2, "{divergence:?}");
                let all = wanted_terms(&batch, &grpo, Scores::default());
                assert_eq!(all[0].weights[0], 1.0 / 6.0, "{aggregation:?}");
            }
        }
        // Compared with the batch, with a greedy completion or with nothing, it is as good as any.
        for algorithm in [Algorithm::reinforce(), Algorithm::remax(), Algorithm::ppo()] {
            let batch = Batch::new(&groups, &algorithm, split(1), &[]);
            assert_eq!((batch.counts.unscored, batch.rows(|_| true).len()), (1, 3));
        }
    }

    /// A weight of 0.5, or one of 0, must not decide what is right.
    #[test]
    fn what_is_correct_is_what_the_trajectory_says() {
        let mut judged = group(0, &[(Some(0.5), 2), (Some(0.0), 2), (Some(0.0), 2), (Some(0.5), 2)]);
        for (trajectory, correct) in judged.trajectories.iter_mut().zip([true, false, false, true]) {
            trajectory.score.correct = Some(correct);
        }
        // All rewards are equal, as where the reward that judges is only watched.
        let mut watched = group(1, &[(Some(1.0), 2); 4]);
        watched.trajectories[1..].iter_mut().for_each(|wrong| wrong.score.correct = Some(false));
        let groups = [Arc::new(judged), Arc::new(watched)];
        let pass = Algorithm { advantage: Advantage::PassAtK { k: 2 }, ..Algorithm::pass_at_k() };
        let batch = Batch::new(&groups, &pass, split(1), &[]);
        assert_eq!(wanted(&batch, &pass), [true, true]);
        let all = wanted_terms(&batch, &pass, Scores::default());
        let signs: Vec<bool> = all.iter().map(|terms| terms.advantages[0] > 0.0).collect();
        assert_eq!(signs, [true, false, false, true, true, false, false, false]);
        let vapo = wanted_terms(&batch, &Algorithm { nll_coef: 0.1, ..Algorithm::grpo() }, Scores::default());
        assert_eq!(vapo.iter().map(|terms| terms.correct).collect::<Vec<_>>(), signs);
        let demonstrations = [Some(group(7, &[(None, 6)]).trajectories.remove(0).sample), None];
        let hpt = Batch::new(&groups, &Algorithm::hpt(), split(1), &demonstrations);
        assert_eq!(hpt.counts.demonstrated, 0, "half of the group is correct, though no reward is above 0.5");
    }

    #[test]
    fn an_algorithm_that_asks_leaves_out_what_does_not_say_whether_it_is_correct() {
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
        assert_eq!(batch.parts(), [0..3, 3..5]);
        let all = wanted_terms(&batch, &Algorithm::grpo(), Scores::default());
        assert_eq!((all[0].weights[0], all[9].weights[0]), (1.0 / 6.0, 1.0 / 4.0));
    }

    #[test]
    fn what_is_masked_leaves_every_denominator() {
        // Behavior log-probabilities are -2: the second trajectory of the first group is far from them.
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 4)], &[(Some(0.0), 5), (Some(1.0), 2)]]);
        let scores = Scores {
            before: Some(vec![vec![-2.0; 3], vec![-7.0; 4], vec![-2.0; 5], vec![-2.0; 2]]),
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
            let all = wanted_terms(&batch, &masking, scores.clone());
            assert_eq!(all[1].weights, [0.0; 4]);
            let divisors: Vec<f64> = [0, 2, 3].map(|i: usize| 1.0 / all[i].weights[0]).to_vec();
            assert_eq!(divisors.iter().map(|d| d.round()).collect::<Vec<_>>(), expected, "{aggregation:?}");
        }
    }

    #[test]
    fn only_the_most_uncertain_tokens_are_trained_on() {
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 2)]]);
        let scores = Scores { entropy: Some(vec![vec![0.1, 2.0, 0.3], vec![1.0, 0.2]]), ..Scores::default() };
        let selective = Algorithm { entropy_share: 0.4, ..Algorithm::grpo() };
        let batch = Batch::new(&groups, &selective, split(1), &[]);
        let all = wanted_terms(&batch, &selective, scores);
        assert_eq!(
            (&all[0].selected[..], &all[1].selected[..]),
            (&[false, true, false][..], &[true, false][..])
        );
        assert!(all.iter().all(|terms| terms.weights.iter().all(|weight| *weight == 1.0 / 5.0)));
    }

    /// Whether a pull that is next to nothing has the groups without variance computed or not.
    #[test]
    fn the_entropy_share_is_of_all_tokens() {
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 2)], &[(Some(1.0), 4), (Some(1.0), 1)]]);
        let scores = Scores {
            before: Some(vec![vec![-2.0; 3], vec![-2.0; 2], vec![-2.0; 4], vec![-2.0]]),
            entropy: Some(vec![vec![0.1, 2.0, 0.3], vec![1.0, 0.2], vec![3.0, 4.0, 0.1, 0.1], vec![5.0]]),
            ..Scores::default()
        };
        let selective = Algorithm { entropy_share: 0.4, ..Algorithm::grpo() };
        let mut pulled = selective.clone();
        pulled.divergence.coef = 1e-12;
        for algorithm in [selective, pulled] {
            let batch = Batch::new(&groups, &algorithm, split(1), &[]);
            assert_eq!(scored(&batch, &algorithm), [true, true]);
            let rows = batch.rows(|_| true);
            let all = terms(&batch, &rows, scores.clone(), &algorithm, PolicyVersion(0));
            // The quantile 0.6 of ten tokens lies between 1.0 and 2.0.
            assert_eq!(
                (&all[0].selected[..], &all[1].selected[..]),
                (&[false, true, false][..], &[false; 2][..])
            );
            assert!(all[..2].iter().all(|terms| terms.weights.iter().all(|weight| *weight == 0.1)));
        }
        // What is dropped is no token of the batch.
        let dropping = Algorithm { entropy_share: 0.4, ..Algorithm::scale_rl() };
        let batch = Batch::new(&groups, &dropping, split(1), &[]);
        assert_eq!(scored(&batch, &dropping), [true, false]);
    }

    /// VAPO: over the tokens of right trajectories alone, minibatch by minibatch.
    #[test]
    fn the_likelihood_of_right_answers_is_a_mean_over_their_tokens() {
        let groups = groups(&[&[(Some(1.0), 3), (Some(0.0), 5)], &[(Some(1.0), 4), (Some(1.0), 2)]]);
        let vapo = Algorithm::vapo();
        for (minibatches, expected) in
            [(1, [1.0 / 9.0, 0.0, 1.0 / 9.0, 1.0 / 9.0]), (2, [1.0 / 3.0, 0.0, 1.0 / 6.0, 1.0 / 6.0])]
        {
            let batch = Batch::new(&groups, &vapo, split(minibatches), &[]);
            let values = Some(vec![vec![0.0; 3], vec![0.0; 5], vec![0.0; 4], vec![0.0; 2]]);
            let all = wanted_terms(&batch, &vapo, Scores { values, ..Scores::default() });
            for (terms, expected) in all.iter().zip(expected) {
                assert!(terms.likelihood_weights.iter().all(|weight| *weight == expected), "{expected}");
            }
        }
    }

    #[test]
    fn a_demonstration_takes_the_place_of_a_group_that_failed() {
        let groups = groups(&[&[(Some(0.0), 3), (Some(0.0), 5)], &[(Some(1.0), 4), (Some(0.0), 4)]]);
        let hpt = Algorithm::hpt();
        let demonstration = group(7, &[(None, 6)]).trajectories.remove(0).sample;
        let demonstrations = [Some(demonstration.clone()), Some(demonstration)];
        let batch = Batch::new(&groups, &hpt, split(1), &demonstrations);
        assert_eq!(batch.counts.demonstrated, 1);
        let rows = batch.rows(|_| true);
        assert_eq!(rows.iter().map(|row| row.trajectory).collect::<Vec<_>>(), [None, Some(0), Some(1)]);
        let all = wanted_terms(&batch, &hpt, Scores::default());
        // Half of the batch's tasks, over its six tokens; the others over four trajectories of at most 16 tokens.
        assert_eq!((all[0].weights[0], all[1].weights[0]), (1.0 / 12.0, 1.0 / 64.0));
        assert!(all[0].demonstration && !all[1].demonstration);
    }
}
