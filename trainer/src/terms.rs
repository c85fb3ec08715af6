//! What the loss of a step needs to know of every row before any gradient: advantages, corrections, weights.
//!
//! Invariant: everything that is divided by is counted here, after masks: a masked token leaves the loss and every
//! denominator; a token that is left out because its gradient is zero stays in them.

use std::collections::BTreeSet;

use trajectory::PolicyVersion;

use crate::algorithm::{Algorithm, Proximal};
use crate::batch::{Batch, Row, behavior};
use crate::credit::{Advantage, Advantages, GroupOutcome};
use crate::loss::correction::Corrected;
use crate::loss::{Aggregation, Counts};

/// Forward passes over the rows of a batch before its first update, each `[rows][T]`; those that an algorithm does not
/// need are not there.
#[derive(Clone, Debug, Default)]
pub struct Scores {
    /// Log-probabilities under the policy before the step, nats.
    pub before: Option<Vec<Vec<f64>>>,
    /// Entropies of the policy before the step, nats.
    pub entropy: Option<Vec<Vec<f64>>>,
    /// Log-probabilities under the reference policy, nats.
    pub reference: Option<Vec<Vec<f64>>>,
    /// What the critic expects before each token.
    pub values: Option<Vec<Vec<f64>>>,
}

/// What the loss needs to know of one row; slices are `[T]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Terms {
    /// How much better each token was than what it is compared with.
    pub advantages: Vec<f64>,
    /// What the critic learns to expect; empty without one.
    pub returns: Vec<f64>,
    /// What it expected before the step; empty without one.
    pub values: Vec<f64>,
    /// Under the distribution that sampled the tokens, nats.
    pub behavior: Vec<f64>,
    /// Under the policy before the step, nats; `None` while that is the policy being differentiated.
    pub before: Option<Vec<f64>>,
    /// Under the policy that anchors the loss; `None` while that is the policy being differentiated, or follows from it.
    pub proximal: Option<Vec<f64>>,
    /// Under the reference policy, nats; empty without one.
    pub reference: Vec<f64>,
    /// Weights for the behavior policy; `None` if they follow from a proximal policy that is not known yet.
    pub corrected: Option<Corrected>,
    /// `[T]` versions since each token was sampled.
    pub staleness: Vec<u64>,
    /// Factor of each token's loss: 0 where the token is masked.
    pub weights: Vec<f64>,
    /// Reward of the trajectory; 0 for a demonstration.
    pub reward: f64,
    /// Whether the row is a demonstration, to be imitated.
    pub demonstration: bool,
}

/// Which groups have a gradient, as far as that is known before any forward pass.
#[must_use]
pub fn wanted(batch: &Batch<'_>, algorithm: &Algorithm) -> Vec<bool> {
    let leave_out = algorithm.is_advantage_alone() && algorithm.advantage.needs_variance();
    // What is charged for divergence differs between trajectories, whatever their rewards.
    let leave_out = leave_out && !algorithm.divergence.in_reward();
    batch.groups.iter().map(|group| !(leave_out && group.zero_variance)).collect()
}

