//! The tensors of weight files, placed one after the other in the flat buffer of [`Parameters`].
//!
//! Invariant: a tensor is placed whole, or an error names it. Tensors that have no place, or were not there, are named at the end.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::{Dtype, TensorView};

use crate::weight_files::{first_of, non_finite, refuse_non_finite, widen};
use crate::{Config, Layout, ModelError, Parameters, fp8, mxfp4};

/// Fills the flat buffer file by file and keeps what there is to complain about.
pub(crate) struct Loader {
    layout: Arc<Layout>,
    values: Vec<f32>,
    /// Position of each tensor of files by its name.
    by_name: HashMap<String, usize>,
    /// Per tensor of files: values that are not finite; `None` until it was read.
    non_finite: Vec<Option<usize>>,
    /// One half of tensors in MXFP4, by their position, whose other half was not read yet.
    halves: HashMap<usize, (Mxfp4Half, Vec<u8>)>,
    /// One half of matrices in FP8, by their position, whose other half was not read yet.
    fp8: HashMap<usize, Fp8Half>,
    /// Layers from this one on predict further tokens, and are not read.
    end_of_layers: Option<usize>,
    unexpected: BTreeSet<String>,
}

/// A half of a tensor in MXFP4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mxfp4Half {
    Blocks,
    Scales,
}

/// A half of a matrix in FP8.
#[derive(Clone, Debug)]
enum Fp8Half {
    /// The numbers, which are in place.
    Numbers,
    Scales(Vec<f32>),
}

impl Mxfp4Half {
    const BOTH: [Self; 2] = [Self::Blocks, Self::Scales];

    /// What its name adds to that of the tensor.
    fn suffix(self) -> &'static str {
        match self {
            Self::Blocks => "_blocks",
            Self::Scales => "_scales",
        }
    }
}

impl Loader {
    pub(crate) fn new(config: &Config) -> Self {
        let layout = Arc::new(Layout::new(config));
        let values = vec![0.0; layout.len()];
        let names = layout.file_tensors().iter().map(|tensor| tensor.name.clone());
        Self {
            by_name: names.zip(0..).collect(),
            non_finite: vec![None; layout.file_tensors().len()],
            halves: HashMap::new(),
            fp8: HashMap::new(),
            end_of_layers: config.architecture.predicts_further_tokens().then_some(config.num_layers()),
            unexpected: BTreeSet::new(),
            layout,
            values,
        }
    }

