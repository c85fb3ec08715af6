//! Safetensors files of a model to [`Parameters`].
//!
//! Invariant: a load either fills every tensor of the layout with finite numbers or names what is wrong. `weight_loader`
//! places the tensors, `weight_writer` saves them.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

use crate::frozen_parameters::FrozenTensor;
use crate::gguf::{self, GgufFile};
use crate::stored_loader::StoredLoader;
use crate::weight_loader::Loader;
use crate::{Config, ModelError, Parameters, files};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Tensor names listed in an error before it says how many there are.
const NAMES_SHOWN: usize = 3;

impl Parameters {
    /// Reads `model.safetensors`, or the shards of `model.safetensors.index.json`, as f32; or the tensors of a GGUF file.
    ///
    /// Names may lack the `model.` prefix, as transformers saves them for a model without a head. `lm_head.weight`
    /// of a tied model, the rotary tables of old files and layers that predict further tokens are ignored. Matrices in FP8 and
    /// experts in MXFP4 are dequantised.
    ///
    /// # Errors
    /// If a file is missing, cut off or malformed, or if tensors are missing, unexpected, of another shape, of a number
    /// format that is not read, or not finite.
    pub fn load(dir: &Path, config: &Config) -> Result<Self, ModelError> {
        if gguf::is_gguf(dir) {
            return GgufFile::open(dir)?.parameters(config);
        }
        let (source, files) = weight_files(dir)?;
        let mut loader = Loader::new(config);
        for path in &files {
            each_tensor(path, |name, tensor| loader.place(path, name, tensor))?;
        }
        loader.finish(&source)
    }
}

/// The tensors of a directory as its files store them, in the order of the layout.
///
/// # Errors
/// Those of [`Parameters::load`].
pub(crate) fn stored(dir: &Path, config: &Config) -> Result<Vec<FrozenTensor>, ModelError> {
    let (source, files) = weight_files(dir)?;
    let mut loader = StoredLoader::new(config);
    for path in &files {
        each_tensor(path, |name, tensor| loader.place(path, name, tensor))?;
    }
    loader.finish(&source)
}

/// All tensors of a directory by their names, as f32, for networks of other crates.
///
/// # Errors
/// Those of [`Parameters::load`] that do not depend on the network.
pub(crate) fn variables(dir: &Path) -> Result<HashMap<String, Tensor>, ModelError> {
    let (_, files) = weight_files(dir)?;
    let mut variables = HashMap::new();
    for path in &files {
        each_tensor(path, |name, tensor| {
            let mut values = vec![0.0; tensor.shape().iter().product()];
            // Buffers of whole numbers, such as position ids, belong to no weight.
            if widen(tensor, &mut values) {
                let tensor = Tensor::from_vec(values, tensor.shape(), &Device::Cpu);
                let tensor = tensor.map_err(|error| ModelError::Safetensors {
                    path: path.clone(),
                    reason: error.to_string(),
                    len: 0,
                })?;
                variables.insert(name.to_owned(), tensor);
            }
            Ok(())
        })?;
    }
    Ok(variables)
}

/// Shows `visit` every tensor of a file, in the order of their names.
fn each_tensor(
    path: &Path,
    mut visit: impl FnMut(&str, &TensorView<'_>) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let read = |source| ModelError::Read { path: path.to_owned(), source };
    let bytes = files::map(path).map_err(read)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|err| ModelError::Safetensors {
        path: path.to_owned(),
        reason: err.to_string(),
        len: bytes.len() as u64,
    })?;
    // The file's own table has no order: of several mistakes, the same one has to be named every time.
    let mut tensors: Vec<_> = tensors.iter().collect();
    tensors.sort_unstable_by_key(|(name, _)| *name);
    tensors.into_iter().try_for_each(|(name, tensor)| visit(name, &tensor))
}

