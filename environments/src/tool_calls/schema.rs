//! What a model is given of a tool: name, description, and the JSON schema of its arguments.
//!
//! Invariant: a schema comes from outside (a server, a docstring), so nothing here relies on its form.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{BadCall, ToolCall, type_of};

/// A tool as a model sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolSchema {
    /// Its name in calls.
    pub name: String,
    /// What it does.
    #[serde(default)]
    pub description: String,
    /// JSON schema of its arguments, an object.
    #[serde(default = "no_parameters")]
    pub parameters: Value,
}

fn no_parameters() -> Value {
    json!({"type": "object", "properties": {}})
}

impl ToolSchema {
    /// As chat templates take it: the form of OpenAI's `tools`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        })
    }

    fn property(&self, name: &str) -> Option<&Value> {
        self.parameters.get("properties")?.get(name)
    }

    /// Whether a parameter takes text, or is unknown.
    pub(super) fn is_text(&self, parameter: &str) -> bool {
        let types = self.property(parameter).and_then(|property| property.get("type"));
        types.is_none_or(|types| types == "string")
    }

    /// Whether `call` has the arguments that the schema requires, of the types that it gives. Types that this function does
    /// not know allow everything.
    ///
    /// # Errors
    /// The first argument that is missing or of another type.
    pub fn check(&self, call: &ToolCall) -> Result<(), BadCall> {
        let none = Vec::new();
        let required = self.parameters.get("required").and_then(Value::as_array).unwrap_or(&none);
        let missing =
            required.iter().filter_map(Value::as_str).find(|name| !call.arguments.contains_key(*name));
        if let Some(missing) = missing {
            let known = self.parameters.get("properties").and_then(Value::as_object);
            let known = known.map_or_else(String::new, list);
            return Err(BadCall::new(format!(
                "the call of {} lacks the argument \"{missing}\"; its arguments are {known}",
                self.name
            )));
        }
        for (name, value) in &call.arguments {
            let Some(wanted) = self.property(name).and_then(|property| property.get("type")) else {
                continue;
            };
            let wanted: Vec<&str> = match wanted {
                Value::String(one) => vec![one],
                Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
                _ => continue,
            };
            if !wanted.is_empty() && !wanted.iter().any(|wanted| is_of(wanted, value)) {
                return Err(BadCall::new(format!(
                    "the argument \"{name}\" of {} is {}; it must be of type {}",
                    self.name,
                    type_of(value),
                    wanted.join(" or ")
                )));
            }
        }
        Ok(())
    }
}

/// Whether `value` is of a type of JSON schema.
fn is_of(wanted: &str, value: &Value) -> bool {
    match wanted {
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "null" => value.is_null(),
        _ => true,
    }
}

fn list(properties: &Map<String, Value>) -> String {
    properties.keys().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}
