//! One rank of a learner: its weights, its share of the optimizer, its part of every step.
//!
//! With several ranks (ZeRO, Rajbhandari et al. 2019, arXiv 1910.02054) each has the optimizer's state of its own shards
//! only and updates them alone. Stage 1: gradients are added up over the micro-batches of a rank, and reduced while the
//! last one runs backward. Stage 2: they are reduced with every micro-batch, and only the own shards are kept. Stage 3:
//! weights too are shared, and gathered layer by layer when they are needed.
//!
//! Invariant: all ranks make the same calls with the same rows, plan and rate. What they have in common (weights after an
//! update, the norm of the gradient, whether it is finite) has the same bits on all of them.

mod memory;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::{Config, Decoder, GradientSink, Gradients, Layout, ParameterSpec, Parameters, Prediction, Team};
use trajectory::Sample;

use crate::TrainerError;
use crate::collective::Collective;
use crate::exchange::{Line, Pool, exchange};
use crate::lead::{decode, encode};
use crate::learner::{LearnerConfig, RowLoss};
use crate::lora::Adapter;
use crate::norm::{clip, norm, sum_of_squares};
use crate::optimizer::{Optimizer, Owned, TensorState};
use crate::packing::pack;
use crate::pass::Pass;
use crate::plan::MicroBatch;
use crate::shards::{Fragment, Shards};

/// What a rank is made of, or all ranks of a learner.
#[derive(Debug)]
pub(crate) struct Seed {
    pub(crate) config: LearnerConfig,
    pub(crate) model: Config,
    pub(crate) parameters: Arc<Parameters>,
    /// What is trained in place of the weights, merged into them.
    pub(crate) adapter: Option<Adapter>,
    /// Of whole tensors.
    pub(crate) optimizer: Option<Optimizer>,
}

/// What a rank among others needs to know before it has any weights.
#[derive(Debug)]
pub(crate) struct Membership {
    config: LearnerConfig,
    model: Config,
    layout: Arc<Layout>,
    adapter: Option<Adapter>,
    collective: Arc<dyn Collective>,
    rank: usize,
    trained: Shards,
    weights: Shards,
}

/// One rank.
#[derive(Debug)]
pub(crate) struct Rank {
    config: LearnerConfig,
    model: Config,
    layout: Arc<Layout>,
    weights: Weights,
    optimizer: Optimizer,
    adapter: Option<Adapter>,
    /// Its place among others, if there are any.
    place: Option<Place>,
    /// Of a rank without others: kept from step to step because zeroing is cheaper than allocating.
    gradients: Option<Gradients>,
    /// The gradients that this rank owns.
    own: Vec<f32>,
    pool: Pool,
}

/// The weights that a rank has.
#[derive(Debug)]
pub(crate) enum Weights {
    /// All of them. Nobody else holds them between two calls.
    Whole(Arc<Parameters>),
    /// The own shards, one after the other.
    Own(Vec<f32>),
}

#[derive(Debug)]
struct Place {
    rank: usize,
    /// `None` once something went wrong, which the others notice by that.
    collective: Mutex<Option<Arc<dyn Collective>>>,
    /// How what is trained is shared.
    trained: Shards,
    /// How the weights are shared.
    weights: Shards,
}

/// What a step or a score computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task<'a> {
    pub(crate) rows: &'a [&'a Sample],
    /// The micro-batches of every rank.
    pub(crate) plan: &'a [Vec<MicroBatch>],
}

/// Predictions of some rows, each with the index of its row.
pub(crate) type Scored = Vec<(usize, Vec<Prediction>)>;

impl Seed {
    /// A learner of one rank.
    pub(crate) fn alone(self) -> Rank {
        let specs = self.adapter.as_ref().map_or(self.parameters.layout().specs(), Adapter::specs);
        let optimizer = self.optimizer.unwrap_or_else(|| Optimizer::new(self.config.optimizer, specs));
        Rank {
            layout: Arc::clone(self.parameters.layout()),
            weights: Weights::Whole(self.parameters),
            optimizer,
            adapter: self.adapter,
            place: None,
            gradients: None,
            own: Vec::new(),
            pool: Pool::default(),
            config: self.config,
            model: self.model,
        }
    }

    /// One of the ranks of `collective`.
    pub(crate) fn member(&self, collective: Arc<dyn Collective>) -> Rank {
        let (model, adapter, layout) = (self.model.clone(), self.adapter.clone(), self.parameters.layout());
        let member = Membership::new(self.config, model, layout, adapter, collective);
        let weights = if member.owns_weights() {
            Weights::Own(member.weights.pack(member.rank, self.parameters.values()))
        } else {
            Weights::Whole(Arc::new(Parameters::clone(&self.parameters)))
        };
        let optimizer = self.optimizer.as_ref().map(|optimizer| optimizer.cut(member.fragments()));
        member.rank(weights, optimizer)
    }
}

