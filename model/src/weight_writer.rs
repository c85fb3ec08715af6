//! [`Parameters`] to safetensors files.
//!
//! Invariant: a save is atomic and has only finite numbers. f32 is lossless; 16-bit formats round to the nearest number.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, View};
use serde_json::json;

use crate::atomic;
use crate::weight_files::{INDEX, SINGLE, refuse_non_finite};
use crate::{ModelError, ParameterSpec, Parameters};

/// Number format of weights in files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightDtype {
    /// 32 bits, lossless.
    #[default]
    F32,
    /// 16 bits, with the range of f32.
    Bf16,
    /// 16 bits, up to 65504.
    F16,
}

impl WeightDtype {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// The word on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// The value of `dtype` in `config.json`.
    #[must_use]
    pub fn declared(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// Bytes of a weight.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    fn stored(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }

    /// Whether `value` is a finite number in this format.
    fn holds(self, value: f32) -> bool {
        match self {
            Self::F32 => value.is_finite(),
            Self::Bf16 => bf16::from_f32(value).is_finite(),
            Self::F16 => f16::from_f32(value).is_finite(),
        }
    }

    fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        }
    }
}

impl Parameters {
    /// Writes `model.safetensors`, or shards of at most `max_shard_bytes` (a larger tensor gets a shard of its own) and
    /// their index, as `dtype`, the way transformers does. The directory must exist. Nothing is overwritten; a reader
    /// sees no weights before all are there.
    ///
    /// # Errors
    /// If the directory holds weights already, a weight is not finite in `dtype`, or a file cannot be written.
    pub fn save(&self, dir: &Path, dtype: WeightDtype, max_shard_bytes: usize) -> Result<(), ModelError> {
        for name in [SINGLE, INDEX] {
            if dir.join(name).exists() {
                return Err(ModelError::Exists { path: dir.join(name) });
            }
        }
        let specs = self.layout().stored();
        let counts = specs
            .iter()
            .map(|spec| self.values()[spec.range()].iter().filter(|value| !dtype.holds(**value)).count());
        refuse_non_finite(dir, specs.iter().zip(counts))?;
        let shards = shards(specs, dtype, max_shard_bytes);
        if let [shard] = shards.as_slice() {
            return self.write_shard(&dir.join(SINGLE), dtype, shard);
        }
        let mut weight_map = BTreeMap::new();
        for (index, shard) in shards.iter().enumerate() {
            let name = format!("model-{:05}-of-{:05}.safetensors", index + 1, shards.len());
            self.write_shard(&dir.join(&name), dtype, shard)?;
            weight_map.extend(shard.iter().map(|spec| (spec.name.clone(), name.clone())));
        }
        let total = self.layout().len();
        let metadata = json!({"total_size": dtype.bytes() * total, "total_parameters": total});
        let index = json!({"metadata": metadata, "weight_map": weight_map});
        atomic::file(&dir.join(INDEX), |temporary| {
            fs::write(temporary, format!("{index:#}\n"))
                .map_err(|source| ModelError::Write { path: temporary.to_owned(), source })
        })
    }

    fn write_shard(
        &self,
        path: &Path,
        dtype: WeightDtype,
        specs: &[ParameterSpec],
    ) -> Result<(), ModelError> {
        let views = specs
            .iter()
            .map(|spec| (&spec.name, EncodedTensor { spec, dtype, values: &self.values()[spec.range()] }));
        let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        atomic::file(path, |temporary| {
            safetensors::serialize_to_file(views, Some(format), temporary).map_err(|err| {
                let source = match err {
                    SafeTensorError::IoError(source) => source,
                    other => std::io::Error::other(other.to_string()),
                };
                ModelError::Write { path: temporary.to_owned(), source }
            })
        })
    }
}

/// One tensor to write; it is encoded when it is written.
struct EncodedTensor<'a> {
    spec: &'a ParameterSpec,
    dtype: WeightDtype,
    values: &'a [f32],
}

impl View for EncodedTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype.stored()
    }

    fn shape(&self) -> &[usize] {
        &self.spec.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.dtype.encode(self.values).into()
    }

    fn data_len(&self) -> usize {
        self.dtype.bytes() * self.values.len()
    }
}

/// Cuts the canonical order into runs of at most `max_bytes`, each of at least one tensor.
fn shards(specs: &[ParameterSpec], dtype: WeightDtype, max_bytes: usize) -> Vec<Vec<ParameterSpec>> {
    let mut shards: Vec<Vec<ParameterSpec>> = Vec::new();
    let mut free = 0;
    for spec in specs {
        let bytes = dtype.bytes() * spec.len();
        match shards.last_mut().filter(|_| bytes <= free) {
            Some(shard) => {
                shard.push(spec.clone());
                free -= bytes;
            }
            None => {
                shards.push(vec![spec.clone()]);
                free = max_bytes.saturating_sub(bytes);
            }
        }
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::tiny;

    #[test]
    fn narrow_formats_round_and_overflow_is_refused() {
        let [_, config] = tiny();
        let parameters = Parameters::random(&config, 3);
        let read = |dtype| {
            let dir = tempfile::tempdir().unwrap();
            parameters.save(dir.path(), dtype, usize::MAX).unwrap();
            Parameters::load(dir.path(), &config).unwrap()
        };
        let rounded: Vec<f32> = parameters.values().iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
        assert_eq!(read(WeightDtype::Bf16).values(), rounded);
        let rounded: Vec<f32> = parameters.values().iter().map(|x| f16::from_f32(*x).to_f32()).collect();
        assert_eq!(read(WeightDtype::F16).values(), rounded);
        assert_eq!(read(WeightDtype::F32).values(), parameters.values());

        let mut large = parameters;
        large.values_mut()[0] = 1e5;
        let dir = tempfile::tempdir().unwrap();
        let error = large.save(dir.path(), WeightDtype::F16, usize::MAX).unwrap_err();
        assert!(matches!(error, ModelError::NonFinite { count: 1, .. }), "{error}");
        large.save(dir.path(), WeightDtype::Bf16, 1).unwrap();
        assert!(dir.path().join(INDEX).is_file());
    }
}
