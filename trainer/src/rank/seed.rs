//! The initial state of ranks, and the kind of rank that a configuration asks for.

use std::sync::Arc;

use collective::HostCollective;
use device::group::{DeviceGroup, DeviceGroupId, GroupCandidate};
use device::{Device, bf16};
use model::{Config, Layout, ModelShard, ParameterSpec, Parameters, Unit};

use super::group::GroupRank;
use super::membership::RankMembership;
use super::on_device::{PassDevice, SingleDeviceRank};
use super::passes::PassCollectives;
use super::replicated::ReplicatedRank;
use super::sharded::ShardedRank;
use super::single::SingleRank;
use super::whole::WholeWeights;
use super::{Rank, RankBase, RankKind};
use crate::TrainerError;
use crate::learner::LearnerConfig;
use crate::lora::Adapter;
use crate::on_device::{
    ByDtype, CollectivePlace, DeviceConfig, DeviceNetwork, OptimizerPlace, by_dtype, open,
};
use crate::optimizer::{Optimizer, OptimizerKind, TensorState, number_of};
use crate::parallel::RankGroups;
use crate::state_weights::StateWeights;
use crate::zero::{BufferPool, Fragment, Shards, TreeSums, number};

/// Initial state of a single rank, or of all ranks of a learner.
#[derive(Debug)]
pub(crate) struct LearnerSeed {
    pub(crate) config: LearnerConfig,
    pub(crate) model: Config,
    pub(crate) weights: StateWeights,
    /// The adapter that is trained in place of the weights. It is merged into weights in f32.
    pub(crate) adapter: Option<Adapter>,
    /// Optimizer state of whole tensors.
    pub(crate) optimizer: Option<Optimizer>,
}

/// Configuration and shards of one of several ranks, before it receives its weights.
#[derive(Debug)]
pub(crate) struct MemberSeed {
    config: LearnerConfig,
    /// The whole model.
    model: Config,
    /// The layout of the model, or of the shard.
    layout: Arc<Layout>,
    /// The shard of the model that this rank trains; `None` for all of it.
    shard: Option<ModelShard>,
    adapter: Option<Adapter>,
    groups: RankGroups,
    trained: Shards,
    weights: Shards,
}

/// The weights that one of several ranks receives.
#[derive(Debug)]
pub(crate) enum RankWeights {
    /// All weights, in f32 in their only reference.
    Whole(StateWeights),
    /// The shards of this rank, concatenated.
    Own(Vec<f32>),
}

impl LearnerSeed {
    /// The only rank of a learner.
    ///
    /// # Errors
    /// If its device is not available, its memory is too small, or routers cannot be updated as the configuration says.
    pub(crate) fn alone(self) -> Result<Rank, TrainerError> {
        let Self { config, model, weights, adapter, optimizer } = self;
        config.check_routers(&model, adapter.is_some())?;
        let passes = PassCollectives::alone(config.parallel, &model);
        let layout = Arc::clone(weights.layout());
        let specs = adapter.as_ref().map_or(layout.specs(), Adapter::specs);
        let sums = TreeSums::new(specs.last().map_or(0, |spec| spec.range().end));
        let optimizer = optimizer.unwrap_or_else(|| Optimizer::new(config.optimizer, specs));
        let buffers = BufferPool::default();
        let mut base = RankBase { config, model, layout, shard: None, optimizer, buffers, passes };
        let mut device = None;
        if let Some(config) = base.config.device.clone() {
            let network = base.open(&config, 0)?;
            if base.updates_on_device(&config, adapter.as_ref()) {
                let parameters = Arc::clone(weights.whole()?);
                drop(weights);
                let new =
                    by_dtype!(map network, network => SingleDeviceRank::new(network, parameters, &mut base)?);
                return Ok(Rank { base, kind: RankKind::SingleOnDevice(Box::new(new)) });
            }
            device = Some(by_dtype!(map network, network => PassDevice::new(network)));
        }
        let mut weights = WholeWeights::new(weights, adapter, device);
        weights.enter_device()?;
        let kind = RankKind::Single(SingleRank { weights, sums });
        Ok(Rank { base, kind })
    }

    /// One rank of `groups`.
    ///
    /// # Errors
    /// If its device is not available, or its memory is too small.
    pub(crate) fn member(&self, groups: RankGroups) -> Result<Rank, TrainerError> {
        let (model, adapter, layout) = (self.model.clone(), self.adapter.clone(), self.weights.layout());
        let member = MemberSeed::new(self.config.clone(), model, layout, adapter, groups)?;
        let weights = match &self.weights {
            StateWeights::Whole(parameters) => {
                let own = member.shard.as_ref().map_or_else(
                    || Ok(Parameters::clone(parameters)),
                    |shard| {
                        Parameters::from_values(Arc::clone(shard.layout()), shard.cut(parameters.values()))
                    },
                )?;
                if member.owns_weights() {
                    RankWeights::Own(member.weights.pack(member.groups.zero.rank(), own.values()))
                } else {
                    RankWeights::Whole(own.into())
                }
            }
            // It never changes.
            StateWeights::Quantized(base) => RankWeights::Whole(StateWeights::Quantized(Arc::clone(base))),
        };
        let cut = |optimizer: &Optimizer| optimizer.cut(member.fragments(), member.shard.as_ref());
        let optimizer = self.optimizer.as_ref().map(cut).transpose()?;
        member.rank(weights, optimizer)
    }
}

