//! What the loss of a step needs to know of every row before any gradient: advantages, corrections, weights.
//!
//! Invariant: everything that is divided by is counted here, after the masks of corrections: a masked token leaves the loss
//! and every denominator. A token that is left out because its gradient is zero stays in them, and so does one that the
//! entropy share takes the policy loss of. Which tokens of a group a correction would mask is known only of groups that are
//! scored: of one that is left out before that, all tokens count.

use std::collections::BTreeSet;

use trajectory::PolicyVersion;

use crate::algorithm::{Algorithm, Proximal};
use crate::batch::{Batch, BatchGroup, Row, behavior};
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
    /// Whether the policy loss of each token counts: those of the largest entropy; empty for all. The other parts of the
    /// loss count in any case.
    pub selected: Vec<bool>,
    /// Factor of each token's negative log-likelihood: one over the tokens of the right trajectories of the minibatch (VAPO,
    /// arXiv 2504.05118); 0 where the token is masked or its trajectory is not right.
    pub likelihood_weights: Vec<f64>,
    /// Reward of the trajectory; 0 for a demonstration.
    pub reward: f64,
    /// Whether the trajectory is correct; false for a demonstration.
    pub correct: bool,
    /// Whether the row is a demonstration, to be imitated.
    pub demonstration: bool,
}

/// Which groups have a gradient, as far as that is known before any forward pass.
#[must_use]
pub fn wanted(batch: &Batch<'_>, algorithm: &Algorithm) -> Vec<bool> {
    let leave_out = algorithm.is_advantage_alone() && algorithm.advantage.needs_variance();
    // What is charged for divergence differs between trajectories, whatever their rewards.
    let leave_out = leave_out && !algorithm.divergence.in_reward();
    // What leaves the denominators leaves the step, whatever else has a gradient.
    let leave_out = leave_out || algorithm.drop_zero_variance;
    batch.groups.iter().map(|group| !(leave_out && group.zero_variance)).collect()
}

/// Which groups are scored, if any are: those with a gradient, and under an entropy share all that count, because its
/// quantile is over all their tokens.
#[must_use]
pub fn scored(batch: &Batch<'_>, algorithm: &Algorithm) -> Vec<bool> {
    let dropped = |group: usize| algorithm.drop_zero_variance && batch.groups[group].zero_variance;
    let wanted = wanted(batch, algorithm).into_iter().enumerate();
    wanted.map(|(group, wanted)| wanted || (algorithm.entropy_share < 1.0 && !dropped(group))).collect()
}

/// Terms of `rows`, which are those of [`scored`] groups in the order of the batch. `version` is the one that the step
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
                terms.correct = outcomes[row.group].trajectories[t].correct;
            }
            terms.anchor(algorithm);
            terms
        })
        .collect();
    let kept: Vec<Vec<bool>> = all
        .iter()
        .map(|terms| match &terms.corrected {
            Some(corrected) => corrected.kept.clone(),
            None => vec![true; terms.behavior.len()],
        })
        .collect();
    if let Some(entropy) = scores.entropy.filter(|_| algorithm.entropy_share < 1.0) {
        select_uncertain(&entropy, &mut all, algorithm.entropy_share);
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
    let outcome = |group: &BatchGroup<'_>| {
        // What is dropped is compared with nothing: it is not in the deviation of the batch either.
        let dropped = algorithm.drop_zero_variance && group.zero_variance;
        if dropped { GroupOutcome::default() } else { group.outcome.clone() }
    };
    let mut outcomes: Vec<GroupOutcome> = batch.groups.iter().map(outcome).collect();
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

/// Selects the tokens whose entropy is at least the quantile `1 - share` of all tokens of the batch, interpolated between
/// neighbours (arXiv 2506.01939; TRL `top_entropy_quantile`). Demonstrations stay whole.
fn select_uncertain(entropy: &[Vec<f64>], terms: &mut [Terms], share: f64) {
    let mut values: Vec<f64> = entropy
        .iter()
        .zip(&*terms)
        .filter(|(_, terms)| !terms.demonstration)
        .flat_map(|(row, _)| row.iter().copied())
        .collect();
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return };
    let place = (1.0 - share).clamp(0.0, 1.0) * last as f64;
    let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
    let least = below + (above - below) * place.fract();
    for (terms, row) in terms.iter_mut().zip(entropy).filter(|(terms, _)| !terms.demonstration) {
        terms.selected = row.iter().map(|entropy| *entropy >= least).collect();
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
            // A demonstrated task counts although no trajectory of it has a reward; another one is not there.
            groups.extend((of.samples.is_empty() && of.demonstration.is_some()).then_some(group));
        }
        let batch_tokens = part.clone().map(|group| group_tokens[group]).sum();
        let right = |i: usize| terms[i].correct && !terms[i].demonstration;
        let right_tokens: usize = inside.iter().copied().filter(|i| right(*i)).map(tokens).sum();
        let likelihood = |i: usize| if right(i) { 1.0 / right_tokens.max(1) as f64 } else { 0.0 };
        let likelihoods: Vec<f64> = inside.iter().copied().map(likelihood).collect();
        for (i, likelihood) in inside.into_iter().zip(likelihoods) {
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
            let each = |weight: f64| kept[i].iter().map(|kept| if *kept { weight } else { 0.0 }).collect();
            (terms[i].weights, terms[i].likelihood_weights) = (each(weight), each(likelihood));
        }
    }
}
