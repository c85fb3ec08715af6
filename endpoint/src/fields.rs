//! The fields of a request, taken one by one.
//!
//! Invariant: a field that no one took is refused by name in [`Fields::finish`], so that nothing a client asks for is ignored
//! silently. A field that is `null` is as if it were not there.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::ApiError;

/// The fields of a JSON object that are not taken yet.
#[derive(Clone, Debug, Default)]
pub struct Fields {
    map: Map<String, Value>,
    /// What stands before a name in errors: nothing, or the name of the object and a dot.
    path: String,
}

impl Fields {
    /// The fields of a body.
    ///
    /// # Errors
    /// A body that is no JSON object.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self { map, path: String::new() }),
            Ok(_) => Err(ApiError::malformed("the body must be a JSON object")),
            Err(error) => Err(ApiError::malformed(format!("the body is not valid JSON: {error}"))),
        }
    }

    /// The fields of an object within another.
    #[must_use]
    pub fn of(map: Map<String, Value>, path: &str) -> Self {
        Self { map, path: format!("{path}.") }
    }

    /// The name of a field in errors.
    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Whether there is a field.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|value| !value.is_null())
    }

    /// Takes a field of any type.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Puts a field back, to be taken again.
    pub fn put(&mut self, name: &str, value: Value) {
        self.map.insert(name.to_owned(), value);
    }

    /// A value that is required.
    ///
    /// # Errors
    /// If it is missing.
    pub fn required<T>(&self, name: &str, value: Option<T>) -> Result<T, ApiError> {
        value.ok_or_else(|| ApiError::missing(&self.name(name)))
    }

    /// Takes a text.
    ///
    /// # Errors
    /// Another type.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(name, "a text")),
        }
    }

    /// Takes true or false.
    ///
    /// # Errors
    /// Another type.
    pub fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.wrong(name, "true or false")),
        }
    }

    /// Takes a number in `range`.
    ///
    /// # Errors
    /// Another type, or a number outside of it.
    pub fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().filter(|number| range.contains(number));
        let wanted = || format!("a number from {} to {}, not {value}", range.start(), range.end());
        number.map(Some).ok_or_else(|| self.wrong(name, &wanted()))
    }

    /// Takes a whole number in `range`.
    ///
    /// # Errors
    /// Another type, or a number outside of it.
    pub fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_i64().filter(|number| range.contains(number));
        let wanted = || format!("a whole number from {} to {}, not {value}", range.start(), range.end());
        number.map(Some).ok_or_else(|| self.wrong(name, &wanted()))
    }

    /// Takes a count in `range`.
    ///
    /// # Errors
    /// Another type, or a number outside of it.
    pub fn count(&mut self, name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ApiError> {
        let bound = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let taken = self.integer(name, bound(*range.start())..=bound(*range.end()))?;
        Ok(taken.and_then(|number| usize::try_from(number).ok()))
    }

    /// Takes a list.
    ///
    /// # Errors
    /// Another type.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(self.wrong(name, "a list")),
        }
    }

    /// Takes an object.
    ///
    /// # Errors
    /// Another type.
    pub fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(_) => Err(self.wrong(name, "an object")),
        }
    }

    /// Takes a list of token ids.
    ///
    /// # Errors
    /// Another type.
    pub fn token_ids(&mut self, name: &str) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(list) = self.list(name)? else { return Ok(None) };
        let ids: Option<Vec<u32>> = list.iter().map(token_id).collect();
        ids.map(Some).ok_or_else(|| self.wrong(name, "a list of token ids"))
    }

    /// Takes a field that is not supported, and has to have one of its `neutral` values.
    ///
    /// # Errors
    /// Any other value.
    pub fn neutral(&mut self, name: &str, neutral: &[Value]) -> Result<(), ApiError> {
        let Some(value) = self.take(name) else { return Ok(()) };
        let equal = |neutral: &Value| match (neutral.as_f64(), value.as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => *neutral == value,
        };
        if neutral.iter().any(equal) {
            return Ok(());
        }
        let name = self.name(name);
        let allowed: Vec<String> = neutral.iter().map(Value::to_string).collect();
        let remedy = if allowed.is_empty() {
            "leave it out".to_owned()
        } else {
            format!("leave it out or send {}", allowed.join(" or "))
        };
        Err(ApiError::invalid(&name, format!("`{name}` is not supported by this endpoint; {remedy}")))
    }

    /// Takes fields that change nothing of what is sampled.
    pub fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.map.remove(*name);
        }
    }

    /// Refuses what is left.
    ///
    /// # Errors
    /// The first field that was not taken.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let name = self.name(name);
                Err(ApiError::invalid(&name, format!("`{name}` is not a field of this route; leave it out")))
            }
        }
    }

    /// The error of a value of another type.
    #[must_use]
    pub fn wrong(&self, name: &str, wanted: &str) -> ApiError {
        let name = self.name(name);
        ApiError::invalid(&name, format!("`{name}` must be {wanted}"))
    }
}

/// The token id that a value is.
pub(crate) fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: &Value) -> Fields {
        Fields::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn a_field_that_is_left_is_named() {
        let mut some = fields(&json!({"a": 1, "b": null, "typo": 2, "n": 3}));
        assert_eq!(some.integer("a", 0..=5).unwrap(), Some(1));
        some.ignore(&["n"]);
        let error = some.clone().finish().unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("typo")));
        some.ignore(&["typo"]);
        some.finish().unwrap();
    }

    #[test]
    fn neutral_values_are_equal_as_numbers() {
        let mut some = fields(&json!({"p": 0, "r": 1.0, "bias": {}, "x": 0.5}));
        some.neutral("p", &[json!(0.0)]).unwrap();
        some.neutral("r", &[json!(1)]).unwrap();
        some.neutral("bias", &[json!({})]).unwrap();
        some.neutral("absent", &[]).unwrap();
        let error = some.neutral("x", &[json!(0)]).unwrap_err();
        assert!(
            error.message.contains("`x` is not supported") && error.message.contains("send 0"),
            "{error}"
        );
    }

    #[test]
    fn values_are_checked() {
        let mut some = fields(&json!({"t": "x", "i": 1.5, "big": 9, "ids": [1, -1], "ok": [1, 2]}));
        assert!(some.flag("t").is_err() && some.integer("i", 0..=9).is_err());
        assert!(some.number("big", 0.0..=2.0).unwrap_err().message.contains("from 0 to 2, not 9"));
        assert!(some.token_ids("ids").is_err());
        assert_eq!(some.token_ids("ok").unwrap(), Some(vec![1, 2]));
        let inner = Fields::of(Map::new(), "sampling_params");
        assert_eq!(
            inner.required::<u8>("n", None).unwrap_err().param.as_deref(),
            Some("body.sampling_params.n")
        );
        assert!(Fields::parse(b"[1]").is_err() && Fields::parse(b"{").is_err());
    }
}
