//! The frozen weights of a model as its file stores them: matrices stay quantised, for low-rank factors that are trained over
//! them (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).
//!
//! Invariant: a load either has every tensor of the layout, with finite numbers only, or names what is wrong. Memory is that of
//! the tensors in the file.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::ops::blocks::BlockFormat;

use crate::directory::DESCRIPTION_FILES;
use crate::gguf::{self, GgufFile};
use crate::ops::blocks::{BlockMatrix, BlockRows};
use crate::weight_files::{stored, weight_files};
use crate::{Config, Layout, ModelError, ParameterSpec, Reduction};

/// What a message of a vector begins with; that of a matrix begins with the number of its format.
const VECTOR: u8 = u8::MAX;

/// Name of the copy of a GGUF file.
const COPY: &str = "model.gguf";

/// Frozen weights of a model.
#[derive(Debug)]
pub struct FrozenParameters {
    path: PathBuf,
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

impl FrozenTensor {
    /// The tensor of a message; `None` if that is not of `spec`.
    fn of(spec: &ParameterSpec, mut message: Vec<u8>) -> Option<Self> {
        let (kind, bytes) = message.split_first()?;
        if *kind == VECTOR {
            let (values, rest) = bytes.as_chunks();
            let whole = values.len() == spec.len() && rest.is_empty();
            return whole
                .then(|| Self::Vector(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()));
        }
        let format = *BlockFormat::ALL.get(usize::from(*kind))?;
        let columns = spec.shape.last().copied().filter(|columns| *columns > 0)?;
        message.remove(0);
        Some(Self::Matrix(Arc::new(BlockMatrix::new(format, [spec.len() / columns, columns], message)?)))
    }
}

/// Bytes of the weights at `path`, a GGUF file or a directory; 0 if there are none.
#[must_use]
pub fn stored_bytes(path: &Path) -> u64 {
    let files = match gguf::is_gguf(path) {
        true => vec![path.to_owned()],
        false => weight_files(path).map_or_else(|_| Vec::new(), |(_, files)| files),
    };
    files.iter().filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum()
}

impl FrozenParameters {
    /// Reads a GGUF file or a Hugging Face directory with a model of `config`.
    ///
    /// # Errors
    /// If its tensors are not those of the model or not finite, a format is not computed with, or the model sums as trees, which
    /// need whole matrices.
    pub fn load(path: &Path, config: &Config) -> Result<Self, ModelError> {
        if config.reduction == Reduction::Tree {
            return Err(ModelError::TreesOfBlocks { path: path.to_owned() });
        }
        let layout = Arc::new(Layout::new(config));
        let tensors = match gguf::is_gguf(path) {
            true => GgufFile::open(path)?.frozen(config, &layout)?,
            false => stored(path, config)?,
        };
        Ok(Self { path: path.to_owned(), config: config.clone(), layout, tensors })
    }

    /// The file or the directory that they were read from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A message for each tensor, in the order of the layout, from which [`Self::received`] makes the same weights in another process.
    pub fn messages(&self) -> impl Iterator<Item = Vec<u8>> {
        self.tensors.iter().map(|tensor| match tensor {
            FrozenTensor::Vector(values) => {
                let values = values.iter().flat_map(|value| value.to_le_bytes());
                std::iter::once(VECTOR).chain(values).collect()
            }
            FrozenTensor::Matrix(matrix) => [&[matrix.format as u8], &matrix.bytes[..]].concat(),
        })
    }

    /// The weights of a model of `config` from the messages that `next` gives. They have no file here.
    ///
    /// # Errors
    /// Those of `next`, or if a message is not the tensor that comes next.
    pub fn received<E: From<ModelError>>(
        config: &Config,
        mut next: impl FnMut() -> Result<Vec<u8>, E>,
    ) -> Result<Self, E> {
        let layout = Arc::new(Layout::new(config));
        let mut tensors = Vec::with_capacity(layout.specs().len());
        for spec in layout.specs() {
            let message = next()?;
            let (kind, bytes) = (message.first().copied(), message.len());
            let tensor = FrozenTensor::of(spec, message).ok_or_else(|| ModelError::Received {
                tensor: spec.name.clone(),
                shape: spec.shape.clone(),
                found: format!("{bytes} bytes that begin with {kind:?}"),
            });
            tensors.push(tensor?);
        }
        Ok(Self { path: PathBuf::new(), config: config.clone(), layout, tensors })
    }

    /// Digest of all tensors as they are stored, blake3 in hexadecimal.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        self.messages().for_each(|message| {
            hasher.update(&message);
        });
        hasher.finalize().to_hex().to_string()
    }

    /// Copies the file, or the weights and the description of the directory, to the directory `to`, and returns what
    /// [`Self::load`] reads there.
    ///
    /// # Errors
    /// If a file cannot be copied.
    pub fn copy_to(&self, to: &Path) -> Result<PathBuf, ModelError> {
        let copy = |from: &Path, to: PathBuf| match std::fs::copy(from, &to) {
            Ok(_) => Ok(to),
            Err(source) => Err(ModelError::Write { path: to, source }),
        };
        if gguf::is_gguf(&self.path) {
            return copy(&self.path, to.join(COPY));
        }
        let (source, shards) = weight_files(&self.path)?;
        let described = DESCRIPTION_FILES.map(|name| self.path.join(name));
        let described = described.into_iter().filter(|file| file.exists());
        // One file is its own index.
        let files: BTreeSet<PathBuf> = shards.into_iter().chain([source]).chain(described).collect();
        for file in files {
            copy(&file, to.join(file.file_name().unwrap_or_default()))?;
        }
        Ok(to.to_owned())
    }

    /// What [`Self::copy_to`] wrote to the directory `to`.
    #[must_use]
    pub fn copied_to(to: &Path) -> PathBuf {
        let file = to.join(COPY);
        if file.exists() { file } else { to.to_owned() }
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
            FrozenTensor::Matrix(matrix) => matrix.bytes.len(),
        };
        self.tensors.iter().map(|tensor| of(tensor) as u64).sum()
    }

    /// The tensors, with their places in the layout.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&ParameterSpec, &FrozenTensor)> {
        self.layout.specs().iter().zip(&self.tensors)
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
        self.tensors().filter(|(spec, _)| range.contains(&spec.offset)).map(|(_, tensor)| tensor)
    }
}