impl Membership {
    /// The place of this rank of `collective` in training a model, or its `adapter`.
    pub(crate) fn new(
        config: LearnerConfig,
        model: Config,
        layout: &Arc<Layout>,
        adapter: Option<Adapter>,
        collective: Arc<dyn Collective>,
    ) -> Self {
        let (rank, world) = (collective.rank(), collective.world());
        let weights = Shards::of_model(layout, world, &config.optimizer);
        let trained = match &adapter {
            Some(adapter) => Shards::of_adapter(layout, adapter, world, &config.optimizer),
            None => weights.clone(),
        };
        Self { config, model, layout: Arc::clone(layout), adapter, collective, rank, trained, weights }
    }

    /// Whether this rank has its own shards of the weights only. With an adapter, which is small, all weights are read
    /// to merge it, and every rank has them.
    pub(crate) fn owns_weights(&self) -> bool {
        self.config.shares_weights() && self.adapter.is_none()
    }

    /// What it owns of the values of a unit.
    pub(crate) fn own_of<'a>(&self, unit: usize, values: &'a [f32]) -> &'a [f32] {
        &values[self.weights.cuts(unit)[self.rank].clone()]
    }

    /// The tensors that are trained.
    pub(crate) fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.layout.specs(), Adapter::specs)
    }

    /// What it owns of them.
    pub(crate) fn fragments(&self) -> &[Fragment] {
        self.trained.fragments(self.rank)
    }

    /// The adapter, to fill in what is in it.
    pub(crate) fn adapter_mut(&mut self) -> Option<&mut Adapter> {
        self.adapter.as_mut()
    }

    /// The rank with its weights and the optimizer of its fragments; `None` for a fresh one.
    pub(crate) fn rank(self, weights: Weights, optimizer: Option<Optimizer>) -> Rank {
        let fresh = || Optimizer::of_fragments(self.config.optimizer, self.trained(), self.fragments());
        let optimizer = optimizer.unwrap_or_else(fresh);
        let collective = Mutex::new(Some(self.collective));
        let place = Place { rank: self.rank, collective, trained: self.trained, weights: self.weights };
        Rank {
            config: self.config,
            model: self.model,
            layout: self.layout,
            weights,
            optimizer,
            adapter: self.adapter,
            place: Some(place),
            gradients: None,
            own: Vec::new(),
            pool: Pool::default(),
        }
    }
}

impl Rank {
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// All weights, if this rank has them.
    pub(crate) fn whole(&self) -> Option<&Arc<Parameters>> {
        match &self.weights {
            Weights::Whole(parameters) => Some(parameters),
            Weights::Own(_) => None,
        }
    }

