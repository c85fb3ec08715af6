//! The tensors of weight files, placed one after the other in the flat buffer of [`Parameters`].
//!
//! Invariant: a tensor is placed whole, or an error names it. Tensors that have no place, or were not there, are named at the end.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::TensorView;

use crate::config::families::FurtherLayers;
use crate::file_tensors::{FilePart, FileTensor};
use crate::stacked_experts::{StackedExperts, stacked_experts};
use crate::stored::{StoredPart, StoredValues};
use crate::weight_files::{first_of, non_finite, refuse_non_finite, widen};
use crate::{Config, Layout, ModelError, Parameters};

/// Starts of the names of tensors that read images.
const IMAGES: &[&str] = &["model.visual.", "visual."];

/// The names of the tensors of weight files, and what there is to complain about.
pub(crate) struct TensorNames {
    pub(crate) layout: Arc<Layout>,
    /// Position of each tensor of files by its name.
    by_name: HashMap<String, usize>,
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

impl TensorNames {
    pub(crate) fn new(config: &Config) -> Self {
        let layout = Arc::new(Layout::new(config));
        let further = config.architecture.further_layers();
        let has_images = config.architecture.has_files_with_images();
        let further_parts: &[&str] = if further == FurtherLayers::Apart { &["mtp."] } else { &[] };
        let names = layout.file_tensors().iter().map(|tensor| tensor.name.clone());
        let by_name = names.zip(0..).collect();
        Self {
            stacked: if has_images { stacked_experts(config, &layout, &by_name) } else { HashMap::new() },
            by_name,
            end_of_layers: (further == FurtherLayers::AfterLast).then_some(config.num_layers()),
            has_images,
            ignored: if has_images { [further_parts, IMAGES].concat() } else { further_parts.to_vec() },
            unexpected: BTreeSet::new(),
            layout,
        }
    }

    /// The name of a tensor in a model of text alone.
    fn of_text(&self, name: &str) -> String {
        name.replacen("model.language_model.", "model.", usize::from(self.has_images))
    }

    /// The tensor of all experts of a layer of this name, which is taken out.
    pub(crate) fn take_stacked(&mut self, name: &str) -> Option<StackedExperts> {
        self.stacked.remove(&self.of_text(name))
    }

    /// Position of a tensor of files, and what `name` is of it.
    pub(crate) fn find(&self, name: &str) -> Option<(usize, StoredPart)> {
        let position = |name: &str| {
            self.by_name
                .get(&self.of_text(name))
                .or_else(|| self.by_name.get(&format!("model.{name}")))
                .copied()
        };
        StoredPart::ALL.into_iter().find_map(|part| {
            let index = position(name.strip_suffix(part.suffix())?)?;
            part.is_of(&self.layout.file_tensors()[index]).then_some((index, part))
        })
    }

    /// Notes a tensor that has no place, if it is none to ignore.
    pub(crate) fn note(&mut self, name: &str) {
        // The head of a tied model is there twice in some files; rotary tables are computed, not learnt.
        let known = name == "lm_head.weight"
            || name.ends_with("rotary_emb.inv_freq")
            || self.ignored.iter().any(|start| name.starts_with(start));
        if !known && !self.is_of_further_layer(name) {
            self.unexpected.insert(name.to_owned());
        }
    }

    /// Notes scales of the tensor of files of this position, which has none.
    pub(crate) fn note_scales(&mut self, index: usize) {
        let name = &self.layout.file_tensors()[index].name;
        self.unexpected.insert(format!("{name}{}", StoredPart::Float8Scales.suffix()));
    }

    /// Whether a tensor is of a layer after the last of the network.
    fn is_of_further_layer(&self, name: &str) -> bool {
        let within = name.strip_prefix("model.").unwrap_or(name).strip_prefix("layers.");
        let layer =
            within.and_then(|rest| rest.split('.').next()).and_then(|layer| layer.parse::<usize>().ok());
        layer.zip(self.end_of_layers).is_some_and(|(layer, end)| layer >= end)
    }

