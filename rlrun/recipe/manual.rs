//! Every key of a recipe with its type, its default and its meaning, from the sources of the schema.
//!
//! Invariant: meanings are the comments of the sources of this binary; types, words and defaults come from the deserialiser.
//! Nothing is repeated here, so a new key is explained as soon as it exists.

use std::fmt;
use std::sync::LazyLock;

use toml::{Table, Value};

use super::schema::RawRecipe;
use source::{Field, Struct, Words, parse};

mod source;

/// The sources of the sections. Types of fields that are structs in one of them are sections too.
const SECTIONS: [&str; 13] = [
    include_str!("schema.rs"),
    include_str!("schema/algorithm.rs"),
    include_str!("schema/curation.rs"),
    include_str!("schema/data.rs"),
    include_str!("schema/endpoint.rs"),
    include_str!("schema/eval.rs"),
    include_str!("schema/island.rs"),
    include_str!("schema/log.rs"),
    include_str!("schema/lora.rs"),
    include_str!("schema/placement.rs"),
    include_str!("schema/supervised.rs"),
    include_str!("schema/trainer.rs"),
    include_str!("../../environments/src/spec.rs"),
];
/// The source of `[[rewards]]`, which is flat.
const REWARDS: &str = include_str!("../../rewards/src/spec.rs");
/// The sources of words.
const WORDS: [&str; 26] = [
    include_str!("words.rs"),
    include_str!("../../buffer/src/config.rs"),
    include_str!("../../environments/src/tool_calls/mod.rs"),
    include_str!("../../islands/src/compression.rs"),
    include_str!("../../model/src/config.rs"),
    include_str!("../../model/src/config/families.rs"),
    include_str!("../../model/src/decoder/mod.rs"),
    include_str!("../../model/src/decoder/train.rs"),
    include_str!("../../model/src/layer.rs"),
    include_str!("../../model/src/pass_ranks.rs"),
    include_str!("../../model/src/resident.rs"),
    include_str!("../../rewards/src/gsm8k.rs"),
    include_str!("../../rewards/src/math/reward.rs"),
    include_str!("../../rewards/src/reward.rs"),
    include_str!("../../rewards/src/set.rs"),
    include_str!("../../rollout/src/engine/speculate.rs"),
    include_str!("../../rollout/src/prompts.rs"),
    include_str!("../../rollout/src/sampler.rs"),
    include_str!("../../rollout/src/tasks/questions.rs"),
    include_str!("../../trainer/src/algorithm/mod.rs"),
    include_str!("../../trainer/src/advantage/group.rs"),
    include_str!("../../trainer/src/critic.rs"),
    include_str!("../../trainer/src/loss/aggregation.rs"),
    include_str!("../../trainer/src/loss/kl.rs"),
    include_str!("../../trainer/src/optimizer/mod.rs"),
    include_str!("../../trainer/src/schedule.rs"),
];
/// What no word is.
const NO_WORD: &str = "?";

/// A section of a recipe, such as `trainer` or `model.random`.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    /// Dotted; lists end in `[]`; empty for the keys outside of sections.
    pub(crate) path: String,
    /// What it is about.
    pub(crate) about: String,
    /// Whether a recipe can do without it.
    pub(crate) optional: bool,
    /// Its keys, in the order of the schema.
    pub(crate) keys: Vec<Key>,
}

/// A key of a recipe.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    /// Dotted, such as `trainer.steps` or `rewards[].weight`.
    pub(crate) path: String,
    /// What it means.
    pub(crate) about: String,
    /// What it takes.
    pub(crate) kind: Kind,
    /// What it is if it is not given; `None` if the meaning says what happens then.
    pub(crate) default: Option<Value>,
    /// Whether its section is there without being written.
    pub(crate) always: bool,
    /// Whether a resume may change it, as in the comment above it: `changes`, or why it stays.
    pub(crate) resume: String,
    /// Whether the run may choose it on the machine of a worker, as in the comment above it.
    pub(crate) worker: String,
}

/// What a key takes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    /// A string.
    Text,
    /// A string that names a file or a directory.
    Path,
    /// A whole number.
    Whole,
    /// Any number.
    Number,
    /// True or false.
    Flag,
    /// A string of a few, each with its meaning.
    Words(Vec<(String, String)>),
    /// A string with a form of its own.
    Form(&'static str),
    /// A table with keys of the user's own.
    Table,
    /// A list.
    List(Box<Kind>),
    /// One, or a list.
    OneOrMany(Box<Kind>),
}

static MANUAL: LazyLock<Vec<Section>> = LazyLock::new(write);
static KEYS: LazyLock<Vec<&'static Key>> =
    LazyLock::new(|| sections().iter().flat_map(|section| &section.keys).collect());

/// All sections, in the order of the schema; the keys outside of sections come first.
pub(crate) fn sections() -> &'static [Section] {
    &MANUAL
}

/// All keys, in the order of the schema.
pub(crate) fn keys() -> &'static [&'static Key] {
    &KEYS
}

