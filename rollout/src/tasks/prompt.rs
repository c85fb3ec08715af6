//! A prompt from the cells of a row.
//!
//! Invariant: a cell of the wrong type is an error; nothing is turned into text that a user would not read as text.
//! Chat templates are applied later, by the model's tokenizer.

use model::ChatMessage;
use serde_json::{Map, Value};
use trajectory::{Message, Prompt};

use super::TaskError;
use super::rows::{DatasetRow, type_of};

/// Looks up a column: the name itself, or a dotted path into nested objects.
#[must_use]
pub fn cell<'a>(columns: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    if let Some(value) = columns.get(path) {
        return Some(value);
    }
    // A column may itself have a dot in its name, so every dot is tried.
    path.match_indices('.')
        .find_map(|(dot, _)| cell(columns.get(&path[..dot])?.as_object()?, &path[dot + 1..]))
}

/// Text, number or boolean of a cell as text.
#[must_use]
pub fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(truth) => Some(truth.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// Reads a prompt cell: a string or a list of messages.
///
/// # Errors
/// A cell of another type, an empty list, a message without `role` and `content` as strings, or with calls of tools.
pub fn from_cell(row: &DatasetRow, column: &str, value: &Value) -> Result<Prompt, TaskError> {
    let wrong = |found: String| TaskError::CellType {
        place: row.place.clone(),
        column: column.to_owned(),
        found,
        expected: "a prompt must be a string, or a list of messages with `role` and `content` as strings",
    };
    let calls = |message: &Value| message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
    match (value, messages(value)) {
        (Value::String(text), _) => Ok(Prompt::Text(text.clone())),
        (Value::Array(list), _) if list.iter().any(calls) => {
            Err(wrong("a list with `tool_calls`, which a prompt does not keep".to_owned()))
        }
        (_, Ok(messages)) => Ok(Prompt::Messages(messages)),
        (_, Err(found)) => Err(wrong(found)),
    }
}

/// Reads a list of messages: role, text, and the id of the call that a tool's answer is of.
///
/// # Errors
/// Those of [`chat_messages`].
fn messages(value: &Value) -> Result<Vec<Message>, String> {
    let message = |message: ChatMessage| {
        let id = message.extra.get("tool_call_id").and_then(Value::as_str).map(str::to_owned);
        Message { tool_call_id: id, ..Message::new(message.role, message.content) }
    };
    Ok(chat_messages(value)?.into_iter().map(message).collect())
}

/// Reads a list of messages with all their keys, such as `tool_calls`, `name` and `reasoning_content`, for chat templates.
/// `content` may be absent or null beside calls of tools.
///
/// # Errors
/// What the value is instead: another type, an empty list, a list with a message without `role` and `content` as strings, or
/// with `tool_calls` that are no list.
pub fn chat_messages(value: &Value) -> Result<Vec<ChatMessage>, String> {
    let Value::Array(list) = value else { return Err(type_of(value).to_owned()) };
    if list.is_empty() {
        return Err("an empty list".to_owned());
    }
    list.iter().enumerate().map(|(at, message)| chat_message(at, message)).collect()
}

/// Message number `at` of a list. A key that is null is absent: tables give every message the keys of all.
fn chat_message(at: usize, message: &Value) -> Result<ChatMessage, String> {
    let wrong =
        |value: &Value, key: &str| format!("a list whose message {at} has {} as `{key}`", type_of(value));
    let tool_calls: Vec<Value> = match message.get("tool_calls") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(calls)) => calls.iter().map(tool_call).collect(),
        Some(other) => return Err(wrong(other, "tool_calls")),
    };
    let part = |key: &str| match message.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        None | Some(Value::Null) if key == "content" && !tool_calls.is_empty() => Ok(String::new()),
        Some(other) => Err(wrong(other, key)),
        None => Err(format!("a list whose message {at} has no `{key}`")),
    };
    let (role, content) = (part("role")?, part("content")?);
    let others = message.as_object().into_iter().flatten();
    let others = others.filter(|(key, value)| {
        !["role", "content", "tool_calls"].contains(&key.as_str()) && !value.is_null()
    });
    let extra = others.map(|(key, value)| (key.clone(), value.clone())).collect();
    Ok(ChatMessage { role, content, tool_calls, extra })
}

