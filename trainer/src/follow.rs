//! A follower: a process that is one rank of a trainer and executes the commands of the leader.
//!
//! Invariant: models, optimizer states and batches come from the leader. The follower makes the same collective calls as
//! the leader. Its computation depends on the commands and its rank alone. It waits for the next command as long as the
//! leader lives.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use model::{FrozenParameters, Layout, Parameters, ResidentParameters, ThreadPool, Unit};
use trajectory::{Group, Sample};
use weights::direct::round::PushPlan;

use crate::TrainerError;
use crate::batch::Batch;
use crate::frozen::{Frozen, FrozenWeights};
use crate::lead::{
    NetworkHeader, PairComparison, RankCommand, UpdateCommand, decode, receive_units, receive_values,
    received,
};
use crate::learner::Learner;
use crate::lora::Adapter;
use crate::optimizer::{Optimizer, TensorState};
use crate::parallel::RankGroups;
use crate::rank::{MemberSeed, RankWeights};
use crate::state_weights::StateWeights;
use crate::supervised::{DemonstrationLoss, PairLoss};
use crate::update::{CriticUpdate, PolicyUpdate};
use collective::HostCollective;

/// Why a follower has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Followed {
    /// The leader needs it no more.
    Stopped,
    /// The leader makes a new group of ranks, which it may join.
    Regroups,
}

/// Executes the commands of the leader, rank 0 of `collective`, until it sends that this ends. Computes on the threads of `pool`.
///
/// # Errors
/// If the connection to another rank is closed, or a command fails on this rank. Dropping the collective then ends the other
/// ranks.
pub fn follow(collective: Arc<dyn HostCollective>, pool: Arc<ThreadPool>) -> Result<Followed, TrainerError> {
    let mut follower = Follower { collective, pool, networks: HashMap::new(), references: HashMap::new() };
    loop {
        if let Some(followed) = follower.turn()? {
            return Ok(followed);
        }
    }
}

struct Follower {
    collective: Arc<dyn HostCollective>,
    pool: Arc<ThreadPool>,
    networks: HashMap<u32, Learner>,
    /// The reference models of the networks, by network number.
    references: HashMap<u32, Frozen>,
}