    pub(crate) fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// The tensors that are trained.
    pub(crate) fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.layout.specs(), Adapter::specs)
    }

    /// The optimizer: of whole tensors, or of [`Self::fragments`].
    pub(crate) fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// What the optimizer has states of; `None` for all tensors.
    pub(crate) fn fragments(&self) -> Option<&[Fragment]> {
        self.place.as_ref().map(|place| place.trained.fragments(place.rank))
    }

    /// The weights that this rank owns: where they lie in the flat parameters, and what they are.
    pub(crate) fn owned(&self) -> Vec<(Range<usize>, &[f32])> {
        match (&self.weights, &self.place) {
            (Weights::Whole(parameters), None) => vec![(0..self.layout.len(), parameters.values())],
            (Weights::Whole(parameters), Some(place)) => {
                let owned = (0..place.weights.units()).map(|unit| place.weights.owned(place.rank, unit));
                owned.map(|range| (range.clone(), &parameters.values()[range])).collect()
            }
            (Weights::Own(values), Some(place)) => {
                let of = |unit| {
                    let Place { rank, weights, .. } = place;
                    (weights.owned(*rank, unit), &values[weights.packed(*rank, unit)])
                };
                (0..place.weights.units()).map(of).collect()
            }
            (Weights::Own(_), None) => unreachable!("a rank that is alone has all weights"),
        }
    }

    pub(crate) fn config(&self) -> &LearnerConfig {
        &self.config
    }

    pub(crate) fn model(&self) -> &Config {
        &self.model
    }

    /// Collects the weights of all ranks into `all` of rank 0; the others give `None`.
    ///
    /// # Errors
    /// If another rank does not take part.
    pub(crate) fn gather_weights(&self, mut all: Option<&mut [f32]>) -> Result<(), TrainerError> {
        let (Some(Place { rank, weights, .. }), Weights::Own(own)) = (&self.place, &self.weights) else {
            unreachable!("weights that every rank has are not collected")
        };
        let collective = self.collective()?;
        for unit in 0..weights.units() {
            let all = all.as_deref_mut().map(|all| &mut all[weights.place(unit)]);
            collective.gather(0, &own[weights.packed(*rank, unit)], weights.cuts(unit), all)?;
        }
        Ok(())
    }

    /// The optimizer of whole tensors, collected from all ranks.
    ///
    /// # Errors
    /// If another rank does not take part.
    pub(crate) fn gather_optimizer(&self) -> Result<Optimizer, TrainerError> {
        let Some(Place { trained, .. }) = &self.place else {
            unreachable!("an optimizer that one rank has is not collected")
        };
        let all = self.collective()?.all_gather_bytes(encode(&self.optimizer.states())?)?;
        let states: Vec<Vec<TensorState>> =
            all.iter().map(|bytes| decode(bytes)).collect::<Result<_, _>>()?;
        let ranks = states.iter().enumerate().map(|(rank, states)| (trained.fragments(rank), &states[..]));
        Ok(Optimizer::join(self.config.optimizer, self.optimizer.updates(), self.trained(), ranks))
    }

    /// What it does with others.
    ///
    /// # Errors
    /// If something went wrong before, or there are no others.
    pub(crate) fn collective(&self) -> Result<Arc<dyn Collective>, TrainerError> {
        let place = self.place.as_ref();
        let collective = place.and_then(|place| lock(&place.collective).clone());
        collective.ok_or(TrainerError::RanksEnded)
    }

    /// Lets the other ranks know that this one does not go on.
    pub(crate) fn leave(&self) {
        if let Some(place) = &self.place {
            lock(&place.collective).take();
        }
    }

    /// Predictions of this rank's rows under the current weights.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary, or another rank does not take part.
    pub(crate) fn score(&self, task: Task<'_>, team: &Team) -> Result<Scored, TrainerError> {
        match (&self.weights, &self.place) {
            (Weights::Own(values), Some(place)) => {
                let collective = self.collective()?;
                let line = Line {
                    collective: &*collective,
                    trained: &place.trained,
                    weights: Some((&place.weights, values)),
                    pool: &self.pool,
                };
                exchange(&line, &mut [], |ends| {
                    let source = ends.gathering(&self.layout, &self.pool);
                    let mut pass = Pass::gathered(&self.model, &self.layout, source, self.config.recompute)?;
                    score_with(&mut pass, place.rank, task, team)
                })
            }
            (Weights::Whole(parameters), _) => self.score_under(
                Decoder::trainable(&self.model, parameters, self.config.recompute),
                task,
                team,
            ),
            (Weights::Own(_), None) => unreachable!("a rank that is alone has all weights"),
        }
    }

    /// The same under another network, whose weights are all there.
    ///
    /// # Errors
    /// If a token lies beyond its vocabulary.
    pub(crate) fn score_under(
        &self,
        decoder: Decoder,
        task: Task<'_>,
        team: &Team,
    ) -> Result<Scored, TrainerError> {
        let rank = self.place.as_ref().map_or(0, |place| place.rank);
        score_with(&mut Pass::Whole(decoder), rank, task, team)
    }

    /// This rank's part of an optimizer step on the sum of `loss` over all rows. Returns the norm of the gradient, and
    /// what this rank's rows report.
    ///
    /// # Errors
    /// If a token lies beyond the vocabulary, another rank does not take part, or the gradient is not finite; the weights
    /// are then as before.
    pub(crate) fn step<L: RowLoss>(
        &mut self,
        task: Task<'_>,
        loss: &L,
        learning_rate: f32,
        team: &Team,
    ) -> Result<(f32, L::Report), TrainerError> {
        if self.place.is_none() {
            let mut gradients = self.gradients.take().unwrap_or_else(|| Gradients::zeros(&self.layout));
            let done = self.step_alone(&mut gradients, task, loss, learning_rate, team);
            self.gradients = Some(gradients);
            return done;
        }
        let mut own = std::mem::take(&mut self.own);
        let done = self.reduced(&mut own, task, loss, team).and_then(|report| {
            let norm = self.update_own(&own, task.rows.len(), learning_rate, team)?;
            Ok((norm, report))
        });
        self.own = own;
        done
    }

    fn step_alone<L: RowLoss>(
        &mut self,
        gradients: &mut Gradients,
        task: Task<'_>,
        loss: &L,
        learning_rate: f32,
        team: &Team,
    ) -> Result<(f32, L::Report), TrainerError> {
        gradients.clear(team);
        let Weights::Whole(parameters) = &mut self.weights else {
            unreachable!("a rank that is alone has all weights")
        };
        let mut pass = Pass::whole(&self.model, parameters, self.config.recompute);
        let mut report = L::Report::default();
        for batch in task.plan.iter().flatten() {
            reverse(&mut pass, (batch, task.rows), (loss, &mut report), gradients, team)?;
        }
        drop(pass);
        let adapted = self.adapter.as_ref().map(|adapter| adapter.gradients(gradients.values(), team));
        let gradients = adapted.as_deref().unwrap_or(gradients.values());
        let norm = norm(gradients, team);
        finite(norm, &self.optimizer, task.rows.len())?;
        let update = (gradients, clip(norm, self.config.max_grad_norm));
        let parameters = unshared(parameters);
        if let Some(adapter) = &mut self.adapter {
            adapter.update(&mut self.optimizer, update, learning_rate, team);
            adapter.merge(parameters.values_mut(), team);
        } else {
            let layout = &self.layout;
            self.optimizer.update(layout.specs(), parameters.values_mut(), update, learning_rate, team);
        }
        Ok((norm, report))
    }

    /// Makes `own` the sums over all ranks of the gradients that this rank owns.
    fn reduced<L: RowLoss>(
        &self,
        own: &mut Vec<f32>,
        task: Task<'_>,
        loss: &L,
        team: &Team,
    ) -> Result<L::Report, TrainerError> {
        let (Some(place), collective) = (&self.place, self.collective()?) else {
            unreachable!("a rank that is alone reduces nothing")
        };
        let Place { rank, trained, weights, .. } = place;
        own.resize(trained.len(*rank), 0.0);
        let shared = match &self.weights {
            Weights::Whole(_) => None,
            Weights::Own(values) => Some((weights, &values[..])),
        };
        let line = Line { collective: &*collective, trained, weights: shared, pool: &self.pool };
        let (mine, accumulates) = (&task.plan[*rank], !self.config.shares_gradients());
        // Where gradients stay until the last, every rank hands them on once, however many micro-batches it has.
        let most = task.plan.iter().map(Vec::len).max().unwrap_or(0);
        let rounds = if accumulates { mine.len().max(1) } else { most };
        exchange(&line, own, |ends| {
            let adapter = self.adapter.as_ref().map(|adapter| (adapter, team));
            let mut sink = ends.reducing(&self.layout, &self.pool, adapter);
            let mut pass = match &self.weights {
                Weights::Whole(parameters) => Pass::whole(&self.model, parameters, self.config.recompute),
                Weights::Own(_) => {
                    let source = ends.gathering(&self.layout, &self.pool);
                    Pass::gathered(&self.model, &self.layout, source, self.config.recompute)?
                }
            };
            let mut report = L::Report::default();
            for round in 0..rounds {
                sink.leave = !accumulates || round + 1 == rounds;
                sink.first = accumulates || round == 0;
                if let Some(batch) = mine.get(round) {
                    reverse(&mut pass, (batch, task.rows), (loss, &mut report), &mut sink, team)?;
                } else {
                    pass.skip_forward()?;
                    pass.skip_backward(&mut sink)?;
                }
            }
            Ok(report)
        })
    }

    /// Updates what this rank owns for its gradients `own`, and gets what the others own. Returns the norm of the whole
    /// gradient.
    fn update_own(
        &mut self,
        own: &[f32],
        rows: usize,
        learning_rate: f32,
        team: &Team,
    ) -> Result<f32, TrainerError> {
        let collective = self.collective()?;
        let Some(Place { rank, trained, .. }) = &self.place else {
            unreachable!("a rank that is alone owns everything")
        };
        let squares = collective.all_gather_bytes(sum_of_squares(own, team).to_le_bytes().to_vec())?;
        let number = |bytes: &Vec<u8>| <[u8; 8]>::try_from(&bytes[..]).map_or(f64::NAN, f64::from_le_bytes);
        let norm = squares.iter().map(number).sum::<f64>().sqrt() as f32;
        finite(norm, &self.optimizer, rows)?;
        let scale = clip(norm, self.config.max_grad_norm);
        let fragments = trained.fragments(*rank);
        if let Some(adapter) = &mut self.adapter {
            let (specs, values) = adapter.parts_mut();
            let owned = owned(specs, fragments, values, false, own);
            self.optimizer.update_owned(specs, owned, scale, learning_rate, team);
            gather(&*collective, trained, values)?;
            let Weights::Whole(parameters) = &mut self.weights else {
                unreachable!("with an adapter every rank has all weights")
            };
            adapter.merge(unshared(parameters).values_mut(), team);
            return Ok(norm);
        }
        let specs = self.layout.specs();
        match &mut self.weights {
            Weights::Whole(parameters) => {
                let values = unshared(parameters).values_mut();
                let owned = owned(specs, fragments, values, false, own);
                self.optimizer.update_owned(specs, owned, scale, learning_rate, team);
                gather(&*collective, trained, values)?;
            }
            Weights::Own(values) => {
                let owned = owned(specs, fragments, values, true, own);
                self.optimizer.update_owned(specs, owned, scale, learning_rate, team);
            }
        }
        Ok(norm)
    }
}

