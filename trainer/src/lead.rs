//! The leader of several processes that train together, and the commands that it sends to the followers.
//!
//! The leader has the trainer. The followers run [`follow`](crate::follow::follow()) and receive models, optimizer states
//! and batches from the leader. The data of a model follow its `RankCommand::Network` as broadcasts, in the order of
//! [`Leader::learner`].
//!
//! Invariant: the leader sends a command before it makes the command's collective calls, so that all processes make the
//! same calls. A follower receives a command after it has completed the previous one.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use model::{Config, Layout, Parameters, ThreadPool};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use trajectory::{Group, PolicyVersion, Sample};
use weights::WritableSlot;

use crate::TrainerError;
use crate::algorithm::Algorithm;
use crate::batch::BatchSplit;
use crate::critic::CriticConfig;
use crate::frozen::{Frozen, FrozenWeights};
use crate::learner::{Learner, LearnerConfig};
use crate::lora::{Adapter, LoraConfig};
use crate::loss::preference::Preference;
use crate::optimizer::Optimizer;
use crate::parallel::RankGroups;
use crate::rank::LearnerSeed;
use crate::state_weights::StateWeights;
use collective::HostCollective;

/// Rank 0 of a trainer of several processes. Dropping it stops the followers.
#[derive(Debug)]
pub struct Leader {
    collective: Arc<dyn HostCollective>,
    networks: AtomicU32,
}

/// A command to the followers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum RankCommand<'a> {
    /// Receive its shards of a model.
    Network(Box<NetworkHeader>),
    /// Drop a model.
    Forget { network: u32 },
    /// Receive the reference model of a policy: factors over its base if that stays quantised.
    Reference { network: u32, model: Option<serde_json::Value> },
    /// Make all updates of one batch.
    Update(Box<UpdateCommand<'a>>),
    /// Make a step on demonstrations.
    Imitate { network: u32, rows: Vec<Cow<'a, Sample>>, learning_rate: f32 },
    /// Compare pairs, and make a step if there is a learning rate.
    Compare {
        network: u32,
        comparison: PairComparison,
        rows: Vec<Cow<'a, Sample>>,
        learning_rate: Option<f32>,
    },
    /// Send its weights to the leader.
    GatherWeights { network: u32 },
    /// Send its shard of the weights to samplers.
    Send { network: u32, plan: Vec<u8> },
    /// Write its weights of a version to the memory that samplers read.
    Write { network: u32, version: PolicyVersion, place: Cow<'a, WritableSlot> },
    /// Send its optimizer state to the leader.
    GatherOptimizer { network: u32 },
    /// Leave this group of ranks and join the next one.
    Regroup,
    /// Exit.
    Stop,
}

/// Header of a model in training.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct NetworkHeader {
    pub(crate) network: u32,
    pub(crate) config: LearnerConfig,
    pub(crate) model: serde_json::Value,
    /// Whether the weights stay quantised.
    pub(crate) is_quantized: bool,
    pub(crate) adapter: Option<LoraConfig>,
    /// Number of updates of the optimizer whose states follow; `None` for a new optimizer.
    pub(crate) updates: Option<u64>,
}

/// Arguments of an [update](crate::update).
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct UpdateCommand<'a> {
    pub(crate) network: u32,
    pub(crate) critic: Option<(CriticConfig, Option<u32>)>,
    pub(crate) algorithm: Cow<'a, Algorithm>,
    pub(crate) split: BatchSplit,
    pub(crate) epochs: usize,
    pub(crate) bitwise: bool,
    pub(crate) version: PolicyVersion,
    pub(crate) learning_rate: f32,
    pub(crate) groups: Vec<Cow<'a, Group>>,
    pub(crate) demonstrations: Cow<'a, [Option<Sample>]>,
}

/// Loss over pairs.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum PairComparison {
    /// A preference loss, with the reference model.
    Preference(Preference),
    /// The loss of a reward model, on the predicted values.
    Reward { margin: f64 },
}

/// The followers of a learner, which receive its commands.
#[derive(Debug)]
pub(crate) struct Followers {
    leader: Arc<Leader>,
    pub(crate) network: u32,
    has_reference: AtomicBool,
    /// Why one of them cannot write to the memory that samplers read, once one could not.
    write_error: OnceLock<String>,
}

impl Leader {
    /// The leader of the processes of `collective`: its rank 0.
    #[must_use]
    pub fn new(collective: Arc<dyn HostCollective>) -> Arc<Self> {
        Arc::new(Self { collective, networks: AtomicU32::new(0) })
    }