/// A call of a tool as chat templates take it: `arguments` as an object, which datasets have as its JSON text too.
fn tool_call(call: &Value) -> Value {
    let mut call = call.clone();
    let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
    if let Some(arguments) = arguments
        && let Some(parsed) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok())
    {
        *arguments = Value::Object(parsed);
    }
    call
}

/// The prompt of a conversation that is trained on: its messages before the last assistant turn.
///
/// # Errors
/// A cell that is no list of messages; a conversation without an assistant turn, or with nothing before it.
pub fn of_conversation(row: &DatasetRow, column: &str, value: &Value) -> Result<Prompt, TaskError> {
    let wrong = |found: &str| TaskError::CellType {
        place: row.place.clone(),
        column: column.to_owned(),
        found: found.to_owned(),
        expected: "a conversation must be a list of messages, with an assistant turn after the prompt; name the column of \
                   the prompt in `prompt_column` if it stands elsewhere",
    };
    let mut messages = messages(value).map_err(|found| wrong(&found))?;
    match messages.iter().rposition(|message| message.role == "assistant") {
        None => Err(wrong("a list with no assistant turn")),
        Some(0) => Err(wrong("a list with nothing before its last assistant turn")),
        Some(last) => {
            messages.truncate(last);
            Ok(Prompt::Messages(messages))
        }
    }
}

/// Fills the placeholders `{column}` of a template.
///
/// A placeholder is a name (letters, digits, `_` and dots, not beginning with a digit) in braces; `{{name}}` writes
/// `{name}`, and braces around anything else stay as they are, so that `\boxed{}` needs no escape.
///
/// # Errors
/// A placeholder without a column; a cell that is not text, a number or a boolean.
pub fn fill(row: &DatasetRow, template: &str) -> Result<String, TaskError> {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(open) = rest.find('{') {
        out.push_str(&rest[..open]);
        rest = &rest[open..];
        if let Some(name) = name_within(rest, "{{", "}}") {
            out.extend(["{", name, "}"]);
            rest = &rest[name.len() + 4..];
        } else if let Some(name) = name_within(rest, "{", "}") {
            out.push_str(&placeholder(row, name)?);
            rest = &rest[name.len() + 2..];
        } else {
            out.push('{');
            rest = &rest[1..];
        }
    }
    out.push_str(rest);
    Ok(out)
}

fn placeholder(row: &DatasetRow, name: &str) -> Result<String, TaskError> {
    let value = cell(&row.columns, name).ok_or_else(|| TaskError::Placeholder {
        place: row.place.clone(),
        placeholder: name.to_owned(),
        existing: row.columns.keys().cloned().collect(),
    })?;
    text(value).ok_or_else(|| TaskError::CellType {
        place: row.place.clone(),
        column: name.to_owned(),
        found: type_of(value).to_owned(),
        expected: "a placeholder of `prompt_template` must be a string, a number or a boolean",
    })
}