/// The path of a key without the places of its lists: `rewards[0].weight` is `rewards[].weight`.
pub(crate) fn without_indexes(path: &str) -> String {
    let mut parts = path.split('[');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |path, part| path + "[]" + part.split_once(']').map_or("", |(_, rest)| rest))
}

impl Key {
    /// The last part of the path.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or(&self.path)
    }

    /// Whether its section is only there if it is written.
    pub(super) fn is_in_optional_section(&self) -> bool {
        !self.always
    }

    /// The unit of its numbers, by its name.
    pub(crate) fn unit(&self) -> Option<&'static str> {
        if !matches!(self.kind, Kind::Whole | Kind::Number) {
            return None;
        }
        let name = self.name();
        let units = [
            ("_s", "seconds"),
            ("_mib", "MiB"),
            ("_mb", "MiB"),
            ("_kib", "KiB"),
            ("_tokens", "tokens"),
            ("_length", "tokens"),
            ("_steps", "steps"),
            ("_groups", "groups"),
            ("_tasks", "tasks"),
            ("_threads", "cores"),
        ];
        if matches!(name, "steps" | "interval") {
            return Some("steps");
        }
        units.iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, unit)| *unit)
    }
}

impl Kind {
    /// The words that it takes with what they mean, alone or in a list; none if it takes others.
    pub(crate) fn words(&self) -> &[(String, String)] {
        match self {
            Self::Words(words) => words,
            Self::List(of) | Self::OneOrMany(of) => of.words(),
            _ => &[],
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text => f.write_str("text"),
            Self::Path => f.write_str("path"),
            Self::Whole => f.write_str("whole number, 0 or more"),
            Self::Number => f.write_str("number"),
            Self::Flag => f.write_str("true or false"),
            Self::Words(words) => {
                let words: Vec<&str> = words.iter().map(|(word, _)| word.as_str()).collect();
                write!(f, "one of {}", words.join(", "))
            }
            Self::Form(form) => f.write_str(form),
            Self::Table => f.write_str("table"),
            Self::List(of) => write!(f, "list, each {of}"),
            Self::OneOrMany(of) => write!(f, "{of}, or a list of them"),
        }
    }
}

/// Reads all sources and asks the deserialiser.
fn write() -> Vec<Section> {
    let mut structs: Vec<Struct> = SECTIONS.iter().flat_map(|source| parse(source).0).collect();
    let rewards = parse(REWARDS).0.into_iter().find(|of| of.name == "RewardSpec").unwrap_or_default();
    let words: Vec<Words> = WORDS.iter().flat_map(|source| parse(source).1).collect();
    structs.insert(0, rewards);
    let mut outline = Vec::new();
    outline_of("RawRecipe", "", false, &structs, &mut outline);
    let defaults = defaults(&outline);
    outline
        .iter()
        .map(|Outline { path, optional, of, fields }| Section {
            path: path.clone(),
            about: of.about.clone(),
            optional: *optional,
            keys: fields.iter().map(|field| key(path, !*optional, field, &words, &defaults)).collect(),
        })
        .collect()
}

/// A section before the deserialiser is asked.
struct Outline {
    path: String,
    optional: bool,
    of: Struct,
    /// The fields that are not sections.
    fields: Vec<Field>,
}

fn outline_of(name: &str, path: &str, optional: bool, structs: &[Struct], outline: &mut Vec<Outline>) {
    let Some(of) = structs.iter().find(|of| of.name == name) else { return };
    let place = outline.len();
    outline.push(Outline { path: path.to_owned(), optional, of: of.clone(), fields: Vec::new() });
    for field in &of.fields {
        let (inner, wrapped) = unwrap(&field.rust_type);
        // Types of a reward have names of their crate, which other sections may have too.
        if of.name == "RewardSpec" || !structs.iter().any(|of| of.name == inner) {
            outline[place].fields.push(field.clone());
            continue;
        }
        let list = if wrapped == Some("Vec") { "[]" } else { "" };
        let dot = if path.is_empty() { "" } else { "." };
        let path = format!("{path}{dot}{}{list}", field.name);
        outline_of(inner, &path, optional || wrapped.is_some(), structs, outline);
    }
}

/// The type in an `Option` or a `Vec`, and which of the two it was.
fn unwrap(rust_type: &str) -> (&str, Option<&str>) {
    ["Option", "Vec"]
        .into_iter()
        .find_map(|outer| {
            let inner = rust_type.strip_prefix(outer)?.strip_prefix('<')?.strip_suffix('>')?;
            Some((inner, Some(outer)))
        })
        .unwrap_or((rust_type, None))
}

fn key(section: &str, always: bool, field: &Field, words: &[Words], defaults: &Value) -> Key {
    let dot = if section.is_empty() { "" } else { "." };
    let path = format!("{section}{dot}{}", field.name);
    let kind = kind_of(section, field, words);
    let default = lookup(defaults, &path).filter(|_| !is_required(section, &field.name)).cloned();
    let (resume, worker) = (field.resume.clone(), field.worker.clone());
    Key { path, about: field.about.clone(), kind, default, always, resume, worker }
}

