//! The tensors of weight files, placed one after the other in the flat buffer of [`Parameters`].
//!
//! Invariant: a tensor is placed whole, or an error names it. Tensors that have no place, or were not there, are named at the end.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::{Dtype, TensorView};

use crate::config::families::FurtherLayers;
use crate::file_tensors::{FilePart, FilePlace, FileTensor};
use crate::layer::ExpertSpec;
use crate::weight_files::{first_of, non_finite, refuse_non_finite, widen};
use crate::{Config, Layout, ModelError, Parameters, mxfp4};

/// Starts of the names of tensors that read images.
const IMAGES: &[&str] = &["model.visual.", "visual."];

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
    /// Layers from this one on predict further tokens, and are not read.
    end_of_layers: Option<usize>,
    /// Whether the files may be those of a model that reads images too.
    has_images: bool,
    /// Tensors of all experts of a layer, by their names, in place of those of each.
    stacked: HashMap<String, StackedExperts>,
    /// Starts of the names of tensors that are not read.
    ignored: Vec<&'static str>,
    unexpected: BTreeSet<String>,
}

/// A half of a tensor in MXFP4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mxfp4Half {
    Blocks,
    Scales,
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
        let further = config.architecture.further_layers();
        let has_images = config.architecture.has_files_with_images();
        let further_parts: &[&str] = if further == FurtherLayers::Apart { &["mtp."] } else { &[] };
        let names = layout.file_tensors().iter().map(|tensor| tensor.name.clone());
        let by_name = names.zip(0..).collect();
        Self {
            non_finite: vec![None; layout.file_tensors().len()],
            halves: HashMap::new(),
            end_of_layers: (further == FurtherLayers::AfterLast).then_some(config.num_layers()),
            stacked: if has_images { stacked_experts(config, &layout, &by_name) } else { HashMap::new() },
            by_name,
            has_images,
            ignored: if has_images { [further_parts, IMAGES].concat() } else { further_parts.to_vec() },
            unexpected: BTreeSet::new(),
            layout,
            values,
        }
    }

    /// The name of a tensor in a model of text alone.
    fn of_text(&self, name: &str) -> String {
        name.replacen("model.language_model.", "model.", usize::from(self.has_images))
    }

    /// Position of a tensor of files.
    fn find(&self, name: &str) -> Option<usize> {
        let of_text = self.of_text(name);
        self.by_name.get(&of_text).or_else(|| self.by_name.get(&format!("model.{name}"))).copied()
    }

    /// Places a tensor of the file `path`.
    pub(crate) fn place(
        &mut self,
        path: &Path,
        name: &str,
        tensor: &TensorView<'_>,
    ) -> Result<(), ModelError> {
        let layout = Arc::clone(&self.layout);
        if let Some(stacked) = self.stacked.remove(&self.of_text(name)) {
            return self.place_stacked(path, name, tensor, &stacked);
        }
        let Some(index) = self.find(name) else {
            return self.place_half(path, name, tensor);
        };
        let file = &layout.file_tensors()[index];
        check_shape(path, name, &file.shape, tensor)?;
        let mut of_file = Vec::new();
        let values = match file.plain() {
            Some(range) => &mut self.values[range],
            None => {
                of_file.resize(file.len(), 0.0);
                &mut of_file[..]
            }
        };
        read_values(path, name, tensor, values)?;
        self.non_finite[index] = Some(non_finite(values));
        if !of_file.is_empty() {
            file.scatter(&of_file, &mut self.values);
        }
        Ok(())
    }

    /// Places a tensor of all experts of a layer.
    fn place_stacked(
        &mut self,
        path: &Path,
        name: &str,
        tensor: &TensorView<'_>,
        StackedExperts { file, of_each }: &StackedExperts,
    ) -> Result<(), ModelError> {
        check_shape(path, name, &file.shape, tensor)?;
        let mut values = vec![0.0; file.len()];
        read_values(path, name, tensor, &mut values)?;
        file.scatter(&values, &mut self.values);
        for (at, index) in of_each.iter().enumerate() {
            self.non_finite[*index] = Some(if at == 0 { non_finite(&values) } else { 0 });
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
            let known = name == "lm_head.weight"
                || name.ends_with("rotary_emb.inv_freq")
                || self.ignored.iter().any(|start| name.starts_with(start));
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
                let other = self.halves.get(&index).map_or("", |(half, _)| match half {
                    Mxfp4Half::Blocks => Mxfp4Half::Scales.suffix(),
                    Mxfp4Half::Scales => Mxfp4Half::Blocks.suffix(),
                });
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
        if !self.unexpected.is_empty() {
            let count = self.unexpected.len();
            let names = first_of(self.unexpected.iter().map(String::as_str));
            return Err(ModelError::UnexpectedTensors { path: source, count, names });
        }
        let names = tensors.iter().map(|tensor| &tensor.name[..]);
        refuse_non_finite(&source, names.zip(self.non_finite.iter().copied().flatten()))?;
        Parameters::from_values(self.layout, self.values)
    }
}

/// A tensor of all experts of a layer.
struct StackedExperts {
    file: FileTensor,
    /// Positions of the tensors of each expert among those of files.
    of_each: Vec<usize>,
}

/// Tensors of all experts, as models that read images too have them: `[experts, 2 width, hidden]` of gate and up, one after the
/// other, and `[experts, hidden, width]`.
fn stacked_experts(
    config: &Config,
    layout: &Layout,
    by_name: &HashMap<String, usize>,
) -> HashMap<String, StackedExperts> {
    let mut all = HashMap::new();
    for (layer, spec) in config.layers.iter().enumerate() {
        let Some(ExpertSpec { count, width, .. }) = spec.feed_forward.experts() else { continue };
        let hidden = config.hidden_size;
        let module = format!("model.layers.{layer}.mlp.experts");
        for (name, parts, [rows, inputs]) in [
            ("gate_up_proj", &["gate_proj", "up_proj"][..], [2 * width, hidden]),
            ("down_proj", &["down_proj"], [hidden, width]),
        ] {
            let names = (0..count).flat_map(|expert| parts.iter().map(move |part| (expert, *part)));
            let names = names.map(|(expert, part)| format!("{module}.{expert}.{part}.weight"));
            let each = rows / parts.len();
            let part = |(at, name): (usize, String)| {
                let (file, spec) = (FilePlace::rows(at * each, inputs), layout.spec(&name)?);
                let part = FilePart { offset: spec.offset, shape: [each, inputs], place: file };
                Some((part, *by_name.get(&name)?))
            };
            let (parts, of_each) = names.enumerate().filter_map(part).unzip();
            let name = format!("{module}.{name}");
            let file = FileTensor { name: name.clone(), shape: vec![count, rows, inputs], parts };
            all.insert(name, StackedExperts { file, of_each });
        }
    }
    all
}

/// Reads the values of a tensor, as f32.
fn read_values(
    path: &Path,
    name: &str,
    tensor: &TensorView<'_>,
    values: &mut [f32],
) -> Result<(), ModelError> {
    if widen(tensor, values) {
        return Ok(());
    }
    Err(ModelError::Dtype {
        path: path.to_owned(),
        tensor: name.to_owned(),
        found: format!("{:?}", tensor.dtype()),
    })
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