/// Predictions of the rows of a rank, which takes part in the passes of the others.
fn score_with(pass: &mut Pass<'_>, rank: usize, task: Task<'_>, team: &Team) -> Result<Scored, TrainerError> {
    let most = task.plan.iter().map(Vec::len).max().unwrap_or(0);
    let mut scored = Scored::new();
    for round in 0..most {
        let Some(batch) = task.plan.get(rank).and_then(|mine| mine.get(round)) else {
            pass.skip_forward()?;
            continue;
        };
        let packed = pack(batch.rows.iter().map(|row| task.rows[*row]));
        let all = pass.score(&packed, team)?;
        let mut from = 0;
        for (row, trained) in batch.rows.iter().zip(&packed.trained) {
            scored.push((*row, all[from..from + trained].to_vec()));
            from += trained;
        }
    }
    Ok(scored)
}

/// Adds the gradients of a micro-batch of `rows` to `sink`, and what its loss says to `report`.
fn reverse<L: RowLoss>(
    pass: &mut Pass<'_>,
    (batch, rows): (&MicroBatch, &[&Sample]),
    (loss, report): (&L, &mut L::Report),
    sink: &mut dyn GradientSink,
    team: &Team,
) -> Result<(), TrainerError> {
    let packed = pack(batch.rows.iter().map(|row| rows[*row]));
    let (predictions, trace) = pass.forward(&packed, team)?;
    let mut slopes = Vec::with_capacity(predictions.len());
    for (row, trained) in batch.rows.iter().zip(&packed.trained) {
        let from = slopes.len();
        slopes.extend(loss.row(*row, &predictions[from..from + trained], report));
    }
    pass.backward(&packed, trace, &slopes, sink, team)
}

