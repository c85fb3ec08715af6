//! From one table to a [`RawRecipe`], with errors that name the key, the line and the nearest name.
//!
//! Invariant: every wrong entry is reported once. An entry that fails is reported, taken out, and the rest decoded
//! again, so that one run shows all of them. Ranges and rules between keys are not checked here.

use std::ops::Range;

use serde::de::{self, Deserializer};
use serde_path_to_error::Segment;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::diagnostic::Diagnostic;
use super::peers;
use super::schema::RawRecipe;
use super::source::Sources;

/// Decodes the merged table.
pub(super) fn decode(mut table: DeTable<'_>, sources: &Sources) -> Result<RawRecipe, Vec<Diagnostic>> {
    let mut errors = Vec::new();
    loop {
        let whole = Spanned::new(0..0, DeValue::Table(table.clone()));
        let error = match serde_path_to_error::deserialize(ValueDeserializer::from(whole)) {
            Ok(recipe) if errors.is_empty() => return Ok(recipe),
            Ok(_) => return Err(errors),
            Err(error) => error,
        };
        let path = Path::from(error.path());
        let inner = error.into_inner();
        errors.push(explain(inner.message(), &path, path.find(&table), inner.span(), sources));
        if !path.remove_from(&mut table) {
            return Err(errors);
        }
    }
}

/// Decodes a string, or a list of strings.
pub(super) fn one_or_many<'de, D: Deserializer<'de>, T: From<String>>(from: D) -> Result<Vec<T>, D::Error> {
    struct Visitor<T>(std::marker::PhantomData<T>);
    impl<'de, T: From<String>> de::Visitor<'de> for Visitor<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a string or a list of strings")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<T>, E> {
            Ok(vec![T::from(text.to_owned())])
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut many = Vec::new();
            while let Some(text) = list.next_element::<String>()? {
                many.push(T::from(text));
            }
            Ok(many)
        }
    }
    from.deserialize_any(Visitor(std::marker::PhantomData))
}

/// Where decoding failed.
struct Path {
    steps: Vec<Step>,
}

enum Step {
    Key(String),
    Index(usize),
}