/// What to name in errors about the whole model, and the files to read.
pub(crate) fn weight_files(dir: &Path) -> Result<(PathBuf, Vec<PathBuf>), ModelError> {
    let single = dir.join(SINGLE);
    if single.exists() {
        return Ok((single.clone(), vec![single]));
    }
    let index = dir.join(INDEX);
    if !index.exists() {
        return Err(ModelError::NoWeights { dir: dir.to_owned() });
    }
    let text = files::read_text(&index, files::MAX_JSON_BYTES)
        .map_err(|source| ModelError::Read { path: index.clone(), source })?;
    let json = |reason: String| ModelError::Json { path: index.clone(), reason };
    let value: Value = serde_json::from_str(&text).map_err(|err| json(err.to_string()))?;
    let map = value.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| json("it has no object `weight_map`".to_owned()))?;
    let mut shards = BTreeSet::new();
    for (tensor, shard) in map {
        let name = shard.as_str().filter(|name| Path::new(name).file_name() == Some(name.as_ref()));
        shards.insert(
            name.ok_or_else(|| json(format!("the shard of `{tensor}` is {shard}, expected a file name")))?,
        );
    }
    if let Some(shard) = shards.iter().find(|shard| !dir.join(shard).exists()) {
        return Err(ModelError::MissingShard { index: index.clone(), shard: (*shard).to_owned() });
    }
    let files = shards.into_iter().map(|shard| dir.join(shard)).collect();
    Ok((index, files))
}

/// Converts to f32; false if the number format is none that is read.
pub(crate) fn widen(tensor: &TensorView<'_>, values: &mut [f32]) -> bool {
    let bytes = tensor.data();
    match tensor.dtype() {
        Dtype::F32 => {
            for (x, b) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*b);
            }
        }
        Dtype::BF16 => {
            for (x, b) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *x = bf16::from_le_bytes(*b).to_f32();
            }
        }
        Dtype::F16 => {
            for (x, b) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *x = f16::from_le_bytes(*b).to_f32();
            }
        }
        _ => return false,
    }
    true
}

pub(crate) fn non_finite(values: &[f32]) -> usize {
    values.iter().filter(|x| !x.is_finite()).count()
}

/// Refuses weights that are not finite, for the number of them in each tensor.
pub(crate) fn refuse_non_finite<'a>(
    path: &Path,
    counts: impl IntoIterator<Item = (&'a str, usize)>,
) -> Result<(), ModelError> {
    let mut bad = counts.into_iter().filter(|(_, count)| *count > 0);
    let Some((name, count)) = bad.next() else { return Ok(()) };
    let count = count + bad.map(|(_, count)| count).sum::<usize>();
    Err(ModelError::NonFinite { path: path.to_owned(), tensor: name.to_owned(), count })
}

