//! Configs of every family: read back as written, and refused by file and key.
//!
//! Invariant: no file of a real model is needed here; those are in `tests/files.rs`.

use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::ModelError;
use crate::layer::{QueryKeyNorm, RouterKind};
use crate::rotary::{RopeScaling, Yarn};

/// A tied Qwen2 and an untied Qwen3 with every optional tensor, whose heads are wider than `hidden / heads`.
pub(crate) fn tiny() -> [Config; 2] {
    let tied = Config::fresh(&Sizes {
        vocab_size: 100,
        hidden_size: 16,
        intermediate_size: 24,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 64,
    });
    let untied =
        Config { architecture: Architecture::Qwen3, head_dim: 6, tie_word_embeddings: false, ..tied.clone() }
            .map_layers(|layer| LayerSpec {
                output_bias: true,
                query_key_norm: QueryKeyNorm::PerHead,
                ..layer
            });
    [tied, untied]
}

/// A tiny model of every family, with what its keys may change.
pub(crate) fn of_every_family() -> Vec<Config> {
    let [tied, untied] = tiny();
    let of = |family: &families::Family| tied.clone().of_family(family.architecture);
    let mut all: Vec<Config> = families::FAMILIES.iter().map(of).collect();
    all.push(untied);
    all
}

/// The model with this rotary embedding in every layer.
fn rotating(config: Config, rotary: Rotary) -> Config {
    config.map_layers(|layer| LayerSpec {
        attention: AttentionSpec { rotary: Some(rotary), ..layer.attention },
        ..layer
    })
}

/// The model with a window in the layers from `first` on.
fn windowed(mut config: Config, window: usize, first: usize) -> Config {
    config.layers[first..].iter_mut().for_each(|layer| layer.attention.window = Some(window));
    config
}

/// The tiny Qwen2 with some keys replaced (`null` takes one away).
fn with(changes: &Value) -> Result<Config, ModelError> {
    let mut map = tiny()[0].to_json().as_object().unwrap().clone();
    map.extend(changes.as_object().unwrap().clone());
    Config::from_json(Path::new("m/config.json"), &map)
}

fn message(changes: &Value) -> String {
    with(changes).unwrap_err().to_string()
}

fn assert_read_back(configs: impl IntoIterator<Item = Config>) {
    for config in configs {
        let map = config.to_json().as_object().unwrap().clone();
        assert_eq!(Config::from_json(Path::new("config.json"), &map).unwrap(), config);
    }
}

fn yarn() -> Rotary {
    let yarn = Yarn {
        factor: 4.0,
        attention_factor: 1.25,
        score_weight: 0.0,
        beta_fast: 16.0,
        beta_slow: 2.0,
        truncate: false,
        original_max_position_embeddings: 32,
    };
    Rotary { scaling: RopeScaling::Yarn(yarn), ..Rotary::plain(10_000.0) }
}

#[test]
fn written_configurations_read_back() {
    let [tied, untied] = tiny();
    let llama = Config {
        architecture: Architecture::Llama,
        rms_norm_eps: 1e-5,
        eos_token_ids: vec![2, 7],
        pad_token_id: None,
        initializer_range: 0.02,
        ..tied.clone().of_family(Architecture::Llama)
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 32,
    };
    let llama = rotating(llama, Rotary { scaling: llama3, ..Rotary::plain(500_000.0) });
    let mistral = Config { eos_token_ids: vec![], ..tied.clone().of_family(Architecture::Mistral) };
    let linear = Rotary { scaling: RopeScaling::Linear { factor: 2.0 }, ..Rotary::plain(10_000.0) };
    let mistral = windowed(rotating(mistral, linear), 32, 0);
    let scaled = rotating(tied.clone(), yarn());
    let upper = windowed(tied.clone(), 16, 1);
    let tree = Config { reduction: Reduction::Tree, ..tied.clone() };
    assert_read_back(
        [tied, untied, llama, mistral, scaled, upper, tree].into_iter().chain(of_every_family()),
    );
}

