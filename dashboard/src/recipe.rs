//! The values of a resolved recipe with their origins, and the difference between two recipes.
//!
//! Invariant: it reads what rlrun writes: one value a line, its origin in the comment behind it. A value is shown as
//! written. Lines of another form are left out.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::path::Path;

use serde_json::{Value, json};

use crate::lines::open_inside;

/// Most bytes of a recipe that are read.
const MAX_RECIPE_BYTES: u64 = 2 << 20;

/// A value of a recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResolvedValue {
    /// The path, such as `rewards[0].kind`.
    key: String,
    /// TOML, as written.
    value: String,
    /// `default`, `--set`, a variable, or a file with line and column.
    origin: String,
}

/// The values of a recipe, in the order of the file.
#[derive(Debug, Default)]
pub(crate) struct ResolvedRecipe {
    values: Vec<ResolvedValue>,
}

impl ResolvedRecipe {
    /// Reads the recipe of a run; `None` if it has none.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn read(root: &Path) -> io::Result<Option<Self>> {
        let Some(file) = open_inside(root, &root.join("resolved.toml"))? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.take(MAX_RECIPE_BYTES).read_to_end(&mut bytes)?;
        Ok(Some(Self::parse(&String::from_utf8_lossy(&bytes))))
    }

    fn parse(text: &str) -> Self {
        let (mut section, mut lists) = (String::new(), HashMap::<String, usize>::new());
        let mut values = Vec::new();
        for line in text.lines().map(str::trim) {
            if let Some(name) = line.strip_prefix("[[").and_then(|line| line.strip_suffix("]]")) {
                let count = lists.entry(name.to_owned()).or_default();
                section = format!("{name}[{count}]");
                *count += 1;
            } else if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                section = under_list(name, &lists);
            } else if let Some((key, rest)) = line.split_once(" = ").filter(|_| !line.starts_with('#')) {
                let (value, origin) = split_comment(rest);
                let key = if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
                values.push(ResolvedValue { key, value: value.to_owned(), origin: origin.to_owned() });
            }
        }
        Self { values }
    }

    /// Value of `trainer.steps`.
    pub(crate) fn steps(&self) -> Option<u64> {
        self.values.iter().find(|value| value.key == "trainer.steps")?.value.parse().ok()
    }

    /// All values, with those of `other` if it is given: `differs` says where they are not equal.
    pub(crate) fn compare(&self, other: Option<&Self>) -> Value {
        let Some(other) = other else {
            let shown = |v: &ResolvedValue| json!({ "key": v.key, "value": v.value, "origin": v.origin });
            return self.values.iter().map(shown).collect();
        };
        let theirs: BTreeMap<&str, &ResolvedValue> =
            other.values.iter().map(|value| (value.key.as_str(), value)).collect();
        let ours: BTreeMap<&str, &ResolvedValue> =
            self.values.iter().map(|value| (value.key.as_str(), value)).collect();
        let only_theirs = other.values.iter().filter(|value| !ours.contains_key(value.key.as_str()));
        let rows = self.values.iter().chain(only_theirs).map(|value| {
            let key = value.key.as_str();
            let (our, their) = (ours.get(key), theirs.get(key));
            json!({
                "key": key,
                "value": our.map(|v| &v.value),
                "origin": our.map(|v| &v.origin),
                "other": their.map(|v| &v.value),
                "other_origin": their.map(|v| &v.origin),
                "differs": our.map(|v| &v.value) != their.map(|v| &v.value),
            })
        });
        rows.collect()
    }
}

/// A section below the last element of a list: `rewards.judge` is `rewards[1].judge`.
fn under_list(name: &str, lists: &HashMap<String, usize>) -> String {
    let owner = lists
        .iter()
        .filter(|(list, _)| name.strip_prefix(list.as_str()).is_some_and(|rest| rest.starts_with('.')))
        .max_by_key(|(list, _)| list.len());
    match owner {
        Some((list, count)) => format!("{list}[{}]{}", count - 1, &name[list.len()..]),
        None => name.to_owned(),
    }
}

/// A TOML value and the comment behind it. A `#` inside quotes belongs to the value.
fn split_comment(rest: &str) -> (&str, &str) {
    let (mut quote, mut escaped) = (None, false);
    for (at, c) in rest.char_indices() {
        match (quote, c) {
            _ if escaped => escaped = false,
            (Some('"'), '\\') => escaped = true,
            (Some(open), c) if open == c => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            (None, '#') => return (rest[..at].trim_end(), rest[at + 1..].trim()),
            _ => {}
        }
    }
    (rest.trim_end(), "")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r##"# The recipe as resolved.
seed = 3                              # old.toml:2:1

[data]
template = "a # b \" # c"  # --set
columns = ['x # y', "z"]   # default

[[rewards]]
kind = "regex"                        # old.toml:21:1

[[rewards]]
kind = "judge"

[rewards.limits]
calls = 4  # default

[trainer]
steps = 12  # RLRUN__TRAINER__STEPS
"##;

    #[test]
    fn every_value_has_its_path_and_origin() {
        let recipe = ResolvedRecipe::parse(TEXT);
        let all: Vec<_> =
            recipe.values.iter().map(|v| (v.key.as_str(), v.value.as_str(), v.origin.as_str())).collect();
        let expected = [
            ("seed", "3", "old.toml:2:1"),
            ("data.template", r#""a # b \" # c""#, "--set"),
            ("data.columns", r#"['x # y', "z"]"#, "default"),
            ("rewards[0].kind", "\"regex\"", "old.toml:21:1"),
            ("rewards[1].kind", "\"judge\"", ""),
            ("rewards[1].limits.calls", "4", "default"),
            ("trainer.steps", "12", "RLRUN__TRAINER__STEPS"),
        ];
        assert_eq!(all, expected);
        assert_eq!(recipe.steps(), Some(12));
    }

    #[test]
    fn a_difference_names_values_of_either_side() {
        let ours = ResolvedRecipe::parse("a = 1  # x\nb = 2  # x\n");
        let theirs = ResolvedRecipe::parse("a = 1  # y\nc = 3  # y\n");
        let rows = ours.compare(Some(&theirs));
        let seen: Vec<_> =
            rows.as_array().unwrap().iter().map(|row| (&row["key"], &row["differs"])).collect();
        let expected = [(json!("a"), json!(false)), (json!("b"), json!(true)), (json!("c"), json!(true))];
        assert_eq!(seen, expected.iter().map(|(key, differs)| (key, differs)).collect::<Vec<_>>());
        assert_eq!(rows[2]["value"], Value::Null);
        assert_eq!(rows[2]["other"], "3");
    }
}
