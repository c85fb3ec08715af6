//! The ranks that compute the passes of a rank with it, over calls apart from those of gradients and weights: context ranks share
//! the tokens, tensor ranks the weights, stages divide the layers. They all have the same rows and make the same passes. Ranks that
//! divide experts have rows of their own, and make as many passes.
//!
//! Invariant: a rank that fails closes its calls with the other ranks of its passes at once, because its peers wait in the pass.

use std::sync::{Arc, Mutex, PoisonError};

use collective::{Collective, HostCollective, Position};
use device::DeviceGroup;
use model::on_device::{DeviceContextRanks, DeviceExpertRanks, DevicePassRanks, DeviceRanks};
use model::{Config, ModelShard, PassRanks, RoutedTokens, TensorRanks};

use super::links::StageCalls;
use crate::TrainerError;
use crate::lead::{decode, encode};
use crate::parallel::ParallelConfig;

/// The collectives of the passes of one rank.
#[derive(Debug)]
pub(super) struct PassCollectives {
    config: ParallelConfig,
    /// Tokens of the vocabulary of the whole model.
    vocabulary: usize,
    /// The configuration with all layers, if this rank has those of a stage.
    all_layers: Option<Arc<Config>>,
    /// `None` for a rank alone, and after it has left.
    ranks: Mutex<Option<PassCalls>>,
}

/// The calls of ranks that compute passes together.
#[derive(Clone, Debug, Default)]
struct PassCalls {
    /// Of context ranks, in passes of the network.
    context: Option<Arc<dyn HostCollective>>,
    /// Of context ranks, in passes of frozen networks, which may run at the same time.
    frozen: Option<Arc<dyn HostCollective>>,
    /// Of tensor ranks. Every one of them has all of a frozen network.
    tensor: Option<Arc<dyn HostCollective>>,
    /// The same, and those of context ranks and of ranks that divide experts, from device to device, if they have such a way.
    tensor_devices: Option<Arc<DeviceGroup>>,
    context_devices: Option<Arc<DeviceGroup>>,
    expert_devices: Option<Arc<DeviceGroup>>,
    /// Of those of them with the same key-value heads.
    same_keys: Option<Arc<dyn HostCollective>>,
    /// Of ranks that divide the experts of the network. Every one of them has all of a frozen network.
    expert: Option<Arc<dyn HostCollective>>,
    /// Of the stages of the network. Every one of them has all of a frozen network.
    stages: Option<StageCalls>,
}

/// Closes the calls of a rank, unless its passes end well.
struct Leaving<'a>(Option<&'a PassCollectives>);

impl PassCollectives {
    /// A rank alone.
    pub(super) fn alone(config: ParallelConfig, model: &Config) -> Self {
        Self { config, vocabulary: model.vocab_size, all_layers: None, ranks: Mutex::new(None) }
    }

    /// The collectives of the passes of this rank of `all` over `model`. All ranks make the call.
    ///
    /// # Errors
    /// If another rank does not.
    pub(super) fn of(
        config: ParallelConfig,
        model: &Config,
        all: &dyn HostCollective,
    ) -> Result<Self, TrainerError> {
        let mut passes = Self::alone(config, model);
        let (rank, tensor) = (all.rank(), config.tensor);
        let split = |color| all.split(color).map(Arc::from);
        let mut calls = PassCalls::default();
        if tensor > 1 {
            calls.tensor = Some(split(rank / tensor)?);
            let copies = ModelShard::key_copies(model, tensor);
            calls.same_keys = (copies > 1).then(|| split(rank / copies)).transpose()?;
        }
        if config.context.degree > 1 {
            let color = rank / config.of_stage() * tensor + rank % tensor;
            (calls.context, calls.frozen) = (Some(split(color)?), Some(split(color)?));
        }
        if config.expert > 1 {
            let [shard, zero] = config.shard_and_zero(rank);
            let zero_ranks = all.world() / config.shards();
            calls.expert = Some(split((shard * zero_ranks + zero) / config.expert)?);
        }
        if config.pipeline > 1 {
            let position = Position { rank: rank % tensor, world: tensor };
            passes.all_layers = Some(Arc::new(ModelShard::new(model, position)?.config().clone()));
            calls.stages = Some(StageCalls::of(config, all)?);
        }
        if config.calls_in_passes() {
            *passes.lock() = Some(calls);
        }
        Ok(passes)
    }

    /// Sections of this rank.
    pub(super) fn own_sections(&self) -> usize {
        self.config.context.sections() / self.config.context.degree
    }

    /// The ranks of passes of the network, or of `frozen` networks, of this `model`.
    ///
    /// # Errors
    /// If this rank has left, or the ranks cannot share the model.
    pub(super) fn passes(&self, model: &Config, frozen: bool) -> Result<PassRanks, TrainerError> {
        let context = self.config.context;
        context.check(model, false)?;
        let calls = self.calls()?;
        let own = if frozen { calls.frozen } else { calls.context };
        Ok(PassRanks {
            context: own.map(|calls| calls as Arc<dyn Collective>),
            tensor: calls.tensor.filter(|_| !frozen).map(|ranks| TensorRanks {
                ranks,
                same_keys: calls.same_keys.map(|ranks| ranks as Arc<dyn Collective>),
                vocabulary: self.vocabulary,
            }),
            expert: calls.expert.filter(|_| !frozen).map(|calls| calls as Arc<dyn Collective>),
            all_layers: self.all_layers.clone().filter(|_| !frozen),
            sections: context.sections(),
            exchange: context.exchange(model),
        })
    }

