//! Models that are not trained: a reference policy, or a teacher.

use std::sync::Arc;

use model::{AdaptedBase, ModelError, Parameters, ResidentParameters, ThreadPool};

/// A model that is not trained.
#[derive(Clone, Debug)]
pub struct Frozen {
    /// Configuration and weights.
    pub weights: FrozenWeights,
    /// A thread pool of its own, for scoring beside the policy. `None` if it shares the pool of the policy in turns.
    pub pool: Option<Arc<ThreadPool>>,
}

/// The weights of a model that is not trained.
#[derive(Clone, Debug)]
pub enum FrozenWeights {
    /// In f32, always in memory or only during a scoring pass.
    Whole(ResidentParameters),
    /// Factors over a base that stays quantised, which the policy shares.
    Adapted(AdaptedBase),
}

impl From<ResidentParameters> for FrozenWeights {
    fn from(weights: ResidentParameters) -> Self {
        Self::Whole(weights)
    }
}

/// The weights of a scoring pass.
#[derive(Debug)]
pub(crate) enum LoadedWeights<'a> {
    /// In f32, with their source.
    Whole(&'a ResidentParameters, Arc<Parameters>),
    Adapted(&'a AdaptedBase),
}

impl FrozenWeights {
    /// The weights; those that are not kept in memory are read now, and freed when they are dropped.
    ///
    /// # Errors
    /// If they cannot be read again.
    pub(crate) fn load(&self) -> Result<LoadedWeights<'_>, ModelError> {
        Ok(match self {
            Self::Whole(resident) => LoadedWeights::Whole(resident, resident.get()?),
            Self::Adapted(policy) => LoadedWeights::Adapted(policy),
        })
    }
}
