//! LoRA adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Invariant: a written adapter loads in PEFT and in rlrun. An adapter with features that rlrun does not implement is
//! refused.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use model::{Layout, ModelError, ParameterSpec, Parameters, atomic, files, manifest};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use crate::TrainerError;
use crate::lora::{Adapter, LoraConfig, TargetModule};
use crate::optimizer_files::{Numbers, StoredTensor, serialize};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Key of the base model's name.
const BASE: &str = "base_model_name_or_path";

/// Keys of PEFT's config that change what an adapter computes, with their value for plain LoRA; absent or null means
/// the same.
const PLAIN: [(&str, &str); 20] = [
    ("bias", "\"none\""),
    ("fan_in_fan_out", "false"),
    ("use_rslora", "false"),
    ("use_dora", "false"),
    ("lora_bias", "false"),
    ("use_qalora", "false"),
    ("rank_pattern", "{}"),
    ("alpha_pattern", "{}"),
    ("modules_to_save", "[]"),
    ("target_parameters", "[]"),
    ("layers_to_transform", "null"),
    ("layer_replication", "null"),
    ("trainable_token_indices", "null"),
    ("exclude_modules", "null"),
    ("alora_invocation_tokens", "null"),
    ("arrow_config", "null"),
    ("kasa_config", "null"),
    ("monteclora_config", "null"),
    ("velora_config", "null"),
    ("use_bdlora", "false"),
];

/// Initialisations of PEFT that modify the frozen weights.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// Writes a new directory. `base` becomes PEFT's `base_model_name_or_path`.
pub(crate) fn write(dir: &Path, adapter: &Adapter, base: &str) -> Result<(), ModelError> {
    fs::create_dir(dir).map_err(|source| ModelError::Write { path: dir.to_owned(), source })?;
    fill(dir, adapter, base)
}

/// The same in an empty directory.
pub(crate) fn fill(dir: &Path, adapter: &Adapter, base: &str) -> Result<(), ModelError> {
    let error = |path: &Path| {
        let path = path.to_owned();
        move |source| ModelError::Write { path, source }
    };
    let LoraConfig { rank, alpha, target_modules } = adapter.config();
    let modules: Vec<&str> = target_modules.iter().map(|module| module.as_str()).collect();
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE: base,
        "r": rank,
        "lora_alpha": number(*alpha),
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": false,
        "use_rslora": false,
        "use_dora": false,
        "modules_to_save": null,
        "init_lora_weights": true,
        "inference_mode": true,
    });
    let path = dir.join(CONFIG);
    let text = serde_json::to_vec_pretty(&config).unwrap_or_default();
    fs::write(&path, text).map_err(error(&path))?;
    let in_order = |(index, spec): (usize, &ParameterSpec)| -> Cow<'_, [f32]> {
        let values = &adapter.values()[spec.range()];
        let Some(rows) = adapter.file_rows(index) else { return values.into() };
        let mut of_file = vec![0.0; values.len()];
        for (row, values) in rows.iter().zip(values.chunks_exact(*rank)) {
            of_file[row * rank..][..*rank].copy_from_slice(values);
        }
        of_file.into()
    };
    let values: Vec<_> = adapter.specs().iter().enumerate().map(in_order).collect();
    let tensor = |(spec, values): (&ParameterSpec, _)| {
        (spec.name.clone(), StoredTensor::new(&spec.shape, Numbers::F32(values)))
    };
    let tensors = adapter.specs().iter().zip(values.iter().map(AsRef::as_ref)).map(tensor).collect();
    let path = dir.join(WEIGHTS);
    // transformers and PEFT require this entry.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize(&path, tensors, metadata).map_err(error(&path))
}

/// Copies an adapter to a new directory, atomically. `base` becomes PEFT's `base_model_name_or_path`.
pub(crate) fn copy(from: &Path, to: &Path, base: &str) -> Result<(), TrainerError> {
    let own = from.join(CONFIG);
    let unusable = |reason: String| TrainerError::Adapter { path: own.clone(), reason };
    let config = files::read(&own, files::MAX_JSON_BYTES);
    let config = config.map_err(|error| unusable(format!("cannot be read: {error}")))?;
    let config = serde_json::from_slice(&config);
    let mut config: Value = config.map_err(|error| unusable(format!("is not JSON: {error}")))?;
    config[BASE] = base.into();
    atomic::directory(to, |dir| {
        let error = |name| move |source| ModelError::Write { path: to.join(name), source };
        fs::write(dir.join(CONFIG), format!("{config:#}\n")).map_err(error(CONFIG))?;
        fs::copy(from.join(WEIGHTS), dir.join(WEIGHTS)).map_err(error(WEIGHTS))?;
        Ok(())
    })?;
    Ok(())
}

