//! Inputs of the loss for every row: advantages, proximal log-probabilities, importance weights, masks, denominators.
//!
//! Invariant: every denominator is counted here, after the masks of off-policy corrections: a masked token leaves the
//! loss and every denominator. A token that is skipped because its gradient is zero stays in them, and so does a token
//! without policy loss under `entropy_share`. Masks are known only for groups that are scored; in groups that are
//! skipped earlier all tokens count.

use std::collections::{BTreeMap, BTreeSet};

use trajectory::{PolicyVersion, Sample};

use crate::advantage::{AdvantageEstimator, Advantages, GroupOutcome};
use crate::algorithm::{Algorithm, EntropyUnit, Proximal};
use crate::batch::{Batch, BatchGroup, BatchRow, behavior_logprobs};
use crate::loss::correction::CorrectionWeights;
use crate::loss::{Aggregation, TokenCounts};

/// Results of the forward-only passes over the rows of a batch before its first update, each `[rows][T]`; `None` if the
/// algorithm does not need them.
#[derive(Clone, Debug, Default)]
pub struct Scores {
    /// Log-probabilities under the policy at the start of the step, nats (`old_log_probs` in verl).
    pub start_logprobs: Option<Vec<Vec<f64>>>,
    /// Entropies of the policy at the start of the step, nats.
    pub entropy: Option<Vec<Vec<f64>>>,
    /// Log-probabilities under the reference policy or teacher, nats.
    pub reference_logprobs: Option<Vec<Vec<f64>>>,
    /// Values of the critic before each token.
    pub values: Option<Vec<Vec<f64>>>,
}

/// Inputs of the loss for one row; all vectors are `[T]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossInputs {
    /// Advantages.
    pub advantages: Vec<f64>,
    /// Value targets of the critic; empty without a critic.
    pub returns: Vec<f64>,
    /// Values before the step; empty without a critic.
    pub values: Vec<f64>,
    /// Behavior log-probabilities: under the distribution that sampled the tokens, nats.
    pub behavior_logprobs: Vec<f64>,
    /// Log-probabilities under the policy at the start of the step, nats; `None` while that is the current policy.
    pub start_logprobs: Option<Vec<f64>>,
    /// Log-probabilities under the proximal policy, which anchors the clip, nats; `None` if it is, or follows from, the
    /// current policy.
    pub proximal_logprobs: Option<Vec<f64>>,
    /// Reference log-probabilities, nats; empty without a reference policy.
    pub reference_logprobs: Vec<f64>,
    /// Off-policy correction; `None` if it depends on a proximal policy that is not known yet.
    pub correction: Option<CorrectionWeights>,
    /// Staleness of each token, versions.
    pub staleness: Vec<u64>,
    /// Weight of each token's loss (one over the denominator); 0 for masked tokens.
    pub weights: Vec<f64>,
    /// Whether each token has a policy loss: the tokens of largest entropy; empty for all. Other loss inputs are not
    /// affected.
    pub selected: Vec<bool>,
    /// Weight of each token's negative log-likelihood: one over the tokens of correct trajectories in the minibatch
    /// (VAPO, arXiv 2504.05118); 0 for masked tokens and incorrect trajectories.
    pub likelihood_weights: Vec<f64>,
    /// Reward of the trajectory; 0 for a demonstration.
    pub reward: f64,
    /// Whether the trajectory is correct; false for a demonstration.
    pub correct: bool,
    /// Whether the row is a demonstration, trained on by its negative log-likelihood.
    pub demonstration: bool,
}

/// Which groups have a gradient, as far as is known before any forward pass.
#[must_use]
pub fn groups_with_gradient(batch: &Batch<'_>, algorithm: &Algorithm) -> Vec<bool> {
    let leave_out = algorithm.is_advantage_alone() && algorithm.advantage.needs_variance();
    // A KL penalty in the reward differs between trajectories with equal rewards.
    let leave_out = leave_out && !algorithm.kl.in_reward();
    // Dropped groups leave the step even if another loss term has a gradient.
    let leave_out = leave_out || algorithm.drop_zero_variance;
    batch.groups.iter().map(|group| !(leave_out && group.zero_variance)).collect()
}

/// Which groups are scored: those with a gradient; with `entropy_share` below 1 all that count, because the quantile is
/// over all their tokens.
#[must_use]
pub fn groups_to_score(batch: &Batch<'_>, algorithm: &Algorithm) -> Vec<bool> {
    let dropped = |group: usize| algorithm.drop_zero_variance && batch.groups[group].zero_variance;
    let wanted = groups_with_gradient(batch, algorithm).into_iter().enumerate();
    wanted.map(|(group, wanted)| wanted || (algorithm.entropy_share < 1.0 && !dropped(group))).collect()
}

