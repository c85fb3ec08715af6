//! GGUF files that the tests quantise themselves.
//!
//! Invariant: what is expected is computed from the model that a file was made from, without the reader.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::quantized::{GgmlDType, QTensor};
use model::{
    Architecture, Config, LayerSpec, MemoryBudget, ModelDirectory, ModelError, Parameters,
    ResidentParameters, RopeScaling, Rotary, Sizes, WeightDtype, characters,
};
use proptest::prelude::*;
use serde_json::json;
use trajectory::{Message, Prompt};

use crate::common::gguf::{GgufContent, quantized};

const DTYPES: [GgmlDType; 14] = [
    GgmlDType::F32,
    GgmlDType::F16,
    GgmlDType::BF16,
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q2K,
    GgmlDType::Q3K,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
    GgmlDType::Q8K,
];

/// A model whose rows are whole blocks of every format.
fn config(architecture: Architecture) -> Config {
    Config::fresh(&Sizes {
        vocab_size: 100,
        hidden_size: 256,
        intermediate_size: 256,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 64,
    })
    .of_family(architecture)
}

/// A model whose files are small.
fn small(architecture: Architecture) -> Config {
    Config::fresh(&Sizes {
        vocab_size: 100,
        hidden_size: 32,
        intermediate_size: 32,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 64,
    })
    .of_family(architecture)
}

/// The model with this base of rotary wavelengths.
fn rotating(config: Config, theta: f64) -> Config {
    config.map_layers(|mut layer| {
        layer.attention.rotary = Some(Rotary::plain(theta));
        layer
    })
}

/// Random parameters, biases and norms too.
fn random(config: &Config) -> Parameters {
    let mut parameters = Parameters::random(config, 3);
    let mut state = 1u32;
    for value in parameters.values_mut() {
        if *value == 0.0 || *value == 1.0 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *value += (state >> 8) as f32 / (1 << 25) as f32;
        }
    }
    parameters
}

fn content(config: &Config, dtype: GgmlDType) -> GgufContent {
    GgufContent::of(config, &random(config), dtype, (&characters(), "gpt-2"))
}

struct Written {
    root: tempfile::TempDir,
    path: PathBuf,
}

fn written(content: &GgufContent) -> Written {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model.gguf");
    content.write(&path);
    Written { root, path }
}

fn failure(content: &GgufContent) -> String {
    let written = written(content);
    let error = loaded(&written.path).unwrap_err().to_string();
    assert!(error.contains("model.gguf"), "{error}");
    error
}

/// The weights, as everything that opens a model reads them.
fn loaded(path: &Path) -> Result<Parameters, ModelError> {
    ModelDirectory::open(path)?.load_parameters()
}

/// Every tensor quantised and dequantised.
fn expected(config: &Config, dtype: GgmlDType) -> Vec<f32> {
    let parameters = random(config);
    let mut all = Vec::new();
    for spec in parameters.layout().specs() {
        let dtype = if spec.shape.len() == 1 { GgmlDType::F32 } else { dtype };
        let tensor = quantized(parameters.get(&spec.name), &spec.shape, dtype);
        let tensor = tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap();
        all.extend(tensor.to_vec1::<f32>().unwrap());
    }
    all
}

#[test]
fn every_format_is_dequantised() {
    let config = config(Architecture::Llama);
    for dtype in DTYPES {
        let written = written(&content(&config, dtype));
        assert_eq!(loaded(&written.path).unwrap().values(), expected(&config, dtype), "{dtype:?}");
    }
}

#[test]
fn every_architecture_keeps_its_network_and_rows() {
    let llama = small(Architecture::Llama);
    let bias = |layer| LayerSpec { qkv_bias: true, output_bias: true, ..layer };
    let biased = llama.clone().map_layers(bias);
    let untied = Config { tie_word_embeddings: false, rms_norm_eps: 1e-5, ..rotating(llama.clone(), 1e5) };
    let window = |mut layer: LayerSpec| {
        layer.attention.window = Some(16);
        layer
    };
    let mistral = small(Architecture::Mistral).map_layers(window);
    let windowed = small(Architecture::Qwen2).map_layers(window);
    let wide = Config { head_dim: 32, eos_token_ids: vec![2, 9], ..small(Architecture::Qwen3) };
    for config in [llama, biased, untied, mistral, windowed, wide, small(Architecture::Qwen2)] {
        let written = written(&content(&config, GgmlDType::Q5_0));
        let directory = ModelDirectory::open(&written.path).unwrap();
        assert_eq!(directory.config(), &config);
        assert_eq!(Config::load(&written.path).unwrap(), config);
        assert_eq!(directory.stop_token_ids(), config.eos_token_ids);
        let parameters = directory.load_parameters().unwrap();
        assert_eq!(parameters.values(), expected(&config, GgmlDType::Q5_0));
        let budget = MemoryBudget::new(Some(0));
        let swapped = ResidentParameters::open(&written.path, &config, &budget).unwrap();
        assert!(swapped.is_swapped());
        assert_eq!(swapped.get().unwrap().values(), parameters.values());
    }
}

