//! How the ranks of a learner divide the work on a model, and the collectives among some of them.
//!
//! World = data x pipeline x context x tensor, tensor innermost: rank `((d * pipeline + s) * context + c) * tensor + t`. Tensor ranks
//! share the weights of a pass and stages its layers ([`ModelShard`]), context ranks its tokens. Ranks with the same shard of the
//! weights are the ZeRO ranks: they reduce gradients and gather weights among each other.
//!
//! Expert ranks are neighbouring ZeRO ranks: each has some experts of every layer, for the tokens of all of them. Where there are more
//! ZeRO ranks than experts are divided among, those with the same experts share them as ZeRO ranks.
//!
//! Invariant: all ranks make the same splits in the same order.

use std::sync::Arc;

use collective::{HostCollective, Position};
use model::{Config, ContextExchange, ModelShard, PassRanks, Recompute, ShardPlace};
use serde::{Deserialize, Serialize};

use crate::TrainerError;
use crate::learner::LearnerConfig;
use crate::optimizer::OptimizerKind;

/// How the ranks of a learner divide the work, apart from the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParallelConfig {
    /// Ranks that share the weights of a pass.
    pub tensor: usize,
    /// Ranks that share its tokens.
    pub context: ContextParallel,
    /// Stages that divide its layers; each computes one micro-batch after the other.
    pub pipeline: usize,
    /// Ranks that divide the experts of every layer, neighbours among those that divide the rows and tokens of a step (data x context),
    /// whose number is a multiple. A rank has neighbouring experts, which compute the tokens of these ranks.
    pub expert: usize,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self::DATA
    }
}

/// How the tokens of a micro-batch are shared among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextParallel {
    /// Ranks that compute a micro-batch together.
    pub degree: usize,
    /// Sections of the tokens of a micro-batch whose gradients are summed apart, a power of two; at least one for each rank is used.
    pub sections: usize,
    /// What they exchange for attention; `None` for what sends fewer values.
    pub exchange: Option<ContextExchange>,
}

/// The place of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankPlace {
    /// Which part of the rows it computes.
    pub(crate) data: Position,
    /// Which part of the weights it has.
    pub(crate) shard: ShardPlace,
}

/// The collectives of a rank.
#[derive(Clone, Debug)]
pub(crate) struct RankGroups {
    /// All ranks.
    pub(crate) all: Arc<dyn HostCollective>,
    /// Those with the same shard of the weights.
    pub(crate) zero: Arc<dyn HostCollective>,
    /// Those of them with the same experts, where ranks divide them; `None` if no other has.
    pub(crate) same_experts: Option<Arc<dyn HostCollective>>,
}

impl ParallelConfig {
    /// All ranks divide the data.
    pub const DATA: Self = Self { tensor: 1, context: ContextParallel::NONE, pipeline: 1, expert: 1 };

    /// Whether ranks make calls in passes.
    pub(crate) fn calls_in_passes(self) -> bool {
        self.of_pass() > 1 || self.expert > 1
    }

    /// Ranks of one pass.
    #[must_use]
    pub fn of_pass(self) -> usize {
        (self.pipeline * self.of_stage()).max(1)
    }

    /// Ranks of one stage of a pass.
    pub(crate) fn of_stage(self) -> usize {
        self.context.degree * self.tensor
    }

    /// Parts of the model that ranks have.
    #[must_use]
    pub fn shards(self) -> usize {
        self.pipeline * self.tensor
    }

    /// Ranks that divide the rows of a step, of `world` ranks.
    #[must_use]
    pub fn data(self, world: usize) -> usize {
        world / self.of_pass()
    }

    /// The place of `rank` among `world`.
    pub(crate) fn place(self, Position { rank, world }: Position) -> RankPlace {
        RankPlace {
            data: Position { rank: rank / self.of_pass(), world: self.data(world) },
            shard: ShardPlace {
                tensor: Position { rank: rank % self.tensor, world: self.tensor },
                stage: Position { rank: rank / self.of_stage() % self.pipeline, world: self.pipeline },
            },
        }
    }

    /// The part of the model that `rank` has, from 0, and its number among the ranks that have the same one.
    pub(crate) fn shard_and_zero(self, rank: usize) -> [usize; 2] {
        let stage = rank / self.of_stage() % self.pipeline;
        let context = rank / self.tensor % self.context.degree;
        let zero = rank / self.of_pass() * self.context.degree + context;
        [stage * self.tensor + rank % self.tensor, zero]
    }

