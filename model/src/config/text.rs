//! The text part of a model that reads images too: the object `text_config` of its `config.json`.
//!
//! Invariant: the part is a model of a family by itself. What transformers reads outside of it and the network depends on is taken
//! along, or refused if both places differ.

use serde_json::{Map, Value};

use super::REDUCTION_KEY;
use super::families::{FAMILIES, Family};
use super::keys::JsonKeys;
use crate::ModelError;

/// Keys beside `text_config` that matter to the text part.
const TAKEN: [&str; 9] = [
    "tie_word_embeddings",
    "quantization_config",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "value_head",
    REDUCTION_KEY,
];

/// The text part of the `config.json` of a model that reads images too; `None` for one of text alone.
pub(crate) fn text_part(keys: &JsonKeys<'_>) -> Result<Option<Map<String, Value>>, ModelError> {
    let found = keys.map.get("model_type").and_then(Value::as_str);
    let Some(family) = FAMILIES.iter().find(|family| family.with_images.is_some_and(|of| Some(of) == found))
    else {
        return Ok(None);
    };
    let Family { model_type, class, .. } = family;
    let text = keys.map.get("text_config").and_then(Value::as_object);
    let mut text = text.ok_or_else(|| keys.missing("text_config"))?.clone();
    let kind = text.entry("model_type").or_insert_with(|| (*model_type).into());
    if kind != model_type {
        return Err(keys.unsupported("text_config", &format!("an object whose model_type is {model_type}")));
    }
    let classes = keys.map.get("architectures").and_then(Value::as_array);
    if let Some(of) = classes.and_then(|list| list.first()).and_then(Value::as_str) {
        let known = [format!("{class}ForConditionalGeneration"), format!("{class}ForCausalLM")];
        if !known.contains(&of.to_owned()) && !of.ends_with("Model") {
            return Err(keys.unsupported("architectures", &known.join(", ")));
        }
    }
    for key in TAKEN {
        let Some(outer) = keys.map.get(key).filter(|value| !value.is_null()) else { continue };
        let inner = text.entry(key).or_insert(Value::Null);
        if inner.is_null() {
            *inner = outer.clone();
        } else if key == "tie_word_embeddings" && inner != outer {
            return Err(keys.bad(key, &format!("what text_config says, which is {inner}")));
        }
    }
    text.insert("architectures".to_owned(), vec![format!("{class}ForCausalLM")].into());
    Ok(Some(text))
}
