//! Every option of the attention half of a layer, of norms, and of what is outside of layers.

use model::{AttentionSpec, Config, Head, LayerSpec, Norm, QueryKeyNorm, RopeScaling, Rotary, Sizes, Yarn};

use super::{DeviceDtype, decodes, prefills, trains_in_bf16, trains_in_f32};

/// Three layers, so that options can differ between them.
fn fresh() -> Config {
    Config::fresh(&Sizes {
        vocab_size: 29,
        hidden_size: 32,
        intermediate_size: 24,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 256,
    })
}

/// The same with the attention of layer `index` changed by `change`.
fn with_attention(mut config: Config, change: impl Fn(usize, AttentionSpec) -> AttentionSpec) -> Config {
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.attention = change(index, layer.attention);
    }
    config
}

fn yarn() -> Yarn {
    Yarn {
        factor: 4.0,
        attention_factor: 1.2,
        beta_fast: 32.0,
        beta_slow: 1.0,
        score_weight: 0.0,
        truncate: true,
        original_max_position_embeddings: 16,
    }
}

/// Configurations with a name, each of which has options that devices compute by operations of their own.
pub(super) fn configs() -> Vec<(&'static str, Config)> {
    let layers = |change: fn(LayerSpec) -> LayerSpec| fresh().map_layers(change);
    let rotary = |index| match index {
        0 => Some(Rotary { share: 0.5, ..Rotary::plain(1e4) }),
        1 => None,
        _ => Some(Rotary { scaling: RopeScaling::Yarn(yarn()), ..Rotary::plain(1e3) }),
    };
    let window = |index| [Some(5), None, Some(2)][index];
    let around = |layer| LayerSpec { norm: Norm::RmsAround, query_key_norm: QueryKeyNorm::PerHead, ..layer };
    let gated = with_attention(fresh(), |_, attention| AttentionSpec { gated: true, ..attention });
    let mixed = with_attention(fresh().map_layers(around), |index, attention| AttentionSpec {
        window: Some(4 + 3 * index),
        rotary: rotary(index),
        scale: Some(0.5),
        sinks: index != 1,
        gated: index != 0,
        ..attention
    });
    vec![
        (
            "norms after a block, of all heads together",
            layers(|layer| LayerSpec {
                norm: Norm::RmsAfter,
                query_key_norm: QueryKeyNorm::Whole,
                output_bias: true,
                ..layer
            }),
        ),
        ("norms around a block", Config { norm_offset: 1.0, ..fresh().map_layers(around) }),
        (
            "multipliers",
            Config {
                embedding_multiplier: 3.0,
                logits_scaling: 1.7,
                head: Head::LanguageAndValue,
                ..with_attention(
                    layers(|layer| LayerSpec { residual_multiplier: 0.4, output_bias: true, ..layer }),
                    |_, attention| AttentionSpec { scale: Some(0.2), ..attention },
                )
            },
        ),
        (
            "multiplied norms",
            layers(|layer| LayerSpec { norm: Norm::RmsAfter, residual_multiplier: 0.4, ..layer }),
        ),
        (
            "rotary embeddings",
            // Without rotation a bias of keys has no effect, and its gradient is a rounding.
            with_attention(layers(|layer| LayerSpec { qkv_bias: false, ..layer }), |index, attention| {
                AttentionSpec { rotary: rotary(index), ..attention }
            }),
        ),
        (
            "windows",
            with_attention(fresh(), |index, attention| AttentionSpec { window: window(index), ..attention }),
        ),
        ("sinks", with_attention(fresh(), |_, attention| AttentionSpec { sinks: true, ..attention })),
        ("gates", gated),
        ("all of them", Config { norm_offset: 0.5, tie_word_embeddings: false, ..mixed }),
    ]
}

#[test]
fn options_train_in_f32() {
    for (name, config) in configs() {
        trains_in_f32(&config, name);
    }
}

#[test]
fn options_train_in_bf16() {
    for (name, config) in configs() {
        trains_in_bf16(&config, name);
    }
}

#[test]
fn options_decode() {
    for (_, config) in configs() {
        decodes(DeviceDtype::F32, &config, 1e-4);
        decodes(DeviceDtype::Bf16, &config, 0.3);
    }
}

#[test]
fn options_prefill_beside_decoding() {
    for (_, config) in configs() {
        prefills(&config);
    }
}
