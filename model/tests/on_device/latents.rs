//! Attention through latents: with and without a latent of queries, both orders of rotated pairs, biases, and widths of values.

use model::{AttentionSpec, Config, FeedForward, Head, LatentSpec, LayerSpec, Norm, Rotary, Sizes};

use super::{DeviceDtype, decodes, prefills, trains_in_bf16, trains_in_f32};

/// Latents with pairs of neighbours, and values that are narrower than keys.
const SPEC: LatentSpec =
    LatentSpec { query_rank: Some(18), key_rank: 12, nope: 7, rope: 6, value: 5, interleaved: true };

/// Two layers with latents of `spec` and without experts, otherwise as `change` makes them.
fn with_latents(spec: LatentSpec, change: impl Fn(LayerSpec) -> LayerSpec) -> Config {
    let sizes = Sizes {
        vocab_size: 29,
        hidden_size: 32,
        intermediate_size: 24,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 4,
        max_position_embeddings: 256,
    };
    let layer = |layer: LayerSpec| LayerSpec {
        attention: AttentionSpec { latent: Some(spec), ..layer.attention },
        feed_forward: FeedForward::SwiGlu,
        qkv_bias: false,
        ..layer
    };
    let config = Config::fresh(&sizes).map_layers(layer).map_layers(change);
    Config { head_dim: spec.head_dim(), ..config }
}

/// Configurations with a name.
pub(super) fn configs() -> Vec<(&'static str, Config)> {
    let of = |spec| with_latents(spec, |layer| layer);
    // Parts of 16 bytes in either storage type.
    let wide = LatentSpec { query_rank: Some(16), key_rank: 24, nope: 16, rope: 16, value: 16, ..SPEC };
    let around = |layer: LayerSpec| LayerSpec {
        norm: Norm::RmsAround,
        qkv_bias: true,
        output_bias: true,
        attention: AttentionSpec { scale: Some(0.4), sinks: true, window: Some(9), ..layer.attention },
        ..layer
    };
    let mut some = with_latents(wide, |layer| layer);
    some.layers[1].attention.rotary = Some(Rotary::plain(50.0));
    vec![
        ("neighbours", of(SPEC)),
        ("halves", of(LatentSpec { interleaved: false, ..wide })),
        ("queries from the input", of(LatentSpec { query_rank: None, value: 13, ..SPEC })),
        ("two rotary embeddings", some),
        (
            "norms, biases, sinks and windows",
            Config { head: Head::LanguageAndValue, norm_offset: 1.0, ..with_latents(SPEC, around) },
        ),
    ]
}

#[test]
fn latents_train_in_f32() {
    for (name, config) in configs() {
        trains_in_f32(&config, name);
    }
}

#[test]
fn latents_train_in_bf16() {
    for (name, config) in configs() {
        trains_in_bf16(&config, name);
    }
}

#[test]
fn latents_decode() {
    for (_, config) in configs() {
        decodes(DeviceDtype::F32, &config, 1e-4);
        decodes(DeviceDtype::Bf16, &config, 0.3);
    }
}

#[test]
fn latents_prefill_beside_decoding() {
    for (_, config) in configs() {
        prefills(&config);
    }
}