    /// An error if tensors have no place, or if a part of one is `missing`. `source` names the files.
    pub(crate) fn complain(
        &self,
        source: &Path,
        missing: impl Iterator<Item = Option<StoredPart>>,
    ) -> Result<(), ModelError> {
        let tensors = self.layout.file_tensors().iter().zip(missing);
        let missing: Vec<String> =
            tensors.filter_map(|(tensor, part)| Some(format!("{}{}", tensor.name, part?.suffix()))).collect();
        if !missing.is_empty() {
            return Err(ModelError::MissingTensors {
                path: source.to_owned(),
                count: missing.len(),
                names: first_of(missing.iter().map(String::as_str)),
            });
        }
        if !self.unexpected.is_empty() {
            let count = self.unexpected.len();
            let names = first_of(self.unexpected.iter().map(String::as_str));
            return Err(ModelError::UnexpectedTensors { path: source.to_owned(), count, names });
        }
        Ok(())
    }
}

/// Fills the flat buffer file by file.
pub(crate) struct Loader {
    names: TensorNames,
    values: Vec<f32>,
    /// Per tensor of files: values that are not finite; `None` until it was read.
    non_finite: Vec<Option<usize>>,
    /// Quantised tensors of files, by their position, of which a part was not read yet.
    halves: HashMap<usize, StoredValues>,
}

impl Loader {
    pub(crate) fn new(config: &Config) -> Self {
        let names = TensorNames::new(config);
        let values = vec![0.0; names.layout.len()];
        Self {
            non_finite: vec![None; names.layout.file_tensors().len()],
            halves: HashMap::new(),
            names,
            values,
        }
    }

    /// Places a tensor of the file `path`.
    pub(crate) fn place(
        &mut self,
        path: &Path,
        name: &str,
        tensor: &TensorView<'_>,
    ) -> Result<(), ModelError> {
        let layout = Arc::clone(&self.names.layout);
        if let Some(StackedExperts { file, of_each }) = self.names.take_stacked(name) {
            let mut stored = StoredValues::default();
            stored.put((path, name), &file, StoredPart::Values, tensor)?;
            for (part, index) in file.parts.iter().zip(of_each) {
                self.non_finite[index] = Some(self.write((path, name), &file, part, &stored)?);
            }
            return Ok(());
        }
        let Some((index, part)) = self.names.find(name) else {
            self.names.note(name);
            return Ok(());
        };
        let file = &layout.file_tensors()[index];
        let plain = file.plain().filter(|_| part == StoredPart::Values && tensor.shape() == file.shape);
        if let Some(range) = plain
            && widen(tensor, &mut self.values[range.clone()])
        {
            self.non_finite[index] = Some(non_finite(&self.values[range]));
            return Ok(());
        }
        let mut stored = self.halves.remove(&index).unwrap_or_default();
        stored.put((path, name), file, part, tensor)?;
        if stored.has_loose_scales() {
            self.names.note_scales(index);
        }
        if stored.missing().is_some() {
            self.halves.insert(index, stored);
            return Ok(());
        }
        let mut count = 0;
        for part in &file.parts {
            count += self.write((path, name), file, part, &stored)?;
        }
        self.non_finite[index] = Some(count);
        Ok(())
    }

    /// Writes `part` of `file`, which is the tensor `name` of the file `path`, and counts the values that are not finite.
    fn write(
        &mut self,
        (path, name): (&Path, &str),
        file: &FileTensor,
        part: &FilePart,
        stored: &StoredValues,
    ) -> Result<usize, ModelError> {
        let [rows, columns] = part.shape;
        let values = &mut self.values[part.offset..][..rows * columns];
        if stored.write(file, part, values) {
            return Ok(non_finite(values));
        }
        let (path, tensor) = (path.to_owned(), name.to_owned());
        let reason = format!("it has no rows of {columns} values");
        Err(ModelError::Blocks { path, tensor, reason })
    }

    /// The parameters, if all tensors were placed. `source` names the files in errors.
    pub(crate) fn finish(self, source: &Path) -> Result<Parameters, ModelError> {
        let Self { mut names, values, non_finite, halves } = self;
        // Scales of what was whole without them.
        halves
            .keys()
            .filter(|index| non_finite[**index].is_some())
            .for_each(|index| names.note_scales(*index));
        let missing =
            non_finite.iter().enumerate().map(|(index, placed)| match (placed, halves.get(&index)) {
                (Some(_), _) => None,
                (None, Some(half)) => half.missing(),
                (None, None) => Some(StoredPart::Values),
            });
        names.complain(source, missing)?;
        let files = names.layout.file_tensors().iter().map(|tensor| &tensor.name[..]);
        refuse_non_finite(source, files.zip(non_finite.into_iter().flatten()))?;
        Parameters::from_values(names.layout, values)
    }
}
