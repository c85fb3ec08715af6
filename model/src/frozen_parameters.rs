//! The frozen weights of a model as its file stores them: matrices stay quantised, for low-rank factors that are trained over
//! them (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).
//!
//! Invariant: a load either has every tensor of the layout, with finite numbers only, or names what is wrong. Memory is that of
//! the tensors in the file.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::gguf::{self, GgufFile};
use crate::ops::blocks::{BlockMatrix, BlockRows};
use crate::{Config, Layout, ModelError, Reduction};

/// Frozen weights of a model.
#[derive(Debug)]
pub struct FrozenParameters {
    config: Config,
    layout: Arc<Layout>,
    /// In the order of the layout.
    tensors: Vec<FrozenTensor>,
}

/// One tensor.
#[derive(Debug)]
pub(crate) enum FrozenTensor {
    /// A norm or a bias.
    Vector(Vec<f32>),
    /// All else.
    Matrix(Arc<BlockMatrix>),
}

impl FrozenParameters {
    /// Reads a GGUF file with a model of `config`.
    ///
    /// # Errors
    /// If it is no GGUF file, its tensors are not those of the model or not finite, a format is not computed with, or the model
    /// sums as trees, which need whole matrices.
    pub fn load(path: &Path, config: &Config) -> Result<Self, ModelError> {
        let unusable = |reason: &str| ModelError::Gguf { path: path.to_owned(), reason: reason.to_owned() };
        if !gguf::is_gguf(path) {
            return Err(unusable(
                "it is no GGUF file, and only these stay quantised in memory; convert the model with llama.cpp's \
                 convert_hf_to_gguf, or load it without quantisation",
            ));
        }
        if config.reduction == Reduction::Tree {
            return Err(unusable(
                "quantised weights are dequantised some rows at a time, and the sums of its model are trees over all of them; \
                 use the reduction \"chain\"",
            ));
        }
        let layout = Arc::new(Layout::new(config));
        let tensors = GgufFile::open(path)?.frozen(config, &layout)?;
        Ok(Self { config: config.clone(), layout, tensors })
    }

    /// The configuration of the model.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where each tensor would lie among flat parameters.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Memory, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let of = |tensor: &FrozenTensor| match tensor {
            FrozenTensor::Vector(values) => size_of_val(&values[..]),
            FrozenTensor::Matrix(matrix) => matrix.bytes(),
        };
        self.tensors.iter().map(|tensor| of(tensor) as u64).sum()
    }

    /// The vectors in a range of the flat parameters, one after the other.
    pub(crate) fn vector(&self, range: &Range<usize>) -> Vec<f32> {
        let vectors = self.within(range).filter_map(|tensor| match tensor {
            FrozenTensor::Vector(values) => Some(&values[..]),
            FrozenTensor::Matrix(_) => None,
        });
        vectors.collect::<Vec<_>>().concat()
    }

    /// The matrices in a range of the flat parameters, one below the other.
    pub(crate) fn matrices(&self, range: &Range<usize>) -> BlockRows {
        let matrices = self.within(range).filter_map(|tensor| match tensor {
            FrozenTensor::Vector(_) => None,
            FrozenTensor::Matrix(matrix) => Some(Arc::clone(matrix)),
        });
        BlockRows::new(matrices.collect())
    }

    fn within<'a>(&'a self, range: &'a Range<usize>) -> impl Iterator<Item = &'a FrozenTensor> {
        let tensors = self.layout.specs().iter().zip(&self.tensors);
        tensors.filter(|(spec, _)| range.contains(&spec.offset)).map(|(_, tensor)| tensor)
    }
}
