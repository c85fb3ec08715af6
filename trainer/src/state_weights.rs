//! The weights of a network in training.

use std::sync::Arc;

use model::{FrozenParameters, Layout, ParameterSpec, Parameters};

use crate::TrainerError;

/// Weights of a network in training.
#[derive(Clone, Debug)]
pub enum StateWeights {
    /// The f32 master weights, with an adapter merged.
    Whole(Arc<Parameters>),
    /// The frozen weights, which stay quantised, under an adapter.
    Quantized(Arc<FrozenParameters>),
}

impl StateWeights {
    /// The weights in f32.
    ///
    /// # Errors
    /// If they stay quantised.
    pub fn whole(&self) -> Result<&Arc<Parameters>, TrainerError> {
        match self {
            Self::Whole(parameters) => Ok(parameters),
            Self::Quantized(_) => Err(TrainerError::QuantizedBase),
        }
    }

    /// Where each tensor lies, or would lie, among flat parameters.
    pub(crate) fn layout(&self) -> &Arc<Layout> {
        match self {
            Self::Whole(parameters) => parameters.layout(),
            Self::Quantized(base) => base.layout(),
        }
    }

    /// Its tensors.
    pub(crate) fn specs(&self) -> &[ParameterSpec] {
        self.layout().specs()
    }

    /// Memory, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Whole(parameters) => size_of_val(parameters.values()) as u64,
            Self::Quantized(base) => base.bytes(),
        }
    }
}

impl From<Parameters> for StateWeights {
    fn from(parameters: Parameters) -> Self {
        Self::Whole(Arc::new(parameters))
    }
}