    /// Lets passes on devices exchange from device to device among those of their ranks that `meet` makes a group of.
    ///
    /// # Errors
    /// That of `meet`, or if this rank has left.
    pub(super) fn connect_devices(
        &self,
        meet: impl Fn(&dyn HostCollective) -> Result<Option<DeviceGroup>, TrainerError>,
    ) -> Result<(), TrainerError> {
        let mut calls = self.calls()?;
        let group = |ranks: &Option<Arc<dyn HostCollective>>| -> Result<_, TrainerError> {
            Ok(match ranks {
                Some(ranks) => meet(&**ranks)?.map(Arc::new),
                None => None,
            })
        };
        calls.tensor_devices = group(&calls.tensor)?;
        calls.context_devices = group(&calls.context)?;
        calls.expert_devices = group(&calls.expert)?;
        self.lock().iter_mut().for_each(|own| own.clone_from(&calls));
        Ok(())
    }

    /// Whether ranks exchange in passes what devices can send each other.
    ///
    /// # Errors
    /// If this rank has left.
    pub(super) fn exchange_on_devices(&self) -> Result<bool, TrainerError> {
        let calls = self.calls()?;
        Ok(calls.tensor.is_some() || calls.context.is_some() || calls.expert.is_some())
    }

    /// Whether they do so from device to device.
    pub(super) fn meet_on_devices(&self) -> bool {
        let direct = |PassCalls { tensor_devices, context_devices, expert_devices, .. }: &PassCalls| {
            [tensor_devices, context_devices, expert_devices].into_iter().any(Option::is_some)
        };
        self.lock().as_ref().is_some_and(direct)
    }

    /// The ranks of a pass on a device.
    ///
    /// # Errors
    /// If this rank has left.
    pub(super) fn on_devices(&self) -> Result<DevicePassRanks, TrainerError> {
        let calls = self.calls()?;
        let ranks =
            |group: Option<Arc<DeviceGroup>>, host: Option<Arc<dyn HostCollective>>| match (group, host) {
                (Some(group), _) => Some(DeviceRanks::Direct(group)),
                (None, Some(ranks)) => Some(DeviceRanks::ThroughHost(ranks)),
                (None, None) => None,
            };
        let context = ranks(calls.context_devices, calls.context.clone()).zip(calls.context);
        let expert = ranks(calls.expert_devices, calls.expert.clone()).zip(calls.expert);
        Ok(DevicePassRanks {
            tensor: ranks(calls.tensor_devices, calls.tensor),
            same_keys: calls.same_keys.map(|ranks| ranks as Arc<dyn Collective>),
            context: context.map(|(exchange, predictions)| DeviceContextRanks {
                exchange,
                predictions,
                all_layers: self.all_layers.clone(),
                tensor: self.config.tensor,
            }),
            expert: expert.map(|(exchange, counts)| DeviceExpertRanks { exchange, counts }),
        })
    }

    /// The calls of the stages of the network; `None` if a rank has all layers.
    ///
    /// # Errors
    /// If this rank has left.
    pub(super) fn stages(&self) -> Result<Option<StageCalls>, TrainerError> {
        Ok(self.calls()?.stages)
    }

    /// The tokens of the experts of each layer in all sections of a pass, from those of this rank.
    ///
    /// # Errors
    /// If another rank does not make the call.
    pub(super) fn merged(
        &self,
        own: Vec<RoutedTokens>,
        model: &Config,
    ) -> Result<Vec<RoutedTokens>, TrainerError> {
        let context = self.calls()?.context.filter(|_| model.expert_slots() > 0);
        let Some(ranks) = context else { return Ok(own) };
        let mut layers: Vec<RoutedTokens> = Vec::new();
        for bytes in ranks.all_gather_bytes(encode(&own)?)? {
            let of_rank: Vec<RoutedTokens> = decode(&bytes)?;
            layers.resize(layers.len().max(of_rank.len()), RoutedTokens::default());
            layers.iter_mut().zip(&of_rank).for_each(|(all, tokens)| all.merge(tokens));
        }
        Ok(layers)
    }

    /// Runs passes. The calls are closed if they fail or panic: the other ranks wait for them.
    ///
    /// # Errors
    /// Those of `passes`.
    pub(super) fn during<R>(
        &self,
        passes: impl FnOnce() -> Result<R, TrainerError>,
    ) -> Result<R, TrainerError> {
        let mut leaving = Leaving(Some(self));
        let done = passes();
        if done.is_ok() {
            leaving.0 = None;
        }
        done
    }

    /// Closes the calls. Those of the other ranks end with an error.
    pub(super) fn leave(&self) {
        self.lock().take();
    }

    fn calls(&self) -> Result<PassCalls, TrainerError> {
        match self.lock().clone() {
            None if self.config.calls_in_passes() => Err(TrainerError::RanksEnded),
            calls => Ok(calls.unwrap_or_default()),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<PassCalls>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|ranks| ranks.leave());
    }
}
