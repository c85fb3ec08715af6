//! The weights that are trained: forward and backward over micro-batches, clipping, the optimizer. With an adapter the
//! weights are frozen, and what is clipped and updated is the adapter.
//!
//! Invariant: a step is a function of the rows, the weights and the optimizer state, whatever the number of threads of
//! its [`Team`]. Ranks (threads with gradients of their own) add theirs in order of rank, so a step repeats bit for bit,
//! and world sizes differ by rounding only.

use std::sync::Arc;

use model::{
    Config, Decoder, Gradients, ParameterSpec, Parameters, Prediction, PredictionGradient, Recompute,
    ResidentParameters, Team,
};
use trajectory::Sample;

use crate::TrainerError;
use crate::lora::Adapter;
use crate::norm::{clip, norm};
use crate::optimizer::{Optimizer, OptimizerConfig, Stream};
use crate::packing::{Packed, pack};
use crate::plan::{MicroBatch, plan};

/// How the learner computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearnerConfig {
    /// Hyperparameters of the optimizer.
    pub optimizer: OptimizerConfig,
    /// Gradients are scaled down to this norm.
    pub max_grad_norm: f32,
    /// Tokens of a micro-batch.
    pub microbatch_tokens: usize,
    /// What the backward computes again instead of keeping it.
    pub recompute: Recompute,
    /// Ranks that share a step: threads with gradients of their own.
    pub world: usize,
}

/// One policy in training.
#[derive(Debug)]
pub struct Learner {
    config: LearnerConfig,
    model: Config,
    /// Nobody else holds them between two calls.
    parameters: Arc<Parameters>,
    optimizer: Optimizer,
    /// What is trained in place of the weights, if anything.
    adapter: Option<Adapter>,
    /// Of every rank, kept from step to step because zeroing is cheaper than allocating.
    gradients: Vec<Gradients>,
    team: Arc<Team>,
}

/// A model that is not trained: a reference policy or a teacher.
#[derive(Clone, Debug)]
pub struct Frozen {
    /// Its shape and its weights, in memory always or only while it scores.
    pub weights: ResidentParameters,
    /// The cores that it has to itself, beside the policy; `None` if it takes turns with the policy on the policy's.
    pub team: Option<Arc<Team>>,
}

/// A loss over the predictions of one row.
pub trait RowLoss: Sync {
    /// What it reports of the tokens of a rank; merged in order of rank.
    type Report: Default + Send;

    /// Derivatives of the loss by each of `predictions`, which belong to the trained tokens of row `index`.
    fn row(
        &self,
        index: usize,
        predictions: &[Prediction],
        report: &mut Self::Report,
    ) -> Vec<PredictionGradient>;
}

impl Learner {
    /// Trains all of `parameters`; `optimizer` is `None` for a fresh one.
    #[must_use]
    pub fn new(
        config: LearnerConfig,
        model: Config,
        parameters: Parameters,
        optimizer: Option<Optimizer>,
    ) -> Self {
        let specs = parameters.layout().specs();
        let optimizer = optimizer.unwrap_or_else(|| Optimizer::new(config.optimizer, specs));
        Self::with(config, model, parameters, None, optimizer)
    }

    /// Trains `adapter` alone; the weights are those it was made for, changed by it. `optimizer` is `None` for a fresh
    /// one.
    #[must_use]
    pub fn adapting(
        config: LearnerConfig,
        model: Config,
        mut parameters: Parameters,
        adapter: Adapter,
        optimizer: Option<Optimizer>,
    ) -> Self {
        let optimizer = optimizer.unwrap_or_else(|| Optimizer::new(config.optimizer, adapter.specs()));
        adapter.merge(parameters.values_mut(), &Team::alone());
        Self::with(config, model, parameters, Some(adapter), optimizer)
    }

    fn with(
        config: LearnerConfig,
        model: Config,
        parameters: Parameters,
        adapter: Option<Adapter>,
        optimizer: Optimizer,
    ) -> Self {
        let (parameters, team) = (Arc::new(parameters), Arc::new(Team::alone()));
        Self { config, model, parameters, optimizer, adapter, gradients: Vec::new(), team }
    }

    /// The same, computing on the cores of `team`.
    #[must_use]
    pub fn on(self, team: Arc<Team>) -> Self {
        Self { team, ..self }
    }

    /// The cores that it computes on.
    #[must_use]
    pub fn team(&self) -> &Arc<Team> {
        &self.team
    }