#[test]
fn written_layers_that_differ_read_back() {
    let [tied, _] = tiny();
    let partial = Rotary { share: 0.5, ..Rotary::plain(10_000.0) };
    let phi3 = windowed(rotating(tied.clone().of_family(Architecture::Phi3), partial), 16, 0);
    let granite = Config {
        embedding_multiplier: 12.0,
        logits_scaling: 8.0,
        ..tied.clone().of_family(Architecture::Granite).map_layers(|layer| LayerSpec {
            residual_multiplier: 0.22,
            attention: AttentionSpec { scale: Some(0.015_625), ..layer.attention },
            ..layer
        })
    };
    let mut gemma = windowed(tied.clone().of_family(Architecture::Gemma3), 16, 1);
    let linear = Rotary { scaling: RopeScaling::Linear { factor: 2.0 }, ..Rotary::plain(10_000.0) };
    gemma.layers[0].attention.rotary = Some(linear);
    let gemma = gemma.map_layers(|layer| LayerSpec {
        attention: AttentionSpec { scale: Some(0.25), ..layer.attention },
        ..layer
    });
    let mut olmo3 = windowed(tied.clone().of_family(Architecture::Olmo3), 16, 0);
    let attention = olmo3.layers[1].attention;
    olmo3.layers[1].attention = AttentionSpec { window: None, rotary: Some(yarn()), ..attention };
    let smollm3 = windowed(tied.of_family(Architecture::Smollm3), 16, 1);
    assert_read_back([phi3, granite, gemma, olmo3, smollm3]);
}

#[test]
fn written_experts_read_back() {
    let [tied, _] = tiny();
    let experts = tied.clone().of_family(Architecture::Qwen3Moe).with_experts(6, 3);
    let mut glm = tied.clone().of_family(Architecture::Glm4Moe);
    glm.layers[0].feed_forward = FeedForward::SwiGlu;
    let glm = glm.map_layers(|mut layer| {
        if let FeedForward::Experts(spec) = &mut layer.feed_forward {
            spec.router = RouterKind::Sigmoid { normalized: false, groups: 2, chosen_groups: 1, scale: 1.5 };
            (spec.width, spec.shared_width) = (10, 20);
        }
        LayerSpec { query_key_norm: QueryKeyNorm::None, qkv_bias: true, ..layer }
    });
    let mut mixed = experts.clone();
    (mixed.layers[1].feed_forward, mixed.intermediate_size) = (FeedForward::SwiGlu, 30);
    let mut alternate = rotating(tied.of_family(Architecture::GptOss), yarn());
    alternate.layers[0].attention.window = Some(12);
    assert_read_back([experts, glm, mixed, alternate]);
}

#[test]
fn rope_is_read_from_either_place() {
    let expected = Rotary { scaling: RopeScaling::Linear { factor: 4.0 }, ..Rotary::plain(5e5) };
    let new = json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}, "rope_theta": null});
    let old = json!({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5});
    for changes in [new, old] {
        let config = with(&changes).unwrap();
        assert_eq!(config.rotaries(), [expected], "{changes}");
    }
    let plain = with(&json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})).unwrap();
    assert_eq!(plain.rotaries(), [Rotary::plain(1e6)]);
    assert_eq!(with(&json!({"rope_theta": null})).unwrap().rotaries(), [Rotary::plain(1e4)]);
}

#[test]
fn every_head_is_read_back() {
    for config in tiny() {
        for head in [Head::Language, Head::LanguageAndValue, Head::Value] {
            let config = Config { head, ..config.clone() };
            let json = config.to_json();
            let read = Config::from_json(Path::new("config.json"), json.as_object().unwrap()).unwrap();
            assert_eq!(read, config);
            let layout = crate::Layout::new(&config);
            assert_eq!(layout.value_head().is_some(), head != Head::Language);
            let language = !config.tie_word_embeddings && head != Head::Value;
            assert_eq!(layout.spec("lm_head.weight").is_some(), language);
        }
    }
}

