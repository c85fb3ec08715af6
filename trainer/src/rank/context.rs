//! The context ranks of a rank: those that compute its passes with it, over calls apart from those of gradients and weights.
//!
//! Ranks are in the order `data * degree + context`: neighbours are context ranks. They all have the same rows, make the same passes, and
//! get the same predictions, so their reports are the same.
//!
//! Invariant: a rank that fails closes its calls with the other context ranks at once, because its peers wait in the pass.

use std::sync::{Arc, Mutex, PoisonError};

use collective::{HostCollective, Position};
use model::{Config, ContextExchange, PassRanks, RoutedTokens};
use serde::{Deserialize, Serialize};

use crate::TrainerError;
use crate::lead::{decode, encode};

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

/// The context ranks of one rank.
#[derive(Debug)]
pub(super) struct ContextRanks {
    config: ContextParallel,
    /// `None` for a rank alone, and after it has left.
    ranks: Mutex<Option<ContextCalls>>,
}

/// The calls of context ranks.
#[derive(Clone, Debug)]
struct ContextCalls {
    /// Of the passes of the network.
    own: Arc<dyn HostCollective>,
    /// Of the passes of frozen networks, which may run at the same time.
    frozen: Arc<dyn HostCollective>,
}

/// Closes the calls of a rank, unless its passes end well.
struct Leaving<'a>(Option<&'a ContextRanks>);

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

    /// The position among the groups of context ranks of the rank at `position`.
    pub(crate) fn data(self, Position { rank, world }: Position) -> Position {
        Position { rank: rank / self.degree, world: (world / self.degree).max(1) }
    }

    /// Checks that `world` ranks can compute a `model` so, on devices or not.
    ///
    /// # Errors
    /// If they cannot.
    pub(crate) fn check(self, model: &Config, world: usize, on_devices: bool) -> Result<(), TrainerError> {
        let (degree, sections) = (self.degree, self.sections());
        if sections <= 1 {
            return Ok(());
        }
        let refused = |reason: String| Err(TrainerError::Context { degree, sections, reason });
        if on_devices {
            return refused("ranks on devices compute whole micro-batches".to_owned());
        }
        if !world.is_multiple_of(degree) {
            return refused(format!("{world} ranks are not groups of {degree}"));
        }
        match PassRanks::obstacle(model, degree, sections, self.exchange(model)) {
            Some(reason) => refused(reason),
            None => Ok(()),
        }
    }
}

impl ContextRanks {
    /// A rank alone.
    pub(super) fn alone(config: ContextParallel) -> Self {
        Self { config, ranks: Mutex::new(None) }
    }

    /// The context ranks of this rank of `all`. All ranks make the call.
    ///
    /// # Errors
    /// If another rank does not.
    pub(super) fn of(config: ContextParallel, all: &dyn HostCollective) -> Result<Self, TrainerError> {
        let context = Self::alone(config);
        if config.degree > 1 {
            let part = || all.split(all.rank() / config.degree).map(Arc::from);
            *context.lock() = Some(ContextCalls { own: part()?, frozen: part()? });
        }
        Ok(context)
    }

    /// Sections of this rank.
    pub(super) fn own_sections(&self) -> usize {
        self.config.sections() / self.config.degree
    }

    /// The ranks of passes of the network, or of `frozen` networks, of this `model`.
    ///
    /// # Errors
    /// If this rank has left, or the ranks cannot share the model.
    pub(super) fn passes(&self, model: &Config, frozen: bool) -> Result<PassRanks, TrainerError> {
        self.config.check(model, self.config.degree, false)?;
        let calls = self.calls()?;
        Ok(PassRanks {
            context: calls.map(
                |calls| if frozen { calls.frozen } else { calls.own } as Arc<dyn collective::Collective>,
            ),
            sections: self.config.sections(),
            exchange: self.config.exchange(model),
            tensor: None,
        })
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
        let calls = self.calls()?.filter(|_| model.expert_slots() > 0);
        let Some(ContextCalls { own: ranks, .. }) = calls else { return Ok(own) };
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

    fn calls(&self) -> Result<Option<ContextCalls>, TrainerError> {
        match self.lock().clone() {
            None if self.config.degree > 1 => Err(TrainerError::RanksEnded),
            calls => Ok(calls),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<ContextCalls>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|ranks| ranks.leave());
    }
}
