//! Learners of an adapter over a base that stays quantised.
//!
//! Invariant: such a learner has no weights in f32, on the host or on a device.

use std::sync::Arc;

use model::{AdaptedBase, FrozenParameters};

use super::{Learner, LearnerConfig};
use crate::TrainerError;
use crate::lora::Adapter;
use crate::optimizer::Optimizer;
use crate::rank::LearnerSeed;
use crate::state_weights::StateWeights;

impl Learner {
    /// A learner of `adapter`, which is not merged into its `base`: that stays quantised (QLoRA, Dettmers et al. 2023, arXiv
    /// 2305.14314). Ranks that are threads share the base. `optimizer` is the restored state; `None` for a new one.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn over(
        config: LearnerConfig,
        base: Arc<FrozenParameters>,
        adapter: Adapter,
        optimizer: Option<Optimizer>,
    ) -> Result<Self, TrainerError> {
        let (model, weights) = (base.config().clone(), StateWeights::Quantized(base));
        Self::with(LearnerSeed { config, model, weights, adapter: Some(adapter), optimizer })
    }

    /// The policy, if an adapter is trained over a base that stays quantised.
    #[must_use]
    pub fn adapted(&self) -> Option<AdaptedBase> {
        self.first.adapted()
    }
}
