//! All updates of one batch: score what the algorithm needs, settle the terms of every row, then one optimizer step per
//! minibatch and epoch.
//!
//! Invariant: forward passes that nothing needs are not made. With one update per batch the policy before the step is the
//! one being differentiated, so a pass over the batch is saved wherever only its log-probabilities are asked for.

use model::{Placement, Prediction};
use trajectory::{PolicyVersion, Sample};

use crate::TrainerError;
use crate::algorithm::{Algorithm, Proximal};
use crate::batch::{Batch, Row};
use crate::critic::{CriticConfig, CriticKind};
use crate::learner::{Frozen, Learner};
use crate::loss::PolicyLoss;
use crate::loss::trajectory_balance;
use crate::objective::{PolicyObjective, ValueObjective, balance};
use crate::report::{CriticReport, Mismatch, TokenSums};
use crate::terms::{Scores, Terms, scored, terms, wanted};

/// What turns a batch into updates.
#[derive(Debug)]
pub(crate) struct Update<'a> {
    pub(crate) algorithm: &'a Algorithm,
    /// Passes over the batch.
    pub(crate) epochs: usize,
    /// The version that the step starts from.
    pub(crate) version: PolicyVersion,
    /// Whether its samples must have the bits that it computes now.
    pub(crate) bitwise: bool,
    pub(crate) learning_rate: f32,
    pub(crate) learner: &'a mut Learner,
    /// How the critic learns, and its network if it has one of its own.
    pub(crate) critic: Option<(CriticConfig, Option<&'a mut Learner>)>,
    /// The reference policy or teacher.
    pub(crate) reference: Option<&'a Frozen>,
}

/// What the updates of a batch did. Sums are over the last epoch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Updated {
    pub(crate) sums: TokenSums,
    /// Norm of the last gradient before clipping.
    pub(crate) grad_norm: f32,
    pub(crate) critic: Option<CriticReport>,
}

/// A minibatch: its rows with their terms.
struct Part<'a, 'b> {
    rows: &'a [Row<'b>],
    samples: Vec<&'b Sample>,
    terms: &'a [Terms],
}

