//! The tensors of a GGUF file as [`Parameters`].
//!
//! Invariant: a load either fills every tensor of the layout with finite numbers, in the order of rows that Hugging Face files
//! have, or names what is wrong. At most [`CHUNK`] dequantised values exist beside the parameters.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};

use super::header::GgufTensor;
use super::{GgufFile, config::ROPE_FACTORS};
use crate::frozen_parameters::FrozenTensor;
use crate::ops::blocks::{BlockMatrix, GGUF_FORMATS, gguf_format};
use crate::weight_files::{first_of, non_finite, refuse_non_finite};
use crate::{Architecture, Config, Layout, ModelError, ParameterSpec, Parameters};

/// Values that are dequantised at a time; a multiple of every block.
const CHUNK: usize = 1 << 18;

/// Tensors outside the layers: the name in Hugging Face files, and in GGUF files.
const GLOBAL: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Modules of a layer.
const MODULES: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", QUERY),
    ("self_attn.k_proj", KEY),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];
const QUERY: &str = "attn_q";
const KEY: &str = "attn_k";

impl GgufFile {
    /// The weights as f32.
    ///
    /// # Errors
    /// If tensors are missing, unexpected, of another shape, or not finite.
    pub(crate) fn parameters(&self, config: &Config) -> Result<Parameters, ModelError> {
        let layout = Arc::new(Layout::new(config));
        let stored = self.all_of(&layout)?;
        let mut values = vec![0.0; layout.len()];
        let mut counts = Vec::new();
        for (spec, (name, tensor)) in layout.specs().iter().zip(stored) {
            let values = &mut values[spec.range()];
            dequantize(tensor.dtype, &self.bytes[tensor.bytes.clone()], values)
                .map_err(|error| self.unusable(format!("tensor {name} cannot be dequantised: {error}")))?;
            if let Some(heads) = permuted_heads(&name, config) {
                let columns = spec.len() / spec.shape[0];
                restore_rows(values, spec.shape[0] / heads * columns, columns);
            }
            counts.push((&spec.name[..], non_finite(values)));
        }
        refuse_non_finite(&self.path, counts)?;
        Parameters::from_values(layout, values)
    }

    /// The weights as they are stored: matrices stay quantised.
    ///
    /// # Errors
    /// As [`Self::parameters`], and if a matrix has a format that is not computed with.
    pub(crate) fn frozen(&self, config: &Config, layout: &Layout) -> Result<Vec<FrozenTensor>, ModelError> {
        let (mut tensors, mut counts) = (Vec::new(), Vec::new());
        for (spec, (name, tensor)) in layout.specs().iter().zip(self.all_of(layout)?) {
            let bytes = &self.bytes[tensor.bytes.clone()];
            let heads = permuted_heads(&name, config);
            let failed = |error| self.unusable(format!("tensor {name} cannot be dequantised: {error}"));
            if let [rows, columns] = spec.shape[..] {
                let mut bytes = bytes.to_vec();
                if let Some(heads) = heads {
                    let row = bytes.len() / rows;
                    restore_rows(&mut bytes, rows / heads * row, row);
                }
                let format = gguf_format(tensor.dtype);
                let matrix = format.and_then(|format| BlockMatrix::new(format, [rows, columns], bytes));
                let Some(matrix) = matrix else {
                    return Err(self.unusable(format!(
                        "tensor {name} is {:?}, which is not computed with as it is; {} are: convert the file, or load the \
                         model without quantisation",
                        tensor.dtype,
                        GGUF_FORMATS
                    )));
                };
                counts.push(matrix.non_finite());
                tensors.push(FrozenTensor::Matrix(Arc::new(matrix)));
            } else {
                let mut values = vec![0.0; spec.len()];
                dequantize(tensor.dtype, bytes, &mut values).map_err(failed)?;
                if let Some(heads) = heads {
                    restore_rows(&mut values, spec.len() / heads, 1);
                }
                counts.push(non_finite(&values));
                tensors.push(FrozenTensor::Vector(values));
            }
        }
        let names = layout.specs().iter().map(|spec| &spec.name[..]);
        refuse_non_finite(&self.path, names.zip(counts))?;
        Ok(tensors)
    }