    /// Position of a tensor of files.
    fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).or_else(|| self.by_name.get(&format!("model.{name}"))).copied()
    }

    /// Places a tensor of the file `path`.
    pub(crate) fn place(
        &mut self,
        path: &Path,
        name: &str,
        tensor: &TensorView<'_>,
    ) -> Result<(), ModelError> {
        let layout = Arc::clone(&self.layout);
        let Some(index) = self.find(name) else {
            return match name.strip_suffix(fp8::SCALES).and_then(|matrix| self.find(matrix)) {
                Some(index) => self.place_scales(path, name, index, tensor),
                None => self.place_half(path, name, tensor),
            };
        };
        let file = &layout.file_tensors()[index];
        check_shape(path, name, &file.shape, tensor)?;
        if let (Dtype::F8_E4M3, Some(range), &[_, columns]) = (tensor.dtype(), file.plain(), &file.shape[..])
        {
            let values = &mut self.values[range];
            fp8::widen(tensor.data(), values);
            match self.fp8.remove(&index) {
                Some(Fp8Half::Scales(scales)) => {
                    fp8::scale(values, columns, &scales);
                    self.non_finite[index] = Some(non_finite(values));
                }
                Some(Fp8Half::Numbers) | None => drop(self.fp8.insert(index, Fp8Half::Numbers)),
            }
            return Ok(());
        }
        let mut of_file = Vec::new();
        let values = match file.plain() {
            Some(range) => &mut self.values[range],
            None => {
                of_file.resize(file.len(), 0.0);
                &mut of_file[..]
            }
        };
        if !widen(tensor, values) {
            return Err(ModelError::Dtype {
                path: path.to_owned(),
                tensor: name.to_owned(),
                found: format!("{:?}", tensor.dtype()),
            });
        }
        self.non_finite[index] = Some(non_finite(values));
        if !of_file.is_empty() {
            file.scatter(&of_file, &mut self.values);
        }
        Ok(())
    }

    /// Places the scales of the matrix in FP8 of this position.
    fn place_scales(
        &mut self,
        path: &Path,
        name: &str,
        index: usize,
        tensor: &TensorView<'_>,
    ) -> Result<(), ModelError> {
        let file = &self.layout.file_tensors()[index];
        let (Some(range), &[rows, columns]) = (file.plain(), &file.shape[..]) else {
            self.unexpected.insert(name.to_owned());
            return Ok(());
        };
        check_shape(path, name, &fp8::scale_shape([rows, columns]), tensor)?;
        let mut scales = vec![0.0; tensor.shape().iter().product()];
        if !widen(tensor, &mut scales) {
            return Err(ModelError::Dtype {
                path: path.to_owned(),
                tensor: name.to_owned(),
                found: format!("{:?}", tensor.dtype()),
            });
        }
        match self.fp8.remove(&index) {
            Some(Fp8Half::Numbers) => {
                let values = &mut self.values[range];
                fp8::scale(values, columns, &scales);
                self.non_finite[index] = Some(non_finite(values));
            }
            Some(Fp8Half::Scales(_)) | None => drop(self.fp8.insert(index, Fp8Half::Scales(scales))),
        }
        Ok(())
    }

    /// Places a tensor of no name in the layout: a half of one in MXFP4, or one to ignore or to complain about.
    fn place_half(&mut self, path: &Path, name: &str, tensor: &TensorView<'_>) -> Result<(), ModelError> {
        let layout = Arc::clone(&self.layout);
        let half = Mxfp4Half::BOTH.into_iter().find_map(|half| {
            let index = self.find(name.strip_suffix(half.suffix())?)?;
            let file = &layout.file_tensors()[index];
            Some((half, index, <[usize; 3]>::try_from(&file.shape[..]).ok()?))
        });
        let Some((half, index, shape)) = half else {
            // The head of a tied model is there twice in some files; rotary tables are computed, not learnt.
            let known = name == "lm_head.weight" || name.ends_with("rotary_emb.inv_freq");
            if !known && !self.is_of_further_layer(name) {
                self.unexpected.insert(name.to_owned());
            }
            return Ok(());
        };
        let bad =
            |reason: String| ModelError::Mxfp4 { path: path.to_owned(), tensor: name.to_owned(), reason };
        let [experts, inputs, outputs] = shape;
        if !inputs.is_multiple_of(mxfp4::BLOCK) {
            let block = mxfp4::BLOCK;
            return Err(bad(format!(
                "an expert has {inputs} inputs, and blocks have {block} values of one output"
            )));
        }
        if tensor.dtype() != Dtype::U8 {
            return Err(bad(format!("it is stored as {:?}, not as bytes", tensor.dtype())));
        }
        let mut expected = vec![experts, outputs, inputs / mxfp4::BLOCK];
        if half == Mxfp4Half::Blocks {
            expected.push(mxfp4::BLOCK_BYTES);
        }
        check_shape(path, name, &expected, tensor)?;
        let (blocks, scales) = match self.halves.remove(&index) {
            Some((Mxfp4Half::Blocks, blocks)) if half == Mxfp4Half::Scales => {
                (blocks, tensor.data().to_vec())
            }
            Some((Mxfp4Half::Scales, scales)) if half == Mxfp4Half::Blocks => {
                (tensor.data().to_vec(), scales)
            }
            _ => {
                self.halves.insert(index, (half, tensor.data().to_vec()));
                return Ok(());
            }
        };
        let of_file = mxfp4::transposed(shape, &blocks, &scales);
        self.non_finite[index] = Some(non_finite(&of_file));
        layout.file_tensors()[index].scatter(&of_file, &mut self.values);
        Ok(())
    }

    /// Whether a tensor is of a layer after the last of the network.
    fn is_of_further_layer(&self, name: &str) -> bool {
        let within = name.strip_prefix("model.").unwrap_or(name).strip_prefix("layers.");
        let layer =
            within.and_then(|rest| rest.split('.').next()).and_then(|layer| layer.parse::<usize>().ok());
        layer.zip(self.end_of_layers).is_some_and(|(layer, end)| layer >= end)
    }

    /// The parameters, if all tensors were placed. `source` names the files in errors.
    pub(crate) fn finish(self, source: PathBuf) -> Result<Parameters, ModelError> {
        let tensors = self.layout.file_tensors();
        let missing = tensors.iter().enumerate().filter(|(index, _)| self.non_finite[*index].is_none());
        let missing: Vec<String> = missing
            .map(|(index, tensor)| {
                let other = match (self.halves.get(&index), self.fp8.get(&index)) {
                    (Some((Mxfp4Half::Blocks, _)), _) => Mxfp4Half::Scales.suffix(),
                    (Some((Mxfp4Half::Scales, _)), _) => Mxfp4Half::Blocks.suffix(),
                    (None, Some(Fp8Half::Numbers)) => fp8::SCALES,
                    (None, Some(Fp8Half::Scales(_)) | None) => "",
                };
                format!("{}{other}", tensor.name)
            })
            .collect();
        if !missing.is_empty() {
            return Err(ModelError::MissingTensors {
                path: source,
                count: missing.len(),
                names: first_of(missing.iter().map(String::as_str)),
            });
        }
        let mut unexpected = self.unexpected;
        // Scales of a matrix that is not in FP8.
        unexpected.extend(self.fp8.keys().map(|index| format!("{}{}", tensors[*index].name, fp8::SCALES)));
        if !unexpected.is_empty() {
            let count = unexpected.len();
            let names = first_of(unexpected.iter().map(String::as_str));
            return Err(ModelError::UnexpectedTensors { path: source, count, names });
        }
        let names = tensors.iter().map(|tensor| &tensor.name[..]);
        refuse_non_finite(&source, names.zip(self.non_finite.iter().copied().flatten()))?;
        Parameters::from_values(self.layout, self.values)
    }
}

fn check_shape(
    path: &Path,
    name: &str,
    expected: &[usize],
    tensor: &TensorView<'_>,
) -> Result<(), ModelError> {
    if tensor.shape() == expected {
        return Ok(());
    }
    Err(ModelError::Shape {
        path: path.to_owned(),
        tensor: name.to_owned(),
        expected: expected.to_vec(),
        found: tensor.shape().to_vec(),
    })
}
