//! Learners of an adapter over a base that stays quantised.
//!
//! Invariant: such a learner has one rank, on the processor, and no weights in f32.

use std::sync::Arc;

use model::{AdaptedBase, FrozenParameters, ThreadPool};

use super::{Learner, LearnerConfig};
use crate::TrainerError;
use crate::lora::Adapter;
use crate::optimizer::Optimizer;
use crate::rank::frozen;

impl Learner {
    /// A learner of `adapter`, which is not merged into its `base`: that stays quantised (QLoRA, Dettmers et al. 2023, arXiv
    /// 2305.14314). `optimizer` is the restored state; `None` for a new one.
    ///
    /// # Errors
    /// If the configuration has a device or several ranks.
    pub fn over(
        config: LearnerConfig,
        base: Arc<FrozenParameters>,
        adapter: Adapter,
        optimizer: Option<Optimizer>,
    ) -> Result<Self, TrainerError> {
        let (model, pool) = (base.config().clone(), Arc::new(ThreadPool::single()));
        let first = frozen(config.clone(), base, adapter, optimizer)?;
        Ok(Self { config, model, first, others: Vec::new(), pool, spread: None })
    }

    /// The policy, if an adapter is trained over a base that stays quantised.
    #[must_use]
    pub fn adapted(&self) -> Option<AdaptedBase> {
        self.first.adapted()
    }
}
