//! Optimizer states in a safetensors file.
//!
//! ```text
//! m.<name>, v.<name>               F32 in the shape of the weight, or U8 for 8-bit moments
//! m.<name>.scales, v.<name>.scales F32 `[blocks]`, with U8
//! momentum.<name>                  F32 in the shape of the weight: Muon and Dion
//! basis.<name>                     F32 `[rank, columns]`: Dion
//! metadata: optimizer              the name in a recipe; `adamw` if absent
//! ```
//!
//! Invariant: a file that is read back gives the same bits, or an error with the difference.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use memmap2::Mmap;
use model::{ParameterSpec, files};
use safetensors::tensor::{Dtype, View};
use safetensors::{SafeTensorError, SafeTensors};

use crate::TrainerError;
use crate::moments::{Coded, Moments};
use crate::optimizer::{Optimizer, OptimizerConfig, OptimizerKind, TensorState};

/// Metadata key of the optimizer's name.
const OPTIMIZER: &str = "optimizer";

/// Writes the optimizer state of the tensors `specs`.
pub(crate) fn write(path: &Path, specs: &[ParameterSpec], optimizer: &Optimizer) -> std::io::Result<()> {
    let mut tensors = Vec::new();
    for (spec, state) in specs.iter().zip(optimizer.states()) {
        match state {
            TensorState::Moments(Moments::Full { first, second }) => {
                tensors.extend([full("m", spec, &spec.shape, first), full("v", spec, &spec.shape, second)]);
            }
            TensorState::Moments(Moments::Coded { first, second }) => {
                for (prefix, Coded { codes, scales }) in [("m", first), ("v", second)] {
                    tensors.push((name(prefix, spec), StoredTensor::new(&spec.shape, Numbers::U8(codes))));
                    let scales = StoredTensor::new(&[scales.len()], Numbers::F32(scales));
                    tensors.push((scales_name(prefix, spec), scales));
                }
            }
            TensorState::Muon(momentum) => tensors.push(full("momentum", spec, &spec.shape, momentum)),
            TensorState::Dion { momentum, basis } => {
                tensors.push(full("momentum", spec, &spec.shape, momentum));
                tensors.push(full("basis", spec, &basis_shape(spec, basis), basis));
            }
        }
    }
    let metadata = HashMap::from([(OPTIMIZER.to_owned(), optimizer.kind().as_str().to_owned())]);
    serialize(path, tensors, metadata)
}

/// Writes a safetensors file.
pub(crate) fn serialize(
    path: &Path,
    tensors: Vec<(String, StoredTensor<'_>)>,
    metadata: HashMap<String, String>,
) -> std::io::Result<()> {
    safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(|error| match error {
        SafeTensorError::IoError(source) => source,
        other => std::io::Error::other(other.to_string()),
    })
}

/// Reads the optimizer state of the tensors `specs` for an optimizer with `config`.
pub(crate) fn read(
    path: &Path,
    specs: &[ParameterSpec],
    config: &OptimizerConfig,
) -> Result<Vec<TensorState>, TrainerError> {
    let broken = |reason: String| TrainerError::Checkpoint {
        path: path.to_owned(),
        reason: format!("{reason}; resume from an earlier checkpoint"),
    };
    let unreadable = |error: std::io::Error| broken(format!("cannot be read: {error}"));
    let file = files::open(path).map_err(unreadable)?;
    #[expect(
        unsafe_code,
        reason = "reading moments of many gigabytes without a second copy; no process writes to a checkpoint with its final name"
    )]
    let bytes = unsafe { Mmap::map(&file) }.map_err(unreadable)?;
    let malformed = |error: SafeTensorError| broken(format!("is not a safetensors file: {error}"));
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(malformed)?;
    let optimizer = metadata.metadata().as_ref().and_then(|metadata| metadata.get(OPTIMIZER));
    let saved = optimizer.map_or(OptimizerKind::default().as_str(), String::as_str);
    if saved != config.kind.as_str() {
        let (path, kind) = (path.to_owned(), config.kind.as_str());
        let reason = format!(
            "has the state of `trainer.optimizer = \"{saved}\"`, but the recipe says \"{kind}\"; continue with \
             \"{saved}\", or start a new run from the checkpoint's model"
        );
        return Err(TrainerError::Checkpoint { path, reason });
    }
    let tensors = SafeTensors::deserialize(&bytes).map_err(malformed)?;
    let states =
        specs.iter().enumerate().map(|(i, spec)| tensor_state(&tensors, spec, config.state(i, spec)));
    states.collect::<Result<_, String>>().map_err(broken)
}