/// Terms of `rows`, which are those of [`wanted`] groups in the order of the batch. `version` is the one that the step
/// starts from.
#[must_use]
pub fn terms(
    batch: &Batch<'_>,
    rows: &[Row<'_>],
    scores: Scores,
    algorithm: &Algorithm,
    version: PolicyVersion,
) -> Vec<Terms> {
    let outcomes = outcomes(batch, rows, &scores, algorithm);
    let advantages = algorithm.advantage.of(&outcomes);
    let returns = match &algorithm.advantage {
        Advantage::Gae(gae) => gae.returns(&outcomes),
        _ => Advantages::new(),
    };
    let mut all: Vec<Terms> = rows
        .iter()
        .enumerate()
        .map(|(i, row)| {
            let of = |all: &Option<Vec<Vec<f64>>>| all.as_ref().map(|all| all[i].clone());
            let mut terms = Terms {
                behavior: behavior(row.sample),
                before: of(&scores.before),
                reference: of(&scores.reference).unwrap_or_default(),
                values: of(&scores.values).unwrap_or_default(),
                staleness: crate::batch::token_staleness(row.sample, version),
                demonstration: row.trajectory.is_none(),
                ..Terms::default()
            };
            if let Some(t) = row.trajectory {
                terms.advantages.clone_from(&advantages[row.group][t]);
                terms.returns = returns.get(row.group).map_or_else(Vec::new, |group| group[t].clone());
                terms.reward = outcomes[row.group].trajectories[t].reward;
            }
            terms.anchor(algorithm);
            terms
        })
        .collect();
    let mut kept: Vec<Vec<bool>> = all
        .iter()
        .map(|terms| match &terms.corrected {
            Some(corrected) => corrected.kept.clone(),
            None => vec![true; terms.behavior.len()],
        })
        .collect();
    if let Some(entropy) = scores.entropy.filter(|_| algorithm.entropy_share < 1.0) {
        keep_uncertain(&mut kept, &entropy, &all, algorithm.entropy_share);
    }
    weigh(batch, rows, &kept, algorithm, &mut all);
    all
}

impl Terms {
    /// Settles which policy anchors the loss, and the correction where that is known before the forward pass.
    fn anchor(&mut self, algorithm: &Algorithm) {
        if self.demonstration {
            let tokens = self.behavior.len();
            self.corrected = Some(Corrected { weights: vec![1.0; tokens], kept: vec![true; tokens] });
            return;
        }
        self.proximal = match algorithm.proximal {
            Proximal::Behavior => Some(self.behavior.clone()),
            Proximal::Interpolate => None,
            Proximal::Recompute => self.before.clone(),
        };
        self.corrected =
            self.proximal.as_ref().map(|proximal| algorithm.correction.of(proximal, &self.behavior));
    }
}

/// What the trajectories achieved, with what the forward passes say of them.
fn outcomes(
    batch: &Batch<'_>,
    rows: &[Row<'_>],
    scores: &Scores,
    algorithm: &Algorithm,
) -> Vec<GroupOutcome> {
    let mut outcomes: Vec<GroupOutcome> = batch.groups.iter().map(|group| group.outcome.clone()).collect();
    for (i, row) in rows.iter().enumerate() {
        let Some(t) = row.trajectory else { continue };
        let outcome = &mut outcomes[row.group].trajectories[t];
        if let Some(values) = &scores.values {
            outcome.values.clone_from(&values[i]);
        }
        let (Some(before), Some(reference)) = (&scores.before, &scores.reference) else { continue };
        let pairs = || before[i].iter().zip(&reference[i]);
        if algorithm.divergence.in_reward() {
            let crate::loss::Divergence { coef, estimator, .. } = algorithm.divergence;
            outcome.penalties = pairs().map(|(p, r)| coef * estimator.token(*p, *r).0).collect();
        }
        if algorithm.advantage == Advantage::Teacher {
            outcome.teacher_gap = pairs().map(|(p, r)| r - p).collect();
        }
    }
    outcomes
}

/// Keeps the tokens of the largest entropy: `share` of all tokens of the batch that are still kept. Demonstrations stay
/// whole.
fn keep_uncertain(kept: &mut [Vec<bool>], entropy: &[Vec<f64>], terms: &[Terms], share: f64) {
    let sampled = |i: usize| !terms[i].demonstration;
    let all = entropy.iter().zip(&*kept).enumerate().filter(|(i, _)| sampled(*i));
    let mut values: Vec<f64> =
        all.flat_map(|(_, (row, kept))| row.iter().zip(kept).filter(|(_, k)| **k).map(|(e, _)| *e)).collect();
    values.sort_by(|a, b| b.total_cmp(a));
    let count = (share * values.len() as f64).ceil() as usize;
    let Some(least) = count.checked_sub(1).and_then(|last| values.get(last)) else { return };
    for (i, row) in entropy.iter().enumerate().filter(|(i, _)| sampled(*i)) {
        kept[i].iter_mut().zip(row).for_each(|(kept, entropy)| *kept &= entropy >= least);
    }
}

/// Gives every token its share of the minibatch's loss.
fn weigh(
    batch: &Batch<'_>,
    rows: &[Row<'_>],
    kept: &[Vec<bool>],
    algorithm: &Algorithm,
    terms: &mut [Terms],
) {
    let tokens = |i: usize| kept[i].iter().filter(|kept| **kept).count();
    for part in batch.parts() {
        let inside: Vec<usize> = (0..rows.len()).filter(|i| part.contains(&rows[*i].group)).collect();
        let computed: BTreeSet<(usize, usize)> =
            inside.iter().filter_map(|i| Some((rows[*i].group, rows[*i].trajectory?))).collect();
        // Tokens that count: kept ones of the rows that are computed, all of those that are not.
        let mut group_tokens = vec![0; batch.groups.len()];
        let (mut sequences, mut groups) = (0, BTreeSet::new());
        for i in inside.iter().filter(|i| !terms[**i].demonstration) {
            group_tokens[rows[*i].group] += tokens(*i);
            sequences += usize::from(tokens(*i) > 0);
            groups.extend((tokens(*i) > 0).then_some(rows[*i].group));
        }
        for group in part.clone() {
            let of = &batch.groups[group];
            if algorithm.drop_zero_variance && of.zero_variance {
                continue;
            }
            let left_out = (0..of.samples.len()).filter(|t| !computed.contains(&(group, *t)));
            for t in left_out {
                group_tokens[group] += of.samples[t].trained_tokens();
                sequences += 1;
                groups.insert(group);
            }
            groups.extend(of.samples.is_empty().then_some(group));
        }
        let batch_tokens = part.clone().map(|group| group_tokens[group]).sum();
        for i in inside {
            let counts = Counts {
                sequence_tokens: tokens(i),
                group_tokens: group_tokens[rows[i].group],
                batch_tokens,
                batch_sequences: sequences,
                batch_groups: groups.len(),
                max_completion_length: batch.max_completion_length(),
            };
            // A demonstration counts like a task: the mean over its tokens.
            let weight = if terms[i].demonstration {
                let counts = Counts { group_tokens: tokens(i), batch_groups: part.len(), ..counts };
                Aggregation::PromptMean.token_weight(&counts)
            } else {
                algorithm.aggregation.token_weight(&counts)
            };
            terms[i].weights = kept[i].iter().map(|kept| if *kept { weight } else { 0.0 }).collect();
        }
    }
}
