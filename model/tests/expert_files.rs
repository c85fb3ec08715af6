//! Weight files with experts or with quantised tensors: the number formats and layouts that are read, and what is refused by name.
//!
//! Invariant: files are made here tensor by tensor, from the tensors that a fresh model is saved with.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use model::{
    Architecture, Config, Decoder, FrozenParameters, LowRank, ModelError, Parameters, Recompute, Sizes,
    WeightDtype,
};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::common::{bits, logits_of, pack_of};

const SIZES: Sizes = Sizes {
    vocab_size: 20,
    hidden_size: 32,
    intermediate_size: 64,
    num_layers: 2,
    num_heads: 4,
    num_kv_heads: 2,
    max_position_embeddings: 64,
};

struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn zero() -> Self {
        Self { dtype: Dtype::F32, shape: vec![1], bytes: vec![0; 4] }
    }
}

/// The tensors of a model's file.
type Tensors = BTreeMap<String, Stored>;

fn config(architecture: Architecture) -> Config {
    Config::fresh(&SIZES).of_family(architecture)
}

/// A fresh model, and its tensors as it is saved.
fn saved(config: &Config) -> (Parameters, Tensors) {
    let parameters = Parameters::random(config, 3);
    let dir = tempfile::tempdir().unwrap();
    parameters.save(dir.path(), WeightDtype::F32, usize::MAX).unwrap();
    let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |view: &TensorView<'_>| Stored {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        bytes: view.data().to_vec(),
    };
    (parameters, tensors.iter().map(|(name, view)| (name.to_owned(), stored(&view))).collect())
}

fn load(config: &Config, tensors: &Tensors) -> Result<Parameters, ModelError> {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("model.safetensors"), tensors);
    Parameters::load(dir.path(), config)
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, stored)| {
        let Stored { dtype, shape, bytes } = stored;
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

fn error(config: &Config, tensors: &Tensors) -> String {
    load(config, tensors).unwrap_err().to_string()
}

#[test]
fn every_family_with_experts_reads_back_what_it_saved() {
    for architecture in
        [Architecture::Qwen3Moe, Architecture::Olmoe, Architecture::Glm4Moe, Architecture::GptOss]
    {
        let config = config(architecture);
        let (parameters, tensors) = saved(&config);
        assert_eq!(load(&config, &tensors).unwrap().values(), parameters.values(), "{architecture:?}");
        let fused = tensors.contains_key("model.layers.0.mlp.experts.gate_up_proj");
        let apart = tensors.contains_key("model.layers.1.mlp.experts.3.gate_proj.weight");
        assert_eq!(
            (fused, apart),
            match architecture {
                Architecture::GptOss => (true, false),
                _ => (false, true),
            }
        );
    }
}

#[test]
fn missing_experts_and_other_layouts_are_named() {
    let experts = config(Architecture::Glm4Moe);
    let (_, mut tensors) = saved(&experts);
    tensors.remove("model.layers.1.mlp.experts.2.up_proj.weight").unwrap();
    tensors.remove("model.layers.1.mlp.gate.e_score_correction_bias").unwrap();
    let message = error(&experts, &tensors);
    assert!(message.contains("lacks 2 of the tensors"), "{message}");
    assert!(message.contains("model.layers.1.mlp.experts.2.up_proj.weight"), "{message}");
    assert!(message.contains("model.layers.1.mlp.gate.e_score_correction_bias"), "{message}");

    // Experts apart, in a model that has them in one tensor, and the other way round.
    let fused = config(Architecture::GptOss);
    let (_, of_fused) = saved(&fused);
    let message = error(&fused, &saved(&experts).1);
    assert!(message.contains("lacks") && message.contains("model.layers.0.mlp.router.weight"), "{message}");
    let message = error(&experts, &of_fused);
    assert!(message.contains("lacks") && message.contains("model.layers.0.mlp.gate.weight"), "{message}");

    let (_, mut more) = saved(&experts);
    more.insert("model.layers.0.mlp.experts.4.up_proj.weight".to_owned(), Stored::zero());
    let message = error(&experts, &more);
    assert!(message.contains("no place for: model.layers.0.mlp.experts.4.up_proj.weight"), "{message}");
}

#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    for (architecture, ignored) in [(Architecture::Glm4Moe, true), (Architecture::Qwen3Moe, false)] {
        let config = config(architecture);
        let (parameters, mut tensors) = saved(&config);
        tensors.insert("model.layers.2.eh_proj.weight".to_owned(), Stored::zero());
        match load(&config, &tensors) {
            Ok(read) => assert!(ignored && read.values() == parameters.values(), "{architecture:?}"),
            Err(error) => assert!(!ignored && error.to_string().contains("layers.2.eh_proj"), "{error}"),
        }
    }
}

const DOWN: &str = "model.layers.1.mlp.experts.down_proj";