    /// Checks that `world` ranks can be divided, and the model among them.
    ///
    /// # Errors
    /// If they cannot; the error names the nearest number that can.
    pub fn check(self, world: usize, model: &Config) -> Result<(), TrainerError> {
        let each = self.of_pass();
        if each == 0 || world == 0 || !world.is_multiple_of(each) {
            let nearest = world.checked_div(each).unwrap_or(0).max(1) * each.max(1);
            let reason = format!(
                "a world of {world} ranks is not divisible by pipeline x context x tensor = {} x {} x {}; {nearest} ranks are possible",
                self.pipeline, self.context.degree, self.tensor
            );
            return Err(TrainerError::Parallel { reason });
        }
        self.shard(model, 0).map(drop)
    }

    /// Part number `shard` of the parts of `model` that ranks have.
    ///
    /// # Errors
    /// If the model cannot be divided.
    pub fn shard(self, model: &Config, shard: usize) -> Result<ModelShard, TrainerError> {
        let place = ShardPlace {
            tensor: Position { rank: shard % self.tensor, world: self.tensor },
            stage: Position { rank: shard / self.tensor, world: self.pipeline },
        };
        Ok(ModelShard::at(model, place)?)
    }
}

impl RankGroups {
    /// Splits `all` ranks.
    ///
    /// # Errors
    /// If another rank does not take part.
    pub(crate) fn new(all: Arc<dyn HostCollective>, config: ParallelConfig) -> Result<Self, TrainerError> {
        let [shard, rank] = config.shard_and_zero(all.rank());
        let zero: Arc<dyn HostCollective> =
            if config.shards() == 1 { Arc::clone(&all) } else { all.split(shard)?.into() };
        let has_same = config.expert > 1 && config.expert < zero.world();
        let color = shard * config.expert + rank % config.expert;
        let same_experts = if has_same { Some(all.split(color)?.into()) } else { None };
        Ok(Self { all, zero, same_experts })
    }
}

impl Default for ContextParallel {
    fn default() -> Self {
        Self::NONE
    }
}

impl ContextParallel {
    /// Every rank computes its micro-batches alone.
    pub const NONE: Self = Self { degree: 1, sections: 1, exchange: None };

    /// Sections of a micro-batch.
    #[must_use]
    pub fn sections(self) -> usize {
        self.sections.max(self.degree)
    }

    /// What ranks exchange for a model of this configuration.
    #[must_use]
    pub fn exchange(self, model: &Config) -> ContextExchange {
        self.exchange.unwrap_or_else(|| ContextExchange::cheaper(model, self.degree))
    }

    /// Checks that ranks can compute a `model` so, on devices or not.
    ///
    /// # Errors
    /// If they cannot.
    pub(crate) fn check(self, model: &Config, on_devices: bool) -> Result<(), TrainerError> {
        let (degree, sections) = (self.degree, self.sections());
        if sections <= 1 {
            return Ok(());
        }
        let refused = |reason: String| Err(TrainerError::Context { degree, sections, reason });
        if on_devices && sections > degree {
            return refused("a rank on a device has one section".to_owned());
        }
        if on_devices && self.exchange == Some(ContextExchange::Keys) {
            return refused("ranks on devices exchange heads".to_owned());
        }
        let exchange = if on_devices { ContextExchange::Heads } else { self.exchange(model) };
        match PassRanks::obstacle(model, degree, sections, exchange) {
            Some(reason) => refused(reason),
            None => Ok(()),
        }
    }
}