#[test]
fn other_networks_are_refused_by_file_and_key() {
    let families = families::model_types();
    for (changes, key, evidence) in [
        (json!({"model_type": "gemma3"}), "model_type", &families[..]),
        (json!({"architectures": ["Qwen2ForTokenClassification"]}), "architectures", "Qwen2ForCausalLM"),
        (json!({"architectures": ["Qwen2ForSequenceClassification"]}), "id2label", "one label"),
        (json!({"hidden_act": "gelu"}), "hidden_act", "silu"),
        (json!({"num_experts": 8}), "num_experts", "dense"),
        (json!({"mlp_bias": true}), "mlp_bias", "false"),
        (json!({"rlrun_reduction": "ring"}), "rlrun_reduction", "chain, tree"),
        (json!({"quantization_config": {"bits": 4}}), "quantization_config", "bf16"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor", "1.0"),
        (json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping", "null"),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
            "rope_parameters",
            "one object",
        ),
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
            "rope_scaling",
            "default, linear, llama3, yarn",
        ),
        (
            json!({"use_sliding_window": true, "layer_types": ["full_attention", "chunked_attention"]}),
            "layer_types",
            "sliding_attention",
        ),
        (
            json!({"rope_parameters": {"rope_type": "longrope"}, "rope_scaling": null}),
            "rope_parameters",
            "longrope",
        ),
    ] {
        let err = with(&changes).unwrap_err();
        assert!(matches!(err, ModelError::Unsupported { .. }), "{err}");
        let text = err.to_string();
        assert!(text.starts_with("m/config.json") && text.contains(key) && text.contains(evidence), "{text}");
    }
}

#[test]
fn invalid_values_are_refused_by_file_and_key() {
    for (changes, key) in [
        (json!({"hidden_size": 0}), "hidden_size"),
        (json!({"hidden_size": "64"}), "hidden_size"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        (json!({"num_attention_heads": 6, "head_dim": null}), "num_attention_heads"),
        (json!({"head_dim": 7}), "head_dim"),
        (json!({"vocab_size": u32::MAX, "hidden_size": u32::MAX - 3}), "num_hidden_layers"),
        (json!({"num_hidden_layers": 20_000, "layer_types": null}), "num_hidden_layers"),
        (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
        (json!({"rope_theta": 0.5}), "rope_theta"),
        (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling"),
        (json!({"rope_scaling": {"factor": 2.0}}), "rope_scaling"),
        (json!({"rope_scaling": "linear"}), "rope_scaling"),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": -1.0}}),
            "attention_factor",
        ),
        (json!({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 64.0}}), "beta_fast"),
        (json!({"use_sliding_window": true, "layer_types": ["full_attention"]}), "layer_types"),
        (json!({"eos_token_id": 100}), "eos_token_id"),
        (json!({"bos_token_id": [1, "x"]}), "bos_token_id"),
    ] {
        let text = message(&changes);
        assert!(text.starts_with("m/config.json") && text.contains(key), "{changes}: {text}");
    }
    for key in ["vocab_size", "num_hidden_layers", "model_type"] {
        assert_eq!(
            message(&json!({ key: null })),
            format!("m/config.json has no key `{key}`, which every model of this kind needs")
        );
    }
    let low = json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}});
    assert!(message(&low).contains("`low_freq_factor`"));
}

#[test]
fn defaults_are_those_of_the_family() {
    let family = |kind: &str, class: &str, changes: Value| {
        let mut map = json!({"model_type": kind, "architectures": [class], "head_dim": null});
        map.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        with(&map)
    };
    let llama = |changes| family("llama", "LlamaForCausalLM", changes).unwrap();
    assert_eq!(llama(json!({"num_key_value_heads": null})).num_kv_heads, 4);
    assert!(!llama(json!({})).layers[0].qkv_bias);
    assert!(llama(json!({"attention_bias": true})).layers[0].output_bias);
    let windows =
        |config: &Config| config.layers.iter().map(|layer| layer.attention.window).collect::<Vec<_>>();
    let mistral = family("mistral", "MistralForCausalLM", json!({"sliding_window": 16})).unwrap();
    assert_eq!((windows(&mistral), mistral.layers[0].qkv_bias), (vec![Some(16); 2], false));
    assert_eq!(mistral.max_context(), 64);
    let qwen2 = with(&json!({"sliding_window": 16, "use_sliding_window": false})).unwrap();
    let LayerSpec { qkv_bias, output_bias, .. } = qwen2.layers[0];
    assert_eq!((windows(&qwen2), qkv_bias, output_bias), (vec![None; 2], true, false));
    for (changes, expected) in [
        (json!({"max_window_layers": 1}), [None, Some(16)]),
        (json!({"max_window_layers": 2}), [None, None]),
        (json!({"max_window_layers": 0}), [Some(16), Some(16)]),
        (json!({"layer_types": ["sliding_attention", "full_attention"]}), [Some(16), None]),
    ] {
        let mut all = json!({"sliding_window": 16, "use_sliding_window": true, "layer_types": null});
        all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        assert_eq!(windows(&with(&all).unwrap()), expected, "{changes}");
    }
    let mut qwen3 = tiny()[1].to_json().as_object().unwrap().clone();
    qwen3.remove("head_dim");
    assert_eq!(Config::from_json(Path::new("config.json"), &qwen3).unwrap().head_dim, 128);
}