#[test]
fn an_export_is_a_directory_of_the_same_model() {
    let mut content = content(&small(Architecture::Llama), GgmlDType::Q4_1);
    content.set(
        "tokenizer.chat_template",
        GgufValue::String("{{ messages[0].content }}{{ eos_token }}".to_owned()),
    );
    let written = written(&content);
    let file = ModelDirectory::open(&written.path).unwrap();
    let parameters = file.load_parameters().unwrap();
    let out = written.root.path().join("out");
    file.export(&out, &parameters, WeightDtype::F32).unwrap();
    let directory = ModelDirectory::open(&out).unwrap();
    assert_eq!(directory.config(), file.config());
    assert_eq!(directory.stop_token_ids(), file.stop_token_ids());
    assert_eq!(directory.load_parameters().unwrap().values(), parameters.values());
    let message = |content: &str| vec![Message::new("user", content)];
    for prompt in [Prompt::Text("1 + 1 <eos>".to_owned()), Prompt::Messages(message("1 + 1"))] {
        let ids = file.encode_prompt(&prompt).unwrap();
        assert_eq!(directory.encode_prompt(&prompt).unwrap(), ids);
        assert_eq!(ids.last(), Some(&2), "the end of text");
    }
    let size = model::directory::tokenizer_bytes(&out).unwrap();
    assert_eq!(model::directory::tokenizer_bytes(&written.path).unwrap(), size);
    // A tree of sums is declared by exports, and a checkpoint is read back.
    let tree = file.with_reduction(model::Reduction::Tree);
    let saved = written.root.path().join("saved");
    tree.save(&saved, &parameters).unwrap();
    assert_eq!(ModelDirectory::open(&saved).unwrap().config(), tree.config());
}

/// The divisors of the rotary frequencies as llama.cpp's converter computes them.
fn rope_factors(config: &Config, (low, high): (f64, f64), factor: f64) -> Vec<f32> {
    let original = 8192.0;
    (0..config.head_dim / 2)
        .map(|index| {
            let frequency =
                1.0 / config.rotaries()[0].theta.powf(2.0 * index as f64 / config.head_dim as f64);
            let wavelength = std::f64::consts::TAU / frequency;
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor as f32
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
            }
        })
        .collect()
}

fn divisors_tensor(divisors: &[f32]) -> (String, QTensor) {
    ("rope_freqs.weight".to_owned(), quantized(divisors, &[divisors.len()], GgmlDType::F32))
}