    /// A learner whose ranks are all processes; every process receives its shards. The arguments are those of
    /// [`Learner::new`], [`Learner::adapting`] and [`Learner::over`]; `config.world` is the number of processes.
    ///
    /// # Errors
    /// If another process is gone, a device is not available, or the model's configuration does not survive encoding.
    pub fn learner(
        self: &Arc<Self>,
        config: LearnerConfig,
        model: Config,
        weights: impl Into<StateWeights>,
        adapter: Option<Adapter>,
        optimizer: Option<Optimizer>,
    ) -> Result<Learner, TrainerError> {
        let config = LearnerConfig { world: self.collective.world(), ..config };
        config.check_parallel(&model, adapter.is_some())?;
        let mut weights = weights.into();
        if let (StateWeights::Whole(parameters), Some(adapter)) = (&mut weights, &adapter) {
            adapter.merge(Arc::make_mut(parameters).values_mut(), &ThreadPool::single());
        }
        let network = self.networks.fetch_add(1, Ordering::Relaxed);
        self.send_command(&RankCommand::Network(Box::new(NetworkHeader {
            network,
            config: config.clone(),
            model: sent(&model)?,
            is_quantized: matches!(weights, StateWeights::Quantized(_)),
            adapter: adapter.as_ref().map(|adapter| adapter.config().clone()),
            updates: optimizer.as_ref().map(Optimizer::updates),
        })))?;
        let groups = RankGroups::new(Arc::clone(&self.collective), config.parallel)?;
        match &weights {
            StateWeights::Whole(parameters) => self.send_units(parameters)?,
            StateWeights::Quantized(base) => {
                for message in base.messages() {
                    self.collective.broadcast_bytes(0, message)?;
                }
            }
        }
        if let Some(adapter) = &adapter {
            self.collective.broadcast_bytes(0, bytes_of(adapter.values()))?;
            // Empty over a base that stays quantised.
            self.collective.broadcast_bytes(0, bytes_of(adapter.base()))?;
        }
        for state in optimizer.iter().flat_map(Optimizer::states) {
            self.collective.broadcast_bytes(0, encode(state)?)?;
        }
        let remote = Followers {
            leader: Arc::clone(self),
            network,
            has_reference: AtomicBool::new(false),
            write_error: OnceLock::new(),
        };
        let seed = LearnerSeed { config, model: model.clone(), weights, adapter, optimizer };
        let rank = seed.member(groups)?;
        Ok(Learner::spread(rank, model, Arc::clone(&self.collective), Some(remote)))
    }

    fn send_units(&self, parameters: &Parameters) -> Result<(), TrainerError> {
        let layout = parameters.layout();
        for unit in layout.units() {
            self.collective.broadcast_bytes(0, bytes_of(&parameters.values()[layout.unit(unit)]))?;
        }
        Ok(())
    }

    /// Ends this group of ranks; the followers join the next one.
    ///
    /// # Errors
    /// If one of them is gone.
    pub(crate) fn regroup(&self) -> Result<(), TrainerError> {
        self.send_command(&RankCommand::Regroup)
    }

    fn send_command(&self, command: &RankCommand<'_>) -> Result<(), TrainerError> {
        self.collective.broadcast_bytes(0, encode(command)?)?;
        Ok(())
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // Followers that are gone need no command, and their error was reported before.
        let _ = self.send_command(&RankCommand::Stop);
    }
}

impl Followers {
    /// Their leader.
    pub(crate) fn leader(&self) -> &Leader {
        &self.leader
    }

    /// Sends `command` to the other ranks before its collective calls.
    ///
    /// # Errors
    /// If one of them is gone.
    pub(crate) fn send_command(&self, command: &RankCommand<'_>) -> Result<(), TrainerError> {
        self.leader.send_command(command)
    }

    /// Why one of them cannot write to the memory that samplers read; `None` as long as all can.
    pub(crate) fn write_error(&self) -> Option<&str> {
        self.write_error.get().map(String::as_str)
    }

    /// Notes that one of them cannot, and why.
    pub(crate) fn cannot_write(&self, reason: String) {
        // The first reason stays.
        let _ = self.write_error.set(reason);
    }

    /// Sends the reference model once. It stays the same for the life of the learner.
    ///
    /// # Errors
    /// If another rank is gone, or the model cannot be read.
    pub(crate) fn send_reference(&self, frozen: &Frozen) -> Result<(), TrainerError> {
        if self.has_reference.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let network = self.network;
        match &frozen.weights {
            FrozenWeights::Whole(weights) => {
                let model = Some(sent(weights.config())?);
                self.send_command(&RankCommand::Reference { network, model })?;
                self.leader.send_units(&*weights.get()?)
            }
            FrozenWeights::Adapted(policy) => {
                self.send_command(&RankCommand::Reference { network, model: None })?;
                self.leader.collective.broadcast_bytes(0, bytes_of(policy.factors().values()))?;
                Ok(())
            }
        }
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        // The error is ignored as in the leader's.
        let _ = self.send_command(&RankCommand::Forget { network: self.network });
    }
}

/// Receives the weights that [`Leader::send_units`] sends, unit by unit.
pub(crate) fn receive_units(
    collective: &dyn HostCollective,
    layout: &Layout,
    mut take: impl FnMut(usize, Vec<f32>),
) -> Result<(), TrainerError> {
    for (number, unit) in layout.units().enumerate() {
        take(number, receive_values(collective, layout.unit(unit).len())?);
    }
    Ok(())
}

/// Receives `len` values, `[len]`.
pub(crate) fn receive_values(collective: &dyn HostCollective, len: usize) -> Result<Vec<f32>, TrainerError> {
    let bytes = collective.broadcast_bytes(0, Vec::new())?;
    let (values, _) = bytes.as_chunks();
    if values.len() != len {
        let reason = format!("{len} values were announced, {} came", values.len());
        return Err(TrainerError::Message { reason });
    }
    Ok(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Encodes a model's configuration, and checks that a follower decodes the same one.
fn sent(model: &Config) -> Result<serde_json::Value, TrainerError> {
    let value = model.to_json();
    if received(&value)? != *model {
        let reason = format!("the model's configuration reads back as another: {value}");
        return Err(TrainerError::Message { reason });
    }
    Ok(value)
}

/// Decodes a model's configuration that `sent` encoded.
pub(crate) fn received(model: &serde_json::Value) -> Result<Config, TrainerError> {
    let map = model.as_object().cloned().unwrap_or_default();
    Ok(Config::from_json(std::path::Path::new("the leader's model"), &map)?)
}

/// Encodes a message as MessagePack with named fields.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>, TrainerError> {
    rmp_serde::to_vec_named(message).map_err(|error| TrainerError::Message { reason: error.to_string() })
}

/// Decodes a message of [`encode`].
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, TrainerError> {
    rmp_serde::from_slice(bytes).map_err(|error| TrainerError::Message { reason: error.to_string() })
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4 * values.len());
    values.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
    bytes
}