impl Update<'_> {
    /// Makes the updates; the inner error names a row whose bits differ where they must not.
    pub(crate) fn run<'b>(
        mut self,
        batch: &Batch<'b>,
    ) -> Result<Result<Updated, (Row<'b>, Mismatch)>, TrainerError> {
        let (wanted, scored) = (wanted(batch, self.algorithm), scored(batch, self.algorithm));
        let rows = batch.rows(|group| scored[group]);
        let parts = batch.parts();
        let scores = self.scores(&rows, parts.len() * self.epochs)?;
        let (knows_before, first) = (scores.before.is_some(), self.learner.updates());
        let terms = terms(batch, &rows, scores, self.algorithm, self.version);
        let with_gradient = |(row, _): &(Row<'_>, Terms)| row.trajectory.is_none() || wanted[row.group];
        let (rows, terms): (Vec<_>, Vec<_>) = rows.into_iter().zip(terms).filter(with_gradient).unzip();
        let cut = |part: &std::ops::Range<usize>| {
            let (from, to) = (first_of(&rows, part.start), first_of(&rows, part.end));
            let rows = &rows[from..to];
            Part { rows, samples: rows.iter().map(|row| row.sample).collect(), terms: &terms[from..to] }
        };
        let parts: Vec<Part<'_, '_>> = parts.iter().map(cut).collect();
        let mut updated = Updated::default();
        for epoch in 0..self.epochs {
            updated.sums = updated.sums.next_epoch();
            for part in &parts {
                let compares = epoch == 0 && (knows_before || self.learner.updates() == first);
                if let Err(mismatch) = self.part(part, compares, &mut updated)? {
                    return Ok(Err((part.rows[mismatch.row], mismatch)));
                }
            }
        }
        if let Some(report) = &mut updated.critic {
            report.describe(&terms);
        }
        Ok(Ok(updated))
    }

    /// One optimizer step of the policy, of the critic, or of both. `compares` is whether the policy before all updates is
    /// known.
    fn part(
        &mut self,
        part: &Part<'_, '_>,
        compares: bool,
        updated: &mut Updated,
    ) -> Result<Result<(), Mismatch>, TrainerError> {
        let log_z = self.log_z(part)?;
        let shared = self.critic.as_ref().filter(|(_, network)| network.is_none());
        let value_loss = shared.map(|(config, _)| config.term);
        let spread = self.learner.is_spread();
        let objective = PolicyObjective {
            algorithm: self.algorithm,
            rows: part.rows,
            terms: part.terms,
            log_z,
            critic: value_loss,
            compares,
            bitwise: self.bitwise.then_some(self.version),
        };
        let (learner, rate) = (&mut *self.learner, self.learning_rate);
        let mut step = || learner.step(&part.samples, &objective, rate);
        let (grad_norm, reports) = match &mut self.critic {
            Some((config, Some(network))) => {
                let (config, version) = (*config, self.version);
                let pretraining = version.0 < config.pretrain_steps;
                let critic = || step_critic(config, network, part);
                let (critic, policy) =
                    beside(config.placement == Placement::Separated && !spread, critic, || {
                        (!pretraining).then(&mut step).transpose()
                    });
                updated.critic = Some(critic?);
                match policy? {
                    Some(stepped) => stepped,
                    None => return Ok(Ok(())),
                }
            }
            _ => step()?,
        };
        reports.iter().for_each(|report| updated.sums.merge(report));
        updated.grad_norm = grad_norm;
        if value_loss.is_some() {
            let loss = updated.sums.mean(updated.sums.value_loss);
            updated.critic = Some(CriticReport { loss, grad_norm, ..CriticReport::default() });
        }
        Ok(updated.sums.mismatched.map_or(Ok(()), Err))
    }

    /// The forward passes that the algorithm needs before the first of `updates`.
    fn scores(&self, rows: &[Row<'_>], updates: usize) -> Result<Scores, TrainerError> {
        let samples: Vec<&Sample> = rows.iter().map(|row| row.sample).collect();
        let critic = self.critic.as_ref();
        let shared = critic.is_some_and(|(config, _)| config.kind == CriticKind::Shared);
        // After the first optimizer step the policy is no longer the one that anchors the loss, nor the one that has
        // to have the sampler's bits.
        let anchored = self.algorithm.proximal == Proximal::Recompute && self.algorithm.uses_proximal();
        let needs_own =
            ((anchored || self.bitwise) && updates > 1) || self.algorithm.needs_scores() || shared;
        let network = critic.and_then(|(config, network)| Some((config.placement, network.as_deref()?)));
        let reference = self.reference;
        // The calls of a process come one after the other, the same on all of them.
        let spread = self.learner.is_spread();
        let separated = reference.is_some_and(|reference| reference.pool.is_some()) && !spread;
        // Models that are placed beside the policy score at the same time as it does.
        let own = || needs_own.then(|| self.learner.score(&samples)).transpose();
        let values = || network.map(|(_, network)| network.score(&samples)).transpose();
        let theirs = || reference.map(|reference| self.learner.score_under(reference, &samples)).transpose();
        let (theirs, (values, own)) = beside(separated, theirs, || {
            let separated = network.is_some_and(|(placement, _)| placement == Placement::Separated);
            beside(separated && !spread, values, own)
        });
        let (own, values, theirs) = (own?, values?, theirs?);
        let logprob = |prediction: &Prediction| prediction.logprob;
        let value = |prediction: &Prediction| prediction.value;
        let values = values.or_else(|| own.clone().filter(|_| shared));
        Ok(Scores {
            before: own.as_ref().map(|own| each(own, logprob)),
            entropy: own.as_ref().map(|own| each(own, |prediction| prediction.entropy)),
            values: values.map(|values| each(&values, value)),
            reference: theirs.map(|theirs| each(&theirs, logprob)),
        })
    }

    /// The normaliser of every row's group under the current weights, if the loss is trajectory balance.
    fn log_z(&self, part: &Part<'_, '_>) -> Result<Vec<f64>, TrainerError> {
        let PolicyLoss::TrajectoryBalance { beta } = self.algorithm.loss else { return Ok(Vec::new()) };
        let current = each(&self.learner.score(&part.samples)?, |prediction| prediction.logprob);
        let balances: Vec<_> =
            part.terms.iter().zip(&current).map(|(terms, current)| balance(terms, current)).collect();
        let groups = part.rows.chunk_by(|a, b| a.group == b.group);
        let mut from = 0;
        Ok(groups
            .flat_map(|rows| {
                let of_group = &balances[from..from + rows.len()];
                from += rows.len();
                vec![trajectory_balance::log_z(of_group, beta); rows.len()]
            })
            .collect())
    }
}

/// One optimizer step of a critic of its own.
fn step_critic(
    config: CriticConfig,
    network: &mut Learner,
    part: &Part<'_, '_>,
) -> Result<CriticReport, TrainerError> {
    let objective = ValueObjective { terms: part.terms, term: config.term };
    let (grad_norm, reports) = network.step(&part.samples, &objective, config.learning_rate)?;
    let mut sums = TokenSums::default();
    reports.iter().for_each(|report| sums.merge(report));
    Ok(CriticReport { loss: sums.mean(sums.value_loss), grad_norm, ..CriticReport::default() })
}

/// Does `other` and `own`: one after the other, or at the same time where `separated`. Neither sees the other's results.
fn beside<A: Send, B>(separated: bool, other: impl FnOnce() -> A + Send, own: impl FnOnce() -> B) -> (A, B) {
    if !separated {
        return (other(), own());
    }
    std::thread::scope(|scope| {
        let other = scope.spawn(other);
        let own = own();
        (other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), own)
    })
}

impl CriticReport {
    /// Adds what the critic expected before the step, and how well that fitted.
    fn describe(&mut self, terms: &[Terms]) {
        let mean = |of: &dyn Fn(f64, f64) -> f64| {
            let pairs = terms.iter().flat_map(|terms| terms.returns.iter().zip(&terms.values));
            crate::credit::mean(pairs.map(|(target, value)| of(*target, *value)))
        };
        let variance = |of: &dyn Fn(f64, f64) -> f64| {
            mean(&|target, value| of(target, value).powi(2)) - mean(of).powi(2)
        };
        self.value = mean(&|_, value| value);
        let of_returns = variance(&|target, _| target);
        let unexplained = variance(&|target, value| target - value);
        self.explained_variance = if of_returns > 0.0 { 1.0 - unexplained / of_returns } else { 0.0 };
    }
}

/// The first of `rows` whose group is `group` or a later one.
fn first_of(rows: &[Row<'_>], group: usize) -> usize {
    rows.partition_point(|row| row.group < group)
}

/// One number of every prediction, in f64.
fn each(predictions: &[Vec<Prediction>], of: impl Fn(&Prediction) -> f32) -> Vec<Vec<f64>> {
    predictions.iter().map(|row| row.iter().map(|prediction| f64::from(of(prediction))).collect()).collect()
}