#[test]
fn the_scaling_of_llama_3_is_recognised() {
    let plain = rotating(config(Architecture::Llama), 500_000.0);
    let divisors = rope_factors(&plain, (1.0, 4.0), 32.0);
    assert!(divisors.iter().any(|x| (1.1..31.0).contains(x)), "{divisors:?}");
    let mut scaled = content(&plain, GgmlDType::Q8_0);
    scaled.tensors.push(divisors_tensor(&divisors));
    let written = written(&scaled);
    let expected = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(Config::load(&written.path).unwrap().rotaries()[0].scaling, expected);
    loaded(&written.path).unwrap();

    let mut other = content(&plain, GgmlDType::Q8_0);
    other.tensors.push(divisors_tensor(&rope_factors(&plain, (1.0, 8.0), 32.0)));
    assert!(failure(&other).contains("rope_freqs.weight is not the scaling of Llama 3.1"));
    let mut linear = content(&plain, GgmlDType::Q8_0);
    linear.set("llama.rope.scaling.type", GgufValue::String("linear".to_owned()));
    linear.set("llama.rope.scaling.factor", GgufValue::F32(4.0));
    let written = self::written(&linear);
    assert_eq!(
        Config::load(&written.path).unwrap().rotaries()[0].scaling,
        RopeScaling::Linear { factor: 4.0 }
    );
    linear.set("llama.rope.scaling.type", GgufValue::String("yarn".to_owned()));
    assert!(failure(&linear).contains("`llama.rope.scaling.type` is \"yarn\", which is not supported"));
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    let changed = |key: &str, value: GgufValue| {
        let mut content = content(&small(Architecture::Llama), GgmlDType::Q8_0);
        content.set(key, value);
        failure(&content)
    };
    let text = |text: &str| GgufValue::String(text.to_owned());
    for (key, value, parts) in [
        ("general.architecture", text("gemma3"), ["\"gemma3\"", "supported: llama, qwen2, qwen3"]),
        ("general.type", text("adapter"), ["`general.type` is \"adapter\"", "model"]),
        ("split.count", GgufValue::U16(3), ["`split.count` is 3", "--merge"]),
        ("llama.expert_count", GgufValue::U32(8), ["`llama.expert_count` is 8", "dense"]),
        ("llama.logit_scale", GgufValue::F32(8.0), ["`llama.logit_scale` is 8.0", "Hugging Face directory"]),
        ("llama.rope.dimension_count", GgufValue::U32(4), ["rope.dimension_count` is 4", "8"]),
        ("llama.attention.value_length", GgufValue::U32(4), ["value_length` is 4", "8"]),
        (
            "llama.attention.head_count",
            GgufValue::U32(0),
            ["`llama.attention.head_count` is 0", "at least 1"],
        ),
        ("llama.block_count", GgufValue::U32(3), ["it lacks 9", "blk.2.attn_norm.weight"]),
        ("llama.block_count", GgufValue::U32(1), ["it holds 9 tensors", "blk.1.attn_k.weight"]),
        ("llama.block_count", GgufValue::U32(u32::MAX), ["num_hidden_layers", "at most 10000 layers"]),
        (
            "llama.feed_forward_length",
            GgufValue::U32(64),
            ["blk.0.ffn_gate.weight has shape [32, 32]", "[64, 32]"],
        ),
        ("llama.vocab_size", GgufValue::U32(101), ["`llama.vocab_size` is 101", "100"]),
        ("llama.attention.layer_norm_rms_epsilon", GgufValue::F32(f32::NAN), ["\"NaN\"", "a number"]),
        (
            "tokenizer.ggml.eos_token_id",
            GgufValue::U32(100),
            ["`eos_token_id` is [100]", "ids below vocab_size"],
        ),
        (
            "tokenizer.ggml.model",
            text("bert"),
            ["`tokenizer.ggml.model` is \"bert\"", "put the tokenizer.json"],
        ),
        (
            "tokenizer.ggml.pre",
            text("chatglm"),
            ["`tokenizer.ggml.pre` is \"chatglm\"", "put the tokenizer.json"],
        ),
        ("tokenizer.ggml.merges", text("a b"), ["`tokenizer.ggml.merges`", "put the tokenizer.json"]),
        (
            "tokenizer.ggml.token_type",
            GgufValue::Array(vec![]),
            ["`tokenizer.ggml.token_type`", "100 tokens"],
        ),
        ("tokenizer.chat_template", text("{% for %}"), ["chat template", "does not compile"]),
        ("general.alignment", GgufValue::U32(0), ["`general.alignment` is 0", "a power of two"]),
        ("general.alignment", text("x"), ["`general.alignment` is no u32", "damaged"]),
    ] {
        let error = changed(key, value);
        assert!(parts.iter().all(|part| error.contains(part)), "{key}: {error}");
    }
}

#[test]
fn a_file_without_a_tokenizer_takes_the_one_beside_it() {
    let mut content = content(&small(Architecture::Qwen2), GgmlDType::Q8_0);
    content.metadata.retain(|key, _| !key.starts_with("tokenizer.ggml.tok"));
    let error = failure(&content);
    assert!(error.contains("it has no tokenizer") && error.contains("put the tokenizer.json"), "{error}");
    let written = written(&content);
    fs::write(written.root.path().join("tokenizer.json"), characters().to_string()).unwrap();
    let directory = ModelDirectory::open(&written.path).unwrap();
    assert_eq!(directory.tokenizer().path(), written.root.path().join("tokenizer.json"));
    assert_eq!(directory.encode_prompt(&Prompt::Text("1 +".to_owned())).unwrap(), [22, 5, 16]);

    let written = self::written(&self::content(&small(Architecture::Qwen2), GgmlDType::Q8_0));
    let mut other = characters();
    other["model"]["vocab"]["1"] = json!(23);
    other["model"]["vocab"]["2"] = json!(22);
    fs::write(written.root.path().join("tokenizer.json"), other.to_string()).unwrap();
    let error = ModelDirectory::open(&written.path).unwrap_err().to_string();
    assert!(error.contains("token 22 is \"1\" in it and \"2\" in"), "{error}");
}

