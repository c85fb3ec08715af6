//! The decoder against candle-transformers: the logits after every prefix of every golden sequence.
//!
//! Invariant: the other side reads the weight files by itself; only the shape of the network comes from our `Config`.
//! It does not check gradients, which candle-transformers does not compute for these models.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{llama, mistral, qwen2, qwen3};
use model::{AttentionSpec, Config, Decoder, LayerSpec, RopeScaling, Rotary};

use crate::common::{Golden, logits_of, pack_of};

/// Asserts that `oracle`, given `[1, n]` tokens, returns our logits after the last of them.
fn assert_agrees(name: &str, golden: &Golden, config: &Config, mut oracle: impl FnMut(&Tensor) -> Tensor) {
    let decoder = Decoder::new(config, &golden.parameters);
    for sequence in &golden.sequences {
        let ours = logits_of(&decoder, &pack_of([&sequence.tokens[..]]));
        for (t, ours) in ours.chunks(config.vocab_size).enumerate() {
            let prefix = Tensor::from_slice(&sequence.tokens[..=t], (1, t + 1), &Device::Cpu).unwrap();
            let theirs: Vec<f32> = oracle(&prefix).flatten_all().unwrap().to_vec1().unwrap();
            assert_eq!(ours.len(), theirs.len(), "{name}");
            for (token, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                assert!(
                    (ours - theirs).abs() <= 1e-4,
                    "{name}: position {t}, token {token}: {ours}, not {theirs}"
                );
            }
        }
    }
}

/// All weight files of the directory, as f32.
fn weights(golden: &Golden) -> VarBuilder<'static> {
    let mut tensors = std::collections::HashMap::new();
    for entry in std::fs::read_dir(&golden.dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            tensors.extend(candle_core::safetensors::load(&path, &Device::Cpu).unwrap());
        }
    }
    VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)
}

fn qwen2_oracle(golden: &Golden, config: &Config) -> impl FnMut(&Tensor) -> Tensor + use<> {
    let theirs = qwen2::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_layers(),
        num_attention_heads: config.num_heads,
        num_key_value_heads: config.num_kv_heads,
        max_position_embeddings: config.max_position_embeddings,
        sliding_window: config.max_position_embeddings, // applied whatever `use_sliding_window` says
        max_window_layers: config.num_layers(),
        tie_word_embeddings: config.tie_word_embeddings,
        rope_theta: config.rotaries()[0].theta,
        rms_norm_eps: f64::from(config.rms_norm_eps),
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    };
    let mut model = qwen2::ModelForCausalLM::new(&theirs, weights(golden)).unwrap();
    move |tokens| {
        model.clear_kv_cache();
        model.forward(tokens, 0).unwrap()
    }
}

#[test]
fn qwen2_agrees() {
    let golden = Golden::open("qwen2");
    assert!(golden.config.tie_word_embeddings);
    assert_agrees("qwen2", &golden, &golden.config, qwen2_oracle(&golden, &golden.config));
}

/// candle-transformers knows no linear rope scaling for Qwen2, so both sides compute these weights without it.
#[test]
fn qwen2_in_shards_agrees_without_rope_scaling() {
    let golden = Golden::open("qwen2_sharded");
    assert!(!golden.config.tie_word_embeddings);
    let plain = |layer: LayerSpec| {
        let rotary = layer.attention.rotary.map(|rotary| Rotary { scaling: RopeScaling::None, ..rotary });
        LayerSpec { attention: AttentionSpec { rotary, ..layer.attention }, ..layer }
    };
    let config = golden.config.clone().map_layers(plain);
    assert_agrees("qwen2_sharded", &golden, &config, qwen2_oracle(&golden, &config));
}

#[test]
fn qwen3_agrees() {
    let golden = Golden::open("qwen3");
    let config = &golden.config;
    let theirs = qwen3::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_layers(),
        num_attention_heads: config.num_heads,
        head_dim: config.head_dim,
        attention_bias: config.layers[0].qkv_bias,
        num_key_value_heads: config.num_kv_heads,
        max_position_embeddings: config.max_position_embeddings,
        sliding_window: None,
        max_window_layers: config.num_layers(),
        tie_word_embeddings: config.tie_word_embeddings,
        rope_theta: config.rotaries()[0].theta,
        rms_norm_eps: f64::from(config.rms_norm_eps),
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    };
    let mut model = qwen3::ModelForCausalLM::new(&theirs, weights(&golden)).unwrap();
    assert_agrees("qwen3", &golden, config, |tokens| {
        model.clear_kv_cache();
        model.forward(tokens, 0).unwrap()
    });
}

#[test]
fn llama_agrees() {
    let golden = Golden::open("llama");
    let config = &golden.config;
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } =
        config.rotaries()[0].scaling
    else {
        panic!("the golden has the rope of Llama 3.1, not {:?}", config.rotaries())
    };
    let theirs = llama::Config {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        vocab_size: config.vocab_size,
        num_hidden_layers: config.num_layers(),
        num_attention_heads: config.num_heads,
        num_key_value_heads: config.num_kv_heads,
        use_flash_attn: false,
        rms_norm_eps: f64::from(config.rms_norm_eps),
        rope_theta: config.rotaries()[0].theta as f32,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: Some(llama::Llama3RopeConfig {
            factor: factor as f32,
            low_freq_factor: low_freq_factor as f32,
            high_freq_factor: high_freq_factor as f32,
            original_max_position_embeddings,
            rope_type: llama::Llama3RopeType::Llama3,
        }),
        max_position_embeddings: config.max_position_embeddings,
        tie_word_embeddings: config.tie_word_embeddings,
    };
    let model = llama::Llama::load(weights(&golden), &theirs).unwrap();
    assert_agrees("llama", &golden, config, |tokens| {
        let mut cache = llama::Cache::new(false, DType::F32, &theirs, &Device::Cpu).unwrap();
        model.forward(tokens, 0, &mut cache).unwrap()
    });
}

#[test]
fn mistral_agrees() {
    let golden = Golden::open("mistral");
    let config = &golden.config;
    let theirs = mistral::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_layers(),
        num_attention_heads: config.num_heads,
        head_dim: Some(config.head_dim),
        num_key_value_heads: config.num_kv_heads,
        hidden_act: Activation::Silu,
        max_position_embeddings: config.max_position_embeddings,
        rms_norm_eps: f64::from(config.rms_norm_eps),
        rope_theta: config.rotaries()[0].theta,
        sliding_window: config.layers[0].attention.window,
        use_flash_attn: false,
    };
    let mut model = mistral::Model::new(&theirs, weights(&golden)).unwrap();
    assert_agrees("mistral", &golden, config, |tokens| {
        model.clear_kv_cache();
        model.forward(tokens, 0).unwrap()
    });
}