impl LearnerConfig {
    /// Checks that the ranks can divide `model`, and that what they do together is possible.
    ///
    /// # Errors
    /// If it is not.
    pub fn check_parallel(&self, model: &Config, adapts: bool) -> Result<(), TrainerError> {
        self.parallel.check(self.world, model)?;
        let of_tensor = ModelShard::new(model, Position { rank: 0, world: self.parallel.tensor })?;
        self.parallel.context.check(of_tensor.config(), self.device.is_some())?;
        let (sections, copies) =
            (self.parallel.context.sections(), ModelShard::key_copies(model, self.parallel.tensor));
        if self.device.is_none() {
            ModelShard::check_sums(model, self.parallel.tensor)?;
        }
        if sections > 1 && copies > 1 {
            let reason = format!(
                "{copies} tensor ranks have copies of each key-value head, whose gradients they sum in passes of one section \
                 only, and a micro-batch has {sections}; set trainer.parallel.tensor = {}, where there are no copies, or both \
                 trainer.parallel.context and its sections to 1",
                self.parallel.tensor / copies
            );
            return Err(TrainerError::Parallel { reason });
        }
        if let Some(reason) = self.expert_obstacle(model, adapts) {
            return Err(TrainerError::Parallel { reason });
        }
        if self.parallel.pipeline > 1 && adapts {
            let reason = "ranks do not divide the layers under an adapter; set trainer.parallel.pipeline = 1";
            return Err(TrainerError::Parallel { reason: reason.to_owned() });
        }
        let reason = if self.parallel.tensor == 1 {
            return Ok(());
        } else if adapts {
            "ranks do not share the weights under an adapter; set trainer.parallel.tensor = 1"
        } else if self.optimizer.kind != OptimizerKind::Adamw {
            "only AdamW with moments in f32 updates parts of matrices; set trainer.parallel.tensor = 1"
        } else {
            return Ok(());
        };
        Err(TrainerError::Parallel { reason: reason.to_owned() })
    }

    /// Why ranks cannot divide the experts of `model`; `None` if they can, or do not.
    fn expert_obstacle(&self, model: &Config, adapts: bool) -> Option<String> {
        let expert = self.parallel.expert;
        if expert == 1 {
            return None;
        }
        let zero_ranks = self.world / self.parallel.shards().max(1);
        let reason = if !zero_ranks.is_multiple_of(expert) {
            let divides = |fewer: &usize| {
                zero_ranks.is_multiple_of(*fewer) && PassRanks::expert_obstacle(model, *fewer).is_none()
            };
            let nearest = (1..expert).rev().find(divides).unwrap_or(1);
            return Some(format!(
                "{zero_ranks} ranks divide the rows and tokens of a step, which is not divisible by trainer.parallel.expert = {expert}; {nearest} is possible"
            ));
        } else if adapts {
            "ranks do not divide experts under an adapter; set trainer.parallel.expert = 1"
        } else if !self.shares_weights() {
            "only ranks with shards of the weights divide experts; set trainer.zero = 3"
        } else if self.recompute == Recompute::Sequence {
            "the chunks of trainer.recompute = \"sequence\" are not the same on all ranks that divide experts; set it to \"block\" or \"none\""
        } else {
            return PassRanks::expert_obstacle(model, expert);
        };
        Some(reason.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_ranks_are_neighbours() {
        let config = ParallelConfig { tensor: 2, ..ParallelConfig::DATA };
        let place = |rank| config.place(Position { rank, world: 6 });
        let places: Vec<_> =
            (0..6).map(|rank| (place(rank).data.rank, place(rank).shard.tensor.rank)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
        assert_eq!(place(5).data.world, 3);
    }

    #[test]
    fn context_ranks_are_around_tensor_ranks() {
        let context = ContextParallel { degree: 2, ..ContextParallel::NONE };
        let config = ParallelConfig { tensor: 2, context, ..ParallelConfig::DATA };
        let place = |rank| config.place(Position { rank, world: 8 });
        let places: Vec<_> =
            (0..8).map(|rank| (place(rank).data.rank, place(rank).shard.tensor.rank)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1)]);
        assert_eq!((place(7).data.world, context.sections()), (2, 2));
    }

    #[test]
    fn stages_are_around_the_ranks_of_a_stage() {
        let context = ContextParallel { degree: 2, ..ContextParallel::NONE };
        let config = ParallelConfig { tensor: 2, context, pipeline: 3, ..ParallelConfig::DATA };
        for rank in 0..24 {
            let place = config.place(Position { rank, world: 24 });
            let expected = ((rank / 12) * 3 + place.shard.stage.rank) * 4 + rank % 4;
            assert_eq!((rank, place.data.rank, place.data.world), (expected, rank / 12, 2));
            let [shard, zero] = config.shard_and_zero(rank);
            assert_eq!(shard, place.shard.stage.rank * 2 + rank % 2);
            assert_eq!(zero, place.data.rank * 2 + rank / 2 % 2);
        }
    }
}