#[test]
fn weights_that_are_not_finite_are_refused() {
    let config = small(Architecture::Llama);
    let mut parameters = random(&config);
    parameters.values_mut()[7] = f32::NAN;
    let content = GgufContent::of(&config, &parameters, GgmlDType::F32, (&characters(), "gpt-2"));
    let written = written(&content);
    let error = loaded(&written.path).unwrap_err();
    assert!(matches!(&error, ModelError::NonFinite { count: 1, .. }), "{error}");
}

#[test]
fn a_file_that_is_cut_off_is_named_at_any_length() {
    let written = written(&content(&small(Architecture::Llama), GgmlDType::Q4_0));
    let whole = fs::read(&written.path).unwrap();
    let header = whole.len() - data_bytes(&small(Architecture::Llama));
    for len in (0..header).step_by(7).chain((header..whole.len() - 31).step_by(501)) {
        fs::write(&written.path, &whole[..len]).unwrap();
        // Without reading the weights.
        let error = ModelDirectory::open(&written.path).unwrap_err().to_string();
        assert!(error.contains("cut off: fetch it again"), "{len}: {error}");
    }
    fs::write(&written.path, [&b"GGML"[..], &whole[4..]].concat()).unwrap();
    let error = loaded(&written.path).unwrap_err().to_string();
    assert!(error.contains("does not begin with `GGUF`"), "{error}");
    assert!(matches!(loaded(Path::new("nowhere.gguf")), Err(ModelError::Read { .. })));
}

/// Bytes of all tensors as Q4_0 and F32, without padding.
fn data_bytes(config: &Config) -> usize {
    let bytes = |spec: &model::ParameterSpec| match spec.shape.len() {
        1 => 4 * spec.len(),
        _ => spec.len() / 32 * 18,
    };
    model::Layout::new(config).specs().iter().map(bytes).sum()
}

#[test]
fn declared_sizes_are_not_believed() {
    let written = written(&content(&small(Architecture::Llama), GgmlDType::Q4_0));
    let whole = fs::read(&written.path).unwrap();
    let key = whole.windows(26).position(|bytes| bytes == b"tokenizer.ggml.token_type\x09").unwrap();
    // Version, counts of tensors and keys, length of the first key, elements of an array.
    for (at, value, part) in [
        (4, 1, "version 1 of the format"),
        (4, 3 << 24, "little-endian"),
        (8, u64::MAX, "its header declares 18446744073709551615 tensors"),
        (16, 1 << 40, "1099511627776 keys"),
        (24, u64::MAX, "its header goes on after"),
        (key + 33, u64::MAX, "`tokenizer.ggml.token_type` has 18446744073709551615 elements"),
        (key + 33, 1 << 21, "its header goes on after"),
    ] {
        let mut bytes = whole.clone();
        let width = if at == 4 { 4 } else { 8 };
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        fs::write(&written.path, &bytes).unwrap();
        let error = loaded(&written.path).unwrap_err().to_string();
        assert!(error.contains(part), "{at}: {error}");
    }
}

#[test]
fn an_unknown_quantisation_is_named() {
    let written = written(&content(&small(Architecture::Llama), GgmlDType::Q4_0));
    let mut bytes = fs::read(&written.path).unwrap();
    let name = b"blk.1.ffn_up.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    // After the number of dimensions and two dimensions.
    bytes[at + 20] = 23;
    fs::write(&written.path, &bytes).unwrap();
    let error = loaded(&written.path).unwrap_err().to_string();
    assert!(
        error.contains("blk.1.ffn_up.weight is quantised in the format with id 23") && error.contains("Q4_K"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn a_damaged_header_is_an_error_and_no_panic(places in prop::collection::vec((0.0..1.0f64, any::<u8>()), 1..4)) {
        let config = small(Architecture::Llama);
        let content = content(&config, GgmlDType::Q4_0);
        let written = written(&content);
        let mut bytes = fs::read(&written.path).unwrap();
        let header = bytes.len() - data_bytes(&config);
        for (place, byte) in places {
            bytes[(place * header as f64) as usize] = byte;
        }
        fs::write(&written.path, &bytes).unwrap();
        if let Ok(read) = loaded(&written.path) {
            prop_assert!(!read.values().is_empty());
        }
    }
}
