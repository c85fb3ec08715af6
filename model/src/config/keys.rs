//! Typed access to the keys of a JSON object, with errors that name the file and the key.
//!
//! Invariant: an absent key and a `null` are the same thing, as in transformers. Models are not known here.

use std::path::Path;

use serde_json::{Map, Value};

use crate::ModelError;

/// A JSON object and its file.
#[derive(Clone, Copy)]
pub(crate) struct JsonKeys<'a> {
    pub(crate) path: &'a Path,
    pub(crate) map: &'a Map<String, Value>,
}

impl<'a> JsonKeys<'a> {
    /// Whether the key has a value other than `null`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// A count of at least 1 that must be there.
    pub(crate) fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A count of at least 1 that may be absent. Zero is allowed in numbers of layers that may have none.
    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let least = u64::from(!["max_window_layers", "first_k_dense_replace"].contains(&key));
        match value.as_u64().filter(|n| (least..=u64::from(u32::MAX)).contains(n)) {
            Some(n) => Ok(Some(n as usize)),
            None => Err(self.bad(key, &format!("a whole number of at least {least}"))),
        }
    }

    /// A finite number, or the default.
    pub(crate) fn number(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.bad(key, "a number")),
        }
    }

    /// A boolean, or the default.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.bad(key, "true or false")),
        }
    }

    /// A text that must be there.
    pub(crate) fn text(&self, key: &str) -> Result<&'a str, ModelError> {
        let value = self.value(key).ok_or_else(|| self.missing(key))?;
        value.as_str().ok_or_else(|| self.bad(key, "a text"))
    }

    /// One token id, a list of them, or none; ascending.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(Vec::new()) };
        // Some published configs write -1 for "no such token".
        if value.as_i64() == Some(-1) {
            return Ok(Vec::new());
        }
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let ids: Option<Vec<u32>> = list.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect();
        let mut ids = ids.ok_or_else(|| self.bad(key, "a token id or a list of token ids"))?;
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// Refuses token ids that the embedding has no row for.
    pub(crate) fn check_tokens(&self, key: &str, ids: &[u32], vocab_size: usize) -> Result<(), ModelError> {
        if ids.iter().any(|&id| id as usize >= vocab_size) {
            return Err(self.bad(key, &format!("ids below vocab_size, which is {vocab_size}")));
        }
        Ok(())
    }

    /// The error for a key that must be there and is not.
    pub(crate) fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey { path: self.path.to_owned(), key: key.to_owned() }
    }

    /// The error for an invalid value.
    pub(crate) fn bad(&self, key: &str, expected: &str) -> ModelError {
        ModelError::BadKey {
            path: self.path.to_owned(),
            key: key.to_owned(),
            found: self.shown(key),
            expected: expected.to_owned(),
        }
    }

    /// The error for a valid value that the decoder does not support.
    pub(crate) fn unsupported(&self, key: &str, supported: &str) -> ModelError {
        ModelError::Unsupported {
            path: self.path.to_owned(),
            key: key.to_owned(),
            found: self.shown(key),
            supported: supported.to_owned(),
        }
    }

    fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn shown(&self, key: &str) -> String {
        let text = self.map.get(key).map_or_else(|| "absent".to_owned(), Value::to_string);
        if text.chars().count() <= 200 { text } else { text.chars().take(200).chain("...".chars()).collect() }
    }
}