/// A gpt-oss model with one tensor in MXFP4: `[4 experts, 64 inputs, 32 outputs]`.
fn with_blocks() -> (Config, Parameters, Tensors) {
    let config = config(Architecture::GptOss);
    let (mut parameters, mut tensors) = saved(&config);
    tensors.remove(DOWN).unwrap();
    // 4 x 32 rows of two blocks. Codes 0 to 15 in turns, and a scale for each block.
    let blocks: Vec<u8> = (0..4 * 32 * 2 * 16).map(|byte| (byte * 37 % 251) as u8).collect();
    let scales: Vec<u8> = (0..4 * 32 * 2).map(|block| 120 + (block % 9) as u8).collect();
    let value = |row: usize, input: usize| {
        let byte = blocks[row * 32 + input / 2];
        let code = if input.is_multiple_of(2) { byte % 16 } else { byte / 16 };
        let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code % 8)];
        let sign = if code < 8 { 1.0 } else { -1.0 };
        sign * size * 2.0_f32.powi(i32::from(scales[row * 2 + input / 32]) - 127)
    };
    for expert in 0..4 {
        let spec = parameters
            .layout()
            .spec(&format!("model.layers.1.mlp.experts.{expert}.down_proj.weight"))
            .cloned();
        let range = spec.unwrap().range();
        for (at, to) in parameters.values_mut()[range].iter_mut().enumerate() {
            *to = value(expert * 32 + at / 64, at % 64);
        }
    }
    let bytes = |shape: &[usize], bytes: &[u8]| Stored {
        dtype: Dtype::U8,
        shape: shape.to_vec(),
        bytes: bytes.to_vec(),
    };
    tensors.insert(format!("{DOWN}_blocks"), bytes(&[4, 32, 2, 16], &blocks));
    tensors.insert(format!("{DOWN}_scales"), bytes(&[4, 32, 2], &scales));
    (config, parameters, tensors)
}

#[test]
fn experts_in_mxfp4_are_dequantised() {
    let (config, parameters, mut tensors) = with_blocks();
    assert_eq!(load(&config, &tensors).unwrap().values(), parameters.values());
    // Halves in different files, the scales first.
    let dir = tempfile::tempdir().unwrap();
    let blocks = tensors.remove(&format!("{DOWN}_blocks")).unwrap();
    write(&dir.path().join("a.safetensors"), &tensors);
    write(&dir.path().join("b.safetensors"), &Tensors::from([(format!("{DOWN}_blocks"), blocks)]));
    let index = r#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    assert_eq!(Parameters::load(dir.path(), &config).unwrap().values(), parameters.values());
}

#[test]
fn halves_and_odd_shapes_of_mxfp4_are_named() {
    let (config, _, mut tensors) = with_blocks();
    let scales = tensors.remove(&format!("{DOWN}_scales")).unwrap();
    let message = error(&config, &tensors);
    assert!(message.contains("lacks 1 of") && message.contains("down_proj_scales"), "{message}");
    tensors.insert(format!("{DOWN}_scales"), Stored { shape: vec![4, 16, 4], ..scales });
    let message = error(&config, &tensors);
    assert!(
        message.contains("down_proj_scales has shape [4, 16, 4]") && message.contains("[4, 32, 2]"),
        "{message}"
    );
    tensors.insert(format!("{DOWN}_scales"), Stored::zero());
    let message = error(&config, &tensors);
    assert!(message.contains("down_proj_scales is stored as F32"), "{message}");

    let narrow = Config::fresh(&Sizes { intermediate_size: 24, ..SIZES }).of_family(Architecture::GptOss);
    let (_, mut tensors) = saved(&narrow);
    tensors.remove(DOWN).unwrap();
    tensors.insert(format!("{DOWN}_blocks"), Stored::zero());
    let message = error(&narrow, &tensors);
    assert!(message.contains("down_proj_blocks cannot be read: an expert has 24 inputs"), "{message}");
}

const GATE: &str = "model.layers.1.mlp.gate_proj.weight";

/// A Qwen 3 model with one matrix in FP8: `[200, 256]`, so the last square of its rows is cut.
fn with_float8() -> (Config, Parameters, Tensors) {
    let config = Config::fresh(&Sizes { hidden_size: 256, intermediate_size: 200, ..SIZES })
        .of_family(Architecture::Qwen3);
    let (mut parameters, mut tensors) = saved(&config);
    // All bits but those that are no number.
    let codes: Vec<u8> =
        (0..200 * 256).map(|at| (at * 37 % 254) as u8).map(|code| code + u8::from(code > 126)).collect();
    let scales = [0.5_f32, 0.02, 0.3, 0.04];
    let value = |code: u8| {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
        let size = if exponent == 0 {
            mantissa * 2.0_f32.powi(-6)
        } else {
            (1.0 + mantissa) * 2.0_f32.powi(exponent - 7)
        };
        if code < 128 { size } else { -size }
    };
    let range = parameters.layout().spec(GATE).unwrap().range();
    for (at, to) in parameters.values_mut()[range].iter_mut().enumerate() {
        let (row, column) = (at / 256, at % 256);
        *to = value(codes[at]) * scales[row / 128 * 2 + column / 128];
    }
    let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    tensors.insert(GATE.to_owned(), Stored { dtype: Dtype::F8_E4M3, shape: vec![200, 256], bytes: codes });
    tensors.insert(format!("{GATE}_scale_inv"), Stored { dtype: Dtype::F32, shape: vec![2, 2], bytes });
    (config, parameters, tensors)
}