#[test]
fn recurrences_are_read_written_and_refused() {
    let [tied, _] = tiny();
    let mut next = tied.clone().of_family(Architecture::Qwen3Next);
    next.layers[1].feed_forward = FeedForward::SwiGlu;
    let next = next.map_layers(|mut layer| {
        if let Some(spec) = &mut layer.delta_net {
            (spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.taps) = (3, 6, 5, 7, 3);
        }
        if let FeedForward::Experts(spec) = &mut layer.feed_forward {
            (spec.shared_width, spec.router) = (10, RouterKind::Softmax { normalized: false });
        }
        layer
    });
    let dense = tied.clone().of_family(Architecture::Qwen35);
    assert_read_back([next, dense.clone()]);
    let with = |changes: Value| {
        let mut map = dense.to_json().as_object().unwrap().clone();
        map.extend(changes.as_object().unwrap().clone());
        Config::from_json(Path::new("m/config.json"), &map)
    };
    let recurs = |config: &Config| config.layers.iter().map(|of| of.delta_net.is_some()).collect::<Vec<_>>();
    let by_interval = json!({"layer_types": null, "num_hidden_layers": 6, "full_attention_interval": 3});
    assert_eq!(recurs(&with(by_interval).unwrap()), [true, true, false, true, true, false]);
    let default = with(json!({"layer_types": null, "num_hidden_layers": 4, "linear_num_key_heads": null,
        "linear_key_head_dim": null, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]},
        "partial_rotary_factor": null, "rope_theta": null, "head_dim": 16}));
    let default = default.unwrap_err().to_string();
    assert!(default.contains("a multiple of linear_num_key_heads, which is 16"), "{default}");
    for (changes, key) in [
        (json!({"layer_types": ["linear_attention", "linear_attention"]}), "layer_types"),
        (json!({"layer_types": ["linear_attention", "mamba"]}), "layer_types"),
        (json!({"layer_types": null, "full_attention_interval": 5}), "full_attention_interval"),
        (json!({"linear_num_value_heads": 5}), "linear_num_value_heads"),
        (json!({"linear_key_head_dim": 4096}), "linear_key_head_dim"),
        (json!({"attn_output_gate": false}), "attn_output_gate"),
        (json!({"num_experts": 4}), "num_experts"),
    ] {
        let text = with(changes.clone()).unwrap_err().to_string();
        assert!(text.contains(key), "{changes}: {text}");
    }
    assert!(message(&json!({"linear_num_key_heads": 2})).contains("linear_num_key_heads"));
    let moe = tied.of_family(Architecture::Qwen35Moe).to_json();
    let mut moe = moe.as_object().unwrap().clone();
    moe.insert("norm_topk_prob".to_owned(), json!(false));
    let text = Config::from_json(Path::new("m/config.json"), &moe).unwrap_err().to_string();
    assert!(text.contains("norm_topk_prob"), "{text}");
}

#[test]
fn ends_of_both_files_count() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), tiny()[0].to_json().to_string()).unwrap();
    assert_eq!(Config::load(dir.path()).unwrap().eos_token_ids, [2]);
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [7, 2, 5]}"#).unwrap();
    assert_eq!(Config::load(dir.path()).unwrap().eos_token_ids, [2, 5, 7]);
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 100}"#).unwrap();
    let err = Config::load(dir.path()).unwrap_err().to_string();
    assert!(err.contains("generation_config.json") && err.contains("vocab_size, which is 100"), "{err}");
}

#[test]
fn a_missing_or_broken_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let err = Config::load(dir.path()).unwrap_err().to_string();
    assert!(err.starts_with("cannot read ") && err.contains("config.json"), "{err}");
    std::fs::write(dir.path().join("config.json"), "{\n \"a\": }").unwrap();
    let err = Config::load(dir.path()).unwrap_err().to_string();
    assert!(err.contains("config.json is not valid") && err.contains("line 2"), "{err}");
}