pub(crate) fn first_of<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names = names.into_iter();
    let mut shown: Vec<&str> = names.by_ref().take(NAMES_SHOWN).collect();
    if names.next().is_some() {
        shown.push("...");
    }
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::tests::tiny;
    use crate::{ParameterSpec, WeightDtype};
    use proptest::prelude::*;
    use tempfile::TempDir;

    struct Saved {
        dir: TempDir,
        config: Config,
        parameters: Parameters,
    }

    struct StoredTensor {
        name: String,
        dtype: Dtype,
        shape: Vec<usize>,
        bytes: Vec<u8>,
    }

    impl StoredTensor {
        /// One value of zero.
        fn zero(name: &str) -> Self {
            Self { name: name.to_owned(), dtype: Dtype::F32, shape: vec![1], bytes: vec![0; 4] }
        }
    }

    fn saved(max_shard_bytes: usize) -> Saved {
        let [_, config] = tiny();
        let parameters = Parameters::random(&config, 3);
        let dir = tempfile::tempdir().unwrap();
        parameters.save(dir.path(), WeightDtype::F32, max_shard_bytes).unwrap();
        Saved { dir, config, parameters }
    }

    fn failure(dir: &TempDir, config: &Config) -> ModelError {
        Parameters::load(dir.path(), config).unwrap_err()
    }

    /// Replaces the weights by one file of these tensors.
    fn rewrite(dir: &TempDir, tensors: &[StoredTensor]) {
        let views = tensors.iter().map(|StoredTensor { name, dtype, shape, bytes }| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &dir.path().join(SINGLE)).unwrap();
    }

    fn tensors(parameters: &Parameters) -> Vec<StoredTensor> {
        let bytes =
            |spec: &ParameterSpec| parameters.get(&spec.name).iter().flat_map(|x| x.to_le_bytes()).collect();
        let specs = parameters.layout().specs().iter();
        let stored = |spec: &ParameterSpec| StoredTensor {
            name: spec.name.clone(),
            dtype: Dtype::F32,
            shape: spec.shape.clone(),
            bytes: bytes(spec),
        };
        specs.map(stored).collect()
    }

    #[test]
    fn one_file_and_shards_read_back_to_the_bit() {
        for max_shard_bytes in [usize::MAX, 20_000, 1] {
            let Saved { dir, config, parameters } = saved(max_shard_bytes);
            let again = Parameters::load(dir.path(), &config).unwrap();
            assert_eq!(again.values(), parameters.values());
            let names: Vec<String> = fs::read_dir(dir.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            assert_eq!(names.contains(&SINGLE.to_owned()), max_shard_bytes == usize::MAX);
            assert_eq!(names.contains(&INDEX.to_owned()), max_shard_bytes != usize::MAX);
            assert!(names.iter().all(|name| !name.contains("partial")), "{names:?}");
        }
    }

    #[test]
    fn shards_keep_their_bound() {
        let Saved { dir, parameters, .. } = saved(20_000);
        let text = fs::read_to_string(dir.path().join(INDEX)).unwrap();
        let index: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(index["metadata"]["total_size"], 4 * parameters.layout().len());
        assert_eq!(index["weight_map"].as_object().unwrap().len(), parameters.layout().specs().len());
        let sizes: Vec<u64> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .filter(|entry| entry.file_name() != INDEX)
            .map(|entry| entry.metadata().unwrap().len())
            .collect();
        assert!(sizes.len() > 1 && sizes.iter().all(|&size| size < 22_000), "{sizes:?}");
    }

    #[test]
    fn nothing_is_overwritten() {
        for max_shard_bytes in [usize::MAX, 20_000] {
            let Saved { dir, parameters, .. } = saved(max_shard_bytes);
            let err = parameters.save(dir.path(), WeightDtype::F32, max_shard_bytes).unwrap_err();
            assert!(matches!(err, ModelError::Exists { .. }), "{err}");
        }
    }

    #[test]
    fn missing_files_are_named() {
        let Saved { dir, config, .. } = saved(20_000);
        let files = fs::read_dir(dir.path()).unwrap().count() - 1;
        let shard = format!("model-00002-of-{files:05}.safetensors");
        fs::remove_file(dir.path().join(&shard)).unwrap();
        let err = failure(&dir, &config);
        assert!(matches!(&err, ModelError::MissingShard { shard: found, .. } if *found == shard), "{err}");
        fs::write(dir.path().join(INDEX), r#"{"weight_map": {"a": "../../etc/passwd"}}"#).unwrap();
        assert!(failure(&dir, &config).to_string().contains("expected a file name"));
        fs::write(dir.path().join(INDEX), r#"{"weight_map": "#).unwrap();
        assert!(matches!(failure(&dir, &config), ModelError::Json { .. }));
        fs::remove_file(dir.path().join(INDEX)).unwrap();
        assert!(matches!(failure(&dir, &config), ModelError::NoWeights { .. }));
    }

    #[test]
    fn a_cut_off_file_is_named_at_any_length() {
        let Saved { dir, config, .. } = saved(usize::MAX);
        let path = dir.path().join(SINGLE);
        let whole = fs::read(&path).unwrap();
        for len in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
            fs::write(&path, &whole[..len]).unwrap();
            let err = failure(&dir, &config);
            assert!(matches!(err, ModelError::Safetensors { .. } | ModelError::Read { .. }), "{err}");
            assert!(err.to_string().contains(SINGLE), "{err}");
        }
    }

    #[test]
    fn missing_and_unexpected_tensors_are_counted_and_named() {
        let Saved { dir, config, parameters } = saved(usize::MAX);
        let mut some = tensors(&parameters);
        some.retain(|tensor| !tensor.name.contains("k_proj"));
        rewrite(&dir, &some);
        let ModelError::MissingTensors { count, names, .. } = failure(&dir, &config) else { panic!() };
        assert_eq!(count, 4);
        assert!(
            names.starts_with("model.layers.0.self_attn.k_proj.weight") && names.ends_with("..."),
            "{names}"
        );
        let mut more = tensors(&parameters);
        more.push(StoredTensor::zero("v_head.weight"));
        rewrite(&dir, &more);
        let err = failure(&dir, &config);
        assert!(
            matches!(&err, ModelError::UnexpectedTensors { count: 1, names, .. } if names == "v_head.weight")
        );
    }

    #[test]
    fn tensors_without_weights_of_their_own_are_ignored() {
        let [config, _] = tiny();
        let parameters = Parameters::random(&config, 3);
        let dir = tempfile::tempdir().unwrap();
        let mut more = tensors(&parameters);
        more.push(StoredTensor::zero("lm_head.weight"));
        more.push(StoredTensor::zero("model.layers.0.self_attn.rotary_emb.inv_freq"));
        rewrite(&dir, &more);
        assert_eq!(Parameters::load(dir.path(), &config).unwrap().values(), parameters.values());
        let mut bare = tensors(&parameters);
        for tensor in &mut bare {
            tensor.name = tensor.name.trim_start_matches("model.").to_owned();
        }
        rewrite(&dir, &bare);
        assert_eq!(Parameters::load(dir.path(), &config).unwrap().values(), parameters.values());
    }

    #[test]
    fn wrong_shapes_and_formats_are_named() {
        let Saved { dir, config, parameters } = saved(usize::MAX);
        let mut wide = tensors(&parameters);
        wide[0].shape = vec![50, 32];
        rewrite(&dir, &wide);
        let err = failure(&dir, &config).to_string();
        assert!(err.contains("embed_tokens.weight has shape [50, 32]") && err.contains("[100, 16]"), "{err}");
        let mut integers = tensors(&parameters);
        integers[1].dtype = Dtype::I32;
        rewrite(&dir, &integers);
        let err = failure(&dir, &config).to_string();
        assert!(err.contains("input_layernorm.weight is stored as I32; supported: F32, BF16, F16"), "{err}");
    }

    #[test]
    fn weights_that_are_not_finite_are_refused_both_ways() {
        let Saved { dir, config, mut parameters } = saved(usize::MAX);
        let norm = parameters.layout().spec("model.norm.weight").unwrap().offset;
        parameters.values_mut()[norm] = f32::NAN;
        parameters.values_mut()[5] = f32::INFINITY;
        rewrite(&dir, &tensors(&parameters));
        fs::create_dir(dir.path().join("out")).unwrap();
        for err in [
            failure(&dir, &config),
            parameters.save(&dir.path().join("out"), WeightDtype::F32, usize::MAX).unwrap_err(),
        ] {
            let ModelError::NonFinite { tensor, count, .. } = &err else { panic!("{err}") };
            assert_eq!((tensor.as_str(), *count), ("model.embed_tokens.weight", 2));
        }
        assert_eq!(fs::read_dir(dir.path().join("out")).unwrap().count(), 0);
    }

    #[test]
    fn narrow_formats_widen_exactly() {
        let [config, _] = tiny();
        let parameters = Parameters::random(&config, 3);
        let dir = tempfile::tempdir().unwrap();
        let mut narrow = tensors(&parameters);
        let embedding = parameters.get("model.embed_tokens.weight");
        narrow[0].dtype = Dtype::BF16;
        narrow[0].bytes = embedding.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        narrow[1].dtype = Dtype::F16;
        narrow[1].bytes = [0.1f32; 16].iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
        rewrite(&dir, &narrow);
        let read = Parameters::load(dir.path(), &config).unwrap();
        let rounded: Vec<f32> = embedding.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_eq!(read.get("model.embed_tokens.weight"), rounded);
        // The f16 next to 0.1 is 1638.5 / 2^14 rounded to 11 bits.
        assert_eq!(read.get("model.layers.0.input_layernorm.weight"), [0.099_975_586; 16]);
    }

    proptest! {
        #[test]
        fn a_damaged_header_is_an_error_and_no_panic(at in 0usize..600, byte: u8) {
            let Saved { dir, config, parameters } = saved(usize::MAX);
            let path = dir.path().join(SINGLE);
            let mut bytes = fs::read(&path).unwrap();
            bytes[at] = byte;
            fs::write(&path, &bytes).unwrap();
            if let Ok(read) = Parameters::load(dir.path(), &config) {
                prop_assert_eq!(read.values().len(), parameters.values().len());
            }
        }
    }
}