/// Weights that stay as they are stored compute what the same weights in f32 do, in the memory of their files.
#[test]
fn quantised_tensors_of_a_directory_can_stay_as_they_are() {
    for (config, parameters, tensors) in [with_blocks(), with_float8()] {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("model.safetensors"), &tensors);
        let base = FrozenParameters::load(dir.path(), &config).unwrap();
        let none = Arc::new(LowRank::zeros(1, 1.0, Vec::new()));
        let pack = pack_of([&[3, 14, 15, 9, 2, 6][..]]);
        let [stored, expected] =
            [Decoder::frozen(&base, &none, Recompute::None), Decoder::new(&config, &parameters)]
                .map(|decoder| bits(&logits_of(&decoder, &pack)));
        assert!(stored == expected, "{:?}", config.architecture);
        let bytes: usize = tensors.values().map(|tensor| tensor.bytes.len()).sum();
        // The scales of a square are kept for each of its rows.
        assert!((base.bytes() as usize) < bytes + bytes / 50, "{} of {bytes}", base.bytes());
    }
}

const IN_FP8: &str = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight";

/// A model with a matrix in FP8, which has two blocks with the scales 0.5 and 4, and its tensors.
fn with_fp8() -> (Config, Parameters, Tensors) {
    let config = Config::fresh(&Sizes { hidden_size: 160, ..SIZES }).of_family(Architecture::DeepseekV3);
    let (mut parameters, mut tensors) = saved(&config);
    let spec = parameters.layout().spec(IN_FP8).unwrap().clone();
    // 1, -2 and 0.5 in turns.
    let numbers = (0..spec.len()).map(|i| [(0x38_u8, 1.0), (0xc0, -2.0), (0x30, 0.5)][i % 3]);
    for (i, (value, (_, number))) in
        parameters.values_mut()[spec.range()].iter_mut().zip(numbers.clone()).enumerate()
    {
        *value = number * if i % 160 < 128 { 0.5 } else { 4.0 };
    }
    let bytes = numbers.map(|(byte, _)| byte).collect();
    tensors.insert(IN_FP8.to_owned(), Stored { dtype: Dtype::F8_E4M3, shape: spec.shape, bytes });
    let bytes = [0.5_f32, 4.0].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let scales = Stored { dtype: Dtype::F32, shape: vec![1, 2], bytes };
    tensors.insert(format!("{IN_FP8}_scale_inv"), scales);
    (config, parameters, tensors)
}

#[test]
fn matrices_in_fp8_are_dequantised() {
    let (config, parameters, tensors) = with_float8();
    assert_eq!(load(&config, &tensors).unwrap().values(), parameters.values());
    let (config, parameters, mut tensors) = with_fp8();
    assert_eq!(load(&config, &tensors).unwrap().values(), parameters.values());
    // Halves in different files, the scales first.
    let dir = tempfile::tempdir().unwrap();
    let numbers = tensors.remove(IN_FP8).unwrap();
    write(&dir.path().join("a.safetensors"), &tensors);
    write(&dir.path().join("b.safetensors"), &Tensors::from([(IN_FP8.to_owned(), numbers)]));
    let index = r#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    assert_eq!(Parameters::load(dir.path(), &config).unwrap().values(), parameters.values());
}

#[test]
fn halves_and_odd_shapes_of_fp8_are_named() {
    let (config, _, mut tensors) = with_fp8();
    let name = format!("{IN_FP8}_scale_inv");
    let scales = tensors.remove(&name).unwrap();
    let message = error(&config, &tensors);
    assert!(message.contains("lacks 1 of") && message.contains(&name), "{message}");
    tensors.insert(name.clone(), Stored { shape: vec![2, 1], bytes: scales.bytes.clone(), ..scales });
    let message = error(&config, &tensors);
    assert!(message.contains("scale_inv has shape [2, 1]") && message.contains("[1, 2]"), "{message}");
    tensors.insert(name.clone(), scales);
    if let Some(numbers) = tensors.get_mut(IN_FP8) {
        numbers.bytes[7] = 0x7f;
    }
    let message = error(&config, &tensors);
    assert!(message.contains("1 weights are infinite or not a number"), "{message}");
    // Scales of a matrix that is not in FP8, and rows that are no whole blocks.
    let stored = |tensors: &Tensors| {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("model.safetensors"), tensors);
        FrozenParameters::load(dir.path(), &config).unwrap_err().to_string()
    };
    assert!(stored(&tensors).contains("a row has 160 values"), "{}", stored(&tensors));
    let (_, plain) = saved(&config);
    tensors.extend(plain);
    for message in [error(&config, &tensors), stored(&tensors)] {
        assert!(message.contains(&name), "{message}");
    }
}
