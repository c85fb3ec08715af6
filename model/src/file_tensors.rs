//! The tensors of weight files: one for each tensor of the layout, or one for several.
//!
//! Some families store the matrices of all experts as one tensor, in another order, or the projections of a block as one. The layout
//! has each `[out, in]`, so that everything that computes, shares or adapts matrices knows one form; files are read into it and written
//! from it.
//!
//! Invariant: every value of a file tensor is one value of the layout, and no other.

use std::borrow::Cow;
use std::ops::Range;

/// A tensor of weight files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// The tensors of the layout in it; neighbours there.
    pub(crate) parts: Vec<FilePart>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FilePart {
    /// Where it starts in the flat buffer.
    pub(crate) offset: usize,
    /// `[out, in]`; a vector has one input.
    pub(crate) shape: [usize; 2],
    pub(crate) place: FilePlace,
}

/// Where a tensor of the layout lies in one of the files. Distances are in values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FilePlace {
    /// The first value.
    pub(crate) start: usize,
    /// Distance of neighbouring outputs.
    pub(crate) output_stride: usize,
    /// Distance of neighbouring inputs.
    pub(crate) input_stride: usize,
    /// Outputs that are neighbours, where not all are: outputs of other tensors lie between blocks of them.
    pub(crate) block: Option<OutputBlock>,
}

/// Blocks of outputs of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutputBlock {
    /// Outputs of a block.
    pub(crate) outputs: usize,
    /// Distance of neighbouring blocks.
    pub(crate) stride: usize,
}

impl FilePlace {
    /// Rows of `inputs` values, from row `start` on.
    pub(crate) fn rows(start: usize, inputs: usize) -> Self {
        Self::strided(start * inputs, inputs, 1)
    }

    /// All outputs at one distance, and all inputs.
    pub(crate) fn strided(start: usize, output_stride: usize, input_stride: usize) -> Self {
        Self { start, output_stride, input_stride, block: None }
    }

    /// The same in blocks of `outputs` at a distance of `stride`.
    pub(crate) fn in_blocks(self, outputs: usize, stride: usize) -> Self {
        Self { block: Some(OutputBlock { outputs, stride }), ..self }
    }

    /// Where the first input of an output lies.
    fn output(&self, output: usize) -> usize {
        let Self { start, output_stride, block, .. } = *self;
        match block {
            None => start + output * output_stride,
            Some(OutputBlock { outputs, stride }) => {
                start + output / outputs * stride + output % outputs * output_stride
            }
        }
    }
}

/// A tensor of files that is made of several of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FusedTensor {
    /// Its name within the layer.
    pub(crate) name: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) place: FilePlace,
}

impl FileTensor {
    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its values in the flat buffer, if they are there in the order of the file.
    pub(crate) fn plain(&self) -> Option<Range<usize>> {
        match &self.parts[..] {
            [part] if part.is_plain() => Some(part.offset..part.offset + self.len()),
            _ => None,
        }
    }

    /// Its values `[len]` in the order of the file, of the `values` of the whole model.
    pub(crate) fn gathered<'a>(&self, values: &'a [f32]) -> Cow<'a, [f32]> {
        if let Some(range) = self.plain() {
            return values[range].into();
        }
        let mut out = vec![0.0; self.len()];
        for part in &self.parts {
            part.each(|of_layout, of_file| out[of_file] = values[of_layout]);
        }
        out.into()
    }

    /// Puts its values `[len]`, in the order of the file, to where they belong in the `values` of the whole model.
    pub(crate) fn scatter(&self, file: &[f32], values: &mut [f32]) {
        for part in &self.parts {
            part.each(|of_layout, of_file| values[of_layout] = file[of_file]);
        }
    }
}

impl FilePart {
    /// A whole tensor of the files with the `shape` of one of the layout.
    pub(crate) fn whole(offset: usize, shape: &[usize]) -> Self {
        let shape = matrix_shape(shape);
        Self { offset, shape, place: FilePlace::rows(0, shape[1]) }
    }