impl MemberSeed {
    /// The seed of this rank of `groups`, which trains a model or its `adapter`.
    ///
    /// # Errors
    /// If the ranks cannot divide the model.
    pub(crate) fn new(
        config: LearnerConfig,
        model: Config,
        layout: &Arc<Layout>,
        adapter: Option<Adapter>,
        groups: RankGroups,
    ) -> Result<Self, TrainerError> {
        config.check_parallel(&model, adapter.is_some())?;
        let place = config.parallel.place(groups.all.position());
        let of_rank = || ModelShard::at(&model, place.shard);
        let shard = (config.parallel.shards() > 1).then(of_rank).transpose()?;
        let layout = Arc::clone(shard.as_ref().map_or(layout, ModelShard::layout));
        let world = groups.zero.world();
        let weights = Shards::of_model(&layout, world, &config.optimizer, config.parallel.expert);
        let trained = match &adapter {
            Some(adapter) => Shards::of_adapter(&layout, adapter, world, &config.optimizer),
            None => weights.clone(),
        };
        Ok(Self { config, model, layout, shard, adapter, groups, trained, weights })
    }

    /// Whether this rank has only its shards of the weights. With an adapter every rank has all weights, because merging
    /// reads them.
    pub(crate) fn owns_weights(&self) -> bool {
        self.config.shares_weights() && self.adapter.is_none()
    }

    /// This rank's part of the `values` of a `unit` of the whole model, whose first is number `start` of the model: all of them, of
    /// a shard its own, and of these the ZeRO shard if the rank has no others.
    pub(crate) fn own_of(&self, unit: Unit, start: usize, values: Vec<f32>) -> Vec<f32> {
        let (unit, values) = match &self.shard {
            None => (unit, values),
            Some(shard) => {
                let Some(own) = shard.own_unit(unit) else { return Vec::new() };
                let place = shard.layout().unit(own);
                let pieces = shard.pieces().iter().filter(|piece| place.contains(&piece.own));
                let runs = pieces.flat_map(|piece| piece.runs());
                let of_whole = runs.flat_map(|(_, whole)| &values[whole.start - start..whole.end - start]);
                (own, of_whole.copied().collect())
            }
        };
        if !self.owns_weights() {
            return values;
        }
        let (rank, unit) = (self.groups.zero.rank(), number(&self.layout, unit));
        let first = self.weights.unit(unit).start;
        let owned = self.weights.of_unit(unit).map(|range| self.weights.owned(rank, range));
        owned.flat_map(|own| &values[own.start - first..own.end - first]).copied().collect()
    }

    /// Tensors of the whole model, or of its adapter, that are trained.
    pub(crate) fn tensors(&self) -> usize {
        let of_model = self.shard.as_ref().map_or(&self.layout, ModelShard::whole).specs();
        self.adapter.as_ref().map_or(of_model, Adapter::specs).len()
    }

    /// The layout of the model, or of the shard, that this rank trains.
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// This rank's part of the states of a tensor of the whole model.
    ///
    /// # Errors
    /// If the state is of another precision than the configuration's.
    pub(crate) fn states_of(
        &self,
        tensor: usize,
        state: &TensorState,
    ) -> Result<Vec<TensorState>, TrainerError> {
        let of_whole = |fragment: &Fragment| number_of(fragment.tensor, self.shard.as_ref());
        let mine = self.fragments().iter().filter(|fragment| of_whole(fragment) == tensor);
        mine.map(|fragment| state.part(fragment, self.shard.as_ref(), &self.config.optimizer)).collect()
    }

    /// The trained tensors.
    pub(crate) fn trained(&self) -> &[ParameterSpec] {
        self.adapter.as_ref().map_or(self.layout.specs(), Adapter::specs)
    }

    /// The parts of the trained tensors that this rank owns.
    pub(crate) fn fragments(&self) -> &[Fragment] {
        self.trained.fragments(self.groups.zero.rank())
    }

    /// The adapter, whose values are received later.
    pub(crate) fn adapter_mut(&mut self) -> Option<&mut Adapter> {
        self.adapter.as_mut()
    }