/// Whether `dir` is an adapter.
pub(crate) fn is_adapter(dir: &Path) -> bool {
    dir.join(CONFIG).is_file()
}

/// The settings of the adapter in `dir`.
pub(crate) fn config(dir: &Path) -> Result<LoraConfig, TrainerError> {
    let (path, bytes) = file(dir, CONFIG, files::MAX_JSON_BYTES)?;
    let unusable = |reason: &str| TrainerError::Adapter { path: path.clone(), reason: reason.to_owned() };
    let config: Value =
        serde_json::from_slice(&bytes).map_err(|error| unusable(&format!("is not JSON: {error}")))?;
    let rank = config["r"].as_u64().and_then(|rank| usize::try_from(rank).ok());
    let modules = serde_json::from_value(config["target_modules"].clone()).ok();
    match (rank, config["lora_alpha"].as_f64(), modules) {
        (Some(rank), Some(alpha), Some(target_modules)) => Ok(LoraConfig { rank, alpha, target_modules }),
        _ => Err(unusable("has no rank, no alpha, or layers that are not supported")),
    }
}

/// The file `name` of an adapter, of at most `limit` bytes, with its path.
fn file(dir: &Path, name: &str, limit: u64) -> Result<(PathBuf, Vec<u8>), TrainerError> {
    let path = dir.join(name);
    match files::read(&path, limit) {
        Ok(bytes) => Ok((path, bytes)),
        Err(error) => {
            let reason = format!("cannot be read: {error}; name a directory that PEFT has written");
            Err(TrainerError::Adapter { path, reason })
        }
    }
}

/// Reads the values of `adapter`, which is of a model of `layout`. `base` are its weights, if it has them in f32.
pub(crate) fn read(
    dir: &Path,
    expected: &LoraConfig,
    layout: &Layout,
    base: Option<&Parameters>,
    adapter: &mut Adapter,
) -> Result<(), TrainerError> {
    manifest::check(dir)?;
    let (path, bytes) = file(dir, CONFIG, files::MAX_JSON_BYTES)?;
    check_config(&bytes, expected).map_err(|reason| TrainerError::Adapter { path, reason })?;
    // The size of f32 values plus a header. PEFT adds both ends of the model if one of them is adapted.
    let ends = layout.specs().iter().filter(|spec| is_end(spec)).map(ParameterSpec::len);
    let weights = 4 * (adapter.values().len() + ends.sum::<usize>()) as u64;
    let (path, bytes) = file(dir, WEIGHTS, weights + files::MAX_JSON_BYTES)?;
    let base = FrozenEnds { layout, values: base };
    let (specs, values) = adapter.parts_mut();
    read_weights(&bytes, &base, specs, values).map_err(|reason| TrainerError::Adapter { path, reason })?;
    reorder(adapter);
    Ok(())
}

/// Puts the rows of all matrices, which are in the order of files, in the order of the layout.
fn reorder(adapter: &mut Adapter) {
    for index in 0..adapter.specs().len() {
        let Some(rows) = adapter.file_rows(index).map(<[usize]>::to_vec) else { continue };
        let (rank, range) = (adapter.config().rank, adapter.specs()[index].range());
        let of_file = adapter.values()[range.clone()].to_vec();
        let own = adapter.values_mut()[range].chunks_exact_mut(rank);
        own.zip(rows).for_each(|(own, row)| own.copy_from_slice(&of_file[row * rank..][..rank]));
    }
}

