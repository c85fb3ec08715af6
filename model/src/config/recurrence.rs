//! The keys of `config.json` about layers with a recurrence in place of attention.
//!
//! Invariant: as in `read`: a key that would change what the network computes is either honoured or refused.

use serde_json::{Map, Value, json};

use super::Config;
use super::families::Family;
use super::keys::JsonKeys;
use crate::ModelError;
use crate::layer::{AttentionSpec, DeltaNetFiles, DeltaNetSpec, LayerSpec, QueryKeyNorm};

/// `full_attention_interval` if `config.json` has no such key.
const INTERVAL: usize = 4;
/// Far above any model that exists, and low enough that no state is too large to allocate.
const MAX_HEAD_WIDTH: usize = 1024;
const MAX_TAPS: usize = 64;

const KEYS: [&str; 5] = [
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
];
const INTERVAL_KEY: &str = "full_attention_interval";
const KINDS: [&str; 2] = ["full_attention", "linear_attention"];

/// The recurrence of a model, and which of its `num_layers` layers have it.
pub(super) fn read(
    keys: &JsonKeys<'_>,
    family: &Family,
    num_layers: usize,
) -> Result<Option<(DeltaNetSpec, Vec<bool>)>, ModelError> {
    let Some(files) = family.recurrence else {
        let found = KEYS.into_iter().chain([INTERVAL_KEY]).find(|key| keys.has(key));
        return found.map_or(Ok(None), |key| {
            Err(keys.unsupported(key, "models of this family without a recurrence, which have no such key"))
        });
    };
    let bounded = |key: &str, default: usize, most: usize| match keys.optional_size(key)?.unwrap_or(default) {
        size if size <= most => Ok(size),
        _ => Err(keys.bad(key, &format!("at most {most}"))),
    };
    let [key_heads, value_heads, key_dim, value_dim, taps] = KEYS;
    let spec = DeltaNetSpec {
        key_heads: bounded(key_heads, 16, u16::MAX.into())?,
        value_heads: bounded(value_heads, 32, u16::MAX.into())?,
        key_dim: bounded(key_dim, 128, MAX_HEAD_WIDTH)?,
        value_dim: bounded(value_dim, 128, MAX_HEAD_WIDTH)?,
        taps: bounded(taps, 4, MAX_TAPS)?,
        files,
    };
    if !spec.value_heads.is_multiple_of(spec.key_heads) {
        let expected = format!("a multiple of linear_num_key_heads, which is {}", spec.key_heads);
        return Err(keys.bad(value_heads, &expected));
    }
    if !keys.flag("attn_output_gate", true)? {
        return Err(keys.unsupported("attn_output_gate", "true"));
    }
    let layers = layers(keys, num_layers)?;
    if !layers.contains(&false) {
        let key = if keys.has("layer_types") { "layer_types" } else { INTERVAL_KEY };
        return Err(keys.bad(key, "a layer with full attention, whose keys say where a sequence is"));
    }
    Ok(layers.contains(&true).then_some((spec, layers)))
}

/// Whether each layer has a recurrence.
fn layers(keys: &JsonKeys<'_>, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    if !keys.has("layer_types") {
        let interval = keys.optional_size(INTERVAL_KEY)?.unwrap_or(INTERVAL);
        return Ok((0..num_layers).map(|index| recurs(index, interval)).collect());
    }
    let types =
        keys.map.get("layer_types").and_then(Value::as_array).filter(|types| types.len() == num_layers);
    let types = types.ok_or_else(|| keys.bad("layer_types", &format!("a list of {num_layers} texts")))?;
    let of = |kind: &Value| {
        let at = KINDS.iter().position(|known| kind.as_str() == Some(known));
        at.map(|at| at == 1).ok_or_else(|| keys.unsupported("layer_types", &KINDS.join(", ")))
    };
    types.iter().map(of).collect()
}

/// Whether a layer has a recurrence: all but the last of each interval.
fn recurs(index: usize, interval: usize) -> bool {
    !(index + 1).is_multiple_of(interval)
}

/// The same layer with a recurrence in place of attention.
pub(super) fn in_place_of_attention(layer: LayerSpec, delta_net: DeltaNetSpec) -> LayerSpec {
    LayerSpec {
        attention: AttentionSpec { window: None, rotary: None, scale: None, sinks: false, gated: false },
        delta_net: Some(delta_net),
        query_key_norm: QueryKeyNorm::None,
        qkv_bias: false,
        output_bias: false,
        ..layer
    }
}

/// The recurrence that a layer of a fresh model with the sizes of `config` has, if it has one. The last layer has attention.
pub(super) fn fresh(config: &Config, files: Option<DeltaNetFiles>, index: usize) -> Option<DeltaNetSpec> {
    let files = files.filter(|_| recurs(index, INTERVAL.min(config.num_layers())))?;
    Some(DeltaNetSpec {
        key_heads: config.num_kv_heads,
        value_heads: config.num_heads,
        key_dim: config.head_dim,
        value_dim: config.head_dim,
        taps: 4,
        files,
    })
}

/// Writes the keys of a family whose layers may have a recurrence to `map`.
pub(super) fn write(config: &Config, map: &mut Map<String, Value>) {
    let kind = |layer: &LayerSpec| KINDS[usize::from(layer.delta_net.is_some())];
    map.insert("layer_types".to_owned(), json!(config.layers.iter().map(kind).collect::<Vec<_>>()));
    let Some(spec) = config.delta_net() else { return };
    let sizes = [spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.taps];
    for (key, size) in KEYS.into_iter().zip(sizes) {
        map.insert(key.to_owned(), json!(size));
    }
}
