//! Limits of free-form values: the columns of a task and the details of its rewards.
//!
//! Invariant: a valid group has at most as many values, at most as deep, with names at most as long, as
//! [`ItemLimits`] allows, over the whole group.

use serde_json::{Map, Value};

use super::group::{ItemLimits, ValidationResult, reject};
use crate::http::problem::ProblemCode;

/// Counts the free-form values of one group.
#[derive(Debug)]
pub(super) struct FreeFormLimits {
    limits: ItemLimits,
    values: usize,
}

impl FreeFormLimits {
    /// No values yet.
    pub(super) fn new(limits: ItemLimits) -> Self {
        Self { limits, values: 0 }
    }

    /// Adds a map of columns or details, in the field `field`.
    pub(super) fn check(&mut self, field: &str, map: &Map<String, Value>) -> ValidationResult<()> {
        map.iter().try_for_each(|(name, value)| {
            self.name(field, name)?;
            self.value(field, value, 0)
        })
    }

    /// Checks a name.
    pub(super) fn name(&self, field: &str, name: &str) -> ValidationResult<()> {
        let (found, limit) = (name.len(), self.limits.name_bytes);
        if found > limit {
            let begin: String = name.chars().take(32).collect();
            let detail =
                format!("`{field}` has a name of {found} bytes, at most {limit} are taken: {begin:?}...");
            return reject(ProblemCode::NameTooLong, detail);
        }
        Ok(())
    }

    fn value(&mut self, field: &str, value: &Value, depth: usize) -> ValidationResult<()> {
        let ItemLimits { values, depth: deepest, .. } = self.limits;
        self.values += 1;
        if self.values > values {
            let detail = format!("columns and details have more than {values} values, with `{field}`");
            return reject(ProblemCode::TooManyValues, detail);
        }
        if depth > deepest {
            let detail = format!("`{field}` has more than {deepest} lists and objects within each other");
            return reject(ProblemCode::TooDeep, detail);
        }
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.value(field, item, depth + 1)),
            Value::Object(map) => map.iter().try_for_each(|(name, item)| {
                self.name(field, name)?;
                self.value(field, item, depth + 1)
            }),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
        }
    }
}
