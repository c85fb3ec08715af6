//! `calculator`: the value of an expression, by the crate `exmex`.
//!
//! Invariant: an expression has no names but those of functions, so it reads and changes nothing.

use serde_json::{Map, Value, json};

use super::{Tool, ToolError};
use crate::{BoxFuture, ToolSchema};

/// Longest expression, characters.
const MAX_CHARS: usize = 1000;
/// Largest value that a double counts to without a gap.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Adds, subtracts, multiplies, divides, raises to powers, and knows functions such as `sqrt`.
#[derive(Clone, Debug)]
pub struct Calculator {
    schema: ToolSchema,
}

impl Default for Calculator {
    fn default() -> Self {
        let schema = ToolSchema {
            name: "calculator".to_owned(),
            description: "Computes the value of an arithmetic expression.".to_owned(),
            parameters: json!({
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "for example (3 + 4) * 2 / 7"}},
                "required": ["expression"],
            }),
        };
        Self { schema }
    }
}

impl Tool for Calculator {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call<'a>(&'a self, arguments: &'a Map<String, Value>) -> BoxFuture<'a, Result<String, ToolError>> {
        let expression = arguments.get("expression").and_then(Value::as_str).unwrap_or_default();
        Box::pin(std::future::ready(value(expression).map_err(ToolError::Refused)))
    }
}

/// The value of an expression, as a person writes it.
fn value(expression: &str) -> Result<String, String> {
    if expression.chars().count() > MAX_CHARS {
        return Err(format!("the expression is longer than {MAX_CHARS} characters"));
    }
    // What people and models write for the operators.
    let plain = expression.replace("**", "^").replace(['\u{d7}', '\u{b7}'], "*").replace('\u{f7}', "/");
    let plain = plain.replace(['\u{2212}', '\u{2013}'], "-").replace(',', "");
    match exmex::eval_str::<f64>(plain.trim().trim_end_matches('=')) {
        Ok(value) if value.is_nan() => Err("the expression has no value".to_owned()),
        Ok(value) if value.is_infinite() => Err("the value is infinite, or too large".to_owned()),
        // No minus sign before a zero.
        Ok(value) if value.fract() == 0.0 && value.abs() < EXACT => Ok(format!("{}", value as i64)),
        Ok(value) => Ok(readable(value)),
        Err(error) => Err(format!("{expression:?} is no arithmetic expression: {error}")),
    }
}

/// Twelve significant digits, without zeros at the end.
fn readable(value: f64) -> String {
    let rounded: f64 = format!("{value:.11e}").parse().unwrap_or(value);
    if (1e-6..1e16).contains(&rounded.abs()) { format!("{rounded}") } else { format!("{rounded:e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_have_the_values_that_people_expect() {
        let values = [
            ("12 * 34", "408"),
            ("(3 + 4) * 2 / 7", "2"),
            ("0.1 + 0.2", "0.3"),
            ("2 ** 10 =", "1024"),
            ("1,000 \u{d7} 3", "3000"),
            ("7 \u{2212} 9", "-2"),
            ("1 / 3", "0.333333333333"),
            ("sqrt(2)^2", "2"),
            ("-0", "0"),
            ("10^20", "1e20"),
        ];
        for (expression, expected) in values {
            assert_eq!(value(expression).as_deref(), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn what_has_no_value_is_refused() {
        for expression in ["", "x + 1", "3 +", "1 / 0", "import os", "10^999", "0/0", "((("] {
            value(expression).unwrap_err();
        }
        let deep = format!("{}1{}", "(".repeat(400), ")".repeat(400));
        assert_eq!(value(&deep).as_deref(), Ok("1"));
        value(&"1+".repeat(1000)).unwrap_err();
    }
}
