//! Frozen weights as the files of a Hugging Face directory store them.
//!
//! Invariant: every tensor of the layout is there, in its own rows and columns, or an error names it.

use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::TensorView;

use crate::frozen_parameters::FrozenTensor;
use crate::stacked_experts::StackedExperts;
use crate::stored::{StoredPart, StoredValues};
use crate::weight_files::{non_finite, refuse_non_finite};
use crate::weight_loader::TensorNames;
use crate::{Config, ModelError};

/// Collects the tensors of the files.
pub(crate) struct StoredLoader {
    names: TensorNames,
    /// For each tensor of files.
    stored: Vec<StoredValues>,
}

impl StoredLoader {
    pub(crate) fn new(config: &Config) -> Self {
        let names = TensorNames::new(config);
        let stored = names.layout.file_tensors().iter().map(|_| StoredValues::default()).collect();
        Self { names, stored }
    }

    /// Takes a tensor of the file `path`.
    pub(crate) fn place(
        &mut self,
        path: &Path,
        name: &str,
        tensor: &TensorView<'_>,
    ) -> Result<(), ModelError> {
        if let Some(StackedExperts { file, of_each }) = self.names.take_stacked(name) {
            let mut all = StoredValues::default();
            all.put((path, name), &file, StoredPart::Values, tensor)?;
            for (part, index) in file.parts.iter().zip(of_each) {
                self.stored[index] = all.part(part);
            }
            return Ok(());
        }
        let Some((index, part)) = self.names.find(name) else {
            self.names.note(name);
            return Ok(());
        };
        let file = &self.names.layout.file_tensors()[index];
        self.stored[index].put((path, name), file, part, tensor)
    }

    /// The tensors in the order of the layout, if all are there. `source` names the files in errors.
    pub(crate) fn finish(self, source: &Path) -> Result<Vec<FrozenTensor>, ModelError> {
        let Self { mut names, stored } = self;
        let loose = stored.iter().enumerate().filter(|(_, stored)| stored.has_loose_scales());
        loose.for_each(|(index, _)| names.note_scales(index));
        let files = names.layout.file_tensors();
        names.complain(source, stored.iter().map(StoredValues::missing))?;
        let specs = names.layout.specs();
        let mut tensors: Vec<Option<FrozenTensor>> = specs.iter().map(|_| None).collect();
        let mut counts = Vec::new();
        for (file, stored) in files.iter().zip(stored) {
            for part in &file.parts {
                let index = specs.partition_point(|spec| spec.offset < part.offset);
                let Some(matrix) = stored.matrix(file, part) else {
                    let reason = format!("a row has {} values, which are not whole blocks", part.shape[1]);
                    return Err(ModelError::Blocks {
                        path: source.to_owned(),
                        tensor: file.name.clone(),
                        reason,
                    });
                };
                let tensor = if specs[index].shape.len() == 2 {
                    counts.push((&file.name[..], matrix.non_finite()));
                    FrozenTensor::Matrix(Arc::new(matrix))
                } else {
                    let mut values = vec![0.0; specs[index].len()];
                    matrix.dequantize(0..part.shape[0], &mut values);
                    counts.push((&file.name[..], non_finite(&values)));
                    FrozenTensor::Vector(values)
                };
                tensors[index] = Some(tensor);
            }
        }
        refuse_non_finite(source, counts)?;
        Ok(tensors.into_iter().flatten().collect())
    }
}