    /// The rank with its weights and the optimizer of its fragments; `None` for a new optimizer.
    ///
    /// # Errors
    /// If its device is not available, or its memory is too small.
    pub(crate) fn rank(
        self,
        weights: RankWeights,
        optimizer: Option<Optimizer>,
    ) -> Result<Rank, TrainerError> {
        self.config.check_routers(&self.model, self.adapter.is_some())?;
        let fresh = || {
            let shard = self.shard.as_ref();
            Optimizer::of_fragments(self.config.optimizer, self.trained(), self.fragments(), shard)
        };
        let optimizer = optimizer.unwrap_or_else(fresh);
        let Self { config, model: whole, layout, shard, adapter, groups, trained, weights: shards } = self;
        let (rank, place) = (groups.zero.rank(), config.parallel.place(groups.all.position()));
        let sums = TreeSums::new(trained.len(rank));
        let model = shard.as_ref().map_or(&whole, ModelShard::config).clone();
        let passes = PassCollectives::of(config.parallel, &whole, &*groups.all)?;
        let membership = RankMembership::new(groups, place, whole, shard.as_ref(), trained, shards);
        let buffers = BufferPool::default();
        let mut base = RankBase { config, model, layout, shard, optimizer, buffers, passes };
        let mut device = None;
        if let Some(config) = base.config.device.clone() {
            let network = base.open(&config, membership.number)?;
            let opened = by_dtype!(&network, network => network.device());
            base.passes.connect_devices(|ranks| base.meet(ranks, opened, config.collective))?;
            // Ranks that compute passes together update weights on the host.
            let alone = !base.config.parallel.calls_in_passes();
            let movable = alone && base.updates_on_device(&config, adapter.as_ref());
            let direct = movable || base.passes.exchange_on_devices()?;
            if !direct && config.collective == CollectivePlace::Device {
                let reason =
                    "they update weights on the host, as LoRA, other optimizers than AdamW and stages do";
                return Err(TrainerError::NoCollective { reason: reason.to_owned() });
            }
            // The owner alone has the value of a correction before it is rounded, and ranks of a group gather all weights or none.
            let corrects = base.config.router_correction_rate > 0.0;
            if corrects && config.collective == CollectivePlace::Device {
                let reason = "`trainer.router_correction_rate` updates routers through the host";
                return Err(TrainerError::NoCollective { reason: reason.to_owned() });
            }
            let movable = movable && !corrects;
            if movable
                && let Some(group) = base.meet(&*membership.collective()?, opened, config.collective)?
            {
                let own = match weights {
                    RankWeights::Whole(all) => membership.weights.pack(rank, all.whole()?.values()),
                    RankWeights::Own(own) => own,
                };
                let new = by_dtype!(map network, network => GroupRank::new(network, membership, group, own, &mut base)?);
                return Ok(Rank { base, kind: RankKind::Group(Box::new(new)) });
            }
            device = Some(by_dtype!(map network, network => PassDevice::new(network)));
        }
        let kind = match weights {
            RankWeights::Whole(all) => {
                let mut weights = WholeWeights::new(all, adapter, device);
                weights.enter_device()?;
                RankKind::Replicated(ReplicatedRank { weights, membership, sums })
            }
            RankWeights::Own(own) => RankKind::Sharded(ShardedRank { own, membership, device, sums }),
        };
        Ok(Rank { base, kind })
    }
}

impl RankBase {
    /// Opens the device of rank `rank`.
    fn open(
        &self,
        device: &DeviceConfig,
        rank: usize,
    ) -> device::Result<ByDtype<DeviceNetwork<f32>, DeviceNetwork<bf16>>> {
        open(device, rank, &self.model, &self.layout, self.config.recompute)
    }

    /// Whether a rank on a device updates its weights there, if it is single or in a device group.
    fn updates_on_device(&self, device: &DeviceConfig, adapter: Option<&Adapter>) -> bool {
        adapter.is_none()
            && device.optimizer == OptimizerPlace::Device
            && self.config.optimizer.kind == OptimizerKind::Adamw
    }

    /// Joins the device group of the ranks. `None` if their devices cannot form one.
    fn meet(
        &self,
        ranks: &dyn HostCollective,
        device: &Device,
        wish: CollectivePlace,
    ) -> Result<Option<DeviceGroup>, TrainerError> {
        if wish == CollectivePlace::Host {
            return Ok(None);
        }
        let all = ranks.all_gather_bytes(GroupCandidate::new(device)?.to_bytes())?;
        let all: Vec<_> = all.iter().map(|bytes| GroupCandidate::from_bytes(bytes)).collect();
        if let Some(reason) = GroupCandidate::obstacle(&all) {
            return match wish {
                CollectivePlace::Device => Err(TrainerError::NoCollective { reason }),
                CollectivePlace::Auto | CollectivePlace::Host => Ok(None),
            };
        }
        let rank = ranks.rank();
        let id = if rank == 0 { DeviceGroupId::new(device)?.to_bytes() } else { Vec::new() };
        let id = DeviceGroupId::from_bytes(&ranks.broadcast_bytes(0, id)?);
        Ok(Some(DeviceGroup::join(device, &id, rank, ranks.world(), self.config.wait)?))
    }
}