#[test]
fn llama3_leaves_short_waves_alone_and_stretches_long_ones() {
    let plain = Rotary::plain(5e5);
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let (plain, scaled) = (plain.inv_freq(64), Rotary { scaling, ..plain }.inv_freq(64));
    assert_eq!((plain.len(), plain[0]), (32, 1.0));
    assert_eq!(plain[0], scaled[0]);
    assert_eq!(plain[31] / 8.0, scaled[31]);
    assert!(plain.iter().zip(&scaled).any(|(p, s)| s < p && *s > p / 8.0), "nothing in between");
}

#[test]
fn keys_of_latents_are_honoured_or_refused() {
    let [tied, _] = tiny();
    let of = |architecture: Architecture, changes: &Value| {
        let mut map = tied.clone().of_family(architecture).to_json().as_object().unwrap().clone();
        map.extend(changes.as_object().unwrap().clone());
        Config::from_json(Path::new("m/config.json"), &map)
    };
    let (deepseek, llama) = (Architecture::DeepseekV3, Architecture::Llama);
    let linear = json!({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}});
    for (architecture, changes, key) in [
        (llama, json!({"kv_lora_rank": 8}), "kv_lora_rank"),
        (llama, json!({"rope_interleave": true}), "rope_interleave"),
        (deepseek, json!({"kv_lora_rank": null}), "kv_lora_rank"),
        (deepseek, json!({"qk_rope_head_dim": 3}), "qk_rope_head_dim"),
        (deepseek, json!({"v_head_dim": 7}), "v_head_dim"),
        (deepseek, json!({"num_key_value_heads": 2}), "num_key_value_heads"),
        (deepseek, json!({"kv_lora_rank": u32::MAX, "hidden_size": u32::MAX}), "num_hidden_layers"),
        (deepseek, linear, "mscale_all_dim"),
    ] {
        let text = of(architecture, &changes).unwrap_err().to_string();
        assert!(text.starts_with("m/config.json") && text.contains(key), "{changes}: {text}");
    }
    let mut map = tied.clone().of_family(deepseek).to_json().as_object().unwrap().clone();
    map.remove("q_lora_rank");
    let text = Config::from_json(Path::new("m/config.json"), &map).unwrap_err().to_string();
    assert!(text.contains("q_lora_rank"), "{text}");

    let latent = |changes: Value| of(deepseek, &changes).unwrap().latent().unwrap();
    let usual = latent(json!({}));
    assert_eq!((usual.nope, usual.rope, usual.value, usual.key_rank), (4, 2, 4, 4));
    assert_eq!((usual.query_rank, latent(json!({"q_lora_rank": null})).query_rank), (Some(8), None));
    assert!(!latent(json!({"rope_interleave": false})).interleaved);
    let kimi = json!({"model_type": "kimi_k2", "head_dim": null});
    assert_eq!(of(deepseek, &kimi).unwrap(), tied.clone().of_family(deepseek));
    // 0.1 ln 40 + 1, as in DeepSeek-V3: cosines stay, and scores are multiplied by its square.
    let yarn = json!({"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0});
    let scaled = of(deepseek, &json!({ "rope_scaling": yarn })).unwrap();
    let AttentionSpec { rotary, scale, .. } = scaled.layers[0].attention;
    assert_eq!(rotary.unwrap().amplitude(), 1.0);
    let expected = 1.368_887_945_411_393_6_f64.powi(2) / 6.0_f64.sqrt();
    assert!((f64::from(scale.unwrap()) - expected).abs() < 1e-7, "{scale:?}");
    assert_read_back([scaled]);
}

#[test]
fn a_model_of_more_tensors_than_any_is_refused() {
    let [tied, _] = tiny();
    let mut map = tied.of_family(Architecture::Qwen3Moe).to_json().as_object().unwrap().clone();
    let many = json!({"num_hidden_layers": 100, "num_experts": 4096, "layer_types": null});
    map.extend(many.as_object().unwrap().clone());
    let error = Config::from_json(Path::new("m/config.json"), &map).unwrap_err().to_string();
    assert!(error.contains("num_experts = 4096, makes at most 1048576 tensors"), "{error}");
}

#[test]
fn keys_of_experts_are_honoured_or_refused() {
    let [tied, _] = tiny();
    let of = |architecture: Architecture, changes: &Value| {
        let mut map = tied.clone().of_family(architecture).to_json().as_object().unwrap().clone();
        map.extend(changes.as_object().unwrap().clone());
        Config::from_json(Path::new("m/config.json"), &map)
    };
    let [qwen, glm, gpt_oss] = [Architecture::Qwen3Moe, Architecture::Glm4Moe, Architecture::GptOss];
    let lite = Architecture::Glm4MoeLite;
    for (architecture, changes, key) in [
        (qwen, json!({"num_experts": 5000}), "num_experts"),
        (qwen, json!({"num_experts_per_tok": 5}), "num_experts_per_tok"),
        (qwen, json!({"num_local_experts": 3}), "num_local_experts"),
        (qwen, json!({"mlp_only_layers": [0, 1]}), "num_hidden_layers"),
        (qwen, json!({"n_shared_experts": 1}), "n_shared_experts"),
        (qwen, json!({"shared_expert_intermediate_size": 8}), "shared_expert_intermediate_size"),
        (qwen, json!({"n_group": 2}), "n_group"),
        (glm, json!({"n_group": 3}), "n_group"),
        (glm, json!({"n_group": 4}), "n_group"),
        (glm, json!({"topk_group": 2}), "topk_group"),
        (glm, json!({"n_group": null}), "n_group"),
        (glm, json!({"routed_scaling_factor": null}), "routed_scaling_factor"),
        (glm, json!({"first_k_dense_replace": null}), "first_k_dense_replace"),
        (glm, json!({"scoring_func": "softmax"}), "scoring_func"),
        (glm, json!({"moe_layer_freq": 2}), "moe_layer_freq"),
        (glm, json!({"swiglu_limit": 7.0}), "swiglu_limit"),
        (glm, json!({"quantization_config": {"quant_method": "mxfp4"}}), "quantization_config"),
        (glm, json!({"quantization_config": {"quant_method": "fp8"}}), "quantization_config"),
        (
            glm,
            json!({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}}),
            "quantization_config",
        ),
        (gpt_oss, json!({"quantization_config": {"quant_method": "awq"}}), "quantization_config"),
        (gpt_oss, json!({"experts_per_token": 3}), "experts_per_token"),
        (lite, json!({"mlp_layer_types": ["dense"]}), "mlp_layer_types"),
        (lite, json!({"mlp_layer_types": ["dense", "none"]}), "mlp_layer_types"),
        (lite, json!({"mlp_layer_types": null, "first_k_dense_replace": 0}), "first_k_dense_replace"),
        (glm, json!({"mlp_layer_types": ["dense", "sparse"]}), "mlp_layer_types"),
        (gpt_oss, json!({"routed_scaling_factor": 2.0}), "routed_scaling_factor"),
        (gpt_oss, json!({"rope_scaling": null}), "rope_scaling"),
        (gpt_oss, json!({"layer_types": ["full_attention"]}), "layer_types"),
    ] {
        let text = of(architecture, &changes).unwrap_err().to_string();
        assert!(text.starts_with("m/config.json") && text.contains(key), "{changes}: {text}");
    }
    let packed = json!({"quantization_config": {"quant_method": "mxfp4"}, "experts_per_token": 2});
    assert_eq!(of(gpt_oss, &packed).unwrap(), tied.clone().of_family(gpt_oss));
    let blocks = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
    assert!(of(glm, &json!({ "quantization_config": blocks })).is_ok());
    let alternate = of(gpt_oss, &json!({"layer_types": null, "sliding_window": 16})).unwrap();
    assert_eq!(
        alternate.layers.iter().map(|layer| layer.attention.window).collect::<Vec<_>>(),
        [Some(16), None]
    );
    let partial = of(glm, &json!({"partial_rotary_factor": null})).unwrap();
    assert_eq!(partial.rotaries()[0].share, 0.5);
    let sparse = of(qwen, &json!({"decoder_sparse_step": 2})).unwrap();
    let has_experts = |layer: &LayerSpec| layer.feed_forward.experts().is_some();
    assert_eq!(sparse.layers.iter().map(has_experts).collect::<Vec<_>>(), [false, true]);
    for (architecture, changes) in [
        (glm, json!({"first_k_dense_replace": 1})),
        (lite, json!({"mlp_layer_types": null, "first_k_dense_replace": 1})),
        (lite, json!({"mlp_layer_types": ["dense", "sparse"]})),
    ] {
        let dense = of(architecture, &changes).unwrap();
        assert_eq!(dense.layers.iter().map(has_experts).collect::<Vec<_>>(), [false, true], "{changes}");
    }
}
