//! The matrices that low-rank adapters are of (LoRA, Hu et al. 2021, arXiv 2106.09685), under the names that PEFT gives them.
//!
//! Files of some families have several tensors of the layout as one, and their programs compute with it as one linear layer. PEFT
//! adapts that layer as a whole, and so does rlrun where the name of the layer is a [`TargetModule`].
//!
//! Invariant: matrices are in the order of the layout, and the values of one are neighbours there.

use std::ops::Range;

use crate::file_tensors::FilePlace;
use crate::{ParameterSpec, TargetModule};

/// A matrix that can have an adapter: a tensor of the layout, or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptedMatrix<'a> {
    /// The name of its weight in Hugging Face files.
    pub name: &'a str,
    /// Its layer; `None` if that is no target of LoRA, as a router.
    pub module: Option<TargetModule>,
    /// Its values in the flat parameters.
    pub weight: Range<usize>,
    /// Number of outputs.
    pub rows: usize,
    /// Number of inputs.
    pub columns: usize,
    tensors: &'a [ParameterSpec],
}

/// The rows of a larger matrix of files that a tensor is, where adapters are of that matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FusedRows {
    /// The name of the larger matrix.
    pub(crate) name: String,
    pub(crate) place: FilePlace,
}

impl<'a> AdaptedMatrix<'a> {
    /// All matrices among `specs`, which are neighbours.
    pub fn all(specs: &'a [ParameterSpec]) -> impl Iterator<Item = Self> {
        let are_one = |a: &ParameterSpec, b: &ParameterSpec| match (&a.fused, &b.fused) {
            (Some(a), Some(b)) => a.name == b.name,
            _ => false,
        };
        specs.chunk_by(are_one).filter_map(Self::of)
    }

    /// The matrix of `tensors`, if they are one.
    fn of(tensors: &'a [ParameterSpec]) -> Option<Self> {
        let (first, last) = (tensors.first()?, tensors.last()?);
        let [_, columns] = first.shape[..] else { return None };
        let weight = first.offset..last.range().end;
        let name = first.fused.as_ref().map_or(&first.name, |fused| &fused.name);
        let (module, rows) = (TargetModule::of_weight(name), weight.len() / columns);
        Some(Self { name, module, weight, rows, columns, tensors })
    }

    /// `[rows]` for each of its rows the row of the matrix in files; `None` if they are the same.
    #[must_use]
    pub fn file_rows(&self) -> Option<Vec<usize>> {
        let of_tensor = |spec: &ParameterSpec| {
            let place = spec.fused.as_ref()?.place;
            Some((0..spec.shape[0]).map(move |row| place.output(row) / self.columns))
        };
        let rows: Vec<usize> = self.tensors.iter().filter_map(of_tensor).flatten().collect();
        rows.iter().enumerate().any(|(own, of_file)| own != *of_file).then_some(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::{of_every_family, tiny};
    use crate::{Architecture, Layout};

    #[test]
    fn every_matrix_but_routers_is_a_target_of_lora() {
        for config in of_every_family() {
            let layout = Layout::new(&config);
            let mut values = 0;
            for matrix in AdaptedMatrix::all(layout.specs()) {
                let routers = ["mlp.gate.weight", "mlp.router.weight", "mlp.shared_expert_gate.weight"];
                let is_router = routers.iter().any(|router| matrix.name.ends_with(router));
                assert_eq!(matrix.module.is_none(), is_router, "{}", matrix.name);
                assert_eq!(matrix.weight.len(), matrix.rows * matrix.columns, "{}", matrix.name);
                values += matrix.weight.len();
            }
            let matrices = layout.specs().iter().filter(|spec| spec.shape.len() == 2);
            assert_eq!(values, matrices.map(ParameterSpec::len).sum::<usize>());
        }
    }

    /// A recurrence has the linear layers of its files.
    #[test]
    fn projections_of_a_recurrence_are_adapted_as_files_have_them() {
        let [tied, _] = tiny();
        let found = |architecture| {
            let layout = Layout::new(&tied.clone().of_family(architecture));
            let matrices = AdaptedMatrix::all(layout.specs()).map(|matrix| {
                let rows = matrix.file_rows();
                if let Some(mut rows) = rows.clone() {
                    rows.sort_unstable();
                    assert_eq!(rows, (0..matrix.rows).collect::<Vec<_>>(), "{}", matrix.name);
                }
                (matrix.name.to_owned(), matrix.rows, rows.is_some())
            });
            let of_first = |(name, rows, other): (String, _, _)| {
                Some((name.strip_prefix("model.layers.0.linear_attn.")?.to_owned(), rows, other))
            };
            matrices.filter_map(of_first).collect::<Vec<_>>()
        };
        let spec = tied.clone().of_family(Architecture::Qwen35).delta_net().unwrap();
        let (channels, values, heads) = (spec.channels(), spec.value_width(), spec.value_heads);
        let row = |name: &str, rows: usize, other: bool| (format!("{name}.weight"), rows, other);
        let output = row("out_proj", tied.hidden_size, false);
        let apart =
            [("in_proj_qkv", channels), ("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads)];
        let mut apart = apart.map(|(name, rows)| row(name, rows, false)).to_vec();
        apart.push(output.clone());
        assert_eq!(found(Architecture::Qwen35), apart);
        let by_head =
            [row("in_proj_qkvz", channels + values, true), row("in_proj_ba", 2 * heads, true), output];
        assert_eq!(found(Architecture::Qwen3Next), by_head);
    }
}