/// The kind of value that the deserialiser accepts for a field.
fn kind_of(section: &str, field: &Field, words: &[Words]) -> Kind {
    let bare = field.rust_type.replace("Option<", "").replace("Vec<", "").replace('>', "");
    let text = match &bare[..] {
        "PathBuf" => Kind::Path,
        "SocketAddr" => Kind::Form("address and port, such as 127.0.0.1:8700"),
        "DeviceWord" => Kind::Form("device: cpu, cuda, cuda:N or emulated"),
        _ => Kind::Text,
    };
    let says = |value: Value| refusal(section, &field.name, value);
    let word = || Value::from(NO_WORD);
    let list = |of: Value| Value::Array(vec![of]);
    let (alone, in_list) = (says(word()), says(list(word())));
    if says(Value::Boolean(true)).is_none() {
        return Kind::Flag;
    }
    if says(Value::Table(Table::new())).is_none() {
        return Kind::Table;
    }
    let of_list = |says: Option<String>| match (says, says_words(&in_list, words)) {
        (_, Some(words)) => words,
        (None, None) => text.clone(),
        (Some(_), None) if refusal(section, &field.name, list(Value::Integer(1))).is_none() => Kind::Whole,
        (Some(_), None) => text.clone(),
    };
    let takes_list = matches!(text, Kind::Form(_)) && field.rust_type.contains("Vec<");
    match (&alone, &in_list) {
        (None, None) => Kind::OneOrMany(Box::new(text)),
        (None, Some(_)) => text,
        (Some(_), None) => Kind::List(Box::new(text)),
        (Some(_), Some(_)) if takes_list => Kind::List(Box::new(text)),
        (Some(_), Some(_)) => {
            if let Some(words) = says_words(&alone, words) {
                return words;
            }
            if says(Value::Float(0.5)).is_none() {
                return Kind::Number;
            }
            if says(Value::Integer(1)).is_none() {
                return Kind::Whole;
            }
            if field.rust_type.contains("Vec<") {
                return Kind::List(Box::new(of_list(in_list.clone())));
            }
            text
        }
    }
}

/// The words that an error message lists, with their documentation in the sources.
fn says_words(refusal: &Option<String>, words: &[Words]) -> Option<Kind> {
    let message = refusal.as_ref().filter(|message| message.starts_with("unknown variant"))?;
    let named: Vec<&str> = message.split('`').skip(3).step_by(2).collect();
    let same = |of: &&Words| of.words.iter().map(|(word, _)| word.as_str()).eq(named.iter().copied());
    let known = words.iter().find(same);
    let about = |index: usize| known.map_or(String::new(), |of| of.words[index].1.clone());
    Some(Kind::Words(named.iter().enumerate().map(|(n, word)| ((*word).to_owned(), about(n))).collect()))
}

/// The error message of the deserialiser for a value; `None` if it accepts it.
fn refusal(section: &str, key: &str, value: Value) -> Option<String> {
    let mut table = empty(section);
    table.insert(key.to_owned(), value);
    let recipe = nested(section, table);
    Value::Table(recipe).try_into::<RawRecipe>().err().map(|error| error.message().to_owned())
}

/// A section with the keys that it cannot be without.
fn empty(section: &str) -> Table {
    let mut table = Table::new();
    while let Err(error) = Value::Table(nested(section, table.clone())).try_into::<RawRecipe>() {
        let missing = error.message().strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        let Some(missing) = missing.filter(|missing| !table.contains_key(*missing)) else { break };
        table.insert(missing.to_owned(), Value::from(""));
    }
    table
}

fn is_required(section: &str, key: &str) -> bool {
    empty(section).contains_key(key)
}

/// A recipe that has nothing but this section.
fn nested(section: &str, table: Table) -> Table {
    if section.is_empty() {
        return table;
    }
    section.rsplit('.').fold(table, |inner, part| {
        let (name, value) = match part.strip_suffix("[]") {
            Some(name) => (name, Value::Array(vec![Value::Table(inner)])),
            None => (part, Value::Table(inner)),
        };
        Table::from_iter([(name.to_owned(), value)])
    })
}

/// A recipe with every section and no key, as it is decoded.
fn defaults(outline: &[Outline]) -> Value {
    let mut recipe = Table::new();
    for section in outline.iter().filter(|section| !section.path.is_empty()) {
        merge(&mut recipe, nested(&section.path, empty(&section.path)));
    }
    let decoded = Value::Table(recipe).try_into::<RawRecipe>().unwrap_or_default();
    Value::try_from(decoded).unwrap_or(Value::Table(Table::new()))
}

fn merge(below: &mut Table, above: Table) {
    for (key, value) in above {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => merge(old, new),
            (_, value) => drop(below.insert(key, value)),
        }
    }
}

/// The value at a path; the first of a list.
fn lookup<'v>(value: &'v Value, path: &str) -> Option<&'v Value> {
    path.split('.').try_fold(value, |value, part| match part.strip_suffix("[]") {
        Some(name) => value.get(name)?.get(0),
        None => value.get(part),
    })
}