    /// The tensors of the layout, in its order, with their names in the file. All that is not allocated yet is checked here:
    /// what is allocated then is at most as large as the file allows.
    fn all_of(&self, layout: &Layout) -> Result<Vec<(String, &GgufTensor)>, ModelError> {
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for spec in layout.specs() {
            let name = name_in_file(&spec.name);
            match self.tensors.get(&name) {
                Some(tensor) => {
                    check_shape(&self.path, spec, &name, tensor)?;
                    found.push((name, tensor));
                }
                None => missing.push(name),
            }
        }
        if !missing.is_empty() {
            let (count, names) = (missing.len(), first_of(missing.iter().map(String::as_str)));
            return Err(self.unusable(format!(
                "it lacks {count} of the tensors that its metadata calls for: {names}; fetch it again, or convert the model \
                 again with llama.cpp's convert_hf_to_gguf"
            )));
        }
        let mut known: HashSet<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        known.insert(ROPE_FACTORS);
        let others: Vec<&str> =
            self.tensors.keys().map(String::as_str).filter(|name| !known.contains(name)).collect();
        if !others.is_empty() {
            let (count, names) = (others.len(), first_of(others));
            return Err(self.unusable(format!(
                "it holds {count} tensors that a model of its metadata has no place for: {names}; left out, the model would \
                 compute something else, so use the Hugging Face directory that it was made from, if rlrun supports it"
            )));
        }
        Ok(found)
    }
}

fn check_shape(path: &Path, spec: &ParameterSpec, name: &str, tensor: &GgufTensor) -> Result<(), ModelError> {
    if tensor.shape == spec.shape {
        return Ok(());
    }
    let reason = format!(
        "tensor {name} has shape {:?}, but its metadata implies {:?}; fetch it again, or convert the model again with \
         llama.cpp's convert_hf_to_gguf",
        tensor.shape, spec.shape
    );
    Err(super::unusable(path, reason))
}

/// The name in GGUF files of a tensor of the layout. A tensor that they do not have keeps its name, under which it is missing.
fn name_in_file(name: &str) -> String {
    if let Some((_, name)) = GLOBAL.iter().find(|(theirs, _)| *theirs == name) {
        return (*name).to_owned();
    }
    let parts = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let Some((layer, (module, kind))) = parts.and_then(|(layer, rest)| Some((layer, rest.rsplit_once('.')?)))
    else {
        return name.to_owned();
    };
    match MODULES.iter().find(|(theirs, _)| *theirs == module) {
        Some((_, module)) => format!("blk.{layer}.{module}.{kind}"),
        None => name.to_owned(),
    }
}

/// The number of heads whose rows are in another order than in Hugging Face files, if this is such a tensor: queries and keys
/// of the architecture `llama`, which Mistral shares.
fn permuted_heads(name: &str, config: &Config) -> Option<usize> {
    if !matches!(config.architecture, Architecture::Llama | Architecture::Mistral) {
        return None;
    }
    match name.split('.').nth(2) {
        Some(QUERY) => Some(config.num_heads),
        Some(KEY) => Some(config.num_kv_heads),
        _ => None,
    }
}

/// Undoes llama.cpp's permutation: there the two rows of a rotary pair are neighbours, in Hugging Face files they are half a
/// head apart. `values [heads, head_dim, columns]`, numbers or bytes of whole rows; `head` is the length of a head in values.
fn restore_rows<T: Copy>(values: &mut [T], head: usize, columns: usize) {
    let half = head / columns / 2;
    for rows in values.chunks_exact_mut(head) {
        let pairs = rows.to_vec();
        for (index, row) in pairs.chunks_exact(columns).enumerate() {
            let to = (index / 2 + index % 2 * half) * columns;
            rows[to..to + columns].copy_from_slice(row);
        }
    }
}

/// Dequantises `bytes`, whole blocks, into `values`, `[n]`.
pub(super) fn dequantize(dtype: GgmlDType, bytes: &[u8], values: &mut [f32]) -> candle_core::Result<()> {
    let chunk = CHUNK / dtype.block_size() * dtype.type_size();
    for (bytes, values) in bytes.chunks(chunk).zip(values.chunks_mut(CHUNK)) {
        let storage = QStorage::from_data(bytes.into(), &Device::Cpu, dtype)?;
        let tensor = QTensor::new(storage, values.len())?.dequantize(&Device::Cpu)?;
        values.copy_from_slice(&tensor.to_vec1::<f32>()?);
    }
    Ok(())
}