/// Loss inputs of `rows`, which are those of the [`groups_to_score`] in batch order. `version` is that at the start of
/// the step.
#[must_use]
pub fn loss_inputs(
    batch: &Batch<'_>,
    rows: &[BatchRow<'_>],
    scores: Scores,
    algorithm: &Algorithm,
    version: PolicyVersion,
) -> Vec<LossInputs> {
    let outcomes = outcomes(batch, rows, &scores, algorithm);
    let advantages = algorithm.advantage.of(&outcomes);
    let returns = match &algorithm.advantage {
        AdvantageEstimator::Gae(gae) => gae.returns(&outcomes),
        _ => Advantages::new(),
    };
    let mut all: Vec<LossInputs> = rows
        .iter()
        .enumerate()
        .map(|(i, row)| {
            let of = |all: &Option<Vec<Vec<f64>>>| all.as_ref().map(|all| all[i].clone());
            let mut inputs = LossInputs {
                behavior_logprobs: behavior_logprobs(row.sample),
                start_logprobs: of(&scores.start_logprobs),
                reference_logprobs: of(&scores.reference_logprobs).unwrap_or_default(),
                values: of(&scores.values).unwrap_or_default(),
                staleness: crate::batch::token_staleness(row.sample, version),
                demonstration: row.trajectory.is_none(),
                ..LossInputs::default()
            };
            if let Some(t) = row.trajectory {
                let tokens = row.offset..row.offset + inputs.behavior_logprobs.len();
                inputs.advantages = advantages[row.group][t][tokens.clone()].to_vec();
                inputs.returns =
                    returns.get(row.group).map_or_else(Vec::new, |group| group[t][tokens].to_vec());
                inputs.reward = outcomes[row.group].trajectories[t].earned();
                inputs.correct = outcomes[row.group].trajectories[t].correct;
            }
            inputs.set_proximal(algorithm);
            inputs
        })
        .collect();
    let kept: Vec<Vec<bool>> = all
        .iter()
        .map(|inputs| match &inputs.correction {
            Some(correction) => correction.kept.clone(),
            None => vec![true; inputs.behavior_logprobs.len()],
        })
        .collect();
    if let Some(entropy) = scores.entropy.filter(|_| algorithm.entropy_share < 1.0) {
        let units: Vec<Vec<SelectionUnit>> = entropy
            .iter()
            .zip(rows)
            .map(|(row, of)| match algorithm.entropy_unit {
                EntropyUnit::Token => {
                    row.iter().map(|entropy| SelectionUnit { tokens: 1, entropy: *entropy }).collect()
                }
                EntropyUnit::Turn => turns(row, of.sample),
            })
            .collect();
        select_high_entropy(&units, &mut all, algorithm.entropy_share);
    }
    set_weights(batch, rows, &kept, algorithm, &mut all);
    all
}

impl LossInputs {
    /// Sets the proximal policy, and the off-policy correction if it is known before the forward pass.
    fn set_proximal(&mut self, algorithm: &Algorithm) {
        if self.demonstration {
            let tokens = self.behavior_logprobs.len();
            self.correction =
                Some(CorrectionWeights { weights: vec![1.0; tokens], kept: vec![true; tokens] });
            return;
        }
        self.proximal_logprobs = match algorithm.proximal {
            Proximal::Behavior => Some(self.behavior_logprobs.clone()),
            Proximal::Interpolate => None,
            Proximal::Recompute => self.start_logprobs.clone(),
        };
        self.correction = self
            .proximal_logprobs
            .as_ref()
            .map(|proximal| algorithm.correction.weights(proximal, &self.behavior_logprobs));
    }
}

/// Rewards and lengths of the trajectories, with what the scoring passes add: per token, row after row of each.
fn outcomes(
    batch: &Batch<'_>,
    rows: &[BatchRow<'_>],
    scores: &Scores,
    algorithm: &Algorithm,
) -> Vec<GroupOutcome> {
    let outcome = |group: &BatchGroup<'_>| {
        // A dropped group is not in the batch deviation either.
        let dropped = algorithm.drop_zero_variance && group.zero_variance;
        if dropped { GroupOutcome::default() } else { group.outcome.clone() }
    };
    let mut outcomes: Vec<GroupOutcome> = batch.groups.iter().map(outcome).collect();
    for (i, row) in rows.iter().enumerate() {
        let Some(t) = row.trajectory else { continue };
        let outcome = &mut outcomes[row.group].trajectories[t];
        if let Some(values) = &scores.values {
            outcome.values.extend(&values[i]);
        }
        let (Some(start), Some(reference)) = (&scores.start_logprobs, &scores.reference_logprobs) else {
            continue;
        };
        let pairs = || start[i].iter().zip(&reference[i]);
        if algorithm.kl.in_reward() {
            let crate::loss::KlPenalty { coef, estimator, .. } = algorithm.kl;
            outcome.penalties.extend(pairs().map(|(p, r)| coef * estimator.token(*p, *r).0));
        }
        if algorithm.advantage == AdvantageEstimator::Teacher {
            outcome.teacher_gap.extend(pairs().map(|(p, r)| r - p));
        }
    }
    outcomes
}

/// Neighbouring tokens that are selected together, and their mean entropy, nats.
struct SelectionUnit {
    tokens: usize,
    entropy: f64,
}

/// The turns of a sample, which are trained tokens without another between them. `entropy` is `[T]`, nats.
fn turns(entropy: &[f64], sample: &Sample) -> Vec<SelectionUnit> {
    let mut left = entropy;
    let runs = sample.loss_mask().split(|trained| !trained).filter(|run| !run.is_empty());
    runs.map(|run| {
        let (of_turn, others) = left.split_at(run.len().min(left.len()));
        left = others;
        SelectionUnit { tokens: of_turn.len(), entropy: crate::advantage::mean(of_turn.iter().copied()) }
    })
    .collect()
}

/// Selects the units whose entropy is at least the quantile `1 - share` of all units of the batch, interpolated between
/// neighbours (arXiv 2506.01939; TRL `top_entropy_quantile`). Demonstrations are not affected. `units` is `[rows]`.
fn select_high_entropy(units: &[Vec<SelectionUnit>], inputs: &mut [LossInputs], share: f64) {
    let mut values: Vec<f64> = units
        .iter()
        .zip(&*inputs)
        .filter(|(_, inputs)| !inputs.demonstration)
        .flat_map(|(row, _)| row.iter().map(|unit| unit.entropy))
        .collect();
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return };
    let place = (1.0 - share).clamp(0.0, 1.0) * last as f64;
    let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
    let least = below + (above - below) * place.fract();
    for (inputs, row) in inputs.iter_mut().zip(units).filter(|(inputs, _)| !inputs.demonstration) {
        let selected = |unit: &SelectionUnit| std::iter::repeat_n(unit.entropy >= least, unit.tokens);
        inputs.selected = row.iter().flat_map(selected).collect();
    }
}

