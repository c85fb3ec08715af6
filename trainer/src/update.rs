//! The optimizer updates of one batch: forward-only scoring passes, loss inputs of every row, then one optimizer step
//! per minibatch and epoch.
//!
//! Invariant: a forward pass is made only if the algorithm needs it. With one update per batch the proximal policy is
//! the current policy, so the scoring pass for its log-probabilities is skipped.

use std::sync::Arc;
use std::time::Instant;

use model::{Placement, Prediction};
use trajectory::{Group, PolicyVersion, Sample, Trajectory};

use crate::TrainerError;
use crate::algorithm::{Algorithm, Proximal};
use crate::batch::{Batch, BatchRow};
use crate::critic::{CriticConfig, CriticKind};
use crate::frozen::Frozen;
use crate::learner::{Learner, LearnerStep};
use crate::loss::PolicyLoss;
use crate::loss::trajectory_balance;
use crate::loss_inputs::{LossInputs, Scores, groups_to_score, groups_with_gradient, loss_inputs};
use crate::objective::{PolicyObjective, ValueObjective, balance};
use crate::rank_spans::RankSpan;
use crate::report::{CriticReport, LogprobMismatch, TokenSums};
use crate::token_log::{RowTokens, TokenLog};

/// The updates of one batch, with all that they read and change.
#[derive(Debug)]
pub(crate) struct PolicyUpdate<'a> {
    pub(crate) algorithm: &'a Algorithm,
    /// Passes over the batch (PPO epochs).
    pub(crate) epochs: usize,
    /// Policy version at the start of the step.
    pub(crate) version: PolicyVersion,
    /// Whether samples of that version must have the same bits as the trainer's log-probabilities.
    pub(crate) bitwise: bool,
    pub(crate) learning_rate: f32,
    pub(crate) learner: &'a mut Learner,
    pub(crate) critic: Option<CriticUpdate<'a>>,
    /// The reference policy or teacher.
    pub(crate) reference: Option<&'a Frozen>,
    /// The groups whose tokens are reported.
    pub(crate) logged: &'a [Arc<Group>],
}

/// The critic of the updates of a batch.
#[derive(Debug)]
pub(crate) struct CriticUpdate<'a> {
    pub(crate) config: CriticConfig,
    /// Its learner, if it is a separate network.
    pub(crate) network: Option<&'a mut Learner>,
}

/// Result of the updates of a batch. Sums are over the last epoch.
#[derive(Clone, Debug, Default)]
pub(crate) struct UpdateResult {
    pub(crate) sums: TokenSums,
    /// Gradient norm of the last update, before clipping.
    pub(crate) grad_norm: f32,
    pub(crate) critic: Option<CriticReport>,
    /// The tokens of the rows of the groups that are reported.
    pub(crate) tokens: Vec<RowTokens>,
    /// When the updates began; second 0 of the spans.
    pub(crate) began: Option<Instant>,
    /// What every rank of the policy did, by rank; empty for a single rank.
    pub(crate) ranks: Vec<Vec<RankSpan>>,
}

/// A minibatch: whole groups that share one optimizer step.
struct Minibatch<'a, 'b> {
    rows: &'a [BatchRow<'b>],
    samples: Vec<&'b Sample>,
    inputs: &'a [LossInputs],
    /// Index of the first row among the rows with a gradient.
    first: usize,
}

