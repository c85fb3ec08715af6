//! Low-rank factors over a base that stays quantised, as a policy that is sampled from and saved (QLoRA, Dettmers et al. 2023,
//! arXiv 2305.14314).
//!
//! Invariant: the base is shared and never changes; two versions of a policy differ in their factors alone.

use std::sync::Arc;

use crate::{Decoder, FrozenParameters, LowRank, ModelError, Parameters, Recompute, ThreadPool};

/// Factors that are not merged into their base.
#[derive(Clone, Debug)]
pub struct AdaptedBase {
    base: Arc<FrozenParameters>,
    factors: Arc<LowRank>,
}

impl AdaptedBase {
    /// `factors` of weights of `base`.
    #[must_use]
    pub fn new(base: Arc<FrozenParameters>, factors: Arc<LowRank>) -> Self {
        Self { base, factors }
    }

    /// The base.
    #[must_use]
    pub fn base(&self) -> &Arc<FrozenParameters> {
        &self.base
    }

    /// The factors.
    #[must_use]
    pub fn factors(&self) -> &Arc<LowRank> {
        &self.factors
    }

    /// The same base with the factors `values [n]`.
    ///
    /// # Errors
    /// If their number is another.
    pub fn with_values(&self, values: &[f32]) -> Result<Self, ModelError> {
        let mut factors = LowRank::clone(&self.factors);
        let (expected, found) = (factors.values().len(), values.len());
        if expected != found {
            return Err(ModelError::Length { expected, found });
        }
        factors.values_mut().copy_from_slice(values);
        Ok(Self { base: Arc::clone(&self.base), factors: Arc::new(factors) })
    }

    /// A decoder to sample with, which shares the base.
    #[must_use]
    pub fn decoder(&self) -> Decoder {
        Decoder::frozen(&self.base, &self.factors, Recompute::None)
    }

    /// All weights in f32, with the factors merged. The base is read again from its file.
    ///
    /// # Errors
    /// If the file cannot be read any more.
    pub fn merged(&self, pool: &ThreadPool) -> Result<Parameters, ModelError> {
        let base = Parameters::load(self.base.path(), self.base.config())?;
        let mut merged = base.clone();
        let pairs = self.factors.pairs();
        let frozen = |pair: usize| &base.values()[pairs[pair].weight.clone()];
        self.factors.merge(merged.values_mut(), frozen, pool);
        Ok(merged)
    }
}