/// Sets the weight of every token in the loss of its minibatch.
fn set_weights(
    batch: &Batch<'_>,
    rows: &[BatchRow<'_>],
    kept: &[Vec<bool>],
    algorithm: &Algorithm,
    inputs: &mut [LossInputs],
) {
    let tokens = |i: usize| kept[i].iter().filter(|kept| **kept).count();
    for minibatch in batch.minibatches() {
        let inside: Vec<usize> = (0..rows.len()).filter(|i| minibatch.contains(&rows[*i].group)).collect();
        let computed: BTreeSet<(usize, usize)> =
            inside.iter().filter_map(|i| Some((rows[*i].group, rows[*i].trajectory?))).collect();
        // Tokens that count: those kept in computed rows, all tokens of skipped rows.
        let mut group_tokens = vec![0; batch.groups.len()];
        let mut trajectory_tokens: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let mut groups = BTreeSet::new();
        for i in inside.iter().copied().filter(|i| !inputs[*i].demonstration && tokens(*i) > 0) {
            group_tokens[rows[i].group] += tokens(i);
            groups.insert(rows[i].group);
            if let Some(trajectory) = rows[i].trajectory {
                *trajectory_tokens.entry((rows[i].group, trajectory)).or_default() += tokens(i);
            }
        }
        // The rows of a trajectory are one sequence.
        let mut sequences = trajectory_tokens.len();
        for group in minibatch.clone() {
            let of = &batch.groups[group];
            if algorithm.drop_zero_variance && of.zero_variance {
                continue;
            }
            let left_out = (0..of.trajectories.len()).filter(|t| !computed.contains(&(group, *t)));
            for t in left_out {
                group_tokens[group] += of.trajectories[t].trained_tokens();
                sequences += 1;
                groups.insert(group);
            }
            // A demonstrated task counts although it has no trajectory with a reward; other tasks without one do not.
            groups.extend((of.trajectories.is_empty() && of.demonstration.is_some()).then_some(group));
        }
        let batch_tokens = minibatch.clone().map(|group| group_tokens[group]).sum();
        let right = |i: usize| inputs[i].correct && !inputs[i].demonstration;
        let right_tokens: usize = inside.iter().copied().filter(|i| right(*i)).map(tokens).sum();
        let likelihood = |i: usize| if right(i) { 1.0 / right_tokens.max(1) as f64 } else { 0.0 };
        let likelihoods: Vec<f64> = inside.iter().copied().map(likelihood).collect();
        for (i, likelihood) in inside.into_iter().zip(likelihoods) {
            let counts = TokenCounts {
                sequence_tokens: rows[i]
                    .trajectory
                    .and_then(|trajectory| trajectory_tokens.get(&(rows[i].group, trajectory)))
                    .copied()
                    .unwrap_or_default(),
                group_tokens: group_tokens[rows[i].group],
                batch_tokens,
                batch_sequences: sequences,
                batch_groups: groups.len(),
                max_completion_length: batch.max_completion_length(),
            };
            // A demonstration is weighted like a task: the mean over its tokens.
            let weight = if inputs[i].demonstration {
                let counts = TokenCounts { group_tokens: tokens(i), batch_groups: minibatch.len(), ..counts };
                Aggregation::PromptMean.token_weight(&counts)
            } else {
                algorithm.aggregation.token_weight(&counts)
            };
            let each = |weight: f64| kept[i].iter().map(|kept| if *kept { weight } else { 0.0 }).collect();
            (inputs[i].weights, inputs[i].likelihood_weights) = (each(weight), each(likelihood));
        }
    }
}
