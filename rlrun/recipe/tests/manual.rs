//! The manual against the deserialiser: every key, its type and its default.

use std::collections::{BTreeMap, BTreeSet};

use toml::{Table, Value};

use crate::recipe::manual::{self, Key, Kind, Section};
use crate::recipe::schema::RawRecipe;

/// A recipe with `table` as its section.
fn recipe(section: &str, table: Table) -> Table {
    section.split('.').rev().filter(|part| !part.is_empty()).fold(table, |inner, part| {
        let list = |inner| Value::Array(vec![Value::Table(inner)]);
        let (name, value) =
            part.strip_suffix("[]").map_or((part, Value::Table(inner.clone())), |name| (name, list(inner)));
        Table::from_iter([(name.to_owned(), value)])
    })
}

/// The keys that an element of the section cannot be without.
fn required(section: &Section) -> Vec<String> {
    let mut keys: Vec<String> = Vec::new();
    loop {
        let table = keys.iter().map(|key| (key.clone(), Value::from("x"))).collect();
        let read: Result<RawRecipe, _> = Value::Table(recipe(&section.path, table)).try_into();
        let Err(error) = read else { return keys };
        let missing = error.message().strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        keys.push(missing.unwrap_or_else(|| panic!("[{}]: {error}", section.path)).to_owned());
    }
}

/// The section with what it cannot be without, and `more`.
fn with(section: &Section, more: Option<(&str, Value)>) -> Result<RawRecipe, toml::de::Error> {
    let required = required(section).into_iter().map(|key| (key, Value::from("x")));
    let more = more.map(|(key, value)| (key.to_owned(), value));
    Value::Table(recipe(&section.path, required.chain(more).collect())).try_into()
}

/// The keys that the deserialiser lists for an unknown key.
fn taken(section: &Section) -> BTreeSet<String> {
    let error = with(section, Some(("no_key", Value::from(1)))).unwrap_err();
    let message = error.message();
    assert!(message.starts_with("unknown field `no_key`"), "{}: {message}", section.path);
    message.split('`').skip(3).step_by(2).map(str::to_owned).collect()
}

#[test]
fn every_key_of_the_deserialiser_is_explained() {
    let sections: BTreeSet<&str> = manual::sections().iter().map(|section| section.path.as_str()).collect();
    assert!(sections.len() >= 20 && manual::keys().len() > 200, "{sections:?}");
    for section in manual::sections() {
        let prefix = if section.path.is_empty() { String::new() } else { format!("{}.", section.path) };
        let inner = sections.iter().filter_map(|path| path.strip_prefix(&prefix[..]));
        let inner = inner
            .map(|path| path.trim_end_matches("[]"))
            .filter(|path| !path.is_empty() && !path.contains('.'));
        let keys = section.keys.iter().map(Key::name);
        let known: BTreeSet<String> = keys.chain(inner).map(str::to_owned).collect();
        assert_eq!(known, taken(section), "[{}]", section.path);
        assert!(!section.about.is_empty(), "[{}] has no comment", section.path);
        for key in &section.keys {
            assert!(key.about.len() > 8 && key.about.ends_with('.'), "{}: {}", key.path, key.about);
            for (word, about) in key.kind.words() {
                assert!(!about.is_empty(), "{}: nothing says what \"{word}\" is", key.path);
            }
        }
    }
}

/// Values that a type accepts, and one that it refuses.
fn examples(kind: &Kind) -> (Vec<Value>, Value) {
    match kind {
        Kind::Text | Kind::Path => (vec![Value::from("x")], Value::from(1)),
        Kind::Whole => (vec![Value::from(0), Value::from(7)], Value::from(0.5)),
        Kind::Number => (vec![Value::from(0.5), Value::from(2)], Value::from("1")),
        Kind::Flag => (vec![Value::from(true), Value::from(false)], Value::from(1)),
        Kind::Words(words) => {
            (words.iter().map(|(word, _)| Value::from(&word[..])).collect(), Value::from("?"))
        }
        Kind::Form(form) if form.starts_with("address") => {
            (vec![Value::from("127.0.0.1:8700")], Value::from("?"))
        }
        Kind::Form(_) => (["cpu", "cuda:1", "emulated"].map(Value::from).to_vec(), Value::from("?")),
        Kind::Table => (vec![Value::Table(Table::new())], Value::from("x")),
        Kind::List(of) => {
            let (good, bad) = examples(of);
            (vec![Value::Array(good), Value::Array(Vec::new())], Value::Array(vec![bad]))
        }
        Kind::OneOrMany(of) => {
            let (good, bad) = examples(of);
            (vec![Value::Array(good.clone()), good[0].clone()], bad)
        }
    }
}

#[test]
fn types_are_those_of_the_deserialiser() {
    for section in manual::sections() {
        for key in &section.keys {
            let (good, bad) = examples(&key.kind);
            for value in good {
                let read = with(section, Some((key.name(), value.clone())));
                assert!(read.is_ok(), "{} is no {}: {value}", key.path, key.kind);
            }
            let read = with(section, Some((key.name(), bad.clone())));
            assert!(read.is_err(), "{} is no {}: {bad} is taken", key.path, key.kind);
        }
    }
}

/// The values of a table by their paths; of lists the first element.
fn flat(value: &Value, path: &str, found: &mut BTreeMap<String, Value>) {
    match value {
        Value::Table(table) if !table.is_empty() => {
            for (key, value) in table {
                let dot = if path.is_empty() { "" } else { "." };
                flat(value, &format!("{path}{dot}{key}"), found);
            }
        }
        Value::Array(list) if list.first().is_some_and(Value::is_table) => {
            flat(&list[0], &format!("{path}[]"), found);
        }
        value => drop(found.insert(path.to_owned(), value.clone())),
    }
}

#[test]
fn defaults_are_those_of_the_deserialiser() {
    let mut decoded = BTreeMap::new();
    for section in manual::sections() {
        flat(&Value::try_from(with(section, None).unwrap()).unwrap(), "", &mut decoded);
    }
    let needed = manual::sections().iter().flat_map(|section| {
        let keys = required(section).into_iter().map(|key| format!("{}.{key}", section.path));
        keys.collect::<Vec<_>>()
    });
    let needed: Vec<String> = needed.collect();
    assert!(needed.contains(&"rewards[].kind".to_owned()));
    let mut compared = 0;
    for key in manual::keys() {
        if needed.contains(&key.path) {
            assert_eq!(key.default, None, "{}", key.path);
            continue;
        }
        assert_eq!(key.default.as_ref(), decoded.get(&key.path), "{}", key.path);
        compared += usize::from(key.default.is_some());
    }
    assert!(compared > 100, "only {compared} keys have a default");
    let default = |path: &str| manual::keys().iter().find(|key| key.path == path).unwrap().default.clone();
    assert_eq!(default("trainer.learning_rate"), Some(Value::from(1e-6)));
    assert_eq!(default("warmup.steps"), Some(Value::from(700)));
    assert_eq!(default("algorithm.kind"), Some(Value::from("grpo")));
    assert_eq!(default("critic.coef"), None);
}