    /// The weights.
    #[must_use]
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The optimizer with its state.
    #[must_use]
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// What is trained in place of the weights, if anything.
    #[must_use]
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// The tensors that the optimizer moves, in the order of its states.
    #[must_use]
    pub fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.parameters.layout().specs(), Adapter::specs)
    }

    /// The model that is trained.
    #[must_use]
    pub fn model(&self) -> &Config {
        &self.model
    }

    /// Gives up the weights.
    #[must_use]
    pub fn into_parameters(self) -> Parameters {
        Arc::unwrap_or_clone(self.parameters)
    }

    /// Memory of weights, gradients and optimizer, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let gradients: usize = self.gradients.iter().map(|rank| size_of_val(rank.values())).sum();
        (gradients + size_of_val(self.parameters.values())) as u64 + self.optimizer.bytes()
    }

    /// Gives up the gradients, which begin at zero in every step. Returns their bytes.
    pub(crate) fn drop_gradients(&mut self) -> u64 {
        std::mem::take(&mut self.gradients).iter().map(|rank| size_of_val(rank.values()) as u64).sum()
    }

    /// What the optimizer remembers.
    pub(crate) fn optimizer_streams(&mut self) -> Vec<Stream<'_>> {
        self.optimizer.streams()
    }

    /// The weights, and the frozen ones under an adapter.
    pub(crate) fn weight_streams(&mut self) -> Vec<Stream<'_>> {
        let frozen = self.adapter.as_mut().map(Adapter::base_mut);
        let weights = Arc::get_mut(&mut self.parameters).map(Parameters::buffer_mut);
        weights.into_iter().chain(frozen).map(Stream::F32).collect()
    }

    /// Both.
    pub(crate) fn all_streams(&mut self) -> Vec<Stream<'_>> {
        let frozen = self.adapter.as_mut().map(Adapter::base_mut);
        let weights = Arc::get_mut(&mut self.parameters).map(Parameters::buffer_mut);
        let weights = weights.into_iter().chain(frozen).map(Stream::F32);
        self.optimizer.streams().into_iter().chain(weights).collect()
    }

    /// Predictions of the trained tokens of each row under the current weights.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary.
    pub fn score(&self, rows: &[&Sample]) -> Result<Vec<Vec<Prediction>>, TrainerError> {
        self.score_with(&self.decoder(), &self.team, rows)
    }

    /// The same under a model that is not trained, where that is placed.
    ///
    /// # Errors
    /// If a token lies beyond its vocabulary, or its weights cannot be read again.
    pub fn score_under(
        &self,
        frozen: &Frozen,
        rows: &[&Sample],
    ) -> Result<Vec<Vec<Prediction>>, TrainerError> {
        let parameters = frozen.weights.get()?;
        let decoder = Decoder::trainable(frozen.weights.config(), &parameters, self.config.recompute);
        self.score_with(&decoder, frozen.team.as_ref().unwrap_or(&self.team), rows)
    }

    fn score_with(
        &self,
        decoder: &Decoder,
        team: &Arc<Team>,
        rows: &[&Sample],
    ) -> Result<Vec<Vec<Prediction>>, TrainerError> {
        let work = |batch: &MicroBatch, team: &Team| -> Result<Vec<(usize, Vec<Prediction>)>, TrainerError> {
            let packed = pack(batch.rows.iter().map(|row| rows[*row]));
            let all = decoder.score(&packed.pack, &packed.positions, &packed.targets, team)?;
            let mut out = Vec::with_capacity(batch.rows.len());
            let mut from = 0;
            for (row, trained) in batch.rows.iter().zip(&packed.trained) {
                out.push((*row, all[from..from + trained].to_vec()));
                from += trained;
            }
            Ok(out)
        };
        let mut scored = vec![Vec::new(); rows.len()];
        let shares = self.shares(rows);
        let ranks = std::iter::repeat_n((), shares.len());
        let work = |(), mine: &[MicroBatch], team: &Team| {
            mine.iter().map(|batch| work(batch, team)).collect::<Result<Vec<_>, _>>()
        };
        for rank in on_ranks(&shares, team, ranks, work)? {
            rank.into_iter().flatten().for_each(|(row, predictions)| scored[row] = predictions);
        }
        Ok(scored)
    }

    /// One optimizer step on the sum of `loss` over `rows`. Returns the gradient norm before clipping, and what each
    /// rank reports.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary or the gradient is not finite; the weights are then as before.
    pub fn step<L: RowLoss>(
        &mut self,
        rows: &[&Sample],
        loss: &L,
        learning_rate: f32,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let mut gradients = std::mem::take(&mut self.gradients);
        let done = self.step_with(&mut gradients, rows, loss, learning_rate);
        self.gradients = gradients;
        done
    }

    fn step_with<L: RowLoss>(
        &mut self,
        gradients: &mut Vec<Gradients>,
        rows: &[&Sample],
        loss: &L,
        learning_rate: f32,
    ) -> Result<(f32, Vec<L::Report>), TrainerError> {
        let shares = self.shares(rows);
        gradients
            .resize_with(shares.len().max(gradients.len()), || Gradients::zeros(self.parameters.layout()));
        let work = |gradients: &mut Gradients, mine: &[MicroBatch], team: &Team| {
            self.accumulate(rows, mine, loss, gradients, team)
        };
        let reports = on_ranks(&shares, &self.team, gradients.iter_mut(), work)?;
        let Some((total, others)) = gradients[..shares.len()].split_first_mut() else {
            return Ok((0.0, reports));
        };
        others.iter().for_each(|other| total.add(other, &self.team));
        let adapted = self.adapter.as_ref().map(|adapter| adapter.gradients(total.values(), &self.team));
        let gradients = adapted.as_deref().unwrap_or(total.values());
        let norm = norm(gradients, &self.team);
        if !norm.is_finite() {
            return Err(TrainerError::GradientNotFinite {
                update: self.optimizer.updates(),
                rows: rows.len(),
            });
        }
        let update = (gradients, clip(norm, self.config.max_grad_norm));
        let Some(parameters) = Arc::get_mut(&mut self.parameters) else {
            unreachable!("the decoders of this step are gone, and nobody else is given the parameters")
        };
        let team = &self.team;
        if let Some(adapter) = &mut self.adapter {
            adapter.update(&mut self.optimizer, update, learning_rate, team);
            adapter.merge(parameters.values_mut(), team);
        } else {
            let layout = Arc::clone(parameters.layout());
            self.optimizer.update(layout.specs(), parameters.values_mut(), update, learning_rate, team);
        }
        Ok((norm, reports))
    }

    /// Adds up the gradients of the rows of `mine`, from zero.
    fn accumulate<L: RowLoss>(
        &self,
        rows: &[&Sample],
        mine: &[MicroBatch],
        loss: &L,
        gradients: &mut Gradients,
        team: &Team,
    ) -> Result<L::Report, TrainerError> {
        gradients.clear(team);
        let decoder = self.decoder();
        let mut report = L::Report::default();
        for batch in mine {
            let Packed { pack, positions, targets, trained } = pack(batch.rows.iter().map(|row| rows[*row]));
            let (predictions, trace) = decoder.forward(&pack, &positions, &targets, team)?;
            let mut slopes = Vec::with_capacity(predictions.len());
            for (row, trained) in batch.rows.iter().zip(&trained) {
                let from = slopes.len();
                slopes.extend(loss.row(*row, &predictions[from..from + trained], &mut report));
            }
            decoder.backward(&pack, trace, &targets, &slopes, gradients, team)?;
        }
        Ok(report)
    }

    /// The network with the current weights.
    fn decoder(&self) -> Decoder {
        Decoder::trainable(&self.model, &self.parameters, self.config.recompute)
    }

    /// The micro-batches of every rank that has some.
    fn shares(&self, rows: &[&Sample]) -> Vec<Vec<MicroBatch>> {
        let mut shares = plan(rows, &self.model, self.config.microbatch_tokens, self.config.world);
        shares.retain(|mine| !mine.is_empty());
        shares
    }
}

/// Runs `work` on every rank's share of the micro-batches, with what belongs to the rank; results in order of rank.
/// One rank has the whole team, several have a thread each.
fn on_ranks<S: Send, R: Send>(
    shares: &[Vec<MicroBatch>],
    team: &Team,
    states: impl Iterator<Item = S>,
    work: impl Fn(S, &[MicroBatch], &Team) -> Result<R, TrainerError> + Sync,
) -> Result<Vec<R>, TrainerError> {
    let ranks = shares.iter().zip(states);
    if shares.len() == 1 {
        return ranks.map(|(mine, state)| work(state, mine, team)).collect();
    }
    let work = &work;
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            ranks.map(|(mine, state)| scope.spawn(move || work(state, mine, &Team::alone()))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