/// Checks that the config describes plain LoRA with the settings `expected`.
fn check_config(bytes: &[u8], expected: &LoraConfig) -> Result<(), String> {
    let config: Value = serde_json::from_slice(bytes).map_err(|error| format!("is not JSON: {error}"))?;
    if config["peft_type"].as_str() != Some("LORA") {
        return Err(format!("has `peft_type` {}; only \"LORA\" can be trained on", config["peft_type"]));
    }
    for (key, plain) in PLAIN {
        let value = &config[key];
        let plain: Value = serde_json::from_str(plain).unwrap_or_default();
        if !value.is_null() && *value != plain {
            return Err(format!("has `{key}` {value}, which rlrun does not compute; it trains plain LoRA"));
        }
    }
    if let Some(changed) = config["init_lora_weights"].as_str().filter(|init| CHANGES_BASE.contains(init)) {
        return Err(format!(
            "was initialised with \"{changed}\", which modified the base model; convert it to plain LoRA with PEFT"
        ));
    }
    let list =
        config["target_modules"].as_array().map(|list| list.iter().filter_map(Value::as_str).collect());
    let Some(modules): Option<BTreeSet<&str>> = list else {
        return Err(format!(
            "has `target_modules` {}, not a list of names; write them out",
            config["target_modules"]
        ));
    };
    let (rank, alpha) = (config["r"].as_u64(), config["lora_alpha"].as_f64());
    let wanted: BTreeSet<&str> = expected.target_modules.iter().map(|module| module.as_str()).collect();
    if rank == Some(expected.rank as u64) && alpha == Some(expected.alpha) && modules == wanted {
        return Ok(());
    }
    let known: BTreeSet<&str> = TargetModule::ALL.iter().map(|module| module.as_str()).collect();
    if let Some(other) = modules.difference(&known).next() {
        return Err(format!("adapts `{other}`, which is not supported; supported layers are {known:?}"));
    }
    let of = |rank: &str, alpha: &str, modules: &BTreeSet<&str>| {
        format!("rank = {rank}, alpha = {alpha}, target_modules = {:?}", modules.iter().collect::<Vec<_>>())
    };
    let found = of(&config["r"].to_string(), &config["lora_alpha"].to_string(), &modules);
    let wanted = of(&expected.rank.to_string(), &expected.alpha.to_string(), &wanted);
    Err(format!("has {found}, but the recipe says {wanted}; write the adapter's values under `[lora]`"))
}

/// Embedding and head of a base model.
struct FrozenEnds<'a> {
    layout: &'a Layout,
    /// `None` if they are not in memory in f32.
    values: Option<&'a Parameters>,
}

fn read_weights(
    bytes: &[u8],
    base: &FrozenEnds<'_>,
    specs: &[ParameterSpec],
    values: &mut [f32],
) -> Result<(), String> {
    let tensors =
        SafeTensors::deserialize(bytes).map_err(|error| format!("is not a safetensors file: {error}"))?;
    let known: BTreeSet<&str> = specs.iter().map(|spec| &spec.name[..]).collect();
    for (name, view) in tensors.iter().filter(|(name, _)| !known.contains(name)) {
        let Some(end) = end_of(name, base.layout) else {
            return Err(format!("has a tensor {name}, for which the model has no layer; use its base model"));
        };
        let Some(values) = base.values else {
            return Err(format!(
                "has {name}, which is compared with that of the base model only where that is in memory in f32; remove it from the \
                 file"
            ));
        };
        let mut found = vec![0.0; end.len()];
        if view.shape() == end.shape {
            convert(&view, &mut found).map_err(|reason| format!("{name} {reason}"))?;
        }
        if found != values.values()[end.range()] {
            return Err(format!(
                "{name} is not that of the base model; use the model that it was trained on"
            ));
        }
    }
    for spec in specs {
        let name = &spec.name;
        let view = tensors.tensor(name).map_err(|_| format!("has no tensor {name}"))?;
        if view.shape() != spec.shape {
            return Err(format!("{name} is {:?}, expected {:?}", view.shape(), spec.shape));
        }
        convert(&view, &mut values[spec.range()]).map_err(|reason| format!("{name} {reason}"))?;
    }
    Ok(())
}

/// Whether a tensor is the embedding or the head.
fn is_end(spec: &ParameterSpec) -> bool {
    use TargetModule::{EmbedTokens, LmHead};
    matches!(TargetModule::of_weight(&spec.name), Some(EmbedTokens | LmHead))
}

/// The end of the base model that PEFT has written beside the factors under this name.
fn end_of<'a>(name: &str, layout: &'a Layout) -> Option<&'a ParameterSpec> {
    let module = name.strip_prefix("base_model.model.")?.strip_suffix(".weight")?;
    let module = module.strip_suffix(".base_layer").unwrap_or(module);
    layout.spec(&format!("{module}.weight")).filter(|spec| is_end(spec))
}

/// Converts a tensor to f32; an error if a number is not finite.
fn convert(view: &TensorView<'_>, values: &mut [f32]) -> Result<(), String> {
    let bytes = view.data();
    match view.dtype() {
        Dtype::F32 => {
            let numbers = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            values.iter_mut().zip(numbers).for_each(|(value, x)| *value = x);
        }
        Dtype::BF16 => {
            let numbers = bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32());
            values.iter_mut().zip(numbers).for_each(|(value, x)| *value = x);
        }
        Dtype::F16 => {
            let numbers = bytes.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32());
            values.iter_mut().zip(numbers).for_each(|(value, x)| *value = x);
        }
        other => return Err(format!("is {other:?}; F32, F16 and BF16 can be read")),
    }
    if values.iter().all(|value| value.is_finite()) {
        return Ok(());
    }
    Err("has values that are not finite; use an earlier adapter".to_owned())
}

/// Whole numbers as JSON integers, because PEFT declares an integer.
fn number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}