impl From<&serde_path_to_error::Path> for Path {
    fn from(path: &serde_path_to_error::Path) -> Self {
        let steps = path.iter().filter_map(|segment| match segment {
            Segment::Map { key } => Some(Step::Key(key.clone())),
            Segment::Seq { index } => Some(Step::Index(*index)),
            Segment::Enum { .. } | Segment::Unknown => None,
        });
        Self { steps: steps.collect() }
    }
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, step) in self.steps.iter().enumerate() {
            match step {
                Step::Key(key) if n == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

impl Path {
    /// What stands there.
    fn find<'t, 'v>(&self, table: &'t DeTable<'v>) -> Option<&'t DeValue<'v>> {
        let mut steps = self.steps.iter();
        let Step::Key(first) = steps.next()? else { return None };
        steps.try_fold(table.get(first.as_str())?.get_ref(), |value, step| {
            let inner = match step {
                Step::Key(key) => value.as_table()?.get(key.as_str())?,
                Step::Index(index) => value.as_array()?.get(*index)?,
            };
            Some(inner.get_ref())
        })
    }

    /// Takes the entry out of the table; false if that cannot be done without renumbering a list.
    fn remove_from(&self, table: &mut DeTable<'_>) -> bool {
        let Some((Step::Key(last), steps)) = self.steps.split_last() else { return false };
        let mut steps = steps.iter();
        let Some(first) = steps.next() else { return table.remove(last.as_str()).is_some() };
        let Step::Key(first) = first else { return false };
        let Some(mut value) = table.get_mut(first.as_str()).map(Spanned::get_mut) else { return false };
        for step in steps {
            let inner = match (step, value) {
                (Step::Key(key), DeValue::Table(table)) => table.get_mut(key.as_str()),
                (Step::Index(index), DeValue::Array(list)) => list.get_mut(*index),
                _ => return false,
            };
            let Some(inner) = inner else { return false };
            value = inner.get_mut();
        }
        let DeValue::Table(inner) = value else { return false };
        inner.remove(last.as_str()).is_some()
    }

    /// The path without its last step.
    fn parent(&self) -> String {
        let path = self.to_string();
        path.rfind('.').map_or(String::new(), |dot| path[..dot].to_owned())
    }
}

/// Serde's message in the words of a recipe.
fn explain(
    message: &str,
    path: &Path,
    value: Option<&DeValue<'_>>,
    span: Option<Range<usize>>,
    sources: &Sources,
) -> Diagnostic {
    let place = span.filter(|span| !span.is_empty()).map(|span| sources.place(&span));
    let mut quoted = message.split('`').skip(1).step_by(2);
    if message.starts_with("unknown field") {
        let key = quoted.next().unwrap_or_default();
        let known: Vec<_> = quoted.collect();
        let diagnostic = Diagnostic::new(format!("unknown key `{path}`"), place);
        return diagnostic.help(suggest_key(key, value, &known, &path.parent()));
    }
    if message.starts_with("unknown variant") {
        let word = quoted.next().unwrap_or_default();
        let known: Vec<_> = quoted.collect();
        let list = known.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
        let theirs = peers::our_word(&path.to_string(), word);
        let help = match theirs.or_else(|| nearest(word, &known)) {
            Some(near) => format!("did you mean \"{near}\"? it takes {list}"),
            None => format!("it takes {list}"),
        };
        return Diagnostic::new(format!("`{path}` cannot be \"{word}\""), place).help(help);
    }
    if message.starts_with("missing field") {
        let key = quoted.next().unwrap_or_default();
        return Diagnostic::new(format!("`{path}` needs the key `{key}`"), place);
    }
    let diagnostic = Diagnostic::new(format!("`{path}`: {}", plain_types(message)), place);
    match value.and_then(|value| as_toml(value.as_str()?, message)) {
        Some(meant) => diagnostic.help(format!("write {meant}, without quotes")),
        None => diagnostic,
    }
}

/// A text as the truth value or the number that it stands for: in quotes, or as Python writes it.
fn as_toml(text: &str, message: &str) -> Option<String> {
    let lower = text.trim().to_ascii_lowercase();
    let wants = |what: &str| message.ends_with(what);
    let flag = wants("a boolean") && ["true", "false"].contains(&&lower[..]);
    let number = ["f64", "usize", "u64", "u32"].into_iter().any(wants)
        && lower.starts_with(|c: char| c.is_ascii_digit() || c == '-')
        && lower.parse::<f64>().is_ok_and(f64::is_finite);
    (flag || number).then_some(lower)
}

/// Rust's type names in the words of a reader.
fn plain_types(message: &str) -> String {
    // Only the words of an enum are asked for in this form.
    if message.starts_with("wanted ") {
        return "expected a string".to_owned();
    }
    let Some((found, expected)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    let expected = match expected {
        "usize" | "u64" | "u32" => "a whole number, 0 or more",
        "f64" => "a number",
        "a boolean" => "true or false",
        "path string" => "a string",
        "a sequence" => "a list",
        other if other.starts_with("struct ") => "a table",
        other => other,
    };
    let found = found.trim_start_matches("invalid type: ").trim_start_matches("invalid value: ");
    format!("expected {expected}, found {found}")
}

/// The remedy for an unknown key: its nearest name, the name that peers give it, or the names there are.
fn suggest_key(key: &str, value: Option<&DeValue<'_>>, known: &[&str], section: &str) -> String {
    let full = |name: &str| if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") };
    if let Some(hint) = peers::hint(&full(key), value) {
        return hint;
    }
    if let Some(elsewhere) = peers::key_elsewhere(key) {
        return format!("there is `{elsewhere}`");
    }
    if let Some(near) = nearest(key, known) {
        return format!("did you mean `{}`?", full(near));
    }
    let names = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if section.is_empty() { format!("there are {names}") } else { format!("`{section}` takes {names}") }
}

/// The known name that `word` may be meant for: the same one in other letters, or one of few other letters.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let letters = |text: &str| -> String {
        text.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
    };
    let bare = letters(word);
    if !bare.is_empty()
        && let Some(same) = known.iter().copied().find(|name| letters(name) == bare)
    {
        return Some(same);
    }
    let word = word.to_lowercase();
    let allowed = (word.chars().count() / 3).max(1);
    let distance = |name: &str| strsim::damerau_levenshtein(&word, name);
    known.iter().copied().min_by_key(|name| distance(name)).filter(|name| distance(name) <= allowed)
}
