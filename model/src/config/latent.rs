//! The keys of multi-head latent attention in `config.json`.
//!
//! Invariant: as in `read`: a key that would change what the network computes is either honoured or refused.

use serde_json::{Map, Value, json};

use super::families::Family;
use super::keys::JsonKeys;
use crate::ModelError;
use crate::layer::LatentSpec;

/// Keys of latent attention.
const KEYS: [&str; 6] =
    ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave"];

/// The latents of queries, keys and values, in a family that has them.
pub(super) fn read(keys: &JsonKeys<'_>, family: &Family) -> Result<Option<LatentSpec>, ModelError> {
    if !family.latent {
        let found = KEYS.into_iter().find(|key| keys.has(key));
        let supported = "models of this family, whose queries, keys and values have no latents";
        return found.map_or(Ok(None), |key| Err(keys.unsupported(key, supported)));
    }
    // `null` is not an absent key: transformers then has no latent of queries.
    if !keys.map.contains_key("q_lora_rank") {
        return Err(keys.missing("q_lora_rank"));
    }
    let latent = LatentSpec {
        query_rank: keys.optional_size("q_lora_rank")?,
        key_rank: keys.size("kv_lora_rank")?,
        nope: keys.size("qk_nope_head_dim")?,
        rope: keys.size("qk_rope_head_dim")?,
        value: keys.size("v_head_dim")?,
        interleaved: keys.flag("rope_interleave", true)?,
    };
    if !latent.rope.is_multiple_of(2) {
        return Err(keys.bad("qk_rope_head_dim", "an even number"));
    }
    let keys_wide = latent.head_dim();
    if latent.value > keys_wide {
        let supported = format!("at most qk_nope_head_dim + qk_rope_head_dim, which is {keys_wide}");
        return Err(keys.unsupported("v_head_dim", &supported));
    }
    Ok(Some(latent))
}

/// Writes the keys of `latent` to `map`.
pub(super) fn write(latent: &LatentSpec, map: &mut Map<String, Value>) {
    let LatentSpec { query_rank, key_rank, nope, rope, value, interleaved } = *latent;
    let values =
        [json!(query_rank), json!(key_rank), json!(nope), json!(rope), json!(value), json!(interleaved)];
    map.extend(KEYS.map(str::to_owned).into_iter().zip(values));
    // transformers has the rotated part under this key too.
    map.insert("head_dim".to_owned(), json!(rope));
}