/// What an update changes: of `values` those of `fragments`, which are all that is there if it is `packed`. `gradients`
/// are packed.
fn owned<'a>(
    specs: &[ParameterSpec],
    fragments: &[Fragment],
    mut values: &'a mut [f32],
    packed: bool,
    mut gradients: &'a [f32],
) -> Vec<Owned<'a>> {
    let mut passed = 0;
    let of = |Fragment { tensor, within }: &Fragment| {
        let start = if packed { passed } else { specs[*tensor].offset + within.start };
        let (_, rest) = std::mem::take(&mut values).split_at_mut(start - passed);
        let (own, rest) = rest.split_at_mut(within.len());
        let (own_gradients, others) = gradients.split_at(within.len());
        (values, gradients, passed) = (rest, others, start + within.len());
        Owned { tensor: *tensor, offset: within.start, values: own, gradients: own_gradients }
    };
    fragments.iter().map(of).collect()
}

/// Gets into `values` what the other ranks own of them.
fn gather(collective: &dyn Collective, shards: &Shards, values: &mut [f32]) -> Result<(), TrainerError> {
    for unit in 0..shards.units() {
        let own = values[shards.owned(collective.rank(), unit)].to_vec();
        collective.all_gather(&own, shards.cuts(unit), &mut values[shards.place(unit)])?;
    }
    Ok(())
}

fn finite(norm: f32, optimizer: &Optimizer, rows: usize) -> Result<(), TrainerError> {
    if norm.is_finite() {
        return Ok(());
    }
    Err(TrainerError::GradientNotFinite { update: optimizer.updates(), rows })
}

/// The parameters, to change.
fn unshared(parameters: &mut Arc<Parameters>) -> &mut Parameters {
    let Some(parameters) = Arc::get_mut(parameters) else {
        unreachable!("the decoders of this step are gone, and nobody else is given the parameters")
    };
    parameters
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