/// Fills `state` from the file.
fn tensor_state(
    tensors: &SafeTensors<'_>,
    spec: &ParameterSpec,
    mut state: TensorState,
) -> Result<TensorState, String> {
    let f32s =
        |prefix, shape: &[usize], values: &mut [f32]| read_f32(tensors, &name(prefix, spec), shape, values);
    match &mut state {
        TensorState::Moments(Moments::Full { first, second }) => {
            f32s("m", &spec.shape, first)?;
            f32s("v", &spec.shape, second)?;
        }
        TensorState::Moments(Moments::Coded { first, second }) => {
            for (prefix, Coded { codes, scales }) in [("m", first), ("v", second)] {
                codes.copy_from_slice(data(tensors, &name(prefix, spec), Dtype::U8, &spec.shape)?);
                read_f32(tensors, &scales_name(prefix, spec), &[scales.len()], scales)?;
            }
        }
        TensorState::Muon(momentum) => f32s("momentum", &spec.shape, momentum)?,
        TensorState::Dion { momentum, basis } => {
            f32s("momentum", &spec.shape, momentum)?;
            let shape = basis_shape(spec, basis);
            f32s("basis", &shape, basis)
                .map_err(|reason| format!("{reason}, which follows from `trainer.dion_rank_fraction`"))?;
        }
    }
    Ok(state)
}

/// `[rank, columns]`
fn basis_shape(spec: &ParameterSpec, basis: &[f32]) -> [usize; 2] {
    let columns = spec.shape.last().copied().unwrap_or(1);
    [basis.len() / columns, columns]
}

/// A tensor in f32 with its name.
fn full<'a>(
    prefix: &str,
    spec: &ParameterSpec,
    shape: &[usize],
    values: &'a [f32],
) -> (String, StoredTensor<'a>) {
    (name(prefix, spec), StoredTensor::new(shape, Numbers::F32(values)))
}

fn name(prefix: &str, spec: &ParameterSpec) -> String {
    format!("{prefix}.{}", spec.name)
}

fn scales_name(prefix: &str, spec: &ParameterSpec) -> String {
    format!("{prefix}.{}.scales", spec.name)
}

fn read_f32(
    tensors: &SafeTensors<'_>,
    name: &str,
    shape: &[usize],
    values: &mut [f32],
) -> Result<(), String> {
    let (numbers, _) = data(tensors, name, Dtype::F32, shape)?.as_chunks();
    values.iter_mut().zip(numbers).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
    Ok(())
}

/// The bytes of a tensor; an error if it has another type or shape.
fn data<'a>(
    tensors: &SafeTensors<'a>,
    name: &str,
    dtype: Dtype,
    shape: &[usize],
) -> Result<&'a [u8], String> {
    let view = tensors.tensor(name).map_err(|_| format!("has no tensor {name}"))?;
    if view.dtype() != dtype || view.shape() != shape {
        return Err(format!("{name} is {:?} {:?}, expected {dtype:?} {shape:?}", view.dtype(), view.shape()));
    }
    Ok(view.data())
}

/// A tensor to be written; converted to bytes when it is written.
pub(crate) struct StoredTensor<'a> {
    shape: Vec<usize>,
    numbers: Numbers<'a>,
}

pub(crate) enum Numbers<'a> {
    F32(&'a [f32]),
    U8(&'a [u8]),
}

impl<'a> StoredTensor<'a> {
    /// A tensor of this shape.
    pub(crate) fn new(shape: &[usize], numbers: Numbers<'a>) -> Self {
        Self { shape: shape.to_vec(), numbers }
    }
}

impl View for StoredTensor<'_> {
    fn dtype(&self) -> Dtype {
        match self.numbers {
            Numbers::F32(_) => Dtype::F32,
            Numbers::U8(_) => Dtype::U8,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.numbers {
            Numbers::F32(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>().into(),
            Numbers::U8(codes) => codes.into(),
        }
    }

    fn data_len(&self) -> usize {
        match self.numbers {
            Numbers::F32(values) => 4 * values.len(),
            Numbers::U8(codes) => codes.len(),
        }
    }
}