    fn is_plain(&self) -> bool {
        self.place == FilePlace::rows(0, self.shape[1])
    }

    /// Shows `visit` every value: its place in the layout, and in the tensor of the files.
    fn each(&self, mut visit: impl FnMut(usize, usize)) {
        let [outputs, inputs] = self.shape;
        for output in 0..outputs {
            let start = self.place.output(output);
            for input in 0..inputs {
                let of_layout = self.offset + output * inputs + input;
                visit(of_layout, start + input * self.place.input_stride);
            }
        }
    }
}

/// `[out, in]` of a matrix, `[n, 1]` of a vector.
pub(crate) fn matrix_shape(shape: &[usize]) -> [usize; 2] {
    let outputs = shape.first().copied().unwrap_or(1);
    [outputs, shape.iter().skip(1).product()]
}

#[cfg(test)]
mod tests {
    use crate::config::tests::tiny;
    use crate::{Architecture, Layout};

    #[test]
    fn every_value_is_in_one_place_of_the_files_and_of_the_layout() {
        use Architecture::{GptOss, Phi3, Qwen3Moe, Qwen3Next, Qwen35};
        let [tied, _] = tiny();
        for architecture in [Qwen3Moe, GptOss, Phi3, Qwen3Next, Qwen35] {
            let layout = Layout::new(&tied.clone().of_family(architecture));
            let fused = architecture != Qwen3Moe;
            assert_eq!(layout.file_tensors().len() < layout.specs().len(), fused, "{architecture:?}");
            let values: Vec<f32> = (0..layout.len()).map(|value| value as f32).collect();
            let mut again = vec![-1.0; values.len()];
            for file in layout.file_tensors() {
                let gathered = file.gathered(&values);
                let mut sorted = gathered.to_vec();
                sorted.sort_by(f32::total_cmp);
                let first = file.parts[0].offset;
                assert!(
                    sorted.iter().zip(first..).all(|(value, expected)| *value == expected as f32),
                    "{}",
                    file.name
                );
                file.scatter(&gathered, &mut again);
            }
            assert_eq!(again, values, "{architecture:?}");
        }
    }

    #[test]
    fn experts_of_one_tensor_are_transposed_with_gate_and_up_in_turns() {
        let [tied, _] = tiny();
        let config = tied.of_family(Architecture::GptOss);
        let layout = Layout::new(&config);
        let values: Vec<f32> = (0..layout.len()).map(|value| value as f32).collect();
        let file = |name: &str| {
            let found =
                layout.file_tensors().iter().find(|file| file.name == format!("model.layers.1.mlp.{name}"));
            found.unwrap().gathered(&values).into_owned()
        };
        let of = |name: &str| {
            let spec = layout.spec(&format!("model.layers.1.mlp.experts.2.{name}")).unwrap();
            (values[spec.range()].to_vec(), spec.shape.clone())
        };
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let ((gate, shape), (up, _), (down, _)) =
            (of("gate_proj.weight"), of("up_proj.weight"), of("down_proj.weight"));
        assert_eq!(shape, [width, hidden]);
        // Output 5, input 3.
        let at = 2 * hidden * 2 * width + 3 * 2 * width + 2 * 5;
        let gate_up = file("experts.gate_up_proj");
        assert_eq!((gate_up[at], gate_up[at + 1]), (gate[5 * hidden + 3], up[5 * hidden + 3]));
        assert_eq!(file("experts.down_proj")[2 * width * hidden + 3 * hidden + 5], down[5 * width + 3]);
        let biases = file("experts.gate_up_proj_bias");
        assert_eq!(biases[2 * 2 * width + 7], of("up_proj.bias").0[3]);
        assert_eq!(file("experts.down_proj_bias")[2 * hidden + 7], of("down_proj.bias").0[7]);
    }
}