impl Follower {
    /// Executes one command; `Some` after the last one.
    fn turn(&mut self) -> Result<Option<Followed>, TrainerError> {
        let bytes = self.collective.broadcast_bytes(0, Vec::new())?;
        let command: RankCommand<'static> = decode(&bytes)?;
        drop(bytes);
        let done = match command {
            RankCommand::Stop => return Ok(Some(Followed::Stopped)),
            RankCommand::Regroup => return Ok(Some(Followed::Regroups)),
            RankCommand::Network(header) => self.receive(*header),
            RankCommand::Forget { network } => {
                self.networks.remove(&network);
                self.references.remove(&network);
                Ok(())
            }
            RankCommand::Reference { network, model } => self.receive_reference(network, model.as_ref()),
            RankCommand::Update(command) => self.update(*command),
            RankCommand::Imitate { network, rows, learning_rate } => {
                let rows: Vec<&Sample> = rows.iter().map(|row| &**row).collect();
                let learner = self.learner(network)?;
                learner.step(&rows, &DemonstrationLoss::over(&rows), learning_rate).map(drop)
            }
            RankCommand::Compare { network, comparison, rows, learning_rate } => {
                self.compare(network, comparison, &rows, learning_rate)
            }
            RankCommand::Send { network, plan } => {
                let plan = PushPlan::from_bytes(&plan)?;
                // The leader judges the errors of the samplers.
                self.learner(network)?.send_own(&plan, None).map(drop)
            }
            RankCommand::Write { network, version, place } => {
                // The leader decides what follows if a rank cannot.
                self.learner(network)?.write_own(version, &place).map(drop)
            }
            RankCommand::GatherWeights { network } => self.learner(network)?.give_weights(),
            RankCommand::GatherOptimizer { network } => self.learner(network)?.give_optimizer(),
        };
        match done {
            // All ranks return this error. The leader decides what follows.
            Err(TrainerError::GradientNotFinite { .. }) | Ok(()) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn receive(&mut self, header: NetworkHeader) -> Result<(), TrainerError> {
        let NetworkHeader { network, config, model, is_quantized, adapter, updates } = header;
        let model = received(&model)?;
        let layout = Arc::new(Layout::new(&model));
        let collective = &*self.collective;
        let skeleton = adapter.map(|config| Adapter::skeleton(config, layout.specs()));
        let (optimizer_config, whole) = (config.optimizer, model.clone());
        let groups = RankGroups::new(Arc::clone(&self.collective), config.parallel)?;
        let frozen = match is_quantized {
            true => {
                let next = || Ok::<_, TrainerError>(collective.broadcast_bytes(0, Vec::new())?);
                Some(FrozenParameters::received(&model, next)?)
            }
            false => None,
        };
        let mut member = MemberSeed::new(config, model, &layout, skeleton, groups)?;
        let weights = if let Some(base) = frozen {
            RankWeights::Whole(StateWeights::Quantized(Arc::new(base)))
        } else {
            let units: Vec<Unit> = layout.units().collect();
            let mut own = Vec::new();
            receive_units(collective, &layout, |unit, values| {
                own.extend(member.own_of(units[unit], layout.unit(units[unit]).start, values));
            })?;
            if member.owns_weights() {
                RankWeights::Own(own)
            } else {
                RankWeights::Whole(Parameters::from_values(Arc::clone(member.layout()), own)?.into())
            }
        };
        if let Some(adapter) = member.adapter_mut() {
            let (values, base) = adapter.lengths();
            let base = if is_quantized { 0 } else { base };
            let values = receive_values(collective, values)?;
            adapter.fill(&values, receive_values(collective, base)?);
        }
        let optimizer = match updates {
            None => None,
            Some(updates) => {
                let mut own: Vec<TensorState> = Vec::new();
                for tensor in 0..member.tensors() {
                    let state: TensorState = decode(&collective.broadcast_bytes(0, Vec::new())?)?;
                    own.extend(member.states_of(tensor, &state)?);
                }
                Some(Optimizer::from_states(optimizer_config, updates, own))
            }
        };
        let rank = member.rank(weights, optimizer)?;
        let learner =
            Learner::spread(rank, whole, Arc::clone(&self.collective), None).on(Arc::clone(&self.pool));
        self.networks.insert(network, learner);
        Ok(())
    }

    fn receive_reference(
        &mut self,
        network: u32,
        model: Option<&serde_json::Value>,
    ) -> Result<(), TrainerError> {
        let Some(model) = model else {
            let collective = Arc::clone(&self.collective);
            let policy = self.learner(network)?.adapted().ok_or(TrainerError::QuantizedBase)?;
            let values = receive_values(&*collective, policy.factors().values().len())?;
            let weights = FrozenWeights::Adapted(policy.with_values(&values)?);
            self.references.insert(network, Frozen { weights, pool: None });
            return Ok(());
        };
        let model = received(model)?;
        let parameters = receive_parameters(&*self.collective, &Arc::new(Layout::new(&model)))?;
        let weights = ResidentParameters::of(model, Arc::new(parameters));
        self.references.insert(network, Frozen { weights: weights.into(), pool: None });
        Ok(())
    }

    fn update(&mut self, command: UpdateCommand<'_>) -> Result<(), TrainerError> {
        let groups: Vec<Arc<Group>> =
            command.groups.into_iter().map(|group| Arc::new(group.into_owned())).collect();
        let batch = Batch::new(&groups, &command.algorithm, command.split, &command.demonstrations);
        let network = command.critic.and_then(|(_, network)| network);
        let mut critic = network.map(|network| self.taken(network)).transpose()?;
        let mut learner = self.taken(command.network)?;
        let update = PolicyUpdate {
            algorithm: &command.algorithm,
            epochs: command.epochs,
            version: command.version,
            bitwise: command.bitwise,
            learning_rate: command.learning_rate,
            learner: &mut learner,
            critic: command.critic.map(|(config, _)| CriticUpdate { config, network: critic.as_mut() }),
            reference: self.references.get(&command.network),
            logged: &[],
        };
        // The leader reads the reports of the rows.
        let done = update.run(&batch).map(drop);
        self.networks.insert(command.network, learner);
        self.networks.extend(network.zip(critic));
        done
    }

    fn compare(
        &mut self,
        network: u32,
        comparison: PairComparison,
        rows: &[Cow<'_, Sample>],
        learning_rate: Option<f32>,
    ) -> Result<(), TrainerError> {
        let loss = match comparison {
            PairComparison::Reward { margin } => PairLoss::Reward { margin },
            PairComparison::Preference(preference) => {
                let reference = self.references.get(&network).cloned().ok_or_else(|| unknown(network))?;
                PairLoss::Preference { preference, reference: Box::new(reference) }
            }
        };
        let rows: Vec<&Sample> = rows.iter().map(|row| &**row).collect();
        let learner = self.learner(network)?;
        match learning_rate {
            Some(rate) => loss.step(learner, &rows, rate).map(drop),
            None => loss.measure(learner, &rows).map(drop),
        }
    }

    fn learner(&mut self, network: u32) -> Result<&mut Learner, TrainerError> {
        self.networks.get_mut(&network).ok_or_else(|| unknown(network))
    }

    fn taken(&mut self, network: u32) -> Result<Learner, TrainerError> {
        self.networks.remove(&network).ok_or_else(|| unknown(network))
    }
}

fn receive_parameters(
    collective: &dyn HostCollective,
    layout: &Arc<Layout>,
) -> Result<Parameters, TrainerError> {
    let mut values = Vec::with_capacity(layout.len());
    receive_units(collective, layout, |_, unit| values.extend(unit))?;
    Ok(Parameters::from_values(Arc::clone(layout), values)?)
}

fn unknown(network: u32) -> TrainerError {
    TrainerError::Message { reason: format!("the leader speaks of network {network}, which it has not sent") }
}