fn name_within<'a>(text: &'a str, open: &str, close: &str) -> Option<&'a str> {
    let inner = text.strip_prefix(open)?;
    let len = inner.bytes().take_while(|b| b.is_ascii_alphanumeric() || [b'_', b'.'].contains(b)).count();
    let name = &inner[..len];
    let is_name = !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit());
    (is_name && inner[len..].starts_with(close)).then_some(name)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::tasks::rows::RowLocation;

    fn row(columns: Value) -> DatasetRow {
        let Value::Object(columns) = columns else { panic!("not an object") };
        DatasetRow { place: RowLocation { path: Path::new("d.jsonl").into(), row: 3 }, columns }
    }

    #[test]
    fn columns_are_found_by_name_and_by_path() {
        let row = row(json!({"a.b": 1, "a": {"b": 2, "c": {"d": 3}, "e.f": 4}}));
        for (path, expected) in
            [("a.b", Some(1)), ("a.c.d", Some(3)), ("a.e.f", Some(4)), ("a.x", None), ("", None), (".", None)]
        {
            assert_eq!(cell(&row.columns, path).and_then(Value::as_i64), expected, "{path}");
        }
    }

    #[test]
    fn templates_fill_names_and_leave_other_braces() {
        let row = row(json!({"q": "2+2?", "m": {"n": 7}}));
        let template = "{q} ({m.n}) \\boxed{} {1} {a b} {{q}} {";
        assert_eq!(fill(&row, template).unwrap(), "2+2? (7) \\boxed{} {1} {a b} {q} {");
    }

    #[test]
    fn a_placeholder_needs_a_column_with_text() {
        let row = row(json!({"q": [1], "r": 1}));
        let message = fill(&row, "{question}").unwrap_err().to_string();
        assert_eq!(
            message,
            "d.jsonl:3: `prompt_template` has the placeholder `{question}`, but the row has only `q`, `r`; \
             write `{{question}}` for the text itself"
        );
        let message = fill(&row, "{q}").unwrap_err().to_string();
        assert!(message.starts_with("d.jsonl:3: column `q` is a list"), "{message}");
    }

    #[test]
    fn prompts_are_strings_or_messages() {
        let row = row(json!({}));
        let read = |value| from_cell(&row, "prompt", &value);
        assert_eq!(read(json!("hi")).unwrap(), Prompt::Text("hi".into()));
        let message = Message::new("user", "hi");
        let messages = json!([{"role": "user", "content": "hi", "name": null}]);
        assert_eq!(read(messages).unwrap(), Prompt::Messages(vec![message]));
        for (value, found) in [
            (json!(3), "a number"),
            (json!(null), "null"),
            (json!([]), "an empty list"),
            (json!([{"role": "user"}]), "a list whose message 0 has no `content`"),
            (json!([{"role": "user", "content": []}]), "a list whose message 0 has a list as `content`"),
            (json!(["hi"]), "a list whose message 0 has no `role`"),
        ] {
            let message = read(value).unwrap_err().to_string();
            assert!(message.starts_with(&format!("d.jsonl:3: column `prompt` is {found}; ")), "{message}");
        }
    }

    #[test]
    fn messages_keep_their_keys() {
        let call = |arguments: Value| json!({"function": {"name": "add", "arguments": arguments}});
        let list = json!([
            {"role": "user", "content": "1+1?", "name": "Ann", "tool_calls": null},
            {"role": "assistant", "content": null, "reasoning_content": "sum", "tool_calls": [call(json!("{\"a\": 1}"))]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ]);
        let read = chat_messages(&list).unwrap();
        assert_eq!(read[0].extra, *json!({"name": "Ann"}).as_object().unwrap());
        assert_eq!((&*read[1].content, &read[1].tool_calls), ("", &vec![call(json!({"a": 1}))]));
        assert_eq!(read[1].extra["reasoning_content"], "sum");
        assert_eq!(messages(&list).unwrap()[2].tool_call_id.as_deref(), Some("c1"));
        assert!(
            from_cell(&row(json!({})), "prompt", &list).unwrap_err().to_string().contains("`tool_calls`")
        );
        let wrong = json!([{"role": "assistant", "content": "", "tool_calls": "add"}]);
        assert_eq!(chat_messages(&wrong).unwrap_err(), "a list whose message 0 has a string as `tool_calls`");
    }

    proptest! {
        #[test]
        fn text_without_braces_is_its_own_template(text in "[^{]*") {
            prop_assert_eq!(fill(&row(json!({})), &text).unwrap(), text);
        }

        #[test]
        fn no_template_panics(text in any::<String>()) {
            let _ = fill(&row(json!({"a": 1})), &text);
        }
    }
}