impl PolicyUpdate<'_> {
    /// Runs all updates; the inner error is a row whose log-probabilities differ where they must be equal.
    pub(crate) fn run<'b>(
        mut self,
        batch: &Batch<'b>,
    ) -> Result<Result<UpdateResult, (BatchRow<'b>, LogprobMismatch)>, TrainerError> {
        let began = Instant::now();
        self.learner.restart_clocks(began);
        let (wanted, scored) =
            (groups_with_gradient(batch, self.algorithm), groups_to_score(batch, self.algorithm));
        let rows = batch.rows(|group| scored[group]);
        let minibatches = batch.minibatches();
        let scores = self.scores(&rows, minibatches.len() * self.epochs)?;
        let (knows_start, first) = (scores.start_logprobs.is_some(), self.learner.updates());
        let inputs = loss_inputs(batch, &rows, scores, self.algorithm, self.version);
        let with_gradient =
            |(row, _): &(BatchRow<'_>, LossInputs)| row.trajectory.is_none() || wanted[row.group];
        let (rows, inputs): (Vec<_>, Vec<_>) = rows.into_iter().zip(inputs).filter(with_gradient).unzip();
        let cut = |minibatch: &std::ops::Range<usize>| {
            let (from, to) = (first_of(&rows, minibatch.start), first_of(&rows, minibatch.end));
            let rows = &rows[from..to];
            Minibatch {
                rows,
                samples: rows.iter().map(|row| row.sample).collect(),
                inputs: &inputs[from..to],
                first: from,
            }
        };
        let minibatches: Vec<Minibatch<'_, '_>> = minibatches.iter().map(cut).collect();
        let logged = self.logged.iter().flat_map(|group| &group.trajectories);
        let logged: Vec<&Sample> = logged.flat_map(Trajectory::samples).collect();
        let log = TokenLog::new(&rows, &logged);
        let mut updated = UpdateResult { began: Some(began), ..UpdateResult::default() };
        for epoch in 0..self.epochs {
            updated.sums = updated.sums.next_epoch();
            for minibatch in &minibatches {
                let compares_sampler = epoch == 0 && (knows_start || self.learner.updates() == first);
                if let Err(mismatch) = self.minibatch(minibatch, compares_sampler, &log, &mut updated)? {
                    return Ok(Err((minibatch.rows[mismatch.row], mismatch)));
                }
            }
        }
        if let Some(report) = &mut updated.critic {
            report.describe(&inputs);
        }
        updated.tokens = log.tokens(self.logged, &rows, &inputs);
        updated.ranks = self.learner.rank_spans()?;
        Ok(Ok(updated))
    }

    /// One optimizer step of the policy, of the critic, or of both. `compares_sampler` says whether the log-probabilities at
    /// the start of the step are known.
    fn minibatch(
        &mut self,
        minibatch: &Minibatch<'_, '_>,
        compares_sampler: bool,
        log: &TokenLog,
        updated: &mut UpdateResult,
    ) -> Result<Result<(), LogprobMismatch>, TrainerError> {
        let log_z = self.log_z(minibatch)?;
        let shared = self.critic.as_ref().filter(|critic| critic.network.is_none());
        let value_loss = shared.map(|critic| critic.config.term);
        let spread = self.learner.is_spread();
        let objective = PolicyObjective {
            algorithm: self.algorithm,
            rows: minibatch.rows,
            inputs: minibatch.inputs,
            log_z,
            critic: value_loss,
            compares_sampler,
            bitwise: self.bitwise.then_some(self.version),
            token_log: Some((log, minibatch.first)),
        };
        let (learner, rate) = (&mut *self.learner, self.learning_rate);
        let mut step = || learner.step(&minibatch.samples, &objective, rate);
        let LearnerStep { grad_norm, reports } = match &mut self.critic {
            Some(CriticUpdate { config, network: Some(network) }) => {
                let (config, version) = (*config, self.version);
                let pretraining = version.0 < config.pretrain_steps;
                let critic = || step_critic(config, network, minibatch);
                let (critic, policy) =
                    maybe_concurrently(config.placement == Placement::Separated && !spread, critic, || {
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

    /// The scoring passes that the algorithm needs before the first of `updates`.
    fn scores(&self, rows: &[BatchRow<'_>], updates: usize) -> Result<Scores, TrainerError> {
        let samples: Vec<&Sample> = rows.iter().map(|row| row.sample).collect();
        let critic = self.critic.as_ref();
        let shared = critic.is_some_and(|critic| critic.config.kind == CriticKind::Shared);
        // After the first optimizer step the current policy is neither the proximal policy nor the policy that sampled.
        let anchored = self.algorithm.proximal == Proximal::Recompute && self.algorithm.uses_proximal();
        let needs_own =
            ((anchored || self.bitwise) && updates > 1) || self.algorithm.needs_scores() || shared;
        let reference = self.reference;
        // Processes make their collective calls in the same order, so passes do not overlap.
        let spread = self.learner.is_spread();
        let separated = reference.is_some_and(|reference| reference.pool.is_some()) && !spread;
        // Models with their own placement score concurrently.
        let own = || needs_own.then(|| self.learner.score(&samples)).transpose();
        let network = critic.and_then(|critic| critic.network.as_deref());
        let values = || network.map(|network| network.score(&samples)).transpose();
        let theirs = || reference.map(|reference| self.learner.score_under(reference, &samples)).transpose();
        let (theirs, (values, own)) = maybe_concurrently(separated, theirs, || {
            let separated = critic.is_some_and(|critic| critic.config.placement == Placement::Separated);
            maybe_concurrently(separated && network.is_some() && !spread, values, own)
        });
        let (own, values, theirs) = (own?, values?, theirs?);
        let logprob = |prediction: &Prediction| prediction.logprob;
        let value = |prediction: &Prediction| prediction.value;
        let values = values.or_else(|| own.clone().filter(|_| shared));
        Ok(Scores {
            start_logprobs: own.as_ref().map(|own| each(own, logprob)),
            entropy: own.as_ref().map(|own| each(own, |prediction| prediction.entropy)),
            values: values.map(|values| each(&values, value)),
            reference_logprobs: theirs.map(|theirs| each(&theirs, logprob)),
        })
    }

    /// `log Z` of every row's group under the current policy, `[rows]`; empty unless the loss is trajectory balance.
    fn log_z(&self, minibatch: &Minibatch<'_, '_>) -> Result<Vec<f64>, TrainerError> {
        let PolicyLoss::TrajectoryBalance { beta } = self.algorithm.loss else { return Ok(Vec::new()) };
        let current = each(&self.learner.score(&minibatch.samples)?, |prediction| prediction.logprob);
        let balances: Vec<_> =
            minibatch.inputs.iter().zip(&current).map(|(inputs, current)| balance(inputs, current)).collect();
        let groups = minibatch.rows.chunk_by(|a, b| a.group == b.group);
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

/// One optimizer step of a separate critic.
fn step_critic(
    config: CriticConfig,
    network: &mut Learner,
    minibatch: &Minibatch<'_, '_>,
) -> Result<CriticReport, TrainerError> {
    let objective = ValueObjective { inputs: minibatch.inputs, term: config.term };
    let LearnerStep { grad_norm, reports } =
        network.step(&minibatch.samples, &objective, config.learning_rate)?;
    let mut sums = TokenSums::default();
    reports.iter().for_each(|report| sums.merge(report));
    Ok(CriticReport { loss: sums.mean(sums.value_loss), grad_norm, ..CriticReport::default() })
}

/// Runs `other` and `own`: concurrently if `separated`, otherwise in this order.
fn maybe_concurrently<A: Send, B>(
    separated: bool,
    other: impl FnOnce() -> A + Send,
    own: impl FnOnce() -> B,
) -> (A, B) {
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
    /// Adds mean value and explained variance of the values before the step.
    fn describe(&mut self, inputs: &[LossInputs]) {
        let mean = |of: &dyn Fn(f64, f64) -> f64| {
            let pairs = inputs.iter().flat_map(|inputs| inputs.returns.iter().zip(&inputs.values));
            crate::advantage::mean(pairs.map(|(target, value)| of(*target, *value)))
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

/// Index of the first row whose group is `group` or later.
fn first_of(rows: &[BatchRow<'_>], group: usize) -> usize {
    rows.partition_point(|row| row.group < group)
}

/// One field of every prediction in f64, `[rows][T]`.
fn each(predictions: &[Vec<Prediction>], of: impl Fn(&Prediction) -> f32) -> Vec<Vec<f64>> {
    predictions.iter().map(|row| row.iter().map(|prediction| f64::from(of(prediction))).collect()).collect()
}
